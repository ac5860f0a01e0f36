"""Slow reference implementation of OmniKV's prefill: one batch row, plain loops over heads and queries.

Source: OpenReview ulCAPXYXfa, Appendix D.10, with the uniform selector of Section 4.2 (Equations 3 and 4). It shares no
code with kv/, and imports none. What the paper leaves open is marked with *.

A prompt of T tokens is processed in consecutive chunks of C tokens; the last one may be shorter. Full layers and filter
layers attend causally to everything. For the chunk of tokens [s, e), a filter layer also chooses min(n, s) of the
positions 0..s-1, which all sparse layers of its segment use. n = max(1, floor(r C + 0.5))*, where r is the ratio of
chosen tokens to chunk size; C is the full chunk size, for a shorter last chunk too*.

Position j scores the sum over the last min(w, e - s) queries of the chunk (w = 16*) of the maximum over all query heads
of that query's attention weight on j. The weights are a softmax, with scale 1 / sqrt(D), over all keys that the query
sees: those at positions 0 to its own. The highest scores are chosen; ties go to the lower position*. All KV heads share
the choice. Query head h uses KV head h // (Hq / Hk).

In a sparse layer, the query at position i of the chunk attends to the chosen positions and to positions s..i*. Where
s <= n, this is everything before it.

All arithmetic is fp64; outputs are fp32.
"""

import math

import torch
from torch import Tensor


def attention_weights(query: Tensor, keys: Tensor) -> Tensor:
    """softmax(K q / sqrt(D)) of one query [D] over n keys [n,D], fp64: [n]. Equal keys get exactly equal weights."""
    logits = (keys.double() * query.double()).sum(1) / math.sqrt(query.shape[0])
    exps = torch.exp(logits - logits.max())
    return exps / exps.sum()


def kv_head_of(head: int, q: Tensor, k: Tensor) -> int:
    """The KV head that a query head uses."""
    if q.shape[0] % k.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads cannot share {k.shape[0]} KV heads evenly")
    return head // (q.shape[0] // k.shape[0])


def attend(q: Tensor, k: Tensor, v: Tensor, head: int, position: int, visible: list[int]) -> Tensor:
    """The output of one query head at one position, over the keys at the visible positions: [D], fp64."""
    kv_head = kv_head_of(head, q, k)
    weights = attention_weights(q[head, position], k[kv_head, visible])
    return (weights[:, None] * v[kv_head, visible].double()).sum(0)


def choose(q: Tensor, k: Tensor, start: int, end: int, count: int, window: int = 16) -> list[int]:
    """The positions before `start` that a filter layer chooses for the chunk [start, end), ascending.

    q is [Hq,T,D], k [Hk,T,D], with the whole prompt; only tokens before `end` are read. `count` is n.
    """
    if not 0 <= start < end <= q.shape[1]:
        raise ValueError(f"[{start}, {end}) is no chunk of {q.shape[1]} tokens")
    if count < 1 or window < 1:
        raise ValueError(f"count = {count} and window = {window} must be at least 1")
    if start <= count:
        return list(range(start))
    scores = [0.0] * start
    for position in range(max(start, end - window), end):
        highest = [0.0] * start  # over the query heads
        for head in range(q.shape[0]):
            keys = k[kv_head_of(head, q, k), : position + 1]
            weights = attention_weights(q[head, position], keys).tolist()
            for j in range(start):
                highest[j] = max(highest[j], weights[j])
        for j in range(start):
            scores[j] += highest[j]
    ranked = sorted(range(start), key=lambda j: (-scores[j], j))
    return sorted(ranked[:count])


def sparse_prompt(q: Tensor, k: Tensor, v: Tensor, chosen: list[list[int]], chunk: int) -> Tensor:
    """A sparse layer's outputs [Hq,T,D]: q [Hq,T,D], k and v [Hk,T,D]; chosen[i] are the positions for chunk i."""
    n_head, length = q.shape[:2]
    if len(chosen) != math.ceil(length / chunk):
        raise ValueError(f"{len(chosen)} choices for {length} tokens in chunks of {chunk}")
    output = torch.zeros(q.shape, dtype=torch.float64)
    for i, positions in enumerate(chosen):
        start, end = i * chunk, min((i + 1) * chunk, length)
        if len(set(positions)) != len(positions) or not all(0 <= j < start for j in positions):
            raise ValueError(f"the choice for chunk {i} must be distinct positions before {start}")
        for position in range(start, end):
            visible = positions + list(range(start, position + 1))
            for head in range(n_head):
                output[head, position] = attend(q, k, v, head, position, visible)
    return output.float()


def full_prompt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact causal attention [Hq,T,D] of a full or filter layer: q [Hq,T,D], k and v [Hk,T,D]."""
    output = torch.zeros(q.shape, dtype=torch.float64)
    for position in range(q.shape[1]):
        for head in range(q.shape[0]):
            output[head, position] = attend(q, k, v, head, position, list(range(position + 1)))
    return output.float()
