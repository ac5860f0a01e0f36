"""The tables and plots of the results, which are rows of the JSON object."""

from collections import defaultdict

from terminal.cli import Choice, table
from terminal.plots import logarithmic, panels

WIDE = 0.25  # share of the median; a row is marked if its 10th and 90th percentiles are further apart


def cell(x: float | None, form: str = ".2f") -> str:
    return "-" if x is None else format(x, form)


def size(*parts: int | None) -> str:
    """The sum of `parts` bytes, - if one is unknown."""
    if None in parts:
        return "-"
    return f"{sum(parts) / 1e9:.2f} GB" if sum(parts) >= 1e9 else f"{sum(parts) / 1e6:.1f} MB"


def label(row: dict) -> str:
    drafts = f", drafts {row['speculate']}" if row.get("speculate") else ""
    return Choice(row["kv"], row["budget"], row["options"]).label + drafts


def weights(row: dict) -> str:
    return row["quantize"] or row["dtype"]


def steps(rows: list[dict]) -> str:
    return table(
        [
            {
                "method": label(r),
                "weights": weights(r),
                "batch": r["batch"],
                "context": r["context"],
                "ms/token": f"{r['ms_per_token']:.2f}" + "!" * is_wide(r),
                "p10 - p90": f"{r['p10']:.2f} - {r['p90']:.2f}",
                "floor": cell(r["floor_ms"]),
                "x floor": cell(r["times_floor"]),
                "vs full": cell(r["speedup_vs_full"]),
                "tokens/s": cell(r["tokens_per_s"], ".1f"),
                "read a step": size(r["step_weight_bytes"], r["step_device_bytes"], r["step_host_bytes"]),
                "KV": size(r["kv_device_bytes"], r["kv_host_bytes"]),
                "peak decode": size(r["peak_decode_bytes"]),
                "peak prefill": size(r["peak_prefill_bytes"]),
                "first token s": cell(r["prefill_s"]),
                "compile s": cell(r["compile_s"], ".1f"),
            }
            for r in rows
        ]
    )


def extensions(rows: list[dict]) -> str:
    """How long a follow-up takes if added at once, if fed in steps, and if everything is prefilled again."""
    return table(
        [
            {
                "method": label(r),
                "context": r["context"],
                "tokens": r["extend"],
                "at once, ms": cell(r["extend_ms"], ".0f"),
                "in steps, ms": cell(r["extend"] * r["ms_per_token"], ".0f"),
                "prefill again, ms": cell(
                    r["prefill_s"] and 1e3 * r["prefill_s"] * (r["context"] + r["extend"]) / r["context"], ".0f"
                ),
            }
            for r in rows
        ]
    )


def tokens_per_round(drafted: int, accept: float) -> float:
    """How many tokens a round gives if each drafted token is accepted with probability `accept`."""
    return sum(accept**i for i in range(drafted + 1))


def speculations(rows: list[dict]) -> str:
    """What a round costs, and the share of accepted tokens at which it begins to pay."""

    def case(r: dict, method: str) -> tuple:
        return r["context"], r["batch"], r["quantize"], method

    alone = {case(r, label(r)): r["ms_per_token"] for r in rows if not r.get("speculate")}
    lines = []
    for r in (r for r in rows if r.get("speculate")):
        n, method = r["speculate"], label(r | {"speculate": 0})
        draft, full = alone.get(case(r, method)), alone.get(case(r, "full"))
        shares = range(101) if full else ()
        pays = next((p for p in shares if r["round_ms"] <= full * tokens_per_round(n, p / 100)), None)
        lines.append(
            {
                "drafts": method,
                "a round": n,
                "context": r["context"],
                "batch": r["batch"],
                "weights": weights(r),
                "round, ms": cell(r["round_ms"]),
                "draft, ms": cell(draft),
                "verify, ms": cell(draft and r["round_ms"] - n * draft),
                "full, ms": cell(full),
                "ms/token": cell(r["ms_per_token"]),
                "accepted": f"{100 * r['accept']:.0f}%",
                "break-even": "-" if pays is None else f"{pays}%",
            }
        )
    return table(lines)


def generations(rows: list[dict]) -> str:
    """Compares each row with the full cache at the same batch size if that ran, else at the first that ran."""
    lines = []
    for r in rows:
        same = ("context", "new", "quantize")
        fulls = [f for f in rows if f["kv"] == "full" and all(f[key] == r[key] for key in same)]
        full = max(fulls, key=lambda f: f["batch"] == r["batch"], default=None)
        lines.append(
            {
                "method": label(r),
                "weights": weights(r),
                "prompt + new": f"{r['context']} + {r['new']}",
                "batch": r["batch"],
                "tokens/s": cell(r["tokens_per_s"], ".1f"),
                "ceiling": cell(r["ceiling_tokens_per_s"], ".1f"),
                "vs full": cell(full and r["tokens_per_s"] / full["tokens_per_s"]),
                "ms first": cell(r["first_ms"]),
                "ms last": cell(r["last_ms"]),
                "KV": f"{r['kv_device_bytes'] / 1e6:.1f} MB",
            }
        )
    return table(lines)


def is_wide(row: dict) -> bool:
    return row["p90"] - row["p10"] > WIDE * row["ms_per_token"]


def draw(rows: list[dict], path: str) -> None:
    """Draws ms/token over the context, speedup over the budget, memory over the context."""
    drawn = (
        ("context", "ms_per_token", "context, tokens", "ms/token", 1),
        ("budget", "speedup_vs_full", "budget, tokens a KV head (or share of the prompt)", "times as fast as full", 1),
        ("context", "peak_decode_bytes", "context, tokens", "peak memory in decode, GB", 1e9),
    )
    with panels(path, 1, 3) as axes:
        for axis, (x, y, xlabel, ylabel, unit) in zip(axes[0], drawn, strict=True):
            lines: dict[str, list] = defaultdict(list)
            for r in rows:
                about = {"method": label(r | {x: None}), "weights": weights(r), "batch": f"batch {r['batch']}"}
                about |= {"context": f"{r['context']} tokens"} if x != "context" else {}
                if r[x] is not None and r[y] is not None:
                    lines[", ".join(about.values())].append((r[x], r[y] / unit))
            for name, points in lines.items():
                axis.plot(*zip(*sorted(points), strict=True), label=name)
            axis.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
            logarithmic(axis, {x for points in lines.values() for x, _ in points})
            if lines:
                axis.legend(fontsize=8).set_in_layout(False)  # else a long legend would squeeze the axes


def draw_generations(rows: list[dict], path: str) -> None:
    """Draws ms per step and the cache's bytes over the tokens generated."""
    with panels(path, 1, 2) as [axes]:
        for r in rows:
            new = [length - r["context"] for length in r["lengths"]]
            axes[0].plot(new, r["ms"], label=f"{label(r)}, batch {r['batch']}")
            axes[1].plot(new, [r["kv_device_bytes"] / 1e6] * len(new))
        for axis, ylabel in zip(axes, ("ms a step", "MB of cache allocated"), strict=True):
            axis.set(xlabel="tokens generated", ylabel=ylabel, ylim=(0, None))
        axes[0].legend()
