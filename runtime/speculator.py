"""Speculation on the device: a step is a round, in which every row gains up to n + 1 tokens.

A row drafts n tokens, one at a time, with the method's cache; the full cache then takes its last token and the drafted
ones at once. Sampling's noise is a hash of (seed, request, position), so what the full cache samples at a position
depends on its logits alone: drafted tokens are accepted up to the first that differs, and that sample follows them.
Greedy or sampled, a row's tokens are those of the full cache alone. Where an EOS or a stop text ends an answer inside a
round, the host takes back the tokens after it (`rewind`).
"""

import torch
from torch import Tensor

from decoder import CONTINUE, Decoder, sample
from kv.parts.ops import following

MORE = -3  # a command: draft another token
UNLIMITED = 2**40


class Speculator(Decoder):
    """A decoder whose KV modules are kv/parts/speculation.py's; their shape says how many tokens a round drafts."""

    def __init__(self, *args):
        super().__init__(*args)
        n = self.shape.rewind
        for name, size in (("left", ()), ("at", ()), ("drafted", (n + 1,))):
            self.register_buffer(name, self.pos.new_zeros(self.batch, *size), persistent=False)
        self.more = self.pos.new_full((self.batch,), MORE)
        self.passes.pop().close()
        self.draft, self.verify = self.through(self.next, self.draw), self.through(self.all, self.settle)
        self.step = self.round

    def reset(self, row: int) -> None:
        super().reset(row)
        self.left[row] = 0

    def start(self, row: int, token: int, pos: int, request: int) -> None:
        super().start(row, token, pos, request)
        self.left[row] = UNLIMITED

    def allow(self, row: int, tokens: int) -> None:
        self.left[row] = tokens

    def rewind(self, row: int, pos: int) -> None:
        """Takes away all but the first `pos` tokens of row `row`, and puts it to sleep."""
        self.pos[row], self.left[row] = pos, 0

    def tokens(self) -> list[int]:
        return [self.drafted.shape[1], 1]

    def close(self) -> None:
        super().close()
        self.draft = self.verify = None

    def round(self, command: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        """command [B] -> the tokens each row samples [B,n+1], -1 after the last; logits [B, vocab] of the first."""
        for i in range(self.shape.rewind):
            self.draft(self.more if i else command, variant, cut, seed)
        return self.verify(command, variant, cut, seed)

    # A draft. `drafted` is a queue: the round's first token, then each drafted token, enters at its end

    def next(self, command: Tensor) -> tuple[Tensor, ...]:
        fed, begins = command >= 0, command != MORE
        ended = (self.token[:, None] == self.eos).any(-1) | (self.left < 1)
        self.live.copy_(torch.where(begins, fed | (self.live & (command == CONTINUE) & ~ended), self.live))
        self.token.copy_(torch.where(fed, command, self.token))
        self.at.copy_(torch.where(begins, self.first(), self.at))
        last = torch.where(begins, self.token, self.drafted[:, -1])
        self.drafted[:, -1] = last
        return *self.model.embed(last[:, None], self.at), self.at.clone(), self.live.clone()

    def first(self) -> Tensor:
        """The position [B] of the round's first token; for a sleeping row, a position that its cache holds."""
        return torch.where(self.live, self.pos, (self.pos - 1).clamp(min=0))

    def draw(self, x: Tensor, cut: Tensor, seed: Tensor, variant: str) -> Tensor:
        self.at.add_(self.live)
        logits = self.model.logits(x[:, -1])
        token = sample(logits, variant, cut, seed, self.request, self.at)
        self.drafted.copy_(torch.cat([self.drafted[:, 1:], token[:, None]], dim=1))
        return logits  # compiled code then stores them, instead of computing them inside the search for the best token

    # The verification

    def all(self, command: Tensor) -> tuple[Tensor, ...]:
        at = self.first()
        return *self.model.embed(self.drafted, at), at, self.live.clone()

    def settle(self, x: Tensor, cut: Tensor, seed: Tensor, variant: str) -> tuple[Tensor, Tensor]:
        logits, n = self.model.logits(x), x.shape[1]  # [B,n,vocab]
        position = following(self.pos + 1, n).flatten()
        request = self.request.repeat_interleave(n)
        token = sample(logits.flatten(0, 1), variant, cut, seed, request, position).view(-1, n)
        right = self.drafted[:, 1:] == token[:, :-1]
        count = torch.minimum(right.long().cumprod(1).sum(1) + 1, self.left) * self.live  # tokens that the row gains
        self.pos.add_(count)
        self.left.sub_(count)
        last = token.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        self.token.copy_(torch.where(self.live, last, self.token))
        gained = torch.arange(n, device=x.device) < count[:, None]
        return torch.where(gained, token, -1), logits[:, 0].clone()
