"""Tensor parallelism: the processes that torchrun starts share one model (Megatron-LM, arXiv 1909.08053).

Each rank holds a part of every layer: some KV heads with their query heads, as many columns of the MLP, and some of the
head's vocabulary; the embedding table is whole. So a KV method sees fewer heads, and nothing else. A layer sums the
ranks' outputs twice, after attention and after the MLP, inside the compiled step. The logits are gathered, and every
rank samples the same token from them. Rank 0 alone reads prompts, prints and writes files.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint import Stored
from config import ModelConfig
from device import free_bytes
from kv.ranks import ALONE, Ranks
from linear import Embedding, Int8Linear, Linear
from model import Transformer
from quantize import quantize_modules

ARRIVE = timedelta(seconds=60)  # in which all ranks must have started
ANSWER = timedelta(minutes=30)  # in which they must join a collective: one may load for longer than another

# The processes


def launched() -> bool:
    """Whether this process is one of several, started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def join() -> Ranks:
    """Connects the ranks, the first time. Raises ValueError if one does not start, or has other arguments than rank 0.
    """
    if not launched():
        return ALONE
    if not dist.is_initialized():
        store, rank, count = check_in()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=ANSWER)
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name)


def check_in() -> tuple[dist.Store, int, int]:
    """The store that the ranks share, this rank, and how many there are."""
    count, waited = int(os.environ["WORLD_SIZE"]), "rank 0"
    try:
        store, rank, count = next(dist.rendezvous("env://", timeout=ARRIVE))
        store = dist.PrefixStore("kv-fast", store)
        store.set(f"arguments of {rank}", json.dumps(sys.argv[1:]))
        arguments = []
        for other in range(count):
            waited = f"rank {other}"
            store.wait([f"arguments of {other}"], ARRIVE)
            arguments.append(json.loads(store.get(f"arguments of {other}")))
    except RuntimeError:  # torch's DistStoreError and DistNetworkError
        raise ValueError(f"{waited} of {count} did not start within {ARRIVE.seconds} s: start all with torchrun, with "
                         "the same address and port") from None
    for other, given in enumerate(arguments):
        if given != arguments[0]:
            raise ValueError(f"rank {other} has other arguments than rank 0: {' '.join(given)}")
    return store, rank, count


def leave() -> None:
    """Disconnects this process from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def first_to_fail() -> bool:
    """Whether no other rank has called this: the one that reports an error for all."""
    if not dist.is_initialized():
        return int(os.environ.get("RANK", 0)) == 0
    try:
        return dist.distributed_c10d._get_default_store().add("failed", 1) == 1
    except RuntimeError:  # the store went with rank 0
        return False


def same(ranks: Ranks, value=None):
    """Rank 0's value, on every rank."""
    if ranks.count == 1:
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def free_share(device: torch.device) -> int:
    """Bytes that this process may still allocate on the device: the ranks of a machine share its memory."""
    return free_bytes(device) // (int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if device.type == "cpu" else 1)


def everyone(ranks: Ranks, value) -> list:
    """The value of each rank, on every rank."""
    if ranks.count == 1:
        return [value]
    found = [None] * ranks.count
    dist.all_gather_object(found, value)
    return found


def least(ranks: Ranks, value: float) -> float:
    """The least of the ranks' values."""
    found = torch.tensor(value, dtype=torch.float64)
    if ranks.count > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return found.item()


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """If the block raises ValueError or OSError on any rank, every rank raises ValueError after it."""
    error = None
    try:
        yield
    except (ValueError, OSError) as found:
        error = found
    if ranks.count == 1 and error is not None:
        raise error
    errors = everyone(ranks, error and str(error))
    if failed := [rank for rank, text in enumerate(errors) if text is not None]:
        text = errors[failed[0]]
        raise ValueError(text if errors == [text] * ranks.count else f"rank {failed[0]}: {text}")


def first(ranks: Ranks, what: Callable):
    """What what() returns on rank 0, on every rank; its ValueError or OSError too."""
    with together(ranks):
        value = what() if ranks.rank == 0 else None
    return same(ranks, value)


def relay(ranks: Ranks, items: Iterable | None) -> Iterator:
    """The items of rank 0's iterable, on every rank; None is not an item."""
    items = iter(items or ())
    while (item := first(ranks, lambda: next(items, None))) is not None:
        yield item


# The model


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
        raise ValueError(f"int4 groups of {groupsize} channels do not divide among {ranks.count} ranks, which have "
                         f"{parts[0]} and {parts[1]} channels: quantize with --groupsize {fits}")


def read_part(stored: Stored, own: Tensor, c: ModelConfig, ranks: Ranks) -> Tensor:
    """This rank's part of a stored tensor, in the shape of `own`; `c` describes the rank's part of the model."""
    split = [dim for dim, (whole, part) in enumerate(zip(stored.shape, own.shape, strict=True)) if whole != part]
    if not split:
        tensor = stored.read()
        once = stored.name.endswith(("wo.bias", "w2.bias"))  # added to a sum over the ranks
        return tensor.zero_() if once and ranks.rank else tensor
    dim, sizes = split[0], [own.shape[split[0]]]
    if ".wqkv." in stored.name:
        sizes = [heads * c.head_dim for heads in (c.n_head, c.n_kv_head, c.n_kv_head)]
    whole, begin, spans = stored.shape[dim], 0, []
    for size in sizes:  # of the query, key and value heads, of which every rank has as many
        start = begin + ranks.rank * size
        spans.append((min(start, whole), min(start + size, whole)))
        begin += ranks.count * size
    tensor = stored.read_spans(dim, spans)
    missing = own.shape[dim] - tensor.shape[dim]  # a vocabulary that does not divide
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor


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
        x = x[rank * rows : (rank + 1) * rows]
        return F.pad(x, [0, 0] * (x.dim() - 1) + [0, rows - len(x)]) if len(x) < rows else x

    with torch.device("meta"):
        head = Linear(table.weight.shape[1], rows, bias=False)
        head = head if isinstance(table, Embedding) else Int8Linear(head)
    if isinstance(table, Embedding):
        head.weight = nn.Parameter(part(table.weight), requires_grad=False)
    else:
        head.weight, head.scales = part(table.weight), part(table.scales)
    return head
