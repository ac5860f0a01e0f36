"""Methods that evict tokens, all layers of them: H2O (arXiv 2306.14048), D2O (arXiv 2406.13035, Equations 4 to 12),
RoCo (arXiv 2402.06262), CaM (Zhang et al., 2024), SimLayerKV (arXiv 2410.13846).

The life of a sequence: `prefill` for layers 0 ... L - 1 (layer 0 begins a new sequence), `finish`, then `decode` for
each layer of each step. Every KV head of every layer keeps its own tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, pvariance

import torch
from torch import Tensor

from kv.method import Plan

from .attention import attend, dots, half_up, probabilities


def group_attention(q: Tensor, keys: Tensor) -> Tensor:
    """Attention of a group's queries at one position: q [G,D], keys [n,D] -> [G,n]."""
    return torch.stack([probabilities(one, keys) for one in q])


def column_sums(q: Tensor, k: Tensor) -> Tensor:
    """Each query head's causal attention, summed over its queries: q [Hq,T,D], k [Hk,T,D] -> fp64 [Hq,T]."""
    q, k = q.double(), k.double()
    groups = q.shape[0] // k.shape[0]
    sums = torch.zeros(q.shape[:2], dtype=torch.float64)
    for head in range(q.shape[0]):
        for i in range(q.shape[1]):
            sums[head, : i + 1] += probabilities(q[head, i], k[head // groups, : i + 1])
    return sums


def cosines(key: Tensor, keys: Tensor) -> list[float]:
    """u (Equation 9): key [D], keys [n,D] -> n similarities; 0 where a key is all zeros."""
    norms = torch.sqrt((keys * keys).sum(1)) * torch.sqrt((key * key).sum())
    return [dot / norm if norm else 0.0 for dot, norm in zip(dots(key, keys).tolist(), norms.tolist(), strict=True)]


def nearest(key: Tensor, keys: Tensor) -> tuple[int, float]:
    """The index of the most similar key, the first among equals, and its similarity: key [D], keys [n,D]."""
    similar = cosines(key, keys)
    return similar.index(max(similar)), max(similar)


def merge_weights(similar: list[float], merge: str) -> tuple[float, list[float]]:
    """(w_c, each w_e) of Equation 12: the weights of a kept token and of the `similar` tokens merged into it."""
    if merge == "average":
        return 1 / (1 + len(similar)), [1 / (1 + len(similar))] * len(similar)
    total = math.e + sum(math.exp(u) for u in similar)
    return math.e / total, [math.exp(u) / total for u in similar]


def bounded(sizes: list[float], total: float, low: float, high: float) -> list[float]:
    """Sizes scaled by one factor and clamped to [low, high]; bisection finds the factor that sums to `total`."""

    def cut(factor: float) -> list[float]:
        return [min(max(factor * size, low), high) for size in sizes]

    small, large = 0.0, high / min(sizes)
    for _ in range(200):
        middle = (small + large) / 2
        small, large = (middle, large) if math.fsum(cut(middle)) < total else (small, middle)
    return cut(large)


def scaled(values: list[float]) -> list[float]:
    """Min-max scaling: the least value becomes 0 and the greatest 1; if all are equal, all become 0."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def layer_budgets(variances: list[list[float]], prompt: int, budget: int, sinks: int, allocation: str) -> list[int]:
    """The slots S_l of each layer (Equations 5 and 15), from the variances Var(s) of its query heads and a budget.

    The budget is in tokens. F_l is the mean over the heads of the variances, scaled within the layer for `softmax`, raw
    otherwise. Each S_l is at least sinks + 4 and at most the prompt; all are `budget` if the prompt is no longer.
    """
    n_layer = len(variances)
    low, high, total = sinks + 4, prompt, n_layer * budget
    if prompt <= budget:
        return [budget] * n_layer

    if allocation == "exponential":
        sizes = [min(max(math.exp(-fmean(heads)) * budget, low), high) for heads in variances]
    else:
        if allocation == "softmax":
            shares = [math.exp(-fmean(scaled(heads))) for heads in variances]
        elif allocation == "reciprocal":
            shares = [1 / max(fmean(heads), 1e-12) for heads in variances]
        else:
            shares = [1.0] * n_layer
        sizes = bounded([share / sum(shares) * total for share in shares], total, low, high)
    return [math.floor(round(size, 6)) for size in sizes]


@dataclass(eq=False)
class Token:
    """One KV head's record of one token."""

    position: int
    key: Tensor  # [D]
    value: Tensor  # [D]
    score: float = 0.0  # s: the attention received, summed over the queries and the group
    squares: float = 0.0  # sum of the squares of each query position's sum over the group
    visits: int = 0  # query positions that could see it

    def see(self, attention: float) -> None:
        """Adds the attention that one query position's group gives."""
        self.score += attention
        self.squares += attention**2
        self.visits += 1

    @property
    def mean(self) -> float:
        return self.score / self.visits

    @property
    def std(self) -> float:
        return math.sqrt(max(self.squares / self.visits - self.mean**2, 0.0))


def highest(tokens: list[Token], count: int, worth: Callable[[Token], float]) -> list[Token]:
    """The `count` tokens of the highest worth; ties go to the lowest position."""
    return sorted(tokens, key=lambda token: (-worth(token), token.position))[:count]


class SlowEvict:
    """Full attention, and the base of the methods.

    A method shrinks the stored prompt in `finish`. In a step, which first stores the new token, it may drop tokens in
    `before`, ahead of the attention, and receives in `after` the attention that each token got.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.groups = plan.n_head // plan.n_kv_head

    def heads(self, q: Tensor, kv_head: int) -> Tensor:
        """A group's queries: q [Hq,...] -> [G,...]."""
        return q[kv_head * self.groups : (kv_head + 1) * self.groups]

    def begin(self) -> None:
        """Forgets the sequence."""
        self.length: list[int] = []  # by layer: tokens of the sequence so far
        self.tokens: list[list[list[Token]]] = []  # by layer and KV head: those held, by ascending position

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt: q [Hq,T,D], k and v [Hk,T,D]. Layer 0 begins a new sequence."""
        if layer == 0:
            self.begin()
        k, v = k.double(), v.double()
        self.prompt = k.shape[1]  # T
        self.length.append(self.prompt)
        kv_heads = range(self.plan.n_kv_head)
        self.tokens.append([[Token(i, k[h, i], v[h, i]) for i in range(self.prompt)] for h in kv_heads])
        self.observe(layer, q.double(), k)

    def observe(self, layer: int, q: Tensor, k: Tensor) -> None:
        """Measures a layer's prompt, in fp64: q [Hq,T,D], k [Hk,T,D]."""

    def read(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> Tensor:
        """`prefill` in chunks: a chunk's queries attend to what is held and to the chunk; then the layer shrinks.

        Returns the outputs [Hq,T,D].
        """
        if layer == 0:
            self.begin()
        q, k, v, end, y = q.double(), k.double(), v.double(), 0, torch.empty_like(q)
        self.prompt = k.shape[1]
        self.length.append(0)
        self.tokens.append([[] for _ in range(self.plan.n_kv_head)])
        for n in sizes:
            end += n
            self.length[layer] = end
            for kv_head, tokens in enumerate(self.tokens[layer]):
                for i in range(end - n, end):
                    tokens.append(Token(i, k[kv_head, i], v[kv_head, i]))
                    keys, values = (torch.stack([getattr(t, x) for t in tokens]) for x in ("key", "value"))
                    attention = group_attention(self.heads(q, kv_head)[:, i], keys)
                    self.heads(y, kv_head)[:, i] = attention @ values
                    self.seen(layer, kv_head, attention.sum(0).tolist())
            self.shrink_all(layer)
        return y

    def seen(self, layer: int, kv_head: int, attention: list[float]) -> None:
        """Receives the attention that a query of a chunk gave each token so far."""

    def shrink_all(self, layer: int) -> None:
        """Drops tokens of a layer after a chunk."""

    def finish(self) -> None:
        """Shrinks every layer once all layers hold the prompt."""

    def before(self, layer: int, kv_head: int) -> None:
        """Drops tokens before a step's attention."""

    def after(self, layer: int, kv_head: int, attention: list[float]) -> None:
        """Receives the attention that a step's group gave each token."""

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, attends to all held tokens, then evicts: q [Hq,D], k and v [Hk,D] -> [Hq,D]."""
        q, k, v = q.double(), k.double(), v.double()
        y = torch.empty_like(q)
        position = self.length[layer]
        self.length[layer] += 1
        for kv_head in range(self.plan.n_kv_head):
            self.tokens[layer][kv_head].append(Token(position, k[kv_head], v[kv_head]))
            self.before(layer, kv_head)
            held = self.tokens[layer][kv_head]
            keys, values = torch.stack([t.key for t in held]), torch.stack([t.value for t in held])
            heads = self.heads(q, kv_head)
            for g in range(self.groups):
                y[kv_head * self.groups + g] = attend(heads[g], keys, values)
            self.after(layer, kv_head, group_attention(heads, keys).sum(0).tolist())
        return y.float()

    def held(self, layer: int, kv_head: int) -> tuple[list[int], Tensor, Tensor]:
        """The positions held, ascending, and the stored keys and values [n,D]."""
        tokens = self.tokens[layer][kv_head]
        keys, values = torch.stack([t.key for t in tokens]), torch.stack([t.value for t in tokens])
        return [t.position for t in tokens], keys.float(), values.float()


class SlowH2O(SlowEvict):
    """H2O: a KV head holds t tokens: the floor(t / 2) most recent and those that received the most attention.

    Derived methods change how many tokens a layer holds (`counts`), how many of them are recent (`recent`), which are
    never evicted (`protected`), how important a token is (`worth`) and what happens to evicted tokens (`absorb`).
    """

    sinks = 0

    def __init__(self, plan: Plan, budget: int):
        super().__init__(plan)
        self.budget = budget

    def begin(self) -> None:
        super().begin()
        self.sums: list[Tensor] = []  # by layer: attention of each query head to each prompt token [Hq,T]

    def counts(self) -> list[int]:
        """How many tokens a KV head of each layer holds."""
        return [self.budget] * self.plan.n_layer

    def recent(self, size: int) -> int:
        """M: how many of the newest positions are never evicted, including the current one."""
        return size // 2

    def is_fixed(self, token: Token, layer: int) -> bool:
        """Whether the token is a sink or recent."""
        newest = self.length[layer] - 1
        return token.position < self.sinks or token.position > newest - self.recent(self.sizes[layer])

    def protected(self, layer: int, tokens: list[Token]) -> list[Token]:
        """The tokens that are never evicted."""
        return [token for token in tokens if self.is_fixed(token, layer)]

    def worth(self, token: Token) -> float:
        """A token's importance: of the unprotected tokens, the most important stay."""
        return token.score

    def absorb(self, layer: int, kv_head: int, evicted: list[Token], kept: list[Token]) -> None:
        """Adds what evicted tokens leave behind to the kept ones; both lists are in ascending positions."""

    def observe(self, layer: int, q: Tensor, k: Tensor) -> None:
        self.sums.append(torch.zeros(q.shape[:2], dtype=torch.float64))
        for kv_head in range(self.plan.n_kv_head):
            tokens, heads = self.tokens[layer][kv_head], self.heads(q, kv_head)
            for i in range(self.prompt):
                attention = group_attention(heads[:, i], k[kv_head, : i + 1])
                self.heads(self.sums[layer], kv_head)[:, : i + 1] += attention
                for token, one in zip(tokens[: i + 1], attention.sum(0).tolist(), strict=True):
                    token.see(one)

    def finish(self) -> None:
        self.sizes = self.counts()  # S_l
        for layer in range(self.plan.n_layer):
            for kv_head in range(self.plan.n_kv_head):
                self.shrink(layer, kv_head)

    def seen(self, layer: int, kv_head: int, attention: list[float]) -> None:
        for token, one in zip(self.tokens[layer][kv_head], attention, strict=True):
            token.see(one)

    def shrink_all(self, layer: int) -> None:
        self.sizes = self.counts()
        for kv_head in range(self.plan.n_kv_head):
            self.shrink(layer, kv_head)

    def shrink(self, layer: int, kv_head: int) -> None:
        """Keeps S_l tokens of a prompt: the protected ones and the best of the others (Equations 7 and 8)."""
        tokens, size = self.tokens[layer][kv_head], self.sizes[layer]
        if len(tokens) <= size:
            return
        safe = self.protected(layer, tokens)
        others = [token for token in tokens if token not in safe]
        chosen = safe + highest(others, size - len(safe), self.worth)
        self.replace(layer, kv_head, [token for token in tokens if token not in chosen])

    def after(self, layer: int, kv_head: int, attention: list[float]) -> None:
        tokens = self.tokens[layer][kv_head]
        for token, one in zip(tokens, attention, strict=True):
            token.see(one)
        if len(tokens) <= self.sizes[layer]:
            return
        safe = self.protected(layer, tokens)
        others = [token for token in tokens if token not in safe]
        self.replace(layer, kv_head, [min(others, key=lambda token: (self.worth(token), token.position))])

    def replace(self, layer: int, kv_head: int, evicted: list[Token]) -> None:
        """Lets the kept tokens absorb the evicted ones, then drops those."""
        kept = [token for token in self.tokens[layer][kv_head] if token not in evicted]
        self.absorb(layer, kv_head, evicted, kept)
        self.tokens[layer][kv_head] = kept


class SlowRoCo(SlowH2O):
    """RoCo: H2O, but a token's importance is its mean attention per visit, and the tokens that vary most stay too.

    Protected are the sinks, the newest 10 (in small budgets, the newest half) and, of the others, those with the
    highest standard deviation: 30% of the budget, rounded half up, or as many as fit beside the sinks and the newest.
    """

    def __init__(self, plan: Plan, budget: int, sinks: int = 4):
        super().__init__(plan, budget)
        self.sinks = sinks

    def recent(self, size: int) -> int:
        return min(10, size // 2)

    def protected(self, layer: int, tokens: list[Token]) -> list[Token]:
        size = self.sizes[layer]
        fixed = super().protected(layer, tokens)
        others = [token for token in tokens if token not in fixed]
        count = min(half_up(Fraction(3, 10) * size), size - self.sinks - self.recent(size))
        return fixed + highest(others, count, lambda token: token.std)

    def worth(self, token: Token) -> float:
        return token.mean


class SlowCaM(SlowH2O):
    """CaM: H2O, but a step may, at random, add a part of the evicted value to the next m kept tokens.

    The end of the prompt evicts as H2O does. In a step, v_i / m is added to each of the m tokens with probability
    clip(s_i / mean s of those tokens, 0, 1): whenever `u(layer, kv_head, position)` in [0, 1) is below it.
    """

    def __init__(self, plan: Plan, budget: int, u: Callable[[int, int, int], float], m: int = 32):
        super().__init__(plan, budget)
        self.u, self.m = u, m

    def absorb(self, layer: int, kv_head: int, evicted: list[Token], kept: list[Token]) -> None:
        decoding = self.length[layer] > self.prompt
        for token in evicted if decoding else []:
            following = [other for other in kept if other.position > token.position][: self.m]
            if not following:
                continue
            p = min(max(token.score / fmean(other.score for other in following), 0.0), 1.0)
            if self.u(layer, kv_head, token.position) < p:
                for other in following:
                    other.value = other.value + token.value / self.m


class SlowD2O(SlowH2O):
    """D2O: layers of lower attention variance hold more tokens; evicted tokens merge into the most similar kept one.

    A layer holds the sinks, floor((S_l - sinks) M / (N + M)) recent tokens, where `ratio` is N : M, and the best of the
    others. `merge` is none, paper (Equation 12) or average. `full_layers` and `uncounted` layers keep everything;
    only `full_layers` count towards the sum of the slots.
    """

    def __init__(
        self,
        plan: Plan,
        budget: int,
        sinks: int = 4,
        beta: float = 0.7,
        allocation: str = "softmax",
        merge: str = "none",
        ratio: Sequence[int] = (1, 1),
        full_layers: Sequence[int] = (),
        uncounted: Sequence[int] = (),
    ):
        super().__init__(plan, budget)
        self.sinks, self.beta, self.allocation, self.merge = sinks, beta, allocation, merge
        self.ratio, self.full_layers, self.uncounted = ratio, full_layers, uncounted

    def begin(self) -> None:
        super().begin()
        self.thresholds: dict[tuple[int, int], float] = {}  # tau by layer and KV head, once a token was evicted

    def counts(self) -> list[int]:
        """S_l by Equations 4 and 5; layers that keep everything get all planned tokens."""
        planned, layers = self.plan.max_prompt + self.plan.room, range(self.plan.n_layer)
        counted = self.budget * (len(layers) - len(self.uncounted)) - planned * len(self.full_layers)
        sharing = [layer for layer in layers if layer not in self.full_layers and layer not in self.uncounted]
        variances = [[pvariance(sums) for sums in self.sums[layer].tolist()] for layer in sharing]
        sizes = layer_budgets(variances, self.prompt, counted // len(sharing), self.sinks, self.allocation)
        return [sizes[sharing.index(layer)] if layer in sharing else planned for layer in layers]

    def recent(self, size: int) -> int:
        return (size - self.sinks) * self.ratio[1] // sum(self.ratio)

    def absorb(self, layer: int, kv_head: int, evicted: list[Token], kept: list[Token]) -> None:
        """Merges the evicted tokens that are similar enough (Equations 9 to 12) and moves the threshold."""
        keys = torch.stack([token.key for token in kept])
        matches = [nearest(token.key, keys) for token in evicted]
        mean = fmean(u for _, u in matches)

        before = self.thresholds.get((layer, kv_head))
        # The first eviction sets its own threshold: at the prompt's end, or in a step if the whole prompt was kept.
        threshold = mean if before is None else before
        self.thresholds[layer, kv_head] = mean if before is None else self.beta * mean + (1 - self.beta) * before

        if self.merge == "none":
            return
        for j, target in enumerate(kept):
            merged = [(t, u) for t, (i, u) in zip(evicted, matches, strict=True) if i == j and u >= threshold]
            if not merged:
                continue
            own, weights = merge_weights([u for _, u in merged], self.merge)
            target.key = own * target.key + sum(w * t.key for w, (t, _) in zip(weights, merged, strict=True))
            target.value = own * target.value + sum(w * t.value for w, (t, _) in zip(weights, merged, strict=True))


class SlowSimLayer(SlowEvict):
    """SimLayerKV: a lazy layer holds the first `sinks` and the `recent` newest tokens; other layers hold everything.

    A layer is lazy if the prompt's last query gives those positions more than `threshold` of its attention, averaged
    over the query heads.
    """

    def __init__(self, plan: Plan, sinks: int = 4, recent: int = 1024, threshold: float = 0.9):
        super().__init__(plan)
        self.sinks, self.recent, self.threshold = sinks, recent, threshold

    def begin(self) -> None:
        super().begin()
        self.masses: list[float] = []  # by layer

    def is_lazy(self, layer: int) -> bool:
        return self.masses[layer] > self.threshold

    def is_near(self, position: int, length: int) -> bool:
        """Whether a position is a sink or recent in a sequence of `length` tokens."""
        return position < self.sinks or position >= length - self.recent

    def observe(self, layer: int, q: Tensor, k: Tensor) -> None:
        masses = []
        for head in range(self.plan.n_head):
            attention = probabilities(q[head, -1], k[head // self.groups]).tolist()
            masses.append(math.fsum(one for i, one in enumerate(attention) if self.is_near(i, self.prompt)))
        self.masses.append(fmean(masses))

    def finish(self) -> None:
        for layer in range(self.plan.n_layer):
            for kv_head in range(self.plan.n_kv_head):
                self.before(layer, kv_head)

    def before(self, layer: int, kv_head: int) -> None:
        if self.is_lazy(layer):
            near = [t for t in self.tokens[layer][kv_head] if self.is_near(t.position, self.length[layer])]
            self.tokens[layer][kv_head] = near
