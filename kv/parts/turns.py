"""turns=true: RocketKV's multi-turn form, in which a question chooses anew among all tokens of all turns."""

import torch
from torch import Tensor

from kv.base import Held, Views
from kv.method import Plan
from kv.parts import attention
from kv.parts.offload import Pool


class Turns:
    """Put before a class that stands on `Scored` (kv/parts/scored.py): `history` holds every token of every turn, but
    for those generated since the last one. The slots hold what that one chose and all tokens generated since.
    """

    extends_alike = False

    def __init__(self, layer: int, host: bool, plan: Plan, *args):
        super().__init__(plan, *args)
        size = (plan.batch, plan.planned, 2, *self.k.shape[1::2])
        self.history = Pool(f"the history of layer {layer}", size, self.k.dtype, plan.device, host)
        self.pools = [self.history]
        self.hold("history_buffer", self.history.buffer)
        self.allocate_state("prompt")  # tokens of each row's prompt, [B]
        self.allocate("position", plan.n_kv_head, self.slots, dtype=torch.int32, fill=-1)  # a later turn keeps more
        self.choice = self.kept  # how many tokens the last turn chose

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.prompt[row] = k.shape[2]
        self.record(row, 0, k[0], v[0])
        self.choose_anew(row, q, k, v, 0)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        self.prompt[row] = pos + k.shape[2]
        keys, values = (torch.cat(x, dim=2) for x in zip(self.everything(row, pos), (k, v), strict=True))
        self.record(row, pos, k[0], v[0])
        self.choose_anew(row, q, keys, values, 0)
        return attention.suffix_attention(q, keys, values)

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        self.join(row, pos)
        self.record(row, pos, k[0], v[0])
        keys, values = self.everything(row, pos + k.shape[2])
        self.choose_anew(row, q, keys, values, keys.shape[2] - int(self.prompt[row]))
        return attention.suffix_attention(q, keys, values)

    def record(self, row: int, pos: int, k: Tensor, v: Tensor) -> None:
        """Adds n tokens to the history, the first at `pos`: k and v [Hk,n,D]."""
        position = torch.arange(pos, pos + k.shape[1], device=k.device)[None, None]
        stored = torch.cat(self.stored.pack(k[None], v[None], position, row))
        self.history.write(row, pos, stored.permute(2, 0, 1, 3))

    def join(self, row: int, length: int) -> None:
        """Adds the tokens that were generated since the last turn to the history of a row of `length` tokens."""
        recorded, dropped = self.recorded(row), int(self.dropped[row])
        new = torch.stack([x[row, :, recorded - dropped : length - dropped] for x in (self.k, self.v)])
        self.history.write(row, recorded, new.permute(2, 0, 1, 3))

    def recorded(self, row: int) -> int:
        """How many tokens of a row the last turn left in the history."""
        return int((self.position[row, 0] >= 0).sum() + self.dropped[row])

    def everything(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of a row's history of `length` tokens, on the device: [1,Hk,length,D] each."""
        k, v = self.history.read(row, length).permute(1, 2, 0, 3)[:, None]
        return self.stored.read(k, v, torch.arange(length, device=k.device), row)

    def choose_anew(self, row: int, q: Tensor, k: Tensor, v: Tensor, later: int) -> None:
        """Stage 1: fills the slots from the whole history, k and v [1,Hk,N,D], by the last of a turn's queries.

        `later` tokens come after the prompt; n1 has a slot for each of them.
        """
        self.choice = super().kept_of(k.shape[2] - later) + later
        super().keep(row, q, k, v)
        self.rows[row] -= later  # as `slots_to_read` adds them

    def kept_of(self, prompt: int) -> int:
        return self.choice

    def window_of(self, prompt: int) -> int:
        return min(self.window, self.choice // 2)

    def held(self, row: int, length: int) -> Held:
        self.join(row, length)
        k, v = self.everything(row, length)
        return Held.new(k[0], v[0])

    def views(self, row: int, length: int) -> Views:
        yield from super().views(row, length)
        yield "history", self.history.part(row, self.recorded(row))
