"""tova: the tokens that the newest query attends to, the same in all heads (Oren et al., arXiv 2401.06104).

The prompt's last query ranks its tokens by its attention, the mean over all query heads of the layer; then every step
drops the token to which its own query attends least, never the newest. Memory and traffic: the budget, and a slot for
the newest token. Generation is unbounded.
"""

from torch import Tensor

from kv.base import KV, Held
from kv.method import Method, Plan
from kv.parts.evicting import Evicting


class TOVA(Evicting):
    def importance(self, weight: Tensor, held: Held, pos: Tensor, active: Tensor) -> Tensor:
        mean = self.plan.ranks.sum(weight.mean((1, 2)))  # [B,n], over all heads, those of other processes included
        return mean[:, None].expand_as(held.position)  # [B,Hk,n]: the lowest goes


class TOVAMethod(Method):
    name = "tova"
    paper = "https://arxiv.org/abs/2401.06104"
    help = "what the newest query attends to"
    fewest = 2  # the smallest budget

    def build(self, plan: Plan, budget: int) -> list[KV]:
        return [TOVA(plan, budget) for _ in range(plan.n_layer)]
