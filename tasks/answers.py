"""Runs samples on an engine (prompts with their later questions, or forced texts) and scores the results."""

import argparse
import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engine import Engine
from sequence import Answer
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


def ask(engine: Engine, job: Job, samples: list[Sample], args: argparse.Namespace) -> list[tuple[int, list[Answer]]]:
    """The prompt's tokens and the answers, per sample. With `fork` a question sees the text, and no other question."""
    parts = [turns(engine, sample, job.chat, args.blind) for sample in samples]
    common = {"max_new_tokens": job.graded.max_new_tokens, "stop": list(job.graded.stop) or None}
    if args.fork:
        found = [engine.generate(questions, prefix=text, stepwise=args.stepwise, **common) for text, questions in parts]
        return [(rows[0].prompt_tokens, [row.answers[0] for row in rows]) for rows in found]
    prompts, fed = (list(part) for part in zip(*parts, strict=True))
    found = engine.generate(prompts, follow_ups=fed, answer_prompts=not args.blind, stepwise=args.stepwise, **common)
    return [(completion.prompt_tokens, completion.answers) for completion in found]


def answer(engine: Engine, job: Job, samples: list[Sample], args: argparse.Namespace) -> list[dict]:
    """The engine's answers to samples, and their scores; args: blind, fork and stepwise of eval.py."""
    found = []
    for sample, (prompt_tokens, answers) in zip(samples, ask(engine, job, samples, args), strict=True):
        graded = [
            {"prediction": a.text, "answer": list(q.answers), "score": job.graded.score(a.text, q)}
            for q, a in zip(sample.questions, answers, strict=True)
        ]
        scores = [g["score"] for g in graded]
        found.append(
            {"prompt_tokens": prompt_tokens, **graded[0], "score": sum(scores) / len(scores)}
            | {"first": scores[0], "later": graded[1:]}
            | ({} if sample.depth is None else {"depth": sample.depth})
        )
    return found


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
    """Logits [128, vocab] of each forced text, decoded together, on the host."""
    prompts, continuations = zip(*(job.items[i] for i in indices), strict=True)
    return [logits.cpu() for logits in engine.logits(list(prompts), list(continuations))]


def force(engine: Engine, job: Job, indices: list[int], reference: Reference) -> list[dict]:
    """Scores of the engine's predictions on forced texts."""
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
