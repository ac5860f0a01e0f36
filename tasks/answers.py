"""Runs samples on an engine (prompts with their later questions, or forced texts), scores and keeps the results."""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

from torch import Tensor

from engine import Answer, Engine, Row
from tasks import Question, Sample, Task, texts
from terminal.cli import read_text
from text.files import parse_json

SPANS = 8  # into which fidelity divides the forced tokens


@dataclass
class Job:
    """A task at one length: its samples and the sizes of the caches they need."""

    task: str
    length: int
    graded: Task | None  # None: measured on a forced text
    items: list  # Samples, or (prompt, continuation)
    new: int  # the most tokens that a row decodes
    chat: bool = False  # whether prompts go through the checkpoint's chat template
    failed: dict[int, str] = field(default_factory=dict)  # the indices of samples that cannot be asked, and why

    @property
    def prompt(self) -> int:
        """Prompt tokens that the caches are planned for."""
        return self.length - (self.graded.max_new_tokens if self.graded else self.new)

    @property
    def indices(self) -> list[int]:
        """The task's index of each item."""
        return [i for i in range(len(self.items) + len(self.failed)) if i not in self.failed]

    @cached_property
    def digests(self) -> list[str]:
        """A hash of each item, which depends on the texts, the seed and the task."""
        return [digest(dataclasses.asdict(x) if isinstance(x, Sample) else x) for x in self.items]


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def later_turn(engine: Engine, question: Question, chat: bool) -> str | list[int]:
    """What is fed for a question outside the prompt: its text, or the ids of its chat turn."""
    if not chat:
        return question.text
    said = question.text.removesuffix(question.opening).lstrip()
    return engine.tokenizer.chat_next(said, opening=question.opening)


def turns(engine: Engine, sample: Sample, chat: bool, blind: bool) -> tuple[str | list[int], list[str | list[int]]]:
    """A sample's prompt, and what is fed after it.

    In a chat, `blind` splits the ids of the first turn where the question begins.
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


def ask(
    engine: Engine, job: Job, samples: list[Sample], args: argparse.Namespace, counts: Counter
) -> list[tuple[int, list[Answer]]]:
    """The prompt's tokens and the answers, per sample. With `fork` a question sees the text, and no other question.

    Adds to `counts` the tokens decoded, and the rows that took part in a step, summed over the steps.
    """

    def answers(rows: list[Row], questions: list | None) -> list[Answer]:
        if args.stepwise and questions:
            engine.feed(rows, questions)
            questions = None
        given = engine.ask(rows, questions, job.graded.max_new_tokens)
        counts.update(decoded=engine.stats.decoded, fed=engine.stats.fed)
        return given

    prompts, questions = zip(*(turns(engine, sample, job.chat, args.blind) for sample in samples), strict=True)
    if args.fork:
        return [fork(engine, prompt, own, args.batch, answers) for prompt, own in zip(prompts, questions, strict=True)]
    rows = engine.start(list(prompts))
    results = [(row.prompt_tokens, []) for row in rows]
    rounds = [] if args.blind else [(rows, None)]  # the prompt asks the first question
    for turn in itertools.zip_longest(*questions):
        asked = [i for i, question in enumerate(turn) if question is not None]
        rounds.append(([rows[i] for i in asked], [turn[i] for i in asked]))
    for asked, own in rounds:
        for row, given in zip(asked, answers(asked, own), strict=True):
            results[rows.index(row)][1].append(given)
    close(rows)
    return results


def fork(
    engine: Engine, prompt: str | list[int], questions: list, batch: int, answers: Callable
) -> tuple[int, list[Answer]]:
    """A text's tokens, and the answers to questions that are each asked of a copy of the text's row."""
    (text,), given = engine.start([prompt]), []
    for part in parts(questions, batch):
        rows = [text.fork() for _ in part]
        given += answers(rows, part)
        close(rows)
    close([text])
    return text.prompt_tokens, given


def parts(items: list, size: int) -> list[list]:
    """Consecutive parts of `size` items, the last of fewer."""
    return [items[at : at + size] for at in range(0, len(items), size)]


def close(rows: list[Row]) -> None:
    for row in rows:
        row.close()


def answer(engine: Engine, job: Job, samples: list[Sample], args: argparse.Namespace, counts: Counter) -> list[dict]:
    """The engine's answers to samples, and their scores; args: blind, fork, stepwise and batch of eval.py."""
    results = []
    for sample, (prompt_tokens, answers) in zip(samples, ask(engine, job, samples, args, counts), strict=True):
        graded = [
            {"prediction": a.text, "answer": list(q.answers), "score": job.graded.score(a.text, q)}
            for q, a in zip(sample.questions, answers, strict=True)
        ]
        result = {"prompt_tokens": prompt_tokens, **graded[0], "score": fmean(g["score"] for g in graded)}
        result |= {"first": graded[0]["score"], "later": graded[1:]}
        results.append(result if sample.depth is None else result | {"depth": sample.depth})
    return results


def forced(engine: Engine, job: Job, indices: list[int]) -> list[Tensor]:
    """Logits [n, vocab] of each forced text, decoded together, on the host."""
    prompts, continuations = zip(*(job.items[i] for i in indices), strict=True)
    return [logits.cpu() for logits in engine.logits(list(prompts), list(continuations))]


def force(engine: Engine, job: Job, indices: list[int], reference: dict[tuple[int, int], Tensor]) -> list[dict]:
    """Scores of the engine's predictions on forced texts; `reference`: the full cache's logits by (length, index)."""
    results = []
    for i, logits in zip(indices, forced(engine, job, indices), strict=True):
        prompt, continuation = job.items[i]
        result = {"prompt_tokens": len(prompt), "prediction": None, "answer": None}
        if job.task == "fidelity":  # without the first row, which prefill computes for every method
            logits, continuation = logits[1:], continuation[1:]
            full = reference[job.length, i][1:]
            kl, same = texts.divergence(logits, full)
            spans = zip(*(x.tensor_split(min(SPANS, len(x))) for x in (logits, full)), strict=True)
            result |= {"score": 100 * same, "kl": kl, "kl_spans": [texts.divergence(*span)[0] for span in spans]}
        nll = texts.negative_log_likelihood(logits, continuation)
        results.append({"score": math.exp(nll), "nll": nll} | result)
    return results


# Results


@dataclass
class Journal:
    """The results so far, by key; with a path, also kept in that file, one line of JSON per sample."""

    path: Path | None
    results: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self):
        if self.path is None or not self.path.exists():
            return
        text = read_text(str(self.path))
        for line in text.splitlines():
            # A line was cut off if the run was stopped, and one may be none of eval.py's.
            with suppress(ValueError, LookupError, TypeError):
                entry = parse_json(line, self.path)
                self.results[entry["key"]] = entry["result"]
        if text and not text.endswith("\n"):
            with open(self.path, "a") as file:
                file.write("\n")

    def add(self, key: str, result: dict) -> None:
        self.results[key] = result
        if self.path is not None:
            with open(self.path, "ab", buffering=0) as file:  # a line at once: other ranks add theirs
                file.write(json.dumps({"key": key, "result": result}).encode() + b"\n")


def summary(job: Job, results: list[dict]) -> dict:
    """Means over a job's samples; `later` is the mean over all later questions."""
    means = {"n": len(results), "score": fmean(r["score"] for r in results), "first": None, "later": None}
    if not job.graded:
        perplexity = math.exp(fmean(r["nll"] for r in results))
        if job.task == "perplexity":
            return means | {"perplexity": perplexity, "score": perplexity}
        spans = [fmean(span) for span in zip(*(r.get("kl_spans", []) for r in results), strict=True)]
        return means | {"perplexity": perplexity, "kl": fmean(r["kl"] for r in results), "kl_spans": spans}
    later = [question["score"] for r in results for question in r["later"]]
    return means | {"first": fmean(r["first"] for r in results), "later": fmean(later) if later else None}
