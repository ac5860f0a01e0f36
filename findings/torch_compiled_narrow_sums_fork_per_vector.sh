#!/usr/bin/env bash
# torch 2.13.0: on a CPU, a compiled sum whose last dimension is narrower than a vector starts its threads once per output
# vector, and takes over ten times as long as one of twice the width.
#
# x [64,64,32,N] is summed over its third dimension. With N = 8, one vector of 256 bits, the generated loop is inside one
# parallel region. With N = 4 the parallel region is inside the loop over the 4,096 sums, around 32 additions. On a CPU
# with AVX-512 N = 8 is such a width (here Inductor is told to use 256 bits, so that any CPU shows the same).
# Source: LoopNest.max_parallel_depth (torch/_inductor/codegen/cpp.py) counts a loop's steps as size // vector width, 0
# here; outer loops of 0 steps look too short for threads, so the loop of the sum gets them.
#
# Needs g++. Seen on 2026-11-29, two threads of an AMD EPYC:
#   N = 8: parallel region outside the loops, 0.07 ms; N = 4: inside, 2.7 ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" - <<'PYTHON'
import time

import torch
import torch._inductor.config as inductor
from torch._inductor.utils import run_and_get_cpp_code

inductor.cpp.simdlen = 256
torch.set_num_threads(2)


def measured(n):
    x = torch.randn(64, 64, 32, n)
    run = torch.compile(lambda x: x.sum(2), dynamic=False)
    y, code = run_and_get_cpp_code(run, x)
    assert torch.allclose(y, x.sum(2), atol=1e-4)
    kernel = code[code.index('extern "C"') :]
    outside = kernel.index("#pragma omp parallel") < kernel.index("for(")
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        run(x)
        times.append(1e3 * (time.perf_counter() - begin))
    return outside, min(times)


(wide, fast), (narrow, slow) = measured(8), measured(4)
where = {True: "outside the loops", False: "inside"}
print(f"N = 8: parallel region {where[wide]}, {fast:.2f} ms; N = 4: {where[narrow]}, {slow:.1f} ms")
assert wide and not narrow and slow > 5 * fast, "this has changed"
PYTHON
