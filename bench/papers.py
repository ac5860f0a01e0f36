"""The figures in the methods' papers, and the same settings measured here."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

import kv as methods
from bench import tables
from bench.contenders import SHAPES, Case, checked
from bench.measure import FULL, generations, measure
from runtime.device import free_bytes
from terminal.cli import Choice


@dataclass(frozen=True)
class Published:
    """Figures of a method in a paper, and the setting they were measured in."""

    method: Choice
    source: str  # paper and figure or table
    hardware: str
    context: int
    # speedup, memory (peak in decode) and rows relative to the full cache, or tokens_per_s; None: only plotted there
    figures: dict[str, float | None]
    shape: str = "llama-3.1-8b"  # of SHAPES
    quantize: str | None = None  # weights
    new: int | None = None  # tokens of whole generations, with as many rows as fit in `memory` bytes
    memory: int = 80 * 10**9

    @property
    def alone(self) -> bool:
        """Whether the figures compare with no other method, so that the full cache need not fit."""
        return "tokens_per_s" in self.figures


K = 1024
STATED = {(96 * K, 256): {"speedup": 3.0, "memory": 0.686}, (96 * K, 512): {"speedup": 2.9, "memory": 0.7}}
PLOTTED = {"speedup": None, "memory": None}
ROCKETKV = [  # section 4.3 states the figures of two settings; the others are only plotted
    Published(Choice("rocketkv", budget, {"split": "even"}), "RocketKV, Figure 5", "H100, fp16", context, figures)
    for context in (16 * K, 32 * K, 64 * K, 96 * K)
    for budget in (256, 512, 1024, 2048, 4096)
    for figures in [STATED.get((context, budget), PLOTTED)]
]
OMNIKV = [
    Published(method, "OmniKV, section 5.2", "A100, fp16", context, figures)
    for method, context, figures in (
        (Choice("omnikv", 2048, {}), 128 * K, {"speedup": 1.68}),
        (Choice("omnikv", None, {"mem": 0.3, "offload": True}), 450_000, {"tokens_per_s": 7.5}),
    )
]
D2O = [  # tokens/s relative to the full cache, each with as many rows as fit; the budget is the prompt's length
    Published(Choice(name, n, own), "D2O, Table 5", "A100 80 GB, fp16", n, {"speedup": s, "rows": 4.0}, new=4 * n)
    for name, own, speedups in (
        ("d2o", {"merge": "paper", "ratio": "3+1"}, (2.34, 2.49, 2.80, 3.04)),
        ("h2o", {}, (2.45, 2.57, 2.90, 3.10)),
    )
    for n, s in zip((256, 512, 1024, 2048), speedups, strict=True)
]
TAILORKV = [
    Published(Choice("tailorkv", 192, {}), f"TailorKV, {source}", hardware, k * K, figures, shape, quantize)
    for source, hardware, k, figures, shape, quantize in (
        ("Table 13", "A100", 64, {"speedup": 0.93}, "llama-3.1-8b", None),
        ("Table 13", "A100", 128, {"speedup": 1.46}, "llama-3.1-8b", None),
        ("Table 13", "A100", 64, {"speedup": 1.43}, "llama-2-7b", None),
        ("Table 13", "A100", 128, {"speedup": 0.79}, "yi-6b", None),
        ("Table 13", "A100", 128, {"speedup": 0.89}, "yi-9b", None),
        ("section 5.3", "A100", 128, {"memory": 0.262}, "llama-2-7b", None),
        ("section 1", "RTX 3090", 128, {"memory": 0.463}, "llama-3.1-8b", "int4"),
        ("section 1", "RTX 3090, PCIe 1.0", 128, {"tokens_per_s": 12.2}, "llama-3.1-8b", "int4"),
    )
]
PUBLISHED = [*ROCKETKV, *OMNIKV, *D2O, *TAILORKV]


def published(args: argparse.Namespace, base: Case, lines: list[dict[str, object]]) -> Iterator[tuple[str, list[dict]]]:
    """Measures the settings that fit this machine; yields a key of the JSON object and new rows for it.

    Adds the lines of the table to `lines`.
    """
    free = free_bytes(base.device)
    for p in tqdm(PUBLISHED, unit="setting", disable=None, leave=False):
        case = replace(base, name=p.shape, config=SHAPES[p.shape], quantize=p.quantize, context=p.context)
        case = checked(replace(case, prefill=False))  # the figures are for decoding
        caches = 2 * case.shape().full_bytes()
        if p.alone:
            caches, _ = methods.planned_bytes(p.method.kv, case.shape(), p.method.budget, p.method.options)
        needed = sum(t.nbytes for t in case.model().state_dict().values()) + caches
        chosen, here = [*([] if p.alone else [FULL]), p.method], {}
        if needed > free:
            here = {
                f"{figure}_vs_full": f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free" for figure in p.figures
            }
        elif p.new:
            rows = list(generations(case, chosen, None, p.new, args.steps, p.memory))
            yield "generations", rows
            if len(rows) == 2:
                full, own = rows
                here = {"speedup_vs_full": own["tokens_per_s"] / full["tokens_per_s"]}
                here["rows_vs_full"] = own["batch"] / full["batch"]
            if rows:
                print(tables.generations(rows), file=sys.stderr)
        else:
            changed = {"baseline": None if p.alone else "naive", "peer": None}
            rows = measure(argparse.Namespace(**vars(args) | changed), case, chosen)
            yield "rows", rows
            here = next((row for row in rows if row["kv"] == p.method.kv), {})
            torch._dynamo.reset()
        for figure, there in p.figures.items():
            lines.append(
                {
                    "published": p.source,
                    "on": p.hardware,
                    "method": p.method.label,
                    "shape": f"{p.shape} {p.quantize or ''}".strip(),
                    "context": f"{p.context} + {p.new}" if p.new else p.context,
                    "batch": "max" if p.new else 1,
                    "figure": figure,
                    "there": tables.cell(there, "g"),
                    "here, vs full": tables.cell(here.get(figure, here.get(f"{figure}_vs_full"))),
                    "vs naive": tables.cell(here.get(f"{figure}_vs_naive")),
                }
            )
