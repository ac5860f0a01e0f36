"""The decode step for a GPU, traced without one: one graph, nothing on the CPU, no synchronization, static buffers."""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from conftest import LLAMA, exhaustive
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import kv
from bench import generated
from engine import RowState, Sampling, decode_step, sample
from kv.parts import attention, offload
from kv.parts.ranks import ALONE, Ranks
from model import Transformer
from runtime import load, speculate
from runtime.hf_config import from_hf
from runtime.planning import plan_for

pytestmark = pytest.mark.slow
CONFIG = from_hf(LLAMA | {"num_hidden_layers": 4, "head_dim": 32, "hidden_size": 128})
LAYERS = {"omnikv": 3, "quest": 3}  # of a step; of other methods, two layers show all that a step does
SCORES = [[3.0, 1.0], [2.0, 4.0], [6.0, 5.0], [1.0, 2.0]]
VARIANTS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in kv.METHODS} | {
    "full:bits": ("full", {"bits": 8}),
    "rocketkv:bits": ("rocketkv", {"bits": 4}),
    "rocketkv:turns": ("rocketkv", {"turns": True, "offload": True}),
    "snapkv:heads": ("snapkv", {"gqa": False}),
    "snapkv:adaptive": ("snapkv", {"heads": "adaptive"}),
    "kvzip:equal": ("kvzip", {"heads": "equal"}),
    "d2o:paper": ("d2o", {"merge": "paper"}),
    "duo": ("duo", {"sinks": 2, "recent": 6, "head_scores": SCORES}),
    "omnikv:direct": ("omnikv", {"offload": True, "engine": "direct"}),
    "omnikv:threads": ("omnikv", {"offload": True, "engine": "threads", "delta": True}),
    "omnikv:bits": ("omnikv", {"offload": True, "bits": 8}),
    "rkv:every": ("rkv", {"every": 128}),
    "tailorkv:direct": ("tailorkv", {"engine": "direct"}),
    "tailorkv:threads": ("tailorkv", {"engine": "threads"}),
    "infllm:threads": ("infllm", {"block": 32, "offload": True, "engine": "threads"}),
    "infllm": ("infllm", {"block": 32}),
}
FETCHES = {"kv_fast::issue", "kv_fast::wait"}  # the host's work in a step, between the CUDA graphs
WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}


def has_threads(name: str) -> bool:
    """Whether a variant's threads fetch between the graphs of a step."""
    return name.endswith(":threads") or name in ("tailorkv", "brute_offload")


@pytest.fixture
def gpu():
    """Tensors are fake, and some of them on a GPU that is not here."""
    with generated.fake_tensors() as device:
        yield device


def build(
    name: str,
    device: torch.device,
    batch: int,
    drafts: int = 0,
    ranks: Ranks = ALONE,
    dtype: torch.dtype = torch.bfloat16,
    mode: str | None = None,
) -> RowState:
    """The rows of a model, quantized if `mode` says so, whose layers have the method's caches."""
    method, options = VARIANTS[name]
    if "head_scores" in options:
        options = options | {"head_scores": SCORES[:2]}
    with unset_fake_temporarily():
        config = replace(CONFIG, n_layer=LAYERS.get(method, 2))
        plan = plan_for(load.share(config, ranks), dtype, device, batch, 1024, 64, drafts, ranks)
        own = kv.parse_options(method, options)
        budget = max(256, own.minimum(plan)) if own.takes_budget else None
    return generated.build(config, plan, method, budget, options, mode)


def trace(run, state: nn.Module, variant: str, device: torch.device, batch: int) -> tuple[torch.fx.GraphModule, object]:
    """The graph that a compiler for CUDA receives, and what is known of its inputs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    found = []

    def compiler(graph: torch.fx.GraphModule, inputs: list):
        found.append((graph, torch._guards.TracingContext.get().fw_metadata))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)
    launch(run, state, backend, variant, device, batch)
    assert len(found) == 1  # fullgraph=True would have raised before
    return found[0]


def launch(run, state: nn.Module, backend, variant: str, device: torch.device, batch: int) -> None:
    """Compiles a step as the engine does, with another backend, and calls it."""
    temperature, top_k = 0.0 if variant.endswith("greedy") else 1.0, 20 if variant.endswith("cut") else None
    sampling = Sampling(temperature, top_k, repetition_penalty=1.1 if variant.startswith("penalized") else 1.0)
    command = [torch.zeros(batch, dtype=torch.int64, device=device)] if run is not speculate.verify_step else []
    generated.launch(run, backend, state, *command, sampling.variant, *sampling.tensors(device))


def problems(graph: torch.fx.GraphModule, known) -> set[str]:
    """What would keep the step from being CUDA graphs, or make the device wait for the host."""
    found = set()
    for node in graph.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, FakeTensor) and value.device.type != "cuda" and node.users:
                found.add(f"on the CPU: {node.format_node()}")
            if isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape):
                found.add(f"a size that varies: {node.format_node()}")
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target.name().partition(".")[0]
        if name in WAITS:
            found.add(f"waits: {node.format_node()}")
        if not name.startswith(("aten::", "prims::", "_c10d_functional::")) and name not in FETCHES:
            found.add(f"an operator of the host: {name}")
        indices = node.args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        if any(index is not None and index.meta["val"].dtype == torch.bool for index in indices):
            found.add(f"waits for how many are true: {node.format_node()}")
    mutated = {i for i, info in enumerate(known.input_info) if info.mutates_data}
    moving = mutated - set(known.static_input_indices)
    inputs = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    found |= {f"mutated, and not static: {inputs[i]}" for i in moving}
    return found


SCORES_ALONE = {"snapkv++", "pyramidkv", "keynorm", "keydiff", "lagkv", "expected", "rkv"}  # their steps are snapkv's
STEPS = [exhaustive(name, 5, "cut") if name in SCORES_ALONE else (name, 5, "cut") for name in VARIANTS]
STEPS += [("full", 1, "plain"), ("full", 1, "penalized greedy"), ("full", 1, "penalized cut")]
STEPS += [exhaustive(name, 1, "greedy") for name in VARIANTS]


@pytest.mark.parametrize(("name", "batch", "sampling"), STEPS)
def test_a_step_is_one_graph_on_the_device(gpu, name, batch, sampling):
    state = build(name, gpu, batch)
    if sampling.startswith("penalized"):
        state.seen = torch.zeros(batch, CONFIG.vocab_size, dtype=torch.bool, device=gpu)
    graph, known = trace(decode_step, state, sampling, gpu, batch)
    assert not problems(graph, known)
    fetches = [n for n in graph.graph.nodes if n.op == "call_function" and "kv_fast" in str(n.target)]
    assert bool(fetches) == has_threads(name)
    generated.caches(state).close()


@pytest.mark.parametrize(("name", "variant"), (("rocketkv", "cut"), ("omnikv:threads", "greedy")))
def test_rounds_are_two_graphs_on_the_device(gpu, name, variant):
    state, passes = build(name, gpu, 3, drafts=2), []
    speculate.rounds(state, 2, sample, lambda part: passes.append(part) or part)
    assert passes == [speculate.draft_step, speculate.verify_step]
    for part in passes:
        graph, known = trace(part, state, variant, gpu, 3)
        assert not problems(graph, known)
    generated.caches(state).close()


@pytest.mark.parametrize("name", ("full", "infllm", "omnikv"))
def test_a_step_of_several_ranks_is_one_graph_on_the_device(gpu, name):
    """The ranks' sums are in it: two per layer, one of the logits, and those of a method that compares heads."""
    state = build(name, gpu, 2, ranks=Ranks(1, 2, "0"))
    graph, known = trace(decode_step, state, "greedy", gpu, 2)
    assert not problems(graph, known)
    names = Counter(str(node.target) for node in graph.graph.nodes)
    layers = len(state.model.layers)
    assert names["_c10d_functional.all_reduce.default"] == 2 * layers + (layers if name == "infllm" else 0)
    assert names["_c10d_functional.all_gather_into_tensor.default"] == 1
    generated.caches(state).close()


class Wrong(nn.Module):
    """Steps with a flaw that the test must see."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.register_buffer("state", torch.zeros(8, device=device))

    def cpu(self, _, command: Tensor, *__) -> Tensor:
        return command + torch.arange(3).sum().to(command.device)

    def moving(self, _, command: Tensor, *__) -> Tensor:
        command.add_(1)  # an input that the caller may place elsewhere next time
        return command + 1

    def item(self, _, command: Tensor, *__) -> Tensor:
        return command + command.sum().item()

    def bools(self, _, command: Tensor, *__) -> Tensor:
        return command[command > 0].sum()

    def host(self, _, command: Tensor, *__) -> Tensor:
        return torch.ops.kv_fast.mv(self.state[:, None].to(torch.bfloat16), command[:1].to(torch.bfloat16))


@pytest.mark.parametrize("flaw", ("cpu", "moving", "item", "bools", "host"))
def test_a_flaw_is_seen(gpu, flaw):
    wrong = Wrong(gpu)
    try:
        found = problems(*trace(getattr(wrong, flaw), wrong, "greedy", gpu, 8))
    except RuntimeError:  # of the compiler, or of a fake tensor whose values are asked for
        found = {"no single graph"}
    assert found


# Prompts


class Waits(TorchDispatchMode):
    """Counts operators that make the host wait for a GPU, and the memory that all operators take."""

    def __init__(self):
        super().__init__()
        self.count, self.largest = Counter(), 0  # the elements of the largest tensor
        self.live, self.peak = {}, 0  # bytes by storage, and at most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        indices = args[1] if name in ("aten::index", "aten::index_put", "aten::index_put_") else ()
        if indices and args[0].dtype == torch.int64:  # a list of rows that a pool keeps on the host
            indices = ()
        if name in WAITS or any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices):
            self.count[name] += 1
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.largest = max(self.largest, out.numel())
        for made in filter(lambda x: isinstance(x, Tensor), out if isinstance(out, tuple | list) else (out,)):
            if not (func.is_view or func._schema.is_mutable):
                self.live[StorageWeakRef(made.untyped_storage())] = made.untyped_storage().nbytes()
        self.live = {storage: size for storage, size in self.live.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def prompt_waits(name: str, layers: int, tokens: int) -> Waits:
    """What a prompt costs, on the CPU, where the same operators run."""
    method, options = VARIANTS[name]
    if "head_scores" in options:
        options = options | {"head_scores": [SCORES[i % 4] for i in range(layers)]}
    config = replace(CONFIG, n_layer=layers)
    plan = plan_for(config, torch.float32, torch.device("cpu"), 1, tokens, 64)
    budget = 256 if kv.METHODS[method].budgeted else None
    model = Transformer(config).requires_grad_(False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.set_rows(1)
    modules = kv.build(method, replace(plan, inv_freq=model.inv_freq), budget, options)
    model.set_kv(modules)
    for module in modules:
        module.error = 0.1  # the first prompt's alone is looked at
    with Waits() as found:
        model.prefill(0, torch.arange(tokens) % 100)
    modules.close()
    return found


# How often the host waits for the device in a layer's prefill; with all other methods it never does.
LAYER_WAITS = {
    "d2o": 2,  # after the last layer: where its region lies
    "d2o:paper": 8,  # also which tokens merge, for 2 KV heads (3 each)
    "simlayer": 1,  # whether the layer is lazy, which decides where its tokens go
}


# Bytes per token that a layer keeps until the last layer is done. All others keep nothing.
PARKED = dict.fromkeys(("d2o", "kvzip"), 4 * 2 * CONFIG.n_kv_head * CONFIG.head_dim)  # K and V: what stays comes later


class Slow(ThreadPoolExecutor):
    """Starts a job when its result is asked for: none is ever done sooner."""

    def submit(self, run, *args) -> Future:
        job = Future()
        job.result = lambda: run(*args)
        return job


@pytest.mark.parametrize("name", VARIANTS)
def test_a_prompt_waits_only_where_it_is_known_to_and_its_memory_grows_with_its_length(name, monkeypatch):
    """Beside weights and caches, memory grows neither with the square of the length nor with the number of layers."""
    monkeypatch.setattr(attention, "SCORES", 2**14)  # weights that may exist at once, few for prompts that are short
    monkeypatch.setattr(offload, "ThreadPoolExecutor", Slow)
    waits, method = LAYER_WAITS.get(name, 0), VARIANTS[name][0]
    layers = 12 if has_threads(name) else 4  # what threads write stays until it is written
    short, long = prompt_waits(name, layers, 700), prompt_waits(name, 2 * layers, 1400)
    assert (short.count.total(), long.count.total()) == (layers * waits, 2 * layers * waits)
    assert long.peak / 1400 < 1.05 * (short.peak / 700 + 4 * PARKED.get(method, 0))
    squares = ("roco", "rkv")  # which compute each query's attention, or all keys' similarity, a block at a time
    assert long.largest < 1400**2 / 2 or method in squares
