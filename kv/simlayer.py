"""simlayer: layers that look only at the first and the newest tokens keep only these (SimLayerKV, arXiv 2410.13846).

A layer is lazy for a prompt if the attention of its last query, the mean over the heads, gives the first `sinks` and
the newest `recent` tokens more than `threshold`, which is the model's; it then streams, and the others keep everything.

What that saves is known only after the prompt, memory is taken before. So the budget, the mean over the layers, says
how many layers can keep everything: x of L, where x S + (L - x)(sinks + recent) = L t. If a prompt wants more, the
laziest go without: each row sorts the layers into slots that they all share while its prompt is read. A budget of 1.0
is the paper's rule as it stands: only traffic falls.

Memory: the budget. Traffic: a layer reads what it has, on a CPU as much as its longest row has.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kv import ops
from kv.base import KV, Buffers, Method, Shape, option


def threshold_of(shape: Shape) -> float:
    """The paper's for Llama-2-7B, Mistral-7B and Qwen2.5-7B; for others that of Llama-3-8B."""
    known = {
        (32, 4096, 32, 1e4): 0.65,
        (32, 4096, 8, 1e4): 0.8, (32, 4096, 8, 1e6): 0.8,  # v0.1 and later
        (28, 3584, 4, 1e6): 0.85,
    }  # fmt: skip
    scaled = shape.rope_type == "linear"  # LongChat has Llama-2's shape
    return 0.9 if scaled else known.get((shape.n_layer, shape.dim, shape.n_kv_head, shape.rope_theta), 0.9)


class Shared(Buffers):
    """The slots of all layers: `large` regions for everything, and small ones. Each layer has one of them a row."""

    def __init__(self, shape: Shape, large: int, window: int, options: "SimLayerMethod"):
        super().__init__(shape)
        self.large, self.window, self.planned = large, window, shape.planned
        self.threshold = threshold_of(shape) if options.threshold is None else options.threshold
        self.sinks = min(options.sinks, window - 1)
        whole = ops.BLOCK if shape.device.type == "cuda" else 1  # flex_prefix wants a region to begin with a block
        sizes = [shape.planned] * large + [window] * (shape.n_layer - large)
        self.starts = [0, *accumulate(-(-size // whole) * whole for size in sizes)]
        self.beyond["whole blocks"] = (self.starts[-1] - sum(sizes)) * shape.slot_bytes
        for name in ("k", "v"):
            self.allocate(name, shape.n_kv_head, self.starts[-1], shape.head_dim)
        table = torch.zeros(shape.n_layer, shape.batch, dtype=torch.int64, device=shape.device)
        self.register_buffer("first", table, persistent=False)  # where a layer's slots of a row begin
        self.register_buffer("size", table + window, persistent=False)  # how many of them it uses, as a ring
        self.beyond["regions"] = self.first.nbytes + self.size.nbytes
        self.regions, self.sizes = ([[0] * shape.n_layer for _ in range(shape.batch)] for _ in range(2))  # on the host
        self.masses: list[list[float]] = [[] for _ in range(shape.batch)]  # of the layers that have seen a row's prompt

    def take(self, row: int, layer: int, mass: float, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt, k and v [Hk,T,D]. The layers of least mass have the large regions."""
        masses, regions, region = self.masses[row], self.regions[row], layer
        masses[layer:] = [mass]
        ranked = sorted(range(layer + 1), key=masses.__getitem__)
        if layer >= self.large and layer in ranked[: self.large]:  # it takes the place of the one that is out now
            out = ranked[self.large]
            region, regions[out] = regions[out], region
            kept = ops.in_ring(k.shape[1], self.window, self.sinks, k.device)
            slot = self.starts[region] + ops.ring(kept, self.sizes[row][out], self.sinks)
            self.write(row, out, self.window, kept, self.k[row, :, slot], self.v[row, :, slot])
        lazy = region >= self.large or (self.threshold < 1 and mass > self.threshold)
        size = self.window if lazy else self.planned
        regions[layer] = region
        kept = ops.in_ring(k.shape[1], size, self.sinks, k.device)
        self.write(row, layer, size, kept, k[:, kept], v[:, kept])

    def write(self, row: int, layer: int, size: int, kept: Tensor, k: Tensor, v: Tensor) -> None:
        """A layer now has a ring of so many slots in its region, and in it the tokens at positions kept [n]."""
        first = self.starts[self.regions[row][layer]]
        self.first[layer, row], self.size[layer, row], self.sizes[row][layer] = first, size, size
        slot = first + ops.ring(kept, size, self.sinks)
        self.k[row, :, slot], self.v[row, :, slot] = k, v


class SimLayer(KV):
    def __init__(self, shape: Shape, shared: Shared, index: int):
        super().__init__(shape)
        self.shared, self.index = shared, index
        self.recent = shared.window - shared.sinks
        self.slots, self.span = shape.planned, ops.span(None, shape.planned, shape.planned, shape.device)
        if index == 0:
            self.beyond += shared.beyond

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        between = slice(self.shared.sinks, max(k.shape[2] - self.recent, 0))
        mass = 1 - ops.window_scores(q, k, 1)[..., between].sum(2).mean()
        self.shared.take(row, self.index, mass.item(), k[0], v[0])

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        shared, first, size = self.shared, self.shared.first[self.index], self.shared.size[self.index]
        slot = first + ops.ring(pos, size, shared.sinks)
        ops.store(shared.k, k, slot, active)
        ops.store(shared.v, v, slot, active)
        length = torch.minimum(pos + 1, size)
        if torch.compiler.is_compiling() and q.device.type == "cuda":
            return ops.flex_prefix(q, shared.k, shared.v, length, first)
        offset = torch.arange(self.span.shape[0], device=q.device)
        index = (first[:, None] + offset).clamp(max=shared.starts[-1] - 1)[:, None].expand(-1, k.shape[1], -1)
        return ops.attend_rows(q, shared.k, shared.v, index, (offset < length[:, None])[:, None])

    def reset(self, row: int) -> None:
        self.shared.sizes[row][self.index] = 0  # its length says which slots hold tokens

    def reads(self, length: int, new: int) -> int:
        """Tokens of a row that holds so many in all: of the one for which the layer keeps most; as planned, if none."""
        planned = self.shape.planned if self.index < self.shared.large else self.shared.window
        return min(length, max(sizes[self.index] for sizes in self.shared.sizes) or planned)


@dataclass(frozen=True)
class SimLayerMethod(Method):
    help = "everything in some layers, for each prompt, streaming in the others"
    lossless = {"threshold": 1.0}
    threshold: float | None = option(
        None, "attention above which a layer is lazy; 1: none; auto: the model's", min=0, max=1
    )
    sinks: int = option(4, "first tokens that lazy layers keep", min=0)
    recent: int = option(1024, "newest tokens that lazy layers keep", min=1)

    def plan(self, shape: Shape, budget: int) -> tuple[int, int]:
        """(layers that can keep everything, tokens that each of the others keeps)"""
        window = min(budget, self.sinks + self.recent, shape.planned)
        if window == shape.planned:
            return 0, window
        return min((budget - window) * shape.n_layer // (shape.planned - window), shape.n_layer), window

    def minimum(self, shape: Shape) -> int:
        return self.sinks + 1

    def memory(self, shape: Shape, budget: int) -> int:
        large, window = self.plan(shape, budget)
        return (large * shape.planned + (shape.n_layer - large) * window) * shape.slot_bytes

    def build(self, shape: Shape, budget: int) -> list[KV]:
        shared = Shared(shape, *self.plan(shape, budget), self)
        return [SimLayer(shape, shared, index) for index in range(shape.n_layer)]
