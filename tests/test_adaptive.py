"""Heads that share a layer's budget (heads=adaptive), beside the slow references; decoding alone: test_sparse.py."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from references.scored import SLOW as SCORED
from references.sparse import SLOW
from runs import answer, make_plan, text

import kv
from kv.parts.adaptive import HeadSlots
from kv.simlayer import Regions

BUDGET, PROMPTS, NEW = 24, (50, 24, 3), 20
OPTIONS = {"keydiff": {"alpha": 0.0}, "snapkv": {"window": 6, "kernel": 3}, "rkv": {"window": 6, "alpha": 0.6}}


@pytest.mark.parametrize("name", OPTIONS)
def test_texts_and_steps_after_the_prompt_attend_to_what_each_head_keeps(name):
    plan, options = replace(make_plan(n_layer=1, new=NEW), max_prompt=max(PROMPTS)), OPTIONS[name]
    (layer,) = kv.build(name, plan, BUDGET, options | {"heads": "adaptive"})
    (equal,) = kv.build(name, plan, BUDGET, {key: value for key, value in options.items() if key != "alpha"})
    extra = sum(x.nbytes for x in (layer.first, layer.size, layer.dropped, layer.shared.position))
    extra -= equal.dropped.nbytes + equal.position.nbytes + (plan.n_kv_head - 1) * plan.unit_bytes * plan.batch
    assert sum(layer.storages().values()) == sum(equal.storages().values()) + extra
    for prompt in PROMPTS:
        q, k, v = text(plan, prompt + NEW, prompt)
        k[0] *= 3  # this head attends to few tokens
        slow, texts = (SCORED | SLOW)[name](plan, BUDGET, heads="adaptive", **options), (7, 1, 1, 3)
        expected = slow.run(q, k, v, prompt, texts)
        assert (answer(layer, [q, k, v], prompt, texts) - expected).abs().max() < 1e-5
        held = [[i for i in head if i >= 0] for head in layer.held(0, prompt + NEW).position.tolist()]
        assert held == slow.stored
        sizes = [len(head) for head in held]
        assert sum(sizes) == plan.n_kv_head * (min(prompt, BUDGET) + NEW)
        assert (len(set(sizes)) > 1) == (prompt > BUDGET)


@pytest.mark.parametrize("prompt", (10, 40))
@pytest.mark.parametrize("name, heads", (("keydiff", "adaptive"), ("kvzip", "model")))
def test_a_row_continues_on_a_plan_for_shorter_prompts(name, heads, prompt):
    """Its regions lie elsewhere."""
    plans = [replace(make_plan(n_layer=2, new=NEW), max_prompt=most) for most in (max(PROMPTS), prompt)]
    source, target = (kv.build(name, plan, BUDGET, {"heads": heads}) for plan in plans)
    qkv = [text(plans[0], prompt + NEW, seed) for seed in range(2)]
    for layer, (q, k, v) in zip(source, qkv, strict=True):
        layer.prefill(0, *(x[None, :, :prompt] for x in (q, k, v)))
    for layer in source:
        layer.finish(0)
    for old, new, (q, k, v) in zip(source, target, qkv, strict=True):
        new.restore(0, prompt, old.state(0, prompt))
        for pos in range(prompt, prompt + NEW):
            step = [x[None, :, pos : pos + 1] for x in (q, k, v)]
            for layer in (old, new):
                layer.before_step(pos + 1, pos + 1 - prompt)
            a, b = (layer.decode(*step, torch.tensor([pos]), torch.tensor([True])) for layer in (old, new))
            assert (a - b).abs().max() <= 1e-6
            assert torch.equal(old.held(0, pos + 1).position, new.held(0, pos + 1).position)


def test_a_saved_row_whose_regions_exceed_the_slots_is_refused():
    layers = kv.build("keydiff", make_plan(n_layer=1, new=NEW), BUDGET, {"heads": "adaptive"})
    layers[0].prefill(0, *(x[None, :, :40] for x in text(make_plan(), 40, 0)))
    state = layers[0].state(0, 40)
    state["size"][1] = 10**7
    layers.reset(0)
    with pytest.raises(ValueError, match="the saved size does not fit this cache"):
        layers[0].restore(0, 40, state)


@pytest.mark.parametrize("name, heads", (("keydiff", "adaptive"), ("kvzip", "model")))
def test_memory_is_freed_with_the_last_reference(name, heads):
    layers = kv.build(name, make_plan(n_layer=2), BUDGET, {"heads": heads})
    dead = [weakref.ref(layer) for layer in layers]
    gc.disable()
    try:
        del layers
        assert not any(ref() for ref in dead)
    finally:
        gc.enable()


@pytest.mark.parametrize("name, shared", (("kvzip", HeadSlots), ("simlayer", Regions)))
def test_the_slots_of_a_row_are_reset_once(name, shared, monkeypatch):
    layers, reset = kv.build(name, make_plan(n_layer=3), BUDGET, {}), []
    monkeypatch.setattr(shared, "reset", lambda self, row: reset.append(row))
    layers.reset(0)
    assert reset == [0]


def test_heads_that_share_a_budget_do_not_choose_again():
    with pytest.raises(ValueError, match="leave out every"):
        kv.build("keydiff", make_plan(), BUDGET, {"heads": "adaptive", "every": 8})
