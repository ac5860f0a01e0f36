"""Answers a prompt: python generate.py --checkpoint DIR --prompt "..." --kv streaming --budget 256

Without arguments it uses the checkpoint in needle/ to answer a question about the long text there.
"""

import runtime.startup  # noqa: F401

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from tqdm import tqdm

import kv as methods
from engine import Completion, Engine, Sampling
from runtime import cpu, parallel, prefix
from runtime.device import DTYPES
from terminal.batch import open_to_append, parse_batch
from terminal.cli import check_output, number, progress, read_text, run, write_json
from terminal.conversation import Conversation
from terminal.report import measured, print_report

__all__ = ["Engine"]
NEEDLE = Path(__file__).parent / "needle"
CHAT_TURNS = 16  # a conversation's caches hold this many answers, and as many questions of the same length


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = p.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="a folder made by convert_hf_checkpoint.py")
    what = p.add_argument_group("what to answer").add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-file", metavar="FILE", help="the prompt is this file; - for stdin")
    batch = 'one prompt a line, or JSONL of {"id": ..., "prompt": ...}; - for stdin'
    what.add_argument("--batch-file", metavar="FILE", help=batch)
    add("--chat", action="store_true", help="use the checkpoint's chat format; on a terminal, keep asking")
    add("--system", metavar="TEXT", help="the system prompt of --chat (default: the chat format's)")
    add("--stop", action="append", metavar="TEXT", help="ends an answer, and is cut off; repeatable")
    add("--save-prompt", metavar="FILE", help="prefill the prompt and save what the cache holds")
    add("--load-prompt", metavar="FILE", help="continue a saved prompt, with its method and budget")
    add("--out", metavar="FILE", help="append each answer to this JSONL file as soon as it is complete")
    add("--kv", metavar="NAME", help="KV method (default: full); see --list-kv")
    add("--budget", type=number, help="tokens per KV head, or a share of the prompt between 0 and 1")
    add("--kv-opt", action="append", metavar="K=V", help="an option of the method; repeatable")
    add("--mem", dest="kv_opt", action="append", type="mem={}".format, help="short for --kv-opt mem=...")
    short = {"dest": "kv_opt", "help": "short for --kv-opt offload=true: keep the rest on the host"}
    add("--offload", action="append_const", const="offload=true", **short)
    bits = "short for --kv-opt bits=...: store K and V in 8 or 4 bits"
    add("--kv-bits", dest="kv_opt", action="append", type="bits={}".format, metavar="N", help=bits)
    drafts = "the method only drafts N tokens at a time, and the full cache verifies them: the full cache's answer"
    add("--speculate", type=int, metavar="N", help=drafts)
    add("--list-kv", action="store_true", help="list the KV methods and exit")
    add("--kv-help", metavar="NAME", help="what a KV method does, and its options")
    add("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 256; demo: 64)")
    add("--batch", type=int, help="rows decoded together (default: one per prompt, at most 8)")
    add("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    add("--top-k", type=int)
    add("--top-p", type=float)
    add("--seed", type=int, help="of sampling (default: a new one each time)")
    add("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    compiles = "compile the decode step (default: yes, except in the demo)"
    add("--compile", action=argparse.BooleanOptionalAction, help=compiles)
    add("--product", choices=cpu.PRODUCTS, help="the product of a compiled step on a CPU (default: auto)")
    add("--verbose", action="store_true", help="print how fast each product reads each size of weight")
    add("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.list_kv:
        for name, method in methods.METHODS.items():
            print(f"{name:14} {method.help}")
        return
    if args.kv_help is not None:
        print(methods.describe(args.kv_help))
        return
    if args.product is not None:
        os.environ["KV_FAST_PRODUCT"] = args.product
    ranks = parallel.join()
    prompts = parallel.first(ranks, lambda: read_prompts(args))
    check(args, prompts, ranks.count)
    if args.checkpoint is None and args.prompt is args.prompt_file is args.batch_file is None:
        print("...", prompts[1].splitlines()[-1], file=sys.stderr)
    answer(args, prompts, ranks)


def read_prompts(args: argparse.Namespace) -> dict[str | int, str]:
    """The prompts by id; a line without an id gets its line number."""
    if args.batch_file is not None:
        return parse_batch(args.batch_file, read_text(args.batch_file))
    if args.prompt_file is not None:
        return {1: read_text(args.prompt_file)}
    if args.prompt is not None:
        return {1: args.prompt}
    if args.checkpoint is not None:
        raise ValueError("nothing to answer: give --prompt, --prompt-file or --batch-file")
    return {1: (NEEDLE / "demo.txt").read_text()}


def check(args: argparse.Namespace, prompts: dict[str | int, str], ranks: int) -> None:
    """Raises ValueError for arguments that conflict or cannot be met, before anything is loaded."""
    if not all(prompts.values()):
        raise ValueError("the prompt is empty")
    if args.system is not None and not args.chat:
        raise ValueError("--system is part of a chat format: add --chat")
    if not all(args.stop or []):
        raise ValueError("--stop: the text is empty")
    if args.speculate is not None and args.speculate < 1:
        raise ValueError(f"--speculate must be at least 1, not {args.speculate}")
    Sampling(args.temperature, args.top_k, args.top_p)
    for flag in ("--json", "--out", "--save-prompt"):
        check_output(getattr(args, flag[2:].replace("-", "_")), flag)
    saves, loads = args.save_prompt is not None, args.load_prompt is not None
    if ranks > 1 and (saves or loads):
        raise ValueError("--save-prompt and --load-prompt need one process: start it with python, not torchrun")
    if saves and (args.batch_file is not None or loads):
        raise ValueError("--save-prompt takes one text: leave out --batch-file and --load-prompt")
    given = (args.kv, args.budget, args.kv_opt, args.speculate, args.chat or None)
    if loads and any(value is not None for value in given):
        raise ValueError(
            "--load-prompt brings method, budget and format: leave out --kv, --budget, options, --speculate, --chat"
        )


def given_options(args: argparse.Namespace) -> dict:
    """The method's options, from --kv-opt and the flags that are short for it. Raises ValueError if two disagree."""
    options = {}
    for option in args.kv_opt or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--kv-opt {name}: write it as name=value")
        asked = [getattr(methods.parse_options(args.kv, {name: v}), name) for v in (options.get(name, value), value)]
        if asked[0] != asked[1]:
            raise ValueError(f"the option {name} is given twice: {options[name]} and {value}")
        options[name] = value
    return options


def answer(args: argparse.Namespace, prompts: dict[str | int, str], ranks: parallel.Ranks) -> None:
    """Loads the engine, answers, and prints the measurements. A single answer streams.

    A rejected prompt among several fails alone: after the others are answered, ValueError names it.
    """
    demo, single, saved = args.checkpoint is None, len(prompts) == 1, None
    args.kv, dtype = args.kv or "full", args.dtype
    limit = args.max_new_tokens if args.max_new_tokens is not None else 64 if demo else 256
    options = given_options(args)
    if args.load_prompt is not None:
        saved = prefix.read_header(args.load_prompt)
        args.kv, args.budget, options, args.speculate = saved.kv, saved.budget, saved.options, saved.speculate
        dtype = dtype or saved.dtype
    typed = single and args.batch_file is None and args.prompt_file != "-" and args.save_prompt is None
    talk = args.chat and typed and parallel.same(ranks, sys.stdin.isatty())
    engine = Engine.load(
        args.checkpoint or NEEDLE,
        args.kv,
        args.budget,
        options,
        device=args.device,
        dtype=dtype,
        seed=args.seed,
        batch=args.batch if args.batch is not None else min(len(prompts), 8),
        max_new_tokens=limit * (2 * CHAT_TURNS if talk else 1),
        compile=args.compile if args.compile is not None else not demo,  # the demo ends before a compile pays off
        speculate=args.speculate or 0,
        progress=partial(progress, quiet=not single),
    )
    if engine.tokenizer is None:
        raise ValueError(f"{engine.no_tokenizer}; prompts here are text")
    ids, failed = encode(engine, args, prompts, saved)
    if args.save_prompt is not None:
        return save(args, engine, next(iter(ids.values())))
    if saved is not None:
        asked = max(map(len, ids.values()))
        if args.max_new_tokens is None:
            limit = max(1, min(limit, saved.max_new_tokens - asked))
        elif asked + limit - 1 > saved.max_new_tokens:
            room = f"room for {saved.max_new_tokens} more tokens and {asked + limit - 1} are needed"
            raise ValueError(f"the prompt was saved with {room}: lower --max-new-tokens, or save it with more")
    out = sys.stderr if args.json == "-" else sys.stdout
    names = list(ids)
    how = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "stop": args.stop}
    with (
        tqdm(total=len(prompts), unit="prompt", disable=None if not single else True) as bar,
        open_to_append(args.out) if args.out and not ranks.rank else nullcontext() as file,
    ):

        def done(index: int, completion: Completion) -> None:
            write(file, {"id": names[index]} | completion.to_dict())
            bar.update()

        for name, error in failed.items():
            tqdm.write(f"prompt {name}: {error}", file=sys.stderr)
            write(file, {"id": name, "error": error})
            bar.update()
        show = (lambda index, token, text: print(text, end="", file=out, flush=True)) if single else None
        if talk:
            completions = [converse(engine, ids[names[0]], limit, how, show, out)]
            done(0, completions[0])
        elif saved is not None:
            completions = ask_saved(engine, args.load_prompt, list(ids.values()), limit, how, show, done)
        else:
            completions = engine.generate(list(ids.values()), limit, **how, on_token=show, on_done=done)
    if single and not talk:
        print(file=out)
    elif not single:
        for name, completion in zip(names, completions, strict=True):
            print(f"{prompts[name][:60]} -> {completion.answers[0].text}", file=out)
    report = measured(engine, completions) | {"checkpoint": str(args.checkpoint or NEEDLE)}
    report["completions"] = [{"id": name} | c for name, c in zip(names, report["completions"], strict=True)]
    report["failed"] = [{"id": name, "error": error} for name, error in failed.items()]
    print_report(report)
    for line in cpu.lines(engine.stats.products) if args.verbose else ():
        print(f"{'product':14} {line}", file=sys.stderr)
    if not ranks.rank:
        write_json(args.json, report)
    if failed:
        raise ValueError(f"{len(failed)} of {len(prompts)} prompts failed: {', '.join(map(str, failed))}")


def encode(
    engine: Engine, args: argparse.Namespace, prompts: dict[str | int, str], saved: prefix.Header | None
) -> tuple[dict[str | int, list[int]], dict[str | int, str]]:
    """The ids of each prompt, or of what follows a saved one, and the errors of those that the engine rejects.

    Raises ValueError if it rejects all.
    """
    ids, failed, chat = {}, {}, engine.tokenizer.chat if args.save_prompt is None else engine.tokenizer.chat_begin
    for name, text in prompts.items():
        try:
            if saved is not None:
                ids[name] = engine.tokenizer.chat_end(text) if saved.chat else engine.encode(text, bos=False)
            else:
                ids[name] = chat(text, args.system) if args.chat else engine.encode(text)
                engine.check_length(len(ids[name]))
        except ValueError as error:
            failed[name] = str(error)
            ids.pop(name, None)
    if not ids:
        name, error = next(iter(failed.items()))
        raise ValueError(error if len(prompts) == 1 else f"no prompt can be answered; prompt {name}: {error}")
    return ids, failed


def write(file: BinaryIO | None, entry: dict) -> None:
    """Appends an answer to the file of --out."""
    if file is not None:
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()


def ask_saved(
    engine: Engine, path: str, questions: list[list[int]], limit: int, how: dict, show: Callable | None, done: Callable
) -> list[Completion]:
    """Answers questions about a saved prompt, each in a row of its own."""
    completions, stats = [], engine.stats.next_call()
    for start in range(0, len(questions), engine.batch):
        group = questions[start : start + engine.batch]
        rows = [engine.load_row(path)]
        rows += [rows[0].fork() for _ in group[1:]]
        stats = stats.then(engine.stats)
        answers = engine.ask(rows, group, limit, **how, on_token=show)
        stats = stats.then(engine.stats)
        for answer in answers:
            completions.append(Completion(rows[0].prompt, [answer]))
            done(len(completions) - 1, completions[-1])
        for row in rows:
            row.close()
    engine.stats = stats
    return completions


def converse(engine: Engine, prompt: list[int], limit: int, how: dict, show: Callable, out: TextIO) -> Completion:
    """A conversation: answers the prompt, then what is typed, until it ends or the caches are full."""
    rows, stats = engine.start([prompt]), engine.stats  # Ctrl-C before the first answer ends the program
    with Conversation(engine, out) as conversation:
        completion = Completion(len(prompt), engine.ask(rows, None, limit, **how, on_token=show))
        stats = stats.then(engine.stats)
        while (question := parallel.first(engine.ranks, conversation.read)) is not None:
            try:
                completion.answers += engine.ask(rows, [question], limit, **how, on_token=show)
                stats = stats.then(engine.stats)
            except ValueError as error:
                print(error, file=sys.stderr)
                break
    engine.stats = stats
    return completion


def save(args: argparse.Namespace, engine: Engine, prompt: list[int]) -> None:
    """Prefills a prompt and writes it to the file that --save-prompt names."""
    (row,) = engine.start([prompt])
    begin = time.perf_counter()
    size, full = row.save(args.save_prompt, args.chat), engine.shape.full_bytes() // engine.shape.planned * len(prompt)
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


if __name__ == "__main__":
    run(main, ranks=True)
