"""random: tokens that a hash of position, KV head and layer draws; every score has to beat it (arXiv 2609.03430).
With `every`, the prompt's go last if the budget exceeds them. Memory and traffic: the budget and the generated tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from kv.method import option
from kv.parts import ops
from kv.parts.scored import Scored, ScoredMethod


class Random(Scored):
    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt = self.prompts.get(self.row, 0)
        return ops.chance(self.at, ops.salt(self.plan)) + (self.at < prompt) * (prompt < self.kept_of(prompt))


@dataclass(frozen=True)
class RandomMethod(ScoredMethod):
    name = "random"
    paper = "https://arxiv.org/abs/2609.03430"
    help = "tokens drawn at random"
    layer = Random
    window: int = option(0, "newest tokens that are always kept", min=0)
