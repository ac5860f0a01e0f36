"""Attention of single queries to listed positions, and what the references build on it."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import torch
from torch import Tensor

from kv.method import Plan


def half_up(x: Fraction | float) -> int:
    """Rounds to the nearest integer, halves up."""
    return math.floor(x + Fraction(1, 2))


def best(scores: Tensor, count: int) -> list[int]:
    """Indices of the `count` highest scores, in ascending order; ties go to the lowest index."""
    values = scores.tolist()
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:count])


def softmax(logits: Tensor) -> Tensor:
    """exp(x) / sum exp(x) of a vector, in fp64."""
    exps = torch.exp(logits.double() - logits.double().max())
    return exps / exps.sum()


def dots(q: Tensor, keys: Tensor) -> Tensor:
    """k . q for each key, in fp64: q [D], keys [n,D] -> [n]. Equal keys give exactly equal results: ties stay ties."""
    return (keys.double() * q.double()).sum(1)


def probabilities(q: Tensor, keys: Tensor) -> Tensor:
    """softmax(K q / sqrt(D)) of one query [D] over n keys [n,D]: [n]."""
    return softmax(dots(q, keys) / math.sqrt(q.shape[0]))


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query's output: q [D], keys and values [n,D] -> fp64 [D]."""
    return probabilities(q, keys) @ values.double()


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Callable[[int], Iterable[int]], at: Iterable[int] | None = None
) -> Tensor:
    """Outputs of the queries `at` some positions (None: all), each over its visible ones: fp64 [Hq,n,D].

    q is [Hq,T,D], k and v [Hk,T,D]; `visible` lists the positions that the query at a position attends to.
    """
    groups = q.shape[0] // k.shape[0]
    found = []
    for i in range(q.shape[1]) if at is None else at:
        seen = list(visible(i))
        found.append([attend(q[h, i], k[h // groups, seen], v[h // groups, seen]) for h in range(q.shape[0])])
    return torch.stack([torch.stack(heads) for heads in found], 1)


def causal(window: int | None = None) -> Callable[[int], range]:
    """What a query sees: all positions up to its own, or the last `window` of them."""
    return lambda i: range(0 if window is None else max(0, i + 1 - window), i + 1)


class Text:
    """One layer's queries [Hq,N,D], keys and values [Hk,N,D] of every token so far."""

    def __init__(self, plan: Plan, q: Tensor, k: Tensor, v: Tensor):
        self.groups = plan.n_head // plan.n_kv_head
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
        return attend(self.queries[head, -1], self.keys[kv_head, positions], self.values[kv_head, positions])


class SlowLayers:
    """Full attention, and the base of methods whose layers depend on each other or share a sequence.

    The life of a sequence: `prefill` for layers 0 ... L - 1 (layer 0 begins a new sequence), then `decode` for each
    layer of each step. A method decides which positions a KV head attends to (`choose`).
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.groups = plan.n_head // plan.n_kv_head

    def begin(self) -> None:
        """Forgets the sequence."""
        self.texts: list[Text] = []  # by layer
        self.attended: dict[int, list[list[int]]] = {}  # by layer and KV head: positions of the last step, ascending

    def text_of(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Text:
        """A layer's storage of a prompt."""
        return Text(self.plan, q, k, v)

    def prefill(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores a layer's prompt: q [Hq,T,D], k and v [Hk,T,D]. Layer 0 begins a new sequence."""
        if layer == 0:
            self.begin()
        self.texts.append(self.text_of(layer, q, k, v))

    def choose(self, layer: int, kv_head: int) -> list[int]:
        """The positions that a KV head attends to, ascending; the newest token is already stored."""
        return list(range(self.texts[layer].length))

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, then attends: q [Hq,D], k and v [Hk,D] -> [Hq,D]."""
        text = self.texts[layer]
        text.append(q, k, v)
        attended = [self.choose(layer, kv_head) for kv_head in range(self.plan.n_kv_head)]
        self.attended[layer] = attended
        heads = range(self.plan.n_head)
        return torch.stack([text.attend(head, attended[head // self.groups]) for head in heads]).float()

    def queries(self, layer: int, kv_head: int) -> Tensor:
        """The newest token's queries of a group: [G,D]."""
        return self.texts[layer].queries[kv_head * self.groups : (kv_head + 1) * self.groups, -1]
