"""calibrate.py: its findings equal slow computations from the attention, and the methods find them."""

import json
import shutil

import pytest
import torch
from conftest import write_random
from references.attention import probabilities
from references.quantized import dense_preference, dequantize, quantize

import calibrate
from engine import Engine
from kv.full import Full
from kv.omnikv import default_filters
from terminal.cli import run as run_main


class Spy(Full):
    def prefill(self, row, q, k, v, **chunk):
        self.seen = q[0], k[0]
        return super().prefill(row, q, k, v, **chunk)


def spy(engine: Engine) -> list[Spy]:
    """Layers that have recorded q and k of the prompt IDS."""
    engine.use("full", max_prompt=90, room=1)
    spies = [Spy(engine.plan) for _ in engine.layers]
    engine.model.set_kv(spies)
    engine.model.prefill(0, torch.tensor(IDS))
    return spies


IDS = torch.randint(128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
MEASURED = torch.linspace(45, 89, 64).long().tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    return Engine.load(write_random(tmp_path_factory.mktemp("calibrate") / "llama"), compile=False)


@pytest.fixture(scope="module")
def found(engine) -> dict:
    return calibrate.calibrate(engine, [IDS], sinks=4, recent=16)


def test_head_scores_are_the_attention_between_sinks_and_window(engine, found):
    for scores, one in zip(found["head_scores"], spy(engine), strict=True):
        q, k = one.seen
        for head, score in enumerate(scores):
            totals = [0.0, 0.0]
            for i, query_head in enumerate((2 * head, 2 * head + 1)):
                for at in range(90 - 32, 90):
                    totals[i] += probabilities(q[query_head, at], k[head, : at + 1])[4 : at - 16 + 1].sum().item()
            assert score == pytest.approx(max(totals) / 32, abs=2e-5)


def test_filter_ability_is_the_attention_of_later_layers_to_a_layers_choice(tmp_path):
    engine = Engine.load(write_random(tmp_path / "m", num_hidden_layers=4), compile=False)
    found = calibrate.calibrate(engine, [IDS], sinks=4, recent=16)
    spies = spy(engine)

    def attention(layer: int, at: int) -> list[list[float]]:
        """Each query head's attention over all positions."""
        q, k = spies[layer].seen
        seen = [probabilities(q[h, at], k[h // 2, : at + 1]).tolist() for h in range(len(q))]
        return [p + [0.0] * (89 - at) for p in seen]

    for layer in range(3):
        caught = {later: 0.0 for later in range(layer + 1, 4)}
        for at in MEASURED:
            most = [max(p) for p in zip(*attention(layer, at), strict=True)]
            chosen = sorted((i for i in range(90) if i != at), key=lambda i: -most[i])[: int(0.05 * 90 + 0.5)]
            for later in caught:
                heads = attention(later, at)
                caught[later] += sum(p[i] for p in heads for i in [*chosen, at]) / len(heads) / len(MEASURED)
        assert found["filter_ability"][layer] == pytest.approx(sum(caught.values()) / len(caught), abs=2e-5)
    assert found["filter_ability"][3] is None and found["filter_layers"] == [0, 1]  # the default


def test_dense_preference_is_the_attention_outside_the_most_attended_tokens(engine, found):
    expected = [dense_preference(*one.seen) for one in spy(engine)]
    assert found["dense_preference"] == pytest.approx(expected, abs=2e-5)


def test_layers_whose_output_stands_quantization_are_proposed(engine, found):
    slow = [[quant_error(*one.seen, one.v[0, :, :90], bits) for bits in (2, 1)] for one in spy(engine)]
    for errors, expected in zip(found["quant_error"], slow, strict=True):
        assert errors == pytest.approx(expected, rel=1e-3)
    for tau, tolerance in ((0, 1), (0.1, 1), (0, 0.5), (0.1, 0.5), (0, 0)):
        quantized = calibrate.calibrate(engine, [IDS], 4, 16, tau, tolerance)["quant_layers"]
        stands = [error <= tolerance for error, _ in slow]
        assert quantized == [i for i, dense in enumerate(found["dense_preference"]) if dense > tau and stands[i]]


def quant_error(q, k, v, bits: int) -> float:
    """The relative error of the output at the measured positions, tokens 0 to 63 quantized."""

    def rounded(x, dim: int):
        pairs = [dequantize(*quantize(part, bits)).float() for part in x.movedim(dim, -1).flatten(0, -2)]
        return torch.stack(pairs).view(x.movedim(dim, -1).shape).movedim(-1, dim)

    keys, values = (torch.cat([rounded(x[:, :64], dim), x[:, 64:]], dim=1) for x, dim in ((k, 1), (v, 2)))
    wrong, total = 0.0, 0.0
    for at in MEASURED:
        for head in range(len(q)):
            seen = head // 2, slice(at + 1)
            y, z = (probabilities(q[head, at], a[seen]).float() @ b[seen].float() for a, b in ((k, v), (keys, values)))
            wrong, total = wrong + (y - z).square().sum().item(), total + y.square().sum().item()
    return (wrong / total) ** 0.5


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Engine:
    folder = write_random(tmp_path_factory.mktemp("calibrate") / "deep", num_hidden_layers=12)
    return Engine.load(folder, compile=False)


def texts(count: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(128, (count, 160), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_replay_without_filter_layers_is_the_model(deep):
    (ids,) = texts(1)
    deep.close()
    deep.model.set_rows(1)
    probes = calibrate.probes_of(deep, ids, 4, 16, "")
    logits = calibrate.replay(deep, ids, probes, ())
    exact = Engine.use(deep, "full", max_prompt=160, room=160).logits(ids[:1], ids[1:] + [0])
    assert torch.allclose(logits, exact[probes[0].at], rtol=1e-3, atol=1e-3)


def test_the_proposed_filter_layers_diverge_no_more_than_the_default_and_read_no_more(deep):
    both = calibrate.calibrate(deep, texts(2), sinks=4, recent=16)["filters"]
    plan = deep.use("full", max_prompt=160, room=1).plan
    assert both["default"]["layers"] == default_filters(plan) and both["default"]["full"] == 7
    assert both["proposed"]["kl"] <= both["default"]["kl"] and both["proposed"]["full"] <= 7
    few = calibrate.calibrate(deep, texts(2), sinks=4, recent=16, full=3)["filters"]
    assert few["proposed"]["full"] <= 3 and few["default"] == both["default"]
    assert "filter_layers" not in calibrate.calibrate(deep, texts(2), sinks=4, recent=16, full=1)
    unseen = texts(2, seed=1)
    kl = {name: divergence_of(deep, x["layers"], unseen) for name, x in (both | {"few": few["proposed"]}).items()}
    assert kl["proposed"] <= kl["default"] < kl["few"]


def divergence_of(engine: Engine, filters: list[int], texts: list[list[int]]) -> float:
    """Omnikv's KL divergence from the full cache, by the engine itself."""
    total = 0.0
    for ids in texts:
        p, q = (
            engine.use(*kv, max_prompt=120, room=40).logits(ids[:120], ids[120:])[1:].log_softmax(-1)
            for kv in (("full",), ("omnikv", 8, {"filter_layers": filters}))
        )
        total += (p.exp() * (p - q)).sum(-1).mean().item()
    return total / len(texts)


def test_a_choice_replaces_the_default_only_if_it_gains_clearly():
    default, other, few = (2, 8, 17), (2, 6, 17), (3,)
    noise = torch.rand(256, generator=torch.Generator().manual_seed(0))
    same, better = noise.flip(0) - 1e-4, noise - 0.01
    assert calibrate.propose({default: noise, other: same}, default, 8, 30) == default
    assert calibrate.propose({default: noise, other: better}, default, 8, 30) == other
    assert calibrate.propose({default: noise, few: noise + 1}, default, 5, 30) == few  # the user's own limit
    assert calibrate.propose({(0,): noise}, (0,), 2, 2) is None  # 2 layers: none could be sparse


def test_choices_are_tried_in_the_order_of_their_sparse_layers_errors():
    errors = [[1.0] * layer for layer in range(30)]
    for layer in range(4, 30):
        errors[layer][2 if layer < 19 else 17] = 0.1  # layer 2 chooses well for those up to 16, layer 17 for the rest
    assert calibrate.best_filters(errors, 8)[0] == (2, 17)
    assert calibrate.best_filters([[], [0.5]], 2) == []


def test_excerpts_are_cut_from_the_end_of_a_text_and_begin_with_bos(text_checkpoint):
    engine = Engine.load(text_checkpoint, compile=False)
    text = "The quick brown fox jumps over the lazy dog. " * 40
    ids = engine.encode(text)
    assert calibrate.excerpts_of(engine, text, 10**6) == [ids]
    parts = calibrate.excerpts_of(engine, text, 50)
    assert len(parts) == 4 and all(len(part) == 50 and part[0] == ids[0] for part in parts)
    assert [token for part in parts for token in part[1:]] == ids[-4 * 49 :]


@pytest.fixture
def flags(text_checkpoint, tmp_path) -> list[str]:
    """A command line that calibrates a copy of a checkpoint, tmp_path / "model"."""
    folder, text = shutil.copytree(text_checkpoint, tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    return ["--checkpoint", str(folder), "--text", str(text), "--sinks", "4", "--recent", "16"]


def test_a_profile_is_written_and_drawn_and_the_methods_find_it(flags, tmp_path, capsys):
    folder, plot = tmp_path / "model", tmp_path / "plot.png"
    (folder / "kv_profile.json").write_text(json.dumps({"of_others": [1]}))
    calibrate.main([*flags, "--plot", str(plot)])
    said = capsys.readouterr()
    assert plot.read_bytes()[:4] == b"\x89PNG" and "filter ability" in said.out and "proposed" in said.out
    assert said.err.splitlines()[0].startswith("-- measure excerpt 1 of") and "-- try filter layers" in said.err
    profile = json.loads((folder / "kv_profile.json").read_text())
    assert profile["format"] == 1 and profile["text"] == "text.txt" and profile["of_others"] == [1]
    assert len(profile["head_scores"]) == 8 and len(profile["head_scores"][0]) == 2
    engine = Engine.load(folder, "omnikv", 24, max_prompt=96, room=8, compile=False)
    assert {type(engine.layers[layer]).__name__ for layer in profile["filter_layers"]} >= {"Filter"}
    engine.use("duo", 60, {"sinks": 4, "recent": 8}, max_prompt=96, room=8)
    chosen, others = [], []
    for layer, scores in zip(engine.layers, profile["head_scores"], strict=True):
        full = sum(p.plan.n_kv_head for p in layer.parts if p.size == engine.plan.planned)
        order = layer.order.tolist()
        chosen, others = chosen + [scores[h] for h in order[:full]], others + [scores[h] for h in order[full:]]
    assert chosen and others and min(chosen) >= max(others)


def test_the_profile_goes_where_out_says_and_the_checkpoint_keeps_its_own(flags, tmp_path, capsys, monkeypatch):
    own, out = tmp_path / "model" / "kv_profile.json", tmp_path / "profile.json"
    own.write_text('{"mine": 1}')
    calibrate.main([*flags, "--out", str(out)])
    profile = json.loads(out.read_text())
    assert f"measured on {profile['tokens']} tokens:" in capsys.readouterr().out
    assert "head_scores" in profile and "mine" not in profile and own.read_text() == '{"mine": 1}'
    monkeypatch.setattr(Engine, "load", lambda *_, **__: pytest.fail("loaded"))
    for name, error in (("/proc/p", "--out /proc/p: cannot be"), (tmp_path / "text.txt", "text.txt is not valid JSON")):
        with pytest.raises(ValueError, match=error):
            calibrate.main([*flags, "--out", str(name)])


@pytest.mark.parametrize(
    "wrong, words",
    (
        ({"sinks": -1}, "--sinks must be at least 0"),
        ({"recent": -5}, "--recent at least 1"),
        ({"tau": float("nan")}, "--tau must lie between 0 and 1, not nan"),
        ({"tau": 7.0}, "--tau must lie"),
        ({"tolerance": 7.0}, "--tolerance must lie"),
        ({"full": 0}, "--full must be at least 1, not 0"),
    ),
)
def test_settings_out_of_range_are_refused(engine, wrong, words):
    with pytest.raises(ValueError, match=words):
        calibrate.calibrate(engine, [IDS], **{"sinks": 4, "recent": 16} | wrong)


def test_attention_that_is_not_a_number_is_refused(checkpoint):
    engine = Engine.load(checkpoint, compile=False)
    engine.model.layers[1].attention_norm.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="is not a number in torch.float32"):
        calibrate.calibrate(engine, [IDS], sinks=4, recent=16)


def test_mistakes_are_refused_in_one_line(checkpoint, text_checkpoint, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("Too short.")
    for model, text, words in (
        (text_checkpoint, "short.txt", "at least"),
        (text_checkpoint, "none.txt", "none.txt"),
        (checkpoint, "short.txt", "no tokenizer"),
        (tmp_path / "none", "short.txt", "no checkpoint folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            run_main(lambda m=model, t=text: calibrate.main(["--checkpoint", str(m), "--text", str(tmp_path / t)]))
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert stop.value.code == 2 and words in line
    assert not (text_checkpoint / "kv_profile.json").exists()
