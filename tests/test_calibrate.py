"""calibrate.py: its findings equal slow computations from the attention, and the methods find them."""

import json
import shutil

import pytest
import torch
from conftest import write_random
from references.attention import probabilities
from references.quantized import dense_preference

import calibrate
from engine import Engine
from kv.full import Full
from terminal.cli import run as run_main


class Spy(Full):
    def prefill(self, row, q, k, v):
        self.seen = q[0], k[0]
        return super().prefill(row, q, k, v)


def spy(engine: Engine, ids: list[int]) -> list[Spy]:
    """Layers that have recorded q and k of a prompt of 90 tokens."""
    engine.use("full", max_prompt=90, max_new_tokens=1)
    spies = [Spy(engine.shape) for _ in engine.layers]
    engine.model.set_kv(spies)
    engine.model.prefill(0, torch.tensor(ids))
    return spies


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("calibrate") / "llama")


def test_head_scores_are_the_attention_between_sinks_and_window(folder):
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine.load(folder, compile=False)
    found = calibrate.calibrate(engine, ids, sinks=4, recent=16)["head_scores"]
    spies = spy(engine, ids)
    for scores, one in zip(found, spies, strict=True):
        q, k = one.seen
        for head, score in enumerate(scores):
            most = 0.0
            for query_head in (2 * head, 2 * head + 1):
                total = 0.0
                for at in range(90 - 32, 90):
                    p = probabilities(q[query_head, at], k[head, : at + 1])
                    total += sum(p[i].item() for i in range(4, at - 16 + 1))
                most = max(most, total / 32)
            assert score == pytest.approx(most, abs=2e-5)


def test_filter_ability_is_the_attention_of_later_layers_to_a_layers_choice(tmp_path):
    engine = Engine.load(write_random(tmp_path / "m", num_hidden_layers=4), compile=False)
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    found = calibrate.calibrate(engine, ids, sinks=4, recent=16)
    spies = spy(engine, ids)

    def attention(layer: int, at: int) -> list[list[float]]:
        """Each query head's attention over all positions."""
        q, k = spies[layer].seen
        seen = [probabilities(q[h, at], k[h // 2, : at + 1]).tolist() for h in range(len(q))]
        return [p + [0.0] * (89 - at) for p in seen]

    for layer in range(3):
        caught = {later: 0.0 for later in range(layer + 1, 4)}
        for at in range(90 - 32, 90):
            most = [max(p) for p in zip(*attention(layer, at), strict=True)]
            chosen = sorted(range(90), key=lambda i: -most[i])[: int(0.05 * 90 + 0.5)]
            for later in caught:
                heads = attention(later, at)
                caught[later] += sum(p[i] for p in heads for i in chosen) / len(heads) / 32
        assert found["filter_ability"][layer] == pytest.approx(sum(caught.values()) / len(caught), abs=2e-5)
    assert found["filter_ability"][3] is None and len(found["filter_layers"]) == 1


def test_dense_preference_is_the_attention_outside_the_most_attended_tokens(folder):
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine.load(folder, compile=False)
    found = calibrate.calibrate(engine, ids, sinks=4, recent=16)
    spies = spy(engine, ids)
    expected = [dense_preference(*one.seen) for one in spies]
    assert found["dense_preference"] == pytest.approx(expected, abs=2e-5)
    assert found["quant_layers"] == [layer for layer, share in enumerate(expected) if share > 0.2]
    tau = sum(expected) / len(expected)
    found = calibrate.calibrate(engine, ids, sinks=4, recent=16, tau=tau)
    assert found["quant_layers"] == [layer for layer, share in enumerate(expected) if share > tau] != []


def test_the_best_filter_layers_are_proposed():
    nothing = [[0.1] * (11 - layer) for layer in range(12)]
    good = [list(row) for row in nothing]
    good[1] = [0.9] * 10
    assert calibrate.propose(good) == [1]
    assert calibrate.propose([[0.5], []]) == []  # 2 layers: none could be sparse
    two = [[0.1] * (39 - layer) for layer in range(40)]
    two[2][:17], two[20] = [0.9] * 17, [0.9] * 19  # layer 2 covers the layers up to 19, layer 20 the rest
    assert calibrate.propose(two) == [2, 20]


def test_the_plot_is_drawn_and_omnikv_finds_its_filter_layers(text_checkpoint, tmp_path, capsys):
    folder = shutil.copytree(text_checkpoint, tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    more = ["--text", str(tmp_path / "text.txt"), "--sinks", "4", "--recent", "16", "--plot", str(tmp_path / "p.png")]
    calibrate.main(["--checkpoint", str(folder), *more])
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG" and "proposed" in capsys.readouterr().out
    engine = Engine.load(folder, "omnikv", 24, max_prompt=96, max_new_tokens=8, compile=False)
    (chosen,) = json.loads((folder / "kv_profile.json").read_text())["filter_layers"]
    assert [type(layer).__name__ for layer in engine.layers][chosen] == "Filter"


def test_duo_finds_the_head_scores_that_calibrate_wrote(text_checkpoint, tmp_path, capsys):
    folder = shutil.copytree(text_checkpoint, tmp_path / "model")
    (folder / "kv_profile.json").write_text(json.dumps({"of_others": [1]}))
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    text = str(tmp_path / "text.txt")
    calibrate.main(["--checkpoint", str(folder), "--text", text, "--sinks", "4", "--recent", "16"])
    assert "filter ability" in capsys.readouterr().out
    profile = json.loads((folder / "kv_profile.json").read_text())
    assert profile["format"] == 1 and profile["text"] == "text.txt" and profile["of_others"] == [1]
    assert len(profile["head_scores"]) == 8 and len(profile["head_scores"][0]) == 2
    engine = Engine.load(folder, "duo", 60, {"sinks": 4, "recent": 8}, max_prompt=96, max_new_tokens=8, compile=False)
    chosen, others = [], []
    for layer, scores in zip(engine.layers, profile["head_scores"], strict=True):
        full = sum(p.shape.n_kv_head for p in layer.parts if p.size == engine.shape.planned)
        order = layer.order.tolist()
        chosen, others = chosen + [scores[h] for h in order[:full]], others + [scores[h] for h in order[full:]]
    assert chosen and others and min(chosen) >= max(others)


def test_the_profile_goes_where_out_says_and_the_checkpoint_keeps_its_own(text_checkpoint, tmp_path):
    folder, text = shutil.copytree(text_checkpoint, tmp_path / "model"), tmp_path / "text.txt"
    (folder / "kv_profile.json").write_text('{"mine": 1}')
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    flags = ["--checkpoint", str(folder), "--text", str(text), "--sinks", "4", "--recent", "16"]
    calibrate.main([*flags, "--out", str(tmp_path / "profile.json")])
    assert (folder / "kv_profile.json").read_text() == '{"mine": 1}'
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert "head_scores" in profile and "mine" not in profile
    with pytest.raises(ValueError, match="--out /proc/p: cannot be written"):
        calibrate.main([*flags, "--out", "/proc/p"])


@pytest.mark.parametrize(
    "wrong, words",
    (
        ({"sinks": -1}, "--sinks must be at least 0"),
        ({"recent": -5}, "--recent at least 1"),
        ({"tau": float("nan")}, "--tau must lie between 0 and 1, not nan"),
        ({"tau": 7.0}, "--tau must lie"),
    ),
)
def test_settings_out_of_range_are_refused(folder, wrong, words):
    engine = Engine.load(folder, compile=False)
    with pytest.raises(ValueError, match=words):
        calibrate.calibrate(engine, list(range(90)), **{"sinks": 4, "recent": 16} | wrong)


def test_attention_that_is_not_a_number_is_refused(folder):
    engine = Engine.load(folder, compile=False)
    engine.model.layers[1].attention_norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="is not a number in torch.float32"):
        calibrate.calibrate(engine, list(range(90)), sinks=4, recent=16)


def test_mistakes_are_refused_in_one_line(folder, text_checkpoint, tmp_path, capsys):
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
