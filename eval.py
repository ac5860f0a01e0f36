"""Measures accuracy: python eval.py --checkpoint DIR --tasks niah_multikey_1,vt --length 4096 --kv full,streaming
--budget 256,1024 --samples 50 --json out.json --plot out.png

Every method answers the same samples. The table shows scores and cache bytes; --json has every answer. With --json FILE
or --progress FILE, a run that was stopped resumes where it was.
"""

import runtime.startup  # noqa: F401

import argparse
import hashlib
import itertools
import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

from engine import Engine
from kv import BudgetTooSmall
from kv.parts.ranks import ALONE, Ranks
from runtime import parallel, planning
from runtime.arguments import check_length
from runtime.checkpoint import COMPANIONS
from runtime.device import DTYPES
from tasks import Recipe, shipped_haystack, texts
from tasks.answers import Job, Journal, answer, digest, force, forced, parts, summary, turns
from tasks.prefill_once import prefill_once
from tasks.registry import GROUPS, TASKS
from terminal.cli import (
    Choice,
    Parser,
    check_output,
    choices,
    number,
    numbers,
    profile_lines,
    run,
    table,
    whole_text,
    write_json,
)

ROUND = 128  # a job's new tokens are rounded up to a multiple of this, so that jobs can share caches
JOINTS = 4  # allowance in tokens: texts encoded separately may take more tokens than when joined
ROOT = Path(__file__).parent
ROOMS = ("kv", "runtime", "tasks", "text")  # their code can affect an answer
OTHER_TOOLS = {"calibrate.py", "convert_hf_checkpoint.py", "generate.py", "quantize.py", "setup.py"}  # theirs cannot


def parser() -> argparse.ArgumentParser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, yes = p.add_argument, {"action": "store_true"}
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="folder of a converted checkpoint")
    groups = ", ".join(f"{name} ({len(tasks)})" for name, tasks in GROUPS.items())
    add("--tasks", default="ruler", help=f"comma-separated names or groups: {groups}; see --list-tasks")
    add("--list-tasks", **yes, help="list the tasks and exit")
    add("--length", default="4096", help="tokens of prompt plus answer, comma-separated (default: 4096)")
    add("--samples", type=int, default=50, help="samples per task and length (default: 50)")
    add("--questions", type=int, default=1, help="the most questions asked about a text (default: 1)")
    add("--blind", **yes, help="prefill the text alone and feed every question afterwards")
    add("--fork", **yes, help="like --blind, but a question is asked of a copy of the text's cache and sees no other")
    add("--stepwise", **yes, help="feed questions one token a step, through the method's own attention")
    add("--chat", **yes, help="apply the checkpoint's chat template; each later question is a turn of its own")
    add("--kv", default="full", help="comma-separated methods; with options: name:option=value:...")
    add("--budget", default="", help="tokens per KV head, or shares of the prompt; comma-separated")
    drafts = "the methods draft N tokens at a time for the full cache to verify; the answers are then the full cache's"
    add("--speculate", type=int, default=0, metavar="N", help=drafts)
    add("--chunk", type=int, metavar="N", help="read prompts and questions at most N tokens at a time: less memory")
    add("--haystack", metavar="FILE", help="hide needles in this text")
    forced = "the texts for perplexity and fidelity, comma-separated; --samples of each (default: the haystack)"
    add("--text", metavar="FILE,..", help=forced)
    add("--forced", type=int, default=128, metavar="N", help="tokens of those that a sample decodes (default: 128)")
    add("--data", type=Path, metavar="DIR", help="folder with the files of published datasets")
    add("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    add("--batch", type=int, default=1, help="rows decoded together (default: 1)")
    ranks = "under torchrun: the processes share a model, or each has a whole one and answers its share of samples"
    add("--ranks", choices=("model", "data"), default="model", help=f"{ranks} (default: model)")
    add("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, help="default: the checkpoint's")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile decode steps (default: on a GPU)")
    add("--progress", metavar="FILE", help="resume from this file and add to it (default: beside --json)")
    add("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    add("--plot", metavar="FILE", help="draw accuracy over budget and bytes; needle: by depth; fidelity: by position")
    return p


# What to run


def chosen_tasks(text: str) -> list[str]:
    names = [name for part in text.split(",") if part for name in GROUPS.get(part, [part])]
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}; there are: {', '.join([*GROUPS, *TASKS])}")
    if not names:
        raise ValueError("--tasks names no task")
    return list(dict.fromkeys(names))


def prepare(
    args: argparse.Namespace,
    haystack: str | None,
    forced_texts: list[str],
    engine: Engine,
    tasks: list[str],
    lengths: list[int],
) -> list[Job]:
    """Every task's samples at every length; `haystack` and `forced_texts` are those of --haystack and --text, if given.

    A sample that cannot be made, or is too long, fails alone. Raises ValueError or FileNotFoundError if all do.
    """
    jobs = []
    for task, length in tqdm([(t, n) for n in lengths for t in tasks], unit="task", desc="samples", leave=False):
        if length > engine.config.max_length:
            raise ValueError(f"--length {length}: the model's context is {engine.config.max_length}")
        graded = TASKS[task]
        if graded is None:
            items = []
            for text in forced_texts or [haystack or shipped_haystack()]:
                ids = engine.encode(text)
                ids, (bos, _) = engine.tokenizer.inner(ids), engine.tokenizer.around
                items += texts.excerpts(ids, length, args.forced, args.samples, bos)
            jobs.append(Job(task, length, None, items, args.forced))
            continue
        around = len(engine.tokenizer.chat("x")) - len(engine.encode("x")) + JOINTS if args.chat else 0
        how = args.seed, args.questions, haystack, args.data
        recipe = Recipe(length - around, engine.encode, engine.tokenizer.decode, *how)
        try:
            count = args.samples if graded.size is None else min(args.samples, graded.size(recipe))
        except ValueError as error:
            raise ValueError(f"{task}: {error}") from None
        job, new = Job(task, length, graded, [], 0, args.chat), 0
        for i in range(count):
            try:
                sample = graded.sample(recipe, i)
                prompt, later = turns(engine, sample, args.chat, args.blind)
                check_length(len(engine.encode(prompt)), job.prompt, f"the room for it in a length of {length}")
                fed = sum(len(engine.encode(turn, bos=False)) for turn in later)
            except ValueError as error:
                job.failed[i] = str(error)
                continue
            except KeyError as error:
                raise ValueError(f"{task}: a record of its file has no {error}; fetch the file again") from None
            job.items.append(sample)
            new = max(new, fed + JOINTS + graded.max_new_tokens * len(sample.questions))
        if not job.items:
            raise ValueError(f"{task}: {next(iter(job.failed.values()), 'its file holds no sample')}")
        job.new = -(-new // ROUND) * ROUND
        jobs.append(job)
    return jobs


# Running


def code(root: Path = ROOT) -> str:
    """A hash of the code that asks, answers and scores. A new file counts unless it is a tool of OTHER_TOOLS."""
    files = [file for file in root.glob("*.py") if file.name not in OTHER_TOOLS]
    files += [file for room in ROOMS for file in (root / room).rglob("*.py")]
    return digest([(str(file.relative_to(root)), file.read_text(encoding="utf-8")) for file in sorted(files)])


def conditions(args: argparse.Namespace, engine: Engine) -> dict:
    """What every answer depends on besides its method and sample."""
    files = [args.checkpoint / name for name in COMPANIONS if name != "kv_profile.json"]
    return {
        "weights": engine.fingerprint,
        "code": code(),
        "profile": digest(engine.profile),
        "tokenizer": [hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files if file.is_file()],
        "dtype": str(engine.dtype).removeprefix("torch."),
        "eos": sorted(engine.eos),
        **{name: getattr(args, name) for name in ("blind", "chat", "stepwise", "fork", "speculate", "chunk")},
        **({"ranks": engine.ranks.count} if engine.ranks.count > 1 else {}),
    }


def evaluate(
    args: argparse.Namespace, engine: Engine, jobs: list[Job], chosen: list[Choice], journal: Journal, ranks: Ranks
) -> tuple[list[dict], list[dict]]:
    """Runs the jobs; returns (rows, samples) of the JSON object. `ranks` share the samples.

    Raises ValueError, before the first sample, for arguments that a method cannot have.
    """
    rows, samples, common = [], [], conditions(args, engine)
    reference: dict[tuple[int, int], torch.Tensor] = {}  # for fidelity: the full cache's logits, on the host
    ordered = sorted(jobs, key=lambda job: (job.length, job.prompt, job.new))  # groups jobs with equal caches
    cells = [(method, job, wanted(args, method, job)) for method, job in itertools.product(chosen, ordered)]
    for *_, caches in cells:
        with suppress(BudgetTooSmall):
            planning.check(engine, *caches)
    with tqdm(total=len(chosen) * sum(len(job.items) for job in jobs), unit="sample") as bar:
        for method, job, caches in cells:
            bar.set_description(f"{method.label} {job.task} {job.length}")
            about = {"kv": method.kv, "budget": method.budget, "options": method.options}
            about |= {"task": job.task, "length": job.length}
            own = common | about | {"new": job.new}  # which depends on the other samples
            named = zip(job.indices, job.digests, strict=True)
            keys = [json.dumps(own | {"index": i, "sample": s}, sort_keys=True) for i, s in named]
            about["chat"] = job.chat
            missing = [i for i, key in enumerate(keys) if key not in journal.results]
            mine = missing[ranks.rank :: ranks.count]
            unknown = [i for i in mine if (job.length, i) not in reference] if job.task == "fidelity" else []
            if unknown:
                engine.use("full", batch=args.batch, max_prompt=job.prompt, room=job.new, chunk=args.chunk or 0)
            for part in parts(unknown, args.batch):
                reference |= zip(((job.length, i) for i in part), forced(engine, job, part), strict=True)
            try:
                bytes_ = use(engine, caches)
            except BudgetTooSmall as error:  # the cell has no score, and the run continues
                nothing = {"n": 0, "score": None, "first": None, "later": None}
                rows.append(about | nothing | {"why": str(error), "minimum": error.minimum})
                bar.update(len(job.items))
                continue
            bar.update(len(job.items) - len(missing))
            before, counts, new = engine.layers.fetched(), Counter(), {}
            for part in parts(mine, args.batch):
                if job.graded:
                    results = answer(engine, job, [job.items[i] for i in part], args, counts)
                else:
                    results = force(engine, job, part, reference)
                for i, result in zip(part, results, strict=True):
                    journal.add(keys[i], result)
                    new[keys[i]] = result
                bar.update(len(part))
            requested, transferred = engine.layers.fetched()
            counts.update(wanted=requested - before[0], fetched=transferred - before[1])
            every = Counter()
            for theirs, their_counts in parallel.everyone(ranks, (new, counts)):
                journal.results |= theirs
                every.update(their_counts)
            results = [journal.results[key] for key in keys]
            rate = {"fetch_hit_rate": 1 - every["fetched"] / every["wanted"] if every["wanted"] else None}
            if engine.speculate:
                rate["accepted_per_round"] = every["decoded"] / every["fed"] - 1 if every["fed"] else None
            rows.append(about | summary(job, results) | bytes_ | rate)
            samples += [about | {"index": i} | result for i, result in zip(job.indices, results, strict=True)]
    return rows, samples


def wanted(args: argparse.Namespace, method: Choice, job: Job) -> tuple:
    """The arguments of `Engine.use` for a job."""
    speculate = 0 if method.kv == "full" and not method.options else args.speculate  # the others must give its answers
    sizes = args.batch + args.fork, job.prompt, job.new, speculate, args.chunk or 0
    return method.kv, method.budget, method.options, *sizes


def use(engine: Engine, caches: tuple) -> dict:
    """Gives the engine caches for the arguments of `Engine.use`, unless it has them. Returns the options that the
    profile set, the caches' bytes per row, and the bytes per row that a step reads."""
    has = (engine.method, engine.budget, engine.options, engine.batch, engine.max_prompt, engine.room)
    if caches != (*has, engine.speculate, engine.chunk) or engine.plan is None:  # no plan: the last caches were refused
        engine.use(*caches)
    batch, prompt = caches[3:5]
    for row in range(batch):  # what the last job's prompts hold changes what a step reads
        engine.layers.reset(row)
    known = planning.figures(engine, prompt + 1)
    device, host = known["kv_device_bytes"], known["kv_host_bytes"]
    return {
        "profile": known["profile"],
        "kv_device_bytes": device // batch,
        "kv_host_bytes": host // batch,
        "share_of_full": (device + host) / known["kv_full_bytes"],
        "step_device_bytes": known["step_device_bytes"],
        "step_host_bytes": known["step_host_bytes"],
    }


def accuracy_table(rows: list[dict], jobs: list[Job], chosen: list[Choice]) -> str:
    """One line per method, one column per task; cells are `first / later` where a task has later questions."""
    lengths, graded = {job.length for job in jobs}, [job for job in jobs if job.graded]
    lines = []
    for method in chosen:
        own = [r for r in rows if (r["kv"], r["budget"], r["options"]) == (method.kv, method.budget, method.options)]
        by_job = {(r["task"], r["length"]): r for r in own}
        line = {"method": method.label}
        line |= {j.task + f"@{j.length}" * (len(lengths) > 1): cell(by_job[j.task, j.length]) for j in jobs}
        if len(graded) > 1:
            scores = [by_job[job.task, job.length]["score"] for job in graded]
            line["average"] = "-" if None in scores else f"{fmean(scores):.1f}"
        sizes = [(r["kv_device_bytes"] + r["kv_host_bytes"], r["share_of_full"]) for r in own if r["score"] is not None]
        most, share = max(sizes, key=lambda pair: pair[0] / pair[1], default=(None, None))  # where full is largest
        line |= {"KV bytes": "-" if most is None else f"{most / 1e6:.2f} MB"}
        lines.append(line | {"of full": "-" if most is None else f"{100 * share:.1f}%"})
    chat = ", ".join(dict.fromkeys(job.task for job in jobs if job.chat))
    return table(lines) + f"\nin the checkpoint's chat template: {chat}" * bool(chat)


def cell(row: dict) -> str:
    if row["score"] is None:
        return f"min {row['minimum']}"
    if row["task"] == "fidelity":
        return f"{row['score']:.1f}% kl {row['kl']:.4f}"
    later = "" if row["later"] is None else f" / {row['later']:.1f}"
    return f"{row['score'] if row['first'] is None else row['first']:.1f}{later}"


def main(argv: list[str] | None = None) -> None:
    if "--list-tasks" in (sys.argv[1:] if argv is None else argv):
        return print("\n".join(f"{group}: {', '.join(names)}" for group, names in GROUPS.items()))
    args = parser().parse_args(argv)
    if args.progress is None and args.json not in (None, "-"):
        args.progress = f"{args.json}.progress.jsonl"
    for flag in ("json", "plot", "progress"):
        check_output(getattr(args, flag), f"--{flag}")
    if args.speculate < 0:
        raise ValueError(f"--speculate must be at least 0, not {args.speculate}")
    for flag in ("samples", "questions", "batch", "forced", "chunk"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    if args.fork and args.chat:
        raise ValueError("--fork and --chat: a chat's later questions are turns of one conversation; leave out one")
    args.blind |= args.fork
    tasks, lengths = chosen_tasks(args.tasks), numbers(args.length, "--length", int)
    chosen = choices(args.kv, numbers(args.budget, "--budget", number) if args.budget else [])
    haystack = None if args.haystack is None else whole_text("--haystack", args.haystack)
    forced_texts = [] if args.text is None else [whole_text("--text", file) for file in args.text.split(",")]
    ranks, whole = parallel.join(), args.ranks == "data"  # whether each rank has a whole model
    how = {"device": args.device, "dtype": args.dtype, "room": 1, "seed": 0, "parallel": not whole}
    engine = Engine.load(args.checkpoint, **how)
    prefill_once(engine)
    engine.compile = args.compile if args.compile is not None else engine.device.type == "cuda"
    if engine.tokenizer is None:
        raise ValueError(f"{engine.no_tokenizer}; the tasks need a tokenizer")
    jobs = prepare(args, haystack, forced_texts, engine, tasks, lengths)
    path = None if args.progress is None else Path(args.progress)
    journal = Journal(None if ranks.rank else path)
    journal.results = parallel.same(ranks, journal.results)
    if whole:
        journal.path = path
    rows, samples = evaluate(args, engine, jobs, chosen, journal, ranks if whole else ALONE)
    if ranks.rank:
        return
    out = sys.stderr if args.json == "-" else sys.stdout
    print("\n".join([accuracy_table(rows, jobs, chosen), *profile_lines(rows)]), file=out)
    arguments = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    failed = [
        {"task": job.task, "length": job.length, "index": i, "error": error}
        for job in jobs
        for i, error in job.failed.items()
    ]
    result = {"args": arguments, "ranks": ranks.count, "rows": rows, "samples": samples, "failed": failed}
    write_json(args.json, result)
    if args.plot:
        from tasks.plot import draw  # imports matplotlib, which takes a second

        draw(rows, samples, args.plot)
    if failed:
        names = ", ".join(f"{x['task']}@{x['length']} {x['index']} ({x['error']})" for x in failed)
        raise ValueError(f"{len(failed)} samples failed, and the others were asked: {names}")


if __name__ == "__main__":
    run(main, ranks=True)
