"""A conversation at a terminal: questions are typed or pasted, and Ctrl-C stops an answer."""

import os
import signal
import sys
import termios
from contextlib import suppress
from functools import cache
from typing import TextIO

from engine import Answer, Engine
from runtime import parallel
from terminal.cli import one_line

HELP = "/exit or Ctrl-D ends the conversation, /help says this; Ctrl-C stops an answer, or exits if none is running"
EXITS = ("/exit", "/quit", "/bye", "/q")  # the last three as in other programs


def say_help(alone: bool) -> None:
    print(HELP if alone else HELP.partition(";")[0], file=sys.stderr)


@cache  # a process does it once
def begin(alone: bool) -> None:
    """Prepares the terminal and says how a conversation ends. alone: whether one process has the model."""
    with suppress(ImportError):
        import readline  # gives input() arrow keys and a history

        if "libedit" not in readline.__doc__:
            readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message
    say_help(alone)


def first_question(alone: bool) -> str | None:
    """What a person types before the model is loaded; None if the conversation ends instead."""
    begin(alone)
    try:
        while not (line := command("> ", alone)):
            pass
    except EOFError:
        line = "/exit"
        print(file=sys.stderr)
    return None if line in EXITS else line


def converse(engine: Engine, prompt: list[int], how: dict, out: TextIO) -> tuple[list[Answer], bool]:
    """Answers the prompt, then what is typed, until the conversation ends or the caches are full.

    Returns the answers, and whether Ctrl-C at the input prompt ended it.
    """
    how = how | {"on_token": lambda index, token, text: print(text, end="", file=out, flush=True)}
    rows, stats = engine.start([prompt]), engine.stats  # Ctrl-C before the first answer ends the program
    with Conversation(engine, out) as conversation:
        answers = conversation.answered(engine.ask(rows, None, **how))
        stats = stats.then(engine.stats)
        while (question := parallel.first(engine.ranks, conversation.read)) is not None:
            try:
                answers += conversation.answered(engine.ask(rows, [question], **how))
                stats = stats.then(engine.stats)
            except ValueError as error:
                print(one_line(error), file=sys.stderr)
                break
    engine.stats = stats
    return answers, conversation.interrupted


class Conversation:
    """While it is open, Ctrl-C ends the answer being decoded instead of the program.

    At the input prompt Ctrl-C ends the conversation; a second one before the first has ended the answer raises
    KeyboardInterrupt. Where several ranks share the model, Ctrl-C ends the program.
    """

    def __init__(self, engine: Engine, out: TextIO):
        """out: receives the answers."""
        self.engine, self.out, self.reading, self.interrupted = engine, out, False, False

    def __enter__(self) -> "Conversation":
        alone = self.engine.ranks.count == 1
        self.handler = signal.signal(signal.SIGINT, self._stop) if alone else signal.SIG_DFL
        if not self.engine.ranks.rank:
            begin(alone)
        return self

    def __exit__(self, *_) -> None:
        if not self.engine.ranks.rank:
            signal.signal(signal.SIGINT, self.handler)
            termios.tcflush(sys.stdin, termios.TCIFLUSH)  # the rest of a pasted text must not reach the shell

    def answered(self, answers: list[Answer]) -> list[Answer]:
        """Ends the line of an answer, and says where it was cut."""
        print(file=self.out, flush=True)
        for answer in answers:
            if answer.finish_reason == "length":
                print(f"(cut at {len(answer.tokens)} tokens: --max-new-tokens)", file=sys.stderr)
        return answers

    def read(self) -> list[int] | None:
        """The ids of the next turn, which a person types; None if the conversation ends."""
        self.reading = True
        try:
            while (line := command("> ", self.engine.ranks.count == 1)) not in EXITS:
                try:
                    if line:
                        return self.engine.tokenizer.chat_next(line)
                except ValueError as error:  # not UTF-8
                    print(f"this text cannot be asked: {one_line(error)}", file=sys.stderr)
            return None
        except (EOFError, KeyboardInterrupt) as end:
            print(file=sys.stderr)
            self.interrupted = isinstance(end, KeyboardInterrupt)
            return None
        finally:
            self.reading = False

    def _stop(self, *_) -> None:
        if self.reading or self.engine.interrupted:
            raise KeyboardInterrupt
        self.engine.interrupt()


def command(prompt: str, alone: bool) -> str:
    """What a person types, which is not /help."""
    while (line := typed(prompt).strip()) == "/help":
        say_help(alone)
    return line


def typed(prompt: str) -> str:
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
