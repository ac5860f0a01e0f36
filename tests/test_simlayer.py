"""SimLayerKV against a slow reference; which layers are lazy, and what memory and traffic that saves."""

from dataclasses import replace

import pytest
import torch
from references import eviction as slow
from runs import MAX_PROMPT, Run, generations, make_plan, step_both, tokens, with_heads

import kv
from kv.parts import inductor

WINDOW = {"sinks": 2, "recent": 10}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)


class Bounded(slow.SlowSimLayer):
    """Only `large` of the layers that are not lazy keep everything: those with the least mass."""

    def __init__(self, *args, large: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.large = large

    def is_lazy(self, layer: int) -> bool:
        least = sorted(range(len(self.masses)), key=lambda i: (round(self.masses[i], 6), i))[: self.large]
        return super().is_lazy(layer) or layer not in least


def attended(plan: kv.Plan, prompt: int, generator: torch.Generator, scales: list[float]) -> list:
    """Prompts whose last query attends to itself in layers with a scale above 0, halfway back in the others."""
    found = tokens(plan, 1, prompt, generator)
    for scale, (q, k, _) in zip(scales, found, strict=True):
        groups = plan.n_head // plan.n_kv_head
        at = prompt - 1 if scale > 0 else prompt // 2
        q[0, :, -1] += abs(scale) * k[0, :, at].repeat_interleave(groups, 0)
    return found


CASES = [(n, t) for n in (3, 0, 1, 6) for t in (0.3, 0.0, 0.9, 1.0) if (n, t) != (6, 1.0)]  # that is the full cache


@pytest.mark.parametrize("large, threshold, heads", with_heads(CASES))
def test_simlayer_equals_its_reference(large, threshold, heads):
    plan = make_plan(heads, n_layer=6)
    budget = 12 + -(-large * (plan.planned - 12) // 6)
    run = Run("simlayer", plan, budget, {"threshold": threshold, **WINDOW})
    regions = run.layers[0].regions
    assert (regions.large, regions.window) == (large, 12)
    check = Bounded(plan, 2, 10, threshold if threshold < 1 else 2.0, large=large)
    for seed, (prompt, steps) in enumerate(generations((100, 61, 30, 9), 30)):
        generator = torch.Generator().manual_seed(seed)
        scales = [(-2, 2, -1, 1, -3, 3)[(i * (seed + 1)) % 6] for i in range(6)]
        inputs = attended(plan, prompt, generator, scales)
        run.prefill(0, inputs)
        for layer, (q, k, v) in enumerate(inputs):
            check.prefill(layer, q[0], k[0], v[0])
        check.finish()
        lazy = [int(layer.size[0]) == 12 for layer in run.layers]
        assert lazy == [check.is_lazy(i) for i in range(6)]
        assert torch.tensor(regions.masses[0]) == pytest.approx(torch.tensor(check.masses), abs=1e-5)
        for _ in range(steps):
            step_both(run, check, generator)


SEEN = {  # n_layer, n_head, n_kv_head, dim, RoPE base -> threshold
    "llama-2-7b": (32, 32, 32, 4096, 1e4, 0.65),
    "mistral-7b": (32, 32, 8, 4096, 1e6, 0.8),
    "mistral-7b v0.1": (32, 32, 8, 4096, 1e4, 0.8),
    "qwen2.5-7b": (28, 28, 4, 3584, 1e6, 0.85),
    "llama-3-8b": (32, 32, 8, 4096, 5e5, 0.9),
    "needle": (8, 8, 2, 256, 1e4, 0.9),
    "longchat": (32, 32, 32, 4096, 1e4, 0.9),  # Llama-2's shape
}


@pytest.mark.parametrize("model", SEEN)
def test_the_default_threshold_depends_on_the_model(model):
    n_layer, n_head, n_kv_head, dim, theta, threshold = SEEN[model]
    rope_type = "linear" if model == "longchat" else "default"
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_kv_head": n_kv_head, "dim": dim, "rope_theta": theta}
    plan = replace(make_plan(), **sizes, rope_type=rope_type, device=torch.device("meta"))
    assert kv.build("simlayer", plan, 40, WINDOW)[0].regions.threshold == threshold
    assert kv.build("simlayer", plan, 40, WINDOW | {"threshold": 0.3})[0].regions.threshold == 0.3


def test_each_row_has_its_own_lazy_layers_and_rows_can_be_refilled():
    plan = make_plan(batch=3, n_layer=6)
    budget = 12 + -(-2 * (plan.planned - 12) // 6)  # two layers keep everything
    run, generator = Run("simlayer", plan, budget, WINDOW), torch.Generator().manual_seed(0)
    alone = [Run("simlayer", replace(plan, batch=1), budget, WINDOW) for _ in range(3)]
    for turn in range(3):
        for row, prompt in enumerate((100, 50, 70)):
            scales = [-3.0 if i in ((row + turn) % 3, 5 - row) else 3.0 for i in range(6)]
            inputs = attended(plan, prompt, generator, scales)
            run.prefill(row, inputs)
            alone[row].prefill(0, inputs)
            assert [i for i, layer in enumerate(run.layers) if layer.size[row] > 12] == [(row + turn) % 3, 5 - row]
        for _ in range(12):
            inputs = tokens(plan, 3, 1, generator)
            found = run.step(inputs)
            for row, one in enumerate(alone):
                mine = one.step([[x[row : row + 1] for x in qkv] for qkv in inputs])
                assert (found[:, row] - mine[:, 0]).abs().max() <= 1e-5


def test_memory_follows_the_budget_and_traffic_the_lazy_layers():
    plan = make_plan(n_layer=6)
    generator, sizes = torch.Generator().manual_seed(0), {}
    for budget in (12, 40, plan.planned):
        layers = kv.build("simlayer", plan, budget, WINDOW)
        sizes[budget] = layers.bytes()[0]
        assert sizes[budget] <= 1.1 * 6 * plan.n_kv_head * budget * plan.unit_bytes
    assert 1 <= sizes[plan.planned] / plan.full_bytes() < 1.01
    run = Run("simlayer", plan, plan.planned, WINDOW)
    run.prefill(0, attended(plan, MAX_PROMPT, generator, [20, -20, 20, 20, -20, 20]))
    read = [layer.step_bytes(101)[0] // (plan.n_kv_head * plan.unit_bytes) for layer in run.layers]
    assert read == [12, 101, 12, 12, 101, 12]
