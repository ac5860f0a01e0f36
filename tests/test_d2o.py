"""D2O, H2O, RoCo and CaM against slow references, and a small example computed by hand."""

import math
import random
from dataclasses import replace
from operator import itemgetter

import pytest
import test_contract as contract
import torch
from conftest import llama_8b
from references import eviction as slow
from references.scored import SlowTOVA
from runs import HEADS, LAYERS, Run, TensorSizes, generations, make_plan, tokens, with_heads

import kv
from kv.base import Held
from kv.d2o import D2O, layer_budgets, most_slots
from kv.parts import attention, inductor, ops
from kv.parts.evicting import Evicting, select

PROMPTS = (100, 61, 30, 9)
CASES = [
    ("h2o", {}, 24),
    ("h2o", {}, 2),
    ("roco", {}, 24),
    ("roco", {"sinks": 0}, 15),
    ("roco", {}, 90),  # protects more tokens that vary than a short prompt has
    ("tova", {}, 24),
    ("tova", {}, 2),
    ("cam", {}, 24),
    ("cam", {"spread": 5}, 24),
    ("d2o", {}, 24),
    ("d2o", {"merge": "paper", "ratio": "3+1"}, 24),
    ("d2o", {"merge": "paper"}, 9),
    ("d2o", {"ratio": "1+2"}, 24),
    ("d2o", {"merge": "average", "beta": 0.3, "uncounted": [1]}, 24),
    ("d2o", {"allocation": "uniform", "sinks": 0, "merge": "paper"}, 24),
    ("d2o", {"allocation": "reciprocal"}, 30),
    ("d2o", {"allocation": "exponential", "park": "device"}, 24),
]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)
    monkeypatch.setattr(attention, "SCORES", 1500)  # several blocks of queries and of evicted keys


def reference(name: str, plan: kv.Plan, budget: int, options: dict, layers: list) -> slow.SlowEvict:
    if name == "cam":
        options = dict(options)
        m = options.pop("spread", 32)

        def chance(layer: int, head: int, position: int) -> float:
            places = torch.full((plan.n_kv_head, 1), position)
            return ops.chance(places, layers[layer].salt)[head, 0].item()

        return slow.SlowCaM(plan, budget, chance, m)
    options = {key: value for key, value in options.items() if key != "park"}
    if "ratio" in options:
        options["ratio"] = [int(part) for part in options["ratio"].split("+")]
    classes = {"tova": SlowTOVA, "h2o": slow.SlowH2O, "roco": slow.SlowRoCo, "d2o": slow.SlowD2O}
    return classes[name](plan, budget, **options)


def sorted_slots(layer, row: int, head: int) -> tuple:
    """(positions, keys, values) of a KV head, in order of position."""
    first, size = int(layer.first[row]) if isinstance(layer, D2O) else 0, layer.size_of("allotted", row)
    place = layer.position[row, head, first : first + size + 1]
    order = [i for i in place.argsort().tolist() if place[i] >= 0]
    at = [first + i for i in order]
    return place[order].tolist(), layer.k[row, head, at], layer.v[row, head, at]


@pytest.mark.parametrize("name, options, budget, heads", with_heads(CASES, itemgetter(0)))
def test_every_eviction_method_equals_its_reference(name, options, budget, heads):
    plan = make_plan(heads, n_layer=3)
    run = Run(name, plan, budget, options)
    check = reference(name, plan, budget, options, run.layers)
    for prompt, steps in generations(PROMPTS, 30):
        generator = torch.Generator().manual_seed(prompt)
        # How much the heads' attention varies: at random in layer 0, one head most in layer 1, one least in layer 2.
        scale = torch.tensor([0.3, 0.3, 2.0])[:, None, None, None].repeat(1, plan.n_head, 1, 1)
        scale[1:, 0] = torch.tensor([[[2.0]], [[0.3]]])
        inputs = [(q * s, k, v) for s, (q, k, v) in zip(scale, tokens(plan, 1, prompt, generator), strict=True)]
        run.prefill(0, inputs)
        for layer, (q, k, v) in enumerate(inputs):
            check.prefill(layer, q[0], k[0], v[0])
        check.finish()
        for step in range(steps):
            for layer, ours in enumerate(run.layers):
                for head in range(plan.n_kv_head if isinstance(ours, Evicting) else 0):
                    (place, *found), (positions, *expected) = sorted_slots(ours, 0, head), check.held(layer, head)
                    assert place == positions
                    assert all((a - b).abs().max() <= 1e-5 for a, b in zip(found, expected, strict=True))
                    if "merge" in options:
                        tau = check.thresholds.get((layer, head), -math.inf)
                        assert ours.threshold[0, head].item() == pytest.approx(tau, abs=1e-5)
            if step == 0 and name == "d2o":
                sizes = [int(ours.allotted[0]) if isinstance(ours, D2O) else plan.planned for ours in run.layers]
                assert sizes == check.sizes
            inputs = [(q * s, k, v) for s, (q, k, v) in zip(scale, tokens(plan, 1, 1, generator), strict=True)]
            found = run.step(inputs)
            for layer, (q, k, v) in enumerate(inputs):
                expected = check.decode(layer, q[0, :, 0], k[0, :, 0], v[0, :, 0])
                assert (found[layer, 0] - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("heads", HEADS)
def test_column_sums_in_blocks_equal_those_of_the_whole_matrix(heads):
    n_head, n_kv_head = HEADS[heads]
    q, k = torch.randn(1, n_head, 90, 16), torch.randn(1, n_kv_head, 90, 16)
    (sums, squares), variance = attention.column_sums(q, k, 2)
    own = slow.column_sums(q[0], k[0])
    assert (variance - own.var(1, correction=0)).abs().max() <= 1e-4
    assert (sums - own.unflatten(0, (n_kv_head, -1)).sum(1)).abs().max() <= 1e-4
    logits = torch.einsum("hgqd,hkd->hgqk", q[0].unflatten(0, (n_kv_head, -1)), k[0]) / 4
    weight = logits.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf).softmax(-1).sum(1)
    assert (squares - weight.square().sum(1)).abs().max() <= 1e-4


ROWS = [(prompt, torch.float32) for prompt in (1, 90, 700)] + [(700, torch.bfloat16), (90, torch.float16)]


@pytest.mark.parametrize("prompt, dtype, heads", with_heads(ROWS))
def test_the_backward_pass_of_attention_gives_the_column_sums(prompt, dtype, heads):
    n_head, n_kv_head = HEADS[heads]
    q, k, v = (torch.randn(1, h, prompt, 24).to(dtype) for h in (n_head, n_kv_head, n_kv_head))
    q *= 4  # attention far from uniform: logits up to about 80
    y, (sums,), variance = attention.observed_attention(q, k, v)
    assert torch.equal(y, attention.causal_attention(q, k, v))
    (expected,), spread = attention.column_sums(q.float(), k.float())
    assert (variance - spread).abs().max() <= 1e-3 * spread.max()
    assert sums.sum() == pytest.approx(n_head * prompt, rel=1e-4)
    assert (sums - expected).abs().max() <= 1e-4 * expected.max()


@pytest.mark.parametrize("allocation", ("softmax", "uniform", "reciprocal", "exponential"))
def test_layers_share_the_budget(allocation):
    chance = random.Random(0)
    for _ in range(300):
        layers, prompt = chance.randint(1, 12), chance.randint(10, 500)
        budget, sinks = chance.randint(8, 200), chance.choice([0, 4])
        heads = chance.randint(1, 6)
        variances = [[chance.expovariate(1) ** 2 for _ in range(heads)] for _ in range(layers)]
        found = layer_budgets(variances, prompt, budget, sinks, allocation)
        assert found == slow.layer_budgets(variances, prompt, budget, sinks, allocation)
        assert sum(found) <= layers * budget
        if allocation != "exponential":
            assert sum(found) > layers * (budget - 1)  # only fractions of a slot are lost
        plan = replace(make_plan(), n_layer=layers, max_prompt=500)
        options = kv.parse_options("d2o", {"allocation": allocation, "sinks": sinks})
        assert max(found) <= most_slots(layers, plan, budget, options)
    assert layer_budgets([[3.0]] * 3, 100, 20, 4, allocation) == [20, 20, 20] or allocation == "exponential"


def test_a_layer_gets_more_slots_the_lower_the_mean_of_its_scaled_variances():
    """F by hand for two layers of 100 slots: shares e^-F, whatever the ratio of the two layers' variances."""
    for scale in (1e-6, 1.0, 1e6):
        some, alike = [2.0, 2.0, 3.0, 2.0], [5.0 * scale] * 4  # F = 1/4, 0
        assert layer_budgets([some, alike], 1000, 100, 4, "softmax") == [87, 112]  # 200 / (1 + e^(1/4)) = 87.56
        most = [7.0 * scale, scale, 7.0 * scale, 7.0 * scale]  # F = 3/4
        assert layer_budgets([some, most], 1000, 100, 4, "softmax") == [124, 75]  # 200 / (1 + e^(1/2)) = 75.51


def test_important_and_recent_tokens_share_the_slots_by_the_ratio():
    plan = make_plan()
    prompt = tokens(plan, 1, 100, torch.Generator().manual_seed(0))
    for ratio, recent in (("3+1", 4), ("1:1", 8), ("1:3", 12), ("1+0", 0), ("0:5", 16), (None, 8)):
        run = Run("d2o", plan, 20, {"allocation": "uniform"} | ({"ratio": ratio} if ratio else {}))
        run.prefill(0, prompt)
        assert [layer.newest(layer.allotted).tolist() for layer in run.layers] == [[recent]] * LAYERS
        run.step(tokens(plan, 1, 1, torch.Generator().manual_seed(1)))
        kept = {place for place in run.layers[0].position[0, 0, :21].tolist() if place >= 0}
        assert {*range(4), *range(101 - recent, 101)} <= kept and len(kept) == 20
    for ratio in ("3", "3+1+1", "0+0", "-1+2", "x", [3, 1], "1" * 9 + ":1"):
        with pytest.raises(ValueError, match="d2o: ratio must be N:M or N"):
            kv.build("d2o", plan, 20, {"ratio": ratio})


def test_an_extension_merges_by_the_threshold_before_it(monkeypatch):
    """With beta = 1 the threshold after an eviction is the evicted token's similarity, which would always reach it."""
    monkeypatch.setitem(contract.VARIANTS, "d2o:beta", ("d2o", {"merge": "paper", "beta": 1.0}))
    plan = contract.make_plan()
    texts = contract.make_texts(plan)
    steps, extended = (contract.Cache("d2o:beta", plan) for _ in range(2))
    steps.run(texts, 20)
    for row, text in texts.items():
        extended.prefill(row, text)
        for i in range(20):
            extended.extend(row, text, i, 1)
        for one, other in zip(steps.held(row), extended.held(row), strict=True):
            assert torch.equal(one.position, other.position)
            assert (one.k - other.k).abs().max() <= 1e-5 and (one.v - other.v).abs().max() <= 1e-5


def test_six_tokens_merge_as_computed_by_hand():
    """One head with 4 slots: 1 sink, so 0 recent and 3 important tokens.

    Keys have norm 1 and known angles. Every query is 0, so query i gives each of its i + 1 tokens 1 / (i + 1): the
    scores are 1 + 1/2 + ... + 1/6 = 2.45, 1.45, 0.95, 0.6167, 0.3667, 0.1667. Token 0 is the sink, tokens 1 to 3 are
    the best.
    """
    plan = kv.Plan(1, 1, 1, 2, 2, "default", 1e4, torch.float32, torch.device("cpu"), 1, 6, 4)
    layer = kv.build("d2o", plan, 8, {"sinks": 1, "merge": "paper", "ratio": "3+1"})[0]
    layer.allotted[0] = 4
    degrees = torch.tensor([0.0, 90.0, 180.0, 45.0, 60.0, 270.0]).deg2rad()
    k = torch.stack([degrees.cos(), degrees.sin()], dim=1)[None]
    v = torch.tensor([[1.0, 0], [2, 0], [3, 0], [4, 0], [5, 1], [6, 1]])[None]
    (score,), _ = attention.column_sums(torch.zeros(1, 1, 6, 2), k[None])
    assert score[0].tolist() == pytest.approx([2.45, 1.45, 0.95, 0.61667, 0.36667, 0.16667], abs=1e-5)
    layer.compress(0, Held.new(k, v), score, [score])
    keys, values = layer.k[0, :, :4], layer.v[0, :, :4]
    assert layer.position[0, :, :4].tolist() == [[0, 1, 2, 3]]
    # Token 4 (60 degrees) is most similar to token 3 (45): cos 15 = 0.9659. Token 5 (270) to 0 and 2: cos 90 = 0.
    assert layer.threshold[0, 0].item() == pytest.approx((math.cos(math.radians(15)) + 0) / 2, abs=1e-6)  # 0.4830
    # 0.9659 is above it: merged with w = e^0.9659 / (e + e^0.9659) = 2.6272 / 5.3455 = 0.4915. 0 is below: dropped.
    own, other = 0.50852, 0.49148
    assert own + other == 1
    assert keys[0, :3].tolist() == k[0, :3].tolist() and values[0, :3].tolist() == v[0, :3].tolist()
    expected = [own * math.cos(math.pi / 4) + other * 0.5, own * math.sin(math.pi / 4) + other * math.sqrt(3) / 2]
    assert keys[0, 3].tolist() == pytest.approx(expected, abs=1e-4)  # 0.6053, 0.7852
    assert values[0, 3].tolist() == pytest.approx([own * 4 + other * 5, other * 1], abs=1e-4)  # 4.4915, 0.4915
    assert layer.received[0, 0, :4].tolist() == score[0, :4].tolist()  # scores do not change


def test_memory_is_the_budget_for_any_prompts_and_any_number_of_tokens():
    """Layers of different sizes, which change from prompt to prompt, share the same slots."""
    plan, budget = make_plan(batch=2), 20
    run, generator = Run("d2o", plan, budget, {}), torch.Generator().manual_seed(0)
    unit = plan.batch * plan.n_kv_head * plan.unit_bytes
    assert run.layers[0].k.nbytes + run.layers[0].v.nbytes == LAYERS * (budget + 1) * unit  # one is spare
    device, seen = run.layers.bytes()[0], set()
    for _ in range(3):
        for row, prompt in enumerate((100, 40)):
            scales = torch.rand(LAYERS, generator=generator) * 3
            inputs = [(q * s, k, v) for s, (q, k, v) in zip(scales, tokens(plan, 1, prompt, generator), strict=True)]
            run.prefill(row, inputs)
            sizes = [int(layer.allotted[row]) for layer in run.layers]
            seen.add(tuple(sizes))
            ends = [int(layer.first[row]) + int(layer.allotted[row]) + 1 for layer in run.layers]
            assert sum(sizes) <= LAYERS * budget and ends[-1] <= LAYERS * (budget + 1)
            assert [int(layer.first[row]) for layer in run.layers] == [0, *ends[:-1]]
        for _ in range(60):
            run.step(tokens(plan, 2, 1, generator))
    assert len(seen) == 6 and run.layers.bytes()[0] == device
    for layer in run.layers:
        read = min(110, 1 + int(layer.allotted.max()))
        assert layer.step_bytes(110)[0] == plan.n_kv_head * read * (plan.unit_bytes + 12)
        assert read <= layer.slots
    merging = Run("d2o", plan, budget, {"merge": "paper"}).layers[0]  # reads the keys again
    assert merging.more_bytes == plan.unit_bytes // 2 + 12


def test_full_layers_count_towards_the_budget():
    plan = make_plan()
    layers = kv.build("d2o", plan, 60, {"full_layers": "0+1"})
    assert [isinstance(layer, D2O) for layer in layers] == [False] * 2 + [True] * 6
    assert layers[2].shared.budget == (60 * LAYERS - 2 * plan.planned) // 6
    with pytest.raises(ValueError, match="at least 39"):
        kv.build("d2o", plan, 30, {"full_layers": [0, 1]})
    with pytest.raises(ValueError, match="at least 8 tokens"):
        kv.build("d2o", plan, 7, {})


def test_uncounted_layers_stay_full_beyond_the_budget():
    plan = make_plan(batch=2)
    layers = kv.build("d2o", plan, 20, {"uncounted": "0+1+7"})
    assert [isinstance(layer, D2O) for layer in layers] == [False] * 2 + [True] * 5 + [False]
    assert layers[2].shared.budget == 20
    shape_8b = llama_8b(max_prompt=8000, room=192, batch=1)
    tokens = 29 * 1024 + 3 * 8192
    size = sum(kv.planned_bytes("d2o", shape_8b, 1024, {"uncounted": "0+1+7"}))
    assert 1 < size / (tokens * shape_8b.slot_bytes) < 1.03
    both = {"uncounted": [0], "full_layers": [1]}
    assert kv.build("d2o", plan, 60, both)[2].shared.budget == (60 * (LAYERS - 1) - plan.planned) // 6
    for options, words in (
        ({"uncounted": [LAYERS]}, "must lie below 8"),
        ({"uncounted": [1], "full_layers": [1, 2]}, "layer 1 .*full_layers.*uncounted"),
        ({"uncounted": range(LAYERS)}, "every layer.*--kv full"),
    ):
        with pytest.raises(ValueError, match=words):
            kv.build("d2o", plan, 60, {name: list(value) for name, value in options.items()})


def test_roco_protects_the_newest_ten_and_the_tokens_that_vary_most():
    """A token that varies stays even if its mean is the lowest of all."""
    plan = make_plan(n_layer=1)
    with pytest.raises(ValueError, match="at least 41 tokens"):  # its sinks, the newest ten and one more
        kv.build("roco", plan, 40, {"sinks": 30})
    for budget, recent, varied in ((60, 10, 18), (24, 10, 7), (25, 10, 8), (15, 7, 4), (12, 6, 2)):
        layer = kv.build("roco", plan, budget, {})[0]
        assert (layer.recent, layer.varied(budget)) == (recent, varied)
    layer = kv.build("roco", plan, 24, {})[0]  # 4 sinks, 10 recent, 7 that vary, 3 by their mean
    visits = 100.0 - torch.arange(100)
    mean = torch.linspace(0.5, 1.5, 100)
    mean[20:28] = torch.linspace(0.01, 0.08, 8)  # low; position 27 varies least of these
    deviation = torch.zeros(100)
    deviation[20:28] = torch.linspace(2.0, 1.3, 8)
    sums = [(mean * visits)[None], ((mean**2 + deviation**2) * visits)[None]]
    importance, _ = layer.ranked(0, sums, torch.arange(100)[None])
    kept = select(importance, 24, layer.sinks, layer.recent)
    assert kept.tolist() == [[*range(4), *range(20, 27), *range(87, 100)]]


def test_a_prompt_allocates_no_square_matrix(monkeypatch):
    monkeypatch.setattr(attention, "SCORES", 1 << 16)
    plan = replace(make_plan(n_layer=1), max_prompt=3000)
    layer = kv.build("d2o", plan, 100, {})[0]
    inputs = tokens(plan, 1, 3000, torch.Generator())
    with TensorSizes() as sizes:
        layer.prefill(0, *inputs[0])
        layer.finish(0)
    assert max(sizes.found) <= 3000 * 6 * 16  # as large as q
