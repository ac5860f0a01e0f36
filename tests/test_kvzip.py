"""kvzip beside its slow reference, which runs transformers' model; and random."""

from dataclasses import replace

import pytest
import torch
from references.kvzip import importance, kept, kept_together
from runs import answer, make_plan, text
from test_model import LLAMA, QWEN2, QWEN3, converted, hf_model
from test_tokenizer import CHATML_TEMPLATE, LLAMA3_SPLIT, byte_level_folder, split_by

import kv
from engine import Engine
from kv.kvzip import FIRST, LATER, opening
from text.tokenizer import load_tokenizer

PROMPT, SINKS, PART = 38, 4, 14


def prompt_of(length: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def held(engine: Engine, row) -> list[list[list[int]]]:
    """The positions that each head of each layer holds of a row's prompt."""
    n = len(row.tokens)
    heads = [
        layer.heads(row.index, n) if hasattr(layer, "heads") else [layer.held(row.index, n)] for layer in engine.layers
    ]
    return [[head.tolist() for each in layer for head in each.position] for layer in heads]


@pytest.mark.parametrize("heads", ("equal", "adaptive", "model"))
@pytest.mark.parametrize("config", (LLAMA, QWEN2, QWEN3), ids=("llama", "qwen2", "qwen3"))
def test_kept_are_the_tokens_that_repeating_the_prompt_needs(config, heads, tmp_path):
    theirs, count, alpha = hf_model(config), 14, {"adaptive": 0.2}.get(heads, 0.0)
    options = {"sinks": SINKS, "part": PART, "heads": heads}
    engine = Engine.load(converted(theirs, config, tmp_path), "kvzip", count, options, batch=2, compile=False)
    prompts = [prompt_of(PROMPT), prompt_of(20)]
    for row, prompt in zip(engine.start(prompts), prompts, strict=True):
        texts = [prompt[max(0, first - 8) : first + PART] for first in range(0, len(prompt), PART)]
        expected = importance(theirs, prompt, texts, PART, SINKS)
        if heads == "equal":
            positions = kept(expected, count)
        else:
            groups = expected if heads == "adaptive" else expected.flatten(0, 1)[None]
            chosen = sum([kept_together(group, count, alpha) for group in groups], [])
            positions = [chosen[i : i + expected.shape[1]] for i in range(0, len(chosen), expected.shape[1])]
        assert held(engine, row) == positions


def test_a_prompt_within_the_budget_is_not_read_again(checkpoint):
    engine = Engine.load(checkpoint, "kvzip", 24, {"part": 8}, compile=False)
    said = []
    engine.progress = lambda items, what: (said.append(what), items)[1]
    for length, expected in ((24, 1), (25, 2)):
        said.clear()
        engine.start([prompt_of(length)])[0].close()
        assert len(said) == expected and all(what.startswith("prefill") for what in said)


def test_a_share_decides_by_the_row_and_the_engine_gives_its_tokenizer(checkpoint):
    engine = Engine.load(checkpoint, "kvzip", 0.5, {"part": 8}, compile=False, max_prompt=60)
    said, engine.progress = [], lambda items, what: said.append(what) or items
    engine.start([prompt_of(20)])[0].close()
    assert len(said) == 2 and said[1].startswith("prefill again")
    given, engine.tokenizer = [], object()
    engine.layers[0].second_pass = lambda prompt, tokenizer: given.append(tokenizer) or [prompt]
    engine.start([prompt_of(20)])
    assert given == [engine.tokenizer]


def test_nothing_of_a_repetition_stays(checkpoint):
    prompt = prompt_of(60)
    full = Engine.load(checkpoint, compile=False).logits(prompt, [3, 4, 5])
    engine = Engine.load(checkpoint, "kvzip", 24, {"part": 8}, compile=False)
    found = [engine.logits(prompt, [3, 4, 5]) for _ in range(2)]
    assert torch.equal(*found)
    assert torch.equal(found[0][0], full[0])  # they come before
    assert all(layer.parked is None and layer.observed is None for layer in engine.layers)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    config = {"chat_template": CHATML_TEMPLATE, "eos_token": "<|im_end|>"}
    special = ["<|im_start|>", "<|im_end|>"]
    return load_tokenizer(byte_level_folder(tmp_path_factory.mktemp("chat"), split_by(LLAMA3_SPLIT), special, config))


def test_texts_repeat_every_chunk_after_an_instruction(tokenizer):
    plan = replace(make_plan(), max_prompt=64)
    layer = kv.build("kvzip", plan, 16, {"part": 10})[0]
    prompt = prompt_of(25)
    first, *others = layer.second_pass(prompt, tokenizer)
    assert first == tokenizer.encode(FIRST, bos=False) + prompt[:10]
    asks = tokenizer.encode(LATER, bos=False)
    assert others == [asks + prompt[2:20], asks + prompt[12:25]]
    assert layer.second_pass(prompt[:16], tokenizer) == []
    assert layer.second_pass(prompt, None) == [prompt[:10], prompt[2:20], prompt[12:25]]


def test_a_system_prompt_stays(tokenizer):
    for system in (None, "Answer with numbers. user\n"):
        prompt = tokenizer.chat("How many?", system)
        n = opening(prompt, tokenizer)
        assert tokenizer.decode(prompt[n:]).lstrip().startswith("How many?") and n > (5 if system else 0)
    assert opening(tokenizer.encode("How many?"), tokenizer) == 0
    assert opening(prompt_of(9), None) == 0
    layer = kv.build("kvzip", make_plan(), 16, {})[0]
    for asked, begins in ((prompt, n), (tokenizer.encode("How many? " * 9), 0)):
        layer.second_pass(asked, tokenizer)
        assert layer.repetition.opening == begins
    prompt = tokenizer.chat("How many? " * 9, "Be brief.")
    whole = opening(prompt, tokenizer)
    assert whole == opening(tokenizer.chat("\nHow many?", "Be brief."), tokenizer)
    for budget in (2 * whole + 4, 10):  # of a small one, half
        layer = kv.build("kvzip", replace(make_plan(), max_prompt=200), budget, {"heads": "equal"})[0]
        layer.second_pass(prompt, tokenizer)
        q, k, v = (x[None] for x in text(layer.plan, len(prompt), 0))
        layer.prefill(0, q, k, v)
        layer.observed = torch.arange(len(prompt)).float().expand(k.shape[1], -1) / 1000
        layer.finish(0)
        n = min(whole, budget // 2)
        last = range(len(prompt) - budget + n, len(prompt))
        assert layer.held(0, len(prompt)).position[0].tolist() == [*range(n), *last]


@pytest.mark.parametrize("name", ("kvzip", "d2o"))
def test_memory_must_suffice_for_the_prompt_that_waits_for_its_last_layer(name, checkpoint, monkeypatch):
    engine = Engine.load(checkpoint, name, 24, compile=False, batch=3, max_prompt=300)
    cache = sum(engine.layers.bytes())
    each = 2 * engine.config.head_dim * 4 + (64 if name == "kvzip" else 0)
    prompt = engine.config.n_layer * 300 * engine.config.n_kv_head * each
    monkeypatch.setattr("runtime.parallel.free_bytes", lambda device: cache + prompt + 1000)
    engine.use(name, 24, batch=3, max_prompt=300)
    monkeypatch.setattr("runtime.parallel.free_bytes", lambda device: cache + prompt - 1000)
    with pytest.raises(ValueError, match=rf"{name} cache of 3 x .*, with a whole prompt's K and V, needs"):
        engine.use(name, 24, batch=3, max_prompt=300)
    monkeypatch.setattr("runtime.parallel.free_bytes", lambda device: prompt + 1000)
    with pytest.raises(ValueError, match="3 x 556 tokens needs"):
        engine.use("kvzip", 300, batch=3, max_prompt=300)  # keeps the prompt: nothing waits


class Characters:
    """A tokenizer whose tokens are characters; its template begins with `system`, if that is given, and `user`."""

    def __init__(self, system: str, user: str):
        self.system, self.user = system, user

    def chat_begin(self, text: str, system: str | None = None) -> list[int]:
        return [*map(ord, ("" if system is None else self.system.format(system)) + self.user + text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize("user", ("[INST]", "<|user|>\n", "USER: "))
@pytest.mark.parametrize("system", ("[SYS]{}[/SYS]", "<|system|>\n{}</s>\n", "{}\n\n"))
def test_what_a_template_writes_before_the_users_text_is_found(system, user):
    """Up to white space, which the user's text may join."""
    tokenizer = Characters(system, user)
    for said in (None, "Be brief: 1 > 0.\n"):
        before = tokenizer.chat_begin("", said)
        for asked in ("How many?", f"How many? {user} Three."):  # a second turn
            prompt = tokenizer.chat_begin(asked, said)
            assert opening(prompt, tokenizer) == len(tokenizer.decode(before).rstrip())


def test_random_draws_other_tokens_in_each_head_and_layer():
    plan = replace(make_plan(n_layer=2), max_prompt=400)
    layers, found = kv.build("random", plan, 104, {}), []
    for layer in layers:
        q, k, v = (x[None] for x in text(plan, 400, 0))
        layer.prefill(0, q, k, v)
        found += layer.held(0, 400).position.tolist()
    assert len(found) == len(set(map(tuple, found))) == 2 * plan.n_kv_head
    for positions in found:
        assert positions[:4] == [0, 1, 2, 3] and len(positions) == 104
        assert 170 < sum(positions[4:]) / 100 < 230  # of numbers up to 400
    assert len(set.intersection(*map(set, found))) < 20


def test_random_drops_generated_tokens_before_the_prompts():
    plan = replace(make_plan(new=60), max_prompt=40)
    (layer,) = kv.build("random", plan, 50, {"every": 10})[:1]
    answer(layer, text(plan, 100, 0), 40)
    for positions in layer.held(0, 100).position.tolist():
        assert positions[:40] == [*range(40)] and len(positions) <= 60 and len(positions) > 50


@pytest.mark.parametrize("budget", (30, 0.75, 40))
def test_random_draws_from_all_that_a_row_holds_if_the_budget_does_not_exceed_the_prompt(budget):
    plan = replace(make_plan(new=160), max_prompt=40)
    (layer,) = kv.build("random", plan, budget, {"every": 10})[:1]
    answer(layer, text(plan, 200, 0), 40)
    for positions in layer.held(0, 200).position.tolist():
        assert sum(p < 40 for p in positions) < 15 and sum(40 <= p < 180 for p in positions) > 10


@pytest.mark.parametrize("chunk", (0, 7))
@pytest.mark.parametrize("what", ("prefill 60", "prefill again"))
def test_a_prompt_that_was_interrupted_leaves_nothing(checkpoint, what, chunk):
    engine = Engine.load(checkpoint, "kvzip", 24, {"part": 8}, compile=False, chunk=chunk, max_prompt=64)
    expected, shown = engine.generate([prompt_of(10)], 4), engine.progress

    def interrupted(items, said):
        for i, item in enumerate(items):
            if said.startswith(what) and i == 1:
                raise KeyboardInterrupt
            yield item

    engine.progress = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt_of(60)], 4)
    assert all(layer.parked is None for layer in engine.layers)
    engine.progress = shown
    assert engine.generate([prompt_of(10)], 4) == expected
