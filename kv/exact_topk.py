"""exact_topk: the oracle of sparse attention. Scores every token exactly, then attends to the best alone.

Each query head attends to its own best tokens; with `shared`, a group attends to the tokens with the highest summed
scores. This is what methods that approximate the scores can hope for at the same budget. Memory: the full cache.
Traffic: every K, and the K and V of the budget's tokens for each query head, or for each group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV
from kv.full import Full
from kv.method import Method, Plan, option
from kv.parts import ops


class ExactTopK(Full):
    def __init__(self, plan: Plan, budget: int, shared: bool):
        super().__init__(plan)
        self.attends_to_all, self.recent, self.shared = False, 0, shared
        self.budget = self.allocate_size("count", min(budget, self.size))
        self.min_slots = ops.min_scores(self.size, self.budget, plan.device)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        keys = self.read(self.k)
        later = torch.arange(keys.shape[2], device=q.device) > pos[:, None]
        logits = ops.group_logits(ops.grouped(q, k.shape[1]), keys, later[:, None, None])  # [B,Hk,G,S]
        scores = ops.softmax(logits).sum(2) if self.shared else logits.flatten(1, 2)  # weights rank as their logits do
        index = ops.top(scores, self.budget, most=self.size, count=self.count)
        return ops.attend_rows(q, self.k, self.v, index, index <= pos[:, None, None])

    def step_bytes(self, length: int) -> tuple[int, int]:
        choices = 1 if self.shared else self.plan.n_head // self.plan.n_kv_head
        units = length / 2 + min(choices * self.budget, length)  # an upper bound: query heads may share tokens
        return int(self.plan.n_kv_head * units * self.plan.unit_bytes), 0


@dataclass(frozen=True)
class ExactTopKMethod(Method):
    name = "exact_topk"
    help = "the best tokens by exact scores: an oracle"
    shared: bool = option(False, "a group's query heads attend to the same tokens")

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        return plan.full_bytes()

    def build(self, plan: Plan, budget: int) -> list[KV]:
        return [ExactTopK(plan, budget, self.shared) for _ in range(plan.n_layer)]
