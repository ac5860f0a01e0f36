"""Methods that compress a row again while it generates (`every`), beside the slow references."""

from dataclasses import replace

import pytest
import torch
from references.scored import SLOW as SCORED
from references.sparse import SLOW
from runs import answer, make_shape

import kv

BUDGET, N, PROMPTS, NEW = 24, 8, (50, 20, 3), 45
CASES = {
    "keynorm": {"window": 4},
    "keydiff": {},
    "lagkv": {"lag": 5},
    "expected": {"future": 16},
    "rkv": {"window": 6, "kernel": 3},
    "snapkv": {"window": 6, "kernel": 3},
    "snapkv:heads": {"window": 6, "kernel": 3, "gqa": False},
}


@pytest.mark.parametrize("texts", ((), (1, 7, 1, 20, 3)), ids=("steps", "texts"))
@pytest.mark.parametrize("case", CASES)
def test_a_row_that_generates_keeps_what_the_reference_keeps(case, texts):
    name, options = case.split(":")[0], CASES[case] | {"every": N}
    shape = replace(make_shape("gqa"), batch=1, n_layer=1, max_prompt=max(PROMPTS), max_new_tokens=NEW)
    (layer,) = kv.build(name, shape, BUDGET, options)
    held = (BUDGET if case != "snapkv:heads" else BUDGET // (shape.n_head // shape.n_kv_head)) + N
    assert layer.k.shape[2] == held + 2  # a step in flight, and the slot for rows that sleep
    for prompt in PROMPTS:
        generator = torch.Generator().manual_seed(prompt)
        heads = (shape.n_head, shape.n_kv_head, shape.n_kv_head)
        q, k, v = (torch.randn(h, prompt + NEW, shape.head_dim, generator=generator) for h in heads)
        slow = (SCORED | SLOW)[name](shape, BUDGET, **options)
        expected = slow.run(q, k, v, prompt, texts)
        assert (answer(layer, [q, k, v], prompt, texts) - expected).abs().max() < 1e-5
        assert layer.held(0, prompt + NEW).position.tolist() == slow.stored and min(map(len, slow.compressions)) >= 2


@pytest.mark.parametrize("case", CASES)
def test_a_step_in_flight_changes_no_choice(case):
    """On a GPU the host makes room one step late: the token of that step is stored, and its query too."""
    shape = replace(make_shape("gqa"), batch=1, n_layer=1, max_prompt=50, max_new_tokens=NEW)
    texts = [torch.randn(1, heads, 50 + NEW, shape.head_dim) for heads in (shape.n_head, *[shape.n_kv_head] * 2)]
    held = []
    for late in (0, 1):
        (layer,) = kv.build(case.split(":")[0], shape, BUDGET, CASES[case] | {"every": N})
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
        kv.build("snapkv", make_shape("gqa"), BUDGET, {"window": 8, "every": 4})
