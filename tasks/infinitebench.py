"""InfiniteBench's 12 tasks (Zhang et al., "∞Bench: Extending Long Context Evaluation Beyond 100K Tokens", arXiv
2402.13718): retrieval, books, a dialogue, code and arithmetic, with 100 thousand tokens and more.

Prompts, answer lengths, the cut in the middle of overlong texts and scores are the published ones
(github.com/OpenBMB/InfiniteBench, MIT, copyright 2023: src/prompt.py, as of commit 753b69f, eval_utils.py,
compute_scores.py). The prompts are its yarn_mistral_templates, which are for base models and end where the answer
begins. The data, `TASK.jsonl`, comes from the data folder or, if none is given, from huggingface.co (dataset
xinrongzhang2022/InfiniteBench).
"""

import re
from functools import partial
from pathlib import Path

from tasks import Question, Sample, Recipe, Task, metrics
from tasks.jsonl import cut_middle, download, find, line_starts, record, split

REPO = "xinrongzhang2022/InfiniteBench"

OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}\n\n"
PROMPTS = {
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information.\n\n{context}\n\n{input}\n\nThe pass key is"
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about the "
        "important information there.\n\n{context}\n\n{input}\n\nThe sequence of digits is"
    ),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}"
    ),
    "longbook_sum_eng": "Summarize the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\n"
        + OPTIONS
        + "The letter of the correct answer is"
    ),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\n"
        "Question: {input}\nAnswer:"
    ),
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    "math_find": "{prefix}\n\n{context}\n\n{input}",
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:"
    ),
    "code_run": (
        "There is a function called {func} in the following Python code.\n\n{context}\n\n"
        "Please compute the exact value of {func_call}. The value of {func_call} is"
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\n{context}\n\nOptions:\n" + OPTIONS + "The correct option is:"
    ),
    "longdialogue_qa_eng": (
        "Below is a dialogue script where one random occurrence of a character name is replaced with "
        '"$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\n'
        "The name that has been replaced with $$MASK$$ is likely"
    ),
}
MAX_NEW_TOKENS_AND_SCORE = {
    "passkey": (6, metrics.first_integer),
    "number_string": (12, metrics.first_integer),
    "kv_retrieval": (50, metrics.kv_retrieval),
    "longbook_sum_eng": (1200, metrics.rouge_lsum),
    "longbook_choice_eng": (40, metrics.longbook_choice_eng),
    "longbook_qa_eng": (40, metrics.qa_f1),
    "longbook_qa_chn": (40, metrics.longbook_qa_chn),
    "math_find": (3, metrics.math_find),
    "math_calc": (30000, metrics.math_calc),
    "code_run": (5, metrics.code_run),
    "code_debug": (5, metrics.code_debug),
    "longdialogue_qa_eng": (40, metrics.longdialogue_qa_eng),
}


def path_of(name: str, recipe: Recipe) -> Path:
    file = f"{name}.jsonl"
    return download(REPO, file) if recipe.data is None else find(recipe.data, file, REPO)


def fields(name: str, found: dict) -> dict[str, str]:
    """A record's values for its template's fields. Raises ValueError if its question is not worded as published."""
    asked = found["input"]
    filled = {"input": asked}
    filled |= {f"OPTION_{letter}": option for letter, option in zip("ABCD", found.get("options") or (), strict=False)}
    worded = {"math_find": "(The .+) of", "code_run": r"(func_\d+)\(-?\d+\)"}.get(name)
    if worded:
        match = re.search(worded, asked)
        if not match:
            raise ValueError(f"{name}.jsonl asks {asked!r}, which is not worded as published; fetch the file again")
        filled |= {"func": match[1], "func_call": match[0]}
        filled["prefix"] = f"What is {match[1].lower()} in the following list?"
    return filled


def answers(name: str, found: dict) -> tuple[str, ...]:
    """The references for a record's answer; for multiple choice, the right option's text and its letter."""
    answer = found["answer"]
    if not isinstance(answer, list):
        answer = [answer]
    elif isinstance(answer[0], list):
        answer = answer[0]
    answer = tuple(map(str, answer))
    if name in ("code_debug", "longbook_choice_eng") and len(answer) == 1:
        answer += ("ABCD"[found["options"].index(answer[0])],)
    return answer


def sample(name: str, recipe: Recipe, index: int) -> Sample:
    found = record(path_of(name, recipe), index)
    text, question = split(PROMPTS[name], found["context"], fields(name, found))
    text, question = cut_middle(recipe, text, question, MAX_NEW_TOKENS_AND_SCORE[name][0])
    return Sample(text, (Question(question, answers(name, found)),))


def score(name: str, answer: str, question: Question) -> float:
    _, metric = MAX_NEW_TOKENS_AND_SCORE[name]
    return metric(answer, question.answers)


def size(name: str, recipe: Recipe) -> int:
    return len(line_starts(path_of(name, recipe)))


TASKS = {
    name: Task(name, max_new_tokens, partial(sample, name), partial(score, name), partial(size, name))
    for name, (max_new_tokens, _) in MAX_NEW_TOKENS_AND_SCORE.items()
}
