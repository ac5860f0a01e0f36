"""random: tokens drawn at random, which any score has to beat (arXiv 2609.03430).

A token's score is a hash of its position, KV head and layer. With `every`, the prompt's tokens go last. Memory and
traffic: the budget and the generated tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from kv.method import option
from kv.parts import ops
from kv.parts.scored import Scored, ScoredMethod


class Random(Scored):
    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt = self.prompts.get(self.row, 0)  # its length, with `every`
        return ops.chance(self.at, ops.salt(self.plan)) + (self.at < prompt)


@dataclass(frozen=True)
class RandomMethod(ScoredMethod):
    name = "random"
    paper = "https://arxiv.org/abs/2609.03430"
    help = "tokens drawn at random"
    layer = Random
    window: int = option(0, "newest tokens that are always kept", min=0)
