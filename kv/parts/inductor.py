"""How a compiled step is made fast: forms that Inductor fuses well, and integers that do not make it compile again.

kv/parts/ops.py says what a step computes; nothing here changes a result beyond rounding. Shapes as in kv/base.py.
"""

from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

STEP = 256  # slots: a step reads a multiple of this, or all
CHUNK = 64  # values that a compiled step on a CPU adds up before it adds the next: they stay in the L1 cache
RANKED = 1200  # the most scores of which a compiled step on a GPU finds the best by ranking all
RECOMPUTED = 512  # the most of them that every comparison computes for itself, which saves a kernel
UNROLLED = 16  # most vectors whose sum a compiled step writes out: Inductor's loops over so few are slow
PARTS = 64  # of a long softmax on a GPU
JOINED = 64  # products of which a GPU makes a long sum of a KV head
TILE = 8  # scores per tile, see `tile_winners`
REREAD = 4096  # the most vectors of a KV head that each query of a group reads for itself on a GPU
BLOCK = 128  # slots per block of flex_attention's mask
# By (dtype, D), written by `fuse` and `double` alone. A compiled step is compiled again once what it read has changed.
FUSED: dict[tuple[torch.dtype, int], int] = {}
DOUBLED: set[tuple[torch.dtype, int]] = set()
UNMARKED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # symbols, see `mark_symbols`


# Integers: a compiled step treats a Python int as a constant and is compiled again for each value. The size of a tensor
# can be a variable, so an integer that changes from step to step is held as a symbol: an empty tensor of that size.


def symbol(value: int, device: torch.device) -> Tensor:
    """A symbol that holds `value`. On a CPU one compile serves all values; a CUDA graph is one value's."""
    held = torch.empty(value, 0, device=device)
    if device.type != "cuda":
        UNMARKED[id(held)] = held
    return held


def mark_symbols() -> None:
    """Tells torch.compile that symbols are variables: before it traces, for it takes a second to import."""
    while UNMARKED:
        torch._dynamo.maybe_mark_dynamic(UNMARKED.popitem()[1], 0)


def value(symbol: Tensor) -> int:
    """The integer that a symbol holds; inside a compiled step, a variable."""
    return symbol.shape[0]


def covering(old: Tensor, length: int, capacity: int, step: int | None = None) -> Tensor:
    """A symbol of how many leading slots, of `capacity`, cover `length`: a multiple of `step` (STEP), or all.

    It is `old` if the number is unchanged. Buffers need one slot more than `capacity`, because the compiler specializes
    a symbol that covers a whole buffer. On CUDA the number is always `capacity`: there the block mask of `flex_prefix`
    follows the lengths, and one graph serves them all.
    """
    step = step or STEP
    size = capacity if old.device.type == "cuda" else min(-(-length // step) * step, capacity)
    return old if value(old) == size else symbol(size, old.device)


# What is stored: Inductor computes a value again in each loop that reads it, unless it is stored.


def stored(x: Tensor) -> Tensor:
    """x, stored where a step is compiled for a CPU."""
    return realized(x) if x.device.type == "cpu" else x


def realized(x: Tensor) -> Tensor:
    """x, contiguous and stored on any device, where compiled code must not compute it again from what it came from."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


# Sums


def rereads(x: Tensor) -> bool:
    """Whether each query of a group reads vectors x [B,Hk,N,D] for itself, because a GPU's L2 cache still holds them.

    Otherwise they are read once for all: what computes them is then a kernel of its own.
    """
    return x.device.type == "cuda" and x.shape[2] <= REREAD


def multiplies(x: Tensor) -> bool:
    """Whether a compiled step calls cuBLAS for sums over vectors x [B,Hk,N,D]: on a GPU, if many are stored in 16 bits.

    It reads them at the memory's speed, where the loops that Inductor writes take 2 to 6 times as long.
    """
    return x.device.type == "cuda" and x.dtype.itemsize == 2 and x.shape[2] > REREAD


def products(q: Tensor, k: Tensor) -> Tensor:
    """`dots` by cuBLAS, which is slow where a row of the result is not a multiple of 16 bytes."""
    whole = k.shape[2] // 8 * 8
    rows, keys = q.to(k.dtype).flatten(0, 1), k[:, :, :whole].flatten(0, 1)
    y = torch.bmm(rows, keys.mT, out_dtype=torch.float32).unflatten(0, q.shape[:2])
    return torch.cat([y, dots(q.float(), k[:, :, whole:].float())], dim=3) if whole < k.shape[2] else y


def dots(q: Tensor, k: Tensor) -> Tensor:
    """q [B,Hk,G,D] times k [B,Hk,N,D] -> [B,Hk,G,N], both fp32: a gather or a decoding of k fuses into the sums."""
    if rereads(k):
        return (q[:, :, :, None] * k[:, :, None]).sum(4)
    return torch.stack([(row[:, :, None] * k).sum(3) for row in realized(q).unbind(2)], dim=2)


def weighted_sum(weight: Tensor, v: Tensor) -> Tensor:
    """Sums of v [B,Hk,N,D] weighted by [B,Hk,G,N] -> [B,Hk,G,D] fp32, a chunk of vectors at a time."""
    if rereads(v):
        return (weight[..., None] * v[:, :, None]).sum(3)
    if multiplies(v):
        return _in_parts(weight, v)
    if v.device.type == "cuda":
        weight = realized(weight)  # otherwise each of the D sums computes its own exponentials
    if v.shape[2] <= UNROLLED:
        parts = [weight[..., i, None] * v[:, :, i, None] for i in range(v.shape[2])]
        return sum(parts[1:], parts[0])
    if in_chunks(v.shape[2]):
        return _chunk_sum(weight, v)
    whole = (v.shape[2] - 1) // CHUNK * CHUNK  # and 1 to CHUNK more, so that one compile serves any N
    rest = torch.stack([(row[..., None] * v[:, :, whole:]).sum(2) for row in weight[..., whole:].unbind(2)], dim=2)
    return rest + _chunk_sum(weight[..., :whole], v[:, :, :whole]) if whole else rest


def in_chunks(n: int) -> bool:
    """Whether n is known to be a multiple of CHUNK, without an assumption about a size that may vary."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a third of a second to import

    return statically_known_true(n % CHUNK == 0)


def _in_parts(weight: Tensor, v: Tensor) -> Tensor:
    """`weighted_sum` by products of parts, which keep a whole GPU busy. A head at a time: the parts of several heads of
    a buffer have no single stride."""
    each = v.shape[2] // JOINED // 8 * 8  # vectors of a part
    whole = each * JOINED
    parts = realized(weight[..., :whole].unflatten(3, (JOINED, each)).transpose(2, 3).to(v.dtype))
    rows = zip(parts, v[:, :, :whole].unflatten(2, (JOINED, each)), strict=True)
    heads = [[torch.bmm(*head, out_dtype=torch.float32) for head in zip(*row, strict=True)] for row in rows]
    y = torch.stack([torch.stack(row).sum(1) for row in heads])
    return y + weighted_sum(weight[..., whole:], v[:, :, whole:]) if whole < v.shape[2] else y


def sum_blocks(x: Tensor) -> Tensor:
    """Sums x [B,Hk,blocks,block,...] over both dims, on a CPU a block at a time, which stays in its cache.

    On a GPU Inductor would divide a long sum anywhere, and then each index: here its parts are whole blocks.
    """
    if x.device.type == "cpu":
        return x.sum(3).sum(2)
    parts = next(n for n in range(PARTS, 0, -1) if x.shape[2] % n == 0)
    return x.unflatten(2, (parts, -1)).sum((3, 4)).sum(2)


def _chunk_sum(weight: Tensor, v: Tensor) -> Tensor:
    weight, v = weight.unflatten(3, (-1, CHUNK)), v.unflatten(2, (-1, CHUNK))
    return torch.stack([(row[..., None] * v).sum(3).sum(2) for row in weight.unbind(2)], dim=2)


def total(x: Tensor) -> Tensor:
    """Sums over the last dim, [..., N] -> [..., 1]; of chunks first on a CPU, where long sums are compiled again."""
    if x.device.type != "cpu":
        return x.sum(-1, keepdim=True)
    whole = (x.shape[-1] - 1) // CHUNK * CHUNK
    rest = x[..., whole:].sum(-1, keepdim=True)
    return rest + x[..., :whole].unflatten(-1, (-1, CHUNK)).sum(-1).sum(-1, keepdim=True) if whole else rest


def cuts(x: Tensor) -> bool:
    """Whether a compiled step on a GPU computes the softmax of x [..., N] by parts: rows are long, and N allows it."""
    if x.device.type != "cuda" or not torch.compiler.is_compiling():
        return False  # before N is asked for: a compiled step on a CPU serves any
    return x.shape[-1] > PARTS**2 and x.shape[-1] % PARTS == 0


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim by parts: what computes x fuses into their maxima and sums, which are few to join."""
    x = x.unflatten(-1, (PARTS, -1))
    most = x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)  # finite where a part has no token
    sums, top = (x - most).exp().sum(-1, keepdim=True), most.amax(-2, keepdim=True)
    whole = (sums * (most - top).exp()).sum(-2, keepdim=True)
    return ((x - top).exp() * (1 / whole)).flatten(-2)


# The best of many scores


def min_scores(most: int, k: int, device: torch.device) -> int:
    """The fewest scores that `ops.top` may choose k from, if there may be `most`: more than k if it forms tiles."""
    return TILE * k + 1 if device.type == "cpu" and most >= TILE**2 * k else k


def tiles(scores: Tensor, k: int, most: int) -> bool:
    """Whether the k best of scores [..., N] are looked for in `tile_winners`; `most` as in `ops.top`."""
    if scores.device.type == "cuda" and torch.compiler.is_compiling():  # on a CPU a compiled step serves any N
        n = scores.shape[-1]
        if n > RANKED >= (n - 1) // TILE and TILE * (k + 1) <= RANKED:
            return True  # so few tiles, and so few scores in the best of them, are ranked
    return min_scores(most, k, scores.device) > k


def tile_winners(rank: Tensor, k: int) -> Tensor:
    """Indices [..., M] among which the k largest of N distinct `rank` [..., N] are: the k tiles with the best maxima.

    Less work than sorting N values where N > TILE k.
    """
    count = (rank.shape[-1] - 1) // TILE
    tile = best(rank[..., : TILE * count].unflatten(-1, (TILE, count)).amax(-2), k, sorted=False)
    members = (tile[..., None, :] + count * torch.arange(TILE, device=tile.device)[:, None]).flatten(-2)
    left = torch.arange(rank.shape[-1], device=tile.device)[TILE * count :].expand(*tile.shape[:-1], -1)  # 1 to TILE
    return torch.cat([members, left], dim=-1)


def best(rank: Tensor, k: int, sorted: bool) -> Tensor:
    """Indices [..., k] of the k largest of N distinct integers [..., N].

    A compiled step on a GPU compares RANKED or fewer with all others, which takes less time than a top-k.
    """
    few = rank.device.type == "cuda" and rank.shape[-1] <= RANKED and torch.compiler.is_compiling()
    return ranked(rank, k) if few else rank.topk(k, sorted=sorted).indices


def ranked(rank: Tensor, k: int) -> Tensor:
    """`best`, in order: each of N integers is compared with all."""
    rank = rank if rank.shape[-1] <= RECOMPUTED else realized(rank)
    place = (rank[..., None, :] > rank[..., None]).sum(-1, dtype=torch.int32)
    place = place.clamp(max=k).long().flatten(0, -2)  # place k is for all that are left over
    row, index = (torch.arange(n, device=rank.device) for n in place.shape)
    # Not a scatter: Inductor would copy the buffer first, and call torch for 64-bit integers.
    found = place.new_empty(len(row), k + 1)
    found[row[:, None], place] = index.expand_as(place)
    return found[:, :k].unflatten(0, rank.shape[:-1])


# Attention


def fuse(dtype: torch.dtype, dim: int, most: int) -> None:
    """From now on, compiled steps on a CPU fuse attention with up to `most` queries of a KV head and D = dim."""
    FUSED[dtype, dim] = most


def most_fused(dtype: torch.dtype, dim: int) -> int:
    """What `fuse` chose; 0 before."""
    return FUSED.get((dtype, dim), 0)


def double(dtype: torch.dtype, dim: int) -> None:
    """From now on, steps on a CPU give SDPA the one query of a KV head, with D = dim, twice."""
    DOUBLED.add((dtype, dim))


def fuses(q: Tensor) -> bool:
    """Whether a compiled step attends with queries [B,Hk,R,D] by products and sums that Inductor fuses, not by SDPA."""
    few = q.shape[2] <= most_fused(q.dtype, q.shape[3])
    return few and q.device.type == "cpu" and torch.compiler.is_compiling()


def doubles(q: Tensor) -> bool:
    """Whether SDPA on this CPU is given the one query of each KV head, q [B,Hk,R,D], twice."""
    return q.shape[2] == 1 and q.device.type == "cpu" and (q.dtype, q.shape[3]) in DOUBLED


def flexes(q: Tensor, k: Tensor) -> bool:
    """Whether a compiled step attends with q [B,Hq,n,D] by flex_attention."""
    few = q.shape[1] // k.shape[1] * q.shape[2] < BLOCK  # queries of a group: one block
    return torch.compiler.is_compiling() and q.device.type == "cuda" and few


def flex_prefix(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """`ops.attend_prefix`."""
    n = q.shape[2]
    return _flex(q, k, v, length + n - 1, lambda b, h, i, slot: slot < length[b] + i % n)


def flex_regions(q: Tensor, k: Tensor, v: Tensor, first: Tensor, length: Tensor) -> Tensor:
    """`ops.attend_regions`, k and v [B,Hk,S,D]."""
    first, end = realized(first), realized(first + length)  # flex_attention reads them, and cannot compute them

    def seen(b: Tensor, h: Tensor, i: Tensor, slot: Tensor) -> Tensor:
        return (slot >= first[b, h]) & (slot < end[b, h])

    return _flex(q, k, v, end, seen, first)


def flex_used(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, used: Tensor) -> Tensor:
    """`ops.attend_used`."""
    mask = realized(mask)  # flex_attention reads it, and cannot compute it
    return _flex(q, k, v, used, lambda b, h, i, slot: mask[b, h, slot])


def _flex(q: Tensor, k: Tensor, v: Tensor, end: Tensor, seen: Callable, first: Tensor | None = None) -> Tensor:
    """Flash-decoding by flex_attention: reads the blocks of the slots before end [B] or, by head, from `first` [B,Hk]
    to `end` [B,Hk].

    seen(b, h, i, slot) is its mask; i counts a group's queries. All blocks count as partly filled: among those the
    kernel divides its work by their number, among whole blocks by the capacity. Further kernels join the parts.
    """
    n, rows = q.shape[2], q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B,Hk,G n,D]
    blocks = -(-k.shape[2] // BLOCK)
    order, count = torch.arange(blocks, device=q.device).expand(q.shape[0], 1, 1, blocks), -(-end // BLOCK)
    if first is None:
        count = count[:, None]  # for all heads
    else:  # the blocks of the region come first
        begin = first // BLOCK
        order, count = order + begin[..., None, None], count - begin
    mask = BlockMask.from_kv_blocks(
        count.to(torch.int32)[..., None],  # [B,1 or Hk,1]: for all queries
        (order % blocks).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(rows.shape[2], k.shape[2]),
        compute_q_blocks=False,  # only a backward pass reads query blocks
    )
    loads_ahead = {"num_stages": 3, "num_warps": 2}  # otherwise loads wait for products
    options = loads_ahead if q.dtype.itemsize == 2 and q.shape[3] <= 128 else {}
    y = flex_attention(rows, k, v, block_mask=mask, kernel_options=options)
    return y.unflatten(2, (-1, n)).flatten(1, 2)
