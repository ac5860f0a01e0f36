"""Prompts that generate.py saves in files, and continues."""

import argparse
import sys
import time
from collections.abc import Callable

from engine import Answer, Engine
from runtime import planning
from terminal.cli import write_json


def save(engine: Engine, prompt: list[int], args: argparse.Namespace) -> None:
    """Prefills a prompt and writes it to the file that --save-prompt names."""
    (row,) = engine.start([prompt])
    begin = time.perf_counter()
    size, plan = row.save(args.save_prompt, args.chat), engine.plan
    full = plan.full_bytes() // (plan.batch * plan.planned) * len(prompt)
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
        "room": engine.plan.room,
    }
    seconds = f"{report['save_s']:.2f} s"
    print(f"-- saved {len(prompt)} tokens in {args.save_prompt}: {size / 1e6:.1f} MB, {seconds}", file=sys.stderr)
    print(f"-- the full cache takes {full / 1e6:.1f} MB; room for {report['room']} more tokens", file=sys.stderr)
    if size >= full and engine.method != "full":
        print("warning: this file is as large as the full cache or larger", file=sys.stderr)
    write_json(args.json, report)


def ask_saved(
    engine: Engine,
    path: str,
    questions: list[list[int]],
    how: dict,
    done: Callable[[int, Answer], None],
    fail: Callable[[int, str], None],
) -> None:
    """Answers questions about a saved prompt, each in a row of its own.

    `done` takes a question's index and answer, `fail` the index and the error of one for which a row has no room.
    """
    stats, answered = engine.stats.next_call(), 0
    for start in range(0, len(questions), engine.batch):
        row, asked = engine.load_row(path), {}
        if not start and how["max_new_tokens"] > engine.plan.room and not engine.endless:
            print(f"note: the prompt was saved with room for {engine.plan.room} more tokens", file=sys.stderr)
        for index, question in enumerate(questions[start : start + engine.batch], start):
            try:
                planning.room_left(engine, row, question)
                asked[index] = question
            except ValueError as error:
                fail(index, str(error))
        rows, indices = [row, *(row.fork() for _ in list(asked)[1:])], list(asked)
        stats = stats.then(engine.stats)
        if asked:
            engine.ask(rows, list(asked.values()), **how, on_answer=lambda i, a: done(indices[i], a))  # noqa: B023
            engine.stats.past_context = [answered + i for i in engine.stats.past_context]
            stats, answered = stats.then(engine.stats), answered + len(asked)
        for row in rows:
            row.close()
    engine.stats = stats
