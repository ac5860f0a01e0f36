"""h2o, roco, cam: a fixed number of tokens a KV head; when another comes, the least important one is evicted.

A token's importance grows with the attention it receives from every query, summed over the query heads of a group.

- h2o (Zhang et al., arXiv 2306.14048): the newest half of the budget stays, and of the rest the highest sums.
- roco (Ren & Zhu, arXiv 2402.06262): the mean of that attention in place of the sum, over the queries that could see
  the token. Protected are the sinks, the newest 10 (of small budgets the newest half) and, with 30% of the budget, the
  tokens whose attention has the highest standard deviation.
- cam (Zhang et al., ICML 2024): h2o, but a step spreads the value of the token that it evicts over the next ones that
  are kept, with a probability that grows with the token's importance. The prompt's end spreads none: thousands of
  values would go into a few hundred.

Memory and traffic: the budget, and a slot for the newest token. Any number of tokens can be generated: past the model's
context, queries see the tokens that are kept side by side, at the positions that these have in the cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv import ops
from kv.base import KV, Buffers, Method, Shape, option
from kv.streaming import SINKS


class H2O(KV):
    """`size` tokens of each KV head, the first `sinks` and the newest `recent` among them, in slots in any order.

    The newest token goes to the spare slot; when another is then evicted, its slot is the next spare one.
    """

    endless = True
    past = False  # whether a row may have left the model's context
    sums = ("received",)  # buffers: for each token, sums of powers of the attention that it has received

    def __init__(self, shape: Shape, size: int, sinks: int, recent: int):
        super().__init__(shape)
        self.size, self.sinks, self.recent = size, sinks, recent
        self.allocate_slots(size + 1)
        allocate_tokens(self, size + 2, self.sums)
        self.state("spare", shape.n_kv_head)  # the slot of the next token
        self.allocate_speeds()
        self.beyond["spare slot"] = shape.slot_bytes

    # The prompt

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, *self.observed = ops.observed_attention(q, k, v, len(self.sums))
        return y

    def skip_prompt(self, q: Tensor, k: Tensor) -> None:
        sums = [torch.rand(k.shape[1:3], device=k.device) for _ in self.sums]
        self.observed = sums, torch.rand(q.shape[1], device=k.device)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        (sums, _), self.observed = self.observed, None
        self.position[row] = -1
        self.compress(row, 0, sums, k[0], v[0], self.size)

    def compress(self, row: int, first: int, sums: list[Tensor], k: Tensor, v: Tensor, size: int) -> None:
        """Stores what stays of a prompt, each of `sums` [Hk,T], k and v [Hk,T,D], in `size` slots from `first` on."""
        kept = self.select(sums, size)
        k, v = self.merge_prompt(row, k, v, kept) if kept.shape[1] < k.shape[1] else (k, v)
        at = slice(first, first + kept.shape[1])
        self.k[row, :, at], self.v[row, :, at], self.position[row, :, at] = k, v, kept
        for name, values in zip(self.sums, sums, strict=True):
            getattr(self, name)[row, :, at] = values.gather(1, kept)
        self.spare[row] = kept.shape[1]

    def select(self, sums: list[Tensor], size: int) -> Tensor:
        """Positions that stay, in order, [Hk,n]: the sinks, the most important tokens, the newest ones."""
        heads, length = sums[0].shape
        position = torch.arange(length, device=sums[0].device).expand(heads, -1)
        if length <= size:
            return position
        newest = length - self.newest(size)
        importance = self.importance(sums, position, length - 1)[:, self.sinks : newest]
        best = ops.top(importance, size - self.sinks - (length - newest)).sort().values + self.sinks
        return torch.cat([position[:, : self.sinks], best, position[:, newest:]], dim=1)

    def newest(self, size: Tensor | int) -> Tensor | int:
        """How many of `size` tokens are the newest."""
        return self.recent

    def importance(self, sums: list[Tensor], position: Tensor, pos: Tensor | int) -> Tensor:
        """Of the tokens at `position`, fp32, when the newest is at `pos`."""
        return sums[0]

    def merge_prompt(self, row: int, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [Hk,n,D] at positions kept [Hk,n] once the other tokens have gone."""
        each = kept[..., None].expand(-1, -1, k.shape[2])
        return k.gather(1, each), v.gather(1, each)

    # A step

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        live = active[:, None].expand_as(self.spare)
        for buffer, new in ((self.k, k[:, :, 0]), (self.v, v[:, :, 0]), (self.position, pos[:, None])):
            self.put(buffer, self.spare, live, new)
        for name in self.sums:
            self.put(getattr(self, name), self.spare, live, 0.0)
        keys, values, position = (self.read(x) for x in (self.k, self.v, self.position))
        near = self.in_cache(keys, position, pos) if self.past else keys
        weight = ops.weights(q, near, position[:, :, None] < 0)  # [B,Hk,G,n]
        y = (weight.to(values.dtype) @ values).view(q.shape)
        received = torch.where(live[..., None], weight.sum(2), 0.0)
        sums = [self.add(getattr(self, name), received**power) for power, name in enumerate(self.sums, 1)]

        held = (position >= 0).sum(2)  # [B,Hk]
        pos = pos[:, None, None]
        importance = self.importance(sums, position, pos).masked_fill(~self.evictable(position, pos), torch.inf)
        slot, evicts = importance.argmin(2), live & (held > self.sizes())
        self.merge(slot, evicts, keys, values, position, sums[0])
        self.put(self.position, slot, evicts, -1)
        self.spare.copy_(torch.where(evicts, slot, torch.where(live, held, self.spare)))
        return y

    def evictable(self, position: Tensor, pos: Tensor) -> Tensor:
        """Which tokens [B,Hk,n] are neither sinks nor among the newest, when the newest is at `pos` [B,1,1]."""
        newest = self.newest(self.sizes())
        return (position >= self.sinks) & (position <= pos - (newest if isinstance(newest, int) else newest[..., None]))

    def merge(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, position: Tensor, sums: Tensor) -> None:
        """Called before the tokens at slot [B,Hk] are evicted, where `evicts` [B,Hk]; the rest are all slots."""

    def in_cache(self, keys: Tensor, position: Tensor, pos: Tensor) -> Tensor:
        """The keys [B,Hk,n,D], in rows past the model's context as if the held tokens stood side by side up to `pos`.

        No distance then exceeds the cache (StreamingLLM, arXiv 2309.17453, section 3.2). What is stored stays.
        """
        pos = pos[:, None, None]
        rank = position.argsort(2, descending=True).argsort(2)  # 0: the newest
        moves = (position >= 0) & (pos >= self.shape.max_length)
        return ops.turn(keys, torch.where(moves, pos - rank - position, 0), self.rope_speed)

    # The slots

    def sizes(self) -> Tensor | int:
        """Tokens that each row keeps."""
        return self.size

    def add(self, buffer: Tensor, change: Tensor) -> Tensor:
        """Adds change [B,Hk,n] to the slots that are read: what they hold then."""
        return self.read(buffer).add_(change)

    def put(self, buffer: Tensor, slot: Tensor, live: Tensor, new: Tensor | float) -> None:
        """Writes new [B,Hk,...] at slot [B,Hk], where live [B,Hk]."""
        b, h = (torch.arange(n, device=slot.device) for n in slot.shape)
        at = (b[:, None], h, slot)
        buffer[at] = torch.where(live.view(*live.shape, *[1] * (buffer.dim() - 3)), new, buffer[at])

    def reset(self, row: int) -> None:
        super().reset(row)
        self.position[row] = -1

    def fit(self, length: int, new: int) -> None:
        self.past = length > self.shape.max_length
        super().fit(length, new)

    def step_bytes(self, length: int) -> tuple[int, int]:
        unit = self.shape.unit_bytes + 8 + 4 * len(self.sums)
        return self.shape.n_kv_head * self.reads(length, 0) * unit, 0


def allocate_tokens(owner: Buffers, slots: int, sums: tuple[str, ...]) -> None:
    """Allocates, for the token in each slot, its sums and its position in the sequence (-1: the slot is empty)."""
    size, beyond = (owner.shape.n_kv_head, slots), "sums and positions"
    for name in sums:
        owner.allocate(name, *size, dtype=torch.float32, beyond=beyond)
    owner.allocate("position", *size, dtype=torch.int64, fill=-1, beyond=beyond)


class RoCo(H2O):
    sums = ("received", "squares")

    def __init__(self, shape: Shape, size: int, sinks: int):
        super().__init__(shape, size, sinks, min(10, size // 2))
        self.varied = self.least = min((3 * size + 5) // 10, size - sinks - self.recent)  # 30%, rounded half up

    def importance(self, sums: list[Tensor], position: Tensor, pos: Tensor | int) -> Tensor:
        """The mean, and without bound for the tokens that vary most."""
        visits = pos - position + 1
        mean = sums[0] / visits
        deviation = (sums[1] / visits - mean**2).clamp(min=0).sqrt()
        varied = ops.top(deviation.masked_fill(~self.evictable(position, pos), -1.0), self.varied)
        return mean.scatter(-1, varied, torch.inf)


class CaM(H2O):
    def __init__(self, shape: Shape, layer: int, size: int, spread: int):
        super().__init__(shape, size, 0, size // 2)
        self.layer, self.spread = layer, spread
        self.follow = self.least = min(spread, size)

    def merge(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, position: Tensor, sums: Tensor) -> None:
        at = position.gather(2, slot[..., None])  # [B,Hk,1]
        later = position.masked_fill(position <= at, torch.iinfo(torch.int64).max)
        nearest = later.topk(self.follow, largest=False)
        real = nearest.values < torch.iinfo(torch.int64).max  # [B,Hk,m]
        mean = torch.where(real, sums.gather(2, nearest.indices), 0.0).sum(2) / real.sum(2)
        spreads = evicts & (self.chance(at)[..., 0] < sums.gather(2, slot[..., None])[..., 0] / mean)
        each = (-1, -1, -1, values.shape[3])
        value = values.gather(2, slot[..., None, None].expand(each)) / self.spread  # [B,Hk,1,D]
        values.scatter_add_(2, nearest.indices[..., None].expand(each),
                            torch.where((spreads[..., None] & real)[..., None], value, 0.0))  # fmt: skip

    def chance(self, position: Tensor) -> Tensor:
        """A number in [0, 1) for the token of each KV head at position [..., Hk, n], always the same one."""
        head = torch.arange(position.shape[-2], device=position.device)[:, None]
        return ops.hashed(ops.hashed(position + ops.hashed(head + 4096 * self.layer))) / 2.0**32


@dataclass(frozen=True)
class H2OMethod(Method):
    help = "recent tokens, and those that got most attention"

    def minimum(self, shape: Shape) -> int:
        return 2

    def build(self, shape: Shape, budget: int) -> list[KV]:
        return [H2O(shape, budget, 0, budget // 2) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class RoCoMethod(Method):
    help = "the same by its mean and deviation"
    sinks: int = SINKS

    def minimum(self, shape: Shape) -> int:
        return 2 * self.sinks + 2

    def build(self, shape: Shape, budget: int) -> list[KV]:
        return [RoCo(shape, budget, self.sinks) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class CaMMethod(H2OMethod):
    help = "h2o that spreads the values it drops"
    spread: int = option(32, "kept tokens among which a value is divided", min=1)

    def build(self, shape: Shape, budget: int) -> list[KV]:
        return [CaM(shape, layer, budget, self.spread) for layer in range(shape.n_layer)]
