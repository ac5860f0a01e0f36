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

from kv.base import KV, Buffers, Held
from kv.method import Method, Shape, option
from kv.parts import attention, inductor, ops


def threshold_of(shape: Shape) -> float:
    """The paper's value for Llama-2-7B, Mistral-7B and Qwen2.5-7B; Llama-3-8B's for other models."""
    known = {
        (32, 4096, 32, 1e4): 0.65,
        (32, 4096, 8, 1e4): 0.8,
        (32, 4096, 8, 1e6): 0.8,  # v0.1 and later
        (28, 3584, 4, 1e6): 0.85,
    }
    scaled = shape.rope_type == "linear"  # LongChat has Llama-2's shape
    return 0.9 if scaled else known.get((shape.n_layer, shape.dim, shape.model_kv_heads, shape.rope_theta), 0.9)


class Shared(Buffers):
    """The slots of all layers: `large` regions for all planned tokens, then small ones. A layer has one per row.

    `window` counts the tokens of a small region, the sinks included.
    """

    def __init__(self, shape: Shape, large: int, window: int, options: "SimLayerMethod"):
        super().__init__(shape)
        self.large, self.window, self.planned = large, window, shape.planned
        self.threshold = threshold_of(shape) if options.threshold is None else options.threshold
        self.sinks = min(options.sinks, window - 1)
        whole = inductor.BLOCK if shape.device.type == "cuda" else 1  # flex_prefix needs regions that begin at a block
        capacities = [shape.planned] * large + [window] * (shape.n_layer - large)
        self.starts = [0, *accumulate(-(-size // whole) * whole for size in capacities)]
        for name in ("k", "v"):
            self.allocate(name, shape.n_kv_head, self.starts[-1], shape.head_dim)
        table = torch.zeros(shape.n_layer, shape.batch, dtype=torch.int64, device=shape.device)
        self.hold("first", table)  # slot where a layer's region begins, [L,B]
        self.hold("size", table + window)  # slots it uses there, as a ring, [L,B]
        self.regions, self.sizes = ([[0] * shape.n_layer for _ in range(shape.batch)] for _ in range(2))  # on the host
        self.masses: list[list[float]] = [[] for _ in range(shape.batch)]  # by row, of the layers prefilled

    def take(self, row: int, layer: int, mass: float, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt, k and v [Hk,T,D]. The large regions go to the layers with the least mass so far."""
        masses, regions = self.masses[row], self.regions[row]
        masses[layer:] = [mass]  # layer 0 drops the masses of the last prompt
        regions[layer] = layer  # the first `large` regions are the large ones
        ranked = sorted(range(layer + 1), key=masses.__getitem__)
        if layer >= self.large and layer in ranked[: self.large]:  # it swaps regions with the layer now out
            out = ranked[self.large]
            regions[layer], regions[out] = regions[out], regions[layer]
            kept = ops.in_ring(k.shape[1], self.window, self.sinks, k.device)
            slot = self.starts[regions[layer]] + ops.ring(kept, self.sizes[row][out], self.sinks)
            self.write(row, out, self.window, kept, self.k[row, :, slot], self.v[row, :, slot])
        lazy = self.threshold < 1 and mass > self.threshold  # a mass may be rounded to above 1
        size = self.window if lazy or regions[layer] >= self.large else self.planned
        kept = ops.in_ring(k.shape[1], size, self.sinks, k.device)
        self.write(row, layer, size, kept, k[:, kept], v[:, kept])

    def write(self, row: int, layer: int, size: int, kept: Tensor, k: Tensor, v: Tensor) -> None:
        """Gives a layer a ring of `size` slots in its region and stores the tokens at positions kept [n] there."""
        first = self.starts[self.regions[row][layer]]
        self.first[layer, row], self.size[layer, row], self.sizes[row][layer] = first, size, size
        slot = first + ops.ring(kept, size, self.sinks)
        self.k[row, :, slot], self.v[row, :, slot] = k, v


class SimLayer(KV):
    reads_all = True

    def __init__(self, shape: Shape, shared: Shared, index: int):
        super().__init__(shape)
        self.shared, self.index = shared, index
        self.recent = shared.window - shared.sinks
        self.slots, self.read_slots = shape.planned, inductor.symbol(shape.planned, shape.device)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        between = slice(self.shared.sinks, max(k.shape[2] - self.recent, 0))
        last = attention.window_scores(q, k, 1)  # the attention of the last query, [Hk,G,T-1]
        mean = self.shape.ranks.sum(last[..., between].sum(2).mean()) / self.shape.ranks.count
        mass = 1 - mean  # on the first and the newest tokens
        self.shared.take(row, self.index, mass.item(), k[0], v[0])

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        shared, first, size = self.shared, self.shared.first[self.index], self.shared.size[self.index]
        slot = (first + ops.ring(pos, size, shared.sinks))[:, None]
        ops.store(shared.k, k, slot, active)
        ops.store(shared.v, v, slot, active)
        length = torch.minimum(pos + 1, size)
        if torch.compiler.is_compiling() and q.device.type == "cuda":
            return inductor.flex_prefix(q, shared.k, shared.v, length, first)
        offset = torch.arange(inductor.value(self.read_slots), device=q.device)
        index = (first[:, None] + offset).clamp(max=shared.starts[-1] - 1)[:, None].expand(-1, k.shape[1], -1)
        return ops.attend_rows(q, shared.k, shared.v, index, (offset < length[:, None])[:, None])

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        shared = self.shared
        kept = ops.in_ring(pos + k.shape[2], shared.sizes[row][self.index], shared.sinks, k.device, pos)
        slot = self.slots_of(row, kept)
        shared.k[row, :, slot], shared.v[row, :, slot] = k[0, :, kept - pos], v[0, :, kept - pos]

    def slots_of(self, row: int, position: Tensor) -> Tensor:
        """Where the tokens at `position` lie in the shared buffers."""
        first, size = self.region(row)
        return first + ops.ring(position, size, self.shared.sinks)

    def region(self, row: int) -> tuple[int, int]:
        """The slot where a row's region begins, and how many slots it uses there."""
        return self.shared.starts[self.shared.regions[row][self.index]], self.shared.sizes[row][self.index]

    def held(self, row: int, length: int) -> Held:
        shared = self.shared
        position = ops.in_ring(length, shared.sizes[row][self.index], shared.sinks, shared.k.device)
        slot = self.slots_of(row, position)
        return Held(shared.k[row, :, slot], shared.v[row, :, slot], position.expand(self.shape.n_kv_head, -1))

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        size = self.shared.sizes[row][self.index]
        if pos + k.shape[2] <= size:
            return super().extend(row, q, k, v, pos)
        y = attention.ring_attention(q, k, v, self.held(row, pos), size, self.shared.sinks)
        self.append(row, k, v, pos)
        return y

    def registers(self, row: int) -> dict[str, Tensor]:
        return {"first": self.shared.first[self.index, row], "size": self.shared.size[self.index, row]}

    def restored(self, row: int) -> None:
        shared = self.shared
        shared.regions[row][self.index] = shared.starts.index(int(shared.first[self.index, row]))
        shared.sizes[row][self.index] = int(shared.size[self.index, row])

    def views(self, row: int, length: int) -> dict[str, Tensor]:
        first, size = self.region(row)
        used = slice(first, first + min(length, size))
        return {"k": self.shared.k[row, :, used], "v": self.shared.v[row, :, used]}

    def reset(self, row: int) -> None:
        self.shared.sizes[row][self.index] = 0  # stale slots can stay: the row's length masks them

    def slots_to_read(self, length: int, new: int) -> int:
        """Slots of the row for which the layer keeps the most; as planned if no row holds a prompt."""
        planned = self.shape.planned if self.index < self.shared.large else self.shared.window
        return min(length, max(sizes[self.index] for sizes in self.shared.sizes) or planned)


@dataclass(frozen=True)
class SimLayerMethod(Method):
    help = "everything in some layers, chosen for each prompt; streaming in the others"
    threshold: float | None = option(
        None, "attention above which a layer is lazy; 1: none is; auto: by model", min=0, max=1
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

    def build(self, shape: Shape, budget: int) -> list[KV]:
        shared = Shared(shape, *self.plan(shape, budget), self)
        return [SimLayer(shape, shared, index) for index in range(shape.n_layer)]
