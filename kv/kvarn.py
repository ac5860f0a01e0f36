"""kvarn: every token's K and V in 8, 4 or 2 bits, rotated and with scales on two sides (KVarN, arXiv 2606.03458).

Tiles of `tile` tokens are rotated by a Hadamard matrix, which spreads outliers over the channels, and divided by scales
that even out the standard deviations of channels and tokens. Then K is quantized per channel and V per token: one
outlying token costs the others nothing. A key is packed without its projection's bias (kv/parts/quant.py); a step adds
the query's product with it, turned by the token's position. The first tile, which holds the sinks, and the tokens of
the newest one wait in full precision. A step does not pack: it would balance a tile every time, in 17 passes. The host
packs a full tile between two steps, `make_room` before the first step that reads its codes (`UNREAD`).

The paper has kbits=4 vbits=2, and 2 and 2; the default here is 4 and 4.

Memory and traffic: the bits of K and V; three 16-bit numbers for each token, and three for each channel of a tile; the
first tile and the newest in the cache's dtype.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.kivi import Quantized
from kv.method import Method, Plan, option
from kv.parts import ops
from kv.parts.buffers import Buffers
from kv.parts.quant import EPS, hold_rotations, quantize, rounded, shifts, slices, step_slices

TILE = 128  # tokens
ROUNDS = 16  # of balancing
PART = 0.25  # of the root mean square: the least standard deviation
STD, MOST = 1e3, math.exp(8)  # bounds of a standard deviation and of a scale, or of 1 divided by them
UNREAD = 2  # newest tokens of a row in a step, of which the host may not know before it
LANES = 16  # adjacent words, as many as the widest register of a CPU holds
TERMS = 4  # products that are added up at once: Inductor stores a sum of more


def balance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of channels and of tokens, of tiles x [...,tile,D] fp32: [...,1,D] and [...,tile,1], fp16.

    Of the pairs that ROUNDS alternating divisions by the standard deviations over tokens and over channels pass
    through, the one whose quotient x / (channels * tokens) has the most equal standard deviations on both sides. The
    tokens' scales have a geometric mean of 1, or channels whose mean is not 0 would shift both without an end.
    """
    by_token, by_channel = ((y, y.square()) for y in (x, x.mT.contiguous()))
    channel, token = (torch.ones_like(y[..., :1, :]) for y, _ in (by_token, by_channel))  # factors, as rows
    best = torch.full_like(x[..., :1, :1], torch.inf), channel, token
    for _ in range(ROUNDS + 1):
        own = deviation(*by_token, token, channel)
        uneven = spread(own) + spread(deviation(*by_channel, channel, token))
        now = uneven, channel, token
        best = tuple(torch.where(uneven < best[0], new, old) for new, old in zip(now, best, strict=True))
        channel = (channel / own).clamp(1 / MOST, MOST)
        token = token / deviation(*by_channel, channel, token)
        token = (token / token.log().mean(-1, keepdim=True).exp()).clamp(1 / MOST, MOST)
    channel, token = (factor.reciprocal().clamp(min=EPS).half() for factor in best[1:])
    return channel, token.mT


def deviation(x: Tensor, square: Tensor, along: Tensor, across: Tensor) -> Tensor:
    """The standard deviation of each column of along^T x across, within bounds: [...,1,M].

    x [...,N,M], square: its squares; along [...,1,N], across [...,1,M]. It is at least a part of the root mean square:
    a channel of V that hardly varies over a tile, as where tokens repeat, would otherwise be magnified until its mean
    takes all of a token's range. So a difference of moments is precise enough; they are products of a row and a matrix.
    """
    squares = along.square() @ square
    variance = squares - (along @ x).square() / x.shape[-2]
    return (variance.maximum(PART**2 * squares).sqrt() * across * x.shape[-2] ** -0.5).clamp(1 / STD, STD)


def spread(x: Tensor) -> Tensor:
    """The largest over the smallest value of each row."""
    return x.amax(-1, keepdim=True) / x.amin(-1, keepdim=True)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [...,R,N], of which a step sums over R, into words [...,N/16,R bits/32,16].

    Code j of word i is that of row j R bits/32 + i. The words are 32 bits, held as fp32: see `products`.
    """
    codes = codes.int().unflatten(-2, (32 // bits, -1)) << shifts(bits, -2, codes.device, 32)
    words = codes.sum(-3, dtype=torch.int32).unflatten(-1, (-1, LANES)).transpose(-3, -2)
    return words.contiguous().view(torch.float32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes [...,R,N], int32."""
    return codes_of(words.view(torch.int32).transpose(-3, -2).flatten(-2), bits).flatten(-3, -2)


def codes_of(words: Tensor, bits: int) -> Tensor:
    """The codes of every word: [...,M,N] -> [...,32/bits,M,N] int32."""
    return words.view(torch.int32).unsqueeze(-3) >> shifts(bits, -2, words.device, 32) & 2**bits - 1


def products(rows: Tensor, words: Tensor, bits: int) -> list[Tensor]:
    """Sums over R of codes, times each of G rows [B,tiles,Hk,G,R]: G tensors [B,tiles,Hk,N].

    On a CPU a compiled loop reads LANES words at a time, in the order of memory, and unpacks them once for all rows.
    They are held as fp32, because Inductor's loads of int32 go through the stack.
    """
    if not torch.compiler.is_compiling():
        parts = (slice(first, first + n) for first, n in step_slices(words, bits, 1, words.shape[1]))
        return torch.cat([rows[:, part] @ unpack(words[:, part], bits).float() for part in parts], dim=1).unbind(-2)
    if words.device.type == "cuda":  # sums of so many terms would be stored in parts
        codes = codes_of(words, bits)  # [...,N/16,32/bits,R bits/32,16]
        factors = rows.unflatten(-1, codes.shape[-3:-1])[..., None, :, :, None]  # [...,G,1,32/bits,R bits/32,1]
        return [(factor * codes).sum((-3, -2)).flatten(-2) for factor in factors.unbind(-5)]
    words, sums = words.view(torch.int32), []
    codes = [words >> shift & 2**bits - 1 for shift in range(0, 32, bits)]
    for row in rows.unbind(-2):
        factors = row.unflatten(-1, (len(codes), -1))[..., None, :, :, None].unbind(-3)  # [...,1,R bits/32,1]
        terms = [factor * code for factor, code in zip(factors, codes, strict=True)]
        few = [sum(terms[i + 1 : i + TERMS], terms[i]).sum(-2) for i in range(0, len(terms), TERMS)]
        sums.append(sum(few[1:], few[0]).flatten(-2))
    return sums


class Tiles(Buffers):
    """`groups` tiles of `group` tokens of each row: R is the side that sums run over, N the other one.

    That is channels and tokens of K, tokens and channels of V. A number is (code scale + zero) norm, scale and zero are
    R's, norm is N's.
    """

    def __init__(self, plan: Plan, groups: int, group: int, bits: tuple[int, int]):
        super().__init__(plan)
        self.groups, self.group, d = groups, group, plan.head_dim
        self.sides = {"k": (d, group, bits[0]), "v": (group, d, bits[1])}
        if d % LANES or group % LANES:
            raise ValueError(f"kvarn: a tile of {group} tokens and a head of {d} channels must be multiples of {LANES}")
        for name, (r, n, b) in self.sides.items():
            size = groups and groups + 1, plan.n_kv_head  # one tile past the end: ops.covering
            self.allocate(name, *size, n // LANES, r * b // 32, LANES, dtype=torch.float32)
            for part, count in (("scale", r), ("zero", r), ("norm", n)):
                self.allocate(f"{name}_{part}", *size, count, dtype=torch.float16)
        hold_rotations(self)

    @property
    def group_bytes(self) -> int:
        """Bytes of one tile of one row and KV head."""
        return sum(getattr(self, name)[:1, :1, :1].nbytes for name in self.initial)

    def views(self, row: int, groups: int) -> Views:
        for name in self.initial:
            part = getattr(self, name)[row, :groups]
            yield name, part.view(torch.int32) if name in self.sides else part  # words may look like NaN

    def fill(self, row: int, k: Tensor, v: Tensor, first: int = 0) -> None:
        """Packs tokens, k and v [Hk,n group,D], into n tiles of a row, from tile `first` on."""
        k, v = (x.unflatten(1, (-1, self.group)).transpose(0, 1) for x in (k, v))  # [n,Hk,group,D]
        for start, count in slices(len(k), self.group):
            keys, values = (x[start : start + count].float() for x in (k, v))
            at = slice(first + start, first + start + count)
            if self.bias is not None:
                keys = keys - self.turned_bias(at.start, count, row)[0]
            keys, values = rotated = torch.stack([keys, values]) @ self.rotation
            channel, token = balance(rotated)  # of both at once: on a GPU, launches take most of the time
            for name, x, norm in (("k", keys.mT, token[0].mT), ("v", values, channel[1])):
                bits = self.sides[name][2]
                codes, scale, zero = quantize(x / rounded(norm), bits, -1)
                parts = {
                    "": pack(codes, bits),
                    "_scale": scale[..., 0],
                    "_zero": zero[..., 0],
                    "_norm": norm[..., 0, :],
                }
                for part, new in parts.items():
                    getattr(self, name + part)[row, at] = new

    def side(self, name: str, first: int, groups: int, row: int | None = None) -> list[Tensor]:
        """Words, scales, zero points and norms of some tiles of `k` or `v`, of all rows or of one."""
        buffers = (getattr(self, name + part) for part in ("", "_scale", "_zero", "_norm"))
        return [(x if row is None else x[row, None]).narrow(1, first, groups) for x in buffers]

    def dequantized(self, name: str, first: int, groups: int, row: int | None) -> Tensor:
        """What `k` or `v` holds of some tiles, rotated: [B,groups,Hk,R,N] fp32; B is 1 for one row."""
        words, scale, zero, norm = self.side(name, first, groups, row)
        codes = unpack(words, self.sides[name][2])
        return (codes * scale[..., None].float() + zero[..., None].float()) * norm[..., None, :].float()

    def keys(self, first: int, groups: int, row: int | None = None) -> Tensor:
        """The keys of some tiles, [B,Hk,groups group,D] fp32; B is 1 for one row."""
        k = self.dequantized("k", first, groups, row).mT @ self.rotation
        k = k if self.bias is None else k + self.turned_bias(first, groups, row)
        return k.transpose(1, 2).flatten(2, 3)

    def values(self, first: int, groups: int, row: int | None = None) -> Tensor:
        """The values of some tiles, [B,Hk,groups group,D] fp32; B is 1 for one row."""
        return (self.dequantized("v", first, groups, row) @ self.rotation).transpose(1, 2).flatten(2, 3)

    def turned_bias(self, first: int, groups: int, row: int | None) -> Tensor:
        """The bias at the positions of some tiles, [B,groups,Hk,group,D] fp32.

        It is turned to a token's place in its tile, then to the tile's place: `bias_dots` turns queries by the latter.
        """
        inv_freq = self.inv_freq if row is None else self.inv_freq[row, None]
        angles = self.start(first, groups)[:, None, None] * inv_freq[:, None, None, None]  # [B,groups,1,1,D/2]
        return ops.rotate(self.in_tile(inv_freq)[:, None], angles.cos(), angles.sin())

    def in_tile(self, inv_freq: Tensor) -> Tensor:
        """The bias at each place of a tile that begins at position 0, [B,Hk,group,D]."""
        return ops.rerotate(self.bias, torch.arange(self.group, device=self.k.device)[None, None], inv_freq)

    def start(self, first: int, groups: int) -> Tensor:
        """The positions of the first tokens of some tiles, which follow the one in full precision: [groups,1] fp32."""
        return (torch.arange(first + 1, first + 1 + groups, device=self.k.device) * self.group)[:, None].float()

    def dots(self, rows: Tensor, groups: int) -> Tensor:
        """Dot products of rows [B,Hk,G,D] and the keys of the first tiles -> [B,Hk,G,n]."""
        y = self.scaled_sums("k", (rows @ self.rotation)[:, None], groups)
        if self.bias is not None:
            y = [a + b for a, b in zip(y, self.bias_dots(rows, groups).unbind(3), strict=True)]
        return torch.stack(y, dim=3).permute(0, 2, 3, 1, 4).flatten(3)

    def weighted_sum(self, weight: Tensor, groups: int) -> Tensor:
        """Sums of the first tiles' values weighted by [B,Hk,G,n] -> [B,Hk,G,D]."""
        rows = weight.unflatten(3, (groups, self.group)).permute(0, 3, 1, 2, 4)
        return torch.stack([x.sum(1) for x in self.scaled_sums("v", rows, groups)], dim=2) @ self.rotation

    def scaled_sums(self, name: str, rows: Tensor, groups: int) -> list[Tensor]:
        """Sums over R of the first tiles' numbers, rotated, times each of G rows [B,groups,Hk,G,R]: G of [...,N]."""
        words, scale, zero, norm = self.side(name, 0, groups)
        offsets = ops.stored((rows * zero[..., None, :]).sum(-1)).unbind(-1)
        sums = products(ops.realized(rows * scale[..., None, :]), words, self.sides[name][2])
        return [(y + offset[..., None]) * norm for y, offset in zip(sums, offsets, strict=True)]

    def bias_dots(self, rows: Tensor, groups: int) -> Tensor:
        """Dot products of rows [B,Hk,G,D] and the turned bias: [B,groups,Hk,G,group]."""
        angles = self.start(0, groups)[:, None] * self.inv_freq[:, None, None, None]  # [B,1,groups,1,D/2]
        cos, sin = ops.stored(angles.cos()), ops.stored(angles.sin())
        back = ops.stored(ops.rotate(rows[:, :, None], cos, -sin))  # [B,Hk,groups,G,D]
        y = back.flatten(2, 3) @ self.in_tile(self.inv_freq).mT
        return y.unflatten(2, (groups, -1)).transpose(1, 2)


class KVarN(Quantized):
    """The host packs, at the latest before the step that reads a tile's codes."""

    packs_in_step = False

    def __init__(self, plan: Plan, bits: tuple[int, int], tile: int):
        super().__init__(plan, bits, tile, UNREAD + plan.rewind, sinks=tile, packed=Tiles)
        self.done: dict[int, int] = {}  # how many tiles of each row are packed

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        super().append(row, k, v, pos)
        self.done[row] = self.groups(pos + k.shape[2])

    def make_room(self, row: int, length: int) -> None:
        done, due = self.done.get(row, 0), self.groups(length + self.unpacked)
        if due > done:
            slot = self.waiting(self.sinks + done * self.group, self.sinks + due * self.group)
            self.packed.fill(row, self.k[row, :, slot], self.v[row, :, slot], done)
            self.done[row] = due

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        self.store(k, v, self.slot(ops.following(pos, k.shape[2])), active)

    def reset(self, row: int) -> None:
        super().reset(row)
        self.done.pop(row, None)

    def views(self, row: int, length: int) -> Views:
        self.done[row] = self.groups(length)
        return super().views(row, length)


@dataclass(frozen=True)
class KVarNMethod(Method):
    name = "kvarn"
    paper = "https://arxiv.org/abs/2606.03458"
    help = "every token's K and V in 8, 4 or 2 bits, rotated and balanced"
    budgeted = False
    lossless = {"tile": 1024}
    kbits: Literal[2, 4, 8] = option(4, "bits of a stored value of K")
    vbits: Literal[2, 4, 8] = option(4, "bits of a stored value of V")
    tile: int = option(TILE, "tokens that share a scale in each channel, a multiple of 16", min=16, max=1024)

    def paper_bytes(self, plan: Plan, budget: None) -> int:
        """bits / 8 bytes a channel; three 16-bit numbers for each token, and for each tile's channel."""
        unit = plan.head_dim * (self.kbits + self.vbits) / 8 + 6 + 6 * plan.head_dim / self.tile
        return int(plan.n_layer * plan.batch * plan.n_kv_head * plan.planned * unit)

    def build(self, plan: Plan, budget: None) -> list[KV]:
        bits = self.kbits, self.vbits
        return [KVarN(plan.layer(i), bits, self.tile) for i in range(plan.n_layer)]
