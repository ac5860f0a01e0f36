"""streaming: attention sinks and a recent window (StreamingLLM, Xiao et al., arXiv 2309.17453).

Keeps the first `sinks` tokens and the newest budget - sinks, including the current one, in a ring of fixed size. Within
the model's context, keys keep their original positions. Beyond it, a row's sinks move along with the window, to the
positions just before it, as in the paper (section 3.2), so that no distance exceeds the cache. Memory and traffic:
`budget` tokens per KV head, however long the text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.base import KV
from kv.full import Full
from kv.method import Method, Plan, option
from kv.parts import ops

SINKS = option(4, "first tokens that are never dropped", min=0)  # an option of several methods


class Streaming(Full):
    """`Full` with `size` slots, of which all but the sinks are a ring; past the context the sinks move along."""

    def __init__(self, plan: Plan, size: int, sinks: int):
        super().__init__(plan, size, sinks)
        self.endless = not self.holds_all
        self.hold("inv_freq", ops.inv_freq(plan))
        self.allocate_state("shift")  # by how many positions each row's sinks have moved
        self.allocate("sink_keys", plan.n_kv_head, self.sinks, plan.head_dim)
        self.contents["sink_keys"] = 1, 1

    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        if self.past_context and self.sinks:
            self.move_sinks(pos, active)
        return super().decode(q, k, v, pos, active)

    def move_sinks(self, pos: Tensor, active: Tensor) -> None:
        """Moves sink j of each row past the context to position pos - (size - 1) + j."""
        past = (active & (pos >= self.plan.max_length))[:, None, None, None]
        first = past & (self.shift == 0)[:, None, None, None]
        keys = self.k[:, :, : self.sinks]
        self.sink_keys.copy_(torch.where(first, keys, self.sink_keys))
        self.shift.copy_(torch.where(past.flatten(), (pos + 1 - self.size).clamp(min=0), self.shift))
        keys.copy_(torch.where(past, ops.rerotate(self.sink_keys, self.shift[:, None, None], self.inv_freq), keys))

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        return KV.prefill_next(self, row, q, k, v, pos)  # its window is for what a chunk leaves behind

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        if not self.sinks or pos + k.shape[2] <= self.plan.max_length:
            return super().extend(row, q, k, v, pos)
        active, ys = torch.zeros(self.plan.batch, dtype=torch.bool, device=q.device), []
        at = active.long()
        active[row] = True
        for i in range(k.shape[2]):  # decode steps: each token moves the sinks
            at[row] = pos + i
            self.before_step(pos + i + 1, pos + i + 1)
            inputs = (x[:, :, i : i + 1].expand(self.plan.batch, -1, -1, -1) for x in (q, k, v))
            ys.append(self.decode(*inputs, at, active)[row, None])
        return torch.cat(ys, dim=2)


@dataclass(frozen=True)
class StreamingMethod(Method):
    name = "streaming"
    paper = "https://arxiv.org/abs/2309.17453"
    help = "sinks and a recent window"
    sinks: int = SINKS

    def minimum(self, plan: Plan) -> int:
        return self.sinks + 1

    def build(self, plan: Plan, budget: int) -> list[KV]:
        return [Streaming(plan, budget, self.sinks) for _ in range(plan.n_layer)]
