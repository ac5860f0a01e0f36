"""What the README and the other pages show is true: programs, commands, tables, links."""

import importlib
import importlib.util
import json
import re
import shlex
import shutil
import sys
from functools import partial
from operator import attrgetter

import pytest
from conftest import write_random
from lm_eval._cli import HarnessCLI

from bench.results import ROOT, documents, render
from engine import Engine
from kv import METHODS
from terminal.cli import Parser

NEEDLE = ROOT / "needle"
PAGES = [*documents(), NEEDLE / "README.md"]
TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}
README = TEXTS["README.md"]
PYTHON = re.compile(r"```python\n(.*?)```", re.S)


def test_the_example_method_is_that_of_the_repository():
    """A registered method is tested like any other, so what the README shows obeys the laws."""
    assert (ROOT / "kv" / "keynorm.py").read_text() in PYTHON.findall(README)


def test_the_table_of_methods_links_their_papers():
    links = re.findall(r"\[`(\S+?)`\]\((http.*?)\)", README)
    assert len(links) > 20 and all(METHODS[name].paper == link for name, link in links)


def test_tables_are_made_from_the_results():
    assert all(render(page.read_text()) == page.read_text() for page in documents()), "run python -m bench.results"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_names_lead_to_files(page):
    text = TEXTS[str(page.relative_to(ROOT))]
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    names = re.findall(r"`((?:\w+/)+\w+\.\w+|\w+\.(?:py|md|sh))`", text)
    assert not [name for name in names if not (ROOT / name).exists()]


def test_the_flags_that_the_readme_names_exist():
    tools = "terminal/options.py", "eval.py", "bench/__main__.py", "quantize.py"
    usage = "".join((ROOT / tool).read_text() for tool in tools)
    assert not [flag for flag in re.findall(r"`(--[a-z-]+)", README) if f'"{flag}"' not in usage]


# The blocks that are not parts of the repository, by page.
PROGRAMS = {name: [b for b in PYTHON.findall(text) if "keynorm" not in b] for name, text in TEXTS.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader stands: a long text, and a small random model under the name that the pages give theirs."""
    vocab = json.loads((NEEDLE / "config.json").read_text())["vocab_size"]
    model = tmp_path / "checkpoints" / "llama-3.1-8b"
    write_random(model, vocab_size=vocab, max_position_embeddings=65536)
    shutil.copy(NEEDLE / "tokenizer.model", model)
    (model / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    (tmp_path / "book.txt").write_text((NEEDLE / "demo.txt").read_text()[:2000])
    monkeypatch.setattr(Engine, "load", partial(Engine.load, compile=False, room=64))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", [page for page, programs in PROGRAMS.items() if programs])
def test_the_programs_on_a_page_run_and_what_it_says_of_an_engine_exists(page, folder):
    for program in PROGRAMS[page]:
        names = {}
        exec(compile(program, f"<{page}>", "exec"), names)
        for path in re.findall(r"\bengine\.(?!py\b)(\w+(?:\.\w+)*)", TEXTS[page]):
            attrgetter(path)(names["engine"])


def commands(text: str) -> list[str]:
    """The command lines in a page's blocks and spans of code."""
    fence = r"^```\w*\n(.*?)^```$"
    lines = "\n".join(re.findall(fence, text, re.S | re.M)).replace("\\\n", " ").splitlines()
    spans = re.findall(r"`([^`]+)`", re.sub(fence, "", text, flags=re.S | re.M))
    known = re.compile(r"(?:\$ )?((?:\.venv/bin/)?(?:python|bash|torchrun|make) .*)", re.S)
    return [" ".join(found[1].split()) for code in (*lines, *spans) if (found := known.fullmatch(code))]


class Parsed(Exception):
    """The arguments are those of the tool."""


@pytest.mark.parametrize("command", dict.fromkeys(command for text in TEXTS.values() for command in commands(text)))
def test_the_commands_on_the_pages_are_those_of_the_tools(command, monkeypatch):
    # A number or a choice stands for the letter that a page puts in its place.
    words = shlex.split(re.sub(r" \d*[NPT]\b", " 1", command.replace("int8|int4", "int8")), comments=True)
    if words[0] == "make":
        assert re.search(rf"^{re.escape(words[1])}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if words[:2] == ["bash", "bench.sh"]:
        if words[2:] and not words[2].startswith("-"):
            assert re.search(rf'"\$\{{1-\}}" !?= {words[2]} \]', (ROOT / "bench.sh").read_text())
            return
        words = ["python", "-m", "bench", *words[2:]]
    if "-m" in words[:2]:
        name, arguments = words[2], words[3:]
    else:  # torchrun's own flags stand before the tool
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        name, arguments = words[at].removesuffix(".py"), words[at + 1 :]
    if name == "pytest":
        assert all((ROOT / word).exists() for word in arguments if word.endswith(".py"))
        return
    assert importlib.util.find_spec(name)
    if name == "tasks.harness":
        monkeypatch.setattr(sys, "argv", ["lm-eval", *arguments])
        HarnessCLI().parse_args()
    elif arguments:
        parse = Parser.parse_args

        def parse_alone(parser, argv):
            parse(parser, argv)
            raise Parsed

        monkeypatch.setattr(Parser, "parse_args", parse_alone)
        with pytest.raises(Parsed):
            importlib.import_module("bench.__main__" if name == "bench" else name).main(arguments)
