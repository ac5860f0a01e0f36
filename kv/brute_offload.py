"""brute_offload: keeps the cache of the last layers on the host and loads it whole at every step.

OmniKV's baseline "Brutal Offload" (OpenReview ulCAPXYXfa, section 5.2): the last 20 of 32 layers, each loaded four
layers ahead. The prompt is on the host; generated tokens stay on the device. Memory: the full cache, and buffers for
the layers being loaded. Traffic: everything, the host's part over the bus.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV, Views
from kv.full import Full
from kv.method import Method, Plan, option
from kv.parts import ops
from kv.parts.fetched import Parts
from kv.parts.offload import Staged, ThreadedPool, Workers


class Ahead(Full):
    """A layer on the device, which may start the loads of later layers."""

    def __init__(self, plan: Plan):
        super().__init__(plan)
        self.loads: tuple[Loaded, ...] = ()

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        for layer in self.loads:
            q = layer.load(q, active)
        return super().decode(q, k, v, pos, active)


class Loaded(Parts):
    """A layer whose prompt is on the host and is loaded whole; generated tokens stay on the device."""

    attends_to_all = True

    def __init__(self, plan: Plan, pool: ThreadedPool):
        super().__init__(plan, chosen=0)
        self.recent, self.loads, self.pool, self.pools = plan.planned, (), pool, [pool]
        self.hold("pool_buffer", pool.buffer)
        self.hold("ticket", pool.ticket(plan.max_prompt))

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0) -> None:
        self.prompt[row] = pos + k.shape[2]
        for i, x in enumerate((k, v)):
            self.pool.write(row, pos, x[0].transpose(0, 1), i)

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        yield "pool", self.pool.part(row, int(self.prompt[row]))

    def held_prompt(self, row: int, prompt: int) -> tuple[Tensor, Tensor]:
        return self.pool.read(row, prompt).permute(1, 2, 0, 3).unbind(0)

    def load(self, q: Tensor, active: Tensor) -> Tensor:
        """Issues the load of the whole prompt; an earlier layer continues with the q returned, see Pool.issue."""
        position = torch.arange(self.plan.max_prompt, device=self.prompt.device)
        wanted = torch.where(position < self.prompt[:, None], position, -1)
        ticket, q = self.pool.issue(wanted, active, q, after=q)
        self.ticket.copy_(ticket)
        return q

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        for layer in self.loads:
            q = layer.load(q, active)
        self.insert(k, v, pos, active)
        loaded = self.pool.wait(self.ticket, q)
        parts = [self.pool.take(loaded, i).unflatten(0, (q.shape[0], -1)).transpose(1, 2) for i in range(2)]
        new = [self.read(self.k), self.read(self.v)]
        keys, values = (torch.cat(pair, dim=2) for pair in zip(parts, new, strict=True))
        prompt = torch.arange(self.plan.max_prompt, device=q.device) < self.prompt[:, None]
        return ops.attend(q, keys, values, torch.cat([prompt, self.occupied(pos)[1]], dim=1))

    def step_bytes(self, length: int) -> tuple[int, int]:
        units = self.plan.n_kv_head * self.plan.unit_bytes
        return units * length, units * min(length, self.plan.max_prompt)


@dataclass(frozen=True)
class BruteOffloadMethod(Method):
    name = "brute_offload"
    paper = "https://openreview.net/forum?id=ulCAPXYXfa"
    help = "every token; most layers' K and V loaded from the host at every step"
    budgeted = False
    layers: int | None = option(None, "how many of the last layers are on the host; auto: 20 of 32", min=1)
    ahead: int = option(4, "how many layers before its use a load starts", min=1)
    threads: int = option(4, "host threads that load", min=1, max=256)

    def paper_bytes(self, plan: Plan, budget: None) -> int:
        """The full cache, and the buffers where prompts arrive: those of `ahead` layers, and of the one that reads."""
        return plan.full_bytes() + (self.ahead + 1) * plan.max_prompt * plan.slot_bytes

    def build(self, plan: Plan, budget: None) -> list[KV]:
        count = int(plan.n_layer * 20 / 32 + 0.5) if self.layers is None else min(self.layers, plan.n_layer)
        first, workers = plan.n_layer - count, Workers(self.threads)
        size = (plan.batch, plan.max_prompt, 2, plan.n_kv_head, plan.head_dim)
        ring = [Staged(size, plan.dtype, plan.device, workers) for _ in range(min(self.ahead + 1, count))]
        layers: list[KV] = [Ahead(plan) for _ in range(first)]
        for layer in range(first, plan.n_layer):
            layers.append(Loaded(plan, ThreadedPool(f"layer {layer}", size, ring[layer % len(ring)])))
            begins = layers[max(0, layer - self.ahead)]
            begins.loads = (*begins.loads, layers[-1])
        return layers
