"""Endless methods past the model's context: queries see the kept tokens at consecutive positions, those they have in
the cache (StreamingLLM, arXiv 2309.17453, section 3.2)."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from test_contract import DIM, LAYERS, Cache, Text, make_plan

import kv
from engine import Engine
from tasks import shipped_haystack

NEEDLE = Path(__file__).parents[1] / "needle"  # its context is 4,096 tokens
CONTEXT = 40
SPEEDS = [10000.0 ** (-2 * i / DIM) for i in range(DIM // 2)]


def moved(key: torch.Tensor, by: int) -> torch.Tensor:
    """A key [D] that RoPE turns `by` positions further: each pair of channels is a complex number."""
    pairs = torch.complex(*key.double().chunk(2)) * torch.exp(1j * by * torch.tensor(SPEEDS, dtype=torch.float64))
    return torch.cat((pairs.real, pairs.imag))


def probabilities(q: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
    return torch.softmax(torch.stack(keys) @ q.double() / math.sqrt(DIM), 0)


def in_cache(kept: list[int], keys: dict[int, torch.Tensor], at: int) -> list[torch.Tensor]:
    """The keys of the kept positions, ascending, as the query at one position sees them."""
    if at < CONTEXT:
        return [keys[j].double() for j in kept]
    return [moved(keys[j], at - (len(kept) - 1 - rank) - j) for rank, j in enumerate(kept)]


def streaming(text: Text, layer: int, head: int, at: int, sinks: int, budget: int) -> torch.Tensor:
    kept = sorted(set(range(sinks)) | set(range(max(0, at + 1 - (budget - sinks)), at + 1)))
    of = head // (text.q.shape[1] // text.k.shape[1])
    p = probabilities(text.q[layer, head, at], in_cache(kept, dict(enumerate(text.k[layer, of])), at))
    return p @ text.v[layer, of, kept].double()


def shape_with_context(heads: str):
    return make_plan(heads, batch=1, max_length=CONTEXT)


@pytest.mark.parametrize("heads", ("mha", "gqa", "mqa"))
@pytest.mark.parametrize("sinks, budget, prompt", ((4, 12, 30), (1, 5, 3), (0, 8, 30)))
def test_the_sinks_move_with_the_window(heads, sinks, budget, prompt):
    plan, steps = shape_with_context(heads), 2 * CONTEXT - prompt
    cache = Cache("streaming", plan)
    cache.layers = kv.build("streaming", plan, budget, {"sinks": sinks})
    cache.step.layers = cache.layers
    for seed in (1, 2):  # the second sequence enters a row that was past the context
        text = Text.random(plan, prompt, steps, seed)
        found = cache.run({0: text}, steps)[0]
        for i in range(steps):
            for layer in range(LAYERS):
                for head in range(plan.n_head):
                    expected = streaming(text, layer, head, prompt + i, sinks, budget)
                    assert (found[layer, head, i] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("heads", ("mha", "gqa", "mqa"))
def test_h2o_sees_its_tokens_side_by_side(heads):
    plan, budget, prompt = shape_with_context(heads), 12, 10
    steps, groups = 2 * CONTEXT - prompt, plan.n_head // plan.n_kv_head
    cache, text = Cache("h2o", plan, budget), Text.random(plan, prompt, 2 * CONTEXT - prompt, seed=3)
    found = cache.run({0: text}, steps)[0]
    for layer in range(LAYERS):
        for of in range(plan.n_kv_head):
            k, v = dict(enumerate(text.k[layer, of])), text.v[layer, of].double()
            queries, score = text.q[layer, of * groups : (of + 1) * groups], dict.fromkeys(range(prompt), 0.0)
            for at in range(prompt + steps):
                score.setdefault(at, 0.0)
                kept = sorted(j for j in score if j <= at)
                p = [probabilities(q[at], in_cache(kept, k, at)) for q in queries]
                for j, mass in zip(kept, sum(p).tolist(), strict=True):
                    score[j] += mass
                if at >= prompt:
                    expected = torch.stack([one @ v[kept] for one in p])
                    assert (found[layer, of * groups : (of + 1) * groups, at - prompt] - expected).abs().max() <= 1e-5
                if at >= prompt and len(kept) > budget:
                    old = [j for j in kept if j <= at - budget // 2]
                    del score[min(old, key=score.__getitem__)]


@pytest.mark.parametrize("name", ("streaming", "h2o", "roco", "cam", "d2o"))
def test_within_the_context_no_key_moves(name):
    text = Text.random(make_plan("gqa", 1), 30, 30, seed=4)
    ends, never = (
        Cache(name, replace(make_plan("gqa", 1), max_length=limit), 20).run({0: text}, 30)[0] for limit in (50, 2**31)
    )
    assert torch.equal(ends[:, :, :20], never[:, :, :20])
    assert (ends[:, :, 20:] - never[:, :, 20:]).abs().amax((0, 1, 3)).min() > 1e-4


@pytest.fixture(scope="module")
def needle() -> Engine:
    return Engine.load(NEEDLE, compile=False)


def surprise(engine: Engine, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """The negative log-likelihood of each token of a continuation, in nats."""
    return F.cross_entropy(engine.logits(prompt, continuation), torch.tensor(continuation), reduction="none")


def beyond_afresh(engine: Engine, name: str, budget: int, measured: range) -> float:
    """Nats by which a method's mean surprise exceeds that of a window of `budget` tokens, reread for each token."""
    text = engine.encode(shipped_haystack(), bos=False)[: measured.stop]
    engine.use("full", max_prompt=budget, room=1)
    afresh = [surprise(engine, text[t - budget : t], text[t : t + 1]) for t in measured]
    engine.use(name, budget, max_prompt=4000, room=len(text) - 4000)
    found = surprise(engine, text[:4000], text[4000:])[[t - 4000 for t in measured]]
    return (found - torch.cat(afresh)).mean().item()


@pytest.mark.exhaustive  # it takes minutes
@pytest.mark.parametrize("name", ("streaming", "h2o", "roco", "d2o"))  # cam is just as far off within the context
def test_far_beyond_the_context_no_methods_surprise_rises_sharply(needle, name):
    found = beyond_afresh(needle, name, 512, range(5500, 8500, 12))
    print(f"{name} {found:+.3f} nats")
    assert found < (0.1 if name == "streaming" else 0.3)
