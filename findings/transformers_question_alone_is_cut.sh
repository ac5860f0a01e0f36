#!/usr/bin/env bash
# transformers 5.17.0: generate(question, past_key_values=cache of a text), with the question's tokens alone and no
# attention_mask, answers a question whose beginning was dropped, or raises "cannot reshape tensor of 0 elements".
#
# generate() makes a mask of ones for the tokens that it gets. Input as long as its mask counts as the whole sequence, so
# its beginning, as many tokens as the cache holds, is taken for read and cut off. Where the question is shorter than the
# text, the difference is negative: as the start of a slice it leaves the tokens from text - question on, or none. A
# question as long as the text is read whole, but at the text's positions. The model itself, called with a cache, takes
# new tokens alone; so does generate() with attention_mask = ones for text and question.
# Source: next_sequence_length in GenerationMixin._prefill; prepare_inputs_for_generation slices [-next_sequence_length:].
#
# Seen on 2026-11-30, a text of 60 tokens: how many tokens of the question the model reads, at which positions, and
# whether the first logits equal those of text and question without a cache; with the mask always all, 60 on, True:
#   30: RuntimeError    40: 20 at 20 to 39, False    60: 60 at 0 to 59, False    100: 40 at 60 to 99, False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

TEXT = 60
EXPECTED = {30: "RuntimeError", 40: (20, 20, 39, False), 60: (60, 0, 59, False), 100: (40, 60, 99, False)}
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200, "initializer_range": 0.5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
torch.manual_seed(0)
model, read = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval(), []
watch = {"with_kwargs": True}
model.model.register_forward_pre_hook(lambda _, args, given: read.append(given["position_ids"][0].tolist()), **watch)
for question, expected in EXPECTED.items():
    tokens = torch.randint(2, 199, (1, TEXT + question))
    every = torch.arange(TEXT + question)[None]
    with torch.no_grad():
        logits = model(tokens, position_ids=every, use_cache=False).logits[0, -1]
    for mask in ({}, {"attention_mask": torch.ones_like(tokens)}):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokens[:, :TEXT], position_ids=every[:, :TEXT], past_key_values=cache)
        read.clear()
        how = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
        try:
            out = model.generate(tokens[:, TEXT:], past_key_values=cache, **mask, **how)
            at = read[0]
            found = len(at), at[0], at[-1], torch.allclose(out.logits[0][0], logits, atol=1e-3)
        except RuntimeError as error:
            assert "0 elements" in str(error), error
            found = "RuntimeError"
        print(f"question of {question}, {'the whole mask' if mask else 'no mask'}: {found}")
        assert found == ((question, TEXT, TEXT + question - 1, True) if mask else expected), found
PYTHON
