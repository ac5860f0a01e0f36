#!/usr/bin/env bash
# transformers 5.17.0: Phi-3's configuration replaces the original length that its LongRoPE block states by 4,096.
#
# Transformers 5 documents original_max_position_embeddings as a key of rope_parameters, and other models read it there.
# Phi3Config has an attribute of that name besides, 4,096 by default, and a block without it at the top of config.json
# gets the default, and no message says so: the attention factor is another, and the long factors, here 4, are used for
# texts of 4,097 to 8,192 tokens too.
# Phi-3 and Phi-4-mini as released state it at the top.
# Source: standardize_rope_params sets the block's value to the attribute's wherever the configuration has one.
#
# Seen on 2026-11-30, for 8,192 tokens; the block says 8,192 of 32,768:
#   phi3, in the block: 4096, attention factor 1.118, first frequency 0.25
#   phi3, in the block and at the top: 8192, attention factor 1.074, first frequency 1.0
#   llama, in the block: 8192, attention factor 1.074, first frequency 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
block = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8192} | factors
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 32768}
found = []
for name, model, top in (
    ("phi3, in the block", "phi3", {}),
    ("phi3, in the block and at the top", "phi3", {"original_max_position_embeddings": 8192}),
    ("llama, in the block", "llama", {}),
):
    (Path(sys.argv[1]) / "config.json").write_text(json.dumps({"model_type": model, "rope_parameters": block} | sizes | top))
    config = AutoConfig.from_pretrained(sys.argv[1])
    frequencies, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=8192)
    length = config.rope_parameters["original_max_position_embeddings"]
    found.append((length, round(factor, 3), frequencies[0].item()))
    print(f"{name}: {length}, attention factor {factor:.3f}, first frequency {frequencies[0].item()}")
assert found == [(4096, 1.118, 0.25), (8192, 1.074, 1.0), (8192, 1.074, 1.0)], "this has changed"
PYTHON
