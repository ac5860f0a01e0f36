"""d2o: h2o with sinks and a budget per layer; evicted tokens may merge into kept ones (D2O, arXiv 2406.13035).

The layers share L t slots per KV head and row. A softmax over the negative variances of the attention that tokens
receive sets each layer's share (Equations 4 and 5). Every layer must see the prompt first, so K and V wait on the host
until then. Raw variances would make the softmax one-hot, so the variances of a layer's query heads are scaled to [0,
1] and averaged: a layer gets more slots if most of its heads vary far less than its most variable head. Each layer
reserves 4 slots for sinks; `ratio` divides the others between the tokens with the highest attention sums and the newest
tokens (Equations 6 to 8).

merge=paper: an evicted token merges into the kept token with the most similar key by cosine (Equation 9), if the
similarity reaches a threshold: at the prompt, the mean over all evicted tokens; at a step, a moving average (Equation
10). The merge weights are e^similarity, and e for the kept token itself, divided by their sum (Equations 11 and 12);
with merge=average they are equal.

The paper's defaults are merge=paper and ratio=3:1. On a real model both lose to h2o, and no form of merging that was
tried gains anything: RoPE has turned the keys that merging averages by different positions, and of a kept token that
ten tokens merge into a tenth remains (docs/accuracy.md). The defaults here, merge=none and 1:1, equal h2o.

Memory: the budget, a spare slot per layer, and every planned token in `uncounted` layers. Generation is unbounded
unless some layers keep all tokens. Traffic: on a CPU, a layer reads as many slots as its largest row holds; on CUDA, as
many as a row could hold. Merging reads the keys again.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.base import KV, Held
from kv.full import Full
from kv.h2o import H2O
from kv.method import Method, Plan, option
from kv.parts import attention, ops
from kv.parts.evicting import Slots
from kv.streaming import SINKS

FEWEST = 4  # the fewest tokens of a layer besides the sinks


def scaled_mean(variances: list[float]) -> float:
    """F_l: the variances of a layer's query heads, scaled to 0 ... 1 and then averaged; 0 if all are equal."""
    low, high = min(variances), max(variances)
    return sum(f - low for f in variances) / (high - low) / len(variances) if high > low else 0.0


def layer_budgets(variances: list[list[float]], prompt: int, budget: int, sinks: int, allocation: str) -> list[int]:
    """S_l (Equation 5): the slots of each layer, `budget` on average (`exponential`: at most that).

    If the prompt exceeds the budget, no layer has more slots than the prompt has tokens. `variances` are raw, per layer
    and query head; only `softmax` scales them.
    """
    if prompt <= budget or allocation == "uniform":
        return [budget] * len(variances)
    smallest, largest, means = sinks + FEWEST, prompt, [sum(heads) / len(heads) for heads in variances]
    if allocation == "exponential":  # of the budget (the paper prints: of the prompt), not scaled to the sum
        return [int(min(max(round(budget * math.exp(-f), 6), smallest), largest)) for f in means]
    shares = [1 / max(f, 1e-12) for f in means]
    if allocation == "softmax":
        shares = [math.exp(-scaled_mean(heads)) for heads in variances]
    return [int(round(size, 6)) for size in within(shares, budget * len(variances), smallest, largest)]


def within(shares: list[float], total: float, smallest: float, largest: float) -> list[float]:
    """Sizes proportional to `shares` that sum to `total`, each within the bounds (Equation 15)."""
    fixed: dict[int, float] = {}  # at a bound; the others share the rest
    while True:
        free = [i for i in range(len(shares)) if i not in fixed]
        scale = (total - sum(fixed.values())) / max(sum(shares[i] for i in free), 1e-300)
        wanted = {i: scale * shares[i] for i in free}
        clipped = {i: min(max(size, smallest), largest) for i, size in wanted.items()}
        change = sum(clipped.values()) - sum(wanted.values())  # above 0: raised sizes are final, else lowered ones
        at_bound = {i: size for i, size in clipped.items() if (size > wanted[i] if change > 0 else size < wanted[i])}
        if not at_bound:
            return [(fixed | clipped)[i] for i in range(len(shares))]
        fixed |= at_bound


def most_slots(layers: int, plan: Plan, budget: int, options: "D2OMethod") -> int:
    """The largest possible S_l."""
    if options.allocation == "softmax":  # F is 0 in one layer, 1 in all others
        return max(budget, min(plan.max_prompt, int(layers * budget / (1 + (layers - 1) / math.e))))
    if options.allocation == "reciprocal":
        return max(budget, min(plan.max_prompt, layers * budget - (layers - 1) * (options.sinks + FEWEST)))
    return budget


class SharedSlots(Slots):
    """The slots of all layers, and the prompt's K and V until every layer has seen it."""

    def __init__(self, plan: Plan, layers: int, budget: int, total: int):
        """budget: the mean slots of these layers, where the budget of all layers is `total`."""
        super().__init__(plan, layers * (budget + 1), D2O.sums)
        self.budget, self.total = budget, total
        self.parked: list[tuple[list[Tensor], Tensor, Tensor, Tensor]] = []  # by layer: sums, variance [Hq], k, v
        self.sizes = [budget] * layers  # S_l of the parked prompt


class D2O(H2O):
    """One layer: its part of the shared slots begins at `first` [B] and has `allotted` [B] slots and a spare one.

    H2O does the rest: what is kept (Equations 7 and 8), and `decode` (Equation 6), which calls `merge`.
    """

    in_chunks = False  # all layers divide the slots, by a whole prompt that waits for them

    def __init__(self, plan: Plan, shared: SharedSlots, index: int, options: "D2OMethod"):
        super().__init__(plan, shared.budget, options.sinks, slots=shared)  # recent 1: a lower bound, see `newest`
        self.shared, self.index, self.options = shared, index, options
        self.slots = most_slots(len(shared.sizes), plan, shared.budget, options) + 1
        self.read_slots = ops.symbol(self.slots, plan.device)
        self.allocate_state("first", fill=index * (shared.budget + 1))
        self.allocate_state("allotted", fill=shared.budget)
        if options.merge != "none":
            self.more_bytes += plan.unit_bytes // 2  # the keys, once more
        # tau (Equation 10); -inf: nothing was evicted
        self.allocate_state("threshold", plan.n_kv_head, dtype=torch.float32, fill=-torch.inf)

    def reset(self, row: int) -> None:
        super().reset(row)
        if self.index == 0:
            self.shared.parked.clear()  # of a prompt that was interrupted: only one is read at a time

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, variance: Tensor, *sums: Tensor) -> None:
        """The variance [Hq] is Equation 4's, the sums [Hk,T] are Equation 6's."""
        waits = (x[0].cpu() if self.options.park == "host" else x[0] for x in (k, v))
        self.shared.parked.append((sums, self.plan.ranks.gather(variance), *waits))

    def finish(self, row: int) -> None:
        shared, options = self.shared, self.options
        if self.index == 0:  # divides the row's slots among the layers
            variances = torch.stack([variance for _, variance, *_ in shared.parked]).tolist()
            prompt = shared.parked[0][2].shape[1]
            mean = min(shared.budget, options.tokens(self.plan, shared.total, prompt))
            shared.sizes = layer_budgets(variances, prompt, mean, options.sinks, options.allocation)
            self.position[row] = -1
        self.first[row] = sum(shared.sizes[: self.index]) + self.index
        self.allotted[row], self.threshold[row] = shared.sizes[self.index], -torch.inf
        sums, _, *parked = shared.parked[self.index]
        tokens = Held.new(*(x.to(self.k.device) for x in parked))
        self.compress(row, tokens, sums[0], sums)
        if self.index == len(shared.sizes) - 1:
            shared.parked.clear()

    # Its part of the shared slots

    def region_of(self, row: int) -> slice:
        first = int(self.first[row])
        return slice(first, first + int(self.allotted[row]) + 1)

    def in_region(self) -> Tensor:
        """Where the slots that are read lie in the shared buffers, [B,Hk,n]."""
        index = self.first[:, None] + torch.arange(ops.value(self.read_slots), device=self.first.device)
        return index.clamp(max=self.position.shape[2] - 1)[:, None].expand(-1, self.plan.n_kv_head, -1)

    def read(self, buffer: Tensor) -> Tensor:
        contents = ops.gather(buffer, self.in_region())
        if buffer is not self.position:
            return contents
        beyond = torch.arange(contents.shape[2], device=buffer.device) > self.allotted[:, None]  # another layer's
        return contents.masked_fill(beyond[:, None], -1)

    def add(self, buffer: Tensor, change: Tensor) -> Tensor:
        buffer.scatter_add_(2, self.in_region(), change)
        return ops.gather(buffer, self.in_region())

    def put(self, buffer: Tensor, slot: Tensor, writes: Tensor, new: Tensor | float) -> None:
        super().put(buffer, slot + self.first[:, None], writes, new)

    def newest(self, kept: Tensor | int) -> Tensor | int:
        """M of the N + M tokens besides the sinks (Equation 8)."""
        important, newest = self.options.parts
        return (kept - self.sinks) * newest // (important + newest)

    # Merging: Equations 9 to 12

    def merge_many(self, row: int, tokens: Held, kept: Tensor, stay: Held, sums: list[Tensor], prompt: bool) -> None:
        if self.options.merge == "none":
            return
        stays = torch.zeros_like(tokens.position, dtype=torch.bool).scatter(1, kept, True)
        for head, evicted in enumerate(~stays):
            similarity, to = self.nearest(tokens.k[head, evicted], stay.k[head])  # Equation 9
            mean, tau = similarity.mean(), self.threshold[row, head].clone()
            self.threshold[row, head] = self.moving_average(mean, tau)  # Equation 10
            merges = similarity >= torch.where(tau.isinf(), mean, tau)
            weight, own = self.weight(similarity) * merges, self.own_weight
            total = torch.full(kept.shape[1:], own, device=kept.device).index_add_(0, to, weight)
            w_c, w_e = own / total, weight / total[to]  # Equation 12
            for ours, gone in ((stay.k, tokens.k[head, evicted]), (stay.v, tokens.v[head, evicted])):
                kept_part, evicted_part = w_c[:, None] * ours[head].float(), w_e[:, None] * gone.float()
                ours[head] = kept_part.index_add_(0, to, evicted_part).to(ours.dtype)  # Equation 11

    def merge(self, slot: Tensor, evicts: Tensor, held: Held, importance: Tensor) -> None:
        if self.options.merge == "none":
            return
        keys, values, position = held
        key, value = (ops.gather(x, slot[..., None])[:, :, 0].float() for x in (keys, values))  # [B,Hk,D]
        others = (position >= 0) & (torch.arange(position.shape[2], device=slot.device) != slot[..., None])
        products = ops.dots(key[:, :, None], keys)[:, :, 0]
        norms = (keys.float().square().sum(3) * key.square().sum(2, keepdim=True)).sqrt().clamp(min=1e-12)
        similarity, to = (products / norms).masked_fill(~others, -2.0).max(2)  # Equation 9
        w_c = (self.own_weight / (self.own_weight + self.weight(similarity)))[..., None]  # Equation 12
        merges = evicts & (similarity >= self.threshold)  # tau_{t-1}: the same choice as tau_t, without rounding
        for buffer, all_, gone in ((self.k, keys, key), (self.v, values, value)):
            ours = ops.gather(all_, to[..., None])[:, :, 0].float()
            self.put(buffer, to, merges, (w_c * ours + (1 - w_c) * gone).to(all_.dtype))  # Equation 11
        tau = self.moving_average(similarity, self.threshold)
        self.threshold.copy_(torch.where(evicts, tau, self.threshold))  # Equation 10

    def moving_average(self, similarity: Tensor, last: Tensor) -> Tensor:
        """tau (Equation 10) of the evicted tokens' mean similarity and the last tau, -inf before the first eviction."""
        beta = self.options.beta
        return torch.where(last.isinf(), similarity, beta * similarity + (1 - beta) * last)

    def nearest(self, gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Each evicted key's [m,D] highest cosine similarity with a kept key [n,D], and that key's index: both [m]."""
        kept, best = F.normalize(kept.float(), dim=1), []
        for part in gone.split(max(1, attention.SCORES // len(kept))):
            best.append((F.normalize(part.float(), dim=1) @ kept.mT).max(1))
        return tuple(torch.cat(x) for x in zip(*best, strict=True))

    def weight(self, similarity: Tensor) -> Tensor:
        return similarity.exp() if self.options.merge == "paper" else torch.ones_like(similarity)

    @property
    def own_weight(self) -> float:
        """A kept token's weight: its similarity to itself is 1."""
        return math.e if self.options.merge == "paper" else 1.0

    def slots_to_read(self, length: int, new: int) -> int:
        """The slots of the layer's largest row; on CUDA, of the largest possible row."""
        on_cuda = self.plan.device.type == "cuda"
        return min(length, self.slots if on_cuda else int(self.allotted.max()) + 1)


@dataclass(frozen=True)
class D2OMethod(Method):
    name = "d2o"
    paper = "https://arxiv.org/abs/2406.13035"
    help = "h2o with a budget per layer, and merging of evicted tokens"
    sinks: int = SINKS
    beta: float = option(0.7, "weight of the newest similarity in the moving average", min=0, max=1)
    allocation: Literal["softmax", "uniform", "reciprocal", "exponential"] = option(
        "softmax", "how the variances divide the budget among the layers (Table 4)"
    )
    merge: Literal["none", "paper", "average"] = option("none", "how evicted tokens merge into kept ones (Table 8)")
    ratio: str = option("1:1", "N:M, important to newest tokens (paper: 3:1); N+M where : separates options: ratio=3+1")
    full_layers: list[int] | None = option(None, "layers that keep all tokens, within the budget", min=0)
    uncounted: list[int] | None = option(None, "layers that keep all tokens, beyond the budget", min=0)
    park: Literal["host", "device"] = option("host", "where the prompt's K and V wait for the last layer")

    def __post_init__(self):
        if not re.fullmatch("[0-9]{1,4}[:+][0-9]{1,4}", self.ratio) or not any(self.parts):
            raise ValueError(f"d2o: ratio must be N:M or N+M, not both 0, for example 3:1, not {self.ratio}")

    @property
    def parts(self) -> tuple[int, int]:
        """N and M."""
        return tuple(map(int, re.split("[:+]", self.ratio)))

    def layers(self, plan: Plan) -> tuple[list[int], int, int]:
        """(layers that share slots, number of `full_layers`, number of `uncounted` layers).

        Raises ValueError for a layer that the model does not have, for one in both lists, and if no layer shares slots.
        """
        full, uncounted = set(self.full_layers or []), set(self.uncounted or [])
        for name, layers in (("full_layers", full), ("uncounted", uncounted)):
            if any(layer >= plan.n_layer for layer in layers):
                raise ValueError(f"d2o: {name} must lie below {plan.n_layer}, not {sorted(layers)}")
        if both := full & uncounted:
            raise ValueError(f"d2o: layer {min(both)} is in both full_layers and uncounted: name it once")
        sharing = [layer for layer in range(plan.n_layer) if layer not in full | uncounted]
        if not sharing:
            raise ValueError("d2o: full_layers and uncounted name every layer: use --kv full")
        return sharing, len(full), len(uncounted)

    def tokens(self, plan: Plan, budget: int, prompt: int) -> int:
        """The mean slots of the layers that share slots, for a prompt of `prompt` tokens."""
        sharing, full, uncounted = self.layers(plan)
        planned = plan.planned if plan.share is None else prompt + plan.room
        counted = plan.row_budget(budget, prompt) * (plan.n_layer - uncounted)
        return max(self.sinks + FEWEST, (counted - full * planned) // len(sharing))

    def minimum(self, plan: Plan) -> int:
        sharing, full, uncounted = self.layers(plan)
        return -(-((self.sinks + FEWEST) * len(sharing) + full * plan.planned) // (plan.n_layer - uncounted))

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        return {"fewest slots": self.minimum(plan)} if self.full_layers and plan.share else {}

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The budget in the layers that it counts, every token in the others."""
        _, _, uncounted = self.layers(plan)
        return ((plan.n_layer - uncounted) * budget + uncounted * plan.planned) * plan.slot_bytes

    def parked_bytes(self, plan: Plan, budget: int) -> tuple[int, int]:
        whole = len(self.layers(plan)[0]) * plan.max_prompt * plan.slot_bytes // plan.batch
        return (0, whole) if self.park == "host" else (whole, 0)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        layers, _, _ = self.layers(plan)
        shared = SharedSlots(plan, len(layers), self.tokens(plan, budget, plan.max_prompt), budget)
        evicting = {layer: D2O(plan, shared, index, self) for index, layer in enumerate(layers)}
        return [evicting.get(layer) or Full(plan) for layer in range(plan.n_layer)]
