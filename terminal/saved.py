"""Prompts that generate.py saves in files, and continues."""

import argparse
import sys
import time
from collections.abc import Callable

from engine import Engine
from terminal.cli import write_json


def save(engine: Engine, prompt: list[int], args: argparse.Namespace) -> None:
    """Prefills a prompt and writes it to the file that --save-prompt names."""
    (row,) = engine.start([prompt])
    begin = time.perf_counter()
    size, shape = row.save(args.save_prompt, args.chat), engine.shape
    full = shape.full_bytes() // (shape.batch * shape.planned) * len(prompt)
    report = {
        "kv": args.kv,
        "budget": args.budget,
        "options": engine.options,
        "speculate": engine.speculate,
        "prompt_tokens": len(prompt),
        "prefill_s": engine.stats.prefill_s,
        "save_s": time.perf_counter() - begin,
        "saved_bytes": size,
        "saved_full_bytes": full,
        "room": engine.shape.max_new_tokens,
    }
    seconds = f"{report['save_s']:.2f} s"
    print(f"-- saved {len(prompt)} tokens in {args.save_prompt}: {size / 1e6:.1f} MB, {seconds}", file=sys.stderr)
    print(f"-- the full cache takes {full / 1e6:.1f} MB; room for {report['room']} more tokens", file=sys.stderr)
    write_json(args.json, report)


def ask_saved(engine: Engine, path: str, questions: list[list[int]], limit: int, how: dict, done: Callable) -> None:
    """Answers questions about a saved prompt, each in a row of its own; `done` takes an index and an answer."""
    stats = engine.stats.next_call()
    for start in range(0, len(questions), engine.batch):
        group = questions[start : start + engine.batch]
        rows = [engine.load_row(path)]
        rows += [rows[0].fork() for _ in group[1:]]
        stats = stats.then(engine.stats)
        for i, answer in enumerate(engine.ask(rows, group, limit, **how), start):
            done(i, answer)
        stats = stats.then(engine.stats)
        for row in rows:
            row.close()
    engine.stats = stats
