"""What a method may depend on, and how it is built: the dimensions of a model and a plan, options, a budget."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

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
    rope_speed: Tensor | None = field(default=None, compare=False)  # [B,D/2], see KV.hold_rope_speed

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

    def full_bytes(self) -> int:
        """Bytes of the full cache, all layers and rows, at the planned length."""
        return self.n_layer * self.planned * self.slot_bytes

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

    @abstractmethod
    def build(self, shape: Shape, budget: int | None) -> list[nn.Module]:
        """A KV (kv/base.py) per layer, for a budget in tokens per KV head from `minimum` to `most`."""

    def minimum(self, shape: Shape) -> int:
        """The smallest budget, in tokens per KV head."""
        return 1

    def most(self, shape: Shape) -> int:
        """The largest budget that changes anything: by default, the one that covers every token."""
        return shape.planned

    @property
    def takes_budget(self) -> bool:
        """Whether the method needs a budget with these options."""
        return self.budgeted and (self.instead is None or getattr(self, self.instead) is None)

    @classmethod
    def parse(cls, name: str, given: dict) -> "Method":
        """The method with the given options, typed values or strings; in a string + or commas separate list items."""
        hints, options = get_type_hints(cls), {f.name: f for f in fields(cls)}
        values = {}
        for key, value in given.items():
            if key not in options:
                raise ValueError(f"{name} has no option {key!r}; it has: {', '.join(options) or 'none'}")
            try:
                values[key] = convert(value, hints[key], *map(options[key].metadata.get, ("min", "max")))
            except ValueError as error:
                raise ValueError(f"{name}: option {key}={value}: {error}") from None
        return cls(**values)

    @classmethod
    def describe_options(cls) -> list[str]:
        """A line for each option: its type, default and meaning."""
        lines = []
        for x in fields(cls):
            kind, meaning = getattr(x.type, "__name__", x.type), x.metadata.get("help", "")
            if get_origin(x.type) is Literal:
                kind = " or ".join(map(str, get_args(x.type)))
            lines.append(f"--kv-opt {x.name}=... ({kind}, default {x.default}): {meaning}")
        return lines


def convert(value: object, hint: object, min: float | None, max: float | None) -> object:
    """An option's value, a string or typed, as the type `hint`. Raises ValueError if it has another type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        if value is None or value == "auto":
            return None
        return convert(value, next(a for a in args if a is not type(None)), min, max)
    if origin is Literal:
        if str(value) not in map(str, args):
            raise ValueError(f"must be one of {', '.join(map(str, args))}")
        return next(arg for arg in args if str(arg) == str(value))
    if origin is list:
        parts = [] if value == "none" else value.replace(",", "+").split("+") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise ValueError("must be a list")
        return [convert(part, args[0], min, max) for part in parts]
    if hint is bool:
        if str(value).lower() not in ("true", "false", "1", "0"):
            raise ValueError("must be true or false")
        return str(value).lower() in ("true", "1")
    try:
        number = hint(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"must be of type {hint.__name__}") from None
    if not (min is None or number >= min) or not (max is None or number <= max):
        raise ValueError(f"must be at least {min}" if max is None else f"must lie between {min} and {max}")
    return number
