"""RULER's question answering: qa_1 from SQuAD, qa_2 from HotpotQA. See tasks/ruler.py."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tasks import Question, Recipe, Sample, fill_length


def opened(text: str, answers: tuple[str, ...]) -> Question:
    """A question whose text from " Answer:" on begins the answer: in a chat, the model's turn begins with it."""
    return Question(text, answers, opening=text[text.rindex(" Answer:") :])


@cache
def read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: download the dataset, and name its folder with --data") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None


@dataclass(frozen=True)
class Asked:
    """A question, with the numbers of the documents that answer it and of documents close to these."""

    query: str
    answers: tuple[str, ...]
    support: list[int]
    close: list[int]


def squad(data: dict) -> tuple[list[Asked], list[str]]:
    documents = sorted({p["context"] for article in data["data"] for p in article["paragraphs"]})
    number = {document: i for i, document in enumerate(documents)}
    asked = []
    for article in data["data"]:
        near = [number[p["context"]] for p in article["paragraphs"]]
        for p in article["paragraphs"]:
            own = number[p["context"]]
            asked += [
                Asked(qa["question"], tuple(a["text"] for a in qa["answers"]), [own], [i for i in near if i != own])
                for qa in p["qas"]
                if not qa.get("is_impossible")
            ]
    return asked, documents


def hotpotqa(data: list) -> tuple[list[Asked], list[str]]:
    def pages(record: dict) -> Iterator[str]:
        return (f"{title}\n{''.join(sentences)}" for title, sentences in record["context"])

    documents = sorted({page for record in data for page in pages(record)})
    number = {document: i for i, document in enumerate(documents)}
    return [Asked(r["question"], (r["answer"],), [number[page] for page in pages(r)], []) for r in data], documents


@cache
def read_qa(dataset: str, folder: Path | None) -> tuple[list[Asked], list[str]]:
    if folder is None:
        task = {"squad": "qa_1", "hotpotqa": "qa_2"}[dataset]
        raise ValueError(
            f"{task} needs {dataset}.json, which does not ship with RULER's generators: give its folder with --data"
        )
    path = folder / f"{dataset}.json"
    try:
        return {"squad": squad, "hotpotqa": hotpotqa}[dataset](read_json(path))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{path} is not the {dataset} file that RULER reads ({error!r})") from None


def count_qa(dataset: str, recipe: Recipe) -> int:
    return len(read_qa(dataset, recipe.data)[0])


def answering(dataset: str, recipe: Recipe, index: int) -> Sample:
    asked, documents = read_qa(dataset, recipe.data)
    ask = asked[index]
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )

    def make(n: int) -> Sample:
        rng = recipe.rng(dataset, index)
        missing = n - len(ask.support)
        close = rng.sample(ask.close, min(missing, len(ask.close)))
        taken = set(ask.support) | set(ask.close)
        others = [i for i in range(len(documents)) if i not in taken] if missing > len(close) else []
        rest = missing - len(close)
        far = rng.sample(others, min(rest, len(others)))
        again = rng.choices(others or range(len(documents)), k=max(0, rest - len(others)))
        chosen = ask.support + close + far + again
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{documents[d]}" for i, d in enumerate(chosen, 1))
        text = f"{order}\n\nThe following are given documents.\n\n{context}"
        return Sample(text, (opened(f"\n\n{order}\n\nQuestion: {ask.query} Answer:", ask.answers),))

    return fill_length(make, recipe, 32, smallest=len(ask.support))
