#!/usr/bin/env bash
# transformers 5.17.0: a model loaded with gguf_file= has no RoPE scaling, whatever the file says.
#
# A GGUF file states its scaling in two ways: keys (rope.scaling.type, .factor, .original_context_length), as written for
# YaRN, and for Llama 3.1 a tensor, rope_freqs.weight, that divides each frequency. transformers maps neither: the
# configuration has the scaled context and plain RoPE, the tensor is dropped, and no list of missing or unexpected keys
# names it. Beyond the original context the model computes something else than llama.cpp does with the same file.
# Source: GGUF_CONFIG_MAPPING of transformers/integrations/ggml.py has rope.freq_base alone.
#
# Seen on 2026-11-28 (a file with YaRN's keys; a file with rope_freqs of 8, which divides by 8):
#   context 32768, rope type default
#   unexpected keys: []; first frequencies [1.0, 0.5623]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.17.0 gguf==0.19.0 torch==2.13.0 accelerate==1.15.0
"$folder/venv/bin/python" -W ignore - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import transformers

folder, dim, head, hidden, vocab = Path(sys.argv[1]), 64, 32, 128, 64
transformers.utils.logging.disable_progress_bar()
shapes = {
    "token_embd": (vocab, dim), "output_norm": (dim,), "blk.0.attn_norm": (dim,), "blk.0.ffn_norm": (dim,),
    "blk.0.attn_q": (dim, dim), "blk.0.attn_k": (head, dim), "blk.0.attn_v": (head, dim),
    "blk.0.attn_output": (dim, dim), "blk.0.ffn_gate": (hidden, dim), "blk.0.ffn_up": (hidden, dim),
    "blk.0.ffn_down": (dim, hidden),
}  # fmt: skip


def write(name, yarn):
    file = gguf.GGUFWriter(folder / name, "llama")
    file.add_context_length(32768)
    file.add_embedding_length(dim)
    file.add_block_count(1)
    file.add_feed_forward_length(hidden)
    file.add_head_count(dim // head)
    file.add_head_count_kv(1)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(10000.0)
    file.add_rope_dimension_count(head)
    file.add_vocab_size(vocab)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("default")
    file.add_token_list([chr(33 + i) for i in range(vocab)])
    file.add_token_types([1] * vocab)
    file.add_token_merges(["A B"])
    if yarn:
        file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        file.add_rope_scaling_factor(4.0)
        file.add_rope_scaling_orig_ctx_len(8192)
    else:
        file.add_tensor("rope_freqs.weight", np.full(head // 2, 8, dtype=np.float32))
    for tensor, shape in shapes.items():
        file.add_tensor(f"{tensor}.weight", np.ones(shape, dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


write("yarn.gguf", True)
config = transformers.AutoConfig.from_pretrained(folder, gguf_file="yarn.gguf")
print(f"context {config.max_position_embeddings}, rope type {config.rope_parameters['rope_type']}")
write("llama3.gguf", False)
how = {"gguf_file": "llama3.gguf", "output_loading_info": True}
model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
frequencies = [round(f, 4) for f in model.model.rotary_emb.inv_freq[:2].tolist()]
print(f"unexpected keys: {list(info['unexpected_keys'])}; first frequencies {frequencies}")
same = config.max_position_embeddings == 32768 and config.rope_parameters["rope_type"] == "default"
assert same and not info["unexpected_keys"] and frequencies == [1.0, 0.5623], "this has changed"
PYTHON
