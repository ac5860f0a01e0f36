"""Reads llama.cpp's model files (GGUF) of some architectures for convert_hf_checkpoint.py.

The package gguf parses a file and dequantizes its tensors. Here its header becomes the small files of a Hugging Face
folder, and its tensors get Hugging Face's names. Of INTERLEAVED the rows of Q and K also get Hugging Face's order:
where that rotates a head's channels i and i + D/2 together, llama.cpp rotates 2i and 2i + 1. Metadata means what it
means to llama.cpp, which knows by itself that every fourth layer of SmolLM3 has no RoPE; what config.json cannot say is
refused by name.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from kv.parts.rope import rope_frequencies
from runtime.checkpoint import Stored
from text.tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, set_byte_level

NAMES = {  # llama.cpp's module -> Hugging Face's
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {  # llama.cpp's name -> Hugging Face's
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mistral3": "MistralForCausalLM",  # with a temperature Ministral3ForCausalLM
}
INTERLEAVED = {"llama", "smollm3", "mistral3"}
TEMPERATURE, LOG_MULTIPLIER = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"  # of mistral3

# Metadata of an architecture, without its prefix. Sizes get the names of config.json:
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
OPTIONAL = {"attention.head_count_kv", "attention.key_length", "rope.freq_base"}
ORIGINAL = "rope.scaling.original_context_length"
SCALING = {"rope.scaling.factor", "rope.scale_linear", ORIGINAL}
REAL = {TEMPERATURE, "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scale_linear"}
# Settings that config.json cannot say (or, like YaRN's betas, llama.cpp does not use), with the values allowed:
ALLOWED = {
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
    "rope.scaling.type": ("none", "linear", "yarn"),
    "rope.scaling.yarn_beta_fast": (32,),
    **dict.fromkeys(["rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_slow"], (1,)),
    **dict.fromkeys(["rope.scaling.alpha", "rope.scaling.yarn_log_multiplier", "attention.scale"], (0,)),
    **dict.fromkeys(["attention.clamp_kqv", "attention.max_alibi_bias", "attention.sliding_window"], (0,)),
    **dict.fromkeys(["attn_logit_softcapping", "final_logit_softcapping", "pooling_type"], (0,)),
    **dict.fromkeys(["expert_count", "expert_used_count", "nextn_predict_layers"], (0,)),
    **dict.fromkeys(["embedding_scale", "logit_scale", "residual_scale"], (0, 1)),
}
# What these architectures do not use:
UNUSED = {"attention.layer_norm_epsilon", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size"}

BLOCK = 2**24  # values that are dequantized at a time
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CJK = "[一-龥ࠀ-一가-퟿]+"
# tokenizer.ggml.pre -> the patterns that cut a text into words, one after the other
SPLITS = {
    "default": (r"[\p{P}$+<=>^~|]+", GPT2_SPLIT, r"\p{N}+", "[0-9]{3}"),
    "gpt-2": (GPT2_SPLIT,),
    "tekken": (TEKKEN_SPLIT,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"),
    **dict.fromkeys(("smollm", "starcoder", "refact"), (r"\p{N}", GPT2_SPLIT)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (LLAMA3_SPLIT,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2_SPLIT,)),
}
WHOLE = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word that is a token stays whole; BOS begins a text
COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # texts become NFC first


@dataclass(frozen=True)
class StoredInGGUF(Stored):
    """A tensor of a GGUF file, which `read` dequantizes to float32."""

    data: Any  # numpy's view of the file
    kind: Any  # its gguf.GGMLQuantizationType
    heads: int  # of a projection whose rows llama.cpp reorders, else 0

    def read(self, *index: slice) -> Tensor:
        from gguf import dequantize

        if self.data.ndim == 1:
            values = torch.tensor(dequantize(self.data, self.kind))
        else:
            values, rows = torch.empty(self.shape), max(1, BLOCK // self.shape[1])
            for at in range(0, len(values), rows):  # the package takes several times the memory of its result
                values[at : at + rows] = torch.tensor(dequantize(self.data[at : at + rows], self.kind))
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
    if fields.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{file} is one part of a model; merge the parts first: llama-gguf-split --merge")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(file, fields, tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if fields["general.architecture"] not in INTERLEAVED:
        heads = {}  # their rows stand in Hugging Face's order
    stored = {}
    for name, tensor in tensors.items():
        layer, module, kind = _parts(name)
        hf = f"{layer}{NAMES.get(module, module)}.{kind}"
        shape = tuple(int(n) for n in reversed(tensor.shape))
        stored[hf] = StoredInGGUF(hf, file, shape, torch.float32, tensor.data, tensor.tensor_type, heads.get(module, 0))
    stored.pop("rope_freqs.weight", None)  # it stands in config.json
    (folder / "config.json").write_text(json.dumps(config))
    try:
        _write_tokenizer(file, fields, folder)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{file}: the tokenizer's metadata is damaged ({error!r})") from None
    return stored


def _parts(name: str) -> tuple[str, str, str]:
    """ "blk.3.attn_q.weight" -> ("model.layers.3.", "attn_q", "weight")."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blk."):
        _, layer, module = module.split(".", 2)
        return f"model.layers.{layer}.", module, kind
    return "", module, kind


@dataclass(frozen=True)
class Metadata:
    """What a GGUF file says of its architecture."""

    file: Path
    prefix: str
    values: dict[str, Any]  # without the prefix

    def number(self, key: str) -> int | float:
        """A positive number, which the file may also give once for each layer. Raises ValueError for anything else."""
        value, real = self.values.get(key), key in REAL
        if isinstance(value, list) and len(value) == self.values["block_count"] and value == value[:1] * len(value):
            value = value[0]
        if type(value) not in ((int, float) if real else (int,)) or not 0 < value < math.inf:
            kind = "number" if real else "integer"
            raise ValueError(f"{self.file}: {self.prefix}{key} must be one positive {kind}, not {shortened(value)}")
        return value

    def check(self, allowed: dict[str, tuple]) -> None:
        """Raises ValueError for unknown keys, and for values that are not among the `allowed` ones."""
        known = SIZES.keys() | SCALING | UNUSED | allowed.keys()
        if unknown := [self.prefix + key for key in self.values if key not in known]:
            names = ", ".join(unknown)[:300]
            raise ValueError(f"{self.file} has metadata that is not understood: {names}; convert the original model")
        for key, values in allowed.items():
            if key in self.values and self.values[key] not in values:
                given, known = shortened(self.values[key]), ", ".join(map(str, values))
                raise ValueError(f"{self.file}: {self.prefix}{key} {given} is not supported; known: {known}")


def _config(file: Path, fields: dict, tensors: dict) -> dict:
    """Hugging Face's config.json. Raises ValueError for what it cannot say."""
    architecture = fields.get("general.architecture")
    if architecture not in list(ARCHITECTURES):
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file} holds the architecture {architecture!r}; of GGUF files only {known} can be converted")
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    metadata = Metadata(file, prefix, own)
    sizes = {name: metadata.number(key) for key, name in SIZES.items() if key in own or key not in OPTIONAL}
    n_head = sizes["num_attention_heads"]
    sizes = {"num_key_value_heads": n_head, "head_dim": sizes["hidden_size"] // n_head, "rope_theta": 10000.0} | sizes
    dim = sizes["head_dim"]
    allowed = ALLOWED | dict.fromkeys(["attention.value_length", "rope.dimension_count"], (dim,))
    allowed["rope.scaling.yarn_ext_factor"] = (-1, int(own.get("rope.scaling.type") == "yarn"))
    if architecture == "mistral3":
        allowed |= {LOG_MULTIPLIER: (0, 1), TEMPERATURE: (own.get(TEMPERATURE),)}
    metadata.check(allowed)
    scaling = _scaling(metadata)
    name = ARCHITECTURES[architecture]
    if own.get(TEMPERATURE):
        if (scaling or {}).get("rope_type") != "yarn":
            raise ValueError(f"{file}: {prefix}{TEMPERATURE} is supported with rope.scaling.type yarn alone")
        name, scaling = "Ministral3ForCausalLM", scaling | {"llama_4_scaling_beta": metadata.number(TEMPERATURE)}
    if "rope_freqs.weight" in tensors:
        if scaling is not None:
            raise ValueError(f"{file} scales RoPE twice, by {scaling['rope_type']!r} and by rope_freqs.weight")
        slower = torch.tensor(tensors["rope_freqs.weight"].data)
        scaling = _llama3(file, slower, sizes["rope_theta"], dim, sizes["max_position_embeddings"])
    return sizes | {
        "architectures": [name],
        "rope_scaling": scaling,
        "sliding_window": None,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else None,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def _scaling(metadata: Metadata) -> dict | None:
    """Hugging Face's form of RoPE's scaling, which is linear unless the file names another type."""
    own = metadata.values
    kind = own.get("rope.scaling.type", "linear")
    key = "rope.scaling.factor" if "rope.scaling.factor" in own else "rope.scale_linear"
    factor = metadata.number(key) if own.get(key, 0) != 0 else 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn" and ORIGINAL in own:
        scaling["original_max_position_embeddings"] = metadata.number(ORIGINAL)
    if kind == "yarn" and own.get(LOG_MULTIPLIER):
        scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return scaling


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
    """The tokenizer's settings with the chat template, and tokenizer.json. Says if its kind is not known here.

    Raises ValueError if the kind is known and what it needs is missing or damaged.
    """
    get = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}.get
    tokens, model, pre = get("tokens") or [], get("model"), get("pre") or "default"
    kinds, scores = get("token_type") or [1] * len(tokens), get("scores") or []
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {key: get(f"{name}_token_id") for key, name in names.items()}
    config = {key: tokens[i] for key, i in ids.items() if i is not None and 0 <= i < len(tokens)}
    for key in ids.keys() - config.keys():
        if ids[key] is not None:
            print(f"{file}: {key} {ids[key]} is outside the vocabulary, and left out", file=sys.stderr)
    config["chat_template"] = get("tokenizer.chat_template", "")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = {token: i for i, token in enumerate(tokens)}
    if model == "gpt2" and pre in SPLITS:
        if pre == "default":
            note = "texts are split as llama.cpp does by default, perhaps not as the model was trained"
            print(f"{file} does not say how its tokenizer splits (tokenizer.ggml.pre): {note}", file=sys.stderr)
        try:
            merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
            library = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WHOLE))
            set_byte_level(library, SPLITS[pre])
            library.normalizer = normalizers.NFC() if pre in COMPOSED else None
        except Exception as error:  # the package tokenizers raises nothing more specific
            raise ValueError(f"{file}: the tokenizer's merges are missing or damaged ({error})") from None
    elif model == "llama":
        if len(scores) != len(tokens):
            raise ValueError(f"{file}: the tokenizer has {len(tokens)} tokens and {len(scores)} scores")
        library = _from_scores(vocab, scores, config.get("unk_token"), get("add_space_prefix", True))
    else:
        what = f"pre {shortened(pre)}" if model == "gpt2" else f"model {shortened(model)}"
        if model is not None:
            print(f"{file}: tokenizer.ggml.{what} is not known; copy the original's tokenizer.json", file=sys.stderr)
        return
    if len(kinds) != len(tokens):
        raise ValueError(f"{file}: the tokenizer has {len(tokens)} tokens and {len(kinds)} types")
    for kind, add in ((CONTROL, library.add_special_tokens), (USER_DEFINED, library.add_tokens)):
        own = [token for token, given in zip(tokens, kinds, strict=True) if given == kind]
        add([AddedToken(token, special=kind == CONTROL, normalized=False) for token in own])
    bos, eos = config.get("bos_token"), config.get("eos_token")
    before = [bos] if bos and get("add_bos_token", model == "llama" or pre in WHOLE) else []
    after = [eos] if eos and get("add_eos_token", False) else []
    if before or after:
        special = [(token, vocab[token]) for token in {*before, *after}]
        library.post_processor = TemplateProcessing([*before, "$A", *after], special_tokens=special)
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
