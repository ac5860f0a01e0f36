"""Measures answers: python eval.py --checkpoint DIR --tasks niah_multikey_1,vt --length 4096 --kv full,streaming
--budget 256,1024 --samples 50 --json out.json --plot out.png

Every method answers the same samples. A table says how well, in how many bytes; --json has every answer. A run that
was stopped goes on where it was, if it has --json FILE or --progress FILE.
"""

import startup  # noqa: F401

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from checkpoint import COMPANIONS, fingerprint
from cli import Choice, check_output, choices, columns, number, numbers, profile_lines, read_text, run, write_json
from device import DTYPES, free_bytes
from engine import Engine
from kv import KV, BudgetTooSmall
from progress import Phase
from tasks import Question, Sample, Setting, Task, shipped_haystack, texts
from tasks.registry import GROUPS, TASKS

ROUND = 128  # caches are planned for a multiple of it
JOINTS = 4  # tokens by which texts encoded apart may differ from the same texts joined
ROOT = Path(__file__).parent
OTHER_TOOLS = {  # code that no answer passes through
    "calibrate.py", "conversation.py", "convert_hf_checkpoint.py",
    "generate.py", "progress.py", "setup.py",
}  # fmt: skip


@dataclass
class Job:
    """A task at a length: its samples, and the caches that they need."""

    task: str
    length: int
    graded: Task | None  # None: measured on a forced text
    items: list  # Samples, or (prompt, continuation)
    new: int  # tokens that a row decodes at most
    chat: bool = False  # prompts are put into the checkpoint's chat template

    @property
    def prompt(self) -> int:
        """Tokens that the caches are planned for: budgets given as a share are a share of them."""
        return self.length - (self.graded.max_new_tokens if self.graded else texts.FORCED)

    @cached_property
    def digests(self) -> list[str]:
        """Of every item: what the texts, the seed and the task made of it."""
        return [digest(dataclasses.asdict(x) if isinstance(x, Sample) else x) for x in self.items]


@dataclass
class Progress:
    """What is already known: lines of JSON, one a sample, in a file if there is one."""

    path: Path | None
    known: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self):
        if self.path is None or not self.path.exists():
            return
        text = read_text(str(self.path))
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self.known[entry["key"]] = entry["found"]
            except (ValueError, LookupError, TypeError, RecursionError):
                continue  # the line that was being written when the run was stopped, or none of ours
        if text and not text.endswith("\n"):
            with open(self.path, "a") as file:
                file.write("\n")

    def add(self, key: str, found: dict) -> None:
        self.known[key] = found
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps({"key": key, "found": found}) + "\n")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="a folder in this engine's format")
    groups = ", ".join(f"{name} ({len(tasks)})" for name, tasks in GROUPS.items())
    p.add_argument("--tasks", default="ruler", help=f"names with commas between; groups: {groups}; see --list-tasks")
    p.add_argument("--list-tasks", action="store_true", help="list the tasks and exit")
    p.add_argument("--length", default="4096", help="tokens of prompt and answer; several with commas (default: 4096)")
    p.add_argument("--samples", type=int, default=50, help="of every task and length (default: 50)")
    p.add_argument("--questions", type=int, default=1, help="asked about a text, where there are so many (default: 1)")
    p.add_argument("--blind", action="store_true", help="prefill the text alone: every question is fed afterwards")
    p.add_argument("--chat", action="store_true", help="put prompts into the checkpoint's chat template, but for tasks "
                   "that their benchmark leaves plain; later questions are turns of their own")
    p.add_argument("--kv", default="full", help="methods with commas between; with options: name:option=value:...")
    p.add_argument("--budget", default="", help="tokens a KV head, or shares of the prompt; several with commas")
    p.add_argument("--haystack", metavar="FILE", help="hide needles in this text")
    p.add_argument("--text", metavar="FILE", help="the text for perplexity and fidelity (default: the haystack)")
    p.add_argument("--data", type=Path, metavar="DIR", help="folder of published datasets' files")
    p.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    p.add_argument("--batch", type=int, default=1, help="rows decoded together (default: 1)")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile decode steps (default: on a GPU)")
    p.add_argument("--progress", metavar="FILE", help="continue from here, and add to it (default: beside --json FILE)")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    p.add_argument("--plot", metavar="FILE", help="draw accuracy over budget and bytes; needle: over length and depth")
    return p


# What is to be run


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
    """Every task's samples at every length; `given` has the texts of --haystack and --text, where these are given.

    Raises ValueError or FileNotFoundError for what cannot be made.
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
        later = 0 if args.blind else 1  # the first question that is fed
        fed = max(sum(len(engine.encode(later_turn(engine, q, chat), bos=False)) for q in s.questions[later:])
                  for s in items)  # fmt: skip
        new = fed + JOINTS + graded.max_new_tokens * max(len(s.questions) for s in items)
        jobs.append(Job(task, length, graded, items, -(-new // ROUND) * ROUND, chat))
    return jobs


# Running


def later_turn(engine: Engine, question: Question, chat: bool) -> str | list[int]:
    """What is fed for a question that is not in the prompt."""
    if not chat:
        return question.text
    said = question.text.removesuffix(question.opening).lstrip()
    return engine.tokenizer.chat_next(said, opening=question.opening)


def turns(engine: Engine, sample: Sample, chat: bool, blind: bool) -> tuple[str | list[int], list[str | list[int]]]:
    """A sample's prompt, and what is fed after it.

    In a chat, `blind` parts the first turn where the question begins: the two parts are the ids of the whole turn.
    """
    later = [later_turn(engine, q, chat) for q in sample.questions[1:]]
    first = sample.questions[0]
    if not chat:
        return (sample.text, [first.text, *later]) if blind else (sample.prompt, later)
    whole = engine.tokenizer.chat(sample.prompt.removesuffix(first.opening), opening=first.opening)
    if not blind:
        return whole, later
    text = os.path.commonprefix([whole, engine.tokenizer.chat(sample.text)])
    return text, [whole[len(text) :], *later]


def answer(engine: Engine, job: Job, samples: list[Sample], blind: bool) -> list[dict]:
    """What the engine answers to samples, and the scores."""
    prompts, fed = zip(*(turns(engine, sample, job.chat, blind) for sample in samples), strict=True)
    completions = engine.generate(
        list(prompts),
        max_new_tokens=job.graded.max_new_tokens,
        stop=list(job.graded.stop) or None,
        follow_ups=list(fed),
        answer_prompts=not blind,
    )
    found = []
    for sample, completion in zip(samples, completions, strict=True):
        graded = [
            {"prediction": a.text, "answer": list(q.answers), "score": job.graded.score(a.text, q)}
            for q, a in zip(sample.questions, completion.answers, strict=True)
        ]
        scores = [g["score"] for g in graded]
        found.append(
            {"prompt_tokens": completion.prompt_tokens, **graded[0], "score": sum(scores) / len(scores)}
            | {"first": scores[0], "later": graded[1:]}
            | ({} if sample.depth is None else {"depth": sample.depth})
        )
    return found


class Seen(KV):
    """Takes down what a layer's method is handed of a prompt, on the host."""

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.qkv = q.cpu(), k.cpu(), v.cpu()

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        raise NotImplementedError("prompts alone are taken down")

    def reset(self, row: int) -> None:
        pass

    def step_bytes(self, length: int) -> tuple[int, int]:
        return 0, 0


class SharedPrompts(Engine):
    """Runs a prompt through the model once for all methods.

    Every method attends to a prompt exactly, so what its `keep` is handed does not depend on the method. q, k and v of
    as many prompts as fit stay on the host.
    """

    seen: dict[tuple, tuple]  # of a prompt: logits, RoPE speeds, q, k, v of every layer, statistics of its attention
    room: int  # bytes of host memory that are left for it

    def share(self) -> "SharedPrompts":
        """Begins to share, in half of the host's free memory."""
        self.seen, self.room = {}, free_bytes(torch.device("cpu")) // 2
        return self

    def prefill(self, row: int, prompt: list[int], planned: int | None = None, phase: Phase | None = None) -> Tensor:
        key, c = (tuple(prompt), planned), self.config
        bytes_ = c.n_layer * (c.n_head + 2 * c.n_kv_head) * len(prompt) * c.head_dim * self.dtype.itemsize
        if key not in self.seen:
            if bytes_ > self.room:
                return super().prefill(row, prompt, planned, phase)
            methods, seen = self.layers, [Seen(self.shape) for _ in self.layers]
            self.give(seen)
            try:
                logits = self.model.prefill(torch.tensor(prompt, device=self.device), row, planned)
            finally:
                self.give(methods)
            self.seen[key] = logits, self.model.rope_speed[row].clone(), [layer.qkv for layer in seen], {}
            self.room -= bytes_
        for layer in self.layers:
            layer.reset(row)
        self.decoder.reset(row)
        logits, self.model.rope_speed[row], qkv, observed = self.seen[key]
        for i, (layer, x) in enumerate(zip(self.layers, qkv, strict=True)):
            layer.set_speed(row, self.model.rope_speed[row])
            q, k, v = (part.to(self.device) for part in x)
            if layer.sums:  # statistics of the attention, which methods share too
                if (i, layer.sums) not in observed:
                    layer.attend_prompt(q, k, v)
                    observed[i, layer.sums] = layer.observed
                layer.observed = observed[i, layer.sums]
            layer.keep(row, q, k, v)
        for layer in self.layers:
            layer.finish(row)
        return logits

    def give(self, layers: list[KV]) -> None:
        for block, layer in zip(self.model.layers, layers, strict=True):
            block.attention.kv = layer


class Reference:
    """The full cache's logits for forced texts, computed once: samples x 128 x vocab fp32 on the host."""

    def __init__(self, engine: Engine):
        self.engine, self.logits = engine, {}

    def prepare(self, job: Job, indices: list[int], batch: int) -> None:
        wanted = [i for i in indices if (job.length, i) not in self.logits]
        if wanted:
            self.engine.use("full", batch=batch, max_prompt=job.prompt, max_new_tokens=job.new)
        for at in range(0, len(wanted), batch):
            part = wanted[at : at + batch]
            for i, logits in zip(part, forced(self.engine, job, part), strict=True):
                self.logits[job.length, i] = logits


def forced(engine: Engine, job: Job, indices: list[int]) -> list[Tensor]:
    """Logits [128, vocab] of texts that are decoded together, on the host."""
    prompts, continuations = zip(*(job.items[i] for i in indices), strict=True)
    return [logits.cpu() for logits in engine.logits(list(prompts), list(continuations))]


def force(engine: Engine, job: Job, indices: list[int], reference: Reference) -> list[dict]:
    """What the engine predicts of forced texts, and the scores."""
    results = []
    for i, logits in zip(indices, forced(engine, job, indices), strict=True):
        prompt, continuation = job.items[i]
        found = {"prompt_tokens": len(prompt), "prediction": None, "answer": None}
        if job.task == "perplexity":
            nll = texts.negative_log_likelihood(logits, continuation)
            results.append(found | {"score": math.exp(nll), "nll": nll})
        else:
            kl, same = texts.divergence(logits, reference.logits[job.length, i])
            results.append(found | {"score": 100 * same, "kl": kl})
    return results


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def code(root: Path = ROOT) -> str:
    """A hash of the code that asks, answers and scores: new files count until they are named in OTHER_TOOLS."""
    files = sorted(file for place in (".", "kv", "tasks") for file in (root / place).glob("*.py"))
    read = [file for file in files if file.name not in OTHER_TOOLS]
    return digest([(str(file.relative_to(root)), file.read_text(encoding="utf-8")) for file in read])


def evaluate(
    args: argparse.Namespace, engine: Engine, jobs: list[Job], chosen: list[Choice], progress: Progress
) -> tuple[list[dict], list[dict]]:  # fmt: skip
    """(rows, samples) of the JSON object."""
    rows, samples, reference = [], [], Reference(engine)
    common = {"weights": fingerprint(args.checkpoint), "code": code(), "profile": digest(engine.profile)}
    files = [args.checkpoint / name for name in COMPANIONS if name != "kv_profile.json"]
    common |= {"tokenizer": [hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files if file.is_file()]}
    common |= {"dtype": str(engine.dtype).removeprefix("torch."), "eos": sorted(engine.eos)}
    common |= {"blind": args.blind, "chat": args.chat}

    def key_of(method: Choice, job: Job, index: int) -> str:
        """What a result depends on."""
        own = {"kv": method.kv, "options": method.options, "budget": method.budget}
        own |= {"task": job.task, "length": job.length, "index": index, "sample": job.digests[index]}
        return json.dumps(common | own, sort_keys=True)

    total = len(chosen) * sum(len(job.items) for job in jobs)
    with tqdm(total=total, unit="sample") as bar:
        for method in chosen:
            for job in sorted(jobs, key=lambda job: (job.length, job.prompt, job.new)):  # like caches in turn
                bar.set_description(f"{method.label} {job.task} {job.length}")
                about = {"kv": method.kv, "budget": method.budget, "options": method.options}
                about |= {"task": job.task, "length": job.length, "chat": job.chat}
                keys = [key_of(method, job, i) for i in range(len(job.items))]
                missing = [i for i, key in enumerate(keys) if key not in progress.known]
                if job.task == "fidelity":
                    reference.prepare(job, missing, args.batch)
                try:
                    bytes_ = use(engine, method, job, args.batch)
                except BudgetTooSmall as error:  # the cell stays empty, the rest goes on
                    nothing = {"n": 0, "score": None, "first": None, "later": None}
                    rows.append(about | nothing | {"why": str(error), "minimum": error.least})
                    bar.update(len(job.items))
                    continue
                bar.update(len(job.items) - len(missing))
                before = engine.fetched()
                for at in range(0, len(missing), args.batch):
                    part = missing[at : at + args.batch]
                    if job.graded:
                        found = answer(engine, job, [job.items[i] for i in part], args.blind)
                    else:
                        found = force(engine, job, part, reference)
                    for i, result in zip(part, found, strict=True):
                        progress.add(keys[i], result)
                    bar.update(len(part))
                results = [progress.known[key] for key in keys]
                wanted, fetched = (a - b for a, b in zip(engine.fetched(), before, strict=True))
                rate = {"fetch_hit_rate": 1 - fetched / wanted if wanted else None}
                rows.append(about | summary(job, results) | bytes_ | rate)
                samples += [about | {"index": i} | result for i, result in enumerate(results)]
    return rows, samples


def use(engine: Engine, method: Choice, job: Job, batch: int) -> dict:
    """Gives the engine the caches for a job, unless it has them; what the profile set, their bytes a row, and those
    that a step reads."""
    wanted = (method.kv, method.budget, method.options, batch, job.prompt, job.new)
    has = (engine.method, engine.budget, engine.options, engine.batch, engine.max_prompt, engine.max_new_tokens)
    if wanted != has or engine.shape is None:  # no shape: what was asked for last was refused
        engine.use(method.kv, method.budget, method.options, batch, job.prompt, job.new)
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


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def summary(job: Job, results: list[dict]) -> dict:
    """The means over a job's samples; `later` over all later questions."""
    if job.task == "perplexity":
        return {"n": len(results), "score": math.exp(mean([r["nll"] for r in results])), "first": None, "later": None}
    found = {"n": len(results), "score": mean([r["score"] for r in results])}
    if job.task == "fidelity":
        return found | {"first": None, "later": None, "kl": mean([r["kl"] for r in results])}
    later = [question["score"] for r in results for question in r["later"]]
    return found | {"first": mean([r["first"] for r in results]), "later": mean(later)}


# Showing


def table(rows: list[dict], jobs: list[Job], chosen: list[Choice]) -> str:
    """Methods down, tasks across; first and later questions apart, where there are later ones."""
    lengths = {job.length for job in jobs}
    names = {(j.task, j.length): j.task + (f"@{j.length}" if len(lengths) > 1 else "") for j in jobs}
    graded = [(j.task, j.length) for j in jobs if j.graded]
    lines = [["method", *names.values(), *["average"] * (len(graded) > 1), "KV bytes", "of full"]]

    def cell(row: dict) -> str:
        if row["score"] is None:
            return f"min {row['minimum']}"
        if row["task"] == "fidelity":
            return f"{row['score']:.1f}% kl {row['kl']:.4f}"
        later = "" if row["later"] is None else f" / {row['later']:.1f}"
        return f"{row['score'] if row['first'] is None else row['first']:.1f}{later}"

    for method in chosen:
        own = {
            (r["task"], r["length"]): r
            for r in rows
            if (r["kv"], r["budget"], r["options"]) == (method.kv, method.budget, method.options)
        }
        scores = [own[key]["score"] for key in graded]
        sized = [r for r in own.values() if r["score"] is not None]
        average = "-" if None in scores or not scores else f"{mean(scores):.1f}"
        most = max(sized, key=lambda r: r["kv_device_bytes"] + r["kv_host_bytes"], default=None)
        size = "-" if most is None else f"{(most['kv_device_bytes'] + most['kv_host_bytes']) / 1e6:.2f} MB"
        share = "-" if most is None else f"{100 * most['share_of_full']:.1f}%"
        lines.append([method.label, *(cell(own[key]) for key in names), *[average] * (len(graded) > 1), size, share])
    chat = ", ".join(dict.fromkeys(job.task for job in jobs if job.chat))
    return columns(lines) + f"\nin the checkpoint's chat template: {chat}" * bool(chat)


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
    for flag in ("samples", "questions", "batch"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    tasks, lengths = chosen_tasks(args.tasks), numbers(args.length, "--length", int)
    chosen = choices(args.kv, numbers(args.budget, "--budget", number) if args.budget else [])
    given = {name: read_text(file) for name in ("haystack", "text") if (file := getattr(args, name)) is not None}
    for name, text in given.items():
        if not text.strip():
            raise ValueError(f"--{name} {getattr(args, name)}: the text is empty")
    engine = SharedPrompts.load(args.checkpoint, device=args.device, dtype=args.dtype, max_new_tokens=1, seed=0).share()
    engine.compile = args.compile if args.compile is not None else engine.device.type == "cuda"
    if engine.tokenizer is None:
        raise ValueError(f"{engine.no_tokenizer}; the tasks are text")
    jobs = prepare(args, given, engine, tasks, lengths)
    progress = Progress(None if args.progress is None else Path(args.progress))
    rows, samples = evaluate(args, engine, jobs, chosen, progress)
    out = sys.stderr if args.json == "-" else sys.stdout
    print("\n".join([table(rows, jobs, chosen), *profile_lines(rows)]), file=out)
    arguments = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    result = {"args": arguments, "rows": rows, "samples": samples}
    write_json(args.json, result)
    if args.plot:
        from tasks.plot import draw  # imports matplotlib, which takes a second

        draw(rows, samples, args.plot)


if __name__ == "__main__":
    run(main)
