"""The tasks: what a prompt asks and how an answer is graded. One file a benchmark; `eval.py` runs them.

A `Task` makes `Sample`s: a text and the questions asked after it, one after the other. The first question ends the
prompt; later ones are fed through the decode path after the answer before, and show what a cache has lost meanwhile.
Samples depend on nothing but the setting and their index.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Question:
    text: str  # ends where the answer begins
    answers: tuple[str, ...]  # what the task's score looks for
    classes: tuple[str, ...] = ()  # that there are to choose from, where the score counts them
    opening: str = ""  # the end of the text with which the answer opens: in a chat the model's turn begins with it


@dataclass(frozen=True)
class Sample:
    text: str  # what stands before the first question
    questions: tuple[Question, ...]
    depth: float | None = None  # where the needle is, as a share of the text, if that is what is measured

    @property
    def prompt(self) -> str:
        return self.text + self.questions[0].text


@dataclass(frozen=True)
class Setting:
    """What samples are made from."""

    length: int  # tokens of the prompt and of an answer of the task's max_new_tokens, as RULER counts
    encode: Callable[[str], list[int]]  # a text to ids, as a prompt is encoded
    decode: Callable[[list[int]], str]
    seed: int = 0
    questions: int = 1  # at most so many are asked about a text
    haystack: str | None = None  # a text to hide needles in; default, the one that ships with the tasks
    data: Path | None = None  # folder with the files of published datasets

    def rng(self, task: str, index: int) -> random.Random:
        """The randomness of one sample."""
        return random.Random(f"{task} {self.length} {self.seed} {index}")


@dataclass(frozen=True)
class Task:
    name: str
    max_new_tokens: int  # per answer
    sample: Callable[[Setting, int], Sample]  # the sample of an index
    score: Callable[[str, Question], float]  # of an answer's text, 0 to 100
    size: Callable[[Setting], int] | None = None  # samples that there are; None: any number
    stop: tuple[str, ...] = ()  # texts that end an answer
    chat: bool = True  # whether the benchmark's runs of chat models put its prompts into their template


def fit(make: Callable[[int], Sample], setting: Setting, reserve: int, least: int = 1) -> Sample:
    """The longest of make(n), n >= least, whose prompt and `reserve` tokens more take at most setting.length.

    make(n) must grow with n, by about the same number of tokens a unit. Raises ValueError if make(least) is too long.
    """
    room, low, high = setting.length - reserve, least, None  # low fits, high does not
    sample = make(low)
    used = len(setting.encode(sample.prompt))
    if used > room:
        raise ValueError(f"a length of {setting.length} tokens is too short: the least is {used + reserve}")
    n = 2 * low + 8
    while high is None or high - low > 1:
        tried = make(n)
        tokens = len(setting.encode(tried.prompt))
        rate = (tokens - used) / (n - low)  # tokens a unit
        if tokens <= room:
            sample, low, used = tried, n, tokens
        else:
            high = n
        step = max(1, int((room - used) / rate)) if rate > 0 else low
        n = low + (step if high is None else min(step, high - low - 1))
    return sample


@cache
def shipped_haystack() -> str:
    return (Path(__file__).parent / "haystack.txt").read_text()


def string_match_all(answer: str, question: Question) -> float:
    """The share of the references that the answer contains, whatever their case (RULER's string_match_all)."""
    return 100 * sum(r.lower() in answer.lower() for r in question.answers) / len(question.answers)


def string_match_part(answer: str, question: Question) -> float:
    """Whether the answer contains one of the references, whatever its case (RULER's string_match_part)."""
    return 100.0 * any(r.lower() in answer.lower() for r in question.answers)
