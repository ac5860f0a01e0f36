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
    demo, single, saved = args.checkpoint is None, len(prompts) == 1 and args.batch_file is None, None
    results = Results(prompts, flags.asked(args), skipped, single)
    args.kv = args.kv or "full"
    options = flags.given_options(args)
    if args.load_prompt is not None:
        saved = prefix.read_header(args.load_prompt)
        args.kv, args.budget, options, args.speculate = saved.kv, saved.budget, saved.options, saved.speculate
        args.dtype = args.dtype or saved.dtype
    how = flags.given_sampling(args, args.checkpoint or flags.NEEDLE)
    limit = args.max_new_tokens if args.max_new_tokens is not None else 64 if demo else 256
    typed = single and "-" not in (args.prompt, args.prompt_file) and args.save_prompt is None
    talk = args.chat and typed and parallel.same(ranks, sys.stdin.isatty())
    engine = Engine.load(
        args.checkpoint or flags.NEEDLE,
        args.kv,
        args.budget,
        options,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        batch=args.batch if args.batch is not None else min(len(prompts), 8),
        max_prompt=args.max_prompt,
        max_new_tokens=limit * (2 * CHAT_TURNS if talk else 1),
        compile=args.compile if args.compile is not None else limit * len(prompts) > PAYS,
        text=True,
        speculate=args.speculate or 0,
        progress=partial(progress, but="" if single else "prefill"),
    )
    if saved and args.max_new_tokens is not None and limit > saved.max_new_tokens and not engine.endless:
        print(f"note: the prompt was saved with room for {saved.max_new_tokens} more tokens", file=sys.stderr)
    ids, refused = flags.encode(engine, args, prompts, saved)
    if args.save_prompt is not None and ids:
        return save(engine, next(iter(ids.values())), args)
    if not saved and ids:
        print_plan(engine, max(map(len, ids.values())))
    out = sys.stderr if args.json == "-" else sys.stdout
    names, streamed, interrupted = list(ids), [], False
    if single:
        how["on_token"] = lambda index, token, text: streamed.append(print(text, end="", file=out, flush=True))

    def done(index: int, *answers: Answer) -> None:
        results.done(names[index], saved.prompt if saved else len(ids[names[index]]), answers)

    def fail(index: int, error: str) -> None:
        results.fail(names[index], error)

    try:
        with results.kept(None if ranks.rank else args.out):
            for name, error in refused.items():
                results.fail(name, error)
            if talk and ids:
                answers, interrupted = converse(engine, ids[names[0]], limit, how, out)
                done(0, *answers)
            elif saved is not None:
                ask_saved(engine, args.load_prompt, list(ids.values()), limit, how, done, fail)
            elif ids:
                engine.generate(list(ids.values()), limit, **how, on_answer=done)
    finally:
        if streamed and not talk:
            print(file=out)  # ends the answer's line, before an error's too
        if not single:
            results.show(out)
    if single and results.failed:
        raise ValueError(results.failed.popitem()[1])
    report = results.report()
    if results.completions:
        report = measured(engine) | {"checkpoint": str(args.checkpoint or flags.NEEDLE)} | report
        print_report(report)
    for line in cpu.lines(engine.stats.products) if args.verbose else ():
        print(f"{'product':14} {line}", file=sys.stderr)
    if not ranks.rank:
        write_json(args.json, report)
    if failed := results.failed:
        raise ValueError(f"{len(failed)} of {len(prompts)} prompts failed: {', '.join(map(str, failed))}")
    if interrupted:
        raise KeyboardInterrupt


if __name__ == "__main__":
    run(main, ranks=True)
