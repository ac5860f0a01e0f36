"""The registry of KV methods: a new method is one file, its import and its line in METHODS."""

import math
import sys
from collections.abc import Iterable
from dataclasses import fields, replace

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
from kv.base import KV
from kv.method import Method, Shape
from kv.parts.speculation import speculative

METHODS: dict[str, type[Method]] = {
    "full": full.FullMethod,
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


class BudgetTooSmall(ValueError):
    def __init__(self, name: str, minimum: int, tokens: int):
        super().__init__(f"{name} needs a budget of at least {minimum} tokens, not {tokens}")
        self.minimum = minimum


def build(name: str, shape: Shape, budget: int | float | None, options: dict, profile: dict | None = None) -> list[KV]:
    """One KV module per layer; if rows may give tokens back (shape.rewind), the method drafts for the full cache.

    `options` holds typed values or strings; missing options come from `profile` (see `read_profile`), then from the
    method's defaults. A budget beyond what covers every token is lowered to that. Raises ValueError for an unknown name
    or option, a budget that does not fit the method, a planned length beyond a sliding window that the method does not
    honour, and a method that cannot draft.
    """
    if shape.rewind:
        shape = replace(shape, max_new_tokens=shape.max_new_tokens + shape.rewind)  # tokens that may be rejected
    method = parse_options(name, from_profile(name, options, profile or {}) | options)
    if shape.window is not None and shape.planned > shape.window and not method.windowed:
        raise ValueError(
            f"{name} does not honour this model's sliding window: use --kv full, or at most {shape.window} tokens of "
            "prompt and answer together"
        )
    layers = method.build(shape, _tokens(name, method, shape, budget))
    return speculative(name, shape, layers) if shape.rewind else layers


def _tokens(name: str, method: Method, shape: Shape, budget: int | float | None) -> int | None:
    """The budget in tokens per KV head, None for a method that takes none."""
    if not method.takes_budget:
        if budget is not None:
            raise ValueError(f"{name} takes no budget" + f" beside {method.instead}" * method.budgeted)
        return None
    if budget is None:
        raise ValueError(f"{name} needs --budget, in tokens or as a share of the prompt")
    if not budget > 0 or isinstance(budget, float) and budget > 1:
        raise ValueError(f"a budget is a number of tokens or a share between 0 and 1, not {budget}")
    tokens, minimum = shape.tokens(budget), method.minimum(shape)
    if tokens < minimum:
        raise BudgetTooSmall(name, minimum, tokens)
    return min(tokens, max(minimum, method.most(shape)))


def parse_options(name: str, given: dict) -> Method:
    """The method with the given options, typed values or strings; in a string + or commas separate list items."""
    return _method(name).parse(name, given)


def _method(name: str) -> type[Method]:
    if name not in METHODS:
        raise ValueError(f"unknown KV method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]


def planned_bytes(name: str, shape: Shape, *args) -> tuple[int, int]:
    """(device, host) bytes that `build` would allocate for the same arguments. Allocates nothing."""
    return total_bytes(build(name, replace(shape, device=torch.device("meta")), *args))


def total_bytes(layers: Iterable[KV]) -> tuple[int, int]:
    """(device, host) bytes of a whole model's cache; storage that layers share counts once."""
    layers, shared = list(layers), {}
    for layer in layers:
        shared |= layer.storages()
    return sum(shared.values()), sum(layer.host_bytes() for layer in layers)


def step_bytes(layers: Iterable[KV], length: int) -> tuple[int, int]:
    """(device, host) bytes of the cache that one step reads for a row of `length` tokens."""
    device, host = zip(*(layer.step_bytes(length) for layer in layers), strict=True)
    return sum(device), sum(host)


def fetched(layers: Iterable[KV]) -> tuple[int, int]:
    """Pool rows that steps requested from the host since allocation, and how many of them had to be fetched."""
    requested, transferred = zip(*(layer.fetched() for layer in layers), strict=True)
    return sum(requested), sum(transferred)


# Options that kv_profile.json may set: calibrate.py's findings. Checkpoints are untrusted, so none of these names a
# file or changes how much is kept.
PROFILE = {"filter_layers": "layers", "quant_layers": "layers", "head_scores": "lists of finite numbers"}


def read_profile(content: dict) -> dict:
    """The options of PROFILE that a kv_profile.json sets. Raises ValueError if one has the wrong type."""
    options = {key: content[key] for key in PROFILE if key in content}
    for key, values in options.items():
        lists, fits = ([values], _is_layer) if PROFILE[key] == "layers" else (values, _is_finite)
        if not isinstance(values, list) or not all(isinstance(x, list) and all(map(fits, x)) for x in lists):
            raise ValueError(f"kv_profile.json: {key} must be a list of {PROFILE[key]}; run calibrate.py again")
    return options


def _is_layer(x: object) -> bool:
    return type(x) is int and x >= 0


def _is_finite(x: object) -> bool:
    return type(x) in (int, float) and math.isfinite(x)


def from_profile(name: str, options: dict, profile: dict) -> dict:
    """What `build` takes from the profile: the method's options that `options` does not set."""
    known = {f.name for f in fields(_method(name))} & PROFILE.keys()
    return {key: value for key, value in profile.items() if key in known and key not in options}


def describe(name: str) -> str:
    """A method's help: its module docstring, and each option with type, default and meaning."""
    method = _method(name)
    takes = "none" if not method.budgeted else "--budget, in tokens per KV head or as a share of the prompt"
    lines = [sys.modules[method.__module__].__doc__.strip(), "", f"budget: {takes}"]
    if drafts(name):
        lines.append("--speculate N: drafts for the full cache, and shares its memory if the draft keeps every token")
    return "\n".join(lines + method.describe_options())


def drafts(name: str) -> bool:
    """Whether the method, with its default options, can draft for the full cache."""
    plan = {"max_prompt": 1024, "max_new_tokens": 64, "batch": 1, "dtype": torch.float32, "rewind": 1}
    model = {"n_layer": 4, "n_head": 4, "n_kv_head": 2, "head_dim": 32, "dim": 128}
    shape = Shape(**model, **plan, rope_type="default", rope_theta=1e4, device=torch.device("meta"))
    try:
        build(name, shape, 1.0 if _method(name).budgeted else None, {})
    except ValueError:
        return False
    return True
