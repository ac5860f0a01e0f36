"""The processes that share a model: what a KV method needs where it compares heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kv.parts.inductor import realized


@dataclass(frozen=True)
class Ranks:
    """This process among `count`: in order of `rank`, each holds 1 / count of the heads.

    `sum` and `gather` are functional collectives, which a compiled step may contain. All ranks must call them alike.
    """

    rank: int = 0
    count: int = 1
    group: str = ""  # the name of torch.distributed's process group

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x."""
        if self.count == 1:
            return x
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", self.group))

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Every rank's x, joined along dimension `dim`."""
        if self.count == 1:
            return x
        ops = torch.ops._c10d_functional
        parts = ops.all_gather_into_tensor(x.movedim(dim, 0).contiguous(), self.count, self.group)
        return realized(ops.wait_tensor(parts).movedim(0, dim))  # torch 2.11: argmax of what is transposed is wrong


ALONE = Ranks()
