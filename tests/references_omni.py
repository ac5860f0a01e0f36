"""Slow reference implementations of OmniKV and of InfLLM's block retrieval: one batch row, plain loops.

They follow the equations and share no code with kv/. OmniKV (OpenReview ulCAPXYXfa, Equations 1 to 4) is one object for
the whole model, because its layers depend on each other; InfLLM (arXiv 2402.04617) is one layer. All arithmetic is
fp64; outputs are fp32.
"""

import math
from fractions import Fraction

import torch
from references import best, half_up
from torch import Tensor

from kv.method import Shape


def dots(q: Tensor, keys: Tensor) -> Tensor:
    """k . q for each key: q [D], keys [n,D] -> [n]. Equal keys give exactly equal results, so ties stay ties."""
    return (keys * q).sum(1)


def probabilities(q: Tensor, keys: Tensor) -> Tensor:
    """softmax(K q / sqrt(D)) of one query [D] over n keys [n,D]: [n]."""
    logits = dots(q, keys) / math.sqrt(q.shape[0])
    exps = torch.exp(logits - logits.max())
    return exps / exps.sum()


class Text:
    """One layer's queries [Hq,N,D], keys and values [Hk,N,D] of every token so far."""

    def __init__(self, shape: Shape, q: Tensor, k: Tensor, v: Tensor):
        window = getattr(shape, "window", None)
        if window is not None and window < shape.max_prompt + shape.max_new_tokens:
            raise ValueError("the references know no sliding window")
        self.groups = shape.n_head // shape.n_kv_head
        self.queries, self.keys, self.values = q.double(), k.double(), v.double()
        self.prompt = k.shape[1]

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def append(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Adds one token: q [Hq,D], k and v [Hk,D]."""
        self.queries = torch.cat([self.queries, q.double()[:, None]], 1)
        self.keys = torch.cat([self.keys, k.double()[:, None]], 1)
        self.values = torch.cat([self.values, v.double()[:, None]], 1)

    def generated(self) -> list[int]:
        """The positions after the prompt."""
        return list(range(self.prompt, self.length))

    def query_heads(self, kv_head: int) -> range:
        """The query heads of a group."""
        return range(kv_head * self.groups, (kv_head + 1) * self.groups)

    def attend(self, head: int, positions: list[int]) -> Tensor:
        """The attention output of one query head of the newest token over some positions: [D]."""
        kv_head = head // self.groups
        return probabilities(self.queries[head, -1], self.keys[kv_head, positions]) @ self.values[kv_head, positions]


class SlowOmni:
    """OmniKV: filter layers select prompt positions; the sparse layers after them attend to these and generated ones.

    `budget` is k. With `mem`, k solves mem = a + k / prompt (1 - a), where a is the share of full layers. k is rounded
    half up, and `mem` is taken as the decimal it prints as.
    """

    def __init__(
        self,
        shape: Shape,
        budget: int,
        filter_layers: list[int] | tuple[int, ...],
        selector: str = "last",
        window: int = 16,
        mem: float | None = None,
    ):
        if selector not in ("last", "uniform", "exp"):
            raise ValueError(f"a selector is last, uniform or exp, not {selector!r}")
        self.shape, self.budget, self.selector, self.max_window, self.mem = shape, budget, selector, window, mem
        self.filter_layers = sorted(filter_layers)
        if mem is not None and Fraction(str(mem)) < self.full_share():
            raise ValueError(f"mem = {mem} is less than the full layers take, {self.full_share()}")
        self.texts: dict[int, Text] = {}  # by layer
        self.selected: dict[int, list[int]] = {}  # by filter layer: its last step's prompt positions, ascending

    def kind(self, layer: int) -> str:
        """'full' if l < f1, l in F or l - 1 in F (Equation 2), else 'sparse'; all are full if there is no filter."""
        filters = self.filter_layers
        is_full = not filters or layer < filters[0] or layer in filters or layer - 1 in filters
        return "full" if is_full else "sparse"

    def filter_of(self, layer: int) -> int | None:
        """The nearest filter layer at or before this one, None below the first."""
        return max((f for f in self.filter_layers if f <= layer), default=None)

    def full_share(self) -> Fraction:
        """a: the full layers' share of all layers."""
        full = [layer for layer in range(self.shape.n_layer) if self.kind(layer) == "full"]
        return Fraction(len(full), self.shape.n_layer)

    def top(self, prompt: int) -> int:
        """k: how many positions of a prompt are selected."""
        if self.mem is None:
            return min(self.budget, prompt)
        a = self.full_share()
        if a == 1:
            return prompt
        return min(max(1, half_up((Fraction(str(self.mem)) - a) / (1 - a) * prompt)), prompt)

    def window(self, prompt: int) -> int:
        """w: how many queries a full observation window holds, including the current one."""
        return 1 if self.selector == "last" else max(1, min(self.max_window, self.top(prompt) // 2))

    def weight(self, j: int, window: int) -> float:
        """alpha_j of query j in a full window; 0 is the oldest and window - 1 the newest."""
        return 2.0 ** (j - window) if self.selector == "exp" else 1.0

    def select(self, text: Text) -> list[int]:
        """The prompt positions that a filter layer selects with the newest query (Equations 3 and 4), ascending."""
        prompt, newest = text.prompt, text.length - 1
        k, window = self.top(prompt), self.window(prompt)
        scores = torch.zeros(prompt, dtype=torch.float64)
        observed = range(max(0, newest - window + 1), newest + 1)
        for position in observed:
            highest = torch.zeros(prompt, dtype=torch.float64)  # of the query heads; 0 where the query cannot see
            for head in range(self.shape.n_head):
                keys = text.keys[head // text.groups, : position + 1]
                seen = probabilities(text.queries[head, position], keys)[:prompt]
                highest[: len(seen)] = torch.maximum(highest[: len(seen)], seen)
            scores += self.weight(window - 1 - (newest - position), window) * highest
        always = [position for position in observed if position < prompt]
        others = [position for position in range(prompt) if position not in always]
        return sorted(always + [others[i] for i in best(scores[others], k - len(always))])

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt: q [Hq,T,D], k and v [Hk,T,D]. Layer 0 begins a new sequence."""
        if layer == 0:
            self.texts, self.selected = {}, {}
        self.texts[layer] = Text(self.shape, q, k, v)

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, selects if this is a filter layer, attends: q [Hq,D], k and v [Hk,D] -> [Hq,D]."""
        text = self.texts[layer]
        text.append(q, k, v)
        if layer in self.filter_layers:
            self.selected[layer] = self.select(text)
        positions = list(range(text.length))
        if self.kind(layer) == "sparse":
            positions = self.selected[self.filter_of(layer)] + text.generated()
        return torch.stack([text.attend(head, positions) for head in range(self.shape.n_head)]).float()


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
        shape: Shape,
        budget: int,
        block: int = 128,
        reps: int = 4,
        sinks: int | None = None,
        local: int | None = None,
        joint: bool = True,
    ):
        self.shape, self.budget, self.block, self.reps, self.joint = shape, budget, block, reps, joint
        self.sinks = min(128, budget // 8) if sinks is None else sinks
        self.local = min(512, budget // 2) if local is None else local
        if self.sinks + self.local > budget:
            raise ValueError(f"{self.sinks} sinks and {self.local} local tokens exceed the budget of {budget}")
        self.top = (budget - self.sinks - self.local) // block
        self.full = budget >= shape.max_prompt + shape.max_new_tokens
        self.blocks: list[range] = []
        self.representatives: list[list[list[int]]] = []  # per KV head and block: positions
        self.attended: list[list[int]] = []  # per KV head: positions that the last step attended to, ascending

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
        self.text, self.attended = Text(self.shape, q, k, v), []
        places = torch.arange(self.text.prompt, dtype=torch.float64)
        self.unturned = torch.stack([turned(keys, -places, self.shape.rope_theta) for keys in self.text.keys])
        end = self.text.prompt - self.local
        self.blocks = [range(at, min(at + self.block, end)) for at in range(self.sinks, end, self.block)]
        self.representatives = [
            [self.choose_representatives(kv_head, block) for block in self.blocks]
            for kv_head in range(self.shape.n_kv_head)
        ]

    def choose(self, kv_head: int) -> list[int]:
        """The positions that a KV head attends to, ascending."""
        text = self.text
        if self.full:
            return list(range(text.length))
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
            moved = torch.full((self.shape.n_head,), self.local - text.length + 1, dtype=torch.float64)
            self.scoring = turned(self.scoring, moved, self.shape.rope_theta)
        self.scores = self.block_scores()
        self.attended = [self.choose(kv_head) for kv_head in range(self.shape.n_kv_head)]
        heads = range(self.shape.n_head)
        return torch.stack([text.attend(head, self.attended[head // text.groups]) for head in heads]).float()
