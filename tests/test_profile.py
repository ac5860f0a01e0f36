"""kv_profile.json: what it may set, what it may not, and that reports say what it set."""

import json
import shutil

import pytest
from conftest import LLAMA
from runs import make_plan

import bench.__main__ as bench
import eval as evaluation
import generate
import kv
from engine import Engine

PROFILE = {"format": 1, "text": "x", "tokens": 9, "filter_layers": [2], "filter_ability": [0.5, None]}


def test_options_that_are_left_out_come_from_the_profile():
    given = kv.build("omnikv", make_plan(), 24, {}, PROFILE)
    assert [type(layer).__name__ for layer in given].index("Filter") == 2
    own = kv.build("omnikv", make_plan(), 24, {"filter_layers": [3]}, PROFILE)
    assert [type(layer).__name__ for layer in own].index("Filter") == 3
    assert kv.from_profile("omnikv", {"filter_layers": [3]}, PROFILE) == {}


def test_a_profile_sets_only_what_calibrate_finds():
    hostile = {"heads": "/etc/passwd", "bits": 4, "sinks": 7, "mem": 0.1, "offload": True, "recent": 1, "threads": 9}
    assert kv.build("streaming", make_plan(), 24, {}, hostile)[0].sinks == 4
    assert kv.read_profile(PROFILE | hostile) == {"filter_layers": [2]}
    for name in ("full", "streaming", "omnikv", "duo", "tailorkv", "rocketkv"):
        assert not kv.from_profile(name, {}, PROFILE | hostile).keys() & hostile.keys()


WRONG = {
    "filter_layers": ("x", "1", 3, [1.5], [[1]], None),
    "quant_layers": ({"a": 1}, ["0"]),
    "head_scores": ([1.0], [["x"]], "none"),
}


@pytest.mark.parametrize("key, value", [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_refused_in_one_line(key, value):
    with pytest.raises(ValueError, match=f"kv_profile.json: {key} must be a list.*; delete the file"):
        kv.read_profile({key: value})


def test_the_engine_refuses_a_profile_that_is_wrong_or_nested_too_deeply(text_checkpoint, tmp_path):
    folder = shutil.copytree(text_checkpoint, tmp_path / "own")
    for content, message in (('{"filter_layers": "1"}', "filter_layers must be"), ("[" * 10**5, "nested too deeply")):
        (folder / "kv_profile.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            Engine.load(folder, compile=False)


def test_reports_say_what_the_profile_set(text_checkpoint, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(text_checkpoint, tmp_path / "own")
    (folder / "kv_profile.json").write_text(json.dumps(PROFILE | {"bits": 4, "filter_layers": [1]}))
    out = tmp_path / "out.json"

    def report(tool, flags: str) -> dict:
        tool.main([*flags.split(), "--kv", "omnikv", "--budget", "64", "--json", str(out)])
        assert "omnikv: filter_layers=[1], from kv_profile.json" in "".join(capsys.readouterr())
        return json.loads(out.read_text())

    found = [report(generate, f"--checkpoint {folder} --prompt x --max-new-tokens 2 --no-compile")]
    found += report(evaluation, f"--checkpoint {folder} --tasks perplexity --length 300 --samples 1")["rows"]
    monkeypatch.setattr(bench, "read_bandwidth", lambda device: 1e9)
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 8}))
    small = f"--context 96 --steps 1 --repeats 1 --no-compile --results {tmp_path / 'r'}"
    found += report(bench, f"--shape {folder / 'config.json'} {small}")["rows"]
    assert [row["profile"] for row in found] == [{"filter_layers": [1]}] * 3


@pytest.mark.parametrize("method, option", [("omnikv", "filter_layers"), ("tailorkv", "quant_layers")])
def test_layers_that_nobody_chose_for_the_model_are_named(method, option, text_checkpoint, capsys):
    def said(options: dict, profile: dict) -> str:
        engine = Engine.load(text_checkpoint, compile=False)
        engine.profile = profile
        engine.use(method, 64, options, max_prompt=100)
        return capsys.readouterr().err

    assert (
        said({}, {})
        == f"warning: {method}'s default {option} suit some models only: calibrate.py measures this one's\n"
    )
    assert not said({option: "0"}, {}) and not said({}, {option: [0]})
