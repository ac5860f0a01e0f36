"""d2o: h2o with a budget for each layer, and tokens that merge into the ones kept when they go (D2O, arXiv 2406.13035).

Layers share L t slots of a KV head and row. The variances of the attention that tokens receive decide a layer's share
(Equation 5): every layer's prompt must have been seen, so K and V wait on the host until then. Raw variances would give
the softmax one winner, so each query head's is scaled to 0 ... 1 over the heads of its layer, and a layer counts with
the mean of its heads: a layer gets more the further most of its heads are below the one that varies most. Of a layer's
slots 4 are the sinks'; `ratio` divides the others between the tokens with the highest sums of attention and the newest
ones (Equations 6 to 8), 3:1.

A token that goes merges into the kept one whose key is most like its own by cosine (Equation 9), if that is like it
enough: at the prompt, as much as the mean of all that go; at a step, as much as a moving average (Equation 10).
Weights are e^similarity, e for the kept token itself (Equations 11 and 12).

Memory: the budget, a spare slot a layer, and every planned token in `uncounted` layers. Any number of tokens can be
generated, unless some layers keep all. Traffic: a layer reads as many slots as its largest row has, on CUDA as many as
it could have, and the keys a second time for the similarities.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kv import ops
from kv.base import KV, Buffers, Method, Shape, option
from kv.full import Full
from kv.h2o import H2O, allocate_known
from kv.streaming import SINKS

LEAST = 4  # tokens of a layer beside the sinks


def scaled_mean(variances: list[float]) -> float:
    """F_l from the variances of a layer's query heads: scaled to 0 ... 1 over them, then their mean; 0 if all equal."""
    low, high = min(variances), max(variances)
    return sum(f - low for f in variances) / (high - low) / len(variances) if high > low else 0.0


def layer_budgets(variances: list[list[float]], prompt: int, budget: int, sinks: int, allocation: str) -> list[int]:
    """S_l (Equation 5): slots of each layer, in all `budget` times their number; none has more than the prompt.

    `variances` has those of each layer's query heads; only `softmax` scales them.
    """
    count = len(variances)
    if prompt <= budget or allocation == "uniform":
        return [budget] * count
    means = [sum(heads) / len(heads) for heads in variances]
    if allocation == "softmax":
        shares = [math.exp(-scaled_mean(heads)) for heads in variances]
    elif allocation == "reciprocal":
        shares = [1 / max(f, 1e-12) for f in means]
    else:
        shares = [math.exp(-f) for f in means]
    least, most = sinks + LEAST, prompt
    if allocation == "exponential":  # not scaled to the sum
        return [int(min(max(round(budget * share, 6), least), most)) for share in shares]
    fixed: dict[int, float] = {}  # layers at a bound; the others share what is left
    while True:
        free = [i for i in range(count) if i not in fixed]
        scale = (budget * count - sum(fixed.values())) / max(sum(shares[i] for i in free), 1e-300)
        wanted = {i: scale * shares[i] for i in free}
        given = {i: min(max(size, least), most) for i, size in wanted.items()}
        more = sum(given.values()) - sum(wanted.values())
        bounded = {i: size for i, size in given.items() if (size > wanted[i] if more > 0 else size < wanted[i])}
        if not bounded:
            break
        fixed |= bounded
    return [int(round((fixed | given)[i], 6)) for i in range(count)]


def most_slots(layers: int, shape: Shape, budget: int, options: "D2OMethod") -> int:
    """The largest S_l that there can be."""
    if options.allocation == "softmax":  # one layer's F is 0, another's 1
        return max(budget, min(shape.max_prompt, int(layers * budget / (1 + (layers - 1) / math.e))))
    if options.allocation == "reciprocal":
        return max(budget, min(shape.max_prompt, layers * budget - (layers - 1) * (options.sinks + LEAST)))
    return budget


class Shared(Buffers):
    """The slots of all layers, a region for each layer and row, and prompts that wait for every layer to be seen."""

    def __init__(self, shape: Shape, layers: int, budget: int, options: "D2OMethod"):
        super().__init__(shape)
        self.budget, self.options, self.total = budget, options, layers * (budget + 1)
        allocate_known(self, self.total, D2O.known)
        self.parked: list[tuple[Tensor, list[Tensor], Tensor, Tensor]] = []  # the first: of the query heads, [Hq]
        self.sizes = [[budget] * layers for _ in range(shape.batch)]  # on the host

    def park(self, known: list[Tensor], variance: Tensor, k: Tensor, v: Tensor) -> None:
        if self.options.park == "host":
            k, v = k.cpu(), v.cpu()
        self.parked.append((variance, known, k, v))

    def divide(self, row: int) -> None:
        """How many slots each layer has of the row."""
        variances = torch.stack([variance for variance, *_ in self.parked]).tolist()
        prompt = self.parked[0][2].shape[1]
        self.place[row] = -1
        self.sizes[row] = layer_budgets(variances, prompt, self.budget, self.options.sinks, self.options.allocation)


class D2O(H2O):
    """A layer's region of the shared slots: it begins at `first` [B] and has `allotted` [B] and a spare one."""

    recent = 1

    def __init__(self, shape: Shape, shared: Shared, index: int, options: "D2OMethod"):
        KV.__init__(self, shape)
        self.shared, self.index, self.options = shared, index, options
        self.sinks, self.size, self.parts = options.sinks, shared.budget, options.parts
        for name in ("k", "v", "place", *self.known):
            self.register_buffer(name, getattr(shared, name), persistent=False)
        self.most = most_slots(len(shared.sizes[0]), shape, shared.budget, options)
        self.allocate("first", dtype=torch.int64, fill=index * (shared.budget + 1))
        self.allocate("allotted", dtype=torch.int64, fill=shared.budget)
        self.allocate("spare", shape.n_kv_head, dtype=torch.int64)
        self.allocate("threshold", shape.n_kv_head, dtype=torch.float32, fill=-torch.inf)  # tau; -inf: none has gone
        self.allocate_speeds()
        self.span = ops.span(None, self.most + 1, self.most + 1, shape.device)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.index == 0:
            self.shared.parked.clear()
        self.shared.park(*self.observed, k[0], v[0])
        self.observed = None

    def finish(self, row: int) -> None:
        if self.index == 0:
            self.shared.divide(row)
        sizes = self.shared.sizes[row]
        first, size = sum(sizes[: self.index]) + self.index, sizes[self.index]
        self.first[row], self.allotted[row], self.threshold[row] = first, size, -torch.inf
        _, known, *kv = self.shared.parked[self.index]
        kept, *rest = self.compress(row, known, *(x.to(self.k.device) for x in kv), size)
        self.fill(row, slice(first, first + kept.shape[1]), kept, *rest)
        if self.index == len(sizes) - 1:
            self.shared.parked.clear()

    def newest(self, size: Tensor | int) -> Tensor | int:
        important, newest = self.parts
        return (size - self.sinks) * newest // (important + newest)

    def sizes(self) -> Tensor:
        return self.allotted[:, None]

    # Merging

    def absorb(self, row: int, score: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().absorb(row, score, k, v, kept)
        stays = torch.zeros_like(score, dtype=torch.bool).scatter(1, kept, True)
        goes = (~stays).nonzero()[:, 1].view(len(k), -1)  # every head drops as many
        merged = [self.merge_prompt(*head) for head in zip(k, v, goes, keys, values, strict=True)]
        keys, values, mean = (torch.stack(x) for x in zip(*merged, strict=True))
        self.threshold[row] = mean
        return keys, values

    def merge_prompt(self, k: Tensor, v: Tensor, goes: Tensor, keys: Tensor, values: Tensor) -> tuple:
        """One KV head's keys and values [n,D] after k and v [T,D] at places `goes` have merged, and their threshold."""
        ours = F.normalize(keys.float(), dim=1)
        best = []  # similarity and slot
        for part in goes.split(max(1, ops.SCORES // len(keys))):
            best.append((F.normalize(k[part].float(), dim=1) @ ours.mT).max(1))
        likeness, slot = (torch.cat(x) for x in zip(*best, strict=True))
        mean = likeness.mean()
        if self.options.merge == "none":
            return keys, values, mean
        weight = self.weight(likeness) * (likeness >= mean)
        theirs = torch.zeros(len(keys), device=k.device).index_add_(0, slot, weight)
        own = self.own_weight(theirs)
        share = weight * ((1 - own) / theirs.clamp(min=1e-30))[slot]
        merged = []
        for kept, all_ in ((keys, k), (values, v)):
            part = share[:, None] * all_[goes].float()
            merged.append((own[:, None] * kept.float()).index_add_(0, slot, part).to(kept.dtype))
        return *merged, mean

    def weight(self, likeness: Tensor) -> Tensor:
        return likeness.exp() if self.options.merge == "weighted" else torch.ones_like(likeness)

    def own_weight(self, theirs: Tensor) -> Tensor:
        """w_c, the weight of a kept token into which others of weights that sum to `theirs` merge."""
        one = math.e if self.options.merge == "weighted" else 1.0
        return torch.where(theirs > 0, (one / (one + theirs)).clamp(min=self.options.keep), 1.0)

    def leave(self, slot: Tensor, evicts: Tensor, keys: Tensor, values: Tensor, place: Tensor, score: Tensor) -> None:
        def at(x: Tensor, slot: Tensor) -> Tensor:
            return x.gather(2, slot[..., None, None].expand(-1, -1, 1, x.shape[3]))[:, :, 0].float()

        key, value = at(keys, slot), at(values, slot)  # [B,Hk,D]
        others = (place >= 0) & (torch.arange(place.shape[2], device=slot.device) != slot[..., None])
        products = ops.dots(key[:, :, None], keys)[:, :, 0]
        norms = (keys.float().square().sum(3) * key.square().sum(2, keepdim=True)).sqrt().clamp(min=1e-12)
        likeness, to = (products / norms).masked_fill(~others, -2.0).max(2)
        if self.options.merge != "none":
            own = self.own_weight(self.weight(likeness))[..., None]
            merges = evicts & (likeness >= self.threshold)
            self.put(self.k, to, merges, (own * at(keys, to) + (1 - own) * key).to(keys.dtype))
            self.put(self.v, to, merges, (own * at(values, to) + (1 - own) * value).to(values.dtype))
        beta = self.options.beta
        moved = torch.where(self.threshold.isinf(), likeness, beta * likeness + (1 - beta) * self.threshold)
        self.threshold.copy_(torch.where(evicts, moved, self.threshold))

    # The region

    def own(self) -> Tensor:
        """Where the first slots lie, [B,Hk,n]."""
        index = self.first[:, None] + torch.arange(self.span.shape[0], device=self.first.device)
        return index.clamp(max=self.shared.total - 1)[:, None].expand(-1, self.shape.n_kv_head, -1)

    def read(self, buffer: Tensor) -> Tensor:
        found = ops.gather(buffer, self.own())
        if buffer is not self.place:
            return found
        beyond = torch.arange(found.shape[2], device=found.device) > self.allotted[:, None]  # another layer's
        return found.masked_fill(beyond[:, None], -1)

    def add(self, buffer: Tensor, change: Tensor) -> Tensor:
        buffer.scatter_add_(2, self.own(), change)
        return ops.gather(buffer, self.own())

    def put(self, buffer: Tensor, slot: Tensor, live: Tensor, new: Tensor | float) -> None:
        super().put(buffer, slot + self.first[:, None], live, new)

    def reset(self, row: int) -> None:
        self.shared.sizes[row] = [self.shared.budget] * len(self.shared.sizes[row])
        self.first[row], self.allotted[row] = self.index * (self.shared.budget + 1), self.shared.budget
        self.place[row, :, self.first[row] : self.first[row] + self.allotted[row] + 1] = -1
        self.spare[row], self.threshold[row] = 0, -torch.inf

    def fit(self, length: int, new: int) -> None:
        self.past = length > self.shape.max_length
        largest = max(sizes[self.index] for sizes in self.shared.sizes)
        self.span = ops.span(self.span, min(length, largest + 1), self.most + 1, self.shape.device)

    def step_bytes(self, length: int) -> tuple[int, int]:
        """What the largest row has; on CUDA, what one could have."""
        largest = max(sizes[self.index] for sizes in self.shared.sizes)
        read = min(length, (self.most if self.shape.device.type == "cuda" else largest) + 1)
        unit = self.shape.unit_bytes * 3 // 2 if self.options.merge != "none" else self.shape.unit_bytes
        return self.shape.n_kv_head * read * (unit + 12), 0

    def overhead(self) -> dict[str, int]:
        state = sum(x.nbytes for x in (self.first, self.allotted, self.spare, self.threshold, self.rope_speed))
        if self.index == 0:
            state += self.place.nbytes + self.score.nbytes
        return {"spare slot": self.shape.slot_bytes, "scores and places": state}


@dataclass(frozen=True)
class D2OMethod(Method):
    help = "h2o with layer budgets, and merging"
    sinks: int = SINKS
    beta: float = option(0.7, "weight of the newest similarity", min=0, max=1)
    allocation: Literal["softmax", "uniform", "reciprocal", "exponential"] = option(
        "softmax", "how the layers share the budget, by the variances (Table 4)"
    )
    merge: Literal["weighted", "average", "none"] = option("weighted", "how tokens merge")
    keep: float = option(0.0, "least weight of a kept token in a merge", min=0, max=1)
    ratio: str = option("3:1", "N:M, important to newest tokens; or N+M, as d2o:ratio=3+1")
    full_layers: list[int] | None = option(None, "layers that keep all, of the same budget", min=0)
    uncounted: list[int] | None = option(None, "layers that keep all, beside the budget", min=0)
    park: Literal["host", "device"] = option("host", "where the prompt's K and V wait")

    def __post_init__(self):
        if not re.fullmatch("[0-9]{1,4}[:+][0-9]{1,4}", self.ratio) or not any(self.parts):
            raise ValueError(f"d2o: ratio must be N:M or N+M, not both 0, for example 3:1, not {self.ratio}")

    @property
    def parts(self) -> tuple[int, int]:
        """N and M."""
        important, newest = re.split("[:+]", self.ratio)
        return int(important), int(newest)

    def layers(self, shape: Shape) -> tuple[list[int], int, int]:
        """(layers that share slots, how many more keep all of the same budget, how many keep all beside it).

        Raises ValueError for a layer that the model does not have, or that is in both lists, and if none shares slots.
        """
        full, uncounted = set(self.full_layers or []), set(self.uncounted or [])
        for name, layers in (("full_layers", full), ("uncounted", uncounted)):
            if any(layer >= shape.n_layer for layer in layers):
                raise ValueError(f"d2o: {name} must lie below {shape.n_layer}, not {sorted(layers)}")
        if both := full & uncounted:
            raise ValueError(f"d2o: layer {min(both)} is in both full_layers and uncounted: name it once")
        sharing = [layer for layer in range(shape.n_layer) if layer not in full | uncounted]
        if not sharing:
            raise ValueError("d2o: full_layers and uncounted name every layer: use --kv full")
        return sharing, len(full), len(uncounted)

    def tokens(self, shape: Shape, budget: int) -> int:
        """What each layer that shares slots has on average."""
        sharing, full, uncounted = self.layers(shape)
        return (budget * (shape.n_layer - uncounted) - full * shape.planned) // len(sharing)

    def minimum(self, shape: Shape) -> int:
        sharing, full, uncounted = self.layers(shape)
        return -(-((self.sinks + LEAST) * len(sharing) + full * shape.planned) // (shape.n_layer - uncounted))

    def memory(self, shape: Shape, budget: int) -> int:
        _, _, uncounted = self.layers(shape)
        return ((shape.n_layer - uncounted) * budget + uncounted * shape.planned) * shape.slot_bytes

    def build(self, shape: Shape, budget: int) -> list[KV]:
        layers, _, _ = self.layers(shape)
        shared = Shared(shape, len(layers), self.tokens(shape, budget), self)
        found = {layer: D2O(shape, shared, index, self) for index, layer in enumerate(layers)}
        return [found.get(layer) or Full(shape) for layer in range(shape.n_layer)]
