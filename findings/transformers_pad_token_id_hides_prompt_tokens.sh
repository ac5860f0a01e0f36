#!/usr/bin/env bash
# transformers 5.17.0: generate(..., pad_token_id=0) for one prompt without padding hides its tokens of id 0.
#
# pad_token_id is given to end the message that it is unset, and seems to matter for what follows an EOS alone. Without
# an attention_mask, generate also takes each token of the prompt that equals it for padding, unless it is an EOS too:
# the model attends to none of them, and the positions after them move. In vocabularies of bytes (GPT-2's, Llama 3's,
# Qwen's) id 0 is "!". The logits are those of the prompt with its exclamation marks removed; nothing is printed.
# Source: generation/utils.py infers the mask from the ids, whoever made them.
#
# Seen on 2026-11-29:
#   pad_token_id 0: as the whole prompt False, as without its tokens 0 True
#   pad_token_id 1: as the whole prompt True, as without its tokens 0 False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=64, initializer_range=0.5)).eval()
prompt = torch.tensor([[5, 0, 7, 21, 0, 9]])
expected = [model(ids).logits[0, -1] for ids in (prompt, prompt[prompt != 0][None])]
found = []
for pad in (0, 1):
    how = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    logits = model.generate(prompt, pad_token_id=pad, **how).logits[0][0]
    whole, without = (torch.allclose(logits, each, atol=1e-4) for each in expected)
    print(f"pad_token_id {pad}: as the whole prompt {whole}, as without its tokens 0 {without}")
    found.append((whole, without))
assert found == [(False, True), (True, False)], found
PYTHON
