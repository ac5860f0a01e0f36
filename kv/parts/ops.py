"""What steps compute: tensor primitives of the methods, the model and sampling. Shapes as in kv/base.py.

kv/parts/inductor.py is how a compiled step is made fast, which a method's author need not read: where it says so
(`fuses`, `flexes`), a compiled step attends with another kernel, which gives the same values.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv.method import Plan
from kv.parts import inductor

# What methods need of it: the sizes of a step, which may change, and where a compiled step stores a value.
from kv.parts.inductor import covering, min_scores, realized, stored, symbol, value  # noqa: F401

BLOCK = 4096  # tokens whose pages' bounds are computed at once
LEAST = 1e-30  # what a sum that may be zero is divided by
REACH = "where the bounds of a page lie between its mean key, 0, and its extremes, 1 (the paper's)"  # an option


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
    """R queries of each group: q [B,Hk,R,D], k and v [B,Hk,S,D], mask broadcastable to [B,Hk,R,S] -> [B,Hk,R,D]."""
    if inductor.fuses(q):
        return attend_stores([group_logits(q, k, ~mask)], [lambda weight: weighted_sum(weight, v)]).to(q.dtype)
    queries = q.expand(-1, -1, 2, -1) if inductor.doubles(q) else q
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)[:, :, : q.shape[2]]


def attend_prefix(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> Tensor:
    """Attention to each row's first slots, length [B] for the first of its n queries, one more for each later one.

    q [B,Hq,n,D], k and v [B,Hk,S,D] -> [B,Hq,n,D]; K and V are read once for all queries of a group.
    """
    if inductor.flexes(q, k):
        return inductor.flex_prefix(q, k, v, length)
    n, slot = q.shape[2], torch.arange(k.shape[2], device=q.device)
    if n == 1:
        return attend(q, k, v, slot < length[:, None])
    mask = slot < following(length, n)[..., None]  # [B,n,S]
    rows = q.unflatten(1, (k.shape[1], -1))  # [B,Hk,G,n,D]
    mask = mask[:, None].repeat(1, 1, rows.shape[2], 1)  # [B,1,G n,S]
    y = attend_groups(rows.flatten(2, 3), k, v, mask)
    return y.unflatten(2, (-1, n)).flatten(1, 2)


def attend_used(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, used: Tensor) -> Tensor:
    """`attend` with mask [B,Hk,S], False for slots from used [B] on: on CUDA their blocks are not read."""
    return inductor.flex_used(q, k, v, mask, used) if inductor.flexes(q, k) else attend(q, k, v, mask)


def attend_regions(q: Tensor, k: Tensor, v: Tensor, first: Tensor, length: Tensor, most: Tensor) -> Tensor:
    """`attend` to each head's own region, the `length` slots from `first` on, [B,Hk]: q [B,Hq,1,D] -> [B,Hq,1,D].

    k and v [B,Hk,S,D], or [B,1,S,D] if the regions of all heads are in the same slots. most: a symbol of the longest
    length, which a CPU reads of every region.
    """
    k, v = (x.expand(-1, first.shape[1], -1, -1) for x in (k, v))
    if inductor.flexes(q, k):
        return inductor.flex_regions(q, k, v, first, length)
    offset = torch.arange(value(most), device=q.device)
    index = (first[..., None] + offset).clamp(max=k.shape[2] - 1)
    return attend_rows(q, k, v, index, offset < length[..., None])


def attend_rows(q: Tensor, k: Tensor, v: Tensor, index: Tensor, mask: Tensor, read: Callable | None = None) -> Tensor:
    """`attend` to chosen slots only: index and mask [B,Hk,N], shared by the queries of a group, or [B,Hq,N].

    `read(k, v, slots)` decodes what is gathered, k and v [B,Hk,n,...], if slots do not store plain vectors.
    """
    slots = index.unflatten(1, (k.shape[1], -1)).flatten(2)  # the choices of each KV head, concatenated
    k, v = gather(k, slots), gather(v, slots)
    kv = (x.unflatten(2, (-1, index.shape[2])).flatten(1, 2) for x in ((k, v) if read is None else read(k, v, slots)))
    keys, values = (inductor.stored(x) for x in kv)  # else the sums would gather number by number
    return attend_used(q, keys, values, mask, torch.full(q.shape[:1], keys.shape[2], device=q.device))


def attend_pages(
    q: Tensor, k: Tensor, v: Tensor, best: Tensor, page: int, last: Tensor, read: Callable | None = None
) -> Tensor:
    """`attend_rows` to the tokens of pages `best` [B,Hk,N]; slots after each row's `last` [B] hold no token."""
    index = (best[..., None] * page + torch.arange(page, device=q.device)).flatten(2)
    return attend_rows(q, k, v, index.clamp(max=k.shape[2] - 1), index <= last[:, None, None], read)


def least(a: Tensor | int, b: Tensor | int) -> Tensor | int:
    """The smaller of two sizes, of which either may differ from row to row."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.as_tensor(b).clamp(max=a)


def column(size: Tensor | int) -> Tensor | int:
    """Rows' sizes [B] as [B,1], or the size that all share."""
    return size[:, None] if isinstance(size, Tensor) else size


def following(pos: Tensor, n: int) -> Tensor:
    """The n positions from pos [B] on: [B,n]."""
    return pos[:, None] + torch.arange(n, device=pos.device)


def newest_pages(k: Tensor, page: int, reach: float, first: Tensor, n: int, ring: int = 0) -> tuple[Tensor, Tensor]:
    """The pages that hold each row's n newest slots, which begin at `first` [B]: k [B,Hk,S,D].

    Returns their indices [B,P], and their bounds [B,Hk,P,2,D]. A row with fewer than P such pages repeats its
    first one. If k is a ring of the newest slots, `ring` is its size.
    """
    index = following(first // page, (n + page - 2) // page + 1)
    last = (first + n - 1)[:, None]
    index = torch.where(index <= last // page, index, index[:, :1])
    slot = (index[..., None] * page + torch.arange(page, device=k.device)).flatten(1)  # [B,P page]
    slot = inductor.realized(slot)  # else the gather and what follows would compute it for every channel
    at = slot % ring if ring else slot.clamp(max=k.shape[2] - 1)
    keys = gather(k, at[:, None].expand(-1, k.shape[1], -1)).unflatten(2, (-1, page))
    empty, count = (slot > last).unflatten(1, (-1, page)), (last + 1 - index * page).clamp(max=page)
    return index, bounds(keys, empty[:, None, ..., None], count[:, None, :, None], reach)


def newest_first(scores: Tensor, newest: Tensor) -> Tensor:
    """Scores of pages [B,Hk,P], but infinite for each row's `newest` [B]."""
    page = torch.arange(scores.shape[2], device=scores.device)
    return scores.masked_fill((page == newest[:, None])[:, None], torch.inf)


def page_bounds(k: Tensor, page: int, reach: float) -> Tensor:
    """The bounds of every page of `page` tokens: k [Hk,n,D] -> [Hk,pages,2,D]."""
    keys = F.pad(k, (0, 0, 0, -k.shape[1] % page)).unflatten(1, (-1, page))
    slot = torch.arange(keys.shape[1] * page, device=k.device).view(-1, page, 1)
    empty, count = slot >= k.shape[1], (k.shape[1] - slot[:, 0]).clamp(max=page)
    pages = max(1, BLOCK // page)  # at once: `bounds` copies the keys four times
    parts = zip(keys.split(pages, dim=1), empty.split(pages), count.split(pages), strict=True)
    return torch.cat([bounds(*part, reach) for part in parts], dim=1)


def bounds(keys: Tensor, empty: Tensor, count: Tensor, reach: float) -> Tensor:
    """The minimum and maximum of each channel of pages, at the share `reach` of their way from the page's mean key.

    keys [...,page,D], of which `count` [...,1] are not empty [...,page,1] -> [...,2,D]. One expression computes both,
    so that one kernel does: a minimum is the negative of the negatives' maximum.
    """
    sign = torch.arange(-1, 2, 2, device=keys.device, dtype=keys.dtype)[:, None]  # [2,1]
    extremes = sign * (sign * keys[..., None, :]).masked_fill(empty[..., None], -torch.inf).amax(-3)
    if reach == 1:
        return extremes
    both = keys[..., None, :].expand(*keys.shape[:-1], 2, -1)
    rest = both.masked_fill(empty[..., None], 0).sum(-3, dtype=torch.float32) * ((1 - reach) / count[..., None])
    return (reach * extremes.float() + rest).to(keys.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [..., D] in Hugging Face's channel order: channel i pairs with i + D/2. cos, sin: [..., D/2]."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rerotate(x: Tensor, shift: Tensor, inv_freq: Tensor) -> Tensor:
    """Moves keys (or queries), RoPE applied, to `shift` positions later: rotations add.

    x [B,H,N,D], shift [B,H,N] or broadcastable to it, inv_freq [B,D/2] in radians per position.
    """
    angle = shift[..., None].float() * inv_freq[:, None, None]
    return rotate(x, angle.cos(), angle.sin())


def inv_freq(plan: Plan) -> Tensor:
    """RoPE's frequencies of each row, for `rerotate`: [B,D/2], the model's own tensor, which follows each prompt.

    Without a model, they follow from rope_theta.
    """
    if plan.inv_freq is not None:
        return plan.inv_freq
    pairs = plan.head_dim // 2
    return torch.tensor([[plan.rope_theta ** (-i / pairs) for i in range(pairs)]] * plan.batch, device=plan.device)


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


def top(scores: Tensor, k: int, ordered: bool = False, most: int = 0, count: Tensor | int | None = None) -> Tensor:
    """Indices [..., k] of the k largest scores [..., N] fp32, best first if `ordered`; ties go to the lowest index.

    Zeros of both signs are equal, and NaN is the largest, as in torch.topk. A caller that names the `most` scores there
    may be lets tiles be formed, and ensures that N is at least inductor.min_scores(most, k). With `count` [B], row b
    takes only as many, and its other indices are N.
    """
    if isinstance(count, Tensor):
        best, taken = top(scores, k, True, most), torch.arange(k, device=scores.device)
        return torch.where(taken < count.view(-1, *[1] * (scores.dim() - 1)), best, scores.shape[-1])
    index = torch.arange(scores.shape[-1], device=scores.device)
    size = scores.view(torch.int32) & 0x7FFFFFFF  # integers that compare like the absolute values
    order = torch.where(scores < 0, -size, size)
    if not inductor.tiles(scores, k, most):
        if scores.device.type == "cuda" and scores.shape[-1] > inductor.RANKED:
            index = order.topk(k, sorted=False).indices  # there torch takes the first of equal ones
            best = _ranked(order.gather(-1, index), index)
            return index.gather(-1, inductor.best(best, k, True)) if ordered else index
        return inductor.best(_ranked(order, index), k, ordered)
    order = inductor.stored(order)
    index = inductor.tile_winners(_ranked(order, index), k)
    return index.gather(-1, inductor.best(_ranked(order.gather(-1, index), index), k, ordered))


def _ranked(order: Tensor, index: Tensor) -> Tensor:
    """One integer for each score: larger for a larger `order`, then for a lower index."""
    return (order.long() << 32) - index


def dots(q: Tensor, k: Tensor, scale: float = 1) -> Tensor:
    """`scale` times the dot products of q [B,Hk,G,D] and k [B,Hk,N,D] -> [B,Hk,G,N] fp32; a group reads a key once."""
    if torch.compiler.is_compiling() and inductor.multiplies(k):
        return inductor.products(q, k) * scale
    q, k = q.float() * scale, k.float()
    return inductor.dots(q, k) if torch.compiler.is_compiling() else q @ k.mT


def weights(q: Tensor, k: Tensor, empty: Tensor) -> Tensor:
    """Attention weights [B,Hk,G,N] fp32 of q [B,Hq,1,D] over k [B,Hk,N,D]; slots that are `empty` (broadcast) get 0."""
    return softmax(group_logits(grouped(q, k.shape[1]), k, empty))


def group_logits(q: Tensor, k: Tensor, empty: Tensor) -> Tensor:
    """Logits [B,Hk,G,N] fp32 of queries that are grouped already, q [B,Hk,G,D]; `empty` slots get -inf."""
    return dots(q, k, q.shape[-1] ** -0.5) + barred(empty)


def barred(empty: Tensor) -> Tensor:
    """What excludes `empty` slots when it is added to logits: -inf or 0, compared once for all heads that share it."""
    return inductor.stored(torch.where(empty, -torch.inf, 0.0))


def weighted_sum(weight: Tensor, v: Tensor) -> Tensor:
    """Sums of v [B,Hk,N,D] weighted by [B,Hk,G,N] -> [B,Hk,G,D] fp32; each vector is read once per group."""
    return inductor.weighted_sum(weight, v) if torch.compiler.is_compiling() else (weight.to(v.dtype) @ v).float()


def softmax(logits: Tensor) -> Tensor:
    """Softmax over the last dim; one compile serves any size of it."""
    if inductor.cuts(logits):
        return inductor.softmax(logits)
    weight = (logits - logits.amax(-1, keepdim=True)).exp()
    return weight * (1 / inductor.total(weight))  # one division, not one for each weight


def attend_stores(logits: list[Tensor], sums: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Attention to tokens in several stores, without joining their logits or values -> [B,Hk,G,D] fp32.

    Of each store: the logits [B,Hk,G,n], and a function from weights [B,Hk,G,n] to weighted sums [B,Hk,G,D] of values.
    """
    most = torch.stack([x.amax(-1, keepdim=True) for x in logits]).amax(0)
    weight = [(x - most).exp() for x in logits]
    return sum(add(x) for add, x in zip(sums, weight, strict=True)) / sum(map(inductor.total, weight))


def sparq_weights(rows: Tensor, channel: Tensor, keys: Tensor, empty: Tensor) -> Tensor:
    """Each query's attention to N keys, estimated from R of their channels: [B,Hk,G,N] fp32.

    rows [B,Hk,G,D] are the queries; channel [B,Hk,R] picks channels; keys [B,Hk,R,N] are those channels of the keys,
    read once per group; `empty` [B,N] keys get no weight. SparQ's temperature (arXiv 2312.04985) makes up for the
    channels left out. A query of zeros attends to all keys alike.
    """
    part = inductor.stored(rows.gather(3, channel[:, :, None].expand(-1, -1, rows.shape[2], -1)).float())  # [B,Hk,G,R]
    share = part.abs().sum(3, keepdim=True) / rows.abs().sum(3, keepdim=True).clamp(min=LEAST)
    temperature = (rows.shape[3] * share).sqrt().clamp(min=LEAST)
    keys = inductor.stored(keys)  # else the sums would gather number by number
    return softmax(weighted_sum(part, keys.float()) / temperature + barred(empty[:, None, None]))


def hashed(x: Tensor) -> Tensor:
    """A 32-bit integer hash (xor-shift and multiply, twice) in int64; overflow does not reach the low 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def salt(plan: Plan) -> Tensor:
    """What `chance` takes of a layer, [Hk]; a tensor, because layers with different integers compile apart."""
    head = plan.ranks.rank * plan.n_kv_head + torch.arange(plan.n_kv_head)
    return hashed(head + 4096 * plan.index).to(plan.device)


def chance(position: Tensor, salt: Tensor) -> Tensor:
    """A pseudorandom number in [0, 1) per token at position [...,Hk,n], fixed by layer, KV head and position."""
    return hashed(hashed(position + salt[:, None])) / 2.0**32


def store(buffer: Tensor, new: Tensor, slot: Tensor, active: Tensor) -> None:
    """Writes n tokens per row: new [B,Hk,n,D] to buffer [B,Hk,S,D] at slot [B,n]; an inactive row's to its last slot.

    That slot holds no token. A row's old values are not written back, because reading them would be another kernel.
    """
    rows, last = torch.arange(slot.shape[0], device=slot.device)[:, None], buffer.shape[2] - 1
    buffer[rows, :, torch.where(active[:, None], slot, last)] = new.transpose(1, 2)


def overwrite(buffer: Tensor, new: Tensor, slot: Tensor, active: Tensor) -> None:
    """`store` where every slot may hold a token: an inactive row's old values are written back."""
    rows, active = torch.arange(slot.shape[0], device=slot.device)[:, None], active[:, None, None, None]
    buffer[rows, :, slot] = torch.where(active, new.transpose(1, 2), buffer[rows, :, slot])


def first_rows(module: nn.Module, x: Tensor, rows: int) -> Tensor:
    """Only the first `rows` output channels of a linear module of any kind."""
    if hasattr(module, "first"):
        return module.first(x, rows)
    return F.linear(x, module.weight[:rows], None if module.bias is None else module.bias[:rows])
