"""Reads llama.cpp's model files (GGUF) of the Llama architecture for convert_hf_checkpoint.py.

The package gguf parses a file and dequantizes its tensors. Here its header becomes the small files of a Hugging Face
folder, its tensors get Hugging Face's names, and the rows of Q and K Hugging Face's order: where that rotates a head's
channels i and i + D/2 together, llama.cpp rotates 2i and 2i + 1.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from kv.parts.rope import rope_frequencies
from runtime.checkpoint import Stored
from text.tokenizer import LLAMA3_SPLIT

NAMES = {  # llama.cpp's module -> Hugging Face's
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens


@dataclass(frozen=True)
class StoredInGGUF(Stored):
    """A tensor of a GGUF file, which `read` dequantizes to float32."""

    data: Any  # numpy's view of the file
    kind: Any  # its gguf.GGMLQuantizationType
    heads: int  # of a projection whose rows llama.cpp reorders, else 0

    def read(self, *index: slice) -> Tensor:
        from gguf import dequantize

        values = torch.tensor(dequantize(self.data, self.kind))
        if self.heads:  # rows [heads, D/2, 2] -> [heads, 2, D/2]
            values = values.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return values[index or ...]


def unpack(file: Path, folder: Path) -> dict[str, Stored]:
    """Writes config.json, the chat template and the tokenizer of a GGUF file to `folder`; returns its tensors.

    Raises ValueError if the package gguf is missing, or the file is damaged or holds what cannot be converted.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise ValueError(f"reading {file} needs the package gguf: pip install gguf") from None
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
            dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(f"{file}: the package gguf cannot dequantize this file ({error})") from None
    except Exception as error:  # the package raises whatever its parsing meets
        raise ValueError(f"{file} is damaged or cut off, or is no GGUF file ({error})") from None
    if fields.get("split.count", 1) > 1:
        raise ValueError(f"{file} is one part of a model; merge the parts first: llama-gguf-split --merge")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(file, fields, tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    stored = {}
    for name, tensor in tensors.items():
        layer, module, kind = _parts(name)
        hf = f"{layer}{NAMES.get(module, module)}.{kind}"
        shape = tuple(int(n) for n in reversed(tensor.shape))
        stored[hf] = StoredInGGUF(hf, file, shape, torch.float32, tensor.data, tensor.tensor_type, heads.get(module, 0))
    stored.pop("rope_freqs.weight", None)  # it stands in config.json
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(file, fields, folder)
    return stored


def _parts(name: str) -> tuple[str, str, str]:
    """ "blk.3.attn_q.weight" -> ("model.layers.3.", "attn_q", "weight")."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blk."):
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.", module, kind
    return "", module, kind


def _config(file: Path, fields: dict, tensors: dict) -> dict:
    """Hugging Face's config.json. Raises ValueError for what it cannot say."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{file} holds the architecture {architecture!r}; of GGUF files only llama can be converted")
    get = {name.removeprefix("llama."): value for name, value in fields.items()}.get
    scaling = get("rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{file} scales RoPE by {scaling!r}, which is not read from GGUF; convert the original model")
    theta, dim = get("rope.freq_base", 10000.0), get("attention.key_length") or get("rope.dimension_count")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv") or get("attention.head_count"),
        "head_dim": dim,
        "intermediate_size": get("feed_forward_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": theta,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
    }
    if "rope_freqs.weight" in tensors:
        if dim is None:
            raise ValueError(f"{file} has rope_freqs.weight and no llama.rope.dimension_count")
        slower = torch.tensor(tensors["rope_freqs.weight"].data)
        config["rope_scaling"] = _llama3(file, slower, theta, dim, config["max_position_embeddings"])
    return config


def _llama3(file: Path, slower: Tensor, theta: float, dim: int, length: int) -> dict:
    """Llama 3.1's RoPE scaling, of which the file holds the result: by how much each of D/2 frequencies is `slower`."""
    plain = {"rope_type": "default", "rope_theta": theta, "max_position_embeddings": length}
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"rope_type": "llama3", "factor": float(slower.max())} | bounds
    both = [rope_frequencies(plain | own, dim, length)[0] for own in ({}, scaling)]
    if slower.shape != both[0].shape or not torch.allclose(both[0] / both[1], slower, rtol=1e-3):
        raise ValueError(f"{file} scales RoPE by factors that are not Llama 3.1's; convert the original model")
    return scaling


def _write_tokenizer(file: Path, fields: dict, folder: Path) -> None:
    """The tokenizer's settings with the chat template, and tokenizer.json unless its kind is unknown here.

    Raises ValueError if the kind is known and what it needs is missing or damaged.
    """
    get = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}.get
    tokens = get("tokens") or []
    kinds, scores = get("token_type") or [1] * len(tokens), get("scores") or []
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {key: get(f"{name}_token_id") for key, name in names.items()}
    config = {key: tokens[i] for key, i in ids.items() if i is not None and i < len(tokens)}
    config["chat_template"] = get("tokenizer.chat_template", "")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab, pre = {token: i for i, token in enumerate(tokens)}, get("pre")
    if get("model") == "gpt2" and pre in ("smollm", "llama-bpe"):
        try:
            merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
            library, split = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe")), pre_tokenizers
        except Exception as error:  # the package tokenizers raises nothing more specific
            raise ValueError(f"{file}: the tokenizer's merges are missing or damaged ({error})") from None
        words = {"smollm": split.Digits(True), "llama-bpe": split.Split(Regex(LLAMA3_SPLIT), "isolated")}
        in_bytes = split.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
        library.pre_tokenizer, library.decoder = split.Sequence([words[pre], in_bytes]), decoders.ByteLevel()
    elif get("model") == "llama":
        if len(scores) != len(tokens):
            raise ValueError(f"{file}: the tokenizer has {len(tokens)} tokens and {len(scores)} scores")
        library = _from_scores(vocab, scores, config.get("unk_token"), get("add_space_prefix", True))
    else:
        return
    if len(kinds) != len(tokens):
        raise ValueError(f"{file}: the tokenizer has {len(tokens)} tokens and {len(kinds)} types")
    for kind, add in ((CONTROL, library.add_special_tokens), (USER_DEFINED, library.add_tokens)):
        own = [token for token, given in zip(tokens, kinds, strict=True) if given == kind]
        add([AddedToken(token, special=kind == CONTROL, normalized=False) for token in own])
    bos = config.get("bos_token")
    if bos is not None and get("add_bos_token", pre == "llama-bpe" or get("model") == "llama"):
        library.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    library.save(str(folder / "tokenizer.json"))


def _from_scores(vocab: dict[str, int], scores: list[float], unknown: str | None, prefix: bool) -> Tokenizer:
    """A sentencepiece BPE model: of a text's adjacent tokens, those merge first whose union has the best score."""
    merges = []
    for token, i in vocab.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += [(-scores[i], vocab[left], vocab[right], left, right) for left, right in pairs]
    merges = [(left, right) for *_, left, right in sorted(merges)]
    library = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    begin = [normalizers.Prepend("▁")] * prefix  # as llama.cpp: also before a space, and after a special token
    library.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    space = [decoders.Strip(" ", 1, 0)] * prefix
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *space]
    library.decoder = decoders.Sequence(steps)
    return library
