"""OmniKV against slow references written from its equations: on the device, offloaded, and its prefill in chunks."""

from dataclasses import replace

import pytest
import torch
from conftest import write_random
from conversations import converse
from references.attention import causal, masked_attention
from references.omnikv import SlowOmni, choose_chunk, chunked_attention
from runs import (
    LAYERS,
    D,
    Run,
    TensorSizes,
    compare,
    generations,
    make_plan,
    prefill_both,
    step_both,
    tokens,
    with_heads,
)

import kv
from engine import Engine
from kv import Plan
from kv.omnikv import BankSparse, Chunks, Filter, Sparse, default_filters
from kv.parts import inductor, quant

PROMPTS = (100, 97, 33, 7)
CASES = [
    ({"filter_layers": [1, 4]}, 24),
    ({"filter_layers": [1], "selector": "uniform", "window": 8}, 24),
    ({"filter_layers": [0, 3], "selector": "exp", "window": 16}, 20),
    ({"filter_layers": [2, 5], "selector": "exp"}, 1),
    ({"filter_layers": [1], "mem": 0.6}, None),
    ({"filter_layers": [1], "mem": 0.5, "selector": "uniform"}, None),
    ({}, 40),
]


def omni(plan: Plan, budget: int | None, options: dict) -> Run:
    return Run("omnikv", plan, budget, options)


def selected(run: Run, row: int = 0) -> dict[int, list[int]]:
    """What each filter layer chose in the last step."""
    filters = {i: layer for i, layer in enumerate(run.layers) if isinstance(layer, Filter)}
    return {i: sorted(p for p in layer.index[row].tolist() if p >= 0) for i, layer in filters.items()}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)


@pytest.mark.parametrize("options, budget, heads", with_heads(CASES))
def test_omnikv_equals_its_reference(options, budget, heads):
    plan = make_plan(heads)
    run, slow_options = omni(plan, budget, options), dict(options)
    filters = slow_options.pop("filter_layers", default_filters(plan))
    slow = SlowOmni(plan, budget, filters, **slow_options)
    for prompt, steps in generations(PROMPTS, plan.room):
        generator = torch.Generator().manual_seed(prompt)
        prefill_both(run, slow, prompt, generator)
        for _ in range(steps):
            step_both(run, slow, generator)
            for layer, chosen in selected(run).items():
                assert chosen == sorted(slow.selected[layer])
        kinds = ["sparse" if isinstance(layer, Sparse) else "full" for layer in run.layers]
        assert kinds == [slow.kind(layer) for layer in range(LAYERS)]


@pytest.mark.parametrize("engine, delta", [("threads", False), ("threads", True), ("direct", False)])
def test_offloaded_omnikv_equals_resident_omnikv_to_the_bit(engine, delta):
    """Rows of a batch are refilled with prompts shorter and longer than the number of chosen tokens."""
    plan, options = make_plan(batch=3), {"filter_layers": [0, 3], "delta": delta}
    away = options | {"offload": True, "engine": engine, "threads": 3}
    here = options | {"offload": delta, "engine": "direct"}  # delta sums in the order of the slots, which a pool has
    compare(omni(plan, 24, here), omni(plan, 24, away), torch.equal)


def test_a_token_chosen_again_keeps_its_slot():
    plan = make_plan(batch=2)
    away = {"filter_layers": [0], "offload": True, "engine": "direct"}
    plain, delta = (omni(plan, 24, away | {"delta": delta}) for delta in (False, True))
    generator, before, kept = torch.Generator().manual_seed(1), None, 0
    for row, prompt in enumerate((100, 60)):
        inputs = tokens(plan, 1, prompt, generator)
        plain.prefill(row, inputs)
        delta.prefill(row, inputs)
    for _ in range(20):
        inputs = tokens(plan, 2, 1, generator)
        assert torch.allclose(plain.step(inputs), delta.step(inputs), atol=1e-5)
        index = delta.layers[0].index.clone()
        for row in range(2):
            assert selected(plain, row) == selected(delta, row)
            if before is not None:
                stays = set(before[row].tolist()) & set(index[row].tolist())
                kept += len(stays)
                for p in stays:
                    assert (before[row] == p).nonzero().tolist() == (index[row] == p).nonzero().tolist()
        before = index
    assert kept > 50


def test_only_rows_that_changed_are_fetched():
    plan = make_plan()
    away = {"filter_layers": [0], "offload": True, "engine": "threads"}
    runs = [omni(plan, 24, away | {"delta": delta}) for delta in (False, True)]
    generator, changed, before = torch.Generator().manual_seed(1), 0, set()
    inputs = tokens(plan, 1, 100, generator)
    for run in runs:
        run.prefill(0, inputs)
    for _ in range(20):
        inputs = tokens(plan, 1, 1, generator)
        for run in runs:
            run.step(inputs)
        [now] = selected(runs[1]).values()
        changed, before = changed + len(set(now) - before), set(now)
    pools = [run.layers[0].bank.pool for run in runs]
    assert [p.counts for p in pools] == [(480, 480), (480, changed)] and changed < 460
    inputs = tokens(plan, 1, 100, generator)  # another prompt: all slots must be fetched again
    runs[1].prefill(0, inputs)
    runs[1].step(tokens(plan, 1, 1, generator))
    assert pools[1].counts[1] == changed + 24
    for run in runs:
        run.layers.close()


def test_the_default_filter_layers_follow_the_paper():
    def roles(n_layer: int, **more) -> str:
        plan = replace(make_plan(), n_layer=n_layer, device=torch.device("meta"), **more)
        kinds = {"Filter": "F", "Sparse": "s", "Full": "."}
        return "".join(kinds[type(layer).__name__] for layer in kv.build("omnikv", plan, 16, {}))

    assert roles(32) == "..F.ssssF.ssssssssF.ssssssssssss"  # the paper's {2, 8, 18}
    yi = [i for i, role in enumerate(roles(48, dim=4096, n_kv_head=4, n_head=32)) if role == "F"]
    assert yi == [6, 11, 30]
    llama3, llama2 = (roles(80, dim=8192, n_kv_head=8, n_head=64, rope_theta=theta) for theta in (5e5, 1e4))
    assert llama3.startswith("....F." + "s" * 13 + "F.") and llama2.startswith(".....F.")
    assert roles(3) == "F.s" and roles(4) == ".F.s"
    with pytest.raises(ValueError, match="none of 2 layers is sparse"):
        roles(2)


@pytest.mark.parametrize("engine", ("threads", "direct"))
def test_memory_is_the_papers_share(engine):
    plan = replace(make_plan(), device=torch.device("meta"), max_prompt=1000)
    copies = 2 if engine == "threads" else 1  # of a chosen token on the device: its slot and the staging buffer
    for mem, k in ((0.6, 360 // copies), (0.375, 1), (0.5, 200 // copies)):  # 3 of 8 layers are full: a = 0.375
        options = {"filter_layers": [1], "mem": mem, "offload": True, "engine": engine}
        layers = kv.build("omnikv", plan, None, options)
        sparse = [layer for layer in layers if isinstance(layer, BankSparse)]
        device, host = layers.bytes()
        unit = plan.n_kv_head * plan.unit_bytes
        generated = LAYERS * plan.room * unit
        assert 1 <= (device - generated) / ((3 * 1000 + 5 * k * copies) * unit) < 1.01  # staging included
        if k > 1:
            assert device - generated == pytest.approx(mem * LAYERS * 1000 * unit, rel=0.01)
        assert sparse[0].bank.pool.memory.nbytes == 5 * 1000 * unit
    with pytest.raises(ValueError, match="less than the share of its full layers, 0.375"):
        kv.build("omnikv", plan, None, {"filter_layers": [1], "mem": 0.37})
    with pytest.raises(ValueError, match="takes no budget beside mem"):
        kv.build("omnikv", plan, 24, {"mem": 0.6})
    with pytest.raises(ValueError, match="needs --budget"):
        kv.build("omnikv", plan, None, {})


def test_mem_counts_the_staging_buffer_of_a_quantized_cache_in_bits():
    plan = replace(make_plan(), device=torch.device("meta"), max_prompt=1000)
    options = {"filter_layers": [1], "mem": 0.6, "offload": True, "engine": "threads", "bits": 4}
    stored = 2 * quant.vector_bytes(D, 4) / plan.unit_bytes  # bytes of a token in the buffer, relative to its slot
    assert kv.build("omnikv", plan, None, options)[3].bank.k == int(360 / (1 + stored) + 0.5)


def test_filter_layers_are_checked():
    for given, message in (("4+1", "ascend"), ("1+9", "below 8"), ("none", "sparse"), ("6", "sparse"), ("1+1", "asc")):
        with pytest.raises(ValueError, match=message):
            kv.build("omnikv", make_plan(), 24, {"filter_layers": given})
    layers = kv.build("omnikv", make_plan(), 24, {}, {"filter_layers": [3]})  # a checkpoint's profile
    assert [i for i, layer in enumerate(layers) if isinstance(layer, Filter)] == [3]


PROMPT_IDS = [[3 + i % 90 for i in range(n)] for n in (60, 31, 5, 44)]


def answers(engine: Engine) -> list:
    pairs = [converse(engine, PROMPT_IDS[i : i + 2], [[[7, 8, 9]]] * 2, 10) for i in (0, 2)]
    return pairs[0] + pairs[1]


def test_a_cache_that_does_not_fit_the_host_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    folder = write_random(tmp_path / "m", num_hidden_layers=3, max_position_embeddings=2**21)
    engine = Engine.load(folder, compile=False)
    monkeypatch.setattr("runtime.parallel.free_bytes", lambda device: 10**8)
    for options in ({"offload": True}, {}):
        with pytest.raises(ValueError, match=r"omnikv cache of 1 x .* needs 0.\d\d GB on cpu and 0.10 GB are free"):
            engine.use("omnikv", 1000, options, max_prompt=2**20)


def test_the_engine_runs_omnikv_with_refilled_rows_and_leaves_no_thread(tmp_path, offload_threads):
    engine = Engine.load(write_random(tmp_path / "m", num_hidden_layers=3), batch=2, room=40, compile=False)
    expected = answers(engine)
    engine.use("omnikv", 60, {"offload": True, "engine": "threads"}, batch=2, room=40)  # 60: all are chosen
    assert answers(engine) == expected
    engine.use("omnikv", 12, {}, batch=2, room=40)
    few = answers(engine)
    assert few != expected
    for delta in (False, True):
        engine.use("omnikv", 12, {"offload": True, "engine": "threads", "delta": delta}, batch=2, room=40)
        assert answers(engine) == few
        wanted, fetched = engine.layers.fetched()
        assert wanted > 500 and (fetched < wanted) == delta
    assert offload_threads()
    engine.use("full")
    assert not offload_threads()


@pytest.mark.cuda
@pytest.mark.parametrize("how", ({}, {"engine": "direct"}, {"engine": "threads"}, {"engine": "threads", "delta": True}))
@pytest.mark.parametrize("name", ("omnikv", "infllm", "brute_offload"))
def test_on_a_gpu_compiled_and_offloaded_equals_eager_and_resident(tmp_path, name, how):
    folder = write_random(tmp_path / "m", num_hidden_layers=3)
    budget = {"omnikv": 12, "infllm": 24}.get(name)
    options = {"infllm": {"block": 6}}.get(name, {})
    if name == "brute_offload":
        how = {}
    elif name == "infllm":
        how = {key: value for key, value in how.items() if key != "delta"}
    expected, found = (
        answers(Engine.load(folder, name, budget, more, batch=2, room=40, max_prompt=60, compile=compiled))
        for more, compiled in ((options, False), (options | (how and {"offload": True} | how), True))
    )
    assert found == expected


# The prefill in chunks

FILTER, SPARSE = 1, (3, 4)  # layer 2 is full


@pytest.mark.parametrize("r, chunk, heads", with_heads(((1, 16), (2, 16), (0.3, 20), (0.01, 7), (1, 100))))
def test_chunks_equal_their_reference(r, chunk, heads):
    plan, count = make_plan(heads), max(1, int(r * chunk + 0.5))
    layers = kv.build("omnikv", plan, 24, {"filter_layers": [FILTER, 5], "prefill": r, "chunk": chunk})
    for prompt in (100, 97, 33, 7, 1):
        inputs = tokens(plan, 1, prompt, torch.Generator().manual_seed(prompt))
        found = [layer.prefill(0, *qkv)[0] for layer, qkv in zip(layers, inputs, strict=True)]
        expected = [masked_attention(*(x[0] for x in qkv), causal()) for qkv in inputs]
        q, k, _ = (x[0] for x in inputs[FILTER])
        starts = range(0, prompt, chunk)
        chosen = [choose_chunk(q, k, start, min(start + chunk, prompt), count) for start in starts]
        for layer in SPARSE:
            expected[layer] = chunked_attention(*(x[0] for x in inputs[layer]), chosen, chunk)
        for layer, y in enumerate(found):
            if layer <= SPARSE[-1]:
                assert (y - expected[layer]).abs().max() <= 1e-5


def test_more_than_the_prompt_is_exact_and_less_is_not(tmp_path):
    folder = write_random(tmp_path / "m", num_hidden_layers=4)
    prompt = [(7 * i) % 90 + 3 for i in range(120)]
    logits = []
    for options in ({}, {"prefill": 8, "chunk": 16}, {"prefill": 1, "chunk": 16}):
        options = {"filter_layers": [0], **options}
        engine = Engine.load(folder, "omnikv", 24, options, max_prompt=120, room=8, compile=False)
        logits.append(engine.start([prompt])[0].logits)
    assert (logits[0] - logits[1]).abs().max() <= 1e-4 < (logits[0] - logits[2]).abs().max()


def test_a_long_prompt_allocates_no_square_matrix():
    plan = make_plan()
    inputs = tokens(plan, 1, 2000, torch.Generator().manual_seed(0))[0]
    chunks = Chunks(1, 50)
    with TensorSizes() as sizes:
        chunks.choose(*inputs[:2])
        chunks.attend(*inputs)
    assert max(sizes.found) <= 2000 * plan.n_head * 32 < 2000 * 2000
