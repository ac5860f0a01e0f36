"""Methods that keep or read only a part of the tokens, against slow references written from the papers' equations."""

from dataclasses import replace
from itertools import product
from operator import itemgetter

import pytest
import torch
from conftest import slow
from references.scored import SLOW as SCORED
from references.sparse import SLOW as SPARSE
from references.sparse import SlowRocketTurns, pyramid_budgets, rocket_sizes
from runs import D, TensorSizes, generations, make_plan, tokens, with_heads

import kv
from kv import Plan
from kv.base import Held
from kv.parts import inductor, ops
from kv.parts.adaptive import Adaptive
from kv.rocketkv import Split
from kv.snapkv import Kernels, SnapKV
from kv.snapkv import pyramid_budgets as our_pyramid

SLOW = SPARSE | SCORED
CASES = {  # method: options, and budgets that make the choice hard
    "rocketkv": [
        ({"kernel": 5, "window": 8}, (8, 24, 60)),
        ({"kernel": 5, "split": "even"}, (24, 60)),
        ({"kernel": 3, "long_kernel": 9, "threshold": 97, "window": 4}, (24,)),
    ],
    "hybrid": [({}, (8, 24, 60)), ({"reach": 1.0}, (24,))],
    "snapkv": [
        ({"kernel": 5, "window": 8, "heads": "adaptive"}, (24, 60)),
        ({"gqa": False, "window": 4, "heads": "adaptive", "alpha": 0.5}, (48,)),
        ({"kernel": 5, "window": 8}, (24, 60)),
        ({"gqa": True, "window": 8}, (24,)),
        ({"deduct": True}, (70,)),
    ],
    "snapkv++": [
        ({"kernel": 5, "window": 8}, (24, 60)),
        ({"threshold": 97, "long_kernel": 9}, (24,)),
        ({"window": 8, "heads": "adaptive"}, (24,)),
    ],
    "pyramidkv": [({"kernel": 5, "window": 8}, (24, 60, 80)), ({"window": 8, "heads": "adaptive"}, (24, 80))],
    "keynorm": [
        ({}, (5, 24, 60)),
        ({"sinks": 0, "window": 0}, (24,)),
        ({"sinks": 0, "window": 0, "heads": "adaptive", "alpha": 0.0}, (24,)),
    ],
    "keydiff": [({}, (24, 60)), ({"sinks": 0, "window": 6}, (24,)), ({"heads": "adaptive"}, (24,))],
    "lagkv": [
        ({"lag": 10}, (24, 60)),
        ({"lag": 7, "sinks": 2, "window": 5}, (24,)),
        ({}, (24,)),
        ({"lag": 10, "heads": "adaptive", "alpha": 0.7}, (24,)),
    ],
    "expected": [
        ({"future": 20}, (24, 60)),
        ({"sinks": 0, "window": 5}, (24,)),
        ({"future": 20, "heads": "adaptive"}, (24,)),
    ],
    "rkv": [({}, (24, 60)), ({"weight": 0.8, "kernel": 5, "window": 6}, (10, 24)), ({"heads": "adaptive"}, (24, 60))],
    "exact_topk": [({}, (1, 24, 60)), ({"shared": True}, (24,))],
    "quest": [
        ({"page": 4, "skip_layers": 0, "reach": 1.0}, (8, 24)),
        ({"page": 4, "skip_layers": 0}, (8, 24, 60)),
        ({"page": None, "skip_layers": 0}, (48,)),
    ],
    "sparq": [({}, (2, 24, 60))],
    "duo": [({"sinks": 4, "recent": 8, "head_scores": None}, (60,)), ({"sinks": 4, "recent": 30}, (24,))],
}
EVERY = [(name, *case, budget) for name, cases in CASES.items() for *case, budgets in cases for budget in budgets]
PROMPTS = (100, 97, 33, 7)  # longer and shorter than the kept tokens, with full and partly filled pages


class Both:
    """A method and its reference, fed with the same tokens."""

    def __init__(self, name, plan, budget, options, monkeypatch):
        if "head_scores" in options:  # the first layer's heads retrieve first
            flat = [[2.0 - layer - 0.1 * h for h in range(plan.n_kv_head)] for layer in range(plan.n_layer)]
            options = options | {"head_scores": flat}
        self.name, self.plan = name, plan
        self.layers = kv.build(name, plan, budget, options)
        self.slow = [self.reference(layer, budget, options) for layer in range(plan.n_layer)]
        attend = ops.attend_rows

        def record(q, k, v, index, mask, read=None):
            self.chosen = [sorted(row[kept].tolist()) for row, kept in zip(index[0], mask[0], strict=True)]
            return attend(q, k, v, index, mask, read)

        monkeypatch.setattr(ops, "attend_rows", record)
        monkeypatch.setattr(inductor, "STEP", 8)

    def reference(self, layer, budget, options):
        options = {key: value for key, value in options.items() if key not in ("skip_layers", "offload")}
        if self.name == "duo":
            ours = self.layers[layer]
            count = sum(p.plan.n_kv_head for p in ours.parts if p.size == self.plan.planned)
            window = ours.parts[-1]
            retrieval = [head in ours.order[:count] for head in range(self.plan.n_kv_head)]
            options = {"heads": retrieval, "sinks": window.sinks, "recent": window.size - window.sinks}
        kind = SlowRocketTurns if options.pop("turns", False) else SLOW[self.name]
        return kind(self.plan, budget, layer, **options)

    def prefill(self, prompt, seed=0):
        self.random, self.length, self.new = torch.Generator().manual_seed(seed), prompt, 0
        self.chose = prompt  # how many tokens there were when a prompt or a turn chose
        for layer, check, (q, k, v) in zip(self.layers, self.slow, self.tokens(prompt), strict=True):
            layer.reset(0)
            layer.prefill(0, q, k, v)
            check.prefill(q[0], k[0], v[0])

    def tokens(self, n):
        return tokens(self.plan, 1, n, self.random)

    def step(self):
        """A token, for which outputs and choices must agree; returns what the last layer's heads attended to."""
        self.length, self.new = self.length + 1, self.new + 1
        for layer, check, (q, k, v) in zip(self.layers, self.slow, self.tokens(1), strict=True):
            self.chosen = None
            layer.make_room(0, self.length - 1)
            layer.before_step(self.length, self.new)
            y = layer.decode(q, k, v, torch.tensor([self.length - 1]), torch.tensor([True]))
            expected = check.decode(q[0, :, 0], k[0, :, 0], v[0, :, 0])
            if self.chosen is not None:
                held = [[*kept, *range(self.chose, self.length)] for kept in check.kept]
                begin = layer.first[0].tolist() if isinstance(layer, Adaptive) else [0] * len(held)
                slots = [[slot - first for slot in each] for each, first in zip(self.chosen, begin, strict=True)]
                chosen = [[held[slot] for slot in each] for held, each in zip(held, slots, strict=True)]
                assert chosen == [sorted(positions) for positions in check.attended]
            assert (y[0, :, 0] - expected).abs().max() <= 1e-5
        return check.attended


@pytest.mark.parametrize("name, options, budget, heads", with_heads(EVERY, itemgetter(0)))
def test_every_sparse_method_equals_its_reference(name, options, budget, heads, monkeypatch):
    plan = make_plan(heads, n_layer=2)
    monkeypatch.setattr(inductor, "TILE", 8 if heads == "gqa" else 2)  # at 8, these caches are too small for tiles
    both = Both(name, plan, budget, options, monkeypatch)
    for prompt, steps in generations(PROMPTS, plan.room):
        both.prefill(prompt)
        for _ in range(steps):
            attended = both.step()
            assert prompt < 100 or min(map(len, attended)) < both.length  # else it could be the full cache


@pytest.mark.parametrize("name", ("rocketkv", "hybrid", "quest"))
def test_methods_equal_their_reference_for_three_times_the_budget_in_generated_tokens(name, monkeypatch):
    options = {"quest": {"page": 4, "skip_layers": 0}}.get(name, {})
    both = Both(name, make_plan(new=72, n_layer=2), 24, options, monkeypatch)
    both.prefill(60)
    for _ in range(72):
        both.step()


SIZES = (100, 24, 6), (100, 90, 6), (40, 24, 6), (40, 8, 6), (40, 24, 16)  # the last: more than half of the kept
TURNS = [*((*sizes, False, "gqa") for sizes in SIZES), (100, 24, 6, True, "mha"), (40, 24, 6, True, "mqa")]


@pytest.mark.parametrize("prompt, budget, window, offload, heads", TURNS)
def test_every_turn_of_rocketkv_chooses_from_all_before_it(prompt, budget, window, offload, heads, monkeypatch):
    options = {"kernel": 5, "window": window, "turns": True, "offload": offload}
    both = Both("rocketkv", make_plan(heads, n_layer=2), budget, options, monkeypatch)
    both.prefill(prompt)
    for turn in (5, 9, 3):  # shorter and longer than the window
        for _ in range(4):
            both.step()
        for layer, check, (q, k, v) in zip(both.layers, both.slow, both.tokens(turn), strict=True):
            y = layer.extend(0, q, k, v, both.length)
            assert (y[0] - check.turn(q[0], k[0], v[0])).abs().max() <= 1e-5
        both.length, both.new, both.chose = both.length + turn, both.new + turn, both.length + turn


def test_rocketkv_offloads_only_a_history():
    with pytest.raises(ValueError, match="turns=true"):
        kv.build("rocketkv", make_plan(), 24, {"offload": True})


# RocketKV's sizes


@pytest.mark.parametrize(
    "planned, budget, slots, page, channels",
    [(131072, 256, 5793, 5, 28), (16384, 256, 2048, 3, 48), (2048, 64, 362, 3, 68)],
)
def test_rocketkv_has_the_sizes_of_the_paper(planned, budget, slots, page, channels):
    new = 128
    plan = Plan(32, 32, 8, 128, 4096, "llama3", 5e5, torch.bfloat16, torch.device("meta"), 1, planned - new, new)
    split = Split(plan, budget, "even")
    assert (split.slots(plan.max_prompt), *split.sizes()) == (slots, page, channels)
    assert split.kept(plan.max_prompt, 32) == (slots - new, 32)
    (layer, *_) = kv.build("rocketkv", plan, budget, {"split": "even"})
    unit, pages = plan.n_kv_head * plan.unit_bytes, -(-slots // page)
    assert 1 < sum(layer.storages().values()) / ((slots + pages) * unit) < 1.01
    ratio = planned / budget
    assert slots + pages < planned * (ratio**-0.5 + 2 * ratio**-0.75)  # Table 1 of the paper, up to rounding
    assert layer.step_bytes(planned)[0] == pytest.approx(budget * unit, rel=0.1)


@pytest.mark.parametrize("split", ("even", "adaptive"))
def test_sizes_equal_the_references(split):
    for planned, new, dim in product((130, 1000, 4096, 131072), (1, 16, 64), (16, 64, 128)):
        plan = replace(make_plan(new=new), max_prompt=planned - new, head_dim=dim)
        for budget in (t for t in (8, 31, 100, 129, 256, 999, 4000) if t < planned):
            ours, expected = Split(plan, budget, split), rocket_sizes(planned, budget, new, dim, split)
            assert ours.slots(planned - new) == expected["n1"]
            assert ours.kept(planned - new, 32)[0] == expected["keep"]
            assert ours.sizes() == (expected["page"], expected["channels"])


def test_pages_of_one_token_add_one_copy_of_k():
    plan = make_plan()
    layer = kv.build("rocketkv", plan, 100, {})[0]
    assert layer.page == 1
    units = sum(layer.storages().values())
    assert 1 < units * 2 / (3 * layer.slots * plan.n_kv_head * plan.unit_bytes) < 1.05


# What several methods share


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", (False, True))
def test_on_a_gpu_too_ties_go_to_the_first(compiled):
    generator = torch.Generator().manual_seed(0)
    top = torch.compile(ops.top, fullgraph=True) if compiled else ops.top
    for n in (900, 1100, 5000, 131072):
        for values in (2, 50, 10000):
            scores = torch.randint(-values, values, (2, 4, n), generator=generator).float() / 3
            expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :512]
            assert torch.equal(top(scores.cuda(), 512, True).cpu(), expected)
            assert torch.equal(top(scores.cuda(), 512).sort().values.cpu(), expected.sort().values)


def test_pyramid_budgets_equal_the_references_and_average_to_the_budget():
    for layers, budget, prompt in product((1, 2, 32), (2, 40, 256, 1843, 2048, 3000), (20, 1900, 100_000)):
        assert our_pyramid(layers, budget, 32, prompt) == pyramid_budgets(layers, budget, 32, prompt)
    budgets = our_pyramid(32, 1024, 32, 4096)
    assert budgets == sorted(budgets, reverse=True) and sum(budgets) / 32 == pytest.approx(1024, rel=0.01)


def test_models_of_the_paper_have_a_threshold_for_the_wide_kernel_and_longchat_two_full_layers():
    """Shapes with the traits of Llama-3.1-8B and of LongChat, and of another model."""
    other = replace(make_plan(n_layer=2), device=torch.device("meta"))
    longchat = replace(other, n_layer=32, n_head=32, n_kv_head=32, rope_type="linear")
    models = (replace(other, rope_theta=5e5), 48 * 1024, 0), (longchat, 12 * 1024, 2), (other, None, 0)
    for plan, threshold, full in models:
        layers, even, plus, given = (
            kv.build(name, plan, 24, options)
            for name, options in (
                ("rocketkv", {}),
                ("rocketkv", {"split": "even"}),
                ("snapkv++", {}),
                ("rocketkv", {"threshold": 50}),
            )
        )
        assert even[-1].kernels == plus[-1].kernels == (63, 511, threshold)
        assert layers[-1].kernels == (63, 511, None)  # split=adaptive has one kernel for every length
        assert given[-1].kernels.threshold == 50
        assert [type(layer).__name__ for layer in layers].count("Full") == full
        adaptive, halves = (Split(plan, 24, how).slots(plan.max_prompt) for how in ("adaptive", "even"))
        assert layers[-1].slots == adaptive != halves == even[-1].slots


def test_stage_1_allocates_no_more_than_one_heads_window_scores():
    """No T x T, nothing over all heads: the largest tensor made for a long prompt is G x window x T, or K in fp32."""
    q, k = torch.randn(1, 6, 4096, D), torch.randn(1, 2, 4096, D)
    layer = SnapKV(replace(make_plan(), max_prompt=4096), lambda prompt: (200, 8), Kernels(63))
    with TensorSizes() as sizes:
        layer.choose(0, q, Held.new(k[0], k[0]), 4096, 4096)
    assert max(sizes.found) <= 3 * max(8, D) * 4096 * 2


@pytest.mark.parametrize("compiled", (False, slow(True)))
def test_the_best_are_the_same_in_tiles(compiled):
    """Few values, so that ties lie in and across tiles and at the last place; also sizes that 8 does not divide."""
    k, most, device = 5, inductor.TILE**2 * 5, torch.device("cpu")
    assert inductor.min_scores(most, k, device) == 8 * k + 1
    assert inductor.min_scores(most - 1, k, device) == inductor.min_scores(0, k, device) == k
    torch._dynamo.reset()
    best = torch.compile(ops.top, fullgraph=True, dynamic=True) if compiled else ops.top
    generator = torch.Generator().manual_seed(0)
    for n in (8 * k + 1, 8 * k + 8, 8 * k + 9, most, most + 77):
        for values in (2, 4, 1000):
            scores = torch.randint(-values, values, (2, 7, n), generator=generator).float() / 3
            for rare in (-torch.inf, -0.0, torch.inf, torch.nan, -torch.nan):
                share = 0.5 if rare == -torch.inf else 0.01
                scores = scores.masked_fill(torch.rand(scores.shape, generator=generator) < share, rare)
            expected = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
            for tiles in (most, 0):
                assert torch.equal(best(scores, k, True, tiles), expected)
                assert torch.equal(best(scores, k, False, tiles).sort().values, expected.sort().values)


# DuoAttention's heads

WINDOW = {"sinks": 4, "recent": 8}


def test_duo_keeps_at_most_the_sinks_asked_for():
    sizes = [kv.METHODS["duo"](sinks=sinks).counts(make_plan(), t)[1:] for sinks in (128, 4) for t in (64, 200, 300)]
    assert sizes == [(13, 51), (40, 160), (128, 172), (4, 60), (4, 196), (4, 296)]
    assert all(layer.endless for layer in kv.build("duo", replace(make_plan(), max_prompt=4000), 300, {}))


def test_duo_needs_to_know_its_heads():
    plan = make_plan(n_layer=2)
    assert kv.build("duo", plan, 12, WINDOW)  # all heads stream: nothing to know
    for scores, words in ((None, "calibrate.py"), ([[1.0]], "2 layers of 2")):
        with pytest.raises(ValueError, match=words):
            kv.build("duo", plan, 60, WINDOW | {"head_scores": scores})


def test_duo_reads_its_heads_from_files(tmp_path):
    """JSON, or the published gates, as numpy.savetxt writes them: training leaves some slightly outside 0 to 1."""
    plan, file = make_plan(n_layer=2), tmp_path / "heads"
    gates = "-2.2e-04\t1.000000000000000000e+00\n8.593750000000000000e-01\t-9.250640869140625000e-05\n"
    for text, budget, retrieval in (
        ('{"head_scores": [[0.1, 0.9], [0.2, 0.3]]}', 48, [[1], []]),
        (gates, 48, [[1], []]),
        (gates, 80, [[1], [0]]),
        (gates, 100, [[0, 1], [0]]),
    ):
        file.write_text(text)
        layers = kv.build("duo", plan, budget, WINDOW | {"heads": str(file)})
        whole = [sum(p.plan.n_kv_head for p in layer.parts if p.size == plan.planned) for layer in layers]
        assert [layer.order[:n].tolist() for layer, n in zip(layers, whole, strict=True)] == retrieval
    gates = (("0.5\tnan\n1\t0\n", "finite"), ("0.5\t1\n", "2 layers of 2"), ("0.5 1\n0 1\n", "tabs"))
    broken = ('{"head_scores": 5}', '{"head_scores": [["x", 1.0], [1.0, 1.0]]}', "[]", "{")
    for text, words in (*gates, *((text, "must be JSON with head_scores") for text in broken)):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            kv.build("duo", plan, 60, WINDOW | {"heads": str(file)})
    file.unlink()
    with pytest.raises(ValueError, match="head_scores"):
        kv.build("duo", plan, 60, WINDOW | {"heads": str(file)})
