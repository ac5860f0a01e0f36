"""A checkpoint's fingerprint, which identifies the results computed with its weights."""

import json
import shutil

from conftest import write_random

from runtime import checkpoint
from runtime.checkpoint import open_weights, read_config, write_checkpoint
from runtime.hf_config import from_hf


def fingerprint(folder) -> str:
    return checkpoint.fingerprint(read_config(folder))


def test_a_fingerprint_depends_on_weights_and_config_and_not_on_their_files(tmp_path):
    one, other = write_random(tmp_path / "one"), write_random(tmp_path / "other", seed=1)
    first = fingerprint(one)
    assert first == fingerprint(shutil.copytree(one, tmp_path / "copy")) != fingerprint(other)
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    (tmp_path / "copy" / "model.safetensors").unlink()  # it reads no weights
    assert fingerprint(tmp_path / "copy") == first
    stored = {name: t.read() for name, t in open_weights(one).items()}
    config = json.loads((one / "config.json").read_text())

    def written(tensors, config=config, **options):
        write_checkpoint(tmp_path / "new", config, from_hf(config), tensors, tensors.__getitem__, force=True, **options)
        return fingerprint(tmp_path / "new")

    for name, tensor in stored.items():  # one number of any tensor changes the fingerprint
        changed = tensor.clone()
        changed.view(-1)[-1] += 0.01
        assert written(stored | {name: changed}) != first, name
    assert written(stored, config | {"rope_theta": 1e6}) != first
    assert written(stored) == first
    assert written(stored, shard_bytes=50_000) == first  # however it is sharded
