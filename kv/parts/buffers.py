"""Tensors with one entry per row, which a method allocates once."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kv.method import Plan


class Buffers(nn.Module):
    """Buffers with one entry per row, which compiled steps write in place and checkpoints leave out."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan
        self.initial: dict[str, float] = {}  # the values that `reset` restores, by buffer
        self.states: list[str] = []  # buffers that describe what a row holds
        self.row_sizes: dict[str, Callable[[int], int]] = {}  # see `allocate_size`

    def allocate(self, name: str, *size: int, dtype: torch.dtype | None = None, fill: float = 0):
        """Allocates and holds a buffer [B,*size], of the cache's dtype by default; `reset` fills a row's part again."""
        self.initial[name] = fill
        size, dtype = (self.plan.batch, *size), dtype or self.plan.dtype
        self.hold(name, torch.full(size, fill, dtype=dtype, device=self.plan.device))

    def hold(self, name: str, buffer: Tensor | None) -> None:
        """Registers a buffer."""
        self.register_buffer(name, buffer, persistent=False)

    def share(self, name: str, part: "Buffers", first: bool) -> None:
        """Sets a part that several layers share; the first of them alone registers, and so resets it."""
        if first:
            setattr(self, name, part)
        else:
            vars(self)[name] = part

    def allocate_state(self, name: str, *size: int, dtype: torch.dtype = torch.int64, fill: float = 0) -> None:
        """Allocates a buffer [B,*size] that describes what a row holds."""
        self.allocate(name, *size, dtype=dtype, fill=fill)
        self.states.append(name)

    def allocate_size(self, name: str, budget: int, of: Callable[[int], int] = int) -> int:
        """Sets `name` to `of(budget)` or, if the budget is a share of each row's prompt, to a buffer [B] of sizes, of
        which it returns the largest."""
        largest = of(budget)
        if self.plan.share is None:
            setattr(self, name, largest)
        else:
            self.allocate_state(name, fill=largest)
            self.row_sizes[name] = lambda prompt: of(self.plan.row_budget(budget, prompt))
        return largest

    def set_sizes(self, row: int, prompt: int) -> None:
        """Sets a row's sizes, for a prompt of `prompt` tokens."""
        for name, of in self.row_sizes.items():
            getattr(self, name)[row] = of(prompt)

    def size_of(self, name: str, row: int) -> int:
        size = getattr(self, name)
        return size if isinstance(size, int) else int(size[row])

    def reset(self, row: int) -> None:
        """Empties a row. What it held may not stay in slots that are masked: 0 x NaN is NaN."""
        for name, fill in self.initial.items():
            getattr(self, name)[row] = fill
        for child in self.children():
            for part in child if isinstance(child, nn.ModuleList) else (child,):
                part.reset(row)
