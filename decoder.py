"""The decode step that the device runs: one token in, one token out, for every row of the batch.

It is compiled once and, on CUDA, replayed as a graph. The host steers it with one command a row and reads its tokens
whenever it likes; the device never waits. Sampling is inside the step, and its noise is a hash of (seed, request,
position), so what a row samples depends on no other row and not on when it ran.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor, nn

from device import compile_errors
from kv import KV, Shape
from kv.ops import hashed
from model import Transformer
from progress import Listener, Phase, Stats, timed

CONTINUE, SLEEP = -1, -2  # commands to a row; anything from 0 up is a token to feed it


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 and top_k 1 are greedy; else top_k and top_p cut the distribution."""

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
        """Which of the three compiled steps this needs: only `cut` pays for a sort of the vocabulary."""
        if self.temperature < 1e-6 or self.top_k == 1:  # logits over less would overflow
            return "greedy"
        return "plain" if self.top_k is None and self.top_p is None else "cut"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What varies without a recompile: (temperature, top_k, top_p) as float64, and the seed."""
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
    """Standard Gumbel noise [B, vocab]: adding it to logits and taking the best draws from their softmax."""
    state = hashed(hashed(hashed(seed) ^ request) ^ pos)[:, None]
    bits = hashed(state ^ hashed(torch.arange(vocab, device=pos.device)))
    u = ((bits >> 9).float() + 0.5) / 2**23  # 23 bits and a half are exact in fp32, and never 0 or 1
    return -torch.log(-torch.log(u))


class Decoder(nn.Module):
    """A model and the state of its rows, all in buffers that a step updates in place; and how steps are launched."""

    def __init__(
        self, model: Transformer, layers: list[KV], shape: Shape, eos: list[int], compile: bool, stats: Stats,
        on_phase: Listener | None,
    ):  # fmt: skip
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
        self.sampling, self.knobs = None, ()  # how the next token is chosen, and that as tensors
        self.commands, self.command = None, None  # to every row in the last step, and that as a tensor
        self.warm: set[str] = set()  # variants of the step that are compiled
        self.step = self._compile() if compile else self.forward

    def reset(self, row: int) -> None:
        """Row `row` holds nothing and sleeps."""
        self.pos[row], self.live[row] = 0, False

    def start(self, row: int, token: int, pos: int, request: int) -> None:
        """Row `row` holds `pos` tokens and has just sampled `token`."""
        for buffer, value in ((self.token, token), (self.pos, pos), (self.request, request), (self.live, True)):
            buffer[row] = value

    @torch.no_grad()
    def forward(self, command: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        """command [B] -> what each row samples next [B], and the logits [B, vocab] it was drawn from.

        A row that sampled an EOS goes to sleep by itself: the EOS is not fed. A token to feed wakes it.
        """
        fed = command >= 0
        ended = (self.token[:, None] == self.eos).any(-1)
        live = fed | (self.live & (command == CONTINUE) & ~ended)
        token = torch.where(fed, command, self.token)
        at = torch.where(live, self.pos, (self.pos - 1).clamp(min=0))  # asleep: a position that its cache holds
        logits = self.model(token[:, None], at, live)
        self.pos.add_(live)
        self.live.copy_(live)
        self.token.copy_(torch.where(live, sample(logits, variant, cut, seed, self.request, self.pos), token))
        return self.token.clone(), logits

    # The host's side

    def _compile(self) -> Callable:
        def step(*inputs):
            return self(*inputs)

        cuda = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
        # A code object of its own: torch.compile counts recompiles by it and gives up at the ninth.
        own = FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
        return torch.compile(own, fullgraph=True, options=cuda if self.device.type == "cuda" else None)

    def warm_up(self, sampling: Sampling, prompt: int) -> None:
        """Compiles (and on CUDA captures) the step before anything is timed, with every row asleep."""
        if sampling != self.sampling:
            self.sampling, self.knobs = sampling, sampling.tensors(self.device)
        if self.compiled and sampling.variant not in self.warm:
            about = f"{sampling.variant} decode step for {self.batch} x {self.shape.planned} tokens"
            with compile_errors(), timed(self.on_phase, Phase("compile", about)) as phase:
                for _ in range(3 if self.device.type == "cuda" else 1):  # a CUDA graph runs, is recorded, is replayed
                    self.launch([SLEEP] * self.batch, prompt + 1, 1)[0].tolist()
            self.stats.compile_s += phase.seconds
            self.warm.add(sampling.variant)

    def launch(self, commands: list[int], length: int, new: int) -> tuple[Tensor, Tensor]:
        """Launches a step after which no row holds more than `length` tokens, `new` of them decoded.

        Returns what was sampled [B] and the logits [B, vocab], good until the next step.
        """
        for layer in self.layers:
            layer.fit(length, new)
        before = compiled_graphs()
        if self.compiled and self.device.type == "cuda":  # it imports torch's compiler, which takes a second
            torch.compiler.cudagraph_mark_step_begin()
        if commands != self.commands:  # from pinned memory: a copy from any other would wait for the last step
            pinned = torch.tensor(commands, pin_memory=self.device.type == "cuda")
            self.commands, self.command = commands, pinned.to(self.device, non_blocking=True)
        out = self.step(self.command, self.sampling.variant, *self.knobs)
        self.stats.compiles += compiled_graphs() - before
        return out


def read_later(tokens: Tensor) -> Callable[[], list[int]]:
    """Starts a copy of tokens to the host; the function returned waits for it."""
    if tokens.device.type != "cuda":
        values = tokens.tolist()
        return lambda: values
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return lambda: (event.synchronize(), host.tolist())[1]


def compiled_graphs() -> int:
    """That torch has compiled in this process."""
    from torch._dynamo.utils import counters  # not at the top: see Caches.__init__

    return counters["stats"]["unique_graphs"]
