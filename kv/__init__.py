"""The registry of KV methods: builds them by name, from a budget and options.

A new method is one file, its import and its line in METHODS.
"""

import dataclasses
import math
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import replace

import torch

from kv import (
    brute_offload,
    d2o,
    duo,
    exact_topk,
    full_bits,
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
from kv.base import KV
from kv.method import Method, Shape
from kv.parts.speculation import speculative

__all__ = [
    "KV",
    "METHODS",
    "BudgetTooSmall",
    "Method",
    "Shape",
    "build",
    "describe",
    "from_profile",
    "paper_bytes",
    "parse_options",
    "planned_bytes",
    "read_profile",
    "total_bytes",
]


# The options that kv_profile.json may set: what calibrate.py measures of a model. Checkpoints are untrusted, so none of
# these options names a file or changes how much is kept.
PROFILE = {"filter_layers": list[int], "quant_layers": list[int], "head_scores": list[list[float]]}


class BudgetTooSmall(ValueError):
    def __init__(self, name: str, least: int, tokens: int):
        super().__init__(f"{name} needs a budget of at least {least} tokens, not {tokens}")
        self.min_slots = least


METHODS: dict[str, type[Method]] = {
    "full": full_bits.FullBitsMethod,
    "streaming": streaming.StreamingMethod,
    "rocketkv": rocketkv.RocketKVMethod,
    "hybrid": rocketkv.HybridMethod,
    "snapkv": snapkv.SnapKVMethod,
    "snapkv++": snapkv.SnapKVPlusMethod,
    "pyramidkv": snapkv.PyramidKVMethod,
    "exact_topk": exact_topk.ExactTopKMethod,
    "quest": quest.QuestMethod,
    "sparq": sparq.SparQMethod,
    "omnikv": omnikv.OmniKVMethod,
    "infllm": infllm.InfLLMMethod,
    "brute_offload": brute_offload.BruteOffloadMethod,
    "d2o": d2o.D2OMethod,
    "h2o": h2o.H2OMethod,
    "roco": h2o.RoCoMethod,
    "cam": h2o.CaMMethod,
    "kivi": kivi.KIVIMethod,
    "tailorkv": tailorkv.TailorKVMethod,
    "pqcache": pqcache.PQCacheMethod,
    "simlayer": simlayer.SimLayerMethod,
    "duo": duo.DuoMethod,
}


def _method(name: str) -> type[Method]:
    if name not in METHODS:
        raise ValueError(f"unknown KV method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]


def build(name: str, shape: Shape, budget: int | float | None, options: dict, profile: dict | None = None) -> list[KV]:
    """One KV module per layer; if rows may give tokens back (shape.rewind), the method drafts for the full cache.

    `options` holds typed values or strings; missing options come from `profile` (see `read_profile`), then from the
    method's defaults. Raises ValueError for an unknown name or option, a budget that does not fit the method, a planned
    length beyond a sliding window that the method does not honour, and a method that cannot draft.
    """
    if shape.rewind:
        shape = replace(shape, max_new_tokens=shape.max_new_tokens + shape.rewind)  # tokens that may be rejected
        return speculative(name, shape, _build(name, shape, budget, options, profile))
    return _build(name, shape, budget, options, profile)


def _build(name: str, shape: Shape, budget: int | float | None, options: dict, profile: dict | None) -> list[KV]:
    method = parse_options(name, from_profile(name, options, profile or {}) | options)
    if shape.window is not None and shape.planned > shape.window and not method.windowed:
        raise ValueError(
            f"{name} does not honour this model's sliding window: use --kv full, or at most {shape.window} tokens of "
            "prompt and answer together"
        )
    if not method.takes_budget:
        if budget is not None:
            raise ValueError(f"{name} takes no budget" + f" beside {method.instead}" * method.budgeted)
        return method.build(shape, None)
    if budget is None:
        raise ValueError(f"{name} needs --budget, in tokens or as a share of the prompt")
    if not budget > 0 or isinstance(budget, float) and budget > 1:
        raise ValueError(f"a budget is a number of tokens or a share between 0 and 1, not {budget}")
    tokens, least = shape.tokens(budget), method.minimum(shape)
    if tokens < least:
        raise BudgetTooSmall(name, least, tokens)
    if method.keeps_all(shape, tokens):
        return full_cache(method).build(shape, None)
    return method.build(shape, tokens)


def full_cache(method: Method) -> Method:
    """The full cache, with the method's bits, that replaces a method whose budget covers every token."""
    return METHODS["full"](**({"bits": method.bits} if "bits" in method.lossless else {}))


def read_profile(content: dict) -> dict:
    """The options of PROFILE that a kv_profile.json sets. Raises ValueError if one has the wrong type."""
    found = {key: content[key] for key in PROFILE if key in content}
    for key, value in found.items():
        if not _is_a(value, PROFILE[key]):
            what = "layers" if PROFILE[key] == list[int] else "lists of finite numbers"
            raise ValueError(f"kv_profile.json: {key} must be a list of {what}; run calibrate.py again")
    return found


def _is_a(value: object, hint: object) -> bool:
    """Whether a JSON value has the type `hint`: possibly nested lists of finite numbers, or of integers from 0 up."""
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and all(_is_a(x, *typing.get_args(hint)) for x in value)
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        return False
    return value >= 0 if hint is int else math.isfinite(value)


def from_profile(name: str, options: dict, profile: dict) -> dict:
    """What `build` takes from the profile: the method's options that `options` does not set."""
    known = {f.name for f in dataclasses.fields(_method(name))} & PROFILE.keys()
    return {key: value for key, value in profile.items() if key in known and key not in options}


def paper_bytes(method: Method, shape: Shape, budget: int | None) -> int:
    """Bytes of all layers and rows by the paper's formula."""
    return full_cache(method).memory(shape, None) if method.keeps_all(shape, budget) else method.memory(shape, budget)


def planned_bytes(name: str, shape: Shape, *args) -> tuple[int, int]:
    """(device, host) bytes that `build` would allocate for the same arguments. Allocates nothing."""
    return total_bytes(build(name, replace(shape, device=torch.device("meta")), *args))


def total_bytes(layers: Iterable[KV]) -> tuple[int, int]:
    """(device, host) bytes of a whole model's cache; storage that layers share counts once."""
    layers, shared = list(layers), {}
    for layer in layers:
        shared |= layer.storages()
    return sum(shared.values()), sum(layer.host_bytes() for layer in layers)


def parse_options(name: str, given: dict) -> Method:
    """The method with the given options, typed values or strings; in a string + or commas separate list items."""
    cls = _method(name)
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


def drafts(name: str) -> bool:
    """Whether the method, with its default options, can draft for the full cache."""
    sizes = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "head_dim": 32, "dim": 128, "max_prompt": 1024}
    shape = Shape(
        **sizes,
        max_new_tokens=64,
        batch=1,
        rope_type="default",
        rope_theta=1e4,
        dtype=torch.float32,
        device=torch.device("meta"),
        rewind=1,
    )
    try:
        build(name, shape, max(64, _method(name)().minimum(shape)) if _method(name).budgeted else None, {})
    except ValueError:
        return False
    return True


def describe(name: str) -> str:
    """A method's help: its module docstring, and each option with type, default and meaning."""
    method = _method(name)
    takes = "none" if not method.budgeted else "--budget, in tokens per KV head or as a share of the prompt"
    lines = [sys.modules[method.__module__].__doc__.strip(), "", f"budget: {takes}"]
    if method.approximates:
        given = "".join(f" and {key}={'auto' if x is None else x}" for key, x in method.approximates_with.items())
        lines.append(f"with a budget for every token{given} the full cache replaces it, because {method.approximates}")
    if drafts(name):
        lines.append("--speculate N: drafts for the full cache, and shares its memory if the draft keeps every token")
    for option in dataclasses.fields(method):
        kind, meaning = getattr(option.type, "__name__", option.type), option.metadata.get("help", "")
        if typing.get_origin(option.type) is typing.Literal:
            kind = " or ".join(map(str, typing.get_args(option.type)))
        lines.append(f"--kv-opt {option.name}=... ({kind}, default {option.default}): {meaning}")
    return "\n".join(lines)
