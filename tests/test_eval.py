"""eval.py on a random checkpoint: what it runs, resumes, refuses and writes; the scores themselves mean nothing."""

import json
import shutil

import pytest
import torch
from conftest import slow

import eval as evaluation
from engine import Engine, Row
from tasks import Question, Sample, Task, plot
from tasks.prefill_once import prefill_once
from tasks.registry import TASKS
from terminal import cli


@pytest.fixture(scope="module")
def result(tiny_checkpoint, tmp_path_factory):
    """The JSON file of a run over two methods, a budget that is too small, and every kind of task."""
    out = tmp_path_factory.mktemp("eval") / "out.json"
    arguments(tiny_checkpoint, "--json", out, "--samples", 2, "--questions", 3, "--batch", 2, "--plot", f"{out}.png")
    return out


def arguments(checkpoint, *more, tasks="niah_multikey_1,two_stage,needle,fidelity,perplexity", kv="full,streaming"):
    run = ["--checkpoint", checkpoint, "--tasks", tasks, "--length", 600, "--kv", kv, "--budget", "64,3", *more]
    evaluation.main([str(a) for a in run])


def rows(out):
    return {(r["kv"], r["budget"], r["task"]): r for r in json.loads(out.read_text())["rows"]}


def test_every_method_budget_and_task_is_a_row_with_the_bytes_it_takes(result):
    found = rows(result)
    budgets = [("full", None), ("streaming", 64), ("streaming", 3)]
    tasks = ["niah_multikey_1", "two_stage", "needle", "fidelity", "perplexity"]
    assert set(found) == {(kv, budget, task) for kv, budget in budgets for task in tasks}
    full, small, none = (found[kv, budget, "needle"] for kv, budget in budgets)
    assert full["n"] == small["n"] == 2 and full["share_of_full"] == 1
    assert small["kv_device_bytes"] < full["kv_device_bytes"] / 5 and small["share_of_full"] < 0.2
    assert small["step_device_bytes"] == 2 * 2 * 64 * 2 * 16 * 4  # layers, KV heads, slots, K and V, head dim, fp32
    assert none["score"] is None and none["n"] == 0 and "at least 5" in none["why"]  # below the minimum
    assert result.with_name(result.name + ".png").read_bytes()[:4] == b"\x89PNG"


def test_later_questions_are_scored_apart_from_the_first(result):
    samples = [s for s in json.loads(result.read_text())["samples"] if s["task"] == "niah_multikey_1"]
    assert all(len(s["later"]) == 2 and s["answer"] != s["later"][0]["answer"] for s in samples)
    assert rows(result)["full", None, "niah_multikey_1"]["later"] is not None
    assert rows(result)["full", None, "needle"]["later"] is None


def test_fidelity_of_the_full_cache_to_itself_is_perfect_and_of_a_small_one_is_not(result):
    found = rows(result)
    assert found["full", None, "fidelity"]["score"] == 100 and found["full", None, "fidelity"]["kl"] == 0
    assert found["streaming", 64, "fidelity"]["kl"] > 0


def excerpt(engine: Engine, i: int) -> tuple[list[int], list[int]]:
    """The prompt and the 128 forced tokens of the i-th forced text of 600 tokens."""
    bos, *ids = engine.encode(evaluation.shipped_haystack())
    own = ids[i * 599 : (i + 1) * 599]
    return [bos, *own[:-128]], own[-128:]


def samples_of(out, task: str, kv: str) -> list[dict]:
    return [s for s in json.loads(out.read_text())["samples"] if (s["task"], s["kv"]) == (task, kv)]


def test_perplexity_is_computed_through_the_decode_path(result, tiny_checkpoint):
    engine = Engine.load(tiny_checkpoint, compile=False, room=128)
    for i, sample in enumerate(samples_of(result, "perplexity", "full")):
        prompt, forced = excerpt(engine, i)
        logits = engine.logits(prompt, forced)
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(forced)).item()
        assert sample["nll"] == pytest.approx(expected, rel=1e-5) and sample["prompt_tokens"] == len(prompt) == 472


@pytest.mark.slow
def test_fidelity_leaves_out_the_token_that_prefill_predicts(result, tiny_checkpoint):
    engines = [
        Engine.load(tiny_checkpoint, *kv, compile=False, max_prompt=472, room=128)
        for kv in (("full",), ("streaming", 64))
    ]
    for i, sample in enumerate(samples_of(result, "fidelity", "streaming")):
        full, small = (engine.logits(*excerpt(engine, i)).log_softmax(-1) for engine in engines)
        rows = (full.exp() * (full - small)).sum(-1)
        assert rows[0].abs() < 1e-6 and sample["kl"] == pytest.approx(rows[1:].mean().item(), rel=1e-4)
        assert sample["kl_spans"] == pytest.approx([span.mean().item() for span in rows[1:].tensor_split(8)], rel=1e-4)


@pytest.mark.slow
def test_a_rerun_continues_where_the_run_was_stopped(result, tiny_checkpoint, monkeypatch):
    """From half the progress and a truncated line, only what is missing is computed; the result is the same."""
    before = json.loads(result.read_text())
    progress = result.with_name(result.name + ".progress.jsonl")
    lines = progress.read_text().splitlines(keepends=True)
    progress.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:40])
    started, start = [], Engine.start

    def spy(self, prompts):
        started.extend(prompts)
        return start(self, prompts)

    monkeypatch.setattr(Engine, "start", spy)
    arguments(tiny_checkpoint, "--json", result, "--samples", 2, "--questions", 3, "--batch", 2)
    after = json.loads(result.read_text())
    assert after["rows"] == before["rows"] and after["samples"] == before["samples"]
    assert 0 < len(started) < 12
    length = len(progress.read_text().splitlines())
    arguments(tiny_checkpoint, "--json", result, "--samples", 2, "--questions", 3, "--batch", 2)
    assert len(progress.read_text().splitlines()) == length == len(lines) + 1  # nothing was computed twice


def test_saved_answers_are_not_those_of_another_plan(tiny_checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    for tokens in (128, 512, 512):
        monkeypatch.setattr(evaluation, "ROUND", tokens)
        arguments(tiny_checkpoint, "--json", out, "--samples", 1, tasks="niah_single_1", kv="full")
    assert len(out.with_name("out.json.progress.jsonl").read_text().splitlines()) == 2


def perplexities(folder, out, *flags) -> list[float]:
    """The perplexity that a resumed run reports, then those of all lines of its progress."""
    arguments(folder, "--json", out, "--samples", 1, *flags, tasks="perplexity", kv="full")
    lines = out.with_name(out.name + ".progress.jsonl").read_text().splitlines()
    return [rows(out)["full", None, "perplexity"]["score"], *(json.loads(x)["result"]["score"] for x in lines)]


@pytest.mark.slow
def test_changed_weights_profile_or_code_invalidate_saved_answers(tiny_checkpoint, tmp_path, monkeypatch):
    folder, out = shutil.copytree(tiny_checkpoint, tmp_path / "own"), tmp_path / "out.json"
    first = perplexities(folder, out)
    assert len(first) == 2 and perplexities(folder, out) == first
    weights = bytearray((folder / "model.safetensors").read_bytes())
    for byte in range(1, 40000, 4):
        weights[-byte] ^= 128  # flips the signs of the last numbers
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    config["kv_fast"]["weights"] = "another"  # as the converter would write it
    (folder / "config.json").write_text(json.dumps(config))
    changed = perplexities(folder, out)
    assert len(changed) == 3 and changed[0] == changed[2] != first[0]
    assert perplexities(shutil.copytree(folder, tmp_path / "moved"), out) == changed  # the location does not matter
    (folder / "kv_profile.json").write_text(json.dumps({"filter_layers": [1]}))
    assert len(perplexities(folder, out)) == 4 == len(perplexities(folder, out))
    monkeypatch.setattr(evaluation, "code", lambda: "another")
    assert len(perplexities(folder, out)) == 5
    assert len(perplexities(folder, out, "--chunk", 99)) == 6


def test_the_hash_of_the_code_covers_the_methods_the_engine_and_the_tasks(tmp_path):
    root = tmp_path / "root"
    for room in (*evaluation.ROOMS, "bench", "terminal"):
        shutil.copytree(evaluation.ROOT / room, root / room)
    for file in evaluation.ROOT.glob("*.py"):
        shutil.copy(file, root)
    assert evaluation.code(root) == evaluation.code()
    counted = "kv/h2o.py kv/parts/ops.py engine.py runtime/cpu.py text/tokenizer.py tasks/ruler.py eval.py kv/new.py"
    for name in (*counted.split(), "bench/measure.py", "calibrate.py", "terminal/report.py"):
        before = evaluation.code(root)
        with open(root / name, "a") as file:
            file.write("# more\n")
        assert (evaluation.code(root) != before) == (name in counted.split()), name


def test_damaged_progress_is_ignored(tiny_checkpoint, tmp_path):
    out = tmp_path / "out.json"
    (progress := out.with_name("out.json.progress.jsonl")).write_text("[" * 100_000 + '\n[1]\n{"key": []}\n')
    arguments(tiny_checkpoint, "--json", out, "--samples", 1, tasks="perplexity", kv="full")
    assert len(progress.read_text().splitlines()) == 4


def test_divergences_alone_are_drawn_over_the_forced_tokens(result, tmp_path, monkeypatch):
    found, lines = rows(result), []
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda axis, **_: lines.extend(axis.lines))
    plot.draw(list(row for key, row in found.items() if key[2] == "fidelity"), [], str(tmp_path / "kl.png"))
    [line] = lines  # the full cache does not diverge, and one budget is too small
    assert list(line.get_ydata()) == found["streaming", 64, "fidelity"]["kl_spans"]
    assert line.get_xdata()[0] == 100 / 16 and (tmp_path / "kl.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no result is an accuracy or a divergence"):
        plot.draw([{"first": None}], [], "none.png")


@pytest.fixture
def fed(monkeypatch):
    """What rows are given, in order: ("start", prompt), ("fork", None), ("ask", question). Answers have 2 tokens."""
    calls, start, ask, fork = [], Engine.start, Engine.ask, Row.fork

    def spy_start(self, prompts):
        calls.extend(("start", prompt) for prompt in prompts)
        return start(self, prompts)

    def spy_fork(self):
        calls.append(("fork", None))
        return fork(self)

    def spy_ask(self, rows, questions, *_, **how):
        calls.extend(("ask", question) for question in questions or [None] * len(rows))
        return ask(self, rows, questions, 2, **how)

    for kind, name, spy in ((Engine, "start", spy_start), (Row, "fork", spy_fork), (Engine, "ask", spy_ask)):
        monkeypatch.setattr(kind, name, spy)
    return calls


def test_blind_prefills_the_text_alone_and_feeds_every_question(tiny_checkpoint, tmp_path, fed):
    arguments(tiny_checkpoint, "--samples", 1, "--blind", "--json", tmp_path / "o", tasks="niah_single_2", kv="full")
    (started, prompt), (asked, question) = fed
    assert (started, asked) == ("start", "ask")
    assert "What is the special magic number" in question and "What is" not in prompt
    assert json.loads((tmp_path / "o").read_text())["samples"][0]["prompt_tokens"] < 600 - 128


ORDERS = {1: "start fork ask fork ask fork ask", 2: "start fork fork ask ask fork ask"}


@pytest.mark.parametrize("batch", ORDERS)
def test_fork_asks_every_question_of_a_copy_of_the_text(tiny_checkpoint, tmp_path, fed, batch):
    common = ("--samples", 1, "--questions", 3, "--fork", "--batch", batch, "--json", tmp_path / "o")
    arguments(tiny_checkpoint, *common, tasks="niah_multikey_1", kv="full")
    assert " ".join(call for call, _ in fed) == ORDERS[batch]
    (_, text), *_ = fed
    questions = [question for call, question in fed if call == "ask"]
    assert all("special magic" in q and "special magic number" in text and q not in text for q in questions)
    (sample,) = json.loads((tmp_path / "o").read_text())["samples"]
    engine = Engine.load(tiny_checkpoint, compile=False)
    (completion,) = engine.generate(engine.encode(text) + engine.encode(questions[2], bos=False), 2)
    assert sample["later"][1]["prediction"] == completion.text  # as if no other question had been asked


def test_questions_and_their_answers_follow_one_another_in_a_row(tiny_checkpoint, tmp_path, fed):
    arguments(tiny_checkpoint, "--samples", 3, "--questions", 2, "--batch", 2, tasks="niah_multikey_1", kv="full")
    assert " ".join(call for call, _ in fed) == "start start ask ask ask ask start ask ask"
    assert [question is None for call, question in fed if call == "ask"] == [True, True, False, False, True, False]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}({{ m.role }}) {{ m.content | trim }}\n"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}(assistant)"
)


@pytest.fixture(scope="module")
def chat_checkpoint(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_chat_puts_questions_into_turns(chat_checkpoint, tmp_path, fed, capsys):
    run = ["--samples", 1, "--questions", 2, "--json", tmp_path / "o", "--chat"]
    arguments(chat_checkpoint, *run, tasks="niah_multikey_1,needle", kv="full")
    tokenizer = Engine.load(chat_checkpoint, compile=False).tokenizer
    chats = [given if given is None or isinstance(given, str) else tokenizer.decode(given) for _, given in fed]
    (first,) = (given for given in chats if given and given.startswith("(user) A special magic number is hidden"))
    later = chats[chats.index(first) + 2]
    assert "mentioned in the provided text?\n(assistant) The special magic number for" in first
    assert "(user) What is the special magic" in later and "?\n(assistant) The special magic number for" in later
    assert any(given and "vault?\n(assistant)Answer: The access code of" in given for given in chats)
    found = json.loads((tmp_path / "o").read_text())
    assert {r["task"]: r["chat"] for r in found["rows"]} == {"niah_multikey_1": True, "needle": True}
    assert found["args"]["chat"] is True
    assert all(s["prompt_tokens"] <= 600 for s in found["samples"])
    assert "in the checkpoint's chat template: niah_multikey_1, needle\n" in capsys.readouterr().out


def test_chat_and_blind_split_the_first_turn_where_the_question_begins(chat_checkpoint, tmp_path, fed):
    run = ["--samples", 1, "--questions", 2, "--json", tmp_path / "o"]
    arguments(chat_checkpoint, *run, "--chat", tasks="niah_multikey_1", kv="full")
    arguments(chat_checkpoint, *run, "--chat", "--blind", tasks="niah_multikey_1", kv="full")
    (_, whole), (_, none), (_, later), (_, text), (_, question), (_, also_later) = fed
    decode = Engine.load(chat_checkpoint, compile=False).tokenizer.decode
    assert text + question == whole and also_later == later and none is None
    assert "What is the special" not in decode(text) and "What is the special" in decode(question)
    assert len(text) > len(question)


def test_a_score_is_the_mean_over_the_questions(tiny_checkpoint, tmp_path, monkeypatch):
    sample = Sample("one two three", tuple(Question(f" {i}?", (str(i),)) for i in range(4)))
    task = Task("odd", 3, lambda setting, index: sample, lambda answer, q: 100.0 * (q.answers[0] in "13"))
    monkeypatch.setitem(TASKS, "odd", task)
    arguments(tiny_checkpoint, "--samples", 2, "--questions", 4, "--json", tmp_path / "o", tasks="odd", kv="full")
    row = rows(tmp_path / "o")["full", None, "odd"]
    assert (row["score"], row["first"], row["later"]) == (50, 0, pytest.approx(200 / 3))


def test_a_sample_that_cannot_be_asked_fails_alone_and_keeps_its_number(tiny_checkpoint, tmp_path, monkeypatch):
    def sample(recipe, index):
        if index == 1:
            raise ValueError("no needle")
        return Sample("x " * (900 if index == 2 else index + 1), (Question("?", ("x",)),))

    monkeypatch.setitem(TASKS, "odd", Task("odd", 3, sample, lambda answer, q: 0.0))
    failed = r"^2 samples failed.*: odd@600 1 \(no needle\), odd@600 2 \(the prompt has"
    for _ in range(2):  # the second run takes its answers from the first one's progress
        with pytest.raises(ValueError, match=failed):
            arguments(tiny_checkpoint, "--samples", 4, "--json", tmp_path / "o", tasks="odd", kv="full,streaming")
        found = json.loads((tmp_path / "o").read_text())
        assert [(row["n"], row["kv"]) for row in found["rows"]] == [(2, "full"), (2, "streaming"), (0, "streaming")]
        assert [(s["index"], s["prompt_tokens"] < 20) for s in found["samples"]] == [(0, True), (3, True)] * 2
        assert [failed["index"] for failed in found["failed"]] == [1, 2]


@pytest.mark.parametrize(
    "more, message",
    (
        (["--tasks", "nothing"], "unknown task 'nothing'; there are: ruler"),
        (["--kv", "nothing"], "unknown KV method 'nothing'"),
        (["--kv", "streaming:sinks"], "write options as name:option=value"),
        (["--kv", "streaming:size=4"], "no option 'size'; it has"),
        (["--kv", "full:bits=4:bits=8"], "the option bits is given twice: 4 and 8"),
        (["--kv", "streaming", "--budget", ""], "needs --budget"),
        (["--budget", "many"], "numbers with commas"),
        (["--kv", "full,streaming", "--budget", "64,3,1.5"], "a share between 0 and 1, not 1.5"),
        (["--kv", "full,tova", "--speculate", "2"], "tova cannot draft"),
        (["--length", "0"], "must be positive"),
        (["--length", "99999"], "the model's context is"),
        (["--length", "150"], "niah_single_1: a length of 150 tokens is too short"),
        (["--samples", "0"], "--samples must be at least 1"),
        (["--chunk", "0"], "--chunk must be at least 1"),
        (["--kv", "full,d2o", "--chunk", "100"], "d2o with these options needs a whole prompt at once: leave out"),
        (["--tasks", "qa_1"], "--data"),
        (["--progress", "/nowhere/progress"], "not a file in an existing folder"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--haystack", "/nowhere"], "/nowhere"),
        (["--json", "/nowhere/out.json"], "not a file in an existing folder"),
        (["--plot", "out.foo"], "--plot out.foo: the format is unknown; known: "),
        (["--chat"], "no chat template"),
        (["--text", ""], "cannot read the file ''"),
        (["--text", "/dev/null"], "--text /dev/null: the text is empty"),
    ),
)
def test_mistakes_are_refused_before_anything_runs(tiny_checkpoint, more, message, monkeypatch):
    monkeypatch.setattr(Engine, "start", lambda *_: pytest.fail("started"))
    base = ["--checkpoint", str(tiny_checkpoint), "--tasks", "niah_single_1", "--length", "512", "--budget", "64"]
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        evaluation.main([*base, *more])
    assert message in " ".join(str(error.value).split())


SHARED = "full streaming rocketkv roco d2o pqcache infllm:block=8 simlayer:recent=16 kivi omnikv:filter_layers=0"


@pytest.mark.parametrize("kv", ["snapkv", "h2o", "tailorkv", *map(slow, SHARED.split())])
def test_a_method_given_a_shared_prompt_decodes_as_after_its_own_prefill(kv, text_checkpoint):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in (90, 150)]
    forced = [prompts[1][:5], prompts[0][:9]]
    methods = cli.choices(kv, [] if kv in ("full", "kivi") else [64, 0.3])
    logits = []
    for shared in (False, True):
        engine = Engine.load(text_checkpoint, compile=False, max_prompt=300, batch=2)
        if shared:
            prefill_once(engine)
            engine.logits(prompts, forced[::-1])  # of the full cache; from now on the prompts are known
            engine.model.layers[0].prefill = None  # no prompt runs through the model again
        for method in methods:
            engine.use(method.kv, method.budget, method.options, 2, 300, 256)
            logits.append(engine.logits(prompts, forced))
    for own, shared in zip(logits[: len(methods)], logits[len(methods) :], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, shared, strict=True))


@pytest.mark.parametrize("kv", ["rocketkv", *map(slow, ("full", "h2o", "full:bits=4"))])
def test_what_prompts_have_in_common_runs_through_the_model_once(kv, text_checkpoint, monkeypatch):
    text = torch.randint(3, 1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [text[:150], text[:160], text[:120], text[:155] + text[:9], text[:90] + text[:40]]
    prompts += [text[:130] + text[:50], text[:70] + text[100:200]]
    forced = [text[:5]] * len(prompts)
    method, ran = cli.choices(kv, [64] * (not kv.startswith("full")))[0], []
    caches = method.kv, method.budget, method.options, len(prompts), 300, 256
    own = Engine.load(text_checkpoint, dtype="float32", compile=False)
    own.use(*caches)
    engine = Engine.load(text_checkpoint, dtype="float32", compile=False)
    prefill_once(engine)
    engine.use(*caches)
    run = engine.model._run
    monkeypatch.setattr(engine.model, "_run", lambda row, tokens, *a: ran.append(len(tokens)) or run(row, tokens, *a))
    shared, expected = engine.logits(prompts, forced), own.logits(prompts, forced)
    assert ran == [150, 10, 1, 14, 40, 50, 170]  # the last one begins like the others by less than half
    shared += engine.logits(prompts[::-1], forced)[::-1]  # each is still what it was
    assert len(ran) == 7
    for a, b in zip(expected * 2, shared, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv, budget", (("full", None), ("snapkv", 16)))
def test_a_prompt_in_chunks_is_each_methods_own(kv, budget, tiny_checkpoint):
    engine = Engine.load(tiny_checkpoint, compile=False)
    recorded, found = prefill_once(engine), []
    for chunk in (0, 33, 200):
        engine.use(kv, budget, {}, max_prompt=100, chunk=chunk)
        found.append(engine.logits(list(range(3, 103)), [4, 5]))
    assert len(recorded) == 1 and torch.equal(found[0], found[2])
    own = Engine.load(tiny_checkpoint, kv, budget, compile=False, max_prompt=100, chunk=33)
    assert torch.equal(found[1], own.logits(list(range(3, 103)), [4, 5]))
    assert ((found[0] - found[1]).abs().max() > 1e-3) == (kv == "snapkv")


def test_a_prompt_is_repeated_once_for_all_budgets(tiny_checkpoint, monkeypatch):
    prompt, ran = torch.randint(3, 100, (100,), generator=torch.Generator().manual_seed(0)).tolist(), []
    kinds = (24, {}), (48, {}), (24, {"heads": "adaptive"}), (24, {"sinks": 2})
    engine = Engine.load(tiny_checkpoint, compile=False)
    prefill_once(engine)
    run = engine.model._run
    monkeypatch.setattr(engine.model, "_run", lambda row, tokens, *a: ran.append(len(tokens)) or run(row, tokens, *a))
    for budget, options in kinds * 2:
        options = {"part": 40} | options
        engine.use("kvzip", budget, options, max_prompt=100)
        own = Engine.load(tiny_checkpoint, "kvzip", budget, options, compile=False, max_prompt=100)
        assert torch.equal(engine.logits(prompt, [4, 5]), own.logits(prompt, [4, 5]))
    assert len(ran) == 1 + 2 * 3  # three parts, again with other sinks
    engine.use("kvzip", 24, {"part": 80}, max_prompt=100)
    engine.logits(prompt, [4, 5])
    engine.use("kvzip", 100, {}, max_prompt=100)  # needs no repetition
    engine.logits(prompt, [4, 5])
    assert len(ran) == 1 + 2 * 3 + 2


def test_prompts_beyond_the_room_are_prefilled(tiny_checkpoint):
    engine = Engine.load(tiny_checkpoint, compile=False, max_prompt=40)
    recorded = prefill_once(engine, room=0)
    logits = engine.logits([3] * 40, [4, 5])
    assert not recorded
    assert torch.equal(logits, Engine.load(tiny_checkpoint, compile=False, max_prompt=40).logits([3] * 40, [4, 5]))


@pytest.mark.parametrize("kv", ("kvzip", "keydiff"))
def test_what_a_step_reads_does_not_depend_on_the_last_job(tiny_checkpoint, kv):
    engine = Engine.load(tiny_checkpoint, compile=False)
    caches = kv, 0.25, {}, 2, 100, 32, 0, 0
    first = evaluation.use(engine, caches)
    engine.generate([[7] * 40, [9] * 60], 4)
    assert evaluation.use(engine, caches) == first
