"""A checkpoint's fingerprint, which identifies the results computed with its weights."""

import json
import shutil

from conftest import write_random

from runtime.checkpoint import fingerprint, open_weights, write_checkpoint


def test_a_fingerprint_depends_on_weights_and_config_and_not_on_their_files(tmp_path):
    big = {"vocab_size": 4096}  # makes embeddings of a megabyte, which are hashed in slices
    one, other = write_random(tmp_path / "one", **big), write_random(tmp_path / "other", seed=1, **big)
    first = fingerprint(one)
    assert first == fingerprint(shutil.copytree(one, tmp_path / "copy")) != fingerprint(other)
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    assert fingerprint(tmp_path / "copy") == first
    stored = {name: t.read() for name, t in open_weights(one).items()}
    config = json.loads((one / "config.json").read_text())
    for name in stored:  # scaling any tensor changes the fingerprint
        changed = stored | {name: stored[name] * 1.001}
        write_checkpoint(tmp_path / "changed", config, changed, changed.__getitem__, force=True)
        assert fingerprint(tmp_path / "changed") != first, name
    write_checkpoint(tmp_path / "changed", config | {"rope_theta": 1e6}, stored, stored.__getitem__, force=True)
    assert fingerprint(tmp_path / "changed") != first
    write_checkpoint(tmp_path / "changed", config, stored, stored.__getitem__, force=True, shard_bytes=500_000)
    assert fingerprint(tmp_path / "changed") == first  # however it is sharded
