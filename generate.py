"""Answers a prompt: python generate.py --checkpoint DIR --prompt "..." --kv streaming --budget 256

Without arguments it uses the checkpoint in needle/ to answer a question about the long text there.
"""

import runtime.startup  # noqa: F401

import argparse
import sys
from functools import partial

from engine import Answer, Engine
from runtime import cpu, parallel, prefix
from terminal import options as flags
from terminal.batch import Results, unanswered
from terminal.cli import progress, run, write_json
from terminal.conversation import converse
from terminal.report import measured, print_plan, print_report
from terminal.saved import ask_saved, save

CHAT_TURNS = 16  # a conversation's caches hold this many answers, and as many questions of the same length
PAYS = 1000  # tokens of answers for which compiling the step pays


def main(argv: list[str] | None = None) -> None:
    args = flags.parser(__doc__).parse_args(argv)
    if flags.describe_methods(args):
        return
    ranks = parallel.join()
    prompts = parallel.first(ranks, lambda: flags.read_prompts(args, ranks.count))
    flags.check(args, prompts, ranks.count)
    left = prompts
    if args.batch_file is not None:
        left = parallel.first(ranks, lambda: unanswered(args.out, prompts, flags.asked(args)))
    skipped = len(prompts) - len(left)
    if skipped:
        print(f"-- {args.out} answers {skipped} of {len(prompts)} prompts: skipped", file=sys.stderr)
    if left:
        answer(args, left, ranks, skipped)
    elif skipped and not ranks.rank:
        write_json(args.json, {"completions": [], "failed": [], "skipped": skipped})


def answer(args: argparse.Namespace, prompts: dict[str | int, str], ranks: parallel.Ranks, skipped: int = 0) -> None:
    """Loads the engine, answers, and prints the measurements. A single answer streams.

    A rejected prompt among several fails alone: after the others are answered, ValueError names it. skipped: how many
    more prompts the file of --out answers.
    """
    out = sys.stderr if args.json == "-" else sys.stdout
    single = len(prompts) == 1 and args.batch_file is None
    results = Results(prompts, flags.asked(args), skipped, single, out)
    typed = single and "-" not in (args.prompt, args.prompt_file) and args.save_prompt is None
    talk = args.chat and typed and parallel.same(ranks, sys.stdin.isatty())
    saved = None if args.load_prompt is None else prefix.read_header(args.load_prompt)
    how = flags.given_sampling(args, args.checkpoint or flags.NEEDLE)
    limit = how["max_new_tokens"]
    engine = load(args, saved, limit * (2 * CHAT_TURNS if talk else 1), limit * len(prompts) > PAYS, results)
    ids, refused = flags.encode(engine, args, prompts, saved)
    if args.save_prompt is not None and ids:
        return save(engine, next(iter(ids.values())), args)
    if not saved and ids:
        print_plan(engine, max(map(len, ids.values())))
    names, asked, interrupted = list(ids), list(ids.values()), False
    how["on_token"] = results.stream if single and not talk else None

    def done(index: int, *answers: Answer) -> None:
        results.done(names[index], saved.prompt if saved else len(asked[index]), answers)

    def fail(index: int, error: str) -> None:
        results.fail(names[index], error)

    with results.kept(None if ranks.rank else args.out):
        for name, error in refused.items():
            results.fail(name, error)
        if talk and ids:
            answers, interrupted = converse(engine, asked[0], how, out)
            done(0, *answers)
        elif saved:
            ask_saved(engine, args.load_prompt, asked, how, done, fail)
        elif ids:
            engine.generate(asked, **how, on_answer=done)
    finish(engine, args, results)
    if interrupted:
        raise KeyboardInterrupt


def load(args: argparse.Namespace, saved: prefix.Header | None, room: int, pays: bool, results: Results) -> Engine:
    """The engine that the flags ask for, or the one that saved a prompt; pays: compiling the step."""
    args.kv = args.kv or "full"
    options = flags.given_options(args)
    if saved:
        args.kv, args.budget, options, args.speculate = saved.kv, saved.budget, saved.options, saved.speculate
        args.dtype = args.dtype or saved.dtype
    engine = Engine.load(
        args.checkpoint or flags.NEEDLE,
        args.kv,
        args.budget,
        options,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        batch=args.batch if args.batch is not None else min(len(results.prompts), 8),
        max_prompt=args.max_prompt,
        room=room,
        compile=args.compile if args.compile is not None else pays or None,
        text=True,
        speculate=args.speculate or 0,
        chunk=args.chunk or 0,
        progress=partial(progress, but="" if results.single else "prefill"),
    )
    return engine


def finish(engine: Engine, args: argparse.Namespace, results: Results) -> None:
    """Prints the measurements and writes --json. Raises ValueError for prompts that failed."""
    if results.single and results.failed:
        raise ValueError(results.failed.popitem()[1])
    report = results.report()
    if results.completions:
        report = measured(engine) | {"checkpoint": str(args.checkpoint or flags.NEEDLE)} | report
        print_report(report)
    if args.verbose:
        lines = [("product", line) for line in cpu.lines(engine.stats.products)]
        lines += [("not kept", f"compiled parts of the step: {x}") for x in {x.failure for x in engine.parts} - {""}]
        for name, line in lines:
            print(f"{name:14} {line}", file=sys.stderr)
    if not engine.ranks.rank:
        write_json(args.json, report)
    if failed := results.failed:
        raise ValueError(f"{len(failed)} of {len(results.prompts)} prompts failed: {', '.join(map(str, failed))}")


if __name__ == "__main__":
    run(main, ranks=True)
