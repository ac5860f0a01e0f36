"""Prompts that are read in chunks: what a method keeps after each, the memory that takes, the engine and the flag."""

import weakref
from dataclasses import replace

import pytest
import torch
from conftest import slow, write_random
from references.attention import causal, half_up, masked_attention
from references.scored import SLOW as SCORED
from references.sparse import SLOW
from runs import make_plan, tokens
from test_d2o import reference, sorted_slots
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kv
from engine import Engine

SIZES = (9, 31, 12, 48)  # of chunks: the first fits every budget, and each has a window's queries


def read(layers: list[kv.KV], inputs: list, sizes: tuple[int, ...]) -> torch.Tensor:
    """Reads a prompt, q, k and v of each layer, into row 0, a chunk through all layers before the next: [L,Hq,T,D]."""
    for layer in layers:
        layer.reset(0)
    ends, ys = torch.tensor(sizes).cumsum(0).tolist(), []
    for n, end in zip(sizes, ends, strict=True):
        parts = [[x[:, :, end - n : end] for x in qkv] for qkv in inputs]
        y = [layer.prefill(0, *qkv, end - n, ends[-1]) for layer, qkv in zip(layers, parts, strict=True)]
        ys.append(torch.cat(y))
    for layer in layers:
        layer.finish(0)
    return torch.cat(ys, dim=2)


# What stays

RANKED = [  # method, options, budget
    ("snapkv", {"window": 6, "kernel": 3}, 24),
    ("snapkv", {"window": 6, "kernel": 3}, 0.3),
    ("snapkv", {"window": 6, "kernel": 3, "gqa": False}, 48),
    ("snapkv", {"window": 6, "kernel": 3, "every": 8}, 0.3),
    ("snapkv", {"window": 6, "kernel": 3, "heads": "adaptive"}, 24),
    ("snapkv", {"window": 6, "kernel": 3, "heads": "adaptive"}, 0.12),  # by chunks alone, its window would be smaller
    ("snapkv++", {"window": 6, "kernel": 5, "long_kernel": 9, "threshold": 40}, 24),
    ("pyramidkv", {"window": 6, "kernel": 3}, 24),
    ("rocketkv", {"window": 6, "kernel": 5}, 24),
    ("rocketkv", {"window": 6, "kernel": 5, "split": "even"}, 40),
    ("keynorm", {}, 24),
    ("keydiff", {"sinks": 2}, 24),
    ("keydiff", {"heads": "adaptive", "alpha": 0.0}, 24),
    ("lagkv", {"lag": 5}, 24),
    ("lagkv", {"lag": 5, "heads": "adaptive"}, 24),
    ("expected", {"future": 16}, 24),
    ("rkv", {"window": 6, "kernel": 3}, 24),
    ("rkv", {"window": 6, "alpha": 0.6, "heads": "adaptive"}, 24),
]


@pytest.mark.parametrize("sizes", (SIZES, slow((100,)), slow((20,) * 5)))
@pytest.mark.parametrize("name, options, budget", RANKED)
def test_after_every_chunk_the_best_of_what_is_held_and_of_the_chunk_stay(name, options, budget, sizes):
    plan, generator = make_plan(n_layer=2, new=20), torch.Generator().manual_seed(0)
    layers, inputs = kv.build(name, plan, budget, options), tokens(plan, 1, 100, generator)
    for _, k, _ in inputs:
        k[:, 0] *= 2  # this head attends to few tokens
    y = read(layers, inputs, sizes)
    for i, (layer, (q, k, v)) in enumerate(zip(layers, inputs, strict=True)):
        check = (SCORED | SLOW)[name](plan, budget if budget > 1 else half_up(budget * 100), i, **options)
        assert (check.read(q[0], k[0], v[0], sizes) - y[i]).abs().max() <= 1e-5
        held = layer.held(0, 100)
        for head, positions in enumerate(check.stored):
            there = held.position[head] >= 0
            assert held.position[head, there].tolist() == positions
            assert torch.equal(held.k[head, there], k[0, check.kv_head(head), positions])
            assert torch.equal(held.v[head, there], v[0, check.kv_head(head), positions])
        for pos in range(100, 112 if "every" in options else 103):
            q, k, v = tokens(plan, 1, 1, generator)[0]
            layer.make_room(0, pos)
            layer.before_step(pos + 1, pos - 99)
            found = layer.decode(q, k, v, torch.tensor([pos]), torch.tensor([True]))
            assert (found[0, :, 0] - check.decode(q[0, :, 0], k[0, :, 0], v[0, :, 0])).abs().max() <= 1e-5
            assert (layer.held(0, pos + 1).position[:, -1] == pos).all()


@pytest.mark.parametrize("heads", ("equal", "adaptive"))
def test_random_draws_other_tokens_in_each_head(heads):
    plan = make_plan(n_layer=1)
    layers, inputs = kv.build("random", plan, 24, {"heads": heads}), tokens(plan, 1, 100, torch.Generator())
    read(layers, inputs, SIZES)
    first, second = (set(x.tolist()) - {-1} for x in layers[0].held(0, 100).position)
    assert len(first) + len(second) == 48 and len(first & second) < 24 and max(first | second) >= 90


EVICTING = [
    ("h2o", {}, 24),
    ("h2o", {}, 2),
    ("roco", {}, 24),
    ("roco", {"sinks": 2}, 60),
    ("cam", {}, 24),
    ("tova", {}, 24),
]


@pytest.mark.parametrize("sizes", (SIZES, slow((100,)), slow((1,) * 100)))
@pytest.mark.parametrize("name, options, budget", EVICTING)
def test_after_every_chunk_the_least_important_tokens_are_evicted(name, options, budget, sizes):
    plan, generator = make_plan(n_layer=2, new=20), torch.Generator().manual_seed(0)
    layers, inputs = kv.build(name, plan, budget, options), tokens(plan, 1, 100, generator)
    check = reference(name, plan, budget, options, layers)
    y = read(layers, inputs, sizes)
    for i, (q, k, v) in enumerate(inputs):
        assert (check.read(i, q[0], k[0], v[0], sizes) - y[i]).abs().max() <= 1e-5
    for pos in range(100, 104):
        for i, layer in enumerate(layers):
            for head in range(plan.n_kv_head):
                (positions, *found), (expected, *theirs) = sorted_slots(layer, 0, head), check.held(i, head)
                assert positions == expected and len(positions) == budget
                assert all((a - b).abs().max() <= 1e-5 for a, b in zip(found, theirs, strict=True))
            q, k, v = tokens(plan, 1, 1, generator)[0]
            layer.before_step(pos + 1, pos - 99)
            found = layer.decode(q, k, v, torch.tensor([pos]), torch.tensor([True]))
            assert (found[0, :, 0] - check.decode(i, q[0, :, 0], k[0, :, 0], v[0, :, 0])).abs().max() <= 1e-5


@pytest.mark.parametrize("name, budget", (("streaming", 24), ("duo", 24)))
def test_a_window_slides_over_the_chunks(name, budget):
    plan = make_plan(n_layer=1)
    (layer,) = kv.build(name, plan, budget, {"sinks": 4} | ({"recent": 20} if name == "duo" else {}))
    inputs = tokens(plan, 1, 100, torch.Generator().manual_seed(0))
    y, first, end = read([layer], inputs, SIZES), sum(SIZES[:2]), sum(SIZES[:3])
    seen = [0, 1, 2, 3, *range(first - 20, first)]
    expected = masked_attention(*(x[0] for x in inputs[0]), lambda i: [*seen, *range(first, i + 1)], range(first, end))
    assert (y[0, :, first:end] - expected).abs().max() <= 1e-5
    held = (layer.parts[0] if name == "duo" else layer).held(0, 100)
    assert held.position[0].tolist() == [0, 1, 2, 3, *range(80, 100)]
    assert torch.equal(held.k, inputs[0][1][0, :, held.position[0]])


def test_simlayer_decides_by_the_first_chunk_that_ends_beyond_the_window():
    """Two of three layers may keep all: those in which that chunk's last query looks to the middle."""
    plan, window = make_plan(n_layer=3), 12
    layers = kv.build("simlayer", plan, -(-(2 * plan.planned + window) // 3), {"sinks": 2, "recent": 10})
    assert (layers[0].regions.large, layers[0].regions.window) == (2, window)
    inputs = tokens(plan, 1, 100, torch.Generator().manual_seed(0))
    for at, (q, k, _) in zip((29, 15, 15), inputs, strict=True):  # layer 0's attends to itself
        q[0, :, 29] += 3 * k[0, :, at].repeat_interleave(plan.n_head // plan.n_kv_head, 0)
    read(layers, inputs, (5, 7, 18, 70))
    assert [int(layer.size[0]) for layer in layers] == [window, plan.planned, plan.planned]
    for layer, (_, k, _) in zip(layers, inputs, strict=True):
        held = layer.held(0, 100)
        assert torch.equal(held.k, k[0, :, held.position[0]])
    assert layers[0].held(0, 100).position[0].tolist() == [0, 1, *range(90, 100)]


FITTING = [
    ("rocketkv", {"bits": 8}, 24, [60, 20, 20]),
    ("hybrid", {}, 24, [60, 20, 20]),
    ("snapkv", {}, 0.9, [60, 20, 90]),
]


@pytest.mark.parametrize("name, options, budget, written", FITTING)
def test_a_chunk_that_fits_is_added_to_what_stays_where_it_is(name, options, budget, written):
    (layer,) = kv.build(name, make_plan(n_layer=1, new=100), budget, options)
    found, write = [], layer.write
    layer.write = lambda row, first, k, *more: found.append(k.shape[1]) or write(row, first, k, *more)
    read([layer], tokens(layer.plan, 1, 100, torch.Generator().manual_seed(0)), (60, 20, 20))
    assert found == written
    assert int((layer.position[0, 0] >= 0).sum()) == layer.rows[0]  # what a saved row says of it


@pytest.mark.parametrize("bits", (8, 4))
def test_a_prompt_that_fits_is_quantized_once(bits):
    """Of one that does not, what stays is rounded after every chunk, and yet hardly further from what it was."""
    heads = torch.arange(2)[:, None]
    for room, sizes, fits in ((100, (60, 20, 20), True), (10, (10,) * 10, False)):
        plan = make_plan(n_layer=1, new=room)
        inputs = tokens(plan, 1, 100, torch.Generator().manual_seed(0))
        (layer,), (whole,) = (kv.build("rocketkv", plan, 24, {"bits": bits, "window": 6}) for _ in range(2))
        read([layer], inputs, sizes)
        read([whole], inputs, (100,))
        slots = layer.filled(0, 100)
        assert (slots == 100) == fits
        if fits:
            assert torch.equal(layer.k[0, :, :100], whole.k[0, :, :100])
            continue
        position = layer.position[:, :, :slots].long()
        exact = [x[:, heads, position[0]] for x in inputs[0][1:]]
        stored = layer.stored.read(layer.k[:, :, :slots], layer.v[:, :, :slots], position, 0)
        once = layer.stored.read(*layer.stored.pack(*exact, position, 0), position, 0)
        for x, y, z in zip(exact, once, stored, strict=True):
            assert 0 < (z - x).norm() <= 1.01 * (y - x).norm()


def test_tokens_of_a_chunk_see_each_other_as_they_are():
    """Though groups of them are quantized once the chunk is stored."""
    plan = make_plan(n_layer=1)
    inputs = tokens(plan, 1, 100, torch.Generator().manual_seed(0))
    y = read(kv.build("kivi", plan, None, {"bits": 1, "group": 8, "recent": 0}), inputs, (1, 99))
    assert (y[0] - masked_attention(*(x[0] for x in inputs[0]), causal())).abs().max() <= 1e-5


def test_the_error_of_rounding_is_that_of_a_chunk_that_was_rounded():
    """Though nothing of the first one was."""
    plan = make_plan(n_layer=1)
    inputs = tokens(plan, 1, 100, torch.Generator().manual_seed(0))
    options = {"bits": 1, "group": 16, "recent": 16}
    (whole,), (layer,) = (kv.build("kivi", plan, None, options) for _ in range(2))
    read([whole], inputs, (100,))
    read([layer], inputs, (4, 96))
    assert 0.5 < layer.error / whole.error < 2


# Memory


class Live(TorchDispatchMode):
    """The most bytes of tensors, made in this context, that were alive at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0

    def free(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in known:
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out


def peak(engine: Engine, name: str, prompt: int, chunk: int) -> int:
    """Bytes that reading a prompt takes beside the caches, at most at once."""
    budget = None if name == "full" else 64
    engine.use(name, budget, max_prompt=prompt, room=256, chunk=chunk)  # with this room rocketkv keeps 256 tokens
    with Live() as live:
        engine.start([[i % 128 for i in range(prompt)]])
    return live.peak


@pytest.mark.parametrize("name", ("rocketkv", "snapkv", "h2o", "streaming"))
def test_in_chunks_memory_does_not_grow_with_the_prompt(name, checkpoint):
    engine = Engine.load(checkpoint, compile=False)
    assert peak(engine, name, 2048, 128) <= peak(engine, name, 512, 128) + 2 * 8 * 1536  # the ids, and where they are
    assert peak(engine, name, 2048, 0) > 3.5 * peak(engine, name, 512, 0)
    assert peak(engine, name, 2048, 128) < peak(engine, name, 2048, 0) / 4


@pytest.mark.parametrize("name", ("full", "rocketkv", "h2o", "streaming"))
def test_in_chunks_memory_does_not_grow_with_a_question(name, checkpoint):
    engine, peaks = Engine.load(checkpoint, compile=False), []
    for length in (512, 2048):
        engine.use(name, None if name == "full" else 64, max_prompt=256, room=2304, chunk=128)
        rows = engine.start([[i % 128 for i in range(256)]])
        with Live() as live:
            engine.ask(rows, [[i % 128 for i in range(length)]], 1)
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0] + 2 * 8 * 1536


def test_in_chunks_a_full_cache_is_read_where_it_is(checkpoint):
    """Only the ids follow the prompt: there is no copy of a layer's keys and values."""
    engine = Engine.load(checkpoint, compile=False)
    peaks = [peak(engine, "full", prompt, 128) for prompt in (512, 2048)]
    assert peaks[1] <= peaks[0] + 2 * 8 * 1536


# The engine

PROMPT = [(7 * i * i + i) % 128 for i in range(50)]


def logits(engine: Engine, chunk: int, **how) -> torch.Tensor:
    engine.use(max_prompt=60, room=12, chunk=chunk, **how)
    return engine.logits(PROMPT, list(range(8)))


KEEPING = {
    "full": {},
    "hybrid": {"budget": 24},
    "quest": {"budget": 24, "options": {"page": 4, "skip_layers": 0}},
    "omnikv": {"budget": 12, "options": {"filter_layers": [0], "offload": True}},
    "pqcache": {"budget": 24, "options": {"codebits": 3}},
    "tailorkv": {"budget": 24, "options": {"quant_layers": [], "channels": 4}},
    "infllm": {"budget": 24, "options": {"block": 6}},
    "brute_offload": {},
    "kvzip": {"budget": 24},  # until it has read the prompt again
    "rocketkv": {"budget": 24, "options": {"turns": True, "offload": True, "window": 8}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return Engine.load(write_random(tmp_path_factory.mktemp("chunks") / "m", num_hidden_layers=3), compile=False)


@pytest.mark.parametrize("kv", KEEPING)
def test_an_answer_is_the_same_if_nothing_is_dropped(engine, kv):
    whole, chunked = (logits(engine, chunk, kv=kv, **KEEPING[kv]) for chunk in (0, 17))
    assert (whole - chunked).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("kv", KEEPING)
def test_a_question_may_be_read_in_chunks(engine, kv):
    found, sizes = [], []
    for chunk in (0, 17, 25):
        engine.use(kv, max_prompt=20, room=60, chunk=chunk, **KEEPING[kv])
        rows = engine.start(PROMPT[:20])
        first, extend = engine.layers[0], engine.layers[0].extend
        first.extend = lambda row, q, *kv, pos, extend=extend: sizes.append(q.shape[2]) or extend(row, q, *kv, pos)
        engine.ask(rows, [PROMPT[20:]], 1)
        found.append(engine.feed(rows, [list(range(8))])[0])
    assert sizes == [30, 15, 15, 15, 15]
    assert all((found[0] - x).abs().max() <= 1e-5 * found[0].abs().max() for x in found)


@pytest.mark.parametrize("kv", ("h2o", "snapkv", "streaming"))
def test_a_chunk_as_long_as_the_prompt_changes_nothing_and_a_shorter_one_does(engine, kv):
    options = {"window": 8} if kv == "snapkv" else {}
    whole, same, chunked = (logits(engine, chunk, kv=kv, budget=24, options=options) for chunk in (0, 50, 17))
    assert torch.equal(whole, same) and (whole - chunked).abs().max() > 1e-3


DRAFTS = {
    "streaming": {},
    "snapkv": {"window": 8},
    "rocketkv": {"window": 8},
    "quest": {"page": 4},
    "omnikv": {"filter_layers": [0]},
    "pqcache": {"codebits": 3},
    "infllm": {"block": 6},
    "duo": {},
}


@pytest.mark.parametrize("kv", DRAFTS)
def test_drafts_are_those_of_a_prompt_in_one_piece(engine, kv):
    options, found = DRAFTS[kv], []
    engine.use("full", max_prompt=60, room=40)
    expected = engine.generate(PROMPT, 15)[0].tokens
    for chunk in (0, 17):
        engine.use(kv, 24, options, max_prompt=60, room=40, speculate=3, chunk=chunk)
        assert engine.generate(PROMPT, 15)[0].tokens == expected
        found.append((engine.stats.decoded, engine.stats.fed))
    assert found[0] == found[1]


def test_after_a_question_a_draft_has_the_budget_of_the_longer_text():
    plan = make_plan(n_layer=1, new=10)
    inputs = tokens(plan, 1, 100, torch.Generator().manual_seed(0))[0]
    asked, whole = (kv.build("rocketkv", replace(plan, rewind=2), 24, {"window": 8})[0] for _ in range(2))
    read([asked], [[x[:, :, :70] for x in inputs]], (70,))
    asked.extend(0, *(x[:, :, 70:] for x in inputs), 70)
    read([whole], [inputs], (100,))
    assert torch.equal(asked.draft.held(0, 100).position, whole.draft.held(0, 100).position)


def test_dynamic_ntk_takes_its_base_from_the_whole_prompt(tmp_path):
    scaling = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 20}
    engine = Engine.load(write_random(tmp_path / "m", **scaling), compile=False)
    whole, chunked = (logits(engine, chunk, kv="full") for chunk in (0, 17))
    assert (whole - chunked).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("kv", ("snapkv", "h2o", "streaming", "infllm"))
def test_a_prompt_read_in_chunks_is_saved_and_continued(engine, kv, tmp_path):
    found, options = [], {"infllm": {"block": 6}, "snapkv": {"window": 8}}.get(kv, {})
    for chunk in (17, 0):
        engine.use(kv, 24, options, max_prompt=60, room=40, chunk=chunk)
        if chunk:
            (row,) = engine.start(PROMPT)
            row.save(tmp_path / "row")
        else:
            row = engine.load_row(tmp_path / "row")
        found.append(engine.feed([row], [list(range(8))])[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("chunk, sizes", ((17, [17, 17, 16]), (49, [25, 25]), (1, [1] * 50), (50, [50]), (0, [50])))
def test_chunks_are_as_long_as_each_other_and_progress_covers_all(engine, chunk, sizes, monkeypatch):
    engine.use("full", max_prompt=60, room=4, chunk=chunk)
    calls, shown, prefill = [], [], engine.layers[1].prefill

    def progress(layers, what):
        shown.append((what, len(layers)))
        yield from layers
        shown.append("done")

    monkeypatch.setattr(engine, "progress", progress)
    monkeypatch.setattr(
        engine.layers[1],
        "prefill",
        lambda row, q, *kv, pos, whole: calls.append((q.shape[2], pos, whole)) or prefill(row, q, *kv, pos, whole),
    )
    engine.start(PROMPT)
    assert calls == [(n, sum(sizes[:i]), 50) for i, n in enumerate(sizes)]
    assert shown == [("prefill 50 tokens", 3 * len(sizes)), "done"]


def test_a_chunk_is_a_number_and_some_methods_refuse_one(engine, tmp_path, monkeypatch):
    for chunk in (-1, 2.5, True, "x"):
        with pytest.raises(ValueError, match="chunk must be a whole number of at least 1"):
            engine.use("full", chunk=chunk)
    monkeypatch.setattr("engine.load_model", lambda *_: pytest.fail("weights were read"))
    deep = write_random(tmp_path / "m", num_hidden_layers=3)
    for name, options in (("d2o", {}), ("omnikv", {"prefill": 0.5})):
        with pytest.raises(ValueError, match=f"^{name} with these options needs a whole prompt .*leave out --chunk$"):
            Engine.load(deep, name, 24, options, chunk=100)
    for name, options in (("snapkv", {"window": 9}), ("rocketkv", {"window": 9, "turns": True})):
        with pytest.raises(ValueError, match="^chunk=17 must be at least twice the window, 9$"):
            engine.use(name, 24, options, max_prompt=60, room=4, chunk=17)
    engine.use("d2o", 24, max_prompt=60, room=4, chunk=60)  # reads every prompt at once
    assert len(engine.generate(PROMPT)[0].tokens) == 4


def test_a_prompt_far_longer_than_a_window_is_read_in_the_memory_of_the_window(engine):
    """Without max_prompt: caches that do not depend on it are as large for any prompt."""
    engine.use("streaming", 24, chunk=64)
    sizes = []
    for n in (50, 3000):
        assert len(engine.generate([i % 128 for i in range(n)], 4)[0].tokens) == 4
        sizes.append(engine.layers.bytes())
    assert sizes[0] == sizes[1]
