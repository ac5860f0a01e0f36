"""The registry of KV methods: a name, how to build it, its options and its help.

A new method is one file with `Options`, `build`, `memory` (and `minimum`, where it takes a budget) and one line here.
"""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from kv import (
    brute_offload,
    d2o,
    duo,
    exact_topk,
    full,
    h2o,
    infllm,
    kivi,
    omnikv,
    pqcache,
    quest,
    rocketkv,
    simlayer,
    snapkv,
    sparq,
    streaming,
    tailorkv,
)
from kv.base import KV, Shape, total_bytes

__all__ = [
    "KV", "METHODS", "BudgetTooSmall", "Method", "Shape", "build", "describe", "from_profile", "paper_bytes",
    "parse_options", "planned_bytes", "read_profile", "takes_budget", "total_bytes",
]  # fmt: skip


# The options that kv_profile.json may set: what calibrate.py finds out about a model. None names a file, and none says
# how much is kept: a checkpoint comes from anywhere.
PROFILE = {"filter_layers": list[int], "quant_layers": list[int], "head_scores": list[list[float]]}


class BudgetTooSmall(ValueError):
    def __init__(self, name: str, least: int, tokens: int):
        super().__init__(f"{name} needs a budget of at least {least} tokens, not {tokens}")
        self.least = least


@dataclass(frozen=True)
class Method:
    build: Callable[[Shape, int | None, object], list[KV]]
    options: type  # a dataclass: name, type, default, and metadata help, min, max
    memory: Callable[[Shape, int | None, object], int]  # bytes by the paper's formula, for all layers and rows
    help: str
    minimum: Callable[[Shape, object], int] | None = None  # smallest budget; None: the method takes no budget
    instead: str | None = None  # an option that may stand in for the budget
    windowed: bool = False  # honours the model's sliding window
    lossless: dict = field(default_factory=dict)  # options that switch the lossy parts off
    approximates: str | None = None  # what `build` computes with a budget for everything, if not full attention
    approximates_with: dict = field(default_factory=dict)  # the options with which it does

    @classmethod
    def of(cls, file: types.ModuleType, help: str, **more) -> "Method":
        """The method of a file that has one."""
        return cls(file.build, file.Options, file.memory, help, getattr(file, "minimum", None), **more)

    def approximation(self, options: object) -> str | None:
        """What `build` computes with a budget for everything, where that is not full attention."""
        approximates = all(getattr(options, name) == value for name, value in self.approximates_with.items())
        return self.approximates if approximates else None

    def full_options(self, shape: Shape, budget: int | None, options: object) -> full.Options | None:
        """Of the full cache that a budget amounts to, if it leaves nothing to drop or to choose and no option does."""
        lossless = all(getattr(options, name) == value for name, value in self.lossless.items() if name != "bits")
        if budget is None or budget < shape.planned or not lossless:
            return None
        return full.Options(options.bits if "bits" in self.lossless else 16)


HALF = "half of the budget is read to choose, and a step attends to the other half"
METHODS: dict[str, Method] = {
    "full": Method.of(full, "every token's K and V; --kv-bits", windowed=True, lossless={"bits": 16}),
    "streaming": Method.of(streaming, "sinks and a recent window"),
    "rocketkv": Method.of(
        rocketkv, "evicts at the prompt, then selects pages at every step", lossless={"bits": 16}, approximates=HALF
    ),
    "hybrid": Method(
        rocketkv.hybrid_build, rocketkv.Stage2, rocketkv.hybrid_memory, "rocketkv's selection of pages alone",
        rocketkv.minimum, lossless={"bits": 16}, approximates=HALF,
    ),
    "snapkv": Method.of(
        snapkv, "what the prompt's end attends to", approximates_with={"gqa": False},
        approximates="the query heads of a group share the budget",
    ),
    "snapkv++": Method(
        snapkv.plus_build, snapkv.PlusOptions, snapkv.memory, "the same, shared by a group, pooled widely",
        snapkv.plus_minimum,
    ),
    "pyramidkv": Method(
        snapkv.pyramid_build, snapkv.PyramidOptions, snapkv.memory, "snapkv with more tokens in lower layers",
        snapkv.pyramid_minimum,
    ),
    "exact_topk": Method.of(exact_topk, "the best tokens by exact scores: an oracle"),
    "quest": Method.of(
        quest, "pages by a bound of their scores", approximates=HALF, approximates_with={"page": None}
    ),
    "sparq": Method.of(
        sparq, "tokens by the query's largest channels",
        approximates="a step attends to half of the budget, and the mean of V stands for the rest",
    ),
    "omnikv": Method.of(
        omnikv, "a few full layers choose what the others read; --offload", instead="mem", lossless={"bits": 16}
    ),
    "infllm": Method.of(infllm, "blocks by representative keys; --offload"),
    "brute_offload": Method.of(brute_offload, "all of it, most layers' from the host at every step"),
    "d2o": Method.of(d2o, "h2o with layer budgets, and merging"),
    "h2o": Method.of(h2o, "recent tokens, and those that got most attention"),
    "roco": Method(h2o.roco_build, h2o.RoCoOptions, h2o.memory, "the same by its mean and deviation", h2o.roco_minimum),
    "cam": Method(h2o.cam_build, h2o.CaMOptions, h2o.memory, "h2o that spreads the values it drops", h2o.minimum),
    "kivi": Method.of(kivi, "all in 4 bits", lossless={"recent": 2**30}),
    "tailorkv": Method.of(
        tailorkv, "dense layers in one bit, tokens of the others from the host by predicted queries",
        lossless={"quant_layers": []},
    ),
    "pqcache": Method.of(pqcache, "tokens from the host, by codes of their keys"),
    "simlayer": Method.of(
        simlayer, "everything in some layers, for each prompt, streaming in the others", lossless={"threshold": 1.0}
    ),
    "duo": Method.of(duo, "everything in some heads, streaming in the others"),
}  # fmt: skip


def _method(name: str) -> Method:
    if name not in METHODS:
        raise ValueError(f"unknown KV method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]


def build(name: str, shape: Shape, budget: int | float | None, options: dict, profile: dict | None = None) -> list[KV]:
    """One KV module a layer.

    `options` holds typed values or strings; what it leaves out comes from `profile` (see `read_profile`), then from the
    method. Raises ValueError for an unknown name or option, a budget that does not fit the method, and
    prompts beyond a sliding window that the method does not honour.
    """
    method = _method(name)
    parsed = parse_options(name, from_profile(name, options, profile or {}) | options)
    if shape.window is not None and shape.planned > shape.window and not method.windowed:
        raise ValueError(
            f"{name} does not honour this model's sliding window: use --kv full, or at most {shape.window} tokens of "
            "prompts and answers"
        )
    if not takes_budget(name, parsed):
        if budget is not None:
            raise ValueError(f"{name} takes no budget" + f" beside {method.instead}" * (method.minimum is not None))
        return method.build(shape, None, parsed)
    if budget is None:
        raise ValueError(f"{name} needs --budget, in tokens or as a share of the prompt")
    if not budget > 0 or isinstance(budget, float) and budget > 1:
        raise ValueError(f"a budget is a number of tokens or a share between 0 and 1, not {budget}")
    tokens, least = shape.tokens(budget), method.minimum(shape, parsed)
    if tokens < least:
        raise BudgetTooSmall(name, least, tokens)
    if everything := method.full_options(shape, tokens, parsed):
        return full.build(shape, None, everything)
    return method.build(shape, tokens, parsed)


def read_profile(content: dict) -> dict:
    """The options in a kv_profile.json, PROFILE's and no others. Raises ValueError for one of another type."""
    found = {key: content[key] for key in PROFILE if key in content}
    for key, value in found.items():
        if not _is_a(value, PROFILE[key]):
            what = "layers" if PROFILE[key] == list[int] else "lists of finite numbers"
            raise ValueError(f"kv_profile.json: {key} must be a list of {what}; run calibrate.py again")
    return found


def _is_a(value: object, hint: object) -> bool:
    """Whether JSON gave a list, of lists perhaps, of finite numbers or of whole ones from 0 up."""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_is_a(x, *typing.get_args(hint)) for x in value)
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        return False
    return value >= 0 if hint is int else math.isfinite(value)


def from_profile(name: str, options: dict, profile: dict) -> dict:
    """What `build` takes from the profile: options of the method that `options` leaves out."""
    known = {f.name for f in dataclasses.fields(_method(name).options)} & PROFILE.keys()
    return {key: value for key, value in profile.items() if key in known and key not in options}


def takes_budget(name: str, options: object) -> bool:
    """Whether the method with these options, its own dataclass, is to be given a budget."""
    method = _method(name)
    return method.minimum is not None and (method.instead is None or getattr(options, method.instead) is None)


def paper_bytes(name: str, shape: Shape, budget: int | None, options: object) -> int:
    """Bytes of all layers and rows by the paper's formula; `options` is the method's dataclass."""
    method = _method(name)
    if everything := method.full_options(shape, budget, options):
        return full.memory(shape, None, everything)
    return method.memory(shape, budget, options)


def planned_bytes(name: str, shape: Shape, *args) -> tuple[int, int]:
    """(device, host) bytes that `build` with the same arguments would allocate; allocates nothing."""
    return total_bytes(build(name, replace(shape, device=torch.device("meta")), *args))


def parse_options(name: str, given: dict) -> object:
    """The method's options dataclass from typed values or from strings; lists are joined with + or commas."""
    cls = _method(name).options
    hints, fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in given.items():
        if key not in fields:
            raise ValueError(f"{name} has no option {key!r}; it has: {', '.join(fields) or 'none'}")
        try:
            values[key] = _convert(value, hints[key], *map(fields[key].metadata.get, ("min", "max")))
        except ValueError as error:
            raise ValueError(f"{name}: option {key}={value}: {error}") from None
    return cls(**values)


def _convert(value: object, hint: object, min: float | None, max: float | None) -> object:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or value == "auto":
            return None
        return _convert(value, next(a for a in args if a is not type(None)), min, max)
    if origin is typing.Literal:
        if str(value) not in map(str, args):
            raise ValueError(f"must be one of {', '.join(map(str, args))}")
        return next(arg for arg in args if str(arg) == str(value))
    if origin is list:
        parts = [] if value == "none" else value.replace(",", "+").split("+") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise ValueError("must be a list")
        return [_convert(part, args[0], min, max) for part in parts]
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


def describe(name: str) -> str:
    """A method's help: its file's docstring, and each option with type, default and meaning."""
    method = _method(name)
    takes = "none" if method.minimum is None else "--budget, in tokens a KV head or as a share of the prompt"
    lines = [sys.modules[method.build.__module__].__doc__.strip(), "", f"budget: {takes}"]
    if method.approximates:
        given = "".join(f" and {key}={'auto' if x is None else x}" for key, x in method.approximates_with.items())
        lines.append(f"with a budget for everything{given} the full cache stands in, for {method.approximates}")
    for option in dataclasses.fields(method.options):
        kind, meaning = getattr(option.type, "__name__", option.type), option.metadata.get("help", "")
        if typing.get_origin(option.type) is typing.Literal:
            kind = " or ".join(map(str, typing.get_args(option.type)))
        lines.append(f"--kv-opt {option.name}=... ({kind}, default {option.default}): {meaning}")
    return "\n".join(lines)
