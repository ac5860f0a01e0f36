"""InfLLM against a slow reference; InfLLM and brute_offload with the cache on the host."""

import pytest
import torch
from references.infllm import SlowInfLLM
from runs import Run, compare, generations, make_plan, tokens, with_heads

import kv
from kv.parts import inductor

PROMPTS = (100, 97, 33, 14, 7)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)


CASES = [
    (24, {"block": 6, "reps": 2}),
    (60, {"block": 7}),
    (50, {"block": 3, "reps": 4, "sinks": 0, "local": 5}),
    (64, {"block": 20, "sinks": 4, "local": 9}),
    (24, {"block": 6, "reps": 2, "joint": False}),
]


@pytest.mark.parametrize("budget, options, heads", with_heads(CASES))
def test_infllm_equals_its_reference(budget, options, heads):
    plan = make_plan(heads)
    run, slow = Run("infllm", plan, budget, options), SlowInfLLM(plan, budget, **options)
    layer = run.layers[0]
    for prompt, steps in generations(PROMPTS, plan.room):
        generator = torch.Generator().manual_seed(prompt)
        inputs = tokens(plan, 1, prompt, generator)
        run.prefill(0, inputs)
        slow.prefill(*(x[0] for x in inputs[0]))
        for _ in range(steps):
            inputs = tokens(plan, 1, 1, generator)
            found = run.step(inputs)[0, 0]
            expected = slow.decode(*(x[0, :, 0] for x in inputs[0]))
            assert (found - expected).abs().max() <= 1e-5
            middle = range(layer.sinks, prompt - layer.local)
            for head, attended in enumerate(slow.attended):
                blocks = {(p - layer.sinks) // layer.block for p in attended if p in middle}
                assert sorted(blocks) == sorted(b for b in layer.index[0, head].tolist() if b >= 0)


def test_dynamic_ntk_turns_a_rows_keys_by_its_own_frequencies():
    plan = make_plan(batch=2)
    q, k, v = tokens(plan, 1, 100, torch.Generator().manual_seed(0))[0]
    layer = kv.build("infllm", plan, 24, {"block": 6, "reps": 6})[0]
    layer.prefill(0, q, k, v)
    before = layer.representative_sums[0].clone()
    layer.inv_freq[1] /= 2
    layer.prefill(1, q, k, v)
    sums = layer.representative_sums
    assert torch.equal(sums[0], before) and (sums[1] - before).abs().max() > 0.1


@pytest.mark.parametrize("engine", ("threads", "direct"))
def test_offloaded_infllm_equals_resident_infllm_to_the_bit(engine):
    options = {"block": 6, "reps": 2}
    plan, away = make_plan(batch=3), {"offload": True, "engine": engine}
    compare(Run("infllm", plan, 24, options), Run("infllm", plan, 24, options | away), torch.equal)


@pytest.mark.parametrize("options", ({}, {"layers": 8}, {"layers": 3, "ahead": 1, "threads": 1}, {"ahead": 7}))
def test_brute_offload_is_full_attention(options):
    plan = make_plan(batch=3)
    here, there = Run("full", plan, None, {}), Run("brute_offload", plan, None, options)
    compare(here, there, lambda a, b: torch.allclose(a, b, atol=1e-6))


def test_brute_offload_has_most_layers_on_the_host_and_buffers_for_those_in_flight():
    plan = make_plan()
    layers = kv.build("brute_offload", plan, None, {})  # 20 of 32: 5 of 8
    unit = plan.n_kv_head * plan.unit_bytes
    assert [bool(layer.pools) for layer in layers] == [False] * 3 + [True] * 5
    prompts = len({layer.pool_buffer.data_ptr() for layer in layers[3:]})
    assert prompts == 5  # four that are loaded ahead, and the one that is read
    assert [layer.step_bytes(110) for layer in layers] == [(110 * unit, 0)] * 3 + [(110 * unit, 100 * unit)] * 5
    loads = [[layers.index(later) for later in layer.loads] for layer in layers]
    assert loads == [[3, 4], [5], [6], [7], [], [], [], []]


def test_infllm_needs_room_for_a_block():
    with pytest.raises(ValueError, match="infllm needs a budget of at least 339"):
        kv.build("infllm", make_plan(new=1000), 300, {})
