"""LongBench and InfiniteBench: their scores by worked examples, their samples from files written here. No network."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks import Recipe, infinitebench, jsonl, longbench, metrics

CHARACTERS = Recipe(10**6, lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids)))  # one id each
BOS = Recipe(10**6, lambda text: [0, *map(ord, text)], lambda ids: "".join(map(chr, filter(None, ids))))
BYTES = Recipe(10**6, lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"))

SPECS = {
    module: json.loads(Path(module.__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for module in (longbench, infinitebench)
}
QUESTION = {  # what a record of InfiniteBench asks
    "math_find": "You should answer with only one number, no other words. The largest number of the list is: ",
    "code_run": "Please give me the exact number of the return value of func_7(-12). Be concise.",
}


@pytest.fixture
def jieba(monkeypatch):
    """A stand-in that treats 北京 as one word and every other character as a word."""

    def cut(text: str) -> list[str]:
        return [word for part in text.split("北京") for word in [*part, "北京"]][:-1]

    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(lcut=cut, setLogLevel=lambda level: None))


def longbench_record(**changed) -> dict:
    return {"input": "Who {asks}?", "context": "One {context}. Two.", "answers": ["Ann"], "all_classes": None} | changed


def infinitebench_record(name: str, **changed) -> dict:
    return {
        "input": QUESTION.get(name, "What?"),
        "context": "Some {text}.",
        "answer": ["f"],
        "options": ["e", "f", "g", "h"],
    } | changed


def write(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def only_sample(folder, task, record, recipe=CHARACTERS):
    write(folder / f"{task.name}.jsonl", record)
    return task.sample(replace(recipe, data=folder), 0)


# Scores


@pytest.mark.parametrize(
    "answer, references, expected",
    [
        ("The cat sat.", ["a cat ran"], 50),  # cat, sat; cat, ran: 2 * 1 / (2 + 2)
        ("the CAT, sat!", ["Cat sat"], 100),
        ("yes yes", ["yes"], 200 / 3),  # repeats count as often as both have them: 2 * 1 / (2 + 1)
        ("cats", ["cat"], 0),
        ("cat", ["dog", "cat"], 100),  # the best reference
        ("", ["cat"], 0),
        ("the", ["a"], 0),
        ("cat", [], 0),
    ],
)
def test_qa_f1_compares_bags_of_bare_words(answer, references, expected):
    assert metrics.qa_f1(answer, references) == pytest.approx(expected)


def test_chinese_f1_compares_words_in_longbench_and_characters_in_infinitebench(jieba):
    # 北京, 大; 北京, 人: 2 * 1 / (2 + 2). In characters 北, 京, 大; 北, 京, 人: 2 * 2 / (3 + 3).
    assert metrics.qa_f1_zh("北京，大。", ["北京人"]) == 50
    assert metrics.longbook_qa_chn("北京，大。", ["北京人"]) == pytest.approx(200 / 3)


@pytest.mark.parametrize("score", [metrics.qa_f1_zh, metrics.rouge_l_zh])
def test_without_jieba_a_chinese_score_says_what_to_install(score, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match="pip install jieba$") as error:
        score("北京", ["北京"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("a b c d", "a c d e", 75),  # a c d: P = R = 3/4
        ("b c a", "a b c", 200 / 3),  # b c: P = R = 2/3
        ("b c. a", "a. b c", 100),  # sentence by sentence nothing is out of order
        ("a a a b", "a b", 100),  # distinct words
        ("a b. ", "a b", 80),  # the blank after the stop is an empty word: P = 2/3, R = 1
        ("b a. b", "a b", 50),  # the common subsequence with "b a" is taken to be b: U = {b}, P = R = 1/2
        ("A", "a", 0),
        ("...", "a", 0),
        ("", "a", 0),
    ],
)
def test_rouge_l_equals_the_rouge_packages(answer, reference, expected):
    assert metrics.rouge_l(answer, [reference]) == pytest.approx(expected, abs=1e-5)


def test_chinese_rouge_l_takes_words_in_order(jieba):
    assert metrics.rouge_l_zh("大北京", ["北京大"]) == pytest.approx(50, abs=1e-5)  # 大 or 北京, of two words each


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("The cat, sat", "the CAT ran", 200 / 3),  # the cat: 2 * 2 / (3 + 3)
        ("b c\na", "a\nb c", 100),  # line by line
        ("b c a", "a b c", 200 / 3),
        ("a", "x a\ny a", 40),  # a twice in the reference, once in the answer: 2 * 1 / (1 + 4)
        ("b a\nb", "a b", 80),  # the subsequence with "b a" is a, that with "b" is b: 2 * 2 / (3 + 2)
        ("", "a", 0),
    ],
)
def test_rouge_lsum_equals_the_rouge_score_packages(answer, reference, expected):
    assert metrics.rouge_lsum(answer, ["something else", reference]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "answer, right, expected",
    [
        ("Animal", "Animal", 100),
        ("Animal or Food", "Food", 50),
        ("Animal disease", "Animal disease", 100),  # the class Animal, a part of it, does not count
        ("Animal disease", "Animal", 50),
        ("animal", "Animal", 0),
        ("Food", "Animal", 0),
    ],
)
def test_classification_shares_the_point_among_the_classes_named(answer, right, expected):
    assert metrics.classification(answer, [right], ["Animal", "Animal disease", "Food"]) == expected


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("return x", 100),
        ("\n\n# why\n```\nreturn x\nmore", 100),  # the first line without `, # and //
        ("return y", 88),  # 2 * 7 / 16 = 87.5 %, to a whole percent
        ("more\nreturn x", 33),  # "re" is common: 2 * 2 / 12
        ("// return x", 0),
    ],
)
def test_code_similarity_is_the_edit_ratio_of_the_first_line_of_code(answer, expected):
    assert metrics.code_similarity(answer, ["return x"]) == expected


@pytest.mark.parametrize("reference", ["4", "Paragraph 4", "段落4"])
def test_counts_and_retrievals_score_the_share_of_right_numbers(reference):
    answers = ["It is 4.", "3 or 4", "14", "four", "第4段"]
    assert [metrics.number_share(answer, [reference]) for answer in answers] == [100, 50, 0, 0, 100]


@pytest.mark.parametrize(
    "score, references, right, wrong",
    [
        (metrics.first_integer, ("71432",), [" 71432. 9", "key71432"], ["9 71432", "714321", "", "none"]),
        (metrics.kv_retrieval, ("ab-1",), ['"ab-1"', "it is: {ab-1}.\n"], ["ab-12", "ab -1", ""]),
        (metrics.code_run, ("-7",), ["It is:-7.", "`-7`", "3 is wrong; -7"], ["-7 it is", "7", "-7 8", "", "-7x"]),
        (metrics.math_find, ("12",), [" 12, I think", "12.0"], ["3 and 12", "120", "twelve", ""]),
        (metrics.math_find, ("2.5",), ["2.5."], ["2", "25"]),
        (metrics.longdialogue_qa_eng, ("ECKER", "COMMANDER BILL"), ["Ecker:", "it was commander Bill"], ["BILL", ""]),
        (
            metrics.code_debug,
            ("load", "B"),
            ["B", "B. load", "A or B", "B\nA", "B or A", "load fails", "the answer is: load", "Option B"],
            ["A", "b", "", "Not B but A", "answer is load", "it is", "is:", "the answer is: J"],
        ),
        (
            metrics.longbook_choice_eng,
            ("Poe", "C"),
            ["C", "C. Poe", "not A but C", "C or A", "Poe", "Cats", "The answer is Poe?", "option is\nC"],
            ["A", "c", "", "A or C, or B", "As I said", "poe", "the answer is: D\nC", "the answer is poe", "E"],
        ),
    ],
)
def test_infinitebench_tells_right_answers_from_near_misses(score, references, right, wrong):
    assert {answer: score(answer, references) for answer in right} == dict.fromkeys(right, 100)
    assert {answer: score(answer, references) for answer in wrong} == dict.fromkeys(wrong, 0)


def test_math_calc_counts_values_up_to_the_first_mistake():
    wanted = ("1", "4", "8", "3")
    answers = ["[1, 4, 8, 3]", "1 4 9 3", "1, 4", "4", ""]
    assert [metrics.math_calc(answer, wanted) for answer in answers] == [100, 50, 50, 0, 0]


# Samples


@pytest.mark.parametrize(
    "specs, digest",
    [
        (SPECS[longbench], "a44e611ec60b24fd65e1c2ff9cc3df1205954b0efa69ead524837268126b6db4"),
        (SPECS[infinitebench], "aaf23db9dd5d9f202447f189f44dc120bbd5f8c389b45518fe8e52995ea6b062"),
    ],
)
def test_templates_are_the_published_ones(specs, digest):
    """The digests are of the published files, with {question} renamed to {input}."""
    assert hashlib.sha256("\0".join(specs[name]["prompt"] for name in sorted(specs)).encode()).hexdigest() == digest


@pytest.mark.parametrize("name", longbench.TASKS)
def test_a_longbench_prompt_is_its_template_filled_in_and_split_after_the_context(name, tmp_path, jieba):
    record = longbench_record()
    sample = only_sample(tmp_path, longbench.TASKS[name], record)
    assert sample.prompt == SPECS[longbench][name]["prompt"].replace("{context}", record["context"]).replace(
        "{input}", record["input"]
    )
    assert sample.text.endswith(record["context"])
    assert sample.questions[0].answers == ("Ann",)


def test_a_whole_longbench_prompt_is_as_published(tmp_path):
    record = longbench_record(context="import a\n", input="def f")
    sample = only_sample(tmp_path, longbench.TASKS["repobench-p"], record)
    assert sample.text == "Please complete the code given below. \nimport a\n"
    assert sample.questions[0].text == "def fNext line of code:\n"


INFINITEBENCH_PROMPTS = {
    "math_find": "What is the largest number in the following list?\n\nSome {text}.\n\n" + QUESTION["math_find"],
    "code_run": "There is a function called func_7 in the following Python code.\n\nSome {text}.\n\nPlease compute the "
    "exact value of func_7(-12). The value of func_7(-12) is",
    "longbook_choice_eng": "Read the book and answer the question.\n\nSome {text}.\n\nQuestion: What?\nA. e\nB. f\n"
    "C. g\nD. h\n\nThe letter of the correct answer is",
    "code_debug": "Following is a Python code where exactly one of the functions/methods has a deliberate error that "
    "makes it crash.\n\nSome {text}.\n\nOptions:\nA. e\nB. f\nC. g\nD. h\n\nThe correct option is:",
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\nSome {text}.\n\n问题：What?\n答案：",
    "longbook_sum_eng": "Summarize the book below.\n\nSome {text}.\n\nSummary:",
}


@pytest.mark.parametrize("name", infinitebench.TASKS)
def test_an_infinitebench_prompt_is_its_template_filled_in_and_split_after_the_context(name, tmp_path):
    sample = only_sample(tmp_path, infinitebench.TASKS[name], infinitebench_record(name))
    filled = SPECS[infinitebench][name]["prompt"].replace("{context}", "Some {text}.").replace("{input}", "What?")
    assert sample.prompt == INFINITEBENCH_PROMPTS.get(name, filled)
    assert sample.text.endswith("Some {text}.")


@pytest.mark.parametrize(
    "name, published, answers",
    [
        ("passkey", ["71432"], ("71432",)),
        ("number_string", "71432", ("71432",)),
        ("longbook_qa_eng", ["Bob", "Bobby"], ("Bob", "Bobby")),
        ("math_find", [2.5], ("2.5",)),
        ("math_calc", [1, 4, 8], ("1", "4", "8")),
        ("math_calc", [[1, 4, 8]], ("1", "4", "8")),
        ("code_debug", ["g"], ("g", "C")),
        ("longbook_choice_eng", "e", ("e", "A")),
        ("longbook_choice_eng", ["h", "D"], ("h", "D")),
    ],
)
def test_answers_are_what_the_score_looks_for(name, published, answers, tmp_path):
    sample = only_sample(tmp_path, infinitebench.TASKS[name], infinitebench_record(name, answer=published))
    [question] = sample.questions
    assert question.answers == answers
    said = " ".join(answers) if name == "math_calc" else answers[0]
    assert infinitebench.TASKS[name].score(said, question) == 100


def test_a_question_that_is_not_worded_as_published_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not worded as published"):
        only_sample(tmp_path, infinitebench.TASKS["code_run"], infinitebench_record("code_run", input="What is f(1)?"))


@pytest.mark.parametrize("name, continued", [("triviaqa", "Passage: Ann"), ("samsum", "Dialogue: Ann")])
def test_only_the_first_line_of_a_few_shot_answer_counts(name, continued, tmp_path):
    task = longbench.TASKS[name]
    [question] = only_sample(tmp_path, task, longbench_record()).questions
    assert task.score(f"\n\nAnn\n{continued}", question) == pytest.approx(100)
    assert task.score(f"Bob\n{continued}", question) == 0


@pytest.mark.parametrize("name", ["trec", "lsht"])
def test_a_class_is_scored_against_all_classes_of_its_record(name, tmp_path):
    task, classes = longbench.TASKS[name], ["Animal", "Food", "Sport"]
    [question] = only_sample(tmp_path, task, longbench_record(answers=["Food"], all_classes=classes)).questions
    assert (question.answers, question.classes) == (("Food",), ("Animal", "Food", "Sport"))
    said = ["Food", "Food, Sport", "Sport", "Food\nSport", "Sport\nFood", "Food, Drink"]
    assert [task.score(answer, question) for answer in said] == [100, 50, 0, 100, 0, 100]


@pytest.mark.parametrize("name", ["qasper", "gov_report", "passage_count", "lcc"])
def test_every_line_of_other_answers_counts(name, tmp_path):
    task, reference = longbench.TASKS[name], {"passage_count": "4", "lcc": "x"}.get(name, "Ann")
    [question] = only_sample(tmp_path, task, longbench_record(answers=[reference])).questions
    before = "#" if name == "lcc" else "?"
    assert task.score(f"{before}\n{reference}", question) > 0


@pytest.mark.parametrize("task", [longbench.TASKS["qasper"], infinitebench.TASKS["passkey"]], ids=lambda t: t.name)
@pytest.mark.parametrize("recipe", [CHARACTERS, BOS, BYTES], ids=["characters", "bos", "bytes"])
@pytest.mark.parametrize("room", [2000, 2003])  # with BYTES, one of them cuts é in two, which makes the text longer
def test_a_text_that_is_too_long_loses_its_middle_and_keeps_its_question(task, recipe, room, tmp_path):
    record = longbench_record() | infinitebench_record(task.name) | {"context": "é" * 2500 + "MIDDLE" + "ü" * 2500}
    whole = only_sample(tmp_path, task, record, recipe)
    cut = task.sample(replace(recipe, data=tmp_path, length=room + task.max_new_tokens), 0)
    assert room - 10 <= len(recipe.encode(cut.prompt)) <= room
    assert cut.questions == whole.questions
    head, tail = cut.text.split("é")[0], cut.text.split("ü")[-1]
    assert (head, tail) == (whole.text.split("é")[0], whole.text.split("ü")[-1])
    assert "é" in cut.text and "ü" in cut.text and "MIDDLE" not in cut.text
    if recipe is CHARACTERS:  # an odd room loses a token, as in the published code
        assert cut.prompt == whole.prompt[: room // 2] + whole.prompt[-(room // 2) :]


def test_a_prompt_that_just_fits_is_whole(tmp_path):
    task = longbench.TASKS["lcc"]
    whole = only_sample(tmp_path, task, longbench_record())
    length = len(whole.prompt) + task.max_new_tokens
    assert task.sample(replace(CHARACTERS, data=tmp_path, length=length), 0) == whole
    assert len(task.sample(replace(CHARACTERS, data=tmp_path, length=length - 1), 0).prompt) < len(whole.prompt)


def test_a_cut_that_reaches_into_the_question_keeps_both_ends_of_the_prompt(tmp_path):
    task = longbench.TASKS["lcc"]
    cut = only_sample(tmp_path, task, longbench_record(), replace(CHARACTERS, length=task.max_new_tokens + 10))
    assert (cut.text, cut.questions[0].text) == ("Pleas", "code:\n"[-5:])


def test_a_length_that_leaves_no_room_for_a_prompt_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a length of 30000 tokens is too short: 30000 of them are for the answer"):
        only_sample(
            tmp_path,
            infinitebench.TASKS["math_calc"],
            infinitebench_record("math_calc"),
            replace(CHARACTERS, length=30000),
        )


@pytest.mark.parametrize("folder", ["", "data"])
@pytest.mark.parametrize(
    "task, record",
    [
        (longbench.TASKS["qasper"], longbench_record()),
        (infinitebench.TASKS["passkey"], infinitebench_record("passkey")),
    ],
    ids=["longbench", "infinitebench"],
)
def test_a_file_has_one_sample_per_line_and_may_lie_in_a_folder_named_data(folder, task, record, tmp_path):
    path = tmp_path / folder / f"{task.name}.jsonl"
    write(path, *(record | {"input": asked} for asked in ["问题?", "Second?", "Third?"]))
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")  # a blank line is no sample
    recipe = replace(CHARACTERS, data=tmp_path)
    assert task.size(recipe) == 3
    assert [
        asked
        for i, asked in enumerate(["问题?", "Second?", "Third?"])
        if asked in task.sample(recipe, i).questions[0].text
    ] == ["问题?", "Second?", "Third?"]
    with pytest.raises(IndexError):
        task.sample(recipe, 3)


@pytest.mark.parametrize("task", [longbench.TASKS["qasper"], infinitebench.TASKS["passkey"]], ids=lambda t: t.name)
def test_a_missing_file_is_named_in_one_line(task, tmp_path):
    for use in (task.size, lambda recipe: task.sample(recipe, 0)):
        with pytest.raises(FileNotFoundError, match="huggingface.co/datasets/.* leave out --data") as error:
            use(replace(CHARACTERS, data=tmp_path))
        assert str(tmp_path / f"{task.name}.jsonl") in str(error.value) and "\n" not in str(error.value)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "qasper.jsonl").write_text('{"input": "Wh')
    with pytest.raises(ValueError, match="record 0 of .*qasper.jsonl is not valid JSON"):
        longbench.TASKS["qasper"].sample(replace(CHARACTERS, data=tmp_path), 0)


def test_a_chinese_task_requires_jieba_before_it_asks_a_model(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ValueError, match="pip install jieba"):
        only_sample(tmp_path, longbench.TASKS["dureader"], longbench_record())


def test_without_a_data_folder_files_come_from_the_hub_once(tmp_path, monkeypatch):
    import zipfile

    import huggingface_hub

    asked = []

    def fetch(repo, name, repo_type):
        asked.append((repo, name, repo_type))
        path = tmp_path / name
        if name == "data.zip":
            with zipfile.ZipFile(path, "w") as files:
                files.writestr("data/qasper.jsonl", json.dumps(longbench_record()) + "\n")
        else:
            write(path, infinitebench_record("passkey"))
        return str(path)

    jsonl.download.cache_clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    for task in (longbench.TASKS["qasper"], infinitebench.TASKS["passkey"]):
        assert task.size(CHARACTERS) == 1
        assert task.sample(CHARACTERS, 0).prompt
    assert asked == [
        ("THUDM/LongBench", "data.zip", "dataset"),
        ("xinrongzhang2022/InfiniteBench", "passkey.jsonl", "dataset"),
    ]
    jsonl.download.cache_clear()


def test_a_failed_download_says_in_one_line_what_to_do(monkeypatch):
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route\nto host")

    jsonl.download.cache_clear()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    said = "data.zip.*no route.*huggingface.co/datasets/THUDM/LongBench .*--data"
    with pytest.raises(FileNotFoundError, match=said) as error:
        longbench.TASKS["qasper"].size(CHARACTERS)
    assert "\n" not in str(error.value)
