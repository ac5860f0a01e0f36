"""Measures accuracy: python eval.py --checkpoint DIR --tasks niah_multikey_1,vt --length 4096 --kv full,streaming
--budget 256,1024 --samples 50 --json out.json --plot out.png

Every method answers the same samples. The table shows scores and cache bytes; --json has every answer. With --json FILE
or --progress FILE, a run that was stopped resumes where it was.
"""

import runtime.startup  # noqa: F401

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from engine import Engine
from kv import BudgetTooSmall
from kv.parts.ranks import ALONE, Ranks
from runtime import processes
from runtime.checkpoint import COMPANIONS, fingerprint
from runtime.device import DTYPES
from tasks import Setting, shipped_haystack, texts
from tasks.answers import Job, Reference, answer, digest, force, later_turn
from tasks.registry import GROUPS, TASKS
from tasks.report import Progress, summary, table
from tasks.shared import SharedPrompts
from terminal.cli import Choice, check_output, choices, number, numbers, profile_lines, read_text, run, write_json

ROUND = 128  # a job's new tokens are rounded up to a multiple of this, so that jobs can share caches
JOINTS = 4  # allowance in tokens: texts encoded separately may take more tokens than when joined
ROOT = Path(__file__).parent
OTHER_TOOLS = {  # code that cannot affect an answer
    "terminal/batch.py",
    "calibrate.py",
    "terminal/conversation.py",
    "convert_hf_checkpoint.py",
    "generate.py",
    "terminal/progress.py",
    "setup.py",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="folder of a converted checkpoint")
    groups = ", ".join(f"{name} ({len(tasks)})" for name, tasks in GROUPS.items())
    p.add_argument("--tasks", default="ruler", help=f"comma-separated names or groups: {groups}; see --list-tasks")
    p.add_argument("--list-tasks", action="store_true", help="list the tasks and exit")
    p.add_argument("--length", default="4096", help="tokens of prompt plus answer, comma-separated (default: 4096)")
    p.add_argument("--samples", type=int, default=50, help="samples per task and length (default: 50)")
    p.add_argument("--questions", type=int, default=1, help="the most questions asked about a text (default: 1)")
    p.add_argument("--blind", action="store_true", help="prefill the text alone and feed every question afterwards")
    p.add_argument(
        "--fork",
        action="store_true",
        help="like --blind, but each question gets a row of its own, which "
        "continues a copy of the text's cache: no question sees another",
    )
    p.add_argument(
        "--stepwise",
        action="store_true",
        help="feed questions one token a step, through the method's own "
        "attention; by default a question after the prompt attends to everything its row holds",
    )
    p.add_argument(
        "--chat",
        action="store_true",
        help="apply the checkpoint's chat template, except in tasks whose "
        "benchmark uses plain prompts; each later question is a turn of its own",
    )
    p.add_argument("--kv", default="full", help="comma-separated methods; with options: name:option=value:...")
    p.add_argument("--budget", default="", help="tokens per KV head, or shares of the prompt; comma-separated")
    p.add_argument(
        "--speculate",
        type=int,
        default=0,
        metavar="N",
        help="the methods draft N tokens at a time for the full cache to verify; the answers are then the full cache's",
    )
    p.add_argument("--haystack", metavar="FILE", help="hide needles in this text")
    p.add_argument("--text", metavar="FILE", help="the text for perplexity and fidelity (default: the haystack)")
    p.add_argument("--data", type=Path, metavar="DIR", help="folder with the files of published datasets")
    p.add_argument("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    p.add_argument("--batch", type=int, default=1, help="rows decoded together (default: 1)")
    p.add_argument(
        "--ranks",
        choices=("model", "data"),
        default="model",
        help="under torchrun: the processes share "
        "one model (default), or each has a whole one and answers its share of the samples",
    )
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile decode steps (default: on a GPU)")
    p.add_argument("--progress", metavar="FILE", help="resume from this file and add to it (default: beside --json)")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    p.add_argument("--plot", metavar="FILE", help="draw accuracy over budget and bytes; needle: over length and depth")
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
    args: argparse.Namespace, given: dict[str, str], engine: Engine, tasks: list[str], lengths: list[int]
) -> list[Job]:
    """Every task's samples at every length; `given` has the texts of --haystack and --text, if given.

    Raises ValueError or FileNotFoundError if a sample cannot be made.
    """
    haystack, jobs = given.get("haystack"), []
    for task, length in tqdm([(t, n) for n in lengths for t in tasks], unit="task", desc="samples", leave=False):
        if length > engine.config.max_length:
            raise ValueError(f"--length {length}: the model's context is {engine.config.max_length}")
        if TASKS[task] is None:
            text = given.get("text") or haystack or shipped_haystack()
            ids = engine.encode(text)
            bos = ids[: len(ids) - len(engine.encode(text, bos=False))]
            items = texts.excerpts(ids[len(bos) :], length, args.samples, bos)
            jobs.append(Job(task, length, None, items, texts.FORCED))
            continue
        graded = TASKS[task]
        chat = args.chat and graded.chat
        around = len(engine.tokenizer.chat("x")) - len(engine.encode("x")) + JOINTS if chat else 0
        setting = Setting(
            length - around, engine.encode, engine.tokenizer.decode, args.seed, args.questions, haystack, args.data
        )
        count = args.samples if graded.size is None else min(args.samples, graded.size(setting))
        if not count:
            raise ValueError(f"{task}: its file holds no sample")
        try:
            items = [graded.sample(setting, i) for i in range(count)]
        except ValueError as error:
            raise ValueError(f"{task}: {error}") from None
        except KeyError as error:
            raise ValueError(f"{task}: a record of its file has no {error}; fetch the file again") from None
        later = 0 if args.blind else 1  # the first question that is fed after the prompt
        fed = max(
            sum(len(engine.encode(later_turn(engine, q, chat), bos=False)) for q in s.questions[later:]) for s in items
        )
        new = fed + JOINTS + graded.max_new_tokens * max(len(s.questions) for s in items)
        jobs.append(Job(task, length, graded, items, -(-new // ROUND) * ROUND, chat))
    return jobs


# Running


def code(root: Path = ROOT) -> str:
    """A hash of the code that asks, answers and scores. A new file counts unless OTHER_TOOLS names it."""
    files = sorted(file for place in (".", "kv", "tasks") for file in (root / place).glob("*.py"))
    read = [file for file in files if file.name not in OTHER_TOOLS]
    return digest([(str(file.relative_to(root)), file.read_text(encoding="utf-8")) for file in read])


def evaluate(
    args: argparse.Namespace,
    engine: Engine,
    jobs: list[Job],
    chosen: list[Choice],
    progress: Progress,
    ranks: Ranks = ALONE,
) -> tuple[list[dict], list[dict]]:
    """Runs the jobs; returns (rows, samples) of the JSON object. `ranks` share the samples."""
    rows, samples, reference = [], [], Reference(engine)
    common = {"weights": fingerprint(args.checkpoint), "code": code(), "profile": digest(engine.profile)}
    files = [args.checkpoint / name for name in COMPANIONS if name != "kv_profile.json"]
    common |= {"tokenizer": [hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files if file.is_file()]}
    common |= {"dtype": str(engine.dtype).removeprefix("torch."), "eos": sorted(engine.eos)}
    common |= {name: getattr(args, name) for name in ("blind", "chat", "stepwise", "fork", "speculate")}
    common |= {"ranks": engine.ranks.count} if engine.ranks.count > 1 else {}

    def key_of(method: Choice, job: Job, index: int) -> str:
        """Everything that a result depends on."""
        own = {"kv": method.kv, "options": method.options, "budget": method.budget}
        own |= {"task": job.task, "length": job.length, "index": index, "sample": job.digests[index]}
        return json.dumps(common | own, sort_keys=True)

    total = len(chosen) * sum(len(job.items) for job in jobs)
    with tqdm(total=total, unit="sample") as bar:
        for method in chosen:
            for job in sorted(jobs, key=lambda job: (job.length, job.prompt, job.new)):  # groups jobs with equal caches
                bar.set_description(f"{method.label} {job.task} {job.length}")
                about = {"kv": method.kv, "budget": method.budget, "options": method.options}
                about |= {"task": job.task, "length": job.length, "chat": job.chat}
                keys = [key_of(method, job, i) for i in range(len(job.items))]
                missing = [i for i, key in enumerate(keys) if key not in progress.known]
                mine = missing[ranks.rank :: ranks.count]
                if job.task == "fidelity":
                    reference.prepare(job, mine, args.batch)
                try:
                    bytes_ = use(engine, method, job, args.batch, args.speculate)
                except BudgetTooSmall as error:  # the cell has no score, and the run continues
                    nothing = {"n": 0, "score": None, "first": None, "later": None}
                    rows.append(about | nothing | {"why": str(error), "minimum": error.minimum})
                    bar.update(len(job.items))
                    continue
                bar.update(len(job.items) - len(missing))
                before, decoded, fed, new = engine.fetched(), 0, 0, {}
                for at in range(0, len(mine), args.batch):
                    part = mine[at : at + args.batch]
                    if job.graded:
                        found = answer(engine, job, [job.items[i] for i in part], args)
                        decoded, fed = decoded + engine.stats.decoded, fed + engine.stats.fed
                    else:
                        found = force(engine, job, part, reference)
                    for i, result in zip(part, found, strict=True):
                        progress.add(keys[i], result)
                        new[keys[i]] = result
                    bar.update(len(part))
                wanted, fetched = (a - b for a, b in zip(engine.fetched(), before, strict=True))
                found, counts = zip(*processes.everyone(ranks, (new, (wanted, fetched, decoded, fed))), strict=True)
                for theirs in found:
                    progress.known |= theirs
                wanted, fetched, decoded, fed = map(sum, zip(*counts, strict=True))
                results = [progress.known[key] for key in keys]
                rate = {"fetch_hit_rate": 1 - fetched / wanted if wanted else None}
                if engine.speculate:
                    rate["accepted_per_round"] = decoded / fed - 1 if fed else None
                rows.append(about | summary(job, results) | bytes_ | rate)
                samples += [about | {"index": i} | result for i, result in enumerate(results)]
    return rows, samples


def use(engine: Engine, method: Choice, job: Job, batch: int, speculate: int = 0) -> dict:
    """Gives the engine the caches for a job, unless it has them. Returns the options that the profile set, the caches'
    bytes per row, and the bytes per row that a step reads."""
    speculate = 0 if method.kv == "full" and not method.options else speculate  # the others must give its answers
    wanted = (method.kv, method.budget, method.options, batch, job.prompt, job.new, speculate)
    has = (engine.method, engine.budget, engine.options, engine.batch, engine.max_prompt, engine.max_new_tokens)
    if wanted != (*has, engine.speculate) or engine.shape is None:  # no shape: the last caches were refused
        engine.use(*wanted)
    device, host, full = engine.kv_bytes()
    read_device, read_host = engine.step_bytes(job.prompt + 1)
    return {
        "profile": engine.from_profile(),
        "kv_device_bytes": device // batch,
        "kv_host_bytes": host // batch,
        "share_of_full": (device + host) / full,
        "step_device_bytes": read_device,
        "step_host_bytes": read_host,
    }


def list_tasks() -> Iterator[str]:
    for group, names in GROUPS.items():
        yield f"{group}: {', '.join(names)}"


def main(argv: list[str] | None = None) -> None:
    if "--list-tasks" in (sys.argv[1:] if argv is None else argv):
        return print("\n".join(list_tasks()))
    args = parser().parse_args(argv)
    if args.progress is None and args.json not in (None, "-"):
        args.progress = f"{args.json}.progress.jsonl"
    for flag in ("json", "plot", "progress"):
        check_output(getattr(args, flag), f"--{flag}")
    if args.speculate < 0:
        raise ValueError(f"--speculate must be at least 0, not {args.speculate}")
    for flag in ("samples", "questions", "batch"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    if args.fork and args.chat:
        raise ValueError("--fork and --chat: a chat's later questions are turns of one conversation; leave out one")
    args.blind |= args.fork
    tasks, lengths = chosen_tasks(args.tasks), numbers(args.length, "--length", int)
    chosen = choices(args.kv, numbers(args.budget, "--budget", number) if args.budget else [])
    given = {name: read_text(file) for name in ("haystack", "text") if (file := getattr(args, name)) is not None}
    for name, text in given.items():
        if not text.strip():
            raise ValueError(f"--{name} {getattr(args, name)}: the text is empty")
    ranks = processes.join()
    engine = SharedPrompts.load(
        args.checkpoint, device=args.device, dtype=args.dtype, max_new_tokens=1, seed=0, parallel=args.ranks == "model"
    ).share()
    engine.compile = args.compile if args.compile is not None else engine.device.type == "cuda"
    if engine.tokenizer is None:
        raise ValueError(f"{engine.no_tokenizer}; the tasks need a tokenizer")
    jobs = prepare(args, given, engine, tasks, lengths)
    path = None if args.progress is None else Path(args.progress)
    progress = Progress(None if ranks.rank else path)
    progress.known = processes.same(ranks, progress.known)
    if args.ranks == "data":
        progress.path = path
    rows, samples = evaluate(args, engine, jobs, chosen, progress, ranks if args.ranks == "data" else ALONE)
    if ranks.rank:
        return
    out = sys.stderr if args.json == "-" else sys.stdout
    print("\n".join([table(rows, jobs, chosen), *profile_lines(rows)]), file=out)
    arguments = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    result = {"args": arguments, "ranks": ranks.count, "rows": rows, "samples": samples}
    write_json(args.json, result)
    if args.plot:
        from tasks.plot import draw  # imports matplotlib, which takes a second

        draw(rows, samples, args.plot)


if __name__ == "__main__":
    run(main, ranks=True)
