"""simlayer: lazy layers keep only the first and newest tokens, the others everything (SimLayerKV, arXiv 2410.13846).

A layer is lazy for a prompt if the attention of its last query, averaged over the heads, gives the first `sinks` and
the newest `recent` tokens more than `threshold`, by default the paper's value for the model. Lazy layers stream; the
others keep everything.

The saving is known only after the prompt, but memory is allocated before it. So the budget, the mean over the layers,
fixes how many layers can keep everything: x of L, where x S + (L - x)(sinks + recent) = L t. If more layers are not
lazy, the laziest of them stream too: each row assigns its layers to shared regions while its prompt is read. A budget
of 1.0 is the paper's rule as it stands: only traffic falls.

Memory: the budget. Traffic: a layer reads the tokens it keeps, on a CPU as many as its longest row keeps.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kv.base import KV, Held, Views
from kv.full import Ring
from kv.method import Method, Plan, option
from kv.parts import attention, ops
from kv.parts.buffers import Buffers


def threshold_of(plan: Plan) -> float:
    """The paper's value for Llama-2-7B, Mistral-7B and Qwen2.5-7B; Llama-3-8B's for other models."""
    known = {
        (32, 4096, 32, 1e4): 0.65,
        (32, 4096, 8, 1e4): 0.8,
        (32, 4096, 8, 1e6): 0.8,  # v0.1 and later
        (28, 3584, 4, 1e6): 0.85,
    }
    scaled = plan.rope_type == "linear"  # LongChat has Llama-2's shape
    return 0.9 if scaled else known.get((plan.n_layer, plan.dim, plan.model_kv_heads, plan.rope_theta), 0.9)


class Regions(Buffers):
    """The slots of all layers: `large` regions for every planned token, then small ones for `window` tokens."""

    def __init__(self, plan: Plan, large: int, window: int, options: "SimLayerMethod"):
        super().__init__(plan)
        self.large, self.window, self.sinks = large, window, min(options.sinks, window - 1)
        self.threshold = threshold_of(plan) if options.threshold is None else options.threshold
        self.starts = [0, *accumulate([plan.planned] * large + [window] * (plan.n_layer - large))]
        for name in ("k", "v"):
            self.allocate(name, plan.n_kv_head, self.starts[-1] + 1, plan.head_dim)  # one past the end: ops.store
        self.first: list[Tensor] = []  # by layer, where each row's region begins, [B]
        self.size: list[Tensor] = []  # by layer, the slots that each row uses there as a ring, [B]
        self.used: list[dict[int, int]] = [{} for _ in range(plan.n_layer)]  # the same by layer and row, on the host
        self.masses: list[list[float]] = [[] for _ in range(plan.batch)]  # by row, of the layers prefilled

    def take(self, row: int, layer: int, mass: float, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt, k and v [Hk,T,D]. The large regions go to the layers with the least mass so far."""
        masses, first = self.masses[row], self.starts[layer]
        masses[layer:] = [mass]  # layer 0 drops the masses of the last prompt
        ranked = sorted(range(layer + 1), key=masses.__getitem__)
        if layer >= self.large and layer in ranked[: self.large]:  # it swaps regions with the layer now out
            out = ranked[self.large]
            kept = ops.in_ring(k.shape[1], self.window, self.sinks, k.device)
            slot = self.first[out][row] + ops.ring(kept, self.size[out][row], self.sinks)
            small, first = first, int(self.first[out][row])
            self.write(row, out, small, self.window, kept, self.k[row, :, slot], self.v[row, :, slot])
        lazy = self.threshold < 1 and mass > self.threshold  # a mass may be rounded to above 1
        size = self.window if lazy or first >= self.starts[self.large] else self.plan.planned
        kept = ops.in_ring(k.shape[1], size, self.sinks, k.device)
        self.write(row, layer, first, size, kept, k[:, kept], v[:, kept])

    def write(self, row: int, layer: int, first: int, size: int, kept: Tensor, k: Tensor, v: Tensor) -> None:
        """Gives a layer the ring of `size` slots at `first`, and stores the tokens at positions kept [n] there."""
        self.first[layer][row], self.size[layer][row], self.used[layer][row] = first, size, size
        slot = first + ops.ring(kept, size, self.sinks)
        self.k[row, :, slot], self.v[row, :, slot] = k, v


class SimLayer(Ring):
    def __init__(self, plan: Plan, regions: Regions, index: int):
        super().__init__(plan)
        self.share("regions", regions, first=not index)
        self.index, self.sinks = index, regions.sinks
        self.recent = regions.window - regions.sinks
        self.slots, self.read_slots = plan.planned, ops.symbol(plan.planned, plan.device)
        self.allocate_state("first")
        self.most = plan.planned if index < regions.large else regions.window
        self.allocate_state("size", fill=self.most)
        regions.first.append(self.first)
        regions.size.append(self.size)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """The first chunk that ends beyond the window decides; before it, all layers keep all and none is lazy."""
        if pos > self.regions.window:
            return super().prefill_next(row, q, k, v, pos)
        both, y = self.attend_with(self.held(row, pos), q, k, v, pos)
        self.keep(row, q, both.k[None], both.v[None])
        return y

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        between = slice(self.sinks, max(k.shape[2] - self.recent, 0))
        last = attention.window_scores(q, k, 1)  # the attention of the last query, [Hk,G,T-1]
        mean = self.plan.ranks.sum(last[..., between].sum(2).mean()) / self.plan.ranks.count
        mass = 1 - mean  # on the first and the newest tokens
        self.regions.take(row, self.index, mass.item(), k[0], v[0])

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        keys, values = self.regions.k, self.regions.v
        slot = (self.first + ops.ring(pos, self.size, self.sinks))[:, None]
        ops.store(keys, k, slot, active)
        ops.store(values, v, slot, active)
        first, length = (x[:, None].expand(-1, k.shape[1]) for x in (self.first, torch.minimum(pos + 1, self.size)))
        return ops.attend_regions(q, keys, values, first, length, self.read_slots)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        first, size = int(self.first[row]), int(self.size[row])
        kept = ops.in_ring(pos + k.shape[2], size, self.sinks, k.device, pos)
        self.regions.write(row, self.index, first, size, kept, k[0, :, kept - pos], v[0, :, kept - pos])

    def held(self, row: int, length: int) -> Held:
        position = ops.in_ring(length, int(self.size[row]), self.sinks, self.first.device)
        slot = self.first[row] + ops.ring(position, self.size[row], self.sinks)
        k, v = self.regions.k[row, :, slot], self.regions.v[row, :, slot]
        return Held(k, v, position.expand(self.plan.n_kv_head, -1))

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        first, size = int(self.first[row]), int(self.size[row])
        self.regions.used[self.index][row] = size  # now that a saved row is restored
        used = slice(first, first + min(length, size))
        yield from (("k", self.regions.k[row, :, used]), ("v", self.regions.v[row, :, used]))

    def slots_to_read(self, length: int, new: int) -> int:
        """Slots of the row for which the layer keeps the most; on CUDA only the blocks in use are read."""
        return min(length, max(self.regions.used[self.index].values(), default=self.most))


@dataclass(frozen=True)
class SimLayerMethod(Method):
    name = "simlayer"
    paper = "https://arxiv.org/abs/2410.13846"
    help = "everything in some layers, chosen for each prompt; streaming in the others"
    lossless = {"threshold": 1.0}
    threshold: float | None = option(
        None, "attention above which a layer is lazy; 1: none is; auto: by model", min=0, max=1
    )
    sinks: int = option(4, "first tokens that lazy layers keep", min=0)
    recent: int = option(1024, "newest tokens that lazy layers keep", min=1)

    def counts(self, plan: Plan, budget: int) -> tuple[int, int]:
        """(layers that can keep everything, tokens that each of the others keeps)"""
        window = min(budget, self.sinks + self.recent, plan.planned)
        if window == plan.planned:
            return 0, window
        return min((budget - window) * plan.n_layer // (plan.planned - window), plan.n_layer), window

    def minimum(self, plan: Plan) -> int:
        return self.sinks + 1

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        return dict(zip(("full layers", "window"), self.counts(plan, budget), strict=True))

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        large, window = self.counts(plan, budget)
        return (large * plan.planned + (plan.n_layer - large) * window) * plan.slot_bytes

    def build(self, plan: Plan, budget: int) -> list[KV]:
        regions = Regions(plan, *self.counts(plan, budget), self)
        return [SimLayer(plan, regions, layer) for layer in range(plan.n_layer)]
