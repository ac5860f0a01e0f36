"""snapkv, snapkv++, pyramidkv: after the prompt, evict all but the tokens that its last queries attend to.

The attention of the last `window` queries, summed over them and max-pooled along the prompt, selects the tokens to
keep besides the window itself. Every generated token is kept too. Memory and traffic: the budget and the generated
tokens. heads=adaptive shares a layer's budget among its heads (kv/parts/adaptive.py).

- snapkv (Li et al., arXiv 2404.14469): the query heads of a group share `budget` tokens. With gqa=false, as in the
  paper's first code, which repeats K and V, each query head keeps its own budget / G tokens: a G-th of the choice for
  as many bytes. A budget that covers every token builds the full cache.
- snapkv++ (RocketKV, arXiv 2502.14051, Algorithm 1): the heads of a group share their tokens. The pooling kernel is
  wide, and wider for long prompts.
- pyramidkv (Cai et al., arXiv 2406.02069): the heads of a group share their tokens. Lower layers keep more than higher
  ones. A prompt no longer than the budget is kept whole in every layer, so no layer has fewer slots than the budget.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from kv.base import KV
from kv.full import full_layers
from kv.method import Method, Plan, option
from kv.parts import attention
from kv.parts.adaptive import HeadBudgets
from kv.parts.scored import EVERY, KERNEL, Scored, pooled


class Kernels(NamedTuple):
    """Widths of the max-pooling in tokens: `long` for prompts of `threshold` tokens and more."""

    short: int
    long: int = 0
    threshold: int | None = None

    def at(self, length: int) -> int:
        return self.long if self.threshold is not None and length >= self.threshold else self.short


Sizes = Callable[[int], tuple[int, int]]  # a prompt's length -> how many of its tokens stay, and the window


class SnapKV(Scored):
    """Scores tokens by the attention of the prompt's last `window` queries, for each KV head or each query head."""

    def __init__(
        self, plan: Plan, sizes: Sizes, kernels: Kernels, most: int = 0, copies: int = 1, bits: int = 16, every: int = 0
    ):
        """sizes: of a prompt of any length. most: tokens that a shorter prompt than the longest may keep."""
        kept, window = sizes(plan.planned if every and plan.share is None else plan.max_prompt)
        super().__init__(plan, max(kept, most), window, 0, copies, bits, every, queries=window)
        self.sizes, self.kernels = sizes, kernels

    def kept_of(self, prompt: int) -> int:
        return min(self.kept, self.sizes(prompt)[0])

    def window_of(self, prompt: int) -> int:
        return self.sizes(prompt)[1]

    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sums = attention.window_scores(q, k, self.latest)  # [Hk,G,T-window]
        sums = sums.sum(1) if self.copies == 1 else sums.flatten(0, 1)
        return pooled(sums, self.kernels.at(k.shape[2]), self.latest)


def threshold_of(plan: Plan) -> int | None:
    """Prompt length from which long_kernel applies (RocketKV, section 4.4.2): Llama-3.x and LongChat; None: never."""
    if plan.rope_theta == 5e5:
        return 48 * 1024
    return 12 * 1024 if is_longchat(plan) else None


def is_longchat(plan: Plan) -> bool:
    return plan.rope_type == "linear" and (plan.n_layer, plan.model_kv_heads) == (32, 32)


@dataclass(frozen=True)
class WindowMethod(Method):
    fewest = 2
    window: int = option(32, "last queries of the prompt, whose attention selects tokens", min=1)


@dataclass(frozen=True)
class SnapKVBase(HeadBudgets, WindowMethod):
    """Builds SnapKV layers; the budget may include the generated tokens."""

    deduct: bool = option(False, "the budget includes the room for an answer: the prompt keeps fewer")
    every: int = EVERY

    def copies(self, plan: Plan) -> int:
        """How many heads of a group keep their own tokens, and so divide the budget."""
        return 1

    def minimum(self, plan: Plan) -> int:
        return 2 * self.copies(plan) + self.deduct * plan.room

    def most(self, plan: Plan) -> int:
        return plan.planned + self.deduct * plan.room

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The budget, and every generated token, in each head that keeps its own."""
        return super().paper_bytes(plan, budget + (self.copies(plan) - 1) * plan.room)

    def sizes(self, plan: Plan, budget: int, prompt: int) -> tuple[int, int]:
        kept = (plan.row_budget(budget, prompt) - self.deduct * plan.room) // self.copies(plan)
        return kept, min(self.window, kept // 2)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        sizes, kernels = partial(self.sizes, plan, budget), self.kernels(plan)
        if self.every and self.deduct:
            raise ValueError("with every, the budget never includes the room: leave out deduct")
        if self.copies(plan) > 1 and budget >= self.most(plan):
            return full_layers(plan)
        layer = partial(self.layer_type(SnapKV, plan), plan, sizes, kernels, copies=self.copies(plan), every=self.every)
        return [layer() for _ in range(plan.n_layer)]


@dataclass(frozen=True)
class SnapKVMethod(SnapKVBase):
    name = "snapkv"
    paper = "https://arxiv.org/abs/2404.14469"
    help = "what the prompt's last queries attend to"
    kernel: int = KERNEL
    gqa: bool = option(True, "the query heads of a group share their tokens; false: each keeps budget / G of its own")

    def copies(self, plan: Plan) -> int:
        return 1 if self.gqa else plan.n_head // plan.n_kv_head

    def kernels(self, plan: Plan) -> Kernels:
        return Kernels(self.kernel)


@dataclass(frozen=True)
class PoolingMethod(WindowMethod):
    """The pooling options of RocketKV's stage 1."""

    kernel: int = option(63, "width of the max-pooling in tokens", min=1)
    long_kernel: int = option(511, "the same, for long prompts", min=1)
    threshold: int | None = option(
        None, "prompt length from which long_kernel applies; auto: by model, in rocketkv only with split=even"
    )

    def kernels(self, plan: Plan) -> Kernels:
        return Kernels(self.kernel, self.long_kernel, threshold_of(plan) if self.threshold is None else self.threshold)


@dataclass(frozen=True)
class SnapKVPlusMethod(PoolingMethod, SnapKVBase):
    name = "snapkv++"
    paper = "https://arxiv.org/abs/2502.14051"
    help = "snapkv shared by the heads of a group, with wide pooling"


@dataclass(frozen=True)
class PyramidKVMethod(HeadBudgets, WindowMethod):
    name = "pyramidkv"
    paper = "https://arxiv.org/abs/2406.02069"
    help = "snapkv with more tokens in lower layers"
    kernel: int = KERNEL
    every: int = EVERY

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The budget in layers that would have less, because of shorter prompts; and every generated token."""
        sizes = pyramid_budgets(plan.n_layer, budget, self.window, plan.max_prompt)
        return sum(max(size, budget) + plan.room for size in sizes) * plan.slot_bytes

    def sizes(self, plan: Plan, budget: int, layer: int, prompt: int) -> tuple[int, int]:
        budget = plan.row_budget(budget, prompt)
        return pyramid_budgets(plan.n_layer, budget, self.window, prompt)[layer], min(self.window, budget // 2)

    def build(self, plan: Plan, budget: int) -> list[KV]:
        layer, layers = self.layer_type(SnapKV, plan), []
        for sizes in (partial(self.sizes, plan, budget, layer) for layer in range(plan.n_layer)):
            # A prompt as long as the budget is kept whole. Of a share, rounding may give a shorter prompt a token more.
            most = sizes(plan.max_prompt)[0] + 1 if plan.share else budget
            layers.append(layer(plan, sizes, Kernels(self.kernel), most, every=self.every))
        return layers


def pyramid_budgets(n_layer: int, budget: int, window: int, prompt: int) -> list[int]:
    """Prompt tokens that each layer keeps, including the window: they fall linearly, and their mean is the budget.

    No layer keeps more tokens than the prompt has: lowering the maximum to that raises the minimum by as much.
    """
    window = min(window, budget // 2)
    n = budget - window  # the mean
    fewest = n / 20
    most = min(2 * n - fewest, prompt - window)
    fewest = min(2 * n - most, most)
    falls = [0.5 if n_layer == 1 else layer / (n_layer - 1) for layer in range(n_layer)]
    sizes = [most - fall * (most - fewest) for fall in falls]
    return [(math.floor(x + 0.5) if x > n else math.ceil(x - 0.5)) + window for x in sizes]  # the mean stays n
