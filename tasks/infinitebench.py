"""InfiniteBench's 12 tasks (Zhang et al., "∞Bench: Extending Long Context Evaluation Beyond 100K Tokens", arXiv
2402.13718): retrieval, books, a dialogue, code and arithmetic, with 100 thousand tokens and more.

Prompts, answer lengths, the cut in the middle of overlong texts and scores are the published ones
(github.com/OpenBMB/InfiniteBench, MIT, copyright 2023: src/prompt.py, as of commit 753b69f, eval_utils.py,
compute_scores.py); infinitebench.json has them. The prompts are its yarn_mistral_templates, which are for base models
and end where the answer begins. The data, `TASK.jsonl`, comes from the data folder or, if none is given, from
huggingface.co (dataset xinrongzhang2022/InfiniteBench).
"""

import re

from tasks.jsonl import Published

WORDED = {"math_find": "(The .+) of", "code_run": r"(func_\d+)\(-?\d+\)"}  # questions that are taken apart
CHOICE = ("code_debug", "longbook_choice_eng")


class InfiniteBench(Published):
    repo = "xinrongzhang2022/InfiniteBench"

    def fill(self, record: dict) -> dict[str, str]:
        asked = record["input"]
        fields = {"input": asked}
        fields |= {f"OPTION_{x}": option for x, option in zip("ABCD", record.get("options") or (), strict=False)}
        if self.name in WORDED:
            match = re.search(WORDED[self.name], asked)
            if not match:
                raise ValueError(f"{asked!r} is not worded as published; fetch {self.name}.jsonl again")
            fields |= {"func": match[1], "func_call": match[0]}
            fields |= {"prefix": f"What is {match[1].lower()} in the following list?"}
        return fields

    def references(self, record: dict) -> dict[str, tuple[str, ...]]:
        """For multiple choice, the right option's text and its letter."""
        answer = record["answer"]
        if isinstance(answer, list) and isinstance(answer[0], list):
            answer = answer[0]
        answers = tuple(map(str, answer if isinstance(answer, list) else [answer]))
        if self.name in CHOICE and len(answers) == 1:
            answers += ("ABCD"[record["options"].index(answers[0])],)
        return {"answers": answers}


TASKS = InfiniteBench.tasks("infinitebench.json")
