"""How large caches are: what a KV method receives about a model and a plan, and whether memory suffices."""

import sys
from contextlib import suppress
from dataclasses import replace

import torch

import kv as methods
from kv import Plan
from kv.parts.ranks import ALONE, Ranks
from model import ModelConfig
from runtime import arguments
from runtime.parallel import free_share, minimum

WRONG = 0.5  # a layer's error of attention (KV.error): Qwen2.5-0.5B diverges by .04 nats at .30, by 1.5 at 1.46


def plan_for(
    c: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    max_prompt: int,
    room: int,
    rewind: int = 0,
    ranks: Ranks = ALONE,
    chunk: int = 0,
) -> Plan:
    """What KV methods receive about a model and a plan. Raises ValueError if no machine could hold it."""
    if batch * (max_prompt + room) > 2**40:
        raise ValueError(
            f"{batch} x {max_prompt + room} tokens exceed the memory of any machine; lower --max-new-tokens or --batch"
        )
    heads = {"n_layer": c.n_layer, "n_head": c.n_head, "n_kv_head": c.n_kv_head, "head_dim": c.head_dim, "dim": c.dim}
    rope = {"rope_type": c.rope["rope_type"], "rope_theta": c.rope["rope_theta"]}
    sizes = {"batch": batch, "max_prompt": max_prompt, "room": room}
    limits = {"window": c.window, "max_length": c.max_length, "chunk": chunk if chunk < max_prompt else 0}
    limits |= {"full_layers": tuple(c.full_layers), "unrotated": tuple(c.unrotated)}
    return Plan(**heads, **rope, **sizes, **limits, dtype=dtype, device=device, rewind=rewind, ranks=ranks)


def longest_prompt(c: ModelConfig, new: int) -> int:
    """The longest prompt every method accepts: with `new` more tokens it fits a window that all layers have."""
    return min(c.max_length, max(1, c.window - new)) if c.window and not c.full_layers else c.max_length


def plan_of(engine, max_prompt: int, room: int) -> Plan:
    """The plan of an engine for prompts of `max_prompt` tokens."""
    sizes = engine.batch, max_prompt, room, engine.speculate
    return plan_for(engine.config, engine.dtype, engine.device, *sizes, engine.ranks, engine.chunk)


def check(
    model,
    kv: str,
    budget: int | float | None,
    options: dict,
    batch: int = 1,
    max_prompt: int | None = None,
    room: int = 256,
    speculate: int = 0,
    chunk: int = 0,
) -> None:
    """Raises ValueError if `Engine.use` cannot have these arguments. model: an engine, or `read_known`'s result."""
    arguments.check_sizes(batch, max_prompt, room, speculate, chunk)
    methods.parse_options(kv, options)
    prompt = longest_prompt(model.config, room) if max_prompt is None else max_prompt
    if prompt > model.config.max_length:
        raise ValueError(f"max_prompt is {prompt} and the model's context is {model.config.max_length}")
    sizes = batch, prompt, room, speculate
    plan = plan_for(model.config, model.dtype, model.device, *sizes, model.ranks, chunk)
    methods.planned_bytes(kv, plan, budget, options, model.profile)


def check_length(engine, tokens: int) -> None:
    """Raises ValueError if a prompt of `tokens` tokens exceeds the model's context or `max_prompt`."""
    arguments.check_length(tokens, engine.config.max_length, "the model's context")
    arguments.check_length(tokens, engine.max_prompt, "max_prompt")


def check_caches(engine, tokens: int) -> None:
    """Raises ValueError if the engine has no caches yet and cannot have any for a prompt of `tokens` tokens."""
    if engine.plan is None:
        check_memory(engine, plan_of(engine, engine.max_prompt or tokens, engine.room))


def suffices(engine, length: int, new: int) -> bool:
    """Whether the caches hold prompts of `length` tokens and `new` more.

    Raises ValueError if others would close rows, or if such prompts are too long.
    """
    check_length(engine, length)
    has = engine.plan
    if has is None or length <= has.max_prompt and (max(new, engine.room) <= has.room or engine.endless):
        return has is not None
    if any(engine.rows):
        has = f"{has.max_prompt} tokens and {has.room} more"
        raise ValueError(f"rows are in use, and the caches hold prompts of {has}: close rows, or load larger ones")
    return False


def needed(engine, has: Plan | None, length: int, new: int) -> Plan:
    """The plan for prompts of `length` tokens and `new` more, after a smaller one."""
    if has is not None:
        return grown(engine, has, length, new)
    plan = plan_of(engine, engine.max_prompt or length, new)
    return plan if engine.max_prompt else rounded(engine, plan)


def rounded(engine, plan: Plan) -> Plan:
    """The plan for prompts of up to 256 tokens more, or an eighth, so that a step that a CPU compiles serves others.

    It stays as it is where answers would change, or where steps are compiled only if earlier code is there and is not.
    """
    if engine.device.type != "cpu":
        return plan
    step = max(256, power_of_two(plan.max_prompt + 1) // 16)
    larger = replace(plan, max_prompt=min(-(-plan.max_prompt // step) * step, longest(engine, plan.room)))
    if larger.max_prompt <= plan.max_prompt or sizes_of(engine, larger) != sizes_of(engine, plan):
        return plan
    if not engine.compiles(larger):
        return plan
    try:
        check_memory(engine, larger, spare=0.5)
    except ValueError:
        return plan
    return larger


def room_left(engine, row, question: list[int]) -> int:
    """The most tokens of an answer to a question to a row. Raises ValueError if there is no room for one."""
    tokens = len(row.tokens) + (row.pending is not None) + len(question)
    if tokens == len(row.tokens) and row.logits is None:
        raise ValueError("there is nothing to continue: give a question")
    left = row.prompt_tokens + engine.plan.room - tokens + 1
    if left < 1 and not engine.endless:
        raise ValueError(
            f"no room for another question: the caches hold {engine.plan.room} tokens after the prompt, and "
            f"{1 - left} more are needed: load with a larger --max-new-tokens, or save a saved prompt again with one"
        )
    return 2**31 if engine.endless else left


def grown(engine, plan: Plan, prompt: int, new: int) -> Plan:
    """A plan for longer prompts, or for more new tokens, than those of `plan`.

    A size that grows becomes a power of two, so that a slightly longer prompt needs no recompile, but stays as
    requested if that would not leave half of the free memory for prefill.
    """
    prompt, new = max(prompt, plan.max_prompt), max(new, plan.room)
    most = longest(engine, new)
    larger = replace(
        plan,
        max_prompt=prompt if prompt == plan.max_prompt else max(prompt, min(power_of_two(prompt), most)),
        room=new if new == plan.room else power_of_two(new),
    )
    try:
        check_memory(engine, larger, spare=0.5)
    except ValueError:
        larger = replace(plan, max_prompt=prompt, room=new)
    sizes = f"prompts of {larger.max_prompt} tokens and {larger.room} more"
    print(f"allocating larger caches, for {sizes}", file=sys.stderr)
    before, after = (sizes_of(engine, each) for each in (plan, larger))
    if changes := [f"{name} {before[name]} -> {size}" for name, size in after.items() if size != before.get(name)]:
        warn(
            engine,
            f"{engine.method} takes sizes from the longest prompt, and answers change with them "
            f"({', '.join(changes)}): max_prompt fixes them",
        )
    return larger


def longest(engine, new: int) -> int:
    """Tokens of the longest prompt that `new` tokens may follow."""
    windowed = methods.METHODS[engine.method].windowed
    return engine.config.max_length if windowed else longest_prompt(engine.config, new)


def sizes_of(engine, plan: Plan) -> dict[str, int]:
    """The sizes of an engine's method that follow from the longest prompt."""
    return methods.plan_sizes(engine.method, plan, engine.budget, engine.options, engine.profile)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def check_budget(engine, plan: Plan) -> None:
    """Warns of a budget whose sizes are too small for such prompts, and of layers that nobody chose for the model."""
    measured = engine.fingerprint and not engine.config.full_layers  # calibrate.py does not measure windows
    if measured and (name := methods.guessed(engine.method, engine.options, engine.profile)):
        warn(engine, f"{engine.method}'s default {name} suit some models only: calibrate.py measures this one's")
    if enough := methods.enough(engine.method, plan, engine.budget, engine.options, engine.profile):
        sizes = "".join(f", {name} {size}" for name, size in sizes_of(engine, plan).items())
        warn(
            engine,
            f"with a budget of {engine.budget}, {engine.method} chooses too coarsely among {plan.max_prompt} tokens"
            f"{sizes}: give it {enough} or more",
        )


def check_error(engine) -> None:
    """Warns if the method quantizes the first prompt so coarsely that a layer's attention is mostly wrong."""
    errors = [layer.error or 0.0 for layer in engine.layers]
    if (error := max(errors)) > WRONG:
        off = f"the attention of layer {errors.index(error)} is off by {error:.0%} of its norm"
        warn(engine, f"{engine.method} stores this prompt in too few bits, {off}")


def planned_bytes(engine, plan: Plan) -> tuple[int, int]:
    """(device, host) bytes of an engine's caches under another plan."""
    return methods.planned_bytes(engine.method, plan, engine.budget, engine.options, engine.profile)


def smaller(engine, plan: Plan) -> str | None:
    """The first flag found with which the engine's caches would take less of the device than the full cache.

    If there is none, but they do for the longest prompt: that of a longer prompt.
    """
    budget, flags = engine.budget, {}
    while isinstance(budget, int) and (budget := budget // 2):
        flags[f"--budget {budget}"] = budget, {}
    options = set(vars(methods.parse_options(engine.method, {})))
    flags |= {f"--kv-bits {n}": (engine.budget, {"bits": str(n)}) for n in (8, 4) if "bits" in options}
    flags |= {"--offload": (engine.budget, {"offload": "true"})} if "offload" in options else {}
    longer = replace(plan, max_prompt=longest_prompt(engine.config, plan.room))
    tried = [(flag, plan, *how) for flag, how in flags.items()]
    for flag, own, budget, more in [*tried, ("that of a longer prompt", longer, engine.budget, {})]:
        with suppress(ValueError):  # a budget that is too small, or bits that the method has not
            device, _ = methods.planned_bytes(engine.method, own, budget, engine.options | more, engine.profile)
            if device < full_bytes(own):
                return flag
    return None


def full_bytes(plan: Plan) -> int:
    """Bytes of the full cache as it is allocated for the same plan, all layers and rows."""
    device, _ = methods.planned_bytes("full", replace(plan, rewind=0), None, {})
    return device


def check_memory(engine, plan: Plan, spare: float = 0.0) -> None:
    """Raises ValueError if the engine's caches would leave less than the share `spare` of the free memory."""
    cache = engine.method, plan, engine.budget, engine.options, engine.profile
    parked = methods.parked_bytes(*cache)
    device, host = map(sum, zip(methods.planned_bytes(*cache), parked, strict=True))
    beside = ", with a whole prompt's K and V," if any(parked) else ""
    apart = plan.device.type != "cpu"
    for place, needed in ((plan.device, device), ("cpu", host)) if apart else ((plan.device, device + host),):
        free = free_share(torch.device(place))
        if minimum(plan.ranks, (1 - spare) * free - needed) < 0:
            raise ValueError(
                f"the {engine.method} cache of {plan.batch} x {plan.planned} tokens{beside} needs {needed / 1e9:.2f} "
                f"GB on {place} and {free / 1e9:.2f} GB are free: shorten the prompt, lower --max-new-tokens or --batch"
                f"{', or --budget' if engine.budget else ''}, or choose a --kv that keeps less"
            )


def warn(engine, line: str) -> None:
    """Prints a warning, once for an engine."""
    if line not in engine.warnings:
        print(f"warning: {line}", file=sys.stderr)
    engine.warnings.add(line)


def warn_past_context(engine) -> None:
    most = engine.config.max_length
    warn(engine, f"decoding past the model's context of {most} tokens, where its text may make no sense")


def figures(engine, length: int) -> dict:
    """What reports say of an engine's caches: their bytes, all rows together, and the bytes that a step reads for one
    row of `length` tokens; the options that the checkpoint's kv_profile.json set. Raises ValueError without caches."""
    if engine.plan is None:
        raise ValueError("no cache is allocated yet: give max_prompt, or generate first")
    device, host = engine.layers.bytes()
    read_device, read_host = engine.layers.step_bytes(length)
    return {
        "plan_sizes": sizes_of(engine, engine.plan),
        "profile": methods.from_profile(engine.method, engine.options, engine.profile),
        "kv_device_bytes": device,
        "kv_host_bytes": host,
        "kv_full_bytes": full_bytes(engine.plan),
        "step_device_bytes": read_device,
        "step_host_bytes": read_host,
    }
