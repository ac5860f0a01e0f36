"""Weight-only quantization of a checkpoint: python quantize.py --checkpoint DIR --mode int4 --groupsize 128 --out DIR

Every linear layer's weight becomes int8 with a scale for each output channel, or int4 with a scale and a zero point
for each group of input channels. With --embeddings, the embedding table and the head also become int8, with a scale
for each token. Norms and biases do not change. Weights round to nearest, with an error of at most half their scale.

The result loads like any checkpoint. One shard is in memory at a time.
"""

import runtime.startup  # noqa: F401

import sys
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from model import ModelConfig, Transformer
from runtime.checkpoint import check_output, check_weights, open_weights, read_config, write_checkpoint
from runtime.linear import GROUPS, MODES, default_groupsize, quantize_modules, read_quantization
from terminal.cli import Parser, run

BLOCK = 2**21  # weights quantized at a time, which limits the fp32 copies in memory


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[O,I] -> int8 [O,I] and scales [O] in the weight's dtype: weight ~ int8 * scale."""
    scales = _up(weight.float().abs().amax(-1) / 127, weight.dtype)
    return (weight.float() / scales.float()[:, None]).round().to(torch.int8), scales


def quantize_int4(weight: Tensor, groupsize: int) -> tuple[Tensor, Tensor]:
    """[O,I] -> packed uint8 [O,I/2], and the scale and zero of each group, [I/groupsize,O,2] in the weight's dtype.

    weight ~ (level - 8) * scale + zero, levels 0 to 15. Byte i of a group holds level i in its low 4 bits and level
    i + groupsize / 2 in its high 4 bits.
    """
    groups = weight.float().unflatten(-1, (-1, groupsize))  # [O,groups,groupsize]
    least, most = groups.amin(-1), groups.amax(-1)
    zeros = (least + 8 / 15 * (most - least)).to(weight.dtype).float()
    scales = _up(torch.maximum((zeros - least) / 8, (most - zeros) / 7), weight.dtype)
    levels = ((groups - zeros[..., None]) / scales.float()[..., None]).round() + 8
    low, high = levels.clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return (low | high << 4).flatten(-2), torch.stack((scales, zeros.to(weight.dtype)), dim=-1).transpose(0, 1)


def _up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds fp32 x up to `dtype`, never to 0, so that no weight lies beyond the last level."""
    y = x.to(dtype)
    y = torch.where(y.float() < x, torch.nextafter(y, torch.full_like(y, torch.inf)), y)
    return torch.where(y == 0, torch.finfo(dtype).tiny, y)


def quantize(
    checkpoint: str | Path,
    out: str | Path,
    mode: str,
    groupsize: int | None = None,
    embeddings: bool = False,
    force: bool = False,
) -> None:
    """Writes the quantized checkpoint `out`; `groupsize` (int4): None, the largest of GROUPS that fits.

    Raises ValueError, FileNotFoundError or OSError, each with one line that says what is wrong and what to do.
    """
    folder = Path(checkpoint)
    check_output(out, folder, force)
    config = read_config(folder)
    if found := read_quantization(config):
        raise ValueError(f"{folder} is quantized already ({found['mode']}); quantize the checkpoint it was made from")
    sizes = ModelConfig(**config["kv_fast"]["model"])
    with torch.device("meta"):
        source, model = (Transformer(sizes) for _ in range(2))
    if mode == "int4" and groupsize is None:
        groupsize = default_groupsize(model)
        print(f"groups of {groupsize} channels, the largest of {GROUPS} that fit this model", file=sys.stderr)
    quantize_modules(model, mode, groupsize, embeddings)
    stored = open_weights(folder)
    check_weights(stored, source.state_dict(), folder)

    layout = model.state_dict()
    for name, tensor in layout.items():
        if tensor.is_floating_point():  # scales take the dtype of their weight
            layout[name] = tensor.to(stored[name if name in stored else name.rpartition(".")[0] + ".weight"].dtype)

    @lru_cache(maxsize=1)  # a weight and its scales are read one after the other
    def parts(module: str) -> dict[str, Tensor]:
        eight = layout[f"{module}.weight"].dtype == torch.int8
        to_numbers = quantize_int8 if eight else partial(quantize_int4, groupsize=groupsize)
        weight = stored[f"{module}.weight"].read()
        blocks = map(to_numbers, weight.split(max(1, BLOCK // weight.shape[1])))
        weights, scales = zip(*blocks, strict=True)
        return {"weight": torch.cat(weights), "scales": torch.cat(scales, dim=0 if eight else 1)}

    def read(name: str) -> Tensor:
        module, _, part = name.rpartition(".")
        return parts(module)[part] if f"{module}.scales" in layout and part != "bias" else stored[name].read()

    about = {"mode": mode, "groupsize": groupsize if mode == "int4" else None, "embeddings": embeddings}
    write_checkpoint(out, config, sizes, layout, read, copy_from=folder, quantization=about, force=force)


def main(argv: list[str] | None = None) -> None:
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--checkpoint", required=True, metavar="DIR", help="a folder made by convert_hf_checkpoint.py")
    p.add_argument("--mode", required=True, choices=MODES)
    p.add_argument("--groupsize", type=int, help="int4: input channels that share a scale (default: 128, 64 or 32)")
    p.add_argument("--embeddings", action="store_true", help="also quantize the embedding table and the head, to int8")
    p.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    p.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    args = p.parse_args(argv)
    if args.mode != "int4" and args.groupsize is not None:
        raise ValueError(f"{args.mode} has no groups: leave out --groupsize")
    quantize(**vars(args))
    print(f"wrote {args.out}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
