"""The contenders: this engine's methods and a naive full cache; bench/peers.py has other engines.

All have random weights of the same shape and caches full of random keys and values; a row whose prefill is timed holds
random tokens.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

import kv as methods
from engine import Engine, read_later
from kv.full import Full
from kv.parts.ranks import Ranks
from model import ModelConfig, Transformer
from runtime import load
from runtime.device import synchronize
from runtime.hf_config import from_hf
from runtime.linear import default_groupsize
from runtime.planning import figures, plan_for
from terminal.cli import Choice

KEYS = """hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
rope_theta""".split()


def llama(*sizes: float, **more) -> dict:
    """A config.json with `sizes` for KEYS."""
    fixed = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2**20}
    return {**fixed, **dict(zip(KEYS, sizes, strict=True)), **more}


ENDLESS = 2**40  # more steps than any row is given
SHAPES = {  # the models' config.json, except the context length, which the benchmark chooses
    "llama-3.1-8b": llama(4096, 32, 32, 8, 14336, 128256, 5e5),
    "llama-3.2-1b": llama(2048, 16, 32, 8, 8192, 128256, 5e5, head_dim=64, tie_word_embeddings=True),
    "mistral-7b": llama(4096, 32, 32, 8, 14336, 32000, 1e6),
    "yi-9b": llama(4096, 48, 32, 4, 11008, 64000, 1e4),
    "yi-6b": llama(4096, 32, 32, 4, 11008, 64000, 5e6),
    "llama-2-7b": llama(4096, 32, 32, 32, 11008, 32000, 1e4),
    "llama-160m": llama(768, 12, 12, 4, 3072, 32000, 1e4),
}


@dataclass(frozen=True)
class Case:
    """The settings that all contenders share."""

    name: str  # of the shape
    config: dict
    dtype: torch.dtype
    device: torch.device
    bandwidth: float  # bytes/s at which the device reads its memory
    context: int
    steps: int  # tokens planned after the context
    compile: bool
    prefill: bool
    ranks: Ranks
    batch: int = 1
    quantize: str | None = None
    groupsize: int | None = None  # int4: input channels that share a scale
    embeddings: bool = False  # whether the table and the head are quantized too

    @property
    def sizes(self) -> ModelConfig:
        return from_hf(self.config)

    def plan(self) -> methods.Plan:
        return plan_for(self.sizes, self.dtype, self.device, self.batch, self.context, self.steps)

    def model(self) -> Transformer:
        """This rank's part of the model, on the meta device. Raises ValueError if it cannot be quantized so."""
        how = {"mode": self.quantize, "groupsize": self.groupsize, "embeddings": self.embeddings}
        return load.skeleton(self.sizes, how if self.quantize else None, self.ranks, self.dtype)

    def floor_ms(self, device_bytes: int, host_bytes: int) -> float:
        """Milliseconds to read a step's bytes; a GPU can read its own memory and the host's at the same time."""
        if self.device.type == "cpu" or not host_bytes:
            return 1e3 * (device_bytes + host_bytes) / self.bandwidth
        return 1e3 * max(device_bytes / self.bandwidth, host_bytes / copy_bandwidth(self.device))

    def exchanged(self) -> int:
        """Bytes that the ranks exchange in one step: the outputs that they sum, and the logits that they gather."""
        numbers = 2 * self.sizes.n_layer * self.sizes.dim + self.sizes.vocab_size
        return self.batch * numbers * self.dtype.itemsize if self.ranks.count > 1 else 0

    def about(self) -> dict:
        """The keys that every row of the JSON object has."""
        return {
            "shape": self.name,
            "context": self.context,
            "batch": self.batch,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantize": self.quantize,
            "groupsize": self.groupsize if self.quantize == "int4" else None,
            "embeddings": bool(self.quantize) and self.embeddings,
        }


def checked(case: Case) -> Case:
    """The case, with the model's default group size where int4 names none.

    Raises ValueError if the model cannot be quantized so or divided among the ranks.
    """
    if case.quantize == "int4" and case.groupsize is None:
        part = load.skeleton(case.sizes, None, case.ranks)
        case = replace(case, groupsize=default_groupsize(part))
    case.model()
    return case


def random_weights(case: Case) -> dict[str, Tensor]:
    """A random state dict, made on the device."""
    weights = {}
    for name, meta in case.model().state_dict().items():
        tensor = weights[name] = torch.empty(meta.shape, dtype=meta.dtype, device=case.device)
        if not tensor.is_floating_point():
            tensor.random_(*((-127, 128) if tensor.dtype == torch.int8 else (0, 256)))
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
        else:
            tensor.normal_(std=0.02 if name.endswith("weight") else 2e-4)
    return weights


def step_weights(case: Case, weights: dict[str, Tensor]) -> int:
    """Bytes of the weights that a step reads: of the embedding table only the part that is this rank's tied head."""
    tied = case.config.get("tie_word_embeddings")
    table = sum(t.nbytes for name, t in weights.items() if name.startswith("tok_embeddings."))
    return sum(t.nbytes for t in weights.values()) - table + (table // case.ranks.count if tied else 0)


def seconds(what: Callable[[], object]) -> float:
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


@cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes/s of a copy from pinned host memory to the device."""
    host = torch.ones(2**28, dtype=torch.uint8, pin_memory=True)
    copy = torch.empty_like(host, device=device)

    def once() -> None:
        copy.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)

    return host.nbytes / statistics.median(seconds(once) for _ in range(7))


class Naive(Full):
    """A common baseline of papers: K and V repeated for every query head, products and softmax in separate steps."""

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        groups = q.shape[1] // k.shape[1]
        keys, values = (self.read(x).repeat_interleave(groups, dim=1) for x in (self.k, self.v))
        scores = q @ keys.mT * q.shape[-1] ** -0.5
        hidden = torch.arange(keys.shape[2], device=q.device) > pos[:, None]
        return scores.masked_fill(hidden[:, None, None], -torch.inf).float().softmax(-1).to(q.dtype) @ values


class Ours:
    """A method of this engine, on weights shared with other contenders."""

    def __init__(self, case: Case, method: Choice, weights: dict[str, Tensor], naive: bool = False, speculate: int = 0):
        self.case, self.method, self.label = case, method, "naive" if naive else method.label
        model = case.model()
        model.load_state_dict(weights, assign=True)
        # This reorders shared weights again each time, which does not matter: they are random.
        model = load.prepared(model.requires_grad_(False), case.ranks)
        loaded = load.Loaded(model, profile=case.config.get("kv_profile", {}))
        self.engine = engine = Engine(loaded, case.compile, seed=0, ranks=case.ranks)
        engine.use(method.kv, method.budget, method.options, case.batch, case.context, case.steps, speculate)
        if naive:
            engine.layers[:] = [Naive(engine.plan) for _ in engine.layers]
            model.set_kv(engine.layers)
        engine._begin_answers(None, None, {})
        engine._warm_up(case.context)
        self.new, self.unread = 0, []

    def start(self) -> float | None:
        """Fills every row; returns the seconds from the first row's prompt to its first token, None if not timed."""
        case, engine, prefill_s = self.case, self.engine, None
        if case.prefill:
            ids = torch.randint(case.config["vocab_size"], (case.context,)).tolist()
            warm = ids if case.device.type == "cuda" else ids[:64]  # a GPU also chooses kernels by length
            engine.start(warm)[0].close()
            prefill_s = seconds(lambda: engine.start(ids)[0].logits.argmax().item())
        for row in range(case.batch):
            if row or not case.prefill:
                self.fill(row)
            engine.state.set_row(row, 1, case.context, ENDLESS, row)
        engine._forget()
        return prefill_s

    def fill(self, row: int) -> None:
        """Fills a row with random keys and values, without the cost of a prefill."""
        c, case = self.engine.config, self.case
        for layer in self.engine.layers:
            q, k, v = (
                torch.randn(1, heads, case.context, c.head_dim, device=case.device, dtype=case.dtype)
                for heads in (c.n_head, c.n_kv_head, c.n_kv_head)
            )
            layer.reset(row)
            layer.begin(row, case.context)
            sizes = [c.n_head if name == "variance" else k.shape[1:3] for name in layer.statistics]
            layer.keep(row, q, k, v, *(torch.rand(size, device=case.device) for size in sizes))
        for layer in self.engine.layers:
            layer.finish(row)

    def step(self) -> None:
        """A step or, with speculation, a round. No drafted token is accepted here, so every row gains one token, which
        does not change the time of a round. As in the engine, the host reads a GPU's tokens a step later."""
        self.new += 1
        engine = self.engine
        if engine.speculate:
            engine.state.left.fill_(1)
        engine.layers.make_room(dict.fromkeys(range(self.case.batch), self.case.context + self.new - 1))
        tokens, _ = engine._step({}, self.case.context + self.new, self.new)
        self.unread.append(read_later(tokens))
        while len(self.unread) > engine.lag:
            self.unread.pop(0)()

    def skip(self, length: int) -> float:
        """Moves the rows on to `length` tokens without decoding; returns the seconds in which they made room."""
        rows, first = range(self.case.batch), self.case.context + self.new
        layers = methods.Cache(layer for layer in self.engine.layers if getattr(layer, "every", 0))

        def room() -> None:
            for tokens in range(first, length):
                layers.make_room(dict.fromkeys(rows, tokens))
            synchronize(self.case.device)

        self.new = length - self.case.context
        self.engine.state.pos.fill_(length)
        return seconds(room)

    def extend_s(self, n: int, repeats: int) -> float:
        """Seconds in which the first row takes n more tokens at once, the median of `repeats`."""
        engine, pos, times = self.engine, self.case.context + self.new, []
        tokens = torch.randint(self.case.config["vocab_size"], (n,), device=self.case.device)
        states = [layer.state(0, pos) for layer in engine.layers]
        for _ in range(repeats):
            times.append(seconds(lambda: engine.model.extend(0, tokens, pos).argmax().item()))
            for layer in engine.layers:
                layer.reset(0)
            for layer, state in zip(engine.layers, states, strict=True):
                layer.restore(0, pos, state)
        return statistics.median(times)

    def about(self) -> dict:
        engine, batch = self.engine, self.case.batch
        known = figures(engine, self.case.context + 1)
        return {
            "kv": "naive" if self.label == "naive" else self.method.kv,
            "budget": self.method.budget,
            "options": self.method.options,
            "speculate": engine.speculate,
            "profile": known["profile"],
            "compile_s": engine.stats.compile_s,
            "products": engine.stats.products,
            **{key: known[key] for key in ("kv_device_bytes", "kv_host_bytes")},
            **{key: batch * known[key] for key in ("step_device_bytes", "step_host_bytes")},
        }
