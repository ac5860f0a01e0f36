"""What the README shows is true."""

import inspect
import re
import sys
import types
from pathlib import Path

import pytest
import test_contract

import kv

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.fixture
def keynorm(monkeypatch):
    """The README's example, registered with the README's line."""
    (source,) = (block for block in BLOCKS if "class KeyNorm(KV)" in block)
    (line,) = (block for block in BLOCKS if block.startswith('"keynorm"'))
    module = types.ModuleType("kv.keynorm")
    module.__dict__["__name__"] = "kv.keynorm"
    monkeypatch.setitem(sys.modules, "kv.keynorm", module)
    exec(source, module.__dict__)
    registered = eval("{" + line + "}", {"Method": kv.Method, "keynorm": module})
    monkeypatch.setitem(kv.METHODS, "keynorm", registered["keynorm"])
    return module


LAWS = [law for name, law in vars(test_contract).items() if name.startswith("test_law_") and "window" not in name]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_example_method_keeps_every_law(keynorm, law):
    wants = inspect.signature(law).parameters
    for shape in [test_contract.make_shape(heads, 3) for heads in test_contract.HEADS]:
        arguments = {"name": "keynorm", "shape": shape, "budget": test_contract.SMALL}
        law(**{key: value for key, value in arguments.items() if key in wants})
        if "shape" not in wants:
            break


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
    usage = "".join((root / f"{tool}.py").read_text() for tool in ("generate", "eval", "bench", "quantize"))
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|txt|md))`", README):
        assert (root / name).exists() or name == "kv/keynorm.py", name
    for flag in set(re.findall(r"`(--[a-z-]+)", README)) - {"--no-compile"}:
        assert f'"{flag}"' in usage, flag
