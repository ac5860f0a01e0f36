"""The step's kernels for a GPU, generated and compiled to machine code without one, and the CUDA graphs they form.

Inductor asks a GPU for its properties alone, if it may not time kernels: a table answers here, and all tensors are
fake. Triton's compiler needs nothing but the architecture.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from test_cuda_trace import VARIANTS, build, close, gpu, guard, launch  # noqa: F401

from engine import decode_step

pytest.importorskip("triton")

ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}  # A100, H100: bytes of shared memory that a block may have
H100 = {
    "type": "cuda",
    "index": 0,
    "multi_processor_count": 132,
    "cc": 90,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
MORE = {
    "name": "NVIDIA H100",
    "gcnArchName": "",
    "minor": 0,
    "total_memory": 80 * 2**30,
    "L2_cache_size": 50 * 2**20,
    "shared_memory_per_block_optin": 227 * 1024,
    "shared_memory_per_multiprocessor": 228 * 1024,
}
# Inductor would measure padded products, and compute constants, on the GPU.
OPTIONS = {
    "shape_padding": False,
    "joint_graph_constant_folding": False,
    "fx_graph_cache": False,
    "compile_threads": 1,
    "triton.cudagraphs": True,
}
SAMPLE = ("full", "rocketkv:bits", "omnikv:threads", "h2o")  # without --all


@dataclass
class Generated:
    """What Inductor made of a step."""

    kernels: dict[str, object]  # Triton's, by source
    graphs: int  # CUDA graphs that a step replays


class Driver:
    """Triton's driver of a GPU that is not here."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


@pytest.fixture
def h100(gpu, monkeypatch):  # noqa: F811
    """A GPU that answers questions, and runs nothing."""
    import torch._inductor.compile_fx
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties = SimpleNamespace(**H100, **MORE)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: properties)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties))
    monkeypatch.setattr(DeviceProperties, "create", classmethod(lambda cls, _: cls(**H100)))
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr("torch._inductor.scheduler.has_triton", lambda *_: True)
    monkeypatch.setattr(torch._inductor.compile_fx, "_check_triton_bf16_support", lambda _: None)
    monkeypatch.setattr(torch._inductor.compile_fx, "cudagraphify", lambda model, *_, **__: model)
    monkeypatch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
    before = driver._active
    driver.set_active(Driver())
    yield gpu
    driver._active = before


def generate(run, state: torch.nn.Module, variant: str, device: torch.device, batch: int, monkeypatch) -> Generated:
    """Traces a step as the engine does on a GPU, and lets Inductor write its kernels; nothing runs."""
    from torch._dynamo.utils import counters
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    kernels, graphs = {}, []

    def triton(self, name: str, source: str, **_):
        kernels[source] = getattr(PyCodeCache.load(source), name)
        return kernels[source]

    def inner(graph: torch.fx.GraphModule, inputs: list, **how):
        found = compile_fx_inner(graph, inputs, **how)
        graphs.append(len(found.partition_maps) if found.partition_maps else 1)
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    for kind in ("cpp_pybinding", "cpp"):
        monkeypatch.setattr(AsyncCompile, kind, lambda *_, **__: pytest.fail("a kernel for the CPU"))
    skips = counters["inductor"]["cudagraph_skips"]
    with config.patch(OPTIONS):
        backend = lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)  # noqa: E731
        launch(run, state, backend, variant, device, batch)
    assert counters["inductor"]["cudagraph_skips"] == skips and len(graphs) == 1
    return Generated(kernels, graphs[0])


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


def pytest_generate_tests(metafunc):
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", VARIANTS if metafunc.config.getoption("--all") else SAMPLE)


def test_every_kernel_of_a_step_becomes_machine_code(h100, name, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    state = build(name, h100, 2)
    found = generate(decode_step, state, "cut" if name == "full" else "greedy", h100, 2, monkeypatch)
    fetches = name.endswith(":threads") or name in ("tailorkv", "brute_offload")  # between the graphs
    assert len(found.kernels) > 10 and (found.graphs > 1) == fetches
    compile_all(found)
    print(name, len(found.kernels), "kernels,", found.graphs, "graphs")
    close(state)


@pytest.mark.parametrize("form", ("flex", "kernel", "fused"))
def test_every_form_of_attention_is_one_graph(h100, monkeypatch, form):
    monkeypatch.setattr("kv.parts.inductor.CUDA_FORM", form)
    state = build("full", h100, 2)
    found = generate(decode_step, state, "greedy", h100, 2, monkeypatch)
    assert any("flex_attention" in source for source in found.kernels) == (form == "flex") and found.graphs == 1
    close(state)


def test_a_top_k_of_tiles_becomes_machine_code(h100, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("kv.parts.inductor.TILE", 2)  # 256 of 1,088 scores are too many for tiles of 8
    found = []
    for devices in (("cpu",), ("cpu", "cuda")):
        monkeypatch.setattr("kv.parts.inductor.TILED", devices)
        state = build("exact_topk", h100, 2)
        found.append(generate(decode_step, state, "greedy", h100, 2, monkeypatch))
        close(state)
    plain, tiled = found
    assert plain.graphs == tiled.graphs == 1 and plain.kernels.keys() != tiled.kernels.keys()
    compile_all(tiled)


def test_a_kernel_for_the_cpu_is_seen(h100, monkeypatch):
    here = torch.ones(9, device="cpu")

    def step(_, command, *__):
        return command + here.cos().sum().long().to(command.device)

    with pytest.raises(pytest.fail.Exception, match="a kernel for the CPU"):
        generate(step, torch.nn.Module(), "greedy", h100, 2, monkeypatch)
