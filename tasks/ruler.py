"""RULER's 13 tasks (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
arXiv 2404.06654): retrieval, variable tracking, aggregation and question answering in a text of any length.

Wordings, task parameters, answer lengths and scores are the published ones (github.com/NVIDIA/RULER, Apache-2.0); the
generators are our own. Differences: the default haystack is `tasks/haystack.txt` (prose of Python's language
reference), not Paul Graham's essays; sentences end where .!? precedes a space; no key or value is drawn twice for one
sample; later questions, which RULER does not have, ask for other keys.
qa_1 and qa_2 read `squad.json` (dev-v2.0) and `hotpotqa.json` (dev distractor v1) from the data folder.
"""

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from wonderwords import RandomWord

from tasks import (
    Question,
    Recipe,
    Sample,
    Task,
    data_file,
    fill_length,
    shipped_haystack,
    string_match_all,
    string_match_part,
)
from text.files import parse_json

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * i / 39) for i in range(40)]  # the depths of needles in an essay, in percent


@cache
def wordlist(kind: str) -> list[str]:
    """wonderwords' "noun", "adjective" or "verb" list."""
    return sorted(RandomWord().filter(include_parts_of_speech=[kind]))


@dataclass
class Drawer:
    """Draws keys and values, none of them twice. `keep` says whether a word or number may be drawn."""

    rng: random.Random
    keep: Callable[[str], bool] = lambda _: True
    drawn: set[str] = field(default_factory=set, init=False)

    def draw(self, kind: str) -> str:
        while (word := getattr(self, kind)()) in self.drawn:
            pass
        self.drawn.add(word)
        return word

    def words(self) -> str:
        return f"{self._kept(lambda: self.rng.choice(wordlist('adjective')))}-{self.noun()}"

    def noun(self) -> str:
        return self._kept(lambda: self.rng.choice(wordlist("noun")))

    def numbers(self) -> str:
        return self._kept(lambda: str(self.rng.randint(10**6, 10**7 - 1)))

    def uuids(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _kept(self, draw: Callable[[], str]) -> str:
        while not self.keep(word := draw()):
            pass
        return word


@cache
def haystack_words(text: str | None) -> list[str]:
    words = (shipped_haystack() if text is None else text).split()
    if not words:
        raise ValueError("the haystack has no words")
    return words


def essay(text: str | None, n: int, first: int = 0) -> list[str]:
    """n words of a haystack as sentences, from word `first` on; the haystack starts over at its end."""
    words = haystack_words(text)
    text = " ".join(words[(first + i) % len(words)] for i in range(n))
    return re.split(r"(?<=[.!?])\s+", text)


def insert(rng: random.Random, sentences: list[str], needles: list[str]) -> str:
    """The sentences as a text, with the needles in order at random depths between them, one at each."""
    if len(needles) > len(DEPTHS):
        raise ValueError(f"a text hides at most {len(DEPTHS)} needles, not {len(needles)}: lower --questions")
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    parts, last = [], 0
    for depth, needle in zip(depths, needles, strict=True):
        at = len(sentences) * depth // 100
        parts += [*sentences[last:at], needle]
        last = at
    return " ".join(parts + sentences[last:])


# Needles in a haystack


NEEDLE = "One of the special magic {type} for {key} is: {value}."
# If one value is asked for, and if several are: what begins the text, a question, and what begins its answer.
ONE = (
    "A special magic {type} is hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {type} afterwards.\n",
    "\nWhat is the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text is",
)
MANY = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. I will quiz you "
    "about the {type} afterwards.\n",
    "\nWhat are all the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text are",
)


@dataclass(frozen=True)
class Niah:
    """A needle task: its haystack, its kinds of keys and values, its keys, values per key and keys per question."""

    haystack: str  # noise, essay or needle (other needles)
    key: str = "words"  # words or uuids
    value: str = "numbers"  # numbers or uuids
    keys: int = 1
    values: int = 1
    queries: int = 1
    backwards: bool = False  # a needle for each question, and the last one is asked for first

    def sample(self, recipe: Recipe, drawer: Drawer, n: int) -> Sample:
        """n: words of the essay, lines of noise, or other needles."""
        rng = drawer.rng
        count = recipe.questions if self.backwards else max(self.keys, self.queries)
        keys = [drawer.draw(self.key) for _ in range(count)]
        facts = {key: [drawer.draw(self.value) for _ in range(self.values)] for key in keys}
        order = keys[::-1] if self.backwards else rng.sample(keys, len(keys))  # in which questions ask for keys

        def needle(key: str, value: str) -> str:
            return NEEDLE.format(type=self.value, key=key, value=value)

        needles = [needle(key, value) for key, values in facts.items() for value in values]
        if not self.backwards:
            rng.shuffle(needles)
        if self.haystack == "essay":
            context = insert(rng, essay(recipe.haystack, n), needles)
        else:
            lines = [NOISE] * n
            if self.haystack == "needle":
                others = {drawer.draw(self.key): [drawer.draw(self.value)] for _ in range(n)}
                lines = [needle(key, value) for key, [value] in others.items()]
                order += rng.sample(list(others), n)
                facts |= others
            for at in sorted(rng.sample(range(n), len(needles)), reverse=True):
                lines.insert(at, needles.pop())
            context = "\n".join(lines)
        single = self.queries * self.values == 1
        kind = self.value[:-1] if single else self.value
        intro, asking, opening = ONE if single else MANY
        questions, order = [], order[: self.queries * recipe.questions]
        for i in range(0, len(order), self.queries):
            group = order[i : i + self.queries]
            text, begun = (part.format(type=kind, query=join(group)) for part in (asking, opening))
            answers = tuple(value for key in group for value in facts[key])
            questions.append(Question(text + begun, answers, opening=begun))
        return Sample(intro.format(type=kind) + context, tuple(questions))


def join(names: list[str]) -> str:
    return ", ".join(names[:-1]) + ", and " + names[-1] if len(names) > 1 else names[0]


def needles(name: str, niah: Niah, recipe: Recipe, index: int) -> Sample:
    smallest = max(niah.keys, niah.queries) * niah.values
    return fill_length(lambda n: niah.sample(recipe, Drawer(recipe.rng(name, index)), n), recipe, 128, smallest)


# Variable tracking


def opened(text: str, answers: tuple[str, ...]) -> Question:
    """A question whose text from " Answer:" on begins the answer: in a chat, the model's turn begins with it."""
    return Question(text, answers, opening=text[text.rindex(" Answer:") :])


def tracking(rng: random.Random, n: int, size: int) -> Sample:
    """A chain of five variables, with names of `size` letters, in n lines of noise."""
    names: list[str] = []
    while len(names) < 5:
        names = list(dict.fromkeys([*names, "".join(rng.choices(string.ascii_uppercase, k=size))]))
    value = str(rng.randint(10000, 99998))
    lines, chain = [NOISE] * n, [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    for i, at in enumerate(sorted(rng.sample(range(n), len(chain)))):
        lines.insert(at + i, chain[i])
    text = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n" + "\n".join(lines)
    question = (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, "
        "they are: "
    )
    return Sample(text, (opened(question, tuple(names)),))


def variable_tracking(recipe: Recipe, index: int) -> Sample:
    short = replace(recipe, length=500)
    example = fill_length(lambda n: tracking(recipe.rng("vt example", index), n, size=3), short, reserve=0, smallest=5)
    shown = example.prompt + " " + " ".join(example.questions[0].answers) + "\n\n"

    def make(n: int) -> Sample:
        sample = tracking(recipe.rng("vt", index), n, size=5)
        return replace(sample, text=shown + sample.text)

    return fill_length(make, recipe, 30, smallest=5)


# Aggregation


@cache
def all_words() -> list[str]:
    return sorted({word for kind in ("noun", "adjective", "verb") for word in wordlist(kind)})


def common_words(rng: random.Random, n: int, common: int, uncommon: int) -> Sample:
    """A list of n words, 10 of them repeated `common` times and the others `uncommon` times."""
    words = all_words()
    if n > len(words):  # RULER switches to a larger list here
        words = [f"{a}-{b}" for a in wordlist("adjective") for b in rng.sample(wordlist("noun"), n // 100)]
    words = rng.sample(words, n)
    numbered = words[:10] * common + words[10:] * uncommon
    rng.shuffle(numbered)
    text = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n" + " ".join(f"{i}. {word}" for i, word in enumerate(numbered, 1))
    )
    question = (
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:"
    )
    return Sample(text, (opened(question, tuple(words[:10])),))


def common_words_extraction(recipe: Recipe, index: int) -> Sample:
    small = recipe.length < 4096
    example = common_words(recipe.rng("cwe example", index), *((20, 3, 1) if small else (40, 10, 3)))
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(example.questions[0].answers, 1))

    def make(n: int) -> Sample:
        sample = common_words(recipe.rng("cwe", index), n, *((6, 1) if small else (30, 3)))
        return replace(sample, text=f"{example.prompt} {listed}\n{sample.text}")

    return fill_length(make, recipe, 120, smallest=11)


def frequent_words(recipe: Recipe, index: int) -> Sample:
    """Coded words, the k-th one n k^-2 / zeta(2) times, rounded down; the first one is written as dots."""
    intro = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    question = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )

    def make(n: int) -> Sample:
        rng, coded = recipe.rng("fwe", index), {"...": None}
        while len(coded) < max(4, (recipe.length - 50) // 50):
            coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        words = list(coded)
        text = [word for k, word in enumerate(words, 1) for _ in range(int(n * k**-2.0 / (math.pi**2 / 6)))]
        rng.shuffle(text)
        return Sample(intro + " ".join(text), (opened(question, tuple(words[1:4])),))

    return fill_length(make, recipe, 50, smallest=64)


# Questions about documents


@dataclass(frozen=True)
class Asked:
    """A question, with the numbers of the documents that answer it and of documents close to these."""

    query: str
    answers: tuple[str, ...]
    support: list[int]
    close: list[int]


def squad(data: dict) -> tuple[list[Asked], list[str]]:
    documents = sorted({p["context"] for article in data["data"] for p in article["paragraphs"]})
    number = {document: i for i, document in enumerate(documents)}
    asked = []
    for article in data["data"]:
        near = [number[p["context"]] for p in article["paragraphs"]]
        for p in article["paragraphs"]:
            own = number[p["context"]]
            asked += [
                Asked(qa["question"], tuple(a["text"] for a in qa["answers"]), [own], [i for i in near if i != own])
                for qa in p["qas"]
                if not qa.get("is_impossible")
            ]
    return asked, documents


def hotpotqa(data: list) -> tuple[list[Asked], list[str]]:
    def pages(record: dict) -> Iterator[str]:
        return (f"{title}\n{''.join(sentences)}" for title, sentences in record["context"])

    documents = sorted({page for record in data for page in pages(record)})
    number = {document: i for i, document in enumerate(documents)}
    return [Asked(r["question"], (r["answer"],), [number[page] for page in pages(r)], []) for r in data], documents


@cache
def read_qa(dataset: str, folder: Path | None) -> tuple[list[Asked], list[str]]:
    """The questions and the documents of a dataset. Raises ValueError or FileNotFoundError that says what to give."""
    path, read = data_file(folder, f"{dataset}.json"), squad if dataset == "squad" else hotpotqa
    try:
        return read(parse_json(path.read_bytes(), path))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the {dataset} file that RULER reads ({error!r})") from None


def count_qa(dataset: str, recipe: Recipe) -> int:
    return len(read_qa(dataset, recipe.data)[0])


def answering(dataset: str, recipe: Recipe, index: int) -> Sample:
    asked, documents = read_qa(dataset, recipe.data)
    ask = asked[index]
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    own = {*ask.support, *ask.close}

    def make(n: int) -> Sample:
        rng = recipe.rng(dataset, index)
        chosen = ask.support + rng.sample(ask.close, min(n - len(ask.support), len(ask.close)))
        missing = n - len(chosen)
        others = [i for i in range(len(documents)) if i not in own] if missing else []
        chosen += rng.sample(others, min(missing, len(others)))
        chosen += rng.choices(others or range(len(documents)), k=max(0, missing - len(others)))
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{documents[d]}" for i, d in enumerate(chosen, 1))
        text = f"{order}\n\nThe following are given documents.\n\n{context}"
        return Sample(text, (opened(f"\n\n{order}\n\nQuestion: {ask.query} Answer:", ask.answers),))

    return fill_length(make, recipe, 32, smallest=len(ask.support))


NIAH = {
    "niah_single_1": Niah("noise"),
    "niah_single_2": Niah("essay"),
    "niah_single_3": Niah("essay", value="uuids"),
    "niah_multikey_1": Niah("essay", keys=4),
    "niah_multikey_2": Niah("needle"),
    "niah_multikey_3": Niah("needle", key="uuids", value="uuids"),
    "niah_multivalue": Niah("essay", values=4),
    "niah_multiquery": Niah("essay", queries=4),
}
TASKS = {name: Task(name, 128, partial(needles, name, niah), string_match_all) for name, niah in NIAH.items()}
TASKS |= {
    "vt": Task("vt", 30, variable_tracking, string_match_all),
    "cwe": Task("cwe", 120, common_words_extraction, string_match_all),
    "fwe": Task("fwe", 50, frequent_words, string_match_all),
    "qa_1": Task("qa_1", 32, partial(answering, "squad"), string_match_part, partial(count_qa, "squad")),
    "qa_2": Task("qa_2", 32, partial(answering, "hotpotqa"), string_match_part, partial(count_qa, "hotpotqa")),
}
