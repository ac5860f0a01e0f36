"""omnikv's context bank: the prompt of its sparse layers, on the host or quantized. kv/omnikv.py is the method."""

from dataclasses import replace

import torch
from torch import Tensor

from kv.base import Buffers
from kv.method import Shape
from kv.parts import quant
from kv.parts.offload import OffloadMethod, Workers


class ContextBank(Buffers):
    """The prompt of a segment's sparse layers: a row holds one token's K and V in all of them."""

    def __init__(self, shape: Shape, layers: list[int], k: int, options: OffloadMethod, workers: Workers):
        """k: how many tokens a step reads per row."""
        super().__init__(shape)
        self.layers, self.k, self.delta, self.bits = layers, k, options.delta, options.bits
        what = "layers " + ", ".join(map(str, layers))
        width = (len(layers), 2, shape.n_kv_head, shape.head_dim)
        if self.bits < 16:
            width, shape = (*width[:3], quant.vector_bytes(width[3], self.bits)), replace(shape, dtype=torch.uint8)
        rows, slots = shape.batch * shape.max_prompt, shape.batch * k
        staged = options.staged(slots, width, shape)
        self.pool = options.pool(what, rows, width, staged, shape, workers, options.delta)
        self.hold("pool_buffer", self.pool.buffer)
        self.hold("ticket", self.pool.ticket(slots))  # from layer to layer

    def write(self, row: int, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores one layer's prompt in the pool: k and v [Hk,T,D]."""
        step = k.shape[1] if self.bits == 16 else quant.SLICE
        for i, x in enumerate((k, v)):
            for start, part in enumerate(x.transpose(0, 1).split(step)):
                first = row * self.shape.max_prompt + start * step
                self.pool.write(first, quant.encode(part, self.bits), self.layers.index(layer), i)

    def read(self, row: int, layer: int, prompt: int) -> tuple[Tensor, Tensor]:
        """K and V [Hk,T,D] of one layer's prompt."""
        rows = self.pool.read(row * self.shape.max_prompt, prompt)[:, self.layers.index(layer)]  # [T,2,Hk,D]
        return self.decoded(rows).permute(1, 2, 0, 3).unbind(0)

    def decoded(self, rows: Tensor) -> Tensor:
        return quant.decode(rows, self.bits, self.shape.head_dim, self.shape.dtype)

    def fetch(self, index: Tensor, active: Tensor, y: Tensor) -> Tensor:
        """Issues a fetch of the prompt positions index [B,k], below 0 none; returns y, see Pool.issue."""
        first = torch.arange(len(active), device=active.device)[:, None] * self.shape.max_prompt
        rows = torch.where(index < 0, -1, index + first).flatten()
        ticket, y = self.pool.issue(rows, active, y)
        self.ticket.copy_(ticket)
        return y

    def keep_slots(self, best: Tensor, index: Tensor) -> Tensor:
        """With `delta`, reorders best [B,k] so that tokens in the last step's index [B,k] keep their slots."""
        if not self.delta:
            return best
        n = self.shape.max_prompt

        def flags(index: Tensor) -> Tensor:
            marks = torch.zeros(index.shape[0], n + 1, dtype=torch.bool, device=index.device)
            return marks.scatter(1, torch.where(index < 0, n, index), True)

        stays = flags(best).gather(1, index.clamp(0)) & (index >= 0)  # [B,k] slots
        enters = ~flags(index).gather(1, best.clamp(0)) & (best >= 0)
        # The n-th entering token goes to the n-th free slot; the free slots left get -1.
        order = torch.where(enters, enters.cumsum(1) - 1, self.k)
        queue = torch.full((best.shape[0], self.k + 1), -1, device=best.device).scatter(1, order, best)
        free = ((~stays).cumsum(1) - 1).clamp(min=0)
        return torch.where(stays, index, queue.gather(1, free))

    def wait(self, q: Tensor) -> None:
        """Waits, after q is known, for the chosen tokens."""
        self.ticket.copy_(self.pool.wait(self.ticket, q))

    def take(self, column: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [B,Hk,k,D] of the chosen tokens in one layer's `column` [1]; undefined where index is -1."""
        rows = self.decoded(self.pool.take(self.ticket, column))  # [B k,2,Hk,D]
        return rows.unflatten(0, (-1, self.k)).permute(2, 0, 3, 1, 4).unbind(0)

    def part(self, row: int, prompt: int) -> Tensor:
        """A view of the pool rows of row `row`, whose prompt has `prompt` tokens."""
        return self.pool.part(row * self.shape.max_prompt, prompt)
