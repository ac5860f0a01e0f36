"""calibrate.py: what it writes is what a slow look at the attention says, and the methods find it."""

import json
import math
import shutil

import pytest
import torch
from conftest import write_random

import calibrate
from cli import run as run_main
from engine import Engine
from kv.full import Full


class Spy(Full):
    def prefill(self, row, q, k, v):
        self.seen = q[0], k[0]
        return super().prefill(row, q, k, v)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("calibrate") / "llama")


def test_head_scores_are_the_attention_between_sinks_and_window(folder):
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine.load(folder, compile=False)
    found = calibrate.calibrate(engine, ids, sinks=4, recent=16)["head_scores"]
    engine.use("full", max_prompt=90, max_new_tokens=1)
    spies = [Spy(engine.shape) for _ in engine.layers]
    engine.model.set_kv(spies, 1)
    engine.model.prefill(torch.tensor(ids), 0)
    for scores, spy in zip(found, spies, strict=True):
        q, k = spy.seen
        for head, score in enumerate(scores):
            most = 0.0
            for query_head in (2 * head, 2 * head + 1):
                total = 0.0
                for at in range(90 - 32, 90):
                    p = torch.softmax(k[head, : at + 1] @ q[query_head, at] / math.sqrt(16), dim=0)
                    total += sum(p[i].item() for i in range(4, at - 16 + 1))
                most = max(most, total / 32)
            assert score == pytest.approx(most, abs=2e-5)


def test_duo_finds_what_it_wrote(text_checkpoint, tmp_path, capsys):
    folder = shutil.copytree(text_checkpoint, tmp_path / "model")
    (folder / "kv_profile.json").write_text(json.dumps({"filter_layers": [1]}))
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    text = str(tmp_path / "text.txt")
    calibrate.main(["--checkpoint", str(folder), "--text", text, "--sinks", "4", "--recent", "16"])
    assert "layer   7" in capsys.readouterr().out
    profile = json.loads((folder / "kv_profile.json").read_text())
    assert profile["format"] == 1 and profile["text"] == "text.txt" and profile["filter_layers"] == [1]
    assert len(profile["head_scores"]) == 8 and len(profile["head_scores"][0]) == 2
    engine = Engine.load(folder, "duo", 60, {"sinks": 4, "recent": 8}, max_prompt=96, max_new_tokens=8, compile=False)
    chosen, others = [], []
    for layer, scores in zip(engine.layers, profile["head_scores"], strict=True):
        full = sum(p.shape.n_kv_head for p in layer.parts if p.size == engine.shape.planned)
        order = layer.order.tolist()
        chosen, others = chosen + [scores[h] for h in order[:full]], others + [scores[h] for h in order[full:]]
    assert chosen and others and min(chosen) >= max(others)


def test_mistakes_are_one_line(folder, text_checkpoint, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("Too short.")
    for checkpoint, text, words in (
        (text_checkpoint, "short.txt", "at least"),
        (text_checkpoint, "none.txt", "none.txt"),
        (folder, "short.txt", "no tokenizer"),
        (tmp_path / "none", "short.txt", "no checkpoint folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_main(lambda c=checkpoint, t=text: calibrate.main(["--checkpoint", str(c), "--text", str(tmp_path / t)]))
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and words in line
    assert not (text_checkpoint / "kv_profile.json").exists()
