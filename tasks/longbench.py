"""LongBench's 21 tasks (Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", arXiv
2308.14508): questions, summaries, few-shot learning, synthetic tasks and code, in English and Chinese.

Prompts, answer lengths, the cut in the middle of a text that is too long, and scores are the published ones
(github.com/THUDM/LongBench, MIT, copyright 2023 THU-KEG & Zhipu AI: config/dataset2prompt.json, as of commit 8ae23fd,
and dataset2maxlen.json, pred.py, eval.py, metrics.py). The prompts stand as they are, for base models; the published
runs put those of all but the few-shot and the code tasks into a chat model's template. The data, `TASK.jsonl`, comes
from the data folder or, if none is given, from huggingface.co (dataset THUDM/LongBench).
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from zipfile import ZipFile

from tasks import Question, Sample, Setting, Task, metrics

REPO = "THUDM/LongBench"
PAGE = "https://huggingface.co/datasets/{}"

PASSAGES = ("Answer the question based on the given passages. Only give me the answer and do not output any other "
            "words.\n\n")
MULTI_HOP = f"{PASSAGES}The following are given passages.\n{{context}}\n\n{PASSAGES}Question: {{input}}\nAnswer:"
PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}"
        "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
        "Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:"),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
        'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
        '"no", or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:'),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答："),
    "hotpotqa": MULTI_HOP,
    "2wikimqa": MULTI_HOP,
    "musique": MULTI_HOP,
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答："),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:"),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:"),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:"),
    "vcsum": "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}"),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"),
    "lsht": "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: "),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: "),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：'),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}


def classification(answer: str, answers: Sequence[str]) -> float:
    """metrics.classification, where `answers` are the right classes and then all classes."""
    right = [label for label, times in Counter(answers).items() if times > 1]
    return metrics.classification(answer, right, sorted(set(answers)))


def first_line(score: Callable[[str, Sequence[str]], float]) -> Callable[[str, Sequence[str]], float]:
    """The score of an answer's first line that is not empty: few-shot answers go on with further examples."""
    return lambda answer, answers: score(answer.lstrip("\n").partition("\n")[0], answers)


MAX_NEW_TOKENS_AND_SCORE = {
    "narrativeqa": (128, metrics.qa_f1),
    "qasper": (128, metrics.qa_f1),
    "multifieldqa_en": (64, metrics.qa_f1),
    "multifieldqa_zh": (64, metrics.qa_f1_zh),
    "hotpotqa": (32, metrics.qa_f1),
    "2wikimqa": (32, metrics.qa_f1),
    "musique": (32, metrics.qa_f1),
    "dureader": (128, metrics.rouge_l_zh),
    "gov_report": (512, metrics.rouge_l),
    "qmsum": (512, metrics.rouge_l),
    "multi_news": (512, metrics.rouge_l),
    "vcsum": (512, metrics.rouge_l_zh),
    "trec": (64, first_line(classification)),
    "triviaqa": (32, first_line(metrics.qa_f1)),
    "samsum": (128, first_line(metrics.rouge_l)),
    "lsht": (64, first_line(classification)),
    "passage_count": (32, metrics.count),
    "passage_retrieval_en": (32, metrics.retrieval),
    "passage_retrieval_zh": (32, metrics.retrieval_zh),
    "lcc": (64, metrics.code_similarity),
    "repobench-p": (64, metrics.code_similarity),
}


@cache
def download(repo: str, name: str) -> Path:
    """A file of a dataset of huggingface.co, in huggingface_hub's cache."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # what a lost connection raises depends on the HTTP library behind huggingface_hub
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise FileNotFoundError(f"downloading {name} failed ({why}); fetch it from {PAGE.format(repo)} and give its "
                                "folder as data folder") from None


def find(folder: Path, name: str, repo: str) -> Path:
    """A file in a data folder, or in `data` there. Raises FileNotFoundError."""
    for path in (folder / name, folder / "data" / name):
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no {folder / name}: fetch it from {PAGE.format(repo)}, or give no data folder "
                            "to have it downloaded")


@cache
def line_starts(path: Path) -> list[int]:
    """The byte where each line that is not blank starts. Records are parsed one by one: a file may have a gigabyte."""
    starts, at = [], 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                starts.append(at)
            at += len(line)
    return starts


def record(path: Path, index: int) -> dict:
    """The object on a line of a jsonl file. Raises IndexError past the last, ValueError for what is not JSON."""
    with path.open("rb") as file:
        file.seek(line_starts(path)[index])
        try:
            return json.loads(file.readline())
        except ValueError as error:
            raise ValueError(f"record {index} of {path} is not JSON ({error}); fetch the file again") from None


def cut_middle(setting: Setting, text: str, question: str, reserve: int) -> tuple[str, str]:
    """The text and the question of a prompt that, with `reserve` tokens more, has at most setting.length tokens.

    Of one that is too long the first and the last half of as many tokens as fit are kept, as published; a token fewer
    at a time if the joined text has more tokens than its halves. Raises ValueError if nothing fits.
    """
    ids, room = setting.encode(text + question), setting.length - reserve
    if len(ids) <= room:
        return text, question
    for half in range(room // 2, 0, -1):
        head, tail = setting.decode(ids[:half]), setting.decode(ids[-half:])
        if len(setting.encode(head + tail)) <= room:
            break
    else:
        raise ValueError(f"a length of {setting.length} tokens is too short: {reserve} of them are for the answer")
    if tail.endswith(question):
        return head + tail.removesuffix(question), question
    return head, tail  # the cut reaches into the question


def split(template: str, context: str, fields: dict[str, str]) -> tuple[str, str]:
    """A template filled in, up to the end of its context and from there."""
    before, after = template.split("{context}")
    return before.format(**fields) + context, after.format(**fields)


def path_of(name: str, setting: Setting) -> Path:
    if setting.data is not None:
        return find(setting.data, f"{name}.jsonl", REPO)
    archive = download(REPO, "data.zip")
    path = archive.parent / "data" / f"{name}.jsonl"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"{name}.part")
        with ZipFile(archive) as files:
            part.write_bytes(files.read(f"data/{name}.jsonl"))
        part.rename(path)
    return path


def sample(name: str, setting: Setting, index: int) -> Sample:
    max_new_tokens, score = MAX_NEW_TOKENS_AND_SCORE[name]
    if score in (metrics.qa_f1_zh, metrics.rouge_l_zh):
        metrics.segmenter()  # refuses now what would fail after an answer
    found = record(path_of(name, setting), index)
    text, question = split(PROMPTS[name], found["context"], {"input": found["input"]})
    text, question = cut_middle(setting, text, question, max_new_tokens)
    return Sample(text, (Question(question, (*found["answers"], *(found["all_classes"] or ()))),))


def size(name: str, setting: Setting) -> int:
    return len(line_starts(path_of(name, setting)))


TASKS = {name: Task(name, max_new_tokens, partial(sample, name), score, partial(size, name))
         for name, (max_new_tokens, score) in MAX_NEW_TOKENS_AND_SCORE.items()}
