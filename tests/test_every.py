"""Methods that compress a row again while it generates (`every`), beside the slow references."""

from dataclasses import replace

import pytest
import torch
from references.scored import SLOW as SCORED
from references.sparse import SLOW
from runs import answer, make_plan, text

import kv
from engine import Engine

BUDGET, N, PROMPTS, NEW = 24, 8, (50, 20, 3), 45
CASES = {
    "keynorm": {"window": 4},
    "keydiff": {},
    "lagkv": {"lag": 5},
    "expected": {"future": 16},
    "rkv": {"window": 6, "kernel": 3},
    "snapkv": {"window": 6, "kernel": 3},
    "snapkv:heads": {"window": 6, "kernel": 3, "gqa": False},
} | {f"pyramidkv:{layer}": {"window": 6, "kernel": 3} for layer in range(3)}


@pytest.mark.parametrize("texts", ((), (1, 7, 1, 20, 3)), ids=("steps", "texts"))
@pytest.mark.parametrize("case", CASES)
def test_a_row_that_generates_keeps_what_the_reference_keeps(case, texts):
    (name, _, which), options = case.partition(":"), CASES[case] | {"every": N}
    which = int(which) if which.isdigit() else 0
    plan = replace(make_plan(n_layer=3, new=NEW), max_prompt=max(PROMPTS))
    layer = kv.build(name, plan, BUDGET, options)[which]
    held = (BUDGET if case != "snapkv:heads" else BUDGET // (plan.n_head // plan.n_kv_head)) + N
    assert name == "pyramidkv" or layer.k.shape[2] == held + 2  # a step in flight, and the slot for rows that sleep
    for prompt in PROMPTS:
        qkv = text(plan, prompt + NEW, prompt)
        slow = (SCORED | SLOW)[name](plan, BUDGET, which, **options)
        assert (answer(layer, qkv, prompt, texts) - slow.run(*qkv, prompt, texts)).abs().max() < 1e-5
        assert layer.held(0, prompt + NEW).position.tolist() == slow.stored
        often = prompt > BUDGET if name == "pyramidkv" else 2  # lower layers of a pyramid keep a short text whole
        assert min(map(len, slow.compressions)) >= often


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_flight_changes_no_choice(case):
    """On a GPU the host makes room one step late: the token of that step is stored, and its query too."""
    plan, held = replace(make_plan(n_layer=1, new=NEW), max_prompt=50), []
    texts = [x[None] for x in text(plan, 50 + NEW, 0)]
    for late in (0, 1):
        (layer,) = kv.build(case.split(":")[0], plan, BUDGET, CASES[case] | {"every": N})
        layer.reset(0)
        layer.prefill(0, *(x[:, :, :50] for x in texts))
        for pos in range(50, 50 + NEW):
            layer.make_room(0, max(50, pos - late))
            layer.before_step(pos + 1, pos - 49)
            layer.decode(*(x[:, :, pos : pos + 1] for x in texts), torch.tensor([pos]), torch.tensor([True]))
        held.append(layer.held(0, 50 + NEW))
    for early, late in zip(*held, strict=True):
        assert torch.equal(early, late)


def test_a_window_that_is_not_generated_yet_is_refused():
    with pytest.raises(ValueError, match="every=4 must be at least the window, 8"):
        kv.build("snapkv", make_plan(), BUDGET, {"window": 8, "every": 4})


@pytest.mark.parametrize("options", ({}, {"every": N}), ids=("all", "every"))
@pytest.mark.parametrize("budget", (60, 0.97))
def test_a_pyramid_follows_from_no_plan(budget, options):
    """What a layer keeps of a text depends neither on the longest prompt nor on what may be generated."""
    plan = make_plan(n_layer=2, new=NEW)
    for prompt in (16, 41):
        texts, found = text(plan, prompt + NEW, prompt), []
        for longest in (prompt, prompt + 1, 96):
            layers = kv.build("pyramidkv", replace(plan, max_prompt=longest), budget, {"window": 8, **options})
            for layer in layers:
                layer.set_sizes(0, prompt)
            found.append(torch.stack([answer(layer, texts, prompt) for layer in layers]))
        assert all((y - found[0]).abs().max() < 1e-5 for y in found)


def test_more_tokens_than_a_row_may_generate_are_as_good_as_none():
    for name in ("expected", "snapkv"):
        none, many = (kv.planned_bytes(name, make_plan(), BUDGET, {"every": every}) for every in (0, 10**6))
        assert none == many


@pytest.mark.parametrize("lag", (0, 1))
def test_when_tokens_are_read_changes_no_answer(lag, tiny_checkpoint):
    """On a GPU the host reads tokens a step late, and a call's first step has none before it."""
    found = []
    for split, late in ((40, 0), (40, lag), (17, lag)):
        options = {"every": N, "window": 8}
        engine = Engine.load(tiny_checkpoint, "snapkv", BUDGET, options, compile=False, room=60)
        engine.lag = late
        (row,) = engine.start([list(range(3, 43))])
        tokens = [engine.ask([row], max_new_tokens=n)[0].tokens for n in (split, 40 - split) if n]
        found.append(sum(tokens, []))
    assert found[0] == found[1] == found[2] and len(found[0]) == 40
