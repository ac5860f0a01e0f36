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
from tasks import Question, metrics
from tasks.jsonl import Published, download

FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")
CODE = ("lcc", "repobench-p")


class LongBench(Published):
    repo = "THUDM/LongBench"

    def fetch(self) -> Path:
        archive = download(self.repo, "data.zip")
        path = archive.parent / "data" / f"{self.name}.jsonl"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            with ZipFile(archive) as files, replacing(path) as new:
                new.write_bytes(files.read(f"data/{path.name}"))
        return path

    def fill(self, record: dict) -> dict[str, str]:
        if self.metric.endswith("_zh"):
            metrics.segmenter()  # if jieba is missing, fails now rather than after an answer
        return super().fill(record)

    def references(self, record: dict) -> dict[str, tuple[str, ...]]:
        return {"answers": tuple(record["answers"]), "classes": tuple(record["all_classes"] or ())}

    def score(self, answer: str, question: Question) -> float:
        if self.name in FEW_SHOT:  # the model may continue with further examples
            answer = answer.lstrip("\n").partition("\n")[0]
        return super().score(answer, question)


TASKS = LongBench.tasks("longbench.json", plain=(*FEW_SHOT, *CODE))
