"""The KV methods: a new one is a file and its name in the first import below."""

import sys
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import fields, replace
from fractions import Fraction
from typing import Literal, get_args, get_origin

import torch

from kv import (
    brute_offload,
    d2o,
    duo,
    exact_topk,
    expected,
    full,
    h2o,
    infllm,
    keydiff,
    keynorm,
    kivi,
    kvarn,
    kvzip,
    lagkv,
    omnikv,
    pqcache,
    quest,
    random,
    rkv,
    rocketkv,
    simlayer,
    snapkv,
    sparq,
    streaming,
    tailorkv,
    tova,
)
from kv.base import KV
from kv.cache import Cache
from kv.method import METHODS, Method, Plan, Share, convert, of_share
from kv.parts.speculation import speculative

for _name in sorted(METHODS):  # files register their methods in the order in which they are imported
    METHODS[_name] = METHODS.pop(_name)


class BudgetTooSmall(ValueError):
    def __init__(self, name: str, minimum: int, tokens: int):
        super().__init__(f"{name} needs a budget of at least {minimum} tokens, not {tokens}")
        self.minimum = minimum


def build(name: str, plan: Plan, budget: int | float | None, options: dict, profile: dict | None = None) -> Cache:
    """One KV module per layer; if rows may give tokens back (plan.rewind), the method drafts for the full cache.

    Where only some layers have a sliding window, they are rings of its size, and the method serves the others.
    `options` holds typed values or strings; missing options come from `profile` (see `read_profile`), then from the
    method's defaults. A budget beyond what covers every token is lowered to that. Raises ValueError for an unknown name
    or option, a budget that does not fit the method, a planned length beyond a sliding window that the method does not
    honour, and a method that cannot draft, or read a prompt in chunks.
    """
    whole = plan
    method, plan, tokens = _resolve(name, plan, budget, options, profile)
    layers = method.build(plan, tokens)
    if plan.chunk and not all(layer.in_chunks for layer in layers):
        raise ValueError(f"{name} with these options needs a whole prompt at once: leave out --chunk")
    if plan.rewind:
        layers = speculative(name, plan, layers)
    for index in plan.unrotated:
        layers[index].unrotate()
    if whole.full_layers:
        served, ring = iter(layers), replace(whole, full_layers=(), room=plan.room)
        places = range(whole.n_layer)
        layers = [next(served) if i in whole.full_layers else full.windowed(ring.layer(i)) for i in places]
    return Cache(layers)


def plan_sizes(name: str, plan: Plan, *args) -> dict[str, int]:
    """What, for the same arguments, `build` derives from the longest prompt, and what changes answers with it."""
    method, plan, tokens = _resolve(name, plan, *args)
    return method.plan_sizes(plan, tokens)


def enough(name: str, plan: Plan, *args) -> int | None:
    """The fewest tokens whose sizes work (Method.works), for the arguments of `build`; None if its budget's do."""
    method, plan, tokens = _resolve(name, plan, *args)
    if tokens is None or method.works(plan, tokens):
        return None
    whole = replace(plan, share=None)
    return bisect_left(range(1, plan.planned), True, key=lambda t: method.works(whole, t)) + 1


def _resolve(
    name: str, plan: Plan, budget: int | float | None, options: dict, profile: dict | None = None
) -> tuple[Method, Plan, int | None]:
    """The method with its options, the plan with the budget's share, and the longest prompt's budget in tokens."""
    if plan.rewind:
        plan = replace(plan, room=plan.room + plan.rewind)  # tokens that may be rejected
    method = parse_options(name, from_profile(name, options, profile or {}) | options)
    if plan.full_layers:
        method, plan = replace(method, **_renumbered(method, plan.full_layers, plan.n_layer)), plan.without_windows()
    if plan.window is not None and plan.planned > plan.window and not method.windowed:
        raise ValueError(
            f"{name} does not honour this model's sliding window: use --kv full, or at most {plan.window} tokens of "
            "prompt and answer together"
        )
    if isinstance(budget, float) and 0 < budget < 1:
        plan = replace(plan, share=Share(Fraction(str(budget)), 1))
        plan = replace(plan, share=Share(Fraction(str(budget)), method.minimum(plan)))
    return method, plan, _tokens(name, method, plan, budget)


LAYERS = "filter_layers", "quant_layers", "full_layers", "uncounted"  # options that name layers


def _renumbered(method: Method, layers: tuple[int, ...], n_layer: int) -> dict[str, list]:
    """The options that name layers of the model, or have an entry for each, for a method that serves `layers` alone."""
    found = {}
    for name in {*LAYERS, "head_scores"} & vars(method).keys():
        if (value := getattr(method, name)) is None:
            continue
        if name in LAYERS:
            if others := sorted(set(value) - set(layers)):
                without = ", ".join(map(str, layers))
                raise ValueError(f"{method.name}: {name} names {others}, but the layers without a window are {without}")
            found[name] = [layers.index(layer) for layer in value]
        elif len(value) == n_layer:
            found[name] = [value[layer] for layer in layers]
    return found


def _tokens(name: str, method: Method, plan: Plan, budget: int | float | None) -> int | None:
    """The longest prompt's budget in tokens per KV head, None for a method that takes none; 1.0 is every token."""
    if not method.takes_budget:
        if budget is not None:
            raise ValueError(f"{name} takes no budget" + f" beside {method.instead}" * method.budgeted)
        return None
    if budget is None:
        raise ValueError(f"{name} needs --budget, in tokens or as a share of the prompt")
    if not budget > 0 or isinstance(budget, float) and budget > 1:
        raise ValueError(f"a budget is a number of tokens or a share between 0 and 1, not {budget}")
    minimum = method.minimum(plan)
    if isinstance(budget, float):
        budget = plan.planned if budget == 1.0 else max(minimum, of_share(Fraction(str(budget)), plan.max_prompt))
    if budget < minimum:
        raise BudgetTooSmall(name, minimum, budget)
    return min(budget, max(minimum, method.most(plan)))


def parse_options(name: str, given: dict) -> Method:
    """The method with the given options, typed values or strings; in a string + or commas separate list items."""
    method = _method(name)
    options, values = {x.name: x for x in fields(method)}, {}
    for key, value in given.items():
        if key not in options:
            others = [other for other, known in METHODS.items() if key in {x.name for x in fields(known)}]
            which = f", which {', '.join(others)} have" if others else ""
            raise ValueError(f"{name} has no option {key!r}{which}; it has: {', '.join(options) or 'none'}")
        bounds = map(options[key].metadata.get, ("min", "max"))
        try:
            values[key] = convert(value, options[key].type, *bounds)
        except ValueError as error:
            raise ValueError(f"{name}: option {key}={value}: {error}") from None
    return method(**values)


def _method(name: str) -> type[Method]:
    if name not in METHODS:
        if name.partition(":")[0] in METHODS:
            raise ValueError(f"KV method {name!r}: give its options apart, with --kv-opt or `options`")
        raise ValueError(f"unknown KV method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]


def describe(name: str) -> str:
    """A method's help: its module docstring, and each option with type, default and meaning."""
    method = _method(name)
    takes = "none" if not method.budgeted else "--budget, in tokens per KV head or as a share of the prompt"
    lines = [sys.modules[method.__module__].__doc__.strip(), "", f"budget: {takes}"]
    lines[2:2] = [f"paper: {method.paper}"] if method.paper else []
    if drafts(name):
        lines.append("--speculate N: drafts for the full cache, and shares its memory if the draft keeps every token")
    for x in fields(method):
        kind, meaning = getattr(x.type, "__name__", x.type), x.metadata.get("help", "")
        if get_origin(x.type) is Literal:
            kind = " or ".join(map(str, get_args(x.type)))
        lines.append(f"--kv-opt {x.name}=... ({kind}, default {x.default}): {meaning}")
    return "\n".join(lines)


def drafts(name: str) -> bool:
    """Whether the method, with its default options, can draft for the full cache."""
    plan = Plan(4, 4, 2, 32, 128, "default", 1e4, torch.float32, torch.device("meta"), 1, 1024, 64, rewind=1)
    try:
        build(name, plan, 0.5 if _method(name).budgeted else None, {})
    except ValueError:
        return False
    return True


def planned_bytes(name: str, plan: Plan, *args) -> tuple[int, int]:
    """(device, host) bytes that `build` would allocate for the same arguments. Allocates nothing."""
    return build(name, replace(plan, device=torch.device("meta")), *args).bytes()


def parked_bytes(name: str, plan: Plan, *args) -> tuple[int, int]:
    """(device, host) bytes that a prompt needs beside those of `build`, for the same arguments, while it is read."""
    method, plan, tokens = _resolve(name, plan, *args)
    return method.parked_bytes(plan, tokens)


# Options that kv_profile.json may set: calibrate.py's findings. Checkpoints are untrusted, so none of these names a
# file or changes how much is kept.
PROFILE = {"filter_layers": list[int], "quant_layers": list[int], "head_scores": list[list[float]]}
GUESSED = "filter_layers", "quant_layers"  # those with a default


def read_profile(content: dict) -> dict:
    """The options of PROFILE that a kv_profile.json sets. Raises ValueError if one has the wrong type."""
    options = {key: content[key] for key in PROFILE if key in content}
    for key, value in options.items():
        try:
            if convert(value, PROFILE[key]) == value:
                continue
        except ValueError:
            pass
        raise ValueError(f"kv_profile.json: {key} must be a {PROFILE[key]}; delete the file, then run calibrate.py")
    return options


def guessed(name: str, options: dict, profile: dict) -> str | None:
    """An option for which a method takes its default, though calibrate.py measures what suits the model."""
    method = parse_options(name, from_profile(name, options, profile) | options)
    return next((option for option in GUESSED if getattr(method, option, ()) is None), None)


def from_profile(name: str, options: dict, profile: dict) -> dict:
    """What `build` takes from the profile: the method's options that `options` does not set."""
    known = {f.name for f in fields(_method(name))} & PROFILE.keys()
    return {key: value for key, value in profile.items() if key in known and key not in options}
