"""Logits of continuations that are given, for evaluation."""

import torch
from torch import Tensor

import kv as methods
from runtime.arguments import Prompt, as_prompts, check_free, is_prompt
from runtime.plan import warn_past_context
from runtime.warm import warm_up


def forced_logits(
    engine, prompts: Prompt | list[Prompt], continuations: Prompt | list[Prompt]
) -> Tensor | list[Tensor]:
    """`Engine.logits`."""
    single = is_prompt(prompts)
    prompts = [engine.encode(prompt) for prompt in as_prompts(prompts)]
    continuations = [continuations] if single else as_prompts(continuations)
    continuations = [engine.encode(ids, bos=False) for ids in continuations]
    if len(prompts) != len(continuations) or not prompts:
        raise ValueError(f"{len(continuations)} continuations for {len(prompts)} prompts")
    longest, new = max(map(len, prompts)), max(map(len, continuations))
    check_free(engine, len(prompts))
    engine._begin_answers(new, None, {})
    engine._reserve(longest, new)
    warm_up(engine, longest)
    if any(len(p) + len(c) - 1 > engine.context for p, c in zip(prompts, continuations, strict=True)):
        warn_past_context(engine)
    results = [torch.empty(len(ids), engine.config.vocab_size, device=engine.device) for ids in continuations]
    rows = []
    try:
        for prompt, logits in zip(prompts, results, strict=True):
            rows.append(engine._prefill(prompt, len(logits)))
            logits[0] = rows[-1].logits
            engine.state.set_row(rows[-1].index, pos=len(prompt))
        for i in range(1, new):
            ahead = i + engine.speculate
            longer = [x for x in zip(rows, continuations, results, strict=True) if i < len(x[1])]
            for row, _, _ in longer:
                engine.state.left[row.index] = 1
            fed = {row.index: ids[i - 1] for row, ids, _ in longer}
            # One token less than the rows hold, as `Engine._launch` does.
            methods.make_room(engine.layers, {row.index: len(row.tokens) + i - 2 for row, _, _ in longer})
            logits = engine._step(fed, longest + ahead, ahead)[1]
            for row, _, own in longer:
                own[i] = logits[row.index]
    finally:
        for row in rows:
            engine._free(row)
    return results[0] if single else results
