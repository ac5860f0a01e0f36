"""Brings the tensors of a released checkpoint into the names and values of Llama's.

Multimodal checkpoints give their text part (Mistral 3, Ministral 3). Weights in fp8 are multiplied by their scales.
Phi-3's fused matrices are split. Granite's four multipliers move into the weights beside them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from reprlib import repr as shortened

import torch
from torch import Tensor

from model import ModelConfig
from runtime.checkpoint import Stored
from runtime.hf_config import MODEL_TYPES, architecture

TEXT = re.compile(r"(model\.)?language_model\.(?=(model|lm_head)\.)|(?<=model\.)language_model\.")  # of two releases
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
MULTIPLIERS = "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"


@dataclass(frozen=True)
class Rows(Stored):
    """Some rows of a tensor."""

    whole: Stored
    first: int

    def read(self, *index: slice) -> Tensor:
        return self.whole.read(slice(self.first, self.first + self.shape[0]))[index or ...]


@dataclass(frozen=True)
class Scaled(Stored):
    """A tensor times a factor or, in blocks of rows and columns, times the entries of another one; fp32."""

    whole: Stored
    factor: float | Stored
    block: tuple[int, int] = (1, 1)

    def read(self, *index: slice) -> Tensor:
        factor = self.factor.read().float() if isinstance(self.factor, Stored) else torch.tensor(self.factor)
        x = self.whole.read().to(torch.float32, copy=True)
        if factor.dim() < 2:
            return x.mul_(factor)[index or ...]
        rows, columns = self.block
        for part, scales in zip(x.split(rows), factor, strict=True):
            part *= scales.repeat_interleave(columns)[: x.shape[1]]
        return x[index or ...]


def text_config(config: dict) -> dict:
    """The text model's config.json, of a multimodal one; any other as it is. Raises ValueError if it is unreadable."""
    if config.get("model_type") != "mistral3" and "Mistral3ForConditionalGeneration" not in _names(config):
        return config
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"config.json: text_config must be an object, not {shortened(text)}")
    kind = text.get("model_type", "mistral")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise ValueError(f"config.json: text_config is a {shortened(kind)}; known: {', '.join(MODEL_TYPES)}")
    shared = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "kv_fast")
    outer, tied = {key: config[key] for key in shared if key in config}, config.get("tie_word_embeddings")
    inner = {"architectures": [MODEL_TYPES[kind]], "model_type": kind, "tie_word_embeddings": tied in (None, True)}
    return outer | text | inner


def _names(config: dict) -> list:
    names = config.get("architectures")
    return names if isinstance(names, list) else [names]


def text_part(stored: dict[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a language model, by Llama's names, and the names of those of other models."""
    if not any(map(TEXT.search, stored)):
        return stored, []
    own = {name: TEXT.sub("", name) for name in stored if TEXT.search(name) or name.startswith("lm_head.")}
    if len(set(own.values())) < len(own):
        raise ValueError(f"{next(iter(stored.values())).file.parent} holds a tensor of the language model twice")
    return {new: stored[name] for name, new in own.items()}, sorted(stored.keys() - own.keys())


def check_quantization(config: dict, folder: object) -> None:
    """Raises ValueError for a quantized checkpoint whose numbers cannot be read."""
    quantized = config.get("quantization_config")
    if not quantized:
        return
    says = quantized if isinstance(quantized, dict) else {"quant_method": quantized}
    method, form, block = says.get("quant_method", "an unnamed method"), says.get("fmt"), says.get("weight_block_size")
    if says is not quantized or method != "fp8" or form not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(f"{folder} is quantized ({str(method)[:40]}); convert the unquantized model")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and 0 < n < 2**31 for n in block)
    ):
        raise ValueError(f"config.json: weight_block_size must be two positive integers, not {shortened(block)}")


def dequantized(stored: dict[str, Stored], config: dict) -> dict[str, Stored]:
    """The tensors with those of fp8 times their scales (as transformers' fp8 stores them). Raises ValueError if a
    scale is missing or does not fit."""
    block, found = (config.get("quantization_config") or {}).get("weight_block_size") or (0, 0), {}
    for name, tensor in stored.items():
        if name.endswith((".weight_scale_inv", ".activation_scale")):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = stored.get(f"{name}_scale_inv")
            shape = None if scale is None else scale.shape
            grid = block if len(tensor.shape) == 2 and 0 not in block else ()
            blocks = tuple(-(-n // size) for n, size in zip(tensor.shape, grid, strict=False))
            if shape not in ((), (1,)) and (not grid or shape != blocks):
                raise ValueError(f"{tensor.file}: tensor {name} is in fp8 and its scales have shape {shape}")
            sizes = tuple(min(n, size) for n, size in zip(tensor.shape, grid, strict=False))
            tensor = Scaled(name, tensor.file, tensor.shape, torch.bfloat16, tensor, scale, sizes)
        found[name] = tensor
    return found


def split(stored: dict[str, Stored], model: ModelConfig) -> dict[str, Stored]:
    """The tensors with fused matrices as those that Llama has. Raises ValueError if one has other rows."""
    heads = [n * model.head_dim for n in (model.n_head, model.n_kv_head, model.n_kv_head)]
    sizes, found = {"qkv_proj": heads, "gate_up_proj": [model.ffn_dim] * 2}, {}
    for name, tensor in stored.items():
        fused = next((part for part in FUSED if f".{part}." in name), None)
        if fused is None:
            found[name] = tensor
            continue
        rows = sizes[fused]
        if not tensor.shape or tensor.shape[0] != sum(rows):
            raise ValueError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, but config.json needs {sum(rows)} rows"
            )
        for i, part in enumerate(FUSED[fused]):
            new = name.replace(fused, part)
            if new in stored:
                raise ValueError(f"{tensor.file} holds both {name} and {new}")
            found[new] = Rows(new, tensor.file, (rows[i], *tensor.shape[1:]), tensor.dtype, tensor, sum(rows[:i]))
    return found


def multiplied(stored: dict[str, Stored], config: dict, model: ModelConfig) -> dict[str, Stored]:
    """Granite's tensors, times its multipliers."""
    if architecture(config) != "GraniteForCausalLM":
        return stored
    values = {key: config.get(key, 1.0) for key in MULTIPLIERS}
    for key, value in values.items():
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise ValueError(f"config.json: {key} must be a positive number, not {shortened(value)}")
    embedding, residual, attention, logits = values.values()
    factors = {  # the final norm's weight also undoes what a tied head shares with the table
        "model.embed_tokens.": embedding,
        "model.norm.": 1 / logits / (embedding if model.tied else 1.0),
        ".q_proj.": attention * model.head_dim**0.5,
        ".o_proj.": residual,
        ".down_proj.": residual,
    }
    return {name: _times(tensor, (f for part, f in factors.items() if part in name)) for name, tensor in stored.items()}


def _times(tensor: Stored, factors: Iterable[float]) -> Stored:
    factor = next(iter(factors), 1.0)
    if factor == 1.0:
        return tensor
    return Scaled(tensor.name, tensor.file, tensor.shape, tensor.dtype, tensor, factor)
