"""Answers a prompt: python generate.py --checkpoint DIR --prompt "..." --kv streaming --budget 256

Without arguments it answers a question about the long text in needle/, with the checkpoint there.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

import kv
from cli import check_output, number, read_text, run, write_json
from device import DTYPES, resident_bytes
from engine import Engine

__all__ = ["Engine"]
NEEDLE = Path(__file__).parent / "needle"
CHAT_TURNS = 16  # a conversation's caches have room for that many answers and questions of the same length


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, metavar="DIR", help="a folder made by convert_hf_checkpoint.py")
    what = p.add_argument_group("what to answer").add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT")
    what.add_argument("--prompt-file", metavar="FILE", help="the prompt is this file; - for stdin")
    what.add_argument("--batch-file", metavar="FILE", help="one prompt a line; - for stdin")
    p.add_argument("--chat", action="store_true", help="use the checkpoint's chat format; on a terminal, keep asking")
    p.add_argument("--kv", default="full", metavar="NAME", help="KV method (default: full); see --list-kv")
    p.add_argument("--budget", type=number, help="tokens a KV head, or a share of the prompt between 0 and 1")
    p.add_argument("--kv-opt", action="append", default=[], metavar="K=V", help="an option of the method; repeatable")
    p.add_argument("--mem", type=float, help="share of the cache for the device; short for --kv-opt mem=...")
    p.add_argument("--offload", action="store_true", help="keep the rest on the host; short for --kv-opt offload=true")
    p.add_argument("--kv-bits", metavar="N", help="store K and V in 8 or 4 bits; short for --kv-opt bits=...")
    p.add_argument("--list-kv", action="store_true", help="list the KV methods and exit")
    p.add_argument("--kv-help", metavar="NAME", help="what a KV method does, and its options")
    p.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens an answer may have (default: 256)")
    p.add_argument("--batch", type=int, help="rows decoded together (default: the prompts, at most 8)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--seed", type=int, help="of sampling (default: a new one each time)")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the decode step (default: yes)")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    return p


def read_prompts(args: argparse.Namespace) -> list[str]:
    if args.batch_file is not None:
        lines = (line.removesuffix("\r") for line in read_text(args.batch_file).split("\n"))
        prompts = [line for line in lines if line.strip()]
        if not prompts:
            raise ValueError(f"{args.batch_file} holds no prompt")
        return prompts
    if args.prompt_file is not None:
        return [read_text(args.prompt_file)]
    if args.prompt is not None:
        return [args.prompt]
    if args.checkpoint is not None:
        raise ValueError("nothing to answer: give --prompt, --prompt-file or --batch-file")
    return [(NEEDLE / "demo.txt").read_text()]


def questions(engine: Engine, out: TextIO) -> Iterator[list[int]]:
    """A chat's next user turns, as long as someone at a terminal types them."""
    while True:
        print(file=out, flush=True)
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line.strip():
            return
        yield engine.tokenizer.chat_next(line.strip())


def answer(args: argparse.Namespace, prompts: list[str], checkpoint: Path, out: TextIO) -> None:
    """Loads the engine, generates, and prints what was measured; text streams to `out`."""
    options = {}
    for option in args.kv_opt:
        name, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"--kv-opt {option}: write it as name=value")
        options[name] = value
    options |= {} if args.mem is None else {"mem": args.mem}
    options |= {"offload": True} if args.offload else {}
    options |= {} if args.kv_bits is None else {"bits": args.kv_bits}
    talk = args.chat and sys.stdin.isatty() and len(prompts) == 1 and args.prompt_file != "-"
    demo = args.checkpoint is None
    limit = args.max_new_tokens if args.max_new_tokens is not None else 64 if demo else 256
    engine = Engine.load(
        checkpoint, args.kv, args.budget, options, device=args.device, dtype=args.dtype, seed=args.seed,
        batch=args.batch if args.batch is not None else min(len(prompts), 8),
        max_new_tokens=limit * (2 * CHAT_TURNS if talk else 1),
        compile=args.compile if args.compile is not None else not demo,  # the demo is over before a compile would pay
    )  # fmt: skip
    if engine.tokenizer is None:
        raise ValueError(f"{engine.no_tokenizer}; prompts here are text")
    single = len(prompts) == 1
    with tqdm(total=len(prompts), unit="prompt", disable=single) as bar:
        seen = set()

        def show(index: int, token: int, text: str) -> None:
            if single:
                print(text, end="", file=out, flush=True)
            elif index not in seen:
                seen.add(index)
                bar.update()

        completions = engine.generate(
            [engine.tokenizer.chat(p) for p in prompts] if args.chat else prompts,
            max_new_tokens=limit, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
            follow_ups=[questions(engine, out)] if talk else None, on_token=show,
        )  # fmt: skip
    if single:
        print(file=out)
    else:
        for prompt, completion in zip(prompts, completions, strict=True):
            print(f"{prompt[:60]} -> {completion.answers[0].text}", file=out)
    report = measured(engine, args, checkpoint, completions)
    print_report(report)
    write_json(args.json, report)


def measured(engine: Engine, args: argparse.Namespace, checkpoint: Path, completions: list) -> dict:
    """The JSON object: what was generated, how long it took, and what the cache takes."""
    stats, (device_bytes, host_bytes, full_bytes) = engine.stats, engine.kv_bytes()
    wanted, fetched = engine.fetched()
    cuda = engine.device.type == "cuda"
    return {
        "kv": args.kv,
        "budget": args.budget,
        "options": engine.options,
        "checkpoint": str(checkpoint),
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "seed": engine.seed,
        "batch": engine.batch,
        "compile_s": stats.compile_s,
        "compiles": stats.compiles,
        "prefill_s": stats.prefill_s,
        "decode_ms_per_token": 1e3 * stats.decode_s / stats.steps if stats.steps else None,
        "tokens_per_s": stats.new_tokens / stats.decode_s if stats.steps else None,
        "kv_device_bytes": device_bytes,
        "kv_host_bytes": host_bytes,
        "kv_full_bytes": full_bytes,
        "fetch_hit_rate": 1 - fetched / wanted if wanted else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else resident_bytes("VmHWM"),
        "completions": [completion.to_dict() for completion in completions],
    }


def print_report(r: dict) -> None:
    def mb(n: int) -> str:
        return f"{n / 1e6:.1f} MB"

    answers = r["completions"]
    lines = [
        ("prompt tokens", ", ".join(str(c["prompt_tokens"]) for c in answers[:8]) + ", ..." * (len(answers) > 8)),
        ("new tokens", str(sum(c["new_tokens"] for c in answers))),
        ("compile", f"{r['compile_s']:.1f} s, {r['compiles']} compiled") if r["compiles"] else ("compile", "off"),
        ("prefill", f"{r['prefill_s']:.2f} s"),
        ("decode", f"{r['decode_ms_per_token']:.2f} ms/token, {r['tokens_per_s']:.1f} tokens/s")
        if r["tokens_per_s"]
        else ("decode", "no steps: the prefill gave the whole answer"),
        ("KV cache", f"{mb(r['kv_device_bytes'])} on the device, {mb(r['kv_host_bytes'])} on the host"),
        ("full cache", f"{mb(r['kv_full_bytes'])} for the same plan"),
        ("peak memory", mb(r["peak_bytes"])),
    ]
    if r["fetch_hit_rate"]:
        lines.insert(-1, ("fetches", f"{100 * r['fetch_hit_rate']:.1f}% of the rows were on the device already"))
    print(f"-- {r['kv']}, {r['dtype']}, {r['device']}", file=sys.stderr)
    for name, value in lines:
        print(f"{name:14} {value}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.list_kv:
        for name, method in kv.METHODS.items():
            print(f"{name:14} {method.help}")
        return
    if args.kv_help is not None:
        print(kv.describe(args.kv_help))
        return
    prompts = read_prompts(args)
    if not all(prompts):
        raise ValueError("the prompt is empty")
    check_output(args.json, "--json")
    if args.checkpoint is None and args.prompt is args.prompt_file is args.batch_file is None:
        print("...", prompts[0].splitlines()[-1], file=sys.stderr)
    answer(args, prompts, args.checkpoint or NEEDLE, sys.stderr if args.json == "-" else sys.stdout)


if __name__ == "__main__":
    run(main)
