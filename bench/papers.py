"""The figures in the methods' papers, and the same settings measured here."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

import kv as methods
from bench.contenders import SHAPES
from bench.generations import generations
from bench.generations import table as generations_table
from bench.measure import measure, new_case
from bench.report import value
from runtime.device import free_bytes
from terminal.cli import Choice

Found = Iterator[tuple[str, list[dict]]]  # finished cases: a key of the JSON object, and new rows for it


@dataclass(frozen=True)
class Setting:
    kv: str  # method
    source: str  # paper and figure or table
    hardware: str
    shape: str  # of SHAPES
    context: int
    budget: int | float | None
    # speedup, memory (peak in decode) and rows relative to the full cache, or tokens_per_s; None: only plotted there
    figures: dict[str, float | None]
    options: dict = field(default_factory=dict)
    quantize: str | None = None  # weights
    new: int | None = None  # tokens of whole generations, with as many rows as fit in `memory` bytes
    memory: int = 80 * 10**9


ROCKETKV = tuple(  # section 4.3 states the figures of two settings; the others are only plotted
    Setting(
        "rocketkv",
        "RocketKV, Figure 5",
        "H100, fp16",
        "llama-3.1-8b",
        1024 * k,
        budget,
        {"speedup": s, "memory": m},
        {"split": "even"},
    )
    for k in (16, 32, 64, 96)
    for budget in (256, 512, 1024, 2048, 4096)
    for s, m in [{256: (3.0, 0.686), 512: (2.9, 0.7)}.get(budget * (k == 96), (None, None))]
)
OMNIKV = (
    Setting("omnikv", "OmniKV, section 5.2", "A100, fp16", "llama-3.1-8b", 128 * 1024, 2048, {"speedup": 1.68}),
    Setting(
        "omnikv",
        "OmniKV, section 5.2",
        "A100, fp16",
        "llama-3.1-8b",
        450 * 1000,
        None,
        {"tokens_per_s": 7.5},
        {"mem": 0.3, "offload": True},
    ),
)
D2O = tuple(  # tokens/s relative to the full cache, each with as many rows as fit; the budget is the prompt's length
    Setting(
        name, "D2O, Table 5", "A100 80 GB, fp16", "llama-3.1-8b", n, n, {"speedup": speedup, "rows": 4.0}, new=4 * n
    )
    for name, speedups in (("d2o", (2.34, 2.49, 2.80, 3.04)), ("h2o", (2.45, 2.57, 2.90, 3.10)))
    for n, speedup in zip((256, 512, 1024, 2048), speedups, strict=True)
)
TAILORKV = (
    *(
        Setting("tailorkv", "TailorKV, Table 13", "A100", shape, k * 1024, 192, {"speedup": speedup})
        for shape, k, speedup in (
            ("llama-3.1-8b", 64, 0.93),
            ("llama-3.1-8b", 128, 1.46),
            ("llama-2-7b", 64, 1.43),
            ("yi-6b", 128, 0.79),
            ("yi-9b", 128, 0.89),
        )
    ),
    Setting("tailorkv", "TailorKV, section 5.3", "A100", "llama-2-7b", 128 * 1024, 192, {"memory": 0.262}),
    Setting(
        "tailorkv",
        "TailorKV, section 1",
        "RTX 3090",
        "llama-3.1-8b",
        128 * 1024,
        192,
        {"memory": 0.463},
        quantize="int4",
    ),
    Setting(
        "tailorkv",
        "TailorKV, section 1",
        "RTX 3090, PCIe 1.0",
        "llama-3.1-8b",
        128 * 1024,
        192,
        {"tokens_per_s": 12.2},
        quantize="int4",
    ),
)
SETTINGS = (*ROCKETKV, *OMNIKV, *D2O, *TAILORKV)


def published(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype, bandwidth: float, lines: list[list[str]]
) -> Found:
    """Measures the settings that fit this machine, and adds the lines of the table to `lines`."""
    free = free_bytes(device)
    head = ["published", "on", "method", "shape", "context", "batch", "figure", "there", "here, vs full", "vs naive"]
    lines.append(head)
    for p in tqdm(SETTINGS, unit="setting", disable=None, leave=False):
        case = new_case(args, SHAPES[p.shape], p.quantize, dtype, device, p.context, 1)
        case.prefill = False  # the figures are for decoding
        chosen, found = Choice(p.kv, p.budget, p.options), {}
        alone = "tokens_per_s" in p.figures  # no comparison, so the full cache need not fit
        arguments = (chosen.kv, case.shape(), chosen.budget, chosen.options)
        caches = methods.planned_bytes(*arguments)[0] if alone else 2 * case.shape().full_bytes()
        needed = sum(t.nbytes for t in case.model().state_dict().values()) + caches
        if needed <= free and p.new:
            case.steps = p.new + args.steps + 2
            both = [Choice("full", None, {}), chosen]
            own = list(generations(case, both, None, p.new, args.steps, bandwidth, p.memory))
            yield "generations", own
            if len(own) == 2:
                found = {"speedup_vs_full": own[1]["tokens_per_s"] / own[0]["tokens_per_s"]}
                found |= {"rows_vs_full": own[1]["batch"] / own[0]["batch"]}
            print(generations_table(own), file=sys.stderr)
        elif needed <= free:
            baseline = {"shape": p.shape, "baseline": None if alone else "naive", "peer": None}
            own_args = argparse.Namespace(**vars(args) | baseline)
            own = measure(own_args, case, [*([] if alone else [Choice("full", None, {})]), chosen], bandwidth)
            found = next((row for row in own if row["kv"] == p.kv), {})
            yield "rows", own
            torch._dynamo.reset()
        for key, there in p.figures.items():
            here = [value(found.get(f"{key}_vs_{base}"), ".2f") for base in ("full", "naive")]
            if key in found:
                here = [value(found[key], ".2f"), "-"]
            if needed > free:
                here = [f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free", "-"]
            context = f"{p.context} + {p.new}" if p.new else str(p.context)
            shape = f"{p.shape} {p.quantize}" if p.quantize else p.shape
            setting = [p.source, p.hardware, chosen.label, shape, context, "max" if p.new else "1"]
            lines.append([*setting, key, value(there, "g"), *here])
