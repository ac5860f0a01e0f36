#!/usr/bin/env bash
# torch 2.13.0: programs that never call torch.compile import the compiler, which takes a second of CPU time: arithmetic,
# torch.where or nn.Embedding on the meta device does it, and the first call of an operator that torch.library.custom_op
# defined.
#
# On the meta device such operators run Python decompositions, and these, as custom_op's kernels, are wrapped so that the
# compiler does not trace into them: the wrapper (torch/_compile.py) imports torch._dynamo when it is first called. So a
# tool that counts a model's bytes on meta starts more slowly than one that allocates them. nn.Linear, torch.full, sort and
# softmax on meta, and operators defined by torch.library.Library, do not.
#
# Seen on 2026-11-29 (the second number: CPU seconds of the import, which vary):
#   imported: add, where, eye, tril, Embedding on meta; a custom_op (1.1 s)
#   not imported: full, Linear, softmax, sort on meta; the definition of a custom_op; a Library's operator
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/call.py" <<'PYTHON'
import sys
import time

import torch

what = sys.argv[1]
meta = torch.device("meta")


def custom():
    @torch.library.custom_op("finding::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    return double


def library():
    own = torch.library.Library("finding", "DEF")
    own.define("triple(Tensor x) -> Tensor")
    own.impl("triple", lambda x: 3 * x, "CPU")
    torch.ops.finding.triple(torch.ones(1))
    return own


calls = {
    "add": lambda: torch.ones(2, device=meta) + 1,
    "where": lambda: torch.where(torch.empty(2, device=meta, dtype=torch.bool), 1, 2),
    "eye": lambda: torch.eye(3, device=meta),
    "tril": lambda: torch.empty(2, 2, device=meta).tril(),
    "Embedding": lambda: torch.nn.Embedding(2, 2, device=meta),
    "custom_op": lambda: custom()(torch.ones(1)),
    "full": lambda: torch.full((2,), 1, device=meta),
    "Linear": lambda: torch.nn.Linear(2, 2, device=meta),
    "softmax": lambda: torch.empty(2, 2, device=meta).softmax(0),
    "sort": lambda: torch.empty(4, device=meta).sort(),
    "definition": custom,
    "library": library,
}
assert "torch._dynamo" not in sys.modules
begin = time.process_time()
calls[what]()
imported = "torch._dynamo" in sys.modules
print(f"{what}: {imported}, {time.process_time() - begin:.2f} s")
assert imported == (what in ("add", "where", "eye", "tril", "Embedding", "custom_op")), "this has changed"
PYTHON
for what in add where eye tril Embedding custom_op full Linear softmax sort definition library; do
  "$folder/venv/bin/python" "$folder/call.py" "$what"
done
