"""bench.compare joins results that eval.py and bench wrote, and plots them."""

import json

import pytest

import bench.__main__ as bench
import eval as evaluation
from bench import compare

METHODS = ["--kv", "full,streaming:sinks=2", "--budget", "64"]


@pytest.fixture(scope="module")
def measured(tiny_checkpoint, tmp_path_factory) -> list:
    """The files of eval.py and of bench about two methods."""
    answers, speed = (tmp_path_factory.mktemp("compare") / name for name in ("answers.json", "speed.json"))
    flags = "--tasks niah_multikey_1,needle,perplexity --questions 2 --length 500 --samples 1".split()
    evaluation.main(["--checkpoint", str(tiny_checkpoint), *METHODS, *flags, "--json", str(answers)])
    flags = "--context 200 --steps 1 --repeats 1 --no-compile --no-prefill --results /dev/null".split()
    bench.main(["--shape", str(tiny_checkpoint / "config.json"), *METHODS, *flags, "--json", str(speed)])
    return [answers, speed]


def read(path) -> dict:
    return json.loads(path.read_text())


def joined(*files: dict) -> dict:
    """What is found of the one method at the one length that the files are about."""
    ((own,),) = (found.values() for found in compare.join(list(files)).values())
    return own


def test_every_method_and_budget_is_a_row(measured, capsys):
    compare.main(list(map(str, measured)))
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    head, _, *rows = lines
    assert [row[0] for row in rows] == ["full", "streaming:sinks=2 64"]
    others = {"KL", "same token, %", "blind, %", "next line, %", "prefill, s"}
    assert head == ["method", *(title for title in compare.COLUMNS if title not in others)]
    assert all(len(row) == len(head) and "" not in row for row in rows)
    answers, speed = (read(path)["rows"] for path in measured)
    of = {r["task"]: r for r in answers if r["kv"] == "streaming"}
    own = dict(zip(head, rows[1], strict=True))
    first = (of["niah_multikey_1"]["first"] + of["needle"]["first"]) / 2
    assert own["answers, %"] == f"{first:.0f} / {of['niah_multikey_1']['later']:.0f}"  # the other has no later ones
    assert own["perplexity"] == f"{of['perplexity']['score']:.2f}"
    (timed,) = (r for r in speed if r["kv"] == "streaming")
    assert own["read a step, MB"] == f"{timed['step_device_bytes'] / 1e6:.2f}"
    assert own["ms/token"] == f"{timed['ms_per_token']:.1f}"


def test_perplexity_is_fidelitys_and_benchs_bytes_are_divided_by_its_batch(measured):
    answers, speed = map(read, measured)
    alone = next(r for r in answers["rows"] if r["task"] == "perplexity" and r["kv"] == "full")
    fidelity = alone | {"task": "fidelity", "kl": 0.0, "perplexity": alone["perplexity"] + 2}
    (timed,) = (r for r in speed["rows"] if r["kv"] == "full")
    both = {key: 3 * timed[key] for key in timed if key.endswith("_bytes") and timed[key]} | {"batch": 3}
    for rows in ([alone, fidelity], [fidelity, alone]):
        own = joined({"rows": [*rows, timed | both | {"prefill_s": 7.5}]})
        assert own["prefill"] == 7.5
        assert own["perplexity"] == fidelity["perplexity"]
        assert own["kv"] == timed["kv_device_bytes"] / 1e6 and own["read"] == timed["step_device_bytes"] / 1e6


def test_questions_of_forks_count_alike_and_lines_are_counted_beside_their_similarity(measured):
    row = read(measured[0])["rows"][0] | {"score": 60, "first": 20, "later": 68}
    assert joined({"args": {"blind": True, "fork": True}, "rows": [row]})["blind"] == "60"
    lines = row | {"task": "code_line", "score": 71.4, "later": None}
    samples = [lines | {"score": score} for score in (100, 100, 100, 0)]
    own = joined({"rows": [lines], "samples": samples})
    assert own["line"] == "75 / 71" and "answers" not in own


@pytest.mark.parametrize(
    "content", ("{}", "[]", '{"rows": [{}]}', '{"rows": 3}', '{"rows": [{"task": "vt", "score": 3}]}', "no", "twice")
)
def test_a_file_that_is_not_a_result_or_times_a_method_twice_is_refused(measured, tmp_path, content):
    message = "other.json must be the files that eval.py and bench wrote"
    if content == "twice":
        content, message = json.dumps({"rows": 2 * read(measured[1])["rows"]}), "full .*timed more than once"
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        compare.main([str(measured[0]), str(tmp_path / "other.json")])


@pytest.mark.slow
def test_fidelity_is_a_mean_over_texts_and_each_length_has_a_table(measured, tiny_checkpoint, tmp_path, capsys):
    blind, fidelity = tmp_path / "blind.json", tmp_path / "fidelity.json"
    answers = read(measured[0])
    blind.write_text(json.dumps(answers | {"args": answers["args"] | {"blind": True}}))
    flags = ["--tasks", "fidelity", "--length", "500,600", "--samples", "2", "--forced", "8"]
    flags += ["--text", f"{__file__},{evaluation.__file__}", "--json", str(fidelity)]
    evaluation.main(["--checkpoint", str(tiny_checkpoint), *METHODS, *flags])
    capsys.readouterr()
    files = list(map(str, [*measured, blind, fidelity]))
    compare.main([*files, "--results", str(tmp_path / "real.json"), "--plot", str(tmp_path / "out.png")])
    assert capsys.readouterr().out.count("| streaming:sinks=2 64 |") == 2
    part = read(fidelity)
    part["rows"] = [row for row in part["rows"] if row["kv"] != "full"]  # which then has no divergence
    (tmp_path / "part.json").write_text(json.dumps(part))
    compare.main([*files[:3], str(tmp_path / "part.json"), "--plot", str(tmp_path / "part.png")])
    assert (tmp_path / "part.png").stat().st_size > 10_000
    found = [read(tmp_path / f"real_{length}.json") for length in (500, 600)]
    absent = "next line, %", "prefill, s"
    assert list(found[0]["columns"]) == ["method", *(x for x in compare.COLUMNS if x not in absent)]
    assert found[0]["machine"]
    assert list(found[1]["columns"]) == ["method", "KL", "same token, %", "perplexity"]
    kl = [x["kl"] for x in read(fidelity)["samples"] if (x["kv"], x["length"]) == ("streaming", 500)]
    full, streaming = found[0]["rows"]
    assert full[1] == 0 and streaming[1] == pytest.approx(sum(kl) / 4) and len(set(kl)) == 4  # two of each text
    assert streaming[4] == streaming[5] and "/" in streaming[4] and all(x is not None for x in streaming)
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_several_checkpoints_share_a_table_and_a_plot(measured, tmp_path, capsys):
    other, timed = map(read, measured)
    name = other["args"]["checkpoint"].split("/")[-1]
    other["args"]["checkpoint"] = "models/other"
    for row in other["rows"]:
        row["first"] = 7 if row["first"] is not None else None
    timed["rows"] = [row | {"shape": "models/other/config.json"} for row in timed["rows"] if row["kv"] == "full"]
    (tmp_path / "other.json").write_text(json.dumps(other))
    (tmp_path / "timed.json").write_text(json.dumps(timed))
    files = map(str, [*measured, tmp_path / "timed.json", tmp_path / "other.json"])
    compare.main([*files, "--results", str(tmp_path / "both.json"), "--plot", str(tmp_path / "out.png")])
    assert capsys.readouterr().out.count("| streaming:sinks=2 64 |") == 1
    found = read(tmp_path / "both.json")
    titles = [f"{title}: {model} 500" for title in ("answers, %", "KV, MB") for model in (name, "other")]
    assert list(found["columns"]) == ["method", *titles]
    full, streaming = (dict(zip(found["columns"], row, strict=True)) for row in found["rows"])
    assert full["answers, %: other 500"].startswith("7 / ") and full[f"answers, %: {name} 500"][:2] != "7 "
    assert 0 < streaming["KV, MB: other 500"] < full["KV, MB: other 500"] == full[f"KV, MB: {name} 500"]
    assert (tmp_path / "out.png").stat().st_size > 10_000
