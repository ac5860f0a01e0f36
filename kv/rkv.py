"""rkv: the prompt tokens that are attended to and unlike the others (R-KV, Cai et al., arXiv 2505.24133).

A token's score is weight x importance - (1 - weight) x redundancy. Importance: the attention of the last `window`
queries, by the highest logit of a group, the mean over these queries, max-pooled over `kernel` tokens. Redundancy: the
mean cosine between the token's key and all others, as a softmax over the tokens; each token ignores the newest one
whose cosine with it is above 0.5, so that of similar tokens the newest counts as least redundant. Memory and traffic:
the budget and the generated tokens. Prefill compares every key with every other, a block at a time.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.method import Plan, option
from kv.parts import attention
from kv.parts.scored import Scored, ScoredMethod, pooled

SIMILAR = 0.5  # cosine


class RKV(Scored):
    def __init__(self, plan: Plan, kept: int, window: int, sinks: int, every: int, kernel: int, weight: float):
        super().__init__(plan, kept, window, sinks, every=every, queries=window)
        self.kernel, self.weight = kernel, weight

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, window = q[0].unflatten(0, (k.shape[1], -1)), self.latest
        heads = zip(queries[:, :, queries.shape[2] - window :].float(), k[0].float(), strict=True)
        attended = pooled(torch.stack([attention_of(q, k) for q, k in heads]), self.kernel, window)
        return self.weight * attended - (1 - self.weight) * torch.stack([redundancy(head) for head in k[0].float()])


def attention_of(q: Tensor, k: Tensor) -> Tensor:
    """The mean attention of a group's last queries q [G,window,D] to the tokens before them: k [T,D] -> [T-window]"""
    window, length = q.shape[1], k.shape[0]
    logits = (q @ k.mT).amax(0) * k.shape[1] ** -0.5  # [window,T]
    later = torch.ones_like(logits, dtype=torch.bool).triu(length - window + 1)
    return logits.masked_fill(later, -torch.inf).softmax(1).mean(0)[: length - window]


def redundancy(k: Tensor) -> Tensor:
    """k [T,D] -> [T]"""
    unit, position = F.normalize(k, dim=1), torch.arange(len(k), device=k.device)
    total = torch.zeros(len(k), device=k.device)
    for rows in position.split(max(1, attention.SCORES // len(k))):
        cosine = (unit[rows] @ unit.mT).masked_fill(rows[:, None] == position, 0.0)
        newest = torch.where(cosine > SIMILAR, position, -1).amax(1)
        total += cosine.masked_fill(newest[:, None] == position, 0.0).sum(0)
    return (total / len(k)).softmax(0)


@dataclass(frozen=True)
class RKVMethod(ScoredMethod):
    name = "rkv"
    paper = "https://arxiv.org/abs/2505.24133"
    help = "what is attended to and unlike the other tokens"
    layer = RKV
    window: int = option(8, "last queries of the prompt, whose tokens are always kept", min=1)
    kernel: int = option(7, "width of the max-pooling in tokens", min=1)
    weight: float = option(0.1, "of the importance; the rest weighs redundancy", min=0, max=1)

    def minimum(self, plan: Plan) -> int:
        return max(2, self.sinks + 1)
