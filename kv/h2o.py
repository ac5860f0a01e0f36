"""h2o, roco, cam: each KV head keeps a fixed number of tokens and evicts the one with the least accumulated attention.

A token's importance is the attention it has received from all queries, summed over the query heads of a group.

- h2o (Zhang et al., arXiv 2306.14048): keeps the newest half of the budget and, from the other tokens, those with the
  highest sums.
- roco (Ren & Zhu, arXiv 2402.06262): importance is the mean of that attention over the queries that could see the
  token. Protected are the sinks, the newest 10 tokens (for small budgets, the newest half) and the tokens whose
  attention has the highest standard deviation, 30% of the budget.
- cam (Zhang et al., ICML 2024): h2o, but a step spreads the evicted token's value over the next kept ones, with a
  probability that grows with the token's importance. Eviction at the prompt spreads nothing: thousands of values would
  go into a few hundred.

Memory and traffic: the budget, and a slot for the newest token. Generation is unbounded: past the model's context, RoPE
positions count kept tokens instead of the text's (StreamingLLM, arXiv 2309.17453, section 3.2).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV, Buffers, Held
from kv.method import Method, Shape, option
from kv.parts import attention, inductor, ops
from kv.streaming import SINKS


class H2O(KV):
    """Keeps `size` tokens per KV head, including the first `sinks` and the newest `recent`, in slots in any order.

    A new token goes to the spare slot. If it evicts a token, that token's slot becomes the spare slot.
    """

    endless = True
    sums = ("received",)  # names of buffers: each token's received attention, then its squares, summed over queries

    def __init__(self, shape: Shape, size: int, sinks: int, recent: int):
        super().__init__(shape)
        self.size, self.sinks, self.recent = size, sinks, recent
        self.allocate_slots(size + 1)
        allocate_tokens(self, self.slots + 1, self.sums)
        self.allocate_state("spare", shape.n_kv_head)  # the slot of the next token
        self.allocate_speeds()
        self.beyond["spare slot"] = shape.slot_bytes

    # The prompt

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, *self.observed = attention.observed_attention(q, k, v, len(self.sums))
        return y

    def skip_prompt(self, q: Tensor, k: Tensor) -> None:
        sums = [torch.rand(k.shape[1:3], device=k.device) for _ in self.sums]
        self.observed = sums, torch.rand(q.shape[1], device=k.device)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        (sums, _), self.observed = self.observed, None
        self.compress(row, sums, Held.new(k[0], v[0]), prompt=True)

    def compress(self, row: int, sums: list[Tensor], tokens: Held, prompt: bool) -> None:
        """Stores what stays of N tokens, a prompt's or those of an extended row; each of `sums` is [Hk,N]."""
        region = self.region_of(row)
        kept = self.select(sums, tokens.position, region.stop - region.start - 1)
        k, v, position = tokens
        if kept.shape[1] < position.shape[1]:
            k, v = self.kept_vectors(row, tokens, kept, sums, prompt)
        at = slice(region.start, region.start + kept.shape[1])
        self.position[row, :, region] = -1
        self.k[row, :, at], self.v[row, :, at] = k, v
        self.position[row, :, at] = position.gather(1, kept)
        for name, values in zip(self.sums, sums, strict=True):
            getattr(self, name)[row, :, at] = values.gather(1, kept)
        self.spare[row] = kept.shape[1]

    def select(self, sums: list[Tensor], position: Tensor, size: int) -> Tensor:
        """Which of N tokens at position [Hk,N], ascending, stay: sinks, the most important, the newest: [Hk,n]."""
        index = torch.arange(position.shape[1], device=position.device).expand_as(position)
        if position.shape[1] <= size:
            return index
        between = slice(self.sinks, position.shape[1] - self.newest(size))
        importance = self.importance(sums, position, position[:, -1:])[:, between]
        best = ops.top(importance, size - self.sinks - self.newest(size)).sort().values + self.sinks
        return torch.cat([index[:, : self.sinks], best, index[:, between.stop :]], dim=1)

    def newest(self, size: Tensor | int) -> Tensor | int:
        """How many of the `size` kept tokens are reserved for the newest."""
        return self.recent

    def importance(self, sums: list[Tensor], position: Tensor, pos: Tensor | int) -> Tensor:
        """The importance, fp32, of the tokens at `position`; the newest token is at `pos`."""
        return sums[0]

    def kept_vectors(
        self, row: int, tokens: Held, kept: Tensor, sums: list[Tensor], prompt: bool
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [Hk,n,D] of the tokens kept [Hk,n]; cam and d2o merge evicted tokens into them."""
        each = kept[..., None].expand(-1, -1, tokens.k.shape[2])
        return tokens.k.gather(1, each), tokens.v.gather(1, each)

    # More tokens

    def held(self, row: int, length: int) -> Held:
        slot = self.slots_by_position(row)
        each = slot[..., None].expand(-1, -1, self.k.shape[3])
        return Held(self.k[row].gather(1, each), self.v[row].gather(1, each), self.position[row].gather(1, slot))

    def views(self, row: int, length: int) -> dict[str, Tensor]:
        region = self.region_of(row)
        used = slice(region.start, min(region.start + length, region.stop))
        return {name: getattr(self, name)[row, :, used] for name in ("k", "v", "position", *self.sums)}

    def slots_by_position(self, row: int) -> Tensor:
        """The slots [Hk,n] of the row's tokens, oldest first; every head holds as many."""
        region = self.region_of(row)
        position = self.position[row, :, region]
        return position.argsort(1)[:, position.shape[1] - int((position[0] >= 0).sum()) :] + region.start

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """Attends to the row's tokens and to the new ones, and then evicts as many as a prompt does."""
        slot, old, n = self.slots_by_position(row), self.held(row, pos), k.shape[2]
        keys = old.k
        if pos + n > self.shape.max_length:
            last = torch.tensor([pos - 1], device=k.device)
            keys = self.in_cache(keys[None], old.position[None], last, self.rope_speed[row, None])[0]
        keys, values = (torch.cat([x, new[0]], dim=1)[None] for x, new in ((keys, k), (old.v, v)))
        y = attention.suffix_attention(q, keys, values)
        received, _ = attention.column_sums(q, keys, len(self.sums))
        for name, total in zip(self.sums, received, strict=True):
            total[:, : slot.shape[1]] += getattr(self, name)[row].gather(1, slot)
        tokens = Held(*(torch.cat(pair, dim=1) for pair in zip(old, Held.new(k[0], v[0], pos), strict=True)))
        self.compress(row, received, tokens, prompt=False)
        return y

    # A step

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        live = active[:, None].expand_as(self.spare)
        for buffer, new in ((self.k, k[:, :, 0]), (self.v, v[:, :, 0]), (self.position, pos[:, None])):
            self.put(buffer, self.spare, live, new)
        for name in self.sums:
            self.put(getattr(self, name), self.spare, live, 0.0)
        keys, values, position = (self.read(x) for x in (self.k, self.v, self.position))
        turned = keys
        if self.past_context:
            past = (pos >= self.shape.max_length)[:, None, None, None]
            turned = torch.where(past, self.in_cache(keys, position, pos, self.rope_speed), keys)
        weight = ops.weights(q, turned, position[:, :, None] < 0)  # [B,Hk,G,n]
        y = (weight.to(values.dtype) @ values).view(q.shape)
        received = torch.where(live[..., None], weight.sum(2), 0.0)
        sums = [self.add(getattr(self, name), received**power) for power, name in enumerate(self.sums, 1)]  # roco: 1, 2

        held = (position >= 0).sum(2)  # [B,Hk]
        pos = pos[:, None, None]
        importance = self.importance(sums, position, pos).masked_fill(~self.evictable(position, pos), torch.inf)
        slot, evicts = importance.argmin(2), live & (held[..., None] > self.sizes())[..., 0]
        self.merge(slot, evicts, keys, values, position, sums[0])
        self.put(self.position, slot, evicts, -1)
        self.spare.copy_(torch.where(evicts, slot, torch.where(live, held, self.spare)))
        return y

    def evictable(self, position: Tensor, pos: Tensor) -> Tensor:
        """Which tokens [B,Hk,n] are neither sinks nor among the newest; the newest token is at `pos` [B,1,1]."""
        return (position >= self.sinks) & (position <= pos - self.newest(self.sizes()))

    def merge(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, position: Tensor, sums: Tensor) -> None:
        """cam and d2o: merges the tokens at slot [B,Hk] into kept ones, where evicts [B,Hk].

        The other arguments cover all slots that the step reads.
        """

    def in_cache(self, keys: Tensor, position: Tensor, last: Tensor, speed: Tensor) -> Tensor:
        """RoPE turns the keys [B,Hk,n,D] to adjacent positions, of which the newest is `last` [B].

        Past the model's context, no distance then exceeds the cache and the new tokens. Stored keys do not change.
        """
        rank = position.argsort(2, descending=True).argsort(2)  # 0: the newest
        return ops.turn(keys, torch.where(position >= 0, last[:, None, None] - rank - position, 0), speed)

    # The slots

    def sizes(self) -> Tensor | int:
        """Tokens that each row keeps, [B,1,1] if they differ."""
        return self.size

    def region_of(self, row: int) -> slice:
        """A row's slots: one for each token that it keeps, and the spare one."""
        return slice(0, self.slots)

    def add(self, buffer: Tensor, change: Tensor) -> Tensor:
        """Adds change [B,Hk,n] to the slots that are read; returns their new contents."""
        held = self.read(buffer)
        new = inductor.realized(held + change)  # else torch 2.11 computes it again from slots that have changed
        held.copy_(new)
        return new

    def put(self, buffer: Tensor, slot: Tensor, live: Tensor, new: Tensor | float) -> None:
        """Writes new [B,Hk,...] at slot [B,Hk], where live [B,Hk]."""
        b, h = (torch.arange(n, device=slot.device) for n in slot.shape)
        at = (b[:, None], h, slot)
        buffer[at] = torch.where(live.view(*live.shape, *[1] * (buffer.dim() - 3)), new, buffer[at])

    def reset(self, row: int) -> None:
        super().reset(row)
        self.position[row] = -1

    def step_bytes(self, length: int) -> tuple[int, int]:
        unit = self.shape.unit_bytes + 8 + 4 * len(self.sums)
        return self.shape.n_kv_head * self.reads(length, 0) * unit, 0


def allocate_tokens(owner: Buffers, slots: int, sums: tuple[str, ...]) -> None:
    """Allocates each slot's sums and the position of its token in the sequence (-1: the slot is empty)."""
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
        """The mean attention; infinite for the `varied` evictable tokens with the highest standard deviation."""
        visits = pos - position + 1
        mean = sums[0] / visits
        deviation = (sums[1] / visits - mean**2).clamp(min=0).sqrt()
        protected = ops.top(deviation.masked_fill(~self.evictable(position, pos), -1.0), self.varied)
        return mean.scatter(-1, protected, torch.inf)


class CaM(H2O):
    """Adds the evicted value / m to the next m kept ones, with probability clip(A / mean A, 0, 1).

    A is the evicted token's sum, mean A that of the m kept ones; `spread` is m.
    """

    def __init__(self, shape: Shape, layer: int, size: int, spread: int):
        super().__init__(shape, size, 0, size // 2)
        self.layer, self.spread = layer, spread
        self.follow = self.least = min(spread, size)

    def merge(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, position: Tensor, sums: Tensor) -> None:
        evicted = inductor.realized(
            position.gather(2, slot[..., None])
        )  # [B,Hk,1]; else Triton's code cannot be compiled
        later = position.masked_fill(position <= evicted, torch.iinfo(torch.int64).max)
        following = later.topk(self.follow, largest=False)  # the next m kept tokens
        real = following.values < torch.iinfo(torch.int64).max  # [B,Hk,m]
        mean = torch.where(real, sums.gather(2, following.indices), 0.0).sum(2) / real.sum(2)  # NaN if nothing evicts
        ratio = sums.gather(2, slot[..., None])[..., 0] / mean
        spreads = evicts & (self.chance(evicted)[..., 0] < ratio)
        each = (-1, -1, -1, values.shape[3])
        value = values.gather(2, slot[..., None, None].expand(each)) / self.spread  # [B,Hk,1,D]
        values.scatter_add_(
            2,
            following.indices[..., None].expand(each),  # values is a view of the cache
            torch.where((spreads[..., None] & real)[..., None], value, 0.0),
        )

    def kept_vectors(
        self, row: int, tokens: Held, kept: Tensor, sums: list[Tensor], prompt: bool
    ) -> tuple[Tensor, Tensor]:
        """`merge` for all tokens that an extension evicts."""
        keys, values = super().kept_vectors(row, tokens, kept, sums, prompt)
        if prompt:
            return keys, values
        stays = torch.zeros_like(tokens.position, dtype=torch.bool).scatter(1, kept, True)
        chance = self.chance(tokens.position)
        for head, evicted in enumerate((~stay).nonzero().flatten() for stay in stays):
            following = torch.searchsorted(kept[head], evicted)[:, None] + torch.arange(self.follow, device=kept.device)
            real = following < kept.shape[1]
            following = following.clamp(max=kept.shape[1] - 1)
            mean = torch.where(real, sums[0][head, kept[head, following]], 0.0).sum(1) / real.sum(1)
            spreads = real & (chance[head, evicted] < sums[0][head, evicted] / mean)[:, None]
            value = (tokens.v[head, evicted] / self.spread)[:, None].expand(-1, self.follow, -1)
            values[head].index_add_(0, following[spreads], value[spreads])
        return keys, values

    def chance(self, position: Tensor) -> Tensor:
        """A pseudorandom number in [0, 1) per token at position [...,Hk,n], fixed by layer, KV head and position."""
        heads = position.shape[-2]
        head = self.shape.ranks.rank * heads + torch.arange(heads, device=position.device)[:, None]
        return ops.hashed(ops.hashed(position + ops.hashed(head + 4096 * self.layer))) / 2.0**32


@dataclass(frozen=True)
class H2OMethod(Method):
    help = "recent tokens, and those that received the most attention"

    def minimum(self, shape: Shape) -> int:
        return 2

    def build(self, shape: Shape, budget: int) -> list[KV]:
        return [H2O(shape, budget, 0, budget // 2) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class RoCoMethod(Method):
    help = "h2o by the mean and the deviation of the attention"
    sinks: int = SINKS

    def minimum(self, shape: Shape) -> int:
        """The sinks, the newest tokens, and one that can be evicted."""
        return min(2 * self.sinks + 2, self.sinks + 11)

    def build(self, shape: Shape, budget: int) -> list[KV]:
        return [RoCo(shape, budget, self.sinks) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class CaMMethod(H2OMethod):
    help = "h2o that spreads evicted values over kept ones"
    spread: int = option(32, "kept tokens among which an evicted value is divided", min=1)

    def build(self, shape: Shape, budget: int) -> list[KV]:
        return [CaM(shape, layer, budget, self.spread) for layer in range(shape.n_layer)]
