"""What the README shows is true."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_contract

import kv

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


(SOURCE,) = (block for block in BLOCKS if "class KeyNorm(" in block)
(TOVA,) = (block for block in BLOCKS if "class TOVA(" in block)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the code in which the README's steps were followed to the letter."""
    copy = tmp_path_factory.mktemp("readme") / "clone"
    for room in {ROOT, *(file.parent for file in ROOT.glob("[a-z]*/**/*.py"))}:
        (copy / room.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
        for file in room.iterdir():
            if file.suffix in (".py", ".toml", ".txt"):
                shutil.copy(file, copy / file.relative_to(ROOT))
    said = re.search(r"Save it as `(.*/(\w+)\.py)`\. In `(.*)`, add a line to the import", README)
    where, name, registry = said.groups()
    (copy / where).write_text(SOURCE)
    (copy / "kv" / "tova.py").write_text(TOVA)
    text = (copy / registry).read_text()
    steps = [block.splitlines() for block in BLOCKS if name in block and block != SOURCE]
    assert len(steps) == 2
    for there, line in steps:
        assert text.count(there + "\n") == 1
        text = text.replace(there, f"{there}\n{line}\n{line.replace(name, 'tova').replace('KeyNorm', 'TOVA')}")
    (copy / registry).write_text(text)
    return copy


def test_the_example_method_is_listed_and_obeys_every_law(clone):
    """As the README says, the copy's own tests check it."""
    listed = subprocess.run([sys.executable, "generate.py", "--list-kv"], cwd=clone, text=True, capture_output=True)
    assert re.search("^keynorm +the shortest keys$", listed.stdout, re.M), listed.stderr
    laws = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/test_contract.py"]
    result = subprocess.run([*laws, "-k", "keynorm or tova"], cwd=clone, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout
    for name in ("keynorm", "tova"):
        assert len(re.findall(rf"\b{name}\b.* PASSED", result.stdout)) >= 10, result.stdout


def test_a_method_that_scores_tokens_fits_on_one_screen():
    assert len([line for line in SOURCE.splitlines() if line.strip()]) <= 15


@pytest.fixture
def keynorm(clone, monkeypatch):
    """The README's example, registered in this process."""
    spec = importlib.util.spec_from_file_location("kv.keynorm", clone / "kv" / "keynorm.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kv.keynorm", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(kv.METHODS, "keynorm", module.KeyNormMethod)


def test_the_example_method_keeps_the_tokens_it_says(keynorm):
    shape = test_contract.make_shape("gqa", 1)
    cache, text = test_contract.Cache("keynorm", shape), test_contract.make_texts(shape)[0]
    cache.prefill(0, text)
    for layer in range(test_contract.LAYERS):
        for head in range(shape.n_kv_head):
            keys = text.k[layer, head, : text.prompt]
            older = sorted(range(text.prompt - 8), key=lambda i, keys=keys: float(keys[i].norm()))
            kept = sorted(older[: test_contract.SMALL - 8]) + list(range(text.prompt - 8, text.prompt))
            assert (cache.layers[layer].k[0, head, : test_contract.SMALL] == keys[kept]).all()


def test_the_files_and_flags_that_the_readme_names_exist():
    root = Path(__file__).parent.parent
    usage = "".join(
        (root / f"{tool}.py").read_text() for tool in ("terminal/options", "eval", "bench/__main__", "quantize")
    )
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|txt|md))`", README):
        assert (root / name).exists() or name in ("kv/keynorm.py", "kv/tova.py"), name
    for flag in set(re.findall(r"`(--[a-z-]+)", README)) - {"--no-compile"}:
        assert f'"{flag}"' in usage, flag


def test_the_readmes_commands_overwrite_nothing_that_ships():
    pages = (ROOT / "docs" / "options.md").read_text()
    outputs = re.findall(r"python calibrate.py .*?--(?:out|plot) (\S+).*?--(?:out|plot) (\S+)", pages)[0]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert set(outputs) <= set(ignored)
