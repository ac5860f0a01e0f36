"""A needle in a haystack, over length and depth (after Greg Kamradt, github.com/gkamradt/LLMTest_NeedleInAHaystack).

Sample i hides one sentence at depth (i mod 11) / 10 of the text's characters, at the nearest end of a sentence. The
haystack may be any text. Each sample draws its own key and value, so that answers are graded exactly and cannot be
guessed.

niah_backwards hides a RULER needle for each question in a text, and asks for the last one first: each later question is
about something further from what the first one needed.
"""

from functools import partial
from itertools import accumulate

from tasks import Question, Recipe, Sample, Task, fill_length, string_match_all
from tasks.ruler import Drawer, Niah, essay, needles

DEPTHS = 11
FACT = "The access code of the {key} vault is"
QUESTION = "\n\nQuestion: What is the access code of the {key} vault?\n"
OPENING = f"Answer: {FACT}"


def needle(recipe: Recipe, index: int) -> Sample:
    depth = index % DEPTHS / (DEPTHS - 1)

    def make(n: int) -> Sample:
        drawer = Drawer(recipe.rng("needle", index))
        key, value, first = drawer.draw("words"), drawer.draw("numbers"), drawer.rng.randrange(10**6)
        sentences = essay(recipe.haystack, n, first)
        ends = [0, *accumulate(len(sentence) + 1 for sentence in sentences)]
        at = min(range(len(ends)), key=lambda i: abs(ends[i] - depth * ends[-1]))
        sentences.insert(at, f"{FACT.format(key=key)} {value}.")
        question, opening = QUESTION.format(key=key), OPENING.format(key=key)
        return Sample(" ".join(sentences), (Question(question + opening, (value,), opening=opening),), depth)

    return fill_length(make, recipe, 32)


BACKWARDS = partial(needles, "niah_backwards", Niah("essay", backwards=True))
TASKS = {
    "needle": Task("needle", 32, needle, string_match_all),
    "niah_backwards": Task("niah_backwards", 128, BACKWARDS, string_match_all),
}
