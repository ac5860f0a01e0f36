"""lagkv: the prompt tokens that stand out against those that follow (LagKV, Liang et al., arXiv 2504.04704).

After the sinks come partitions of `lag` tokens. The minimum and the maximum of each channel over the next partition
normalize K and V of a partition; a token's deviation over the channels, as a share (softmax) of its partition's, the
mean of K's and V's, ranks it among them. So every partition loses the same part. The last whole partition and what
follows it have no successor and stay; if the budget is too small for them, the newest do. Memory and traffic: the
budget and the generated tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.method import Plan, option
from kv.parts.scored import Scored, ScoredMethod


class LagKV(Scored):
    def __init__(self, plan: Plan, kept: int, window: int, sinks: int, every: int, lag: int):
        super().__init__(plan, kept, window, sinks, every=every)
        self.lag = lag

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = k.shape[2]
        scores = (2 + torch.arange(length, device=k.device) / length).repeat(k.shape[1], 1)
        count = (length - self.sinks) // self.lag  # partitions
        if count > 1:
            parts = slice(self.sinks, self.sinks + count * self.lag)
            deviation = sum(self.deviation(x[0, :, parts].float().unflatten(1, (count, -1))) for x in (k, v)) / 2
            rank = deviation.argsort(dim=2, stable=True).argsort(2)  # [Hk,count-1,lag]
            scores[:, parts.start : parts.stop - self.lag] = rank.flatten(1) / self.lag
        return scores

    def deviation(self, x: Tensor) -> Tensor:
        """The share of each token in its partition's deviation: x [Hk,count,lag,D] -> [Hk,count-1,lag]."""
        least, most = x[:, 1:].amin(2, keepdim=True), x[:, 1:].amax(2, keepdim=True)
        normal = torch.where(most > least, (x[:, :-1] - least) / (most - least), 0.0)
        return normal.std(3).softmax(2)


@dataclass(frozen=True)
class LagKVMethod(ScoredMethod):
    name = "lagkv"
    paper = "https://arxiv.org/abs/2504.04704"
    help = "what stands out against the tokens that follow"
    layer = LagKV
    window: int = option(0, "newest prompt tokens that are always kept", min=0)
    lag: int = option(128, "tokens of a partition", min=1)
