"""Tasks of published datasets with one record per line: finds their files, and turns records into samples."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from tasks import Question, Recipe, Sample, Task

PAGE = "https://huggingface.co/datasets/{}"


def read_specs(name: str) -> dict[str, dict]:
    """task -> its prompt, max_new_tokens and score (a function of tasks/metrics.py), from a file of this folder."""
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


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


def find(folder: Path, name: str, repo: str) -> Path:
    """A file in a data folder or in its subfolder `data`. Raises FileNotFoundError."""
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"there is no {folder / name}: fetch it from {PAGE.format(repo)}, or leave out --data to have it downloaded"
    )


@cache
def line_starts(path: Path) -> list[int]:
    """The byte offset of each non-blank line. Records are parsed one by one, since a file may have a gigabyte."""
    starts, at = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(at)
            at += len(line)
    return starts


def record(path: Path, index: int) -> dict:
    """A record of a jsonl file. Raises IndexError past the last record, ValueError if it is not a JSON object."""
    with path.open("rb") as file:
        file.seek(line_starts(path)[index])
        try:
            content = json.loads(file.readline())
        except ValueError as error:
            raise ValueError(f"record {index} of {path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(content, dict):
        raise ValueError(f"record {index} of {path} is not a JSON object; fetch the file again")
    return content


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


def make_tasks(
    specs: dict[str, dict],
    path_of: Callable[[str, Recipe], Path],
    fields: Callable[[str, dict], dict[str, str]],
    references: Callable[[str, dict], tuple],
    score: Callable[[str, str, Question], float],
    plain: tuple[str, ...] = (),
) -> dict[str, Task]:
    """The tasks of `specs`, by name. For a task's name, `path_of` gives its file, `fields` a record's values for the
    prompt, `references` its answers (and classes), `score` an answer's score. `plain` tasks take no chat template."""

    def sample(name: str, recipe: Recipe, index: int) -> Sample:
        content, spec = record(path_of(name, recipe), index), specs[name]
        before, after = spec["prompt"].split("{context}")
        values = fields(name, content)
        text, question = before.format(**values) + content["context"], after.format(**values)
        text, question = cut_middle(recipe, text, question, spec["max_new_tokens"])
        return Sample(text, (Question(question, *references(name, content)),))

    def size(name: str, recipe: Recipe) -> int:
        return len(line_starts(path_of(name, recipe)))

    return {
        name: Task(name, spec["max_new_tokens"], *(partial(f, name) for f in (sample, score, size)), name not in plain)
        for name, spec in specs.items()
    }
