"""Compiles the decode step before anything is timed."""

import time

import torch

from runtime import cpu
from runtime.compile import compile_errors


def warm_up(engine, length: int) -> None:
    """Prepares the step for the sampling of a call, for rows of `length` tokens: allocates what a first repetition
    penalty needs, and compiles (on CUDA also captures) a variant that is new, with every row asleep."""
    variant, state = engine.sampling.variant, engine.state
    if engine.sampling.repetition_penalty != 1 and state.seen is None:
        state.seen = torch.zeros(engine.batch, engine.config.vocab_size, dtype=torch.bool, device=engine.device)
    if not engine.compile or variant in engine.warm:
        return
    begin = time.perf_counter()
    with compile_errors():
        what = f"compile the {variant} decode step, a minute or more the first time"
        for _ in engine.progress([None], what):  # only shows the text
            # Verification first: drafts, of which there are more, decide last.
            for tokens in [] if engine.warm else sorted({1, engine.speculate + 1}, reverse=True):
                engine.stats.products |= cpu.tune(engine.model, engine.shape, tokens)
            for _ in range(3 if engine.device.type == "cuda" else 1):  # CUDA graph: run, record, replay
                engine._step({}, length + 1, 1)[0].tolist()
    engine.stats.compile_s += time.perf_counter() - begin
    engine.warm.add(variant)
