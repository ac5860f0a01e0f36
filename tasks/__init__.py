"""The tasks: what a prompt asks and how an answer is graded. One file per benchmark; `eval.py` runs them.

A `Task` makes `Sample`s: a text and the questions asked about it, one after the other. The first question ends the
prompt. Each later question follows the previous answer, and shows what the cache has lost. A sample depends only on the
recipe and its index.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Question:
    text: str  # ends where the answer begins
    answers: tuple[str, ...]  # the references for the task's score
    opening: str = ""  # the end of `text` that begins the answer: in a chat, the model's turn begins with it


@dataclass(frozen=True)
class Sample:
    text: str  # everything before the first question
    questions: tuple[Question, ...]
    depth: float | None = None  # the needle's depth as a share of the text, if the task measures by depth

    @property
    def prompt(self) -> str:
        return self.text + self.questions[0].text


@dataclass(frozen=True)
class Recipe:
    """What samples are made from."""

    length: int  # tokens of the prompt plus the task's max_new_tokens, as RULER counts
    encode: Callable[[str], list[int]]  # encodes a text as a prompt
    decode: Callable[[list[int]], str]
    seed: int = 0
    questions: int = 1  # the most questions asked about a text
    haystack: str | None = None  # a text to hide needles in; None: the one that ships with the tasks
    data: Path | None = None  # folder with the files of published datasets

    def rng(self, task: str, index: int) -> random.Random:
        """The random generator of one sample."""
        return random.Random(f"{task} {self.length} {self.seed} {index}")


@dataclass(frozen=True)
class Task:
    name: str
    max_new_tokens: int  # per answer
    sample: Callable[[Recipe, int], Sample]  # (recipe, index) -> sample
    score: Callable[[str, Question], float]  # the score of an answer's text, 0 to 100
    size: Callable[[Recipe], int] | None = None  # the number of samples; None: unlimited


def fill_length(make: Callable[[int], Sample], recipe: Recipe, reserve: int, smallest: int = 1) -> Sample:
    """The longest make(n), n >= smallest, whose prompt plus `reserve` tokens takes at most recipe.length tokens.

    Each unit of n must add about the same number of tokens. Raises ValueError if make(smallest) is too long.
    """
    room, low, high = recipe.length - reserve, smallest, None  # low fits, high does not
    sample = make(low)
    used = len(recipe.encode(sample.prompt))
    if used > room:
        raise ValueError(f"a length of {recipe.length} tokens is too short: the least is {used + reserve}")
    n = 2 * low + 8
    while high is None or high - low > 1:
        tried = make(n)
        tokens = len(recipe.encode(tried.prompt))
        rate = (tokens - used) / (n - low)  # tokens per unit
        if tokens <= room:
            sample, low, used = tried, n, tokens
        else:
            high = n
        step = max(1, int((room - used) / rate)) if rate > 0 else low
        n = low + (step if high is None else min(step, high - low - 1))
    return sample


def data_file(folder: Path | None, name: str) -> Path:
    """A published dataset's file. Raises ValueError or FileNotFoundError that says what to give."""
    if folder is None:
        raise ValueError(f"{name} does not ship with the tasks: give its folder with --data")
    if not (path := folder / name).is_file():
        raise FileNotFoundError(f"{path} is missing: download the dataset, and name its folder with --data")
    return path


@cache
def shipped_haystack() -> str:
    return (Path(__file__).parent / "haystack.txt").read_text()


def string_match_all(answer: str, question: Question) -> float:
    """The share of the references that the answer contains, ignoring case (RULER's string_match_all)."""
    return 100 * sum(r.lower() in answer.lower() for r in question.answers) / len(question.answers)


def string_match_part(answer: str, question: Question) -> float:
    """Whether the answer contains one of the references, ignoring case (RULER's string_match_part)."""
    return 100.0 * any(r.lower() in answer.lower() for r in question.answers)
