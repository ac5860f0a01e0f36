"""Speculation: a method's cache drafts tokens, the full cache verifies them (TriForce, arXiv 2404.11912).

Each layer owns the full cache and a draft: the KV module of any method that can take tokens back (`KV.rewinds`). A
decode step of one token per row is the draft's. A step of several tokens verifies: each attends to the full cache and
to the tokens before it, and all replace what the draft stored at their positions, so a draft's errors end with the
round. Tokens that are rejected need no undoing: moving `pos` back takes them away. A draft that ranks a prompt's tokens
ranks all tokens again after a question: the full cache still has them.

Memory: the full cache and the draft. A draft that holds every token as the full cache does (`KV.holds_all`) reads the
full cache's K and V, and adds only what it chooses by.
"""

from torch import Tensor

from kv.base import KV, Views
from kv.full import Full
from kv.method import Plan
from kv.parts import ops
from kv.parts.scored import Scored


class Speculation(KV):
    """One layer's draft and full cache."""

    def __init__(self, plan: Plan, draft: KV):
        super().__init__(plan)
        self.draft, self.full = draft, Full(plan)
        self.wants_lookahead, self.pools = draft.wants_lookahead, draft.pools
        self.reranks = isinstance(draft, Scored) and draft.kept < plan.max_prompt  # whether it ranks a prompt's tokens
        if draft.holds_all:
            self.full.k, self.full.v = draft.k, draft.v

    def begin(self, row: int, whole: int) -> None:
        self.draft.begin(row, whole)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.draft.keep(row, q, k, v)
        if not self.draft.holds_all:
            self.full.keep(row, q, k, v)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """The draft's step or, for n > 1 tokens per row, the first at pos [B], verification.

        q [B,Hq,n,D], k and v [B,Hk,n,D] -> [B,Hq,n,D]
        """
        if q.shape[2] == 1:
            return self.draft.decode(q, k, v, pos, active)
        self.full.insert(k, v, pos, active)
        y = ops.attend_prefix(q, self.full.read(self.full.k), self.full.read(self.full.v), pos + 1)
        self.draft.insert(k, v, pos, active)
        return y

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        y, end = self.full.extend(row, q, k, v, pos), pos + k.shape[2]
        if not self.reranks:
            self.draft.prefill_next(row, q, k, v, pos)
        elif end == self.draft.whole:
            self.rank_again(row, q, end)
        return y

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        y = self.full.extend(row, q, k, v, pos)
        self.draft.whole = pos + k.shape[2]  # whose budget the draft has
        if self.reranks:
            self.rank_again(row, q, pos + k.shape[2])
        else:
            self.draft.append(row, k, v, pos)
        return y

    def rank_again(self, row: int, q: Tensor, length: int) -> None:
        """The draft chooses from all `length` tokens of the row."""
        held = self.full.held(row, length)
        self.draft.keep(row, q, held.k[None], held.v[None])

    def finish(self, row: int) -> None:
        self.draft.finish(row)

    def lookahead(self, q: Tensor, x: Tensor, active: Tensor) -> Tensor:
        return x if q.shape[2] > 1 else self.draft.lookahead(q, x, active)

    def make_room(self, row: int, length: int) -> None:
        self.draft.make_room(row, length)

    def before_step(self, length: int, new: int) -> tuple:
        return self.draft.before_step(length, new), self.full.before_step(length, new)

    def views(self, row: int, length: int) -> Views:
        yield from self.draft.views(row, length)
        if not self.draft.holds_all:
            yield from ((f"full_{name}", view) for name, view in self.full.views(row, length))

    def step_bytes(self, length: int) -> tuple[int, int]:
        """Of a round: the drafts, and one verification, which reads the full cache once."""
        device, host = (self.plan.rewind * n for n in self.draft.step_bytes(length))
        return device + self.full.step_bytes(length)[0], host


def speculative(name: str, plan: Plan, drafts: list[KV]) -> list[KV]:
    """Puts the full cache behind every layer of method `name`. Raises ValueError if the method cannot draft."""
    if plan.window is not None and plan.planned > plan.window:
        raise ValueError(
            f"speculation needs the full cache, and this model's sliding window drops tokens: use at most "
            f"{plan.window} tokens of prompt and answer together"
        )
    if name == "full" and all(type(draft) is Full for draft in drafts):
        raise ValueError("the full cache cannot draft for itself: choose another --kv, or leave out --speculate")
    if not all(draft.rewinds for draft in drafts):
        raise ValueError(f"{name} cannot draft: its cache cannot take tokens back")
    if not all(draft.exact_prompt for draft in drafts):
        raise ValueError(f"{name} with prefill=... cannot draft: the full cache's prompt is exact")
    return [Speculation(plan, draft) for draft in drafts]
