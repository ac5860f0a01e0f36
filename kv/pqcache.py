"""pqcache: fetches tokens from the host by product-quantization codes of their keys (PQCache, arXiv 2407.12820).

Keys are split into equal parts of their channels, and k-means clusters each part of each KV head's prompt. A key's
codes are the numbers of its nearest centroids. A step multiplies the sum of a group's queries with the centroids,
scores each token by adding up the products of its codes' centroids, and fetches the best tokens. The first and the
newest tokens stay on the device; a generated token that is no longer among the newest gets codes too.

The budget t is n_local + n_topk, n_local = min(128, t / 3), as in tailorkv. Memory: the prompt on the host; on the
device, per KV head, one byte per part and token, the centroids, and the budget. Traffic: the codes, the centroids, and
the budget.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.method import Plan, option
from kv.parts import attention, offload, ops
from kv.parts.fetched import FetchedTokens, FetchMethod

LONG = 64 * 1024  # a prompt of more tokens gets one round of k-means


class PQCache(FetchedTokens):
    def __init__(self, plan: Plan, layer: int, budget: int, options: "PQCacheMethod", staged: offload.Staged | None):
        super().__init__(plan, layer, budget, options, staged)
        self.rounds, self.partitions, self.recent = options.rounds, options.partitions, options.ends(budget)[1]
        if plan.head_dim % self.partitions:
            raise ValueError(f"pqcache: a head of {plan.head_dim} channels has no {self.partitions} equal partitions")
        heads, size = plan.n_kv_head, plan.head_dim // self.partitions
        self.allocate("centroids", heads, self.partitions, 2**options.codebits, size, dtype=torch.float32)
        self.allocate("codes", heads, self.partitions, plan.planned + 1, dtype=torch.uint8)
        self.read_codes = ops.symbol(plan.planned, plan.device)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        super().keep(row, q, k, v, pos)
        if pos + k.shape[2] < self.whole:  # only the last chunk knows all keys
            return
        rounds = self.rounds if self.whole <= LONG else min(self.rounds, 1)
        for head, keys in enumerate(self.held_prompt(row, self.whole)[0] if pos else k[0]):
            for part, x in enumerate(keys.float().chunk(self.partitions, dim=1)):
                centroids, codes = cluster(x, self.centroids.shape[3], rounds)
                self.centroids[row, head, part] = torch.inf  # centroids that a short prompt lacks are nearest to no key
                self.centroids[row, head, part, : len(centroids)] = centroids
                self.codes[row, head, part, : len(x)] = codes

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        n = ops.value(self.read_codes)
        queries = ops.grouped(q, k.shape[1]).float().sum(2).unflatten(2, (self.partitions, -1))  # [B,Hk,parts,d]
        table = (queries[:, :, :, None] * self.centroids).sum(4)  # [B,Hk,parts,centroids]
        first = torch.arange(table[..., 0].numel(), device=q.device, dtype=torch.int32).view(table.shape[:3])
        code = first[..., None] * table.shape[3] + self.codes.narrow(3, 0, n)  # int32: faster than int64 on a CPU
        scores = table.flatten()[code].sum(2)
        position = torch.arange(n, device=q.device)
        middle = (position >= ops.column(self.sinks)) & (position <= (pos - self.local)[:, None])
        q = self.fetch(scores, middle, active, q, self.plan.planned)
        new = self.index >= self.prompt[:, None, None]  # chosen tokens that are on the device
        at = self.first_generated + torch.where(new, self.index - self.prompt[:, None, None], 0)
        for buffer in (self.k, self.v):
            old = buffer[:, :, self.end_slots : self.first_generated]
            self.store_chosen(buffer, torch.where(new[..., None], ops.gather(buffer, at), old), active)
        return self.attend_parts(q, pos, self.index >= 0)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        super().insert(k, v, pos, active)
        row = torch.arange(len(pos), device=pos.device)
        for i in range(k.shape[2]):  # the token that is no longer recent gets codes, if it was generated
            position = pos + i - self.local
            at = self.first_generated + (position - self.prompt).clamp(min=0)
            code = self.nearest(self.k[row, :, at], self.centroids)
            position, new = position.clamp(min=0), (active & (position >= self.prompt))[:, None, None]
            self.codes[row, :, :, position] = torch.where(new, code, self.codes[row, :, :, position])

    def nearest(self, keys: Tensor, centroids: Tensor) -> Tensor:
        """The codes [n,Hk,parts] of keys [n,Hk,D], by centroids [n or 1,Hk,parts,centroids,d]."""
        parts = keys.float().unflatten(2, (self.partitions, 1, -1))  # [n,Hk,parts,1,d]
        return (parts - centroids).square().sum(4).argmin(3).to(torch.uint8)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        super().append(row, k, v, pos)
        prompt, local = int(self.prompt[row]), self.size_of("local", row)
        first, end = (max(0, at - local - prompt) for at in (pos, pos + k.shape[2]))  # no longer recent
        step = max(1, attention.SCORES // self.centroids[row].numel())
        for at in range(first, end, step):
            keys = self.k[row, :, self.first_generated + at : self.first_generated + min(at + step, end)]
            code = self.nearest(keys.transpose(0, 1), self.centroids[row, None])
            self.codes[row, :, :, prompt + at : prompt + at + len(code)] = code.permute(1, 2, 0)

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        yield "codes", self.codes[row, :, :, : max(int(self.prompt[row]), length - self.size_of("local", row))]
        yield "centroids", self.centroids[row]

    def occupied(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Which slots of the ends, and which of the generated tokens, hold sinks or recent tokens: two of [B,n]."""
        slot, prompt = torch.arange(self.end_slots, device=pos.device), self.prompt[:, None]
        sinks, ends = ops.column(self.sinks), ops.column(self.ends)
        end = torch.where(slot < sinks, slot, slot + (prompt - ends).clamp(min=0))  # positions
        new = prompt + torch.arange(ops.value(self.read_slots) - self.first_generated, device=pos.device)
        near_end, near_new = ((x < sinks) | (x > (pos - self.local)[:, None]) for x in (end, new))
        return near_end & (end < prompt), near_new & (new <= pos[:, None])

    def before_step(self, length: int, new: int) -> tuple:
        planned = self.plan.planned
        fewest = ops.min_scores(planned, self.count, self.plan.device)
        self.read_codes = ops.covering(self.read_codes, max(length, fewest), planned)
        return *super().before_step(length, new), ops.value(self.read_codes)

    def step_bytes(self, length: int) -> tuple[int, int]:
        device, host = super().step_bytes(length)
        return device + self.codes[0, ..., 0].numel() * length + self.centroids[0].nbytes, host


def cluster(x: Tensor, count: int, rounds: int) -> tuple[Tensor, Tensor]:
    """k-means, starting at evenly spaced tokens: x [T,d] -> centroids [min(count,T),d], codes uint8 [T]."""
    count = min(count, len(x))
    centroids = x[torch.arange(count, device=x.device) * len(x) // count]

    def nearest() -> Tensor:
        step = max(1, attention.SCORES // count)
        return torch.cat([(centroids.square().sum(1) - 2 * part @ centroids.mT).argmin(1) for part in x.split(step)])

    for _ in range(rounds):
        member = (nearest()[:, None] == torch.arange(count, device=x.device)).float()
        size = member.sum(0)[:, None]
        centroids = torch.where(size > 0, member.mT @ x / size.clamp(min=1), centroids)
    return centroids, nearest().to(torch.uint8)


@dataclass(frozen=True)
class PQCacheMethod(FetchMethod):
    name = "pqcache"
    paper = "https://arxiv.org/abs/2407.12820"
    help = "tokens from the host, by codes of their keys"
    newest, any_token = 1, True
    partitions: int = option(2, "equal parts of a key", min=1)
    codebits: int = option(6, "bits per code, n: 2^n centroids per part", min=1, max=8)
    rounds: int = option(8, "rounds of k-means; 1 for prompts beyond 64K tokens", min=0)

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """K and V of the prompt, one byte per part and token, and the centroids in fp32."""
        codes = self.partitions * plan.planned + 4 * 2**self.codebits * plan.head_dim
        heads = plan.n_layer * plan.batch * plan.n_kv_head
        return heads * (plan.max_prompt * plan.unit_bytes + codes)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        staged = self.staged_tokens(plan, budget)
        return [PQCache(plan, layer, budget, self, staged) for layer in range(plan.n_layer)]
