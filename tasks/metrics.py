"""The scores of LongBench and InfiniteBench, 0 to 100, reimplemented from their published definitions
(github.com/THUDM/LongBench metrics.py and eval.py; github.com/OpenBMB/InfiniteBench src/compute_scores.py).

A score takes an answer's text and its references. Functions marked `best_reference` return the score of the best one.
jieba splits Chinese text into words; it is imported when needed (pip install jieba).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import wraps
from itertools import chain

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The punctuation that both benchmarks strip from Chinese. Their list lacks a few marks (《〈〉·).
MARKS_ZH = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
MARKS_ZH += "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
NO_PUNCTUATION_ZH = str.maketrans("", "", string.punctuation + MARKS_ZH)


def best_reference(one: Callable[..., float]) -> Callable[..., float]:
    """Turns a score for one reference, 0 to 1, into the best score over several references, 0 to 100."""

    @wraps(one)
    def score(answer: str, references: Sequence[str], *rest: Sequence[str]) -> float:
        return 100.0 * max((one(answer, reference, *rest) for reference in references), default=0.0)

    return score


def segmenter() -> Callable[[str], list[str]]:
    """jieba's function that splits Chinese text into words. Raises ValueError if jieba is not installed."""
    try:
        import jieba
    except ImportError:
        raise ValueError("scores of Chinese answers need jieba's word segmentation: pip install jieba") from None
    jieba.setLogLevel("WARNING")
    return jieba.lcut


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION)).split()


def bare_zh(text: str) -> str:
    """Lower-case text without punctuation and white space."""
    return "".join(text.lower().translate(NO_PUNCTUATION_ZH).split())


def token_f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    """2PR / (P + R) of two bags of S and W tokens with C in common, P = C / S and R = C / W: 2C / (S + W)."""
    return 2 * (Counter(said) & Counter(wanted)).total() / max(1, len(said) + len(wanted))


def lcs(wanted: Sequence[str], said: Sequence[str], tie_to_said: bool) -> list[int]:
    """Indices in `wanted` of a longest common subsequence with `said`, last first.

    Of several, returns the one found by backtracking from both ends, where a tie drops a word of `wanted` (if
    `tie_to_said`) or of `said`. The choice changes scores of texts with more than one sentence.
    """
    lengths = [[0] * (len(said) + 1)]  # [i][j]: of wanted[:i] and said[:j]
    for word in wanted:
        above, row = lengths[-1], [0]
        for j, other in enumerate(said):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        lengths.append(row)
    common, i, j = [], len(wanted), len(said)
    while i and j:
        shorter_wanted, shorter_said = lengths[i - 1][j], lengths[i][j - 1]
        if wanted[i - 1] == said[j - 1]:
            i, j = i - 1, j - 1
            common.append(i)
        elif shorter_wanted > shorter_said or (tie_to_said and shorter_wanted == shorter_said):
            i -= 1
        else:
            j -= 1
    return common


# LongBench


@best_reference
def qa_f1(answer: str, reference: str) -> float:
    """F1 of the bags of words (LongBench and InfiniteBench qa_f1_score)."""
    return token_f1(words(answer), words(reference))


@best_reference
def qa_f1_zh(answer: str, reference: str) -> float:
    """F1 of the bags of jieba's words (LongBench qa_f1_zh_score)."""
    cut = segmenter()
    return token_f1(*([w for w in map(bare_zh, cut(text)) if w] for text in (answer, reference)))


@best_reference
def rouge_l(answer: str, reference: str) -> float:
    """Rouge-L's F as in the `rouge` package, version 1.0.1, which LongBench's rouge_score uses.

    F = 2PR / (P + R + 1e-8), P = |U| / |answer's distinct words|, R = |U| / |reference's distinct words|, where U is
    the set of words in a longest common subsequence of any answer sentence and any reference sentence. Full stops
    separate sentences; a sentence of white space is one empty word. Case matters. On sentences of some 500 words or
    more, the package hits Python's recursion limit and LongBench scores 0; this function still returns F.
    """
    said, wanted = ([part.split() or [""] for part in text.split(".") if part] for text in (answer, reference))
    if not said or not wanted:
        return 0.0
    common = len({w[i] for w in wanted for s in said for i in lcs(w, s, tie_to_said=False)})
    precision, recall = common / len(set(chain(*said))), common / len(set(chain(*wanted)))
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(answer: str, references: Sequence[str]) -> float:
    """rouge_l of jieba's words, joined by spaces (LongBench rouge_zh_score)."""
    answer, *references = (" ".join(segmenter()(text)) for text in (answer, *references))
    return rouge_l(answer, references)


@best_reference
def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the answer names, if the right one is among them (LongBench classification_score).

    A class whose name is part of the right one's does not count. (The published loop deletes from the list it iterates
    over, and so misses the second of two adjacent such classes.)
    """
    named = [c for c in classes if c in answer and (c == reference or c not in reference)]
    return 1 / len(named) if reference in named else 0.0


@best_reference
def code_similarity(answer: str, reference: str) -> float:
    """Similarity of the answer's first line that has no `, # or // to the reference (LongBench code_sim_score).

    fuzzywuzzy's `ratio`: difflib's 2 * matching characters / all characters, in whole percent. If python-Levenshtein
    is installed, fuzzywuzzy computes another ratio; this is the ratio without it.
    """
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not re.search("`|#|//", line)), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


@best_reference
def number_share(answer: str, reference: str) -> float:
    """The share of the answer's numbers that are the reference's (LongBench count_score, retrieval_score and
    retrieval_zh_score, whose references are 4, "Paragraph 4" and "段落4")."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(re.search(r"\d+", reference)[0]) / max(1, len(numbers))


# InfiniteBench; qa_f1 is its longbook_qa_eng


@best_reference
def first_integer(answer: str, reference: str) -> float:
    """Whether the first run of digits is the reference (passkey, number_string)."""
    return re.findall("[0-9]+", answer)[:1] == [reference]


@best_reference
def kv_retrieval(answer: str, reference: str) -> float:
    """Whether the reference is a word of the answer; white space and any of :"'.,?!{} separate words."""
    return reference in re.split(r"[\s:\"'.,?!{}]+", answer)


@best_reference
def code_run(answer: str, reference: str) -> float:
    """Whether the last word is the reference's integer; white space and any of .`'": separate words."""
    last = re.sub("[.`'\":]", " ", answer).split()[-1:]
    try:
        return [int(word) for word in last] == [int(reference)]
    except ValueError:
        return 0.0


@best_reference
def math_find(answer: str, reference: str) -> float:
    """Whether the first number, without its sign, equals the reference's. Here a decimal may equal an integer; the
    published score fails on a decimal if the reference is an integer."""
    number = re.search(r"\d+(\.\d+)?", answer)
    return number is not None and float(number[0]) == float(reference)


def math_calc(answer: str, references: Sequence[str]) -> float:
    """The share of the references that the answer's integers match, in order, before the first mismatch."""
    right = 0
    for said, wanted in zip(re.findall("[0-9]+", answer), references, strict=False):
        if int(said) != int(wanted):
            break
        right += 1
    return 100 * right / len(references)


@best_reference
def longdialogue_qa_eng(answer: str, reference: str) -> float:
    """Whether the answer contains the reference, ignoring case."""
    return reference.upper() in answer.upper()


def _lone_letter(answer: str, letters: str) -> str | None:
    """The last lone letter of the first line that has one."""
    by_line = (re.findall(rf"\b[{letters}]\b", line) for line in answer.split("\n"))
    return next((lone[-1] for lone in by_line if lone), None)


def _after(answer: str, phrases: Sequence[str]) -> str | None:
    """The text one character after the first phrase, in the given order, that the answer contains; None without one."""
    for phrase in phrases:
        _, said, rest = answer.partition(phrase)
        if said:
            return rest[1:]
    return None


def code_debug(answer: str, references: Sequence[str]) -> float:
    """Whether the answer chooses the right option; references: the function's name and the option's letter.

    It does if, in its first line with a lone letter A to J, the last such letter is the right one; if it starts with
    either reference; or if either follows "answer is:", "is:" or "answer:".
    """
    answer, right = answer.strip(), tuple(references)
    if _lone_letter(answer, "A-J") == right[1]:
        return 100.0
    answer = re.sub(" +", " ", re.sub(r"[\n`'\"*-]|[Oo]ption", " ", answer))
    after = _after(answer, ("answer is:", "is:", "answer:"))
    return 100.0 * (answer.startswith(right) or (after or "").startswith(right))


def longbook_choice_eng(answer: str, references: Sequence[str]) -> float:
    """Whether the answer chooses the right option; references: the option's text and its letter.

    It does if, in its first line with a lone letter A to D, the last such letter is the right one. Otherwise the first
    of these that exists decides: a first character that is one of ABCD; the whole answer, if that is a reference; the
    text after "answer is:", "answer:", "answer is" or "option is"; the first word that is one of ABCD.
    """
    answer = answer.strip()
    if _lone_letter(answer, "A-D") in references:
        return 100.0
    if answer.startswith(("A", "B", "C", "D")):
        return 100.0 * (answer[0] in references)
    if answer in references:
        return 100.0
    answer = re.sub(" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", answer))
    after = _after(answer, ("answer is:", "answer:", "answer is", "option is"))
    if after is not None:
        return 100.0 * after.startswith(tuple(references))
    return 100.0 * (next((word for word in answer.split() if word in "ABCD"), None) in references)


@best_reference
def longbook_qa_chn(answer: str, reference: str) -> float:
    """F1 of the bags of characters (InfiniteBench qa_f1_score_zh)."""
    return token_f1(bare_zh(answer), bare_zh(reference))


@best_reference
def rouge_lsum(answer: str, reference: str) -> float:
    """RougeLsum's F as in the `rouge_score` package without stemming, which InfiniteBench uses for longbook_sum_eng.

    F = 2H / (words of the answer + words of the reference). H counts, for each line of the reference, the words in its
    longest common subsequences with the answer's lines, each word at most as often as the answer has it. Words are runs
    of a-z and 0-9 in the lower-case text.
    """
    lines = (text.lower().split("\n") for text in (answer, reference))
    said, wanted = ([re.findall("[a-z0-9]+", line) for line in text] for text in lines)
    common = Counter(w[i] for w in wanted for i in {i for s in said for i in lcs(w, s, tie_to_said=True)})
    answered = Counter(chain(*said))
    return 2 * (common & answered).total() / max(1, answered.total() + sum(map(len, wanted)))
