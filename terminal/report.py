"""What generate.py reports: what was generated, how long it took, and how many bytes the cache takes."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from engine import Answer, Engine
from runtime import planning
from runtime.device import resident_bytes
from terminal.cli import Choice, profile_lines


def print_plan(engine: Engine, longest: int) -> None:
    """Says what share of the full cache's memory the planned caches take, and warns if it is no less than all.

    longest: tokens of the longest prompt.
    """
    plan = engine.plan or planning.plan_of(engine, engine.max_prompt or longest, engine.room)
    device, host = planning.planned_bytes(engine, plan)
    full, tokens = planning.full_bytes(plan), f"{plan.max_prompt} + {plan.room} tokens"
    tokens += f" in each of {plan.batch} rows" if plan.batch > 1 else ""
    plain = engine.method == "full" and not engine.options
    of_full = "" if plain else f", {device / full:.0%} of the full cache's {mb(full)}"
    on_host = f" and {mb(host)} on the host" if host else ""
    print(f"-- cache for {tokens}: {mb(device)}{on_host}{of_full}", file=sys.stderr, flush=True)
    if device < full or plain or engine.speculate:
        return
    if isinstance(engine.budget, int) and engine.budget >= plan.max_prompt:
        helps = "the budget covers the whole prompt"
    else:
        smaller = planning.smaller(engine, plan)
        helps = f"{smaller} takes less" if smaller else "it saves reads, not memory"
    new = device - planning.planned_bytes(engine, replace(plan, room=1))[0]
    room = f"; {mb(new)} of it are for new tokens, see --max-new-tokens" if new > device / 2 else ""
    planning.warn(engine, f"this cache is as large as the full one or larger: {helps}{room}")


def mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def completion(prompt_tokens: int, answers: Sequence[Answer]) -> dict:
    """The answer to a prompt and, in a conversation, to each question after it.

    text, tokens and finish_reason are those of the first answer; new_tokens counts all answers.
    """
    answers = [asdict(answer) for answer in answers]
    new = sum(len(answer["tokens"]) for answer in answers)
    return {"prompt_tokens": prompt_tokens, "new_tokens": new, **answers[0], "answers": answers}


CACHES = ("profile", "plan_sizes", "kv_device_bytes", "kv_host_bytes", "kv_full_bytes")
STATS = ("load_s", "load_bytes", "compile_s", "compiles", "prefill_s", "tokens_reused", "extend_s", "extend_tokens")
STATS += ("first_token_s", "past_context")


def measured(engine: Engine) -> dict:
    """What --json writes of one method and one call, besides the answers."""
    stats, caches = engine.stats, planning.figures(engine, 1)
    requested, transferred = engine.layers.fetched()
    cuda = engine.device.type == "cuda"
    return {
        "kv": engine.method,
        "budget": engine.budget,
        "options": engine.options,
        "speculate": engine.speculate,
        "chunk": engine.chunk,
        "max_prompt": engine.plan.max_prompt,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "ranks": engine.ranks.count,
        "sampling": {name: value for name, value in asdict(engine.sampling).items() if name != "seed"},
        "seed": engine.seed,
        "batch": engine.batch,
        **{name: caches[name] for name in CACHES},
        **{name: getattr(stats, name) for name in STATS},
        "prefill_tokens_per_s": stats.prefill_tokens / stats.prefill_s if stats.prefill_tokens else None,
        "decode_ms_per_token": stats.ms_per_token,  # per row
        "decode_ms_per_step": 1e3 * stats.decode_s / stats.steps if stats.steps else None,
        "accepted_per_round": stats.accepted if engine.speculate else None,
        "tokens_per_s": stats.decoded / stats.decode_s if stats.steps else None,  # over all rows
        "fetch_hit_rate": 1 - transferred / requested if requested else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else resident_bytes("VmHWM"),
    }


def print_report(r: dict) -> None:
    answers = r["completions"]
    rows = " in all rows" if r["batch"] > 1 else ""
    lines = [
        ("prompt tokens", ", ".join(str(c["prompt_tokens"]) for c in answers[:8]) + ", ..." * (len(answers) > 8)),
        ("new tokens", str(sum(c["new_tokens"] for c in answers))),
        ("load", f"{r['load_bytes'] / 1e9:.2f} GB, {r['load_s']:.2f} s"),
        ("compile", f"{r['compile_s']:.1f} s, {r['compiles']} compiled" if r["compile_s"] else "off"),
        ("prefill", f"{r['prefill_s']:.2f} s, {r['prefill_tokens_per_s']:.0f} tokens/s")
        if r["prefill_tokens_per_s"]
        else ("restored", f"{r['prefill_s']:.2f} s, {r['tokens_reused']} tokens"),
        ("first token", f"{r['first_token_s']:.2f} s"),
        ("decode", f"{r['decode_ms_per_token']:.2f} ms/token, {r['tokens_per_s']:.1f} tokens/s{rows}")
        if r["tokens_per_s"]
        else ("decode", "no steps: the prefill gave the whole answer"),
        ("KV cache", f"{mb(r['kv_device_bytes'])} on the device, {mb(r['kv_host_bytes'])} on the host"),
        ("full cache", f"{mb(r['kv_full_bytes'])} for the same plan"),
        ("peak memory", mb(r["peak_bytes"])),
    ]
    if r["accepted_per_round"] is not None:
        drafts = f"{r['accepted_per_round']:.2f} of {r['speculate']} drafted tokens accepted"
        lines.insert(7, ("speculation", f"{drafts}, {r['decode_ms_per_step']:.2f} ms a round"))
    if r["ranks"] > 1:
        lines.insert(0, ("ranks", f"{r['ranks']}; bytes are those of one"))
    if r["fetch_hit_rate"]:
        lines.insert(-1, ("fetches", f"{100 * r['fetch_hit_rate']:.1f}% of the rows were on the device already"))
    if r["extend_tokens"]:
        lines.append(("added at once", f"{r['extend_tokens']} tokens, {r['extend_s']:.2f} s"))
    if r["past_context"]:
        passed = ", ".join(str(answers[i]["id"]) for i in r["past_context"][:8])
        lines.append(("past context", f"prompts {passed}" + ", ..." * (len(r["past_context"]) > 8)))
    name = Choice(r["kv"], r["budget"], r["options"]).label
    name = f"full, with drafts by {name}" if r["speculate"] else name
    print(f"-- {name}, {r['dtype']}, {r['device']}", file=sys.stderr)
    lines += [("profile", line) for line in profile_lines([r])]
    for name, value in lines:
        print(f"{name:14} {value}", file=sys.stderr)
