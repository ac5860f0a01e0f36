#!/usr/bin/env bash
# torch 2.13.0: on a CPU with AVX2, a compiled kernel reads int32 several times slower than the same bits as float32.
#
# Packed codes are often held as int32 and unpacked by shifts and masks in a compiled kernel. With vectors of 256 bits
# (CPUs without AVX-512; here Inductor is told so) reading them takes most of the time. Held as float32 and viewed as
# int32 inside the compiled function, which moves no bit, the same sum takes a fraction.
# Source: Inductor reads whole vectors, too, through Vectorized<T>::loadu(pointer, count). In ATen/cpu/vec/vec256 the one
# of int32 fills an array on the stack, copies into it and loads that; the one of float is a masked load.
#
# Needs g++. Seen on 2026-11-28, one thread of an AMD EPYC:
#   equal: True; int32 3.2 ms, the same bits as float32 0.5 ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" - <<'PYTHON'
import time

import torch
import torch._inductor.config as inductor

inductor.cpp.simdlen = 256
torch.set_num_threads(1)


@torch.compile
def of_integers(x):
    return (x & 15).sum(-1)


@torch.compile
def of_floats(x):
    return (x.view(torch.int32) & 15).sum(-1)


def best(run, x):
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        run(x)
        times.append(1e3 * (time.perf_counter() - begin))
    return min(times)


codes = torch.randint(2**30, (2048, 1024), dtype=torch.int32)
same = codes.view(torch.float32)
equal = torch.equal(of_integers(codes), of_floats(same))
slow, fast = best(of_integers, codes), best(of_floats, same)
print(f"equal: {equal}; int32 {slow:.1f} ms, the same bits as float32 {fast:.1f} ms")
assert equal and slow > 2 * fast, "this has changed"
PYTHON
