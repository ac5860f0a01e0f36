"""Tensor parallelism: the processes that torchrun starts share one model (Megatron-LM, arXiv 1909.08053).

Each rank holds a part of every layer: some KV heads with their query heads, a share of the MLP's columns and of the
head's vocabulary; the embedding table is whole. A KV method sees fewer heads and no other change. A layer sums the
ranks' outputs twice, after attention and after the MLP, inside the compiled step. The logits are gathered, and every
rank samples the same token from them. Rank 0 alone reads prompts, prints and writes files.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv.parts.ranks import Ranks
from model import ModelConfig, Transformer
from quantize import quantize_modules
from runtime.checkpoint import Stored
from runtime.linear import Embedding, Int8Linear, Linear


def share(c: ModelConfig, ranks: Ranks) -> ModelConfig:
    """The sizes of one rank's part. Raises ValueError if heads or MLPs do not divide."""
    for size, what in ((c.n_kv_head, "KV heads"), (c.ffn_dim, "MLP channels")):
        if size % ranks.count:
            fit = [str(n) for n in range(1, ranks.count) if not c.n_kv_head % n and not c.ffn_dim % n]
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
            model.output = Linear(c.dim, -(-c.vocab_size // ranks.count), bias=False)
        model.to(dtype)
    if quantization:
        if quantization["mode"] == "int4":
            check_groups(model, quantization["groupsize"], ranks)
        quantize_modules(model, **quantization)
    return model


def check_groups(model: Transformer, groupsize: int, ranks: Ranks) -> None:
    """Raises ValueError if a rank's part of an int4 weight would begin or end within a group."""
    if ranks.count == 1 or not isinstance(groupsize, int) or groupsize < 2:
        return
    parts = model.layers[0].attention.wo.in_features, model.layers[0].feed_forward.w2.in_features
    common = math.gcd(*parts)
    if common % groupsize:
        fits = min(groupsize, common & -common)
        raise ValueError(
            f"int4 groups of {groupsize} channels do not divide among {ranks.count} ranks, which have "
            f"{parts[0]} and {parts[1]} channels: quantize with --groupsize {fits}"
        )


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


def connect(model: Transformer, ranks: Ranks) -> Transformer:
    """Makes a loaded part of a model exchange its outputs with the other parts."""
    if ranks.count == 1:
        return model
    vocab = model.config.vocab_size
    if model.output is None:
        model.output = tied_head(model.tok_embeddings, -(-vocab // ranks.count), ranks.rank)
    for layer in model.layers:
        for linear in (layer.attention.wo, layer.feed_forward.w2):
            linear.register_forward_hook(lambda module, x, y: ranks.sum(y))
    model.output.register_forward_hook(lambda module, x, y: ranks.gather(y, -1)[..., :vocab])
    return model


def tied_head(table: nn.Module, rows: int, rank: int) -> nn.Module:
    """A rank's rows of the embedding table as a linear layer, padded with zeros; without padding it copies nothing."""

    def part(x: Tensor) -> Tensor:
        return padded(x[rank * rows : (rank + 1) * rows], 0, rows)

    with torch.device("meta"):
        head = Linear(table.weight.shape[1], rows, bias=False)
        head = head if isinstance(table, Embedding) else Int8Linear(head)
    if isinstance(table, Embedding):
        head.weight = nn.Parameter(part(table.weight), requires_grad=False)
    else:
        head.weight, head.scales = part(table.weight), part(table.scales)
    return head
