"""Published datasets with a record a line: where their files are, and how a record becomes a text and a question."""

import json
from functools import cache
from pathlib import Path

from tasks import Setting

PAGE = "https://huggingface.co/datasets/{}"


@cache
def download(repo: str, name: str) -> Path:
    """A file of a dataset of huggingface.co, in huggingface_hub's cache."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # what a lost connection raises depends on the HTTP library behind huggingface_hub
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise FileNotFoundError(f"downloading {name} failed ({why}); fetch it from {PAGE.format(repo)} and name its "
                                "folder with --data") from None


def find(folder: Path, name: str, repo: str) -> Path:
    """A file in a data folder, or in `data` there. Raises FileNotFoundError."""
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {folder / name}: fetch it from {PAGE.format(repo)}, or leave out --data to "
                            "have it downloaded")


@cache
def line_starts(path: Path) -> list[int]:
    """The byte where each line that is not blank starts. Records are parsed one by one: a file may have a gigabyte."""
    starts, at = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(at)
            at += len(line)
    return starts


def record(path: Path, index: int) -> dict:
    """The object on a line of a jsonl file. Raises IndexError past the last, ValueError for what is no JSON object."""
    with path.open("rb") as file:
        file.seek(line_starts(path)[index])
        try:
            found = json.loads(file.readline())
        except ValueError as error:
            raise ValueError(f"record {index} of {path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(found, dict):
        raise ValueError(f"record {index} of {path} is no JSON object; fetch the file again")
    return found


def cut_middle(setting: Setting, text: str, question: str, reserve: int) -> tuple[str, str]:
    """The text and the question of a prompt that, with `reserve` tokens more, has at most setting.length tokens.

    Of one that is too long the first and the last half of as many tokens as fit are kept, as published; a token fewer
    at a time if the joined text has more tokens than its halves. Raises ValueError if nothing fits.
    """
    ids, room = setting.encode(text + question), setting.length - reserve
    if len(ids) <= room:
        return text, question
    for half in range(room // 2, 0, -1):
        head, tail = setting.decode(ids[:half]), setting.decode(ids[-half:])
        if len(setting.encode(head + tail)) <= room:
            break
    else:
        raise ValueError(f"a length of {setting.length} tokens is too short: {reserve} of them are for the answer")
    if tail.endswith(question):
        return head + tail.removesuffix(question), question
    return head, tail  # the cut reaches into the question


def split(template: str, context: str, fields: dict[str, str]) -> tuple[str, str]:
    """A template filled in, up to the end of its context and from there."""
    before, after = template.split("{context}")
    return before.format(**fields) + context, after.format(**fields)
