"""Compiled parts on disk: a later process finds all of them, and answers alike."""

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import exhaustive, slow, write_random
from test_contract import SMALL, VARIANTS
from torch import Tensor, nn

import generate
from engine import Engine
from kv import METHODS
from runtime import cpu, packages
from runtime.packages import Packages, Trace, fact

ROOT = Path(__file__).parent.parent
PROMPTS = [[(7 * i) % 128 for i in range(150)], [(5 * i) % 128 for i in range(40)]]
SAMPLED = ["rocketkv"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    return write_random(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=3)


def answer(folder: Path, cache: Path, **arguments) -> dict:
    env = os.environ | {"XDG_CACHE_HOME": str(cache), "KV_FAST_PACKAGES": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"}
    command = [
        sys.executable,
        str(ROOT / "tests/packaged.py"),
        str(folder),
        json.dumps({"prompts": PROMPTS} | arguments),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [slow(x) if x in SAMPLED else exhaustive(x) for x in VARIANTS])
def test_a_later_process_finds_every_part(name, deep, tmp_path):
    kv, options = VARIANTS[name]
    how = {"kv": kv, "options": options, "budget": SMALL if METHODS[kv].budgeted else None}
    eager, first = answer(deep, tmp_path, **how, compile=False), answer(deep, tmp_path, **how, compile=True)
    again = answer(deep, tmp_path, **how, compile=None)
    assert eager["answers"] == first["answers"] == again["answers"]
    assert first["compiles"] > 2 and again["compiles"] == 0
    assert again["found"] and all(again["found"])
    assert not again["compiler"] or name not in SAMPLED


@pytest.mark.slow
def test_speculation_and_sampling_find_theirs(deep, tmp_path):
    how = {"kv": "rocketkv", "budget": SMALL, "speculate": 2}
    first = answer(deep, tmp_path, **how, sampling={"temperature": 1.0})
    again = answer(deep, tmp_path, **how, compile=None, sampling={"temperature": 1.0})
    assert first["answers"] == again["answers"] and all(again["found"]) and again["compiles"] == 0
    greedy = answer(deep, tmp_path, **how, compile=None)  # whose last part is another: it runs eagerly
    assert greedy["answers"] == answer(deep, tmp_path, **how, compile=False)["answers"]
    assert set(greedy["found"]) == {True, False} and greedy["compiles"] == 0


@pytest.mark.slow
def test_prompts_of_similar_lengths_share_their_packages(deep, tmp_path):
    how = {"kv": "full", "max_prompt": None}
    answer(deep, tmp_path, **how, compile=True, prompts=[PROMPTS[0]])
    again = answer(deep, tmp_path, **how, compile=None, prompts=PROMPTS[1:])
    assert again["found"] and all(again["found"])
    assert again["answers"] == answer(deep, tmp_path, **how, compile=False, prompts=PROMPTS[1:])["answers"]


@pytest.mark.parametrize(
    "kv, compile, tokens, planned",
    [
        ("full", True, 300, 512),
        ("full", True, 512, 512),
        ("full", True, 2100, 2304),
        ("full", True, 4000, 4096),  # the context
        ("full", False, 300, 300),
        ("full", None, 300, 300),  # no packages are there
        ("sparq", True, 300, 300),  # its sizes would change
    ],
)
def test_caches_of_a_compiled_step_have_a_round_length(deep, kv, compile, tokens, planned):
    engine = Engine.load(deep, kv, 128 if kv == "sparq" else None, compile=compile, seed=0)
    engine.start([[1] * tokens])
    assert engine.plan.max_prompt == planned
    assert Engine.load(deep, kv, engine.budget, compile=compile, max_prompt=tokens).plan.max_prompt == tokens


def part(x: Tensor) -> None: ...


class Owner(nn.Module):
    def __init__(self, slots: int = 8):
        super().__init__()
        self.register_buffer("k", torch.zeros(2, 9))
        self.read, self.ends, self.kinds = torch.empty(slots, 0), 3, {"a": 1}


def trace(**changes) -> Trace:
    """Of a part that reads all of these, and is right for 4 to 8 slots."""
    names = ["inputs[1]", "inputs[0]._buffers['k']", "inputs[0].read", "inputs[0].ends", "inputs[0].kinds"]
    facts = [fact(torch.zeros(3)), fact(torch.zeros(2, 9)), None, "3", "dict of [\"'a'\"]"]
    conditions = [(["s0"], ["4 <= s0 <= 8", "Ne(s0, 7)"]), (["s1"], ["Eq(Max(s1, 2), s1)"])]
    return Trace(
        **{
            "part": "part",
            "forms": "",
            "names": names,
            "facts": facts,
            "same": [0, 1, 2, 3, 4],
            "sizes": [[2]],
            "conditions": conditions,
            "arguments": [2, 1, 0],
            "outputs": [0],
            "several": False,
        }
        | changes
    )


def test_code_is_for_what_it_was_traced_with():
    owner, x = Owner(), torch.ones(3)
    assert [y is z for y, z in zip(trace().match((owner, x)), (owner.read, owner.k, x), strict=True)] == [True] * 3
    for slots, right in ((4, True), (5, True), (7, False), (3, False), (9, False), (1, False)):
        assert (trace().match((Owner(slots), x)) is not None) == right, slots
    assert trace().match((owner, torch.ones(4))) is None  # shape
    assert trace().match((owner, torch.ones(3, dtype=torch.int32))) is None
    assert trace().match((owner, torch.ones(3, 2)[:, 0])) is None  # strides
    assert trace().match((nn.Linear(1, 1), x)) is None  # another kind of owner
    for name, value in (("ends", 4), ("ends", True), ("kinds", {"b": 1}), ("kinds", None), ("read", 8)):
        other = Owner()
        setattr(other, name, value)
        assert trace().match((other, x)) is None, name


def test_sizes_of_one_and_unknown_conditions():
    assert trace(conditions=[]).match((Owner(1), torch.ones(3))) is None  # torch.compile takes a size of 1 for a number
    unknown = trace(conditions=[(["s0"], ["Least(s0, s9) > 1"])])
    assert unknown.match((Owner(), torch.ones(3))) is None


def test_code_for_two_tensors_is_not_for_one_given_twice():
    x = torch.zeros(2, 9)
    two = trace(
        names=["inputs[0]", "inputs[1]"], facts=[fact(x)] * 2, same=[0, 1], sizes=[], conditions=[], arguments=[0]
    )
    assert two.match((x, torch.zeros(2, 9))) is not None and two.match((x, x)) is None


def test_sizes_that_were_equal_must_stay_so():
    """torch.compile takes equal sizes for one."""
    names, facts = ["inputs[0]", "inputs[1]"], [None, None]
    both = trace(names=names, facts=facts, same=[0, 1], sizes=[[0, 1]], conditions=[], arguments=[0])
    assert both.match((torch.empty(5, 0), torch.empty(5, 0))) and not both.match((torch.empty(5, 0), torch.empty(6, 0)))


def stored(path: Path, code: str = "code.so", **changes) -> None:
    """A package with a trace, and with code that does nothing."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(packages.ENTRY, json.dumps(asdict(trace(**changes))))
        file.writestr(code, b"no machine code")


def test_a_damaged_package_is_deleted_and_nothing_is_found(tmp_path, monkeypatch):
    """Torch does not see it."""
    monkeypatch.setattr(packages, "Code", lambda path: pytest.fail(f"{path} is loaded"))
    for name, content in {"empty": b"", "text": b"no zip"}.items():
        (tmp_path / f"{name}.pt2").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as file:
        file.writestr(packages.ENTRY, "{}")
    stored(tmp_path / "without.pt2", "code.cpp")
    stored(tmp_path / "changed.pt2")
    content = (tmp_path / "changed.pt2").read_bytes()
    (tmp_path / "changed.pt2").write_bytes(content.replace(b"machine", b"mashing"))
    (tmp_path / "notes.txt").write_text("mine")
    assert Packages(tmp_path, lambda: "").find(part, (Owner(), torch.ones(3))) is None
    assert [x.name for x in tmp_path.iterdir()] == ["notes.txt"]


def test_the_packages_that_were_not_used_for_longest_are_deleted(tmp_path, monkeypatch):
    for i, name in enumerate(("a", "b", "c")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.pt2").write_bytes(bytes(10))
        os.utime(tmp_path / name / "x.pt2", (i, i))
    monkeypatch.setattr(packages, "LIMIT", 25)
    packages.shrink(tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["b", "c"]


def test_a_step_that_cannot_be_packaged_is_compiled_as_any_function(deep, monkeypatch, tmp_path, capsys, traced_only):
    """The process that makes a package fails; and a part cannot be given to another process."""
    monkeypatch.setenv("KV_FAST_PACKAGES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = Engine.load(deep, compile=False, seed=0).generate([PROMPTS[0]], max_new_tokens=8)[0].tokens
    for name, value, why in (
        ("runtime.packages.PYTHON", "/bin/false", "its process ended"),
        ("runtime.packages.pickle.dumps", None, "TypeError: 'NoneType' object is not callable"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            engine = Engine.load(deep, compile=True, seed=0)
            assert engine.generate([PROMPTS[0]], max_new_tokens=8)[0].tokens == expected
            assert engine.stats.compiles > 0 and not (tmp_path / "kv-fast/steps").exists()
        nothing = SimpleNamespace(single=False, completions=[], report=dict, failed={}, prompts=[])
        generate.finish(engine, SimpleNamespace(verbose=True, json=None), nothing)
        assert f"not kept       compiled parts of the step: {why}\n" in capsys.readouterr().err


def test_a_worker_that_has_ended_takes_orders_and_makes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("runtime.packages.PYTHON", "/bin/false")
    worker = packages.Worker()
    worker.process.wait()
    worker.begin(tmp_path)
    worker.wait()
    assert not worker.busy


@pytest.mark.parametrize("error", (AttributeError, RuntimeError))
def test_packages_that_cannot_be_loaded_now_stay(error, tmp_path, monkeypatch):
    def fails(path: Path):
        raise error

    stored(tmp_path / "a.pt2")
    asked = part, (Owner(), torch.ones(3))
    monkeypatch.setattr(packages, "Code", fails)
    assert Packages(tmp_path, lambda: "").find(*asked) is None and [x.name for x in tmp_path.iterdir()] == ["a.pt2"]
    monkeypatch.setattr(packages, "Code", lambda path: path)
    monkeypatch.setattr(os, "utime", lambda path: (_ for _ in ()).throw(PermissionError))  # of another user's file
    assert Packages(tmp_path, lambda: "").find(*asked)[0].code == tmp_path / "a.pt2"
    monkeypatch.undo()
    assert [x.name for x in tmp_path.iterdir()] == ["a.pt2"]


def test_an_interrupted_compilation_leaves_nothing_behind(deep, monkeypatch, tmp_path, traced_only):
    monkeypatch.setenv("KV_FAST_PACKAGES", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine, builds, workers, settle = Engine.load(deep, compile=True, seed=0), [], [], Packages.settle

    def interrupted(self):
        builds.extend(self.builds)
        workers.extend(self.workers)
        if self.builds:
            raise KeyboardInterrupt
        settle(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Packages, "settle", interrupted)
        engine.generate([PROMPTS[0]], max_new_tokens=8)
    assert workers and all(worker.process.poll() is not None for worker in workers)
    assert len(builds) == 3 and not any(build.folder.exists() for build in builds)
    expected = Engine.load(deep, compile=False, seed=0).generate([PROMPTS[0]], max_new_tokens=8)[0].tokens
    monkeypatch.setattr("runtime.packages.PYTHON", "/bin/false")
    assert engine.generate([PROMPTS[0]], max_new_tokens=8)[0].tokens == expected


def raised(error: type[Exception], what: Callable):
    """Repeats a call until it raises the error, for at most 30 s."""
    end = time.monotonic() + 30
    with pytest.raises(error):
        while time.monotonic() < end:
            what()
            time.sleep(0.05)


def test_a_worker_ends_with_the_process_that_wants_its_packages(tmp_path):
    """Killed, a process cannot end its workers itself; one that has an order must not finish it first."""
    code = "import sys; from pathlib import Path; from runtime.packages import Worker"
    code += "; worker = Worker(); worker.begin(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    folder = tmp_path / "ordered"
    folder.mkdir()
    os.mkfifo(folder / "order")
    command, pipe = [sys.executable, "-c", code, str(folder)], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as parent:
        parent.stdout.readline()
        with open(folder / "order", "wb", buffering=0) as order:  # when the worker has opened it
            order.write(b"not all")
            parent.kill()
            raised(BrokenPipeError, lambda: order.write(b"."))  # nobody reads it any more
    assert not folder.exists()


def double(owner: Owner, x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.parametrize(("what", "why"), (("is killed", "its process ended"), ("fails", "EOFError: Ran out of input")))
def test_a_part_whose_worker_ends_in_its_first_call_is_compiled_as_any_function(what, why, tmp_path, monkeypatch):
    parts, begin, workers = cpu.Parts(Packages(tmp_path, lambda: "")), packages.Worker.begin, []

    def ended(self, folder):
        workers.append(self)
        (folder / "order").write_bytes(b"")
        begin(self, folder)
        if what == "is killed":
            self.process.kill()

    monkeypatch.setattr(packages.Worker, "begin", ended)
    assert torch.equal(parts(double, Owner(), torch.ones(3)), torch.full((3,), 2.0))
    assert parts.packages is None and not any(tmp_path.iterdir()) and parts.failure == why
    assert len(workers) == 1 and workers[0].process.poll() is not None


def test_code_that_cannot_be_written_says_why_and_runs(tmp_path):
    (tmp_path / "file").write_text("")
    parts = cpu.Parts(Packages(tmp_path / "file/folder", lambda: ""))
    assert torch.equal(parts(double, Owner(), torch.ones(3)), torch.full((3,), 2.0))
    assert "Not a directory" in parts.failure and parts.packages is not None


def test_the_reason_of_an_error_is_its_first_line_or_that_of_the_compiler():
    text = "C++ compile error\n\nOutput:\nIn file x.h:\na.cpp:3: fatal error: no space left\ncompilation terminated."
    assert packages.reason(RuntimeError(text)) == "a.cpp:3: fatal error: no space left"
    assert packages.reason(RuntimeError("one\ntwo")) == "RuntimeError: one"


def test_a_worker_makes_the_next_package_after_a_failure(tmp_path):
    worker = packages.Worker()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        worker.begin(tmp_path / name)
        worker.wait()
        assert "FileNotFoundError" in (tmp_path / name / "failure").read_text()
    worker.stop()
    assert worker.process.poll() is not None
