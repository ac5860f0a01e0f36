#!/usr/bin/env bash
# torch 2.13.0: TORCHINDUCTOR_CACHE_DIR does not move the largest files that torch.compile writes on a CPU. Inductor has
# g++ precompile its headers, some 150 MB for each set of compiler flags, always below the system's temporary folder
# (TMPDIR/torchinductor_USER/precompiled_headers; by a comment in torch/_inductor/codecache.py on purpose, for all
# programs), where nothing deletes them. AOTInductor adds two more sets. Where /tmp is memory, that is memory.
#
# torch._inductor.config.cpp_cache_precompile_headers = False (AOTInductor: aot_inductor.precompile_headers) writes none.
#
# Needs g++ (12.2.0 here). Seen on 2026-11-30, AMD EPYC, one line of Python compiled, MB of headers and of the cache:
#   as it is: 155, 0; with -march=x86-64-v3 too: 311, 0; AOTInductor too: 608, 2; without precompiled headers: 0, 0
set -euo pipefail
command -v g++ > /dev/null || { echo "no g++: nothing to show"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
mkdir "$folder/tmp"
TORCHINDUCTOR_CACHE_DIR="$folder/cache" TMPDIR="$folder/tmp" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch._inductor.config as inductor

folder = Path(sys.argv[1])


def megabytes(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) // 10**6


def headers():
    return sum(megabytes(path) for path in (folder / "tmp").rglob("precompiled_headers"))


class Model(torch.nn.Module):
    def forward(self, x):
        return x.sin() + 1


def compiled():
    torch._dynamo.reset()
    torch.compile(Model(), fullgraph=True)(torch.ones(64))
    return headers(), megabytes(folder / "cache")


with inductor.patch(cpp_cache_precompile_headers=False, force_disable_caches=True):
    without = compiled()
found = {"as it is": compiled()}
with inductor.patch({"cpp.march": "x86-64-v3"}):
    found["with -march=x86-64-v3 too"] = compiled()
program = torch.export.export(Model(), (torch.ones(64),))
torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "tmp" / "model.pt2"))
found["AOTInductor too"] = headers(), megabytes(folder / "cache")
print(found, "without precompiled headers:", without)
sizes = [size for size, _ in found.values()]
assert without[0] == 0, "this has changed"
assert sizes[0] > 100 and sizes[1] > sizes[0] + 100 and sizes[2] > sizes[1] + 200, "this has changed"
assert all(cache < 20 for _, cache in [*found.values(), without]), "this has changed"
PYTHON
