"""The results that eval.py has so far, and its table."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from tasks.answers import Job
from terminal.cli import Choice, read_text, table


@dataclass
class Journal:
    """The results so far, by key; with a path, also kept in that file, one line of JSON per sample."""

    path: Path | None
    results: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self):
        if self.path is None or not self.path.exists():
            return
        text = read_text(str(self.path))
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self.results[entry["key"]] = entry["result"]
            except (ValueError, LookupError, TypeError, RecursionError):
                continue  # a line cut off when the run was stopped, or one that eval.py did not write
        if text and not text.endswith("\n"):
            with open(self.path, "a") as file:
                file.write("\n")

    def add(self, key: str, result: dict) -> None:
        self.results[key] = result
        if self.path is not None:
            with open(self.path, "ab", buffering=0) as file:  # a line at once: other ranks add theirs
                file.write(json.dumps({"key": key, "result": result}).encode() + b"\n")


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def summary(job: Job, results: list[dict]) -> dict:
    """Means over a job's samples; `later` is the mean over all later questions."""
    if job.task == "perplexity":
        return {"n": len(results), "score": math.exp(mean([r["nll"] for r in results])), "first": None, "later": None}
    means = {"n": len(results), "score": mean([r["score"] for r in results])}
    if job.task == "fidelity":
        return means | {"first": None, "later": None, "kl": mean([r["kl"] for r in results])}
    later = [question["score"] for r in results for question in r["later"]]
    return means | {"first": mean([r["first"] for r in results]), "later": mean(later)}


def accuracy_table(rows: list[dict], jobs: list[Job], chosen: list[Choice]) -> str:
    """One line per method, one column per task; cells are `first / later` where a task has later questions."""
    several, graded = len({job.length for job in jobs}) > 1, [job for job in jobs if job.graded]

    def cell(row: dict) -> str:
        if row["score"] is None:
            return f"min {row['minimum']}"
        if row["task"] == "fidelity":
            return f"{row['score']:.1f}% kl {row['kl']:.4f}"
        later = "" if row["later"] is None else f" / {row['later']:.1f}"
        return f"{row['score'] if row['first'] is None else row['first']:.1f}{later}"

    lines = []
    for method in chosen:
        own = [r for r in rows if (r["kv"], r["budget"], r["options"]) == (method.kv, method.budget, method.options)]
        by_job = {(r["task"], r["length"]): r for r in own}
        line = {"method": method.label}
        line |= {j.task + f"@{j.length}" * several: cell(by_job[j.task, j.length]) for j in jobs}
        if len(graded) > 1:
            scores = [by_job[job.task, job.length]["score"] for job in graded]
            line["average"] = "-" if None in scores else f"{mean(scores):.1f}"
        sizes = [(r["kv_device_bytes"] + r["kv_host_bytes"], r["share_of_full"]) for r in own if r["score"] is not None]
        line |= {"KV bytes": f"{max(sizes)[0] / 1e6:.2f} MB" if sizes else "-"}
        line |= {"of full": f"{100 * max(sizes)[1]:.1f}%" if sizes else "-"}
        lines.append(line)
    chat = ", ".join(dict.fromkeys(job.task for job in jobs if job.chat))
    return table(lines) + f"\nin the checkpoint's chat template: {chat}" * bool(chat)
