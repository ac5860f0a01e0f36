"""snapkv, snapkv++, pyramidkv: after the prompt, evict all but the tokens that its last queries attend to.

The attention of the last `window` queries, summed over them and max-pooled along the prompt, selects the tokens to
keep besides the window itself. Every generated token is kept too. Memory and traffic: the budget and the generated
tokens.

- snapkv (Li et al., arXiv 2404.14469): each query head keeps its own budget / G tokens. With `gqa`, the query heads of
  a group share `budget` tokens.
- snapkv++ (RocketKV, arXiv 2502.14051, Algorithm 1): the heads of a group share their tokens. The pooling kernel is
  wide, and wider for long prompts.
- pyramidkv (Cai et al., arXiv 2406.02069): the heads of a group share their tokens. Lower layers keep more than higher
  ones.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.base import KV
from kv.method import Method, Shape, option
from kv.parts import attention, ops
from kv.parts.kept import Kept

# Options that methods share
KERNEL = option(7, "width of the max-pooling in tokens", min=1)
THRESHOLD = "prompt length from which long_kernel applies; auto: by model, in rocketkv only with split=even"
DEDUCT = option(False, "the budget includes max_new_tokens: the prompt keeps fewer")


class SnapKV(Kept):
    """Keeps `kept` tokens of a prompt, including the last `window`, and every generated token.

    Each KV head keeps its own tokens or, with `per_query`, each query head.
    """

    def __init__(
        self,
        shape: Shape,
        kept: int,
        window: int,
        kernel: int,
        long_kernel: int = 0,
        threshold: int | None = None,
        per_query: bool = False,
        width: int | None = None,
    ):
        super().__init__(replace(shape, n_kv_head=shape.n_head) if per_query else shape, kept, width)
        self.kernel, self.long_kernel, self.threshold = kernel, long_kernel, threshold
        self.repeats = shape.n_head // shape.n_kv_head if per_query else 1  # stored copies per KV head
        self.recent = self.window = min(window, self.kept)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.fill(row, k, v, self.choose(q, k))

    def choose(self, q: Tensor, k: Tensor) -> Tensor:
        """The kept positions [heads,n], ascending."""
        heads, length = k.shape[1] * self.repeats, k.shape[2]
        if length <= self.kept:
            return torch.arange(length, device=k.device).expand(heads, -1)
        scores = attention.window_scores(q, k, self.window)  # [Hk,G,T-window]
        scores = scores.flatten(0, 1) if self.repeats > 1 else scores.sum(1)
        long = self.threshold is not None and length >= self.threshold
        kernel = self.long_kernel if long else self.kernel
        pooled = F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)[:, : scores.shape[1]]
        best = ops.top(pooled, self.kept - self.window).sort().values
        window = torch.arange(length - self.window, length, device=k.device).expand(heads, -1)
        return torch.cat((best, window), dim=1)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        super().append(row, *self.repeated(k, v), pos)

    def repeated(self, *kv: Tensor) -> tuple[Tensor, ...]:
        """New K and V [B,Hk,n,D] for each head that stores tokens."""
        return kv if self.repeats == 1 else tuple(x.repeat_interleave(self.repeats, dim=1) for x in kv)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        return self.attend(q, pos - self.dropped + 1)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        super().insert(*self.repeated(k, v), pos, active)


def threshold_of(shape: Shape) -> int | None:
    """Prompt length from which long_kernel applies (RocketKV, section 4.4.2): Llama-3.x and LongChat; None: never."""
    if shape.rope_theta == 5e5:
        return 48 * 1024
    return 12 * 1024 if is_longchat(shape) else None


def is_longchat(shape: Shape) -> bool:
    return shape.rope_type == "linear" and (shape.n_layer, shape.model_kv_heads) == (32, 32)


# The methods


@dataclass(frozen=True)
class WindowMethod(Method):
    window: int = option(32, "last queries of the prompt, whose attention selects tokens", min=1)

    def minimum(self, shape: Shape) -> int:
        return 2


@dataclass(frozen=True)
class SnapKVMethod(WindowMethod):
    help = "what the prompt's last queries attend to"
    kernel: int = KERNEL
    gqa: bool = option(False, "the query heads of a group share their tokens")
    deduct: bool = DEDUCT

    def minimum(self, shape: Shape) -> int:
        return 2 * shape.n_head // shape.n_kv_head + self.deduct * shape.max_new_tokens

    def build(self, shape: Shape, budget: int) -> list[KV]:
        kept, group = budget - self.deduct * shape.max_new_tokens, shape.n_head // shape.n_kv_head
        per_query = not self.gqa
        kept = kept // group if per_query else kept
        window = min(self.window, kept // 2)
        return [SnapKV(shape, kept, window, self.kernel, per_query=per_query) for _ in range(shape.n_layer)]


@dataclass(frozen=True)
class PoolingMethod(WindowMethod):
    """The pooling options of RocketKV's stage 1."""

    kernel: int = option(63, "width of the max-pooling in tokens", min=1)
    long_kernel: int = option(511, "the same, for long prompts", min=1)
    threshold: int | None = option(None, THRESHOLD)

    def kernels(self, shape: Shape) -> tuple[int, int, int | None]:
        """SnapKV's kernel, long_kernel and threshold."""
        threshold = threshold_of(shape) if self.threshold is None else self.threshold
        return self.kernel, self.long_kernel, threshold


@dataclass(frozen=True)
class SnapKVPlusMethod(PoolingMethod):
    help = "snapkv shared by the heads of a group, with wide pooling"
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
    """Prompt tokens that each layer keeps, including the window: they fall linearly, and their mean is the budget.

    No layer keeps more tokens than the prompt has: lowering the maximum to that raises the minimum by as much.
    """
    window = min(window, budget // 2)
    n = budget - window  # the mean
    least = n / 20
    most = min(2 * n - least, prompt - window)
    least = min(2 * n - most, most)
    falls = [0.5 if n_layer == 1 else layer / (n_layer - 1) for layer in range(n_layer)]
    sizes = [most - fall * (most - least) for fall in falls]
    return [(math.floor(x + 0.5) if x > n else math.ceil(x - 0.5)) + window for x in sizes]  # the mean stays n
