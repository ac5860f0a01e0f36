"""Puts samples to an engine: prompts and the questions that follow, forced texts, and what is scored of the answers."""

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from engine import Engine
from tasks import Question, Sample, Task, texts


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


def digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


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
