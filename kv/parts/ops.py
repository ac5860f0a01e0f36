"""Tensor primitives of a decode step that two or more methods share. Shapes as in kv/base.py."""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kv.parts.flex import BLOCK, flex

SPAN = 256  # slots: a step reads a multiple of this, or all
SCORES = 1 << 24  # attention weights that may exist at once while a prompt is processed
CHUNK = 64  # values that a compiled step on a CPU adds up before it adds the next: they stay in the L1 cache
TILE = 8  # scores per tile, see `top`
TILED = ("cpu", "cuda") if os.environ.get("KV_FAST_TILES") else ("cpu",)  # for a GPU a guess, see bench/gpu.py
UNROLLED = 16  # most vectors whose sum a compiled step writes out: Inductor's loops over so few are slow
# By (dtype, D): the most queries for which fused products and sums beat SDPA on this CPU, measured by runtime/tune.py.
FUSED: dict[tuple[torch.dtype, int], int] = {}
CUDA_FORM = "flex"  # of attention on a GPU: flex_attention, "kernel" (SDPA) or "fused"; a guess, see bench/gpu.py


def grouped(q: Tensor, heads: int) -> Tensor:
    """Groups one query per row by `heads` KV heads: [B,Hq,1,D] -> [B,Hk,G,D]."""
    return q.view(q.shape[0], heads, -1, q.shape[-1])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query per row against S slots: q [B,Hq,1,D], k and v [B,Hk,S,D], mask [B,S] or [B,Hk,S] -> [B,Hq,1,D].

    The G queries of a group form one small matrix, so K and V are read once and never repeated.
    """
    mask = (mask[:, None] if mask.dim() == 2 else mask)[:, :, None]
    return attend_groups(grouped(q, k.shape[1]), k, v, mask).reshape(q.shape)  # some kernels return other strides


def attend_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """R queries of each group: q [B,Hk,R,D], k and v [B,Hk,S,D], mask broadcastable to [B,Hk,R,S] -> [B,Hk,R,D].

    A compiled step attends by SDPA or by products and sums that Inductor fuses: see FUSED and CUDA_FORM.
    """
    few = q.shape[2] <= FUSED.get((q.dtype, q.shape[3]), 0)
    fuses = few if q.device.type == "cpu" else CUDA_FORM == "fused"
    if not fuses or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return attend_stores([group_logits(q, k, ~mask)], [lambda weight: weighted_sum(weight, v)]).to(q.dtype)


def attend_prefix(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """Attention to each row's first slots, length [B] for the first of its n queries, one more for each later one.

    q [B,Hq,n,D], k and v [B,Hk,S,D] -> [B,Hq,n,D]; K and V are read once for all queries of a group.
    """
    if _flexes(q, k):
        return flex_prefix(q, k, v, length)
    n, slot = q.shape[2], torch.arange(k.shape[2], device=q.device)
    if n == 1:
        return attend(q, k, v, slot < length[:, None])
    mask = slot < following(length, n)[..., None]  # [B,n,S]
    rows = q.unflatten(1, (k.shape[1], -1))  # [B,Hk,G,n,D]
    mask = mask[:, None].repeat(1, 1, rows.shape[2], 1)  # [B,1,G n,S]
    y = attend_groups(rows.flatten(2, 3), k, v, mask)
    return y.unflatten(2, (-1, n)).flatten(1, 2)


def flex_prefix(q: Tensor, k: Tensor, v: Tensor, length: Tensor, first: Tensor | None = None) -> Tensor:
    """`attend_prefix` by flex_attention. With `first` [B], multiples of BLOCK, the slots of each row begin there."""
    n = q.shape[2]

    def seen(b: Tensor, h: Tensor, i: Tensor, slot: Tensor) -> Tensor:
        return slot < (length[b] if first is None else first[b] + length[b]) + i % n

    return flex(q, k, v, length + n - 1, seen, first)


def attend_used(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, used: Tensor) -> Tensor:
    """`attend` with mask [B,Hk,S], False for slots from used [B] on: on CUDA their blocks are not read."""
    if not _flexes(q, k):
        return attend(q, k, v, mask)
    mask = realized(mask)  # flex_attention reads it, and cannot compute it
    return flex(q, k, v, used, lambda b, h, i, slot: mask[b, h, slot])


def _flexes(q: Tensor, k: Tensor) -> bool:
    few = q.shape[1] // k.shape[1] * q.shape[2] < BLOCK  # queries of a group: one block
    return torch.compiler.is_compiling() and q.device.type == "cuda" and CUDA_FORM == "flex" and few


def attend_rows(q: Tensor, k: Tensor, v: Tensor, index: Tensor, mask: Tensor, read: Callable | None = None) -> Tensor:
    """`attend` to chosen slots only: index and mask [B,Hk,N], shared by the queries of a group, or [B,Hq,N].

    `read` decodes the gathered slots if they do not store plain vectors.
    """
    slots = index.unflatten(1, (k.shape[1], -1)).flatten(2)  # the choices of each KV head, concatenated
    found = (gather(x, slots).unflatten(2, (-1, index.shape[2])).flatten(1, 2) for x in (k, v))
    keys, values = (stored(x if read is None else read(x)) for x in found)  # else the sums gather number by number
    return attend(q, keys, values, mask)


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, best: Tensor, page: int, last: Tensor, read: Callable | None = None
) -> Tensor:
    """`attend_rows` to the tokens of pages `best` [B,Hk,N]; slots after each row's `last` [B] hold no token."""
    index = (best[..., None] * page + torch.arange(page, device=q.device)).flatten(2)
    return attend_rows(q, k, v, index.clamp(max=k.shape[2] - 1), index <= last[:, None, None], read)


def following(pos: Tensor, n: int) -> Tensor:
    """The n positions from pos [B] on: [B,n]."""
    return pos[:, None] + torch.arange(n, device=pos.device)


def newest_pages(k: Tensor, page: int, first: Tensor, n: int, read: Callable | None = None) -> tuple[Tensor, Tensor]:
    """The pages that hold each row's n newest slots, which begin at `first` [B]: k [B,Hk,S,D].

    Returns their indices [B,P] and, stacked, the minimum and maximum of each channel over their keys [2,B,Hk,P,D]. A
    row with fewer than P such pages repeats its first one. `read` decodes the keys.
    """
    index = following(first // page, (n + page - 2) // page + 1)
    last = (first + n - 1)[:, None]
    index = torch.where(index <= last // page, index, index[:, :1])
    slot = (index[..., None] * page + torch.arange(page, device=k.device)).flatten(1)  # [B,P page]
    keys = gather(k, slot.clamp(max=k.shape[2] - 1)[:, None].expand(-1, k.shape[1], -1))
    keys = (keys if read is None else read(keys)).unflatten(2, (-1, page))
    empty = (slot > last).unflatten(1, (-1, page))[:, None, ..., None]
    low, high = keys.masked_fill(empty, torch.inf).amin(3), keys.masked_fill(empty, -torch.inf).amax(3)
    return index, torch.stack([low, high])


def page_bounds(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each channel in every page of `page` tokens: k [Hk,n,D] -> two of [Hk,pages,D]."""
    rest = (0, 0, 0, -k.shape[1] % page)
    low, high = (F.pad(k, rest, value=empty).unflatten(1, (-1, page)) for empty in (torch.inf, -torch.inf))
    return low.amin(2), high.amax(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [..., D] in Hugging Face's channel order: channel i pairs with i + D/2. cos, sin: [..., D/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def turn(x: Tensor, shift: Tensor, speed: Tensor) -> Tensor:
    """Rotates keys (or queries), RoPE applied, as if they stood `shift` positions later: rotations add.

    x [B,H,N,D], shift [B,H,N] or broadcastable to it, speed [B,D/2] in radians per position.
    """
    angle = shift[..., None].float() * speed[:, None, None]
    return rotate(x, angle.cos(), angle.sin())


def ring(position: Tensor, size: Tensor | int, sinks: int) -> Tensor:
    """The slots of the tokens at `position` among `size` slots: the sinks' slots, then a ring."""
    return torch.where(position < size, position, sinks + (position - sinks) % (size - sinks))


def in_ring(length: int, size: int, sinks: int, device: torch.device, first: int = 0) -> Tensor:
    """The positions, from `first` on, of the tokens that `ring` holds after `length` tokens."""
    if length <= size:
        return torch.arange(first, length, device=device)
    newest = torch.arange(max(first, length - size + sinks), length, device=device)
    return torch.cat((torch.arange(min(first, sinks), sinks, device=device), newest))


def gather(x: Tensor, index: Tensor) -> Tensor:
    """x [B,H,S,D] at index [B,H,N] -> [B,H,N,D]"""
    b, h = (torch.arange(n, device=x.device) for n in index.shape[:2])
    return x[b[:, None, None], h[:, None], index]


def top(scores: Tensor, k: int, ordered: bool = False, most: int = 0) -> Tensor:
    """Indices [..., k] of the k largest scores [..., N] fp32, best first if `ordered`; ties go to the lowest index.

    Devices in TILED sort the maxima of tiles first where that is less work: the best lie in the k best tiles. The
    caller then ensures least(most, k) <= N <= most.
    """
    bits, index = scores.view(torch.int32), torch.arange(scores.shape[-1], device=scores.device)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that compare like the floats
    if least(most, k, scores.device) > k:
        order, count = stored(order), (scores.shape[-1] - 1) // TILE
        tiles = _ranked(order, index)[..., : TILE * count].unflatten(-1, (TILE, count))
        tile = tiles.amax(-2).topk(k, sorted=False).indices
        members = (tile[..., None, :] + count * torch.arange(TILE, device=tile.device)[:, None]).flatten(-2)
        left = index[TILE * count :].expand(*tile.shape[:-1], -1)  # 1 to TILE scores
        index = torch.cat([members, left], dim=-1)
        order = order.gather(-1, index)
    return -_ranked(order, index).topk(k, sorted=ordered).values & 0xFFFFFFFF


def _ranked(order: Tensor, index: Tensor) -> Tensor:
    """One integer for each score: larger for a larger `order`, then for a lower index."""
    return (order.long() << 32) - index


def least(most: int, k: int, device: torch.device) -> int:
    """The fewest scores that `top` may choose k from, if there may be `most`: more than k if it forms tiles."""
    return TILE * k + 1 if device.type in TILED and most >= TILE**2 * k else k


def dots(q: Tensor, k: Tensor) -> Tensor:
    """Dot products of q [B,Hk,G,D] and k [B,Hk,N,D] -> [B,Hk,G,N] fp32; each key is read once per group."""
    q, k = q.float(), k.float()
    if not torch.compiler.is_compiling():
        return q @ k.mT
    return torch.stack([(row[:, :, None] * k).sum(3) for row in stored(q).unbind(2)], dim=2)


def stored(x: Tensor) -> Tensor:
    """x, stored: a step compiled for a CPU would compute it again in each loop that reads it."""
    return realized(x) if x.device.type == "cpu" else x


def realized(x: Tensor) -> Tensor:
    """x, contiguous and stored on any device, where compiled code must not compute it again from what it came from."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def weights(q: Tensor, k: Tensor, empty: Tensor) -> Tensor:
    """Attention weights [B,Hk,G,N] fp32 of q [B,Hq,1,D] over k [B,Hk,N,D]; slots that are `empty` (broadcast) get 0."""
    return softmax(group_logits(grouped(q, k.shape[1]), k, empty))


def group_logits(q: Tensor, k: Tensor, empty: Tensor) -> Tensor:
    """Logits [B,Hk,G,N] fp32 of queries that are grouped already, q [B,Hk,G,D]; `empty` slots get -inf."""
    return dots(q.float() * q.shape[-1] ** -0.5, k) + barred(empty)


def barred(empty: Tensor) -> Tensor:
    """What excludes `empty` slots when it is added to logits: -inf or 0, compared once for all heads that share it."""
    return stored(torch.where(empty, -torch.inf, 0.0))


def weighted_sum(weight: Tensor, v: Tensor) -> Tensor:
    """Sums of v [B,Hk,N,D] weighted by [B,Hk,G,N] -> [B,Hk,G,D] fp32; each vector is read once per group."""
    if not torch.compiler.is_compiling():
        return (weight.to(v.dtype) @ v).float()
    if v.shape[2] <= UNROLLED:
        parts = [weight[..., i, None] * v[:, :, i, None] for i in range(v.shape[2])]
        return sum(parts[1:], parts[0])
    if statically_known_true(v.shape[2] % CHUNK == 0):
        return _chunk_sum(weight, v)
    whole = (v.shape[2] - 1) // CHUNK * CHUNK  # and 1 to CHUNK more, so that one compile serves any N
    rest = torch.stack([(row[..., None] * v[:, :, whole:]).sum(2) for row in weight[..., whole:].unbind(2)], dim=2)
    return rest + _chunk_sum(weight[..., :whole], v[:, :, :whole]) if whole else rest


def _chunk_sum(weight: Tensor, v: Tensor) -> Tensor:
    weight, v = weight.unflatten(3, (-1, CHUNK)), v.unflatten(2, (-1, CHUNK))
    return torch.stack([(row[..., None] * v).sum(3).sum(2) for row in weight.unbind(2)], dim=2)


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dim; one compile serves any size of it."""
    weight = (logits - logits.amax(-1, keepdim=True)).exp()
    return weight * (1 / total(weight))  # one division, not one for each weight


def total(x: Tensor) -> Tensor:
    """Sums over the last dim, [..., N] -> [..., 1]; of chunks first on a CPU, where long sums are compiled again."""
    if x.device.type != "cpu":
        return x.sum(-1, keepdim=True)
    whole = (x.shape[-1] - 1) // CHUNK * CHUNK
    rest = x[..., whole:].sum(-1, keepdim=True)
    return rest + x[..., :whole].unflatten(-1, (-1, CHUNK)).sum(-1).sum(-1, keepdim=True) if whole else rest


def attend_stores(logits: list[Tensor], sums: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Attention to tokens in several stores, without joining their logits or values -> [B,Hk,G,D] fp32.

    Of each store: the logits [B,Hk,G,n], and a function from weights [B,Hk,G,n] to weighted sums [B,Hk,G,D] of values.
    """
    most = torch.stack([x.amax(-1, keepdim=True) for x in logits]).amax(0)
    weight = [(x - most).exp() for x in logits]
    return sum(add(x) for add, x in zip(sums, weight, strict=True)) / sum(map(total, weight))


def sparq_weights(rows: Tensor, channel: Tensor, keys: Tensor, empty: Tensor) -> Tensor:
    """Each query's attention to N keys, estimated from R of their channels: [B,Hk,G,N] fp32.

    rows [B,Hk,G,D] are the queries; channel [B,Hk,R] picks channels; keys [B,Hk,R,N] are those channels of the keys,
    read once per group; `empty` [B,N] keys get no weight. SparQ's temperature (arXiv 2312.04985) makes up for the
    channels left out.
    """
    part = rows.gather(3, channel[:, :, None].expand(-1, -1, rows.shape[2], -1))  # [B,Hk,G,R]
    temperature = (rows.shape[3] * part.abs().sum(3, keepdim=True) / rows.abs().sum(3, keepdim=True)).sqrt()
    logits = weighted_sum(stored(part.float() / temperature), keys.float())
    return softmax(logits + barred(empty[:, None, None]))


def hashed(x: Tensor) -> Tensor:
    """A 32-bit integer hash (xor-shift and multiply, twice) in int64; overflow does not reach the low 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def store(buffer: Tensor, new: Tensor, slot: Tensor, active: Tensor) -> None:
    """Writes n tokens per row: new [B,Hk,n,D] to buffer [B,Hk,S,D] at slot [B,n]; inactive rows do not change."""
    rows = torch.arange(slot.shape[0], device=slot.device)[:, None]
    old = buffer[rows, :, slot]  # [B,n,Hk,D]
    buffer[rows, :, slot] = torch.where(active[:, None, None, None], new.transpose(1, 2), old)


def span(old: Tensor, length: int, capacity: int, device: torch.device, step: int | None = None) -> Tensor:
    """How many leading slots the next step reads, as the first size of an empty tensor; `old` if unchanged.

    A compiled step sees that size as a variable, so one compile serves all lengths; a Python int would be compiled
    for each. Buffers need one slot more than `capacity`, because the compiler specializes a span that covers a whole
    buffer. On CUDA the span is always `capacity`: there the block mask of `flex_prefix` follows the lengths, and one
    graph serves them all.
    """
    size = capacity if device.type == "cuda" else min(-(-length // (step or SPAN)) * (step or SPAN), capacity)
    return old if old.shape[0] == size else number(size, device)


def number(value: int, device: torch.device) -> Tensor:
    """An integer as the first size of an empty tensor: code that differs in it alone is compiled once, on a CPU."""
    found = torch.empty(value, 0, device=device)
    if device.type != "cuda":
        torch._dynamo.maybe_mark_dynamic(found, 0)
    return found
