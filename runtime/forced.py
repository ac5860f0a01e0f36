"""Logits of continuations that are given, for evaluation."""

import torch
from torch import Tensor


def forced_logits(engine, prompts: list[list[int]], continuations: list[list[int]]) -> list[Tensor]:
    """`Engine.logits` for lists of ids: prefill computes row 0, decode steps that are fed the ids the others."""
    found = [torch.empty(len(ids), engine.config.vocab_size, device=engine.device) for ids in continuations]
    longest, rows = max(map(len, prompts)), []
    try:
        for prompt, logits in zip(prompts, found, strict=True):
            rows.append(engine._prefill(prompt, len(logits)))
            logits[0] = rows[-1].logits
            engine.state.wake(rows[-1].slot, 0, len(prompt), 0, 0)
        for i in range(1, max(map(len, continuations))):
            ahead = i + engine.speculate
            longer = [x for x in zip(rows, continuations, found, strict=True) if i < len(x[1])]
            for row, _, _ in longer:
                engine.state.left[row.slot] = 1
            fed = {row.slot: ids[i - 1] for row, ids, _ in longer}
            logits = engine._step(fed, longest + ahead, ahead)[1]
            for row, _, own in longer:
                own[i] = logits[row.slot]
    finally:
        for row in rows:
            engine._free(row)
    return found
