#!/usr/bin/env bash
# transformers 5.17.0: once a Phi-3 text grows past original_max_position_embeddings while it is generated, each further
# token follows from the newest token alone; the prompt and the answer so far are gone.
#
# Phi-3's long RoPE changes its frequencies there, so the class drops the cache, to compute it again for the whole text:
# its comment expects one slow token. But generate() now hands the model the newest token alone. The cache that this
# begins is short, and is dropped again before the next token. No message says so. It happens without long RoPE too,
# at 4,096 tokens where the configuration states no length. A prompt that is longer than that is not affected.
# Source: Phi3ForCausalLM.prepare_inputs_for_generation; next_sequence_length cuts the text since pull request 44130.
#
# Seen on 2026-11-30: what the logits of the first 8 tokens after a prompt of 25, and then of 12 more, equal, where
# the length is 32:
#   default: the whole text True, the newest token False; then False, True
#   longrope: the whole text True, the newest token False; then False, True
#   no cache: the whole text True, the newest token False; then True, False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import Phi3Config, Phi3ForCausalLM

PROMPT, LENGTH, NEW = 25, 32, 20
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 200}
heads = {"initializer_range": 0.5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ropes = {"default": {}, "longrope": {"factor": 4.0, "original_max_position_embeddings": LENGTH} | factors}
found = []
for rope, cached in (("default", True), ("longrope", True), ("default", False)):
    torch.manual_seed(0)
    block = {"rope_type": rope, "rope_theta": 1e4} | ropes[rope]
    length = {"original_max_position_embeddings": LENGTH}
    model = Phi3ForCausalLM(Phi3Config(**sizes, **heads, **special, **length, rope_parameters=block)).eval()
    prompt = torch.randint(2, 199, (1, PROMPT))
    how = {"use_cache": cached, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(prompt, max_new_tokens=NEW, **how)
    like = []
    for i, (logits,) in enumerate(out.logits):
        text = out.sequences[:, : PROMPT + i]
        like.append([torch.allclose(logits, model(ids).logits[0, -1], atol=1e-3) for ids in (text, text[:, -1:])])
    early, late = like[: LENGTH + 1 - PROMPT], like[LENGTH + 1 - PROMPT :]
    both = [each[0] for each in (early, late)]
    assert early == [both[0]] * len(early) and late == [both[1]] * len(late), like
    (a, b), (c, d) = both
    print(f"{rope if cached else 'no cache'}: the whole text {a}, the newest token {b}; then {c}, {d}")
    found.append(both)
assert found == [[[True, False], [False, True]]] * 2 + [[[True, False]] * 2], found
PYTHON
