"""The base of methods that rank a prompt's tokens by a score, keep the best, and keep every generated token."""

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.base import KV, Held, Views
from kv.method import Method, Shape, option
from kv.parts import ops, quant


class Scored(KV):
    """Slots for `kept` tokens of a prompt, in order of position, followed by every generated token.

    A method writes `score`. The first `sinks` and the newest `window` tokens of a prompt are always kept. A KV head
    keeps its own tokens or, with `copies` = G, each of its query heads does.
    """

    rewinds = True

    def __init__(self, shape: Shape, kept: int, window: int = 0, sinks: int = 0, copies: int = 1, bits: int = 16):
        """kept: of the longest prompt. bits of a stored value (quant.encode); `decode` is then the method's own."""
        super().__init__(replace(shape, n_kv_head=shape.n_kv_head * copies))
        self.copies, self.budget, self.kept = copies, kept, min(kept, shape.max_prompt)
        self.window, self.sinks = min(window, self.kept), sinks
        self.rows: dict[int, int] = {}  # how many tokens each row keeps of its prompt
        self.recent = max(1, self.window)
        self.bits = bits
        width = None if bits == 16 else quant.vector_bytes(shape.head_dim, bits)
        self.allocate_slots(self.kept + shape.max_new_tokens, width)
        self.allocate_state("dropped")  # how many tokens of each row's prompt are gone, [B]
        self.allocate_state("position", self.shape.n_kv_head, self.kept, dtype=torch.int32, fill=-1)  # of the kept

    @abstractmethod
    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """How much each token of a prompt is worth keeping: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [Hk,T] or [Hq,T]."""

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        best = self.choose(q, k, v)
        head = torch.arange(len(best), device=k.device)[:, None] // self.copies
        self.write(row, 0, k[0, head, best], v[0, head, best])
        self.rows[row], self.dropped[row] = best.shape[1], k.shape[2] - best.shape[1]
        self.position[row, :, : best.shape[1]] = best

    def write(self, row: int, first: int, k: Tensor, v: Tensor) -> None:
        """Stores n vectors in a row's slots from `first` on: k and v [H,n,D]."""
        slots = slice(first, first + k.shape[1])
        self.k[row, :, slots], self.v[row, :, slots] = quant.encode(k, self.bits), quant.encode(v, self.bits)

    def choose(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The positions of the tokens to keep, ascending: [Hk,n], or [Hq,n]."""
        position = torch.arange(k.shape[2], device=k.device)
        if len(position) <= (kept := self.kept_of(k.shape[2])):
            return position.expand(self.shape.n_kv_head, -1)
        always = (position < self.sinks) | (position >= len(position) - self.window_of(len(position)))
        scores = self.score(q, k, v).float().masked_fill(always, torch.inf)
        return ops.top(scores, kept).sort().values

    def kept_of(self, prompt: int) -> int:
        """How many tokens of a prompt of `prompt` tokens stay, at most `kept`."""
        return min(self.kept, self.shape.row_budget(self.budget, prompt))

    def window_of(self, prompt: int) -> int:
        """How many of its newest tokens always stay: at most half of those that do."""
        kept = self.kept_of(prompt)
        return min(self.window, kept // 2, kept - self.sinks)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        return ops.attend_prefix(q, self.read(self.k), self.read(self.v), self.slot(pos) + 1)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        k, v = (quant.encode(self.copied(x), self.bits) for x in (k, v))
        self.store(k, v, ops.following(self.slot(pos), k.shape[2]), active)

    def slot(self, pos: Tensor) -> Tensor:
        """The slots of the tokens at pos [B]; 0 for a row that sleeps at position 0, whatever it holds."""
        return (pos - self.dropped).clamp(min=0)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        self.write(row, self.filled(row, pos), self.copied(k)[0], self.copied(v)[0])

    def copied(self, x: Tensor) -> Tensor:
        """K or V [B,Hk,n,D] of new tokens, for each head that stores them."""
        return x if self.copies == 1 else x.repeat_interleave(self.copies, dim=1)

    def decoded(self, x: Tensor) -> Tensor:
        """Stored vectors as numbers, [..., D]."""
        return quant.decode(x, self.bits, self.shape.head_dim, self.shape.dtype)

    def held(self, row: int, length: int) -> Held:
        dropped = int(self.dropped[row])
        position = self.position[row, :, : length - dropped]
        position = position[:, : int((position[0] >= 0).sum())]
        generated = torch.arange(position.shape[1] + dropped, length, device=position.device)
        k, v = (self.decoded(x[row, :, : length - dropped]) for x in (self.k, self.v))
        return Held(k, v, torch.cat([position, generated.expand(len(position), -1)], dim=1))

    def filled(self, row: int, length: int) -> int:
        return length - int(self.dropped[row])

    def reset(self, row: int) -> None:
        super().reset(row)
        self.rows.pop(row, None)

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        self.rows[row] = int((self.position[row, 0] >= 0).sum())  # now that a saved row is restored

    def slots_to_read(self, length: int, new: int) -> int:
        return min(length, max(self.rows.values(), default=self.kept_of(self.shape.max_prompt)) + new)


def pooled(scores: Tensor, kernel: int, window: int) -> Tensor:
    """Scores [H,n], max-pooled over `kernel` tokens, and 0 for the window, which stays anyway: [H,n+window]"""
    best = F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)[:, : scores.shape[1]]
    return F.pad(best, (0, window))


@dataclass(frozen=True)
class ScoredMethod(Method):
    """Builds the `layer` of a method that writes `score`; its own options are arguments of the layer, by name."""

    layer: ClassVar[type[Scored]]
    window: int = option(8, "newest prompt tokens that are always kept", min=0)
    sinks: int = option(4, "first tokens that are always kept", min=0)

    def minimum(self, shape: Shape) -> int:
        return self.sinks + 1

    def build(self, shape: Shape, budget: int) -> list[KV]:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        options["window"] = min(self.window, budget // 2, budget - self.sinks)
        return [self.layer(shape, budget, **options) for _ in range(shape.n_layer)]
