#!/usr/bin/env bash
# torch 2.13.0: in code that torch.compile makes for a CPU, a sum of more than 4,096 fp32 numbers keeps its accumulator
# in memory instead of a register. Inductor then adds up by parts of 4,096 vectors, for accuracy, with a helper that is
# used by rows of 4,097 to 65,536 numbers too, which have one part on a CPU with AVX-512. Each addition waits for the
# last one's store: a product of a weight's long rows (the down projection of most language models) takes up to twice
# as long a number as one of short rows. Eager sums are not affected; sizes that vary (dynamic=True) are.
#
# The condition is in torch/_inductor/codegen/cpp.py (need_use_acc_helper); no option switches it off. What helps: sums
# of at most 4,096 numbers, then their sum, w.unflatten(-1, (2, -1)).sum(-1).sum(-1).
#
# Needs g++ (12.2.0 here). Seen on 2026-11-30, AMD EPYC (AVX-512), one thread, picoseconds a number of rows of 4,096
# numbers: 78; of 4,128: 143; of 4,128 in two parts: 80.
set -euo pipefail
command -v g++ > /dev/null || { echo "no g++: nothing to show"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/sums.py" <<'PYTHON'
import time

import torch
from torch._inductor.utils import run_and_get_code

torch.set_num_threads(1)


def measure(columns, parts, dynamic=False):
    """Picoseconds a number of a product of 2^20 of them, which stay in the cache; whether it sums by helpers."""

    def product(x, w):
        sums = (x.unflatten(-1, (parts, -1)) * w.unflatten(-1, (parts, -1))).sum(-1)
        return sums.sum(-1)

    torch._dynamo.reset()
    x, w = torch.ones(columns), torch.ones(2**20 // columns, columns)
    compiled = torch.compile(product, dynamic=dynamic)
    y, (code,) = run_and_get_code(compiled, x, w)
    assert torch.equal(y, torch.full((len(w),), float(columns)))
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        compiled(x, w)
        times.append(time.perf_counter() - begin)
    return min(times) / w.numel() * 1e12, "CascadeSumHelper<" in code


short, long, divided = measure(4096, 1), measure(4128, 1), measure(4128, 2)
print("picoseconds a number, helpers: 4,096", short, "4,128", long, "4,128 in two parts", divided)
assert (short[1], long[1], divided[1]) == (False, True, False)
assert long[0] > 1.2 * short[0] and long[0] > 1.2 * divided[0]
assert measure(4128, 1, dynamic=True)[1]
PYTHON
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" "$folder/sums.py"
