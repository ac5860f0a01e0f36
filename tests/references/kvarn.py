"""KVarN (arXiv 2606.03458): all layers. Attention within the prompt is exact and left out here."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv.method import Plan

from .attention import Text
from .quantized import EPS, PackedLayers, quantize

UNREAD = 2  # newest tokens of a row in a step, which are not packed yet
ROUNDS = 16  # of balancing
STD = 1e-3, 1e3  # the bounds of a standard deviation
LOG = 8.0  # the bound of a scale's |log|


def hadamard(size: int) -> Tensor:
    """Sylvester's orthonormal Hadamard matrix, in blocks of the largest power of two that divides the size: [D,D]."""
    block = size & -size
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            if i // block == j // block:
                matrix[i, j] = (-1) ** (i % block & j % block).bit_count() / block**0.5
    return matrix


def rotate(x: Tensor, position: int, inv_freq: Tensor) -> Tensor:
    """RoPE of one vector in Hugging Face's channel order, channel i paired with i + D/2: x [D] -> fp32 [D]."""
    a, b = x.float().chunk(2)
    cos, sin = (position * inv_freq.float()).cos(), (position * inv_freq.float()).sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def deviation(x: Tensor, dim: int) -> Tensor:
    """The standard deviation over a dimension, at least a quarter of the root mean square, clipped to `STD`."""
    std = (x - x.mean(dim, keepdim=True)).square().mean(dim).sqrt()
    return std.maximum(x.square().mean(dim).sqrt() / 4).clamp(*STD)


def imbalance(x: Tensor) -> float:
    """Largest over smallest deviation of the channels, plus the same of the tokens: x [tokens,D]."""
    channels, tokens = deviation(x, 0), deviation(x, 1)
    return (channels.max() / channels.min() + tokens.max() / tokens.min()).item()


def balance(x: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of a tile's channels and tokens, s_c and s_t: fp32 [tokens,D] -> [D], [tokens].

    They start at 1. A round multiplies each channel's scale by its deviation of x / (s_c s_t), then each token's by its
    own, then divides the tokens' by their geometric mean: else channels whose mean is not 0 would shift both scales
    without an end. The earliest pair of the lowest imbalance is kept, the start included.
    """
    log_c, log_t = torch.zeros(x.shape[1]), torch.zeros(x.shape[0])

    def balanced() -> Tensor:
        return x / (log_c.exp() * log_t.exp()[:, None])

    least, kept = imbalance(balanced()), (log_c.exp(), log_t.exp())
    for _ in range(ROUNDS):
        log_c = (log_c + deviation(balanced(), 0).log()).clamp(-LOG, LOG)
        log_t = log_t + deviation(balanced(), 1).log()
        log_t = (log_t - log_t.mean()).clamp(-LOG, LOG)
        if imbalance(balanced()) < least:
            least, kept = imbalance(balanced()), (log_c.exp(), log_t.exp())
    return kept


def encode(x: Tensor, other: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Groups' codes, scales, zero points and the other side's scales: x [G,n] -> int64 [G,n], fp16 [G], [G], [n].

    A group is a channel of K or a token of V; `other` [n] are the scales of the other side, which are rounded to fp16
    and divide x. A group's own scale multiplies both its step and its zero point, so that it has no part in the codes.
    """
    rounded = other.clamp(min=EPS).half()
    groups = [quantize(x[i] / rounded.float(), bits) for i in range(x.shape[0])]
    codes, scales, zeros = (torch.stack(parts) for parts in zip(*groups, strict=True))
    return codes, scales, zeros, rounded


def decode(codes: Tensor, scales: Tensor, zeros: Tensor, other: Tensor) -> Tensor:
    """other (scale code + zero), in fp64: [G,n]."""
    return other.double() * (scales.double()[:, None] * codes + zeros.double()[:, None])


class KVarNText(Text):
    """One layer's tokens. `keys` and `values` hold the decoded vectors of the `packed` tokens after the first tile.

    Tile j is tokens j tile ... (j + 1) tile - 1. The first one stays as given; every other is packed once complete.
    """

    def __init__(self, method: "SlowKVarN", layer: int, q: Tensor, k: Tensor, v: Tensor):
        super().__init__(method.plan, q, k, v)
        self.keys, self.values = self.keys.clone(), self.values.clone()  # packing writes to them
        self.bits, self.tile, self.inv_freq = method.bits, method.tile, method.inv_freq
        self.bias = torch.zeros(k.shape[0], k.shape[2]) if method.biases[layer] is None else method.biases[layer]
        self.hadamard = hadamard(k.shape[2])
        self.packed = 0
        # by KV head, in order of tile: what `encode` returns, K's groups being channels, V's tokens
        self.key_tiles: list[list[tuple[Tensor, ...]]] = [[] for _ in self.keys]
        self.value_tiles: list[list[tuple[Tensor, ...]]] = [[] for _ in self.keys]
        self.pack()

    def append(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().append(q, k, v)
        self.pack()

    def pack(self) -> None:
        """Quantizes every tile that is due."""
        while self.packed < max(0, (self.length - UNREAD) // self.tile - 1) * self.tile:
            tile = range(self.tile + self.packed, 2 * self.tile + self.packed)
            for kv_head in range(self.keys.shape[0]):
                self.pack_keys(kv_head, tile)
                self.pack_values(kv_head, tile)
            self.packed += self.tile

    def pack_keys(self, kv_head: int, tile: range) -> None:
        """Quantizes a tile's keys, less their rotated bias, per channel over the tokens."""
        bias = torch.stack([rotate(self.bias[kv_head], t, self.inv_freq) for t in tile])
        x = (self.keys[kv_head, tile].float() - bias) @ self.hadamard.float()
        _, s_t = balance(x)
        self.key_tiles[kv_head].append(encode(x.T, s_t, self.bits[0]))
        decoded = decode(*self.key_tiles[kv_head][-1]).T
        self.keys[kv_head, tile] = decoded @ self.hadamard.T + bias.double()

    def pack_values(self, kv_head: int, tile: range) -> None:
        """Quantizes a tile's values per token over the channels."""
        x = self.values[kv_head, tile].float() @ self.hadamard.float()
        s_c, _ = balance(x)
        self.value_tiles[kv_head].append(encode(x, s_c, self.bits[1]))
        self.values[kv_head, tile] = decode(*self.value_tiles[kv_head][-1]) @ self.hadamard.T


class SlowKVarN(PackedLayers):
    """Quantizes every complete tile but the first, its scales balanced over channels and tokens.

    Of n tokens, max(0, floor((n - UNREAD) / tile) - 1) tile are packed, from position `tile` on. `biases` holds each
    layer's key bias [Hk,D], added before RoPE, or None; `inv_freq` [D/2] are RoPE's frequencies (None: by theta).
    """

    def __init__(
        self,
        plan: Plan,
        kbits: int,
        vbits: int,
        tile: int = 128,
        biases: Sequence[Tensor | None] | None = None,
        inv_freq: Tensor | None = None,
    ):
        super().__init__(plan)
        self.bits, self.tile = (kbits, vbits), tile
        self.biases = [None] * plan.n_layer if biases is None else list(biases)
        if inv_freq is None:
            inv_freq = 1.0 / plan.rope_theta ** (torch.arange(0, plan.head_dim, 2).float() / plan.head_dim)
        self.inv_freq = inv_freq

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        return KVarNText(self, layer, q, k, v)

    def packed_keys(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes int64 [P,D]; fp16: scales and zero points [P / tile,D], tokens' scales [P]."""
        count, head_dim = self.packed(layer), self.plan.head_dim
        codes, s_t = torch.zeros(count, head_dim).long(), torch.zeros(count).half()
        scales, zeros = torch.zeros(2, count // self.tile, head_dim).half()
        for i, tile in enumerate(self.texts[layer].key_tiles[kv_head]):
            span = slice(i * self.tile, (i + 1) * self.tile)
            codes.T[:, span], scales[i], zeros[i], s_t[span] = tile
        return codes, scales, zeros, s_t

    def packed_values(self, layer: int, kv_head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes int64 [P,D]; fp16: scales and zero points [P], channels' scales [P / tile,D]."""
        count, head_dim = self.packed(layer), self.plan.head_dim
        codes, s_c = torch.zeros(count, head_dim).long(), torch.zeros(count // self.tile, head_dim).half()
        scales, zeros = torch.zeros(2, count).half()
        for i, tile in enumerate(self.texts[layer].value_tiles[kv_head]):
            span = slice(i * self.tile, (i + 1) * self.tile)
            codes[span], scales[span], zeros[span], s_c[i] = tile
        return codes, scales, zeros, s_c
