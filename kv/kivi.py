"""kivi: every token's K and V in 2 or 4 bits, but for the newest (KIVI, Liu et al., arXiv 2402.02750).

K is quantized per channel over the tokens of a group, V per token over its channels, `recent` tokens and more wait in
full precision until another group of them is full. The parent of what stores whole layers quantized.

Memory and traffic: bits / 16 of the full cache, 16-bit scales and zero points (2 / 64 values a value), the newest
`recent` + `group` tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kv import ops
from kv.base import KV, Method, Shape, option
from kv.quant import Packed, channels, widen

GROUP, RECENT = 64, 128  # tokens


class Quantized(KV):
    """Tokens 0 to P(n) of n are packed, the others wait in a ring."""

    def __init__(self, shape: Shape, bits: int, group: int = GROUP, recent: int = 0):
        super().__init__(shape)
        self.group, self.wait = group, min(recent, shape.planned)
        self.recent = shape.planned  # all are attended to
        self.ring = -(-self.wait // group) * group + group
        self.packed = Packed(shape, max(0, shape.planned - self.wait) // group, group, bits)
        for name in ("k", "v"):
            self.allocate(name, shape.n_kv_head, self.ring, shape.head_dim, beyond="tokens that wait")
        self.beyond["group past the end"] = shape.batch * shape.n_kv_head * self.packed.group_bytes
        self.span = self.groups_read(None, shape.planned)

    def groups(self, count: Tensor | int) -> Tensor | int:
        """P(n) / group: the groups that are packed of so many tokens."""
        left = count - self.wait
        return (left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0)) // self.group

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        length = k.shape[2]
        count = self.groups(length) * self.group
        self.packed.fill(row, k[0, :, :count], v[0, :, :count])
        slot = torch.arange(count, length, device=k.device) % self.ring
        self.k[row, :, slot], self.v[row, :, slot] = k[0, :, count:], v[0, :, count:]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.store(k, v, pos % self.ring, active)
        count = self.groups(pos + 1)
        if self.packed.groups:
            self.pack(count - 1, active & (count > self.groups(pos)))
        rows = widen(ops.grouped(q, k.shape[1]))  # [B,Hk,G,D]
        n = self.span.shape[0]
        age = (pos[:, None] - torch.arange(self.ring, device=q.device)) % self.ring  # of what is in each slot
        waits = age <= (pos - count * self.group)[:, None]
        logits = ops.dots(rows, self.k)
        if self.packed.groups:
            full = torch.arange(n * self.group, device=q.device) < (count * self.group)[:, None]
            logits = torch.cat([self.packed.dots(rows, n), logits], dim=3)
            waits = torch.cat([full, waits], dim=1)
        logits = logits.masked_fill(~waits[:, None, None], -torch.inf) * q.shape[-1] ** -0.5
        weight = logits.softmax(-1)
        y = ops.sums(weight[..., -self.ring :], self.v.float())
        if self.packed.groups:
            y = y + self.packed.sums(weight[..., : -self.ring], n)
        return y.view(q.shape).to(q.dtype)

    def pack(self, at: Tensor, due: Tensor) -> None:
        """The tokens of group at [B] leave the ring, where due [B]."""
        at = at.clamp(min=0)
        slot = (at[:, None] * self.group + torch.arange(self.group, device=at.device)) % self.ring
        index = slot[:, None].expand(-1, self.k.shape[1], -1)
        self.packed.store(ops.gather(self.k, index), ops.gather(self.v, index), at, due)

    def groups_read(self, old: Tensor | None, length: int) -> Tensor:
        step, most = max(2, ops.SPAN // self.group), max(1, self.packed.groups)
        return ops.span(old, max(1, self.groups(length)), most, self.shape.device, step)

    def fit(self, length: int, new: int) -> None:
        self.span = self.groups_read(self.span, length)

    def step_bytes(self, length: int) -> tuple[int, int]:
        """Of the ring all is read, and what of it may be packed once more."""
        waits = self.ring + self.group * (self.packed.groups > 0)
        packed = self.groups(length) * self.packed.group_bytes
        return self.shape.n_kv_head * (packed + waits * self.shape.unit_bytes), 0


def layer_bytes(shape: Shape, bits: int, group: int = GROUP) -> int:
    """Of one layer, by TailorKV's Table 2: 2 S Hk D (bits / 16 + 2 / group) values for groups of one size."""
    vector = shape.head_dim * bits / 8
    unit = 2 * vector + 4 * shape.head_dim / group + 4 * shape.head_dim / channels(shape.head_dim)
    return int(shape.batch * shape.n_kv_head * shape.planned * unit)


@dataclass(frozen=True)
class KIVIMethod(Method):
    help = "all in 4 bits"
    budgeted, lossless = False, {"recent": 2**30}
    bits: Literal[1, 2, 4, 8] = option(4, "of a value")
    group: int = option(GROUP, "tokens over which a channel of K is quantized", min=8)
    recent: int = option(RECENT, "newest tokens that are not quantized", min=0)

    def memory(self, shape: Shape, budget: None) -> int:
        return shape.n_layer * layer_bytes(shape, self.bits, self.group)

    def build(self, shape: Shape, budget: None) -> list[KV]:
        return [Quantized(shape, self.bits, self.group, self.recent) for _ in range(shape.n_layer)]
