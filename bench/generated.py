"""The code that Inductor generates for a step on a GPU, where there is none.

All tensors are fake. Inductor asks a GPU for its properties alone, if it may not time kernels: a table answers here.
"""

import ctypes
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import kv
from engine import RowState
from model import ModelConfig, Transformer
from runtime import load
from runtime.compile import compiled
from runtime.linear import Int4Linear, default_groupsize, quantize_modules

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
OPTIONS = {"shape_padding": False, "joint_graph_constant_folding": False, "fx_graph_cache": False, "compile_threads": 1}
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>);
}
"""
LAUNCHES = {  # lines of the code that Inductor writes around its kernels, by kind
    "triton": r"\btriton_\w+\.run\(",
    "product": r"\bextern_kernels\.\w+\(",
    "topk": r"\btorch\.ops\.aten\.(?:topk|sort)\.\w+\(",
    "host": r"\btorch\.ops\.kv_fast\.\w+\.\w+\(",
    "other": r"(?:\btorch\.ops\.(?!aten\.(?:topk|sort)\.|kv_fast\.)|(?<![\w.])aten\.)\w+(?:\.\w+)*\(|\.copy_\(",
}


# A GPU that is not here


class FakeStream:
    """A CUDA stream that is never used."""

    def __init__(self, *_):
        pass


def fake_host_memory(what: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device):
    return torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype, device=device)


@cache
def guard() -> None:
    """Lets torch's build for CPUs index fake CUDA tensors: it has no code that makes a GPU the current one."""
    if torch.version.cuda is None:
        torch_folder = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(GUARD)
            build = ["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library]
            subprocess.run([*build, "-I", torch_folder / "include", "-L", torch_folder / "lib", "-lc10"], check=True)
            ctypes.CDLL(str(library))


@contextmanager
def fake_tensors() -> Iterator[torch.device]:
    """Tensors are fake, and those on the device that is returned are on a GPU that is not here."""
    guard()
    torch._dynamo.reset()
    with (
        patch("kv.parts.offload.host_memory", fake_host_memory),
        patch("torch.cuda.Stream", FakeStream),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield torch.device("cuda", 0)
    torch._dynamo.reset()


class Driver:
    """Triton's driver of a GPU that is not here."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


@contextmanager
def fake_gpu() -> Iterator[torch.device]:
    """As `fake_tensors`; the GPU answers what an H100 would, and runs nothing."""
    import torch._inductor.compile_fx
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    properties, before = SimpleNamespace(**H100, **MORE), driver._active
    with fake_tensors() as device, ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "get_device_properties", lambda *_: properties),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
            (DeviceProperties, "create", classmethod(lambda cls, _: cls(**H100))),
            (torch._inductor.scheduler, "has_triton", lambda *_: True),
            (torch._inductor.compile_fx, "_check_triton_bf16_support", lambda _: None),
            (torch._inductor.compile_fx, "cudagraphify", lambda model, *_, **__: model),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch("torch._C._cuda_getCurrentRawStream", lambda _: 0, create=True))
        driver.set_active(Driver())
        try:
            yield device
        finally:
            driver._active = before


# Steps


def build(
    config: ModelConfig, plan: kv.Plan, method: str, budget: int | None, options: dict, mode: str | None = None
) -> RowState:
    """The rows of a model of fake weights, quantized to int8 or int4 if `mode` says so, whose layers have the method's
    caches; rows hold whole prompts."""
    with plan.device:
        torch.set_default_dtype(plan.dtype)
        model = Transformer(load.share(config, plan.ranks)).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        if mode:
            quantize_modules(model, mode, default_groupsize(model) if mode == "int4" else None, embeddings=False)
            for module in model.modules() if plan.device.type == "cuda" else ():
                if isinstance(module, Int4Linear) and module.orders():
                    module.reordered(module.orders()[0])
        load.connect(model, plan.ranks)
        model.set_rows(plan.batch)
        layers = kv.build(method, replace(plan, inv_freq=model.inv_freq), budget, options)
        model.set_kv(layers)
        state = RowState(model, plan.batch, [2])
    layers.before_step(plan.max_prompt, 1)
    return state


def caches(state: RowState) -> kv.Cache:
    return kv.Cache(layer.attention.kv for layer in state.model.layers)


def launch(step: Callable, backend: Callable, *inputs: object) -> None:
    """Compiles a step as the engine does, with another backend, and calls it."""
    with torch.no_grad():
        compiled(step, backend=backend)(*inputs)


@dataclass
class Generated:
    """What Inductor made of a step."""

    kernels: dict[str, object] = field(default_factory=dict)  # Triton's, by source
    code: list[str] = field(default_factory=list)  # that launches them; one, if the step is one graph
    inputs: list[Tensor] = field(default_factory=list)  # of that code
    graphs: int = 0  # CUDA graphs that a step replays
    read: int = 0  # bytes
    written: int = 0

    def launches(self) -> Counter:
        """How many kernels a step launches, by kind; a top-k or a sort counts once, whatever torch makes of it."""
        code = re.sub(r"'''.*?'''", "", "".join(self.code), flags=re.DOTALL)  # without the kernels
        code = re.sub(r"^\s*#.*$", "", code, flags=re.MULTILINE)
        return Counter({kind: len(re.findall(pattern, code)) for kind, pattern in LAUNCHES.items()})


def generate(run: Callable[[Callable], None], options: dict) -> Generated:
    """Lets Inductor write the kernels of a step, which `run(backend)` compiles; nothing is launched."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    found, write = Generated(), GraphLowering.codegen

    def triton(self, name: str, source: str, **_):
        found.kernels[source] = getattr(PyCodeCache.load(source), name)
        return found.kernels[source]

    def for_a_cpu(*_, **__):
        raise AssertionError("a kernel for the CPU")

    def inner(graph: torch.fx.GraphModule, inputs: list, **how):
        code = compile_fx_inner(graph, inputs, **how)
        found.graphs += len(code.partition_maps) if code.partition_maps else 1

        def call(*given):
            found.inputs += given
            return graph.forward(*given)

        return make_boxed_func(call)

    def codegen(graph: GraphLowering) -> tuple:
        code = write(graph)
        for node in graph.scheduler.nodes:
            read, written = traffic(graph, node)
            found.read, found.written = found.read + read, found.written + written
        return code

    with (
        patch.object(AsyncCompile, "triton", triton),
        patch.object(AsyncCompile, "cpp_pybinding", for_a_cpu),
        patch.object(AsyncCompile, "cpp", for_a_cpu),
        patch.object(GraphLowering, "codegen", codegen),
        patch.object(GraphLowering, "save_output_code", staticmethod(found.code.append)),
        config.patch(OPTIONS | options),
    ):
        run(lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner))
    return found


def traffic(graph, node) -> tuple[int, int]:
    """The bytes that a kernel of Inductor's scheduler reads and writes, each element once."""
    from torch._inductor.dependencies import MemoryDep, StarDep
    from torch._inductor.scheduler import NopKernelSchedulerNode

    if isinstance(node, NopKernelSchedulerNode):
        return 0, 0

    def number(size) -> int:
        return graph.sizevars.optimization_hint(size, fallback=0)

    operands = Counter()  # elements of each that a product reads, of a part of a buffer only those
    for operand in node.node.inputs if node.is_extern() or node.is_template() else ():
        with suppress(NotImplementedError):  # a kernel with several outputs
            operands[operand.get_name()] += prod(map(number, operand.get_size()))

    def direct(dep: MemoryDep | StarDep) -> int:
        if isinstance(dep, StarDep):  # an operand of a product; a kernel that writes a part of a buffer reads none
            return operands[graph.scheduler.mutation_real_name.get(dep.name, dep.name)]
        return prod(number(size) for var, size in dep.ranges.items() if var in dep.index.free_symbols)

    deps = [dep for dep in node.read_writes.reads | node.read_writes.writes if isinstance(dep, MemoryDep | StarDep)]
    deps = [dep for dep in deps if item_bytes(graph, dep.name)]
    plain = [dep for dep in deps if isinstance(dep, StarDep) or not dep.is_indirect()]
    whole = {dep.name: number(graph.get_numel(dep.name)) for dep in deps}
    # Of a gather or a scatter, as many entries as there are indices: not more than the largest integer operand.
    indices = max((direct(dep) for dep in plain if is_index(graph, dep.name)), default=1)

    def elements(dep: MemoryDep | StarDep) -> int:
        if dep in plain:
            return direct(dep)
        return min(prod(map(number, dep.size)), direct(dep) * indices)

    def total(some: Iterable) -> int:
        by_name = Counter()
        for dep in some:
            by_name[dep.name] += elements(dep)
        return sum(min(count, whole[name]) * item_bytes(graph, name) for name, count in by_name.items())

    own, inside = node.get_buffer_names(), {part.get_name() for part in node.get_nodes()}
    kept = {name for name in own if {user.node.get_name() for user in graph.scheduler.name_to_buf[name].users} - inside}
    reads = [dep for dep in deps if dep in node.read_writes.reads and dep.name not in own]  # the others: registers
    return total(reads), total(dep for dep in deps if dep in node.read_writes.writes and dep.name in kept)


def item_bytes(graph, name: str) -> int:
    """Bytes of an element of a buffer; 0 for what stands for several buffers, or for none."""
    with suppress(NotImplementedError):
        return graph.get_dtype(name).itemsize
    return 0


def is_index(graph, name: str) -> bool:
    return graph.get_dtype(name) in (torch.int32, torch.int64)
