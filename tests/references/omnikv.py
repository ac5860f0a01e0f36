"""OmniKV (OpenReview ulCAPXYXfa, Equations 1 to 4): one object for the whole model, because its layers depend on each
other.

Its prefill in chunks follows Appendix D.10, with the uniform selector of Section 4.2; * marks what the paper leaves
open. A prompt of T tokens is processed in consecutive chunks of C tokens; the last one may be shorter. Full layers and
filter layers attend causally to everything. For the chunk of tokens [s, e), a filter layer also chooses min(n, s) of
the positions 0..s-1, which all sparse layers of its segment use. n = max(1, floor(r C + 0.5))*, where r is the ratio of
chosen tokens to chunk size; C is the full chunk size, for a shorter last chunk too*. Position j scores the sum over the
last min(w, e - s) queries of the chunk (w = 16*) of the maximum over all query heads of that query's attention weight
on j, over all keys that the query sees. All KV heads share the choice. In a sparse layer, the query at position i of
the chunk attends to the chosen positions and to positions s..i*. Where s <= n, this is everything before it.
"""

from fractions import Fraction

import torch
from torch import Tensor

from kv.method import Plan

from .attention import SlowLayers, Text, best, half_up, masked_attention, probabilities


class SlowOmni(SlowLayers):
    """OmniKV: filter layers select prompt positions; the sparse layers after them attend to these and generated ones.

    `budget` is k. With `mem`, k solves mem = a + k / prompt (1 - a), where a is the share of full layers. k is rounded
    half up, and `mem` is taken as the decimal it prints as.
    """

    def __init__(
        self,
        plan: Plan,
        budget: int,
        filter_layers: list[int],
        selector: str = "last",
        window: int = 16,
        mem: float | None = None,
    ):
        super().__init__(plan)
        self.budget, self.selector, self.max_window, self.mem = budget, selector, window, mem
        self.filter_layers = filter_layers

    def kind(self, layer: int) -> str:
        """'full' if l < f1, l in F or l - 1 in F (Equation 2), else 'sparse'."""
        filters = self.filter_layers
        return "full" if layer < filters[0] or layer in filters or layer - 1 in filters else "sparse"

    def top(self, prompt: int) -> int:
        """k: how many positions of a prompt are selected."""
        if self.mem is None:
            return min(self.budget, prompt)
        full = [layer for layer in range(self.plan.n_layer) if self.kind(layer) == "full"]
        a = Fraction(len(full), self.plan.n_layer)
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
            for head in range(self.plan.n_head):
                keys = text.keys[head // text.groups, : position + 1]
                seen = probabilities(text.queries[head, position], keys)[:prompt]
                highest[: len(seen)] = torch.maximum(highest[: len(seen)], seen)
            scores += self.weight(window - 1 - (newest - position), window) * highest
        always = [position for position in observed if position < prompt]
        others = [position for position in range(prompt) if position not in always]
        return sorted(always + [others[i] for i in best(scores[others], k - len(always))])

    def begin(self) -> None:
        super().begin()
        self.selected: dict[int, list[int]] = {}  # by filter layer: its last step's prompt positions, ascending

    def choose(self, layer: int, kv_head: int) -> list[int]:
        """Everything in a full layer; in a sparse one, what its filter layer selected and the generated tokens."""
        if self.kind(layer) == "full":
            return super().choose(layer, kv_head)
        nearest = max(f for f in self.filter_layers if f <= layer)
        return self.selected[nearest] + self.texts[layer].generated()

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores one token, attends, and selects for the layers that follow if this is a filter layer."""
        y = super().decode(layer, q, k, v)
        if layer in self.filter_layers:
            self.selected[layer] = self.select(self.texts[layer])
        return y


def choose_chunk(q: Tensor, k: Tensor, start: int, end: int, count: int, window: int = 16) -> list[int]:
    """The positions before `start` that a filter layer chooses for the chunk [start, end), ascending.

    q is [Hq,T,D], k [Hk,T,D], with the whole prompt; only tokens before `end` are read. `count` is n.
    """
    if start <= count:
        return list(range(start))
    scores, groups = [0.0] * start, q.shape[0] // k.shape[0]
    for position in range(max(start, end - window), end):
        highest = [0.0] * start  # over the query heads
        for head in range(q.shape[0]):
            weights = probabilities(q[head, position], k[head // groups, : position + 1]).tolist()
            highest = [max(pair) for pair in zip(highest, weights[:start], strict=True)]
        scores = [a + b for a, b in zip(scores, highest, strict=True)]
    return best(torch.tensor(scores, dtype=torch.float64), count)


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, chosen: list[list[int]], chunk: int) -> Tensor:
    """A sparse layer's outputs [Hq,T,D]: q [Hq,T,D], k and v [Hk,T,D]; chosen[i] are the positions for chunk i."""
    return masked_attention(q, k, v, lambda i: chosen[i // chunk] + list(range(i - i % chunk, i + 1))).float()
