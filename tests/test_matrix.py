"""Every combination of method, dtype, weights, batch, compilation, chat and storage options works or is refused in one
line. A run samples them; `pytest tests/test_matrix.py --exhaustive` runs them all, which takes hours."""

import dataclasses
import itertools
import json
import random
import re
import shutil

import pytest
import torch
from chat_templates import LLAMA2
from conftest import write_random
from conversations import converse

import quantize
from engine import Engine
from kv import METHODS, parse_options
from kv.kivi import Quantized
from kv.parts.evicting import Evicting
from runtime.planning import plan_of

pytestmark = pytest.mark.slow
AXES = {
    "dtype": ("float32", "bfloat16"),
    "weights": (None, "int8", "int4"),
    "batch": (1, 3),
    "compile": (False, True),
    "chat": (False, True),
    "storage": ({}, {"offload": "true"}, {"bits": "4"}),
}
EVERY = [(name, *values) for name in METHODS for values in itertools.product(*AXES.values())]
PROMPTS = ["The keeper rowed out to the light before the tide had turned. " * n for n in (9, 4, 1)]
QUESTIONS = ["And the fog?", "Who was it?", "And then?"]
NEW, MAX_PROMPT, BUDGET = 5, 256, 96
TIES = {"float32": 1e-3, "bfloat16": 1.0}  # logits this close to the best count as equal; their deviation is 2.5
FLIPS = {"float32": 0.0, "bfloat16": 0.2}  # share of wrong tokens: rounding may change what a method selects


def sample() -> list[tuple]:
    """Two eager combinations of every method, and one that it must refuse; a compiled one of every 18th method."""
    chosen, draw = [], random.Random(0)
    for i, name in enumerate(METHODS):
        own = [c for c in EVERY if c[0] == name and (c[6] == {} or accepts(name, c[6]))]
        chosen += draw.sample([c for c in own if not c[4]], 2)
        chosen += draw.sample([c for c in own if c[4]], 1) if i % 18 == 0 else []
        chosen += draw.sample([c for c in EVERY if c[0] == name and c not in own], 1) if len(own) < 144 else []
    return chosen


def accepts(name: str, storage: dict) -> bool:
    return set(storage) <= {f.name for f in dataclasses.fields(METHODS[name])}


def pytest_generate_tests(metafunc):
    if "combination" in metafunc.fixturenames:
        chosen = EVERY if metafunc.config.getoption("--exhaustive") else sample()
        ids = ["-".join(f"{x}" for x in c if not isinstance(x, dict)) + "-".join(["", *c[-1]]) for c in chosen]
        metafunc.parametrize("combination", chosen, ids=ids)


@pytest.fixture(scope="module")
def folders(text_checkpoint, tmp_path_factory) -> dict:
    """(dtype, weights) -> a checkpoint with a tokenizer and a chat template."""
    found, root = {}, tmp_path_factory.mktemp("matrix")
    for dtype in AXES["dtype"]:
        sizes = {"num_hidden_layers": 4, "vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
        plain = write_random(root / dtype, dtype=getattr(torch, dtype), **sizes)
        shutil.copy(text_checkpoint / "tokenizer.model", plain)
        chat = {"chat_template": LLAMA2, "add_bos_token": True}
        (plain / "tokenizer_config.json").write_text(json.dumps(chat))
        found[dtype, None] = plain
        for mode in ("int8", "int4"):
            found[dtype, mode] = root / f"{dtype}-{mode}"
            quantize.main(["--checkpoint", str(plain), "--mode", mode, "--out", str(found[dtype, mode])])
    return found


def load(folder, name: str, storage: dict, **more) -> Engine:
    engine = Engine.load(folder, batch=1, compile=False, seed=0, room=1)
    engine.eos = set()  # every answer has its full length
    engine.compile = more.pop("compile", False)
    if name == "rocketkv" and "offload" in storage:
        storage = storage | {"turns": "true"}  # otherwise it has nothing to offload
    method, takes = parse_options(name, storage), None
    if method.takes_budget:
        plan = dataclasses.replace(plan_of(engine, MAX_PROMPT, 40), device=torch.device("meta"))
        takes = max(BUDGET, method.minimum(plan))
    return engine.use(name, takes, storage, max_prompt=MAX_PROMPT, room=40, **more)


def test_a_combination_works_or_is_refused(folders, combination):
    """A batch, compiled or not, generates what an eager engine with one row predicts from the same tokens."""
    name, dtype, weights, batch, compiled, chat, storage = combination
    folder = folders[dtype, weights]
    if not accepts(name, storage):
        with pytest.raises(ValueError, match=f"^{re.escape(name)} has no option"):
            load(folder, name, storage)
        return
    engine = load(folder, name, storage, batch=batch, compile=compiled)
    code = engine.tokenizer
    prompts = [code.chat(p) if chat else engine.encode(p) for p in PROMPTS[:batch]]
    questions = [[code.chat_next(q)] if chat else [] for q in QUESTIONS[:batch]]
    # Methods that take a question at once as they would token by token; others attend to more, or evict less often.
    at_once = all(x.attends_to_all and not isinstance(x, Quantized | Evicting) for x in engine.layers)
    conversations = converse(engine, prompts, questions, NEW, stepwise=not at_once)
    alone = load(folder, name, storage)
    for prompt, question, conversation in zip(prompts, questions, conversations, strict=True):
        answers = [tokens for tokens, _ in conversation]
        assert [len(tokens) for tokens in answers] == [NEW] * (1 + chat)
        said = answers[0] + (question[0] + answers[1] if chat else [])
        logits = alone.logits(prompt, said)
        assert logits.isfinite().all() and logits.std() > 2  # far from uniform: a wrong token is noticed
        drawn = [*range(NEW), *range(len(said) - NEW, len(said))]
        behind = logits.amax(1) - logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        assert (behind[drawn] >= TIES[dtype]).float().mean() <= FLIPS[dtype]
    on_host = engine.layers.bytes()[1] > 0
    engine.close()
    alone.close()
    assert on_host <= ("offload" in storage or name in ("tailorkv", "pqcache", "brute_offload"))
