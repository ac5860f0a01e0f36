"""full: every token's K and V. The baseline, and the base class of methods that store everything and read a part.

Memory and traffic: one K and one V vector per token and KV head; with bits=8 or 4 what kvarn takes. A sliding window
makes the slots a ring.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV, Held
from kv.kvarn import TILE, KVarN, KVarNMethod
from kv.method import Method, Plan
from kv.parts import attention, ops
from kv.parts.quant import BITS, Bits


class Ring(KV):
    """A layer that keeps the first `sinks` tokens of a row and the newest, `size` in all."""

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        size = self.size_of("size", row)
        if pos + k.shape[2] <= size:
            return super().extend(row, q, k, v, pos)
        y = attention.ring_attention(q, k, v, self.held(row, pos), size, self.sinks)
        self.append(row, k, v, pos)
        return y


class Full(Ring):
    """The first `sinks` tokens of a row and the newest, `size` in all, by default every planned one.

    Later tokens overwrite the oldest: the slots after the sinks are a ring. It has `plan.rewind` slots more than it
    keeps tokens, so that tokens which may be given back overwrite nothing that is still needed.
    """

    rewinds = True

    def __init__(self, plan: Plan, size: int | None = None, sinks: int = 0):
        super().__init__(plan)
        size = min(size or plan.planned, plan.planned)
        self.sinks = min(sinks, size - 1)
        self.allocate_slots(min(size + plan.rewind, plan.planned))
        self.recent, self.holds_all = size - self.sinks, size == plan.planned
        if self.holds_all:
            self.size = self.row_slots = size
        else:  # tokens that a row keeps, and its slots
            self.allocate_size("size", size)
            self.allocate_size("row_slots", size, lambda t: min(t + plan.rewind, plan.planned))

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """Like an extension: it reads the slots where they are, and each token sees no more than a sliding window."""
        return self.extend(row, q, k, v, pos)

    def observe(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size = self.size_of("size", row)
        return attention.ring_attention(q, k, v, self.held(row, self.whole), size, self.sinks)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        kept = ops.in_ring(pos + k.shape[2], self.size_of("size", row), self.sinks, k.device, pos)
        slot = ops.ring(kept, self.size_of("row_slots", row), self.sinks)
        self.k[row, :, slot], self.v[row, :, slot] = k[0, :, kept - pos], v[0, :, kept - pos]

    def held(self, row: int, length: int) -> Held:
        size = self.size_of("size", row)
        position = ops.in_ring(length, size, self.sinks, self.k.device)
        slot = slice(length) if length <= size else ops.ring(position, self.size_of("row_slots", row), self.sinks)
        return Held(self.k[row, :, slot], self.v[row, :, slot], position.expand(self.plan.n_kv_head, -1))

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        self.store(k, v, ops.ring(ops.following(pos, k.shape[2]), ops.column(self.row_slots), self.sinks), active)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        if self.plan.rewind and not self.holds_all:
            keys, values, queries = self.read(self.k), self.read(self.v), enumerate(q.split(1, dim=2))
            return torch.cat([ops.attend(x, keys, values, self.in_window(pos + i)) for i, x in queries], dim=2)
        length = (pos + 1).clamp(max=self.size)  # slots fill in order
        return ops.attend_prefix(q, self.read(self.k), self.read(self.v), length)

    def in_window(self, pos: Tensor) -> Tensor:
        """Which of the slots that are read hold one of the `size` tokens up to pos [B]: [B,S]."""
        slot, pos = torch.arange(ops.value(self.read_slots), device=pos.device), pos[:, None]
        size, ring = ops.column(self.size), ops.column(self.row_slots)
        age = (pos - slot) % (ring - self.sinks)  # of the newest token up to pos that a slot can hold
        newest = (age < size - self.sinks) & (pos - age >= self.sinks) & (slot < ring)
        return torch.where(slot < self.sinks, slot <= pos, newest)


def windowed(plan: Plan) -> KV:
    """A layer with the plan's sliding window among layers without one, which a method serves."""
    layer = Full(plan, plan.window)
    layer.endless = not layer.holds_all
    return layer


def full_layer(plan: Plan, bits: int) -> KV:
    """One layer that stores every token in `bits` bits per value."""
    if bits == 16:
        return Full(plan, plan.window)
    if plan.window is not None and plan.window < plan.planned:
        raise ValueError(f"a cache in {bits} bits does not honour this model's sliding window: leave out --kv-bits")
    return KVarN(plan, (bits, bits), TILE)


def full_layers(plan: Plan, bits: int = 16) -> list[KV]:
    """What a method builds whose steps would leave tokens out even if the budget covers all."""
    return [full_layer(plan.layer(i), bits) for i in range(plan.n_layer)]


@dataclass(frozen=True)
class FullMethod(Method):
    name = "full"
    help = "every token's K and V; quantized with --kv-bits"
    budgeted, windowed = False, True
    lossless = {"bits": 16}
    bits: Bits = BITS

    def paper_bytes(self, plan: Plan, budget: None) -> int:
        """Every token, or as many as the sliding window."""
        if self.bits < 16:
            return KVarNMethod(self.bits, self.bits).paper_bytes(plan, None)
        return plan.full_bytes() * min(plan.window or plan.planned, plan.planned) // plan.planned

    def build(self, plan: Plan, budget: None) -> list[KV]:
        return full_layers(plan, self.bits)
