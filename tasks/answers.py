"""Runs samples on an engine (prompts with their later questions, or forced texts) and scores the results."""

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engine import Answer, Engine, Row
from tasks import Question, Sample, Task, texts


@dataclass
class Job:
    """A task at one length: its samples and the sizes of the caches they need."""

    task: str
    length: int
    graded: Task | None  # None: measured on a forced text
    items: list  # Samples, or (prompt, continuation)
    new: int  # the most tokens that a row decodes
    chat: bool = False  # whether prompts go through the checkpoint's chat template

    @property
    def prompt(self) -> int:
        """Prompt tokens that the caches are planned for. A budget given as a share is a share of these."""
        return self.length - (self.graded.max_new_tokens if self.graded else texts.FORCED)

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
        given = engine.ask(rows, questions, job.graded.max_new_tokens, stepwise=args.stepwise)
        counts.update(decoded=engine.stats.decoded, fed=engine.stats.fed)
        return given

    prompts, questions = zip(*(turns(engine, sample, job.chat, args.blind) for sample in samples), strict=True)
    results = []
    for prompt, own in zip(prompts, questions, strict=True) if args.fork else ():
        (text,) = engine.start([prompt])
        results.append((text.prompt_tokens, []))
        for part in parts(own, args.batch):
            forks = [text.fork() for _ in part]
            results[-1][1].extend(answers(forks, part))
            close(forks)
        close([text])
    if args.fork:
        return results
    rows = engine.start(list(prompts))
    results = [(row.prompt_tokens, []) for row in rows]
    if not args.blind:  # the prompt asks the first question
        for (_, own), given in zip(results, answers(rows, None), strict=True):
            own.append(given)
    for turn in itertools.zip_longest(*questions):
        asked = [i for i, question in enumerate(turn) if question is not None]
        for i, given in zip(asked, answers([rows[i] for i in asked], [turn[i] for i in asked]), strict=True):
            results[i][1].append(given)
    close(rows)
    return results


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
        scores = [g["score"] for g in graded]
        results.append(
            {"prompt_tokens": prompt_tokens, **graded[0], "score": sum(scores) / len(scores)}
            | {"first": scores[0], "later": graded[1:]}
            | ({} if sample.depth is None else {"depth": sample.depth})
        )
    return results


def forced(engine: Engine, job: Job, indices: list[int]) -> list[Tensor]:
    """Logits [128, vocab] of each forced text, decoded together, on the host."""
    prompts, continuations = zip(*(job.items[i] for i in indices), strict=True)
    return [logits.cpu() for logits in engine.logits(list(prompts), list(continuations))]


def force(engine: Engine, job: Job, indices: list[int], reference: dict[tuple[int, int], Tensor]) -> list[dict]:
    """Scores of the engine's predictions on forced texts; `reference`: the full cache's logits by (length, index)."""
    results = []
    for i, logits in zip(indices, forced(engine, job, indices), strict=True):
        prompt, continuation = job.items[i]
        result = {"prompt_tokens": len(prompt), "prediction": None, "answer": None}
        if job.task == "perplexity":
            nll = texts.negative_log_likelihood(logits, continuation)
            result |= {"score": math.exp(nll), "nll": nll}
        else:  # without the first row, which prefill computes for every method
            kl, same = texts.divergence(logits[1:], reference[job.length, i][1:])
            result |= {"score": 100 * same, "kl": kl}
        results.append(result)
    return results
