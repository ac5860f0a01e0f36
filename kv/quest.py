"""quest: attends to the pages of tokens whose scores have the highest bounds (Quest, Tang et al., arXiv 2406.10774).

Each page stores the minimum and maximum of each channel over its keys, which bound any key's product with a query. No
key has all extremes, so bounds that lie nearer to the page's mean choose better pages (`reach`). A step scores all
pages by that bound and attends to the tokens of the best pages, always including the newest page. A budget that covers
every token builds the full cache.
Memory: the full cache and two vectors per page. Traffic: the bounds, and the budget.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV
from kv.full import Full, full_layers
from kv.method import Method, Plan, of_share, option
from kv.parts import ops


class Quest(Full):
    def __init__(self, plan: Plan, budget: int, options: "QuestMethod"):
        super().__init__(plan)
        self.attends_to_all, self.recent, self.reach = False, 1, options.reach
        self.page = page = options.page_of(plan, budget)
        count = -(-self.size // page)
        self.pages = self.allocate_size("count", budget, lambda t: min(options.pages(t, page), count))
        self.min_slots = self.pages * page
        for name in ("low", "high"):
            self.allocate(name, plan.n_kv_head, count + 1, plan.head_dim)  # one past the end: ops.store
            self.contents[name] = 1, page

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        super().append(row, k, v, pos)
        begins = pos // self.page * self.page  # the first token of the newest page
        low, high = ops.page_bounds(self.k[row, :, begins : pos + k.shape[2]], self.page, self.reach).unbind(2)
        pages = slice(begins // self.page, begins // self.page + low.shape[1])
        self.low[row, :, pages], self.high[row, :, pages] = low, high

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        best = ops.top(self.score(q, pos), self.pages, count=self.count)
        return ops.attend_pages(q, self.k, self.v, best, self.page, pos)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        super().insert(k, v, pos, active)
        newest, bounds = ops.newest_pages(self.k, self.page, self.reach, pos, k.shape[2])
        ops.store(self.low, bounds[..., 0, :], newest, active)
        ops.store(self.high, bounds[..., 1, :], newest, active)

    def score(self, q: Tensor, pos: Tensor) -> Tensor:
        """The group's attention to every page by its bound, [B,Hk,pages]; the newest page comes first."""
        used = -(-ops.value(self.read_slots) // self.page)
        low, high = (buffer.narrow(2, 0, used).float() for buffer in (self.low, self.high))
        queries = ops.grouped(q, low.shape[1])[:, :, :, None].float().unbind(2)  # one query head at a time, [B,Hk,1,D]
        bound = torch.stack([torch.maximum(x * low, x * high).sum(-1) for x in queries], dim=2) * q.shape[-1] ** -0.5
        page, newest = torch.arange(used, device=q.device), pos // self.page
        weight = bound.masked_fill((page > newest[:, None])[:, None, None], -torch.inf).softmax(-1).sum(2)
        return ops.newest_first(weight, newest)

    def step_bytes(self, length: int) -> tuple[int, int]:
        pages = -(-length // self.page)
        units = pages + min(self.pages, pages) * self.page
        return self.plan.n_kv_head * units * self.plan.unit_bytes, 0


@dataclass(frozen=True)
class QuestMethod(Method):
    name = "quest"
    paper = "https://arxiv.org/abs/2406.10774"
    help = "the pages with the highest bounds on their scores"
    page: int | None = option(16, "tokens per page; auto: half of the budget is for the bounds", min=1)
    reach: float = option(0.75, ops.REACH, min=0, max=1)
    skip_layers: int = option(2, "first layers that stay full", min=0)

    def page_of(self, plan: Plan, budget: int) -> int:
        """Tokens per page; auto: the bounds of S / page pages are half the budget."""
        if self.page is not None:
            return self.page
        return max(1, of_share(1 / plan.part(budget), 2))

    def pages(self, budget: int, page: int) -> int:
        """Pages attended to."""
        return max(1, budget // 2 // page) if self.page is None else budget // page

    def minimum(self, plan: Plan) -> int:
        """Two pages."""
        if self.page is not None:
            return 2 * self.page
        if plan.share:  # its page does not depend on t
            return 4 * self.page_of(plan, 1)
        allowed = (t for t in range(1, plan.planned + 1) if t // 2 >= 2 * self.page_of(plan, t))
        return next(allowed, plan.planned)

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        return {} if self.page or plan.share else {"page": self.page_of(plan, budget)}

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The full cache, and a unit for each page."""
        pages = -(-plan.planned // self.page_of(plan, budget))
        return plan.full_bytes() + max(0, plan.n_layer - self.skip_layers) * pages * plan.slot_bytes

    def build(self, plan: Plan, budget: int) -> list[KV]:
        if budget >= plan.planned:
            return full_layers(plan)
        full = min(self.skip_layers, plan.n_layer)
        layers: list[KV] = [Full(plan) for _ in range(full)]
        return layers + [Quest(plan, budget, self) for _ in range(plan.n_layer - full)]
