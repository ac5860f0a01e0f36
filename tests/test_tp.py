"""Tensor parallelism: the ranks together compute what one process computes."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tp_worker
from conftest import write_random
from torch import Tensor, nn

import kv
import tp
from checkpoint import Stored, load_checkpoint, open_weights, read_config
from config import ModelConfig
from engine import Engine
from kv import METHODS
from kv.ranks import ALONE, Ranks
from quantize import quantize, read_quantization

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 130}
SCORES = [[3.0, 1.0, 2.5, 0.5], [2.0, 4.0, 0.1, 0.2], [6.0, 5.0, 0.3, 0.4]]
VARIANTS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in METHODS} | {
    "full:bits": ("full", {"bits": 8}),
    "rocketkv": ("rocketkv", {"window": 8, "kernel": 5}),
    "quest": ("quest", {"page": 4, "skip_layers": 0}),
    "snapkv:gqa": ("snapkv", {"gqa": True}),
    "infllm": ("infllm", {"block": 6}),
    "simlayer": ("simlayer", {"sinks": 2, "recent": 6, "threshold": 0.3}),
    "kivi": ("kivi", {"bits": 2, "group": 8, "recent": 4}),
    "tailorkv": ("tailorkv", {"group": 8, "channels": 4}),
    "tailorkv:threads": ("tailorkv", {"group": 8, "channels": 4, "engine": "threads", "threads": 2}),
    "pqcache": ("pqcache", {"codebits": 3}),
    "duo": ("duo", {"sinks": 2, "recent": 6, "head_scores": SCORES}),
    "omnikv:threads": ("omnikv", {"offload": True, "engine": "threads", "threads": 2, "delta": True}),
    "omnikv:prefill": ("omnikv", {"prefill": 0.5, "chunk": 8}),
}
BUDGETS = {"simlayer": 90}
PER_RANK = [name for name in VARIANTS if name.startswith("omnikv")]  # each rank chooses tokens for its own heads
WORLDS = (2, 4)


def use(name: str, **more) -> dict:
    method, options = VARIANTS[name]
    budget = BUDGETS.get(name, 24) if METHODS[method].budgeted else None
    if budget is not None and name not in BUDGETS:
        budget = max(budget, METHODS[method](**options).minimum(SHAPE))
    return {"kv": method, "options": options, "budget": budget, **more}


SHAPE = kv.Shape(
    3, 8, 4, 16, 64, "default", 1e4, torch.float32, torch.device("meta"), batch=3, max_prompt=90, max_new_tokens=60
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints that differ in what a rank must split."""
    root = tmp_path_factory.mktemp("tp")
    found = {"llama": write_random(root / "llama", **SIZES)}
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    found["tied, biased"] = write_random(root / "tied", **SIZES, **biased)
    found["qwen3"] = write_random(root / "qwen3", architectures=["Qwen3ForCausalLM"], **SIZES)
    for mode in ("int8", "int4"):
        found[mode] = root / mode
        quantize(found["tied, biased"], found[mode], mode, groupsize=8, embeddings=mode == "int8")
    return found


@pytest.fixture(scope="module")
def cases(folders) -> dict[str, dict]:
    found = {name: {"checkpoint": str(folders["llama"]), "use": use(name)} for name in VARIANTS}
    found |= {f"{name}, full": {"checkpoint": str(folder), "use": use("full")} for name, folder in folders.items()}
    for name in ("full", "rocketkv"):
        found[f"{name}, compiled"] = found[name] | {"compile": True}
    found["speculation"] = {"checkpoint": str(folders["llama"]), "use": use("rocketkv", speculate=3)}
    return found


def torchrun(world: int, *command: str, **how) -> subprocess.Popen:
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--master-port=0", *command]
    start[3:3] = ["--standalone"]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | how.pop("env", {})
    return subprocess.Popen(
        start, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    )


@pytest.fixture(scope="module")
def alone(cases) -> dict[str, dict]:
    engines = {}
    return {name: tp_worker.run(case, engines) for name, case in cases.items()}


@pytest.fixture(scope="module", params=WORLDS)
def ranked(request, cases, tmp_path_factory) -> dict[str, list[dict]]:
    """What every rank of a run computes, by case."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    cases = {name: case for name, case in cases.items() if world == 2 or not case.get("compile")}
    torch.save(cases, folder / "cases")
    run = torchrun(world, "tests/tp_worker.py", str(folder / "cases"), str(folder / "results"))
    _, errors = run.communicate(timeout=900)
    assert run.returncode == 0, errors
    return torch.load(folder / "results", weights_only=False)


class Apart(nn.Module):
    """KV modules that each have a share of the heads: what ranks compute, in one process."""

    wants_lookahead = False

    def __init__(self, *parts: kv.KV):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def each(self, name: str, *inputs, **more) -> Tensor:
        shares = [x.chunk(len(self.parts), 1) if torch.is_tensor(x) and x.dim() == 4 else [x] * len(self.parts)
                  for x in inputs]  # fmt: skip
        return torch.cat([getattr(p, name)(*own, **more) for p, *own in zip(self.parts, *shares, strict=True)], 1)

    def prefill(self, row, q, k, v):
        return self.each("prefill", row, q, k, v)

    def extend(self, row, q, k, v, pos):
        return self.each("extend", row, q, k, v, pos=pos)

    def decode(self, q, k, v, pos, active):
        return self.each("decode", q, k, v, pos, active)

    def finish(self, row):
        return [part.finish(row) for part in self.parts]

    def reset(self, row):
        return [part.reset(row) for part in self.parts]

    def set_speed(self, row, speed):
        return [part.set_speed(row, speed) for part in self.parts]

    def fit(self, length, new):
        return [part.fit(length, new) for part in self.parts]

    def close(self):
        return [part.close() for part in self.parts]


def per_rank(case: dict, world: int) -> dict:
    """`tp_worker.run` of one process, in which groups of KV heads choose by themselves."""
    engine = Engine.load(case["checkpoint"], compile=False, seed=0)
    engine.use(batch=3, max_prompt=90, max_new_tokens=60, **case["use"])
    small = replace(engine.shape, n_head=8 // world, n_kv_head=4 // world)
    parts = [kv.build(engine.method, small, engine.budget, engine.options) for _ in range(world)]
    whole, engine.layers[:] = list(engine.layers), [Apart(*layer) for layer in zip(*parts, strict=True)]
    engine.model.set_kv(engine.layers, 3)
    logits = engine.logits(tp_worker.PROMPTS, tp_worker.FORCED)
    tokens = []
    for sampling in tp_worker.SAMPLINGS:
        engine.requests = iter(range(100))
        rows = engine.generate(tp_worker.PROMPTS, 10, follow_ups=tp_worker.FOLLOW_UPS, **sampling)
        tokens.append([answer.tokens for row in rows for answer in row.answers])
    engine.close()
    for layer in whole:
        layer.close()
    return {"logits": logits, "tokens": tokens}


def test_ranks_compute_what_one_process_does(ranked, alone, cases):
    """Logits to 1e-5 of their size, equal tokens; omnikv equals a process whose heads choose in groups."""
    wrong = []
    for name, everyone in ranked.items():
        expected = per_rank(cases[name], len(everyone)) if name in PER_RANK else alone[name]
        size = max(x.abs().max() for x in expected["logits"])
        pairs = zip(everyone[0]["logits"], expected["logits"], strict=True)
        error = max((a - b).abs().max() for a, b in pairs) / size
        if error > 1e-5 or everyone[0]["tokens"] != expected["tokens"]:
            wrong.append((name, float(error)))
    assert not wrong
