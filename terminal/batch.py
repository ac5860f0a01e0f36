"""Files of prompts and of answers: what --batch-file reads and --out appends to."""

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


def parse_object(line: str) -> dict:
    """The JSON object in a line; an empty dict if there is none."""
    try:
        value = parse_json(line, "a line")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


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
