"""bench.compare joins results that eval.py and bench wrote, and plots marks with readable names."""

import json

import pytest

import bench.__main__ as bench
import eval as evaluation
from bench import compare


@pytest.fixture(scope="module")
def measured(tiny_checkpoint, tmp_path_factory):
    """[answers.json, speed.json] of two methods."""
    folder = tmp_path_factory.mktemp("compare")
    kv = ["--kv", "full,streaming:sinks=2", "--budget", "64"]
    tasks = ["--tasks", "niah_multikey_1,needle,perplexity", "--questions", "2"]
    plan = ["--length", "500", "--samples", "1", "--json", str(folder / "answers.json")]
    evaluation.main(["--checkpoint", str(tiny_checkpoint), *tasks, *plan, *kv])
    plan = ["--context", "200", "--steps", "1", "--repeats", "1", "--no-compile", "--no-prefill"]
    out = ["--json", str(folder / "speed.json"), "--results", str(folder / "results.jsonl")]
    bench.main(["--shape", str(tiny_checkpoint / "config.json"), *plan, *out, *kv])
    return [str(folder / "answers.json"), str(folder / "speed.json")]


def test_every_method_and_budget_is_a_row_exhaustive_measurements(measured, capsys):
    compare.main(measured)
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    head, _, *rows = lines
    assert [row[0] for row in rows] == ["full", "streaming:sinks=2 64"]
    others = {"KL", "same token, %", "blind, %", "next line, %"}
    assert head == ["method", *(title for title in compare.COLUMNS if title not in others)]
    assert all(len(row) == len(head) and "" not in row for row in rows)
    answers, speed = (json.loads(open(path).read())["rows"] for path in measured)
    of = {(r["kv"], r["budget"], r["task"]): r for r in answers}
    own = dict(zip(head, rows[1], strict=True))
    graded = [of["streaming", 64, task] for task in ("niah_multikey_1", "needle")]
    first = sum(r["first"] for r in graded) / 2
    assert own["answers, %"] == f"{first:.0f} / {graded[0]['later']:.0f}"  # only one task has later questions
    assert own["perplexity"] == f"{of['streaming', 64, 'perplexity']['score']:.2f}"
    (timed,) = (r for r in speed if r["kv"] == "streaming" and r["budget"] == 64)
    assert own["read a step, MB"] == f"{timed['step_device_bytes'] / 1e6:.2f}"
    assert own["ms/token"] == f"{timed['ms_per_token']:.1f}"


def test_perplexity_is_fidelitys_and_benchs_bytes_are_divided_by_its_batch(measured):
    answers, speed = (json.loads(open(path).read()) for path in measured)
    alone = next(r for r in answers["rows"] if r["task"] == "perplexity" and r["kv"] == "full")
    fidelity = alone | {"task": "fidelity", "kl": 0.0, "perplexity": alone["perplexity"] + 2}
    (timed,) = (r for r in speed["rows"] if r["kv"] == "full")
    both = {key: 3 * timed[key] for key in timed if key.endswith("_bytes") and timed[key]} | {"batch": 3}
    for rows in ([alone, fidelity], [fidelity, alone]):
        ((own,),) = (found.values() for found in compare.join([{"rows": [*rows, timed | both]}]).values())
        assert own["perplexity"] == fidelity["perplexity"]
        assert own["kv"] == timed["kv_device_bytes"] / 1e6 and own["read"] == timed["step_device_bytes"] / 1e6


def test_questions_of_forks_count_alike_and_lines_are_counted_beside_their_similarity(measured):
    row = json.loads(open(measured[0]).read())["rows"][0] | {"score": 60, "first": 20, "later": 68}
    ((own,),) = (
        found.values() for found in compare.join([{"args": {"blind": True, "fork": True}, "rows": [row]}]).values()
    )
    assert own["blind"] == "60"
    lines = row | {"task": "code_line", "score": 71.4, "later": None}
    samples = [lines | {"score": score} for score in (100, 100, 100, 0)]
    ((own,),) = (found.values() for found in compare.join([{"rows": [lines], "samples": samples}]).values())
    assert own["line"] == "75 / 71" and "answers" not in own


def test_a_method_that_was_timed_twice_is_refused(measured, tmp_path):
    rows = json.loads(open(measured[1]).read())["rows"]
    (tmp_path / "twice.json").write_text(json.dumps({"rows": rows + rows}))
    with pytest.raises(ValueError, match="full .*timed more than once"):
        compare.main([measured[0], str(tmp_path / "twice.json")])


def test_a_file_that_is_not_a_result_is_refused(measured, tmp_path):
    for content in ("{}", "[]", '{"rows": [{}]}', '{"rows": 3}', '{"rows": [{"task": "vt", "score": 3}]}', "no"):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match="other.json must be the files that eval.py and bench wrote"):
            compare.main([measured[0], str(tmp_path / "other.json")])


def test_fidelity_is_a_mean_over_texts_and_each_length_has_a_table(measured, tiny_checkpoint, tmp_path, capsys):
    blind = json.loads(open(measured[0]).read())
    blind["args"]["blind"] = True
    (tmp_path / "blind.json").write_text(json.dumps(blind))
    texts = f"{__file__},{evaluation.__file__}"
    flags = ["--tasks", "fidelity", "--length", "500,600", "--samples", "2", "--forced", "8", "--text", texts]
    flags += ["--kv", "full,streaming:sinks=2", "--budget", "64", "--json", str(tmp_path / "fidelity.json")]
    evaluation.main(["--checkpoint", str(tiny_checkpoint), *flags])
    capsys.readouterr()
    files = [*measured, str(tmp_path / "blind.json"), str(tmp_path / "fidelity.json")]
    compare.main([*files, "--results", str(tmp_path / "real.json"), "--plot", str(tmp_path / "out.png")])
    assert capsys.readouterr().out.count("| streaming:sinks=2 64 |") == 2
    found = [json.loads((tmp_path / f"real_{length}.json").read_text()) for length in (500, 600)]
    assert list(found[0]["columns"]) == ["method", *(x for x in compare.COLUMNS if x != "next line, %")]
    assert found[0]["machine"]
    assert list(found[1]["columns"]) == ["method", "KL", "same token, %", "perplexity"]
    kept = json.loads((tmp_path / "fidelity.json").read_text())["samples"]
    kl = [sample["kl"] for sample in kept if (sample["kv"], sample["length"]) == ("streaming", 500)]
    full, streaming = found[0]["rows"]
    assert full[1] == 0 and streaming[1] == pytest.approx(sum(kl) / 4) and len(set(kl)) == 4  # two of each text
    assert streaming[4] == streaming[5] and "/" in streaming[4] and all(x is not None for x in streaming)
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_several_checkpoints_share_a_table_and_a_plot(measured, tmp_path, capsys):
    other, timed = (json.loads(open(path).read()) for path in measured)
    other["args"]["checkpoint"] = "models/other"
    for row in other["rows"]:
        row["first"] = 7 if row["first"] is not None else None
    timed["rows"] = [row | {"shape": "models/other/config.json"} for row in timed["rows"] if row["kv"] == "full"]
    for name, file in ("other", other), ("timed", timed):
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    files = [*measured, str(tmp_path / "timed.json"), str(tmp_path / "other.json")]
    compare.main([*files, "--results", str(tmp_path / "both.json"), "--plot", str(tmp_path / "out.png")])
    assert capsys.readouterr().out.count("| streaming:sinks=2 64 |") == 1
    found = json.loads((tmp_path / "both.json").read_text())
    name = json.loads(open(measured[0]).read())["args"]["checkpoint"].split("/")[-1]
    titles = [f"{title}: {model} 500" for title in ("answers, %", "KV, MB") for model in (name, "other")]
    assert list(found["columns"]) == ["method", *titles]
    full, streaming = (dict(zip(found["columns"], row, strict=True)) for row in found["rows"])
    assert full["answers, %: other 500"].startswith("7 / ") and full[f"answers, %: {name} 500"][:2] != "7 "
    assert 0 < streaming["KV, MB: other 500"] < full["KV, MB: other 500"] == full[f"KV, MB: {name} 500"]
    assert (tmp_path / "out.png").stat().st_size > 10_000
