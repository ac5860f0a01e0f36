"""StreamingLLM against its definition: the first and the newest tokens, at their own positions. Budgets and options."""

from dataclasses import replace

import pytest
import torch
from references.attention import masked_attention
from runs import with_heads
from test_contract import LAYERS, Cache, Text, make_plan

import kv


def streaming(text: Text, sinks: int, budget: int, steps: int) -> torch.Tensor:
    """Attention of the generated tokens to the sinks and the newest budget - sinks tokens: [L,Hq,steps,D]."""

    def kept(i: int) -> list[int]:
        return sorted({*range(min(sinks, i + 1)), *range(max(0, i + 1 - (budget - sinks)), i + 1)})

    at = range(text.prompt, text.prompt + steps)
    return torch.stack([masked_attention(*qkv, kept, at) for qkv in zip(text.q, text.k, text.v, strict=True)])


@pytest.mark.parametrize("sinks, budget, heads", with_heads(((4, 24), (4, 5), (0, 16), (1, 70))))
@pytest.mark.parametrize("prompt", (3, 24, 50, 96))
def test_streaming_attends_to_sinks_and_recent_tokens(heads, sinks, budget, prompt):
    plan, steps = make_plan(heads, batch=1, max_length=2**31), 3 * budget
    cache = Cache("streaming", plan)
    cache.layers = cache.step.layers = kv.build("streaming", plan, budget, {"sinks": sinks})
    text = Text.random(plan, prompt, steps, seed=prompt)
    found = cache.run({0: text}, steps)[0]
    assert (found - streaming(text, sinks, budget, steps)).abs().max() <= 1e-5


def test_streaming_takes_the_memory_of_its_budget_however_long_the_prompt():
    """The budget, a slot past the end, the keys of 4 sinks; RoPE's frequencies, and by how much the sinks moved."""
    plan = make_plan("gqa", 1)
    expected = LAYERS * ((128 + 1) * plan.slot_bytes + 4 * plan.slot_bytes // 2 + 4 * plan.head_dim // 2 + 8), 0
    for max_prompt in (1000, 4000):
        assert kv.planned_bytes("streaming", replace(plan, max_prompt=max_prompt), 128, {}) == expected


def test_a_budget_is_a_number_of_tokens_or_a_share_of_the_prompt():
    plan = make_plan()
    layers = [kv.build("streaming", plan, budget, {})[0] for budget in (24, 0.25, 0.01, 1.0)]
    assert [layer.size_of("size", 0) for layer in layers] == [24, 24, 5, plan.planned]
    for budget, message in ((4, "at least 5"), (1.5, "share between 0 and 1"), (None, "needs")):
        with pytest.raises(ValueError, match=message):
            kv.build("streaming", plan, budget, {})
    with pytest.raises(ValueError, match="takes no budget"):
        kv.build("full", plan, 256, {})


def test_options_are_checked_by_name_type_and_range():
    plan = make_plan()
    assert kv.build("streaming", plan, 24, {"sinks": "2"})[0].sinks == 2
    for name, options, message in (
        ("streaming", {"sink": "4"}, "no option 'sink'; it has: sinks"),
        ("streaming", {"sinks": "x"}, "type int"),
        ("streaming", {"sinks": "-1"}, "at least 0"),
        ("d2o", {"full_layers": [-1]}, "at least 0"),
        ("d2o", {"full_layers": [LAYERS]}, f"must lie below {LAYERS}"),
        ("tailorkv", {"quant_layers": 3.5}, "must be a list"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.build(name, plan, 24, options)
    with pytest.raises(ValueError, match="there are: brute_offload, cam"):
        kv.build("nosuch", plan, 24, {})


def test_prompts_beyond_a_sliding_window_are_refused_by_name():
    within, beyond = make_plan(window=128), make_plan(window=127)  # 96 prompt and 32 new tokens
    kv.build("streaming", within, 24, {})
    with pytest.raises(ValueError, match="streaming does not honour this model's sliding window"):
        kv.build("streaming", beyond, 24, {})
    assert kv.build("full", beyond, None, {})[0].size == 127


def test_quest_has_a_minimum_even_for_a_cache_of_a_few_tokens():
    plan = replace(make_plan(), max_prompt=4, room=2)
    with pytest.raises(ValueError, match="at least 6"):
        kv.build("quest", plan, 3, {"page": None, "skip_layers": 0})


def test_the_help_names_the_choices_of_an_option():
    assert "(16 or 8 or 4, default 16)" in kv.describe("full")
    assert "(none or paper or average, default none)" in kv.describe("d2o")
