"""duo: retrieval heads keep everything, others sinks and a recent window (DuoAttention, Xiao et al., arXiv 2410.10819).

Which KV heads are retrieval heads is known in advance: from a file, this engine's or the gates that the authors publish
for their models (full_attention_heads.tsv), or from the `head_scores` that calibrate.py writes beside the checkpoint (a
proxy: each head's attention to the tokens between the sinks and the window). The budget is the mean over all heads:
x S + (1 - x)(sinks + recent), x the share of retrieval heads. Memory and traffic: that mean.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.full import Full
from kv.method import Method, Plan, option
from kv.streaming import Streaming
from text.files import parse_json


class Duo(KV):
    """One layer of up to two parts: the heads that keep everything, by `retrieval` [Hk], and those that stream."""

    rewinds = True

    def __init__(self, plan: Plan, retrieval: list[bool], sinks: int, recent: int):
        super().__init__(plan)
        order, count = sorted(range(len(retrieval)), key=lambda h: not retrieval[h]), sum(retrieval)
        kinds = ((Full, count, ()), (Streaming, len(order) - count, (sinks + recent, sinks)))
        self.parts = torch.nn.ModuleList(
            kind(replace(plan, share=None, n_kv_head=n, n_head=n * plan.n_head // plan.n_kv_head), *sizes)
            for kind, n, sizes in kinds
            if n
        )
        self.counts = [part.plan.n_kv_head for part in self.parts]
        self.endless = all(part.endless for part in self.parts)
        self.recent = min(part.recent for part in self.parts)
        heads = torch.tensor(order, device=plan.device)
        self.hold("order", heads)
        self.hold("back", heads.argsort())

    def split(self, x: Tensor) -> list[Tensor]:
        """The heads of each part of x [B,H,T,D], H = Hk or Hq.

        Tensors of their own: of a view, torch's flex_attention compiled for a GPU reads the base's first queries.
        """
        groups = x.unflatten(1, (self.plan.n_kv_head, -1))
        return [groups.index_select(1, heads).flatten(1, 2) for heads in self.order.split(self.counts)]

    def join(self, ys: list[Tensor]) -> Tensor:
        """The inverse of `split`, for query heads."""
        groups = [y.unflatten(1, (n, -1)) for y, n in zip(ys, self.counts, strict=True)]
        return torch.cat(groups, dim=1).index_select(1, self.back).flatten(1, 2)

    def each(self, *inputs: Tensor) -> Iterator[tuple]:
        """(part, its heads of each input) for all parts."""
        return zip(self.parts, *map(self.split, inputs), strict=True)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        return self.join([part.decode(*qkv, pos, active) for part, *qkv in self.each(q, k, v)])

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        for part, *new in self.each(k, v):
            part.insert(*new, pos, active)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        for part, *new in self.each(k, v):
            part.append(row, *new, pos)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        return self.join([part.prefill_next(row, *qkv, pos) for part, *qkv in self.each(q, k, v)])

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        return self.join([part.extend(row, *qkv, pos) for part, *qkv in self.each(q, k, v)])

    def views(self, row: int, length: int) -> Views:
        for i, part in enumerate(self.parts):
            yield from ((f"{i}.{name}", view) for name, view in part.views(row, length))

    def before_step(self, length: int, new: int) -> tuple:
        return tuple(part.before_step(length, new) for part in self.parts)

    def step_bytes(self, length: int) -> tuple[int, int]:
        return sum(part.step_bytes(length)[0] for part in self.parts), 0


@dataclass(frozen=True)
class DuoMethod(Method):
    name = "duo"
    paper = "https://arxiv.org/abs/2410.10819"
    help = "everything in some heads, streaming in the others"
    fewest = 2
    heads: str | None = option(None, "file of head_scores: JSON, or DuoAttention's TSV")
    head_scores: list[list[float]] | None = option(None, "how much each KV head retrieves")
    sinks: int = option(128, "first tokens that streaming heads keep", min=0)
    recent: int = option(512, "newest tokens that streaming heads keep", min=1)

    def counts(self, plan: Plan, budget: int) -> tuple[int, int, int]:
        """(retrieval heads of the whole model, sinks, recent)"""
        every, window = plan.n_layer * plan.model_kv_heads, self.sinks + self.recent
        if budget <= window:
            sinks = min(self.sinks, int(0.2 * budget + 0.5) if budget <= 256 else budget // 2)
            return 0, sinks, budget - sinks
        share = (budget - window) / (plan.planned - window)
        return int(share * every + 0.5), self.sinks, self.recent

    def choose(self, plan: Plan, count: int) -> list[list[bool]]:
        """Whether each KV head is among the model's `count` with the highest scores, [layer][KV head]."""
        heads = plan.model_kv_heads
        every = plan.n_layer * heads
        if count in (0, every):
            return [[count > 0] * plan.n_kv_head for _ in range(plan.n_layer)]
        scores = read_scores(self.heads) if self.heads else self.head_scores
        if scores is None:
            raise ValueError("duo does not know this model's retrieval heads: run calibrate.py, or give heads=FILE")
        if len(scores) != plan.n_layer or any(len(row) != heads for row in scores):
            raise ValueError(f"duo: head_scores must have {plan.n_layer} layers of {heads} KV heads")
        flat = [score for row in scores for score in row]
        if not all(map(math.isfinite, flat)):
            raise ValueError("duo: every one of head_scores must be finite")
        best = set(sorted(range(every), key=lambda i: -flat[i])[:count])
        first = plan.ranks.rank * plan.n_kv_head  # of this rank's heads
        ours = range(first, first + plan.n_kv_head)
        return [[layer * heads + h in best for h in ours] for layer in range(plan.n_layer)]

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        sizes = dict(zip(("retrieval heads", "sinks", "recent"), self.counts(plan, budget), strict=True))
        return sizes if plan.share or sizes["retrieval heads"] else {}

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """Every token in this rank's retrieval heads; in others the recent ones and the sinks, whose keys are twice."""
        count, sinks, recent = self.counts(plan, budget)
        count = sum(map(sum, self.choose(plan, count)))
        rest = plan.n_layer * plan.n_kv_head - count
        units = count * plan.planned + rest * (min(sinks + recent, plan.planned) + sinks // 2)
        return plan.batch * units * plan.unit_bytes

    def build(self, plan: Plan, budget: int) -> list[KV]:
        count, sinks, recent = self.counts(plan, budget)
        return [Duo(plan, retrieval, sinks, recent) for retrieval in self.choose(plan, count)]


def read_scores(path: str) -> list[list[float]]:
    """Scores [layer][KV head] from a JSON file with `head_scores`, or from DuoAttention's published gates.

    The gates come as one line per layer with tabs between KV heads; as the authors do, this clips them to [0, 1].
    """
    try:
        text = Path(path).read_text()
        if text.lstrip().startswith("{"):
            return [[float(score) for score in row] for row in parse_json(text, path)["head_scores"]]
        gates = [[float(gate) for gate in line.split("\t")] for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        wanted = "JSON with head_scores, or lines of numbers with tabs, one per layer"
        raise ValueError(f"duo: {path} must be {wanted} ({type(error).__name__})") from None
    return [[min(max(gate, 0.0), 1.0) for gate in row] for row in gates]
