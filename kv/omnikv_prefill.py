"""OmniKV's faster prefill (OpenReview ulCAPXYXfa, appendix D.10): sparse layers read a part of a long prompt too.

The prompt is cut into chunks of C tokens. For each, the filter layer, which attends to everything, chooses r C of the
tokens before the chunk: those with the highest attention from the chunk's last queries, the maximum over the heads,
summed over the queries (the selector `uniform`). The sparse layers' queries attend to these and, causally, to their
chunk. An answer that needs other tokens is lost; r C tokens and more are read exactly. Cost: T (r + 1) C query-key
products per head of a sparse layer, instead of T^2 / 2.
"""

import math

import torch
from torch import Tensor

from kv.parts import attention, ops

WINDOW = 16  # last queries of a chunk, which choose


class Chunks:
    """One segment's chunks: its filter layer calls `choose`, then its sparse layers `attend`, for the same prompt."""

    def __init__(self, r: float, size: int):
        self.size, self.count = size, max(1, math.floor(r * size + 0.5))
        self.chosen: list[Tensor] = []  # per chunk, the positions chosen before it

    def choose(self, q: Tensor, k: Tensor) -> None:
        """Chooses for each chunk: q [1,Hq,T,D], k [1,Hk,T,D]."""
        self.chosen = [self.best(q, k, first) for first in range(0, k.shape[2], self.size)]

    def best(self, q: Tensor, k: Tensor, first: int) -> Tensor:
        """The positions chosen for the chunk that begins at `first`, ascending."""
        if first <= self.count:
            return torch.arange(first, device=k.device)
        end = min(first + self.size, k.shape[2])
        n = min(WINDOW, end - first)
        scores = highest_attention(q[0, :, :end], k[0, :, :end], n)[:, :first]
        return ops.top(scores.sum(0), self.count).sort().values

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A sparse layer's attention: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D]."""
        y = torch.empty_like(q)
        for i, chosen in enumerate(self.chosen):
            chunk = slice(i * self.size, (i + 1) * self.size)
            keys, values = (torch.cat([x[:, :, chosen], x[:, :, chunk]], dim=2) for x in (k, v))
            y[:, :, chunk] = attention.suffix_attention(q[:, :, chunk], keys, values)
        return y


def highest_attention(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The attention of the last n queries (Equation 3), the maximum over the heads (Equation 4): [n,T] fp32.

    q [Hq,N,D] are the last N of T queries, k [Hk,T,D]. One KV head at a time.
    """
    length = k.shape[1]
    later = torch.arange(length, device=q.device) > torch.arange(length - n, length, device=q.device)[:, None]
    scores = torch.zeros(n, length, device=q.device)
    for rows, keys in zip(q[:, q.shape[1] - n :].unflatten(0, (k.shape[0], -1)), k, strict=True):
        logits = rows.float() @ keys.float().mT * q.shape[-1] ** -0.5  # [G,n,T]
        scores = torch.maximum(scores, logits.masked_fill(later, -torch.inf).softmax(-1).amax(0))
    return scores
