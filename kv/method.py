"""What a method may depend on, and how it is built: the dimensions of a model and a plan, options, a budget."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor, nn

from kv.parts.ranks import ALONE, Ranks

HALF = Fraction(1, 2)  # floor(x + HALF) rounds half up


def of_share(share: Fraction, tokens: int) -> int:
    """A share of so many tokens, rounded half up."""
    return math.floor(share * tokens + HALF)


class Share(NamedTuple):
    """A budget that is a share of each row's prompt."""

    part: Fraction
    fewest: int  # tokens: the method's minimum


@dataclass(frozen=True)
class Plan:
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
    room: int  # tokens after the prompt
    window: int | None = None  # the model's sliding window in tokens, where it has one
    max_length: int = 2**31  # the model's context in tokens
    share: Share | None = None  # of a row's prompt, its budget; None: all rows have the same
    rewind: int = 0  # how many of its newest tokens a row may give back
    chunk: int = 0  # the most tokens of a prompt that are read at once; 0: all
    full_layers: tuple[int, ...] = ()  # with a window: the layers without it
    unrotated: tuple[int, ...] = ()  # the layers without RoPE
    ranks: Ranks = ALONE  # the processes among which the heads are divided; n_head and n_kv_head are this one's
    inv_freq: Tensor | None = field(default=None, compare=False)  # [B,D/2], see kv/parts/ops.py
    key_biases: Tensor | None = field(default=None, compare=False)  # [L,Hk,D] fp32, what every key has before RoPE
    key_bias: Tensor | None = field(default=None, compare=False)  # [Hk,D], a layer's: see `layer`
    index: int = field(default=0, compare=False)  # its number

    @property
    def planned(self) -> int:
        """S: the largest number of tokens a row will hold."""
        return self.max_prompt + self.room

    def without_windows(self) -> "Plan":
        """The plan for the model's layers that see every token, which a method serves, where others have a window."""
        layers = self.full_layers
        unrotated = tuple(i for i, layer in enumerate(layers) if layer in self.unrotated)
        biases = None if self.key_biases is None else self.key_biases[list(layers)]
        whole = {"window": None, "full_layers": (), "unrotated": unrotated, "key_biases": biases}
        return replace(self, n_layer=len(layers), **whole)

    def layer(self, index: int) -> "Plan":
        """The plan for one layer, with its number and, for caches that pack keys, its own key bias."""
        return replace(self, index=index, key_bias=None if self.key_biases is None else self.key_biases[index])

    def row_budget(self, budget: int, prompt: int) -> int:
        """The budget of a row with `prompt` prompt tokens, where that of the longest prompt is `budget`."""
        if self.share is None:
            return budget
        return min(budget, max(self.share.fewest, of_share(self.share.part, prompt)))

    def part(self, budget: int) -> Fraction:
        """The part of a row's tokens that its budget covers: the share or, for a budget in tokens, that of the plan."""
        return Fraction(budget, self.planned) if self.share is None else self.share.part

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

    def full_bytes(self) -> int:
        """Bytes of the full cache, all layers and rows, at the planned length."""
        slots = self.n_layer * self.planned
        if self.full_layers:
            slots -= (self.n_layer - len(self.full_layers)) * max(0, self.planned - self.window)
        return slots * self.slot_bytes


def option(default: object, help: str, min: float | None = None, max: float | None = None) -> Any:
    """A field of a `Method`: its default, its help text and its bounds."""
    return field(default=default, metadata={"help": help, "min": min, "max": max})


METHODS: dict[str, type["Method"]] = {}  # by name: those of the files that kv/__init__.py imports


@dataclass(frozen=True)
class Method(ABC):
    """A method as the command line names it: its fields are its options, and `build` makes the layers' caches.

    A subclass with a `name` of its own registers itself.
    """

    name: ClassVar[str]
    paper: ClassVar[str | None] = None  # its address
    help: ClassVar[str]  # a line of --list-kv
    budgeted: ClassVar[bool] = True  # it takes a budget
    instead: ClassVar[str | None] = None  # an option that may replace the budget
    fewest: ClassVar[int] = 1  # `minimum`, where no option changes it
    windowed: ClassVar[bool] = False  # it honours the model's sliding window
    lossless: ClassVar[dict[str, object]] = {}  # options that switch its lossy parts off, for law 1 (kv/base.py)

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):
            METHODS[cls.name] = cls

    @abstractmethod
    def build(self, plan: Plan, budget: int | None) -> list[nn.Module]:
        """A KV (kv/base.py) per layer, for a budget in tokens per KV head from `minimum` to `most`."""

    def paper_bytes(self, plan: Plan, budget: int | None) -> int:
        """Bytes of all layers and rows by the paper's formula, for law 7: by default, the budget in every layer.

        What the method needs beyond that and is not small is part of it, and its docstring says so.
        """
        return plan.n_layer * budget * plan.slot_bytes

    def parked_bytes(self, plan: Plan, budget: int | None) -> tuple[int, int]:
        """(device, host) bytes of the longest prompt that all layers hold until the last layer has read it."""
        return 0, 0

    def minimum(self, plan: Plan) -> int:
        """The smallest budget, in tokens per KV head."""
        return self.fewest

    def plan_sizes(self, plan: Plan, budget: int | None) -> dict[str, int]:
        """Sizes, by name, that follow from the longest prompt and change the answers to the others."""
        return {}

    def works(self, plan: Plan, budget: int) -> bool:
        """Whether the sizes that a budget means are large enough to do better than `streaming` (docs/accuracy.md)."""
        return True

    def most(self, plan: Plan) -> int:
        """The largest budget that changes anything: by default, the one that covers every token."""
        return plan.planned

    @property
    def takes_budget(self) -> bool:
        """Whether the method needs a budget with these options."""
        return self.budgeted and (self.instead is None or getattr(self, self.instead) is None)


def convert(value: object, kind: object, min: float | None = None, max: float | None = None) -> object:
    """An option's value, a string or typed, as the type `kind`. Raises ValueError if it has another type."""
    args = get_args(kind)
    if type(None) in args:  # the type comes first: int | None
        return None if value is None or value == "auto" else convert(value, args[0], min, max)
    if get_origin(kind) is Literal:
        by_text = {str(arg): arg for arg in args}
        if str(value) not in by_text:
            raise ValueError(f"must be one of {', '.join(by_text)}")
        return by_text[str(value)]
    if get_origin(kind) is list:
        if isinstance(value, str):
            value = [] if value == "none" else value.replace(",", "+").split("+")
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list")
        return [convert(part, args[0], min, max) for part in value]
    if kind is bool:
        if str(value).lower() not in ("true", "false", "1", "0"):
            raise ValueError("must be true or false")
        return str(value).lower() in ("true", "1")
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"must be of type {kind.__name__}") from None
    if not (min is None or number >= min) or not (max is None or number <= max):
        raise ValueError(f"must be at least {min}" if max is None else f"must lie between {min} and {max}")
    return number
