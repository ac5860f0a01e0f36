"""The base of methods that hold a fixed number of tokens and evict the least important one whenever a new one comes."""

import torch
from torch import Tensor

from kv.base import KV, Held, Views
from kv.method import Plan
from kv.parts import attention, inductor, ops
from kv.parts.buffers import Buffers


class Slots(Buffers):
    """Slots for `count` tokens per row and KV head: K, V, the position in the text (-1: empty), and `sums`."""

    def __init__(self, plan: Plan, count: int, sums: tuple[str, ...]):
        super().__init__(plan)
        for name in ("k", "v"):
            self.allocate(name, plan.n_kv_head, count, plan.head_dim)
        for name in sums:
            self.allocate(name, plan.n_kv_head, count, dtype=torch.float32)
        self.allocate("position", plan.n_kv_head, count, dtype=torch.int64, fill=-1)


class Evicting(KV):
    """Keeps `size` tokens per KV head, including the first `sinks` and the newest `recent`, in slots in any order.

    With recent=0 even the newest token may go. A new token goes to the spare slot. If it evicts a token, that token's
    slot becomes the spare slot. `importance` ranks the tokens at every step, and those of a prompt by its last query:
    a method that needs only the newest query's attention writes nothing else. A method that accumulates statistics of
    each token names them in `sums` and also writes `rank`, for prompts and extensions.

    Generation is unbounded: past the model's context, RoPE positions count kept tokens instead of the text's.
    """

    extends_alike = False  # an extension evicts its tokens at once, not one by one
    sums: tuple[str, ...] = ()  # names of fp32 buffers, a number for each slot, which move with the tokens

    def __init__(self, plan: Plan, size: int, sinks: int = 0, recent: int = 1, slots: Slots | None = None):
        """slots: those of other layers too; the layer then allocates `allotted`, the tokens that each row keeps."""
        super().__init__(plan)
        self.sinks, self.recent = sinks, recent
        self.endless = size < plan.planned
        self.slots = size + 1  # one is spare
        self.read_slots = inductor.symbol(self.slots, plan.device)
        for name, buffer in (slots or Slots(plan, self.slots + 1, self.sums)).named_buffers():
            self.hold(name, buffer)
        if slots is None:
            self.allocate_size("allotted", size)
        self.allocate_state("spare", plan.n_kv_head)  # the slot of the next token
        self.hold("inv_freq", ops.inv_freq(plan))
        self.more_bytes = 8 + 4 * len(self.sums)

    # What a method implements

    def importance(self, weight: Tensor, held: Held, pos: Tensor, active: Tensor) -> Tensor:
        """The importance [B,Hk,n], fp32, of tokens `held` [B,Hk,n,...], from the newest query's attention [B,Hk,G,n].

        An empty slot's position is -1; the query is at pos [B,1,1]. Runs once a step, so `sums` grow here.
        """
        raise NotImplementedError

    def rank(self, row: int, q: Tensor, k: Tensor, tokens: Held) -> tuple[Tensor, list[Tensor]]:
        """The importance [Hk,N] of `tokens` [Hk,N,...], by ascending position, and their `sums`, each [Hk,N].

        They are the row's, if any, then n new ones with queries q [1,Hq,n,D], which attend to keys k [1,Hk,N,D].
        """
        weight = ops.weights(q[:, :, -1:], k, torch.zeros(1, dtype=torch.bool, device=k.device))
        active = torch.ones(1, dtype=torch.bool, device=k.device)
        held = Held(*(x[None] for x in tokens))
        return self.importance(weight, held, tokens.position[:1, -1:, None], active)[0], []

    def newest(self, kept: Tensor | int) -> Tensor | int:
        """How many of `kept` tokens are reserved for the newest."""
        return self.recent

    def merge(self, slot: Tensor, evicts: Tensor, held: Held, importance: Tensor) -> None:
        """Merges the tokens at slot [B,Hk], where evicts [B,Hk], into others of all `held` [B,Hk,n,...]."""

    def merge_many(self, row: int, tokens: Held, kept: Tensor, stay: Held, sums: list[Tensor], prompt: bool) -> None:
        """Merges those of `tokens`, a prompt's or an extended row's, whose index is not in kept [Hk,n] into `stay`."""

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        tokens = Held.new(k[0], v[0])
        self.compress(row, tokens, *self.rank(row, q, k, tokens))

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        return self.extend(row, q, k, v, pos, prompt=True)

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int, prompt: bool = False) -> Tensor:
        """Attends to the row's tokens and to the new ones, and then evicts as many as a prompt does."""
        old = self.held(row, pos)
        tokens = old.followed_by(k[0], v[0], pos)
        keys = tokens.k[None]
        if pos + k.shape[2] > self.plan.max_length:
            last = torch.tensor([pos - 1], device=k.device)
            turned = self.side_by_side(old.k[None], old.position[None], last, self.inv_freq[row, None])
            keys = torch.cat([turned, k], dim=2)
        y = attention.suffix_attention(q, keys, tokens.v[None])
        self.compress(row, tokens, *self.rank(row, q, keys, tokens), prompt)
        return y

    def compress(self, row: int, tokens: Held, importance: Tensor, sums: list[Tensor], prompt: bool = True) -> None:
        """Stores what stays of N tokens, a prompt's or those of an extended row: the other tensors are [Hk,N]."""
        region = self.region_of(row)
        size = region.stop - region.start - 1
        kept, stay = select(importance, size, self.sinks, self.newest(size)), tokens
        if kept.shape[1] < tokens.k.shape[1]:
            stay = at(tokens, kept)
            self.merge_many(row, tokens, kept, stay, sums, prompt)
        filled = slice(region.start, region.start + kept.shape[1])
        self.position[row, :, region] = -1
        self.k[row, :, filled], self.v[row, :, filled], self.position[row, :, filled] = stay
        for name, values in zip(self.sums, sums, strict=True):
            getattr(self, name)[row, :, filled] = values.gather(1, kept)
        self.spare[row] = kept.shape[1]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        writes = active[:, None].expand_as(self.spare)
        for buffer, new in ((self.k, k[:, :, 0]), (self.v, v[:, :, 0]), (self.position, pos[:, None])):
            self.put(buffer, self.spare, writes, new)
        for name in self.sums:
            self.put(getattr(self, name), self.spare, writes, 0.0)
        keys, values, position = (self.read(x) for x in (self.k, self.v, self.position))
        turned = keys
        if self.past_context:
            past = (pos >= self.plan.max_length)[:, None, None, None]
            turned = torch.where(past, self.side_by_side(keys, position, pos, self.inv_freq), keys)
        weight = ops.weights(q, turned, position[:, :, None] < 0)  # [B,Hk,G,n]
        y = (weight.to(values.dtype) @ values).view(q.shape)

        held, count = Held(keys, values, position), (position >= 0).sum(2)  # [B,Hk]
        importance = self.importance(weight, held, pos[:, None, None], active)
        evictable = self.evictable(position, pos[:, None, None], self.sizes())
        slot = importance.masked_fill(~evictable, torch.inf).argmin(2)
        evicts = writes & (count[..., None] > self.sizes())[..., 0]
        self.merge(slot, evicts, held, importance)
        self.put(self.position, slot, evicts, -1)
        self.spare.copy_(torch.where(evicts, slot, torch.where(writes, count, self.spare)))
        return y

    def evictable(self, position: Tensor, pos: Tensor, size: Tensor | int) -> Tensor:
        """Which tokens [B,Hk,n] are neither sinks nor among the newest; the newest token is at `pos` [B,1,1]."""
        return (position >= self.sinks) & (position <= pos - self.newest(size))

    def side_by_side(self, keys: Tensor, position: Tensor, last: Tensor, inv_freq: Tensor) -> Tensor:
        """RoPE turns the keys [B,Hk,n,D] to adjacent positions, of which the newest is `last` [B].

        Past the model's context, no distance then exceeds the cache and the new tokens. Stored keys do not change.
        """
        rank = position.argsort(2, descending=True).argsort(2)  # 0: the newest
        return ops.rerotate(keys, torch.where(position >= 0, last[:, None, None] - rank - position, 0), inv_freq)

    def sizes(self) -> Tensor | int:
        """Tokens that each row keeps, [B,1,1] if they differ."""
        return self.allotted if isinstance(self.allotted, int) else self.allotted[:, None, None]

    def region_of(self, row: int) -> slice:
        """A row's slots: one for each token that it keeps, and the spare one."""
        return slice(0, self.size_of("allotted", row) + 1)

    def add(self, buffer: Tensor, change: Tensor) -> Tensor:
        """Adds change [B,Hk,n] to the slots that are read; returns their new contents."""
        old = self.read(buffer)
        new = inductor.realized(old + change)  # else torch 2.11 computes it again from slots that have changed
        old.copy_(new)
        return new

    def put(self, buffer: Tensor, slot: Tensor, writes: Tensor, new: Tensor | float) -> None:
        """Writes new [B,Hk,...] at slot [B,Hk], where writes [B,Hk]."""
        b, h = (torch.arange(n, device=slot.device) for n in slot.shape)
        where = b[:, None], h, slot
        buffer[where] = torch.where(writes.view(*writes.shape, *[1] * (buffer.dim() - 3)), new, buffer[where])

    def slots_by_position(self, row: int) -> Tensor:
        """The slots [Hk,n] of the row's tokens, oldest first; every head holds as many."""
        region = self.region_of(row)
        position = self.position[row, :, region]
        return position.argsort(1)[:, position.shape[1] - int((position[0] >= 0).sum()) :] + region.start

    def held(self, row: int, length: int) -> Held:
        return at(Held(self.k[row], self.v[row], self.position[row]), self.slots_by_position(row))

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        region = self.region_of(row)
        used = slice(region.start, min(region.start + length, region.stop))
        for name in ("k", "v", "position", *self.sums):
            yield name, getattr(self, name)[row, :, used]

    def reset(self, row: int) -> None:
        super().reset(row)
        region = self.region_of(row)
        self.position[row, :, region] = -1
        self.k[row, :, region], self.v[row, :, region] = 0, 0  # a NaN would reach the output: 0 x NaN is NaN


def at(tokens: Held, index: Tensor) -> Held:
    """Copies of the tokens at index [H,n]."""
    each = index[..., None].expand(-1, -1, tokens.k.shape[2])
    return Held(tokens.k.gather(1, each), tokens.v.gather(1, each), tokens.position.gather(1, index))


def select(importance: Tensor, size: int, sinks: int, newest: int) -> Tensor:
    """Which `size` of N tokens stay: the sinks, the most important, the newest; in order of position, [Hk,n]."""
    length = importance.shape[1]
    index = torch.arange(length, device=importance.device).expand_as(importance)
    if length <= size:
        return index
    between = slice(sinks, length - newest)
    best = ops.top(importance[:, between], size - sinks - newest).sort().values + sinks
    return torch.cat([index[:, :sinks], best, index[:, between.stop :]], dim=1)
