"""Chooses the products of runtime/linear.py that are fastest on this CPU, by timing them.

A CPU reads a weight up to three times as fast with one product as with another, and which one wins differs between
CPUs and between sizes. Three things are timed, each once per machine: every size of weight, on the model's own weights
and for the rows of a compiled step; two forms of a step's attention, torch's kernel and fused products and sums; and
prefill's products, with 16-bit weights as they are and widened to fp32. The times are kept in
~/.cache/kv-fast/products.json (or under XDG_CACHE_HOME). KV_FAST_PRODUCT=kernel, mv or fused fixes the choice for
steps; on a GPU it fixes only the form of attention (inductor.CUDA_FORM).
"""

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv import Shape
from kv.parts import inductor, ops
from runtime.device import machine
from runtime.linear import FEW, WIDENED, Embedding, Int8Embedding, Int8Linear, Linear
from runtime.region import Region

Times = dict[str, float]  # milliseconds by product
PRODUCTS = ("auto", "kernel", "mv", "fused")
LEAST = 2**26  # bytes of weights; smaller models stay in the CPU's caches, and keep the defaults
READ = 2**28  # the most bytes that a candidate reads in one round
TOKENS = 2**8, 2**13  # the fewest and the most tokens with which attention is timed
ROUNDS = 7
FORMS = 2  # to raise when a form changes, so that its old times are measured again
BETTER = 0.95  # share of the default's time below which another product replaces it


def fixed_product() -> str:
    """KV_FAST_PRODUCT, or auto. Raises ValueError if it names no product."""
    fixed = os.environ.get("KV_FAST_PRODUCT", "auto")
    if fixed not in PRODUCTS:
        raise ValueError(f"KV_FAST_PRODUCT={fixed} names no product: use {', '.join(PRODUCTS)}")
    return fixed


def tune(model: nn.Module, rows: int) -> dict[str, Times]:
    """Sets `products` for steps of `rows` rows of the model's weights; returns the milliseconds by size and product.

    Raises ValueError if KV_FAST_PRODUCT names no product.
    """
    fixed = fixed_product()
    if rows > FEW or model.norm.weight.device.type != "cpu":
        return {}
    groups = defaultdict(list)
    for module in model.modules():
        if is_product(module, model):
            groups[describe(module, rows)].append(module)
    times = {}
    if fixed == "auto":
        if is_small(model):
            return {}
        region = Region(multiply)
        times = recalled(groups, lambda name: measure(groups[name], rows, region))
    for name, modules in groups.items():
        best = fastest(times[name]) if times else fixed
        for module in modules:
            one, few = module.products
            module.products = (best, few) if rows == 1 else (one, best)
    return times


def tune_attention(model: nn.Module, shape: Shape, queries: int) -> dict[str, Times]:
    """Decides how compiled steps with `queries` new tokens per row attend; returns the milliseconds of each form.

    Both are timed over as many tokens as a row may hold, rounded down to a power of two. Raises ValueError as `tune`.
    """
    fixed, rows = fixed_product(), shape.n_head // shape.n_kv_head * queries
    least, most = TOKENS
    tokens = min(max(least, 1 << shape.planned.bit_length() - 1), most)
    name = f"{str(shape.dtype).removeprefix('torch.')} attention, {rows} x {shape.head_dim}, {tokens} tokens"
    times = {}
    if shape.device.type != "cpu":
        inductor.CUDA_FORM = fixed if fixed in ("kernel", "fused") else "flex"
        return {}
    if fixed == "auto":
        if is_small(model) and shape.full_bytes() < LEAST:
            return {}
        times = recalled([name], lambda _: measure_attention(shape, rows, tokens))
    best = fastest(times[name]) if times else fixed
    choose_attention(shape.dtype, shape.head_dim, rows, best)
    return times


def choose_attention(dtype: torch.dtype, dim: int, rows: int, form: str) -> None:
    """Fewer rows are fused too if fusing is fastest for `rows`; otherwise more rows are not fused either."""
    most = inductor.FUSED.get((dtype, dim), 0)
    inductor.FUSED[dtype, dim] = max(most, rows) if form == "fused" else min(most, rows - 1)


def measure_attention(shape: Shape, rows: int, tokens: int) -> Times:
    """Milliseconds of each form, the least of several rounds over as many caches as a model has layers, within READ."""
    heads, dim, dtype, found = shape.n_kv_head, shape.head_dim, shape.dtype, {}
    before = inductor.FUSED.get((dtype, dim), 0)
    count = max(1, min(shape.n_layer, READ // 2 // (tokens * heads * shape.unit_bytes)))
    caches = [torch.ones(2, 1, heads, tokens, dim, dtype=dtype) for _ in range(count)]
    q, mask = torch.ones(1, heads, rows, dim, dtype=dtype), torch.ones(1, 1, rows, tokens, dtype=torch.bool)
    region = Region(ops.attend_groups)
    for turn in range(1 + ROUNDS):  # the first compiles
        for name in ("kernel", "fused"):
            inductor.FUSED[dtype, dim] = rows if name == "fused" else 0
            begin = time.perf_counter()
            for i, (k, v) in enumerate(caches):
                region((name, i), None, (q, k, v, mask))
            ms = 1e3 * (time.perf_counter() - begin) / count
            if turn:
                found[name] = min(ms, found.get(name, ms))
    inductor.FUSED[dtype, dim] = before
    return found


def widen(dtype: torch.dtype) -> None:
    """Decides whether prefill widens weights of this dtype on this CPU."""
    if dtype == torch.float32 or dtype in decided:
        return
    name = f"{str(dtype).removeprefix('torch.')}, many rows"
    if fastest(recalled([name], lambda _: measure_widening(dtype))[name]) == "widened":
        WIDENED.append(dtype)
    decided.add(dtype)


decided: set[torch.dtype] = set()


def measure_widening(dtype: torch.dtype) -> Times:
    """Milliseconds of a product as it is and widened, the least of several rounds.

    The product is small and has one thread: on a busy machine some rounds are then undisturbed.
    """
    x, weight, found = torch.ones(128, 1024, dtype=dtype), torch.ones(512, 1024, dtype=dtype), {}
    forms = {"kernel": lambda: F.linear(x, weight), "widened": lambda: F.linear(x.float(), weight.float()).to(dtype)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(3 * ROUNDS):
            for name, form in forms.items():
                begin = time.perf_counter()
                form()
                found[name] = min(1e3 * (time.perf_counter() - begin), found.get(name, torch.inf))
    finally:
        torch.set_num_threads(threads)
    return found


def is_small(model: nn.Module) -> bool:
    return sum(m.weight.nbytes for m in model.modules() if hasattr(m, "weight")) < LEAST


def is_product(module: nn.Module, model: nn.Module) -> bool:
    table = isinstance(module, Embedding | Int8Embedding)
    return isinstance(module, Linear | Int8Linear) or (table and model.output is None)


def describe(module: nn.Module, rows: int) -> str:
    """What decides the time, such as "bfloat16 3072 x 768, 1 row"."""
    dtype, (out, size) = str(module.weight.dtype).removeprefix("torch."), module.weight.shape
    return f"{dtype} {out} x {size}, {rows} row" + "s" * (rows > 1)


def candidates(module: nn.Module, rows: int) -> list[str]:
    """The default comes first."""
    return ["mv"] * (rows == 1 and module.weight.dtype == torch.bfloat16) + ["kernel", "fused"]


def multiply(x: Tensor, module: nn.Module) -> Tensor:
    """Without the module's hooks, which may wait for other processes (runtime/tp.py)."""
    return module.logits(x) if isinstance(module, Embedding | Int8Embedding) else module.forward(x)


@torch.no_grad()
def measure(modules: list[nn.Module], rows: int, region: Region) -> Times:
    """Milliseconds of each product, the least of several rounds over weights that are larger than the CPU's caches."""
    first = modules[0]
    modules = modules[: max(1, READ // first.weight.nbytes)]
    dtype = first.scales.dtype if hasattr(first, "scales") else first.weight.dtype
    x, before, found = torch.ones(rows, first.weight.shape[1], dtype=dtype), first.products, {}
    for turn in range(1 + ROUNDS):  # the first compiles
        for name in candidates(first, rows):
            for module in modules:
                module.products = (name, name)
            if turn == 0 and name != "fused":
                continue
            begin = time.perf_counter()
            for i, module in enumerate(modules):
                region((name, i), None, (x,), module) if name == "fused" else multiply(x, module)
            ms = 1e3 * (time.perf_counter() - begin) / len(modules)
            found[name] = min(ms, found.get(name, ms))
    region.forget()
    for module in modules:
        module.products = before
    return found


def fastest(times: Times) -> str:
    default, best = next(iter(times)), min(times, key=times.get)
    return best if times[best] < BETTER * times[default] else default


# The file: {machine: {size: {product: ms}}}


def recalled(names: Iterable[str], measure: Callable[[str], Times]) -> dict[str, Times]:
    """The times of each size, measured if this machine's are not in the file."""
    here, file = where(), cache_file()
    known = read(file)
    times = known.get(here, {})
    if missing := [name for name in names if name not in times]:
        times |= {name: measure(name) for name in missing}
        write(file, known | {here: times})
    return {name: times[name] for name in names}


def where() -> str:
    """The CPU, its threads, torch's version and that of the forms."""
    with open("/proc/cpuinfo") as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    return f"{machine(torch.device('cpu'))}, {hashlib.sha256(flags.encode()).hexdigest()[:8]}, {FORMS}"


def cache_file() -> Path:
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home: a path that cannot be written
        folder = Path(os.devnull)
    return folder / "kv-fast" / "products.json"


def read(file: Path) -> dict[str, dict[str, Times]]:
    """What is known; nothing if the file is missing or damaged."""
    try:
        known = json.loads(file.read_text())
        for sizes in known.values():
            for times in sizes.values():
                if not times or not set(times) <= {*PRODUCTS, "widened"} or not all(ms > 0 for ms in times.values()):
                    return {}
        return known
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def write(file: Path, known: dict) -> None:
    """Replaces the file as a whole; does nothing if it cannot be written."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(known, indent=1))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def lines(times: dict[str, Times]) -> list[str]:
    """One line per size: the milliseconds of each product, the chosen one first."""
    found = []
    for name, by_product in times.items():
        order = sorted(by_product, key=lambda product: (product != fastest(by_product), by_product[product]))
        found.append(f"{name}: " + ", ".join(f"{product} {by_product[product]:.3f} ms" for product in order))
    return found
