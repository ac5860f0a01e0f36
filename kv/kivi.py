"""kivi: every token's K and V in 8, 4, 2 or 1 bits, except the newest tokens (KIVI, Liu et al., arXiv 2402.02750).

`Packed` (quant.py) quantizes K per channel over a group of tokens, V per token over up to 64 channels. The newest
`recent` tokens, and older ones until they fill a group, wait in full precision. tailorkv uses these layers too.

Memory and traffic: the bits, 16-bit scales and zero points (2 / 64 of a value per value), and the newest `recent` +
`group` tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kv.base import KV, Held, Views
from kv.method import Method, Plan, option
from kv.parts import inductor, ops
from kv.parts.quant import Packed, channels

GROUP, RECENT = 64, 128  # tokens


class Quantized(KV):
    """Of n tokens, (n - sinks - unpacked) // group * group after the sinks are packed; the others wait in a ring."""

    rewinds = quantizes = packs_in_step = True

    def __init__(
        self,
        plan: Plan,
        bits: int | tuple[int, int],
        group: int = GROUP,
        recent: int = 0,
        sinks: int = 0,
        packed: Callable[..., Packed] = Packed,
    ):
        """recent: newest tokens, and sinks: first tokens, that are not packed."""
        super().__init__(plan)
        self.group, self.unpacked = group, min(recent, plan.planned)
        self.recent = plan.planned  # every step attends to all tokens
        self.sinks = min(sinks, plan.planned - 1)
        ring = self.unpacked + plan.rewind + group  # a group that was packed may be packed again
        self.waits = self.sinks + min(ring, plan.planned - self.sinks)  # slots
        self.packed = packed(plan, self.groups(plan.planned), group, bits)
        for name in ("k", "v"):
            self.allocate(name, plan.n_kv_head, self.waits + 1, plan.head_dim)  # one past the end: ops.store
        self.read_groups = ops.symbol(max(1, self.packed.groups), plan.device)

    def groups(self, length: Tensor | int) -> Tensor | int:
        """How many groups of a row of `length` tokens are packed."""
        left = length - self.sinks - self.unpacked
        return (left.clamp(min=0) if isinstance(left, Tensor) else max(left, 0)) // self.group

    def slot(self, position: Tensor) -> Tensor:
        """The slots of tokens that wait."""
        return ops.ring(position, self.waits, self.sinks)

    def waiting(self, first: int, length: int) -> Tensor:
        """The slots of the tokens from `first` on of a row of `length` tokens."""
        return self.slot(torch.arange(min(first, length), length, device=self.k.device))

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        length, done, k, v = pos + k.shape[2], self.groups(pos), k[0], v[0]
        start = min(k.shape[1], max(0, self.sinks - pos))  # of the first new token that is no sink
        if start:
            self.k[row, :, pos : pos + start], self.v[row, :, pos : pos + start] = k[:, :start], v[:, :start]
        slot = self.waiting(self.sinks + done * self.group, pos)
        k, v = (torch.cat([x[row, :, slot], new[:, start:]], 1) for x, new in ((self.k, k), (self.v, v)))
        packs = (self.groups(length) - done) * self.group
        self.packed.fill(row, k[:, :packs], v[:, :packs], done)
        slot = self.waiting(self.sinks + done * self.group + packs, length)
        self.k[row, :, slot], self.v[row, :, slot] = k[:, packs:], v[:, packs:]

    def views(self, row: int, length: int) -> Views:
        yield from self.packed.views(row, self.groups(length))
        filled = min(length, self.waits)
        yield from (("waits_k", self.k[row, :, :filled]), ("waits_v", self.v[row, :, :filled]))

    def held(self, row: int, length: int) -> Held:
        groups, sinks = self.groups(length), min(self.sinks, length)
        slot = self.waiting(self.sinks + groups * self.group, length)
        packed = (decoded(0, groups, row)[0].to(self.k.dtype) for decoded in (self.packed.keys, self.packed.values))
        parts = zip(packed, (self.k[row], self.v[row]), strict=True)
        return Held.new(*(torch.cat([x[:, :sinks], old, x[:, slot]], dim=1) for old, x in parts))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        groups = self.groups(pos + 1)
        queries = ops.grouped(q, k.shape[1]).float() * q.shape[-1] ** -0.5  # [B,Hk,G,D]
        slot = torch.arange(self.waits, device=q.device)
        age = (pos[:, None] - slot) % (self.waits - self.sinks)  # of the token in each slot of the ring
        waits = age <= (pos - self.sinks - groups * self.group)[:, None]
        if self.sinks:
            waits = torch.where(slot < self.sinks, slot <= pos[:, None], waits)
        keys, values = (x.narrow(2, 0, self.waits) for x in (self.k, self.v))
        logits = [ops.dots(queries, keys).masked_fill(~waits[:, None, None], -torch.inf)]
        sums = [lambda weight: ops.weighted_sum(weight, values.float())]
        if self.packed.groups:
            read = ops.value(self.read_groups)  # groups
            empty = torch.arange(read * self.group, device=q.device) >= (groups * self.group)[:, None]
            empty = ops.stored(empty.float())[:, None, None] > 0  # a CPU compares floats faster than positions
            logits.append(self.packed.dots(queries, read).masked_fill(empty, -torch.inf))
            sums.append(lambda weight: self.packed.weighted_sum(weight, read))
        return ops.attend_stores(logits, sums).view(q.shape).to(q.dtype)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        n = k.shape[2]  # at most a group's
        self.store(k, v, self.slot(ops.following(pos, n)), active)
        if self.packed.groups:  # one may be full now
            groups = self.groups(pos + n)
            newest = (groups - 1).clamp(min=0)
            slot = self.slot(ops.following(newest * self.group, self.group))
            index = slot[:, None].expand(-1, self.k.shape[1], -1)
            full = active & (groups > self.groups(pos))
            self.packed.store(ops.gather(self.k, index), ops.gather(self.v, index), newest, full)

    def before_step(self, length: int, new: int) -> tuple:
        step, most = max(2, inductor.STEP // self.group), max(1, self.packed.groups)
        self.read_groups = ops.covering(self.read_groups, max(1, self.groups(length)), most, step)
        return (ops.value(self.read_groups),)

    def step_bytes(self, length: int) -> tuple[int, int]:
        """Every step reads all that waits, and a second time the group that it may pack."""
        waits = self.waits + self.group * (self.packs_in_step and self.packed.groups > 0)
        packed = self.groups(length) * self.packed.group_bytes
        return self.plan.n_kv_head * (packed + waits * self.plan.unit_bytes), 0


def packed_bytes(plan: Plan, bits: int, group: int) -> int:
    """One layer by TailorKV's Table 2: 2 S Hk D (bits / 16 + 2 / group) values if K and V share `group`."""
    values = 2 * plan.head_dim * bits / 8 + 4 * plan.head_dim / group
    unit = values + 4 * plan.head_dim / channels(plan.head_dim)
    return int(plan.batch * plan.n_kv_head * plan.planned * unit)


@dataclass(frozen=True)
class KIVIMethod(Method):
    name = "kivi"
    paper = "https://arxiv.org/abs/2402.02750"
    help = "every token's K and V in 8, 4, 2 or 1 bits"
    budgeted = False
    lossless = {"recent": 2**30}
    bits: Literal[1, 2, 4, 8] = option(4, "bits of a stored value")
    group: int = option(GROUP, "tokens that share a scale in each channel of K, a multiple of 8", min=8, max=1024)
    recent: int = option(RECENT, "newest tokens that are not quantized", min=0)

    def paper_bytes(self, plan: Plan, budget: None) -> int:
        return plan.n_layer * packed_bytes(plan, self.bits, self.group)

    def build(self, plan: Plan, budget: None) -> list[KV]:
        return [Quantized(plan, self.bits, self.group, self.recent) for _ in range(plan.n_layer)]
