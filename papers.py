"""What the papers of the methods measured, for bench.py --paper to measure here."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Setting:
    kv: str  # method
    source: str  # paper and figure or table
    hardware: str
    shape: str  # of contenders.SHAPES
    context: int
    budget: int | float | None
    # speedup, memory (peak in decode) over the paper's full cache, tokens_per_s without one; None: drawn only
    figures: dict[str, float | None]
    options: dict = field(default_factory=dict)
    quantize: str | None = None  # weights
    new: int | None = None  # tokens of whole generations, with as many rows as fit in `memory` bytes
    memory: int = 80 * 10**9


ROCKETKV = tuple(  # section 4.3 prints the figures of the longest context; the others are drawn
    Setting(
        "rocketkv", "RocketKV, Figure 5", "H100, fp16", "llama-3.1-8b", 1024 * k, budget, {"speedup": s, "memory": m},
        {"split": "even"},
    )
    for k in (16, 32, 64, 96)
    for budget in (256, 512, 1024, 2048, 4096)
    for s, m in [{256: (3.0, 0.686), 512: (2.9, 0.7)}.get(budget * (k == 96), (None, None))]
)
OMNIKV = (
    Setting("omnikv", "OmniKV, section 5.2", "A100, fp16", "llama-3.1-8b", 128 * 1024, 2048, {"speedup": 1.68}),
    Setting("omnikv", "OmniKV, section 5.2", "A100, fp16", "llama-3.1-8b", 450 * 1000, None, {"tokens_per_s": 7.5},
            {"mem": 0.3, "offload": True}),
)  # fmt: skip
D2O = tuple(  # tokens/s over those of the full cache, each with as many rows as fit, the budget the prompt's
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
            ("llama-3.1-8b", 64, 0.93), ("llama-3.1-8b", 128, 1.46), ("llama-2-7b", 64, 1.43),
            ("yi-6b", 128, 0.79), ("yi-9b", 128, 0.89),
        )
    ),
    Setting("tailorkv", "TailorKV, section 5.3", "A100", "llama-2-7b", 128 * 1024, 192, {"memory": 0.262}),
    Setting("tailorkv", "TailorKV, section 1", "RTX 3090", "llama-3.1-8b", 128 * 1024, 192, {"memory": 0.463},
            quantize="int4"),
    Setting("tailorkv", "TailorKV, section 1", "RTX 3090, PCIe 1.0", "llama-3.1-8b", 128 * 1024, 192,
            {"tokens_per_s": 12.2}, quantize="int4"),
)  # fmt: skip
SETTINGS = (*ROCKETKV, *OMNIKV, *D2O, *TAILORKV)
