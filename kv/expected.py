"""expected: the prompt tokens that queries still to come are expected to attend to (Expected Attention, Devoto et al.,
arXiv 2510.00636).

The queries of a head before RoPE are taken as normally distributed, with the prompt's mean mu and covariance C. RoPE
turns both by the mean rotation of the next `future` positions. A query then attends to key k in proportion to
exp(mu . k / sqrt D + k' C k / 2 D) in the mean. A token's score is this attention, the mean over the group, times the
norm of its value. The sinks are kept, and count in none of these. Memory and traffic: the budget and the generated
tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.method import Plan, option
from kv.parts import ops
from kv.parts.scored import Scored, ScoredMethod


class Expected(Scored):
    def __init__(self, plan: Plan, kept: int, window: int, sinks: int, every: int, future: int):
        super().__init__(plan, kept, window, sinks, every=every, queries=every)
        self.future = future
        self.hold("inv_freq", ops.inv_freq(plan))

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inv_freq, end = self.inv_freq[self.row, None], self.end
        position = torch.arange(max(self.sinks, end - q.shape[2]), end, device=k.device)  # of the queries
        angle = torch.arange(end, end + self.future, device=k.device)[:, None] * inv_freq
        cos, sin = angle.cos().mean(0), angle.sin().mean(0)  # of the mean rotation, [D/2]
        scores = []
        for group, keys, values in zip(q[0].unflatten(0, (len(k[0]), -1)), k[0].float(), v[0].float(), strict=True):
            recent = group[None, :, -len(position) :].float()
            plain = ops.rerotate(recent, -position[None, None], inv_freq)[0]  # without RoPE, [G,n,D]
            mean = plain.mean(1, keepdim=True)  # [G,1,D]
            covariance = (plain - mean).mT @ (plain - mean) / len(position)  # [G,D,D]
            mean = ops.rotate(mean, cos, sin)
            covariance = ops.rotate(ops.rotate(covariance, cos, sin).mT, cos, sin)
            keys, d = keys[self.sinks :], k.shape[3]
            logits = (mean @ keys.mT)[:, 0] * d**-0.5 + (keys @ covariance * keys).sum(2) / (2 * d)  # [G,T']
            scores.append(logits.softmax(1).mean(0) * values[self.sinks :].norm(dim=1))
        return F.pad(torch.stack(scores), (self.sinks, 0))


@dataclass(frozen=True)
class ExpectedMethod(ScoredMethod):
    name = "expected"
    paper = "https://arxiv.org/abs/2510.00636"
    help = "what queries to come are expected to attend to"
    layer = Expected
    window: int = option(0, "newest prompt tokens that are always kept", min=0)
    future: int = option(512, "positions after the prompt whose queries are expected", min=1)
