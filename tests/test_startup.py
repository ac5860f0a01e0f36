"""What happens before torch is imported: Ctrl-C, and a torch that is too old or too new."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import slow

ROOT = Path(__file__).parent.parent
SCRIPTS = [[f"{name}.py"] for name in "eval calibrate convert_hf_checkpoint quantize".split()]
MODULES = [["-m", name] for name in ("bench", "bench.compare")]
every_tool = pytest.mark.parametrize("tool", [["generate.py"], *map(slow, [*SCRIPTS, *MODULES])], ids=" ".join)


def python(place: Path, *command) -> subprocess.CompletedProcess:
    """Runs Python in the clone; `place` takes precedence over installed packages."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(place)},
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )


def with_torch(place: Path, code: str) -> Path:
    """A folder with a torch whose import runs the code."""
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").write_text(code)
    return place


INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"


@every_tool
def test_ctrl_c_while_a_tool_imports_is_one_line_and_130(tmp_path, tool):
    result = python(with_torch(tmp_path, INTERRUPT), *tool)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_reaches_a_program_that_imports_the_engine(tmp_path):
    program = "try:\n    import engine\nexcept KeyboardInterrupt:\n    print('mine')"
    result = python(with_torch(tmp_path, INTERRUPT), "-c", program)
    assert (result.returncode, result.stdout, result.stderr) == (0, "mine\n", "")


def dated(place: Path, version: str) -> Path:
    """Metadata that claims this version of torch; the installed torch is imported."""
    (place / f"torch-{version}.dist-info").mkdir()
    (place / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    return place


@every_tool
def test_without_torch_a_tool_ends_with_one_whole_line(tmp_path, tool):
    result = python(tmp_path, "-S", *tool)  # -S: no installed packages
    line = "error: torch is not installed here: source .venv/bin/activate, or pip install -r requirements.txt\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.parametrize("version", ("2.10.1+cu126", slow("1.13.0")))
def test_a_torch_that_is_too_old_is_refused_in_one_line(tmp_path, version):
    result = python(dated(tmp_path, version), "generate.py", "--list-kv")
    line = f"torch {version} is too old, kv-fast runs on 2.11 to 2.13: pip install -r requirements.txt"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"error: {line}\n")
    assert f"ImportError: {line}" in python(tmp_path, "-c", "import engine").stderr


@pytest.mark.parametrize(
    "version, said",
    (
        ("2.14.0a0+git1", "kv-fast is tested with torch 2.11 to 2.13, and this is 2.14.0a0+git1\n"),
        ("2.11.0", ""),
        ("2.13.1+cu130", ""),
    ),
)
def test_a_newer_torch_is_reported_and_used(tmp_path, version, said):
    result = python(dated(tmp_path, version), "-c", "import runtime.startup")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", said)


def test_installing_is_refused_because_kv_fast_runs_from_its_clone(tmp_path):
    result = python(tmp_path, "setup.py", "egg_info")
    assert result.returncode == 1 and result.stderr.startswith("kv-fast is run from its clone and is not installed")


# Page faults of rounds that take four buffers of 8 MB, write to them, and free them.
ROUNDS = """
import ctypes, os, resource
c = ctypes.CDLL(None)
c.malloc.restype, size = ctypes.c_void_p, 2**23
def round():
    buffers = [ctypes.c_void_p(c.malloc(size)) for _ in range(4)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, size)
    for buffer in buffers:
        c.free(buffer)
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"), flush=True)
os._exit(0)
"""


OWN = {"GOMP_SPINCOUNT": "7", "MALLOC_TRIM_THRESHOLD_": "131072", "THP_MEM_ALLOC_ENABLE": "0"}


@pytest.mark.parametrize(
    "command, given, keeps, spins, pages",
    (
        (["generate.py"], {}, True, "30000", "1"),
        slow(["-m", "bench"], {}, True, "30000", "1"),
        (["generate.py"], OWN, False, "7", "0"),
        (["generate.py"], {"OMP_WAIT_POLICY": "active"}, True, "None", "1"),
        (["-c", "import engine"], {}, False, "None", "None"),
    ),
)
def test_a_tools_threads_soon_sleep_and_it_keeps_the_memory_it_freed_unless_the_user_decides(
    tmp_path, monkeypatch, command, given, keeps, spins, pages
):
    for name in ("OMP_WAIT_POLICY", *OWN):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    faults, *found = python(with_torch(tmp_path, ROUNDS), *command).stdout.split()
    assert (int(faults) < 100) == keeps and found == [spins, pages]
