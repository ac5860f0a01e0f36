"""LongBench's 21 tasks (Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", arXiv
2308.14508): questions, summaries, few-shot learning, synthetic tasks and code, in English and Chinese.

Prompts, answer lengths, the cut in the middle of overlong texts and scores are the published ones
(github.com/THUDM/LongBench, MIT, copyright 2023 THU-KEG & Zhipu AI: config/dataset2prompt.json, as of commit 8ae23fd,
and dataset2maxlen.json, pred.py, eval.py, metrics.py); longbench.json has them. The published runs apply a chat model's
template in all tasks except the few-shot and code ones, as eval.py --chat does here. The data, `TASK.jsonl`, comes from
the data folder or, if none is given, from huggingface.co (dataset THUDM/LongBench).
"""

from pathlib import Path
from zipfile import ZipFile

from runtime.device import replacing
from tasks import Question, Recipe, metrics
from tasks.jsonl import download, find, make_tasks, read_specs

REPO = "THUDM/LongBench"
SPECS = read_specs("longbench.json")
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")
CODE = ("lcc", "repobench-p")


def path_of(name: str, recipe: Recipe) -> Path:
    if recipe.data is not None:
        return find(recipe.data, f"{name}.jsonl", REPO)
    archive = download(REPO, "data.zip")
    path = archive.parent / "data" / f"{name}.jsonl"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        with ZipFile(archive) as files, replacing(path) as new:
            new.write_bytes(files.read(f"data/{name}.jsonl"))
    return path


def fields(name: str, record: dict) -> dict[str, str]:
    if SPECS[name]["score"].endswith("_zh"):
        metrics.segmenter()  # if jieba is missing, fails now rather than after an answer
    return {"input": record["input"]}


def references(name: str, record: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The references for a record's answer, and its classes."""
    return tuple(record["answers"]), tuple(record["all_classes"] or ())


def score(name: str, answer: str, question: Question) -> float:
    metric = getattr(metrics, SPECS[name]["score"])
    if name in FEW_SHOT:  # the model may continue with further examples
        answer = answer.lstrip("\n").partition("\n")[0]
    rest = [question.classes] if metric is metrics.classification else []
    return metric(answer, question.answers, *rest)


TASKS = make_tasks(SPECS, path_of, fields, references, score, plain=(*FEW_SHOT, *CODE))
