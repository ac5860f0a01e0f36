"""What happens before torch is imported: Ctrl-C, and a torch that is too old or too new."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = [f"{name}.py" for name in "generate eval calibrate convert_hf_checkpoint quantize".split()]
MODULES = ["bench", "bench.compare"]


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


@pytest.fixture
def interrupting(tmp_path):
    """A torch whose import is interrupted."""
    (tmp_path / "torch").mkdir()
    code = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    (tmp_path / "torch" / "__init__.py").write_text(code)
    return tmp_path


@pytest.mark.parametrize("tool", [*TOOLS, *MODULES])
def test_ctrl_c_while_a_tool_imports_is_one_line_and_130(interrupting, tool):
    result = python(interrupting, *(["-m", tool] if tool in MODULES else [tool]))
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_reaches_a_program_that_imports_the_engine(interrupting):
    result = python(interrupting, "-c", "try:\n    import engine\nexcept KeyboardInterrupt:\n    print('mine')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "mine\n", "")


def dated(place: Path, version: str) -> Path:
    """Metadata that claims this version of torch; the installed torch is imported."""
    (place / f"torch-{version}.dist-info").mkdir()
    (place / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    return place


@pytest.mark.parametrize("tool", [*TOOLS, *MODULES])
def test_without_torch_a_tool_ends_with_one_whole_line(tmp_path, tool):
    result = python(tmp_path, "-S", *(["-m", tool] if tool in MODULES else [tool]))  # -S: no installed packages
    line = "error: torch is not installed here: source .venv/bin/activate, or pip install -r requirements.txt\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.parametrize("version", ("2.10.1+cu126", "1.13.0"))
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


@pytest.mark.parametrize(
    "command, given, spins",
    (
        (["generate.py"], {}, "30000"),
        (["-m", "bench"], {}, "30000"),
        (["generate.py"], {"GOMP_SPINCOUNT": "7"}, "7"),
        (["generate.py"], {"OMP_WAIT_POLICY": "active"}, "None"),
        (["-c", "import engine"], {}, "None"),
    ),
)
def test_a_tools_waiting_threads_soon_sleep_unless_the_user_decides(tmp_path, monkeypatch, command, given, spins):
    (tmp_path / "torch").mkdir()
    code = "import os\nprint(os.environ.get('GOMP_SPINCOUNT'), flush=True)\nos._exit(0)"
    (tmp_path / "torch" / "__init__.py").write_text(code)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert python(tmp_path, *command).stdout == f"{spins}\n"


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
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, os.environ.get("THP_MEM_ALLOC_ENABLE"), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "command, given, keeps, pages",
    (
        (["generate.py"], {}, True, "1"),
        (["generate.py"], {"MALLOC_TRIM_THRESHOLD_": "131072", "THP_MEM_ALLOC_ENABLE": "0"}, False, "0"),
        (["-c", "import engine"], {}, False, "None"),
    ),
)
def test_a_tool_keeps_the_memory_it_freed_unless_the_user_decides(tmp_path, monkeypatch, command, given, keeps, pages):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ROUNDS)
    for name in ("MALLOC_TRIM_THRESHOLD_", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    faults, huge = python(tmp_path, *command).stdout.split()
    assert (int(faults) < 100) == keeps and huge == pages
