"""A long run: one engine, requests of every kind, some of them bad. Memory and threads do not grow, and every answer
equals the same request's alone. `pytest tests/test_long_run.py --exhaustive` sends 1,000 requests, any other run 30."""

import random
import threading
from pathlib import Path

import pytest
from conftest import write_random

from engine import Answer, Engine
from runtime.device import resident_bytes

pytestmark = pytest.mark.slow
METHODS = {
    "full": (None, {}),
    "rocketkv": (48, {"window": 8, "kernel": 5}),
    "omnikv": (48, {"offload": True}),
    "d2o": (48, {}),
    "tailorkv": (48, {"quant_layers": [0], "group": 8, "channels": 4, "engine": "threads"}),
}
MAX_PROMPT, NEW, BATCH = 300, 60, 3
BAD = (
    ([], {}, "empty"),
    ([128], {}, "from 0 to 127"),
    ([1, 2, -1], {}, "from 0 to 127"),
    ([5] * (MAX_PROMPT + 1), {}, "max_prompt is 300"),
    ([5], {"max_new_tokens": 0}, "at least 1"),
    ([5], {"temperature": -1.0}, "temperature"),
    ([5], {"stop": [""]}, "none of them empty"),
)


class Gone(Exception):
    """The caller has gone away."""


class Asked:
    """1 to 6 prompts, and perhaps up to 3 of them again in rows that a question follows."""

    def __init__(self, draw: random.Random):
        lengths = [draw.randint(1, draw.choice((1, 40, MAX_PROMPT))) for _ in range(draw.randint(1, 6))]
        self.prompts = [[draw.randrange(3, 128) for _ in range(n)] for n in lengths]
        self.sampled = draw.choice(({}, {}, {"temperature": 0.9, "top_k": 30}))
        self.options = {"max_new_tokens": draw.randint(1, 20)} | self.sampled
        self.questions = [[draw.randrange(3, 128)] * draw.randint(1, 5) for _ in range(draw.randint(0, BATCH))]
        self.questions = self.questions[: len(self.prompts)]
        self.leaves_after = draw.randint(1, 20) if draw.random() < 0.1 else None  # tokens

    def send(self, engine: Engine) -> list | None:
        """The answers to the prompts, then those of conversations; None if the caller went away."""
        seen = []

        def count(*token):
            seen.append(token)
            if len(seen) == self.leaves_after:
                raise Gone

        try:
            answers = [*map(plain, engine.generate(self.prompts, on_token=count, **self.options))]
            return answers + self.converse(engine, self.prompts, self.questions, count)
        except Gone:
            return None

    def converse(self, engine: Engine, prompts: list, questions: list, on_token=None) -> list:
        """The answers to prompts and their questions, in rows that decode together."""
        if not questions:
            return []
        rows, answers = engine.start(prompts[: len(questions)]), []
        try:
            for asked in (None, questions):
                answers += engine.ask(rows, asked, on_token=on_token, **self.options)
        finally:
            for row in rows:
                row.close()
        return list(map(plain, answers))

    def alone(self, engine: Engine) -> list:
        """The same answers, each prompt by itself."""
        answers = [plain(engine.generate([prompt], **self.options)[0]) for prompt in self.prompts]
        pairs = zip(self.prompts, self.questions, strict=False)
        conversations = [self.converse(engine, [prompt], [question]) for prompt, question in pairs]
        return answers + [answer for turn in zip(*conversations, strict=True) for answer in turn]


def plain(answer: Answer) -> tuple:
    return answer.tokens, answer.finish_reason


def tasks() -> int:
    """Threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--exhaustive")
    metafunc.parametrize("total", [1000 if everything else 30])
    metafunc.parametrize("compiled", [False, True] if everything else [False])


@pytest.mark.parametrize("name", METHODS)
def test_requests_leave_nothing_behind(tmp_path, name, compiled, total):
    folder = write_random(tmp_path / "model", num_hidden_layers=4, eos_token_id=2)
    budget, options = METHODS[name]
    others = set(threading.enumerate())
    plan = {"batch": BATCH, "max_prompt": MAX_PROMPT, "room": NEW}
    engine, other = (Engine.load(folder, name, budget, options, compile=compiled, seed=0, **plan) for _ in range(2))
    engine.eos = other.eos = set(range(2, 10))  # answers end at different steps
    draw, sent, ended, gone, memory, threads = random.Random(0), 0, set(), 0, None, None
    while sent < total:
        if draw.random() < 0.1:
            prompt, more, why = draw.choice(BAD)
            with pytest.raises(ValueError, match=why):
                engine.generate([prompt], **more)
            sent += 1
            continue
        asked = Asked(draw)
        pointers = [buffer.data_ptr() for layer in engine.layers for buffer in layer.buffers()]
        answers = asked.send(engine)
        assert pointers == [buffer.data_ptr() for layer in engine.layers for buffer in layer.buffers()]
        sent += len(asked.prompts)
        if answers is None:
            gone += 1
        else:
            assert asked.sampled or answers == asked.alone(other)
            ended |= {reason for _, reason in answers}
        if memory is None and sent > total // 4:
            memory, threads = resident_bytes("VmRSS"), tasks()
    assert ended == {"stop", "length"} and (gone or total < 1000)
    assert tasks() <= threads and resident_bytes("VmRSS") - memory < 20e6
    for each in (engine, other):
        each.close()
    assert not [t.name for t in set(threading.enumerate()) - others]
