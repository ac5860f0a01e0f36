#!/usr/bin/env bash
# torch 2.13.0: code that Inductor generates with 256-bit vectors is wrong on a CPU with AVX-512. Where the condition is a
# >=, <= or != of int64, a compiled torch.where silently picks the wrong side in every second vector.
#
# ATEN_CPU_CAPABILITY=avx2 is a documented way to leave AVX-512 out, and also makes Inductor use 256-bit vectors, as
# torch._inductor.config.cpp.simdlen = 256 does. Inductor still passes -march=native to g++; with march = "x86-64-v3" (or
# on a CPU without AVX-512) the same source is right. These three comparisons are the inverted ones of ATen's
# vec256_int.h; >, <, ==, and comparisons of int32 and floats are right.
#
# Needs g++ (12.2.0 here) and a CPU with AVX-512. Seen on 2026-11-29, AMD EPYC, of 64 elements wrong:
#   int64: >= 32, <= 32, != 32, > 0, < 0, == 0; int32: >= 0; float32: >= 0; int64 with x86-64-v3: >= 0
set -euo pipefail
grep -q avx512f /proc/cpuinfo || { echo "this CPU has no AVX-512: nothing to show"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$folder/cache" ATEN_CPU_CAPABILITY=avx2 "$folder/venv/bin/python" - <<'PYTHON'
import operator

import torch
import torch._inductor.config as inductor

generator = torch.Generator().manual_seed(0)
other = torch.randint(1000, 2000, (64,), generator=generator)
value = torch.randint(-100, 100, (64,), generator=generator)
value[::9] = 0


def wrong(name, dtype=torch.int64):
    """How many elements of the compiled function differ from the eager one's."""
    compare = getattr(operator, name)

    def select(x, y):
        return torch.where(compare(y, 0), x, y)

    inputs = other.to(dtype), value.to(dtype)
    torch._dynamo.reset()
    return int((torch.compile(select)(*inputs) != select(*inputs)).sum())


found = {name: wrong(name) for name in ("ge", "le", "ne", "gt", "lt", "eq")}
found |= {"ge of int32": wrong("ge", torch.int32), "ge of float32": wrong("ge", torch.float32)}
inductor.cpp.march = "x86-64-v3"
found["ge for x86-64-v3"] = wrong("ge")
print(found)
bad = {"ge", "le", "ne"}
assert all((count > 0) == (name in bad) for name, count in found.items()), "this has changed"
PYTHON
