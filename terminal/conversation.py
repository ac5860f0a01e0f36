"""A conversation at a terminal: questions are typed or pasted, and Ctrl-C stops an answer."""

import os
import signal
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

from engine import Engine

HELP = "/exit or Ctrl-D ends the conversation; Ctrl-C stops an answer, or exits if none is running"


class Conversation:
    """While it is open, Ctrl-C ends the answer being decoded instead of the program.

    Before the first token and at the input prompt, Ctrl-C raises KeyboardInterrupt as usual. So does a second Ctrl-C
    before the first has ended the answer.
    """

    def __init__(self, engine: Engine, out: TextIO):
        self.engine, self.out = engine, out  # out: receives the answers
        self.answering = False

    def __enter__(self) -> "Conversation":
        try:
            import readline  # gives input() arrow keys and a history

            if "libedit" not in readline.__doc__:
                readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message
        except ImportError:
            pass
        alone = self.engine.ranks.count == 1
        print(HELP if alone else HELP.partition(";")[0], file=sys.stderr)
        self.handler = signal.signal(signal.SIGINT, self._stop) if alone else signal.SIG_DFL
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self.handler)
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # the rest of a pasted text must not reach the shell

    def begun(self) -> None:
        """Notes that an answer has begun."""
        self.answering = True

    def questions(self) -> Iterator[list[int]]:
        """Yields the ids of every later turn."""
        self.answering = False
        print(file=self.out, flush=True)
        while (line := self._read()) is not None:
            try:
                ids = self.engine.tokenizer.chat_next(line) if line else None
            except ValueError as error:  # not UTF-8
                print(f"this text cannot be asked: {error}", file=sys.stderr)
                continue
            if ids:
                self.answering = True
                yield ids
                self.answering = False
                print(file=self.out, flush=True)

    def _stop(self, *_) -> None:
        if not self.answering or self.engine.interrupted:
            raise KeyboardInterrupt
        self.engine.interrupt()

    def _read(self) -> str | None:
        """A message without surrounding white space; None if the conversation ends."""
        try:
            line = ask("> ").strip()
        except EOFError:
            line = "/exit"
            print(file=sys.stderr)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise
        return None if line == "/exit" else line


def ask(prompt: str) -> str:
    """`input`, but with readline whenever stdin and stderr are terminals, and without a prompt in a piped stdout."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        return input(prompt)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
