"""The step's kernels for a GPU, generated and compiled to machine code without one, and the CUDA graphs they form.

Triton's compiler needs nothing but the architecture.
"""

import pytest
import torch
from conftest import exhaustive
from test_cuda_trace import VARIANTS, build, has_threads, launch

from bench import generated
from bench.generated import Generated
from engine import decode_step
from runtime.compile import cuda_options

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}  # A100, H100: bytes of shared memory that a block may have
SAMPLE = ("full", "rocketkv:bits")  # without --exhaustive


@pytest.fixture
def h100(monkeypatch, tmp_path):
    """A GPU that answers questions, and runs nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with generated.fake_gpu() as device:
        yield device


def generate(run, state: torch.nn.Module, variant: str, device: torch.device, batch: int) -> Generated:
    """What Inductor makes of a step, one graph of which CUDA makes graphs."""
    from torch._dynamo.utils import counters

    skips = counters["inductor"]["cudagraph_skips"]
    found = generated.generate(lambda backend: launch(run, state, backend, variant, device, batch), cuda_options())
    assert counters["inductor"]["cudagraph_skips"] == skips and len(found.code) == 1
    return found


def machine_code(kernel, architecture: int):
    """Triton's first configuration of a kernel; the others differ in the sizes of blocks."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    settings = kernel.configs[0]
    about = kernel._create_compile_meta(settings) | {"cc": architecture}
    source = ASTSource(kernel.fn, about["signature"], about["constants"], about["configs"][0])
    how = kernel._create_compile_options(settings, about)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=how)


def compile_all(found: Generated) -> None:
    for kernel in found.kernels.values():
        for architecture, shared in ARCHITECTURES.items():
            code = machine_code(kernel, architecture)
            assert code.asm["cubin"][:4] == b"\x7fELF" and code.metadata.shared <= shared


@pytest.mark.parametrize("name", [name if name in SAMPLE else exhaustive(name) for name in VARIANTS])
def test_every_kernel_of_a_step_becomes_machine_code(h100, name):
    state = build(name, h100, 2)
    found = generate(decode_step, state, "cut" if name == "full" else "greedy", h100, 2)
    assert len(found.kernels) > 10 and (found.graphs > 1) == has_threads(name)
    compile_all(found)
    generated.caches(state).close()


def test_a_top_k_of_tiles_becomes_machine_code(h100, monkeypatch):
    monkeypatch.setattr("kv.parts.inductor.TILE", 2)  # 256 of 1,088 scores are too many for tiles of 8
    found = []
    for ranked in (0, 600):  # the second ranks 543 tiles, then what is in 257
        monkeypatch.setattr("kv.parts.inductor.RANKED", ranked)
        state = build("exact_topk", h100, 2)
        found.append(generate(decode_step, state, "greedy", h100, 2))
        generated.caches(state).close()
    plain, tiled = found
    assert plain.graphs == tiled.graphs == 1 and plain.kernels.keys() != tiled.kernels.keys()
    compile_all(tiled)


def test_a_kernel_for_the_cpu_is_seen(h100):
    here = torch.ones(9, device="cpu")

    def step(_, command, *__):
        return command + here.cos().sum().long().to(command.device)

    with pytest.raises(RuntimeError, match="a kernel for the CPU"):
        generate(step, torch.nn.Module(), "greedy", h100, 2)
