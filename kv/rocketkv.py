"""rocketkv, hybrid: coarse eviction at the prompt, then fine selection at every step (RocketKV, arXiv 2502.14051).

Stage 1 (Algorithm 1, kv/snapkv.py) keeps n1 slots of S = max_prompt + max_new_tokens. Stage 2 (Algorithm 2) stores the
minimum and maximum of each channel over the keys of each page of p stored tokens. A step scores all pages by the
query's r largest channels and attends to the tokens of the best pages. Half of the budget t is read to select, half to
attend, even if the budget covers every token. `hybrid` is stage 2 alone, n1 = S.

The default, split=adaptive, is the authors' current choice: the higher the compression ratio, the larger stage 1's
share of it, and one pooling kernel serves prompts of every length. split=even is their first paper's: both stages
compress alike, and long prompts use a wider kernel.

Memory: n1 + n1 / p units of one K and one V vector per KV head (for pages of one token n1 + n1 / 2). Traffic: t units.
With bits=8 or 4, the n1 vectors are quantized one by one, and a step unpacks only those it attends to.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kv.base import KV
from kv.full import full_layer
from kv.method import Method, Shape, option
from kv.parts import inductor, ops, quant
from kv.snapkv import Kernels, PoolingMethod, SnapKV, is_longchat


@dataclass(frozen=True)
class Sizes:
    """The sizes that a budget means."""

    slots: int  # n1
    kept: int  # of the prompt: n1 - max_new_tokens
    page: int  # p, in tokens
    channels: int  # r
    pages: int  # attended to: t / 2 / p

    @classmethod
    def of(cls, shape: Shape, budget: int, split: str | None) -> "Sizes":
        """`split` is None for stage 2 alone."""
        planned, new, budget = shape.planned, shape.max_new_tokens, min(budget, shape.planned)
        c, slots = planned / budget, planned
        if split is not None:
            power = 0.5 if split == "even" else min(0.2 + 0.06 * math.log2(c), 0.8)
            slots = max(math.floor(planned / c**power + 0.5), min(2 * new, planned))  # S / c**power
        c2 = slots / budget  # the compression ratio left to stage 2
        page = max(1, min(math.floor(c2), math.ceil(math.sqrt(c2))))
        channels = (2 * shape.head_dim * page * budget + slots) // (2 * slots)  # D p / c2, half up
        channels = min(max(channels, 1), shape.head_dim)
        return cls(slots, slots - new, page, channels, max(1, budget // 2 // page))


class RocketKV(SnapKV):
    """Stage 1 is SnapKV. Of stage 2, `insert` is step 1, `page_scores` step 2 and `attend_pages` step 3."""

    def __init__(self, shape: Shape, sizes: Sizes, bits: int, window: int, kernels: Kernels):
        super().__init__(shape, sizes.kept, min(window, sizes.kept // 2), kernels, bits=bits)
        self.page, self.channels = sizes.page, sizes.channels
        self.reads_all, self.recent = False, 0  # a step may leave out even the newest page
        self.holds_all = self.slots == shape.planned and bits == 16
        count = -(-self.slots // self.page)
        self.pages = min(sizes.pages, count)
        self.min_slots = self.pages * self.page
        # Channel-major: the D minima, then the D maxima of each page. A page of one token stores one copy of both.
        self.allocate("bounds", shape.n_kv_head, shape.head_dim * (2 if self.page > 1 else 1), count)
        self.contents["bounds"] = 2, self.page

    def write(self, row: int, first: int, k: Tensor, v: Tensor) -> None:
        super().write(row, first, k, v)
        page = first // self.page
        keys = self.decoded(
            self.k[row, :, page * self.page : first + k.shape[1]]
        )  # of the pages that changed, [Hk,n,D]
        bounds = keys if self.page == 1 else torch.cat(ops.page_bounds(keys, self.page), dim=2)
        self.bounds[row, :, :, page : page + bounds.shape[1]] = bounds.mT

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        slot = pos - self.dropped
        best = ops.top(self.page_scores(q, slot), self.pages)
        return ops.attend_pages(q, self.k, self.v, best, self.page, slot, self.decoded)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        """Stores the tokens, and the bounds of their pages (section 3.4, step 1)."""
        super().insert(k, v, pos, active)
        at, (low, high) = ops.newest_pages(self.k, self.page, pos - self.dropped, k.shape[2], self.decoded)
        new = (low if self.page == 1 else torch.cat([low, high], dim=3)).transpose(1, 2)  # [B,P,Hk,2D]
        row = torch.arange(pos.shape[0], device=pos.device)[:, None]
        self.bounds[row, :, :, at] = torch.where(active[:, None, None, None], new, self.bounds[row, :, :, at])

    def page_scores(self, q: Tensor, slot: Tensor) -> Tensor:
        """The approximate attention of the group to every page, [B,Hk,pages] (Algorithm 2, step 2)."""
        queries = ops.grouped(q, self.bounds.shape[1]).float()  # [B,Hk,G,D]
        channel = ops.top(queries.abs().sum(2), self.channels)  # [B,Hk,r]
        index = channel
        if self.page > 1:  # a page's maximum where the group's q sums to 0 or more, else its minimum
            index = channel + q.shape[-1] * (queries.sum(2) >= 0).gather(2, channel)
        used = -(-inductor.value(self.read_slots) // self.page)
        empty = torch.arange(used, device=q.device) > (slot // self.page)[:, None]
        bounds = ops.gather(self.bounds.narrow(3, 0, used), index)
        return ops.sparq_weights(queries, channel, bounds, empty).sum(2)

    def step_bytes(self, length: int) -> tuple[int, int]:
        pages = -(-self.slots_to_read(length, max(0, length - self.shape.max_prompt)) // self.page)
        choose = self.channels * pages * self.shape.dtype.itemsize
        attend = min(self.pages, pages) * self.page * 2 * quant.stored_bytes(self.shape, self.bits)
        return self.shape.n_kv_head * (choose + attend), 0


@dataclass(frozen=True)
class HybridMethod(Method):
    help = "rocketkv's page selection alone"
    fewest = 8
    split: ClassVar[str | None] = None  # no stage 1
    skip_layers: int | None = option(None, "first layers that stay full; auto: 2 for LongChat, else none", min=0)
    bits: quant.Bits = quant.BITS

    def skipped(self, shape: Shape) -> int:
        """How many first layers stay full: by default 2 for LongChat (RocketKV, A.1), else none."""
        return 2 * is_longchat(shape) if self.skip_layers is None else min(self.skip_layers, shape.n_layer)

    def stage1(self, shape: Shape) -> tuple[int, Kernels]:
        """SnapKV's window and kernels; without stage 1 a row keeps every token, and neither matters."""
        return 1, Kernels(1)

    def build(self, shape: Shape, budget: int) -> list[KV]:
        skip, sizes, stage1 = self.skipped(shape), Sizes.of(shape, budget, self.split), self.stage1(shape)
        layers = [full_layer(shape, self.bits) for _ in range(skip)]
        return layers + [RocketKV(shape, sizes, self.bits, *stage1) for _ in range(shape.n_layer - skip)]


@dataclass(frozen=True)
class RocketKVMethod(HybridMethod, PoolingMethod):
    help = "evicts at the prompt, then selects pages at every step"
    fewest = 8
    split: Literal["adaptive", "even"] = option(
        "adaptive", "stage 1's share of the compression; even: half, as in the first paper"
    )

    def stage1(self, shape: Shape) -> tuple[int, Kernels]:
        kernels = self.kernels(shape)
        return self.window, kernels if self.split == "even" else kernels._replace(threshold=self.threshold)
