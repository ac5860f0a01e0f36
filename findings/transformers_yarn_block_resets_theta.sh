#!/usr/bin/env bash
# transformers 5.17.0: a rope_scaling block added to a config.json that transformers 5 saved resets rope_theta.
#
# Qwen2.5's model cards tell users to add a "rope_scaling" block for YaRN. Transformers 4 saved rope_theta at the top of
# config.json, and the block leaves it alone. Transformers 5 saves it in "rope_parameters", which the block replaces as a
# whole: theta becomes the default, 10,000 for 1,000,000, without a warning, and every frequency is another.
# Source: PreTrainedConfig takes rope_scaling in place of rope_parameters, then sets the defaults that it lacks.
#
# Seen on 2026-11-27:
#   theta beside the block: 1000000.0
#   theta in rope_parameters: 10000.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoConfig

block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
model = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
found = []
for name, theta in {
    "beside the block": {"rope_theta": 1e6},
    "in rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}.items():
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model | theta | {"rope_scaling": block}))
    found.append(AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"])
    print(f"theta {name}: {found[-1]}")
assert found == [1e6, 1e4], "this has changed"
PYTHON
