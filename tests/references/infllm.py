"""InfLLM's block retrieval (arXiv 2402.04617): one layer."""

import torch
from torch import Tensor

from kv.method import Plan

from .attention import Text, best, dots


def turned(x: Tensor, moved: Tensor, base: float) -> Tensor:
    """Keys or queries [n,D], RoPE applied, turned `moved` [n] positions further; channel i pairs with i + D / 2."""
    half = x.shape[1] // 2
    result = x.clone()
    for i in range(half):
        cos, sin = torch.cos(moved * base ** (-i / half)), torch.sin(moved * base ** (-i / half))
        result[:, i] = x[:, i] * cos - x[:, i + half] * sin
        result[:, i + half] = x[:, i + half] * cos + x[:, i] * sin
    return result


class SlowInfLLM:
    """InfLLM: a KV head attends to the prompt's sinks, local tokens and best blocks, and to all generated tokens.

    A block's score is the sum of q . k over a few representatives, chosen once, at prefill. With `joint`, scores are
    summed over all heads, keys are taken before RoPE (at position 0) and every query at position `local`; otherwise
    each KV head scores alone, with keys and queries at their own positions.
    """

    def __init__(
        self,
        plan: Plan,
        budget: int,
        block: int = 128,
        reps: int = 4,
        sinks: int | None = None,
        local: int | None = None,
        joint: bool = True,
    ):
        self.plan, self.block, self.reps, self.joint = plan, block, reps, joint
        self.sinks = min(128, budget // 8) if sinks is None else sinks
        self.local = min(512, budget // 2) if local is None else local
        self.top = (budget - self.sinks - self.local) // block

    def representative_score(self, kv_head: int, position: int) -> float:
        """r_m: the mean over the next `local` queries of sum_G q_j . k_m, 0 if none follows."""
        text = self.text
        after = range(position + 1, min(position + self.local, text.prompt - 1) + 1)
        total = 0.0
        for head in text.query_heads(kv_head):
            total += float(dots(text.keys[kv_head, position], text.queries[head, after.start : after.stop]).sum())
        return total / max(1, len(after))

    def choose_representatives(self, kv_head: int, block: range) -> list[int]:
        """The `reps` positions of a block with the highest r_m, or all positions of a smaller block."""
        scores = torch.tensor([self.representative_score(kv_head, m) for m in block], dtype=torch.float64)
        return [block[i] for i in best(scores, self.reps)]

    def block_score(self, kv_head: int, representatives: list[int]) -> float:
        """The sum over the group and the representatives of q . k, where q is the newest query."""
        keys = (self.unturned if self.joint else self.text.keys)[kv_head, representatives]
        queries = self.scoring[list(self.text.query_heads(kv_head))]
        return float((queries[:, None] * keys).sum())

    def block_scores(self) -> Tensor:
        """Every block's score by KV head, [Hk,blocks]; with `joint`, each head gets the sum over all heads."""
        scores = [[self.block_score(head, one) for one in blocks] for head, blocks in enumerate(self.representatives)]
        found = torch.tensor(scores, dtype=torch.float64)
        return found.sum(0).expand_as(found) if self.joint else found

    def prefill(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores a prompt; cuts the tokens between sinks and local ones into blocks: q [Hq,T,D], k and v [Hk,T,D]."""
        self.text = Text(self.plan, q, k, v)
        places = torch.arange(self.text.prompt, dtype=torch.float64)
        self.unturned = torch.stack([turned(keys, -places, self.plan.rope_theta) for keys in self.text.keys])
        end = self.text.prompt - self.local
        self.blocks = [range(at, min(at + self.block, end)) for at in range(self.sinks, end, self.block)]
        self.representatives = [  # per KV head and block: positions
            [self.choose_representatives(kv_head, block) for block in self.blocks]
            for kv_head in range(self.plan.n_kv_head)
        ]

    def choose(self, kv_head: int) -> list[int]:
        """The positions that a KV head attends to, ascending."""
        text = self.text
        chosen = set(range(min(self.sinks, text.prompt)))
        chosen |= set(range(max(0, text.prompt - self.local), text.prompt))
        chosen |= set(text.generated())
        for i in best(self.scores[kv_head], self.top):
            chosen |= set(self.blocks[i])
        return sorted(chosen)

    def decode(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, then attends: q [Hq,D], k and v [Hk,D] -> [Hq,D]."""
        text = self.text
        text.append(q, k, v)
        self.scoring = text.queries[:, -1]
        if self.joint:
            moved = torch.full((self.plan.n_head,), self.local - text.length + 1, dtype=torch.float64)
            self.scoring = turned(self.scoring, moved, self.plan.rope_theta)
        self.scores = self.block_scores()
        self.attended = [self.choose(kv_head) for kv_head in range(self.plan.n_kv_head)]  # positions, ascending
        heads = range(self.plan.n_head)
        return torch.stack([text.attend(head, self.attended[head // text.groups]) for head in heads]).float()
