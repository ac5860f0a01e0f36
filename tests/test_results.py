"""The tables of the documents are what their results say, and the documents' links lead somewhere."""

import re

import pytest

from bench.results import RESULTS, ROOT, TABLE, documents, render

TEXTS = {path: path.read_text() for path in documents()}
LINKS = re.compile(r"\]\(([^)#]+)[^)]*\)")


def linked(path):
    """The files that a document links to, and pictures that it shows."""
    return {(path.parent / link).resolve() for link in LINKS.findall(path.read_text()) if "://" not in link}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_tables_are_made_from_the_results(path):
    assert render(TEXTS[path]) == TEXTS[path], "run python -m bench.results"


def test_every_result_stands_in_a_table_or_is_named():
    shown = {match[2] for text in TEXTS.values() for match in TABLE.finditer(text)}
    named = set(re.findall(r"`docs/results/(\w+)\.json`", "".join(TEXTS.values())))
    assert shown | named == {path.stem for path in RESULTS.glob("*.json")}


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_links_lead_to_files(path):
    assert not [link for link in linked(path) if not link.exists()]


def test_every_picture_is_shown():
    shown = set().union(*map(linked, TEXTS))
    assert set((ROOT / "docs").glob("*.png")) <= shown
