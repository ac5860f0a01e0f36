"""SCBench (Li et al., arXiv 2412.10319): several questions about one long text, one after the other.

The texts are those of the published files, scbench_kv.jsonl and so on, in the data folder; each line has a context, and
turns with an input and an answer. A text that is too long loses its middle, as in the benchmark. The tasks here are
those graded by whether an answer contains the reference.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from tasks import Question, Recipe, Sample, Task, data_file, fill_length, string_match_all, string_match_part
from text.files import parse_json

PIECE = 64  # characters by which a text is shortened
BOOK = "Read the book and answer the question. Be very concise in your answer."
PAIRS = "Extract the value corresponding to the specified key in the JSON object below."
KINDS: dict[str, tuple[str, str, int, Callable[[str, Question], float]]] = {
    # name: what begins the prompt, how a turn asks, tokens of an answer, score
    "kv": (f"{PAIRS}\n\n", "\n\n{}", 150, string_match_part),
    "prefix_suffix": ("", "\n\n{}", 150, string_match_part),
    "vt": ("", "\n\n{}", 30, string_match_all),
    "qa_eng": (f"{BOOK}\n\n", "\n\nQuestion: {}\nAnswer:", 40, string_match_part),
    "many_shot": ("", "\n\n{}", 10, string_match_part),
}


@cache
def records(name: str, folder: Path | None) -> list[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """Each context of a file with its questions and their references.

    Raises ValueError or FileNotFoundError that says what to give.
    """
    path, found = data_file(folder, f"scbench_{name}.jsonl"), []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, path)
            turns = [(turn["input"], turn["answer"]) for turn in record["multi_turns"]]
            turns = [(asked, tuple(map(str, a)) if isinstance(a, list) else (str(a),)) for asked, a in turns]
            found.append((record.get("context") or record["input"], turns))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: not a record of SCBench ({error!r})") from None
    return found


def turns_about(name: str, recipe: Recipe, index: int) -> Sample:
    (begin, asking, new, _), (context, turns) = KINDS[name], records(name, recipe.data)[index]
    questions = tuple(Question(asking.format(asked), answers) for asked, answers in turns[: recipe.questions])

    def make(pieces: int) -> Sample:
        half = pieces * PIECE // 2
        text = context if 2 * half >= len(context) else context[:half] + context[-half:]
        return Sample(begin + text, questions)

    whole = make(len(context))
    fits = len(recipe.encode(whole.prompt)) + new <= recipe.length
    return whole if fits else fill_length(make, recipe, new)


TASKS = {
    f"scbench_{name}": Task(
        f"scbench_{name}",
        new,
        partial(turns_about, name),
        score,
        lambda recipe, name=name: len(records(name, recipe.data)),
    )
    for name, (_, _, new, score) in KINDS.items()
}
