"""2StageRetr (OmniKV, OpenReview ulCAPXYXfa, appendix A): add two numbers, then look the sum up in a dict of colors.

The task is stated at the end of the prompt, so that nothing can be computed earlier. The wording is the paper's. The
dict has the keys 0, 1, 2, ... and grows with the requested length, to at most 200 pairs as in the paper.
`two_stage_lookup` gives the sum: it is the second stage alone.
"""

import re
from functools import partial

from tasks import Question, Recipe, Sample, Task, fill_length

PAIRS = 200  # the most pairs in the dict
NEW_TOKENS = 64  # of an answer
COLOURS = (
    "lime yellow red black brown maroon teal violet blue green orange purple pink white gray cyan magenta navy olive "
    "gold silver beige indigo coral"
).split()
INTRO = (
    "Lets play a game. You have a dict and a mathematical addition equation. The keys of a dictionary can be any "
    "number. You need to find the corresponding key value in the dictionary after performing the addition and output "
    "the value corresponding to that key. The Dict is "
)


def ask(a: int, b: int, given: bool) -> str:
    total = f"{a + b}." if given else "?"
    return f" The equation is {a} + {b} = {total} Answer the corresponding color based on the addition result."


def two_stage(given: bool, recipe: Recipe, index: int) -> Sample:
    def make(n: int) -> Sample:
        rng = recipe.rng("two_stage", index)
        order = rng.sample(range(PAIRS), PAIRS)
        splits = [rng.random() for _ in range(PAIRS)]
        colours = [rng.choice(COLOURS) for _ in range(PAIRS)][: min(n, PAIRS)]
        questions = []
        for total in [t for t in order if t < len(colours)][: recipe.questions]:
            a = round(splits[total] * total)
            questions.append(Question(ask(a, total - a, given), (colours[total],)))
        pairs = ", ".join(f"{i}: {colour}" for i, colour in enumerate(colours))
        return Sample(INTRO + "{" + pairs + "}", tuple(questions))

    whole = make(PAIRS)  # the longest sample there is
    fits = len(recipe.encode(whole.prompt)) + NEW_TOKENS <= recipe.length
    return whole if fits else fill_length(make, recipe, NEW_TOKENS)


def names_colour(answer: str, question: Question) -> float:
    """Whether the answer contains the color as a word (the paper's exact match), and no other color before it."""
    named = re.findall(r"\b(" + "|".join(COLOURS) + r")\b", answer.lower())
    return 100.0 * (named[:1] == [question.answers[0]])


TASKS = {
    "two_stage": Task("two_stage", NEW_TOKENS, partial(two_stage, False), names_colour),
    "two_stage_lookup": Task("two_stage_lookup", NEW_TOKENS, partial(two_stage, True), names_colour),
}
