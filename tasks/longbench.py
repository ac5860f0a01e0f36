"""LongBench's 21 tasks (Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", arXiv
2308.14508): questions, summaries, few-shot learning, synthetic tasks and code, in English and Chinese.

Prompts, answer lengths, the cut in the middle of overlong texts and scores are the published ones
(github.com/THUDM/LongBench, MIT, copyright 2023 THU-KEG & Zhipu AI: config/dataset2prompt.json, as of commit 8ae23fd,
and dataset2maxlen.json, pred.py, eval.py, metrics.py). The published runs apply a chat model's template in all tasks
except the few-shot and code ones, as eval.py --chat does here. The data, `TASK.jsonl`, comes from the data folder or,
if none is given, from huggingface.co (dataset THUDM/LongBench).
"""

from functools import partial
from pathlib import Path
from zipfile import ZipFile

from tasks import Question, Sample, Recipe, Task, metrics
from tasks.jsonl import cut_middle, download, find, line_starts, record, split

REPO = "THUDM/LongBench"

PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
)
MULTI_HOP = f"{PASSAGES}The following are given passages.\n{{context}}\n\n{PASSAGES}Question: {{input}}\nAnswer:"
PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}"
        "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
        "Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
        'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
        '"no", or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:'
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答："
    ),
    "hotpotqa": MULTI_HOP,
    "2wikimqa": MULTI_HOP,
    "musique": MULTI_HOP,
    "dureader": (
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答："
    ),
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:"
    ),
    "vcsum": "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
    ),
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "lsht": "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: "
    ),
    "passage_retrieval_zh": (
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        '下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：'
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}
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
    "trec": (64, metrics.classification),
    "triviaqa": (32, metrics.qa_f1),
    "samsum": (128, metrics.rouge_l),
    "lsht": (64, metrics.classification),
    "passage_count": (32, metrics.count),
    "passage_retrieval_en": (32, metrics.retrieval),
    "passage_retrieval_zh": (32, metrics.retrieval_zh),
    "lcc": (64, metrics.code_similarity),
    "repobench-p": (64, metrics.code_similarity),
}
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")
CODE = ("lcc", "repobench-p")


def path_of(name: str, recipe: Recipe) -> Path:
    if recipe.data is not None:
        return find(recipe.data, f"{name}.jsonl", REPO)
    archive = download(REPO, "data.zip")
    path = archive.parent / "data" / f"{name}.jsonl"
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f"{name}.part")
        with ZipFile(archive) as files:
            part.write_bytes(files.read(f"data/{name}.jsonl"))
        part.rename(path)
    return path


def sample(name: str, recipe: Recipe, index: int) -> Sample:
    max_new_tokens, metric = MAX_NEW_TOKENS_AND_SCORE[name]
    if metric in (metrics.qa_f1_zh, metrics.rouge_l_zh):
        metrics.segmenter()  # if jieba is missing, fails now rather than after an answer
    found = record(path_of(name, recipe), index)
    text, question = split(PROMPTS[name], found["context"], {"input": found["input"]})
    text, question = cut_middle(recipe, text, question, max_new_tokens)
    return Sample(text, (Question(question, tuple(found["answers"]), tuple(found["all_classes"] or ())),))


def score(name: str, answer: str, question: Question) -> float:
    _, metric = MAX_NEW_TOKENS_AND_SCORE[name]
    if name in FEW_SHOT:  # the model may continue with further examples
        answer = answer.lstrip("\n").partition("\n")[0]
    rest = [question.classes] if metric is metrics.classification else []
    return metric(answer, question.answers, *rest)


def size(name: str, recipe: Recipe) -> int:
    return len(line_starts(path_of(name, recipe)))


TASKS = {
    name: Task(
        name,
        max_new_tokens,
        partial(sample, name),
        partial(score, name),
        partial(size, name),
        chat=name not in (*FEW_SHOT, *CODE),
    )
    for name, (max_new_tokens, _) in MAX_NEW_TOKENS_AND_SCORE.items()
}
