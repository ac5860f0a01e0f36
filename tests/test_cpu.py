"""The products and the attention of a compiled step on a CPU, and the choice between them."""

from runtime.startup import ROOT

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from conftest import write_random
from test_contract import make_plan
from torch import Tensor, nn

from engine import Engine
from kv import METHODS
from kv.parts import attention, inductor, ops
from model import Transformer
from runtime import cpu
from runtime.linear import Int8Linear, quantize_modules

PROMPT = [*range(5, 45)]


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def model(checkpoint):
    return Engine.load(checkpoint, compile=False).model


@pytest.fixture(params=("eager", pytest.param("inductor", marks=pytest.mark.slow)))
def as_compiled(request, monkeypatch):
    """Runs a function as a compiled step does: by Inductor, or eagerly and told that it is compiled."""
    if request.param == "inductor":
        torch._dynamo.reset()
        return partial(torch.compile, fullgraph=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return lambda function: function


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize(("rows", "out", "long"), ((1, 40, 4096), (8, 40, 4096), (8, 40, 60), (1, 40, 47), (2, 41, 16)))
def test_products_agree_to_rounding(as_compiled, monkeypatch, dtype, rows, out, long):
    """A fused product also of several rows of the weight at a time, and of sums in several parts."""
    monkeypatch.setattr(cpu, "LONG", long)
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, 1, 48).to(dtype), torch.randn(out, 48).to(dtype), torch.randn(out).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    for product in ("kernel", "mv", "fused"):
        y = as_compiled(cpu.linear)(x, weight, bias, (product, product))
        assert y.dtype == dtype and y.shape == exact.shape
        assert (y.double() - exact).abs().max() <= 3 * torch.finfo(dtype).eps * exact.abs().max() + 1e-5


@pytest.mark.slow
def test_a_long_fused_product_reads_four_rows_at_a_time_and_adds_up_in_registers():
    from torch._inductor.utils import run_and_get_code  # imports the compiler

    torch._dynamo.reset()
    x, weight = torch.randn(1, 4480), torch.randn(8, 4480)
    y, (code,) = run_and_get_code(torch.compile(cpu.fused, fullgraph=True), x, weight)
    assert torch.allclose(y, F.linear(x, weight), atol=1e-3)
    assert "CascadeSumHelper<" not in code and "tmp_acc3_vec" in code and "tmp_acc4_vec" not in code


@pytest.mark.parametrize(("rows", "long"), ((1, 4096), (5, 4096), (5, 32)))
def test_the_fused_product_of_int8_is_the_kernels(as_compiled, monkeypatch, rows, long):
    monkeypatch.setattr(cpu, "LONG", long)
    torch.manual_seed(0)
    module, x = Int8Linear(nn.Linear(64, 40)), torch.randn(rows, 1, 64)
    module.weight.random_(-127, 128)
    module.scales.uniform_(0.01, 0.1)
    expected = module(x)
    module.products = ("fused", "fused")
    found = as_compiled(lambda x: module(x))(x)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def sizes(model: Transformer, rows: int) -> set[str]:
    return {cpu.describe(m, rows) for m in model.modules() if hasattr(m, "products")}


def test_known_times_decide_and_nothing_is_measured(model, monkeypatch):
    monkeypatch.setattr(cpu, "LEAST", 0)
    monkeypatch.setattr(cpu, "measure", None)
    slow, fast, even = {"kernel": 2.0, "fused": 3.0}, {"kernel": 2.0, "fused": 1.0}, {"kernel": 2.0, "fused": 1.95}
    times = dict.fromkeys(sizes(model, 1), even) | {"float32 96 x 64, 1 row": fast, "float32 64 x 64, 1 row": slow}
    cpu.write(cpu.cache_file(), {cpu.where(): times, "another machine": {}})
    assert cpu.tune_products(model, 1) == times
    block = model.layers[1]
    assert block.feed_forward.w1.products == ("fused", "kernel")
    assert block.attention.wo.products == block.feed_forward.w2.products == ("kernel", "kernel")
    assert "float32 96 x 64, 1 row: fused 1.000 ms, kernel 2.000 ms" in cpu.lines(times)


def test_a_size_is_measured_once_and_kept(model, monkeypatch):
    measured = []
    monkeypatch.setattr(cpu, "LEAST", 0)
    monkeypatch.setattr(cpu, "measure", lambda modules, rows: measured.append(len(modules)) or {"kernel": 0.1})
    file = cpu.cache_file()
    file.parent.mkdir(parents=True)
    file.write_text('{"damaged": ')
    cpu.tune_products(model, 1)
    assert sum(measured) == 5 * 2 + 1 and len(measured) == len(sizes(model, 1))
    cpu.tune_products(model, 1)
    assert len(measured) == len(sizes(model, 1))
    cpu.tune_products(model, 3)
    assert len(measured) == 2 * len(sizes(model, 1))
    assert set(json.loads(file.read_text())[cpu.where()]) == sizes(model, 1) | sizes(model, 3)
    assert [*file.parent.iterdir()] == [file]


def test_times_of_a_busy_machine_decide_once_and_are_not_kept(model, monkeypatch, capfd):
    monkeypatch.setattr(cpu, "LEAST", 0)
    monkeypatch.setattr(cpu, "_rate", lambda: 64 * 64 * 4 / 0.03)  # the floor of a weight of that size is 0.05 ms
    least = {"kernel": 1.0, "fused": 0.41}
    monkeypatch.setattr(cpu, "measure", lambda modules, rows: dict(least))
    times, slow = cpu.tune_products(model, 1), {"float32 64 x 64, 1 row"}
    assert model.layers[0].attention.wo.products == ("fused", "kernel")
    assert set(json.loads(cpu.cache_file().read_text())[cpu.where()]) == sizes(model, 1) - slow
    assert capfd.readouterr().err == f"warning: this machine is busy: the next start times again {slow.pop()}\n"
    assert "float32 64 x 64, 1 row: fused 0.410 ms, kernel 1.000 ms; 8.2x its floor" in cpu.lines(times)
    least["kernel"] = 0.1
    cpu.tune_products(model, 1)
    assert model.layers[0].attention.wo.products == ("kernel", "kernel") and not capfd.readouterr().err
    assert model.layers[0].feed_forward.w1.products == ("fused", "kernel")  # from the file
    assert set(json.loads(cpu.cache_file().read_text())[cpu.where()]) == sizes(model, 1)


def test_one_form_alone_may_be_measured_on_a_busy_machine():
    assert cpu.disturbed({"kernel": 0.05, "fused": 4.7, "floor": 0.025})
    assert not cpu.disturbed({"kernel": 0.23, "fused": 2.1, "floor": 0.14})  # int8 without AVX-512
    assert not cpu.disturbed({"kernel": 0.05, "fused": 4.7})


@pytest.mark.parametrize(
    "damage",
    (
        "",
        "[]",
        '{"m": 3}',
        '{"m": {"s": {}}}',
        '{"m": {"s": {"fused": "1"}}}',
        '{"m": {"s": {"fused": 0}}}',
        '{"m": {"s": {"best": 1.0}}}',
        "\x00\xff",
        '{"m":' * 100_000,
    ),
)
def test_a_damaged_file_counts_as_empty(tmp_path, damage):
    (tmp_path / "products.json").write_text(damage)
    assert cpu.read(tmp_path / "products.json") == {}


def test_a_user_without_a_home_has_no_file(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", homeless)
    cpu.write(cpu.cache_file(), {"m": {"s": {"fused": 1.0}}})
    assert cpu.read(cpu.cache_file()) == {}


def test_without_a_place_for_the_file_it_measures_each_time(model, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "LEAST", 0)
    monkeypatch.setattr(cpu, "measure", lambda *_: {"kernel": 2.0, "fused": 1.0})
    (tmp_path / "cache").write_text("a file where the folder should be")
    cpu.tune_products(model, 1)
    assert model.layers[0].attention.wo.products == ("fused", "kernel")


def test_small_models_and_large_batches_keep_the_defaults(model, monkeypatch):
    assert cpu.tune_products(model, 1) == {}
    monkeypatch.setattr(cpu, "LEAST", 0)
    assert cpu.tune_products(model, cpu.FEW + 1) == {}
    assert model.output.products == ("mv", "kernel") and not cpu.cache_file().exists()


def test_a_product_can_be_fixed_and_an_unknown_one_is_refused(model, monkeypatch):
    monkeypatch.setenv("KV_FAST_PRODUCT", "fused")
    assert cpu.tune_products(model, 4) == {} and model.output.products == ("mv", "fused")
    monkeypatch.setenv("KV_FAST_PRODUCT", "fastest")
    with pytest.raises(ValueError, match="KV_FAST_PRODUCT=fastest names no product: use auto, kernel, mv, fused"):
        cpu.tune_products(model, 1)


@pytest.mark.parametrize("kind", ("tied", "int4"))
def test_a_head_of_any_kind_is_chosen_for(tmp_path, monkeypatch, kind):
    """A tied one has the table's weights; the other layers of an int4 model have no choice, and count as weights."""
    model = Engine.load(write_random(tmp_path / "model", tie_word_embeddings=kind == "tied"), compile=False).model
    if kind == "int4":
        quantize_modules(model, "int4", 32, embeddings=False)
        monkeypatch.setattr(cpu, "LEAST", 2 * model.output.weight.nbytes)
    else:
        assert model.output.weight.data_ptr() == model.tok_embeddings.weight.data_ptr()
        monkeypatch.setattr(cpu, "LEAST", 0)
    monkeypatch.setattr(cpu, "measure", lambda *_: {"kernel": 2.0, "fused": 1.0})
    times = cpu.tune_products(model, 1)
    assert cpu.describe(model.output, 1) in times and (kind == "tied" or len(times) == 1)
    assert model.output.products == ("fused", "kernel") and not hasattr(model.tok_embeddings, "products")


@pytest.mark.slow
def test_measured_products_change_no_token(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "LEAST", 0)
    monkeypatch.setattr(cpu, "FAR", torch.inf)
    folder = write_random(tmp_path / "model", tie_word_embeddings=True)
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:]]
    expected = Engine.load(folder, compile=False, batch=3).generate(prompts, 12)
    engine = Engine.load(folder, batch=3, max_prompt=len(PROMPT))
    found = engine.generate(prompts, 12)
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert set(engine.stats.products) == sizes(engine.model, 3) | {"float32 attention, 2 x 16, 256 tokens"}
    for times in engine.stats.products.values():
        assert set(times) == {"kernel", "fused", "floor"} and min(times.values()) > 0
    monkeypatch.setattr(cpu, "measure", None)
    engine.use("full", batch=3, max_prompt=40)
    engine._begin_answers(1, None, {})
    engine._warm_up(40)


def test_a_models_size_is_that_of_its_weights_whatever_its_caches_have(tmp_path):
    engine = Engine.load(write_random(tmp_path / "model", num_hidden_layers=4), compile=False)
    for name, method in METHODS.items():
        engine.use(name, 1.0 if method.budgeted else None, max_prompt=1024)
        assert cpu.is_small(engine.model), name


@pytest.mark.parametrize("dtype, other", ((torch.bfloat16, "widened"), (torch.float32, "turned")))
@pytest.mark.parametrize("faster", (False, True))
def test_products_have_another_form_where_that_is_faster(monkeypatch, dtype, other, faster):
    times = {"kernel": 2.0, other: 1.0 if faster else 3.0}
    monkeypatch.setattr(cpu, "BETTER_FORM", found := {})
    monkeypatch.setattr(cpu, "measure_form", lambda dtype: times)
    cpu.choose_form(dtype)
    assert found == {dtype: other if faster else "kernel"}
    monkeypatch.setattr(cpu, "measure_form", None)
    monkeypatch.setattr(cpu, "BETTER_FORM", again := {})
    cpu.choose_form(dtype)  # from the file
    assert again == found
    rows = "few" if other == "turned" else "many"
    assert json.loads(cpu.cache_file().read_text())[cpu.where()] == {f"{cpu.dtype_name(dtype)}, {rows} rows": times}


def test_the_default_form_is_timed_first():
    for times, other in (
        (cpu.measure_form(torch.float16), "widened"),
        (cpu.measure_form(torch.float32), "turned"),
        (cpu.measure_doubling(torch.bfloat16, 8), "twice"),
        (cpu.measure_multiplying(torch.bfloat16, 64), "products"),
    ):
        assert list(times) == ["kernel", other] and min(times.values()) > 0


@pytest.mark.parametrize("faster", ("kernel", "twice"))
def test_the_only_query_of_a_kv_head_is_given_twice_where_that_is_faster(monkeypatch, faster):
    monkeypatch.setattr(inductor, "DOUBLED", set())
    monkeypatch.setattr(cpu, "measure_doubling", lambda *_: {"kernel": 2.0, "twice": 1.0 if faster == "twice" else 3.0})
    cpu.double(torch.bfloat16, 8)
    cpu.double(torch.float32, 8)
    attend, given = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *a, **b: given.append(q.shape[2]) or attend(q, *a, **b)
    )
    for heads, dtype in ((4, torch.bfloat16), (2, torch.bfloat16), (4, torch.float32)):
        q, k, v = (torch.randn(2, n, s, 8, dtype=dtype) for n, s in ((4, 1), (heads, 30), (heads, 30)))
        mask = torch.rand(2, 30) < 0.5
        y = ops.attend(q, k, v, mask)
        expected = attend(q, *(x.repeat_interleave(4 // heads, 1) for x in (k, v)), attn_mask=mask[:, None, None])
        assert y.shape == q.shape and torch.allclose(y, expected, atol=2 * torch.finfo(dtype).eps)
    assert given == [2 if faster == "twice" else 1, 2, 1]  # a group of two is two queries


@pytest.mark.parametrize("faster", ("kernel", "products"))
def test_a_prompt_attends_by_products_where_that_is_faster(monkeypatch, faster):
    monkeypatch.setattr(attention, "MULTIPLIED", found := set())
    monkeypatch.setattr(
        cpu, "measure_multiplying", lambda *_: {"kernel": 2.0, "products": 1 + 2 * (faster == "kernel")}
    )
    for dtype in (torch.bfloat16, torch.float32):
        cpu.multiply(dtype, 64)
    assert found == ({(torch.bfloat16, 64)} if faster == "products" else set())
    assert "products" in str(cpu.read(cpu.cache_file()))  # what is kept can be read


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("size", (inductor.CHUNK * 3, inductor.CHUNK + 72, 40))
@pytest.mark.parametrize("queries", (1, 6))
def test_fused_attention_agrees_to_rounding(as_compiled, monkeypatch, dtype, size, queries):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16).to(dtype) for n in (queries, size, size))
    mask = torch.rand(2, 1, queries, size) < 0.7
    k, v = (x.masked_fill(~mask.any(2)[..., None], 1e4) for x in (k, v))
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=mask)
    kernel = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    monkeypatch.setattr(inductor, "FUSED", {})
    inductor.fuse(dtype, 16, queries)
    y = as_compiled(ops.attend_groups)(q, k, v, mask)
    assert y.dtype == dtype and not torch.equal(y, kernel)  # another sum
    assert (y.double() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("read", (ops.attend_prefix, lambda q, k, v, length: ops.weights(q, k, late(k, length)) @ v))
def test_attention_to_a_growing_cache_is_compiled_once(monkeypatch, read):
    """Inductor compiles sums of more than 4,096 numbers otherwise than shorter ones, if they are sums in one go."""
    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "FUSED", {(torch.float32, 16): 3})
    q, k, v = (torch.randn(1, heads, n, 16) for heads, n in ((6, 1), (2, 4600), (2, 4600)))
    step = torch.compile(
        lambda span, length: read(q, *(x.narrow(2, 0, span.shape[0]) for x in (k, v)), length), fullgraph=True
    )
    for length in (200, 500, 4500, 4598):
        span = inductor.covering(inductor.symbol(4599, q.device), length, 4599)
        inductor.mark_symbols()
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = step(span, torch.tensor([length]))
        assert torch.allclose(found, read(q, k, v, torch.tensor([length])), atol=1e-6)


def late(k: Tensor, length: Tensor) -> Tensor:
    return (torch.arange(k.shape[2]) >= length[:, None])[:, None, None]


@pytest.mark.parametrize("faster", ("kernel", "fused"))
def test_attention_takes_the_form_that_is_faster(model, monkeypatch, faster):
    measured = []

    def measure(plan, rows, tokens):
        measured.append((rows, tokens))
        return {"kernel": 1.0, "fused": 0.5 if faster == "fused" else 2.0}

    monkeypatch.setattr(inductor, "FUSED", {})
    monkeypatch.setattr(cpu, "FAR", torch.inf)
    monkeypatch.setattr(cpu, "measure_attention", measure)
    small = make_plan()
    large = replace(small, max_prompt=cpu.LEAST // (small.n_layer * small.slot_bytes))
    assert cpu.tune_attention(model, small, 1) == {} and not measured  # a small model with a small cache
    for queries in (1, 4, 1):
        found = cpu.tune_attention(model, large, queries)
        assert list(found) == [f"float32 attention, {2 * queries} x 16, 8192 tokens"]
    assert measured == [(2, 8192), (8, 8192)]
    assert inductor.most_fused(torch.float32, 16) == (8 if faster == "fused" else 0)
    monkeypatch.setattr(cpu, "LEAST", 0)  # a large model with a small cache
    for planned, tokens in ((40, 256), (1023, 512), (1024, 1024)):
        cpu.tune_attention(model, replace(small, max_prompt=planned - small.room), 1)
        assert measured[-1] == (2, tokens)
    monkeypatch.setenv("KV_FAST_PRODUCT", "kernel")
    cpu.tune_attention(model, large, 1)
    assert inductor.most_fused(torch.float32, 16) < 2
    monkeypatch.setenv("KV_FAST_PRODUCT", "fused")
    cpu.tune_attention(model, small, 1)
    assert inductor.most_fused(torch.float32, 16) >= 2


@pytest.mark.slow
def test_both_forms_of_attention_are_measured(monkeypatch):
    monkeypatch.setattr(inductor, "FUSED", {(torch.float32, 16): 3})
    monkeypatch.setattr(cpu, "READ", 1)
    times = cpu.measure_attention(make_plan(), 6, 256)
    assert inductor.most_fused(torch.float32, 16) == 3  # what was decided before
    assert list(times) == ["kernel", "fused"] and all(ms > 0 for ms in times.values())


@pytest.mark.slow
def test_narrower_vectors_than_the_cpu_has_are_compiled_right(tmp_path):
    """See findings/torch_avx2_code_on_avx512_selects_wrong.sh; a CPU without AVX-512 has no wider ones."""
    code = """if True:
        import torch
        from runtime.cpu import Parts
        x, y = torch.arange(64), torch.arange(64) - 30
        run, select = Parts(), lambda owner, x, y: torch.where(y >= 0, x, y)
        assert torch.equal(run(select, None, x, y), select(None, x, y))
    """
    caches = {"ATEN_CPU_CAPABILITY": "avx2", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=os.environ | caches, cwd=ROOT, check=True)
