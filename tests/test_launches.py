"""A step's launches and bytes on a GPU, counted from the code that Inductor generates for it."""

import json

import pytest
import torch

from bench import generated, launches
from runtime.compile import cuda_options

pytest.importorskip("triton")
MOST = {"full": 10.5, "rocketkv": 19, "kivi": 19}  # kernels per layer; a lower number is progress


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("launches") / "launches.json"
    launches.main(["--kv", ",".join(MOST), "--layers", "2", "--json", str(file)])
    return {row["kv"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.parametrize("name", MOST)
def test_a_layer_does_not_launch_more_kernels(rows, name):
    assert rows[name]["launches_per_layer"] <= MOST[name]
    assert rows[name]["launches"] == sum(rows[name]["by_kind"].values()) and rows[name]["graphs"] == 1
    assert not rows[name]["by_kind"]["product"]  # sums take in what follows, and read a weight as fast


@pytest.mark.parametrize("name", MOST)
def test_kernels_read_and_write_little_more_than_a_step_must_read(rows, name):
    """Weights and cache are most of it; no kernel counts the whole of a buffer of which it gathers a part."""
    assert 1 <= rows[name]["kernel_bytes"] / rows[name]["step_bytes"] < 1.05


def test_a_call_to_torch_counts():
    """Inductor calls torch where it writes no kernel, as for a scatter of 64-bit integers."""

    def place(x):
        return x.new_zeros(9).scatter(0, x, x)

    with generated.fake_gpu() as device:
        x = torch.zeros(4, dtype=torch.int64, device=device)
        found = generated.generate(lambda backend: generated.launch(place, backend, x), cuda_options())
    assert found.launches()["other"] == 1


def test_the_time_is_predicted_from_bytes_and_launches(rows):
    row = rows["full"]
    assert row["predicted_ms"] == pytest.approx(row["kernel_bytes"] / 3.05e9 + row["launches"] * 1.7e-3)


def test_quantized_weights_are_read_in_fewer_bytes(rows, capsys):
    launches.main(["--kv", "full", "--layers", "2", "--quantize", "int4", "--json"])
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["launches_per_layer"] <= 12.5 and row["by_kind"]["other"] == 10  # torch's products; nothing joins them
    assert row["step_bytes"] < 0.8 * rows["full"]["step_bytes"]


@pytest.mark.parametrize(
    ("flag", "value"), (("--context", "0"), ("--layers", "0"), ("--batch", "x"), ("--kv", "nothing"))
)
def test_bad_arguments_are_named(flag, value):
    with pytest.raises(ValueError, match=value if flag == "--kv" else flag):
        launches.main([flag, value])
