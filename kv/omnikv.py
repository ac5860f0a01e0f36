"""omnikv: a few filter layers attend to all tokens and choose those the others read (OmniKV, OpenReview ulCAPXYXfa).

At every step a filter layer chooses the k prompt tokens with the highest attention, taking the maximum over its heads
(Equation 4). The sparse layers up to the next filter layer attend to these and to every generated token (Equation 2).
The layers before the first filter layer are full; so is the layer after each filter layer, which gives the fetch time
to run. No token is ever dropped, and every step chooses again.

Selectors weight the attention of the observation window: `last` uses only the current query, `uniform` weights all its
queries equally, `exp` gives each query twice the weight of the one before. uniform and exp always choose the window's
own prompt positions.

Memory: the full cache; with bits=8 or 4, the prompt's vectors in sparse layers have as many. With `offload` the sparse
layers' prompt is in a context bank on the host, whose entries hold one token's K and V for all layers that share a
choice. With engine=threads a whole segment is fetched as soon as its filter layer has chosen, a layer before it is
needed, into a buffer on the device; the direct engine lets each sparse layer read its own part from the host. `mem` is
the device's share of the full cache and sets k by section 5: mem = a + (1 - a) k / S, a the share of full layers, S the
prompt's tokens. With threads a chosen token takes a slot and an entry of the buffer, which halves k (at 16 bits). k
follows each row's prompt; generated tokens stay on the device and come on top. Traffic: full and filter layers read
everything, sparse layers k and the generated tokens.

With prefill=r (appendix D.10) sparse layers read a part of a long prompt too. It is cut into chunks of C tokens; for
each, the filter layer chooses r C of the tokens before it, by the selector `uniform` over the chunk's last queries, and
the sparse layers attend to these and, causally, to the chunk. An answer that needs other tokens is lost; r C tokens and
more are read exactly. Cost: T (r + 1) C query-key products per head of a sparse layer, instead of T^2 / 2.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.full import Full, FullMethod, full_layer
from kv.method import Plan, of_share, option
from kv.parts import attention, offload, ops, quant
from kv.parts.buffers import Buffers
from kv.parts.fetched import Parts

CHUNK_WINDOW = 16  # last queries of a prompt's chunk, which choose for it


class Filter(Full):
    """Attends to every token, and chooses those of the prompt that its sparse layers read."""

    def __init__(self, plan: Plan, layout: "Layout", options: "OmniKVMethod", bank: "ContextBank | None"):
        """bank: the sparse layers' prompt; None if each layer holds its own."""
        super().__init__(plan)
        self.layout, self.bank, self.selector = layout, bank, options.selector
        self.most = layout.k  # tokens chosen per row
        self.pools = [] if bank is None else [bank.pool]
        self.chunks = None if options.prefill is None else Chunks(options.prefill, options.chunk)
        self.allocate_state("index", self.most, fill=-1)  # prompt positions; -1: none
        self.allocate_state("prompt")  # the length of each row's prompt
        self.allocate_state("count")  # how many tokens to choose from it
        self.rewinds = self.selector == "last"  # the other selectors overwrite scores of past queries
        self.min_slots = self.most
        self.window = 1 if self.selector == "last" else max(1, min(options.window, self.most // 2))
        if self.window > 1:  # scores of past queries, a ring by position
            self.allocate("past", self.window, self.size + 1, dtype=torch.float32)
            self.contents["past"] = 1, 1

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if self.chunks is not None:
            self.chunks.choose(q, k)
        return super().attend_prompt(q, k, v)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        prompt = k.shape[2]
        self.index[row], self.prompt[row], self.count[row] = -1, prompt, self.layout.count(prompt)
        if self.window > 1:
            self.past[row] = 0
            self.look_back(row, q, k[0])
        super().keep(row, q, k, v)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        self.prompt[row], self.count[row] = pos + k.shape[2], self.layout.count(pos + k.shape[2])
        return super().prefill_next(row, q, k, v, pos)

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        y = super().extend(row, q, k, v, pos)
        if self.window > 1:
            self.look_back(row, q, self.held(row, pos + k.shape[2]).k)
        return y

    def look_back(self, row: int, q: Tensor, keys: Tensor) -> None:
        """Stores the last queries' scores (Equation 3) for the window of the next steps: keys [Hk,T,D]."""
        n, length = min(self.window - 1, q.shape[2]), keys.shape[1]
        position = torch.arange(length - n, length, device=q.device)
        self.past[row, position % self.window, :length] = attention.highest_attention(q[0], keys, n)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        keys, values = self.read(self.k), self.read(self.v)
        later = torch.arange(keys.shape[2], device=q.device) > pos[:, None]
        weight = ops.weights(q, keys, later[:, None, None])  # Equation 3, [B,Hk,G,N]
        y = ops.weighted_sum(weight, values).to(q.dtype).view(q.shape)
        scores = weight.amax((1, 2))  # [B,N], Equation 4's maximum over the heads
        self.choose(scores if self.window == 1 else self.weigh(scores, pos, active), active)
        if self.bank is not None:
            ticket, y = self.bank.pool.issue(self.index, active, y)
            self.bank.ticket.copy_(ticket)
        return y

    def weigh(self, scores: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """Stores this query's scores [B,N] in the ring; returns the weighted scores of the window, [B,N]."""
        n, row = scores.shape[1], torch.arange(pos.shape[0], device=pos.device)
        at, past = pos % self.window, self.past.narrow(2, 0, n)
        past[row, at] = torch.where(active[:, None], scores, past[row, at])
        age = (pos[:, None] - torch.arange(self.window, device=pos.device)) % self.window  # of each ring entry
        window = (self.count // 2).clamp(1, self.window)[:, None]  # at most half of what is chosen
        # Equation 4 counts i from the oldest query: i = w - 1 - age
        alpha = (age < window) * (1.0 if self.selector == "uniform" else torch.exp2(-age - 1.0))
        in_window = torch.arange(n, device=pos.device) > pos[:, None] - window
        return (past * alpha[..., None]).sum(1).masked_fill(in_window, torch.inf)

    def choose(self, scores: Tensor, active: Tensor) -> None:
        """Chooses the `count` prompt tokens with the highest scores [B,N] fp32, N >= k."""
        position = torch.arange(scores.shape[1], device=scores.device)
        best = ops.top(scores.masked_fill(position >= self.prompt[:, None], -torch.inf), self.most, ordered=True)
        chosen = torch.where(torch.arange(self.most, device=scores.device) < self.count[:, None], best, -1)
        if self.bank is not None and self.bank.delta:
            chosen = offload.keep_slots(chosen, self.index, self.bank.pool.count)
        self.index.copy_(torch.where(active[:, None], chosen, self.index))

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        if self.bank is not None:
            yield "pool", self.bank.pool.part(row, int(self.prompt[row]))

    def step_bytes(self, length: int) -> tuple[int, int]:
        past = 4 * self.window * length if self.window > 1 else 0
        return super().step_bytes(length)[0] + past, 0


class Sparse(Full):
    """Attends to the tokens that its filter layer chose, and to the generated tokens."""

    def __init__(self, plan: Plan, chooser: Filter):
        super().__init__(plan)
        self.chunks, self.most = chooser.chunks, chooser.most
        self.exact_prompt = self.in_chunks = self.chunks is None
        self.recent, self.attends_to_all = 1, False
        self.hold("index", chooser.index)
        self.hold("prompt", chooser.prompt)
        self.read_new = ops.symbol(plan.room, plan.device)  # generated tokens to read

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return super().attend_prompt(q, k, v) if self.exact_prompt else (self.chunks.attend(q, k, v),)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        generated = ops.following(self.prompt, ops.value(self.read_new))
        index = torch.cat([self.index.clamp(min=0), generated.clamp(max=self.slots)], dim=1)
        mask = torch.cat([self.index >= 0, generated <= pos[:, None]], dim=1)
        return ops.attend_rows(q, self.k, self.v, *(x[:, None].expand(-1, k.shape[1], -1) for x in (index, mask)))

    def before_step(self, length: int, new: int) -> tuple:
        self.read_new = ops.covering(self.read_new, max(new, 1), self.plan.room)
        return (ops.value(self.read_new),)

    def slots_to_read(self, length: int, new: int) -> int:
        read = self.plan.room if self.plan.device.type == "cuda" else new  # a gather reads masked slots too
        return min(self.most, length - new) + read


class ContextBank(Buffers):
    """The prompt of a filter layer's sparse layers: an entry holds one token's K and V in all of them."""

    def __init__(self, plan: Plan, layers: list[int], k: int, options: "OmniKVMethod", workers: offload.Workers):
        """k: how many tokens a step reads per row."""
        super().__init__(plan)
        self.layers, self.k, self.delta, self.bits = layers, k, options.delta, options.bits
        what = "layers " + ", ".join(map(str, layers))
        entry = (len(layers), 2, plan.n_kv_head, plan.head_dim)
        if self.bits < 16:
            entry, plan = (*entry[:3], quant.vector_bytes(entry[3], self.bits)), replace(plan, dtype=torch.uint8)
        staged = options.staged((k, *entry), plan, workers)
        self.pool = options.pool(what, (plan.max_prompt, *entry), staged, plan, options.delta)
        self.hold("pool_buffer", self.pool.buffer)
        self.hold("ticket", self.pool.ticket(k))  # from layer to layer

    def take(self, column: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B,Hk,k,...] of the chosen tokens in one layer's `column` [1]; undefined where index is -1."""
        entries = self.pool.take(self.ticket, column)  # [B k,2,Hk,...]
        return entries.unflatten(0, (-1, self.k)).permute(2, 0, 3, 1, 4).unbind(0)


class BankSparse(Parts):
    """A sparse layer whose prompt is in the bank: it stores the chosen tokens, once fetched, and the generated ones."""

    def __init__(self, plan: Plan, chooser: Filter, layer: int):
        super().__init__(plan, chooser.most, prompt=chooser.prompt)
        self.bank, self.chunks = chooser.bank, chooser.chunks
        self.stored, self.quantizes = quant.Vectors(plan, self.bank.bits), self.bank.bits < 16
        self.exact_prompt = self.in_chunks = self.chunks is None
        self.hold("index", chooser.index)
        self.at = self.bank.layers.index(layer)  # of the layer in an entry of the pool
        self.hold("column", torch.tensor([self.at], device=plan.device))  # the same: layers share compiled code
        self.first = self.at == 0

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return super().attend_prompt(q, k, v) if self.exact_prompt else (self.chunks.attend(q, k, v),)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        position = torch.arange(pos, pos + k.shape[2], device=k.device)
        for i, x in enumerate(self.stored.pack(k, v, position, row)):
            self.bank.pool.write(row, pos, x[0].transpose(0, 1), self.at, i)

    def held_prompt(self, row: int, prompt: int) -> tuple[Tensor, Tensor]:
        k, v = self.bank.pool.read(row, prompt)[:, self.at].permute(1, 2, 0, 3)[:, None]  # [1,Hk,T,...]
        position = torch.arange(prompt, device=k.device)
        k, v = self.stored.read(k, v, position, row)
        return k[0], v[0]

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        bank = self.bank
        if self.first:
            bank.ticket.copy_(bank.pool.wait(bank.ticket, q))
        k, v = self.stored.read(*bank.take(self.column), self.index[:, None])
        self.store_chosen(self.k, k, active)
        self.store_chosen(self.v, v, active)
        return self.attend_parts(q, pos, (self.index >= 0)[:, None].expand(-1, k.shape[1], -1))

    def step_bytes(self, length: int) -> tuple[int, int]:
        new = max(0, length - self.plan.max_prompt)
        unit = 2 * quant.stored_bytes(self.plan, self.bank.bits)
        chosen = self.plan.n_kv_head * min(self.bank.k, length - new) * unit
        generated = self.plan.n_kv_head * new * self.plan.unit_bytes
        return generated + chosen, chosen * self.bank.pool.on_host


class Chunks:
    """The chunks of a prompt (D.10): the filter layer calls `choose`, then the sparse layers `attend`."""

    def __init__(self, r: float, size: int):
        self.size, self.count = size, max(1, math.floor(r * size + 0.5))
        self.chosen: list[Tensor] = []  # per chunk, the positions chosen before it

    def choose(self, q: Tensor, k: Tensor) -> None:
        """Chooses for each chunk: q [1,Hq,T,D], k [1,Hk,T,D]."""
        self.chosen = []
        for first in range(0, k.shape[2], self.size):
            end, best = min(first + self.size, k.shape[2]), torch.arange(first, device=k.device)
            if first > self.count:
                n = min(CHUNK_WINDOW, end - first)
                scores = attention.highest_attention(q[0, :, :end], k[0, :, :end], n)[:, :first]
                best = ops.top(scores.sum(0), self.count).sort().values
            self.chosen.append(best)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """A sparse layer's attention: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D]."""
        y = torch.empty_like(q)
        for i, chosen in enumerate(self.chosen):
            chunk = slice(i * self.size, (i + 1) * self.size)
            keys, values = (torch.cat([x[:, :, chosen], x[:, :, chunk]], dim=2) for x in (k, v))
            y[:, :, chunk] = attention.suffix_attention(q[:, :, chunk], keys, values)
        return y


@dataclass(frozen=True)
class Layout:
    """Which layers are sparse, which filter layer chooses for them, and how many tokens."""

    segments: dict[int, list[int]]  # filter layer -> the sparse layers that follow it
    k: int  # the most tokens chosen per row
    share: Fraction | None  # the share of its prompt that a row chooses; None: k

    @classmethod
    def of(cls, plan: Plan, budget: int | None, options: "OmniKVMethod") -> "Layout":
        filters = default_filters(plan) if options.filter_layers is None else options.filter_layers
        if sorted(set(filters)) != filters or any(layer >= plan.n_layer for layer in filters):
            raise ValueError(f"omnikv: filter_layers must ascend and lie below {plan.n_layer}, not {filters}")
        segments = segments_of(filters, plan.n_layer)
        sparse = sum(map(len, segments.values()))
        if not sparse:
            raise ValueError(f"omnikv: with filter layers {filters} none of {plan.n_layer} layers is sparse")
        if options.mem is None:
            return cls(segments, min(budget, plan.max_prompt), plan.share and plan.part(budget))
        a = 1 - Fraction(sparse, plan.n_layer)
        share = (Fraction(str(options.mem)) - a) / (1 - a)  # k / S of section 5: mem = a + (1 - a) k / S
        if share < 0:
            raise ValueError(f"omnikv: mem={options.mem} is less than the share of its full layers, {float(a):.3f}")
        if options.threaded(plan):  # a chosen token is in its slot and in the buffer where it arrives
            share /= 1 + Fraction(2 * quant.stored_bytes(plan, options.bits), plan.unit_bytes)
        return cls(segments, max(1, of_share(share, plan.max_prompt)), share)

    def count(self, prompt: int) -> int:
        """How many of a prompt's tokens are chosen."""
        return min(self.k if self.share is None else max(1, of_share(self.share, prompt)), self.k, prompt)


def default_filters(plan: Plan) -> list[int]:
    """The paper's for Yi-9B and Llama-3-70B; else Llama-3-8B's relative depths, fewer if no layer were sparse."""
    model = plan.n_layer, plan.dim, plan.model_kv_heads
    if model == (48, 4096, 4):
        return [6, 11, 30]
    if model == (80, 8192, 8) and plan.rope_theta == 5e5:  # Llama-2-70B has the same shape
        return [4, 19, 41]
    filters = sorted({int(depth / 32 * plan.n_layer + 0.5) for depth in (2, 8, 18)})
    while len(filters) > 1 and not any(segments_of(filters, plan.n_layer).values()):
        filters.pop()
    return filters


def segments_of(filters: list[int], n_layer: int) -> dict[int, list[int]]:
    """Each filter layer's sparse layers: from the second after it up to the next filter layer (Equation 2)."""
    ends = [*filters, n_layer][1:]
    return {first: list(range(first + 2, end)) for first, end in zip(filters, ends, strict=True)}


@dataclass(frozen=True)
class OmniKVMethod(offload.OffloadMethod):
    name = "omnikv"
    paper = "https://openreview.net/forum?id=ulCAPXYXfa"
    help = "a few full layers choose what the others read; --offload"
    instead = "mem"
    lossless = {"bits": 16, "prefill": None}
    filter_layers: list[int] | None = option(None, "layers that choose", min=0)
    selector: Literal["last", "uniform", "exp"] = option("last", "how the queries in the window are weighted")
    window: int = option(16, "queries in the window of uniform and exp", min=1)
    mem: float | None = option(None, "share of the cache for the device, instead of a budget", min=0, max=1)
    delta: bool = option(False, "threads fetch only what the device does not hold already")
    bits: quant.Bits = quant.BITS
    prefill: float | None = option(None, "r: sparse layers prefill with r x chunk chosen tokens; auto: all", min=0)
    chunk: int = option(4096, "tokens per chunk of `prefill`", min=1)

    def paper_bytes(self, plan: Plan, budget: int | None) -> int:
        """The full cache, in `bits` except filter layers and new tokens of sparse layers; offload adds chosen ones."""
        layout = Layout.of(plan, budget, self)
        sparse, filters = sum(map(len, layout.segments.values())), sum(map(bool, layout.segments.values()))
        layer = plan.max_prompt * 2 * quant.stored_bytes(plan, self.bits) + plan.room * plan.unit_bytes
        layers = plan.batch * plan.n_kv_head * sparse * (layer + self.offload * layout.k * plan.unit_bytes)
        others = (plan.n_layer - sparse - filters) * FullMethod(self.bits).paper_bytes(plan, None)
        return layers + (filters * plan.full_bytes() + others) // plan.n_layer

    def build(self, plan: Plan, budget: int | None) -> list[KV]:
        layout, plan = Layout.of(plan, budget, self), replace(plan, share=None)
        layers: dict[int, KV] = {}
        workers = offload.Workers(self.threads)
        for first, sparse in layout.segments.items():
            if sparse:
                bank = ContextBank(plan, sparse, layout.k, self, workers) if self.offload or self.bits < 16 else None
                chooser = layers[first] = Filter(plan, layout, self, bank)
                for layer in sparse:
                    layers[layer] = BankSparse(plan.layer(layer), chooser, layer) if bank else Sparse(plan, chooser)
        return [layers.get(layer) or full_layer(plan.layer(layer), self.bits) for layer in range(plan.n_layer)]
