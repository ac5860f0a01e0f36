"""Measures a model's attention for methods that depend on it: python calibrate.py --checkpoint DIR --text FILE

Writes kv_profile.json into the checkpoint, where every tool finds it, or to the file that --out names. It holds:

- filter_ability (omnikv): the share of the next 8 layers' attention that falls on the tokens to which a layer attends
  most (OmniKV, OpenReview ulCAPXYXfa, section 3 and Figure 6a).
- filter_layers (omnikv): the layers proposed to choose tokens for the others. Their choices catch the most attention
  over all layers, while at most a quarter of the layers (or 3) are full.
- dense_preference (tailorkv): the share of a layer's attention outside the 5% of the tokens to which each head attends
  most, the mean over the last queries and the heads (TailorKV, arXiv 2505.19586, Equations 6 to 8).
- quant_layers (tailorkv): the layers whose dense_preference is above --tau (Equation 9). Such dense attention tolerates
  coarse keys and values.
- head_scores (duo): for each KV head, the attention of the text's last queries to the tokens between the first and the
  recent ones: the mean over the queries, the maximum over the group's heads. It replaces the gates that DuoAttention
  (arXiv 2410.10819) trains: a head that attends to these tokens is a retrieval head.
"""

import runtime.startup  # noqa: F401

import argparse
import json
import math
import sys
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from engine import Engine
from kv.base import KV
from kv.duo import DuoMethod
from kv.method import Shape
from kv.omnikv import segments_of
from kv.parts import ops
from runtime.device import DTYPES, replacing
from runtime.plan import shape_of
from terminal.cli import check_output, load_pyplot, read_text, run, table
from text.files import read_json

QUERIES = 32  # how many of the text's last queries are measured
CHOSEN = 2048, 0.05  # the most tokens that a layer chooses, and their largest share of the text
SPARSE = 0.05  # the share of the tokens to which a sparse layer would attend
AFTER = 8  # a layer's choice is judged by the attention of this many next layers
FILTERS = 3  # the most filter layers
MEASURES = "filter ability", "dense preference"  # the printed columns


class Probe(KV):
    """Measures a prompt's attention and stores no tokens; `chosen` holds the choices of the layers below."""

    def __init__(self, shape: Shape, sinks: int, window: int, chosen: list[Tensor]):
        super().__init__(shape)
        self.sinks, self.window, self.chosen = sinks, window, chosen

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        length = k.shape[2]
        last = torch.arange(length - QUERIES, length, device=k.device)[:, None]
        key = torch.arange(length, device=k.device)
        between = (key >= self.sinks) & (key <= last - self.window)  # [queries,T]
        most = q.new_zeros(QUERIES, length, dtype=torch.float32)
        scores, outside, caught = [], 0.0, [0.0] * len(self.chosen)
        groups = q[0, :, -QUERIES:].unflatten(0, (k.shape[1], -1))  # [Hk,G,queries,D]
        for rows, keys in zip(groups, k[0], strict=True):
            logits = rows.float() @ keys.float().mT * q.shape[-1] ** -0.5
            mass = logits.masked_fill(key > last, -torch.inf).softmax(-1)
            scores.append((mass * between).sum(-1).mean(-1).max().item())
            most = torch.maximum(most, mass.amax(0))
            outside += (1 - mass.topk(max(1, int(SPARSE * length + 0.5))).values.sum(-1)).sum().item()
            for i, index in enumerate(self.chosen):
                caught[i] += mass.gather(2, index.expand(len(rows), -1, -1)).sum().item()
        measured = QUERIES * q.shape[1]
        self.head_scores, self.dense, self.caught = scores, outside / measured, [x / measured for x in caught]
        self.chosen.append(ops.top(most, max(1, min(CHOSEN[0], int(CHOSEN[1] * length + 0.5)))))  # [queries,n]

    def decode(self, *_) -> Tensor:
        raise NotImplementedError("a probe only sees prompts")


def rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if x is None else round(x, 5) for x in values]


def calibrate(engine: Engine, ids: list[int], sinks: int, recent: int, tau: float = 0.2) -> dict:
    """Measures a text's attention; returns the content of kv_profile.json. Raises ValueError if the text is too short,
    an argument is out of range or the attention is not finite."""
    if sinks < 0 or recent < 1:
        raise ValueError(f"--sinks must be at least 0 and --recent at least 1, not {sinks} and {recent}")
    if not 0 <= tau <= 1:
        raise ValueError(f"--tau must lie between 0 and 1, not {tau}")
    if len(ids) < sinks + recent + QUERIES:
        raise ValueError(
            f"the text has {len(ids)} tokens; with {sinks} sinks and {recent} recent tokens it needs at least "
            f"{sinks + recent + QUERIES}"
        )
    chosen: list[Tensor] = []
    shape = shape_of(engine.config, engine.dtype, engine.device, 1, len(ids), 0)
    probes = [Probe(shape, sinks, recent, chosen) for _ in engine.model.layers]
    engine.close()
    engine.model.set_rows(1)
    engine.model.set_kv(probes)
    engine.model.prefill(0, torch.tensor(ids, device=engine.device))
    if not all(math.isfinite(x) for p in probes for x in (p.dense, *p.head_scores, *p.caught)):
        raise ValueError(f"the model's attention to the text is not a number in {engine.dtype}: try --dtype float32")
    caught = [[probe.caught[layer] for probe in probes[layer + 1 :]] for layer in range(len(probes))]
    dense = rounded(probe.dense for probe in probes)
    profile = {
        "format": 1,
        "tokens": len(ids),
        "filter_ability": rounded(sum(c[:AFTER]) / len(c[:AFTER]) if c else None for c in caught),
        "head_scores": [rounded(probe.head_scores) for probe in probes],
        "dense_preference": dense,
        "quant_layers": [layer for layer, share in enumerate(dense) if share > tau],
    }
    filters = propose(caught)
    return profile | ({"filter_layers": filters} if filters else {})


def propose(caught: list[list[float]]) -> list[int]:
    """The filter layers whose choices catch the most attention, summed over all layers; [] if none are possible.

    caught[l][i]: the share of layer l + 1 + i's attention that falls on the tokens that layer l chooses. A full layer
    counts as 1. Of L layers, max(3, L / 4) may be full, as the paper's own choices for Llama-3-8B and Yi-9B require.
    """
    n_layer = len(caught)
    best, most = [], 0.0
    for count in range(1, FILTERS + 1):
        for filters in map(list, combinations(range(n_layer), count)):
            segments = segments_of(filters, n_layer)
            sparse = [(first, layer) for first, layers in segments.items() for layer in layers]
            if not sparse or not all(segments.values()) or n_layer - len(sparse) > max(3, n_layer // 4):
                continue
            seen = n_layer - len(sparse) + sum(caught[first][layer - first - 1] for first, layer in sparse)
            if seen > most:
                best, most = filters, seen
    return best


def draw(profile: dict, tau: float, path: str) -> None:
    """Draws OmniKV's Figure 6a and TailorKV's Figure 12: one curve each over the layers, proposed layers marked."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    filters = profile["filter_ability"][:-1], profile.get("filter_layers", []), "filter layers"
    dense = profile["dense_preference"], profile["quant_layers"], "quantized layers"
    for axis, (curve, marked, label) in zip(axes, (filters, dense), strict=True):
        axis.plot(range(len(curve)), curve, marker="o")
        axis.plot(marked, [curve[layer] for layer in marked], "o", markersize=12, fillstyle="none", label=label)
        axis.set(xlabel="layer", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"attention of the next {AFTER} layers to its choice")
    axes[1].set_ylabel(f"attention beyond the best {SPARSE:.0%} of the tokens")
    axes[1].axhline(tau, color="gray", linestyle="--", label="tau")
    for axis in axes:
        axis.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    p.add_argument("--text", required=True, metavar="FILE", help="a text like the model's prompts, question included")
    p.add_argument("--length", type=int, help="tokens to read, from the end of the text (default: all that fit)")
    p.add_argument("--sinks", type=int, default=DuoMethod.sinks, help="first tokens of a streaming head")
    p.add_argument("--recent", type=int, default=DuoMethod.recent, help="newest tokens of a streaming head")
    p.add_argument("--tau", type=float, default=0.2, help="dense preference above which a layer is quantized")
    p.add_argument("--out", type=Path, metavar="FILE", help="default: kv_profile.json in the checkpoint")
    p.add_argument("--plot", metavar="FILE", help="draw filter ability and dense preference over the layers")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    args = p.parse_args(argv)
    path = args.out or args.checkpoint / "kv_profile.json"
    if args.checkpoint.is_dir():  # otherwise loading reports the error
        check_output(str(path), "--out")
    check_output(args.plot, "--plot")
    if args.length is not None and args.length < 1:
        raise ValueError(f"--length must be at least 1, not {args.length}")
    text = read_text(args.text)
    if not text.strip():
        raise ValueError(f"--text {args.text}: the text is empty")
    engine = Engine.load(args.checkpoint, device=args.device, dtype=args.dtype, compile=False)
    ids = engine.encode(text)
    length = min(args.length or len(ids), engine.config.max_length)
    if len(ids) > length:  # keeps BOS and the end of the text
        bos = len(ids) - len(engine.encode(text, bos=False))
        ids = ids[:bos] + ids[len(ids) - length + bos :]
    profile = calibrate(engine, ids, args.sinks, args.recent, args.tau)
    old = read_json(path) if path.is_file() and path.stat().st_size else {}  # a redirected stdout is an empty file
    old.pop("filter_layers", None)  # an earlier run's, if this one proposes none
    with replacing(path) as new:
        new.write_text(json.dumps(old | {"text": Path(args.text).name} | profile, indent=1) + "\n")
    filters, quantized = profile.get("filter_layers", []), profile["quant_layers"]
    lines = []
    for layer, heads in enumerate(profile["head_scores"]):
        cells = {name: profile[name.replace(" ", "_")][layer] for name in MEASURES}
        cells |= {f"head {head}": score for head, score in enumerate(heads)}
        shares = {name: "-" if share is None else f"{100 * share:.1f}%" for name, share in cells.items()}
        lines.append({"layer": f"{layer}{'*' * (layer in filters)}{'q' * (layer in quantized)}", **shares})
    print(table(lines))
    print("* proposed as filter layers" if filters else "too few layers for filter layers")
    print("q proposed as quantized layers" if quantized else f"no layer's dense preference is above {args.tau}")
    if args.plot:
        draw(profile, args.tau, args.plot)
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
