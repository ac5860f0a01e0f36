"""Tensor primitives that two or more methods share. Shapes as in kv/base.py."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

SPAN = 256  # slots: a step reads a multiple of this, or all
SCORES = 1 << 24  # attention weights that may exist at once while a prompt is processed
BLOCK = 128  # slots per block of flex_attention's block mask


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Exact causal attention of a whole prompt: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D]; never T x T.

    With `window`, each query sees that many tokens, itself included.
    """
    y, groups = torch.empty_like(q), q.shape[1] // k.shape[1]
    for g in range(groups):  # heads g, g + G, ... share no KV head, so K and V are never repeated
        if window is None or window >= q.shape[2]:
            y[:, g::groups] = F.scaled_dot_product_attention(q[:, g::groups], k, v, is_causal=True)
        else:
            _banded_attention(y[:, g::groups], q[:, g::groups], k, v, window)
    return y


def _banded_attention(y: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int) -> None:
    """Writes y, one block of queries at a time, against the keys that the block's windows reach."""
    block = min(window, 1024)
    for start in range(0, q.shape[2], block):
        stop, first = min(start + block, q.shape[2]), max(start - window + 1, 0)
        age = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        rows, seen = slice(start, stop), slice(first, stop)
        mask = (age >= 0) & (age < window)
        y[:, :, rows] = F.scaled_dot_product_attention(q[:, :, rows], k[:, :, seen], v[:, :, seen], attn_mask=mask)


def suffix_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact causal attention of the last n of N tokens: q [1,Hq,n,D], k and v [1,Hk,N,D] -> [1,Hq,n,D]; never n x N.

    Two flash attentions, to the tokens before the n and among the n, weighted by their sums of exponentials.
    """
    (n, length), groups = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    first = length - n
    if first == 0:
        return causal_attention(q, k, v)
    if not _flashes(q):
        return _masked_attention(q, k, v, lambda query, key: key <= query + first)
    rows = q.unflatten(1, (-1, groups))  # [1,Hk,G,n,D]
    before, total = _flash_attention(rows.flatten(2, 3), k[:, :, :first], v[:, :, :first], causal=False)
    before, total = before.unflatten(2, (groups, n)), total.unflatten(2, (groups, n))
    y = torch.empty_like(rows)
    for g in range(groups):
        among, own = _flash_attention(rows[:, :, g], k[:, :, first:], v[:, :, first:])
        share = (own - total[:, :, g]).sigmoid()[..., None]
        y[:, :, g] = share * among + (1 - share) * before[:, :, g]
    return y.flatten(1, 2)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, held: tuple[Tensor, Tensor, Tensor], size: int, sinks: int
) -> Tensor:
    """Attention of n tokens to what a `ring` of `size` slots holds when each is the newest: q [1,Hq,n,D] -> the same.

    k and v [1,Hk,n,D]: of these tokens. held: k and v [Hk,N,D] and position [Hk,N] of those before.
    """
    keys, values = (torch.cat([old[None], new], dim=2) for old, new in zip(held, (k, v), strict=False))
    first = held[2].shape[1]
    pos = int(held[2][0, -1]) + 1 if first else 0
    position = torch.cat([held[2][0], torch.arange(pos, pos + k.shape[2], device=q.device)])

    def seen(query: Tensor, key: Tensor) -> Tensor:
        at = position[first + query]
        return (position <= at) & ((position < sinks) | (position > at - size + sinks))

    return _masked_attention(q, keys, values, seen)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Attention of queries to the keys they see, by `seen(query [n,1], key [N])`; a block of queries at a time."""
    y, groups, (n, length) = torch.empty_like(q), q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    block, key = max(1, SCORES // length), torch.arange(length, device=q.device)
    for start in range(0, n, block):
        part = slice(start, start + block)
        mask = seen(torch.arange(n, device=q.device)[part, None], key)
        for g in range(groups):
            y[:, g::groups, part] = F.scaled_dot_product_attention(q[:, g::groups, part], k, v, attn_mask=mask)
    return y


def grouped(q: Tensor, heads: int) -> Tensor:
    """Groups one query per row by `heads` KV heads: [B,Hq,1,D] -> [B,Hk,G,D]."""
    return q.view(q.shape[0], heads, -1, q.shape[-1])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query per row against S slots: q [B,Hq,1,D], k and v [B,Hk,S,D], mask [B,S] or [B,Hk,S] -> [B,Hq,1,D].

    The G queries of a group form one small matrix, so K and V are read once and never repeated.
    """
    mask = (mask[:, None] if mask.dim() == 2 else mask)[:, :, None]
    return F.scaled_dot_product_attention(grouped(q, k.shape[1]), k, v, attn_mask=mask).view(q.shape)


def attend_prefix(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """`attend` to each row's first `length` [B] slots."""
    if torch.compiler.is_compiling() and q.device.type == "cuda":
        return flex_prefix(q, k, v, length)
    return attend(q, k, v, torch.arange(k.shape[2], device=q.device) < length[:, None])


def flex_prefix(q: Tensor, k: Tensor, v: Tensor, length: Tensor, first: Tensor | None = None) -> Tensor:
    """`attend_prefix` as flash-decoding: a block mask built from `length` skips the blocks past a row's end.

    With `first` [B], multiples of BLOCK, the slots of each row begin there.
    """
    rows = grouped(q, k.shape[1])
    blocks = -(-k.shape[2] // BLOCK)
    whole = (length // BLOCK).to(torch.int32)[:, None, None]  # [B,1,1]: one for all heads, one block of queries
    cut = (length % BLOCK > 0).to(torch.int32)[:, None, None]
    order = torch.arange(blocks, device=q.device).expand(q.shape[0], 1, 1, blocks)  # a row's own blocks come first
    if first is not None:
        order = order + (first // BLOCK)[:, None, None, None]
    mask = BlockMask.from_kv_blocks(
        cut,
        ((order + whole[..., None]) % blocks).int(),  # the partly filled block follows the whole ones
        whole,
        (order % blocks).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, i, slot: slot < (length[b] if first is None else first[b] + length[b]),
        seq_lengths=(rows.shape[2], k.shape[2]),
        compute_q_blocks=False,  # only a backward pass reads query blocks
    )
    return flex_attention(rows, k, v, block_mask=mask).view(q.shape)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, index: Tensor, mask: Tensor, read: Callable | None = None) -> Tensor:
    """`attend` to chosen slots only: index and mask [B,Hk,N], shared by the queries of a group, or [B,Hq,N].

    `read` decodes the gathered slots if they do not store plain vectors.
    """
    slots = index.unflatten(1, (k.shape[1], -1)).flatten(2)  # the choices of each KV head, concatenated
    keys, values = (gather(x, slots).unflatten(2, (-1, index.shape[2])).flatten(1, 2) for x in (k, v))
    if read is not None:
        keys, values = read(keys), read(values)
    return attend(q, keys, values, mask)


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, best: Tensor, page: int, last: Tensor, read: Callable | None = None
) -> Tensor:
    """`attend_rows` to the tokens of pages `best` [B,Hk,N]; slots after each row's `last` [B] hold no token."""
    index = (best[..., None] * page + torch.arange(page, device=q.device)).flatten(2)
    return attend_rows(q, k, v, index.clamp(max=k.shape[2] - 1), index <= last[:, None, None], read)


def page_bounds(k: Tensor, page: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each channel in every page of `page` tokens: k [Hk,n,D] -> two of [Hk,pages,D].

    Token 0 of k lies at slot `first`; the slots before it on its page do not count.
    """
    before = first % page
    rest = (0, 0, before, -(before + k.shape[1]) % page)
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


def in_ring(length: int, size: int, sinks: int, device: torch.device) -> Tensor:
    """The positions of the tokens that `ring` holds after `length` tokens."""
    kept = torch.arange(length, device=device)
    return kept if length <= size else torch.cat((kept[:sinks], kept[length - size + sinks :]))


def gather(x: Tensor, index: Tensor) -> Tensor:
    """x [B,H,S,D] at index [B,H,N] -> [B,H,N,D]"""
    b, h = (torch.arange(n, device=x.device) for n in index.shape[:2])
    return x[b[:, None, None], h[:, None], index]


def top(scores: Tensor, k: int, ordered: bool = False) -> Tensor:
    """Indices [..., k] of the k largest scores [..., N] fp32, best first if `ordered`; ties go to the lowest index."""
    bits = scores.view(torch.int32).long()
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that compare like the floats
    keys = (order << 32) - torch.arange(scores.shape[-1], device=scores.device)
    return -keys.topk(k, sorted=ordered).values & 0xFFFFFFFF


def dots(q: Tensor, k: Tensor) -> Tensor:
    """Dot products of q [B,Hk,G,D] and k [B,Hk,N,D] -> [B,Hk,G,N] fp32; each key is read once per group."""
    q, k = q.float(), k.float()
    if not torch.compiler.is_compiling():
        return q @ k.mT
    return torch.stack([(row[:, :, None] * k).sum(3) for row in q.unbind(2)], dim=2)


def weights(q: Tensor, k: Tensor, empty: Tensor) -> Tensor:
    """Attention weights [B,Hk,G,N] fp32 of q [B,Hq,1,D] over k [B,Hk,N,D]; slots that are `empty` (broadcast) get 0."""
    return (dots(grouped(q, k.shape[1]), k) * q.shape[-1] ** -0.5).masked_fill(empty, -torch.inf).softmax(-1)


def sums(weight: Tensor, v: Tensor) -> Tensor:
    """Sums of v [B,Hk,N,D] weighted by [B,Hk,G,N] -> [B,Hk,G,D] fp32; each vector is read once per group."""
    if not torch.compiler.is_compiling():
        return weight @ v
    return torch.stack([(row[..., None] * v).sum(2) for row in weight.unbind(2)], dim=2)


def sparq_weights(rows: Tensor, channel: Tensor, keys: Tensor, empty: Tensor) -> Tensor:
    """Each query's attention to N keys, estimated from R of their channels: [B,Hk,G,N] fp32.

    rows [B,Hk,G,D] are the queries; channel [B,Hk,R] picks channels; keys [B,Hk,R,N] are those channels of the keys,
    read once per group; `empty` [B,N] keys get no weight. SparQ's temperature (arXiv 2312.04985) makes up for the
    channels left out.
    """
    part = rows.gather(3, channel[:, :, None].expand(-1, -1, rows.shape[2], -1))  # [B,Hk,G,R]
    logits = sums(part.float(), keys.float())
    heat = (rows.shape[3] * part.abs().sum(3, keepdim=True) / rows.abs().sum(3, keepdim=True)).sqrt()
    return (logits / heat).masked_fill(empty[:, None, None], -torch.inf).softmax(-1)


def window_scores(q: Tensor, k: Tensor, window: int) -> Tensor:
    """The attention of the last `window` queries to earlier tokens: q [1,Hq,T,D], k [1,Hk,T,D] -> [Hk,G,T-window].

    Softmax over all keys that a query sees, summed over the window, fp32. One KV head at a time, so at most
    G x window x T scores exist at once.
    """
    end, sums = k.shape[2] - window, []
    later = torch.ones(window, window, dtype=torch.bool, device=q.device).triu(1)
    for rows, keys in zip(q[0, :, end:].unflatten(0, (k.shape[1], -1)), k[0], strict=True):
        scores = rows.float() @ keys.float().mT * q.shape[-1] ** -0.5  # [G,window,T]
        scores[..., end:].masked_fill_(later, -torch.inf)
        sums.append(scores.softmax(-1)[..., :end].sum(1))
    return torch.stack(sums)


def column_sums(q: Tensor, k: Tensor, powers: int = 1) -> tuple[list[Tensor], Tensor]:
    """The attention that tokens receive from the last n queries, fp32: q [1,Hq,n,D], k [1,Hk,T,D] -> `powers` of
    [Hk,T], and [Hq].

    The first are the sums over all queries of the group's attention to the power of 1, 2, ... (D2O, Equation 6); the
    last is the variance, over the tokens, of each query head's own sums (Equation 4). A block of queries at a time,
    never T x T.
    """
    length, groups, n = k.shape[2], q.shape[1] // k.shape[1], q.shape[2]
    block = max(1, min(n, SCORES // (groups * length)))
    found = [torch.zeros(k.shape[1], length, device=q.device) for _ in range(powers)]
    variance = torch.empty(k.shape[1], groups, device=q.device)
    for head, (rows, keys) in enumerate(zip(q[0].unflatten(0, (k.shape[1], -1)), k[0], strict=True)):
        keys = keys.float().mT * q.shape[-1] ** -0.5
        own = torch.zeros(groups, length, device=q.device)  # each query head's sums
        for start in range(0, n, block):
            stop = min(start + block, n)
            first, seen = length - n + start, length - n + stop  # positions
            logits = rows[:, start:stop].float() @ keys[:, :seen]  # [G,block,seen]
            later = torch.arange(seen, device=q.device) > torch.arange(first, seen, device=q.device)[:, None]
            weight = logits.masked_fill_(later, -torch.inf).softmax(-1)
            own[:, :seen] += weight.sum(1)
            for power, sums in enumerate(found[1:], 2):
                sums[head, :seen] += (weight.sum(0) ** power).sum(0)
        found[0][head], variance[head] = own.sum(0), own.var(1, correction=0)
    return found, variance.flatten()


def observed_attention(q: Tensor, k: Tensor, v: Tensor, powers: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
    """`causal_attention` of a whole prompt [1,Hq,T,D], then its `column_sums`: `powers` of [Hk,T], and [Hq]."""
    if powers > 1 or not _flashes(q):
        return causal_attention(q, k, v), *column_sums(q, k, powers)
    y, sums, groups = torch.empty_like(q), torch.zeros(k.shape[1:3], device=q.device), q.shape[1] // k.shape[1]
    variance = torch.empty(q.shape[1], device=q.device)
    for g in range(groups):
        y[:, g::groups], total = _flash_attention(q[:, g::groups], k, v)
        own = _flash_sums(q[:, g::groups], k, total)
        sums += own
        variance[g::groups] = own.var(1, correction=0)
    return y, [sums], variance


def _flashes(q: Tensor) -> bool:
    """Whether torch's flash kernel takes q as it is, also with 8 more channels; SDPA would pad or switch kernels."""
    if q.device.type == "cpu":
        return True
    sizes = q.shape[-1] % 8 == 0 and q.shape[-1] <= 248
    return q.dtype != torch.float32 and sizes and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Attention, and the log of each query's sum of exponentials [1,H,T], which SDPA does not return."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_sums(q: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """`column_sums` for one query head per KV head by a second flash attention; `total` [1,H,T]: the first one's logs.

    Key j receives the sum over i >= j of exp(q_i k_j / sqrt(D) - total_i). With the roles swapped this is the sum of
    exponentials of query k_j over keys q_i, causal if both run backwards. Three more channels add -total_i, split into
    parts that the dtype can represent.
    """
    scale, more = q.shape[-1] ** -0.5, k.new_zeros(*k.shape[:3], 8)  # CUDA needs a head dim that is a multiple of 8
    offset, rest = more.clone(), -total.float() / scale
    for channel in range(3):
        more[..., channel], offset[..., channel] = 1, rest
        rest = rest - offset[..., channel].float()
    keys = torch.cat([q, offset], dim=3).flip(2)
    return _flash_attention(torch.cat([k, more], dim=3).flip(2), keys, keys, scale)[1][0].float().exp().flip(1)


def hashed(x: Tensor) -> Tensor:
    """A 32-bit integer hash (xor-shift and multiply, twice) in int64; overflow does not reach the low 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def store(buffer: Tensor, new: Tensor, slot: Tensor, active: Tensor) -> None:
    """Writes one token per row: new [B,Hk,1,D] to buffer [B,Hk,S,D] at slot [B]; inactive rows do not change."""
    rows = torch.arange(slot.shape[0], device=slot.device)
    buffer[rows, :, slot] = torch.where(active[:, None, None], new[:, :, 0], buffer[rows, :, slot])


def span(old: Tensor | None, length: int, capacity: int, device: torch.device, step: int | None = None) -> Tensor:
    """How many leading slots the next step reads, as the first size of an empty tensor; `old` if unchanged.

    A compiled step sees that size as a variable, so one compile serves all lengths; a Python int would be compiled
    for each. Buffers need one slot more than `capacity`, because the compiler specializes a span that covers a whole
    buffer. On CUDA the span is always `capacity`: there the block mask of `flex_prefix` follows the lengths, and one
    graph serves them all.
    """
    size = capacity if device.type == "cuda" else min(-(-length // (step or SPAN)) * (step or SPAN), capacity)
    if old is not None and old.shape[0] == size:
        return old
    new = torch.empty(size, 0, device=device)
    if device.type != "cuda":
        torch._dynamo.maybe_mark_dynamic(new, 0)
    return new
