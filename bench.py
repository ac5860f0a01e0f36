"""How fast, in how much memory, how far from what the machine allows: python bench.py --kv all --budget 256,1024

Needs no checkpoint: a model of a known shape gets random weights. All methods decode the same context, step by step in
turns. The floor of a step is the bytes that it must read (weights with the head but without the embedding table, and
what the method reads of its cache) over the read bandwidth of a large sum, measured in the same run. Nothing else
should run meanwhile.
"""

import startup  # noqa: F401

import argparse
import ctypes
import datetime
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

import kv as methods
import throughput
from checkpoint import read_json
from cli import Choice, check_output, choices, columns, load_pyplot, number, numbers, profile_lines, run, write_json
from contenders import SHAPES, Case, Ours, Theirs, floor_ms, random_weights, seconds, step_weights
from device import DTYPES, cap_memory, free_bytes, machine, memory_errors, pick_device, pick_dtype, resident_bytes
from papers import SETTINGS
from quantize import MODES

Found = Iterator[tuple[str, list[dict]]]  # finished cases: a key of the JSON object, and rows for it
STYLES = ("-o", "--s", ":^", "-.D", "-v", "--P", ":X")
LEAST = 2**25  # bytes of free memory
WIDE = 0.25  # of the median: more between the 10th and the 90th percentile, and the row says so


# Measuring


def read_bandwidth(device: torch.device) -> float:
    """Bytes/s of a large sum. Raises ValueError if there is no memory to sum over."""
    most, free = 2**30 if device.type == "cuda" else 2**29, free_bytes(device)
    if free < LEAST:
        raise ValueError(
            f"{device} has {max(0, free) / 1e9:.3f} GB free, and measuring takes {LEAST / 1e9:.3f}: free some, or "
            "raise --memory-cap, which counts what this process holds already"
        )
    data = torch.ones(min(most, free // 16), dtype=torch.float32, device=device)
    return data.nbytes / statistics.median(seconds(lambda: data.sum().item()) for _ in range(11))


def rise(device: torch.device, what) -> tuple:
    """(what(), bytes that the use of the device's memory rose above where it was, None where it cannot be known)"""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = what()
        return result, torch.cuda.max_memory_allocated(device) - before
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before is to count when it is used again
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
    except OSError:
        return what(), None
    before = resident_bytes("VmRSS")
    result = what()
    return result, resident_bytes("VmHWM") - before


def graphs(contender: Ours) -> int:
    """CUDA graphs that a step replays."""
    replay, count = torch.cuda.CUDAGraph.replay, 0

    def counted(graph):
        nonlocal count
        count += 1
        return replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    try:
        contender.step()
    finally:
        torch.cuda.CUDAGraph.replay = replay
    return count


def attention_kernel(contender: Ours) -> str:
    """What the profiler calls the kernel that attends."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if contender.case.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        contender.step()
    names = [e.key for e in trace.key_averages() if any(w in e.key.lower() for w in ("attention", "flash", "flex"))]
    return min(names, key=lambda name: (name.startswith("aten::scaled_dot"), -len(name)), default="fused by Inductor")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[round(share * (len(values) - 1))]


def measure(args: argparse.Namespace, case: Case, chosen: list[Choice], bandwidth: float) -> list[dict]:
    """One row of the JSON object a contender, all of them timed in turns."""
    weights = random_weights(case)
    weight_bytes = sum(t.nbytes for t in weights.values())
    rows, contenders = [], []
    for make in tqdm(makers(args, case, chosen, weights), unit="method", disable=None, leave=False):
        try:
            with memory_errors():
                contender = make()
                prefill_s, prefill_rise = rise(case.device, contender.start)
                for _ in range(3):
                    contender.step()
                _, decode_rise = rise(case.device, contender.step)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        row = {
            "shape": args.shape, "context": case.context, "batch": case.batch,
            "dtype": str(case.dtype).removeprefix("torch."), "quantize": case.quantize, "prefill_s": prefill_s,
            **contender.about(), "weight_bytes": weight_bytes, "graphs": None,
            "step_weight_bytes": step_weights(case, weights),
        }  # fmt: skip
        if isinstance(contender, Ours):
            held = weight_bytes + row["kv_device_bytes"]
            for when, more in (("prefill", prefill_rise), ("decode", decode_rise)):
                row[f"peak_{when}_bytes"] = None if more is None else held + more
            if not case.prefill:
                row["peak_prefill_bytes"] = None  # what rose was the filling with random keys and values
            read = row["step_weight_bytes"] + row["step_device_bytes"]
            row["floor_ms"] = floor_ms(case.device, read, row["step_host_bytes"], bandwidth)
            if case.device.type == "cuda":
                row["graphs"] = graphs(contender)
            if row["kv"] in ("full", "naive"):
                row["kernel"] = attention_kernel(contender)
        else:
            row |= {"peak_prefill_bytes": None, "peak_decode_bytes": None}
            row["floor_ms"] = None
        rows.append(row)
        contenders.append(contender)
    times = [[] for _ in contenders]
    for _ in range(args.repeats if contenders else 0):
        for own, contender in zip(times, contenders, strict=True):
            contender.step()  # brings its data back
            own += [1e3 * seconds(contender.step) for _ in range(args.steps)]
    for row, own in zip(rows, times, strict=True):
        row["ms_per_token"], row["p10"], row["p90"] = (percentile(own, share) for share in (0.5, 0.1, 0.9))
        row["tokens_per_s"] = case.batch * 1e3 / row["ms_per_token"]
        row["times_floor"] = row["floor_ms"] and row["ms_per_token"] / row["floor_ms"]
    for name in ("full", "naive"):
        base = next((row for row in rows if row["kv"] == name), None)
        for row in rows:
            row[f"speedup_vs_{name}"] = base and base["ms_per_token"] / row["ms_per_token"]
            peaks = row["peak_decode_bytes"], base and base["peak_decode_bytes"]
            row[f"memory_vs_{name}"] = None if None in peaks else peaks[0] / peaks[1]
    if args.profile:
        profile(contenders, args.profile)
    return rows


def published(
    args: argparse.Namespace, device: torch.device, dtype: torch.dtype, bandwidth: float, lines: list[list[str]]
) -> Found:
    """The settings that this machine is large enough for; `lines` becomes the table."""
    free = free_bytes(device)
    head = ["published", "on", "method", "shape", "context", "batch", "figure", "there", "here, vs full", "vs naive"]
    lines.append(head)
    for p in tqdm(SETTINGS, unit="setting", disable=None, leave=False):
        case = new_case(args, SHAPES[p.shape], p.quantize, dtype, device, p.context, 1)
        case.prefill = False  # the figures are of decoding
        chosen, found = Choice(p.kv, p.budget, p.options), {}
        alone = "tokens_per_s" in p.figures  # where the full cache need not fit
        arguments = (chosen.kv, case.shape(), chosen.budget, chosen.options)
        caches = methods.planned_bytes(*arguments)[0] if alone else 2 * case.shape().full_bytes()
        needed = sum(t.nbytes for t in case.model().state_dict().values()) + caches
        if needed <= free and p.new:
            case.steps = p.new + args.steps + 2
            both = [Choice("full", None, {}), chosen]
            own = list(throughput.generations(case, both, None, p.new, args.steps, bandwidth, p.memory))
            yield "generations", own
            if len(own) == 2:
                found = {"speedup_vs_full": own[1]["tokens_per_s"] / own[0]["tokens_per_s"]}
                found |= {"rows_vs_full": own[1]["batch"] / own[0]["batch"]}
            print(throughput.table(own), file=sys.stderr)
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


def makers(args: argparse.Namespace, case: Case, chosen: list[Choice], weights: dict) -> list:
    """Functions that make the contenders."""
    found = [partial(Ours, case, method, weights) for method in chosen]
    if args.baseline:
        found.append(partial(Ours, case, Choice("full", None, {}), weights, naive=True))
    if args.peer:
        caches = ["dynamic", "static"] + ["static, compiled"] * case.compile
        found += [partial(Theirs, case, cache) for cache in caches]
    return found


def profile(contenders: list, path: str) -> None:
    """A trace of two steps of each, for chrome://tracing or perfetto."""
    with torch.profiler.profile() as trace:
        for contender in contenders:
            with torch.profiler.record_function(contender.label):
                contender.step()
                contender.step()
    trace.export_chrome_trace(path)


# Showing


def table(rows: list[dict]) -> str:
    head = ["method", "weights", "batch", "context", "ms/token", "p10 - p90", "floor", "x floor", "vs full", "tokens/s",
            "read a step", "KV", "peak decode", "peak prefill", "prefill s", "compile s"]  # fmt: skip
    lines = [head]

    def size(*parts: int | None) -> str:
        n = None if None in parts else sum(parts)
        return "-" if n is None else f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"

    for r in rows:
        lines.append([
            Choice(r["kv"], r["budget"], r["options"]).label, r["quantize"] or r["dtype"], str(r["batch"]),
            str(r["context"]), f"{r['ms_per_token']:.2f}" + "!" * is_wide(r), f"{r['p10']:.2f} - {r['p90']:.2f}",
            value(r["floor_ms"], ".2f"), value(r["times_floor"], ".2f"), value(r["speedup_vs_full"], ".2f"),
            f"{r['tokens_per_s']:.1f}", size(r["step_weight_bytes"], r["step_device_bytes"], r["step_host_bytes"]),
            size(r["kv_device_bytes"], r["kv_host_bytes"]), size(r["peak_decode_bytes"]), size(r["peak_prefill_bytes"]),
            value(r["prefill_s"], ".2f"), value(r["compile_s"], ".1f"),
        ])  # fmt: skip
    return columns(lines)


def value(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)


def is_wide(row: dict) -> bool:
    return row["p90"] - row["p10"] > WIDE * row["ms_per_token"]


def draw(rows: list[dict], path: str) -> None:
    """ms/token over the context, speedup over the budget, memory over the context."""
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
        lines: dict[str, dict[str, list]] = {}  # of each method: its lines
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
            axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# The command line


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", help=f"{', '.join(SHAPES)}, or the path of a config.json (default: what fits here)")
    p.add_argument("--kv", default="all", help="methods with commas between; with options: name:option=value:...")
    p.add_argument("--budget", default="256,1024", help="tokens a KV head, or shares of the prompt, with commas")
    p.add_argument("--context", help="tokens in the cache; several with commas (default: what fits here)")
    p.add_argument("--batch", default="1", help="rows decoded together, with commas (default: 1); max: all that fit")
    p.add_argument("--generate", type=int, metavar="N", help="time whole generations of N tokens after --context")
    p.add_argument("--quantize", default="none", help=f"none, {', '.join(MODES)}; several with commas")
    p.add_argument("--groupsize", type=int, default=128, help="of int4 (default: 128)")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and caches")
    p.add_argument("--steps", type=int, default=20, help="timed of every contender in a repeat (default: 20)")
    p.add_argument("--repeats", type=int, default=3, help="turns that every contender has (default: 3)")
    p.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True, help="measure it (default: yes)")
    p.add_argument("--baseline", choices=["naive"], help="the full cache with K and V repeated for every query head")
    p.add_argument("--peer", choices=["transformers"], help="Hugging Face's own generation step, same shape and dtype")
    p.add_argument("--paper", action="store_true", help="the settings of the methods' papers, beside their figures")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--memory-cap", type=float, metavar="GB", help="behave as if the device had no more memory")
    p.add_argument("--profile", metavar="FILE", help="write a trace of two steps of every contender")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    p.add_argument("--plot", metavar="FILE", help="draw ms/token, speedup and memory")
    p.add_argument("--results", metavar="FILE", default="bench-results.jsonl", help="each finished case adds a line")
    return p


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for flag in ("json", "plot", "profile", "results"):
        check_output(getattr(args, flag), f"--{flag}")
    for flag in ("steps", "repeats", "groupsize", "generate"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    if args.paper and args.generate:
        raise ValueError("--paper has settings of its own: leave out --generate")
    if args.peer and not importlib.util.find_spec(args.peer):
        raise ValueError(f"--peer {args.peer} needs it: pip install {args.peer}")
    if args.memory_cap is not None and args.memory_cap <= 0:
        raise ValueError(f"--memory-cap must be positive, not {args.memory_cap}")
    device, dtype = pick_device(args.device), pick_dtype(args.dtype)
    if args.memory_cap is not None:
        cap_memory(int(args.memory_cap * 1e9), device)
    args.shape = args.shape or default_shape(device)
    config = shape_config(args.shape)
    contexts = numbers(args.context, "--context", int) if args.context else default_contexts(device)
    if args.batch == "max" and args.generate is None:
        raise ValueError("--batch max needs --generate N")
    batches = None if args.batch == "max" else numbers(args.batch, "--batch", int)
    budgets = numbers(args.budget, "--budget", number) if args.budget else []
    chosen = choices(",".join(methods.METHODS) if args.kv == "all" else args.kv, budgets)
    modes = [None if mode == "none" else mode for mode in args.quantize.split(",")]
    if unknown := set(modes) - {None, *MODES}:
        raise ValueError(f"--quantize {unknown.pop()}: known are none, {', '.join(MODES)}")
    bandwidth = read_bandwidth(device)
    about = {"machine": machine(device), "commit": commit(), "date": f"{datetime.date.today()}"}
    about |= {"command": " ".join(["bench.py", *(sys.argv[1:] if argv is None else argv)])}
    about |= {"bandwidth_gbs": bandwidth / 1e9}
    out = sys.stderr if args.json == "-" else sys.stdout
    print(f"{about['machine']}, reads {bandwidth / 1e9:.0f} GB/s; {args.shape}", file=out)
    result, lines, stopped = about | {"rows": []} | ({"generations": []} if args.paper else {}), [], False

    def asked() -> Found:
        for mode, context in itertools.product(modes, contexts):
            if args.generate:
                case = new_case(args, config, mode, dtype, device, context, 1)
                case.steps, case.prefill = args.generate + args.steps + 2, False
                for row in throughput.generations(case, chosen, batches, args.generate, args.steps, bandwidth):
                    yield "rows", [row]
                continue
            for batch in batches:
                case = new_case(args, config, mode, dtype, device, context, batch)
                yield "rows", measure(args, case, chosen, bandwidth)
                torch._dynamo.reset()

    try:
        for key, found in published(args, device, dtype, bandwidth, lines) if args.paper else asked():
            result[key] += found
            if found:
                with open(args.results, "a") as file:
                    file.write(json.dumps(about | {key: found}) + "\n")
                if args.json != "-":
                    write_json(args.json, result)
    except KeyboardInterrupt:  # what has finished is shown all the same
        stopped = True
    if len(lines) > 1:
        print(columns(lines), file=out)
    show(args, result["rows"], out)
    if args.json == "-":
        write_json(args.json, result)
    if stopped:
        raise KeyboardInterrupt
    if not result["rows"] and not args.paper:
        raise ValueError("nothing was measured: every method was left out")


def show(args: argparse.Namespace, rows: list[dict], out: TextIO) -> None:
    if not rows:
        return
    print(throughput.table(rows) if args.generate else table(rows), file=out)
    kernels = sorted({f"{r['kv']} attends with {r['kernel']}" for r in rows if "kernel" in r})
    for line in profile_lines(rows) + kernels:
        print(line, file=out)
    if not args.generate and any(map(is_wide, rows)):
        print("! the spread is too wide to conclude: is the machine idle?", file=out)
    if args.plot:
        throughput.draw(rows, args.plot) if args.generate else draw(rows, args.plot)


def new_case(args, config: dict, mode: str | None, dtype, device, context: int, batch: int) -> Case:
    steps = args.repeats * (args.steps + 1) + 8
    return Case(config, mode, args.groupsize, dtype, device, context, batch, steps, args.compile, args.prefill)


def shape_config(name: str) -> dict:
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).is_file():
        raise ValueError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}, or give the path of a config.json")
    profile = Path(name).with_name("kv_profile.json")
    known = {"kv_profile": methods.read_profile(read_json(profile))} if profile.is_file() else {}
    return {**read_json(Path(name)), "max_position_embeddings": 2**20, **known}


def default_shape(device: torch.device) -> str:
    free = free_bytes(device)
    return "llama-160m" if device.type == "cpu" else "llama-3.1-8b" if free > 40e9 else "llama-3.2-1b"


def default_contexts(device: torch.device) -> list[int]:
    return [4096, 16384] if device.type == "cpu" else [4096, 16384, 65536, 131072]


def commit() -> str | None:
    """Of this folder, with a + if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    run(main)
