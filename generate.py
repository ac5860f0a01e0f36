"""Answers a prompt: python generate.py --checkpoint DIR --prompt "..." --kv streaming --budget 256

Without arguments it uses the checkpoint in needle/ to answer a question about the long text there.
"""

import runtime.startup  # noqa: F401

import argparse
import json
import os
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TextIO

import kv
from decoder import Sampling
from engine import Engine
from runtime import prefix, processes, tune
from runtime.checkpoint import fingerprint
from runtime.device import DTYPES
from sequence import Completion
from terminal.batch import open_to_append, parse_batch
from terminal.cli import check_output, number, read_text, run, write_json
from terminal.conversation import Conversation
from terminal.progress import Progress
from terminal.report import measured, print_report

__all__ = ["Engine"]
NEEDLE = Path(__file__).parent / "needle"
CHAT_TURNS = 16  # a conversation's caches hold this many answers, and as many questions of the same length


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, metavar="DIR", help="a folder made by convert_hf_checkpoint.py")
    what = p.add_argument_group("what to answer").add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-file", metavar="FILE", help="the prompt is this file; - for stdin")
    batch = 'one prompt a line, or JSONL of {"id": ..., "prompt": ...}; - for stdin'
    what.add_argument("--batch-file", metavar="FILE", help=batch)
    p.add_argument("--chat", action="store_true", help="use the checkpoint's chat format; on a terminal, keep asking")
    p.add_argument("--system", metavar="TEXT", help="the system prompt of --chat (default: the chat format's)")
    p.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer, and is cut off; repeatable")
    p.add_argument("--save-prompt", metavar="FILE", help="prefill the prompt and save what the cache holds")
    p.add_argument("--load-prompt", metavar="FILE", help="continue a saved prompt, with its method and budget")
    p.add_argument("--out", metavar="FILE", help="append each answer to this JSONL file as soon as it is complete")
    p.add_argument("--kv", metavar="NAME", help="KV method (default: full); see --list-kv")
    p.add_argument("--budget", type=number, help="tokens per KV head, or a share of the prompt between 0 and 1")
    p.add_argument("--kv-opt", action="append", default=[], metavar="K=V", help="an option of the method; repeatable")
    p.add_argument("--mem", type=float, help="share of the cache for the device; short for --kv-opt mem=...")
    p.add_argument("--offload", action="store_true", help="keep the rest on the host; short for --kv-opt offload=true")
    p.add_argument("--kv-bits", metavar="N", help="store K and V in 8 or 4 bits; short for --kv-opt bits=...")
    p.add_argument(
        "--speculate",
        type=int,
        metavar="N",
        help="the method only drafts N tokens at a time, and the full "
        "cache verifies them: the full cache's answer, faster, in more memory",
    )
    p.add_argument("--list-kv", action="store_true", help="list the KV methods and exit")
    p.add_argument("--kv-help", metavar="NAME", help="what a KV method does, and its options")
    p.add_argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 256; demo: 64)")
    p.add_argument("--batch", type=int, help="rows decoded together (default: one per prompt, at most 8)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--seed", type=int, help="of sampling (default: a new one each time)")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    p.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the decode step (default: yes, except in the demo)",
    )
    p.add_argument("--product", choices=tune.PRODUCTS, help="the product of a compiled step on a CPU (default: auto)")
    p.add_argument("--verbose", action="store_true", help="print how fast each product reads each size of weight")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    return p


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


def encode(engine: Engine, text: str, args: argparse.Namespace, saved: prefix.Prefix | None) -> list[int]:
    """The ids of a prompt, or of what follows a saved one. Raises ValueError if the engine would reject the prompt."""
    if saved is not None:
        return engine.tokenizer.chat_end(text) if saved.chat else engine.encode(text, bos=False)
    if args.chat:
        form = engine.tokenizer.chat if args.save_prompt is None else engine.tokenizer.chat_begin
        ids = form(text, args.system)
    else:
        ids = engine.encode(text)
    engine.check_length(len(ids))
    return ids


def given_options(args: argparse.Namespace) -> dict:
    """The method's options, from --kv-opt and the flags that are short for it. Raises ValueError if two disagree."""
    given = [option.partition("=") for option in args.kv_opt]
    for name, equals, _ in given:
        if not equals:
            raise ValueError(f"--kv-opt {name}: write it as name=value")
    short = {"mem": args.mem, "offload": args.offload or None, "bits": args.kv_bits}
    options = {}
    for name, value in [(n, v) for n, _, v in given] + [(n, v) for n, v in short.items() if v is not None]:
        asked = [getattr(kv.parse_options(args.kv, {name: v}), name) for v in (options.get(name, value), value)]
        if asked[0] != asked[1]:
            raise ValueError(f"the option {name} is given twice: {options[name]} and {value}")
        options[name] = value
    return options


def answer(args: argparse.Namespace, prompts: dict[str | int, str], checkpoint: Path, out: TextIO) -> None:
    """Loads the engine, generates, and prints the measurements. Answers go to `out`; a single one streams.

    A rejected prompt among several fails alone: after the others are answered, ValueError names it.
    """
    options, saved, ranks = given_options(args), None, processes.join()
    if args.load_prompt is not None:
        saved = prefix.load(args.load_prompt, fingerprint(checkpoint))
        args.kv, args.budget, options = saved.setting.kv, saved.setting.budget, saved.setting.options
        args.speculate = saved.setting.speculate
    Sampling(args.temperature, args.top_k, args.top_p)  # rejects now what generate would reject
    single = len(prompts) == 1
    terminal = processes.same(ranks, sys.stdin.isatty())
    talk = args.chat and terminal and single and args.batch_file is None and args.prompt_file != "-"
    talk = talk and args.save_prompt is None
    demo = args.checkpoint is None
    limit = args.max_new_tokens if args.max_new_tokens is not None else 64 if demo else 256
    with closing(Progress(len(prompts))) as progress:
        engine = Engine.load(
            checkpoint,
            args.kv,
            args.budget,
            options,
            device=args.device,
            dtype=args.dtype or (saved and saved.setting.dtype),
            seed=args.seed,
            batch=args.batch if args.batch is not None else min(len(prompts), 8),
            max_new_tokens=limit * (2 * CHAT_TURNS if talk else 1),
            compile=args.compile if args.compile is not None else not demo,  # the demo ends before a compile pays off
            speculate=args.speculate or 0,
            on_phase=progress,
        )
        if engine.tokenizer is None:
            raise ValueError(f"{engine.no_tokenizer}; prompts here are text")
        ids, failed = {}, {}
        for name, text in prompts.items():
            try:
                ids[name] = encode(engine, text, args, saved)
            except ValueError as error:
                failed[name] = str(error)
        if not ids:
            name, error = next(iter(failed.items()))
            raise ValueError(error if single else f"no prompt can be answered; prompt {name}: {error}")
        names = list(ids)
        if args.save_prompt is not None:
            return save_prompt(args, engine, ids[names[0]])
        if saved is not None and args.max_new_tokens is None and not demo:
            limit = max(1, min(limit, saved.setting.max_new_tokens - max(map(len, ids.values()))))
        with (
            open_to_append(args.out) if args.out and not ranks.rank else nullcontext() as file,
            Conversation(engine, out) if talk and not ranks.rank else nullcontext() as conversation,
        ):

            def write(entry: dict) -> None:
                if file is not None:
                    file.write(json.dumps(entry).encode() + b"\n")
                    file.flush()

            def show(index: int, token: int, text: str) -> None:
                if conversation is not None:
                    conversation.begun()
                if single:
                    print(text, end="", file=out, flush=True)

            def done(index: int, completion: Completion) -> None:
                write({"id": names[index]} | completion.to_dict())
                progress.finished()

            for name, error in failed.items():
                progress.line(f"prompt {name}: {error}")
                write({"id": name, "error": error})
                progress.finished()
            completions = engine.generate(
                list(ids.values()),
                limit,
                args.temperature,
                args.top_k,
                args.top_p,
                args.stop,
                follow_ups=[processes.relay(ranks, conversation and conversation.questions())] if talk else None,
                prefix=saved,
                on_token=show,
                on_done=done,
            )
    if single and not talk:
        print(file=out)
    elif not single:
        for name, completion in zip(names, completions, strict=True):
            print(f"{prompts[name][:60]} -> {completion.answers[0].text}", file=out)
    report = measured(engine, args.kv, args.budget, checkpoint, completions)
    report["completions"] = [{"id": name} | c for name, c in zip(names, report["completions"], strict=True)]
    report["failed"] = [{"id": name, "error": error} for name, error in failed.items()]
    print_report(report)
    for line in tune.lines(engine.stats.products) if args.verbose else ():
        print(f"{'product':14} {line}", file=sys.stderr)
    if not ranks.rank:
        write_json(args.json, report)
    if failed:
        raise ValueError(f"{len(failed)} of {len(prompts)} prompts failed: {', '.join(map(str, failed))}")


def save_prompt(args: argparse.Namespace, engine: Engine, prompt: list[int]) -> None:
    """Prefills a prompt and writes it to the file that --save-prompt names."""
    found, begin = engine.prefix(prompt), time.perf_counter()
    found.chat = args.chat
    found.save(args.save_prompt, engine.weights)
    report = {
        "kv": args.kv,
        "budget": args.budget,
        "options": engine.options,
        "speculate": engine.speculate,
        "prompt_tokens": len(prompt),
        "prefill_s": engine.stats.prefill_s,
        "save_s": time.perf_counter() - begin,
        "saved_bytes": found.bytes,
        "saved_full_bytes": engine.shape.full_bytes() // engine.shape.planned * len(prompt),
        "room": engine.shape.max_new_tokens,
    }
    size, full = (f"{report[name] / 1e6:.1f} MB" for name in ("saved_bytes", "saved_full_bytes"))
    print(f"-- saved {len(prompt)} tokens in {args.save_prompt}: {size}, {report['save_s']:.2f} s", file=sys.stderr)
    print(f"-- the full cache takes {full}; room for {report['room']} more tokens", file=sys.stderr)
    write_json(args.json, report)


def check_saved(args: argparse.Namespace) -> None:
    """Raises ValueError if --save-prompt or --load-prompt conflicts with another argument."""
    check_output(args.save_prompt, "--save-prompt")
    if args.save_prompt is not None and (args.batch_file is not None or args.load_prompt is not None):
        raise ValueError("--save-prompt takes one text: leave out --batch-file and --load-prompt")
    given = args.kv, args.budget, args.mem, args.kv_bits, args.offload or None, args.kv_opt or None, args.speculate
    if args.load_prompt is not None and (args.chat or any(value is not None for value in given)):
        raise ValueError(
            "--load-prompt brings method, budget and format: leave out --kv, --budget, options, --speculate, --chat"
        )
    args.kv = args.kv or "full"


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.list_kv:
        for name, method in kv.METHODS.items():
            print(f"{name:14} {method.help}")
        return
    if args.kv_help is not None:
        print(kv.describe(args.kv_help))
        return
    if args.product is not None:
        os.environ["KV_FAST_PRODUCT"] = args.product
    ranks = processes.join()
    if ranks.count > 1 and (args.save_prompt is not None or args.load_prompt is not None):
        raise ValueError("--save-prompt and --load-prompt need one process: start it with python, not torchrun")
    prompts = processes.first(ranks, lambda: read_prompts(args))
    if not all(prompts.values()):
        raise ValueError("the prompt is empty")
    if args.system is not None and not args.chat:
        raise ValueError("--system is part of a chat format: add --chat")
    if not all(args.stop or []):
        raise ValueError("--stop: the text is empty")
    if args.speculate is not None and args.speculate < 1:
        raise ValueError(f"--speculate must be at least 1, not {args.speculate}")
    check_output(args.json, "--json")
    check_output(args.out, "--out")
    check_saved(args)
    if args.checkpoint is None and args.prompt is args.prompt_file is args.batch_file is None:
        print("...", prompts[1].splitlines()[-1], file=sys.stderr)
    answer(args, prompts, args.checkpoint or NEEDLE, sys.stderr if args.json == "-" else sys.stdout)


if __name__ == "__main__":
    run(main, ranks=True)
