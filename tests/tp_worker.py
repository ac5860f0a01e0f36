"""What each rank runs for test_tp.py: torchrun ... tests/tp_worker.py CASES RESULTS, both files of torch.save."""

import itertools
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from paper_bytes import overhead, paper_bytes

import kv
from engine import Engine
from runtime import processes

PROMPTS = [list(range(5, 45)), [9, 8, 7], list(range(3, 93))]
FOLLOW_UPS = [[[1, 2, 3]], [[4], [5, 6]], []]
FORCED = [list(range(20, 26)), list(range(50, 54)), list(range(60, 66))]
SAMPLING = {"temperature": 0.9, "top_k": 30}


def outcome(engine: Engine) -> dict:
    """What an engine computes: logits, tokens, and the bytes of its caches."""
    found = {"logits": [x.clone() for x in engine.logits(PROMPTS, FORCED)]}
    engine.requests = itertools.count()  # the noise of sampling depends on a request's number
    rows = engine.generate(PROMPTS, 5, follow_ups=FOLLOW_UPS, **SAMPLING)
    found["tokens"] = [answer.tokens for row in rows for answer in row.answers]
    method = kv.parse_options(engine.method, engine.options)
    shape, budget = engine.shape, engine.budget
    tokens = None if budget is None else shape.tokens(budget)
    return found | {
        "bytes": sum(engine.kv_bytes()[:2]),
        "paper": 0 if engine.speculate else paper_bytes(engine.method, method, shape, tokens),
        "overhead": sum(map(overhead, engine.layers), Counter()).total(),
    }


def run(case: dict, engines: dict[str, Engine]) -> dict:
    """`outcome` of a case: a checkpoint, and arguments of `Engine.use`."""
    folder = case["checkpoint"]
    if folder not in engines:
        engines[folder] = Engine.load(folder, compile=False, seed=0)
    engine = engines[folder]
    engine.compile = case.get("compile", False)
    engine.use(batch=3, max_prompt=90, max_new_tokens=60, **case["use"])
    try:
        return outcome(engine)
    finally:
        engine.close()


def main() -> None:
    cases, results = sys.argv[1:]
    ranks, engines, found = processes.join(), {}, {}
    for name, case in torch.load(cases, weights_only=False).items():
        ours = run(case, engines)
        everyone = [None] * ranks.count
        dist.all_gather_object(everyone, ours)
        for other in everyone:  # each rank must have sampled the same tokens from the same logits
            assert all(map(torch.equal, other["logits"], ours["logits"])) and other["tokens"] == ours["tokens"], name
        found[name] = everyone
    if ranks.rank == 0:
        torch.save(found, results)
    processes.leave()


if __name__ == "__main__":
    main()
