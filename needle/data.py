"""Training data for needle/train.py: plain text, and texts with questions that they answer."""

import gzip
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from tasks import Recipe, Sample, fill_length, two_stage
from tasks.ruler import NIAH, Drawer, Niah, Wording, join, tracking, variable_tracking
from text.tokenizer import Tokenizer

BOS, EOS = 1, 2
TEXT_WEIGHT = 0.02  # the weight, in the loss, of a token outside answers

# Plain text

SOURCES = (
    "common-licenses/*",
    "man/man[1-8]/*.gz",
    "doc/**/*.txt*",
    "doc/**/README*",
    "doc/**/copyright",
    "perl/5*/**/*.pod",
)


def unroff(text: str) -> str:
    """A manual page without most of its markup."""
    lines = []
    for line in text.split("\n"):
        macro = re.match(r"[.'](\w*)\s*(.*)", line)
        lines.append(line if not macro else macro[2] if set(macro[1]) <= set("BIR") else "")
    text = re.sub(r"\\f.|\\&|\\\|", "", "\n".join(lines))
    return text.replace("\\-", "-").replace("\\(aq", "'")


def paragraphs(root: Path = Path("/usr/share")) -> list[str]:
    """The prose in a Debian machine's manuals and licenses, each paragraph once."""
    prose: dict[str, None] = {}
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            try:
                data = path.read_bytes()
                text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            except (OSError, EOFError, UnicodeDecodeError, zlib.error):
                continue
            for paragraph in re.split(r"\n\s*\n", unroff(text) if "/man/" in str(path) else text):
                words = " ".join(paragraph.split())
                plain = sum(c.isalpha() or c == " " for c in words)
                if 150 < len(words) < 2000 and words.isascii() and words[0].isupper() and plain > 0.92 * len(words):
                    prose[words] = None
    return list(prose)


# Questions


def keep(drawn: str) -> bool:
    """Whether training may use a word or a number; a fifth of each is held out."""
    return zlib.crc32(drawn.encode()) % 5 > 0


class Alike(Drawer):
    """Reuses words of earlier keys, and only three digits in numbers, so that matching one word or digit fails."""

    def __init__(self, *args):
        super().__init__(*args)
        self.digits = self.rng.sample("123456789", 3)

    def words(self) -> str:
        words = super().words().split("-")
        others = [key.split("-") for key in sorted(self.drawn) if key.count("-") == 1]
        if others and len(words) == 2 and self.rng.random() < 0.6:
            i = self.rng.randrange(2)
            words[i] = self.rng.choice(others)[i]
        return "-".join(words)

    def numbers(self) -> str:
        return self._kept(lambda: "".join(self.rng.choices(self.digits, k=7)))


# Questions of the first four repeat the words before the value, which is easiest to learn.
WORDINGS = [
    Wording("{key} {value}.", "\n{query}", ""),
    Wording("{key} is {value}.", "\n{query}", " is"),
    Wording("The {type} of {key}: {value}.", "\nThe {type} of {query}", ":"),
    Wording("Remember that {key} has the code {value}.", "\nRemember that {query}", " has the code"),
    Wording(
        "The password for {key} was set to {value}.",
        "\nQuestion: What is the password for {query}?",
        " Answer: The password for {query} was set to",
    ),
    Wording(
        "In the register, {key} stands beside {value}.",
        "\nWhich of the {type} stands beside {query} in the register?",
        " In the register, {query} stands beside",
        "A register of {type} is spread over this text.\n",
    ),
    Wording(
        "{key} lives at number {value}.",
        "\n\nQuestion: At what number does {query} live?\nAnswer:",
        " {query} lives at",
    ),
    Wording(
        "Note: the {type} that belong to {key} are {value}.",
        "\nWhich {type} belong to {query}?",
        " The {type} that belong to {query} in this text are",
    ),
    Wording(
        "One of the magic {type} of {key} is: {value}.",
        "\nWhat is the magic {type} of {query} in the text above?",
        " The magic {type} of {query} in the text above is",
        "Some magic {type} are hidden below. Memorize them.\n",
    ),
]


@dataclass
class Episode:
    """A text, the questions about it, and the answers as the model should write them."""

    kind: str
    sample: Sample
    answers: list[str]


class Data:
    """Endless training sequences, drawn from `seed`."""

    def __init__(self, tokenizer: Tokenizer, text: list[str], seed: int):
        self.tokenizer, self.text, self.rng = tokenizer, text, random.Random(seed)

    def recipe(self, length: int, questions: int) -> Recipe:
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        return Recipe(length, encode, decode, self.rng.getrandbits(32), questions, haystack=self.stretch(length))

    def stretch(self, length: int) -> str:
        """`length` successive words of the plain text."""
        start = self.rng.randrange(len(self.text) - length)
        return " ".join(self.text[start : start + length])

    def niah(self, kind: str, length: int, niah: Niah, questions: int) -> Episode:
        recipe = self.recipe(length, questions)
        reserve = (40 if niah.value == "uuids" else 24) * niah.values * niah.queries + 60 * (questions - 1)
        drawer = Alike if self.rng.random() < (0.3 if kind in ("direct", "echo") else 0.6) else Drawer

        def make(n: int) -> Sample:
            return niah.sample(recipe, drawer(random.Random(recipe.seed), keep), n)

        sample = fill_length(make, recipe, reserve, smallest=max(niah.keys, niah.queries) * niah.values)
        text, answers = sample.text, []
        for question in sample.questions:
            values = sorted(question.answers, key=text.index)
            if niah.queries > 1:  # the answer names each value's key
                befores = [text[: text.index(value)] for value in question.answers]
                keys = [before[before.rindex(" for ") + 5 : before.rindex(" is:")] for before in befores]
                values = [f"{key}: {value}" for key, value in zip(keys, question.answers, strict=True)]
            answers.append(join(values) + ".")
        return Episode(kind, sample, answers)

    def tracking(self, length: int) -> Episode:
        recipe, hops, size = self.recipe(length, 1), self.rng.choice([1, 2, 3, 4, 4]), self.rng.choice([3, 5, 5])
        if length >= 1024 and self.rng.random() < 0.6:  # as in RULER, with an example of another chain first
            sample = variable_tracking(recipe, 0)
        else:
            seed = recipe.seed
            sample = fill_length(lambda n: tracking(random.Random(seed), n, hops, size), recipe, 30, smallest=hops + 1)
        return Episode("vt", sample, [" ".join(sample.questions[0].answers)])

    def lookup(self, length: int, questions: int) -> Episode:
        recipe = self.recipe(length, questions)
        sample = two_stage.two_stage(True, recipe, 0, "train", 60 * questions)
        answers = []
        for question in sample.questions:
            a, b = map(int, re.search(r"(\d+) \+ (\d+)", question.text).groups())
            answers.append(f"{a} + {b} = {a + b}: {question.answers[0]}.")
        return Episode("lookup", sample, answers)

    def echo(self, kind: str, length: int, questions: int) -> Episode:
        """Facts whose questions repeat their first words."""
        wording = self.rng.choice(WORDINGS[: 1 if kind == "direct" else 4])
        niah = Niah(self.rng.choice(["essay", "needle"]), keys=questions, wording=wording)
        return self.niah(kind, length, niah, questions)

    def drill(self, length: int, questions: int) -> Episode:
        """Facts of random words, a few of them between key and value. Half of the questions repeat the words."""

        def words(most: int) -> str:
            drawn = (self.rng.choice(self.text) for _ in range(self.rng.randint(0, most)))
            return "".join(f" {word}" for word in drawn if word.isalpha())

        said, between = words(2), words(4)
        asked, again = (said, between) if self.rng.random() < 0.5 else (words(3), words(5))
        fact, question = f"{said} {{key}}{between} {{value}}.".strip(), "\n" + f"{asked} {{query}}".strip()
        wording = Wording(fact, question, again)
        niah = Niah(self.rng.choice(["essay", "needle"]), keys=questions, wording=wording)
        return self.niah("drill", length, niah, questions)

    def episode(self, stage: str, length: int) -> Episode:
        rng, long = self.rng, length >= 512
        if stage == "ruler" and rng.random() < 0.8:
            questions = rng.randint(2, max(2, length // 75))
            return self.niah(stage, length, Niah(rng.choice(["essay", "needle"]), keys=questions), questions)
        if stage != "all":
            return self.echo(rng.choice(["direct", "echo"]) if stage != "direct" else stage, length, rng.randint(1, 4))
        if rng.random() < 0.1:
            return self.drill(length, rng.randint(2, min(8, length // 60)))
        questions = rng.randint(1, min(8, length // 100))
        wording = None if rng.random() < 0.7 else rng.choice(WORDINGS)
        value = "uuids" if long and rng.random() < 0.25 else "numbers"
        needles = {  # the kind's share of the episodes, its task and the most questions
            "noise": (0.5, Niah("noise", value=value, wording=wording), 1),
            "essay": (
                2.5,
                Niah("essay", value=value, keys=max(questions, rng.randint(1, 4)), wording=wording),
                questions,
            ),
            "multikey_2": (2, Niah("needle", wording=wording), questions),
            "multikey_3": (1.5 * long, NIAH["niah_multikey_3"], min(questions, length // 256)),
            "multivalue": (2.5, Niah("essay", values=rng.randint(2, 4)), 1),
            "multiquery": (1, Niah("essay", queries=rng.randint(2, 4 if long else 2)), 1),
        }
        shares = {"echo": 1, "vt": 2 if length > 512 else 6, "lookup": 0.7}
        shares |= {kind: share for kind, (share, _, _) in needles.items()}
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if kind in needles:
            return self.niah(kind, length, *needles[kind][1:])
        if kind == "echo":
            return self.echo(kind, length, questions)
        return self.tracking(length) if kind == "vt" else self.lookup(length, questions)

    def sequence(self, stage: str, length: int) -> "Sequence":
        """A sequence of `length` tokens: episodes as long as they fit, then plain text."""
        s = Sequence()
        while (room := length - len(s.ids)) >= 128:
            if self.rng.random() < 0.4:  # short episodes teach more per token
                room = min(room, self.rng.choice([256, 512]))
            try:
                episode = self.episode(stage, room)
            except ValueError:  # the room is too short for the episode
                break
            text = episode.sample.text
            for question, answer in zip(episode.sample.questions, episode.answers, strict=True):
                prompt = self.tokenizer.encode(text + question.text, bos=bool(text))
                tokens = self.tokenizer.encode(answer if question.text.endswith(" ") else " " + answer, bos=False)
                if len(s.ids) + len(prompt) + len(tokens) > length:
                    break
                s.add(prompt, TEXT_WEIGHT)
                s.add(tokens, 1.0, episode.kind)
                text = ""
        if len(s.ids) < length:
            s.add(self.tokenizer.encode(self.stretch(length))[: length - len(s.ids)], TEXT_WEIGHT)
        return s

    def repeats(self, length: int) -> "Sequence":
        """A few phrases of random tokens, repeated in random order: only earlier occurrences tell the next token."""
        s, rng = Sequence(), self.rng
        if rng.random() < 0.3:  # or one long phrase, twice
            stretch = [rng.randrange(3, self.tokenizer.vocab_size) for _ in range(rng.randint(8, (length - 1) // 2))]
            s.add([BOS, *stretch, stretch[0]], 0.0)
            s.add(stretch[1:], 1.0, "repeats", eos=False)
            s.add([BOS] * (length - len(s.ids)), 0.0)
            return s
        sizes = [rng.randint(3, rng.choice([8, 16, length // 4])) for _ in range(rng.randint(2, 8))]
        phrases = [[rng.randrange(3, self.tokenizer.vocab_size) for _ in range(size)] for size in sizes]
        seen = set()
        s.add([BOS], 0.0)
        while len(s.ids) < length:
            i = rng.randrange(len(phrases))
            phrase = phrases[i][: length - len(s.ids)]
            s.add(phrase[:1], 0.0)
            s.add(phrase[1:], 1.0 * (i in seen), "repeats" if i in seen else None, eos=False)
            seen.add(i)
        return s


class Sequence:
    """Tokens, what should follow each, that prediction's weight in the loss, and (kind, begin, end) of answers."""

    def __init__(self):
        self.ids, self.follow, self.weights, self.answers = [], [], [], []
        self.ended = True

    def add(self, tokens: list[int], weight: float, kind: str | None = None, eos: bool = True) -> None:
        """`kind` marks an answer, after which EOS should follow (if `eos`). As in the engine, EOS is not fed itself."""
        if not tokens:
            return
        begin = len(self.ids) - 1
        if not self.ended:
            self.follow[-1], self.weights[-1] = tokens[0], weight
        self.ids += tokens
        self.follow += [*tokens[1:], EOS]
        self.ended = bool(kind) and eos
        self.weights += [weight] * (len(tokens) - 1) + [weight if self.ended else 0.0]
        if kind:
            self.answers.append((kind, begin, len(self.ids) - (not eos)))
