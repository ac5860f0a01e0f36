#!/usr/bin/env bash
# torch 2.13.0 (CPU wheel): on an AMD EPYC with AVX-512 bf16, attention in bf16 takes as long as in fp32, although linear
# layers take half as long.
#
# Linear layers and torch.mm in bf16 run in oneDNN, which uses the bf16 instructions of any CPU that has them. The flash
# kernel behind scaled_dot_product_attention calls MKL's GEMM_BF16BF16F32 instead, and MKL, away from Intel's CPUs, widens
# the operands and calls its fp32 product (perf: mkl_blas_def_sgemm_kernel_0_zen takes 60% of the time). So a long bf16
# prompt spends most of its time in attention, at the speed of fp32. On other CPUs nothing is checked here.
#
# Seen on 2026-11-30 (EPYC with avx512_bf16, two threads; milliseconds vary):
#   attention: 32 calls of MKL's GEMM_BF16BF16F32, 0 of oneDNN; linear: 1 of oneDNN
#   attention of 4,096 tokens: bf16 54 ms, fp32 51; linear: bf16 40, fp32 99
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > "$folder/call.py" <<'PYTHON'
import sys
import time

import torch
import torch.nn.functional as F

torch.manual_seed(0)


def attention(dtype, tokens):
    q, k, v = (torch.randn(1, 2, tokens, 64, dtype=dtype) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v)


def linear(dtype, tokens):
    x, weight = torch.randn(tokens, 1024, dtype=dtype), torch.randn(2048, 1024, dtype=dtype)
    return lambda: F.linear(x, weight)


def best(call):
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e3 * min(times)


calls = {"attention": attention, "linear": linear}
if len(sys.argv) > 1:
    calls[sys.argv[1]](torch.bfloat16, 512)()
    sys.exit()
ms = {name: [best(make(dtype, 4096)) for dtype in (torch.bfloat16, torch.float32)] for name, make in calls.items()}
for name, (half, full) in ms.items():
    print(f"{name} of 4,096 tokens: bf16 {half:.0f} ms, fp32 {full:.0f}")
(a, b), (c, d) = ms.values()
assert a > 0.8 * b, "bf16 attention has become faster than fp32"
assert c < 0.7 * d, "bf16 linear layers are not faster than fp32"
PYTHON
cd "$folder"
for what in attention linear; do
  MKL_VERBOSE=1 ONEDNN_VERBOSE=1 venv/bin/python call.py $what > $what.log 2>&1
done
mkl=$(grep -c GEMM_BF16BF16F32 attention.log || true) onednn=$(grep -c "primitive,exec" attention.log || true)
echo "attention: $mkl calls of MKL's GEMM_BF16BF16F32, $onednn of oneDNN; linear: $(grep -c "primitive,exec" linear.log || true) of oneDNN"
if ! grep -q avx512_bf16 /proc/cpuinfo || ! grep -q AuthenticAMD /proc/cpuinfo; then
  echo "no AMD CPU with AVX-512 bf16: times are not compared"
  exit
fi
if [ "$mkl" -eq 0 ] || [ "$onednn" -gt 0 ] || ! grep -q "primitive,exec" linear.log; then
  echo "this has changed"
  exit 1
fi
OMP_NUM_THREADS=2 venv/bin/python call.py
