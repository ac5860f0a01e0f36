"""Linear layers in 16 bits, int8 and int4; each uses the product that is fastest on its device.

For the few rows of a decode step there are up to three products: "kernel", torch's own (F.linear, or its CPU kernels
for quantized weights), "mv" (torch.mv, one row), and "fused", products and sums that Inductor compiles into one loop,
which reads the weight once, as stored, for all rows. The fastest product depends on the CPU: runtime/tune.py finds it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 8  # most rows for which a step chooses among the products
MANY = 8  # fewest rows for which a dtype in WIDENED is widened
WIDENED: list[torch.dtype] = []  # dtypes whose large products are faster in fp32 on this CPU, see runtime/tune.py
Products = tuple[str, str]  # for one row and for 2 to FEW

# The custom op keeps Inductor from decomposing torch.mv.
_library = torch.library.Library("kv_fast", "DEF")
_library.define("mv(Tensor weight, Tensor x) -> Tensor")
_library.impl("mv", torch.mv, "CPU")
_library.impl("mv", lambda weight, x: x.new_empty(weight.shape[0]), "Meta")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: Products = ("mv", "kernel")) -> Tensor:
    """x [...,I] times weight [O,I] -> [...,O]; on a CPU, in fp32 for MANY rows or more of a dtype in WIDENED."""
    rows = x.numel() // x.shape[-1]
    if x.device.type == "cpu" and rows <= FEW:
        product = products[0] if rows == 1 else products[1]
        if product == "fused" and torch.compiler.is_compiling():
            return finish(fused(x, weight), x, bias)
        if product == "mv" and rows == 1 and x.dtype == torch.bfloat16:
            return finish(torch.ops.kv_fast.mv(weight, x.flatten()), x, bias)
    if x.device.type == "cpu" and x.dtype in WIDENED and rows >= MANY:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def fused(x: Tensor, weight: Tensor) -> Tensor:
    """x [...,I] times weight [O,I] of any dtype -> [rows,O] fp32; compiled, it is one loop over the weight."""
    y = [(row * weight.float()).sum(-1) for row in rows_of(x)]
    return torch.stack(y) if len(y) > 1 else y[0][None]  # a stack would end the loop: what follows could not join it


def rows_of(x: Tensor) -> Tensor:
    """x [...,I] as [rows,I] fp32; as_strided makes Inductor store it.

    Otherwise Inductor recomputes x (the output of a norm, say), or widens it, for every row of a weight.
    """
    rows = x.numel() // x.shape[-1], x.shape[-1]
    return x.float().contiguous().as_strided(rows, (x.shape[-1], 1))


class Linear(nn.Linear):
    products: Products = ("mv", "kernel")

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.products)

    def first(self, x: Tensor, rows: int) -> Tensor:
        """Only the first `rows` output channels."""
        return linear(x, self.weight[:rows], None if self.bias is None else self.bias[:rows], self.products)


class Embedding(nn.Embedding):
    products: Products = ("mv", "kernel")

    def reset_parameters(self) -> None:
        """Does nothing: weights are loaded, and normal_ on a meta tensor imports torch's compiler (half a second)."""

    def logits(self, x: Tensor) -> Tensor:
        """The table as the tied output head: x [...,C] -> [...,vocab]"""
        return linear(x, self.weight, None, self.products)


class Int8Linear(nn.Module):
    """A Linear whose weight is int8 [O,I] with scales [O]."""

    products: Products = ("kernel", "kernel")

    def __init__(self, linear: Linear):
        super().__init__()
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty_like(linear.weight[:, 0]))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, self.weight.shape[0])

    def first(self, x: Tensor, rows: int) -> Tensor:
        bias = None if self.bias is None else self.bias[:rows]
        return int8_linear(x, self.weight[:rows], self.scales[:rows], bias, self.products)


class Int8Embedding(nn.Module):
    """An Embedding whose table is int8 [vocab,C] with scales [vocab]."""

    products: Products = ("kernel", "kernel")

    def __init__(self, table: Embedding):
        super().__init__()
        self.register_buffer("weight", torch.empty_like(table.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty_like(table.weight[:, 0]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].to(self.scales.dtype) * self.scales[ids][..., None]

    def logits(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scales, None, self.products)


class Int4Linear(nn.Module):
    """A Linear whose weight is packed int4: uint8 [O,I/2], with scales and zeros [I/groupsize,O,2]."""

    def __init__(self, linear: Linear, groupsize: int):
        super().__init__()
        out, size = linear.weight.shape
        self.groupsize = groupsize
        self.register_buffer("weight", linear.weight.new_empty(out, size // 2, dtype=torch.uint8))
        self.register_buffer("scales", linear.weight.new_empty(size // groupsize, out, 2))
        self.bias = linear.bias
        self.packed = 0  # `half` of levels_of_packed if in the order of torch's CPU kernel, else 0

    def pack(self) -> None:
        """Reorders the weight in place for torch's CPU kernel, if the kernel supports its sizes."""
        rows = self.weight.shape[0]
        if self.weight.device.type != "cpu" or rows % 64 or self.groupsize not in (32, 64, 128, 256) or self.packed:
            return
        for block in self.weight.split(1024):
            levels = levels_of(block, self.groupsize)
            new = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.int(), 1)
            half = next((n for n in (32, 16) if torch.equal(levels_of_packed(new, n), levels)), 0)  # AVX-512, AVX2
            if not half:  # this CPU's kernel uses another order
                return
            block.copy_(new)
        self.packed = half

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x, self.weight.shape[0])

    def first(self, x: Tensor, rows: int) -> Tensor:
        bias = None if self.bias is None else self.bias[:rows]
        if self.packed and few(x):
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x.flatten(0, -2), self.weight, self.groupsize, self.scales)
            return finish(y[:, :rows], x, bias)
        if self.packed:
            levels = levels_of_packed(self.weight, self.packed)[:rows].unflatten(1, (-1, self.groupsize))
            return linear(x, restore(levels, self.scales[:, :rows]).to(x.dtype), bias)
        return int4_linear(x, self.weight[:rows], self.scales[:, :rows], bias)


def few(x: Tensor) -> bool:
    """Whether torch's CPU kernels for quantized weights beat a float matmul: on a CPU, up to 16 rows of x [...,I]."""
    return x.device.type == "cpu" and x.numel() <= 16 * x.shape[-1]


def fuses(x: Tensor) -> bool:
    """Whether the step is compiled and x [...,I] has few rows."""
    return x.numel() <= FEW * x.shape[-1] and torch.compiler.is_compiling()


def int8_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, products: Products) -> Tensor:
    """x [...,I] times int8 weight [O,I] and its scales [O] -> [...,O]"""
    product = products[0] if x.numel() == x.shape[-1] else products[1]
    if fuses(x) and (x.device.type != "cpu" or product == "fused"):
        return finish(fused(x, weight) * scales.float(), x, bias)
    if few(x):
        return finish(torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), weight, scales), x, bias)
    return linear(x, weight.to(x.dtype) * scales[:, None], bias)


def int4_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [...,I] times packed int4 weight [O,I/2] with its scales and zeros [groups,O,2] -> [...,O]"""
    if not fuses(x):
        groups = levels_of(weight, weight.shape[1] * 2 // scales.shape[0]).unflatten(1, (scales.shape[0], -1))
        return linear(x, restore(groups, scales).to(x.dtype), bias)
    groups = weight.unflatten(-1, (scales.shape[0], -1))  # [O,groups,groupsize/2]
    low, high = (groups & 15).float() - 8, (groups >> 4).float() - 8
    parts = rows_of(x).unflatten(1, (scales.shape[0], 2, -1))  # [rows,groups,2,groupsize/2]
    scale, zero = scales.float().transpose(0, 1).unbind(-1)
    y = []
    for part, total in zip(parts, parts.sum((2, 3)), strict=True):
        y.append(((low * part[:, 0] + high * part[:, 1]) * scale[..., None]).sum((1, 2)) + (total * zero).sum(-1))
    return finish(torch.stack(y), x, bias)


def levels_of(weight: Tensor, groupsize: int) -> Tensor:
    """Packed [O,I/2] -> levels 0 to 15, uint8 [O,I]"""
    groups = weight.unflatten(-1, (-1, groupsize // 2))
    return torch.cat((groups & 15, groups >> 4), dim=-1).flatten(1)


def levels_of_packed(weight: Tensor, half: int) -> Tensor:
    """`levels_of` for torch's CPU kernel: blocks of 2 x half rows by column, the second half in the high bits."""
    blocks = weight.view(-1, 2 * weight.shape[1], half)
    return torch.cat((blocks & 15, blocks >> 4), dim=-1).transpose(1, 2).reshape(-1, 2 * weight.shape[1])


def restore(groups: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes: levels [O,groups,groupsize], scales and zeros [groups,O,2] -> weight [O,I]"""
    scale, zero = scales.transpose(0, 1)[..., None, :].unbind(-1)  # [O,groups,1]
    return ((groups.to(scale.dtype) - 8) * scale + zero).flatten(1)


def finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """y [rows,O] plus the bias -> [...,O], in the dtype and leading shape of x [...,I]"""
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)
