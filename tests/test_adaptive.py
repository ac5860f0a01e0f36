"""Heads that share a layer's budget (heads=adaptive), beside the slow references; decoding alone: test_sparse.py."""

from dataclasses import replace

import pytest
from references.scored import SLOW as SCORED
from references.sparse import SLOW
from runs import answer, make_plan, text

import kv

BUDGET, PROMPTS, NEW = 24, (50, 24, 3), 20
OPTIONS = {"keydiff": {"alpha": 0.0}, "snapkv": {"window": 6, "kernel": 3}, "rkv": {"window": 6, "alpha": 0.6}}


@pytest.mark.parametrize("name", OPTIONS)
def test_texts_and_steps_after_the_prompt_attend_to_what_each_head_keeps(name):
    plan, options = replace(make_plan(n_layer=1, new=NEW), max_prompt=max(PROMPTS)), OPTIONS[name]
    (layer,) = kv.build(name, plan, BUDGET, options | {"heads": "adaptive"})
    (equal,) = kv.build(name, plan, BUDGET, {key: value for key, value in options.items() if key != "alpha"})
    extra = sum(x.nbytes for x in (layer.first, layer.size, layer.dropped, layer.regions.position))
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


def test_heads_that_share_a_budget_do_not_choose_again():
    with pytest.raises(ValueError, match="leave out every"):
        kv.build("keydiff", make_plan(), BUDGET, {"heads": "adaptive", "every": 8})
