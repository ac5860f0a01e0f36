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
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kv import ops
from kv.base import KV, Shape
from kv.full import Full

# Options of more than one method
KERNEL = field(default=7, metadata={"help": "tokens that the max-pooling spans", "min": 1})
THRESHOLD = "tokens of a long prompt; auto: the model's, for rocketkv with split=even alone"
DEDUCT = field(default=False, metadata={"help": "generated tokens count: the prompt keeps fewer"})


@dataclass(frozen=True)
class Window:
    window: int = field(default=32, metadata={"help": "last queries of the prompt whose attention decides", "min": 1})


@dataclass(frozen=True)
class Options(Window):
    kernel: int = KERNEL
    gqa: bool = field(default=False, metadata={"help": "the query heads of a group share what they keep"})
    deduct: bool = DEDUCT


@dataclass(frozen=True)
class Pooling(Window):
    """Of RocketKV's stage 1."""

    kernel: int = field(default=63, metadata={"help": "tokens that the max-pooling spans", "min": 1})
    long_kernel: int = field(default=511, metadata={"help": "the same for long prompts", "min": 1})
    threshold: int | None = field(default=None, metadata={"help": THRESHOLD})

    def kernels(self, shape: Shape) -> tuple[int, int, int | None]:
        """What SnapKV takes: the kernel, that of long prompts, and how long those are."""
        threshold = threshold_of(shape) if self.threshold is None else self.threshold
        return self.kernel, self.long_kernel, threshold


@dataclass(frozen=True)
class PlusOptions(Pooling):
    deduct: bool = DEDUCT


@dataclass(frozen=True)
class PyramidOptions(Window):
    kernel: int = KERNEL


class SnapKV(Full):
    """Keeps `kept` tokens of a prompt, the last `window` among them, and all that follow.

    For each KV head, or `per_query` for each query head.
    """

    def __init__(
        self, shape: Shape, kept: int, window: int, kernel: int, long_kernel: int = 0, threshold: int | None = None,
        per_query: bool = False,
    ):  # fmt: skip
        kept, window = min(kept, shape.max_prompt), min(window, kept)
        stored = replace(shape, n_kv_head=shape.n_head) if per_query else shape
        super().__init__(stored, kept + shape.max_new_tokens)
        self.kept, self.kernel, self.long_kernel, self.threshold = kept, kernel, long_kernel, threshold
        self.repeats = stored.n_kv_head // shape.n_kv_head  # heads that store a KV head's tokens
        self.recent = self.window = window
        self.allocate("shift", dtype=torch.int64)  # from a token's position to its slot

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        kept = self.choose(q, k)
        head, n = torch.arange(kept.shape[0], device=k.device)[:, None] // self.repeats, kept.shape[1]
        self.k[row, :, :n], self.v[row, :, :n] = (self.coded(x[0, head, kept]) for x in (k, v))
        self.shift[row] = n - k.shape[2]

    def coded(self, x: Tensor) -> Tensor:
        """Vectors as they are stored."""
        return x

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
        return super().decode(q, k, v, pos + self.shift, active)

    def reset(self, row: int) -> None:
        self.shift[row] = 0

    def fit(self, length: int, new: int) -> None:
        super().fit(min(length, self.kept + new), new)

    def stored(self, length: int) -> int:
        """Tokens in a row of `length` tokens, those beyond max_prompt generated."""
        new = max(0, length - self.shape.max_prompt)
        return min(length - new, self.kept) + new

    def step_bytes(self, length: int) -> tuple[int, int]:
        return super().step_bytes(self.stored(length))

    def overhead(self) -> dict[str, int]:
        generated = self.shape.max_new_tokens * self.shape.slot_bytes
        return super().overhead() | {"generated": generated, "row state": self.shift.nbytes}


def threshold_of(shape: Shape) -> int | None:
    """Tokens from which the pooling is wide (RocketKV, section 4.4.2): Llama-3.x, LongChat, and never for others."""
    if shape.rope_theta == 5e5:
        return 48 * 1024
    return 12 * 1024 if is_longchat(shape) else None


def is_longchat(shape: Shape) -> bool:
    return shape.rope_type == "linear" and (shape.n_layer, shape.n_kv_head) == (32, 32)


# snapkv


def minimum(shape: Shape, options: Options) -> int:
    return 2 * shape.n_head // shape.n_kv_head + options.deduct * shape.max_new_tokens


def keep_of(shape: Shape, budget: int, options: Options | PlusOptions) -> int:
    return budget - shape.max_new_tokens if options.deduct else budget


def build(shape: Shape, budget: int, options: Options) -> list[KV]:
    keep, groups = keep_of(shape, budget, options), shape.n_head // shape.n_kv_head
    per_query = not options.gqa and groups > 1
    keep = keep // groups if per_query else keep
    window = min(options.window, keep // 2)
    return [SnapKV(shape, keep, window, options.kernel, per_query=per_query) for _ in range(shape.n_layer)]


def memory(shape: Shape, budget: int, options: Window) -> int:
    """The budget's tokens in every layer; those generated are declared as overhead."""
    return shape.bytes(budget)


# snapkv++


def plus_minimum(shape: Shape, options: PlusOptions) -> int:
    return 2 + options.deduct * shape.max_new_tokens


def plus_build(shape: Shape, budget: int, options: PlusOptions) -> list[KV]:
    keep = keep_of(shape, budget, options)
    window = min(options.window, keep // 2)
    return [SnapKV(shape, keep, window, *options.kernels(shape)) for _ in range(shape.n_layer)]


# pyramidkv


def pyramid_minimum(shape: Shape, options: PyramidOptions) -> int:
    return 2


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


def pyramid_build(shape: Shape, budget: int, options: PyramidOptions) -> list[KV]:
    keeps = pyramid_budgets(shape.n_layer, budget, options.window, shape.max_prompt)
    return [SnapKV(shape, keep, min(options.window, budget // 2), options.kernel) for keep in keeps]
