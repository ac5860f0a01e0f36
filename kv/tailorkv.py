"""tailorkv: the layers that look at everything in one bit, the others' tokens fetched from the host (arXiv 2505.19586).

Layers whose attention is dense (Equations 6 to 9, calibrate.py) store every token in 1 or 2 bits (Equation 4, kivi.py
without a recent window). Of the others' prompts K and V live on the host, K channel by channel a second time; the
device keeps the first tokens, the last, and each channel's largest |K|. While the layer below computes, its input to
attention, multiplied by this layer's query weights, predicts the query (Equation 12); the channels where |q| max |K| is
largest are fetched (Equation 10). Their products with the true query choose the tokens to fetch. The queries of a group
choose together, by their mean.

The budget t is n_local + n_topk, n_local = min(128, t / 3). Attended: these, and all that was generated.

Memory, device: 2 S Hk D (bits / 16 + 2 / 64) values of a quantized layer, two buffers of S d Hk values for d channels
(Table 2), and t tokens of every other layer; host: K, V and K again. Traffic: d channels of S tokens, and the budget.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kv import offload, ops
from kv.base import KV, Shape, option
from kv.fetched import FetchedTokens, FetchMethod
from kv.kivi import GROUP, Quantized, layer_bytes

LONG = 32 * 1024  # tokens of a prompt beyond which more channels are fetched


class Tailored(FetchedTokens):
    """A layer that is not quantized."""

    wants_lookahead = True

    def __init__(self, shape: Shape, layer: int, budget: int, options: "TailorKVMethod", shared: "Shared"):
        super().__init__(shape, layer, budget, options, shared.rows, shared.row_workers)
        self.channels = shared.channels
        self.allocate("largest", shape.n_kv_head, shape.head_dim, dtype=torch.float32, beyond="max |K|")
        what = f"the channels of layer {layer}"
        rows, width = self.largest.numel(), (shape.max_prompt,)
        staged, workers = shared.staged_channels[layer % 2], shared.channel_workers
        self.channel_pool = options.pool(what, rows, width, staged, shape, workers)
        self.pools.append(self.channel_pool)
        self.register_buffer("channel_buffer", self.channel_pool.buffer, persistent=False)
        self.pending: tuple[Tensor, Tensor] | None = None  # between the lookahead and the layer: channels and a token

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().keep(row, q, k, v)
        length, channels = k.shape[2], k.shape[1] * k.shape[3]
        self.channel_pool.write(row * channels, k[0].mT.flatten(0, 1), slice(0, length))
        self.largest[row] = k[0].abs().amax(1)

    def lookahead(self, q: Tensor, x: Tensor, active: Tensor) -> Tensor:
        channel = ops.top(self.mean(q).abs() * self.largest, self.channels)  # [B,Hk,d]
        b, h, d = self.largest.shape
        wanted = (torch.arange(b * h, device=q.device).view(b, h, 1) * d + channel).flatten()
        token, x = self.channel_pool.issue(wanted, active.repeat_interleave(h * self.channels), x)
        self.pending = channel, token
        return x

    def mean(self, q: Tensor) -> Tensor:
        """Of a group's queries: [B,Hq,1,D] -> [B,Hk,D] fp32"""
        return ops.grouped(q, self.shape.n_kv_head).float().mean(2)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        age = self.store_generated(k, v, pos, active)
        if self.pending is None:  # the first layer: nothing could look ahead
            q = self.lookahead(q, q, active)
        (channel, token), self.pending = self.pending, None
        keys = self.channel_pool.take(self.channel_pool.wait(token, q)).unflatten(0, channel.shape)  # [B,Hk,d,S]
        part = self.mean(q).gather(2, channel)[:, :, None]
        scores = ops.sums(part, keys.float())[:, :, 0]
        position = torch.arange(self.shape.max_prompt, device=q.device)
        between = (position >= self.sinks) & (position < (self.prompt - self.ends + self.sinks)[:, None])
        q = self.fetch(scores, between, active, q)
        ends, new = self.held(age)
        return self.attend_parts(q, ends, self.index >= 0, new)

    def step_bytes(self, length: int) -> tuple[int, int]:
        """The channels come from the host, as many tokens of them as are planned, and are read where they arrive."""
        device, host = self.fetched_bytes(length)
        channels = self.shape.n_kv_head * self.channels * self.shape.max_prompt * self.shape.dtype.itemsize
        return device + channels, host + channels * (self.channel_pool.host_bytes > 0)

    def overhead(self) -> dict[str, int]:
        declared = super().overhead()
        return declared | {"staging": declared["staging"] - self.channel_pool.staged_bytes}  # those are in Table 2


class Shared:
    """What the layers use in turn: threads, and where rows and channels arrive."""

    def __init__(self, shape: Shape, budget: int, options: "TailorKVMethod"):
        self.channels = options.fetched_channels(shape)
        slots = shape.batch * shape.n_kv_head * self.channels
        self.channel_workers, self.row_workers = (offload.Workers(options.threads) for _ in range(2))
        self.staged_channels = [options.staged(slots, (shape.max_prompt,), shape, early=True) for _ in range(2)]
        self.rows = options.staged_rows(shape, budget)


@dataclass(frozen=True)
class TailorKVMethod(FetchMethod):
    help = "dense layers in one bit, tokens of the others from the host by predicted queries"
    lossless = {"quant_layers": []}
    quant_layers: list[int] | None = option(None, "layers that are quantized", min=0)
    bits: Literal[1, 2, 4, 8] = option(1, "of a value in them")
    group: int = option(GROUP, "tokens over which a channel of K is quantized", min=8)
    channels: int | None = option(None, "of K that are fetched; auto: 8, or 12 for plans beyond 32K tokens", min=1)

    def fetched_channels(self, shape: Shape) -> int:
        """d_s: of a KV head's K."""
        return min(self.channels or (12 if shape.max_prompt > LONG else 8), shape.head_dim)

    def quantized_layers(self, shape: Shape) -> list[int]:
        """Those of the options; else 0, and 1 too for Llama-2-7B, Yi-6B and Yi-9B (section 5.1)."""
        if self.quant_layers is None:
            known = shape.dim == 4096 and (shape.n_layer, shape.n_kv_head) in ((32, 32), (32, 4), (48, 4))
            return [0, 1] if known else [0]
        if any(layer >= shape.n_layer for layer in self.quant_layers):
            raise ValueError(f"tailorkv: quant_layers must lie below {shape.n_layer}, not {self.quant_layers}")
        return sorted(set(self.quant_layers))

    def minimum(self, shape: Shape) -> int:
        return max(8, self.initial + 1)

    def memory(self, shape: Shape, budget: int) -> int:
        """Table 2, and on the host K, V and K again."""
        quantized = len(self.quantized_layers(shape))
        sparse = shape.n_layer - quantized
        prompt = shape.max_prompt * shape.slot_bytes
        buffers = 2 * shape.batch * shape.n_kv_head * self.fetched_channels(shape) * shape.max_prompt
        layers = quantized * layer_bytes(shape, self.bits, self.group) + sparse * prompt * 3 // 2
        return layers + buffers * shape.dtype.itemsize * (sparse > 0)

    def build(self, shape: Shape, budget: int) -> list[KV]:
        quantized, shared = self.quantized_layers(shape), Shared(shape, budget, self)
        return [
            Quantized(shape, self.bits, self.group)
            if layer in quantized
            else Tailored(shape, layer, budget, self, shared)
            for layer in range(shape.n_layer)
        ]
