"""K and V quantized to 8, 4, 2 or 1 bits and packed, with 16-bit scales and zero points (TailorKV, Equation 4).

Shapes as in kv/base.py. `Packed` stores whole groups of tokens, for attention to all of them. In K a scale covers one
channel of a group's tokens, in V up to 64 channels of one token. A CPU's compiled step multiplies the codes themselves:
K's scales go into the query, once per group, and V's into the weights. K is stored channel by channel, V token by
token. Such a step updates the sums of 16 adjacent tokens at once. Their 8- or 4-bit codes therefore lie in adjacent
bytes, and those that share a byte are far apart (`pack`); their 2- or 1-bit codes fill one word (`pack_words`).
`Vectors` turns each vector into bytes of its own, for methods that gather a few tokens.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.method import Plan, option
from kv.parts import inductor, ops
from kv.parts.buffers import Buffers

BITS = option(16, "bits of a stored value; 16 is the model's own dtype")  # an option of several methods
Bits = Literal[16, 8, 4]
EPS, MOST = 2.0**-14, 65504.0  # bounds of a scale: the smallest normal and the largest fp16 number
CHANNELS = 64  # the most channels of one token that share a scale in `Packed`
SPAN = 32  # and in `Vectors`
SLICE = 8192  # tokens of a prompt in fp32 at once
CODES = 2**18  # of a step that is not compiled in fp32 at once: a CPU's cache holds them
LAUNCHED = 2**8  # times as many on a GPU, where launches take most of the time


def quantize(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes x along one dimension: codes (uint8), and scale and zero point (fp16, `dim` of size 1).

    Equation 4. The codes are computed from the rounded scale and zero point, so the error is at most half a step, plus
    what the rounded zero point clips; fp16's range clips the zero point and the scale.
    """
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = ((high - low) / torch.full_like(low, 2**bits - 1)).clamp(EPS, MOST).half()
    zero = low.clamp(-MOST, MOST).half()
    codes = ((x - rounded(zero)) / rounded(scale)).round().clamp(0, 2**bits - 1)
    return codes.to(torch.uint8), scale, zero


def rounded(x: Tensor) -> Tensor:
    """fp16 to fp32 by way of integers: a compiler may skip the rounding to fp16 of a value it has just computed."""
    return (x.view(torch.int16).int() & 0xFFFF).to(torch.int16).view(torch.float16).float()


def pack(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Packs n codes into m = ceil(n bits / 8) bytes along a negative dim: byte i holds codes i, i + m, i + 2m, ..."""
    per = 8 // bits
    size = -(-codes.shape[dim] // per)
    codes = F.pad(codes, (0, 0) * (-dim - 1) + (0, size * per - codes.shape[dim])).unflatten(dim, (per, size))
    shifted = codes << shifts(bits, dim, codes.device).to(torch.uint8)
    return shifted.sum(dim - 1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, dim: int, size: int) -> Tensor:
    """The first `size` codes along the negative dim, int32."""
    parts = (packed.unsqueeze(dim - 1).int() >> shifts(bits, dim, packed.device)) & (2**bits - 1)
    return parts.flatten(dim - 1, dim).narrow(dim, 0, size)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [..., n] into 32-bit words [..., n bits / 32] of adjacent codes; 32 must divide n bits."""
    codes = codes.unflatten(-1, (-1, 32 // bits)).int()
    return (codes << shifts(bits, 0, codes.device, 32)).sum(-1, dtype=torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The codes [..., n], int32."""
    return ((words[..., None] >> shifts(bits, 0, words.device, 32)) & (2**bits - 1)).flatten(-2)


def shifts(bits: int, dim: int, device: torch.device, size: int = 8) -> Tensor:
    """The bit offset of each code within `size` bits, shaped to broadcast along `dim` - 1."""
    return torch.arange(0, size, bits, dtype=torch.int32, device=device).view(-1, *[1] * -dim)


def slices(groups: int, group: int, most: int | None = None) -> list[tuple[int, int]]:
    """(first group, number of groups) to hold in fp32 at once: groups of `group`, together at most `most`.

    That is by default tokens, SLICE of them.
    """
    step = max(1, (most or SLICE) // group)
    return [(first, min(step, groups - first)) for first in range(0, groups, step)]


def step_slices(packed: Tensor, bits: int, dim: int, groups: int) -> list[tuple[int, int]]:
    """`slices` of a step that is not compiled, of all rows: dimension `dim` of what holds codes counts the groups."""
    most = CODES if packed.device.type == "cpu" else CODES * LAUNCHED
    return slices(groups, packed.select(dim, 0).nbytes * 8 // bits, most)


def vector_bytes(size: int, bits: int) -> int:
    """Bytes of one vector of `size` channels as `Vectors` stores it."""
    return -(-size * bits // 8) + 4 * (size // channels(size, SPAN))


def stored_bytes(plan: Plan, bits: int) -> int:
    """Bytes of one K or V vector, packed unless bits is 16."""
    return plan.unit_bytes // 2 if bits == 16 else vector_bytes(plan.head_dim, bits)


def channels(size: int, most: int = CHANNELS) -> int:
    """How many channels of a vector share a scale: `most`, or fewer, so that all scales cover as many."""
    return math.gcd(size, most)


def pack_vectors(x: Tensor, bits: int) -> Tensor:
    """Packs vectors x [..., D] into bytes [..., vector_bytes]: the codes, then each scale and zero point."""
    codes, scale, zero = quantize(x.unflatten(-1, (-1, channels(x.shape[-1], SPAN))), bits, -1)
    packed = pack(codes.flatten(-2), bits, -1)
    constants = torch.cat([scale, zero], dim=-1).flatten(-2).view(torch.int16).int()
    low, high = constants & 255, (constants >> 8) & 255
    return torch.cat([packed, torch.stack([low, high], dim=-1).flatten(-2).to(torch.uint8)], dim=-1)


def unpack_vectors(x: Tensor, bits: int, size: int) -> Tensor:
    """The approximate inverse of `pack_vectors` for vectors of `size` channels: [..., D] fp32."""
    span = channels(size, SPAN)
    after = 4 * (size // span)  # bytes of scales and zero points
    packed, constants = x.split([x.shape[-1] - after, after], -1)
    low, high = constants.int().unflatten(-1, (-1, 2, 2)).unbind(-1)
    scale, zero = (low | high << 8).to(torch.int16).view(torch.float16).float().unbind(-1)  # [..., D / span]
    codes = unpack(packed, bits, -1, size).unflatten(-1, (-1, span))
    return (codes * scale[..., None] + zero[..., None]).flatten(-2)


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix [size,size] fp32, in blocks of the largest power of 2 that divides it.

    Rotated by it, a vector's outliers are spread over its channels (QuaRot, arXiv 2404.00456).
    """
    block, index = size & -size, torch.arange(size)
    sign, shared = torch.ones(size, size), index[:, None] & index
    for bit in range(block.bit_length() - 1):
        sign = torch.where(shared >> bit & 1 == 1, -sign, sign)
    return torch.where(index[:, None] // block == index // block, sign * block**-0.5, 0).to(device)


def hold_rotations(holder: Buffers) -> None:
    """Gives a layer's store the `rotation` of its vectors, its keys' `bias` [1,Hk,1,D], or None, and what turns it."""
    plan = holder.plan
    holder.hold("rotation", hadamard(plan.head_dim, plan.device))
    holder.hold("bias", None if plan.key_bias is None else plan.key_bias[None, :, None])
    holder.hold("inv_freq", None if plan.key_bias is None else ops.inv_freq(plan))


class Vectors(Buffers):
    """How a method stores the vectors of one layer that it reads one by one: in `bits` bits; 16: as they are.

    A key is stored without the bias that its projection added, turned by the key's position as RoPE turned it: in
    Qwen2.5 that bias is nearly the whole key. Keys and values are rotated, and SPAN channels share a scale.
    """

    def __init__(self, plan: Plan, bits: int):
        super().__init__(plan)
        self.bits = bits
        if bits < 16:
            hold_rotations(self)

    @property
    def width(self) -> int | None:
        """Bytes of a stored vector; None: a vector of the cache's dtype."""
        return None if self.bits == 16 else vector_bytes(self.plan.head_dim, self.bits)

    def pack(self, k: Tensor, v: Tensor, position: Tensor, row: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [B,H,N,D] at position [B,H,N], broadcastable but for N, as they are stored; with `row`, B is
        1 and the row's."""
        return (k, v) if self.bits == 16 else self.by_slices(self.packed, k, v, position, row)

    def read(self, k: Tensor, v: Tensor, position: Tensor, row: int | None = None) -> tuple[Tensor, Tensor]:
        """The approximate inverse of `pack`."""
        return (k, v) if self.bits == 16 else self.by_slices(self.unpacked, k, v, position, row)

    def by_slices(self, convert: Callable, k: Tensor, v: Tensor, position: Tensor, row: int | None) -> tuple:
        """Converts SLICE tokens at once; in a compiled step, which has few, all."""
        if torch.compiler.is_compiling() or k.shape[2] <= SLICE:
            return convert(k, v, position, row)
        slices = zip(k.split(SLICE, 2), v.split(SLICE, 2), position.split(SLICE, -1), strict=True)
        return tuple(torch.cat(x, dim=2) for x in zip(*(convert(*part, row) for part in slices), strict=True))

    def packed(self, k: Tensor, v: Tensor, position: Tensor, row: int | None) -> tuple[Tensor, Tensor]:
        k = k.float() if self.bias is None else k.float() - self.turned_bias(position, row)
        k, v = torch.stack([k, v.float()]) @ self.rotation  # one product: on a GPU it is a kernel of its own
        return pack_vectors(k, self.bits), pack_vectors(v, self.bits)

    def unpacked(self, k: Tensor, v: Tensor, position: Tensor, row: int | None) -> tuple[Tensor, Tensor]:
        k, v = torch.stack([unpack_vectors(x, self.bits, self.plan.head_dim) for x in (k, v)]) @ self.rotation
        k = k if self.bias is None else k + self.turned_bias(position, row)
        return k.to(self.plan.dtype), v.to(self.plan.dtype)

    def turned_bias(self, position: Tensor, row: int | None) -> Tensor:
        """The bias at each position, [B,Hk,N,D] fp32."""
        inv_freq = self.inv_freq if row is None else self.inv_freq[row, None]
        return ops.rerotate(self.bias, position, inv_freq)


class Packed(Buffers):
    """`groups` groups of `group` tokens per row and KV head."""

    def __init__(self, plan: Plan, groups: int, group: int, bits: int):
        super().__init__(plan)
        if group % 8:
            raise ValueError(f"a group must be a multiple of 8 tokens, not {group}")
        self.groups, self.group, self.bits, self.channels = groups, group, bits, channels(plan.head_dim)
        size, d = (plan.n_kv_head, groups and groups + 1), plan.head_dim  # one group past the end, see `store`
        row = group * bits // 8  # bytes of one channel
        self.words = bits <= 2 and row % 4 == 0  # of K: else bytes
        keys = ("k", (d, row // 4), torch.int32, (d, 1)) if self.words else ("k", (d, row), torch.uint8, (d, 1))
        for name, codes, dtype, more in (keys, ("v", (row, d), torch.uint8, (group, d // self.channels))):
            self.allocate(name, *size, *codes, dtype=dtype)
            for part in ("scale", "zero"):
                self.allocate(f"{name}_{part}", *size, *more, dtype=torch.float16)

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of one row and KV head."""
        return sum(x[:1, :1, :1].nbytes for x in self.buffers())

    def views(self, row: int, groups: int) -> Iterator[tuple[str, Tensor]]:
        """Names and views of what holds a row's first groups."""
        yield from ((name, x[row, :, :groups]) for name, x in self.named_buffers())

    def pack(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Quantizes whole groups k and v [..., group, D]: the contents of each buffer, by name."""
        codes, k_scale, k_zero = quantize(k.mT, self.bits, -1)
        packed = pack_words(codes, self.bits) if self.words else pack(codes, self.bits, -1)
        keys = {"k": packed, "k_scale": k_scale, "k_zero": k_zero}
        codes, v_scale, v_zero = quantize(v.unflatten(-1, (-1, self.channels)), self.bits, -1)
        packed = pack(codes.flatten(-2), self.bits, -2)
        return keys | {"v": packed, "v_scale": v_scale[..., 0], "v_zero": v_zero[..., 0]}

    def fill(self, row: int, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Packs tokens, k and v [Hk,n group,D], into n groups of a row, from group `first` on."""
        k, v = (x.unflatten(1, (-1, self.group)) for x in (k, v))
        for start, count in slices(k.shape[1], self.group):
            for name, values in self.pack(*(x.narrow(1, start, count) for x in (k, v))).items():
                getattr(self, name)[row, :, first + start : first + start + count] = values

    def store(self, k: Tensor, v: Tensor, at: Tensor, due: Tensor) -> None:
        """Packs one group per row: k and v [B,Hk,group,D] become group `at` [B] where `due` [B], else the last one."""
        rows, at = torch.arange(at.shape[0], device=at.device), torch.where(due, at, self.groups)
        for name, values in self.pack(k, v).items():
            getattr(self, name)[rows, :, at] = values

    def keys(self, first: int, groups: int, row: int | None = None) -> Tensor:
        """The keys of some groups, [B,Hk,groups group,D] fp32; B is 1 for one row."""
        packed, scale, zero = self.part(first, groups, row, self.k, self.k_scale, self.k_zero)
        return (self.key_codes(packed) * scale.float() + zero.float()).mT.flatten(2, 3)

    def key_codes(self, packed: Tensor) -> Tensor:
        """The codes [..., D, group], int32, of a part of k."""
        return unpack_words(packed, self.bits) if self.words else unpack(packed, self.bits, -1, self.group)

    def values(self, first: int, groups: int, row: int | None = None) -> Tensor:
        """The values of some groups, [B,Hk,groups group,D] fp32; B is 1 for one row."""
        codes, scale, zero = self.part(first, groups, row, self.v, self.v_scale, self.v_zero)
        codes = unpack(codes, self.bits, -2, self.group).unflatten(-1, (-1, self.channels))
        return (codes * scale.float()[..., None] + zero.float()[..., None]).flatten(-2).flatten(2, 3)

    def part(self, first: int, groups: int, row: int | None, *buffers: Tensor) -> list[Tensor]:
        """Some groups of each buffer, of all rows or of one."""
        return [(x if row is None else x[row, None]).narrow(2, first, groups) for x in buffers]

    def dots(self, rows: Tensor, groups: int) -> Tensor:
        """Dot products of rows [B,Hk,G,D] and the keys of the first groups -> [B,Hk,G,n]."""
        if not torch.compiler.is_compiling():
            parts = step_slices(self.k, self.bits, 2, groups)
            return torch.cat([ops.dots(rows, self.keys(*part)) for part in parts], dim=3)
        if self.k.device.type == "cuda":  # it would read 4 scaled queries a code
            return ops.dots(rows, self.keys(0, groups))
        packed, scale, zero = self.part(0, groups, None, self.k, self.k_scale[..., 0], self.k_zero[..., 0])
        codes, y = self.key_codes(packed), []  # [B,Hk,groups,D,group]
        for row in rows.unbind(2):
            scaled = inductor.stored(row[:, :, None] * scale)  # [B,Hk,groups,D]
            offset = inductor.stored((row[:, :, None] * zero).sum(3))
            y.append((scaled[..., None] * codes).sum(3) + offset[..., None])
        return torch.stack(y, dim=2).flatten(3)

    def weighted_sum(self, weight: Tensor, groups: int) -> Tensor:
        """Sums of the first groups' values weighted by [B,Hk,G,n] -> [B,Hk,G,D]."""
        if not torch.compiler.is_compiling():
            return sum(
                ops.weighted_sum(weight.narrow(3, first * self.group, n * self.group), self.values(first, n))
                for first, n in step_slices(self.v, self.bits, 2, groups)
            )
        codes, scale, zero = self.part(0, groups, None, self.v, self.v_scale, self.v_zero)
        codes, y = unpack(codes, self.bits, -2, self.group).unflatten(-1, (-1, self.channels)), []
        for row in weight.unflatten(3, (groups, self.group))[..., None].unbind(2):  # [B,Hk,groups,group,1]
            scaled = inductor.realized(row * scale)  # [B,Hk,groups,group,D / channels]
            total = inductor.sum_blocks(scaled[..., None] * codes)
            y.append((total + (row * zero).sum((2, 3))[..., None]).flatten(2))
        return torch.stack(y, dim=2)
