"""Prefills each prompt once for all methods, and what two prompts have in common once for both."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine import Engine
from kv import KV
from kv.method import Plan
from kv.parts.attention import suffix_attention
from runtime import parallel

Vectors = tuple[Tensor, ...]  # q [1,Hq,n,D], k and v [1,Hk,n,D] of a layer, on the host


@dataclass
class Prompt:
    """What is kept of a prompt: the vectors of its tokens or, of one that begins as `base` does, of those after that.

    They are written over the base's when they are wanted: to copy all of them would take longer than most methods do.
    """

    tokens: Tensor
    base: "Prompt | None"
    common: int  # tokens that `whole` always has: those before any that is overwritten
    logits: Tensor
    inv_freq: Tensor
    own: list[Vectors]  # of each layer, after the common ones
    whole: list[Vectors] = field(default_factory=list)  # of each layer; empty if there is a base
    statistics: dict[tuple[int, tuple], Vectors] = field(default_factory=dict)
    observed: dict[tuple, list[Tensor]] = field(default_factory=dict)  # of each layer, by a second pass

    def vectors(self, layer: int, n: int) -> Vectors:
        """Those of the first n tokens, until the next call."""
        base = self.base or self
        for prompt in (base,) if base is self else (base, self):
            pairs = zip(base.whole[layer], prompt.own[layer], strict=True)
            base.whole[layer] = tuple(write(x, own, prompt.common) for x, own in pairs)
        return tuple(x[:, :, :n] for x in base.whole[layer])

    def share(self, n: int) -> None:
        """Keeps what is overwritten by a prompt that has only the first n tokens in common with it."""
        if n < self.common:
            for layer in range(len(self.whole)):
                own = (x[:, :, n:].clone() for x in self.vectors(layer, len(self.tokens)))
                self.own[layer] = tuple(own)
            self.common = n

    def begins(self, tokens: Tensor) -> int:
        """How many tokens it has in common with a prompt's beginning, of which one remains."""
        n = min(len(self.tokens), len(tokens) - 1)
        return int((self.tokens[:n] == tokens[:n]).long().cumprod(0).sum())


def write(whole: Tensor, part: Tensor, at: int) -> Tensor:
    """whole [1,H,n,D] with `part` from token `at` on; a longer one if that is too short."""
    if (end := at + part.shape[2]) > whole.shape[2]:
        return torch.cat([whole[:, :, :at], part], dim=2)
    whole[:, :, at:end] = part
    return whole


class Recorder(KV):
    """Records on the host the q, k and v of a prompt that a layer's method receives, after `before` if given."""

    def __init__(self, plan: Plan, before: Vectors = ()):
        super().__init__(plan)
        self.before = before

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.qkv = q.cpu(), k.cpu(), v.cpu()

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        self.keep(row, q, k, v)
        k, v = (torch.cat([a.to(b.device), b], dim=2) for a, b in zip(self.before[1:], (k, v), strict=True))
        return suffix_attention(q, k, v)

    def decode(self, *_) -> Tensor:
        raise NotImplementedError("only prompts are recorded")


def second_pass(prompt: Prompt, layers: list[KV], texts: Iterator[Tensor]) -> Iterable[Tensor]:
    """The texts of a second pass, if they did not run yet; else the layers get what was found."""
    if (first := next(texts, None)) is None:
        return
    asks = next(layer for layer in layers if type(layer).second_pass is not KV.second_pass)
    key = type(asks).observe, getattr(asks, "sinks", 0), *first.tolist()
    if key not in prompt.observed:
        yield first
        yield from texts
        prompt.observed[key] = [layer.observed for layer in layers]
    for layer, observed in zip(layers, prompt.observed[key], strict=True):
        layer.observed = observed


def prefill_once(engine: Engine, room: float | None = None) -> dict:
    """Makes an engine run a prompt through the model once for all methods that it will use; returns what it keeps.

    Methods attend to a prompt exactly (except with omnikv's option prefill, and in chunks), so the q, k and v that
    `keep` receives do not depend on the method. Those of as many prompts as fit in `room` bytes, by default half of the
    host's free memory, stay on the host, by tokens (and by length, where RoPE follows it), until the caller removes
    them from the result. Of a prompt that begins as one of them does, by more than half, only the rest runs through the
    model.
    So does a second pass, whatever the budget.
    """
    model, prefill, c, recorded = engine.model, engine.model.prefill, engine.config, {}
    if room is None:
        room = parallel.minimum(engine.ranks, parallel.free_share(torch.device("cpu")) // 2)
    token_bytes = c.n_layer * (c.n_head + 2 * c.n_kv_head) * c.head_dim * engine.dtype.itemsize

    def record(row: int, tokens: Tensor, length: int, progress: Callable, base: Prompt | None, common: int) -> Prompt:
        layers = engine.layers
        recorders = [Recorder(x.plan, base.vectors(i, common) if base else ()) for i, x in enumerate(layers)]
        model.set_kv(recorders)
        try:
            if base is None:
                logits = prefill(row, tokens, length, progress)
            else:
                model.inv_freq[row] = base.inv_freq
                logits = model.extend(row, tokens[common:], common)
        finally:
            model.set_kv(layers)
        vectors, inv_freq = [recorder.qkv for recorder in recorders], model.inv_freq[row].clone()
        if base is not None:
            base.share(common)
            return Prompt(tokens, base, common, logits, inv_freq, vectors)
        nothing = [tuple(x[:, :, :0] for x in own) for own in vectors]
        return Prompt(tokens, None, len(tokens), logits, inv_freq, nothing, vectors)

    def once(
        row: int,
        tokens: Tensor,
        length: int = 0,
        progress: Callable[[Iterable], Iterable] = iter,
        texts: Iterable[Tensor] = (),
        chunk: int = 0,
    ) -> Tensor:
        layers, rope = engine.layers, length if c.rope["rope_type"] == "dynamic" else 0
        if 0 < chunk < tokens.numel() or not all(layer.exact_prompt for layer in layers):
            # In chunks, the method decides what the layers above receive.
            return prefill(row, tokens, length, progress, texts, chunk)
        key = tuple(tokens.tolist()), rope
        if key not in recorded:
            alike = [p for (_, own), p in recorded.items() if own == rope and p.base is None]
            base = max(alike if engine.plan.window is None else [], key=lambda p: p.begins(tokens), default=None)
            common = base.begins(tokens) if base else 0
            if common <= tokens.numel() // 2:
                base, common = None, 0
            held = sum(p.tokens.numel() - (p.common if p.base else 0) for p in recorded.values())
            if (held + tokens.numel() - common) * token_bytes > room:
                return prefill(row, tokens, length, progress, texts)
            recorded[key] = record(row, tokens, length, progress, base, common)
        prompt = recorded[key]
        model.inv_freq[row] = prompt.inv_freq
        for i, layer in enumerate(layers):
            q, k, v = (x.to(engine.device) for x in prompt.vectors(i, tokens.numel()))
            if layer.statistics and (i, layer.statistics) not in prompt.statistics:
                prompt.statistics[i, layer.statistics] = layer.attend_prompt(q, k, v)[1:]
            layer.begin(row, tokens.numel())
            layer.keep(row, q, k, v, *prompt.statistics.get((i, layer.statistics), ()))
        model.finish(row, tokens.numel(), second_pass(prompt, layers, iter(texts)))
        return prompt.logits

    model.prefill = once
    return recorded
