"""sparq: scores tokens by the query's largest channels, attends to the best (SparQ, Ribar et al., arXiv 2312.04985).

K is stored a second time, channel by channel. A step reads the r channels in which the group's query is largest and
approximates every token's attention weight from them. It attends to t / 2 tokens: the newest take a quarter of these,
the best the rest. The mean of all V gets the weight of the other tokens. A budget that covers every token builds the
full cache. Memory: one and a half times the full cache. Traffic: t / 2 units to select, t / 2 to attend.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.full import Full, full_layers
from kv.method import Method, Plan, of_share
from kv.parts import ops


class SparQ(Full):
    def __init__(self, plan: Plan, budget: int):
        super().__init__(plan)
        self.channels = channels_of(plan, budget)
        self.chosen = self.allocate_size("count", budget, lambda t: max(1, t // 2))
        self.min_slots = ops.min_scores(self.size, self.chosen, plan.device)
        self.attends_to_all, self.recent = False, self.chosen // 4
        self.allocate("kt", plan.n_kv_head, plan.head_dim, self.size + 1)  # K, channel-major
        self.contents["kt"] = 2, 1
        # Running means of V, a ring by position: if tokens are taken back, an earlier mean is found there.
        self.ring = 1 if plan.rewind == 0 else plan.rewind + 2
        self.allocate("mean", plan.n_kv_head, self.ring + 1, plan.head_dim, dtype=torch.float32)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        super().append(row, k, v, pos)
        self.kt[row, :, :, pos : pos + k.shape[2]] = k[0].mT
        last, mean = pos + k.shape[2] - 1, self.mean[row]
        mean[:, last % self.ring] = (pos * mean[:, (pos - 1) % self.ring] + v[0].float().sum(1)) / (last + 1)

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        yield "mean", self.mean[row, :, (length - 1) % self.ring]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        mean = self.means(v, pos)[:, :, 0]  # [B,Hk,D]
        self.insert(k, v, pos, active)
        queries = ops.grouped(q, k.shape[1]).float()  # [B,Hk,G,D]
        channel = ops.top(queries.abs().sum(2), self.channels)  # [B,Hk,r]
        table = self.kt.narrow(3, 0, ops.value(self.read_slots))
        position = torch.arange(table.shape[3], device=q.device)
        weight = ops.sparq_weights(queries, channel, ops.gather(table, channel), position > pos[:, None])  # [B,Hk,G,S]
        newest = (position > (pos - self.count // 4)[:, None]) & (position <= pos[:, None])  # [B,S]
        scores = weight.sum(2).masked_fill(newest[:, None], torch.inf)
        index = ops.top(scores, self.chosen, most=self.size, count=self.count)
        mask = index <= pos[:, None, None]
        y = ops.attend_rows(q, self.k, self.v, index, mask).view(queries.shape).float()
        at = index.clamp(max=weight.shape[3] - 1)[:, :, None].expand(-1, -1, queries.shape[2], -1)
        alpha = torch.where(mask[:, :, None], weight.gather(3, at), 0.0).sum(3, keepdim=True)
        alpha = torch.where((pos < self.count).view(-1, 1, 1, 1), 1.0, alpha)
        return (alpha * y + (1 - alpha) * mean[:, :, None]).to(q.dtype).view(q.shape)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        super().insert(k, v, pos, active)
        row, at = torch.arange(pos.shape[0], device=k.device)[:, None], ops.following(pos, k.shape[2])
        self.kt[row, :, :, torch.where(active[:, None], at, self.size)] = k.transpose(1, 2)
        ops.store(self.mean, self.means(v, pos), at % self.ring, active)

    def means(self, v: Tensor, pos: Tensor) -> Tensor:
        """The means of all V up to each of n new tokens, [B,Hk,n,D] fp32."""
        row, at = torch.arange(pos.shape[0], device=v.device), ops.following(pos, v.shape[2])
        before = self.mean[row, :, (pos - 1) % self.ring][:, :, None] * pos[:, None, None, None]
        total = before + (v.float() if v.shape[2] == 1 else v.float().cumsum(2))  # compiled, cumsum ends a loop
        return total / (at + 1)[:, None, :, None]

    def step_bytes(self, length: int) -> tuple[int, int]:
        choose = self.channels * length * self.plan.dtype.itemsize
        attend = min(self.chosen, length) * self.plan.unit_bytes
        return self.plan.n_kv_head * (choose + attend + 4 * self.plan.head_dim), 0


def channels_of(plan: Plan, budget: int) -> int:
    """r = D t / S, rounded half up."""
    return min(max(1, of_share(plan.part(budget), plan.head_dim)), plan.head_dim)


@dataclass(frozen=True)
class SparQMethod(Method):
    name = "sparq"
    paper = "https://arxiv.org/abs/2312.04985"
    help = "the best tokens by the query's largest channels"
    fewest = 2

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        return {} if plan.share else {"channels": channels_of(plan, budget)}

    def works(self, plan: Plan, budget: int) -> bool:
        return channels_of(plan, budget) >= min(4, plan.head_dim)

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """K twice."""
        return plan.full_bytes() * 3 // 2

    def build(self, plan: Plan, budget: int) -> list[KV]:
        if budget >= plan.planned:
            return full_layers(plan)
        return [SparQ(plan, budget) for _ in range(plan.n_layer)]
