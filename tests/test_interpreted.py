"""Law 15: a step's kernels for a GPU, in Triton's interpreter, give the eager step's tokens, logits and buffers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import exhaustive
from test_cuda_trace import VARIANTS

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
SAMPLE = (
    ["full", "--batch", "1", "--cut"],
    ["rocketkv", "--drafts", "2"],
    ["omnikv:threads"],
    ["duo", "--quantize", "int4"],
    ["kvzip"],
)
MORE = (
    ["kivi"],
    ["infllm", "--ranks"],
    ["omnikv:threads", "--drafts", "2"],
    ["d2o", "--ranks"],
    ["rocketkv", "--quantize", "int8"],
    ["kvarn", "--drafts", "2"],
    *([name, *how] for name in VARIANTS for how in ([], ["--batch", "1", "--cut"])),
)
LIMIT = 1e-5  # in fp32, relative to a tensor's largest value


def run(*args: str) -> dict[str, float]:
    """The largest difference of each tensor that differs most in one of the steps; no module of this process may have
    been imported for a GPU, so that another one interprets."""
    script = Path(__file__).with_name("interpreted.py")
    how = {"capture_output": True, "text": True, "env": os.environ | {"TRITON_INTERPRET": "1"}}
    found = subprocess.run([sys.executable, script, *args], **how)
    assert found.returncode == 0, found.stderr[-2000:]
    result = json.loads(found.stdout)
    assert result["tensors"] > 10 and len(result["worst"]) == 3
    worst: dict[str, float] = {}
    for step in result["worst"]:
        worst |= {path: max(value, worst.get(path, 0)) for path, value in step.items()}
    return worst


@pytest.mark.parametrize("case", [*SAMPLE, *map(exhaustive, MORE)], ids=" ".join)
def test_the_kernels_for_a_gpu_give_the_eager_step(case):
    worst = run(*case)
    assert max(worst.values()) < LIMIT, worst


@pytest.mark.parametrize("error", ("kernel", "grid"))
def test_an_error_is_seen(error):
    try:
        worst = run("full", "--corrupt", error)
    except AssertionError as stopped:  # by an index that no one has written
        assert "an address outside of the kernel's tensors" in str(stopped)
    else:
        assert max(worst.values()) > 100 * LIMIT
