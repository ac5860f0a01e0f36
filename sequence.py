"""The host's view of a batch row: a prompt, its answers, and what the device still owes it."""

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decoder import CONTINUE, SLEEP
from tokenizer import Stream


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)  # without the EOS
    text: str = ""
    finish_reason: str = ""  # stop, length or interrupted; empty while it runs


@dataclass
class Completion:
    """What `Engine.generate` returns for one prompt."""

    prompt_tokens: int
    answers: list[Answer] = field(default_factory=list)  # to the prompt, then to each follow-up

    @property
    def new_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def to_dict(self) -> dict:
        """text, tokens and finish_reason are the first answer's, new_tokens those of all answers."""
        answers = [dataclasses.asdict(answer) for answer in self.answers]
        first = answers[0] if answers else dataclasses.asdict(Answer())
        return {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, **first, "answers": answers}


class Row:
    """One prompt on its way through a batch row."""

    def __init__(self, index: int, prompt: list[int], follow_ups: Iterable, planned: int):
        self.index, self.prompt, self.follow_ups = index, prompt, iter(follow_ups)
        self.planned = planned  # tokens that it will hold at most
        self.completion = Completion(len(prompt))
        self.length = len(prompt)  # tokens in the cache once every launched step has run
        self.feed: deque[int] = deque()  # tokens to force, one a step
        self.limit = 0  # tokens that the current answer may have
        self.wanted = 0  # samples still to be asked of the device for it
        self.unfed: list[int] = []  # its last token, where that has not entered the cache
        self.stream: Stream | None = None  # turns its tokens into text
        self.shown = 0  # characters of it that on_token has seen
        self.interrupted = False  # its limit was lowered to what the device had been asked for

    @property
    def answer(self) -> Answer:
        return self.completion.answers[-1]

    @property
    def idle(self) -> bool:
        """Its answer, if it has begun one, is complete."""
        return not self.completion.answers or bool(self.answer.finish_reason)

    @property
    def new(self) -> int:
        return self.length - len(self.prompt)

    def open(self, limit: int, stream: Stream | None, sampled: int = 0) -> None:
        """A new answer of at most `limit` tokens begins, `sampled` of them asked of the device already."""
        self.completion.answers.append(Answer())
        self.limit, self.wanted = limit, limit - sampled
        self.stream, self.shown, self.interrupted = stream, 0, False

    def interrupt(self) -> None:
        """The running answer, if there is one, ends with the next token read: a question on its way is fed whole, and
        every token of the answer but the last is in the cache, as after any other end."""
        if not self.idle:
            asked = self.limit - self.wanted
            self.wanted = int(asked == len(self.answer.tokens))  # nothing to read: one more sample
            self.limit, self.interrupted = asked + self.wanted, True

    def command(self) -> tuple[int, bool]:
        """What the row does in the next step, and whether what it samples then belongs to its answer."""
        if self.feed:
            command, counts = self.feed.popleft(), not self.feed
        else:
            command, counts = (CONTINUE, True) if self.wanted else (SLEEP, False)
        self.length += command != SLEEP
        self.wanted -= counts
        return command, counts

    def take(self, token: int, ended: bool, ahead: int, stop: list[str]) -> str:
        """Adds a sampled token to the answer; the text that may be shown for it.

        ended: it is an EOS. ahead: steps launched since that continue the row (0 or 1): the device has fed them this
        token, unless it ended.
        """
        answer, before = self.answer, len(self.answer.text)
        if not ended:
            answer.tokens.append(token)
        if self.stream is not None:
            answer.text += "" if ended else self.stream.push(token)
        full = len(answer.tokens) == self.limit
        if self.stream is not None and (ended or full):
            answer.text += self.stream.flush()
        begin = max(0, before - max(map(len, stop), default=0))  # what lies before was searched already
        cut = min((at for text in stop if (at := answer.text.find(text, begin)) >= 0), default=None)
        if cut is not None:
            answer.text = answer.text[:cut]
        if ended or full or cut is not None:
            out_of_tokens = "interrupted" if self.interrupted else "length"
            answer.finish_reason = out_of_tokens if full and cut is None else "stop"
            self.wanted, self.unfed = 0, [] if ended or ahead else [token]
            self.length -= ahead if ended else 0
        # A stop text may have begun at the end: that much is held back until it is certain.
        begun = (n for text in stop for n in range(len(text)) if answer.text.endswith(text[:n]))
        held = 0 if answer.finish_reason else max(begun, default=0)
        visible = answer.text[self.shown : len(answer.text) - held]
        self.shown += len(visible)
        return visible
