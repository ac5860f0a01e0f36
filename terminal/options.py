"""What generate.py is asked: its options, the prompts, and their ids."""

import argparse
import json
import sys
from pathlib import Path
from reprlib import repr as shortened

import kv as methods
from engine import Engine, Sampling
from runtime import planning, prefix
from runtime.arguments import check_penalty
from runtime.checkpoint import SAMPLING, read_config, read_sampling, unsupported_sampling
from runtime.device import DTYPES
from runtime.load import read_known
from terminal.batch import parse_batch
from terminal.cli import Parser, check_output, number, read_text
from terminal.conversation import first_question
from text.tokenizer import load_tokenizer

NEEDLE = Path(__file__).parents[1] / "needle"
FILES = ("checkpoint", "load_prompt")


def parser(about: str) -> argparse.ArgumentParser:
    p = Parser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    out = "append each answer to this JSONL file as soon as it is complete; a batch skips the ids that it answers"
    add("--out", metavar="FILE", help=out)
    add("--kv", metavar="NAME", help="KV method (default: full); see --list-kv")
    add("--budget", type=number, help="tokens per KV head, or a share of the prompt between 0 and 1")
    add("--kv-opt", action="append", metavar="K=V", help="an option of the method; repeatable")
    add("--mem", dest="kv_opt", action="append", type="mem={}".format, help="short for --kv-opt mem=...")
    short = {"dest": "kv_opt", "help": "short for --kv-opt offload=true: keep the rest on the host"}
    add("--offload", action="append_const", const="offload=true", **short)
    bits = "short for --kv-opt bits=...: store K and V in 8 or 4 bits (kivi, tailorkv: also fewer)"
    add("--kv-bits", dest="kv_opt", action="append", type="bits={}".format, metavar="N", help=bits)
    drafts = "the method drafts N tokens at a time, and the full cache verifies them (in 16 bits but for near ties)"
    add("--speculate", type=int, metavar="N", help=drafts)
    less = "read prompts and questions at most N tokens at a time, in less memory; after each, evicting methods evict"
    add("--chunk", type=int, metavar="N", help=less)
    add("--list-kv", action="store_true", help="list the KV methods and exit")
    add("--kv-help", metavar="NAME", help="what a KV method does, and its options")
    add("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer (default: 256; demo: 64)")
    add("--max-prompt", type=int, metavar="N", help="allocate caches for prompts of N tokens (default: the longest)")
    add("--batch", type=int, help="rows decoded together (default: one per prompt, at most 8)")
    add("--temperature", type=float, help="0 (default) is greedy")
    add("--top-k", type=int, help="0 or -1 (default) keeps all tokens")
    add("--top-p", type=float)
    add("--min-p", type=float, help="cuts tokens less probable than this times the most probable one")
    add("--repetition-penalty", type=float, help="above 1, tokens of the prompt and the answer become less likely")
    recommended = "sample as transformers does by the checkpoint's generation_config.json, but for the flags above"
    add("--generation-config", action="store_true", help=recommended)
    add("--seed", type=int, help="of sampling (default: a new one each time)")
    add("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    compiles = "compile the decode step (default: for more than 1,000 tokens of answers, or if that was done before)"
    add("--compile", action=argparse.BooleanOptionalAction, help=compiles)
    verbose = "print how fast each product reads each size of weight, and why compiled code is not kept, if it is not"
    add("--verbose", action="store_true", help=verbose)
    add("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    return p


def describe_methods(args: argparse.Namespace) -> bool:
    """Prints what --list-kv or --kv-help asks for; whether one of them was given."""
    if args.list_kv:
        for name, method in methods.METHODS.items():
            print(f"{name:14} {method.help}")
    elif args.kv_help is not None:
        print(methods.describe(args.kv_help))
    return args.list_kv or args.kv_help is not None


def read_prompts(args: argparse.Namespace, ranks: int) -> dict[str | int, str]:
    """The prompts by id; a line without an id gets its line number. Without any, --chat asks for one at a terminal;
    {} if the conversation ends there."""
    if args.batch_file is not None:
        name = "stdin" if args.batch_file == "-" else args.batch_file
        return parse_batch(name, read_text(args.batch_file))
    if args.prompt_file is not None:
        return {1: read_text(args.prompt_file)}
    if args.prompt is not None:
        return {1: read_text("-") if args.prompt == "-" else args.prompt}
    if args.checkpoint is not None:
        if args.chat and not args.load_prompt and not args.save_prompt and sys.stdin.isatty():
            args.kv = args.kv or "full"
            known = read_known(args.checkpoint, args.device, args.dtype)
            # What is refused, is refused before one types.
            planning.check(known, args.kv, args.budget, given_options(args))
            load_tokenizer(args.checkpoint).chat("x", args.system)
            question = first_question(ranks == 1)
            return {} if question is None else {1: question}
        read_config(args.checkpoint)
        raise ValueError(
            "nothing to answer: give --prompt, --prompt-file or --batch-file"
            + "; a conversation needs a terminal" * args.chat
        )
    demo = (NEEDLE / "demo.txt").read_text()
    print("...", demo.splitlines()[-1], file=sys.stderr)
    return {1: demo}


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
    if args.chunk is not None and args.chunk < 1:
        raise ValueError(f"--chunk must be at least 1, not {args.chunk}")
    for flag in ("--json", "--out", "--save-prompt"):
        check_output(getattr(args, flag[2:].replace("-", "_")), flag)
    if args.out and args.batch_file and Path(args.out).resolve() == Path(args.batch_file).resolve():
        raise ValueError("--out names the --batch-file itself: name another file")
    saves, loads = args.save_prompt is not None, args.load_prompt is not None
    if ranks > 1 and (saves or loads):
        raise ValueError("--save-prompt and --load-prompt need one process: start it with python, not torchrun")
    if saves and (args.batch_file is not None or loads):
        raise ValueError("--save-prompt takes one text: leave out --batch-file and --load-prompt")
    if saves and args.out is not None:
        raise ValueError("--save-prompt answers nothing: leave out --out")
    brought = {"--kv": args.kv, "--budget": args.budget, "options": args.kv_opt, "--speculate": args.speculate}
    brought |= {"--max-prompt": args.max_prompt, "--chat": args.chat or None}
    if loads and (given := [flag for flag, value in brought.items() if value is not None]):
        raise ValueError(f"--load-prompt brings method, sizes and format: leave out {', '.join(given)}")


def asked(args: argparse.Namespace) -> str:
    """The flags that decide an answer, so that one is not taken for that of other flags."""
    names = "kv budget kv_opt speculate chunk chat system stop max_new_tokens generation_config".split()
    given = {name: getattr(args, name) for name in (*names, *SAMPLING)}
    files = {name: getattr(args, name) and str(Path(getattr(args, name)).resolve()) for name in FILES}
    return json.dumps(given | files)


def given_sampling(args: argparse.Namespace, folder: Path) -> dict:
    """Sampling's arguments of `Engine.generate`, `max_new_tokens` and `stop`.

    Notes what transformers takes from the checkpoint beyond.

    Raises ValueError for arguments that cannot be met.
    """
    given = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    decides = args.generation_config or args.temperature == 0  # else the file alone says what is recommended
    how, notes = given, []
    try:
        used = read_sampling(folder, args.temperature if decides else None) | given
        if args.generation_config:
            how = used
        elif beyond := {name: value for name, value in used.items() if name not in given}:
            notes.append(f"generation_config.json recommends {listed(beyond)}; --generation-config applies it")
        if ignored := unsupported_sampling(folder, used.get("temperature", 0) > 0):
            notes.append(f"generation_config.json also sets {listed(ignored)}: not supported, and ignored")
    except ValueError as error:
        if args.generation_config:
            raise
        notes = [str(error)]
    if args.generation_config and not (folder / "generation_config.json").exists():
        notes.append(f"{folder} has no generation_config.json, so --generation-config changes nothing")
    check_penalty(Sampling(**how).repetition_penalty, args.speculate)
    for note in notes if args.save_prompt is None else ():
        print("note:", note, file=sys.stderr)
    limit = (
        args.max_new_tokens if args.max_new_tokens is not None else 64 if args.checkpoint is None else 256
    )  # 64: demo
    return how | {"max_new_tokens": limit, "stop": args.stop}


def listed(values: dict[str, object]) -> str:
    return ", ".join(f"{name} {shortened(value)}" for name, value in values.items())


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


def encode(
    engine: Engine, args: argparse.Namespace, prompts: dict[str | int, str], saved: prefix.Header | None
) -> tuple[dict[str | int, list[int]], dict[str | int, str]]:
    """The ids of each prompt, or of what follows a saved one, and the errors of those that the engine rejects."""
    ids, failed, chat = {}, {}, engine.tokenizer.chat if args.save_prompt is None else engine.tokenizer.chat_begin
    for name, text in prompts.items():
        try:
            if saved is not None:
                ids[name] = engine.tokenizer.chat_end(text) if saved.chat else engine.encode(text, bos=False)
            else:
                prompt = chat(text, args.system) if args.chat else engine.encode(text)
                planning.check_length(engine, len(prompt))
                ids[name] = prompt
        except ValueError as error:
            failed[name] = str(error)
    for name in sorted(ids, key=lambda name: -len(ids[name])) if saved is None else ():
        try:
            planning.check_caches(engine, len(ids[name]))
            break  # shorter prompts need no more
        except ValueError as error:
            failed[name] = str(error)
            del ids[name]
    return ids, failed
