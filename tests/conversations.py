"""Conversations with an engine, and what they gave, shared by the tests of several rooms."""

import torch
from torch import Tensor

import engine as engine_py
from engine import Answer, Engine, Row, RowState, Sampling, decode_step
from model import Transformer


def converse(engine: Engine, prompts: list, questions: list[list] | None = None, new: int = 12, **how) -> list[list]:
    """Each prompt's answer, and those to its questions: prompts together, then the first questions, and so on."""
    rows = engine.start(prompts)
    answers = [[answer] for answer in answers_to(engine, rows, None, new, **how)]
    questions = questions or [[] for _ in rows]
    for i in range(max(map(len, questions), default=0)):
        asked = [index for index, own in enumerate(questions) if i < len(own)]
        found = answers_to(
            engine, [rows[index] for index in asked], [questions[index][i] for index in asked], new, **how
        )
        for index, answer in zip(asked, found, strict=True):
            answers[index].append(answer)
    for row in rows:
        row.close()
    return outcome(answers)


def answers_to(
    engine: Engine, rows: list[Row], questions: list | None, new: int, stepwise: bool = False, **how
) -> list[Answer]:
    """`engine.ask`; stepwise: after questions that are fed one token a step."""
    if stepwise and questions:
        engine.feed(rows, questions)
        questions = None
    return engine.ask(rows, questions, new, **how)


def outcome(found: list) -> list[list[tuple[list[int], str]]]:
    """The tokens and finish reasons of answers, or of lists of answers."""
    answers = [[x] if isinstance(x, Answer) else x for x in found]
    return [[(answer.tokens, answer.finish_reason) for answer in row] for row in answers]


def number(monkeypatch, first: int) -> None:
    """Gives the answers of a call the noise of those numbered `first`, first + 1..."""
    noise = GUMBEL
    monkeypatch.setattr(engine_py, "gumbel", lambda seed, request, *rest: noise(seed, request + first, *rest))


GUMBEL = engine_py.gumbel


def model_step(model: Transformer, tokens: Tensor, pos: Tensor) -> Tensor:
    """The decode step for tokens [B,1] at positions pos [B] -> logits [B, vocab]."""
    state = RowState(model, len(pos), ())
    state.pos.copy_(pos)
    state.left.fill_(1)
    with torch.no_grad():
        return decode_step(state, tokens[:, 0], "greedy", *Sampling().tensors(pos.device))[1]
