"""A long run: one engine, requests of every kind, some of them bad. Memory and threads do not grow, and every answer
equals the same request's alone. `pytest tests/test_long_run.py --all` sends 1,000 requests, any other run 40."""

import itertools
import random
import threading
from pathlib import Path

import pytest
import torch
from conftest import write_random

from engine import Engine
from runtime.device import resident_bytes

METHODS = {
    "full": (None, {}),
    "rocketkv": (48, {"window": 8, "kernel": 5}),
    "omnikv": (48, {"offload": True}),
    "d2o": (48, {}),
    "tailorkv": (48, {"quant_layers": [0], "group": 8, "channels": 4, "engine": "threads"}),
}
MAX_PROMPT, NEW = 300, 60
BAD = (
    ([], {}, "empty"),
    ([128], {}, "from 0 to 127"),
    ([1, 2, -1], {}, "from 0 to 127"),
    ([5] * (MAX_PROMPT + 1), {}, "max_prompt is 300"),
    ([5], {"max_new_tokens": 0}, "at least 1"),
    ([5], {"temperature": -1.0}, "temperature"),
    ([5], {"follow_ups": [[[]]]}, "empty"),
)


class Gone(Exception):
    """The caller has gone away."""


class Asked:
    """A random call of `generate`: 1 to 6 prompts, perhaps with follow-ups. With `sampled`, it may sample; prompt
    lengths are multiples of `whole` tokens."""

    def __init__(self, draw: random.Random, sampled: bool, whole: int):
        longest = [draw.choice((1, 40, MAX_PROMPT)) for _ in range(draw.randint(1, 6))]
        lengths = [-(-draw.randint(1, most) // whole) * whole for most in longest]
        self.prompts = [[draw.randrange(3, 128) for _ in range(n)] for n in lengths]
        self.options = {"max_new_tokens": draw.randint(1, 20)}
        self.options |= draw.choice(({}, {}, {"temperature": 0.9, "top_k": 30})) if sampled else {}
        self.questions = [[[draw.randrange(3, 128)] * draw.randint(1, 5)] * draw.randint(0, 1) for _ in self.prompts]
        self.leaves_after = draw.randint(1, 20) if draw.random() < 0.1 else None  # tokens

    def send(self, engine: Engine) -> list | None:
        """The answers, or None if the caller went away."""
        seen = []

        def count(*token):
            seen.append(token)
            if len(seen) == self.leaves_after:
                raise Gone

        try:
            found = engine.generate(self.prompts, follow_ups=self.questions, on_token=count, **self.options)
        except Gone:
            return None
        return [[(a.tokens, a.finish_reason) for a in completion.answers] for completion in found]

    def alone(self, engine: Engine, first: int) -> list:
        """The answers to each prompt by itself; the request number, first + i for prompt i, seeds the sampling."""
        found = []
        for i, (prompt, questions) in enumerate(zip(self.prompts, self.questions, strict=True)):
            engine.requests = iter([first + i])
            (completion,) = engine.generate([prompt], follow_ups=[questions], **self.options)
            found.append([(a.tokens, a.finish_reason) for a in completion.answers])
        return found


def tasks() -> int:
    """Threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def same_up_to_ties(asked: Asked, found: list, expected: list, engine: Engine) -> bool:
    """Whether the first answers are the same tokens, or diverge where two tokens are equally good in bf16."""
    for prompt, (here, *_), (there, *_) in zip(asked.prompts, found, expected, strict=True):
        parts = next((i for i, (a, b) in enumerate(zip(here[0], there[0], strict=False)) if a != b), None)
        if parts is not None:
            logits = engine.logits(prompt, there[0])[parts]
            if logits.max() - logits[here[0][parts]] > 0.5:
                return False
    return True


def pytest_generate_tests(metafunc):
    everything = metafunc.config.getoption("--all")
    metafunc.parametrize("total", [1000 if everything else 40])
    metafunc.parametrize("compiled", [False, True] if everything else [False])


@pytest.mark.parametrize("name", METHODS)
def test_requests_leave_nothing_behind(tmp_path, name, compiled, total):
    dtype = torch.bfloat16 if compiled else torch.float32
    folder = write_random(tmp_path / "model", dtype=dtype, num_hidden_layers=4, eos_token_id=2)
    budget, options = METHODS[name]
    others = set(threading.enumerate())
    plan = {"batch": 3, "max_prompt": MAX_PROMPT, "max_new_tokens": NEW}
    engine, other = (Engine.load(folder, name, budget, options, compile=compiled, seed=0, **plan) for _ in range(2))
    engine.eos = other.eos = set(range(2, 10))  # answers end at different steps
    for each in (engine, other):
        each.use(name, budget, options, **plan)
    draw, sent, ended, gone, memory, threads = random.Random(0), 0, set(), 0, None, None
    first = 0
    while sent < total:
        if draw.random() < 0.1:
            prompt, more, why = draw.choice(BAD)
            with pytest.raises(ValueError, match=why):
                engine.generate([prompt], **more)
            sent += 1
            continue
        # oneDNN caches megabytes of kernels for every length of a bf16 prompt: draw few lengths.
        asked = Asked(draw, sampled=not compiled, whole=25 if compiled else 1)
        pointers = [buffer.data_ptr() for layer in engine.layers for buffer in layer.buffers()]
        found = asked.send(engine)
        assert pointers == [buffer.data_ptr() for layer in engine.layers for buffer in layer.buffers()]
        sent += len(asked.prompts)
        if found is None:
            gone += 1
        else:
            expected = asked.alone(other, first)
            assert found == expected or compiled and same_up_to_ties(asked, found, expected, other)
            ended |= {reason for answers in found for _, reason in answers}
        first = next(engine.requests)
        engine.requests = itertools.count(first)
        if memory is None and sent > total // 4:
            memory, threads = resident_bytes("VmRSS"), tasks()
    assert ended == {"stop", "length"} and (gone or total < 1000)
    assert tasks() <= threads and resident_bytes("VmRSS") - memory < 20e6
    for each in (engine, other):
        each.close()
    assert not [t.name for t in set(threading.enumerate()) - others]
