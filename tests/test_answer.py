"""The text of an answer: stop texts end it, and what may begin one is held back."""

import random

from text.answer import AnswerText


class Pieces:
    """A tokenizer, and its stream, in which a token is a text."""

    def stream(self) -> "Pieces":
        return self

    def push(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return "."  # the rest of a character that was not complete


def test_what_is_shown_never_holds_a_part_of_a_stop_text():
    chance = random.Random(0)
    ends = set()
    for _ in range(2000):
        stop = ["".join(chance.choices("ab", k=chance.randrange(1, 5))) for _ in range(chance.randrange(3))]
        tokens = ["".join(chance.choices("ab", k=chance.randrange(4))) for _ in range(chance.randrange(1, 9))]
        answer, shown, text = AnswerText(Pieces(), stop), "", ""
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            text += token + "." * last
            shown += answer.push(token, last)
            cut = min((text.index(s) for s in stop if s in text), default=None)
            assert answer.stopped == (cut is not None) and answer.text == text[:cut] and answer.text.startswith(shown)
            if answer.stopped or last:
                ends.add((answer.stopped, last))
                assert shown == answer.text
                break
            begun = max((n for s in stop for n in range(len(s)) if text.endswith(s[:n])), default=0)
            assert len(shown) == len(text) - begun  # and no more is held back
    assert ends == {(True, True), (True, False), (False, True)}


def test_an_eos_adds_no_text_and_without_a_tokenizer_there_is_none():
    answer = AnswerText(Pieces(), ["b"])
    assert [answer.push("a", False), answer.push(None, True)] == ["a", "."] and not answer.stopped
    assert AnswerText(None, []).push(5, True) == ""
