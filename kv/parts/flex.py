"""Attention of a decode step on a GPU by flex_attention. Shapes as in kv/base.py."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # slots per block of the block mask


def flex(q: Tensor, k: Tensor, v: Tensor, used: Tensor, seen: Callable, first: Tensor | None = None) -> Tensor:
    """Flash-decoding by flex_attention: reads the blocks of each row's used [B] slots, which begin at `first`.

    seen(b, h, i, slot) is its mask; i counts a group's queries. All blocks count as partly filled: among those the
    kernel divides its work by their number, among whole blocks by the capacity.
    """
    n, rows = q.shape[2], q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [B,Hk,G n,D]
    blocks = -(-k.shape[2] // BLOCK)
    order = torch.arange(blocks, device=q.device).expand(q.shape[0], 1, 1, blocks)  # a row's own blocks come first
    if first is not None:
        order = order + (first // BLOCK)[:, None, None, None]
    mask = BlockMask.from_kv_blocks(
        (-(-used // BLOCK)).to(torch.int32)[:, None, None],  # [B,1,1]: for all heads and queries
        (order % blocks).int(),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(rows.shape[2], k.shape[2]),
        compute_q_blocks=False,  # only a backward pass reads query blocks
    )
    pipelined = {"num_stages": 3, "num_warps": 2} if q.dtype.itemsize == 2 and q.shape[3] <= 128 else None
    y = flex_attention(rows, k, v, block_mask=mask, kernel_options=pipelined)  # else loads wait for products
    return y.unflatten(2, (-1, n)).flatten(1, 2)
