"""The decode step that the device runs: one token in, one token out, for every row of the batch.

The host steers it with one command a row and reads its tokens whenever it likes; the device never waits. Sampling
is inside the step, and its noise is a hash of (seed, request, position), so what a row samples depends on no other
row and not on when it ran.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kv.ops import hashed
from model import Transformer

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
    """A model and the state of its rows, all in buffers that a step updates in place."""

    def __init__(self, model: Transformer, batch: int, eos: list[int], device: torch.device):
        super().__init__()
        self.model = model
        for name in ("token", "pos", "request"):
            self.register_buffer(name, torch.zeros(batch, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("live", torch.zeros(batch, dtype=torch.bool, device=device), persistent=False)
        self.register_buffer("eos", torch.tensor(eos or [-1], device=device), persistent=False)

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
