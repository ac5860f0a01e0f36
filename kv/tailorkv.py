"""tailorkv: quantizes layers with dense attention, offloads the others and fetches tokens (arXiv 2505.19586).

Quantization-friendly layers, whose attention is dense (Equations 6 to 9, calibrate.py), store every token in `bits`
bits, 1 or 2 in the paper (Equation 4, quant.py): they are kivi's layers without a recent window. One bit, the minimum
and the maximum of each group, can ruin a layer: on a real model layer 0's output was wrong by 2.3 times its norm.
Sparsity-friendly layers, all others, keep the prompt's K and V on the host, with a second, channel-major copy of K; the
device keeps the first and last tokens and each channel's largest |K|. While layer l - 1 computes, its input to
attention, multiplied by layer l's query weights, predicts the query of layer l (Equation 12, in model.py), and the
channels of K with the largest |q| max |K| are prefetched (Equation 10). In layer l the products of the true query with
these channels choose the tokens to fetch. The queries of a group choose together, by their mean.

The budget t is n_local + n_topk; n_local = min(128, t / 3) includes the first 4 (fetched.py). A step attends to
these and to all generated tokens.

Memory, device: 2 S Hk D (bits / 16 + 2 / 64) values per quantized layer, two buffers of S d Hk values for d channels
(Table 2), and t tokens per other layer; host: K, V and K again per other layer. Traffic: a quantized layer's codes; in
other layers d channels of S tokens, and the budget.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.kivi import GROUP, Quantized, packed_bytes
from kv.method import Plan, option
from kv.parts import ops
from kv.parts.fetched import FetchedTokens, FetchMethod
from kv.parts.offload import Staged, Workers

LONG = 32 * 1024  # a longer max_prompt, in tokens, fetches more channels


class Tailored(FetchedTokens):
    """A sparsity-friendly layer."""

    wants_lookahead = True

    def __init__(self, plan: Plan, layer: int, budget: int, options: "TailorKVMethod", *staged: Staged | None):
        """staged: where tokens, and where channels arrive; None unless threads fetch them."""
        tokens, channels = staged
        super().__init__(plan, layer, budget, options, tokens)
        self.channels = options.fetched_channels(plan)
        self.allocate("largest", plan.n_kv_head, plan.head_dim, dtype=torch.float32)
        size = (plan.n_kv_head * plan.head_dim, plan.max_prompt)
        self.channel_pool = options.pool(f"the channels of layer {layer}", size, channels, plan)
        self.pools.append(self.channel_pool)
        self.hold("channel_buffer", self.channel_pool.buffer)
        self.predicted = layer > 0  # a layer below predicts this layer's query
        # From `lookahead` to `decode`: the channels that are fetched, and Pool.issue's ticket.
        self.allocate("channel", plan.n_kv_head, self.channels, dtype=torch.int64)
        self.hold("ticket", self.channel_pool.ticket(plan.n_kv_head * self.channels))

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        super().keep(row, q, k, v, pos)
        self.channel_pool.write(row, 0, k[0].mT.flatten(0, 1), slice(pos, pos + k.shape[2]))
        largest = k[0].abs().amax(1)
        self.largest[row] = torch.maximum(self.largest[row], largest) if pos else largest

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        yield "channels", self.channel_pool.part(row, self.channel_pool.count)[:, : int(self.prompt[row])]
        yield "largest", self.largest[row]

    def lookahead(self, q: Tensor, x: Tensor, active: Tensor) -> Tensor:
        """Prefetches the channels with the largest |q| max |K| (Equation 10).

        The model calls it before the layer below attends, with the query [B,Hq,1,D], RoPE applied, that this layer's
        weights predict from the input of that layer (Equation 12), which continues with the x returned: see Pool.issue.
        """
        channel = ops.top(self.mean(q).abs() * self.largest, self.channels)  # [B,Hk,d]
        self.channel.copy_(torch.where(active[:, None, None], channel, self.channel))
        heads, size = self.largest.shape[1:]
        wanted = torch.arange(heads, device=q.device)[:, None] * size + self.channel
        ticket, x = self.channel_pool.issue(wanted, active, x)
        self.ticket.copy_(ticket)
        return x

    def mean(self, q: Tensor) -> Tensor:
        """The mean of each group's queries: [B,Hq,1,D] -> [B,Hk,D] fp32."""
        return ops.grouped(q, self.plan.n_kv_head).float().mean(2)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        self.insert(k, v, pos, active)
        if not self.predicted:
            q = self.lookahead(q, q, active)
        waited = self.channel_pool.wait(self.ticket, q)
        keys = self.channel_pool.take(waited).unflatten(0, self.channel.shape)  # [B,Hk,d,S]
        query = ops.stored(self.mean(q).gather(2, self.channel))[:, :, None]  # [B,Hk,1,d]
        scores = ops.weighted_sum(query, keys.float())[:, :, 0]  # products over the d channels, [B,Hk,S]
        position = torch.arange(self.plan.max_prompt, device=q.device)
        between = (position >= ops.column(self.sinks)) & (position < (self.prompt - self.local)[:, None])
        q = self.fetch(scores, between, active, q, self.plan.max_prompt)
        return self.attend_parts(q, pos, self.index >= 0)

    def step_bytes(self, length: int) -> tuple[int, int]:
        """The fetched channels, of max_prompt tokens, are read on the host and again where they arrive."""
        device, host = super().step_bytes(length)
        prefetched = self.plan.n_kv_head * self.channels * self.plan.max_prompt * self.plan.dtype.itemsize
        return device + prefetched, host + prefetched * self.channel_pool.on_host


@dataclass(frozen=True)
class TailorKVMethod(FetchMethod):
    name = "tailorkv"
    paper = "https://arxiv.org/abs/2505.19586"
    help = "dense layers in two bits, tokens of the others from the host by predicted queries"
    lossless = {"quant_layers": []}
    quant_layers: list[int] | None = option(None, "layers that are quantized", min=0)
    bits: Literal[1, 2, 4, 8] = option(2, "bits of a stored value in them; 1 can ruin a layer")
    group: int = option(GROUP, "tokens that share a scale in each channel of K", min=8)
    channels: int | None = option(None, "channels of K to fetch; auto: 8, or 12 if max_prompt is beyond 32K", min=1)

    def fetched_channels(self, plan: Plan) -> int:
        """d_s: channels fetched per KV head."""
        return min(self.channels or (12 if plan.max_prompt > LONG else 8), plan.head_dim)

    def quantized_layers(self, plan: Plan) -> list[int]:
        """The option's layers; by default 0, for Llama-2-7B, Yi-6B and Yi-9B also 1 (section 5.1)."""
        if self.quant_layers is None:
            known = plan.dim == 4096 and (plan.n_layer, plan.model_kv_heads) in ((32, 32), (32, 4), (48, 4))
            return [0, 1] if known else [0]
        if any(layer >= plan.n_layer for layer in self.quant_layers):
            raise ValueError(f"tailorkv: quant_layers must lie below {plan.n_layer}, not {self.quant_layers}")
        return sorted(set(self.quant_layers))

    def plan_sizes(self, plan: Plan, budget: int) -> dict[str, int]:
        return {} if self.channels else {"channels": self.fetched_channels(plan)}

    def paper_bytes(self, plan: Plan, budget: int) -> int:
        """Table 2, and K, V and K again on the host."""
        dense = len(self.quantized_layers(plan))
        sparse = plan.n_layer - dense
        buffers = 2 * plan.batch * plan.n_kv_head * self.fetched_channels(plan) * plan.max_prompt
        host = sparse * plan.max_prompt * plan.slot_bytes * 3 // 2
        device = dense * packed_bytes(plan, self.bits, self.group) + buffers * plan.dtype.itemsize * (sparse > 0)
        return device + host

    def build(self, plan: Plan, budget: int) -> list[KV]:
        layers: list[KV] = []
        quantized, tokens = self.quantized_layers(plan), self.staged_tokens(plan, budget)
        workers = Workers(self.threads)
        size = (plan.n_kv_head * self.fetched_channels(plan), plan.max_prompt)
        channels = [self.staged(size, plan, workers, early=True) for _ in range(2)]  # layers use them in turn
        for layer in range(plan.n_layer):
            if layer in quantized:
                layers.append(Quantized(plan, self.bits, self.group))
            else:
                layers.append(Tailored(plan, layer, budget, self, tokens, channels[layer % 2]))
        return layers
