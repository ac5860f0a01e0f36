#!/usr/bin/env bash
# transformers 5.17.0: Mistral 3's multimodal model ties its head although its text_config says that it is not tied.
#
# text_config is the configuration of a Mistral, and tie_word_embeddings there decides for a Mistral alone. Inside
# Mistral3ForConditionalGeneration it decides nothing: the outer configuration's own tie_word_embeddings does, whose
# default is true where Mistral's is false. A head and a table that were two matrices are one, and the saved checkpoint
# has no head, beside a text_config that promises one. Who reads the text part by text_config misses a tensor.
# Source: lm_head belongs to the outer class, and ties by that class's configuration.
#
# Seen on 2026-11-29:
#   outer None: tied True, head saved False, text_config says tied False
#   outer False: tied False, head saved True, text_config says tied False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys

from safetensors import safe_open
from transformers import AutoConfig, Mistral3Config, Mistral3ForConditionalGeneration

sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
text = sizes | {"model_type": "mistral", "num_key_value_heads": 1, "vocab_size": 32, "tie_word_embeddings": False}
vision = sizes | {"model_type": "pixtral", "image_size": 28, "patch_size": 14}
found = []
for outer in (None, False):
    how = {} if outer is None else {"tie_word_embeddings": outer}
    model = Mistral3ForConditionalGeneration(Mistral3Config(text_config=dict(text), vision_config=dict(vision), **how))
    folder = f"{sys.argv[1]}/{outer}"
    model.save_pretrained(folder)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        saved = any(name.endswith("lm_head.weight") for name in file.keys())
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    says = AutoConfig.from_pretrained(folder).text_config.tie_word_embeddings
    print(f"outer {outer}: tied {tied}, head saved {saved}, text_config says tied {says}")
    found.append((tied, saved, says))
assert found == [(True, False, False), (False, True, False)], found
PYTHON
