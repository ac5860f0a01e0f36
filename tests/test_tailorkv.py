"""TailorKV against a slow reference; the queries that the layer below predicts, and the fetches it overlaps with."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import write_random
from conversations import converse, model_step
from references.quantized import SlowTailorKV
from runs import Run, compare, foreseen, make_plan, tokens, with_heads

import kv
from engine import Engine
from kv.parts import inductor, offload
from kv.tailorkv import Tailored
from model import Attention

HERE = {"offload": False}
DIRECT, THREADS = ({"engine": engine, "threads": 3} for engine in ("direct", "threads"))
CASES = [
    ({"quant_layers": [0], "channels": 4} | THREADS, 24),
    ({"quant_layers": [0], "channels": 1} | DIRECT, 8),
    ({"quant_layers": [0], "bits": 2} | HERE, 200),
    ({"quant_layers": [], "channels": 4} | THREADS, 90),
    ({"quant_layers": [], "channels": 1} | HERE, 24),
    ({"quant_layers": [1, 2], "channels": 4} | THREADS, 8),
    ({"quant_layers": [1, 2], "channels": 1, "initial": 0} | DIRECT, 90),
    ({"quant_layers": [1, 2], "channels": 16, "initial": 2, "local": 11} | THREADS, 24),
]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)


def tailor(plan: kv.Plan, budget: int, options: dict) -> Run:
    return Run("tailorkv", plan, budget, {"group": 8} | options)


@pytest.mark.parametrize("options, budget, heads", with_heads(CASES))
def test_tailorkv_equals_its_reference(options, budget, heads, monkeypatch):
    """Two rows, refilled in turn."""
    monkeypatch.setattr(inductor, "TILE", 8 if heads == "gqa" else 2)  # 8 is too much for these caches
    plan = make_plan(heads, batch=2, n_layer=4)
    run = tailor(plan, budget, options)
    known = {key: value for key, value in options.items() if key not in THREADS | HERE}
    slow = [SlowTailorKV(plan, budget, **{"group": 8, "value_group": 16} | known) for _ in range(2)]
    generator = torch.Generator().manual_seed(budget)
    for prompts in ({0: 100, 1: 61}, {0: 30}, {1: 9}, {0: 100}):
        for row, prompt in prompts.items():
            inputs = tokens(plan, 1, prompt, generator)
            run.prefill(row, inputs)
            for layer, (q, k, v) in enumerate(inputs):
                slow[row].prefill(layer, q[0], k[0], v[0])
        for _ in range(6):
            inputs = tokens(plan, 2, 1, generator)
            found = run.step(inputs)
            for row, check in enumerate(slow):
                for layer, (q, k, v) in enumerate(inputs):
                    predicted = foreseen(q)[row, :, 0] if layer > 0 else None
                    expected = check.decode(layer, q[row, :, 0], k[row, :, 0], v[row, :, 0], predicted)
                    assert (found[layer, row] - expected).abs().max() <= 1e-5
                    if not check.is_quantized(layer):
                        for head, index in enumerate(run.layers[layer].index[row].tolist()):
                            between = check.candidates(layer)
                            chosen = [p for p in check.attended[layer][head] if p in between]
                            assert sorted(p for p in index if p >= 0) == chosen
    run.layers.close()


@pytest.mark.parametrize("options", (DIRECT, THREADS, THREADS | {"wide": 1}), ids=("direct", "threads", "wide"))
def test_offloaded_tailorkv_equals_resident_tailorkv_to_the_bit(options, monkeypatch):
    """Rows of a batch are refilled; `wide` copies each row of host memory by itself."""
    options = dict(options)
    monkeypatch.setattr(offload, "WIDE", options.pop("wide", offload.WIDE))
    plan = make_plan(batch=3)
    compare(tailor(plan, 24, HERE), tailor(plan, 24, options), torch.equal)


@pytest.mark.parametrize("options", (DIRECT, THREADS), ids=("direct", "threads"))
def test_an_inactive_row_does_not_change_where_layers_share_fetch_buffers(options):
    plan = make_plan(batch=2, n_layer=3)
    run, generator = tailor(plan, 24, {"quant_layers": []} | options), torch.Generator().manual_seed(0)
    for row, prompt in enumerate((100, 50)):
        run.prefill(row, tokens(plan, 1, prompt, generator))
    run.step(tokens(plan, 2, 1, generator))
    slots = [x[1, :, :-1] for layer in run.layers for x in (layer.k, layer.v)]
    own = slots + [x[1] for layer in run.layers for x in (layer.index, layer.prompt, layer.largest)]
    before = [x.clone() for x in own]
    for _ in range(3):
        run.step(tokens(plan, 2, 1, generator), [True, False])
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    run.layers.close()


# In the model

MODELS = {
    "biases": {"attention_bias": True, "rope_theta": 500.0},
    "q_norm": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "attention_bias": True},
}


def engine_of(folder, changes: dict, options: dict, name: str = "tailorkv", budget: int | None = 24) -> Engine:
    folder = write_random(folder / "m", num_hidden_layers=4, **changes)
    options = {"group": 8, "quant_layers": [1]} | options if name == "tailorkv" else options
    return Engine.load(folder, name, budget, options, batch=2, max_prompt=80, room=30, compile=False)


def steps(engine: Engine, count: int) -> torch.Tensor:
    """Logits of steps after two prompts, of 70 and 33 tokens."""
    found = []
    for row, n in enumerate((70, 33)):
        engine.model.prefill(row, torch.arange(n) % 101)
    for i in range(count):
        pos = torch.tensor([70 + i, 33 + i])
        found.append(model_step(engine.model, torch.tensor([[3 + i], [90 - i]]), pos))
    return torch.stack(found)


def rotated(q: torch.Tensor, pos: int, theta: float) -> torch.Tensor:
    """RoPE on q [Hq,D]."""
    half = q.shape[-1] // 2
    angle = pos * theta ** (-torch.arange(half).double() / half)
    a, b = q.double().split(half, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).float()


@pytest.mark.parametrize("name", MODELS)
def test_the_query_is_predicted_from_the_attention_input_of_the_layer_below(name, tmp_path, monkeypatch):
    engine = engine_of(tmp_path, MODELS[name], HERE)
    layers, asked, normed, theirs = engine.model.layers, [], {}, []
    for i, layer in enumerate(layers):
        layer.attention_norm.register_forward_hook(lambda module, x, y, i=i: normed.update({i: y.clone()}))
    lookahead, query = Tailored.lookahead, Attention.query

    def noted(cache, q, x, active):
        i = next(i for i, layer in enumerate(layers) if layer.attention.kv is cache)
        theirs.append((i, q.clone(), normed.get(i - 1)))
        return lookahead(cache, q, x, active)

    monkeypatch.setattr(Tailored, "lookahead", noted)
    monkeypatch.setattr(Attention, "query", lambda a, *args: asked.append(a) or query(a, *args))
    steps(engine, 10)
    assert asked == [layers[i].attention for i in (2, 3)] * 10  # layer 0 has none below, layer 1 is quantized
    assert [i for i, *_ in theirs] == [0, 2, 3] * 10
    for n, (i, q, h) in enumerate(theirs):
        if i == 0:
            continue
        a, c = layers[i].attention, engine.model.config
        size = c.n_head * c.head_dim
        expected = F.linear(h[:, 0], a.wqkv.weight[:size], a.wqkv.bias[:size]).view(2, c.n_head, c.head_dim)
        if c.qk_norm:
            expected = expected / (expected.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * a.q_norm.weight
        for row, prompt in enumerate((70, 33)):
            mine = rotated(expected[row], prompt + n // 3, c.rope["rope_theta"])
            assert (q[row, :, 0] - mine).abs().max() <= 1e-4


@pytest.mark.parametrize("name, options", [("full", {}), ("kivi", {}), ("tailorkv", {"quant_layers": [1, 2, 3]})])
def test_a_method_that_does_not_look_ahead_costs_no_projection(name, options, tmp_path, monkeypatch):
    engine = engine_of(tmp_path, {}, options, name, 24 if name == "tailorkv" else None)
    monkeypatch.setattr(Attention, "query", None)
    assert steps(engine, 2).isfinite().all()
    engine.use("full")


def test_channels_are_fetched_while_the_layer_below_computes(tmp_path, monkeypatch, offload_threads):
    """Threads deliver no channel before its layer waits for it, so waiting anywhere earlier would fail."""
    expected = steps(engine_of(tmp_path / "here", {}, HERE), 5)
    engine, log = engine_of(tmp_path / "there", {}, THREADS), []
    caches = [layer.attention.kv for layer in engine.model.layers]
    for i, layer in enumerate(caches):
        monkeypatch.setattr(layer, "decode", lambda *a, i=i, f=layer.decode: (f(*a), log.append(("decoded", i)))[0])
    for i in (2, 3):
        pool, needed = caches[i].channel_pool, threading.Event()

        def gather(*args, needed=needed, gather=pool.gather):
            assert needed.wait(30), "nobody waits for it"
            return gather(*args)

        def finish(i=i, needed=needed, finish=pool.finish):
            log.append(("waits", i))
            needed.set()
            found = finish()
            needed.clear()
            return found

        monkeypatch.setattr(pool, "gather", gather)
        monkeypatch.setattr(pool, "finish", finish)
    assert torch.equal(steps(engine, 5), expected)
    step = [("decoded", 0), ("decoded", 1), ("waits", 2), ("decoded", 2), ("waits", 3), ("decoded", 3)]
    assert log == step * 5
    engine.use("full")
    assert not offload_threads()


# Threads


@pytest.mark.parametrize("pool, what", [("channel_pool", "the channels of layer 2"), ("pool", "layer 2")])
def test_a_failing_thread_raises_with_its_layer_and_the_step_can_be_repeated(pool, what, monkeypatch, offload_threads):
    plan = make_plan(batch=2)
    here, there = tailor(plan, 24, HERE), tailor(plan, 24, THREADS)
    generator = torch.Generator().manual_seed(0)
    for row, prompt in enumerate((100, 50)):
        inputs = tokens(plan, 1, prompt, generator)
        here.prefill(row, inputs)
        there.prefill(row, inputs)

    def fails(*_):
        raise OSError("bus error")

    for _ in range(3):
        inputs = tokens(plan, 2, 1, generator)
        with monkeypatch.context() as broken:
            broken.setattr(getattr(there.layers[2], pool), "gather", fails)
            with pytest.raises(RuntimeError, match=rf"^{what}: entries \d+ to \d+ could not be fetched \(bus error\)$"):
                there.step(inputs)
        assert torch.equal(there.step(inputs), here.step(inputs))
    assert offload_threads()
    there.layers.close()
    assert not offload_threads()


def test_the_engine_runs_tailorkv_with_refilled_rows_and_leaves_no_thread(tmp_path, offload_threads):
    prompts = [[3 + i % 90 for i in range(n)] for n in (60, 31, 5, 44)]

    def answers(options: dict) -> list:
        engine.use("tailorkv", 12, {"group": 8, "channels": 2} | options, batch=2, room=40)
        pairs = [converse(engine, prompts[i : i + 2], [[[7, 8, 9]]] * 2, 10) for i in (0, 2)]
        return pairs[0] + pairs[1]

    folder = write_random(tmp_path / "m", num_hidden_layers=3)
    engine = Engine.load(folder, batch=2, room=40, compile=False)
    expected = answers(HERE)
    assert expected != answers(HERE | {"channels": 16})
    assert answers(DIRECT) == expected
    assert answers(THREADS) == expected
    assert offload_threads()
    engine.use("full")
    assert not offload_threads()


# Sizes


@pytest.mark.parametrize("prompt, channels", [(32 * 1024, 8), (64 * 1024, 12)])
def test_memory_is_table_2s_and_the_host_holds_keys_twice(prompt, channels):
    meta, heads, dim, new, t = torch.device("meta"), 2, 64, 64, 1024
    plan = kv.Plan(4, 8, heads, dim, 512, "default", 1e4, torch.bfloat16, meta, 2, prompt, new)
    rows, unit = plan.batch * heads, plan.unit_bytes
    table = rows * (2 * (prompt + new) * dim * (2 / 16 + 2 / 64) + 2 * channels * prompt) * 2  # 16-bit values
    layers = kv.build("tailorkv", plan, t, {"engine": "threads"})
    staged = rows * (t - 128) * unit  # arriving tokens; the layers share this buffer
    device, host = kv.planned_bytes("tailorkv", plan, t, {"engine": "threads"})
    assert 1 < device / (table + 3 * rows * (t + new + 1) * unit + staged) < 1.02
    assert device < 0.2 * plan.full_bytes()
    assert 1 <= host / (1.5 * 3 * rows * prompt * unit) < 1.06  # and where threads gather what they fetch
    lines = heads * channels * prompt * 2
    assert layers[1].step_bytes(prompt) == (lines + heads * t * unit, lines + heads * (t - 128) * unit)


def test_a_layer_that_is_named_twice_is_counted_once():
    once, twice = (kv.parse_options("tailorkv", {"quant_layers": layers}) for layers in ([1], [1, 1]))
    sizes = [sum(layer.wants_lookahead for layer in method.build(make_plan(), 24)) for method in (once, twice)]
    assert sizes[0] == sizes[1] == make_plan().n_layer - 1


def test_only_fetching_threads_need_buffers():
    plan = replace(make_plan(), device=torch.device("meta"))
    sizes = [kv.planned_bytes("tailorkv", plan, 24, options) for options in (HERE, DIRECT, THREADS)]
    prompts = plan.n_kv_head * plan.max_prompt * plan.unit_bytes * (plan.n_layer - 1)
    buffers = plan.n_kv_head * (2 * 8 * plan.max_prompt * 4 + 16 * plan.unit_bytes)
    assert sizes[1] == (sizes[0][0] - 1.5 * prompts, 1.5 * prompts) and sizes[0][1] == 0
    tickets = 8 * (plan.n_kv_head * 8 - 1) * (plan.n_layer - 1)  # the ids of fetched channels: threads are told them
    assert sizes[2][0] == sizes[1][0] + buffers - tickets and sizes[2][1] > sizes[1][1]


def test_options_that_do_not_fit_the_model_or_the_method_are_refused_in_one_line():
    for budget, options, words in (
        (24, {"quant_layers": [0, 8]}, "quant_layers must lie below 8"),
        (24, {"quant_layers": "-1"}, "quant_layers=-1: must be at least 0"),
        (7, {}, "at least 8 tokens, not 7"),
        (12, {"initial": 12}, "at least 13 tokens, not 12"),
        (24, {"group": 12}, "a multiple of 8 tokens, not 12"),
    ):
        with pytest.raises(ValueError, match=words):
            kv.build("tailorkv", make_plan(), budget, options)


def test_the_default_quantized_layers_depend_on_the_model():
    def of(n_layer: int, n_kv_head: int) -> list[int]:
        plan = replace(make_plan(), n_layer=n_layer, n_head=32, n_kv_head=n_kv_head, dim=4096)
        layers = kv.build("tailorkv", replace(plan, device=torch.device("meta")), 24, {})
        return [i for i, layer in enumerate(layers) if not layer.wants_lookahead]

    assert of(32, 8) == [0]  # Llama-3.1-8B
    assert of(32, 32) == of(32, 4) == of(48, 4) == [0, 1]  # Llama-2-7B, Yi-6B, Yi-9B
