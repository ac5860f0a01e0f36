"""The host's view of a batch row: a prompt, its answers, and the samples the device still owes it."""

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from decoder import CONTINUE, SLEEP
from runtime.prefix import Prefix, Shared
from text.tokenizer import Stream


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
        """text, tokens and finish_reason are those of the first answer; new_tokens counts all answers."""
        answers = [dataclasses.asdict(answer) for answer in self.answers]
        first = answers[0] if answers else dataclasses.asdict(Answer())
        return {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, **first, "answers": answers}


class Row:
    """One prompt and its progress through a batch row."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        follow_ups: Iterable,
        planned: int,
        prefix: Prefix | None = None,
        shared: Shared | None = None,
    ):
        self.index, self.prompt, self.follow_ups = index, prompt, iter(follow_ups)
        self.prefix = prefix  # what the prompt left in the caches, if it need not be prefilled
        self.shared = shared  # its beginning, if other prompts have the same
        self.planned = planned  # the most tokens it will hold
        self.completion = Completion(len(prompt))
        self.request = 0  # its number, for the noise of sampling
        self.length = len(prompt)  # tokens in the cache once every launched step has run; a step counts as one token
        self.feed: deque[int] = deque()  # tokens to feed, one per step
        self.limit = 0  # the most tokens of the current answer
        self.wanted = 0  # samples still to request from the device for the answer
        self.unfed: list[int] = []  # the answer's last token, if it is not in the cache
        self.stream: Stream | None = None  # turns the answer's tokens into text
        self.shown = 0  # characters of the answer that on_token has received
        self.interrupted = False  # `interrupt` has lowered the limit

    @property
    def answer(self) -> Answer:
        return self.completion.answers[-1]

    @property
    def idle(self) -> bool:
        """Whether no answer is running: none has begun, or the last one is complete."""
        return not self.completion.answers or bool(self.answer.finish_reason)

    @property
    def new(self) -> int:
        return self.length - len(self.prompt)

    def open(self, limit: int, stream: Stream | None, sampled: int = 0) -> None:
        """Begins a new answer of at most `limit` tokens; `sampled` of them are already requested from the device."""
        self.completion.answers.append(Answer())
        self.limit, self.wanted = limit, limit - sampled
        self.stream, self.shown, self.interrupted = stream, 0, False

    def interrupt(self) -> None:
        """Ends the running answer, if there is one, with the next token read. A question that is being fed is still fed
        to its end. As after any other end, the cache holds all tokens of the answer except the last."""
        if not self.idle:
            asked = self.limit - self.wanted
            self.wanted = int(asked == len(self.answer.tokens))  # nothing left to read: one more sample
            self.limit, self.interrupted = asked + self.wanted, True

    def command(self) -> tuple[int, bool]:
        """The row's command for the next step, and whether the token it then samples belongs to its answer."""
        if self.feed:
            command, counts = self.feed.popleft(), not self.feed
        else:
            command, counts = (CONTINUE, True) if self.wanted else (SLEEP, False)
        self.length += command != SLEEP
        self.wanted -= counts
        return command, counts

    def take(self, token: int, ended: bool, ahead: int, stop: list[str]) -> str:
        """Adds a sampled token to the answer; returns the text that may now be shown.

        ended: the token is an EOS. ahead: later steps, already launched, that continue the row (0 or 1); the device
        feeds them this token unless it is an EOS.
        """
        answer, before = self.answer, len(self.answer.text)
        if not ended:
            answer.tokens.append(token)
        if self.stream is not None:
            answer.text += "" if ended else self.stream.push(token)
        full = len(answer.tokens) == self.limit
        if self.stream is not None and (ended or full):
            answer.text += self.stream.flush()
        begin = max(0, before - max(map(len, stop), default=0))  # earlier text is already searched
        cut = min((at for text in stop if (at := answer.text.find(text, begin)) >= 0), default=None)
        if cut is not None:
            answer.text = answer.text[:cut]
        if ended or full or cut is not None:
            out_of_tokens = "interrupted" if self.interrupted else "length"
            answer.finish_reason = out_of_tokens if full and cut is None else "stop"
            self.wanted, self.unfed = 0, [] if ended or ahead else [token]
            self.length -= ahead if ended else 0
        # The end may be the start of a stop text: hold that much back until it is certain.
        begun = (n for text in stop for n in range(len(text)) if answer.text.endswith(text[:n]))
        held = 0 if answer.finish_reason else max(begun, default=0)
        visible = answer.text[self.shown : len(answer.text) - held]
        self.shown += len(visible)
        return visible
