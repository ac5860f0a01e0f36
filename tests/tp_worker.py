"""What each rank runs for test_tp.py: torchrun ... tests/tp_worker.py CASES RESULTS, both files of torch.save."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from engine import Engine
from runtime import parallel
from terminal.cli import run as run_tool

PROMPTS = [list(range(5, 45)), [9, 8, 7], list(range(3, 93))]
FOLLOW_UPS = [{0: [1, 2, 3], 1: [4]}, {1: [5, 6]}]  # questions by row, in the order of the calls
FORCED = [list(range(20, 26)), list(range(50, 54)), list(range(60, 66))]
SAMPLING = {"temperature": 0.9, "top_k": 30}


def conversations(engine: Engine) -> list[list[int]]:
    """Sampled answers to the prompts and to the questions after them."""
    rows = engine.start(PROMPTS)
    answers = engine.ask(rows, max_new_tokens=5, **SAMPLING)
    for questions in FOLLOW_UPS:
        answers += engine.ask([rows[i] for i in questions], list(questions.values()), 5, **SAMPLING)
    for row in rows:
        row.close()
    return [answer.tokens for answer in answers]


def run(case: dict, engines: dict[str, Engine]) -> dict:
    """Logits and tokens of a case: a checkpoint, and arguments of `Engine.use`."""
    folder = case["checkpoint"]
    if folder not in engines:
        engines[folder] = Engine.load(folder, compile=False, seed=0)
    engine = engines[folder]
    engine.compile = case.get("compile", False)
    engine.use(batch=3, max_prompt=90, room=60, **case["use"])
    try:
        return {"logits": [x.clone() for x in engine.logits(PROMPTS, FORCED)], "tokens": conversations(engine)}
    finally:
        engine.close()


def main() -> None:
    cases, results = sys.argv[1:]
    ranks, engines, found = parallel.join(), {}, {}
    for name, case in torch.load(cases, weights_only=False).items():
        ours = run(case, engines)
        everyone = [None] * ranks.count
        dist.all_gather_object(everyone, ours)
        for other in everyone:  # each rank must have sampled the same tokens from the same logits
            assert all(map(torch.equal, other["logits"], ours["logits"])) and other["tokens"] == ours["tokens"], name
        found[name] = ours
    if ranks.rank == 0:
        torch.save(found, results)


if __name__ == "__main__":
    run_tool(main, ranks=True)  # ends as the tools do: torch.distributed's threads may abort what Python tears down
