#!/usr/bin/env bash
# transformers 5.17.0: a draft model whose layers have a sliding window (Mistral, Gemma 3) ends generate(assistant_model=...)
# with a RuntimeError about sizes of tensors once the text has reached the window.
#
# Where the target model has the window, assisted generation and prompt lookup take tokens back from it and work. A draft
# model's caches also record what may be taken back: while a draft grows, they keep more tokens than the window, but the
# attention mask is built for the window alone. Texts shorter than the window work, so a short test passes. A draft
# without a window, or whose sliding_window is None, serves every target.
# Source: DynamicSlidingWindowLayer: with record_past, update() keeps all keys until crop(), which runs between drafts,
# while get_mask_sizes() states sliding_window - 1 + query_length.
#
# Seen on 2026-11-30, windows of 32, 24 new tokens; "same" are the tokens of greedy decoding without a draft:
#   draft             text of 5   text of 60, target Llama   target Mistral   target Gemma 3
#   Llama             same        same                       same             same
#   Mistral, Gemma 3  same        RuntimeError               RuntimeError     RuntimeError
#   prompt lookup     same        same                       same             same
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers import MistralForCausalLM

WINDOW, SHORT, LONG, NEW = 32, 5, 60, 24
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100, "initializer_range": 0.3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
KINDS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads, **special)),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(**sizes, **heads, **special, sliding_window=WINDOW)),
    "Gemma 3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **special, sliding_window=WINDOW)),
}


def models(seed):
    found = {}
    for name, make in KINDS.items():
        torch.manual_seed(seed)
        found[name] = make().eval()
    return found


targets, drafts = models(0), models(1)
for target, model in targets.items():
    for tokens in (SHORT, LONG):
        torch.manual_seed(2)
        prompt = torch.randint(2, 99, (1, tokens))
        how = {"do_sample": False, "max_new_tokens": NEW}
        expected, found = model.generate(prompt, **how), {}
        for draft in (*drafts, "prompt lookup"):
            more = {"assistant_model": drafts[draft]} if draft in drafts else {"prompt_lookup_num_tokens": 4}
            try:
                found[draft] = "same" if torch.equal(model.generate(prompt, **how, **more), expected) else "other tokens"
            except RuntimeError as error:
                assert "size of tensor" in str(error), error
                found[draft] = "RuntimeError"
        print(f"text of {tokens}, target {target}: {found}")
        windowed = "same" if tokens == SHORT else "RuntimeError"
        assert found == {"Llama": "same", "Mistral": windowed, "Gemma 3": windowed, "prompt lookup": "same"}, found
PYTHON
