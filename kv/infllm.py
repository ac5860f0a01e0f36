"""infllm: attends to the blocks whose representative keys match the query best (InfLLM, Xiao et al., arXiv 2402.04617).

The prompt between its first tokens (sinks) and its last n_local ones is cut into blocks. A block's representatives are
the tokens whose keys have the largest mean product with the n_local queries after them. A step scores every block by
the products of its queries with the representatives' keys, and attends to the sinks, the last tokens, the best blocks
and all generated tokens. Products are linear, so only the sum of a block's representative keys is stored. The paper
also prefills this way; here prefill is exact.

As in the authors' release, all heads choose together, and scores ignore a block's position: representative keys are
turned back to position 0, every query to position n_local. With joint=false each KV head chooses, with RoPE applied.

Memory: the full cache and one vector per block and KV head; with `offload` the blocks are on the host, and the tokens
that a step attends to on the device. Traffic: one vector per block and KV head to choose, and the budget.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.method import Plan, option
from kv.parts import offload, ops
from kv.parts.fetched import Fetched


class InfLLM(Fetched):
    """An entry of the pool is one block of one KV head."""

    queries: Tensor | None = None  # [1,Hq,n,D], while a prompt is read: those from the first block on that is not full

    def __init__(self, plan: Plan, layer: int, budget: int, options: "InfLLMMethod", staged: offload.Staged | None):
        (count, blocks), block = options.blocks(plan, budget), options.block
        pool = options.pool(f"layer {layer}", (plan.n_kv_head * blocks, 2, block, plan.head_dim), staged, plan)
        super().__init__(plan, budget, options.ends, count, size=block, pool=pool)
        self.allocate_size("chosen", budget, lambda t: options.blocks(plan, t)[0])  # how many blocks to fetch
        self.block, self.reps, self.blocks, self.joint = block, options.reps, blocks, options.joint
        if self.joint:
            self.hold("inv_freq", ops.inv_freq(plan))
        size = (plan.n_kv_head, blocks, plan.head_dim)
        self.allocate("representative_sums", *size, dtype=torch.float32)  # the sum of each block's representative keys

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        if pos:
            k, v = (torch.cat([old[None], x], dim=2) for old, x in zip(self.held_prompt(row, pos), (k, v), strict=True))
            q = torch.cat([self.queries, q], dim=2)
        self.keep_ends(row, k[0, :, pos:], v[0, :, pos:], pos)
        (sinks, local), length = self.ends_of(row), k.shape[2]
        done, full = (max(0, n - sinks - local) // self.block for n in (pos, length))  # blocks: before, and now
        first, last = sinks + done * self.block, length - local
        if last > first:
            blocks = -(-(last - first) // self.block)
            fill = (0, 0, 0, first + blocks * self.block - last)
            for i, x in enumerate((k, v)):
                cut = torch.nn.functional.pad(x[0, :, first:last], fill).unflatten(1, (blocks, self.block))
                for head, entries in enumerate(cut):
                    self.pool.write(row, head * self.blocks + done, entries, i)
            part = (x[0, :, x.shape[2] - (length - first) :] for x in (q, k))
            self.representative_sums[row, :, done : done + blocks] = self.represent(row, *part, done, blocks)
        rest = max(0, length - sinks - full * self.block)  # tokens from the first block on that is not full
        self.queries = q[:, :, q.shape[2] - rest :].clone() if length < self.whole else None

    def represent(self, row: int, q: Tensor, k: Tensor, done: int, blocks: int) -> Tensor:
        """The sum of the representative keys of each block after `done` ones, [Hk,blocks,D] fp32.

        q [Hq,n,D] and k [Hk,n,D] of all tokens from the first one of these blocks on.
        """
        (sinks, local), sums = self.ends_of(row), []
        last = k.shape[1] - local
        rest = blocks * self.block - last
        for queries, keys in zip(q.unflatten(0, (len(k), -1)), k, strict=True):
            total = queries.double().sum(0).cumsum(0)  # over the group and up to each position; differences cancel
            following = (total[local:] - total[:last]) / local  # the mean of the next n_local
            middle = keys[:last].float()
            score = (following.float() * middle).sum(1)
            score = torch.nn.functional.pad(score, (0, rest), value=-torch.inf).view(blocks, self.block)
            middle = torch.nn.functional.pad(middle, (0, 0, 0, rest)).view(blocks, self.block, -1)  # zeros add nothing
            best = ops.top(score, min(self.reps, self.block))
            chosen = middle.gather(1, best[..., None].expand(-1, -1, middle.shape[2]))[None]  # [1,blocks,reps,D]
            if self.joint:
                position = torch.arange(done, done + blocks, device=k.device)[:, None] * self.block + sinks + best
                chosen = ops.rerotate(chosen, -position[None], self.inv_freq[row, None])  # to position 0
            sums.append(chosen[0].sum(1))
        return torch.stack(sums)

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        heads, blocks = self.plan.n_kv_head, -(-max(0, int(self.prompt[row]) - sum(self.ends_of(row))) // self.block)
        yield "pool", self.pool.part(row, heads * self.blocks).unflatten(0, (heads, -1))[:, :blocks]
        yield "representatives", self.representative_sums[row, :, :blocks]

    def held_prompt(self, row: int, prompt: int) -> tuple[Tensor, Tensor]:
        heads, (sinks, local) = self.plan.n_kv_head, self.ends_of(row)
        middle, ends, sinks = max(0, prompt - sinks - local), min(prompt, sinks + local), min(prompt, sinks)
        blocks = self.pool.read(row, heads * self.blocks)  # [Hk blocks,2,block,D]
        blocks = blocks.unflatten(0, (heads, -1)).transpose(1, 2).flatten(2, 3)[:, :, :middle]  # [Hk,2,n,D]
        both = (x[row, :, :ends] for x in (self.k, self.v))
        return tuple(torch.cat([x[:, :sinks], blocks[:, i], x[:, sinks:]], dim=1) for i, x in enumerate(both))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        self.index.copy_(torch.where(active[:, None, None], self.choose(q, pos), self.index))
        first = torch.arange(k.shape[1], device=q.device)[:, None] * self.blocks  # of each head's entries
        q = self.bring(torch.where(self.index < 0, -1, self.index + first), active, q)
        position = self.index[..., None] * self.block + torch.arange(self.block, device=q.device)  # after the sinks
        inside = (self.index[..., None] >= 0) & (position < (self.prompt - self.ends)[:, None, None, None])
        return self.attend_parts(q, pos, inside.flatten(2))

    def choose(self, q: Tensor, pos: Tensor) -> Tensor:
        """The best blocks, [B,Hk,count], padded with -1 in rows that have fewer."""
        q = q.float()
        if self.joint:
            q = ops.rerotate(q, (self.local - pos)[:, None, None], self.inv_freq)
        query = ops.grouped(q, self.plan.n_kv_head).sum(2, keepdim=True)  # [B,Hk,1,D]
        scores = ops.dots(query, self.representative_sums)[:, :, 0]  # [B,Hk,blocks]
        if self.joint:
            scores = self.plan.ranks.sum(scores.sum(1, keepdim=True))
        middle = (self.prompt - self.ends).clamp(min=0)[:, None, None]  # tokens
        empty = torch.arange(self.blocks, device=q.device) * self.block >= middle
        best = ops.top(scores.masked_fill(empty, -torch.inf), self.count, count=self.chosen)
        return torch.where(best * self.block < middle, best, -1).expand_as(self.index)

    def step_bytes(self, length: int) -> tuple[int, int]:
        device, host = super().step_bytes(length)
        blocks = -(-self.choices(length) // self.block)
        return device + blocks * self.representative_sums[0, :, 0].nbytes, host


@dataclass(frozen=True)
class InfLLMMethod(offload.OffloadMethod):
    name = "infllm"
    paper = "https://arxiv.org/abs/2402.04617"
    help = "blocks by representative keys; --offload"
    block: int = option(128, "tokens per block", min=1)
    reps: int = option(4, "tokens that represent a block", min=1)
    sinks: int | None = option(None, "first tokens; auto: budget / 8, at most 128", min=0)
    local: int | None = option(None, "last tokens of the prompt; auto: budget / 2, at most 512", min=1)
    joint: bool = option(True, "all heads choose together, on keys before RoPE")

    def ends(self, budget: int) -> tuple[int, int]:
        """`sinks` and `local`."""
        sinks = min(128, budget // 8) if self.sinks is None else self.sinks
        return sinks, min(512, budget // 2) if self.local is None else self.local

    def blocks(self, plan: Plan, budget: int) -> tuple[int, int]:
        """How many blocks a step attends to, and how many the longest prompt has."""
        ends = sum(self.ends(budget))
        most = -(-max(1, plan.max_prompt - ends) // self.block)
        count = (budget - ends) // self.block + (budget >= plan.planned)  # the last block is filled in part
        return min(count, most), most

    def minimum(self, plan: Plan) -> int:
        """One block, the sinks and the local tokens."""
        smallest = self.block + (self.sinks or 0) + (self.local or 0)
        return next(t for t in itertools.count(smallest) if t - sum(self.ends(t)) >= self.block)

    def most(self, plan: Plan) -> int:
        """Beyond what covers every token, the sinks and the local tokens still grow, up to a budget of 1,024."""
        return plan.planned + 1024

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The full cache, and one fp32 vector per block and KV head."""
        _, blocks = self.blocks(plan, budget)
        return plan.full_bytes() + plan.n_layer * plan.batch * plan.n_kv_head * blocks * plan.head_dim * 4

    def build(self, plan: Plan, budget: int) -> list[KV]:
        count, _ = self.blocks(plan, budget)
        staged = self.staged((plan.n_kv_head * count, 2, self.block, plan.head_dim), plan)
        return [InfLLM(plan, layer, budget, self, staged) for layer in range(plan.n_layer)]
