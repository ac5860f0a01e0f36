"""Measures a model for methods that depend on it: python calibrate.py --checkpoint DIR --text FILE

Cuts excerpts from the end of the text. Writes kv_profile.json into the checkpoint, where every tool finds it, or to the
file that --out names. It holds:

- filter_layers (omnikv): the layers proposed to choose tokens for the others. Omnikv's steps in the second half of the
  excerpts are computed, each with 5% of the excerpt chosen, and compared with the full cache's. The proposal is the
  default, unless another choice diverges less (KL) by two standard errors; those whose sparse layers' outputs have the
  smallest errors are tried. Full layers read every token: no more are full than with the default, or than --full. What
  is best for short prompts may fail for long ones (BENCHMARKS.md): measure with --length as long as yours.
- filter_ability (omnikv): the share of the next 8 layers' attention that falls on the tokens to which a layer attends
  most (OmniKV, OpenReview ulCAPXYXfa, section 3 and Figure 6a).
- dense_preference (tailorkv): the share of a layer's attention outside the 5% of the tokens to which each head attends
  most, the mean over the last queries and the heads (TailorKV, arXiv 2505.19586, Equations 6 to 8).
- quant_error (tailorkv): the relative error of a layer's attention output with K and V in 2 bits, and in 1. Zeros
  instead of the output would have an error of 1.
- quant_layers (tailorkv): the layers whose dense_preference is above --tau (Equation 9), so that a few fetched tokens
  would not do, and whose error in 2 bits is at most --tolerance.
- head_scores (duo): for each KV head, the attention of an excerpt's last queries to the tokens between the first and
  the recent ones: the mean over the queries, the maximum over the group's heads. It replaces the gates that
  DuoAttention (arXiv 2410.10819) trains: a head that attends to these tokens is a retrieval head.
"""

import runtime.startup  # noqa: F401

import argparse
import json
import sys
from collections.abc import Iterable
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from engine import Engine
from kv.base import KV
from kv.duo import DuoMethod
from kv.kivi import Quantized
from kv.method import Plan
from kv.omnikv import default_filters, segments_of
from runtime.device import DTYPES
from runtime.planning import plan_for
from terminal.cli import Parser, check_output, progress, run, table, whole_text
from terminal.plots import panels
from text.files import read_json, replacing

EXCERPTS, LENGTH = 4, 4096  # the most excerpts, and their tokens
LAST = 32  # queries of an excerpt for dense_preference and head_scores
QUERIES = 64  # queries, evenly over an excerpt's second half, for all else
CHOSEN = 2048, 0.05  # the most tokens that a layer chooses, and their largest share of the excerpt
SPARSE = 0.05  # the share of the tokens to which a sparse layer would attend
AFTER = 8  # a layer's choice is judged by the attention of this many next layers
FILTERS = 3  # the most filter layers
TRIED = 8  # choices of filter layers whose KL divergence is measured
TAU, TOLERANCE = 0.2, 0.5  # a quantized layer's least dense preference and largest error
BITS = 2, 1
MEASURES = "filter ability", "dense preference"  # the printed columns


class Probe(KV):
    """Measures a layer's attention to an excerpt, whose K and V it holds; `below`: the probes of the layers below."""

    def __init__(self, plan: Plan, sinks: int, window: int, below: list["Probe"]):
        super().__init__(plan)
        self.sinks, self.window, self.below = sinks, window, below

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.length, self.keys, self.values = k.shape[2], k[0], v[0]
        self.at = torch.linspace(self.length / 2, self.length - 1, QUERIES, device=k.device).long()
        self.measure_last(q[0, :, -LAST:])
        rows = q[0, :, self.at]
        weight = self.weights(rows, self.at)
        y = self.output(weight)
        self.caught, self.sparse_error = [], []  # of each layer below, if it chooses
        for probe in self.below:
            chosen = weight * probe.choice
            share = chosen.sum(-1, keepdim=True)
            self.caught.append(share.mean().item())
            self.sparse_error.append(error(self.output(chosen / share), y) ** 2)
        self.quant_error = [self.quantized(k, v, bits, rows, y) for bits in BITS]
        self.choice = self.choose(weight)

    def measure_last(self, q: Tensor) -> None:
        """dense_preference and head_scores, by the last queries [Hq,n,D]."""
        last = torch.arange(self.length - q.shape[1], self.length, device=q.device)
        key = torch.arange(self.length, device=q.device)
        weight = self.weights(q, last)
        self.dense = 1 - weight.topk(max(1, int(SPARSE * self.length + 0.5))).values.sum(-1).mean().item()
        between = (key >= self.sinks) & (key <= last[:, None] - self.window)
        self.head_scores = (weight * between).sum(-1).mean(-1).amax(1).tolist()

    def quantized(self, k: Tensor, v: Tensor, bits: int, q: Tensor, y: Tensor) -> float:
        """The error of the output y with quantized K and V."""
        layer = Quantized(self.plan, bits)
        layer.keep(0, q, k, v)
        keys, values, _ = layer.held(0, self.length)
        return error(self.weights(q, self.at, keys) @ values[:, None].float(), y)

    def weights(self, q: Tensor, at: Tensor, keys: Tensor | None = None) -> Tensor:
        """The attention [Hk,G,n,T] fp32 of queries [Hq,n,D] at positions [n]; keys: instead of the excerpt's."""
        keys = self.keys if keys is None else keys
        logits = q.unflatten(0, (len(keys), -1)).float() @ keys[:, None].float().mT * q.shape[-1] ** -0.5
        return logits.masked_fill_(torch.arange(self.length, device=q.device) > at[:, None], -torch.inf).softmax(-1)

    def output(self, weight: Tensor) -> Tensor:
        return weight @ self.values[:, None].float()  # [Hk,G,n,D]

    def choose(self, weight: Tensor) -> Tensor:
        """The tokens that a filter layer chooses by its attention [Hk,G,n,T], and each query's own: a mask [n,T]."""
        count = max(1, min(CHOSEN[0], int(CHOSEN[1] * self.length + 0.5)))
        own = self.at[:, None]
        index = torch.cat([weight.amax((0, 1)).scatter(1, own, -1).topk(count).indices, own], dim=1)
        return torch.zeros_like(weight[0, 0], dtype=torch.bool).scatter_(1, index, True)

    def decode(self, *_) -> Tensor:
        raise NotImplementedError("a probe only sees prompts")


def error(y: Tensor, exact: Tensor) -> float:
    """The relative error of an output."""
    return ((y - exact).norm() / exact.norm()).item()


def probes_of(engine: Engine, ids: list[int], sinks: int, recent: int, name: str) -> list[Probe]:
    """Every layer's probe, after the prefill of the excerpt of this name."""
    plan, probes = plan_for(engine.config, engine.dtype, engine.device, 1, len(ids), 0), []
    for layer in range(engine.config.n_layer):
        probes.append(Probe(plan, sinks, recent, probes[:layer]))
    engine.model.set_kv(probes)
    engine.model.prefill(0, torch.tensor(ids, device=engine.device), progress=lambda x: engine.progress(x, name))
    return probes


@torch.no_grad()
def replay(engine: Engine, ids: list[int], probes: list[Probe], filters: tuple[int, ...]) -> Tensor:
    """Logits [n,vocab] of omnikv's steps at the measured positions, with these filter layers; none: the full cache's.

    All steps run at once; the K and V that they read are the full cache's.
    """
    segments, chosen, model = segments_of(filters, len(probes)), {}, engine.model
    chooser = {layer: first for first, layers in segments.items() for layer in layers}

    def attend(layer: int, q: Tensor, *_) -> Tensor:
        probe = probes[layer]
        weight = probe.weights(q[0], probe.at)
        if layer in chooser:
            weight *= chosen[chooser[layer]]
            weight /= weight.sum(-1, keepdim=True)
        elif layer in segments:
            chosen[layer] = probe.choose(weight)
        return probe.output(weight).flatten(0, 1)[None].to(q.dtype)

    at = probes[0].at
    cos, sin = model.cos_sin(at[None], model.inv_freq)
    x = model.tok_embeddings(torch.tensor(ids, device=at.device)[None, at])
    for layer, block in enumerate(model.layers):
        block.prefill(x, cos, sin, partial(attend, layer))
    return model.logits(x[0])


def rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if x is None else round(x, 5) for x in values]


def calibrate(
    engine: Engine,
    excerpts: list[list[int]],
    sinks: int,
    recent: int,
    tau: float = TAU,
    tolerance: float = TOLERANCE,
    full: int | None = None,
) -> dict:
    """Measures excerpts, equally long; returns the content of kv_profile.json. Raises ValueError if they are too short,
    an argument is out of range or the attention is not finite."""
    if sinks < 0 or recent < 1:
        raise ValueError(f"--sinks must be at least 0 and --recent at least 1, not {sinks} and {recent}")
    if engine.config.full_layers:
        raise ValueError("layers with a sliding window have no profile yet: every layer must see every token")
    for name, share in (("--tau", tau), ("--tolerance", tolerance)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {share}")
    if full is not None and full < 1:
        raise ValueError(f"--full must be at least 1, not {full}")
    if len(excerpts[0]) < sinks + recent + LAST:
        raise ValueError(
            f"the excerpt has {len(excerpts[0])} tokens; with {sinks} sinks and {recent} recent tokens it needs at "
            f"least {sinks + recent + LAST}"
        )
    engine.close()
    engine.model.set_rows(1)
    names = [f"measure excerpt {i} of {len(excerpts)}, {len(ids)} tokens" for i, ids in enumerate(excerpts, 1)]
    measured = [probes_of(engine, ids, sinks, recent, name) for ids, name in zip(excerpts, names, strict=True)]

    def mean(name: str) -> list:
        """What each layer's probes measured, the mean over the excerpts."""
        return [
            torch.tensor([getattr(x, name) for x in layer]).mean(0).tolist() for layer in zip(*measured, strict=True)
        ]

    dense, errors, scores, caught, sparse = found = [
        mean(name) for name in ("dense", "quant_error", "head_scores", "caught", "sparse_error")
    ]
    if not all(torch.tensor(layer).isfinite().all() for values in found for layer in values):
        raise ValueError(f"the model's attention to the text is not a number in {engine.dtype}: try --dtype float32")
    later = [[above[layer] for above in caught[layer + 1 :][:AFTER]] for layer in range(len(caught))]
    texts = list(zip(excerpts, measured, strict=True))
    exact = [replay(engine, *text, ()).log_softmax(-1) for text in texts]

    def divergence(filters: tuple[int, ...]) -> Tensor:
        """The KL divergence of each measured step."""
        steps = [replay(engine, *text, filters).log_softmax(-1) for text in texts]
        return torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(exact, steps, strict=True)])

    n_layer, default = len(sparse), tuple(default_filters(measured[0][0].plan))
    most = full_layers(default, n_layer) if full is None else full
    choices = engine.progress((default, *best_filters(sparse, most)), "try filter layers")
    tried = {filters: divergence(filters) for filters in choices}
    proposed = propose(tried, default, most, n_layer)
    profile = {
        "format": 1,
        "tokens": len(excerpts[0]),
        "excerpts": len(excerpts),
        "filter_ability": rounded(sum(x) / len(x) if x else None for x in later),
        "head_scores": [rounded(x) for x in scores],
        "dense_preference": rounded(dense),
        "quant_error": [rounded(x) for x in errors],
        "quant_layers": [i for i in range(n_layer) if dense[i] > tau and errors[i][0] <= tolerance],
    }
    if proposed is None:
        return profile
    both = {"default": default, "proposed": proposed}
    filters = {
        name: {"layers": list(x), "full": full_layers(x, n_layer), "kl": round(tried[x].mean().item(), 5)}
        for name, x in both.items()
    }
    return profile | {"filter_layers": list(proposed), "filters": filters}


def propose(
    tried: dict[tuple[int, ...], Tensor], default: tuple[int, ...], most: int, n_layer: int
) -> tuple[int, ...] | None:
    """The filter layers with the smallest mean KL divergence; the default, unless that gains two standard errors.

    tried: the divergences, step by step. None if no choice leaves a layer sparse, and at most `most` full.
    """
    allowed = [filters for filters in tried if full_layers(filters, n_layer) <= min(most, n_layer - 1)]
    best = min(allowed, key=lambda filters: tried[filters].mean().item(), default=None)
    if default in allowed:
        gain = tried[default] - tried[best]
        if gain.mean() <= 2 * gain.std() / len(gain) ** 0.5:
            return default
    return best


def full_layers(filters: tuple[int, ...], n_layer: int) -> int:
    return n_layer - sum(map(len, segments_of(filters, n_layer).values()))


def best_filters(sparse_error: list[list[float]], most: int) -> list[tuple[int, ...]]:
    """The choices of filter layers with the smallest sums of their sparse layers' errors, best first; [] if none exist.

    sparse_error[l][f]: layer l's squared relative error if it attends to what layer f chooses. At most `most` layers
    may be full: every step reads all tokens in these.
    """
    n_layer, sums = len(sparse_error), []
    for count in range(1, FILTERS + 1):
        for filters in combinations(range(n_layer), count):
            segments = segments_of(filters, n_layer)
            if all(segments.values()) and full_layers(filters, n_layer) <= most:
                pairs = ((layer, first) for first, layers in segments.items() for layer in layers)
                sums.append((sum(sparse_error[layer][first] for layer, first in pairs), filters))
    return [filters for _, filters in sorted(sums)[:TRIED]]


def excerpts_of(engine: Engine, text: str, length: int) -> list[list[int]]:
    """Excerpts of at most `length` tokens from the end of a text, each with the tokenizer's BOS."""
    ids = engine.encode(text)
    text_ids, (bos, _) = engine.tokenizer.inner(ids), engine.tokenizer.around
    size = max(1, min(length, engine.config.max_length) - len(bos))
    count = min(EXCERPTS, max(1, len(text_ids) // size))
    return [bos + text_ids[-size * i :][:size] for i in range(count, 0, -1)]


def draw(profile: dict, tau: float, tolerance: float, path: str) -> None:
    """Draws OmniKV's Figure 6a, TailorKV's Figure 12 and the errors of quantized layers; proposed layers are marked."""
    errors, quantized = [error for error, _ in profile["quant_error"]], profile["quant_layers"]
    filters = profile["filter_ability"][:-1], profile.get("filter_layers", []), "filter layers"
    dense = profile["dense_preference"], quantized, "quantized layers"
    with panels(path, 1, 3, width=5, height=4) as (axes,):
        for axis, (curve, marked, label) in zip(axes, (filters, dense, (errors, *dense[1:])), strict=True):
            axis.plot(range(len(curve)), curve)
            axis.plot(marked, [curve[layer] for layer in marked], "o", markersize=12, fillstyle="none", label=label)
            axis.set(xlabel="layer", ylim=(0, max(1, *curve)))
        axes[0].set_ylabel(f"attention of the next {AFTER} layers to its choice")
        axes[1].set_ylabel(f"attention beyond the best {SPARSE:.0%} of the tokens")
        axes[1].axhline(tau, color="gray", linestyle="--", label="tau")
        axes[2].set_ylabel(f"error of its output in {BITS[0]} bits")
        axes[2].axhline(tolerance, color="gray", linestyle="--", label="tolerance")
        for axis in axes:
            axis.legend()


def report(profile: dict) -> str:
    """A table of the layers, the filter layers, and what the marks mean."""
    filters, quantized = profile.get("filters"), profile["quant_layers"]
    lines = []
    for layer, heads in enumerate(profile["head_scores"]):
        cells = {name: profile[name.replace(" ", "_")][layer] for name in MEASURES}
        cells |= {f"{bits} bits": error for bits, error in zip(BITS, profile["quant_error"][layer], strict=True)}
        cells |= {f"head {head}": score for head, score in enumerate(heads)}
        shares = {name: "-" if share is None else f"{100 * share:.1f}%" for name, share in cells.items()}
        chooses = layer in profile.get("filter_layers", [])
        lines.append({"layer": f"{layer}{'*' * chooses}{'q' * (layer in quantized)}", **shares})
    found = [table(lines)]
    if filters:
        found.append("* proposed as filter layers")
        rows = [{"filters": name, **x, "layers": "+".join(map(str, x["layers"]))} for name, x in filters.items()]
        found.append(table(rows))
    else:
        found.append("no filter layers: too few layers, or --full is too small")
    if quantized:
        found.append("q proposed as quantized layers")
    else:
        found.append("no layer has both a dense preference above --tau and an error of at most --tolerance")
    return "\n".join(found)


def main(argv: list[str] | None = None) -> None:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    p.add_argument("--text", required=True, metavar="FILE", help="a text like the model's prompts, question included")
    p.add_argument("--length", type=int, default=LENGTH, help=f"tokens per excerpt, as per prompt (default: {LENGTH})")
    p.add_argument("--sinks", type=int, default=DuoMethod.sinks, help="first tokens of a streaming head")
    p.add_argument("--recent", type=int, default=DuoMethod.recent, help="newest tokens of a streaming head")
    p.add_argument("--tau", type=float, default=TAU, help="dense preference above which a layer is quantized")
    p.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="the largest error of a quantized layer's output in 2 bits"
    )
    p.add_argument(
        "--full", type=int, help="the most full layers (default: as many as with omnikv's own filter layers)"
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="default: kv_profile.json in the checkpoint")
    p.add_argument("--plot", metavar="FILE", help="draw filter ability, dense preference and errors over the layers")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    args = p.parse_args(argv)
    path = args.out or args.checkpoint / "kv_profile.json"
    if args.checkpoint.is_dir():  # otherwise loading reports the error
        check_output(str(path), "--out")
    check_output(args.plot, "--plot")
    if args.length < 1:
        raise ValueError(f"--length must be at least 1, not {args.length}")
    text = whole_text("--text", args.text)
    old = read_json(path) if path.is_file() and path.stat().st_size else {}  # a redirected stdout is an empty file
    engine = Engine.load(args.checkpoint, device=args.device, dtype=args.dtype, compile=False, progress=progress)
    excerpts = excerpts_of(engine, text, args.length)
    profile = calibrate(engine, excerpts, args.sinks, args.recent, args.tau, args.tolerance, args.full)
    for name in ("filter_layers", "filters"):  # an earlier run's, if this one proposes none
        old.pop(name, None)
    with replacing(path) as new:
        new.write_text(json.dumps(old | {"text": Path(args.text).name} | profile, indent=1) + "\n")
    print(report(profile))
    print(f"measured on {profile['tokens']} tokens: measure longer prompts with --length")
    if args.plot:
        draw(profile, args.tau, args.tolerance, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
