"""infllm: attention to the blocks of the prompt that a few of their keys speak for (Xiao et al., arXiv 2402.04617).

The prompt between its first tokens (sinks) and its last ones (local) is cut into blocks. Those tokens of a block that
the queries after them attend to most represent it; a step scores every block by the products of the group's queries
with its representatives' keys, and attends to the sinks, the local tokens, the tokens of the best blocks, and all that
was generated. The paper also prefills so; here prefill is exact. A product is linear, so the sum of these keys is all
that is kept of them.

Memory: the full cache and a vector a block; with `offload` the blocks are on the host, and what a step attends to on
the device. Traffic: a vector a block to choose, and the budget.
"""

import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kv import offload, ops
from kv.base import KV, Shape


@dataclass(frozen=True)
class Options(offload.Options):
    block: int = field(default=128, metadata={"help": "tokens of a block", "min": 1})
    reps: int = field(default=4, metadata={"help": "tokens that represent it", "min": 1})
    sinks: int | None = field(default=None, metadata={"help": "first tokens; auto: an eighth, at most 128", "min": 0})
    local: int | None = field(default=None, metadata={"help": "prompt's last; auto: half, at most 512", "min": 1})

    def at(self, budget: int) -> "Options":
        """With the sinks and the local tokens of a budget."""
        sinks = min(128, budget // 8) if self.sinks is None else self.sinks
        local = min(512, budget // 2) if self.local is None else self.local
        return replace(self, sinks=sinks, local=local)


class InfLLM(KV):
    """Slots: sinks, local tokens, the chosen blocks, generated tokens."""

    recent = 1

    def __init__(self, shape: Shape, layer: int, count: int, options: Options, workers):
        super().__init__()
        self.shape, self.block, self.reps = shape, options.block, options.reps
        self.sinks, self.local = options.sinks, options.local
        self.ends = self.sinks + self.local
        self.blocks = -(-max(1, shape.max_prompt - self.ends) // self.block)
        self.count = min(count, self.blocks)
        self.chosen = self.ends + self.count * self.block  # slots before the generated tokens
        self.capacity = self.chosen + shape.max_new_tokens
        b, h, d = shape.batch, shape.n_kv_head, shape.head_dim
        self.register_slots(shape, self.capacity)
        speakers = torch.zeros(b, h, self.blocks, d, device=shape.device)
        self.register_buffer("speakers", speakers, persistent=False)  # each block's representatives' keys, summed
        prompt = torch.zeros(b, dtype=torch.int64, device=shape.device)
        self.register_buffer("prompt", prompt, persistent=False)  # tokens of each row's
        index = torch.full((b, h, self.count), -1, device=shape.device)
        self.register_buffer("index", index, persistent=False)  # blocks chosen; -1: none
        rows = b * h * self.blocks
        width = (2, self.block, d)
        staged = options.staged(b * h * self.count, width, shape)
        self.pool = options.pool(f"layer {layer}", rows, width, staged, shape, workers)
        self.register_buffer("pool_buffer", self.pool.buffer, persistent=False)
        self.span = ops.span(None, self.capacity, self.capacity, shape.device)

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.prompt[row] = length = k.shape[2]
        self.index[row] = -1
        ends = torch.arange(min(length, self.ends), device=k.device)
        ends = torch.where(ends < self.sinks, ends, ends + max(0, length - self.ends))
        self.k[row, :, : len(ends)], self.v[row, :, : len(ends)] = k[0, :, ends], v[0, :, ends]
        middle = slice(self.sinks, length - self.local)
        used = -(-max(0, length - self.ends) // self.block)
        if used:
            heads, fill = k.shape[1], (0, 0, 0, used * self.block - (length - self.ends))
            for i, x in enumerate((k, v)):
                blocks = torch.nn.functional.pad(x[0, :, middle], fill).unflatten(1, (used, self.block))
                for head in range(heads):
                    self.pool.write((row * heads + head) * self.blocks, blocks[head], i)
            self.speakers[row, :, :used] = self.speak(q, k, used)
        return ops.causal_attention(q, k, v, self.shape.window)

    def speak(self, q: Tensor, k: Tensor, used: int) -> Tensor:
        """The sum of the keys that represent each block, [Hk,blocks,D] fp32."""
        length, sums = k.shape[2], []
        place = torch.arange(self.sinks, length - self.local, device=k.device)
        last = (place + self.local).clamp(max=length - 1)
        rest = used * self.block - len(place)
        for rows, keys in zip(q[0].unflatten(0, (k.shape[1], -1)), k[0], strict=True):
            queries = rows.double().sum(0).cumsum(0)  # of the group, up to each position
            following = (queries[last] - queries[place]) / (last - place)[:, None]
            middle = keys[place].float()
            score = (following.float() * middle).sum(1)
            score = torch.nn.functional.pad(score, (0, rest), value=-torch.inf).view(used, self.block)
            middle = torch.nn.functional.pad(middle, (0, 0, 0, rest)).view(used, self.block, -1)  # nothing adds nothing
            best = ops.top(score, min(self.reps, self.block))
            sums.append(middle.gather(1, best[..., None].expand(-1, -1, middle.shape[2])).sum(1))
        return torch.stack(sums)

    def finish(self, row: int) -> None:
        self.pool.settle()

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        age = (pos - self.prompt).clamp(min=0)  # of a row that has generated nothing: inactive
        ops.store(self.k, k, self.chosen + age, active)
        ops.store(self.v, v, self.chosen + age, active)
        b, h = q.shape[0], k.shape[1]
        self.index.copy_(torch.where(active[:, None, None], self.choose(q), self.index))
        block = self.index
        first = torch.arange(b * h, device=q.device).view(b, h, 1) * self.blocks
        wanted = torch.where(block < 0, -1, block + first).flatten()
        asked = active.repeat_interleave(h * self.count)
        token, q = self.pool.issue(wanted, asked, wanted, q)
        fetched = self.pool.take(self.pool.wait(token, q))  # [B Hk count,2,block,D]
        keys, values = fetched.view(b, h, self.count, 2, self.block, -1).unbind(3)
        self.k[:, :, self.ends : self.chosen] = keys.flatten(2, 3)
        self.v[:, :, self.ends : self.chosen] = values.flatten(2, 3)
        n = self.span.shape[0]
        mask = self.mask(block, age, n)
        rows = q.view(b, h, -1, q.shape[-1])
        keys, values = self.k.narrow(2, 0, n), self.v.narrow(2, 0, n)
        return torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask).view(q.shape)

    def choose(self, q: Tensor) -> Tensor:
        """The best blocks, [B,Hk,count]; -1 where a row has fewer."""
        queries = q.view(q.shape[0], self.shape.n_kv_head, -1, q.shape[-1]).float().sum(2)  # [B,Hk,D]
        scores = (queries[:, :, None] * self.speakers).sum(3)
        used = (self.prompt - self.ends).clamp(min=0)[:, None, None]
        empty = torch.arange(self.blocks, device=q.device) * self.block >= used
        best = ops.top(scores.masked_fill(empty, -torch.inf), self.count)
        return torch.where(best * self.block < used, best, -1)

    def mask(self, block: Tensor, age: Tensor, n: int) -> Tensor:
        """Which of the first n slots hold what is attended to: [B,Hk,1,n]"""
        b, h, _ = block.shape
        ends = torch.arange(self.ends, device=age.device) < self.prompt[:, None]
        place = block[..., None] * self.block + torch.arange(self.block, device=age.device)  # behind the sinks
        inside = (block[..., None] >= 0) & (place < (self.prompt - self.ends)[:, None, None, None])
        new = torch.arange(n - self.chosen, device=age.device) <= age[:, None]
        parts = (ends[:, None].expand(b, h, -1), inside.flatten(2), new[:, None].expand(b, h, -1))
        return torch.cat(parts, dim=2)[:, :, None]

    def reset(self, row: int) -> None:
        self.prompt[row], self.index[row] = 0, -1

    def fit(self, length: int, new: int) -> None:
        self.span = ops.span(self.span, self.chosen + max(new, 1), self.capacity, self.shape.device)

    def host_bytes(self) -> int:
        return self.pool.host_bytes

    def fetched(self) -> tuple[int, int]:
        return self.pool.counts

    def step_bytes(self, length: int) -> tuple[int, int]:
        new = max(0, length - self.shape.max_prompt)
        middle = max(0, length - new - self.ends)
        chosen = min(self.count * self.block, middle)
        unit = self.shape.unit_bytes
        choose = -(-middle // self.block) * self.shape.head_dim * self.speakers.itemsize
        device = choose + (min(length - new, self.ends) + chosen + new) * unit
        heads = self.shape.n_kv_head
        return heads * device, heads * chosen * unit if self.pool.host_bytes else 0

    def overhead(self) -> dict[str, int]:
        units = self.shape.batch * self.shape.n_kv_head * self.shape.unit_bytes
        rest = self.blocks * self.block - max(0, self.shape.max_prompt - self.ends)
        return {
            "slot past the end": units, "staging": self.pool.overhead(),
            "choice": self.prompt.nbytes + self.index.nbytes,
            "chosen blocks": units * self.count * self.block, "ends of blocks": units * rest,
            "ends of a short prompt": units * max(0, self.ends - self.shape.max_prompt),
        }  # fmt: skip

    def close(self) -> None:
        self.pool.close()


def blocks_of(budget: int, options: Options) -> int:
    """Blocks that a budget attends to."""
    sized = options.at(budget)
    return (budget - sized.sinks - sized.local) // options.block


def minimum(shape: Shape, options: Options) -> int:
    """One block beside the sinks and the local tokens."""
    least = options.block + (options.sinks or 0) + (options.local or 0)
    return next(t for t in itertools.count(least) if blocks_of(t, options) >= 1)


def memory(shape: Shape, budget: int, options: Options) -> int:
    """The full cache, and an fp32 vector a block."""
    sized = options.at(budget)
    blocks = -(-max(1, shape.max_prompt - sized.sinks - sized.local) // options.block)
    return shape.full_bytes() + shape.n_layer * shape.batch * shape.n_kv_head * blocks * shape.head_dim * 4


def build(shape: Shape, budget: int, options: Options) -> list[KV]:
    workers, count = offload.Workers(options.threads), blocks_of(budget, options)
    return [InfLLM(shape, layer, count, options.at(budget), workers) for layer in range(shape.n_layer)]
