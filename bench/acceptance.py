"""How many drafted tokens the full cache accepts: python -m bench.acceptance --checkpoint DIR --kv quest,rocketkv

Each method drafts for two kinds of answers about texts of --length tokens: look-ups (RULER's niah_multikey_1) and
--tokens more tokens of free text. The table shows the drafted tokens accepted per round, the bytes of K and V that a
drafting step reads, and how many answers equal the full cache's; in 16 bits some differ, because a product of several
rows rounds differently from one of a single row.
"""

import runtime.startup  # noqa: F401

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from bench import tables
from engine import Engine
from runtime.device import DTYPES
from tasks import Recipe, shipped_haystack
from tasks.registry import TASKS
from terminal.cli import Choice, Parser, check_output, choices, number, numbers, read_text, run, table, write_json

LOOKUP = "niah_multikey_1"


def parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="folder of a converted checkpoint")
    p.add_argument("--kv", required=True, help="comma-separated methods; with options: name:option=value:...")
    p.add_argument("--budget", default="256", help="tokens per KV head, comma-separated (default: 256)")
    p.add_argument("--speculate", default="4", metavar="N,..", help="tokens drafted per round (default: 4)")
    p.add_argument("--length", type=int, default=3584, help="tokens of a text (default: 3584)")
    p.add_argument("--tokens", type=int, default=256, help="tokens of free text (default: 256)")
    p.add_argument("--samples", type=int, default=8, help="texts of each kind (default: 8)")
    p.add_argument("--text", metavar="FILE", help="the free text's beginning (default: the haystack)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    return p


def prompts(engine: Engine, args: argparse.Namespace) -> dict[str, tuple[list[list[int]], int]]:
    """Prompts of --length tokens or fewer, and the most tokens of an answer, by kind."""
    ids = engine.encode(read_text(args.text) if args.text else shipped_haystack())
    ids = engine.tokenizer.inner(ids)
    starts = range(0, len(ids) - args.length, args.length)[: args.samples]
    if not starts:
        raise ValueError(f"the text has {len(ids)} tokens; shorten --length")
    (bos, _), task = engine.tokenizer.around, TASKS[LOOKUP]
    recipe = Recipe(args.length + task.max_new_tokens, engine.encode, engine.tokenizer.decode)
    lookups = [engine.encode(task.sample(recipe, i).prompt) for i in range(args.samples)]
    free = [(bos + ids[i : i + args.length])[: args.length] for i in starts]
    return {"look-ups": (lookups, task.max_new_tokens), "free text": (free, args.tokens)}


def measure(args: argparse.Namespace, engine: Engine, kinds: dict, cells: list[tuple[Choice, int]]) -> Iterator[dict]:
    """A row of the JSON object for each draft; the first cell is the full cache alone."""
    full = {}
    for method, n in cells:
        row = {"kv": method.kv, "budget": method.budget, "options": method.options, "speculate": n, "kinds": {}}
        for kind, (texts, limit) in kinds.items():
            longest = max(map(len, texts))
            engine.use(method.kv, method.budget, method.options, args.batch, longest, limit, n)
            answers = [a.tokens for a in engine.generate(texts, limit, temperature=args.temperature)]
            full.setdefault(kind, answers)
            same = sum(a == b for a, b in zip(answers, full[kind], strict=True))
            row["kinds"][kind] = {"accepted": engine.stats.accepted, "same": same, "of": len(texts)}
            row["draft_bytes"] = sum(sum(getattr(layer, "draft", layer).step_bytes(longest)) for layer in engine.layers)
            row["full_bytes"] = engine.plan.full_bytes() // engine.plan.planned // args.batch * longest
        if n:
            yield row


def line(row: dict) -> dict[str, object]:
    """A line of the table."""
    kinds = row["kinds"]
    accepted = {f"accepted, {kind}": tables.cell(kinds[kind]["accepted"]) for kind in kinds}
    return {"drafts": tables.label(row | {"speculate": 0}), "a round": row["speculate"], **accepted} | {
        "draft reads": f"{row['draft_bytes'] / 1e6:.2f} MB",
        "of full": f"{100 * row['draft_bytes'] / row['full_bytes']:.1f}%",
        "same answers": f"{sum(x['same'] for x in kinds.values())} of {sum(x['of'] for x in kinds.values())}",
    }


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_output(args.json, "--json")
    for flag in ("length", "tokens", "samples", "batch"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    counts = numbers(args.speculate, "--speculate", int)
    chosen = choices(args.kv, numbers(args.budget, "--budget", number))
    engine = Engine.load(args.checkpoint, device=args.device, dtype=args.dtype, compile=False, seed=0)
    if engine.tokenizer is None:
        raise ValueError(engine.no_tokenizer)
    kinds = prompts(engine, args)
    cells = [(Choice("full", None, {}), 0), *itertools.product(chosen, counts)]
    for method, n in cells:  # rejects now what cannot draft
        engine.use(method.kv, method.budget, method.options, args.batch, None, args.tokens, n)
    rows = []
    try:
        for row in tqdm(measure(args, engine, kinds, cells), total=len(cells) - 1, unit="draft", disable=None):
            rows.append(row)
    finally:  # whatever was measured is shown
        if rows:
            print(table(list(map(line, rows))), file=sys.stderr if args.json == "-" else sys.stdout)
        write_json(args.json, {"args": {k: str(v) for k, v in vars(args).items()}, "rows": rows})


if __name__ == "__main__":
    run(main)
