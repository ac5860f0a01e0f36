#!/usr/bin/env bash
# transformers 5.17.0: from a tokenizer.model alone, LlamaTokenizer merges pieces in the order of their ids, so that
# indented code gets other ids than from sentencepiece.
#
# sentencepiece merges the two pieces first whose union has the highest score. In Mistral's and Llama 2's vocabularies
# runs of spaces stand at the front and have the lowest scores: they are to merge last. Without a tokenizer.json,
# transformers 5 derives the merges from the ids alone. A model that was fine-tuned with sentencepiece, or with
# transformers 4's slow tokenizer, then sees an indentation that it was not trained with. (The first id differs too: no
# space is put before the text.)
# Source: the conversion of a sentencepiece model calls generate_merges without its second argument, the scores.
#
# Seen on 2026-11-27, with the model that mistral-common ships (Mistral 7B's first):
#   sentencepiece: [801, 285, 5888, 13, 5390, 604, 28705, 28740]
#   transformers:  [1270, 285, 5888, 13, 273, 807, 28705, 28740]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" "$@" --quiet --disable-pip-version-check; }
pip install transformers==5.17.0 sentencepiece==0.2.3 protobuf==7.36.2
pip install --no-deps mistral-common==1.13.1  # for its data
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import shutil
import sys
from importlib.metadata import files
from pathlib import Path

import sentencepiece
from transformers import AutoTokenizer

folder = Path(sys.argv[1], "mistral")
folder.mkdir()
(data,) = (file for file in files("mistral-common") if file.name == "tokenizer.model.v1")
shutil.copy(data.locate(), folder / "tokenizer.model")
(folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": True}))

text = "def f():\n        return 1"
own = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model")).encode(text)
theirs = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False).input_ids
print("sentencepiece:", own)
print("transformers: ", theirs)
assert own == [801, 285, 5888, 13, 5390, 604, 28705, 28740], "this has changed"
assert theirs == [1270, 285, 5888, 13, 273, 807, 28705, 28740], "this has changed"
PYTHON
