"""The generated tasks: what a prompt says, how long it is, and which answers are right. Every expectation is worked
out from the prompt's text, not from the code that wrote it."""

import json
import math
import random
import re
from collections import Counter
from itertools import cycle, islice

import pytest
import torch

from tasks import Question, Recipe, Sample, fill_length, needle, ruler, scbench, shipped_haystack, texts, two_stage

PIECES = re.compile(r"\d| ?[^\W\d]{1,6}|\W")  # roughly the tokens of English text
TASKS = {**ruler.TASKS, **needle.TASKS, **two_stage.TASKS}
QA = ["qa_1", "qa_2"]
TWO_STAGE = ["two_stage", "two_stage_lookup"]
GENERATED = [name for name in TASKS if name not in QA]
FILLED = [name for name in GENERATED if name not in TWO_STAGE]  # those that grow to any length
NIAH = {  # RULER's table: kinds of haystack, keys and values; numbers of keys, values per key and keys asked for
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KINDS = {
    "words": r"[^\d,]+-[^\d,]+",
    "numbers": r"[1-9]\d{6}",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


def encode(text: str) -> list[int]:
    return [0, *(1 for _ in PIECES.findall(text))]  # BOS and the pieces


def sample(name: str, length: int = 4096, index: int = 0, **changed) -> Sample:
    return TASKS[name].sample(Recipe(length, encode, lambda ids: "", **changed), index)


def hidden(text: str) -> list[tuple[str, str]]:
    """The keys and values of the needles in a text."""
    return re.findall(r"One of the special magic (?:numbers|uuids) for (.+?) is: (\S+?)\.(?=\s|$)", text)


# Lengths


def growing(units: list[int]):
    """make(n): a prompt whose length in characters is the sum of the first n units."""
    return lambda n: Sample("x" * sum(units[:n]), (Question("", ()),))


@pytest.mark.parametrize(
    "units", [[1] * 900, [7] * 900, [3, 9] * 450, [30] + [5] * 900, [2] * 60 + [9] * 900, [1, 2, 1, 20] * 300]
)
@pytest.mark.parametrize("least", [1, 4])
def test_fit_takes_the_longest_prompt_that_leaves_room_for_an_answer(units, least):
    for length in range(100, 400, 7):
        made = fill_length(growing(units), Recipe(length, list, "".join), reserve=30, smallest=least)
        fitting = [n for n in range(length) if sum(units[:n]) <= length - 30]
        assert len(made.text) == sum(units[: fitting[-1]])


def test_fit_makes_few_prompts_on_its_way():
    made = []
    fill_length(lambda n: made.append(n) or growing([5] * n)(n), Recipe(100_000, list, "".join), reserve=30)
    assert len(made) < 10


def test_fit_refuses_a_length_below_the_least_and_names_the_least():
    make = growing([10, 20, 30])
    assert fill_length(make, Recipe(75, list, "".join), reserve=45, smallest=2).text == "x" * 30
    with pytest.raises(ValueError, match="^a length of 74 tokens is too short: the least is 75$"):
        fill_length(make, Recipe(74, list, "".join), reserve=45, smallest=2)


@pytest.mark.parametrize("length", [2048, 16384])
@pytest.mark.parametrize("name", FILLED)
def test_prompt_and_answer_fill_the_length_to_two_percent(name, length):
    spare = 0.02 * length
    for index in range(3):
        made = sample(name, length, index)
        used = len(encode(made.prompt)) + TASKS[name].max_new_tokens
        if name == "niah_multikey_3":  # two uuids per line
            spare = max(spare, 1.1 * len(encode(made.text.splitlines()[-1])))
        assert length - spare <= used <= length


@pytest.mark.parametrize("name", TWO_STAGE)
def test_two_stage_grows_to_200_pairs_and_no_further(name):
    for length in (400, 500, 800, 1200):
        used = len(encode(sample(name, length).prompt)) + 64
        assert length - 10 <= used <= length  # a pair has at most 6 tokens, and the equation up to 4 more or fewer
    for length in (2048, 4096, 16384):
        assert sample(name, length).text.count(":") == 200


@pytest.mark.parametrize("name", GENERATED)
def test_a_length_that_is_too_short_is_refused_with_the_least(name):
    with pytest.raises(ValueError, match="a length of 40 tokens is too short: the least is ") as error:
        sample(name, 40)
    least = int(re.search(r"\d+$", str(error.value))[0])
    assert sample(name, least + 40)  # longer names and values may take a few more tokens


@pytest.mark.parametrize(
    "name, tokens", {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}.items()
)
def test_answers_have_rulers_maximum_lengths(name, tokens):
    assert TASKS[name].max_new_tokens == tokens


# Randomness


@pytest.mark.parametrize("name", GENERATED)
def test_a_sample_depends_on_its_seed_and_index_alone(name):
    first = sample(name, 2048)
    others = [sample(name, 2048, index=1), sample(name, 2048, seed=1)]
    assert sample(name, 2048) == first
    assert len({first.text, *(other.text for other in others)}) == 3


def test_no_word_is_drawn_twice():
    drawer = ruler.Drawer(random.Random(0))
    assert len({drawer.draw("noun") for _ in range(3000)}) == 3000


# Needles


@pytest.mark.parametrize("name", NIAH)
def test_niah_hides_rulers_needles_and_asks_for_keys_of_which_it_knows_all_values(name):
    haystack, key_kind, value_kind, keys, values, queries = NIAH[name]
    for index in range(3):
        made = sample(name, 2048, index)
        found = hidden(made.text)
        assert all(made.text.count(value) == 1 for _, value in found)
        assert all(
            re.fullmatch(KINDS[key_kind], key) and re.fullmatch(KINDS[value_kind], value) for key, value in found
        )
        assert set(Counter(key for key, _ in found).values()) == {values}
        if haystack == "needle":
            assert len(found) == len(made.text.splitlines()) - 1 > 15  # all but the first line, which says what to do
        else:
            assert len(found) == keys * values
        [question] = made.questions
        asked = re.search(r" for (.+?) mentioned in the provided text\?", question.text)[1]
        asked = re.split(", and |, ", asked)
        assert len(set(asked)) == queries and len(question.answers) == queries * values
        parts = [set(question.answers[i : i + values]) for i in range(0, len(question.answers), values)]
        assert parts == [{value for key, value in found if key == own} for own in asked]  # in the question's order


def test_backwards_asks_for_the_last_needle_first():
    for index in range(5):
        made = sample("niah_backwards", index=index, questions=4)
        found = hidden(made.text)
        assert len(found) == 4 and [question.answers for question in made.questions] == [(v,) for _, v in found[::-1]]
        assert all(
            f" for {key} " in question.text for (key, _), question in zip(found[::-1], made.questions, strict=True)
        )
    with pytest.raises(ValueError, match="a text hides at most 40 needles, not 41: lower --questions"):
        sample("niah_backwards", questions=41)


def test_the_noise_around_a_needle_is_rulers():
    _, *lines = sample("niah_single_1").text.splitlines()
    assert Counter(line == NOISE for line in lines) == {True: len(lines) - 1, False: 1}


@pytest.mark.parametrize("name", [name for name, (haystack, *_) in NIAH.items() if haystack == "essay"])
@pytest.mark.parametrize("haystack", [None, "Bees hum.  Do wasps hum?\n\nFlies buzz!\n"])
def test_the_text_around_needles_is_the_haystack_again_and_again(name, haystack):
    text = sample(name, 2048, haystack=haystack).text.partition("\n")[2]
    rest = re.sub(r"One of the special magic \w+ for .+? is: \S+\.( |$)", "", text).rstrip()
    words = rest.split()
    assert len(words) > 1000
    assert rest == " ".join(islice(cycle((haystack or shipped_haystack()).split()), len(words)))  # on one line


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2", "vt"])
def test_needles_may_stand_anywhere_in_the_text(name):
    firsts, lasts = [], []
    for index in range(30):
        made = sample(name, 2048, index)
        text = made.text.rpartition("Memorize and track")[2]  # without an example
        first, *_, last = made.questions[0].answers * 2
        firsts.append(text.index(first) / len(text))
        lasts.append(text.index(last) / len(text))
    assert min(firsts) < 0.2 and max(lasts) > 0.8


LATER = ["niah_multikey_1", "niah_multikey_2", "niah_multikey_3"]


@pytest.mark.parametrize("name", LATER)
def test_later_questions_ask_for_other_keys_of_the_same_text(name):
    for index in range(3):
        made = sample(name, 2048, index, questions=4)
        values, asked = dict(hidden(made.text)), []
        for question in made.questions:
            asked.append(re.search(r" for (\S.*?) mentioned", question.text)[1])
            assert question.answers == (values[asked[-1]],)
        assert len(set(asked)) == 4


@pytest.mark.parametrize("name", [*LATER, *TWO_STAGE])
def test_more_questions_change_neither_the_text_nor_the_first(name):
    one, four = sample(name, 800), sample(name, 800, questions=4)
    assert (one.text, one.questions) == (four.text, four.questions[:1])


@pytest.mark.parametrize("name", [name for name in GENERATED if name not in (*LATER, *TWO_STAGE, "niah_backwards")])
def test_a_text_with_one_thing_to_ask_has_one_question(name):
    assert len(sample(name, 2048, questions=4).questions) == 1


@pytest.mark.parametrize("index", range(0, 22, 3))
def test_the_needle_stands_where_its_depth_says(index):
    made = sample("needle", 4096, index)
    [fact] = re.finditer(r"The access code of the (.+?) vault is (\d{7})\.", made.text)
    [question] = made.questions
    assert made.depth == index % 11 / 10
    assert abs(fact.start() / (len(made.text) - len(fact[0])) - made.depth) < 0.02
    assert made.text.count(fact[2]) == 1 and question.answers == (fact[2],)
    assert question.text == (
        f"\n\nQuestion: What is the access code of the {fact[1]} vault?\nAnswer: The access code "
        f"of the {fact[1]} vault is"
    )


def test_a_needle_stands_between_sentences():
    for index in range(11):  # the haystack begins and ends within a sentence
        text = sample("needle", 2048, index, haystack="Here it is, a.b sentence. Is it? " * 99).text
        before, after = re.split("The access code of the .+? vault is .{7}\\.", text)
        if index == 0:
            assert before == ""
        elif index == 10:
            assert after == ""
        else:
            assert before.endswith((". ", "? ")) and after.startswith((" Here", " Is"))


# Variables, words and colors


def assignments(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE)


def resolved(chain: list[tuple[str, str]]) -> dict[str, str]:
    """The value of each variable, assignments taken one after the other."""
    values: dict[str, str] = {}
    for name, given in chain:
        values[name] = given if given.isdigit() else values[given]
    return values


@pytest.mark.parametrize("index", range(5))
def test_a_chain_of_variables_leads_to_the_value_asked_for(index):
    made = sample("vt", 2048, index)
    _, example, text = made.text.split("Memorize and track the chain(s)")
    chain = assignments(text)
    asked = re.search(r"assigned the value (\d{5}) in", made.questions[0].text)[1]
    assert resolved(chain) == dict.fromkeys(made.questions[0].answers, asked)
    assert [name for name, _ in chain] == list(made.questions[0].answers)
    assert all(re.fullmatch("[A-Z]{5}", name) for name, _ in chain) and len(chain) == 5
    assert [len(re.findall(rf"\b{name}\b", text)) for name, _ in chain] == [2, 2, 2, 2, 1]
    assert {line for line in text.splitlines()[2:] if not line.startswith("VAR")} == {NOISE}
    shown = assignments(example)  # solved before the task
    solved = re.search(r"5 variables are assigned the value (\d{5}), they are: +((?:[A-Z]{3} ?){5})\n\n$", example)
    assert resolved(shown) == dict.fromkeys(solved[2].split(), solved[1])
    assert not set(resolved(shown)) & set(resolved(chain))


def listed(text: str) -> list[str]:
    """The words of a numbered list, whose numbers are 1, 2, 3, ..."""
    found = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\s*$)", text)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [word for _, word in found]


@pytest.mark.parametrize(
    "length, often, seldom, in_example",
    [(2048, 6, 1, (3, 1, 20)), (4095, 6, 1, (3, 1, 20)), (4096, 30, 3, (10, 3, 40)), (16384, 30, 3, (10, 3, 40))],
)
def test_common_words_occur_as_often_as_rulers_and_all_others_less(length, often, seldom, in_example):
    made = sample("cwe", length)
    example, text = (part for part in made.text.split("Memorize the ones that appear most often.\n")[1:])
    counted = Counter(listed(text))
    answers = set(made.questions[0].answers)
    assert len(answers) == 10
    assert {word: times for word, times in counted.items() if word in answers} == dict.fromkeys(answers, often)
    assert {times for word, times in counted.items() if word not in answers} == {seldom}
    words, _, solution = example.partition("\nQuestion:")
    often, seldom, distinct = in_example
    counted = Counter(listed(words))
    solved = listed(re.search(r"in the list are: (1\. .+)\nBelow", solution)[1])
    assert {word: counted[word] for word in solved} == dict.fromkeys(solved, often) and len(solved) == 10
    assert Counter(counted.values()) == {often: 10, seldom: distinct - 10}


@pytest.mark.parametrize("length", [512, 2048, 4096, 16384])
def test_the_three_most_frequent_coded_words_are_asked_for_in_order(length):
    made = sample("fwe", length)
    counted = Counter(made.text.partition("coded words. ")[2].split())
    (dots, most), *words = counted.most_common()
    assert dots == "..." and all(re.fullmatch("[a-z]{6}", word) for word, _ in words)
    assert made.questions[0].answers == tuple(word for word, _ in words[:3])
    assert most > words[0][1] > words[1][1] > words[2][1] > words[3][1]
    for k, (_, times) in enumerate(words[:3], 2):  # Zipf's law with exponent 2, cut to integers
        assert most / k**2 - 1 <= times <= (most + 1) / k**2


@pytest.mark.parametrize("name, said", [("two_stage", r"\?"), ("two_stage_lookup", r"(\d+)\.")])
@pytest.mark.parametrize("length", [600, 4096])
def test_the_color_of_the_sum_is_the_answer(name, said, length):
    for index in range(10):
        made = sample(name, length, index, questions=3)
        pairs = re.findall(r"(\d+): (\w+)", made.text)
        assert [int(key) for key, _ in pairs] == list(range(len(pairs)))
        colours = {int(key): colour for key, colour in pairs}
        assert len(set(colours.values())) > 10
        sums = set()
        for question in made.questions:
            found = re.search(rf"(\d+) \+ (\d+) = {said} ", question.text)
            a, b, *total = map(int, found.groups())
            assert total in ([], [a + b])
            assert question.answers == (colours[a + b],)
            sums.add(a + b)
        assert len(sums) == 3


def test_two_stage_and_its_lookup_differ_only_in_the_sum():
    sums, lookups = sample("two_stage", index=3), sample("two_stage_lookup", index=3)
    assert re.sub(r"= \d+\.", "= ?", lookups.prompt) == sums.prompt and lookups.prompt != sums.prompt


# Published wordings


@pytest.mark.parametrize("name", NIAH)
def test_niah_prompts_begin_and_end_in_rulers_words(name):
    _, _, kind, _, values, queries = NIAH[name]
    made = sample(name, 2048)
    asked, many = re.search(r"for (.+?) mentioned", made.questions[0].text)[1], values * queries > 1
    kind = kind if many else kind.removesuffix("s")
    some, are, what, verb = ("Some", f"{kind} are", "are all", "are") if many else ("A", f"{kind} is", "is", "is")
    assert made.text.startswith(
        f"{some} special magic {are} hidden within the following text. Make sure to memorize it. I will quiz you about "
        f"the {kind} afterwards.\n"
    )
    assert made.questions[0].text == (
        f"\nWhat {what} the special magic {kind} for {asked} mentioned in the provided text? The special magic {kind} "
        f"for {asked} mentioned in the provided text {verb}"
    )


WORDINGS = {
    "vt": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        "\nQuestion: Find all variables that are assigned the value 12345 in the text above. Answer: According to the "
        "chain(s) of variable assignment in the text above, 5 variables are assigned the value 12345, they are: ",
    ),
    "cwe": (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        "that appear most often.\n1. ",
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:",
    ),
    "fwe": (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
        "frequently appeared words in the above coded text? Answer: According to the coded text above, the three most "
        "frequently appeared words are:",
    ),
    "two_stage": (
        "Lets play a game. You have a dict and a mathematical addition equation. The keys of a dictionary can be any "
        "number. You need to find the corresponding key value in the dictionary after performing the addition and "
        "output the value corresponding to that key. The Dict is {0: ",
        "} The equation is 12345 + 12345 = ? Answer the corresponding color based on the addition result.",
    ),
}


@pytest.mark.parametrize("name", WORDINGS)
def test_other_prompts_begin_and_end_in_published_words(name):
    begin, end = WORDINGS[name]
    made = sample(name, 2048)
    assert made.text.startswith(begin)
    ending = made.text[-1:] * (name == "two_stage") + made.questions[0].text
    numbers = r"\d{5}" if name == "vt" else r"\d+(?= \+| =)"
    assert re.sub(numbers, "12345", ending) == end


@pytest.mark.parametrize("name", ["vt", "cwe"])
def test_a_solved_example_stands_first_in_the_words_of_the_task(name):
    begin, end = WORDINGS[name]
    text = re.sub(r"\b\d{5}\b", "12345", sample(name, 2048).text)
    assert text.count(begin) == 2 and text.count(end) == 1
    assert text.index(end) < text.rindex(begin)


# Grades


@pytest.mark.parametrize("name", [*NIAH, "vt", "cwe", "fwe", "needle"])
def test_each_answer_counts_its_share_in_any_wording_and_case(name):
    [question] = sample(name, 2048).questions
    said, count = ", ".join(question.answers), len(question.answers)
    for answer in (f"I think: {said}. That is it.", said.upper(), said.lower(), "\n".join(question.answers[::-1])):
        assert TASKS[name].score(answer, question) == 100
    for found in range(count):
        score = TASKS[name].score(" ".join(question.answers[count - found :]), question)
        assert score == pytest.approx(100 * found / count)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_multikey_3", "needle"])
def test_a_value_that_is_almost_right_is_wrong(name):
    [question] = sample(name, 2048).questions
    [value] = question.answers
    for answer in (value[:-1] + ("1" if value[-1] == "0" else "0"), value[1:], " ".join(value), value[::-1]):
        assert TASKS[name].score(answer, question) == 0


@pytest.mark.parametrize("name", QA)
def test_one_of_the_answers_to_a_question_about_documents_is_enough(name):
    question = Question("", ("the Seine", "Seine"))
    answers = ["It is the SEINE.", "Seine", "Sein", "Loire", ""]
    assert [TASKS[name].score(answer, question) for answer in answers] == [100, 100, 0, 0, 0]


@pytest.mark.parametrize("name", TWO_STAGE)
@pytest.mark.parametrize(
    "answer, right",
    [
        ("blue", True),
        (' Since 8 + 10 = 18, the corresponding color is "Blue".', True),
        ("BLUE, not red", True),
        ("red, blue", False),
        ("Not red but blue", False),
        ("bluebird", False),
        ("skyblue", False),
        ("blu", False),
        ("Fred said blue", True),  # "red" is only a part of a word
        ("", False),
    ],
)
def test_the_first_color_named_counts(name, answer, right):
    assert TASKS[name].score(answer, Question("", ("blue",))) == 100 * right


# Questions about documents

PAGES = [f"Page {i} tells of the town number {i}. " + "It is long. " * (i % 7) for i in range(60)]


def squad(question: str, *answers: str) -> dict:
    found = [{"text": answer, "answer_start": 0} for answer in answers]
    return {"question": question, "is_impossible": not answers, "answers": found}


ANN = [squad("Where does Ann live?", "Ulm", "in Ulm"), squad("Where does Bob live?")]
PARAGRAPHS = [
    {"context": "Ann lives in Ulm.", "qas": ANN},
    {"context": "Cem lives in Rome.", "qas": [squad("Who lives in Rome?", "Cem")]},
]
OTHERS = [{"context": page, "qas": []} for page in PAGES]
SQUAD = {"data": [{"title": "A", "paragraphs": PARAGRAPHS}, {"title": "B", "paragraphs": OTHERS}]}
HOTPOTQA = [
    {
        "question": "Which town do both share?",
        "answer": "Ulm",
        "context": [["Ann", ["Ann lives in Ulm.", " She sings."]], ["Cem", ["Cem lives in Ulm."]]],
    },
    {"question": "Who rules?", "answer": "Eve", "context": [[f"T{i}", [page]] for i, page in enumerate(PAGES)]},
]
ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


def documents(text: str) -> list[str]:
    """The documents of a prompt, which are numbered from 1."""
    head, *found = re.split(r"(?:^|\n\n)Document (\d+):\n", text.split("given documents.\n\n")[-1])
    assert head == "" and [int(number) for number in found[::2]] == list(range(1, len(found) // 2 + 1))
    return found[1::2]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(HOTPOTQA))
    return tmp_path


def test_documents_and_question_are_worded_as_published(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"title": "A", "paragraphs": PARAGRAPHS[:1]}]}))
    made = sample("qa_1", 120, data=tmp_path)
    assert made.text == f"{ORDER}\n\nThe following are given documents.\n\nDocument 1:\nAnn lives in Ulm."
    assert made.questions == (
        Question(f"\n\n{ORDER}\n\nQuestion: Where does Ann live? Answer:", ("Ulm", "in Ulm"), opening=" Answer:"),
    )


def test_every_question_that_can_be_answered_is_a_sample(data):
    assert [TASKS[name].size(Recipe(4096, encode, str, data=data)) for name in QA] == [2, 2]
    asked = [sample("qa_1", 500, index, data=data).questions[0].text for index in range(2)]
    assert "Ann" in asked[0] and "Who lives in Rome?" in asked[1]
    with pytest.raises(IndexError):
        sample("qa_1", 500, 2, data=data)


@pytest.mark.parametrize(
    "name, answering",
    [("qa_1", {"Ann lives in Ulm."}), ("qa_2", {"Ann\nAnn lives in Ulm. She sings.", "Cem\nCem lives in Ulm."})],
)
@pytest.mark.parametrize("length", [300, 800])
def test_documents_that_answer_stand_among_others_that_fill_the_length(name, answering, length, data):
    orders, places = set(), set()
    for seed in range(4):
        made = sample(name, length, data=data, seed=seed)
        found = documents(made.text)
        used = len(encode(made.prompt)) + 32
        longest = max(len(encode(page)) for page in PAGES) + 10
        assert length - 2 * longest <= used <= length
        assert answering < set(found) and len(set(found)) == len(found) > 3
        orders.add(tuple(found))
        places.add(found.index(max(answering)))
        assert sample(name, length, data=data, seed=seed) == made
    assert len(orders) == 4 and len(places) > 1


def test_other_paragraphs_of_the_article_come_before_those_of_others(data):
    for seed in range(4):
        assert "Cem lives in Rome." in documents(sample("qa_1", 200, data=data, seed=seed).text)


@pytest.mark.parametrize("name", QA)
@pytest.mark.parametrize("articles, pages", [(2, 62), (1, 2)])
def test_documents_repeat_when_there_are_too_few(name, data, articles, pages):
    (data / "squad.json").write_text(json.dumps({"data": SQUAD["data"][:articles]}))
    (data / "hotpotqa.json").write_text(json.dumps(HOTPOTQA[:articles]))
    made = sample(name, 4096, data=data)
    found = Counter(documents(made.text))
    assert len(found) == pages < found.total() and len(encode(made.prompt)) > 3900


@pytest.mark.parametrize(
    "task, file, damaged",
    [
        (TASKS["qa_1"], "squad.json", ('{"data": ', '[["other"]]')),
        (TASKS["qa_2"], "hotpotqa.json", ('{"data": ', '[["other"]]')),
        (scbench.TASKS["scbench_kv"], "scbench_kv.jsonl", ("[1]", "{", '{"multi_turns": [{}]}')),
    ],
)
def test_without_a_dataset_one_line_says_what_to_give(task, file, damaged, tmp_path):
    def refused(kind: type, folder) -> str:
        with pytest.raises(kind) as error:
            task.size(Recipe(4096, encode, str, data=folder))
        assert file in str(error.value) and "\n" not in str(error.value)
        return str(error.value)

    assert "--data" in refused(ValueError, None)
    assert "--data" in refused(FileNotFoundError, tmp_path)
    for text in damaged:
        (tmp_path / file).write_text("\n" + text)
        assert str(tmp_path / file) in refused(ValueError, tmp_path)


# SCBench's files


def write_scbench(folder, pairs: int = 400) -> dict[str, str]:
    """Two texts of key-value pairs, in SCBench's format; returns the first one's pairs."""
    rng, lines = random.Random(0), []
    for _ in range(2):
        held = {f"{rng.getrandbits(64):016x}": f"{rng.getrandbits(64):016x}" for _ in range(pairs)}
        asked = [*list(held)[:2], list(held)[-1], list(held)[pairs // 2]]
        turns = [{"input": f'Key: "{key}"\nThe value is', "answer": held[key]} for key in asked]
        lines.append((held, json.dumps({"id": len(lines), "context": json.dumps(held), "multi_turns": turns})))
    (folder / "scbench_kv.jsonl").write_text("\n".join(line for _, line in lines) + "\n\n")
    return lines[0][0]


def test_a_text_of_scbench_is_asked_again_and_again(tmp_path):
    held, task = write_scbench(tmp_path), scbench.TASKS["scbench_kv"]
    recipe = Recipe(100_000, encode, str, questions=3, data=tmp_path)
    made = task.sample(recipe, 0)
    assert task.size(recipe) == 2 and made != task.sample(recipe, 1)
    assert json.loads(made.text.partition("below.\n\n")[2]) == held and len(made.questions) == 3
    assert made.questions[1].text.startswith('\n\nKey: "')
    (key,) = re.findall("[0-9a-f]{16}", made.questions[1].text)
    assert made.questions[1].answers == (held[key],)
    assert task.score(f"It is {held[key]}.", made.questions[1]) == 100
    assert task.score("It is here.", made.questions[1]) == 0


def test_a_text_of_scbench_that_is_too_long_loses_its_middle(tmp_path):
    held = write_scbench(tmp_path)
    made = scbench.TASKS["scbench_kv"].sample(Recipe(4096, encode, str, data=tmp_path), 0)
    assert 4096 - 150 - 100 < len(encode(made.prompt)) <= 4096 - 150
    seen = [key for key in held if f'"{key}"' in made.text]
    assert {*list(held)[:20], *list(held)[-20:]} <= {*seen} and list(held)[200] not in seen


def test_answers_in_lists_are_one_or_all_to_be_found(tmp_path):
    record = {"input": "a text", "multi_turns": [{"input": "Which?", "answer": ["x1", 2]}]}
    for name, half in (("vt", 50), ("qa_eng", 100), ("many_shot", 100)):
        (tmp_path / f"scbench_{name}.jsonl").write_text(json.dumps(record))
        task = scbench.TASKS[f"scbench_{name}"]
        [question] = task.sample(Recipe(4096, encode, str, data=tmp_path), 0).questions
        assert question.answers == ("x1", "2") and task.score("X1", question) == half


# Haystacks


def test_an_empty_haystack_is_refused():
    with pytest.raises(ValueError, match="no words"):
        sample("niah_single_2", haystack=" \n")


# Forced texts


def test_excerpts_are_adjacent_and_end_in_the_forced_tokens():
    found = texts.excerpts(list(range(1000)), length=202, forced=128, samples=3, bos=[-1, -2])
    assert found == [([-1, -2, *range(at, at + 72)], list(range(at + 72, at + 200))) for at in (0, 200, 400)]
    assert [len(texts.excerpts(list(range(n)), 200, 128, 10, [])) for n in (599, 600)] == [2, 3]


def test_excerpts_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="a length of 129 tokens is too short"):
        texts.excerpts(list(range(1000)), 129, 128, 1, [-1])
    assert texts.excerpts(list(range(1000)), 130, 128, 1, [-1]) == [([-1, 0], list(range(1, 129)))]
    with pytest.raises(ValueError, match="the text has 198 tokens, fewer than a sample of 199"):
        texts.excerpts(list(range(198)), 200, 128, 1, [-1])


THREE_TO_ONE, EVEN = [math.log(3), 0.0], [0.0, 0.0]  # logits of probabilities 3/4 and 1/4, and 1/2 and 1/2


def test_the_negative_log_likelihood_is_the_mean_over_rows():
    logits = torch.tensor([THREE_TO_ONE, THREE_TO_ONE, EVEN])
    expected = (math.log(4 / 3) + math.log(4) + math.log(2)) / 3
    assert texts.negative_log_likelihood(logits, [0, 1, 0]) == pytest.approx(expected)


def test_divergence_is_that_of_the_method_from_the_full_cache():
    full, method = torch.tensor([THREE_TO_ONE, EVEN]), torch.tensor([EVEN, EVEN]) + 5
    kl, _ = texts.divergence(method, full)  # 3/4 ln(3/4 : 1/2) + 1/4 ln(1/4 : 1/2), and 0
    assert kl == pytest.approx((0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2)
    kl, _ = texts.divergence(full, method)
    assert kl == pytest.approx((0.5 * math.log(2 / 3) + 0.5 * math.log(2)) / 2)


def test_agreement_is_the_share_of_rows_with_the_same_likeliest_token():
    full = torch.tensor([[0.0, 1, 2], [3, 1, 2], [0, 5, 1], [1, 0, 0]])
    method = torch.tensor([[0.0, 1, 9], [0, 1, 2], [4, 5, 1], [7, 0, 0]])
    assert texts.divergence(method, full)[1] == 0.75
    assert texts.divergence(full, full) == (0, 1)


@pytest.mark.parametrize("name", [name for name in GENERATED if name not in two_stage.TASKS])
def test_a_question_ends_with_the_opening_of_its_answer(name):
    recipe = Recipe(2048, str.split, " ".join, questions=2)
    for question in TASKS[name].sample(recipe, 0).questions:
        assert question.opening and question.text.endswith(question.opening)
        said = question.text.removesuffix(question.opening).strip()
        assert said.endswith(("?", "above.", "list?", "text?")) and "nswer" not in said
