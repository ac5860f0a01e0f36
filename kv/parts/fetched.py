"""The base of methods that keep both ends of a prompt on the device and fetch parts of its middle."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kv.base import KV, Held, Views
from kv.method import Plan, option
from kv.parts import inductor, offload, ops
from kv.parts.offload import Pool, Staged


@dataclass(frozen=True)
class FetchMethod(offload.OffloadMethod):
    """A method that keeps both ends of a prompt on the device and fetches tokens of its middle."""

    newest: ClassVar[int] = 0  # the fewest local tokens besides the initial ones
    any_token: ClassVar[bool] = False  # generated tokens are chosen too, once they are not local
    offload: bool = option(True, "the prompt lives on the host")
    initial: int = option(4, "first tokens, which stay on the device", min=0)
    local: int | None = option(None, "first and last tokens on the device; auto: budget / 3, at most 128", min=1)

    def split(self, budget: int) -> tuple[int, int]:
        """Splits a budget: n_local tokens that stay, initial ones included, and n_topk tokens to fetch."""
        local = min(128, budget // 3) if self.local is None else self.local
        local = min(max(local, self.initial + self.newest), budget - 1)
        return local, budget - local

    def ends(self, budget: int) -> tuple[int, int]:
        """How many first and how many last tokens of the prompt stay."""
        return self.initial, self.split(budget)[0] - self.initial

    def minimum(self, plan: Plan) -> int:
        return max(8, self.initial + self.newest + 1)

    def most(self, plan: Plan) -> int:
        """Beyond what covers every token, n_local still grows, up to 128."""
        return plan.planned + 3 * 128

    def reach(self, plan: Plan) -> int:
        """How many tokens of a row may be chosen, or stay."""
        return plan.planned if self.any_token else plan.max_prompt

    def sizes(self, plan: Plan, budget: int) -> tuple[int, int]:
        """`split`, with n_topk no larger than the number of tokens that do not stay."""
        local, count = self.split(budget)
        return local, min(count, max(1, self.reach(plan) - local))

    def staged_tokens(self, plan: Plan, budget: int) -> Staged | None:
        """The buffer where fetched tokens arrive, which all layers use in turn; None unless threads fetch."""
        return self.staged((plan.n_kv_head * self.sizes(plan, budget)[1], 2, plan.head_dim), plan)


Ends = Callable[[int], tuple[int, int]]  # a budget -> how many first and last tokens of a prompt stay on the device


class Parts(KV):
    """Slots in three parts: the ends of the prompt, tokens chosen from its middle, generated tokens."""

    recent, rewinds, attends_to_all = 1, True, False

    def __init__(
        self, plan: Plan, chosen: int, budget: int = 0, ends: Ends = lambda t: (0, 0), prompt: Tensor | None = None
    ):
        """chosen: how many slots. prompt [B]: the length of each row's prompt, if layers share that buffer."""
        super().__init__(plan)
        self.end_slots = sum(ends(budget))
        self.first_generated = self.end_slots + chosen
        self.allocate_size("sinks", budget, lambda t: ends(t)[0])  # first tokens of the prompt that stay
        self.allocate_size("local", budget, lambda t: ends(t)[1])  # its last tokens that do
        self.allocate_slots(self.first_generated + plan.room)
        self.contents.clear()  # see `views`: the slots do not fill in order
        if prompt is None:
            self.allocate_state("prompt")
        else:
            self.hold("prompt", prompt)

    @property
    def ends(self) -> Tensor | int:
        return self.sinks + self.local

    def ends_of(self, row: int) -> tuple[int, int]:
        """A row's `sinks` and `local`."""
        return self.size_of("sinks", row), self.size_of("local", row)

    def slots_to_read(self, length: int, new: int) -> int:
        return self.first_generated + max(new, 1)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        _, y = self.attend_with(Held.new(*self.held_prompt(row, pos)), q, k, v, pos)
        self.keep(row, q, k, v, pos)
        return y

    @abstractmethod
    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        """Stores T tokens of a prompt after its first `pos`, those of the chunks before."""

    def keep_ends(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        """Stores the first `sinks` tokens of a prompt, and its last, in the slots of the ends: k and v [Hk,T,D].

        Of a prompt of which the row has `pos` tokens, and whose next ones these are.
        """
        self.prompt[row] = pos + k.shape[1]
        sinks, local = self.ends_of(row)
        if pos:
            old = slice(min(pos, sinks + local))
            k, v = torch.cat([self.k[row, :, old], k], dim=1), torch.cat([self.v[row, :, old], v], dim=1)
        ends = torch.arange(min(k.shape[1], sinks + local), device=k.device)
        ends = torch.where(ends < sinks, ends, ends + max(0, k.shape[1] - sinks - local))
        self.k[row, :, : len(ends)], self.v[row, :, : len(ends)] = k[:, ends], v[:, ends]

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        self.store(k, v, self.first_generated + ops.following(self.generated(pos), k.shape[2]), active)

    def generated(self, pos: Tensor) -> Tensor:
        """The index [B], among the generated tokens, of the token at pos [B]."""
        return (pos - self.prompt).clamp(min=0)  # an inactive row without generated tokens would give -1

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        first = self.first_generated + pos - int(self.prompt[row])
        for buffer, x in ((self.k, k), (self.v, v)):
            buffer[row, :, first : first + k.shape[2]] = x[0]

    def held(self, row: int, length: int) -> Held:
        prompt = int(self.prompt[row])
        generated = slice(self.first_generated, self.first_generated + length - prompt)
        new = (x[row, :, generated] for x in (self.k, self.v))
        return Held.new(*(torch.cat(pair, dim=1) for pair in zip(self.held_prompt(row, prompt), new, strict=True)))

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        prompt = int(self.prompt[row])
        generated = slice(self.first_generated, self.first_generated + length - prompt)
        ends = slice(min(prompt, sum(self.ends_of(row))))
        for part, slots in (("ends", ends), ("generated", generated)):
            yield from ((f"{part}_k", self.k[row, :, slots]), (f"{part}_v", self.v[row, :, slots]))

    @abstractmethod
    def held_prompt(self, row: int, prompt: int) -> tuple[Tensor, Tensor]:
        """K and V [Hk,T,D] of the row's prompt, which has `prompt` tokens."""

    def occupied(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Which slots of the ends, and which of the generated tokens up to pos [B], hold a token: two of [B,n]."""
        ends = torch.arange(self.end_slots, device=pos.device) < self.prompt.clamp(max=self.ends)[:, None]
        slot = torch.arange(inductor.value(self.read_slots) - self.first_generated, device=pos.device)
        return ends, slot <= self.generated(pos)[:, None]

    def store_chosen(self, buffer: Tensor, new: Tensor, active: Tensor) -> None:
        """Writes new [B,Hk,n,D] to the chosen slots. A compiled copy_ would pass over the whole buffer."""
        slot = torch.arange(self.end_slots, self.first_generated, device=new.device)
        ops.store(buffer, new, slot.expand(new.shape[0], -1), active)

    def attend_parts(self, q: Tensor, pos: Tensor, chosen: Tensor) -> Tensor:
        """Attention to the `occupied` slots, and to those of the chosen tokens in the mask `chosen` [B,Hk,n]."""
        (b, h, _), (ends, new) = chosen.shape, self.occupied(pos)
        mask = torch.cat([ends[:, None].expand(b, h, -1), chosen, new[:, None].expand(b, h, -1)], dim=2)
        used = self.first_generated + self.generated(pos) + 1
        return ops.attend_used(q, self.read(self.k), self.read(self.v), mask, used)


class Fetched(Parts):
    """A pool holds the middle, K and V of `size` tokens per entry; a step fetches `count` entries per KV head."""

    def __init__(self, plan: Plan, budget: int, ends: Ends, count: int, size: int, pool: Pool):
        super().__init__(plan, count * size, budget, ends)
        self.count, self.reach = count, plan.max_prompt  # tokens of a row that may be chosen, or stay
        self.allocate_state("index", plan.n_kv_head, count, fill=-1)  # tokens or blocks chosen; -1: none
        self.pool, self.pools = pool, [pool]
        self.hold("pool_buffer", pool.buffer)

    def bring(self, wanted: Tensor, active: Tensor, q: Tensor) -> Tensor:
        """Fetches entries wanted [B,Hk,count], below 0 none, to the chosen slots; returns q, see Pool.issue."""
        ticket, q = self.pool.issue(wanted, active, q)
        entries = inductor.stored(self.pool.take(self.pool.wait(ticket, q)))
        for buffer, new in zip((self.k, self.v), entries.unflatten(0, wanted.shape).unbind(3), strict=True):
            self.store_chosen(buffer, new.flatten(2, -2), active)
        return q

    def step_bytes(self, length: int) -> tuple[int, int]:
        """Of attention, with every chosen token from the pool; choosing comes on top."""
        prompt, unit = min(length, self.plan.max_prompt), self.plan.n_kv_head * self.plan.unit_bytes
        chosen = min(self.first_generated - self.end_slots, self.choices(length))
        return (min(prompt, self.end_slots) + chosen + length - prompt) * unit, chosen * unit * self.pool.on_host

    def choices(self, length: int) -> int:
        """How many tokens of a row of `length` tokens can be chosen."""
        return max(0, min(length, self.reach) - self.end_slots)


class FetchedTokens(Fetched):
    """An entry is one token of one KV head, [max_prompt,Hk] of them in each row: every head chooses its own."""

    def __init__(self, plan: Plan, layer: int, budget: int, options: FetchMethod, staged: Staged | None):
        _, count = options.sizes(plan, budget)
        size = (plan.max_prompt * plan.n_kv_head, 2, plan.head_dim)
        pool = options.pool(f"layer {layer}", size, staged, plan)
        super().__init__(plan, budget, options.ends, count, size=1, pool=pool)
        self.allocate_size("chosen", budget, lambda t: options.sizes(plan, t)[1])  # how many tokens to fetch
        self.reach = options.reach(plan)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        self.keep_ends(row, k[0], v[0], pos)
        for i, x in enumerate((k, v)):
            self.pool.write(row, pos * self.plan.n_kv_head, x[0].transpose(0, 1).flatten(0, 1), i)

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        yield "pool", self.pool.part(row, int(self.prompt[row]) * self.plan.n_kv_head)

    def held_prompt(self, row: int, prompt: int) -> tuple[Tensor, Tensor]:
        entries = self.pool.read(row, prompt * self.plan.n_kv_head)  # [T Hk,2,D]
        return entries.unflatten(0, (prompt, -1)).permute(2, 1, 0, 3).unbind(0)

    def fetch(self, scores: Tensor, candidates: Tensor, active: Tensor, q: Tensor, most: int = 0) -> Tensor:
        """Fetches the candidates [B,N] with the best scores [B,Hk,N] to the chosen slots; returns q, see Pool.issue.

        For `most` see ops.top.
        """
        scores = scores.masked_fill(~candidates[:, None], -torch.inf)
        best = ops.top(scores, self.count, most=most, count=self.chosen)
        there = scores.gather(2, best.clamp(max=scores.shape[2] - 1)) > -torch.inf
        best = torch.where(there & (best < scores.shape[2]), best, -1)
        self.index.copy_(torch.where(active[:, None, None], best, self.index))
        heads = best.shape[1]
        there = (self.index >= 0) & (self.index < self.prompt[:, None, None])  # pqcache also chooses generated tokens
        entry = self.index * heads + torch.arange(heads, device=q.device)[:, None]
        return self.bring(torch.where(there, entry, -1), active, q)
