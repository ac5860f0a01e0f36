"""keydiff: the prompt tokens whose keys differ most from the mean key (KeyDiff, Park et al., arXiv 2504.15364).

A token's score is minus the cosine between its key and the mean of all unit keys of the KV head: distinct keys stay,
whatever the queries. Memory and traffic: the budget and the generated tokens.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kv.method import option
from kv.parts.scored import Scored, ScoredMethod


class KeyDiff(Scored):
    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unit = F.normalize(k[0].float(), dim=-1)  # [Hk,T,D]
        return -F.cosine_similarity(unit, unit.mean(1, keepdim=True), dim=-1)


@dataclass(frozen=True)
class KeyDiffMethod(ScoredMethod):
    name = "keydiff"
    paper = "https://arxiv.org/abs/2504.15364"
    help = "the keys that differ most from the mean key"
    layer = KeyDiff
    window: int = option(0, "newest prompt tokens that are always kept", min=0)
