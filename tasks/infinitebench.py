"""InfiniteBench's 12 tasks (Zhang et al., "∞Bench: Extending Long Context Evaluation Beyond 100K Tokens", arXiv
2402.13718): retrieval, books, a dialogue, code and arithmetic, with 100 thousand tokens and more.

Prompts, answer lengths, the cut in the middle of overlong texts and scores are the published ones
(github.com/OpenBMB/InfiniteBench, MIT, copyright 2023: src/prompt.py, as of commit 753b69f, eval_utils.py,
compute_scores.py); infinitebench.json has them. The prompts are its yarn_mistral_templates, which are for base models
and end where the answer begins. The data, `TASK.jsonl`, comes from the data folder or, if none is given, from
huggingface.co (dataset xinrongzhang2022/InfiniteBench).
"""

import re
from pathlib import Path

from tasks import Question, Recipe, metrics
from tasks.jsonl import download, find, make_tasks, read_specs

REPO = "xinrongzhang2022/InfiniteBench"
SPECS = read_specs("infinitebench.json")


def path_of(name: str, recipe: Recipe) -> Path:
    file = f"{name}.jsonl"
    return download(REPO, file) if recipe.data is None else find(recipe.data, file, REPO)


def fields(name: str, record: dict) -> dict[str, str]:
    """A record's values for its template's fields. Raises ValueError if its question is not worded as published."""
    asked = record["input"]
    filled = {"input": asked}
    filled |= {f"OPTION_{letter}": option for letter, option in zip("ABCD", record.get("options") or (), strict=False)}
    worded = {"math_find": "(The .+) of", "code_run": r"(func_\d+)\(-?\d+\)"}.get(name)
    if worded:
        match = re.search(worded, asked)
        if not match:
            raise ValueError(f"{name}.jsonl asks {asked!r}, which is not worded as published; fetch the file again")
        filled |= {"func": match[1], "func_call": match[0]}
        filled["prefix"] = f"What is {match[1].lower()} in the following list?"
    return filled


def references(name: str, record: dict) -> tuple[tuple[str, ...]]:
    """The references for a record's answer; for multiple choice, the right option's text and its letter."""
    answer = record["answer"]
    if not isinstance(answer, list):
        answer = [answer]
    elif isinstance(answer[0], list):
        answer = answer[0]
    answer = tuple(map(str, answer))
    if name in ("code_debug", "longbook_choice_eng") and len(answer) == 1:
        answer += ("ABCD"[record["options"].index(answer[0])],)
    return (answer,)


def score(name: str, answer: str, question: Question) -> float:
    return getattr(metrics, SPECS[name]["score"])(answer, question.answers)


TASKS = make_tasks(SPECS, path_of, fields, references, score)
