"""The table and the plot of the results."""

import itertools

from terminal.cli import Choice, columns, load_pyplot

STYLES = ("-o", "--s", ":^", "-.D", "-v", "--P", ":X")
WIDE = 0.25  # share of the median; a row is marked if its 10th and 90th percentiles are further apart


def table(rows: list[dict]) -> str:
    head = [
        "method",
        "weights",
        "batch",
        "context",
        "ms/token",
        "p10 - p90",
        "floor",
        "x floor",
        "vs full",
        "tokens/s",
        "read a step",
        "KV",
        "peak decode",
        "peak prefill",
        "first token s",
        "compile s",
    ]
    lines = [head]

    def size(*parts: int | None) -> str:
        n = None if None in parts else sum(parts)
        return "-" if n is None else f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"

    for r in rows:
        drafts = f", drafts {r['speculate']}" if r.get("speculate") else ""
        lines.append(
            [
                Choice(r["kv"], r["budget"], r["options"]).label + drafts,
                r["quantize"] or r["dtype"],
                str(r["batch"]),
                str(r["context"]),
                f"{r['ms_per_token']:.2f}" + "!" * is_wide(r),
                f"{r['p10']:.2f} - {r['p90']:.2f}",
                value(r["floor_ms"], ".2f"),
                value(r["times_floor"], ".2f"),
                value(r["speedup_vs_full"], ".2f"),
                f"{r['tokens_per_s']:.1f}",
                size(r["step_weight_bytes"], r["step_device_bytes"], r["step_host_bytes"]),
                size(r["kv_device_bytes"], r["kv_host_bytes"]),
                size(r["peak_decode_bytes"]),
                size(r["peak_prefill_bytes"]),
                value(r["prefill_s"], ".2f"),
                value(r["compile_s"], ".1f"),
            ]
        )
    return columns(lines)


def extensions(rows: list[dict]) -> str:
    """How long a follow-up takes if added at once, if fed in steps, and if everything is prefilled again."""
    lines = [["method", "context", "tokens", "at once, ms", "in steps, ms", "prefill again, ms"]]
    for r in rows:
        n, again = r["extend"], r["prefill_s"] and 1e3 * r["prefill_s"] * (r["context"] + r["extend"]) / r["context"]
        lines.append(
            [
                Choice(r["kv"], r["budget"], r["options"]).label,
                str(r["context"]),
                str(n),
                f"{r['extend_ms']:.0f}",
                f"{n * r['ms_per_token']:.0f}",
                value(again, ".0f"),
            ]
        )
    return columns(lines)


def tokens_per_round(drafted: int, accept: float) -> float:
    """How many tokens a round gives if each drafted token is accepted with probability `accept`."""
    return sum(accept**i for i in range(drafted + 1))


def speculations(rows: list[dict], all_rows: list[dict]) -> str:
    """What a round costs, and the acceptance at which it begins to pay; `rows` are those with speculation."""
    lines = [
        [
            "drafts",
            "a round",
            "context",
            "batch",
            "weights",
            "round, ms",
            "draft, ms",
            "verify, ms",
            "full, ms",
            "ms/token",
            "accepted",
            "break-even",
        ]
    ]
    for r in rows:
        same = [x for x in all_rows if all(x[key] == r[key] for key in ("context", "batch", "quantize"))]
        plain = [
            x["ms_per_token"]
            for x in same
            if not x.get("speculate")
            and x["kv"] == r["kv"]
            and x["budget"] == r["budget"]
            and x["options"] == r["options"]
        ]
        full = [x["ms_per_token"] for x in same if x["kv"] == "full" and not x["options"]]
        n, draft = r["speculate"], plain[0]
        percents = range(101) if full else ()
        pays = next((p for p in percents if r["round_ms"] <= full[0] * tokens_per_round(n, p / 100)), None)
        lines.append(
            [
                Choice(r["kv"], r["budget"], r["options"]).label,
                str(n),
                str(r["context"]),
                str(r["batch"]),
                r["quantize"] or r["dtype"],
                f"{r['round_ms']:.2f}",
                f"{draft:.2f}",
                f"{r['round_ms'] - n * draft:.2f}",
                value(full[0] if full else None, ".2f"),
                f"{r['ms_per_token']:.2f}",
                f"{100 * r['accept']:.0f}%",
                "-" if pays is None else f"{pays}%",
            ]
        )
    return columns(lines)


def value(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)


def is_wide(row: dict) -> bool:
    return row["p90"] - row["p10"] > WIDE * row["ms_per_token"]


def draw(rows: list[dict], path: str) -> None:
    """Draws ms/token over the context, speedup over the budget, memory over the context."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(17, 4.6), layout="constrained")
    panels = (
        ("context", "ms_per_token", "context, tokens", "ms/token"),
        ("budget", "speedup_vs_full", "budget, tokens a KV head (or share of the prompt)", "times as fast as full"),
        ("context", "peak_decode_bytes", "context, tokens", "peak memory in decode, GB"),
    )
    known = list(dict.fromkeys(Choice(r["kv"], None, r["options"]).label for r in rows))
    values = {key: {r[key] for r in rows} for key in ("batch", "context")}
    values["weights"] = {r["quantize"] or r["dtype"] for r in rows}
    for axis, (x, y, xlabel, ylabel) in zip(axes, panels, strict=True):
        lines: dict[str, dict[str, list]] = {}  # method -> line -> points
        for r in rows:
            if r[x] is None or r[y] is None:
                continue
            parts = {"weights": r["quantize"] or r["dtype"], "batch": f"batch {r['batch']}"}
            parts |= {"context": f"{r['context']} tokens"} if x == "budget" else {}
            name = Choice(r["kv"], None if x == "budget" else r["budget"], r["options"]).label
            name = ", ".join([name, *(text for key, text in parts.items() if len(values[key]) > 1)])
            own = lines.setdefault(Choice(r["kv"], None, r["options"]).label, {}).setdefault(name, [])
            own.append((r[x], r[y] / (1e9 if "bytes" in y else 1)))
        for method, own in lines.items():
            for style, (label, points) in zip(itertools.cycle(STYLES), own.items(), strict=False):
                color = pyplot.get_cmap("tab20")(known.index(method) % 20)
                axis.plot(*zip(*sorted(points), strict=True), style, color=color, label=label)
        axis.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
        ticks = sorted({point[0] for own in lines.values() for points in own.values() for point in points})
        if ticks:
            axis.set_xscale("log")
            axis.minorticks_off()
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.legend(fontsize=8).set_in_layout(False)  # else a long legend would squeeze the axes
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
