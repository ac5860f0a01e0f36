"""Tasks on source code. Every expectation is worked out from the prompt's text, not from the code that wrote it."""

import re
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from tasks import Question, Recipe, Sample
from tasks.code import TASKS

PIECES = re.compile(r"\d| ?[^\W\d]{1,6}|\W")  # roughly the tokens of code
LENGTH = 6000
PLANTED = re.compile(r"def \w+\(\):\n    return (?:\d{7}|\w+\(\))\n\n\n|[A-Z_]+ = \d{7}\n\n\n")


def sample(name: str, index: int = 0, length: int = LENGTH, **changed) -> Sample:
    return TASKS[name].sample(Recipe(length, PIECES.findall, "".join, **changed), index)


@cache
def standard_library() -> str:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n\n\n".join(module.read_text() for module in modules)


def value(text: str, name: str) -> tuple[str, int]:
    """What the text says that a function returns or that a constant is in the end, and in how many steps it does."""
    if name.isupper():
        return re.findall(rf"^{name} = (\d+)$", text, re.MULTILINE)[-1], 1
    [result] = re.findall(rf"^def {name}\(\):\n    return (.+)$", text, re.MULTILINE)
    if result.isdecimal():
        return result, 1
    found, steps = value(text, result.removesuffix("()"))
    return found, steps + 1


def asked(question: Question) -> str:
    return re.search(r"(?:What does|Which value does) (\w+)", question.text)[1]


def test_the_answer_is_what_the_text_says_and_each_kind_of_fact_as_hard():
    texts = [sample("code_facts", i) for i in range(24)]
    for made in texts:
        [question] = made.questions
        found, steps = value(made.text, asked(question))
        assert question.answers == (found,) and question.text.endswith(f"\n\n{question.opening}")
        assert steps == (2 if "the function that it calls" in question.text else 1)
    assert len({made.text for made in texts[:12]}) == 1  # one prefill serves all
    names = [asked(made.questions[0]) for made in texts[:12]]
    assert len(set(names)) == 12
    defined = re.findall(r"^(?:def (\w+)\(\):\n    return (?:\d{7}|\w+\(\))$)", texts[0].text, re.MULTILINE)
    alike = [[n for n in defined if n.split("_")[:2] == name.split("_")[:2]] for name in names]
    assert [len(own) for own in alike] == [1, 3, 0, 2] * 3
    for name in names[2::4]:
        first, last = re.findall(rf"^{name} = (\d+)$", texts[0].text, re.MULTILINE)
        assert first != last


def test_several_questions_about_a_text_are_its_facts_in_turn():
    alone = [sample("code_facts", i) for i in range(24)]
    for index, made in enumerate(sample("code_facts", i, questions=6) for i in range(4)):
        own = alone[6 * index : 6 * index + 6]
        assert made.questions == tuple(other.questions[0] for other in own)
        assert all(other.text == made.text for other in own)
    assert len(sample("code_facts", 0, questions=50).questions) == 12


def test_facts_stand_between_definitions_all_over_a_text_that_is_otherwise_the_source():
    made = sample("code_facts", length=20_000)
    begin, code = made.text.split("```python\n")
    assert begin == "Here is the source code of a program.\n\n"
    places = [m.start() / len(code) for m in PLANTED.finditer(code)]
    assert len(places) == 3 * (1 + 3 + 2 + 2) and min(places) < 0.25 and max(places) > 0.75
    assert PLANTED.sub("", code) in standard_library()
    assert all(code[: m.start()].endswith("\n\n\n") for m in PLANTED.finditer(code) if m.start())


@pytest.mark.parametrize("length", [3000, 30_000])
def test_prompt_and_answer_fill_the_length(length):
    for i in range(12):
        used = len(PIECES.findall(sample("code_facts", i, length).prompt)) + TASKS["code_facts"].max_new_tokens
        assert length - 300 < used <= length


@pytest.mark.parametrize(
    "answer, right",
    [(" 1234567\n", True), (" f()\n\ndef f():\n    return 1234567", True), (" 7654321\n# 1234567", False), ("", False)]
    + [(" 12345678", False), (" x(12)\n\n1234567", True)],
)
def test_the_first_number_counts(answer, right):
    assert TASKS["code_facts"].score(answer, Question("", ("1234567",))) == 100 * right


@pytest.mark.parametrize("index", range(12))
def test_the_line_asked_for_follows_in_the_source_and_needs_a_distant_name(index):
    made = sample("code_line", index, length=12_000)
    [question] = made.questions
    [line] = question.answers
    source = standard_library()
    at = source.index(made.prompt) + len(made.prompt)
    assert source[at:].split("\n")[0].strip() == line != ""
    before, near = made.prompt[:-3000], made.prompt[-3000:]
    assert any(name in before and name not in near for name in re.findall(r"\w+", line) if len(name) > 6)


def test_lines_of_a_text_are_asked_for_at_different_places_of_its_end():
    texts = [sample("code_line", i, length=12_000).text for i in range(6)][::-1]  # the longest first
    assert len(set(texts)) == 6 and all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
    assert len(PIECES.findall(texts[-1])) < 12_000 and len(texts[0]) > len(texts[-1]) / 2
    assert not sample("code_line", 6, length=12_000).text.startswith(texts[0][:1000])


@pytest.mark.parametrize(
    "answer, score",
    [("    x = first(1)\n    y", 100), ("\n\n  x = first(1)", 100), ("", 0), ("x = first(2)\n", 100 * 22 / 24)],
)
def test_a_line_is_as_right_as_it_is_similar(answer, score):
    assert TASKS["code_line"].score(answer, Question("", ("x = first(1)",))) == pytest.approx(score)


def test_another_text_serves_too_and_one_without_distant_names_is_refused():
    own = "\n\n\n".join(f"def a{i}():\n    pass" for i in range(2000))
    assert "def a9" in sample("code_facts", haystack=own).text
    with pytest.raises(ValueError, match="no line at the end of the text needs a name of 3000 characters before"):
        sample("code_line", haystack=own)
