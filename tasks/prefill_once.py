"""Prefills each prompt once for all methods."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from engine import Engine
from kv import KV
from runtime import parallel


class Recorder(KV):
    """Records on the host the q, k and v of a prompt that a layer's method receives."""

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.qkv = q.cpu(), k.cpu(), v.cpu()

    def decode(self, *_) -> Tensor:
        raise NotImplementedError("only prompts are recorded")


def prefill_once(engine: Engine, room: float | None = None) -> dict:
    """Makes an engine run a prompt through the model once for all methods that it will use; returns what it keeps.

    Methods attend to a prompt exactly (except with omnikv's option prefill), so the q, k and v that `keep` receives do
    not depend on the method. Those of as many prompts as fit in `room` bytes, by default half of the host's free
    memory, stay on the host, by tokens (and by length, where RoPE follows it), until the caller removes them from the
    result.
    """
    model, prefill, c, recorded = engine.model, engine.model.prefill, engine.config, {}
    if room is None:
        room = parallel.minimum(engine.ranks, parallel.free_share(torch.device("cpu")) // 2)

    def once(row: int, tokens: Tensor, length: int = 0, progress: Callable[[Iterable], Iterable] = iter) -> Tensor:
        layers, key = engine.layers, (tuple(tokens.tolist()), length if c.rope["rope_type"] == "dynamic" else 0)
        bytes_ = c.n_layer * (c.n_head + 2 * c.n_kv_head) * tokens.numel() * c.head_dim * engine.dtype.itemsize
        full = key not in recorded and bytes_ + sum(size for size, *_ in recorded.values()) > room
        if full or not all(layer.exact_prompt for layer in layers):
            return prefill(row, tokens, length, progress)
        if key not in recorded:
            recorders = [Recorder(engine.shape) for _ in layers]
            model.set_kv(recorders)
            try:
                logits = prefill(row, tokens, length, progress)
            finally:
                model.set_kv(layers)
            recorded[key] = bytes_, logits, model.inv_freq[row].clone(), [recorder.qkv for recorder in recorders], {}
        _, logits, model.inv_freq[row], qkv, statistics = recorded[key]
        for i, (layer, x) in enumerate(zip(layers, qkv, strict=True)):
            q, k, v = (part.to(engine.device) for part in x)
            if layer.statistics and (i, layer.statistics) not in statistics:
                statistics[i, layer.statistics] = layer.attend_prompt(q, k, v)[1:]
            layer.set_sizes(row, tokens.numel())
            layer.keep(row, q, k, v, *statistics.get((i, layer.statistics), ()))
        for layer in layers:
            layer.finish(row)
        return logits

    model.prefill = once
    return recorded
