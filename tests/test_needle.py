"""The checkpoint in needle/: small, as its README says, and able to tell a good cache from a bad one."""

from pathlib import Path

import pytest

from engine import Engine
from runtime.checkpoint import open_weights
from tasks import Recipe
from tasks.registry import TASKS

NEEDLE = Path(__file__).parent.parent / "needle"


@pytest.fixture(scope="module")
def engine():
    return Engine.load(NEEDLE, compile=False, room=32, seed=0)


def accuracy(engine, task, length, samples, method="full", budget=None, seed=1):
    engine.use(method, budget, batch=4, room=32)
    recipe = Recipe(length, engine.encode, engine.tokenizer.decode, seed)
    asked = [TASKS[task].sample(recipe, i) for i in range(samples)]
    answers = engine.generate([sample.prompt for sample in asked])
    scores = [
        TASKS[task].score(answer.text, sample.questions[0]) for answer, sample in zip(answers, asked, strict=True)
    ]
    return sum(scores) / len(scores)


def test_the_checkpoint_is_small_and_in_16_bits():
    assert sum(file.stat().st_size for file in NEEDLE.glob("model*.safetensors")) <= 20e6
    assert sum(tensor.dtype.itemsize for tensor in open_weights(NEEDLE).values()) == 2 * len(open_weights(NEEDLE))


@pytest.mark.slow
def test_it_finds_needles_with_the_full_cache_and_not_outside_a_window(engine):
    for task in ("niah_single_2", "niah_multikey_1"):
        assert accuracy(engine, task, 768, 8) >= 80
    assert accuracy(engine, "niah_single_2", 768, 8, "streaming", 100) <= 40
