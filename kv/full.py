"""full: every token's K and V. The baseline, and the base class of methods that store everything and read a part.

Memory and traffic: one K and one V vector per token and KV head. If the model has a sliding window, the slots are a
ring of that many tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from kv import attention, ops
from kv.base import KV, Held
from kv.method import Method, Shape


class Full(KV):
    """`size` slots per row, by default all planned tokens. Later tokens overwrite the oldest except `sinks`."""

    def __init__(self, shape: Shape, size: int | None = None, sinks: int = 0):
        super().__init__(shape)
        self.size = min(size or shape.planned, shape.planned)
        self.sinks = min(sinks, self.size - 1)
        self.allocate_slots(self.size)
        self.recent = self.size - self.sinks
        self.keeps_prompts = self.size == shape.planned

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.append(row, k, v, 0)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        kept = ops.in_ring(pos + k.shape[2], self.size, self.sinks, k.device)
        kept = kept[kept >= pos]
        slot = ops.ring(kept, self.size, self.sinks)
        self.k[row, :, slot], self.v[row, :, slot] = k[0, :, kept - pos], v[0, :, kept - pos]

    def held(self, row: int, length: int) -> Held:
        position = ops.in_ring(length, self.size, self.sinks, self.k.device)
        slot = slice(length) if length <= self.size else ops.ring(position, self.size, self.sinks)
        return Held(self.k[row, :, slot], self.v[row, :, slot], position.expand(self.shape.n_kv_head, -1))

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        if pos + k.shape[2] <= self.size:
            return super().extend(row, q, k, v, pos)
        y = attention.ring_attention(q, k, v, self.held(row, pos), self.size, self.sinks)
        self.append(row, k, v, pos)
        return y

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.store(k, v, ops.ring(pos, self.size, self.sinks), active)
        return self.attend(q, (pos + 1).clamp(max=self.size))  # slots fill in order


@dataclass(frozen=True)
class FullMethod(Method):
    """Registered as FullBitsMethod, which adds --kv-bits."""

    help = "every token's K and V"
    budgeted, windowed = False, True

    def memory(self, shape: Shape, budget: None) -> int:
        """2 L B Hk S D values, S at most the model's window."""
        return shape.full_bytes() * min(shape.window or shape.planned, shape.planned) // shape.planned

    def build(self, shape: Shape, budget: None) -> list[KV]:
        return [Full(shape, shape.window) for _ in range(shape.n_layer)]
