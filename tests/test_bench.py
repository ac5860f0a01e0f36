"""The benchmark: what it counts, writes and refuses. Durations are not tested."""

import ctypes
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from conftest import LLAMA

import bench.__main__ as bench
import kv
from bench import acceptance, contenders, peers, tables
from kv.full import Full
from kv.parts.ranks import ALONE
from kv.parts.scored import Scored
from runtime import device as devices
from terminal.cli import run as run_main

SMALL = ["--context", "96", "--steps", "2", "--repeats", "2", "--no-compile", "--dtype", "float32"]
KEYS = """kv budget options shape context batch dtype quantize ms_per_token p10 p90 tokens_per_s prefill_s compile_s
kv_device_bytes kv_host_bytes step_device_bytes step_host_bytes floor_ms times_floor speedup_vs_full peak_prefill_bytes
peak_decode_bytes graphs""".split()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder that holds only a tiny model's config; the bandwidth is fixed instead of measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e9)
    (tmp_path / "tiny.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 3}))
    return tmp_path


def run(*args) -> None:
    bench.main(["--shape", "tiny.json", *SMALL, *map(str, args)])


def result(*args) -> dict:
    run("--json", "out.json", *args)
    with open("out.json") as file:
        return json.load(file)


def test_every_method_context_batch_and_quantization_is_a_row(here, capsys):
    report = result("--kv", "all", "--budget", "32")
    assert {"machine", "bandwidth_gbs", "commit", "date", "command", "rows"} <= set(report)
    assert len(report["rows"]) == len(kv.METHODS) - 1 and "left out: infllm" in capsys.readouterr().err
    product = ["--budget", "32,0.5", "--context", "64,96", "--batch", "1,2", "--quantize", "none,int4"]
    rows = result("--kv", "full,streaming", *product)["rows"]
    cases = list(itertools.product((None, "int4"), (64, 96), (1, 2), (None, 32, 0.5)))
    assert [(r["quantize"], r["context"], r["batch"], r["budget"]) for r in rows] == cases
    assert {row["speedup_vs_full"] for row in rows if row["kv"] == "full"} == {1.0}
    for row in report["rows"] + rows:
        assert set(KEYS) <= set(row)
        assert 0 < row["p10"] <= row["ms_per_token"] <= row["p90"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms_per_token"])
        assert row["prefill_s"] > 0 and row["peak_decode_bytes"] >= row["weight_bytes"] + row["kv_device_bytes"]


def test_int4_takes_the_largest_group_that_divides_the_models_channels(here):
    (row,) = result("--kv", "full", "--quantize", "int4")["rows"]
    assert row["groupsize"] == 32  # of 64 and 96 channels
    (here / "tiny.json").write_text(json.dumps(LLAMA | {"intermediate_size": 128}))
    (row,) = result("--kv", "full", "--quantize", "int4")["rows"]
    assert row["groupsize"] == 64


def test_every_case_is_checked_before_the_first_is_measured(here, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="groupsize 48 must be even and divide"):
        run("--kv", "full", "--quantize", "none,int4", "--groupsize", "48")
    (here / "tiny.json").write_text(json.dumps(LLAMA | {"intermediate_size": 90}))
    with pytest.raises(ValueError, match="none of .* divides all layers' input channels: use --groupsize 2"):
        run("--kv", "full", "--quantize", "none,int4")


@pytest.mark.parametrize(
    ("tied", "quantize", "embeddings"), ((0, None, 0), (1, None, 0), (0, "int8", 0), (0, "int4", 0), (1, "int4", 1))
)
def test_the_floor_is_the_bytes_of_a_step_over_the_bandwidth(here, tied, quantize, embeddings):
    (here / "tiny.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": bool(tied)}))
    more = ["--quantize", quantize, "--groupsize", 32] if quantize else []
    more += ["--embeddings"] * embeddings
    rows = result("--kv", "full,streaming", "--budget", "16", "--batch", "2", *more)["rows"]
    dim, ffn, vocab, layers, kv_heads, head = 64, 96, 128, 2, 2, 16
    products = layers * (dim * (4 + 2 + 2) * head + dim * dim + 3 * dim * ffn)
    outputs = layers * ((4 + 2 + 2) * head + dim + 2 * ffn + dim)
    groups = layers * ((8 * head + dim + 2 * ffn) * dim // 32 + dim * ffn // 32)
    norms = 4 * (2 * layers + 1) * dim
    linear = {None: 4 * products, "int8": products + 4 * outputs, "int4": products // 2 + 8 * groups}[quantize]
    table = vocab * (dim + 4 if embeddings else 4 * dim)
    for row in rows:
        tokens = 97 if row["kv"] == "full" else 16
        cache = 2 * (2 * layers * kv_heads * tokens * head * 4)
        assert row["step_device_bytes"] == cache
        assert row["floor_ms"] == pytest.approx((linear + norms + table + cache) / 1e9 * 1e3)


def test_the_naive_baseline_computes_what_full_computes(here):
    row = result("--kv", "full", "--baseline", "naive")["rows"]
    assert [r["kv"] for r in row] == ["full", "naive"] and all(r["kernel"] for r in row)
    plan = kv.Plan(2, 4, 2, 16, 64, "default", 1e4, torch.float32, torch.device("cpu"), 2, 50, 10)
    torch.manual_seed(0)
    layers = [Full(plan), contenders.Naive(plan)]
    for row, n in enumerate((50, 9)):
        qkv = [torch.randn(1, heads, n, 16) for heads in (4, 2, 2)]
        for layer in layers:
            layer.prefill(row, *qkv)
    q, k, v = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2))
    pos, active = torch.tensor([50, 9]), torch.tensor([True, True])
    a, b = (layer.decode(q, k, v, pos, active) for layer in layers)
    assert torch.allclose(a, b, atol=1e-5)


def test_peer_transformers_adds_its_dynamic_and_static_caches_and_budgets(here, monkeypatch):
    seen, step = {}, peers.Transformers.step

    def noted(self):
        forward, held = self.forward, int(self.cache.get_seq_length())
        self.forward = lambda **x: seen.setdefault(self.label, (held, int(x["position_ids"]))) and forward(**x)
        step(self)
        self.forward = forward

    monkeypatch.setattr(peers.Transformers, "step", noted)
    rows = result("--kv", "full,streaming", "--budget", "16,200,0.5", "--peer", "transformers")["rows"]
    labels = [f"transformers, {x}" for x in ("dynamic", "static", "dynamic, 16 tokens")]
    assert [r["kv"] for r in rows] == ["full", *["streaming"] * 3, *labels]
    assert all(r["ms_per_token"] > 0 and r["floor_ms"] is None for r in rows[4:])
    assert seen == dict(zip(labels, ((96, 96), (96, 96), (16, 96)), strict=True))


def test_peer_llama_cpp_names_the_packages_it_lacks(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ValueError, match="--peer llama.cpp needs it: pip install gguf"):
        result("--kv", "full", "--peer", "llama.cpp")


def llama_cpp(models: list[gguf.GGUFReader], rows: list[SimpleNamespace]) -> SimpleNamespace:
    """What bench/peers.py calls of llama-cpp-python, which PyPI has as source only: the best next token is the next
    position."""

    def load(path: bytes, how: SimpleNamespace) -> gguf.GGUFReader:
        assert how.use_mmap is False
        models.append(gguf.GGUFReader(path.decode()))
        return models[-1]

    def begin(model: gguf.GGUFReader, plan: SimpleNamespace) -> SimpleNamespace:
        assert model is models[-1] and plan.n_threads == plan.n_threads_batch == torch.get_num_threads()
        rows.append(SimpleNamespace(tokens=[], room=plan.n_ctx, flash=plan.flash_attn_type))
        return rows[-1]

    def logits(row: SimpleNamespace, i: int) -> ctypes.c_void_p:
        assert i == -1
        row.logits = (ctypes.c_float * LLAMA["vocab_size"])()
        row.logits[len(row.tokens) % LLAMA["vocab_size"]] = 1.0
        return ctypes.cast(row.logits, ctypes.POINTER(ctypes.c_float))

    def nothing(*_) -> None:
        pass

    return SimpleNamespace(
        llama_log_callback=lambda function: function,
        llama_log_set=nothing,
        llama_backend_init=nothing,
        llama_model_default_params=SimpleNamespace,
        llama_model_load_from_file=load,
        llama_context_default_params=SimpleNamespace,
        llama_init_from_model=begin,
        llama_batch_get_one=lambda ids, n: ids[:n],
        llama_decode=lambda row, ids: row.tokens.extend(ids) or 0,
        llama_get_logits_ith=logits,
    )


@pytest.mark.parametrize(("quantize", "kind"), (("none", "F32"), ("int8", "Q8_0"), ("int4", "Q4_0")))
def test_peer_llama_cpp_runs_the_same_shape(here, monkeypatch, quantize, kind):
    models, ran, found = [], [], importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "llama_cpp", llama_cpp(models, ran))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "llama_cpp" or found(name))
    rows = result("--kv", "full", "--peer", "llama.cpp", "--quantize", quantize, "--groupsize", "32")["rows"]
    assert [r["kv"] for r in rows] == ["full", "llama.cpp, flash", "llama.cpp"]
    assert all(r["ms_per_token"] > 0 and r["prefill_s"] > 0 and r["floor_ms"] is None for r in rows[1:])
    assert [row.flash for row in ran] == [1, 0]
    for row in ran:
        assert 96 + 2 <= len(row.tokens) <= row.room < 96 + 512
        assert row.tokens[96:] == [i % 128 for i in range(96, len(row.tokens))]
    sizes = {"attn_q": [64, 64], "attn_k": [64, 32], "attn_v": [64, 32], "attn_output": [64, 64]}
    sizes |= {"ffn_gate": [64, 96], "ffn_up": [64, 96], "ffn_down": [96, 64]}
    expected = {f"blk.{layer}.{name}.weight": size for layer in range(3) for name, size in sizes.items()}
    expected |= {"token_embd.weight": [64, 128], "output.weight": [64, 128]}
    about = {"block_count": 3, "head_count": 4, "head_count_kv": 2, "vocab_size": 128}
    for model in models:
        weights = [x for x in model.tensors if "norm" not in x.name]
        assert {x.name: x.shape.tolist() for x in weights} == expected
        assert {x.tensor_type.name for x in weights} == {kind}
        fields = {name.removeprefix("llama.").replace("attention.", ""): x for name, x in model.fields.items()}
        assert {name: fields[name].contents() for name in about} == about


def test_rounds_of_speculation_are_rows_beside_full_and_the_plain_draft(here, capsys):
    flags = "--kv", "full,streaming,h2o", "--budget", "16", "--speculate", "1,3", "--accept", "0.5"
    rows = result(*flags)["rows"]
    full, draft, _, one, three = rows
    assert [(r["kv"], r["speculate"]) for r in (one, three)] == [("streaming", 1), ("streaming", 3)]
    assert one["round_ms"] == pytest.approx(1.5 * one["ms_per_token"])
    assert three["round_ms"] == pytest.approx(1.875 * three["ms_per_token"])
    weights = full["step_weight_bytes"]
    drafts, verified = 3 * draft["step_device_bytes"], full["step_device_bytes"]
    assert three["step_device_bytes"] == pytest.approx(drafts + verified, rel=0.1)  # it plans more tokens
    assert three["floor_ms"] == pytest.approx((4 * weights + three["step_device_bytes"]) / 1e6 / 1.875)
    out, err = capsys.readouterr()
    assert "left out: h2o cannot draft" in err and "break-even" in out and "streaming 16, drafts 3" in out


@pytest.mark.slow
def test_acceptance_counts_the_drafts_that_the_full_cache_accepts(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    def ask(*more) -> None:
        flags = ["--length", "400", "--tokens", "6", "--samples", "2", "--budget", "32", "--json", str(file)]
        acceptance.main(["--checkpoint", str(tiny_checkpoint), "--kv", "quest:page=4:skip_layers=0", *flags, *more])

    def rows() -> list[dict]:
        return json.loads(file.read_text())["rows"]

    file = tmp_path / "out.json"
    ask("--kv", "quest:page=4:skip_layers=0,full:bits=8", "--speculate", "3")
    assert [(r["kv"], r["speculate"]) for r in rows()] == [("quest", 3), ("full", 3)]
    for row in rows():
        assert all(0 <= x["accepted"] <= row["speculate"] and x["same"] == 2 for x in row["kinds"].values())
        assert 0 < row["draft_bytes"] < row["full_bytes"]
    assert all(x["accepted"] > 1 for x in rows()[1]["kinds"].values())  # 8 bits of every token draft well
    assert "accepted, free text" in capsys.readouterr().out
    ask("--temperature", "5", "--samples", "1")
    assert rows()[0]["kinds"]["free text"]["same"] == 1
    measured = rows()

    def interrupted(*_):
        yield measured[0]
        raise KeyboardInterrupt

    for more, message in ((["--kv", "quest,h2o"], "h2o cannot draft"), (["--samples", "0"], "--samples must be")):
        with pytest.raises(ValueError, match=message):
            ask(*more)
    monkeypatch.setattr(acceptance, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert rows() == measured


def test_a_follow_up_in_steps_takes_a_steps_time_for_each_token():
    row = {"kv": "full", "budget": None, "options": {}, "context": 100, "extend": 20}
    line = tables.extensions([row | {"extend_ms": 7.0, "ms_per_token": 3.0, "prefill_s": 0.5}]).splitlines()[-1]
    assert line.split() == ["full", "100", "20", "7", "60", "600"]


@pytest.mark.slow
def test_every_run_is_appended_to_the_results_and_plotted(here, capsys):
    for _ in range(2):
        run("--kv", "full,streaming", "--budget", "16,32", "--plot", "out.png", "--profile", "trace.json", "--json")
    found = [json.loads(line) for line in open("bench-results.jsonl")]
    assert len(found) == 2 and found[0]["rows"]
    assert (here / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((here / "trace.json").read_text())["traceEvents"]
    out, err = capsys.readouterr()
    assert [json.loads(line)["machine"] for line in out.splitlines()] == [found[0]["machine"]] * 2
    assert "x floor" in err


@pytest.mark.slow
def test_contenders_side_by_side_give_the_same_rows(here, capfd):
    """Each in a process of its own; one that cannot be measured stops no other."""
    args = ("--kv", "full,streaming", "--budget", "2,32", "--quantize", "none,int8")
    expected, found = (result(*args, *more)["rows"] for more in ([], ["--side-by-side"]))
    told = capfd.readouterr().err
    for rows in (expected, found):
        rows.sort(key=lambda row: (row["quantize"] or "", row["kv"]))
        assert [row["speedup_vs_full"] for row in rows if row["kv"] == "full"] == [1, 1]
    same = ("kv", "budget", "quantize", "step_device_bytes", "kv_device_bytes", "weight_bytes", "floor_ms")
    assert [[row[key] for key in same] for row in found] == [[row[key] for key in same] for row in expected]
    assert [row.keys() for row in found] == [row.keys() for row in expected] and len(found) == 4
    assert told.count("at least 5 tokens") == 4  # streaming's smallest budget: twice each


@pytest.mark.slow
def test_contenders_side_by_side_have_as_many_rows_as_their_caches_may_take(here, capfd, monkeypatch):
    args = ("--kv", "full,streaming", "--budget", "32", "--batch", "max", "--cache", ".001", "--no-prefill")
    full, streaming = sorted(result(*args, "--no-compile", "--side-by-side")["rows"], key=lambda row: row["kv"])
    for row in (full, streaming):
        assert row["kv_device_bytes"] < 1e6 < row["kv_device_bytes"] * (1 + 2 / row["batch"]) + 3e5, row["batch"]
    assert streaming["batch"] > full["batch"]
    assert streaming["speedup_vs_full"] == pytest.approx(streaming["tokens_per_s"] / full["tokens_per_s"])
    quantized = "--kv full --quantize int8 --batch max --no-compile --no-prefill --side-by-side".split()
    monkeypatch.setattr("bench.side_by_side.SPARE", 0)
    monkeypatch.setattr("bench.side_by_side.free_bytes", lambda device: 2 * 10**6)
    (row,) = result(*quantized)["rows"]
    assert row["kv_device_bytes"] + row["weight_bytes"] < 2e6  # a process has its own quantized weights
    args = ("--kv", "full", "--batch", "max", "--cache", "1e-6", "--side-by-side")
    with pytest.raises(ValueError, match="nothing was measured"):
        run(*args)
    assert "left out: full does not fit even with one row" in capfd.readouterr().err


def test_contenders_after_the_limit_are_left_out(here, monkeypatch, capsys):
    clock = itertools.count(0, 100)
    monkeypatch.setattr("bench.measure.time", SimpleNamespace(monotonic=lambda: next(clock)))
    rows = result("--kv", "full,streaming,sparq", "--budget", "32", "--limit", "250")["rows"]
    assert [row["kv"] for row in rows] == ["full", "streaming"]
    assert "left out: contenders after --limit 250" in capsys.readouterr().err


def test_a_memory_cap_is_respected(here, capsys, monkeypatch):
    monkeypatch.setattr(devices, "_caps", {})
    with pytest.raises(ValueError, match="nothing was measured"):
        run("--kv", "full", "--memory-cap", "0.001")
    assert "free" in capsys.readouterr().err


def test_a_memory_cap_below_what_the_process_holds_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(devices, "_caps", {})
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: bench.main("--kv full --memory-cap 1e-9 --results /dev/null".split()))
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and "cpu has 0.000 GB free" in line and "--memory-cap" in line


def test_whole_generations_are_timed_with_as_many_rows_as_fit(here, monkeypatch, capsys):
    more = ["--generate", "64", "--context", "32", "--budget", "32", "--plot", "out.png"]
    rows = result("--kv", "full,h2o,d2o", *more, "--batch", "2")["rows"]
    assert [(r["kv"], r["batch"], r["new"]) for r in rows] == [("full", 2, 64), ("h2o", 2, 64), ("d2o", 2, 64)]
    assert all(0 < r["tokens_per_s"] and 0 < r["ceiling_tokens_per_s"] for r in rows)
    assert all(r["lengths"][0] == 32 and r["lengths"][-1] == 95 and len(r["ms"]) == len(r["lengths"]) for r in rows)
    assert (here / "out.png").read_bytes()[:4] == b"\x89PNG" and "ceiling" in capsys.readouterr().out
    monkeypatch.setattr("bench.measure.free_bytes", lambda device: 2 * 10**6)
    largest = {r["kv"]: r["batch"] for r in result("--kv", "full,h2o", *more, "--batch", "max")["rows"]}
    assert largest["h2o"] > 1.5 * largest["full"] > 0
    for name, batch in largest.items():
        sizes = 32, 68, False, False, ALONE, batch + 1
        case = contenders.Case("", bench.shape_config("tiny.json"), torch.float32, torch.device("cpu"), 1e9, *sizes)
        budget = None if name == "full" else 32
        one_more = sum(kv.planned_bytes(name, case.plan(), budget, {}))
        assert one_more < 2 * 10**6 * 1.1 and one_more + (batch + 1) * 12 * 128 + 8 * 32 * 64 * 4 > 2 * 10**6


@pytest.mark.parametrize("end, code", ((KeyboardInterrupt(), 130), (ValueError("broken"), 2)))
def test_finished_rows_survive_an_interrupt_or_a_failure(here, monkeypatch, capsys, end, code):
    measure, seen = bench.measure, []

    def twice(*args):
        if len(seen) == 2:
            raise end
        seen.append([json.loads(line)["rows"] for line in open("bench-results.jsonl")] if seen else [])
        return measure(*args)

    monkeypatch.setattr(bench, "measure", twice)
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: run("--kv", "full", "--context", "64,80,96", "--json", "out.json", "--plot", "out.png"))
    out, err = capsys.readouterr()
    assert stop.value.code == code and err.splitlines()[-1] in ("interrupted", "error: broken")
    assert [line.split()[3] for line in out.splitlines() if line.startswith("full  ")] == ["64", "80"]
    assert [r["context"] for r in json.load(open("out.json"))["rows"]] == [64, 80]
    assert [row["context"] for (row,) in seen[1]] == [64]  # written as soon as it was measured
    assert len(open("bench-results.jsonl").readlines()) == 2 and (here / "out.png").exists()


def test_the_default_results_file_is_checked_before_the_work(here):
    (here / "bench-results.jsonl").mkdir()
    with pytest.raises(ValueError, match="--results bench-results.jsonl: not a file"):
        run("--kv", "full")


def test_a_generations_tokens_pay_for_the_room_that_rows_make(here, monkeypatch):
    compress, done = Scored.compress, []
    monkeypatch.setattr(Scored, "compress", lambda *args: done.append(compress(*args)))

    def compressions(what) -> int:
        before = len(done)
        what()
        return len(done) - before

    for module in ("measure", "contenders"):
        monkeypatch.setattr(f"bench.{module}.seconds", compressions)
    flags = ["--generate", "400", "--context", "32", "--budget", "16", "--batch", "2", "--steps", "3"]
    (row,) = result("--kv", "keydiff:every=8", *flags)["rows"]
    assert row["ms_per_token"] == pytest.approx(1e3 * 2 * 3 / 8, rel=0.05)  # 2 rows, 3 layers


@pytest.mark.parametrize(
    ("flags", "words"),
    (
        ("--shape gpt-2", "gpt-2 llama-3.1-8b"),
        ("--kv lru", "lru streaming"),
        ("--quantize int3", "int3 int8"),
        ("--quantize int4 --groupsize 48", "48 --groupsize 32"),
        ("--embeddings", "--embeddings --quantize"),
        ("--context many", "--context commas"),
        ("--context 0", "--context"),
        ("--steps 0", "--steps"),
        ("--json no/such/folder.json", "--json"),
        ("--results /proc/r", "--results written"),
        ("--budget=", "cam --budget"),
        ("--accept 1.5", "--accept 1.5"),
        ("--speculate 0", "--speculate positive"),
        ("--speculate 2 --generate 5", "--speculate --generate"),
        ("--side-by-side --generate 5", "--side-by-side --generate"),
        ("--batch max", "--batch --generate --side-by-side"),
        ("--cache 1", "--cache --batch max"),
        ("--cache 0 --batch max --side-by-side", "--cache 0"),
        ("--memory-cap -1", "--memory-cap -1"),
        ("--peer transformers --quantize none,int8", "--peer --quantize"),
    ),
)
def test_mistakes_are_refused_in_one_line(here, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run_main(lambda: run(*flags.split()))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and all(word in line for word in words.split())


def test_known_shapes_have_the_sizes_of_their_models():
    sizes = {name: contenders.from_hf(config) for name, config in bench.SHAPES.items()}
    with torch.device("meta"):
        count = {name: sum(p.numel() for p in contenders.Transformer(c).parameters()) for name, c in sizes.items()}
    expected = {  # as their model cards state
        "llama-3.1-8b": 8.03e9,
        "llama-3.2-1b": 1.24e9,
        "mistral-7b": 7.24e9,
        "yi-9b": 8.83e9,
        "yi-6b": 6.06e9,
        "llama-2-7b": 6.74e9,
        "llama-160m": 0.153e9,
    }
    assert count == {name: pytest.approx(n, rel=0.005) for name, n in expected.items()}


def test_bench_sh_passes_its_arguments_on(tmp_path):
    """Runs a copy of bench.sh in a folder whose make and python only print what they are asked to do."""
    (tmp_path / "bench.sh").write_text((Path(bench.__file__).parents[1] / "bench.sh").read_text())
    (tmp_path / "Makefile").write_text(".venv/requirements:\n\t@echo installed\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)

    def lines(*args):
        return subprocess.run(["bash", tmp_path / "bench.sh", *args], capture_output=True, text=True).stdout.split("\n")

    assert lines("--steps", "3") == ["installed", "-m bench --steps 3", ""]
    _, answers, fidelity, speed, *_, table, _ = lines("bits", tmp_path / "out", "DIR")
    methods = answers.split(" --kv ")[1].split()[0]
    assert all(f" --kv {methods} " in line for line in (fidelity, speed)) and table.startswith("-m bench.compare")
    assert {"full", "kivi:bits=2", "omnikv:bits=4"} <= set(methods.split(","))
