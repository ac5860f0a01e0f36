"""Methods that keep or read only a part of the tokens, against slow references written from the papers' equations."""

from dataclasses import replace
from operator import itemgetter

import pytest
import torch
from references.scored import SLOW as SCORED
from references.sparse import SLOW as SPARSE
from references.sparse import SlowRocketTurns, pyramid_budgets, rocket_sizes
from runs import TensorSizes, generations, with_heads

import kv
from kv import Plan
from kv.parts import inductor, ops
from kv.rocketkv import Split
from kv.snapkv import Kernels, SnapKV
from kv.snapkv import pyramid_budgets as our_pyramid

SLOW = SPARSE | SCORED
HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (4, 1)}
D = 16
CASES = {  # method: options, and budgets that make the choice hard
    "rocketkv": [
        ({"kernel": 5, "window": 8}, (8, 24, 60)),
        ({"kernel": 5, "split": "even"}, (24, 60)),
        ({"kernel": 3, "long_kernel": 9, "threshold": 50, "window": 4}, (24,)),
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
        ({"threshold": 50, "long_kernel": 9}, (24,)),
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


def make_plan(heads: str, new: int = 30) -> Plan:
    n_head, n_kv_head = HEADS[heads]
    return Plan(2, n_head, n_kv_head, D, n_head * D, "default", 1e4, torch.float32, torch.device("cpu"), 1, 100, new)


class Both:
    """A method, from its own `build`, and its reference, fed with the same tokens.

    `chosen` holds the slots that the method selected last.
    """

    def __init__(self, name, plan, budget, options, monkeypatch):
        options = dict(options)
        if "head_scores" in options:  # the first layer's heads retrieve first
            flat = [[2.0 - layer - 0.1 * h for h in range(plan.n_kv_head)] for layer in range(plan.n_layer)]
            options["head_scores"] = flat
        self.name, self.plan = name, plan
        self.layers = kv.parse_options(name, options).build(plan, budget)
        self.slow = [self.reference(layer, budget, options) for layer in range(plan.n_layer)]
        self.chosen = None
        attend = ops.attend_rows

        def record(q, k, v, index, mask, read=None):
            self.chosen = [sorted(row[kept].tolist()) for row, kept in zip(index[0], mask[0], strict=True)]
            return attend(q, k, v, index, mask, read)

        monkeypatch.setattr(ops, "attend_rows", record)
        monkeypatch.setattr(inductor, "STEP", 8)

    def reference(self, layer, budget, options):
        options = dict(options)
        if self.name == "duo":
            ours = self.layers[layer]
            retrieval = [False] * self.plan.n_kv_head
            for head in ours.order[: sum(p.plan.n_kv_head for p in ours.parts if p.size == self.plan.planned)]:
                retrieval[head] = True
            window = ours.parts[-1]
            options = {"heads": retrieval, "sinks": window.sinks, "recent": window.size - window.sinks}
        elif options.get("page", 0) is None:
            options = options | {"page": "auto"}
        if options.pop("turns", False):
            options.pop("offload")
            return SlowRocketTurns(self.plan, budget, layer, **options)
        return SLOW[self.name](self.plan, budget, layer, **options)

    def prefill(self, prompt, seed=0):
        self.random, self.length, self.new = torch.Generator().manual_seed(seed), prompt, 0
        self.chose = prompt  # how many tokens there were when a prompt or a turn chose
        for layer, slow in zip(self.layers, self.slow, strict=True):
            q, k, v = self.tokens(prompt)
            layer.reset(0)
            layer.prefill(0, q, k, v)
            slow.prefill(q[0], k[0], v[0])

    def tokens(self, n):
        heads = (self.plan.n_head, self.plan.n_kv_head, self.plan.n_kv_head)
        return [torch.randn(1, h, n, D, generator=self.random) for h in heads]

    def step(self):
        """-> per layer: (our output [Hq,D], the reference's, our selected positions or None, the reference's)."""
        found = []
        self.length, self.new = self.length + 1, self.new + 1
        for layer, slow in zip(self.layers, self.slow, strict=True):
            self.chosen = None
            q, k, v = self.tokens(1)
            layer.make_room(0, self.length - 1)
            layer.before_step(self.length, self.new)
            y = layer.decode(q, k, v, torch.tensor([self.length - 1]), torch.tensor([True]))
            expected = slow.decode(q[0, :, 0], k[0, :, 0], v[0, :, 0])
            positions = None
            if self.chosen is not None:
                generated = list(range(self.chose, self.length))
                positions = [
                    [(kept + generated)[slot] for slot in slots]
                    for kept, slots in zip(slow.kept, self.chosen, strict=True)
                ]
            found.append((y[0, :, 0], expected, positions, [sorted(a) for a in slow.attended]))
        return found


@pytest.mark.parametrize("name, options, budget, heads", with_heads(EVERY, itemgetter(0)))
def test_every_sparse_method_equals_its_reference(name, options, budget, heads, monkeypatch):
    plan = make_plan(heads)
    if budget < kv.parse_options(name, {k: v for k, v in options.items() if v}).minimum(plan):
        pytest.skip("the budget is below the method's minimum for this shape")
    monkeypatch.setattr(inductor, "TILE", 8 if heads == "gqa" else 2)  # at 8, these caches are too small for tiles
    both = Both(name, plan, budget, options, monkeypatch)
    for prompt, steps in generations(PROMPTS, plan.room):
        both.prefill(prompt)
        for _ in range(steps):
            for y, expected, chosen, attended in both.step():
                assert chosen is None or chosen == attended
                assert (y - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", [n for n in CASES if n != "duo"])
def test_no_sparse_method_attends_to_everything(name, monkeypatch):
    """If it kept everything, the comparison above could not tell it from the full cache."""
    options, budgets = CASES[name][0]
    both = Both(name, make_plan("gqa"), budgets[0], options, monkeypatch)
    both.prefill(100)
    for _, _, _, attended in both.step():
        assert all(len(tokens) < 101 for tokens in attended)


@pytest.mark.parametrize("name", ("rocketkv", "hybrid", "quest"))
def test_methods_equal_their_reference_for_three_times_the_budget_in_generated_tokens(name, monkeypatch):
    plan, options = make_plan("gqa", new=72), {"quest": {"page": 4, "skip_layers": 0}}.get(name, {})
    both = Both(name, plan, 24, options, monkeypatch)
    both.prefill(60)
    for _ in range(72):
        for y, expected, chosen, attended in both.step():
            assert chosen == attended and (y - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("offload", (False, True))
@pytest.mark.parametrize("prompt, budget", [(100, 24), (100, 90), (40, 24), (40, 8)])
def test_every_turn_of_rocketkv_chooses_from_all_before_it(prompt, budget, offload, heads, monkeypatch):
    plan, options = make_plan(heads), {"kernel": 5, "window": 6}
    both = Both("rocketkv", plan, budget, options | {"turns": True, "offload": offload}, monkeypatch)
    both.prefill(prompt)
    for turn in (5, 9, 3):  # shorter and longer than the window
        for _ in range(4):
            for y, expected, chosen, attended in both.step():
                assert chosen == attended
                assert (y - expected).abs().max() <= 1e-5
        for layer, slow in zip(both.layers, both.slow, strict=True):
            q, k, v = both.tokens(turn)
            y = layer.extend(0, q, k, v, both.length)
            assert (y[0] - slow.turn(q[0], k[0], v[0])).abs().max() <= 1e-5
        both.length, both.new, both.chose = both.length + turn, both.new + turn, both.length + turn


def test_rocketkv_offloads_only_a_history():
    with pytest.raises(ValueError, match="turns=true"):
        kv.build("rocketkv", make_plan("gqa"), 24, {"offload": True})


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
    unit = plan.n_kv_head * plan.unit_bytes
    pages = -(-slots // page)
    assert 1 < sum(layer.storages().values()) / ((slots + pages) * unit) < 1.01
    ratio = planned / budget
    assert slots + pages < planned * (ratio**-0.5 + 2 * ratio**-0.75)  # Table 1 of the paper, up to rounding
    assert layer.step_bytes(planned)[0] == pytest.approx(budget * unit, rel=0.1)


@pytest.mark.parametrize("split", ("even", "adaptive"))
def test_sizes_equal_the_references(split):
    for planned in (130, 1000, 4096, 131072):
        for budget in (8, 31, 100, 129, 256, 999, 4000):
            for new in (1, 16, 64):
                for dim in (16, 64, 128):
                    if budget < planned:
                        plan = replace(make_plan("gqa", new), max_prompt=planned - new, head_dim=dim)
                        ours, expected = Split(plan, budget, split), rocket_sizes(planned, budget, new, dim, split)
                        assert ours.slots(planned - new) == expected["n1"]
                        assert ours.kept(planned - new, 32)[0] == expected["keep"]
                        assert ours.sizes() == (expected["page"], expected["channels"])


def test_pages_of_one_token_add_one_copy_of_k():
    plan = make_plan("gqa")
    layer = kv.build("rocketkv", plan, 100, {})[0]
    assert layer.page == 1
    units = sum(layer.storages().values())
    assert 1 < units * 2 / (3 * layer.slots * plan.n_kv_head * plan.unit_bytes) < 1.05


@pytest.mark.parametrize("reach", (None, 1.0))
@pytest.mark.parametrize("name, options", [("rocketkv", {}), ("hybrid", {}), ("quest", {"page": 4, "skip_layers": 0})])
def test_bounds_are_those_of_the_stored_keys(name, options, reach, monkeypatch):
    plan, options = make_plan("gqa", new=40), options | ({"reach": reach} if reach else {})
    reach = reach or {"quest": 0.75}.get(name, 0.5)
    for prompt in (1, 3, 50, 99, 100):
        both = Both(name, plan, 16, options, monkeypatch)
        both.prefill(prompt, seed=prompt)
        layer = both.layers[0]
        for _ in range(40):
            both.step()
            stored = min(prompt, getattr(layer, "kept", prompt)) + both.new
            keys = layer.k[0, :, :stored]
            for page, lanes in enumerate(keys.split(layer.page, dim=1)):
                if name == "quest":
                    low, high = layer.low[0, :, page], layer.high[0, :, page]
                else:
                    low, high = layer.bounds[0, :, :, page].chunk(2, dim=1)
                mean = lanes.mean(1)
                for bound, extreme in ((low, lanes.amin(1)), (high, lanes.amax(1))):
                    torch.testing.assert_close(bound, reach * extreme + (1 - reach) * mean, rtol=0, atol=1e-6)


# What several methods share


def test_ties_go_to_the_first():
    scores = torch.zeros(3, 40)
    scores[1, 7::3], scores[2, 5:9], scores[2, 20] = 2.5, -1.0, -0.5
    found = [sorted(row) for row in ops.top(scores, 5).tolist()]
    assert found == [[0, 1, 2, 3, 4], [7, 10, 13, 16, 19], [0, 1, 2, 3, 4]]
    assert sorted(ops.top(torch.tensor([-1.0, -3.0, -2.0, -torch.inf]), 2).tolist()) == [0, 2]
    random = torch.randn(20, 500)
    assert torch.equal(ops.top(random, 9).sort().values, random.topk(9).indices.sort().values)


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
    for layers in (1, 2, 32):
        for budget in (2, 40, 256, 1843, 2048, 3000):
            for prompt in (20, 1900, 100_000):
                assert our_pyramid(layers, budget, 32, prompt) == pyramid_budgets(layers, budget, 32, prompt)
    budgets = our_pyramid(32, 1024, 32, 4096)
    assert budgets == sorted(budgets, reverse=True) and sum(budgets) / 32 == pytest.approx(1024, rel=0.01)


def test_pyramidkv_gives_higher_layers_what_lower_ones_cannot_use():
    plan = replace(make_plan("gqa"), n_layer=32, max_prompt=2048, device=torch.device("meta"))
    keeps = [layer.kept_of(2048) for layer in kv.build("pyramidkv", plan, 1843, {})]
    assert max(keeps) == 2048 and keeps == sorted(keeps, reverse=True)
    assert sum(keeps) / 32 == pytest.approx(1843, abs=1)


def test_wide_pooling_begins_at_the_threshold(monkeypatch):
    kernels, pool = [], torch.nn.functional.max_pool1d

    def record(x, kernel, **more):
        kernels.append(kernel)
        return pool(x, kernel, **more)

    monkeypatch.setattr(torch.nn.functional, "max_pool1d", record)
    layer = SnapKV(make_plan("gqa"), lambda prompt: (20, 4), Kernels(3, 9, threshold=50))
    for length in (49, 50):
        layer.choose(0, torch.randn(1, 6, length, D), *torch.randn(2, 1, 2, length, D), length)
    assert kernels == [3, 9]


def paper_shapes() -> tuple[Plan, Plan]:
    """Shapes with the traits of Llama-3.1-8B and of LongChat, on the meta device."""
    plan = replace(make_plan("gqa"), device=torch.device("meta"))
    longchat = replace(plan, n_layer=32, n_head=32, n_kv_head=32, rope_type="linear")
    return replace(plan, rope_theta=5e5), longchat


@pytest.mark.parametrize("name, options", [("rocketkv", {"split": "even"}), ("snapkv++", {})])
def test_only_the_models_of_the_paper_have_a_threshold(name, options):
    shapes = (*paper_shapes(), make_plan("gqa"))
    for plan, threshold in zip(shapes, (48 * 1024, 12 * 1024, None), strict=True):
        layer = kv.build(name, plan, 24, options)[-1]
        assert layer.kernels == (63, 511, threshold)


def test_longchat_has_two_full_layers():
    for plan, full in zip(paper_shapes(), (0, 2), strict=True):
        layers = kv.build("rocketkv", plan, 24, {})
        assert [type(layer).__name__ for layer in layers].count("Full") == full


def test_rocketkv_by_default_splits_adaptively_with_one_kernel_for_every_length():
    for plan in (*paper_shapes(), make_plan("gqa")):
        layer = kv.build("rocketkv", plan, 24, {})[-1]
        assert layer.kernels == (63, 511, None)
        adaptive, even = (Split(plan, 24, how).slots(plan.max_prompt) for how in ("adaptive", "even"))
        assert layer.slots == adaptive != even
    layer = kv.build("rocketkv", plan, 24, {"threshold": 50})[-1]
    assert layer.kernels.threshold == 50  # as the user says


def test_stage_1_allocates_no_more_than_one_heads_window_scores(monkeypatch):
    """No T x T, nothing over all heads: the largest tensor made for a long prompt is G x window x T, or K in fp32."""
    q, k = torch.randn(1, 6, 4096, D), torch.randn(1, 2, 4096, D)
    layer = SnapKV(replace(make_plan("gqa"), max_prompt=4096), lambda prompt: (200, 8), Kernels(63))
    with TensorSizes() as sizes:
        layer.choose(0, q, k, k, 4096)
    assert max(sizes.found) <= 3 * max(8, D) * 4096 * 2


def test_quest_attends_to_the_newest_page(monkeypatch):
    both = Both("quest", make_plan("gqa"), 8, {"page": 4, "skip_layers": 0}, monkeypatch)
    both.prefill(99)
    for step in range(20):
        for _, _, chosen, _ in both.step():
            assert all(99 + step in positions for positions in chosen)


def test_exact_topk_chooses_for_every_query_head_or_for_a_group(monkeypatch):
    for options, lists in (({}, 6), ({"shared": True}, 2)):
        both = Both("exact_topk", make_plan("gqa"), 24, options, monkeypatch)
        both.prefill(100)
        for _, _, chosen, _ in both.step():
            assert [len(positions) for positions in chosen] == [24] * lists
            assert len(set(map(tuple, chosen))) == lists


def test_sparq_attends_to_the_newest_quarter_of_what_it_selects(monkeypatch):
    both = Both("sparq", make_plan("gqa"), 48, {}, monkeypatch)
    both.prefill(99)
    for step in range(20):
        for _, _, chosen, _ in both.step():
            newest = set(range(94 + step, 100 + step))
            assert all(len(positions) == 24 and newest <= set(positions) for positions in chosen)


def test_sparq_rounds_its_channels_half_up():
    plan = make_plan("gqa")  # 16 channels, 130 planned tokens
    assert [kv.build("sparq", plan, t, {})[0].channels for t in (2, 12, 13, 60)] == [1, 1, 2, 7]


def test_duo_keeps_at_most_the_sinks_asked_for():
    plan = make_plan("gqa")
    sizes = [kv.METHODS["duo"](sinks=sinks).counts(plan, t)[1:] for sinks in (128, 4) for t in (64, 200, 300)]
    assert sizes == [(13, 51), (40, 160), (128, 172), (4, 60), (4, 196), (4, 296)]


def test_duo_needs_to_know_its_heads(tmp_path):
    plan = make_plan("gqa")
    with pytest.raises(ValueError, match="calibrate.py"):
        kv.build("duo", plan, 60, {"sinks": 4, "recent": 8})
    assert kv.build("duo", plan, 12, {"sinks": 4, "recent": 8})  # all heads stream: nothing to know
    with pytest.raises(ValueError, match="2 layers of 2"):
        kv.build("duo", plan, 60, {"sinks": 4, "recent": 8, "head_scores": [[1.0]]})
    (tmp_path / "heads.json").write_text('{"head_scores": [[0.1, 0.9], [0.2, 0.3]]}')
    layers = kv.build("duo", plan, 48, {"sinks": 4, "recent": 8, "heads": str(tmp_path / "heads.json")})
    full = [[p.plan.n_kv_head for p in layer.parts if p.size == plan.planned] for layer in layers]
    assert full == [[1], []] and layers[0].order.tolist() == [1, 0]
    with pytest.raises(ValueError, match="head_scores"):
        kv.build("duo", plan, 60, {"sinks": 4, "recent": 8, "heads": str(tmp_path / "none.json")})


def test_duo_reads_the_published_gates(tmp_path):
    """As numpy.savetxt writes them: one line per layer, with tabs; training leaves gates slightly outside 0 to 1."""
    plan, window, file = make_plan("gqa"), {"sinks": 4, "recent": 8}, tmp_path / "full_attention_heads.tsv"
    file.write_text("-2.2e-04\t1.000000000000000000e+00\n8.593750000000000000e-01\t-9.250640869140625000e-05\n")
    for budget, retrieval in ((48, [[1], []]), (80, [[1], [0]]), (100, [[0, 1], [0]])):
        layers = kv.build("duo", plan, budget, window | {"heads": str(file)})
        whole = [sum(p.plan.n_kv_head for p in layer.parts if p.size == plan.planned) for layer in layers]
        assert [layer.order[:n].tolist() for layer, n in zip(layers, whole, strict=True)] == retrieval
    for text, words in (("0.5\tnan\n1\t0\n", "finite"), ("0.5\t1\n", "2 layers of 2"), ("0.5 1\n0 1\n", "tabs")):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            kv.build("duo", plan, 60, window | {"heads": str(file)})


def test_duo_without_retrieval_heads_streams_within_its_budget():
    plan = replace(make_plan("gqa"), max_prompt=4000)
    for budget, sinks in ((200, 40), (640, 128), (300, 128)):
        for layer in kv.build("duo", plan, budget, {}):
            assert [(p.sinks, p.size) for p in layer.parts] == [(sinks, budget)] and layer.endless


@pytest.mark.parametrize("compiled", (False, True))
def test_the_best_are_the_same_in_tiles(compiled):
    """Few values, so that ties lie in and across tiles and at the last place; also sizes that 8 does not divide."""
    k, most = 5, inductor.TILE**2 * 5
    device = torch.device("cpu")
    assert (
        inductor.min_scores(most, k, device) == 8 * k + 1
        and inductor.min_scores(most - 1, k, device) == inductor.min_scores(0, k, device) == k
    )
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
            assert torch.equal(best(scores, k, True, most), expected)
            assert torch.equal(best(scores, k, False, most).sort().values, expected.sort().values)
