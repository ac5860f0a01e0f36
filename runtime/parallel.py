"""Ranks: the processes that torchrun starts connect, and agree on values and errors.

They share one model (runtime/load.py), or each has its own. Rank 0 alone reads prompts, prints and writes files.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from kv.parts.ranks import ALONE, Ranks
from runtime.device import free_bytes

ARRIVE = timedelta(seconds=60)  # time limit for all ranks to start
ANSWER = timedelta(minutes=30)  # time limit for all ranks to join a collective: one may load for longer than another


def launched() -> bool:
    """Whether this process is one of several, started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def join() -> Ranks:
    """Connects the ranks on its first call.

    Raises ValueError if a rank does not start, or if its arguments differ from those of rank 0.
    """
    if not launched():
        return ALONE
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            store, rank, count = next(dist.rendezvous("env://", timeout=ARRIVE))
            dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=ANSWER)
        except (ValueError, RuntimeError) as error:  # among them torch's DistStoreError and DistNetworkError
            reason = str(error).partition("\n")[0][:200]
            raise ValueError(
                f"not all ranks are connected ({reason}): start all with torchrun, with the same address and port"
            ) from None
        stores.append(dist.PrefixStore("kv-fast", store))
        ours, *others = everyone(Ranks(rank, count), sys.argv[1:])
        for other, theirs in enumerate(others, 1):
            if theirs != ours:
                raise ValueError(f"rank {other} has other arguments than rank 0: {' '.join(theirs)}")
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name)


stores: list[dist.Store] = []  # shared by the ranks; empty until they are connected


def leave() -> None:
    """Disconnects this process from the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def first_to_fail() -> bool:
    """Whether no other rank has called this: the one that reports an error for all."""
    try:
        return not stores or stores[0].add("failed", 1) == 1
    except RuntimeError:  # the store went with rank 0
        return False


def same(ranks: Ranks, value):
    """Rank 0's value, on every rank."""
    return everyone(ranks, value)[0]


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


def minimum(ranks: Ranks, value: float) -> float:
    """The smallest of the ranks' values."""
    return min(everyone(ranks, value))


@contextmanager
def together(ranks: Ranks) -> Iterator[None]:
    """If the block raises ValueError or OSError on any of several ranks, every rank raises ValueError after it."""
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
    """Runs what() on rank 0 alone; every rank returns its result, or raises its ValueError or OSError."""
    with together(ranks):
        value = what() if ranks.rank == 0 else None
    return same(ranks, value)
