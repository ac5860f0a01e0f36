"""Tensors with one entry per row, which a method allocates once."""

import torch
from torch import Tensor, nn

from kv.method import Shape


class Buffers(nn.Module):
    """Buffers with one entry per row, which compiled steps write in place and checkpoints leave out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.initial: dict[str, float] = {}  # the values that `reset` restores, by buffer
        self.states: list[str] = []  # buffers that describe what a row holds

    def allocate(self, name: str, *size: int, dtype: torch.dtype | None = None, fill: float = 0):
        """Allocates and holds a buffer [B,*size], of the cache's dtype by default; `reset` fills a row's part again."""
        self.initial[name] = fill
        size, dtype = (self.shape.batch, *size), dtype or self.shape.dtype
        self.hold(name, torch.full(size, fill, dtype=dtype, device=self.shape.device))

    def hold(self, name: str, buffer: Tensor | None) -> None:
        """Registers a buffer."""
        self.register_buffer(name, buffer, persistent=False)

    def allocate_state(self, name: str, *size: int, dtype: torch.dtype = torch.int64, fill: float = 0) -> None:
        """Allocates a buffer [B,*size] that describes what a row holds."""
        self.allocate(name, *size, dtype=dtype, fill=fill)
        self.states.append(name)

    def reset(self, row: int) -> None:
        """Empties a row. What it held may not stay in slots that are masked: 0 x NaN is NaN."""
        for name, fill in self.initial.items():
            getattr(self, name)[row] = fill
        for child in self.children():
            for part in child if isinstance(child, nn.ModuleList) else (child,):
                part.reset(row)
