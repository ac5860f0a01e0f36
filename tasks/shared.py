"""Prefills each prompt once for all methods."""

import torch
from torch import Tensor

from engine import Engine
from kv import KV
from runtime import processes
from terminal.progress import Phase


class Seen(KV):
    """Records on the host the q, k and v of a prompt that a layer's method receives."""

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.qkv = q.cpu(), k.cpu(), v.cpu()

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        raise NotImplementedError("only prompts are recorded")


class SharedPrompts(Engine):
    """Runs a prompt through the model once for all methods.

    Methods attend to a prompt exactly (except with omnikv's option prefill), so the q, k and v that `keep` receives do
    not depend on the method. Those of as many prompts as fit stay on the host.
    """

    seen: dict[tuple, tuple]  # for a prompt: logits, RoPE speeds, every layer's q, k, v, and statistics of attention
    room: float  # bytes of host memory left for `seen`

    def share(self) -> "SharedPrompts":
        """Starts sharing prompts, in at most half of the host's free memory."""
        self.seen, self.room = {}, processes.least(self.ranks, processes.free_share(torch.device("cpu")) // 2)
        return self

    def prefill(self, row: int, prompt: list[int], planned: int | None = None, phase: Phase | None = None) -> Tensor:
        key, c = (tuple(prompt), planned), self.config
        bytes_ = c.n_layer * (c.n_head + 2 * c.n_kv_head) * len(prompt) * c.head_dim * self.dtype.itemsize
        if not all(layer.exact_prompt for layer in self.layers):
            return super().prefill(row, prompt, planned, phase)
        if key not in self.seen:
            if bytes_ > self.room:
                return super().prefill(row, prompt, planned, phase)
            methods, seen = self.layers, [Seen(self.shape) for _ in self.layers]
            self.give(seen)
            try:
                logits = self.model.prefill(torch.tensor(prompt, device=self.device), row, planned)
            finally:
                self.give(methods)
            self.seen[key] = logits, self.model.rope_speed[row].clone(), [layer.qkv for layer in seen], {}
            self.room -= bytes_
        for layer in self.layers:
            layer.reset(row)
        self.decoder.reset(row)
        logits, self.model.rope_speed[row], qkv, statistics = self.seen[key]
        for i, (layer, x) in enumerate(zip(self.layers, qkv, strict=True)):
            q, k, v = (part.to(self.device) for part in x)
            if layer.statistics and (i, layer.statistics) not in statistics:
                statistics[i, layer.statistics] = layer.attend_prompt(q, k, v)[1:]
            layer.keep(row, q, k, v, *statistics.get((i, layer.statistics), ()))
        for layer in self.layers:
            layer.finish(row)
        return logits

    def give(self, layers: list[KV]) -> None:
        for block, layer in zip(self.model.layers, layers, strict=True):
            block.attention.kv = layer
