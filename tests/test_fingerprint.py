"""The name of a checkpoint's weights, by which what was computed with them is found again."""

import json
import shutil

from conftest import write_random

from checkpoint import fingerprint, open_weights, write_checkpoint


def test_a_fingerprint_is_of_the_weights_and_the_config_wherever_they_lie(tmp_path):
    big = {"vocab_size": 4096}  # embeddings of a megabyte, of which slices are read
    one, other = write_random(tmp_path / "one", **big), write_random(tmp_path / "other", seed=1, **big)
    first = fingerprint(one)
    assert first == fingerprint(shutil.copytree(one, tmp_path / "copy")) != fingerprint(other)
    (tmp_path / "copy" / "tokenizer.json").write_text("{}")
    assert fingerprint(tmp_path / "copy") == first
    stored = {name: t.read() for name, t in open_weights(one).items()}
    config = json.loads((one / "config.json").read_text())
    for name in stored:  # a change of any tensor is seen
        changed = stored | {name: stored[name] * 1.001}
        write_checkpoint(tmp_path / "changed", config, changed, changed.__getitem__, force=True)
        assert fingerprint(tmp_path / "changed") != first, name
    write_checkpoint(tmp_path / "changed", config | {"rope_theta": 1e6}, stored, stored.__getitem__, force=True)
    assert fingerprint(tmp_path / "changed") != first
    write_checkpoint(tmp_path / "changed", config, stored, stored.__getitem__, force=True, shard_bytes=500_000)
    assert fingerprint(tmp_path / "changed") == first  # however it is cut into files
