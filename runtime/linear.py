"""Linear layers and embeddings with int8 and int4 weights.

Few rows are multiplied by torch's kernels for quantized weights or, in a compiled step, by products and sums that
Inductor fuses into one loop over the weight as it is stored. int4 takes torch's kernels where its sizes allow them. On
a GPU int8 is fused; on a CPU runtime/cpu.py chooses.
"""

import math

import torch
from torch import Tensor, nn

from runtime.cpu import FEW, Products, finish, fused, joined, linear, rows_of

MODES = ("int8", "int4")
GROUPS = (128, 64, 32)  # int4 group sizes that are tried where none is named
FEW_ON_A_GPU = 6  # more rows take longer in a loop over int8 than with the weight restored first (an H200)
TILES = 8  # the order of a GPU's kernel, see levels_of_packed


class Quantized(nn.Module):
    """A linear layer that restores its weight for many rows, once for all of a prompt's slices (model.slices)."""

    floats: Tensor | None = None  # the restored weight [O,I], from `hold_floats` to `drop_floats`

    def hold_floats(self, dtype: torch.dtype) -> None:
        self.floats = self.restored(dtype)

    def drop_floats(self) -> None:
        self.__dict__.pop("floats", None)

    def restored(self, dtype: torch.dtype, rows: int | None = None) -> Tensor:
        """The first `rows` rows of the weight, [rows,I]; None: all."""
        return self.restore(dtype, rows) if self.floats is None else self.floats[:rows]


class Int8Linear(Quantized):
    """A Linear whose weight is int8 [O,I] with scales [O]."""

    products: Products = ("kernel", "kernel")

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty_like(linear.weight[:, 0]))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, self.weight.shape[0])

    def first(self, x: Tensor, rows: int) -> Tensor:
        weight, scales = self.weight[:rows], self.scales[:rows]
        bias = None if self.bias is None else self.bias[:rows]
        product = self.products[0] if x.numel() == x.shape[-1] else self.products[1]
        if fuses(x) and (x.device.type != "cpu" or product == "fused"):
            return finish(fused(x, weight) * scales.float(), x, bias)
        if few(x) and x.device.type == "cpu":
            return finish(torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), weight, scales), x, bias)
        return linear(x, self.restored(x.dtype, rows), bias)

    def restore(self, dtype: torch.dtype, rows: int | None) -> Tensor:
        return self.weight[:rows].to(dtype) * self.scales[:rows, None]


class Int8Embedding(nn.Module):
    """An Embedding whose table is int8 [vocab,C] with scales [vocab]."""

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.register_buffer("weight", torch.empty_like(table.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty_like(table.weight[:, 0]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].to(self.scales.dtype) * self.scales[ids][..., None]


class Int4Linear(Quantized):
    """A Linear whose weight is packed int4: uint8 [O,I/2], with scales and zeros [I/groupsize,O,2]."""

    def __init__(self, linear: nn.Linear, groupsize: int):
        super().__init__()
        out, size = linear.weight.shape
        self.groupsize = groupsize
        self.register_buffer("weight", linear.weight.new_empty(out, size // 2, dtype=torch.uint8))
        self.register_buffer("scales", linear.weight.new_empty(size // groupsize, out, 2))
        self.bias = linear.bias
        self.packed = 0  # `order` of levels_of_packed if in the order of torch's kernel, else 0

    def orders(self) -> tuple[int, ...]:
        """What torch's kernel on this device may have for an order; none if it does not support the sizes."""
        rows, device = self.weight.shape[0], self.weight.device.type
        if self.groupsize not in (32, 64, 128, 256):
            return ()
        if device == "cuda":
            fits = rows % 8 == 0 and self.weight.shape[1] % 64 == 0 and self.scales.dtype == torch.bfloat16
            return (TILES,) if fits else ()
        return (32, 16) if device == "cpu" and rows % 64 == 0 else ()  # AVX-512, AVX2

    def pack(self) -> None:
        """Reorders the weight in place for torch's kernel, if the kernel supports its sizes."""
        orders = () if self.packed else self.orders()
        for block in self.weight.split(1024) if orders else ():
            levels = levels_of(block, self.groupsize)
            if block.device.type == "cuda":
                new = torch.ops.aten._convert_weight_to_int4pack(levels[:, ::2] << 4 | levels[:, 1::2], 8)
            else:
                new = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
            new = new.view(torch.uint8).view_as(block)
            orders = [order for order in orders if torch.equal(levels_of_packed(new, order), levels)]
            if not orders:  # this torch's kernel has another one
                return
            block.copy_(new)
        if orders:
            self.reordered(orders[0])

    def reordered(self, order: int) -> None:
        """Says that the weight is in this order."""
        self.packed = order
        if order == TILES:
            self.weight = self.weight.view(torch.int32).view(self.scales.shape[1] // 8, -1, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, self.scales.shape[1])

    def first(self, x: Tensor, rows: int) -> Tensor:
        bias, aten = None if self.bias is None else self.bias[:rows], torch.ops.aten
        if self.packed and few(x):
            multiply = aten._weight_int4pack_mm if self.packed == TILES else aten._weight_int4pack_mm_for_cpu
            return finish(multiply(x.flatten(0, -2), self.weight, self.groupsize, self.scales)[:, :rows], x, bias)
        if not self.packed and fuses(x):
            return int4_fused(x, self.weight[:rows], self.scales[:, :rows], bias)
        return linear(x, self.restored(x.dtype, rows), bias)

    def restore(self, dtype: torch.dtype, rows: int | None) -> Tensor:
        levels = levels_of_packed(self.weight, self.packed) if self.packed else levels_of(self.weight, self.groupsize)
        scale, zero = self.scales[:, :rows].transpose(0, 1)[..., None, :].unbind(-1)  # [O,groups,1]
        groups = levels[:rows].unflatten(1, (-1, self.groupsize)).to(scale.dtype)
        return ((groups - 8) * scale + zero).flatten(1).to(dtype)


def few(x: Tensor) -> bool:
    """Whether torch's kernels for quantized weights beat a float matmul: up to 16 rows of x [...,I]."""
    return x.numel() <= 16 * x.shape[-1]


def fuses(x: Tensor) -> bool:
    """Whether the step is compiled and x [...,I] has few rows."""
    most = FEW if x.device.type == "cpu" else FEW_ON_A_GPU
    return x.numel() <= most * x.shape[-1] and torch.compiler.is_compiling()


def int4_fused(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [...,I] times packed int4 weight [O,I/2] with its scales and zeros [groups,O,2] -> [...,O], in one loop."""
    groups = weight.unflatten(-1, (scales.shape[0], -1))  # [O,groups,groupsize/2]
    low, high = (groups & 15).float(), (groups >> 4).float()
    scale, zero = scales.float().transpose(0, 1)[..., None, :].unbind(-1)  # [O,groups,1]
    zero, y = zero - 8 * scale, []
    for part in rows_of(x).unflatten(1, (scales.shape[0], 2, -1)):  # [groups,2,groupsize/2]
        first, second = part.unbind(1)
        y.append(((low * first + high * second) * scale + (first + second) * zero).sum((1, 2)))
    return finish(joined(y), x, bias)


def levels_of(weight: Tensor, groupsize: int) -> Tensor:
    """Packed [O,I/2] -> levels 0 to 15, uint8 [O,I]"""
    groups = weight.unflatten(-1, (-1, groupsize // 2))
    return torch.cat((groups & 15, groups >> 4), dim=-1).flatten(1)


def levels_of_packed(weight: Tensor, order: int) -> Tensor:
    """`levels_of` for torch's kernels. A CPU's: blocks of 2 x `order` rows by column, the second half in the high bits.

    TILES, a GPU's, as bytes or as 32-bit words: a word holds 8 levels of a tile of 8 rows and 128 columns, as they lie
    in the operand of a tensor core.
    """
    if order == TILES:
        words = weight if weight.dtype == torch.int32 else weight.view(torch.int32).view(len(weight) // 8, -1, 32, 4)
        levels = words[..., None] >> torch.arange(0, 32, 4, device=words.device) & 15
        levels = levels.to(torch.uint8).unflatten(2, (8, 4)).unflatten(-1, (2, 2, 2))  # rows/8,I/128,8,q,p,odd,r,s
        return levels.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(8 * len(words), -1)  # column (((p r) s) q) odd
    blocks = weight.view(-1, 2 * weight.shape[1], order).mT.contiguous()  # turned while two levels are one byte
    return torch.cat((blocks & 15, blocks >> 4), dim=1).flatten(0, 1)


# Quantized models


def quantize_modules(model: nn.Module, mode: str, groupsize: int | None, embeddings: bool) -> None:
    """Replaces the linear layers of a model or of a rank's part, on the meta device, by modules for quantized weights.

    Raises ValueError for an int4 group size that is odd or does not divide a layer's input.
    """
    if mode == "int4":
        even = isinstance(groupsize, int) and groupsize > 1 and groupsize % 2 == 0
        if not even or channels(model) % groupsize:
            where = f"the layers' input channels on every rank: {advice(model)}"
            raise ValueError(f"groupsize {groupsize} must be even and divide {where}")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and (embeddings or child is not model.output):
                eight = mode == "int8" or child is model.output
                setattr(parent, name, Int8Linear(child) if eight else Int4Linear(child, groupsize))
            elif isinstance(child, nn.Embedding) and embeddings:
                setattr(parent, name, Int8Embedding(child))


def channels(model: nn.Module) -> int:
    """The greatest common divisor of the layers' input channels, which an int4 group size must divide."""
    return math.gcd(*(m.in_features for m in model.layers.modules() if isinstance(m, nn.Linear)))


def default_groupsize(model: nn.Module) -> int:
    """The largest of GROUPS that divides all layers' input channels. Raises ValueError if none does."""
    for size in GROUPS:
        if channels(model) % size == 0:
            return size
    raise ValueError(f"none of {GROUPS} divides all layers' input channels: {advice(model)}")


def advice(model: nn.Module) -> str:
    largest = min(GROUPS[0], channels(model) & -channels(model))
    return f"use --groupsize {largest}" if largest > 1 else "use --mode int8"


def pack(model: nn.Module) -> None:
    """Reorders a loaded model's int4 weights for the device's kernels."""
    for module in model.modules():
        if isinstance(module, Int4Linear):
            module.pack()


def read_quantization(config: dict) -> dict | None:
    """Arguments for `quantize_modules` from config.json; None if unquantized. Raises ValueError for an unknown mode."""
    found = config["kv_fast"].get("quantization")
    if not found:
        return None
    if not isinstance(found, dict) or found.get("mode") not in MODES:
        raise ValueError(f"config.json: quantization {found!r} is not known; known modes: {', '.join(MODES)}")
    return {"mode": found["mode"], "groupsize": found.get("groupsize"), "embeddings": bool(found.get("embeddings"))}
