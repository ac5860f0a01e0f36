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

from kv import attention, ops

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
        later = torch.arange(end, device=k.device) > torch.arange(end - n, end, device=k.device)[:, None]
        scores = torch.zeros(n, first, device=k.device)
        for rows, keys in zip(q[0, :, end - n : end].unflatten(0, (k.shape[1], -1)), k[0, :, :end], strict=True):
            logits = rows.float() @ keys.float().mT * q.shape[-1] ** -0.5  # [G,n,end]
            weight = logits.masked_fill(later, -torch.inf).softmax(-1)
            scores = torch.maximum(scores, weight[..., :first].amax(0))
        return ops.top(scores.sum(0), self.count).sort().values

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A sparse layer's attention: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D]."""
        y = torch.empty_like(q)
        for i, chosen in enumerate(self.chosen):
            chunk = slice(i * self.size, (i + 1) * self.size)
            keys, values = (torch.cat([x[:, :, chosen], x[:, :, chunk]], dim=2) for x in (k, v))
            y[:, :, chunk] = attention.suffix_attention(q[:, :, chunk], keys, values)
        return y
