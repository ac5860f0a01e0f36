"""What methods have in common that keep both ends of a prompt on the device and fetch some of what lies between."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv import offload, ops
from kv.base import KV, Shape, option
from kv.offload import Pool, Staged


@dataclass(frozen=True)
class FetchMethod(offload.OffloadMethod):
    """Keeps both ends of a prompt and fetches tokens from between; how the budget is split."""

    offload: bool = option(True, "the prompt lives on the host")
    initial: int = option(4, "first tokens, which stay on the device", min=0)
    local: int | None = option(None, "first and last tokens on the device; auto: a third, at most 128", min=1)

    def split(self, budget: int) -> tuple[int, int]:
        """(n_local, n_topk): tokens that stay, the initial ones among them, and tokens that are fetched."""
        local = min(128, budget // 3) if self.local is None else self.local
        local = min(max(local, self.initial), budget - 1)
        return local, budget - local

    def reach(self, shape: Shape) -> int:
        """The tokens of a row, those that stay among them, that may ever be fetched: the prompt's."""
        return shape.max_prompt

    def sizes(self, shape: Shape, budget: int) -> tuple[int, int]:
        """`split`, but no more tokens fetched than lie between those that stay."""
        local, count = self.split(budget)
        return local, min(count, max(1, self.reach(shape) - local))

    def staged_rows(self, shape: Shape, budget: int) -> Staged | None:
        """Where the rows of one layer after the other arrive."""
        slots = shape.batch * shape.n_kv_head * self.sizes(shape, budget)[1]
        return self.staged(slots, (2, shape.head_dim), shape)


class Parts(KV):
    """Slots in three parts: the ends of the prompt, the chosen tokens of what lies between, the generated tokens."""

    recent = 1

    def __init__(self, shape: Shape, sinks: int, ends: int, chosen: int, prompt: Tensor | None = None):
        """prompt [B]: tokens of each row's, where layers share that."""
        super().__init__(shape)
        self.pools: list[Pool] = []  # that this layer answers for
        self.sinks, self.ends, self.chosen = sinks, ends, ends + chosen  # the last: slots before the generated tokens
        self.allocate_slots(self.chosen + shape.max_new_tokens)
        if prompt is None:
            self.state("prompt")
        else:
            self.register_buffer("prompt", prompt, persistent=False)

    def reads(self, length: int, new: int) -> int:
        return self.chosen + max(new, 1)

    def keep_ends(self, row: int, k: Tensor, v: Tensor) -> None:
        """The first tokens and the last of a prompt: k and v [Hk,T,D]."""
        self.prompt[row] = length = k.shape[1]
        ends = torch.arange(min(length, self.ends), device=k.device)
        ends = torch.where(ends < self.sinks, ends, ends + max(0, length - self.ends))
        self.k[row, :, : len(ends)], self.v[row, :, : len(ends)] = k[:, ends], v[:, ends]

    def store_generated(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """Takes in one token a row; its index [B] among those generated."""
        age = (pos - self.prompt).clamp(min=0)  # of a row that has generated nothing: inactive
        self.store(k, v, self.chosen + age, active)
        return age

    def held(self, age: Tensor) -> tuple[Tensor, Tensor]:
        """Which slots of the ends, and which of the generated tokens, hold one: two of [B,n]."""
        ends = torch.arange(self.ends, device=age.device) < self.prompt[:, None]
        return ends, torch.arange(self.span.shape[0] - self.chosen, device=age.device) <= age[:, None]

    def attend_parts(self, q: Tensor, ends: Tensor, chosen: Tensor, new: Tensor) -> Tensor:
        """Attention to those slots of the ends [B,n], of the chosen tokens [B,Hk,n], of the generated ones [B,n]."""
        b, h, _ = chosen.shape
        mask = torch.cat([ends[:, None].expand(b, h, -1), chosen, new[:, None].expand(b, h, -1)], dim=2)
        return ops.attend(q, self.read(self.k), self.read(self.v), mask)

    # What lies between the ends

    def finish(self, row: int) -> None:
        for pool in self.pools:
            pool.settle()

    def host_bytes(self) -> int:
        return sum(pool.host_bytes for pool in self.pools)

    def fetched(self) -> tuple[int, int]:
        wanted, fetched = zip((0, 0), *(pool.counts for pool in self.pools), strict=True)
        return sum(wanted), sum(fetched)

    def overhead(self) -> dict[str, int]:
        return super().overhead() | {"staging": sum(pool.overhead() for pool in self.pools)}

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


class Fetched(Parts):
    """What lies between the ends is in a pool, K and V of `width` tokens a row of it; `count` rows are fetched."""

    def __init__(self, shape: Shape, sinks: int, ends: int, count: int, width: int, pool: Pool):
        super().__init__(shape, sinks, ends, count * width)
        self.count = count
        self.state("index", shape.n_kv_head, count, fill=-1)  # what was chosen; -1: none
        self.pool, self.pools = pool, [pool]
        self.register_buffer("pool_buffer", pool.buffer, persistent=False)


class FetchedTokens(Fetched):
    """Its rows are single tokens of a KV head, each head's own."""

    def __init__(self, shape: Shape, layer: int, budget: int, options: FetchMethod, staged, workers):
        ends, count = options.sizes(shape, budget)
        rows, width = shape.batch * shape.max_prompt * shape.n_kv_head, (2, shape.head_dim)
        pool = options.pool(f"layer {layer}", rows, width, staged, shape, workers)
        super().__init__(shape, options.initial, ends, count, 1, pool)
        self.beyond["slots"] = self.slots * shape.slot_bytes

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.keep_ends(row, k[0], v[0])
        for i, x in enumerate((k, v)):
            self.pool.write(row * self.shape.max_prompt * k.shape[1], x[0].transpose(0, 1).flatten(0, 1), i)

    def fetch(self, scores: Tensor, candidates: Tensor, active: Tensor, q: Tensor) -> Tensor:
        """The best candidates [B,N] of the prompt by scores [B,Hk,N] into their slots; returns q, see Pool.issue."""
        scores = scores.masked_fill(~candidates[:, None], -torch.inf)
        best = ops.top(scores, self.count, ordered=True)  # in another order sums would round differently
        best = torch.where(scores.gather(2, best) > -torch.inf, best, -1)
        self.index.copy_(torch.where(active[:, None, None], best, self.index))
        b, h = best.shape[:2]
        row, head = torch.arange(b, device=q.device)[:, None, None], torch.arange(h, device=q.device)[:, None]
        there = (self.index >= 0) & (self.index < self.prompt[:, None, None])
        wanted = torch.where(there, (row * self.shape.max_prompt + self.index) * h + head, -1).flatten()
        token, q = self.pool.issue(wanted, active.repeat_interleave(h * self.count), q)
        rows = self.pool.take(self.pool.wait(token, q)).view(b, h, self.count, 2, -1)
        for buffer, new in zip((self.k, self.v), rows.unbind(3), strict=True):
            slots = buffer[:, :, self.ends : self.chosen]
            slots.copy_(torch.where(active[:, None, None, None], new, slots))
        return q

    def fetched_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes of attention in one step."""
        new = max(0, length - self.shape.max_prompt)
        ends = min(length - new, self.ends)
        chosen, unit = min(self.count, length - new - ends), self.shape.n_kv_head * self.shape.unit_bytes
        return (ends + chosen + new) * unit, chosen * unit * (self.pool.host_bytes > 0)
