"""A step's launches and bytes on a GPU, counted from the code that Inductor generates for it."""

import json

import pytest
import torch

from bench import generated, launches
from runtime.compile import cuda_options

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
MOST = {"full": 10.5, "rocketkv": 19, "kivi": 19}  # kernels per layer; a lower number is progress


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    file = tmp_path_factory.mktemp("launches") / "launches.json"
    launches.main(["--kv", ",".join(MOST), "--layers", "2", "--json", str(file)])
    return {row["kv"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.parametrize("name", MOST)
def test_a_layer_launches_no_more_kernels_and_they_read_little_more_than_a_step_must(rows, name):
    row = rows[name]
    assert row["launches_per_layer"] <= MOST[name]
    assert row["launches"] == sum(row["by_kind"].values()) and row["graphs"] == 1
    assert not row["by_kind"]["product"]  # sums take in what follows, and read a weight as fast
    assert 1 <= row["kernel_bytes"] / row["step_bytes"] < 1.05  # weights and cache are most of it
    assert row["predicted_ms"] == pytest.approx(row["kernel_bytes"] / 3.05e9 + row["launches"] * 1.7e-3)


def test_a_call_to_torch_counts():
    """Inductor calls torch where it writes no kernel, as for a scatter of 64-bit integers."""

    def place(x):
        return x.new_zeros(9).scatter(0, x, x)

    with generated.fake_gpu() as device:
        x = torch.zeros(4, dtype=torch.int64, device=device)
        found = generated.generate(lambda backend: generated.launch(place, backend, x), cuda_options())
    assert found.launches()["other"] == 1


def test_quantized_weights_are_read_in_fewer_bytes(rows, capsys):
    launches.main(["--kv", "full", "--layers", "2", "--quantize", "int4", "--json"])
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["launches_per_layer"] <= 12.5 and row["by_kind"]["other"] == 10  # torch's products; nothing joins them
    assert row["step_bytes"] < 0.8 * rows["full"]["step_bytes"]


@pytest.mark.parametrize("flag, value", (("--context", "0"), ("--layers", "0"), ("--batch", "x"), ("--kv", "nothing")))
def test_bad_arguments_are_named(flag, value):
    with pytest.raises(ValueError, match=value if flag == "--kv" else flag):
        launches.main([flag, value])
