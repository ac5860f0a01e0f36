"""KVarN (arXiv 2606.03458): all layers. Attention within the prompt is exact and left out here."""

import torch
from torch import Tensor

from kv.method import Plan

from .attention import SlowLayers, Text
from .quantized import EPS, PackedText, quantize

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


class KVarNText(PackedText):
    """One layer's tokens. Tile j is tokens j tile ... (j + 1) tile - 1. The first one stays as given; every other is
    packed once complete.
    """

    def __init__(self, method: "SlowKVarN", layer: int, q: Tensor, k: Tensor, v: Tensor):
        self.bits, self.whole, self.inv_freq = method.bits, method.tile, method.inv_freq
        self.bias = torch.zeros(k.shape[0], k.shape[2]) if method.biases is None else method.biases[layer]
        self.hadamard = hadamard(k.shape[2])
        super().__init__(method.plan, q, k, v, method.tile)

    def due(self) -> int:
        return max(0, (self.length - UNREAD) // self.group - 1)

    def pack_keys(self, kv_head: int, tile: range) -> tuple[Tensor, ...]:
        """Quantizes a tile's keys, less their rotated bias, per channel over the tokens."""
        bias = torch.stack([rotate(self.bias[kv_head], t, self.inv_freq) for t in tile])
        x = (self.keys[kv_head, tile].float() - bias) @ self.hadamard.float()
        _, s_t = balance(x)
        encoded = encode(x.T, s_t, self.bits[0])
        self.keys[kv_head, tile] = decode(*encoded).T @ self.hadamard.T + bias.double()
        return encoded

    def pack_values(self, kv_head: int, tile: range) -> tuple[Tensor, ...]:
        """Quantizes a tile's values per token over the channels."""
        x = self.values[kv_head, tile].float() @ self.hadamard.float()
        s_c, _ = balance(x)
        encoded = encode(x, s_c, self.bits[1])
        self.values[kv_head, tile] = decode(*encoded) @ self.hadamard.T
        return encoded


class SlowKVarN(SlowLayers):
    """Quantizes every complete tile but the first, its scales balanced over channels and tokens.

    Of n tokens, max(0, floor((n - UNREAD) / tile) - 1) tile are packed, from position `tile` on. `biases` [L,Hk,D] are
    the key biases, added before RoPE, or None.
    """

    def __init__(self, plan: Plan, kbits: int, vbits: int, tile: int = 128, biases: Tensor | None = None):
        super().__init__(plan)
        self.bits, self.tile, self.biases = (kbits, vbits), tile, biases
        self.inv_freq = 1.0 / plan.rope_theta ** (torch.arange(0, plan.head_dim, 2).float() / plan.head_dim)

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        return KVarNText(self, layer, q, k, v)
