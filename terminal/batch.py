"""Files of prompts and of answers: what --batch-file reads and --out appends to."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from text.files import parse_json


def parse_batch(name: str, text: str) -> dict[str | int, str]:
    """Prompts by id. The file is JSONL if its name ends in .jsonl or its first line is an object with a prompt."""
    lines = {i: line.removesuffix("\r") for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ValueError(f"{name} holds no prompt")
    if not name.endswith(".jsonl") and "prompt" not in parse_object(next(iter(lines.values()))):
        if is_json(text):
            raise ValueError(f'{name} is one JSON value: write a prompt a line, or JSONL of {{"id", "prompt"}}')
        return lines
    prompts = {}
    for i, line in lines.items():
        entry = parse_object(line)
        key, prompt = entry.get("id", i), entry.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{name}, line {i}: write {{"id": ..., "prompt": "..."}}, with a prompt that is not empty')
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ValueError(f"{name}, line {i}: the id must be a text or a whole number")
        if key in prompts:
            raise ValueError(f"{name}, line {i}: the id {key!r} is taken already")
        prompts[key] = prompt
    return prompts


def is_json(text: str) -> bool:
    """Whether the whole text is a JSON array or object."""
    try:
        return isinstance(parse_json(text, "a text"), list | dict)
    except ValueError:
        return False


def parse_object(line: str | bytes) -> dict:
    """The JSON object in a line; an empty dict if there is none."""
    try:
        value = parse_json(line, "a line")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def digest(prompt: str, asked: str) -> str:
    """What --out keeps of a request, to tell it from another one with the same id; asked: what the flags say of it."""
    return hashlib.sha256(json.dumps([prompt, asked]).encode()).hexdigest()[:12]


def unanswered(out: str | None, prompts: dict[str | int, str], asked: str) -> dict[str | int, str]:
    """The prompts that the file of --out does not answer; one of which it says an error is not answered.

    Raises ValueError if it answers another request under the same id.
    """
    if out is None or not Path(out).is_file():
        return prompts
    answered = set()
    with open(out, "rb") as file:
        for entry in map(parse_object, file):  # a line that a killed run cut off is none
            name = entry.get("id")
            failed = "text" not in entry or entry.get("finish_reason") == "error"
            if failed or not isinstance(name, str | int) or isinstance(name, bool) or name not in prompts:
                continue
            if entry.get("request_digest", own := digest(prompts[name], asked)) != own:
                raise ValueError(
                    f"{out} answers the id {name!r}, but for another prompt or other flags: name another --out"
                )
            answered.add(name)
    return {name: prompt for name, prompt in prompts.items() if name not in answered}


@contextmanager
def appended(name: str | None) -> Iterator[BinaryIO | None]:
    """The file that --out names, to append lines to; if its last line was cut off, ends it first."""
    if name is None:
        yield None
        return
    with open(name, "ab") as file:
        if Path(name).is_file() and file.tell():
            with open(name, "rb") as written:
                written.seek(-1, 2)
                if written.read(1) != b"\n":
                    file.write(b"\n")
        yield file


def write(file: BinaryIO | None, entry: dict) -> None:
    """Appends an answer to the file of --out."""
    if file is not None:
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
