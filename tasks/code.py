"""Long source code: facts planted between its definitions, and its next line.

The text is a file of code (`--haystack`) or Python's standard library. A text serves several samples, so that one
prefill can serve them all (tasks/prefill_once.py). A sample of code_facts asks for `--questions` of a text's facts, and
the next sample for the next ones. They are in turn

- the number that a function returns;
- the number that one of three functions returns whose names begin alike;
- the last value of a constant that is assigned twice;
- the number that a function returns by calling another one: two hops.

code_line asks for a line that needs a name which occurs earlier in the text, but not in the last FAR characters. Its
score is the edit similarity of LCC (Guo et al., arXiv 2306.14893) and RepoBench (Liu et al., arXiv 2306.03091), 100 if
the line is right; here it is difflib's ratio.
"""

import random
import re
import sysconfig
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from itertools import accumulate
from pathlib import Path

from tasks import Question, Recipe, Sample, Task, fill_length
from tasks.ruler import Drawer

FACTS, LINES = 12, 6  # samples of a text
FAR = 3000  # characters
FACT_TOKENS, LINE_TOKENS = 48, 32  # of an answer
BEGIN = "Here is the source code of a program.\n\n```python\n"
STATEMENT = re.compile(r"(?!#|def |class |__).*(\w\(| = )")
LONG_NAME = re.compile(r"[A-Za-z_]\w{6,}")


@cache
def lines_of(code: str | None) -> tuple[list[str], list[int]]:
    """The lines of a text, and the indices of those after two blank ones, where definitions begin."""
    if code is None:  # the modules in the order of their names
        modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        code = "\n\n\n".join(path.read_text(encoding="utf-8") for path in modules)
    lines = code.splitlines()
    starts = [i for i in range(2, len(lines)) if lines[i][:1].strip() and not (lines[i - 1] or lines[i - 2])]
    return lines, starts or [0]


def excerpt(recipe: Recipe, rng: random.Random, n: int) -> tuple[list[str], list[int]]:
    """n lines of the text from a definition on, and the indices of those where definitions begin."""
    lines, starts = lines_of(recipe.haystack)
    first = rng.choice([at for at in starts if at + n <= len(lines)] or [0])
    return lines[first : first + n], [at - first for at in starts if first <= at < first + n]


# Facts


@dataclass(frozen=True)
class Fact:
    planted: tuple[str, ...]  # definitions, in the order of the text
    question: str
    opening: str
    value: str

    def ask(self) -> Question:
        opening = f"```python\n{self.opening}"
        return Question(f"\n```\n\n{self.question}\n\n{opening}", (self.value,), opening=opening)


def draw_fact(kind: int, drawer: Drawer) -> Fact:
    name, values = f"{drawer.noun()}_{drawer.noun()}", [drawer.numbers() for _ in range(3)]
    if kind == 2:
        name = name.upper()
        planted = tuple(f"{name} = {value}" for value in values[:2])
        return Fact(
            planted, f"Which value does {name} have in the end? Show its last assignment.", f"{name} =", values[1]
        )
    names = [name if kind == 0 else f"{name}_{drawer.noun()}" for _ in range(1 if kind == 0 else 3)]
    results = [f"{names[1]}()", values[0]] if kind == 3 else values
    planted = [f"def {own}():\n    return {result}" for own, result in zip(names, results, strict=False)]
    drawer.rng.shuffle(planted)
    more = ", and that of the function that it calls" if kind == 3 else ""
    question = f"What does {names[0]}() return? Show its definition{more}."
    return Fact(tuple(planted), question, f"def {names[0]}():\n    return", values[0])


def facts(recipe: Recipe, index: int) -> Sample:
    count = min(recipe.questions, FACTS)
    text, first = divmod(index * count, FACTS)
    rng = recipe.rng("code_facts", text)
    drawer = Drawer(rng, str.isalnum)  # words without a hyphen
    every = [draw_fact(i % 4, drawer) for i in range(FACTS)]
    questions = [fact.ask() for fact in every]
    asked = [questions[i % FACTS] for i in range(first, first + count)]
    longest = max(questions, key=lambda question: len(recipe.encode(question.text)))  # the text fits with each

    def make(n: int) -> Sample:
        rng = recipe.rng("code_facts places", text)
        lines, starts = excerpt(recipe, rng, n)
        planted = [definition for own in every for definition in own.planted]
        places = [at for own in every for at in sorted(rng.choices(starts, k=len(own.planted)))]
        for at, _, definition in sorted(zip(places, range(len(planted)), planted, strict=True), reverse=True):
            lines[at:at] = [definition, "", ""]
        return Sample(BEGIN + "\n".join(lines), (longest,))

    return replace(fill_length(make, recipe, FACT_TOKENS), questions=tuple(asked))


def first_number(answer: str, question: Question) -> float:
    """Whether the first long number of the answer is the right one."""
    return 100.0 * (re.findall(r"\d{5,}", answer)[:1] == list(question.answers))


# The next line


def cuts(lines: list[str], rng: random.Random) -> list[int]:
    """At most LINES lines of the last quarter that need a name from far above, the one with the longest text first."""
    ends = [0, *accumulate(len(line) + 1 for line in lines)]
    text, found = "\n".join(lines), []
    for i in range(len(lines) * 3 // 4, len(lines)):
        line, near = lines[i].strip(), max(0, ends[i] - FAR)
        names = LONG_NAME.findall(line) if 20 <= len(line) <= 72 and STATEMENT.match(line) else ()
        if any(name in text[:near] and name not in text[near : ends[i]] for name in names):
            found.append(i)
    return sorted(rng.sample(found, min(LINES, len(found))), reverse=True)


def next_line(recipe: Recipe, index: int) -> Sample:
    text, part = divmod(index, LINES)

    def make(n: int) -> Sample:
        lines, _ = excerpt(recipe, recipe.rng("code_line", text), n)
        return Sample("\n".join(lines), (Question("\n", ()),))

    lines = fill_length(make, recipe, LINE_TOKENS).text.split("\n")
    if not (found := cuts(lines, recipe.rng("code_line cuts", text))):
        raise ValueError(f"no line at the end of the text needs a name of {FAR} characters before")
    at = found[part % len(found)]
    return Sample("\n".join(lines[:at]), (Question("\n", (lines[at].strip(),)),))


def similarity(answer: str, question: Question) -> float:
    """That of the answer's first line and the right one, without indentation."""
    line = next(filter(None, map(str.strip, answer.splitlines())), "")
    return 100 * SequenceMatcher(None, line, question.answers[0], autojunk=False).ratio()


TASKS = {
    "code_facts": Task("code_facts", FACT_TOKENS, facts, first_number),
    "code_line": Task("code_line", LINE_TOKENS, next_line, similarity),
}
