"""The model that a checkpoint folder holds or, where ranks share it, this rank's part.

Tensor parallelism (Megatron-LM, arXiv 1909.08053): each rank holds a part of every layer, some KV heads with their
query heads, a share of the MLP's columns and of the head's vocabulary; the embedding table is whole. A KV method sees
fewer heads and no other change. A layer sums the ranks' outputs twice, after attention and after the MLP, inside the
compiled step. The logits are gathered, and every rank samples the same token from them.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kv as methods
from kv.parts.ranks import ALONE, Ranks
from model import ModelConfig, Transformer
from runtime import cpu
from runtime.checkpoint import Stored, fingerprint, load_checkpoint, read_config, read_eos_ids
from runtime.device import pick_device, pick_dtype
from runtime.linear import Int8Linear, pack, quantize_modules, read_quantization
from runtime.parallel import free_share
from text.files import read_json
from text.tokenizer import Tokenizer, load_tokenizer


@dataclass
class Loaded:
    """What a checkpoint folder holds; the model is this rank's part."""

    model: Transformer
    tokenizer: Tokenizer | None = None
    no_tokenizer: str = "this engine has no tokenizer"  # why there is none
    eos: Set[int] = frozenset()  # ids that end an answer
    profile: dict = field(default_factory=dict)  # of kv_profile.json, see kv.read_profile
    fingerprint: str = ""  # of the checkpoint
    bytes: int = 0  # of the weights


@dataclass(frozen=True)
class Known:
    """What a checkpoint says before its weights are read; `planning.check` asks for no more."""

    stored: dict  # config.json
    config: ModelConfig  # of this rank's part
    dtype: torch.dtype
    device: torch.device
    profile: dict
    ranks: Ranks


def read_known(
    folder: Path, device: str | torch.device | None, dtype: str | torch.dtype | None, ranks: Ranks = ALONE
) -> Known:
    """Raises ValueError or FileNotFoundError with one line that says what to do."""
    device, stored = pick_device(device), read_config(folder)
    config = share(ModelConfig(**stored["kv_fast"]["model"]), ranks)
    profile = methods.read_profile(read_json(folder / "kv_profile.json", missing={}))
    return Known(stored, config, pick_dtype(dtype or stored["kv_fast"].get("dtype")), device, profile, ranks)


def load_model(folder: Path, known: Known, text: bool) -> Loaded:
    """Loads a converted checkpoint. Raises ValueError or FileNotFoundError with one line that says what to do; where
    prompts are `text`, also if the tokenizer cannot be read."""
    device, dtype, ranks, config = known.device, known.dtype, known.ranks, known.stored
    sizes, quantization = ModelConfig(**config["kv_fast"]["model"]), read_quantization(config)
    model = skeleton(sizes, quantization, ranks)
    whole = skeleton(sizes, quantization, ALONE) if ranks.count > 1 else None
    eos, _ = read_eos_ids(folder, config, sizes.vocab_size)
    tokenizer, no_tokenizer = None, ""
    try:
        tokenizer = load_tokenizer(folder)
    except (ValueError, FileNotFoundError) as error:
        if text:
            raise ValueError(f"{error}; prompts here are text") from None
        no_tokenizer = str(error)  # token ids work without one
    if tokenizer is not None:
        eos |= tokenizer.eos_ids
        used = max(set(range(tokenizer.vocab_size)) - set(tokenizer.special.values()))  # <pad> may be larger
        if used >= sizes.vocab_size:
            tokens = f"{tokenizer.vocab_size} tokens and the model {sizes.vocab_size}"
            raise ValueError(f"the tokenizer in {folder} has {tokens}: it belongs to another checkpoint")
    tensors = model.state_dict().values()
    needed = sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)
    free = free_share(device)
    if needed > free:
        raise ValueError(f"the weights need {needed / 1e9:.2f} GB on {device} and {free / 1e9:.2f} GB are free")
    read = partial(read_part, c=model.config, ranks=ranks)
    load_checkpoint(folder, model, device, dtype, whole, read).requires_grad_(False)
    return Loaded(prepared(model, ranks), tokenizer, no_tokenizer, eos, known.profile, fingerprint(config), needed)


def prepared(model: Transformer, ranks: Ranks = ALONE) -> Transformer:
    """Makes a model with loaded weights ready for its device and connects it to the other ranks' parts."""
    pack(model)
    connect(model, ranks)
    if model.norm.weight.device.type == "cpu":
        cpu.prepare(model)
    return model


def share(c: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The sizes of one rank's part. Raises ValueError if heads or MLPs do not divide."""
    for size, what in ((c.n_kv_head, "KV heads"), (c.ffn_dim, "MLP channels")):
        if size % ranks.count:
            fit = [str(n) for n in range(1, c.n_kv_head + 1) if not c.n_kv_head % n and not c.ffn_dim % n]
            raise ValueError(f"{size} {what} do not divide among {ranks.count} ranks: start {' or '.join(fit)}")
    return replace(
        c, n_head=c.n_head // ranks.count, n_kv_head=c.n_kv_head // ranks.count, ffn_dim=c.ffn_dim // ranks.count
    )


def skeleton(
    c: ModelConfig, quantization: dict | None, ranks: Ranks, dtype: torch.dtype = torch.float32
) -> Transformer:
    """One rank's part of the model, on the meta device. Raises ValueError if the model does not divide."""
    with torch.device("meta"):
        model = Transformer(share(c, ranks))
        if ranks.count > 1 and model.output is not None:
            model.output = nn.Linear(c.dim, -(-c.vocab_size // ranks.count), bias=False)
        model.to(dtype)
    if quantization:
        quantize_modules(model, **quantization)
    return model


def read_part(stored: Stored, own: Tensor, c: ModelConfig, ranks: Ranks) -> Tensor:
    """This rank's part of a stored tensor, in the shape of `own`; `c` describes the rank's part of the model."""
    split = [dim for dim, (whole, part) in enumerate(zip(stored.shape, own.shape, strict=True)) if whole != part]
    if not split:
        tensor = stored.read()
        once = stored.name.endswith(("wo.bias", "w2.bias"))  # added to a sum over the ranks
        return torch.zeros_like(tensor) if once and ranks.rank else tensor
    dim, sizes = split[0], [own.shape[split[0]]]
    if ".wqkv." in stored.name:
        sizes = [heads * c.head_dim for heads in (c.n_head, c.n_kv_head, c.n_kv_head)]
    whole, begin, spans = stored.shape[dim], 0, []
    for size in sizes:  # of the query, key and value heads: all ranks have equally many of each
        start = begin + ranks.rank * size
        spans.append((min(start, whole), min(start + size, whole)))
        begin += ranks.count * size
    parts = [stored.read(*[slice(None)] * dim, slice(start, stop)) for start, stop in spans]
    return padded(torch.cat(parts, dim), dim, own.shape[dim])


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros up to `size` along dimension `dim`: the last rank's part of a vocabulary that does not divide."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


def connect(model: Transformer, ranks: Ranks) -> None:
    """Gives a model its tied head, and makes a rank's part exchange its outputs with the other parts."""
    vocab = model.config.vocab_size
    if model.output is None:
        model.output = tied_head(model.tok_embeddings, -(-vocab // ranks.count), ranks.rank)
    if ranks.count > 1:
        for layer in model.layers:
            for linear in (layer.attention.wo, layer.feed_forward.w2):
                linear.register_forward_hook(lambda module, x, y: ranks.sum(y))
        model.output.register_forward_hook(lambda module, x, y: ranks.gather(y, -1)[..., :vocab])


def tied_head(table: nn.Module, rows: int, rank: int) -> nn.Module:
    """A rank's rows of the embedding table as a linear layer, padded with zeros; without padding it copies nothing."""
    with torch.device("meta"):
        head = nn.Linear(table.weight.shape[1], rows, bias=False)
        head = head if isinstance(table, nn.Embedding) else Int8Linear(head)
    own = {name: padded(x[rank * rows : (rank + 1) * rows], 0, rows) for name, x in table.state_dict().items()}
    head.load_state_dict(own, assign=True)
    return head.requires_grad_(False)
