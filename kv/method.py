"""How a method is named, sized and built: the dimensions it may depend on, its options, its flags."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kv.parts.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Shape:
    """The model's dimensions and the planned lengths: all that a method may depend on when it allocates."""

    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    dim: int
    rope_type: str
    rope_theta: float
    dtype: torch.dtype
    device: torch.device
    batch: int
    max_prompt: int
    max_new_tokens: int
    window: int | None = None  # the model's sliding window in tokens, where it has one
    max_length: int = 2**31  # the model's context in tokens
    rewind: int = 0  # how many of its newest tokens a row may give back
    ranks: Ranks = ALONE  # the processes among which the heads are divided; n_head and n_kv_head are this one's
    rope_speed: Tensor | None = field(default=None, compare=False)  # [B,D/2], radians per position, shared with the
    # model, which sets a row's before its prompt; None: from rope_theta

    @property
    def planned(self) -> int:
        """S: the largest number of tokens a row will hold."""
        return self.max_prompt + self.max_new_tokens

    @property
    def model_kv_heads(self) -> int:
        """The model's KV heads, those of all ranks."""
        return self.n_kv_head * self.ranks.count

    @property
    def unit_bytes(self) -> int:
        """Bytes of one K and one V vector of one KV head."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of a layer: a unit for each KV head of each row."""
        return self.batch * self.n_kv_head * self.unit_bytes

    def bytes(self, tokens: int) -> int:
        """Bytes of `tokens` slots in every layer."""
        return self.n_layer * tokens * self.slot_bytes

    def full_bytes(self) -> int:
        """Bytes of the full cache, all layers and rows, at the planned length."""
        return self.bytes(self.planned)

    def tokens(self, budget: int | float) -> int:
        """A budget in tokens per KV head: an int as it is, a float in (0, 1) as a share of max_prompt, 1.0 as all."""
        if isinstance(budget, int):
            return budget
        return self.planned if budget == 1.0 else int(budget * self.max_prompt + 0.5)


def option(default: object, help: str, min: float | None = None, max: float | None = None) -> Any:
    """A field of a `Method`: its default, its help text and its bounds."""
    return field(default=default, metadata={"help": help, "min": min, "max": max})


@dataclass(frozen=True)
class Method(ABC):
    """A method as the command line names it: its fields are its options, and `build` makes the layers' caches."""

    help: ClassVar[str]  # a line of --list-kv
    budgeted: ClassVar[bool] = True  # it takes a budget
    instead: ClassVar[str | None] = None  # an option that may replace the budget
    windowed: ClassVar[bool] = False  # it honours the model's sliding window
    lossless: ClassVar[dict] = {}  # options that switch the lossy parts off
    approximates: ClassVar[str | None] = None  # how it approximates even with a budget for every token
    approximates_with: ClassVar[dict] = {}  # the options under which it does

    @abstractmethod
    def build(self, shape: Shape, budget: int | None) -> list[nn.Module]:
        """A KV (kv/base.py) per layer, for a budget in tokens per KV head."""

    def minimum(self, shape: Shape) -> int:
        """The smallest budget, in tokens per KV head."""
        return 1

    @property
    def takes_budget(self) -> bool:
        """Whether the method needs a budget with these options."""
        return self.budgeted and (self.instead is None or getattr(self, self.instead) is None)
