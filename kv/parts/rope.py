"""Rotary position embeddings: the frequencies of all forms that checkpoints use. model.py rotates q and k by them.

A form is a dictionary of rope_type, rope_theta, max_position_embeddings and the type's own parameters, as
runtime/hf_config.py reads them.
"""

import math

import torch
from torch import Tensor

for function in (torch.cos, torch.sin, torch.exp):  # MKL's first call, if multithreaded, can lose precision
    function(torch.ones(1))


def rope_frequencies(rope: dict, head_dim: int, length: int) -> tuple[Tensor, float]:
    """inv_freq [D/2], radians per position (fp32), and the factor on cos and sin (1 except for yarn).

    default: RoFormer, arXiv 2104.09864. linear: arXiv 2306.15595. dynamic: NTK-aware, with a base for `length` tokens.
    llama3: Llama 3.1's smoothed split at two wavelengths. yarn: arXiv 2309.00071, sections 3.2 to 3.4.
    """
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)
    limit = rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]
    if kind == "dynamic" and length > limit:
        theta *= (factor * length / limit - (factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return inv_freq / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = limit * inv_freq / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return inv_freq * (keep + (1 - keep) / factor), 1.0
    if kind == "yarn":
        return _yarn(rope, head_dim, inv_freq, limit)
    return inv_freq, 1.0


def _yarn(rope: dict, head_dim: int, inv_freq: Tensor, limit: int) -> tuple[Tensor, float]:
    factor = rope["factor"]

    def channel(turns: float) -> float:  # the (fractional) channel that makes this many turns within the context
        return head_dim * math.log(limit / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = channel(rope.get("beta_fast", 32)), channel(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = magnitude(1.0)
    if "mscale" in rope and "mscale_all_dim" in rope:
        attention = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return inv_freq * (1 - interpolate + interpolate / factor), rope.get("attention_factor", attention)
