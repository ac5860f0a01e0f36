"""Files of prompts and of answers: what --batch-file reads and --out appends to."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from tqdm import tqdm

from engine import Answer
from terminal.cli import one_line
from terminal.report import completion
from text.files import parse_json


def parse_batch(name: str, text: str) -> dict[str | int, str]:
    """Prompts by id. The file is JSONL if its name ends in .jsonl or its first line is an object with a prompt."""
    lines = {i: line.removesuffix("\r") for i, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ValueError(f"{name} holds no prompt")
    if not name.endswith(".jsonl") and "prompt" not in parse_object(next(iter(lines.values()))):
        if isinstance(parse_any(text), list | dict):
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


def parse_object(line: str | bytes) -> dict:
    """The JSON object in a line; an empty dict if there is none."""
    value = parse_any(line)
    return value if isinstance(value, dict) else {}


def parse_any(text: str | bytes) -> object:
    """The JSON value that a text is; None if it is none."""
    try:
        return parse_json(text, "a text")
    except ValueError:
        return None


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


class Results:
    """What became of each prompt of a call: its answers or its error, printed and in the file of --out."""

    def __init__(self, prompts: dict[str | int, str], asked: str, skipped: int, single: bool, screen: TextIO):
        """asked: as in `digest`. skipped: how many more prompts the file answers. single: no batch, so no progress.

        screen: where answers are printed.
        """
        self.prompts, self.asked, self.skipped, self.single, self.screen = prompts, asked, skipped, single, screen
        self.completions: dict[str | int, dict] = {}
        self.failed: dict[str | int, str] = {}
        self.streamed = False

    @contextmanager
    def kept(self, out: str | None) -> Iterator[None]:
        """While it is open, results are appended to the file `out`; then those of a batch are printed.

        If something ends a batch early, it says how many answers the file has.
        """
        hidden = True if self.single else None  # None: where stderr is no terminal
        with tqdm(total=len(self.prompts), unit="prompt", disable=hidden) as self.bar, appended(out) as self.file:
            try:
                yield
            finally:
                self.show()
                early = len(self.completions) + len(self.failed) < len(self.prompts)
                if early and out is not None and not self.single:
                    count = f"{self.skipped + len(self.completions)} of {self.skipped + len(self.prompts)}"
                    tqdm.write(f"-- {count} answers are in {out}: the same command continues", file=sys.stderr)

    def stream(self, index: int, token: int, text: str) -> None:
        """Prints a piece of a single answer: an `on_token` of the engine."""
        self.streamed = True
        print(text, end="", file=self.screen, flush=True)

    def show(self) -> None:
        """Ends the line of a streamed answer, or prints a line for each answer of a batch, which may have several."""
        if self.streamed:
            print(file=self.screen)
        for name, found in () if self.single else self.in_order().items():
            print(f"{name}: {one_line(self.prompts[name])[:60]} -> {found['text']}", file=self.screen)

    def done(self, name: str | int, prompt_tokens: int, answers: Sequence[Answer]) -> None:
        about = {"id": name, "request_digest": digest(self.prompts[name], self.asked)}
        self.completions[name] = about | completion(prompt_tokens, answers)
        self.write(self.completions[name])

    def fail(self, name: str | int, error: str) -> None:
        self.failed[name] = error
        if not self.single:
            tqdm.write(one_line(f"prompt {name}: {error}"), file=sys.stderr)
        self.write({"id": name, "error": error})

    def write(self, entry: dict) -> None:
        """Appends an entry to the file."""
        if self.file is not None:
            self.file.write(json.dumps(entry).encode() + b"\n")
            self.file.flush()
        self.bar.update()

    def in_order(self) -> dict[str | int, dict]:
        """The completions in the order of the prompts."""
        return {name: self.completions[name] for name in self.prompts if name in self.completions}

    def report(self) -> dict:
        failed = [{"id": name, "error": error} for name, error in self.failed.items()]
        return {"completions": [*self.in_order().values()], "failed": failed, "skipped": self.skipped}
