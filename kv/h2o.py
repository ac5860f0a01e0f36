"""h2o, roco, cam: a fixed number of tokens a KV head; when another comes the one that mattered least goes.

What a token matters is the attention that it has had from all queries so far, summed over the group.

- h2o (Zhang et al., arXiv 2306.14048): the newest half of the budget stays, and of the rest the highest sums.
- roco (Ren & Zhu, arXiv 2402.06262): the mean of that attention in place of the sum, over the queries that could see
  the token. Protected are the sinks, the newest 10 (of small budgets the newest half) and, with 30% of the budget, the
  tokens whose attention has the highest standard deviation.
- cam (Zhang et al., ICML 2024): h2o, but a step spreads the value of the token that it evicts over the next ones that
  are kept, with a probability that grows with what the token mattered. The prompt's end spreads none: thousands of
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

    One more slot is spare: there the newest token goes; when another then leaves, its slot is the next spare one.
    """

    endless = True
    past = False  # whether a row may have left the model's context
    observed = None  # between `attend_prompt` and `keep`: see ops.observed_attention
    known = ("score",)  # buffers of what is known of each token: sums of powers of the attention that it has had

    def __init__(self, shape: Shape, size: int, sinks: int, recent: int):
        super().__init__(shape)
        self.size, self.sinks, self.recent = size, sinks, recent
        allocate_known(self, size + 2, self.known)  # the last one is never used: see ops.span
        self.allocate("spare", shape.n_kv_head, dtype=torch.int64)  # the slot of the next token
        self.allocate_speeds()
        self.span = ops.span(None, size + 1, size + 1, shape.device)

    # The prompt

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, *self.observed = ops.observed_attention(q, k, v, len(self.known))
        return y

    def skip_prompt(self, q: Tensor, k: Tensor) -> None:
        known = [torch.rand(k.shape[1:3], device=k.device) for _ in self.known]
        self.observed = known, torch.rand(q.shape[1], device=k.device)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        (known, _), self.observed = self.observed, None
        kept, known, keys, values = self.compress(row, known, k[0], v[0], self.size)
        self.place[row] = -1
        self.fill(row, slice(0, kept.shape[1]), kept, known, keys, values)

    def fill(self, row: int, at: slice, kept: Tensor, known: list[Tensor], k: Tensor, v: Tensor) -> None:
        """Writes what stays of a prompt into the slots `at`."""
        self.k[row, :, at], self.v[row, :, at], self.place[row, :, at] = k, v, kept
        for name, values in zip(self.known, known, strict=True):
            getattr(self, name)[row, :, at] = values
        self.spare[row] = kept.shape[1]

    def compress(self, row: int, known: list[Tensor], k: Tensor, v: Tensor, size: int) -> tuple:
        """What stays of a prompt, each of `known` [Hk,T], k and v [Hk,T,D]: places, then the same of n <= size."""
        if k.shape[1] <= size:
            return torch.arange(k.shape[1], device=k.device).expand(k.shape[0], -1), known, k, v
        kept = self.choose(known, size)
        return kept, [values.gather(1, kept) for values in known], *self.absorb(row, known[0], k, v, kept)

    def choose(self, known: list[Tensor], size: int) -> Tensor:
        """Places that stay, [Hk,size] in order. D2O's Equations 7 and 8."""
        heads, length = known[0].shape
        recent = self.newest(size)
        place = torch.arange(length, device=known[0].device).expand(heads, -1)
        count = size - self.sinks - recent
        merit = self.merit(known, place, length - 1)[:, self.sinks : length - recent]
        best = ops.top(merit, count).sort().values + self.sinks
        return torch.cat([place[:, : self.sinks], best, place[:, length - recent :]], dim=1)

    def newest(self, size: Tensor | int) -> Tensor | int:
        """How many of `size` tokens are the newest."""
        return self.recent

    def merit(self, known: list[Tensor], place: Tensor, pos: Tensor | int) -> Tensor:
        """What the tokens at `place` matter, fp32, when the newest is at `pos`."""
        return known[0]

    def exposed(self, place: Tensor, pos: Tensor | int, recent: Tensor | int) -> Tensor:
        """Which tokens are neither sinks nor recent, and so may have to leave."""
        return (place >= self.sinks) & (place <= pos - recent)

    def absorb(self, row: int, score: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [Hk,n,D] of the kept places [Hk,n] once the others have gone."""
        each = kept[..., None].expand(-1, -1, k.shape[2])
        return k.gather(1, each), v.gather(1, each)

    # A step

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        live = active[:, None].expand_as(self.spare)
        for buffer, new in ((self.k, k[:, :, 0]), (self.v, v[:, :, 0]), (self.place, pos[:, None])):
            self.put(buffer, self.spare, live, new)
        for name in self.known:
            self.put(getattr(self, name), self.spare, live, 0.0)
        keys, values, place = (self.read(x) for x in (self.k, self.v, self.place))
        near = self.in_cache(keys, place, pos) if self.past else keys
        weight = ops.weights(q, near, place[:, :, None] < 0)
        y = (weight.to(values.dtype) @ values).view(q.shape)
        seen = torch.where(live[..., None], weight.sum(2), 0.0)  # [B,Hk,n]
        known = [self.add(getattr(self, name), seen**power) for power, name in enumerate(self.known, 1)]
        held, size = (place >= 0).sum(2), self.sizes()  # [B,Hk], and what broadcasts to it
        pos, recent = pos[:, None, None], self.newest(size)
        recent = recent if isinstance(recent, int) else recent[..., None]
        merit = self.merit(known, place, pos)
        leaves = merit.masked_fill(~self.exposed(place, pos, recent), torch.inf).argmin(2)  # slots, [B,Hk]
        evicts = live & (held > size)
        self.leave(leaves, evicts, keys, values, place, known[0])
        self.put(self.place, leaves, evicts, -1)
        self.spare.copy_(torch.where(evicts, leaves, torch.where(live, held, self.spare)))
        return y

    def in_cache(self, keys: Tensor, place: Tensor, pos: Tensor) -> Tensor:
        """The keys [B,Hk,n,D], in rows past the model's context as if the held tokens stood side by side up to `pos`.

        No distance then exceeds the cache (StreamingLLM, arXiv 2309.17453, section 3.2). What is stored stays.
        """
        pos = pos[:, None, None]
        rank = place.argsort(2, descending=True).argsort(2)  # 0: the newest
        moves = (place >= 0) & (pos >= self.shape.max_length)
        return ops.turn(keys, torch.where(moves, pos - rank - place, 0), self.rope_speed)

    def leave(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, place: Tensor, score: Tensor) -> None:
        """Called before the tokens at slot [B,Hk] go, where `evicts` [B,Hk]; the rest are all slots, [B,Hk,n,...]."""

    def sizes(self) -> Tensor | int:
        """Tokens that each row keeps."""
        return self.size

    def read(self, buffer: Tensor) -> Tensor:
        """The first slots, as many as the longest row may fill: [B,Hk,n,...]"""
        return buffer.narrow(2, 0, self.span.shape[0])

    def add(self, buffer: Tensor, change: Tensor) -> Tensor:
        """Adds change [B,Hk,n] to the first slots: what they hold then."""
        return self.read(buffer).add_(change)

    def put(self, buffer: Tensor, slot: Tensor, live: Tensor, new: Tensor | float) -> None:
        """Writes new [B,Hk,...] at slot [B,Hk], where live [B,Hk]."""
        b, h = (torch.arange(n, device=slot.device) for n in slot.shape)
        at = (b[:, None], h, slot)
        buffer[at] = torch.where(live.view(*live.shape, *[1] * (buffer.dim() - 3)), new, buffer[at])

    def reset(self, row: int) -> None:
        self.place[row], self.spare[row] = -1, 0

    def fit(self, length: int, new: int) -> None:
        self.past = length > self.shape.max_length
        self.span = ops.span(self.span, min(length, self.size + 1), self.size + 1, self.shape.device)

    def step_bytes(self, length: int) -> tuple[int, int]:
        slots = min(length, self.size + 1)
        return self.shape.n_kv_head * slots * (self.shape.unit_bytes + 8 + 4 * len(self.known)), 0

    def overhead(self) -> dict[str, int]:
        state = sum(getattr(self, name).nbytes for name in (*self.known, "place", "spare", "rope_speed"))
        return {"spare slot": self.shape.slot_bytes, "slot past the end": self.shape.slot_bytes,
                "scores and places": state}  # fmt: skip


def allocate_known(owner: Buffers, count: int, known: tuple[str, ...]) -> None:
    """So many slots: keys, values, what is known of their tokens, and their places in the text, -1: none."""
    size = (owner.shape.n_kv_head, count)
    for name in ("k", "v"):
        owner.allocate(name, *size, owner.shape.head_dim)
    for name in known:
        owner.allocate(name, *size, dtype=torch.float32)
    owner.allocate("place", *size, dtype=torch.int64, fill=-1)


class RoCo(H2O):
    known = ("score", "squares")

    def __init__(self, shape: Shape, size: int, sinks: int):
        super().__init__(shape, size, sinks, min(10, size // 2))
        self.varied = min((3 * size + 5) // 10, size - sinks - self.recent)  # 30%, rounded half up

    def fit(self, length: int, new: int) -> None:
        super().fit(max(length, self.varied), new)  # `merit` chooses so many of the slots that it reads

    def merit(self, known: list[Tensor], place: Tensor, pos: Tensor | int) -> Tensor:
        """The mean, and without bound for the tokens that vary most."""
        visits = pos - place + 1
        mean = known[0] / visits
        deviation = (known[1] / visits - mean**2).clamp(min=0).sqrt()
        varied = ops.top(deviation.masked_fill(~self.exposed(place, pos, self.recent), -1.0), self.varied)
        return mean.scatter(-1, varied, torch.inf)


class CaM(H2O):
    def __init__(self, shape: Shape, layer: int, size: int, spread: int):
        super().__init__(shape, size, 0, size // 2)
        self.layer, self.spread, self.follow = layer, spread, min(spread, size)

    def fit(self, length: int, new: int) -> None:
        super().fit(max(length, self.follow), new)

    def chance(self, place: Tensor) -> Tensor:
        """A number in [0, 1) for the token of each KV head at place [..., Hk, n], always the same one."""
        head = torch.arange(place.shape[-2], device=place.device)[:, None]
        return ops.hashed(ops.hashed(place + ops.hashed(head + 4096 * self.layer))) / 2.0**32

    def leave(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, place: Tensor, score: Tensor) -> None:
        at = place.gather(2, slot[..., None])  # [B,Hk,1]
        later = place.masked_fill(place <= at, torch.iinfo(torch.int64).max)
        nearest = later.topk(self.follow, largest=False)
        real = nearest.values < torch.iinfo(torch.int64).max  # [B,Hk,m]
        mean = torch.where(real, score.gather(2, nearest.indices), 0.0).sum(2) / real.sum(2)
        spreads = evicts & (self.chance(at)[..., 0] < score.gather(2, slot[..., None])[..., 0] / mean)
        each = (-1, -1, -1, values.shape[3])
        value = values.gather(2, slot[..., None, None].expand(each)) / self.spread  # [B,Hk,1,D]
        values.scatter_add_(2, nearest.indices[..., None].expand(each),
                            torch.where((spreads[..., None] & real)[..., None], value, 0.0))  # fmt: skip


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
