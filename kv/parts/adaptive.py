"""heads=adaptive, heads=model: KV heads share a budget by their scores, those of a layer or of all layers.

Where H equal heads would keep n tokens each, every head keeps its best alpha n tokens, those that always stay included,
and the rest of the H n go to the highest scores of all heads: of a layer's (Ada-KV, Feng et al., arXiv 2407.11550), or
of all layers' (KVzip, arXiv 2505.23416). Memory: that of equal heads. Each head has a region of the slots that the
heads of a row share: for what it keeps of the prompt, then for each generated token. Traffic: on a GPU that of equal
heads; a CPU copies what a step reads, of each head of a layer as much as of the one that keeps the most. Processes that
share a model share out the budget of their own heads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal
from weakref import proxy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kv.base import Held, Views
from kv.method import Method, Plan, option
from kv.parts import attention, ops
from kv.parts.buffers import Buffers


class HeadSlots(Buffers):
    """Slots [B,1,S,D] that `heads` KV heads share, of which each keeps `kept` tokens of a prompt on average."""

    def __init__(self, plan: Plan, heads: int, kept: int):
        super().__init__(plan)
        slots = heads * (kept + plan.room) + 1  # one past the end: ops.store
        for name in ("k", "v"):
            self.allocate(name, 1, slots, plan.head_dim)
        self.allocate("position", slots, dtype=torch.int32, fill=-1)  # -1: no token, or one that a step stored


class Adaptive:
    """Put before a class that stands on `Scored` (kv/parts/scored.py): its heads keep different numbers of tokens.

    The layers of a group share their budget. If there are several, their `keep` of a prompt that exceeds it must run in
    `finish`, and `score` may use of its arguments only T. What supposes that all heads keep as many tokens, as `every`
    and `bits` do, does not work here.
    """

    def __init__(self, *args, alpha: float, layers: int = 1, group: list | None = None, **options):
        """layers: of the group; group: those that were built before."""
        self.alpha, self.layers, self.group = alpha, layers, [] if group is None else group
        self.below = len(self.group)  # how many of them come first
        super().__init__(*args, **options)
        self.group.append(proxy(self))  # a cycle of references would keep the memory

    def allocate_row(self, slots: int) -> None:
        heads = self.layers * self.plan.n_kv_head
        shared = self.group[0].shared if self.below else HeadSlots(self.plan, heads, self.kept)
        self.share("shared", shared, first=not self.below)
        self.slots = min(self.plan.max_prompt, heads * self.kept) + self.plan.room  # the most of a head
        self.read_slots = ops.symbol(self.slots, self.plan.device)
        for name in ("dropped", "size"):  # tokens of each head that are gone, and those of the prompt that it can hold
            self.allocate_state(name, self.plan.n_kv_head)
        self.allocate("first", self.plan.n_kv_head, dtype=torch.int64)  # where its region begins

    # A prompt

    def choose(self, row: int, q: Tensor | None, tokens: Held, end: int, prompt: int) -> tuple[Tensor, Tensor]:
        """Heads [M], ascending, and the indices of their tokens, ascending by head [M]."""
        if tokens.k.shape[1] <= self.kept_of(prompt):
            head, index = self.each_head(torch.arange(tokens.k.shape[1], device=tokens.k.device))
            return head.expand_as(index).flatten(), index.flatten()
        if self.below == 0:
            ranks = torch.cat([layer.ranked(row, q, tokens, end, prompt) for layer in self.group])
            self.shared.chosen = self.share_out(ranks, prompt)
        return self.shared.chosen.pop(0)

    def share_out(self, scores: Tensor, prompt: int) -> list[tuple[Tensor, Tensor]]:
        """The best of scores [R,N] of all heads of the group: what each layer `choose`s."""
        kept, heads = self.kept_of(prompt), self.plan.n_kv_head
        scores = scores.scatter(1, ops.top(scores, int(self.alpha * kept)), torch.inf)
        cell = ops.top(scores.flatten(), kept * len(scores)).sort().values
        head, index = cell // scores.shape[1], cell % scores.shape[1]
        sizes = [len(cell)] if self.layers == 1 else torch.bincount(head // heads, minlength=self.layers).tolist()
        return [*zip((head % heads).split(sizes), index.split(sizes), strict=True)]

    def hold_best(self, row: int, head: Tensor, index: Tensor, tokens: Held, end: int) -> None:
        heads, place = (torch.arange(n, device=head.device) for n in (self.plan.n_kv_head, len(head)))
        kept = (head[:, None] == heads).sum(0)
        fits = min(self.whole, self.kept_of(self.whole))  # what a head holds before any token is gone
        self.gone[row] = max(0, tokens.k.shape[1] - fits)
        self.dropped[row], self.size[row] = end - kept, kept if self.gone[row] else fits
        self.lay_out(row)
        r, slot = self.shared, self.first[row, head] + place - (kept.cumsum(0) - kept)[head]
        r.position[row, ops.following(self.first[row] + self.size[row], self.plan.room)] = -1
        at = head * len(tokens.k) // len(heads), index
        r.k[row, 0, slot], r.v[row, 0, slot] = tokens.k[at], tokens.v[at]
        r.position[row, slot] = tokens.position[at].int()

    def lay_out(self, row: int) -> None:
        """Places the regions of a row's heads by their `size`, after those of the layers below."""
        slots = self.size[row] + self.plan.room
        self.first[row] = slots.cumsum(0) - slots
        if self.below:
            below = self.group[self.below - 1]
            self.first[row] += below.first[row, -1] + below.size[row, -1] + self.plan.room

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """As if each head were a layer, but for the choice."""
        if not self.gone.get(row):  # all heads hold all
            return super().prefill_next(row, q, k, v, pos)
        heads, end = self.heads(row, pos), pos + k.shape[2]
        new = (x.chunk(len(heads), dim=1) for x in (q, self.copied(k), self.copied(v)))
        held, ys, scores = [], [], []
        for head, (own, *qkv) in enumerate(zip(heads, *new, strict=True)):
            both, y = self.attend_with(own, *qkv, pos)
            held.append(both)
            ys.append(y)
            scores.append(self.ranked(row, qkv[0], both, end, self.whole).expand(len(heads), -1)[head])
        [best] = self.share_out(padded(scores, padding_value=-torch.inf), self.whole)
        self.hold_best(row, *best, side_by_side(held), end)
        return torch.cat(ys, dim=1)

    # A step, and a text that extends a row

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        return ops.attend_regions(q, self.shared.k, self.shared.v, self.first, self.slot(pos) + 1, self.read_slots)

    def slots_to_read(self, length: int, new: int) -> int:
        """Of a head; on CUDA the mean, for `step_bytes`."""
        kept = self.kept if self.size.is_cuda else int(self.size.max()) or self.kept
        return min(length, self.slots, kept + new)

    def slot(self, pos: Tensor) -> Tensor:
        """Where in the regions of their heads the tokens at pos [B] are, [B,Hk]."""
        return (pos[:, None] - self.dropped).clamp(min=0)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        slot = ((self.first + self.slot(pos))[..., None] + torch.arange(k.shape[2], device=k.device)).flatten(1)
        for buffer, new in ((self.shared.k, k), (self.shared.v, v)):
            ops.store(buffer, self.copied(new).flatten(1, 2)[:, None], slot, active)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        r, slot = self.shared, ops.following(self.first[row] + pos - self.dropped[row], k.shape[2])
        r.k[row, 0, slot], r.v[row, 0, slot] = self.copied(k)[0], self.copied(v)[0]
        r.position[row, slot] = torch.arange(pos, pos + k.shape[2], device=k.device).int()

    def hold_more(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        self.append(row, k, v, pos)

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        self.append(row, k, v, pos)
        heads = self.heads(row, pos + k.shape[2])
        groups = zip(q.chunk(len(heads), dim=1), heads, strict=True)
        return torch.cat([attention.suffix_attention(q, held.k[None], held.v[None]) for q, held in groups], dim=1)

    # What a row holds

    def regions_of(self, row: int, length: int) -> list[slice]:
        """The slots that each head of a row of `length` tokens fills."""
        first, last = self.first[row], self.first[row] + length - self.dropped[row]
        return [slice(*each) for each in zip(first.tolist(), last.tolist(), strict=True)]

    def heads(self, row: int, length: int) -> list[Held]:
        """What each head holds of a row of `length` tokens."""
        r, held = self.shared, []
        for region, gone in zip(self.regions_of(row, length), self.dropped[row], strict=True):
            known = r.position[row, region]
            position = torch.where(known >= 0, known, torch.arange(len(known), device=known.device) + gone)
            held.append(Held(r.k[row, :, region], r.v[row, :, region], position[None]))
        return held

    def held(self, row: int, length: int) -> Held:
        return side_by_side(self.heads(row, length))

    def views(self, row: int, length: int) -> Views:
        for name in ("dropped", "size"):
            yield name, getattr(self, name)[row]
        self.lay_out(row)  # of a row that is restored
        if int(self.first[row, -1] + self.size[row, -1]) + self.plan.room >= self.shared.k.shape[2]:
            raise ValueError("the saved size does not fit this cache")
        for head, region in enumerate(self.regions_of(row, length)):
            yield f"k{head}", self.shared.k[row, 0, region]
            yield f"v{head}", self.shared.v[row, 0, region]
            yield f"position{head}", self.shared.position[row, region]


padded = partial(pad_sequence, batch_first=True, padding_side="left")


def side_by_side(heads: list[Held]) -> Held:
    """What heads [1,n,...] hold, padded in front to the longest of them."""
    k, v, position = ([x[0] for x in each] for each in zip(*heads, strict=True))
    return Held(padded(k), padded(v), padded(position, padding_value=-1))


ALPHA = {"adaptive": 0.2, "model": 0.0}


@dataclass(frozen=True)
class HeadBudgets(Method):
    """The options of a method whose layers stand on `Scored`."""

    heads: Literal["equal", "adaptive"] = option(
        "equal", "adaptive: the KV heads of a layer share its budget by their scores (Ada-KV)"
    )
    alpha: float | None = option(
        None, "what each head has at least, of an equal budget; auto: 0.2, with heads=model 0", min=0, max=1
    )

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The budget, and every generated token."""
        return super().paper_bytes(plan, budget + plan.room)

    def layer_type(self, layer: type, plan: Plan) -> type | partial:
        """`layer`, or one whose heads share a budget."""
        if self.heads == "equal":
            if self.alpha is not None:
                raise ValueError("alpha divides a budget that heads share: name heads=adaptive too")
            return layer
        if self.every:
            raise ValueError(f"heads={self.heads} shares out a prompt's budget once: leave out every")
        group = {"layers": plan.n_layer, "group": []} if self.heads == "model" else {}
        alpha = ALPHA[self.heads] if self.alpha is None else self.alpha
        return partial(type(f"Adaptive{layer.__name__}", (Adaptive, layer), {}), alpha=alpha, **group)
