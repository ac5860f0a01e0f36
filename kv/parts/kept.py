"""The base of methods that evict once, after the prompt, and keep every generated token."""

import torch
from torch import Tensor

from kv.base import KV, Held
from kv.method import Shape
from kv.parts import ops


class Kept(KV):
    """Slots for `kept` tokens of a prompt, in order of position, followed by every generated token."""

    rewinds = True

    def __init__(self, shape: Shape, kept: int, width: int | None = None):
        """width: bytes of a stored vector, if `coded` changes it."""
        super().__init__(shape)
        self.kept = min(kept, shape.max_prompt)
        self.allocate_slots(self.kept + shape.max_new_tokens, width)
        self.allocate_state("dropped")  # how many tokens of each row's prompt are gone, [B]
        self.allocate_state("position", shape.n_kv_head, self.kept, dtype=torch.int32, fill=-1)  # of the kept tokens

    def fill(self, row: int, k: Tensor, v: Tensor, kept: Tensor) -> None:
        """Stores the tokens at positions kept [H,n] of k and v [1,Hk,T,D]; H is Hk, or a multiple of it."""
        heads, n = kept.shape
        head = torch.arange(heads, device=k.device)[:, None] // (heads // k.shape[1])
        self.k[row, :, :n], self.v[row, :, :n] = (self.coded(x[0, head, kept]) for x in (k, v))
        self.dropped[row] = k.shape[2] - n
        self.position[row, :, :n] = kept

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        self.store(self.coded(k), self.coded(v), ops.following(pos - self.dropped, k.shape[2]), active)

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        first = pos - int(self.dropped[row])
        for buffer, x in ((self.k, k), (self.v, v)):
            buffer[row, :, first : first + k.shape[2]] = self.coded(x[0])

    def held(self, row: int, length: int) -> Held:
        dropped = int(self.dropped[row])
        position = self.position[row, :, : length - dropped]
        position = position[:, : int((position[0] >= 0).sum())]
        generated = torch.arange(position.shape[1] + dropped, length, device=position.device)
        k, v = (self.decoded(x[row, :, : length - dropped]) for x in (self.k, self.v))
        return Held(k, v, torch.cat([position, generated.expand(len(position), -1)], dim=1))

    def views(self, row: int, length: int) -> dict[str, Tensor]:
        return super().views(row, length - int(self.dropped[row]))

    def coded(self, x: Tensor) -> Tensor:
        """Converts vectors to the form in which they are stored."""
        return x

    def decoded(self, x: Tensor) -> Tensor:
        """The inverse of `coded`."""
        return x

    def slots_to_read(self, length: int, new: int) -> int:
        return min(length, self.kept + new)
