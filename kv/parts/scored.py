"""The base of methods that rank a prompt's tokens by a score, keep the best, and keep every generated token."""

from abc import abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kv.base import KV, Held, Views
from kv.method import Plan, option
from kv.parts import ops, quant
from kv.parts.adaptive import HeadBudgets

LAG = 1  # steps that may have stored a token which the host has not read when it makes room
KERNEL = option(7, "width of the max-pooling in tokens; 15 keeps a number whole whose digits are tokens", min=1)
EVERY = option(0, "while generating, keep only the budget again after every N tokens (R-KV: 128); 0: keep all", min=0)


class Scored(KV):
    """Slots for `kept` tokens of a prompt, in order of position, followed by every generated token.

    A method writes `score`. The first `sinks` and the newest `window` tokens of a prompt are always kept. A KV head
    keeps its own tokens or, with `copies` = G, each of its query heads does.

    With `every` = N, a row that holds N tokens more than it keeps drops the worst N before it continues, as if what it
    holds were a prompt.
    """

    def __init__(
        self,
        plan: Plan,
        kept: int,
        window: int = 0,
        sinks: int = 0,
        copies: int = 1,
        bits: int = 16,
        every: int = 0,
        queries: int = 0,
    ):
        """kept: of the longest prompt. bits of a stored value (quant.Vectors); `decode` is then the method's own.
        queries: how many of the newest queries a row holds while it generates, for `score` to rank again (`every`)."""
        super().__init__(replace(plan, n_kv_head=plan.n_kv_head * copies))
        if 0 < every < window:  # a row would be compressed before all queries of the window are known
            raise ValueError(f"every={every} must be at least the window, {window}")
        if 0 < plan.chunk < 2 * window:  # half as long, if a prompt is little longer than one
            raise ValueError(f"chunk={plan.chunk} must be at least twice the window, {window}")
        every = every if every <= plan.room else 0  # no row holds as many more
        self.every, self.queries = every, queries if every else 0
        self.copies, self.budget, self.kept = copies, kept, kept if every else min(kept, plan.max_prompt)
        self.window, self.sinks = min(window, self.kept), sinks
        self.rows: dict[int, int] = {}  # how many tokens each row keeps of its prompt
        self.gone: dict[int, int] = {}  # `dropped` and `prompt`, where the host reads them
        self.prompts: dict[int, int] = {}
        self.recent = max(1, self.window)
        self.stored, self.quantizes = quant.Vectors(plan, bits), bits < 16
        slots = min(kept + every + LAG, plan.planned) if every else self.kept + plan.room
        self.allocate_row(slots)
        self.rewinds = not every
        self.extends_alike = self.extends_alike and not every
        if every:
            self.allocate_state("prompt")  # its tokens, [B]
        if self.queries:  # a ring, by position
            self.allocate_state("past", plan.n_head, queries + LAG, plan.head_dim, dtype=plan.dtype)

    def allocate_row(self, slots: int) -> None:
        self.allocate_slots(slots, self.stored.width)
        self.allocate_state("dropped")  # how many of each row's tokens are gone, [B]
        self.allocate_state("position", self.plan.n_kv_head, self.kept, dtype=torch.int32, fill=-1)  # of the kept

    @abstractmethod
    def score(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """How much each of T tokens is worth keeping: k and v [1,Hk,T,D] -> [Hk,T], or [Hq,T].

        q [1,Hq,n,D]: the newest tokens' queries. Of a prompt n = T; later, with `every`, n = `queries`, and q is None
        if that is 0. The text, in row `self.row`, has `self.end` tokens; the `self.latest` newest stay anyway. The T
        tokens are at positions `self.at` [H,T].
        """

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.every:
            self.prompt[row] = self.prompts[row] = self.whole
        tokens, end = Held.new(k[0], v[0]), k.shape[2]
        self.hold_best(row, *self.choose(row, q, tokens, end, self.whole), tokens, end)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """A row whose budget what it holds and the chunk exceed keeps the best of them, by the chunk's queries."""
        end = pos + k.shape[2]
        held, y = self.attend_with(self.held(row, pos), q, self.copied(k), self.copied(v), pos)
        if held.k.shape[1] > self.kept_of(self.whole):
            self.hold_best(row, *self.choose(row, q, held, end, self.whole), held, end)
        else:  # nothing is gone yet
            self.hold_more(row, k, v, pos)
        return y

    def hold_more(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        """Adds n tokens of the prompt to a row that holds all before them: k and v [1,Hk,n,D]."""
        self.append(row, k, v, pos)
        self.rows[row] = end = pos + k.shape[2]
        self.position[row, :, pos:end] = torch.arange(pos, end, device=k.device)

    def hold_best(self, row: int, head: Tensor, index: Tensor, tokens: Held, end: int) -> None:
        """Makes n of a row's tokens before position `end` all that it holds: those of `choose`."""
        kept, at = index.shape[1], (head * len(tokens.k) // self.plan.n_kv_head, index)
        self.position[row] = -1
        self.position[row, :, :kept] = tokens.position[at]
        self.write(row, 0, tokens.k[at], tokens.v[at], tokens.position[at])
        self.rows[row], self.gone[row], self.dropped[row] = kept, end - kept, end - kept

    def write(self, row: int, first: int, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Stores n tokens in a row's slots from `first` on: k and v [H,n,D], position [H,n]."""
        slots = slice(first, first + k.shape[1])
        k, v = self.stored.pack(k[None], v[None], position[None], row)
        self.k[row, :, slots], self.v[row, :, slots] = k[0], v[0]

    def choose(self, row: int, q: Tensor | None, tokens: Held, end: int, prompt: int) -> tuple[Tensor, Tensor]:
        """Which of a row's `tokens`, all before position `end`, each of the H heads that store tokens keeps.

        Returns heads [H,1], or [H,n], and the indices of their tokens, ascending [H,n].
        prompt: the length whose budget they have.
        """
        kept = self.kept_of(prompt)
        if tokens.k.shape[1] <= kept:
            return self.each_head(torch.arange(tokens.k.shape[1], device=tokens.k.device))
        return self.best(self.ranked(row, q, tokens, end, prompt), kept)

    def ranked(self, row: int, q: Tensor | None, tokens: Held, end: int, prompt: int) -> Tensor:
        """The scores that `choose` compares, [H,N]; infinite for what stays anyway."""
        index = torch.arange(tokens.k.shape[1], device=tokens.k.device)
        self.row, self.end, self.latest, self.at = row, end, self.window_of(prompt), tokens.position
        if q is not None:
            self.latest = min(self.latest, q.shape[2])  # of a short text
        always = (index < self.sinks) | (index >= len(index) - self.latest)
        scores = self.score(q, tokens.k[None], tokens.v[None]).float()
        self.at = None
        return scores.masked_fill(always, torch.inf)

    def best(self, scores: Tensor, kept: int) -> tuple[Tensor, Tensor]:
        """Of scores [H,T], the `kept` best of each head, as `choose` returns them."""
        return self.each_head(ops.top(scores, kept).sort().values)

    def each_head(self, index: Tensor) -> tuple[Tensor, Tensor]:
        heads = torch.arange(self.plan.n_kv_head, device=index.device)[:, None]
        return heads, index.expand(len(heads), -1)

    def kept_of(self, prompt: int) -> int:
        """How many tokens of a prompt of `prompt` tokens stay, at most `kept`."""
        return min(self.kept, self.plan.row_budget(self.budget, prompt))

    def window_of(self, prompt: int) -> int:
        """How many of its newest tokens always stay: at most half of those that do."""
        kept = self.kept_of(prompt)
        return min(self.window, kept // 2, kept - self.sinks)

    # While generating, with `every`

    def make_room(self, row: int, length: int) -> None:
        if self.every and length - self.gone[row] >= self.most(row, length):
            self.compress(row, length)

    def most(self, row: int, end: int) -> int:
        """How many tokens a row of `end` tokens holds before it is compressed: N more than it kept, or may keep."""
        return self.every + max(self.rows[row], self.kept_of(self.length_of(row, end)))

    def length_of(self, row: int, end: int) -> int:
        """How long a prompt has the budget of a row of `end` tokens: if it is a share, as long as the row's own."""
        return end if self.plan.share is None else self.prompts[row]

    def compress(self, row: int, end: int) -> None:
        """Keeps the best of a row's tokens before position `end`; a step may have stored one after them."""
        held = self.held(row, end)
        after = [x[row, :, held.k.shape[1] : self.slots].clone() for x in (self.k, self.v)]
        kept = self.keep_best(row, held, end)
        for x, rest in zip((self.k, self.v), after, strict=True):
            x[row, :, kept : kept + rest.shape[1]] = rest

    def keep_best(self, row: int, held: Held, end: int) -> int:
        """Stores the best of `held`, a row's tokens before position `end`; returns how many."""
        q, prompt = self.newest_queries(row, end), self.length_of(row, end)
        best = self.choose(row, q, held, end, prompt)
        self.hold_best(row, *best, held, end)
        return best[1].shape[1]

    def newest_queries(self, row: int, end: int) -> Tensor | None:
        """The queries before position `end` that `score` takes, if any, [1,Hq,n,D]."""
        if not self.queries:
            return None
        position = torch.arange(end - self.queries, end, device=self.past.device)
        return self.past[row, None, :, position % self.past.shape[2]]

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """With `every`, a row that then holds too many tokens keeps the best."""
        if not self.every:
            return super().extend(row, q, k, v, pos)
        self.make_room(row, pos)
        end = pos + k.shape[2]
        held, y = self.attend_with(self.held(row, pos), q, self.copied(k), self.copied(v), pos)
        if self.queries:
            last = torch.arange(max(pos, end - self.past.shape[2]), end, device=k.device)
            self.past[row, :, last % self.past.shape[2]] = q[0, :, last - pos]
        if held.k.shape[1] <= self.most(row, end):
            self.append(row, k, v, pos)
        else:
            self.keep_best(row, held, end)
        return y

    # A step

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        if self.queries:
            ops.overwrite(self.past, q, pos[:, None] % self.past.shape[2], active)
        return ops.attend_prefix(q, self.read(self.k), self.read(self.v), self.slot(pos) + 1)

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        position = ops.following(pos, k.shape[2])
        k, v = self.stored.pack(self.copied(k), self.copied(v), position[:, None])
        self.store(k, v, ops.following(self.slot(pos), k.shape[2]), active)

    def slot(self, pos: Tensor) -> Tensor:
        """The slots of the tokens at pos [B]; 0 for a row that sleeps at position 0, whatever it holds."""
        return (pos - self.dropped).clamp(min=0)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        position = torch.arange(pos, pos + k.shape[2], device=k.device).expand(self.plan.n_kv_head, -1)
        self.write(row, self.filled(row, pos), self.copied(k)[0], self.copied(v)[0], position)

    def copied(self, x: Tensor) -> Tensor:
        """K or V [B,Hk,n,D] of new tokens, for each head that stores them."""
        return x if self.copies == 1 else x.repeat_interleave(self.copies, dim=1)

    def positions(self, slots: Tensor, row: int | None = None) -> Tensor:
        """The positions of the tokens in slots [B,H,n]; those of a prompt are in `position`."""
        known, dropped = (x if row is None else x[row, None] for x in (self.position, self.dropped))
        known = known.gather(2, slots.clamp(max=known.shape[2] - 1))
        return torch.where((slots < self.position.shape[2]) & (known >= 0), known, slots + dropped[:, None, None])

    def held(self, row: int, length: int) -> Held:
        slots = torch.arange(length - int(self.dropped[row]), device=self.k.device).expand(1, self.plan.n_kv_head, -1)
        k, v = (x[row, :, : slots.shape[2]] for x in (self.k, self.v))
        position = self.positions(slots, row)
        k, v = self.stored.read(k[None], v[None], position, row)
        return Held(k[0], v[0], position[0])

    def filled(self, row: int, length: int) -> int:
        return length - int(self.dropped[row])

    def reset(self, row: int) -> None:
        super().reset(row)
        self.rows.pop(row, None)
        self.gone[row] = 0

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        self.rows[row] = int((self.position[row, 0] >= 0).sum())  # now that a saved row is restored
        self.gone[row] = int(self.dropped[row])
        if self.every:
            self.prompts[row] = int(self.prompt[row])

    def slots_to_read(self, length: int, new: int) -> int:
        kept = max(self.rows.values(), default=self.kept_of(self.plan.max_prompt))
        return min(length, self.slots, kept + (self.slots if self.every else new))


def pooled(scores: Tensor, kernel: int, window: int) -> Tensor:
    """Scores [H,n], max-pooled over `kernel` tokens, and 0 for the window, which stays anyway: [H,n+window]"""
    best = F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)[:, : scores.shape[1]]
    return F.pad(best, (0, window))


@dataclass(frozen=True)
class ScoredMethod(HeadBudgets):
    """Builds the `layer` of a method that writes `score`. Its fields, but for `heads` and `alpha`, are options and, by
    name, arguments of the layer: `window`, `sinks`, `every` and the method's own (kv/rkv.py has two)."""

    layer: ClassVar[type[Scored]]
    window: int = option(8, "newest prompt tokens that are always kept", min=0)
    sinks: int = option(4, "first tokens that are always kept", min=0)
    every: int = EVERY

    def minimum(self, plan: Plan) -> int:
        return self.sinks + 1

    def build(self, plan: Plan, budget: int) -> list[KV]:
        apart = {field.name for field in fields(HeadBudgets)}
        options = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in apart}
        options["window"] = min(self.window, budget // 2, budget - self.sinks)
        layer = self.layer_type(self.layer, plan)
        return [layer(plan.layer(i), budget, **options) for i in range(plan.n_layer)]
