"""What the README shows is true."""

import re
from pathlib import Path

import test_contract

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


(KEYNORM,) = (block for block in BLOCKS if "class KeyNorm(" in block)
(TOVA,) = (block for block in BLOCKS if "class TOVA(" in block)


def test_the_example_methods_are_those_of_the_repository():
    """A registered method is tested like any other, so what the README shows obeys the laws."""
    assert (ROOT / "kv" / "keynorm.py").read_text() == KEYNORM
    assert (ROOT / "kv" / "tova.py").read_text().endswith(TOVA)
    registry = (ROOT / "kv" / "__init__.py").read_text()
    for block in (block for block in BLOCKS if "keynorm" in block and block != KEYNORM):
        first, line = block.splitlines()
        assert f"{first}\n" in registry and f"\n{line}\n" in registry


def test_a_method_that_scores_tokens_fits_on_one_screen():
    assert len([line for line in KEYNORM.splitlines() if line.strip()]) <= 15


def test_the_example_method_keeps_the_tokens_it_says():
    shape = test_contract.make_shape("gqa", 1)
    cache, text = test_contract.Cache("keynorm", shape), test_contract.make_texts(shape)[0]
    cache.prefill(0, text)
    for layer in range(test_contract.LAYERS):
        for head in range(shape.n_kv_head):
            keys = text.k[layer, head, : text.prompt]
            older = sorted(range(4, text.prompt - 8), key=lambda i, keys=keys: float(keys[i].norm()))
            kept = [0, 1, 2, 3, *sorted(older[: test_contract.SMALL - 12]), *range(text.prompt - 8, text.prompt)]
            assert (cache.layers[layer].k[0, head, : test_contract.SMALL] == keys[kept]).all()


def test_the_files_and_flags_that_the_readme_names_exist():
    root = Path(__file__).parent.parent
    usage = "".join(
        (root / f"{tool}.py").read_text() for tool in ("terminal/options", "eval", "bench/__main__", "quantize")
    )
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|txt|md))`", README):
        assert (root / name).exists(), name
    for flag in set(re.findall(r"`(--[a-z-]+)", README)) - {"--no-compile"}:
        assert f'"{flag}"' in usage, flag


def test_the_readmes_commands_overwrite_nothing_that_ships():
    pages = (ROOT / "docs" / "options.md").read_text()
    outputs = re.findall(r"python calibrate.py .*?--(?:out|plot) (\S+).*?--(?:out|plot) (\S+)", pages)[0]
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert set(outputs) <= set(ignored)
