"""Host pools: what is fetched is what was written, whatever the threads do."""

import random
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import slow
from runs import Run, make_plan, tokens

from kv import parse_options
from kv.parts import offload, ops

ROWS, WIDTH, SLOTS = 64, (2, 3), 20
CPU = torch.device("cpu")


def make_pool(count: int = 3, delta: bool = True, batch: int = 1) -> offload.ThreadedPool:
    staged = offload.Staged((1, SLOTS, *WIDTH), torch.float32, CPU, offload.Workers(count))
    return offload.ThreadedPool("layers 2, 3", (batch, ROWS // batch, *WIDTH), staged, delta)


def fetch(pool: offload.Pool, ids: torch.Tensor) -> torch.Tensor:
    active, order = torch.ones(1, dtype=torch.bool, device=ids.device), torch.zeros(1, device=ids.device)
    token, _ = pool.issue(ids[None], active, order)
    return pool.take(pool.wait(token, ids))


def fill(pool: offload.Pool, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(ROWS, *WIDTH, generator=torch.Generator().manual_seed(seed))
    for start in range(0, ROWS, 16):
        for column in range(WIDTH[0]):
            pool.write(0, start, rows[start : start + 16, column], column)
    pool.settle()
    return rows


@pytest.mark.parametrize("delta", (False, True))
@pytest.mark.parametrize("chunk", (1, 4 << 20))
def test_fetched_rows_are_those_that_were_written(delta, chunk, monkeypatch, offload_threads):
    monkeypatch.setattr(offload, "CHUNK", chunk)  # one row in each staging buffer
    pools = [make_pool(count, delta) for count in (1, 3, 40)]
    pools.append(offload.Pool("layers 2, 3", (1, ROWS, *WIDTH), torch.float32, CPU, host=True))
    for pool in pools:
        for seed in range(3):
            rows = fill(pool, seed)
            for _ in range(10):
                ids = torch.randint(-1, ROWS, (SLOTS,), generator=torch.Generator().manual_seed(seed))
                found = fetch(pool, ids)
                for column in range(WIDTH[0]):
                    taken = found[:, column]
                    assert torch.equal(taken[ids >= 0], rows[ids[ids >= 0], column])
        pool.close()
    assert not offload_threads()


def test_a_failing_thread_raises_in_the_caller_with_layer_and_rows(monkeypatch):
    pool = make_pool(1)
    rows, gather = fill(pool), pool.gather
    ids = torch.arange(10, 10 + SLOTS)

    def fails(*_):
        raise OSError("bus error")

    monkeypatch.setattr(pool, "gather", fails)
    with pytest.raises(RuntimeError, match="layers 2, 3: entries 10 to 29 could not be fetched .bus error"):
        fetch(pool, ids)
    monkeypatch.setattr(pool, "gather", gather)  # what failed is fetched again
    assert torch.equal(fetch(pool, ids), rows[ids])
    pool.close()


def test_a_failing_write_raises_in_the_caller():
    pool = make_pool()
    pool.write(0, 0, torch.zeros(5, 7), 0)  # of another shape
    with pytest.raises(RuntimeError):
        pool.settle()
    pool.close()


@pytest.mark.parametrize("compiled", (False, slow(True)))
def test_500_steps_with_delays_and_failures_fetch_no_wrong_row(compiled, monkeypatch, offload_threads):
    """No hang and no wrong row; a failure is raised once, in the step that needs the rows."""
    pools = [make_pool(3, delta) for delta in (True, False)]
    rows = [fill(pool, seed) for seed, pool in enumerate(pools)]
    chance, failed = random.Random(0), []
    for pool in pools:

        def gather(ids, staging, whole=pool.gather):
            time.sleep(chance.random() * 2e-3)
            if chance.random() < 0.05:
                failed.append(ids)
                raise OSError("injected")
            return whole(ids, staging)

        monkeypatch.setattr(pool, "gather", gather)

    def step(ids):
        tokens, x = [], ids.float()
        for pool in pools:
            token, x = pool.issue(ids[None], ids[:1] >= -1, x)
            tokens.append(token)
        x = x @ torch.ones(SLOTS, SLOTS)  # a layer that computes in the meantime
        return [pool.take(pool.wait(token, x), 1) for pool, token in zip(pools, tokens, strict=True)], x

    run = torch.compile(step, fullgraph=True) if compiled else step
    generator, raised, ids = torch.Generator().manual_seed(0), 0, torch.arange(SLOTS)
    for _ in range(500):
        ids = torch.where(torch.rand(SLOTS, generator=generator) < 0.3, torch.randint(-1, ROWS, (SLOTS,)), ids)
        failed.clear()
        try:
            found, _ = run(ids)
        except RuntimeError as error:
            assert failed and "injected" in str(error)
            raised += 1
            continue
        for own, all_rows in zip(found, rows, strict=True):
            assert torch.equal(own[ids >= 0], all_rows[ids[ids >= 0], 1])
    assert 20 < raised < 400
    for pool in pools:
        pool.close()
    assert not offload_threads()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, budget, options, n_layer, early",
    [
        ("omnikv", 12, {"filter_layers": [0, 3], "offload": True, "engine": "threads"}, 6, "layers [25]"),
        ("brute_offload", None, {"layers": 5, "ahead": 1}, 6, "layer [1-5]"),
        ("tailorkv", 24, {"quant_layers": [], "engine": "threads"}, 2, "the channels of layer 1"),
    ],
)
def test_compiled_steps_fetch_while_a_layer_computes(name, budget, options, n_layer, early, monkeypatch):
    """The compiler keeps the order: issue, the attention of the layers between, wait; no buffer is reused too early."""
    torch._dynamo.reset()
    log = []

    @torch.library.custom_op("kv_fast_test::mark", mutates_args=())
    def mark(x: torch.Tensor) -> torch.Tensor:
        log.append(("attention", ""))
        return x.clone()

    mark.register_fake(torch.empty_like)
    attend, weights = ops.attend, ops.weights  # filter layers attend with the weights they choose by
    monkeypatch.setattr(ops, "attend", lambda *a: mark(attend(*a)))
    monkeypatch.setattr(ops, "weights", lambda *a: mark(weights(*a)))
    for method in (offload.ThreadedPool.start, offload.ThreadedPool.finish):

        def logged(pool, *a, method=method):
            log.append((method.__name__, pool.what))
            return method(pool, *a)

        monkeypatch.setattr(offload.ThreadedPool, method.__name__, logged)
    plan, generator = make_plan(n_layer=n_layer), torch.Generator().manual_seed(0)
    eager, compiled = runs = [Run(name, plan, budget, options) for _ in range(2)]
    fast, inputs = torch.compile(compiled.decode, fullgraph=True), tokens(plan, 1, 100, generator)
    for run in runs:
        run.prefill(0, inputs)
    for _ in range(3):
        inputs = tokens(plan, 1, 1, generator)
        expected = eager.step(inputs)
        log.clear()
        assert (compiled.step(inputs, decode=fast) - expected).abs().max() <= 1e-5
    pools = {what for _, what in log if re.fullmatch(early, what)}
    for what in pools:
        between = log[log.index(("start", what)) : log.index(("finish", what))]
        assert ("attention", "") in between, log
    assert pools and log.count(("attention", "")) == plan.n_layer
    for run in runs:
        run.layers.close()


def test_a_fetch_that_nobody_waited_for_does_no_harm(monkeypatch, offload_threads):
    """An error elsewhere or Ctrl-C may abort a step between issue and wait."""
    staged = offload.Staged((1, SLOTS, *WIDTH), torch.float32, CPU, offload.Workers(2))
    pools = [offload.ThreadedPool(f"layer {i}", (1, ROWS, *WIDTH), staged, delta=i == 0) for i in range(2)]
    ids, rows = torch.arange(SLOTS), [fill(pool, seed) for seed, pool in enumerate(pools)]
    for pool in pools:
        slow = pool.gather
        monkeypatch.setattr(pool, "gather", lambda *a, gather=slow: (time.sleep(0.1), gather(*a))[1])
    pools[0].issue(ids[None], ids[:1] >= 0, ids)
    rows[0] = fill(pools[0], 5)  # another prompt
    assert torch.equal(fetch(pools[0], ids), rows[0][ids])
    pools[0].issue(ids[None] + 1, ids[:1] >= 0, ids)
    assert torch.equal(fetch(pools[1], ids), rows[1][ids])  # in the same buffer
    pools[0].issue(ids[None], ids[:1] >= 0, ids)
    pools[0].write(0, 0, torch.zeros(5, 7), 0)  # fails, as may the fetch in flight; the pools can still be closed
    for pool in pools:
        pool.close()
    assert not offload_threads()


def test_slots_that_are_not_asked_for_are_left_alone():
    for delta in (False, True):
        pool = make_pool(2, delta, batch=2)
        entries, index = fill(pool).unflatten(0, (2, -1)), torch.arange(SLOTS // 2).expand(2, -1)
        both = torch.ones(2, dtype=torch.bool)
        token, _ = pool.issue(index, both, index)
        first = pool.take(pool.wait(token, index)).unflatten(0, (2, -1)).clone()
        assert torch.equal(first, entries[:, : SLOTS // 2])
        asked = index[0] % 2 == 0
        token, _ = pool.issue(torch.where(asked, index + 20, -1), both & torch.tensor([False, True]), index)
        found = pool.take(pool.wait(token, index)).unflatten(0, (2, -1))
        assert torch.equal(found[0], first[0])  # the row is inactive
        assert torch.equal(found[1, asked], entries[1, 20 + index[1, asked]])
        assert torch.equal(found[1, ~asked], first[1, ~asked])
        assert pool.counts == (SLOTS + SLOTS // 4,) * 2
        pool.close()


def test_a_pool_that_is_dropped_leaves_no_thread(offload_threads):
    pool = make_pool()
    fill(pool)
    assert offload_threads()
    del pool
    deadline = time.time() + 10
    while offload_threads() and time.time() < deadline:
        time.sleep(0.01)
    assert not offload_threads()


@pytest.mark.slow
def test_python_exits_while_a_fetch_is_under_way():
    code = """
        import time, torch
        from kv.parts import offload
        staged = offload.Staged((1, 4, 2), torch.float32, torch.device("cpu"), offload.Workers(2))
        pool = offload.ThreadedPool("x", (1, 8, 2), staged)
        pool.gather = lambda *_: time.sleep(0.5)
        ids = torch.arange(4)
        pool.issue(ids[None], ids[:1] >= 0, ids)
    """
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=root, timeout=60, check=True)


def test_too_much_host_memory_is_refused_with_what_it_needs():
    with pytest.raises(ValueError, match=r"layers 2, 3 need .* GB of host memory, which cannot be allocated"):
        offload.Pool("layers 2, 3", (1, 2**48, 1), torch.float32, CPU, host=True)


def test_threads_fetch_by_default_only_what_a_gpu_is_told_to_fetch_early():
    def threaded(device: torch.device, **options) -> tuple[bool, bool]:
        method, plan = parse_options("tailorkv", options), replace(make_plan(), device=device)
        return method.threaded(plan), method.threaded(plan, early=True)

    gpu = torch.device("cuda")
    assert threaded(CPU) == (False, False) and threaded(gpu) == (False, True)
    for device in (CPU, gpu):
        assert threaded(device, engine="threads") == (True, True)
        assert threaded(device, engine="direct") == threaded(device, engine="threads", offload=False) == (False, False)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ("direct", "threads", "delta"))
def test_fetched_rows_on_a_gpu_are_those_that_were_written(kind):
    device, rows = torch.device("cuda"), torch.randn(4096, 2, 8, 64, device="cuda", dtype=torch.bfloat16)
    if kind == "direct":
        pool = offload.Pool("layers 2", (1, 4096, 2, 8, 64), torch.bfloat16, device, host=True)
        assert pool.memory.is_pinned() and pool.entries.is_cuda
    else:
        staged = offload.Staged((1, 500, 2, 8, 64), torch.bfloat16, device, offload.Workers(4))
        pool = offload.ThreadedPool("layers 2", (1, 4096, 2, 8, 64), staged, kind == "delta")
    for column in range(2):
        pool.write(0, 0, rows[:, column], column)
    pool.settle()
    assert torch.equal(pool.memory, rows.cpu())

    def step(ids):
        found = fetch(pool, ids)
        return found[:, 0] + 0, found[:, 1] + 0

    run = torch.compile(step, fullgraph=True, options={"triton.cudagraphs": True})
    for i in range(20):
        ids = torch.randint(0, 4096, (500,), device=device)
        torch.compiler.cudagraph_mark_step_begin()
        found = run(ids)
        for column in range(2):
            assert torch.equal(found[column], rows[ids, column]), i
    pool.close()
