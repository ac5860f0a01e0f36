"""KIVI against a slow reference, without a full-precision copy of the cache; the `bits` of other methods."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from references.quantized import SlowQuantized
from runs import Run, TensorSizes, generations, make_plan, prefill_both, step_both, tokens, with_heads
from torch._inductor.utils import run_and_get_code

import kv
from kv.kvarn import KVarN
from kv.parts import inductor, ops, quant
from kv.rocketkv import EXACT

PROMPTS = (100, 61, 16, 9, 5)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)


def same_codes(layer, slow: SlowQuantized, index: int) -> None:
    """Asserts that the packed tokens of a layer's row 0 equal the reference's to the bit."""
    packed = layer.packed
    text = slow.texts[index]
    count = text.packed // packed.group
    for head in range(layer.plan.n_kv_head if count else 0):
        codes, scale, zero = (torch.stack(x) for x in zip(*text.key_groups[head], strict=True))
        assert torch.equal(packed.key_codes(packed.k[0, head, :count]).mT.long(), codes)
        assert torch.equal(packed.k_scale[0, head, :count, :, 0], scale)
        assert torch.equal(packed.k_zero[0, head, :count, :, 0], zero)
        codes, scale, zero = (torch.cat(x) for x in zip(*text.value_groups[head], strict=True))
        found = quant.unpack(packed.v[0, head, :count], packed.bits, -2, packed.group)
        assert torch.equal(found.flatten(0, 1).long(), codes)
        assert torch.equal(packed.v_scale[0, head, :count].flatten(0, 1), scale)
        assert torch.equal(packed.v_zero[0, head, :count].flatten(0, 1), zero)


@pytest.mark.parametrize("bits, recent, heads", with_heads(product((2, 4), (13, 0, 8, 500))))
def test_kivi_equals_its_reference(bits, recent, heads):
    plan = make_plan(heads, n_layer=2)
    run = Run("kivi", plan, None, {"bits": bits, "group": 8, "recent": recent})
    slow = SlowQuantized(plan, bits, 8, quant.channels(plan.head_dim), recent)
    for prompt, steps in generations(PROMPTS, plan.room):
        generator = torch.Generator().manual_seed(prompt)
        prefill_both(run, slow, prompt, generator)
        for _ in range(steps):
            step_both(run, slow, generator)
        for layer, ours in enumerate(run.layers):
            assert slow.texts[layer].packed == max(0, prompt + steps - recent) // 8 * 8
            same_codes(ours, slow, layer)


def test_codes_in_bfloat16_are_those_of_the_rounded_tokens():
    plan = replace(make_plan(n_layer=1), dtype=torch.bfloat16)
    run, slow = Run("kivi", plan, None, {"group": 8, "recent": 4}), SlowQuantized(plan, 4, 8, 16, 4)
    generator = torch.Generator().manual_seed(0)
    (q, k, v) = (x.bfloat16() for x in tokens(plan, 1, 50, generator)[0])
    run.prefill(0, [(q, k, v)])
    slow.prefill(0, q[0], k[0], v[0])
    for _ in range(20):
        (q, k, v) = (x.bfloat16() for x in tokens(plan, 1, 1, generator)[0])
        expected = slow.decode(0, q[0, :, 0], k[0, :, 0], v[0, :, 0])
        assert (run.step([(q, k, v)])[0, 0] - expected).abs().max() <= 2**-8 * expected.abs().max()
    same_codes(run.layers[0], slow, 0)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("bits", (1, 2, 4, 8))
def test_memory_is_table_2s_and_the_window(bits, head_dim):
    plan = replace(make_plan(batch=2), dtype=torch.bfloat16, head_dim=head_dim, max_prompt=4000, room=96)
    table = 2 * 4096 * plan.n_kv_head * head_dim * (bits / 16 + 2 / 64) * 2  # bytes of a row in a layer
    rows = plan.n_layer * plan.batch
    for recent in (0, 128):
        device, host = kv.planned_bytes("kivi", plan, None, {"bits": bits, "recent": recent})
        waits = (recent + 64 + 1) * plan.n_kv_head * plan.unit_bytes
        assert 1 <= device / (rows * (table * (1 - recent / 4096) + waits)) < 1.02 and host == 0


class NewSizes(TensorSizes):
    """Records the number of elements of every tensor that is not a view of another."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if all(out.alias_info is None for out in func._schema.returns):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


LONG, PART = 4031, 256  # tokens of a prompt, one short of a full group; at most PART may exist in full precision


@pytest.fixture
def long_step(request, monkeypatch):
    """A layer, its prompt's K and V, and the inputs of the next step."""
    batch = getattr(request, "param", 1)
    monkeypatch.setattr(inductor, "STEP", 256)
    monkeypatch.setattr(quant, "SLICE", PART)
    monkeypatch.setattr(quant, "CODES", 2 * PART * 64)
    plan = replace(make_plan(batch=batch, n_layer=1), head_dim=64, max_prompt=LONG, room=500)
    layer, generator = kv.build("kivi", plan, None, {"recent": 0})[0], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, LONG + 1, 64, generator=generator) for h in (6, 2, 2))
    for row in range(batch):
        layer.prefill(row, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1])
    layer.before_step(LONG + 1, 1)
    inputs = [x[:, :, -1:].repeat(batch, 1, 1, 1) for x in (q, k, v)]
    rows = torch.tensor([LONG]).repeat(batch), torch.ones(batch, dtype=torch.bool)
    return layer, k[0, :, :-1], v[0, :, :-1], (*inputs, *rows)


@pytest.mark.parametrize("long_step", (1, 3), indirect=True)
def test_the_whole_cache_never_exists_in_full_precision(long_step):
    layer, k, v, inputs = long_step
    count = layer.groups(LONG) * layer.group
    with NewSizes() as filling:
        layer.packed.fill(0, k[:, :count], v[:, :count])
    with NewSizes() as step:
        layer.decode(*inputs)
    assert len(filling.found) > 100 and len(step.found) > 100
    weights = inputs[0].shape[0] * inputs[0].shape[1] * (LONG + 2 * layer.group)
    assert max(filling.found + step.found) <= max(k.shape[0] * PART * k.shape[2], weights)


@pytest.mark.slow
def test_a_compiled_step_allocates_nothing_larger_than_the_attention_weights(long_step):
    layer, *_, inputs = long_step
    before = [x.clone() for x in layer.packed.buffers()]
    expected = layer.decode(*inputs)
    packed = [x.clone() for x in layer.packed.buffers()]
    for x, old in zip(layer.packed.buffers(), before, strict=True):
        x.copy_(old)
    found, (code,) = run_and_get_code(torch.compile(layer.decode, fullgraph=True), *inputs)
    assert (found - expected).abs().max() <= 1e-5
    for x, old, new in zip(layer.packed.buffers(), before, packed, strict=True):
        assert torch.equal(x, new) and not torch.equal(old, new)
    sizes = re.findall(r" = empty_strided_cpu\((\(.*?\)), \(", code)
    variable = defaultdict(lambda: layer.read_groups.shape[0])  # the only size that the code leaves open
    sizes = [math.prod(eval(size, {}, variable)) for size in sizes]
    assert len(sizes) > 10
    assert max(sizes) <= inputs[0].shape[1] * (layer.read_groups.shape[0] * layer.group + layer.waits)


# The other methods' bits


def differences(name: str, budget: int | None) -> tuple:
    """Runs of a method with 16, 8 and 4 bits, and how 8 and 4 differ from 16 in 20 steps after 600 tokens.

    The differences are [2,20,L,B,Hq,D].
    """
    plan = replace(make_plan(n_layer=2), max_prompt=600)
    runs, found = [Run(name, plan, budget, {"bits": bits}) for bits in (16, 8, 4)], []
    generator = torch.Generator().manual_seed(0)
    inputs = tokens(plan, 1, 600, generator)
    for run in runs:
        run.prefill(0, inputs)
    for _ in range(20):
        inputs = tokens(plan, 1, 1, generator)
        found.append(torch.stack([run.step(inputs) for run in runs]))
    found = torch.stack(found, dim=1)
    return runs, (found[1:] - found[0]).abs()


def test_full_in_fewer_bits_is_nearly_full_attention():
    runs, (eight, four) = differences("full", None)
    assert 0 < eight.max() < 0.005 < four.max() < 0.1
    assert all(isinstance(layer, KVarN) for layer in runs[1].layers)


@pytest.mark.parametrize("name", ("rocketkv", "hybrid"))
def test_rocketkv_in_fewer_bits_chooses_the_pages_of_16(name, monkeypatch):
    pages, attend = [], ops.attend_pages

    def noted(q, k, v, best, *args):
        pages.extend(map(set, best.flatten(0, 1).tolist()))
        return attend(q, k, v, best, *args)

    monkeypatch.setattr(ops, "attend_pages", noted)
    (exact, *coded), (eight, four) = differences(name, 100)
    a, b = exact.layers[0], coded[0].layers[0]
    for x, y in zip(a.held(0, 620)[:2], b.held(0, 620)[:2], strict=True):
        assert 0 < (x - y).abs().max() < 0.04  # the same tokens, rounded
    runs = torch.arange(len(pages)) // (2 * 2) % 3  # the run of each entry: 2 layers x 2 KV heads per step
    by_run = [[pages[i] for i in (runs == run).nonzero()] for run in range(3)]
    assert by_run[0] == by_run[1] == by_run[2]  # their bounds are not rounded to fewer bits
    assert 0 < eight.mean() < 0.006 < four.mean()


@pytest.mark.parametrize("question", (1, 7, 90))
def test_the_newest_tokens_of_hybrid_are_attended_to_as_they_were(question, monkeypatch):
    plan = replace(make_plan(n_layer=1), max_prompt=150, room=200)
    run, generator, attend = Run("hybrid", plan, 64, {"bits": 4}), torch.Generator().manual_seed(0), ops.attend_pages
    given = [tokens(plan, 1, n, generator)[0][1:] for n in (150, question, *[1] * 80)]
    layer, lengths = run.layers[0], []

    def check(found: tuple, n: int) -> None:
        for x, parts in zip(found, zip(*given, strict=True), strict=True):
            same = (x == torch.cat(parts, dim=2)[0, :, :n]).all(-1).all(0)  # of both heads
            assert same.tolist() == [False] * (n - EXACT) + [True] * EXACT

    def checked(q, k, v, best, page, last, read):
        lengths.append(n := int(last) + 1)
        slots = torch.arange(n).expand(1, plan.n_kv_head, -1)
        check([x[0] for x in read(k[:, :, :n], v[:, :, :n], slots)], n)
        return attend(q, k, v, best, page, last, read)

    monkeypatch.setattr(ops, "attend_pages", checked)
    query = torch.randn(1, plan.n_head, 150, plan.head_dim, generator=generator)
    layer.prefill(0, query, *given[0])
    pos = 150
    for k, v in given[1:]:
        inputs, n = (query[:, :, : k.shape[2]], k, v), k.shape[2]
        if n > 1:
            layer.extend(0, *inputs, pos)
        else:
            layer.before_step(pos + 1, pos + 1 - 150)
            layer.decode(*inputs, torch.tensor([pos]), torch.tensor([True]))
        pos += n
        check(layer.held(0, pos)[:2], pos)
    assert len(lengths) >= 80
    keys = torch.cat([k for k, _ in given], dim=2)
    low, high = ops.page_bounds(keys[0], layer.page, layer.reach).unbind(2)
    assert layer.page > 1 and torch.equal(layer.bounds[0, :, :, : low.shape[1]], torch.cat([low, high], dim=2).mT)


def test_bits_that_do_not_pack_are_refused():
    for names, known in ((("full", "rocketkv", "omnikv"), "16, 8, 4"), (("kivi", "tailorkv"), "1, 2, 4, 8")):
        for name in names:
            with pytest.raises(ValueError, match=f"{name}: option bits=3: must be one of {known}$"):
                kv.build(name, make_plan(), None, {"bits": 3})


def test_a_quantized_cache_refuses_a_sliding_window():
    plan = replace(make_plan(), window=64)
    with pytest.raises(ValueError, match="4 bits does not honour .* sliding window"):
        kv.build("full", plan, None, {"bits": 4})
    assert kv.build("full", replace(plan, window=plan.planned), None, {"bits": 4})
