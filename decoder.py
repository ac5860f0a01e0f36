"""The decode step that the device runs: one token in, one token out, for every row of the batch.

The step is compiled once: on CUDA as a whole, replayed as a graph; on a CPU by region (region.py). The host sends it
one command per row and reads the tokens at any later time; the device never waits. The step also samples, with noise
that is a hash of (seed, request, position): a row's samples do not depend on other rows or on timing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kv import KV, Shape
from kv.parts.ops import hashed
from model import Block, Transformer
from runtime.device import compile_errors
from runtime.region import Region, compiled
from runtime.tune import tune, tune_attention
from terminal.progress import Listener, Phase, Stats, timed

CONTINUE, SLEEP = -1, -2  # commands to a row; a value of 0 or more is a token to feed it


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Temperature 0 or top_k 1 is greedy; else top_k and top_p cut the distribution."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"the temperature must be 0 or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must lie between 0 and 1, not {self.top_p}")
        if self.temperature == 0 and (self.top_p is not None or self.top_k not in (None, 1)):
            raise ValueError("temperature 0 takes the best token: top-k and top-p need a --temperature above 0")

    @property
    def variant(self) -> str:
        """Which of three compiled steps this needs: greedy, plain or cut. Only `cut` sorts the vocabulary."""
        if self.temperature < 1e-6 or self.top_k == 1:  # dividing logits by less would overflow
            return "greedy"
        return "plain" if self.top_k is None and self.top_p is None else "cut"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What can change without a recompile: (temperature, top_k, top_p) as float64, and the seed."""
        cut = (self.temperature, min(self.top_k or 2**31, 2**31), self.top_p or 1.0)
        return torch.tensor(cut, dtype=torch.float64, device=device), torch.tensor(self.seed % 2**32, device=device)


def sample(logits: Tensor, variant: str, cut: Tensor, seed: Tensor, request: Tensor, pos: Tensor) -> Tensor:
    """logits [B, vocab] -> tokens [B], for requests [B] at positions [B]."""
    if variant == "greedy":
        return logits.argmax(-1)
    logits = logits / cut[0].float()
    if variant == "cut":
        ordered = logits.sort(-1, descending=True).values
        rank = torch.arange(logits.shape[-1], device=logits.device)
        p = ordered.masked_fill(rank >= cut[1], -torch.inf).softmax(-1)
        kept = (p.cumsum(-1) - p < cut[2]) & (rank < cut[1]) | (rank == 0)
        least = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return (logits + _gumbel(seed, request, pos, logits.shape[-1])).argmax(-1)


def _gumbel(seed: Tensor, request: Tensor, pos: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [B, vocab]: the argmax of logits plus noise is a draw from their softmax."""
    state = hashed(hashed(hashed(seed) ^ request) ^ pos)[:, None]
    bits = hashed(state ^ hashed(torch.arange(vocab, device=pos.device)))
    u = ((bits >> 9).float() + 0.5) / 2**23  # exact in fp32 (23 bits plus a half), so never 0 or 1
    return -torch.log(-torch.log(u))


class Decoder(nn.Module):
    """A model and the state of its rows, in buffers that each step updates in place; it also launches the steps."""

    def __init__(
        self,
        model: Transformer,
        layers: list[KV],
        shape: Shape,
        eos: list[int],
        compile: bool,
        stats: Stats,
        on_phase: Listener | None,
    ):
        super().__init__()
        self.model, self.layers, self.shape = model, layers, shape
        self.compiled, self.stats, self.on_phase = compile, stats, on_phase
        self.device, self.batch = shape.device, shape.batch
        for name in ("token", "pos", "request"):
            zeros = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
            self.register_buffer(name, zeros, persistent=False)
        live = torch.zeros(self.batch, dtype=torch.bool, device=self.device)
        self.register_buffer("live", live, persistent=False)
        self.register_buffer("eos", torch.tensor(eos or [-1], device=self.device), persistent=False)
        self.sampling, self.knobs = None, ()  # the current Sampling, and its tensors
        self.commands, self.command = None, None  # the last step's command to each row, as list and tensor
        self.warm: set[str] = set()  # compiled variants of the step
        self.fitted: list[tuple] = []  # what each layer's `fit` returned
        self.passes: list[Pass] = []
        self.step = self.through(self.begin, self.end)

    def through(self, enter: Callable, leave: Callable) -> "Pass":
        """Tokens through all layers; see `Pass`."""
        self.passes.append(Pass(self, enter, leave))
        return self.passes[-1]

    def reset(self, row: int) -> None:
        """Empties row `row` and puts it to sleep."""
        self._forget()
        self.pos[row], self.live[row] = 0, False

    def allow(self, row: int, tokens: int) -> None:
        """Limits how many more tokens row `row` may sample; only runtime/speculator.py needs the limit."""

    def start(self, row: int, token: int, pos: int, request: int) -> None:
        """Wakes row `row`, which holds `pos` tokens and has just sampled `token`."""
        self._forget()
        for buffer, value in ((self.token, token), (self.pos, pos), (self.request, request), (self.live, True)):
            buffer[row] = value

    # The step: `begin`, the layers, `end`

    def begin(self, command: Tensor) -> tuple[Tensor, ...]:
        """command [B] -> what the layers take: x, cos, sin, positions and which rows are live.

        A row that sampled an EOS goes to sleep by itself, without feeding the EOS. A token to feed wakes it.
        """
        fed = command >= 0
        ended = (self.token[:, None] == self.eos).any(-1)
        self.live.copy_(fed | (self.live & (command == CONTINUE) & ~ended))
        self.token.copy_(torch.where(fed, command, self.token))
        at = torch.where(self.live, self.pos, (self.pos - 1).clamp(min=0))  # asleep: a position its cache holds
        return *self.model.embed(self.token[:, None], at), at, self.live.clone()

    def end(self, x: Tensor, cut: Tensor, seed: Tensor, variant: str) -> tuple[Tensor, Tensor]:
        """x [B,1,C] -> the token each row samples [B,1], and the logits [B, vocab] it is drawn from."""
        logits = self.model.logits(x[:, -1])
        self.pos.add_(self.live)
        self.token.copy_(torch.where(self.live, sample(logits, variant, cut, seed, self.request, self.pos), self.token))
        return self.token[:, None].clone(), logits

    # The host's side

    def _forget(self) -> None:
        for each in self.passes:
            each.forget()

    def close(self) -> None:
        """Breaks reference cycles, which would keep the caches' memory; nothing can be launched afterwards."""
        for each in self.passes:
            each.close()
        self.step, self.passes = None, []

    def warm_up(self, sampling: Sampling, prompt: int) -> None:
        """Compiles (and on CUDA captures) the step with every row asleep, before anything is timed."""
        if sampling != self.sampling:
            self.sampling, self.knobs = sampling, sampling.tensors(self.device)
        if self.compiled and sampling.variant not in self.warm:
            about = f"{sampling.variant} decode step for {self.batch} x {self.shape.planned} tokens"
            with compile_errors(), timed(self.on_phase, Phase("compile", about)) as phase:
                for tokens in self.tokens() if not self.warm else ():
                    self.stats.products |= tune(self.model, self.batch * tokens)
                    self.stats.products |= tune_attention(self.model, self.shape, tokens)
                for _ in range(3 if self.device.type == "cuda" else 1):  # CUDA graph: run, record, replay
                    self.launch([SLEEP] * self.batch, prompt + 1, 1)[0].tolist()
            self.stats.compile_s += phase.seconds
            self.warm.add(sampling.variant)

    def tokens(self) -> list[int]:
        """How many tokens per row the passes of a step have."""
        return [1]

    def launch(self, commands: list[int], length: int, new: int) -> tuple[Tensor, Tensor]:
        """Launches a step. After it, no row holds more than `length` tokens, `new` of them decoded.

        Returns the sampled tokens [B,1] and the logits [B, vocab], valid until the next step.
        """
        self.fitted = [layer.before_step(length, new) for layer in self.layers]
        before = compiled_graphs()
        if commands != self.commands:  # pinned: a copy from other memory would wait for the last step
            pinned = torch.tensor(commands, pin_memory=self.device.type == "cuda")
            self.commands, self.command = commands, pinned.to(self.device, non_blocking=True)
        out = self.step(self.command, self.sampling.variant, *self.knobs)
        self.stats.compiles += compiled_graphs() - before
        return out


class Pass:
    """A pass of tokens through all layers: `enter` embeds them, `leave` turns the output into tokens and logits.

    On CUDA it is compiled as a whole; on a CPU in regions: layers with the same code are compiled once.
    """

    def __init__(self, decoder: Decoder, enter: Callable, leave: Callable):
        self.decoder, self.enter, self.leave = decoder, enter, leave
        self.regions: tuple[Region, ...] = ()
        self.run, self.graphed = self.forward, decoder.compiled and decoder.device.type == "cuda"
        if self.graphed:
            self.run = compiled(self.forward, options={"triton.cudagraphs": True, "coordinate_descent_tuning": True})
        elif decoder.compiled:
            self.regions, self.run = (Region(enter), Region(run_layer), Region(leave)), self.by_region

    @torch.no_grad()
    def __call__(self, command: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        if self.graphed:  # the call imports torch's compiler, which takes a second
            torch.compiler.cudagraph_mark_step_begin()
        return self.run(command, variant, cut, seed)

    def forward(self, command: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        x, cos, sin, at, live = self.enter(command)
        for layer, after in self.decoder.model.pairs():
            x = layer(x, cos, sin, at, live, after)
        return self.leave(x, cut, seed, variant)

    def by_region(self, command: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        enter, layer, leave = self.regions
        x, cos, sin, at, live = enter(None, None, (command,))
        for i, modules in enumerate(self.decoder.model.pairs()):
            x = layer(i, self.decoder.fitted[i], (x, cos, sin, at, live), *modules)
        return leave(variant, None, (x, cut, seed), variant)

    def forget(self) -> None:
        for region in self.regions:
            region.forget()

    def close(self) -> None:
        for region in self.regions:
            region.close()
        self.decoder = self.enter = self.leave = self.run = None
        self.regions = ()


def run_layer(
    x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, active: Tensor, layer: Block, after: Block | None
) -> Tensor:
    return layer(x, cos, sin, pos, active, after)


def read_later(tokens: Tensor) -> Callable[[], list[list[int]]]:
    """Starts a copy of tokens to the host; the returned function waits for it and returns the tokens."""
    if tokens.device.type != "cuda":
        values = tokens.tolist()
        return lambda: values
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return lambda: (event.synchronize(), host.tolist())[1]


def compiled_graphs() -> int:
    """The number of graphs torch has compiled in this process."""
    from torch._dynamo.utils import counters  # not at the top: see Caches.__init__

    return counters["stats"]["unique_graphs"]
