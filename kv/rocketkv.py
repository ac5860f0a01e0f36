"""rocketkv, hybrid: coarse eviction at the prompt, then fine selection at every step (RocketKV, arXiv 2502.14051).

Stage 1 (Algorithm 1, kv/snapkv.py) keeps n1 slots of S, a row's prompt and room. Stage 2 (Algorithm 2) stores
the minimum and maximum of each channel over the keys of each page of p stored tokens. A step scores all pages by the
query's r largest channels and attends to the tokens of the best pages, here always including the newest page (the paper
leaves it out if it is not among the best: newest=false). The bounds lie nearer to a page's mean key than its extremes,
which chooses better pages (kv/quest.py; the paper's: reach=1). Half of the budget t is read to select, half to attend;
a budget that covers every token builds the full cache. `hybrid` is stage 2 alone, n1 = S.

p and r follow from the compression ratio S / t, and all rows share them: those of the longest prompt, or of the share
if the budget is a share of the prompt.

The default, split=adaptive, is the authors' current choice: the higher the compression ratio, the larger stage 1's
share of it, and one pooling kernel serves prompts of every length. split=even is their first paper's: both stages
compress alike, and long prompts use a wider kernel.

Memory: n1 + n1 / p units of one K and one V vector per KV head (for pages of one token n1 + n1 / 2). Traffic: t units.
With bits=8 or 4, the n1 vectors are quantized one by one, and a step unpacks only those it attends to. The bounds, and
a second copy of the newest tokens, which most attention goes to, stay in the cache's dtype.

turns=true is the authors' multi-turn form: what a question needs is no longer dropped by the question before it. A row
also keeps its history, every token of every turn, with offload=true on the host. A later text of several tokens attends
to all of it, and stage 1 chooses anew, from the history and by the last queries of that text. Steps are the same as
without. Memory: S units more; traffic of such a text: the history once.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kv.base import KV, Held
from kv.full import FullMethod, full_layer, full_layers
from kv.method import Method, Plan, of_share, option
from kv.parts import ops, quant
from kv.parts.turns import Turns
from kv.snapkv import Kernels, PoolingMethod, SnapKV, is_longchat

EXACT = 64  # newest tokens that are held unquantized too


@dataclass(frozen=True)
class Split:
    """How a budget is divided between the stages."""

    plan: Plan
    budget: int  # t
    how: str | None  # the option `split`; None: stage 2 alone

    def slots(self, prompt: int) -> int:
        """n1 for a prompt of `prompt` tokens: S / c**power, and at least twice the tokens that may be generated."""
        planned, new = prompt + self.plan.room, self.plan.room
        c = self.compression(prompt)
        return max(math.floor(planned / c ** self.power(c) + 0.5), min(2 * new, planned))

    def compression(self, prompt: int) -> float:
        """c, at least 1: that of the share or, for a budget in tokens, of the prompt and what is generated."""
        if self.plan.share is not None:
            return float(1 / self.plan.share.part)
        return max(1.0, (prompt + self.plan.room) / self.budget)

    def power(self, c: float) -> float:
        """Stage 1 compresses by c**power."""
        return {None: 0.0, "even": 0.5}.get(self.how, min(0.2 + 0.06 * math.log2(c), 0.8))

    def kept(self, prompt: int, window: int) -> tuple[int, int]:
        """How many tokens of a prompt stage 1 keeps, and its window."""
        kept = self.slots(prompt) - self.plan.room
        return kept, min(window, kept // 2)

    def sizes(self) -> tuple[int, int]:
        """p in tokens and the channels r, which all rows share: those of the share or of the longest prompt."""
        c = self.compression(self.plan.max_prompt)
        if self.plan.share is None:
            c2 = Fraction(self.slots(self.plan.max_prompt), min(self.budget, self.plan.planned))
        else:
            c2 = Fraction(c ** (1 - self.power(c)))  # the compression ratio left to stage 2
        page = max(1, min(math.floor(c2), math.ceil(math.sqrt(c2))))
        return page, min(max(1, of_share(page / c2, self.plan.head_dim)), self.plan.head_dim)


class RocketKV(SnapKV):
    """Stage 1 is SnapKV. Of stage 2, `insert` is step 1, `page_scores` step 2 and `attend_pages` step 3."""

    def __init__(self, plan: Plan, split: Split, bits: int, newest: bool, reach: float, window: int, kernels: Kernels):
        super().__init__(plan, partial(split.kept, window=window), kernels, bits=bits)
        page, self.channels = split.sizes()
        self.newest, self.recent, self.reach, self.attends_to_all = newest, int(newest), reach, False
        self.holds_all = self.slots == plan.planned and bits == 16
        self.page, count = page, -(-self.slots // page)
        self.pages = self.allocate_size("count", split.budget, lambda t: min(max(1, t // 2 // page), count))
        self.min_slots = self.pages * page
        # Channel-major: the D minima, then the D maxima of each page. A page of one token stores one copy of both.
        self.allocate("bounds", plan.n_kv_head, plan.head_dim * (2 if self.page > 1 else 1), count + 1)
        self.contents["bounds"] = 2, self.page
        self.ring = max(EXACT, self.page) + plan.rewind if bits < 16 else 0  # slots of `newest_k` and `newest_v`
        for name in ("newest_k", "newest_v") if self.ring else ():
            self.allocate_state(name, plan.n_kv_head, self.ring, plan.head_dim, dtype=plan.dtype)

    def write(self, row: int, first: int, k: Tensor, v: Tensor, position: Tensor) -> None:
        page, end = first // self.page, first + k.shape[1]
        begun = torch.arange(page * self.page, first, device=k.device)  # slots of a page that is not full yet
        keys = self.newest_k[row, :, begun % self.ring] if self.ring else self.k[row, :, begun]
        super().write(row, first, k, v, position)
        keys = torch.cat([keys, k], dim=1)
        bounds = keys if self.page == 1 else ops.page_bounds(keys, self.page, self.reach).flatten(2)
        self.bounds[row, :, :, page : page + bounds.shape[1]] = bounds.mT
        if self.ring:
            slot = torch.arange(max(first, end - self.ring), end, device=k.device)
            for held, new in ((self.newest_k, k), (self.newest_v, v)):
                held[row, :, slot % self.ring] = new[:, slot - first]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        slot = self.slot(pos)
        scores = self.page_scores(q, slot)
        if self.newest:
            scores = ops.newest_first(scores, slot // self.page)
        best = ops.top(scores, self.pages, count=self.count)
        read = partial(self.dequantized, last=slot) if self.ring else None
        return ops.attend_pages(q, self.k, self.v, best, self.page, slot, read)

    def dequantized(self, k: Tensor, v: Tensor, slots: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        """What slots [B,Hk,n] of rows store whose newest slot is last [B]: k and v [B,Hk,n,...] -> [B,Hk,n,D]."""
        k, v = self.stored.read(k, v, self.positions(slots))
        last = last[:, None, None]
        newest = ((slots > last - EXACT) & (slots <= last))[..., None]
        old = zip((k, v), (self.newest_k, self.newest_v), strict=True)
        k, v = (torch.where(newest, ops.gather(held, slots % self.ring), x) for x, held in old)
        return k, v

    def held(self, row: int, length: int) -> Held:
        held = super().held(row, length)
        if self.ring:
            n = held.k.shape[1]
            slot = torch.arange(max(0, n - EXACT), n, device=held.k.device)
            held.k[:, slot], held.v[:, slot] = (x[row, :, slot % self.ring] for x in (self.newest_k, self.newest_v))
        return held

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        """Stores the tokens, and the bounds of their pages (section 3.4, step 1)."""
        super().insert(k, v, pos, active)
        first, n = self.slot(pos), k.shape[2]
        for held, new in ((self.newest_k, k), (self.newest_v, v)) if self.ring else ():
            ops.overwrite(held, new, ops.following(first, n) % self.ring, active)
        keys = self.newest_k if self.ring else self.k
        at, bounds = ops.newest_pages(keys, self.page, self.reach, first, n, self.ring)
        row, at = (x[..., None] for x in (torch.arange(len(pos), device=pos.device)[:, None], at))
        at = torch.where(active[:, None, None], at, self.bounds.shape[3] - 1)  # as ops.store does
        bounds = bounds[:, :, :, 0] if self.page == 1 else bounds.flatten(3)
        channel = torch.arange(bounds.shape[3], device=pos.device)
        self.bounds[row, :, channel, at] = bounds.permute(0, 2, 3, 1)  # [B,P,D or 2 D,Hk]

    def page_scores(self, q: Tensor, slot: Tensor) -> Tensor:
        """The approximate attention of the group to every page, [B,Hk,pages] (Algorithm 2, step 2)."""
        queries = ops.grouped(q, self.bounds.shape[1]).float()  # [B,Hk,G,D]
        channel = ops.top(queries.abs().sum(2), self.channels)  # [B,Hk,r]
        index = channel
        if self.page > 1:  # a page's maximum where the group's q sums to 0 or more, else its minimum
            index = channel + q.shape[-1] * (queries.sum(2) >= 0).gather(2, channel)
        used = -(-ops.value(self.read_slots) // self.page)
        empty = torch.arange(used, device=q.device) > (slot // self.page)[:, None]
        bounds = ops.gather(self.bounds.narrow(3, 0, used), index)
        return ops.sparq_weights(queries, channel, bounds, empty).sum(2)

    def step_bytes(self, length: int) -> tuple[int, int]:
        pages = -(-self.slots_to_read(length, max(0, length - self.plan.max_prompt)) // self.page)
        choose = self.channels * pages * self.plan.dtype.itemsize
        attend = min(self.pages, pages) * self.page * 2 * quant.stored_bytes(self.plan, self.stored.bits)
        return self.plan.n_kv_head * (choose + attend + min(self.ring, length) * self.plan.unit_bytes), 0


class MultiTurn(Turns, RocketKV):
    """Each turn chooses anew which tokens fill RocketKV's slots (kv/parts/turns.py)."""


@dataclass(frozen=True)
class HybridMethod(Method):
    name = "hybrid"
    paper = "https://arxiv.org/abs/2502.14051"
    help = "rocketkv's page selection alone"
    fewest = 8
    lossless = {"bits": 16}
    split: ClassVar[str | None] = None  # no stage 1
    turns: ClassVar[bool] = False
    skip_layers: int | None = option(None, "first layers that stay full; auto: 2 for LongChat, else none", min=0)
    bits: quant.Bits = quant.BITS
    newest: bool = option(True, "the newest page is always read; false, as in the paper: if it is among the best")
    reach: float = option(0.5, ops.REACH, min=0, max=1)

    def skipped(self, plan: Plan) -> int:
        """How many first layers stay full: by default 2 for LongChat (RocketKV, A.1), else none."""
        return 2 * is_longchat(plan) if self.skip_layers is None else min(self.skip_layers, plan.n_layer)

    def stage1(self, plan: Plan) -> tuple[int, Kernels]:
        """SnapKV's window and kernels; without stage 1 a row keeps every token, and neither matters."""
        return 1, Kernels(1)

    def divided(self, plan: Plan, budget: int) -> Split:
        return Split(plan, min(budget, plan.planned), self.split)

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        page, channels = self.divided(plan, budget).sizes()
        return {} if plan.share else {"page": page, "channels": channels}

    def works(self, plan: Plan, budget: int) -> bool:
        return self.divided(plan, budget).sizes()[0] <= 5

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """n1 + ceil(n1 / p) units per KV head, n1 + n1 / 2 if p is 1; with turns S more."""
        full = FullMethod(self.bits).paper_bytes(plan, None)
        if budget >= plan.planned:
            return full
        skip, split = self.skipped(plan), self.divided(plan, budget)
        slots, (page, _) = split.slots(plan.max_prompt), split.sizes()
        bounds = (1 if page == 1 else 2) * -(-slots // page) * plan.unit_bytes // 2
        slots += plan.planned * self.turns
        sparse = plan.batch * plan.n_kv_head * (2 * slots * quant.stored_bytes(plan, self.bits) + bounds)
        return (plan.n_layer - skip) * sparse + skip * full // plan.n_layer

    def build(self, plan: Plan, budget: int) -> list[KV]:
        if budget >= plan.planned:
            return full_layers(plan, self.bits)
        skip = self.skipped(plan)
        sizes = self.divided(plan, budget), self.bits, self.newest, self.reach, *self.stage1(plan)
        shapes = map(plan.layer, range(plan.n_layer))
        return [self.layer(i, x, *sizes) if i >= skip else full_layer(x, self.bits) for i, x in enumerate(shapes)]

    def layer(self, layer: int, *args) -> KV:
        return RocketKV(*args)


@dataclass(frozen=True)
class RocketKVMethod(HybridMethod, PoolingMethod):
    name = "rocketkv"
    help = "evicts at the prompt, then selects pages at every step"
    split: Literal["adaptive", "even"] = option(
        "adaptive", "stage 1's share of the compression; even: half, as in the first paper"
    )
    turns: bool = option(False, "every token stays, and each question of several tokens chooses anew among them")
    offload: bool = option(False, "with turns: what is not chosen lives on the host")

    def stage1(self, plan: Plan) -> tuple[int, Kernels]:
        kernels = self.kernels(plan)
        return self.window, kernels if self.split == "even" else kernels._replace(threshold=self.threshold)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        if self.offload and not self.turns:
            raise ValueError("rocketkv keeps nothing to offload without turns=true")
        if self.offload and plan.rewind:
            raise ValueError("speculation keeps every token on the device: leave out offload")
        return super().build(plan, budget)

    def layer(self, layer: int, plan: Plan, *args) -> KV:
        if self.turns and not plan.rewind:  # a draft chooses from the full cache
            return MultiTurn(layer, self.offload, plan, *args)
        return super().layer(layer, plan, *args)
