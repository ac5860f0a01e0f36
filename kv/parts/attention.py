"""Attention of many tokens of one sequence: of a whole prompt, or of tokens that extend it. Shapes as in kv/base.py."""

import math
from collections.abc import Callable, Iterator
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.parts.ops import LEAST

SCORES = 1 << 24  # attention weights that may exist at once while a prompt is processed
CHECKED = 8  # last queries of a prompt, whose attention to rounded keys and values is compared
MULTIPLIED: set[tuple[torch.dtype, int]] = set()  # dtypes and head dims in which this CPU attends by `products`
BLOCK = 256  # queries of a head in a product there; where a KV head has fewer, torch's kernel computes them
KEYS = 512  # keys in a product
SHIFT = 24  # sigmoid(x - 24) is exp(x - 24), to 3e-4 of it, for x up to 16
EXACT = math.exp(16 - SHIFT)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Exact causal attention of a whole prompt: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D]; never T x T.

    With `window`, each query sees that many tokens, itself included.
    """
    if _multiplies(q) and q.shape[2] > BLOCK and (window is None or window >= q.shape[2]):
        return suffix_attention(q, k, v)
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

    Two flash attentions, to the tokens before the n and among the n, weighted by their sums of exponentials. Where
    `products` computes the first of the two, the n tokens come in blocks.
    """
    (n, length), groups = (q.shape[2], k.shape[2]), q.shape[1] // k.shape[1]
    first = length - n
    if _multiplies(q) and n > BLOCK:
        parts = zip(q.split(BLOCK, 2), range(first + BLOCK, length + BLOCK, BLOCK), strict=True)
        return torch.cat([suffix_attention(rows, k[:, :, :end], v[:, :, :end]) for rows, end in parts], dim=2)
    if first == 0:
        return causal_attention(q, k, v)
    if not _flashes(q):
        return _masked_attention(q, k, v, lambda query, key: key <= query + first)
    rows = q.unflatten(1, (-1, groups))  # [1,Hk,G,n,D]
    keys, values = (x[:, :, first:].expand(groups, -1, -1, -1) for x in (k, v))
    among, own = (x.transpose(0, 1)[None] for x in _flash_attention(rows[0].transpose(0, 1), keys, values))
    earlier = rows.flatten(2, 3), k[:, :, :first], v[:, :, :first]
    many = _multiplies(q) and groups * n >= BLOCK
    before, total = products(*earlier, own.flatten(2)) if many else _flash_attention(*earlier, causal=False)
    before, share = before.unflatten(2, (groups, n)), (own - total.unflatten(2, (groups, n))).sigmoid()[..., None]
    y = torch.empty_like(rows)
    for g in range(groups):  # one at a time: the terms are in fp32
        y[:, :, g] = share[:, :, g] * among[:, :, g] + (1 - share[:, :, g]) * before[:, :, g]
    return y.flatten(1, 2)


def _multiplies(q: Tensor) -> bool:
    return q.device.type == "cpu" and (q.dtype, q.shape[3]) in MULTIPLIED


def can_multiply() -> bool:
    """Whether this CPU's oneDNN has the products of `products`."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def products(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Attention, and the log of each query's sum of exponentials, by oneDNN's products: q [1,Hk,R,D], k and v
    [1,Hk,N,D], own [1,Hk,R] -> [1,Hk,R,D] and [1,Hk,R] fp32.

    torch's kernel multiplies bf16 by MKL, which on some CPUs widens to fp32 and takes twice as long. oneDNN can apply a
    sigmoid to a product's fp32 sums, and far below 0 a sigmoid is an exponential. To get there, logits are lowered by
    SHIFT and by `own`, the logs of each query's sums over other tokens, or more where a block has much larger ones.
    """
    results = [_products(*head) for head in zip(q[0], k[0], v[0], own[0], strict=True)]
    y, total = (torch.stack(x)[None] for x in zip(*results, strict=True))
    return y, total


def _products(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """`products` of one KV head: q [R,D], k and v [N,D], own [R] -> [R,D], [R]"""
    scale, shift = q.shape[1] ** -0.5, own + SHIFT
    scaled, large = q * scale, slice(0)
    if math.frexp(scale)[0] != 0.5:  # no power of two: queries are rounded once more, but not in the largest channels
        large = k.abs().amax(0).topk(q.shape[1] // 4).indices
    lost = (q.float() * scale - scaled)[:, large].to(q.dtype)
    rows = torch.cat([scaled, lost, _parts(-shift, q)], dim=1)
    keys = torch.cat([k, k[:, large], k.new_ones(len(k), 8)], dim=1)
    sums, total = torch.zeros(q.shape), torch.zeros(len(q))
    for part, values in zip(keys.split(KEYS), v.split(KEYS), strict=True):
        weight, added = _sigmoids(rows, part)
        if not (added < EXACT).all():
            change = ((rows @ part.t()).amax(-1).float() + SHIFT).clamp(min=0)
            shift, sums, total = shift + change, sums * (-change).exp()[:, None], total * (-change).exp()
            rows[:, -8:] = _parts(-shift, q)
            weight, added = _sigmoids(rows, part)
        sums += weight @ values
        total += added
    return sums / total.clamp(min=LEAST)[:, None], total.log() + shift


def _sigmoids(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The sigmoids of the products of rows [R,C] and keys [N,C], and their sums: [R,N], [R]"""
    weight = torch.ops.mkldnn._linear_pointwise(rows, keys, None, "sigmoid", [], "")
    return weight, weight.sum(-1)


def _parts(x: Tensor, like: Tensor) -> Tensor:
    """x [...] fp32 as a sum of numbers that the dtype of `like` can represent: [...,8]"""
    parts = like.new_zeros(*x.shape, 8)  # CUDA's flash kernel needs a head dim that is a multiple of 8
    for channel in range(3):
        parts[..., channel] = x
        x = x - parts[..., channel].float()
    return parts


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


def error(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> float:
    """How much rounding changes attention: the relative error of the last queries' outputs.

    q [1,Hq,T,D], k and v [1,Hk,T,D] of a prompt, or of a chunk; keys and values [Hk,N,D] are what is stored of its
    tokens at position [Hk,N], below 0: none. Both attend to these tokens alone.
    """
    n, sums = min(q.shape[2], CHECKED), q.new_zeros(2, dtype=torch.float32)  # of squares: differences, outputs
    newest = torch.arange(q.shape[2] - n, q.shape[2], device=q.device)
    rows = q[0, :, -n:].unflatten(0, (len(keys), -1)).float()  # [Hk,G,n,D]
    for head, at in enumerate(position.long()):  # one at a time: fp32 copies of all would be a prompt's largest
        seen = (at >= 0) & (at <= newest[:, None])
        stored, exact = (
            F.scaled_dot_product_attention(rows[head], *(x.float().expand(len(rows[head]), -1, -1) for x in kv), seen)
            for kv in ((keys[head], values[head]), (k[0, head, at.clamp(min=0)], v[0, head, at.clamp(min=0)]))
        )
        sums += torch.stack([(stored - exact).square().sum(), exact.square().sum()])
    return float((sums[0] / sums[1]).sqrt().nan_to_num(0.0, torch.inf))  # an output of 0 or NaN says nothing


def _last_attention(q: Tensor, k: Tensor, n: int) -> Iterator[Tensor]:
    """The attention of the last n queries to each token, one KV head at a time: [G,n,T] fp32.

    q [Hq,N,D] are the last N of T queries, k [Hk,T,D].
    """
    length = k.shape[1]
    later = torch.arange(length, device=q.device) > torch.arange(length - n, length, device=q.device)[:, None]
    for rows, keys in zip(q[:, q.shape[1] - n :].unflatten(0, (k.shape[0], -1)), k, strict=True):
        logits = rows.float() @ keys.float().mT * q.shape[-1] ** -0.5
        yield logits.masked_fill_(later, -torch.inf).softmax(-1)


def window_scores(q: Tensor, k: Tensor, window: int) -> Tensor:
    """The attention of the last `window` queries to earlier tokens, summed over the window.

    q [1,Hq,T,D], k [1,Hk,T,D] -> [Hk,G,T-window] fp32.
    """
    end = k.shape[2] - window
    return torch.stack([weight[..., :end].sum(1) for weight in _last_attention(q[0], k[0], window)])


def highest_attention(q: Tensor, k: Tensor, n: int) -> Tensor:
    """The attention of the last n queries to each token, the maximum over all heads: [n,T] fp32.

    q [Hq,N,D] are the last N of T queries, k [Hk,T,D].
    """
    return reduce(torch.maximum, (weight.amax(0) for weight in _last_attention(q, k, n)))


def most_attention(q: Tensor, k: Tensor) -> Tensor:
    """The highest attention that tokens receive from any of the last n queries of a group.

    q [1,Hq,n,D], k [1,Hk,T,D] -> [Hk,T] fp32. A block of queries at a time, never n x T.
    """
    most = torch.zeros(k.shape[1:3], device=k.device)
    for head, seen, weight in _blocks(q, k):
        most[head, :seen] = torch.maximum(most[head, :seen], weight.amax((0, 1)))
    return most


def _blocks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The attention of the last n queries, q [1,Hq,n,D] to k [1,Hk,T,D], a block of queries at a time: the KV head, how
    many tokens the block sees, and its group's attention [G,block,seen] fp32."""
    length, groups, n = k.shape[2], q.shape[1] // k.shape[1], q.shape[2]
    block = max(1, min(n, SCORES // (groups * length)))
    for start in range(0, n, block):
        stop = min(start + block, n)
        seen = length - n + stop
        for head, weight in enumerate(_last_attention(q[0, :, :stop], k[0, :, :seen], stop - start)):
            yield head, seen, weight


def column_sums(q: Tensor, k: Tensor, powers: int = 1) -> tuple[list[Tensor], Tensor]:
    """The attention that tokens receive from the last n queries, fp32: q [1,Hq,n,D], k [1,Hk,T,D] -> `powers` of
    [Hk,T], and [Hq].

    The first are the sums over all queries of the group's attention to the power of 1, 2, ... (D2O, Equation 6); the
    last is the variance, over the tokens, of each query head's own sums (Equation 4). A block of queries at a time,
    never T x T.
    """
    (heads, length), groups = k.shape[1:3], q.shape[1] // k.shape[1]
    totals = [torch.zeros(heads, length, device=q.device) for _ in range(powers)]
    own = torch.zeros(heads, groups, length, device=q.device)  # each query head's sums
    for head, seen, weight in _blocks(q, k):
        own[head, :, :seen] += weight.sum(1)
        for power, sums in enumerate(totals[1:], 2):
            sums[head, :seen] += (weight.sum(0) ** power).sum(0)
    totals[0] = own.sum(1)
    return totals, own.var(2, correction=0).flatten()


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
    exponentials of query k_j over keys q_i, causal if both run backwards. More channels add -total_i.
    """
    scale, ones = q.shape[-1] ** -0.5, k.new_ones(*k.shape[:3], 8)
    keys = torch.cat([q, _parts(-total.float() / scale, q)], dim=3).flip(2)
    return _flash_attention(torch.cat([k, ones], dim=3).flip(2), keys, keys, scale)[1][0].float().exp().flip(1)
