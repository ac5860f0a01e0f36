"""Converts a Hugging Face folder, or a repository on huggingface.co, to a kv-fast checkpoint (runtime/checkpoint.py).

    python convert_hf_checkpoint.py meta-llama/Llama-3.1-8B-Instruct --out checkpoints/llama-3.1-8b

Tensors get the names of model.py; q, k and v become one matrix with q's rows first, then k's, then v's. RoPE's channel
order stays Hugging Face's. Every check that needs only headers and config.json runs before a byte is written.
"""

import runtime.startup  # noqa: F401

import argparse
import re
import sys
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from torch import Tensor

from config import ModelConfig
from model import Transformer
from runtime.checkpoint import (
    COMPANIONS,
    Stored,
    check_output,
    check_weights,
    open_weights,
    read_config,
    write_checkpoint,
)
from runtime.device import DTYPES
from terminal.cli import run
from text.tokenizer import load_tokenizer

NAMES = {  # model.py's module -> Hugging Face's, stacked in this order
    "tok_embeddings": ["model.embed_tokens"],
    "norm": ["model.norm"],
    "output": ["lm_head"],
    "attention.wqkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.wo": ["self_attn.o_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention_norm": ["input_layernorm"],
    "feed_forward.w1": ["mlp.gate_proj"],
    "feed_forward.w3": ["mlp.up_proj"],
    "feed_forward.w2": ["mlp.down_proj"],
    "ffn_norm": ["post_attention_layernorm"],
}
SMALL_FILES = ["config.json", *COMPANIONS]
SAFETENSORS = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
BINS = ["pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json"]


def sources(name: str) -> list[str]:
    """The names of the Hugging Face tensors that are stacked into one of ours."""
    layer, module, kind = re.fullmatch(r"(layers\.\d+\.)?(.+)\.(weight|bias)", name).groups()
    return [f"model.{layer}{part}.{kind}" if layer else f"{part}.{kind}" for part in NAMES[module]]


def read_source(folder: Path) -> tuple[dict, ModelConfig]:
    """config.json, raw and as a ModelConfig. Raises ValueError for a model that cannot be converted."""
    config = read_config(folder, converted=False)
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "an unnamed method") if isinstance(quantized, dict) else quantized
        raise ValueError(f"{folder} is quantized ({method}); convert the unquantized model")
    return config, ModelConfig.from_dict(config)


def fetch(repo: str, revision: str | None, patterns: list[str]) -> Path:
    """Downloads matching files to huggingface_hub's cache, resuming an interrupted download; returns their folder."""
    page = f"https://huggingface.co/{repo}"
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ValueError(f"{repo} is gated: accept its terms at {page}, then log in with: hf auth login") from None
    except RevisionNotFoundError:
        raise ValueError(f"{repo} has no revision {revision}; see {page}/tree/main for those it has") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(
            f"{repo} is neither a folder here nor a repository on huggingface.co "
            "(if it is private, log in with: hf auth login)"
        ) from None
    except Exception as error:  # a lost connection raises an error of whichever HTTP library huggingface_hub uses
        raise OSError(
            f"{repo} is not a folder here, and downloading it failed ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}); check connection and disk, then run again"
        ) from None


def download(repo: str, revision: str | None) -> Path:
    """Fetches only what a conversion needs: .bin files only if the repository has no safetensors."""
    read_source(fetch(repo, revision, SMALL_FILES))  # refuses an unsupported model before its weights are downloaded
    folder = fetch(repo, revision, SMALL_FILES + SAFETENSORS)
    return folder if any(folder.glob("model*.safetensors")) else fetch(repo, revision, SMALL_FILES + BINS)


def plan(config: ModelConfig, stored: dict[str, Stored], folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The converted checkpoint's tensors, without data. Raises ValueError if the source's tensors do not match."""
    with torch.device("meta"):
        layout = Transformer(config).to(dtype).state_dict()
    rows = [heads * config.head_dim for heads in (config.n_head, config.n_kv_head, config.n_kv_head)]
    shapes = {}
    for name, tensor in layout.items():
        parts = sources(name)
        split = tensor.split(rows) if len(parts) == 3 else [tensor]
        shapes.update({part: tuple(t.shape) for part, t in zip(parts, split, strict=True)})
    check_weights(stored, shapes, folder)
    for tensor in stored.values():
        if not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, so the model is quantized; "
                "convert the unquantized one"
            )
    return layout


def convert(
    src: str | Path, out: str | Path, revision: str | None = None, dtype: str | None = None, force: bool = False
) -> None:
    """Converts `src`, a folder or a repository id, to the checkpoint `out` in `dtype` (None: the source's).

    Raises ValueError, FileNotFoundError or OSError, each with one line that says what is wrong and what to do.
    """
    local = Path(src).is_dir()
    check_output(out, src if local else None, force)
    if local and revision is not None:
        raise ValueError(f"{src} is a folder; --revision is for a repository on huggingface.co")
    folder = Path(src) if local else download(str(src), revision)
    config, model_config = read_source(folder)
    stored = {name: t for name, t in open_weights(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if model_config.tied and (head := stored.get("lm_head.weight")):
        table = stored.get("model.embed_tokens.weight")
        if table is None or (head.dtype == table.dtype and torch.equal(head.read(), table.read())):
            del stored[head.name]
        else:  # as in transformers, the stored head decides, not config.json
            print(
                f"{head.file}: lm_head.weight is not the embedding table, so the head is kept and "
                "tie_word_embeddings becomes false",
                file=sys.stderr,
            )
            config = config | {"tie_word_embeddings": False}
            model_config = ModelConfig.from_dict(config)
    found = next((t.dtype for t in stored.values() if t.name == "model.embed_tokens.weight"), torch.bfloat16)
    to = DTYPES.get(dtype) if dtype else found
    if to not in DTYPES.values():
        raise ValueError(f"cannot write {dtype or found}; choose one of --dtype {', '.join(DTYPES)}")
    layout = plan(model_config, stored, folder, to)

    def read(name: str) -> Tensor:
        parts = [stored[part].read().to(to) for part in sources(name)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if to == torch.float16 and not tensor.isfinite().all():
            raise ValueError(f"tensor {name} has values that float16 cannot hold; choose --dtype bfloat16")
        return tensor

    write_checkpoint(out, config, layout, read, copy_from=folder, force=force)
    try:
        load_tokenizer(out)
    except (ValueError, FileNotFoundError) as error:
        print(f"without a tokenizer the checkpoint takes only token ids: {error}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("src", help="Hugging Face folder, or repository id such as mistralai/Mistral-7B-Instruct-v0.2")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the source's")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    args = parser.parse_args(argv)
    convert(**vars(args))
    print(f"wrote {args.out}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
