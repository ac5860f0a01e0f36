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
import torch.nn.functional as F
from torch import Tensor

from kv.base import KV, Held
from kv.method import Method, Plan, option
from kv.parts import attention, ops
from kv.parts.evicting import Evicting
from kv.streaming import SINKS


class H2O(Evicting):
    """A token's importance is the attention that it has received."""

    statistics = ("variance", "received")
    sums = ("received",)  # the received attention, and in roco its squares, summed over queries

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        y, sums, variance = attention.observed_attention(q, k, v, len(self.sums))
        return y, variance, *sums

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, variance: Tensor, *sums: Tensor) -> None:
        tokens = Held.new(k[0], v[0])
        self.compress(row, tokens, *self.ranked(row, sums, tokens.position))

    def rank(self, row: int, q: Tensor, k: Tensor, tokens: Held) -> tuple[Tensor, list[Tensor]]:
        sums, _ = attention.column_sums(q, k, len(self.sums))
        slot = self.slots_by_position(row)
        for name, total in zip(self.sums, sums, strict=True):
            total[:, : slot.shape[1]] += getattr(self, name)[row].gather(1, slot)
        return self.ranked(row, sums, tokens.position)

    def ranked(self, row: int, sums: list[Tensor], position: Tensor) -> tuple[Tensor, list[Tensor]]:
        """What `rank` returns; where all tokens stay, their importance is arbitrary."""
        size = self.size_of("allotted", row)
        return sums[0] if position.shape[1] <= size else self.worth(sums, position, position[:, -1:], size), sums

    def newest(self, kept: Tensor | int) -> Tensor | int:
        return kept // 2

    def importance(self, weight: Tensor, held: Held, pos: Tensor, active: Tensor) -> Tensor:
        received = torch.where(active[:, None, None], weight.sum(2), 0.0)
        sums = [self.add(getattr(self, name), received**power) for power, name in enumerate(self.sums, 1)]
        return self.worth(sums, held.position, pos, self.sizes())

    def worth(self, sums: list[Tensor], position: Tensor, pos: Tensor, size: Tensor | int) -> Tensor:
        """The importance of the tokens at `position`, `size` of which stay; the newest token is at `pos`."""
        return sums[0]


class RoCo(H2O):
    statistics = ("variance", "received", "squares")
    sums = ("received", "squares")

    def __init__(self, plan: Plan, size: int, sinks: int):
        super().__init__(plan, size, sinks, min(10, size // 2))
        self.min_slots = self.varied(size)

    def newest(self, kept: Tensor | int) -> Tensor | int:
        return ops.least(10, kept // 2)

    def varied(self, kept: Tensor | int) -> Tensor | int:
        """How many tokens their deviation protects: 30% of those kept, rounded half up."""
        return ops.least((3 * kept + 5) // 10, kept - self.sinks - self.newest(kept))

    def worth(self, sums: list[Tensor], position: Tensor, pos: Tensor, size: Tensor | int) -> Tensor:
        """The mean attention; infinite for the `varied` evictable tokens with the highest standard deviation."""
        visits = pos - position + 1
        mean = sums[0] / visits
        deviation = (sums[1] / visits - mean**2).clamp(min=0).sqrt()
        deviation, varied = deviation.masked_fill(~self.evictable(position, pos, size), -1.0), self.varied(size)
        most = varied if isinstance(varied, int) else self.min_slots
        protected = ops.top(deviation, most, count=varied)
        padded = mean if isinstance(varied, int) else F.pad(mean, (0, 1))  # where rows protect fewer, indices may be N
        return padded.scatter(-1, protected, torch.inf)[..., : mean.shape[-1]]


class CaM(H2O):
    """Adds the evicted value / m to the next m kept ones, with probability clip(A / mean A, 0, 1).

    A is the evicted token's sum, mean A that of the m kept ones; `spread` is m.
    """

    def __init__(self, plan: Plan, size: int, spread: int):
        super().__init__(plan, size, 0, size // 2)
        self.spread = spread
        self.hold("salt", ops.salt(plan))
        self.follow = self.min_slots = min(spread, size)

    def merge(self, slot: Tensor, evicts: Tensor, held: Held, importance: Tensor) -> None:
        _, values, position = held
        # [B,Hk,1]; realized: else Triton's code cannot be compiled
        evicted = ops.realized(position.gather(2, slot[..., None]))
        later = position.masked_fill(position <= evicted, torch.iinfo(torch.int64).max)
        following = later.topk(self.follow, largest=False)  # the next m kept tokens
        real = following.values < torch.iinfo(torch.int64).max  # [B,Hk,m]
        total = torch.where(real, importance.gather(2, following.indices), 0.0).sum(2)
        ratio = importance.gather(2, slot[..., None])[..., 0] / (total / real.sum(2))  # NaN if nothing evicts
        spreads = evicts & (ops.chance(evicted, self.salt)[..., 0] < ratio)
        each = (-1, -1, -1, values.shape[3])
        value = values.gather(2, slot[..., None, None].expand(each)) / self.spread  # [B,Hk,1,D]
        shares = torch.where((spreads[..., None] & real)[..., None], value, 0.0)
        values.scatter_add_(2, following.indices[..., None].expand(each), shares)  # a view of the cache

    def merge_many(self, row: int, tokens: Held, kept: Tensor, stay: Held, sums: list[Tensor], prompt: bool) -> None:
        """`merge` for all tokens that an extension evicts."""
        if prompt:
            return
        stays = torch.zeros_like(tokens.position, dtype=torch.bool).scatter(1, kept, True)
        chance = ops.chance(tokens.position, self.salt)
        for head, evicted in enumerate((~stay).nonzero().flatten() for stay in stays):
            following = torch.searchsorted(kept[head], evicted)[:, None] + torch.arange(self.follow, device=kept.device)
            real = following < kept.shape[1]
            following = following.clamp(max=kept.shape[1] - 1)
            mean = torch.where(real, sums[0][head, kept[head, following]], 0.0).sum(1) / real.sum(1)
            spreads = real & (chance[head, evicted] < sums[0][head, evicted] / mean)[:, None]
            value = (tokens.v[head, evicted] / self.spread)[:, None].expand(-1, self.follow, -1)
            stay.v[head].index_add_(0, following[spreads], value[spreads])


@dataclass(frozen=True)
class H2OMethod(Method):
    name = "h2o"
    paper = "https://arxiv.org/abs/2306.14048"
    help = "recent tokens, and those that received the most attention"
    fewest = 2

    def build(self, plan: Plan, budget: int) -> list[KV]:
        return [H2O(plan, budget, 0, budget // 2) for _ in range(plan.n_layer)]


@dataclass(frozen=True)
class RoCoMethod(Method):
    name = "roco"
    paper = "https://arxiv.org/abs/2402.06262"
    help = "h2o by the mean and the deviation of the attention"
    sinks: int = SINKS

    def minimum(self, plan: Plan) -> int:
        """The sinks, the newest tokens, and one that can be evicted."""
        return min(2 * self.sinks + 2, self.sinks + 11)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        return [RoCo(plan, budget, self.sinks) for _ in range(plan.n_layer)]


@dataclass(frozen=True)
class CaMMethod(H2OMethod):
    name = "cam"
    paper = "https://openreview.net/forum?id=LCTmppB165"
    help = "h2o that spreads evicted values over kept ones"
    spread: int = option(32, "kept tokens among which an evicted value is divided", min=1)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        return [CaM(plan.layer(layer), budget, self.spread) for layer in range(plan.n_layer)]
