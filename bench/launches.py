"""Counts what a decode step costs on a GPU, without one: python -m bench.launches --kv full,rocketkv --budget 512

Inductor generates the step's kernels for an H100, as the engine compiles it, and nothing runs. The table shows the
kernels that a step launches, by kind and per layer; a top-k or a sort is one call to torch, which may launch several.
`kernel_bytes` are those that the kernels read and write, each element once a kernel; `step_bytes` those that a step
must read of the GPU's memory: the weights with the head, but without the embedding table, and what the method reads of
its cache. What comes from the host over the bus is left out, and so is the time that it takes. The time is predicted,
not measured: the kernels' bytes over the bandwidth of the GPU's memory, plus a cost for each launch. Its floor is the
time of `step_bytes`.
"""

import runtime.startup  # noqa: F401

import argparse
import datetime
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

import kv as methods
from bench import generated
from bench.__main__ import commit, shape_config
from bench.contenders import SHAPES
from bench.tables import size
from engine import RowState, Sampling, decode_step
from model import ModelConfig
from runtime.compile import cuda_options
from runtime.device import DTYPES, pick_dtype
from runtime.hf_config import from_hf
from runtime.linear import MODES
from runtime.planning import plan_for
from terminal.cli import Choice, Parser, check_output, choices, numbers, one_line, run, table, write_json

# Bytes/s of a large sum, as measured on an H100: 0.91 of its data sheet's, and assumed the same share of the others'.
BANDWIDTH = {"a100": 1.86e12, "h100": 3.05e12, "h200": 4.37e12}
LAUNCH_US = 1.7  # of one kernel in a CUDA graph, beside the time of its bytes
NEW = 64  # tokens planned after the context


def parser() -> argparse.ArgumentParser:
    p = Parser(
        prog="python -m bench.launches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--shape", default="llama-3.1-8b", help=f"{', '.join(SHAPES)}, or the path of a config.json")
    p.add_argument("--kv", default="all", help="comma-separated methods; with options: name:option=value:...")
    p.add_argument("--budget", default="512", help="tokens per KV head, comma-separated (default: 512)")
    p.add_argument("--context", type=int, default=32768, help="tokens in the cache (default: 32768)")
    p.add_argument("--batch", default="1", help="rows decoded at once, comma-separated (default: 1)")
    p.add_argument("--layers", type=int, metavar="N", help="count a model of the first N layers (default: all)")
    p.add_argument("--quantize", choices=MODES, help="quantize the weights of linear layers")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and caches (default: bfloat16)")
    p.add_argument("--gpu", choices=BANDWIDTH, default="h100", help="whose time is predicted (default: h100)")
    us = f"microseconds that a launch costs beside its bytes (default: {LAUNCH_US})"
    p.add_argument("--launch-us", type=float, default=LAUNCH_US, metavar="US", help=us)
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="results as JSON, to stdout without FILE")
    return p


def step(
    config: ModelConfig, plan: methods.Plan, method: Choice, mode: str | None = None
) -> tuple[generated.Generated, RowState]:
    """What Inductor makes of a method's step, and the rows whose step it is."""
    with generated.fake_gpu() as device:
        plan = replace(plan, device=device, n_layer=config.n_layer)
        state = generated.build(config, plan, method.kv, method.budget, method.options, mode)
        command, sampling = torch.zeros(plan.batch, dtype=torch.int64, device=device), Sampling()
        inputs = state, command, sampling.variant, *sampling.tensors(device)
        found = generated.generate(lambda backend: generated.launch(decode_step, backend, *inputs), cuda_options())
        generated.caches(state).close()
    return found, state


def step_bytes(state: RowState, plan: methods.Plan) -> int:
    """The bytes of the GPU's memory that a step must read: the weights with the head, and its part of each cache."""
    weights = {n: w.nbytes for n, w in state.model.state_dict().items() if not n.startswith("tok_embeddings.")}
    return sum(weights.values()) + plan.batch * generated.caches(state).step_bytes(plan.max_prompt + 1)[0]


def measure(args: argparse.Namespace, chosen: list[Choice]) -> Iterator[dict]:
    """One row of the JSON object for each method and batch."""
    config = from_hf(shape_config(args.shape))
    config = replace(config, n_layer=min(args.layers or config.n_layer, config.n_layer))
    for batch in args.batch:
        plan = plan_for(config, pick_dtype(args.dtype), torch.device("meta"), batch, args.context, NEW)
        without, _ = step(replace(config, n_layer=0), plan, Choice("full", None, {}), args.quantize)
        for method in tqdm(chosen, unit="method", disable=None, leave=False):
            try:
                found, state = step(config, plan, method, args.quantize)
            except ValueError as error:
                print(f"left out: {method.label}: {one_line(error)}", file=sys.stderr)
                continue
            kinds = found.launches()
            launches, bytes_, needed = kinds.total(), found.read + found.written, step_bytes(state, plan)
            seconds = bytes_ / BANDWIDTH[args.gpu] + launches * args.launch_us / 1e6
            yield {
                "kv": method.kv,
                "budget": method.budget,
                "options": method.options,
                "shape": args.shape,
                "layers": config.n_layer,
                "context": args.context,
                "batch": batch,
                "launches": launches,
                "launches_per_layer": (launches - without.launches().total()) / config.n_layer,
                "by_kind": dict(kinds),
                "graphs": found.graphs,
                "quantize": args.quantize,
                "step_bytes": needed,
                "kernel_bytes": bytes_,
                "predicted_ms": 1e3 * seconds,
                "times_floor": seconds * BANDWIDTH[args.gpu] / needed,
            }


def show(args: argparse.Namespace, rows: list[dict]) -> str:
    lines = [
        {
            "method": Choice(row["kv"], row["budget"], row["options"]).label,
            "batch": row["batch"],
            "launches": row["launches"],
            **{kind: row["by_kind"][kind] for kind in generated.LAUNCHES},
            "a layer": f"{row['launches_per_layer']:.1f}",
            "a step reads": size(row["step_bytes"]),
            "its kernels": size(row["kernel_bytes"]),
            f"{args.gpu}, ms, predicted": f"{row['predicted_ms']:.2f}",
            "x floor": f"{row['times_floor']:.2f}",
        }
        for row in rows
    ]
    return table(lines)


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_output(args.json, "--json")
    for flag in ("context", "layers"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise ValueError(f"--{flag} must be at least 1")
    if importlib.util.find_spec("triton") is None:
        raise ValueError("Inductor writes kernels for a GPU with Triton: pip install triton")
    args.batch = numbers(args.batch, "--batch", int)
    chosen = choices(",".join(methods.METHODS) if args.kv == "all" else args.kv, numbers(args.budget, "--budget", int))
    rows = list(measure(args, chosen))
    if not rows:
        raise ValueError("nothing was counted: every method was left out")
    print(show(args, rows), file=sys.stderr if args.json == "-" else sys.stdout)
    about = {"date": f"{datetime.date.today()}", "commit": commit(), "gpu": args.gpu, "launch_us": args.launch_us}
    write_json(args.json, about | {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    run(main)
