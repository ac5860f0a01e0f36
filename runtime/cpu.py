"""What exists only for speed on a CPU: products of linear layers, attention and prefill, and compiling by part.

A CPU reads a weight up to three times as fast with one product as with another, and which one wins differs between
CPUs and between sizes. For the few rows of a decode step there are up to three: "kernel" (F.linear, or torch's kernel
for int8), "mv" (torch.mv, one row) and "fused", products and sums that Inductor compiles into one loop, which reads the
weight once, as stored, for all rows. Three things are timed, each once per machine: every size of weight, on the
model's own weights and for the rows of a step; two forms of a step's attention; and prefill's products, with 16-bit
weights as they are and widened to fp32. The times are kept in ~/.cache/kv-fast/products.json (or under XDG_CACHE_HOME).
KV_FAST_PRODUCT=kernel, mv or fused fixes the choice for steps; on a GPU it fixes only the form of attention.
"""

import hashlib
import json
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv.method import Shape
from kv.parts import inductor, ops
from runtime.compile import compiled
from runtime.device import machine, replacing

Times = dict[str, float]  # milliseconds by product
Products = tuple[str, str]  # for one row and for 2 to FEW
FEW = 8  # most rows for which a step chooses among the products
MANY = 8  # fewest rows for which a dtype in WIDENED is widened
WIDENED: list[torch.dtype] = []  # dtypes whose large products are faster in fp32 on this CPU
PRODUCTS = ("auto", "kernel", "mv", "fused")
LEAST = 2**26  # bytes of weights; smaller models stay in the CPU's caches, and keep the defaults
READ = 2**28  # the most bytes that a candidate reads in one round
TOKENS = 2**8, 2**13  # the fewest and the most tokens with which attention is timed
ROUNDS = 7
VERSIONS = 1000  # of a part, at most: layers may all have different sizes
FORMS = 2  # to raise when a form changes, so that its old times are measured again
BETTER = 0.95  # share of the default's time below which another product replaces it


# Products

# The custom op keeps Inductor from decomposing torch.mv.
_library = torch.library.Library("kv_fast", "DEF")
_library.define("mv(Tensor weight, Tensor x) -> Tensor")
_library.impl("mv", torch.mv, "CPU")
_library.impl("mv", lambda weight, x: x.new_empty(weight.shape[0]), "Meta")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: Products = ("mv", "kernel")) -> Tensor:
    """x [...,I] times weight [O,I] -> [...,O]; on a CPU, in fp32 for MANY rows or more of a dtype in WIDENED."""
    rows = x.numel() // x.shape[-1]
    if x.device.type == "cpu" and rows <= FEW:
        product = products[0] if rows == 1 else products[1]
        if product == "fused" and torch.compiler.is_compiling():
            return finish(fused(x, weight), x, bias)
        if product == "mv" and rows == 1 and x.dtype == torch.bfloat16:
            return finish(torch.ops.kv_fast.mv(weight, x.flatten()), x, bias)
    if x.device.type == "cpu" and x.dtype in WIDENED and rows >= MANY:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


def fused(x: Tensor, weight: Tensor) -> Tensor:
    """x [...,I] times weight [O,I] of any dtype -> [rows,O] fp32; compiled, it is one loop over the weight."""
    y = [(row * weight.float()).sum(-1) for row in rows_of(x)]
    return torch.stack(y) if len(y) > 1 else y[0][None]  # a stack would end the loop: what follows could not join it


def rows_of(x: Tensor) -> Tensor:
    """x [...,I] as [rows,I] fp32; as_strided makes Inductor store it.

    Otherwise Inductor recomputes x (the output of a norm, say), or widens it, for every row of a weight.
    """
    rows = x.numel() // x.shape[-1], x.shape[-1]
    return x.float().contiguous().as_strided(rows, (x.shape[-1], 1))


def finish(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """y [rows,O] plus the bias -> [...,O], in the dtype and leading shape of x [...,I]"""
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """Takes the place of an nn.Linear, with its weights."""

    products: Products = ("mv", "kernel")

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.products)

    def first(self, x: Tensor, rows: int) -> Tensor:
        """Only the first `rows` output channels."""
        return linear(x, self.weight[:rows], None if self.bias is None else self.bias[:rows], self.products)


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives a loaded model this room's linear layers, and decides whether prefill widens its weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                new = Linear(child)
                new._forward_hooks = child._forward_hooks  # runtime/parallel.py's
                setattr(module, name, new)
    widen(dtype)


# A step by its parts


@dataclass
class Call:
    """A call of compiled code, to be repeated with other tensors."""

    code: Callable
    arguments: list  # of the code: among them the owner's tensors
    given: list[tuple[int, int]]  # (index in `arguments`, index among the inputs that the caller gives)
    outputs: list[int]  # which of the code's outputs the part returns


class Parts:
    """Runs the parts of a step, such as a layer, each compiled once for all its owners (engine.decode_step's `run`).

    Before each call torch.compile checks that whatever the code read while it was traced is unchanged; for a layer this
    takes 0.1 ms. Here an owner's first call is checked, and later ones call the compiled code directly, until `forget`:
    until then only the values in tensors may change. The graphs' inputs and outputs come back through `last`, a list
    rather than an attribute, so that no cycle of references keeps the owner's memory.
    """

    def __init__(self):
        self.functions: dict[Callable, Callable] = {}
        self.calls: dict[Hashable, Call] = {}
        self.last: list[tuple] = []  # the code that ran last, its arguments and outputs

    def __call__(self, part: Callable, owner: object, *inputs: Tensor | str):
        """part(owner, *inputs), which returns a tensor or several; a text among the inputs selects another version."""
        key = part, owner, *[x for x in inputs if isinstance(x, str)]
        call = self.calls.get(key)
        if call is None:
            return self._checked(key, part, owner, *inputs)
        for index, given in call.given:
            call.arguments[index] = inputs[given]
        outputs = call.code(*call.arguments)
        returned = tuple(outputs[index] for index in call.outputs)
        return returned if len(returned) > 1 else returned[0]

    def forget(self) -> None:
        """Makes the next call of every owner a checked one."""
        self.calls.clear()

    def _checked(self, key: Hashable, part: Callable, owner: object, *inputs: Tensor | str):
        if part not in self.functions:
            self.functions[part] = compiled(part, backend=partial(_remembering, self.last))
        with torch._dynamo.config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS):
            found = self.functions[part](owner, *inputs)
        if not self.last:  # torch.compile is switched off (TORCH_COMPILE_DISABLE=1)
            return found
        code, arguments, outputs = self.last.pop()
        given = [(i, j) for i, x in enumerate(arguments) for j, y in enumerate(inputs) if x is y]
        returned = found if isinstance(found, tuple) else (found,)
        places = [next(i for i, x in enumerate(outputs) if x is y) for y in returned]
        self.calls[key] = Call(code, list(arguments), given, places)
        return found


def _remembering(last: list[tuple], graph, examples: list) -> Callable:
    """A backend of torch.compile: Inductor's code, whose last call stays in `last`."""
    from torch._inductor.compile_fx import compile_fx

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # Inductor then computes in fp32, as wanted
        code = compile_fx(graph, examples)

    def call(*arguments):
        outputs = code(*arguments)
        last[:] = [(code, arguments, outputs)]
        return outputs

    return call


# Timing


def fixed_product() -> str:
    """KV_FAST_PRODUCT, or auto. Raises ValueError if it names no product."""
    fixed = os.environ.get("KV_FAST_PRODUCT", "auto")
    if fixed not in PRODUCTS:
        raise ValueError(f"KV_FAST_PRODUCT={fixed} names no product: use {', '.join(PRODUCTS)}")
    return fixed


def tune(model: nn.Module, shape: Shape, queries: int) -> dict[str, Times]:
    """Chooses products and attention for steps with `queries` tokens per row; returns what was timed."""
    return tune_products(model, shape.batch * queries) | tune_attention(model, shape, queries)


def tune_products(model: nn.Module, rows: int) -> dict[str, Times]:
    """Sets `products` for steps of `rows` rows of the model's weights; returns the milliseconds by size and product.

    Raises ValueError if KV_FAST_PRODUCT names no product.
    """
    fixed = fixed_product()
    if rows > FEW or model.norm.weight.device.type != "cpu":
        return {}
    groups = defaultdict(list)
    for module in model.modules():
        if hasattr(module, "products"):
            groups[describe(module, rows)].append(module)
    times = {}
    if fixed == "auto":
        if is_small(model):
            return {}
        times = recalled(groups, lambda name: measure(groups[name], rows))
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
    caches = [torch.ones(2, 1, heads, tokens, dim, dtype=dtype).unbind() for _ in range(count)]
    q, mask = torch.ones(1, heads, rows, dim, dtype=dtype), torch.ones(1, 1, rows, tokens, dtype=torch.bool)
    runs = {"kernel": Parts(), "fused": Parts()}
    for turn in range(1 + ROUNDS):  # the first compiles
        for name in ("kernel", "fused"):
            inductor.FUSED[dtype, dim] = rows if name == "fused" else 0
            begin = time.perf_counter()
            for k, v in caches:
                runs[name](attend, None, q, k, v, mask)
            ms = 1e3 * (time.perf_counter() - begin) / count
            if turn:
                found[name] = min(ms, found.get(name, ms))
    inductor.FUSED[dtype, dim] = before
    return found


def attend(_: None, *inputs: Tensor) -> Tensor:
    return ops.attend_groups(*inputs)


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
    return sum(weight.nbytes for weight in {m.weight for m in model.modules() if hasattr(m, "weight")}) < LEAST


def describe(module: nn.Module, rows: int) -> str:
    """What decides the time, such as "bfloat16 3072 x 768, 1 row"."""
    dtype, (out, size) = str(module.weight.dtype).removeprefix("torch."), module.weight.shape
    return f"{dtype} {out} x {size}, {rows} row" + "s" * (rows > 1)


def candidates(module: nn.Module, rows: int) -> list[str]:
    """The default comes first."""
    return ["mv"] * (rows == 1 and module.weight.dtype == torch.bfloat16) + ["kernel", "fused"]


@torch.no_grad()
def measure(modules: list[nn.Module], rows: int) -> Times:
    """Milliseconds of each product, the least of several rounds over weights that are larger than the CPU's caches."""
    first = modules[0]
    modules = modules[: max(1, READ // first.weight.nbytes)]
    dtype = first.scales.dtype if hasattr(first, "scales") else first.weight.dtype
    x, before, found, run = torch.ones(rows, first.weight.shape[1], dtype=dtype), first.products, {}, Parts()
    for turn in range(1 + ROUNDS):  # the first compiles
        for name in candidates(first, rows):
            for module in modules:
                module.products = (name, name)
            if turn == 0 and name != "fused":
                continue
            begin = time.perf_counter()
            for module in modules:  # `forward` alone: hooks may wait for other processes
                run(type(module).forward, module, x) if name == "fused" else module.forward(x)
            ms = 1e3 * (time.perf_counter() - begin) / len(modules)
            found[name] = min(ms, found.get(name, ms))
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
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            new.write_text(json.dumps(known, indent=1))


def lines(times: dict[str, Times]) -> list[str]:
    """One line per size: the milliseconds of each product, the chosen one first."""
    found = []
    for name, by_product in times.items():
        order = sorted(by_product, key=lambda product: (product != fastest(by_product), by_product[product]))
        found.append(f"{name}: " + ", ".join(f"{product} {by_product[product]:.3f} ms" for product in order))
    return found
