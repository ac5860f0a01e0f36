"""Converts a Hugging Face folder, a repository on huggingface.co or a GGUF file to a kv-fast checkpoint.

    python convert_hf_checkpoint.py meta-llama/Llama-3.1-8B-Instruct --out checkpoints/llama-3.1-8b

Tensors get the names of model.py; q, k and v become one matrix with q's rows first, then k's, then v's. RoPE's channel
order stays Hugging Face's; runtime/released.py brings other families' tensors into Llama's form. Every check that needs
only headers and config.json runs before a byte is written. A checkpoint of format 1 becomes one of format 2.
"""

import runtime.startup  # noqa: F401

import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from reprlib import repr as shortened

import huggingface_hub
import torch
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from torch import Tensor

from kv.parts.ranks import ALONE
from model import ModelConfig, Transformer
from runtime import released
from runtime.checkpoint import (
    COMPANIONS,
    Stored,
    check_output,
    check_weights,
    open_weights,
    read_eos_ids,
    read_hf_config,
    write_checkpoint,
)
from runtime.device import DTYPES
from runtime.gguf import unpack
from runtime.hf_config import from_hf
from runtime.linear import read_quantization
from runtime.load import skeleton
from terminal.cli import Parser, one_line, run
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


@dataclass(frozen=True)
class StoredInBin(Stored):
    """One tensor in a file of torch.save."""

    def read(self, *index: slice) -> Tensor:
        return _load_bin(self.file)[self.name][index or ...]


def read_bin_header(file: Path) -> dict[str, Stored]:
    return {name: StoredInBin(name, file, tuple(t.shape), t.dtype) for name, t in _load_bin(file).items()}


def _load_bin(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{file} is refused: it is a pickle that holds more than tensors, and loading such a file "
            "can run any code; ask for safetensors"
        ) from None
    except Exception as error:  # a damaged archive fails in many ways
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{file} is truncated, or older than torch 1.6 ({reason}); download it again") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"{file} is not a state dict: it must map names to tensors")
    return state


def open_source(folder: Path) -> dict[str, Stored]:
    """The tensors of the safetensors files or, without these, of the .bin files."""
    if any(folder.glob("pytorch_model.bin*")) and not any(folder.glob("model.safetensors*")):
        return open_weights(folder, "pytorch_model.bin", read_bin_header)
    return open_weights(folder)


def read_source(folder: Path) -> tuple[dict, ModelConfig]:
    """config.json, raw and as a ModelConfig. Raises ValueError for a model that cannot be converted."""
    config = released.text_config(read_hf_config(folder))
    section = config.get("kv_fast", {"format": 1})
    if not isinstance(section, dict) or section.get("format") != 1:
        raise ValueError(f"{folder} is converted already; use it as it is")
    released.check_quantization(config, folder)
    model = from_hf(config)
    read_eos_ids(folder, config, model.vocab_size)
    return config, model


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


def choose_dtype(config: dict, stored: dict[str, Stored]) -> torch.dtype:
    """The dtype of all tensors; if they differ, says that it is config.json's or else the widest."""
    dtypes = {t.dtype for t in stored.values()}
    if len(dtypes) == 1:
        return dtypes.pop()
    stated = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    chosen = DTYPES.get(stated) or reduce(torch.promote_types, dtypes)
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    reason = "as config.json says" if stated in DTYPES else "the widest"
    print(f"the tensors are in {names}; all are written in {chosen}, {reason}".replace("torch.", ""), file=sys.stderr)
    return chosen


def plan(
    config: dict, model: ModelConfig, stored: dict[str, Stored], origin: Path, dtype: str | None
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """The converted tensors without data, and what reads one. Raises ValueError if the source's do not match."""
    with torch.device("meta"):
        layout = Transformer(model).state_dict()
    rows = [heads * model.head_dim for heads in (model.n_head, model.n_kv_head, model.n_kv_head)]
    expected = {}
    for name, tensor in layout.items():
        parts = sources(name)
        expected.update(zip(parts, tensor.split(rows) if len(parts) == 3 else [tensor], strict=True))
    check_weights(stored, expected, origin)
    for tensor in stored.values():
        if not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, so the model is quantized; "
                "convert the unquantized one"
            )
    to = DTYPES.get(dtype) if dtype else choose_dtype(config, stored)
    if to not in DTYPES.values():
        raise ValueError(f"cannot write {dtype or to}; choose one of --dtype {', '.join(DTYPES)}")

    def read(name: str) -> Tensor:
        parts = [stored[part].read().to(to) for part in sources(name)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if to == torch.float16 and not tensor.isfinite().all():
            raise ValueError(f"tensor {name} has values that float16 cannot hold; choose --dtype bfloat16")
        return tensor

    return {name: tensor.to(to) for name, tensor in layout.items()}, read


def settle_head(config: dict, model: ModelConfig, stored: dict[str, Stored]) -> tuple[dict, ModelConfig]:
    """Settles which tensor a tied model's table and head are; as in transformers, the stored head decides."""
    head, table = (stored.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    if not model.tied or head is None:
        return config, model
    if table is None:  # safetensors' save_model keeps either name
        stored["model.embed_tokens.weight"] = stored.pop("lm_head.weight")
    elif head.equals(table):
        del stored["lm_head.weight"]
    else:
        print(
            f"{head.file}: lm_head.weight is not the embedding table, so the head is kept and "
            "tie_word_embeddings becomes false",
            file=sys.stderr,
        )
        return config | {"tie_word_embeddings": False}, replace(model, tied=False)
    return config, model


def convert(
    src: str | Path, out: str | Path, revision: str | None = None, dtype: str | None = None, force: bool = False
) -> None:
    """Converts `src`, a folder, a repository id or a GGUF file, to the checkpoint `out`.

    dtype: of the weights (None: the source's; a GGUF file's become bfloat16).

    Raises ValueError, FileNotFoundError or OSError, each with one line that says what is wrong and what to do.
    """
    local = Path(src).exists()
    if not local and str(src).endswith((".gguf", ".safetensors", ".bin")):
        raise FileNotFoundError(f"there is no file {src}")
    check_output(out, src if local else None, force)
    if local and revision is not None:
        raise ValueError(f"{src} is on this disk; --revision is for a repository on huggingface.co")
    if Path(src).is_file():
        with tempfile.TemporaryDirectory() as folder:
            stored = unpack(Path(src), Path(folder))
            return write(Path(folder), Path(src), stored, out, dtype or "bfloat16", force)
    folder = Path(src) if local else download(str(src), revision)
    write(folder, folder, None, out, dtype, force)


def write(
    folder: Path, origin: Path, stored: dict[str, Stored] | None, out: str | Path, dtype: str | None, force: bool
) -> None:
    """Writes the checkpoint of a Hugging Face folder; `stored`: the tensors of `origin`, if they are not in it."""
    config, model = read_source(folder)
    stored, quantization = stored or open_source(folder), None
    if "kv_fast" in config:  # of format 1, which has the same tensors
        if dtype is not None:
            raise ValueError(f"{folder} is converted already and keeps its dtype; leave --dtype out")
        quantization = read_quantization(config)
        layout = skeleton(model, quantization, ALONE).state_dict()
        check_weights(stored, layout, folder)
        layout = {name: tensor.to(stored[name].dtype) for name, tensor in layout.items()}
        read = lambda name: stored[name].read()  # noqa: E731
    else:
        stored = {name: t for name, t in stored.items() if not name.endswith("rotary_emb.inv_freq")}
        stored, others = released.text_part(stored)
        if others:
            print(f"left out: {len(others)} tensors of other models, such as {others[0]}", file=sys.stderr)
        stored = released.split(released.dequantized(stored, config), model)
        config.pop("quantization_config", None)
        config, model = settle_head(config, model, stored)
        stored = released.multiplied(stored, config, model)
        layout, read = plan(config, model, stored, origin, dtype)
    write_checkpoint(out, config, model, layout, read, folder, quantization, force)
    _, outside = read_eos_ids(folder, config, model.vocab_size)
    if outside:
        ids = shortened(sorted(outside))
        print(f"eos_token_id {ids} is outside the vocabulary of {model.vocab_size}: it ends no answer", file=sys.stderr)
    try:
        load_tokenizer(out)
    except (ValueError, FileNotFoundError) as error:
        print(f"without a tokenizer the checkpoint takes only token ids: {one_line(error)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "src", help="Hugging Face folder, repository id such as mistralai/Mistral-7B-Instruct-v0.2, or GGUF file"
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the source's")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    args = parser.parse_args(argv)
    convert(**vars(args))
    print(f"wrote {args.out}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
