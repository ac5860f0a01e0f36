"""What methods have in common that keep both ends of a prompt on the device and fetch some of what lies between."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kv import offload, ops
from kv.base import KV, Shape


class Fetched(KV):
    """Slots: the ends of the prompt, what was fetched, the generated tokens.

    The pool holds K and V of what lies between, `width` tokens a row of it; `count` rows are fetched.
    """

    recent = 1

    def __init__(self, shape: Shape, sinks: int, ends: int, count: int, width: int, pool: offload.Pool):
        super().__init__()
        self.shape, self.sinks, self.ends, self.count = shape, sinks, ends, count
        self.chosen = ends + count * width  # slots before the generated tokens
        self.capacity = self.chosen + shape.max_new_tokens
        self.register_slots(shape, self.capacity)
        prompt = torch.zeros(shape.batch, dtype=torch.int64, device=shape.device)
        self.register_buffer("prompt", prompt, persistent=False)  # tokens of each row's
        index = torch.full((shape.batch, shape.n_kv_head, count), -1, device=shape.device)
        self.register_buffer("index", index, persistent=False)  # what was chosen; -1: none
        self.pool = pool
        self.register_buffer("pool_buffer", pool.buffer, persistent=False)
        self.span = ops.span(None, self.capacity, self.capacity, shape.device)

    def keep_ends(self, row: int, k: Tensor, v: Tensor) -> None:
        """The first tokens and the last of a prompt: k and v [Hk,T,D]."""
        self.prompt[row] = length = k.shape[1]
        self.index[row] = -1
        ends = torch.arange(min(length, self.ends), device=k.device)
        ends = torch.where(ends < self.sinks, ends, ends + max(0, length - self.ends))
        self.k[row, :, : len(ends)], self.v[row, :, : len(ends)] = k[:, ends], v[:, ends]

    def finish(self, row: int) -> None:
        self.pool.settle()

    def store(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """Takes in one token a row; its place [B] among those generated."""
        age = (pos - self.prompt).clamp(min=0)  # of a row that has generated nothing: inactive
        ops.store(self.k, k, self.chosen + age, active)
        ops.store(self.v, v, self.chosen + age, active)
        return age

    def held(self, age: Tensor) -> tuple[Tensor, Tensor]:
        """Which slots of the ends, and which of the generated tokens, hold one: two of [B,n]."""
        ends = torch.arange(self.ends, device=age.device) < self.prompt[:, None]
        return ends, torch.arange(self.span.shape[0] - self.chosen, device=age.device) <= age[:, None]

    def attend(self, q: Tensor, ends: Tensor, chosen: Tensor, new: Tensor) -> Tensor:
        """Attention to those slots of the ends [B,n], of what was fetched [B,Hk,n], of the generated tokens [B,n]."""
        n, (b, h, _) = self.span.shape[0], chosen.shape
        mask = torch.cat([ends[:, None].expand(b, h, -1), chosen, new[:, None].expand(b, h, -1)], dim=2)
        rows, keys, values = q.view(b, h, -1, q.shape[-1]), self.k.narrow(2, 0, n), self.v.narrow(2, 0, n)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask[:, :, None]).view(q.shape)

    def reset(self, row: int) -> None:
        self.prompt[row], self.index[row] = 0, -1

    def fit(self, length: int, new: int) -> None:
        self.span = ops.span(self.span, self.chosen + max(new, 1), self.capacity, self.shape.device)

    def host_bytes(self) -> int:
        return self.pool.host_bytes

    def fetched(self) -> tuple[int, int]:
        return self.pool.counts

    def close(self) -> None:
        self.pool.close()
