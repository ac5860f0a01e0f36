"""Methods that score a prompt's tokens and keep the best: key norms (arXiv 2406.11430), KeyDiff (arXiv 2504.15364),
Expected Attention (arXiv 2510.00636), LagKV (arXiv 2504.04704), R-KV (arXiv 2505.24133); and TOVA (arXiv 2401.06104),
which evicts at every step.

The first five are one layer each. Each KV head chooses alone, once or again while it generates (`every`), or the KV
heads choose once and together (`heads` = "adaptive": Ada-KV, arXiv 2407.11550). TOVA holds one set of tokens in all KV
heads of a layer; its interface is that of eviction.py.
"""

import math

import torch
from torch import Tensor

from kv.method import Plan

from .attention import dots, probabilities, softmax
from .eviction import SlowEvict, Token, cosines, highest
from .infllm import turned
from .sparse import SlowCompressing, max_pool

TINY = 1e-30  # LagKV: what divides a channel whose minimum is its maximum
SIMILAR = 0.5  # R-KV: a cosine above this marks two tokens as redundant


def norm(x: Tensor) -> Tensor:
    """The L2 norm of each vector: x [n,D] -> [n]."""
    return torch.sqrt((x * x).sum(1))


def unit(keys: Tensor) -> Tensor:
    """Each key divided by its L2 norm; a key of zeros stays: keys [n,D] -> [n,D]."""
    norms = norm(keys).tolist()
    return torch.stack([key / length if length else key for key, length in zip(keys, norms, strict=True)])


class SlowScored(SlowCompressing):
    """The base: a prompt longer than the budget keeps its sinks, its newest tokens and the best scores between them.

    The budget counts all three. All generated tokens stay, unless `every` compresses them with the prompt's: then the
    sinks are the first held tokens. All that is held is attended to.
    """

    def window(self) -> int:
        """How many of the newest prompt tokens stay: at most half of those that do."""
        return min(self.option["window"], self.budget // 2, self.budget - self.option["sinks"])

    def scores(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """A group's scores of the T tokens of a prompt, or held: q [G,m,D], keys and values [T,D] -> [T].

        q are the queries of the newest m tokens of the text, T of them unless `observed` says otherwise. The scores of
        the sinks and of the newest tokens are not used.
        """
        raise NotImplementedError

    def ranks(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = self.scores(q, keys, values)
        scores[: self.option["sinks"]] = torch.inf
        scores[keys.shape[0] - self.window() :] = torch.inf
        return scores


class SlowKeyNorm(SlowScored):
    """Key norms: the keys of the smallest L2 norm stay."""

    defaults = {"sinks": 4, "window": 8, **SlowCompressing.defaults}

    def scores(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return -norm(keys)


class SlowKeyDiff(SlowScored):
    """KeyDiff: the keys stay that are least similar, by cosine, to the mean of the unit keys of the whole prompt."""

    defaults = {"sinks": 4, "window": 0, **SlowCompressing.defaults}

    def scores(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return -torch.tensor(cosines(unit(keys).mean(0), keys), dtype=torch.float64)


class SlowExpected(SlowScored):
    """Expected Attention: the expected attention weight of a token, for queries of a normal distribution, times |v|.

    The score is the softmax of mu . k / sqrt(D) + k' C k / (2 D) over the tokens after the sinks, its mean over the
    query heads of the group, times the L2 norm of v. mu and C are the mean and the population covariance of the query
    head's prompt queries before RoPE, without the sinks', turned by the mean of the rotations of the next `future`
    positions. The choice from held tokens reads the text's last `every` queries in place of the prompt's; they have
    their positions in the text, as have the next ones.
    """

    defaults = {"future": 512, "sinks": 4, "window": 0, **SlowCompressing.defaults}

    def observed(self, held: int) -> int:
        return self.option["every"]

    def chunk_observed(self, held: int, chunk: int) -> int:
        return chunk

    def rotation(self, length: int) -> Tensor:
        """R: the mean of the rotation matrices of the positions length ... length + future - 1: [D,D]."""
        future, eye = self.option["future"], torch.eye(self.plan.head_dim, dtype=torch.float64)
        total = torch.zeros_like(eye)
        for position in range(length, length + future):
            moved = torch.full((eye.shape[0],), position, dtype=torch.float64)
            total += turned(eye, moved, self.plan.rope_theta).T  # row j of the turned unit vectors is column j of R
        return total / future

    def distribution(self, q: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """mu and C of one query head's future queries: q [m,D], RoPE applied, and R [D,D] -> [D], [D,D].

        q are the text's newest m queries; those at positions below `sinks` are left out.
        """
        length, sinks = self.text.length, self.option["sinks"]
        places = torch.arange(length - q.shape[0], length, dtype=torch.float64)
        plain = turned(q, -places, self.plan.rope_theta)[places >= sinks]
        mu = plain.mean(0)
        covariance = torch.zeros(q.shape[1], q.shape[1], dtype=torch.float64)
        for one in plain:
            covariance += torch.outer(one - mu, one - mu) / plain.shape[0]
        return rotation @ mu, rotation @ covariance @ rotation.T

    def scores(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (length, dim), sinks = keys.shape, self.option["sinks"]
        expected, rotation = torch.zeros(length, dtype=torch.float64), self.rotation(self.text.length)
        for one in q:
            mu, covariance = self.distribution(one, rotation)
            logits = torch.zeros(length, dtype=torch.float64)
            for i, key in enumerate(keys):
                logits[i] = (mu * key).sum() / math.sqrt(dim) + (key @ covariance * key).sum() / (2 * dim)
            expected[sinks:] += softmax(logits[sinks:]) / q.shape[0]
        return expected * norm(values)


class SlowLagKV(SlowScored):
    """LagKV: the tokens stay that vary most over the channels, once scaled to the range of the tokens that follow.

    After the sinks come whole partitions of `lag` tokens. In a partition, each channel of K is scaled so that 0 and 1
    are its minimum and maximum over the next partition (if those are equal, the difference to the minimum is divided by
    1e-30); the softmax over the partition of each token's standard deviation over the channels (of n - 1) and the same
    of V have a mean, and the token's rank by it, the lowest being 0 and the lower position ranking lower among equals,
    divided by `lag`, is the score. The last whole partition and what remains have no successor: they score
    2 + position / T.
    """

    defaults = {"lag": 128, "sinks": 4, "window": 0, **SlowCompressing.defaults}

    def spread(self, x: Tensor, successor: Tensor) -> Tensor:
        """What K, or V, gives the tokens of a partition: x and successor [lag,D] -> [lag]."""
        low, high = successor.min(0).values, successor.max(0).values
        scaled = (x - low) / torch.where(high == low, TINY, high - low)
        return softmax(torch.stack([one.std(correction=1) for one in scaled]))

    def scores(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        length, lag, sinks = keys.shape[0], self.option["lag"], self.option["sinks"]
        scores = torch.tensor([2 + i / length for i in range(length)], dtype=torch.float64)
        for j in range((length - sinks) // lag - 1):
            start = sinks + j * lag
            own, successor = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            of_keys, of_values = self.spread(keys[own], keys[successor]), self.spread(values[own], values[successor])
            means = ((of_keys + of_values) / 2).tolist()
            for rank, i in enumerate(sorted(range(lag), key=lambda i: (means[i], i))):
                scores[start + i] = rank / lag
        return scores


class SlowRKV(SlowScored):
    """R-KV: lambda importance - (1 - lambda) redundancy, where lambda is `weight`.

    Importance is SnapKV's, by the last `window` queries, with the highest logit of the group in place of the sum and
    the mean over the queries. Redundancy is the softmax over all tokens of a token's mean cosine with all keys of the
    prompt, or of the held tokens: 0 with itself and, from each key, with the newest token whose cosine with that key is
    above 0.5. The window is at most half of the budget.
    """

    defaults = {"weight": 0.1, "window": 8, "kernel": 7, "sinks": 4, **SlowCompressing.defaults}

    def importance(self, q: Tensor, keys: Tensor) -> Tensor:
        """The pooled importance of the tokens before the window: q [G,T,D], keys [T,D] -> [T - window]."""
        length, window = keys.shape[0], self.window()
        total = torch.zeros(length - window, dtype=torch.float64)
        for i in range(length - window, length):
            logits = torch.stack([dots(one[i], keys[: i + 1]) / math.sqrt(keys.shape[1]) for one in q])
            total += softmax(logits.max(0).values)[: length - window]
        return max_pool(total / window, self.option["kernel"])

    def redundancy(self, keys: Tensor) -> Tensor:
        """The redundancy of all tokens: keys [T,D] -> [T]."""
        length, units = keys.shape[0], unit(keys)
        total = torch.zeros(length, dtype=torch.float64)
        for i in range(length):
            row = dots(units[i], units)
            row[i] = 0
            similar = [j for j in range(length) if row[j] > SIMILAR]
            if similar:
                row[max(similar)] = 0
            total += row
        return softmax(total / length)

    def scores(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        weight = self.option["weight"]
        scores = -(1 - weight) * self.redundancy(keys)
        scores[: keys.shape[0] - self.window()] += weight * self.importance(q, keys)
        return scores


class SlowTOVA(SlowEvict):
    """TOVA: a layer holds t tokens, the same in all KV heads: those of the last query's highest attention, and its own.

    The attention is the mean over all query heads. A step attends to t + 1 tokens; then the least attended goes, never
    the newest one, the lowest position among equals.
    """

    def __init__(self, plan: Plan, budget: int):
        super().__init__(plan)
        self.budget = budget

    def begin(self) -> None:
        super().begin()
        self.weights: list[list[list[float]]] = []  # by layer and KV head: the last query's, summed over the group

    def means(self, layer: int) -> dict[int, float]:
        """By position held: the last query's attention weight, the mean over all query heads."""
        heads, tokens = self.weights[layer], self.tokens[layer][0]
        return {t.position: math.fsum(h[i] for h in heads) / self.plan.n_head for i, t in enumerate(tokens)}

    def hold(self, layer: int, kept: list[Token]) -> None:
        """Drops all tokens but those at the positions of `kept`, in every KV head."""
        positions = {token.position for token in kept}
        for kv_head, tokens in enumerate(self.tokens[layer]):
            self.tokens[layer][kv_head] = [token for token in tokens if token.position in positions]

    def observe(self, layer: int, q: Tensor, k: Tensor) -> None:
        self.weights.append([])
        for kv_head in range(self.plan.n_kv_head):
            group = [probabilities(one[-1], k[kv_head]) for one in self.heads(q, kv_head)]
            self.weights[layer].append(torch.stack(group).sum(0).tolist())

    def finish(self) -> None:
        for layer in range(self.plan.n_layer):
            self.shrink_all(layer)

    def shrink_all(self, layer: int) -> None:
        if len(self.tokens[layer][0]) > self.budget:
            *older, last = self.tokens[layer][0]
            means = self.means(layer)
            top = highest(older, self.budget - 1, lambda token: means[token.position])
            self.hold(layer, [*top, last])

    def seen(self, layer: int, kv_head: int, attention: list[float]) -> None:
        self.weights += [[[] for _ in range(self.plan.n_kv_head)]] * (len(self.weights) == layer)
        self.weights[layer][kv_head] = attention

    def after(self, layer: int, kv_head: int, attention: list[float]) -> None:
        self.weights[layer][kv_head] = attention
        if kv_head < self.plan.n_kv_head - 1 or len(attention) <= self.budget:
            return  # the last KV head's attention completes the means
        *older, last = self.tokens[layer][0]
        means = self.means(layer)
        evicted = min(older, key=lambda token: (means[token.position], token.position))
        self.hold(layer, [*(token for token in older if token is not evicted), last])


SLOW: dict[str, type[SlowCompressing]] = {
    "keynorm": SlowKeyNorm,
    "keydiff": SlowKeyDiff,
    "expected": SlowExpected,
    "lagkv": SlowLagKV,
    "rkv": SlowRKV,
}
