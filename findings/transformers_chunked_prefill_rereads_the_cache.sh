#!/usr/bin/env bash
# transformers 5.17.0: generate(past_key_values=cache, prefill_chunk_size=N) reads the cached text again: the cache then
# holds it twice, and the answer is another one.
#
# A prompt that continues a cache is cut to its new tokens, so a document's cache can serve many questions. With
# prefill_chunk_size, meant for long documents, all tokens are split into chunks, as if the cache were empty, and
# appended to it at positions from 0 on. Nothing is raised or logged. With an empty cache, chunks give the same answer
# as one piece.
# Source: in GenerationMixin._prefill only the branch without chunks uses next_sequence_length; the other one starts
# with past_length = 0.
#
# Seen on 2026-11-30, a text of 100 tokens and a question of 20, of a Llama and of a Mistral whose window is 32:
#   tokens in the cache once the first token of the answer is known: 120 without chunks, 220 with chunks of 16
#   that token's logits equal those without a cache: True without chunks, False with chunks of 16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

TEXT, QUESTION, CHUNK = 100, 20, 16
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200, "initializer_range": 0.5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
torch.manual_seed(0)
models = [LlamaForCausalLM(LlamaConfig(**sizes, **heads))]
models.append(MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=32)))
prompt = torch.randint(2, 199, (1, TEXT + QUESTION))
for model in models:
    model.eval()
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits[0, -1]
    found = []
    for cached in (0, TEXT):
        for chunk in (None, CHUNK):
            cache = DynamicCache(config=model.config)
            if cached:
                with torch.no_grad():
                    model(prompt[:, :cached], past_key_values=cache)
            how = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1}
            out = model.generate(prompt, past_key_values=cache, prefill_chunk_size=chunk, **how)
            same = torch.allclose(out.logits[0][0], expected, atol=1e-3)
            found.append((cached, chunk, cache.get_seq_length(), same))
            print(type(model).__name__, "cached: %d, chunks of %s: %d tokens in the cache, the same logits: %s" % found[-1])
    whole = TEXT + QUESTION
    assert found == [
        (0, None, whole, True),
        (0, CHUNK, whole, True),
        (TEXT, None, whole, True),
        (TEXT, CHUNK, TEXT + whole, False),
    ], found
PYTHON
