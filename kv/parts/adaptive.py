"""heads=adaptive: the KV heads of a layer share its budget by their scores (Ada-KV, Feng et al., arXiv 2407.11550).

Where H equal heads would keep n tokens each, every head keeps its best alpha n tokens, those that always stay included,
and the rest of the layer's H n go to the highest scores of all heads. Memory: that of equal heads. A row has H n cells,
in which the tokens of one head follow those of another, and then H cells for each generated token. Traffic: that of
equal heads. A step reads the cells once for the queries of all heads, and each query masks the cells of other heads.
That takes H times the products of equal heads: few beside the bytes on a GPU, but on a CPU attention takes several
times as long. Processes that share a model share out the budget of their own heads.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kv.base import Held
from kv.method import Method, Plan, option
from kv.parts import attention, ops


class Adaptive:
    """Put before a class that stands on `Scored` (kv/parts/scored.py): its heads keep different numbers of tokens.

    Slot s of head h is cell s H + h of a row. k and v [B,H,S,D] and owner [B,H,S] are views of memory in the order of
    cells, [B,S,H,...].
    """

    more_bytes = 1  # the owner

    def __init__(self, *args, alpha: float, **options):
        super().__init__(*args, **options)
        self.alpha = alpha

    def allocate_slots(self, slots: int, width: int | None = None) -> None:
        super().allocate_slots(slots, width)
        self.allocate("owner", self.plan.n_kv_head, slots + 1, dtype=torch.uint8)  # the head whose token a cell holds
        self.contents["owner"] = 1, 1
        for name in ("k", "v", "owner"):
            x = getattr(self, name)
            setattr(self, name, x.view(x.shape[0], x.shape[2], x.shape[1], *x.shape[3:]).transpose(1, 2))
        self.disown(slice(None))

    def reset(self, row: int) -> None:
        super().reset(row)
        self.disown(row)

    def disown(self, row: int | slice) -> None:
        """Gives each head as many cells as the others, as those of generated tokens are."""
        self.owner[row] = torch.arange(self.plan.n_kv_head, device=self.owner.device)[:, None]

    def best(self, scores: Tensor, kept: int) -> tuple[Tensor, Tensor]:
        surest = ops.top(scores, int(self.alpha * kept))
        scores = scores.scatter(1, surest, torch.inf)
        cell = ops.top(scores.flatten(), kept * len(scores)).sort().values
        cell = cell.view(kept, len(scores)).mT  # by slot and head
        return cell // scores.shape[1], cell % scores.shape[1]

    def hold_best(self, row: int, head: Tensor, index: Tensor, tokens: Held, end: int) -> None:
        super().hold_best(row, head, index, tokens, end)
        self.disown(row)
        self.owner[row, :, : index.shape[1]] = head

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        cells = (self.read(x).transpose(1, 2).flatten(1, 2) for x in (self.k, self.v, self.owner))
        return ops.attend_owned(q, *cells, self.plan.n_kv_head, (self.slot(pos) + 1) * self.plan.n_kv_head)

    def heads(self, row: int, length: int) -> list[Held]:
        """What each head holds of a row of `length` tokens."""
        slots = super().held(row, length)
        owner = self.owner[row, :, : slots.k.shape[1]]
        k, v, position, owner = (x.transpose(0, 1).flatten(0, 1) for x in (*slots, owner))
        own = [(owner == head).nonzero()[:, 0] for head in range(self.k.shape[1])]
        return [Held(k[None, cell], v[None, cell], position[None, cell]) for cell in own]

    def held(self, row: int, length: int) -> Held:
        return side_by_side(self.heads(row, length))

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """As if each head were a layer, but for the choice."""
        if not self.gone[row]:  # all heads hold all
            return super().prefill_next(row, q, k, v, pos)
        heads, end = self.heads(row, pos), pos + k.shape[2]
        new = (x.chunk(len(heads), dim=1) for x in (q, self.copied(k), self.copied(v)))
        held, ys, scores = [], [], []
        for head, (own, *qkv) in enumerate(zip(heads, *new, strict=True)):
            both, y = self.attend_with(own, *qkv, pos)
            held.append(both)
            ys.append(y)
            scores.append(self.ranked(row, qkv[0], both, end, self.whole).expand(len(heads), -1)[head])
        scores = padded(scores, padding_value=-torch.inf)
        self.hold_best(row, *self.best(scores, self.kept_of(self.whole)), side_by_side(held), end)
        return torch.cat(ys, dim=1)

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        self.append(row, k, v, pos)
        heads = self.heads(row, pos + k.shape[2])
        groups = zip(q.chunk(len(heads), dim=1), heads, strict=True)
        return torch.cat([attention.suffix_attention(q, held.k[None], held.v[None]) for q, held in groups], dim=1)


padded = partial(pad_sequence, batch_first=True, padding_side="left")


def side_by_side(heads: list[Held]) -> Held:
    """What heads [1,n,...] hold, padded in front to the longest of them."""
    k, v, position = ([x[0] for x in each] for each in zip(*heads, strict=True))
    return Held(padded(k), padded(v), padded(position, padding_value=-1))


@dataclass(frozen=True)
class HeadBudgets(Method):
    """The options of a method whose layers stand on `Scored`."""

    heads: Literal["equal", "adaptive"] = option(
        "equal", "adaptive: the KV heads of a layer share its budget by their scores (Ada-KV)"
    )
    alpha: float = option(0.2, "with heads=adaptive, what each head has at least, of an equal budget", min=0, max=1)

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """The budget, and every generated token."""
        return super().paper_bytes(plan, budget + plan.room)

    def layer_type(self, layer: type) -> type | partial:
        """`layer`, or one that stores the tokens of adaptive heads."""
        if self.heads == "equal":
            return layer
        if self.every:
            raise ValueError("heads=adaptive shares out a prompt's budget once: leave out every")
        return partial(type(f"Adaptive{layer.__name__}", (Adaptive, layer), {}), alpha=self.alpha)
