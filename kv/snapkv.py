"""snapkv, snapkv++, pyramidkv: what a prompt's last queries attend to stays, once and for all.

The attention of the last `window` queries, summed over them and max-pooled along the prompt, says which tokens of the
prompt are kept beside the window itself; every generated token comes on top. Memory and traffic: the budget and the
generated tokens.

- snapkv (Li et al., arXiv 2404.14469): every query head keeps tokens of its own, budget / G of them. With gqa the heads
  of a group share their tokens, budget of them.
- snapkv++ (RocketKV, arXiv 2502.14051, Algorithm 1): shared by a group, with a wide pooling kernel, and a wider one for
  long prompts.
- pyramidkv (Cai et al., arXiv 2406.02069): shared by a group, more tokens in lower layers than in higher ones.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kv import ops
from kv.base import KV, Kept, Method, Shape, option

# Options of more than one method
KERNEL = option(7, "tokens that the max-pooling spans", min=1)
THRESHOLD = "tokens of a long prompt; auto: the model's, for rocketkv with split=even alone"
DEDUCT = option(False, "generated tokens count: the prompt keeps fewer")


class SnapKV(Kept):
    """Keeps `kept` tokens of a prompt, the last `window` among them, and all that follow.

    For each KV head, or `per_query` for each query head.
    """

    def __init__(
        self, shape: Shape, kept: int, window: int, kernel: int, long_kernel: int = 0, threshold: int | None = None,
        per_query: bool = False,
    ):  # fmt: skip
        super().__init__(replace(shape, n_kv_head=shape.n_head) if per_query else shape, kept)
        self.kernel, self.long_kernel, self.threshold = kernel, long_kernel, threshold
        self.repeats = self.shape.n_kv_head // shape.n_kv_head  # heads that store a KV head's tokens
        self.recent = self.window = min(window, self.kept)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.fill(row, k, v, self.choose(q, k))

    def choose(self, q: Tensor, k: Tensor) -> Tensor:
        """Positions that are kept, [heads, n] in sequence order."""
        heads, length = k.shape[1] * self.repeats, k.shape[2]
        if length <= self.kept:
            return torch.arange(length, device=k.device).expand(heads, -1)
        scores = ops.window_scores(q, k, self.window)  # [Hk,G,N]
        scores = scores.flatten(0, 1) if self.repeats > 1 else scores.sum(1)
        long = self.threshold is not None and length >= self.threshold
        kernel = self.long_kernel if long else self.kernel
        pooled = F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)[:, : scores.shape[1]]
        best = ops.top(pooled, self.kept - self.window).sort().values
        window = torch.arange(length - self.window, length, device=k.device).expand(heads, -1)
        return torch.cat((best, window), dim=1)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        if self.repeats > 1:
            k, v = (x.repeat_interleave(self.repeats, dim=1) for x in (k, v))
        slot = pos - self.dropped
        self.store(k, v, slot, active)
        return self.attend(q, slot + 1)


def threshold_of(shape: Shape) -> int | None:
    """Tokens from which the pooling is wide (RocketKV, section 4.4.2): Llama-3.x, LongChat, and never for others."""
    if shape.rope_theta == 5e5:
        return 48 * 1024
    return 12 * 1024 if is_longchat(shape) else None


def is_longchat(shape: Shape) -> bool:
    return shape.rope_type == "linear" and (shape.n_layer, shape.n_kv_head) == (32, 32)


# The methods


@dataclass(frozen=True)
class WindowMethod(Method):
    window: int = option(32, "last queries of the prompt whose attention decides", min=1)

    def minimum(self, shape: Shape) -> int:
        return 2


@dataclass(frozen=True)
class SnapKVMethod(WindowMethod):
    help = "what the prompt's end attends to"
    approximates, approximates_with = "the query heads of a group share the budget", {"gqa": False}
    kernel: int = KERNEL
    gqa: bool = option(False, "the query heads of a group share what they keep")
    deduct: bool = DEDUCT

    def minimum(self, shape: Shape) -> int:
        return 2 * shape.n_head // shape.n_kv_head + self.deduct * shape.max_new_tokens

    def build(self, shape: Shape, budget: int) -> list[KV]:
        kept, groups = budget - self.deduct * shape.max_new_tokens, shape.n_head // shape.n_kv_head
        per_query = not self.gqa and groups > 1
        kept = kept // groups if per_query else kept
        window = min(self.window, kept // 2)
        return [SnapKV(shape, kept, window, self.kernel, per_query=per_query) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class PoolingMethod(WindowMethod):
    """Of RocketKV's stage 1."""

    kernel: int = option(63, "tokens that the max-pooling spans", min=1)
    long_kernel: int = option(511, "the same for long prompts", min=1)
    threshold: int | None = option(None, THRESHOLD)

    def kernels(self, shape: Shape) -> tuple[int, int, int | None]:
        """What SnapKV takes: the kernel, that of long prompts, and how long those are."""
        threshold = threshold_of(shape) if self.threshold is None else self.threshold
        return self.kernel, self.long_kernel, threshold


@dataclass(frozen=True)
class SnapKVPlusMethod(PoolingMethod):
    help = "the same, shared by a group, pooled widely"
    deduct: bool = DEDUCT

    def minimum(self, shape: Shape) -> int:
        return 2 + self.deduct * shape.max_new_tokens

    def build(self, shape: Shape, budget: int) -> list[KV]:
        kept = budget - self.deduct * shape.max_new_tokens
        window = min(self.window, kept // 2)
        return [SnapKV(shape, kept, window, *self.kernels(shape)) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class PyramidKVMethod(WindowMethod):
    help = "snapkv with more tokens in lower layers"
    kernel: int = KERNEL

    def build(self, shape: Shape, budget: int) -> list[KV]:
        kept = pyramid_budgets(shape.n_layer, budget, self.window, shape.max_prompt)
        return [SnapKV(shape, n, min(self.window, budget // 2), self.kernel) for n in kept]


def pyramid_budgets(n_layer: int, budget: int, window: int, prompt: int) -> list[int]:
    """Tokens that each layer's prompt keeps, the window included: they fall linearly, their mean is the budget.

    No layer keeps more than a prompt has: what the lowest layers cannot use goes to the highest.
    """
    window = min(window, budget // 2)
    mean = budget - window
    most = min(2 * mean - mean / 20, prompt - window)
    least = min(2 * mean - most, most)
    falls = [0.5 if n_layer == 1 else layer / (n_layer - 1) for layer in range(n_layer)]
    return [math.floor(most - fall * (most - least) + 0.5) + window for fall in falls]
