"""calibrate.py: its findings equal slow computations from the attention, and the methods find them."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import write_random
from references.attention import attend, probabilities
from references.quantized import dense_preference

import calibrate
import kv
from engine import Engine
from kv.full import Full
from kv.omnikv import Filter, default_filters
from runtime.plan import shape_of
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
    found = calibrate.calibrate(engine, [ids], sinks=4, recent=16)["head_scores"]
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
    found = calibrate.calibrate(engine, [ids], sinks=4, recent=16)
    spies = spy(engine, ids)

    def attention(layer: int, at: int) -> list[list[float]]:
        """Each query head's attention over all positions."""
        q, k = spies[layer].seen
        seen = [probabilities(q[h, at], k[h // 2, : at + 1]).tolist() for h in range(len(q))]
        return [p + [0.0] * (89 - at) for p in seen]

    for layer in range(3):
        caught = {later: 0.0 for later in range(layer + 1, 4)}
        for at in torch.linspace(45, 89, 64).long().tolist():  # of the excerpt's second half
            most = [max(p) for p in zip(*attention(layer, at), strict=True)]
            chosen = {*sorted(range(90), key=lambda i: -most[i])[: int(0.05 * 90 + 0.5)], at}
            for later in caught:
                heads = attention(later, at)
                caught[later] += sum(p[i] for p in heads for i in chosen) / len(heads) / 64
        assert found["filter_ability"][layer] == pytest.approx(sum(caught.values()) / len(caught), abs=2e-5)
    assert found["filter_ability"][3] is None and found["filter_layers"]


def test_dense_preference_is_the_attention_outside_the_most_attended_tokens(folder):
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine.load(folder, compile=False)
    found = calibrate.calibrate(engine, [ids], sinks=4, recent=16)
    spies = spy(engine, ids)
    expected = [dense_preference(*one.seen) for one in spies]
    assert found["dense_preference"] == pytest.approx(expected, abs=2e-5)


def test_layers_whose_output_stands_quantization_are_proposed(folder):
    """However dense its attention is, a layer is judged by the error of its output."""
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = Engine.load(folder, compile=False)
    errors = calibrate.calibrate(engine, [ids], sinks=4, recent=16)["quant_error"]
    for one, found in zip(spy(engine, ids), errors, strict=True):
        q, k = one.seen
        exact, at = one.held(0, 90), torch.linspace(45, 89, 64).long().tolist()
        for bits, error in zip((2, 1), found, strict=True):
            layer = kv.build("kivi", replace(one.shape, n_layer=1), None, {"bits": bits, "recent": 0})[0]
            layer.keep(0, q[None], k[None], exact.v[None])
            stored = layer.held(0, 90)
            y, wrong = (
                torch.stack(
                    [attend(q[h, i], x.k[h // 2, : i + 1], x.v[h // 2, : i + 1]) for h in range(len(q)) for i in at]
                )
                for x in (exact, stored)
            )
            assert error == pytest.approx(((wrong - y).norm() / y.norm()).item(), rel=1e-3)
    tolerance = sorted(two for two, _ in errors)[0]
    found = calibrate.calibrate(engine, [ids], sinks=4, recent=16, tolerance=tolerance + 1e-4)
    assert found["quant_layers"] == [i for i, (two, _) in enumerate(errors) if two == tolerance]


def test_the_choices_with_the_smallest_errors_come_first():
    bad = [[1.0] * layer for layer in range(12)]
    good = [[0.1 if filters == 1 else 1.0 for filters in range(layer)] for layer in range(12)]
    assert calibrate.best_filters(good, most=3)[0] == [1]
    assert all(calibrate.full_layers(x, 12) <= 4 for x in calibrate.best_filters(bad, most=4))
    assert calibrate.best_filters([[], [0.5]], most=2) == []  # 2 layers: none could be sparse
    two = [[0.1 if filters == (2 if layer < 20 else 20) else 1.0 for filters in range(layer)] for layer in range(40)]
    assert calibrate.best_filters(two, most=6)[0] == [2, 20]


def test_the_steps_that_are_compared_are_omnikvs(tmp_path):
    engine = Engine.load(write_random(tmp_path / "m", num_hidden_layers=6), compile=False)
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    engine.model.set_rows(1)
    probes = calibrate.probes_of(engine, ids, 4, 16)
    found = [calibrate.replay(engine, ids, probes, filters)[-1] for filters in ([], [1])]  # of the last position
    exact, expected = (
        Engine.load(tmp_path / "m", *method, compile=False).logits(ids[:89], [ids[89], 0])[
            1
        ]  # 5 tokens, and the newest
        for method in (("full",), ("omnikv", 5, {"filter_layers": [1]}))
    )
    assert (found[0] - exact).abs().max() <= 1e-4
    assert (found[1] - expected).norm() < 0.3 * (exact - expected).norm()  # the newest token's K and V are exact here


def test_a_proposal_is_never_worse_than_the_default_nor_reads_more(tmp_path):
    engine = Engine.load(write_random(tmp_path / "m", num_hidden_layers=12), compile=False)
    g = torch.Generator().manual_seed(2)
    excerpts = [torch.randint(128, (90,), generator=g).tolist() for _ in range(2)]
    found = calibrate.calibrate(engine, excerpts, sinks=4, recent=16)["filters"]
    assert found["default"]["layers"] == default_filters(shape_of(engine.config, engine.dtype, engine.device, 1, 90, 0))
    assert found["proposed"]["kl"] <= found["default"]["kl"] and found["proposed"]["full"] <= found["default"]["full"]
    fewer = calibrate.calibrate(engine, excerpts, sinks=4, recent=16, full=4)["filters"]["proposed"]
    assert fewer["full"] <= 4


def test_the_plot_is_drawn_and_omnikv_finds_its_filter_layers(text_checkpoint, tmp_path, capsys):
    folder = shutil.copytree(text_checkpoint, tmp_path / "model")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    more = ["--text", str(tmp_path / "text.txt"), "--sinks", "4", "--recent", "16", "--plot", str(tmp_path / "p.png")]
    calibrate.main(["--checkpoint", str(folder), *more])
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG" and "proposed" in capsys.readouterr().out
    engine = Engine.load(folder, "omnikv", 24, max_prompt=96, max_new_tokens=8, compile=False)
    filters = json.loads((folder / "kv_profile.json").read_text())["filter_layers"]
    assert [i for i, layer in enumerate(engine.layers) if isinstance(layer, Filter)] == filters


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
        ({"tolerance": float("nan")}, "--tolerance must lie between 0 and 1, not nan"),
        ({"tolerance": 7.0}, "--tolerance must lie"),
        ({"full": 0}, "--full must be at least 1"),
    ),
)
def test_settings_out_of_range_are_refused(folder, wrong, words):
    engine = Engine.load(folder, compile=False)
    with pytest.raises(ValueError, match=words):
        calibrate.calibrate(engine, [list(range(90))], **{"sinks": 4, "recent": 16} | wrong)


def test_attention_that_is_not_a_number_is_refused(folder):
    engine = Engine.load(folder, compile=False)
    engine.model.layers[1].attention_norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="is not a number in torch.float32"):
        calibrate.calibrate(engine, [list(range(90))], sinks=4, recent=16)


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
