"""PQCache against a slow reference."""

import pytest
import torch
from references import quantized as slow
from runs import Run, generations, make_plan, prefill_both, step_both, with_heads

import kv
from kv.parts import attention, inductor
from kv.pqcache import cluster

CASES = [
    ({}, 24),
    ({}, 8),
    ({"codebits": 3, "engine": "direct"}, 40),
    ({"partitions": 1, "initial": 0}, 24),
    ({"partitions": 4, "codebits": 2, "offload": False}, 24),
    ({"rounds": 0, "engine": "threads"}, 30),
    ({}, 130),  # more prompt and generated tokens are chosen than the prompt has
]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)
    monkeypatch.setattr(attention, "SCORES", 500)  # keys are assigned to centroids in several blocks


@pytest.mark.parametrize("options, budget, heads", with_heads(CASES))
def test_pqcache_equals_its_reference(options, budget, heads, monkeypatch):
    monkeypatch.setattr(inductor, "TILE", 8 if heads == "gqa" else 2)  # at 8, these caches are too small for tiles
    plan = make_plan(heads, new=60, n_layer=2)
    known = {key: value for key, value in options.items() if key in ("partitions", "codebits", "rounds", "initial")}
    run, check = Run("pqcache", plan, budget, options), slow.SlowPQCache(plan, budget, **known)
    for prompt, steps in generations((100, 61, 30, 3), 50):  # generated tokens leave the window and are chosen
        generator = torch.Generator().manual_seed(prompt)
        prefill_both(run, check, prompt, generator)
        for _ in range(steps):
            step_both(run, check, generator)
        for layer, ours in enumerate(run.layers):
            for head in range(plan.n_kv_head):
                theirs = check.codes[layer][head]
                assert ours.codes[0, head, :, : len(theirs[0])].tolist() == [list(map(int, part)) for part in theirs]
    run.layers.close()


def test_k_means_finds_clusters_that_are_far_apart():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0], [50, 0], [0, 50]])
    which = torch.arange(90) // 30  # k-means starts at tokens 0, 30 and 60
    centroids, codes = cluster(centres[which] + torch.randn(90, 2, generator=generator), 3, 8)
    assert codes.tolist() == which.tolist()
    assert (centroids - centres).abs().max() < 1


def test_a_head_that_has_no_equal_partitions_is_refused():
    with pytest.raises(ValueError, match="16 channels has no 3 equal partitions"):
        kv.build("pqcache", make_plan(), 24, {"partitions": 3})
