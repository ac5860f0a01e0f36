"""Tasks of published datasets with one record per line: finds their files, and turns records into samples."""

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import ClassVar

from tasks import Question, Recipe, Sample, Task, metrics
from text.files import parse_json

PAGE = "https://huggingface.co/datasets/{}"


@cache
def download(repo: str, name: str) -> Path:
    """Downloads a file of a huggingface.co dataset to huggingface_hub's cache. Raises FileNotFoundError."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # a lost connection raises an error of whichever HTTP library huggingface_hub uses
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise FileNotFoundError(
            f"downloading {name} failed ({why}); fetch it from {PAGE.format(repo)} and name its folder with --data"
        ) from None


@lru_cache(maxsize=1)  # of the present task: a file may have hundreds of megabytes
def lines(path: Path) -> list[bytes]:
    """The records of a file, which are not parsed yet."""
    return [line for line in path.read_bytes().split(b"\n") if line.strip()]


def cut_middle(recipe: Recipe, text: str, question: str, reserve: int) -> tuple[str, str]:
    """Cuts a prompt so that it plus `reserve` tokens takes at most recipe.length tokens; returns (text, question).

    As published, an overlong prompt keeps as many tokens as fit, half from its beginning and half from its end. If the
    joined halves encode to more tokens, each half loses one token at a time. Raises ValueError if nothing fits.
    """
    ids, room = recipe.encode(text + question), recipe.length - reserve
    if len(ids) <= room:
        return text, question
    for half in range(room // 2, 0, -1):
        head, tail = recipe.decode(ids[:half]), recipe.decode(ids[-half:])
        if len(recipe.encode(head + tail)) <= room:
            break
    else:
        raise ValueError(f"a length of {recipe.length} tokens is too short: {reserve} of them are for the answer")
    if tail.endswith(question):
        return head + tail.removesuffix(question), question
    return head, tail  # the cut reaches into the question


@dataclass(frozen=True)
class Published:
    """A task of a dataset on huggingface.co. A subclass is a dataset."""

    repo: ClassVar[str]

    name: str
    prompt: str  # with {context} and the fields that `fill` gives
    max_new_tokens: int
    metric: str  # a function of tasks/metrics.py

    def fetch(self) -> Path:
        """The task's file, downloaded."""
        return download(self.repo, f"{self.name}.jsonl")

    def fill(self, record: dict) -> dict[str, str]:
        """A record's values for the fields of the prompt. Raises ValueError if the record cannot be used."""
        return {"input": record["input"]}

    def references(self, record: dict) -> dict[str, tuple[str, ...]]:
        """A question's `answers` and, if its score takes them, `classes`."""
        raise NotImplementedError

    def score(self, answer: str, question: Question) -> float:
        classes = (question.classes,) if self.metric == "classification" else ()
        return getattr(metrics, self.metric)(answer, question.answers, *classes)

    def file(self, recipe: Recipe) -> Path:
        """The task's file: in a data folder or its subfolder `data`, otherwise downloaded. Raises FileNotFoundError."""
        if recipe.data is None:
            return self.fetch()
        name = f"{self.name}.jsonl"
        for path in (recipe.data / name, recipe.data / "data" / name):
            if path.is_file():
                return path
        where = f"fetch it from {PAGE.format(self.repo)}, or leave out --data to have it downloaded"
        raise FileNotFoundError(f"there is no {recipe.data / name}: {where}")

    def size(self, recipe: Recipe) -> int:
        return len(lines(self.file(recipe)))

    def sample(self, recipe: Recipe, index: int) -> Sample:
        path = self.file(recipe)
        try:
            record = parse_json(lines(path)[index], f"record {index} of {path}")
        except ValueError as error:
            raise ValueError(f"{error}; fetch the file again") from None
        if not isinstance(record, dict):
            raise ValueError(f"record {index} of {path} is not a JSON object; fetch the file again")
        before, after = self.prompt.split("{context}")
        fields = self.fill(record)
        text, question = before.format(**fields) + record["context"], after.format(**fields)
        text, question = cut_middle(recipe, text, question, self.max_new_tokens)
        return Sample(text, (Question(question, **self.references(record)),))

    @classmethod
    def tasks(cls, specs: str, plain: tuple[str, ...] = ()) -> dict[str, Task]:
        """The tasks that a JSON file of this folder describes, by name; those in `plain` take no chat template."""
        tasks = {}
        for name, spec in json.loads(Path(__file__).with_name(specs).read_text(encoding="utf-8")).items():
            own = cls(name, spec["prompt"], spec["max_new_tokens"], spec["score"])
            tasks[name] = Task(name, own.max_new_tokens, own.sample, own.score, own.size, name not in plain)
        return tasks
