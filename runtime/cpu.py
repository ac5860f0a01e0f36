"""Speed on a CPU: products of linear layers, attention and prefill, and compiling by part. A GPU's int8 is "fused" too.

A CPU reads a weight up to three times as fast with one product as with another, and which one wins differs between
CPUs and between sizes. For the few rows of a decode step there are up to three: "kernel" (F.linear, or torch's kernel
for int8), "mv" (torch.mv, one row) and "fused", products and sums that Inductor compiles into one loop, which reads the
weight once, as stored, for all rows. Each choice is timed once per machine: every size of weight, on the model's own
weights and for the rows of a step; a compiled step's attention by torch's kernel and fused; that kernel with the only
query of a KV head given once and twice; a prompt's attention in bf16 by torch's kernel and by oneDNN's products;
prefill's products, with 16-bit weights as they are and widened to fp32; and fp32 products of a few rows by F.linear and
turned, as the weight times the rows' transpose.
The times are kept in ~/.cache/kv-fast/products.json (or under XDG_CACHE_HOME), but for those of a busy machine: the
next start measures again what takes far longer than reading its bytes does. KV_FAST_PRODUCT=kernel, mv or fused fixes
the choice for compiled steps.
"""

import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv.method import Plan
from kv.parts import attention, inductor, ops
from runtime.compile import compiled
from runtime.device import machine
from runtime.packages import Build, Failed, Packages, reason
from text.files import parse_json, replacing

Times = dict[str, float]  # milliseconds by product and, where known, the `floor` of all
Products = tuple[str, str]  # for one row and for 2 to FEW
FEW = 8  # most rows for which a step chooses among the products
MANY = 8  # fewest rows for which 16-bit weights are widened
SPLIT, PART = 256, 2**19  # the most rows for which they are widened in parts, and the numbers of a part
TURNED = 32  # most rows for which an fp32 product may be turned
BETTER_FORM: dict[torch.dtype, str] = {}  # the fastest on this CPU: kernel or, in 16 bits, widened, in fp32, turned
PRODUCTS = ("auto", "kernel", "mv", "fused")
KNOWN = {*PRODUCTS, "widened", "turned", "twice", "products", "floor"}  # in the file
LEAST = 2**26  # bytes of weights; smaller models stay in the CPU's caches, and keep the defaults
READ = 2**28  # the most bytes that a candidate reads in one round
TOKENS = 2**8, 2**13  # the fewest and the most tokens with which attention is timed
ROUNDS = 7
VERSIONS = 1000  # of a part, at most: layers may all have different sizes
LONG = 4096  # the most numbers that Inductor adds up in a register, and of an x that `fused` reads for every row
SIDE_BY_SIDE = 4  # rows of a weight for which `fused` reads a larger x once
FORMS = 6  # to raise when a form changes, so that its old times are measured again
CALL = 0.02  # milliseconds: a floor is that of a call, and of reading the bytes
FAR = 8  # times its floor: what takes longer was measured on a busy machine, or FAR^2 times if another was faster
BETTER = 0.95  # share of the default's time below which another product replaces it


# Products

# A custom op keeps Inductor from decomposing torch.mv, and from unrolling a loop over parts of a weight.
_library = torch.library.Library("kv_fast", "DEF")
_library.define("mv(Tensor weight, Tensor x) -> Tensor")
_library.impl("mv", torch.mv, "CPU")
_library.impl("mv", lambda weight, x: x.new_empty(weight.shape[0]), "Meta")


def widened(weight: Tensor, x: Tensor) -> Tensor:
    """x [n,I] times weight [O,I] of 16 bits -> [n,O] fp32.

    For up to SPLIT rows, parts of the weight are widened one by one, so that they stay in the CPU's caches.
    """
    if len(x) > SPLIT:
        return F.linear(x.float(), weight.float())
    x, size = x.float().t(), max(1, PART // x.shape[1])
    y = x.new_empty(len(weight), x.shape[1])
    for part, out in zip(weight.split(size), y.split(size), strict=True):
        torch.mm(part.float(), x, out=out)
    return y.t().contiguous()


_library.define("widened(Tensor weight, Tensor x) -> Tensor")
_library.impl("widened", widened, "CPU")
_library.impl("widened", lambda weight, x: x.new_empty(len(x), len(weight), dtype=torch.float32), "Meta")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, products: Products = ("mv", "kernel")) -> Tensor:
    """x [...,I] times weight [O,I] -> [...,O]; on a CPU, widened for many rows or turned for a few, if faster."""
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    product, form = products[0] if rows == 1 else products[1], BETTER_FORM.get(x.dtype)
    if product == "fused" and rows <= FEW and torch.compiler.is_compiling():
        return finish(fused(x, weight), x, bias)
    if product == "mv" and rows == 1 and x.dtype == torch.bfloat16:
        return finish(torch.ops.kv_fast.mv(weight, x.flatten()), x, bias)
    if form == "turned" and 1 < rows <= TURNED:
        return finish((weight @ x.reshape(rows, -1).t()).t().contiguous(), x, bias)
    if form == "widened" and rows >= MANY:
        return finish(torch.ops.kv_fast.widened(weight, x.reshape(rows, -1)), x, bias)
    return F.linear(x, weight, bias)


def fused(x: Tensor, weight: Tensor) -> Tensor:
    """x [...,I] times weight [O,I] of any dtype -> [rows,O] fp32; compiled, it is one loop over the weight.

    On a CPU a large x, which takes up half of a small L1 cache, is read for up to SIDE_BY_SIDE rows of the weight at a
    time. Long sums have parts: Inductor would add up each of more than LONG numbers in memory, in twice the time.
    """
    out, size = weight.shape
    if x.device.type != "cpu" or x.numel() <= LONG:
        return joined([(row * weight.float()).sum(-1) for row in rows_of(x)])
    parts = next((n for n in range(1, 65) if size % n == 0 and size // n <= LONG), 1)
    blocks = weight.unflatten(0, (math.gcd(out, SIDE_BY_SIDE), -1)).unflatten(2, (parts, -1)).unbind(0)
    sums = [[(row.unflatten(0, (parts, -1)) * block.float()).sum(-1) for block in blocks] for row in rows_of(x)]
    return joined([torch.cat(row).sum(-1) for row in sums])


def joined(rows: list[Tensor]) -> Tensor:
    """Rows [O] as [rows,O]; a stack of one would end a compiled loop: what follows could not join it."""
    return torch.stack(rows) if len(rows) > 1 else rows[0][None]


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
    """What `prepare` makes of an nn.Linear."""

    products: Products = ("mv", "kernel")

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.products)

    def first(self, x: Tensor, rows: int) -> Tensor:
        """Only the first `rows` output channels."""
        return linear(x, self.weight[:rows], None if self.bias is None else self.bias[:rows], self.products)


def prepare(model: nn.Module) -> None:
    """Gives a loaded model this room's linear layers, and decides how it multiplies."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear  # in place, so that weights and hooks stay
    dtype = model.norm.weight.dtype
    if dtype != torch.float32 or not is_small(model):  # a small fp32 model's products take no time
        choose_form(dtype)
    double(dtype, model.config.head_dim)
    multiply(dtype, model.config.head_dim)


# A step by its parts


class Parts:
    """Runs the parts of a step, such as a layer, each compiled once for all its owners (engine.decode_step's `run`).

    Before each call torch.compile checks that whatever the code read while it was traced is unchanged; for a layer this
    takes 0.1 ms. Here an owner's first call is checked, and later ones call the compiled code directly, until `forget`:
    until then only the values in tensors may change. The graphs' inputs and outputs come back through `last`, a list
    rather than an attribute, so that no cycle of references keeps the owner's memory.
    """

    def __init__(self, packages: Packages | None = None, compiles: bool = True):
        """packages: code on disk, which is used and added to. Unless it `compiles`, parts without code run eagerly."""
        self.packages, self.compiles = packages, compiles
        self.functions: dict[Callable, Callable] = {}
        self.calls: dict[Hashable, Callable] = {}
        self.last: list[tuple] = []  # the code that ran last, its arguments and outputs
        self.failure = ""  # why some of the code is not on disk

    def __call__(self, part: Callable, owner: object, *inputs: Tensor | str):
        """part(owner, *inputs), which returns a tensor or several; a text among the inputs selects another version."""
        key = part, owner, *[x for x in inputs if isinstance(x, str)]
        return self.calls[key](*inputs) if key in self.calls else self._checked(key, part, owner, *inputs)

    def forget(self) -> None:
        """Makes the next call of every owner a checked one."""
        self.calls.clear()

    def settle(self, later: bool = False) -> bool:
        """Waits for the code that is compiled; from now on, parts without code return zeros if `later`, or wait.

        False if there is none: parts are compiled when they run.
        """
        if self.packages is not None:
            try:
                self.packages.settle()
                self.packages.later, self.failure = later, self.packages.failure
            except Failed as error:
                self._unpackaged(error)
        return self.packages is not None

    def stop(self) -> None:
        """Ends what is compiled, and forgets all code: the next call compiles anew."""
        if self.packages is not None:
            self.packages.stop()
        self.functions.clear()
        self.calls.clear()

    def _unpackaged(self, error: Failed) -> None:
        self.failure = str(error)
        self.packages.stop()
        self.packages = None
        self.functions.clear()
        self.calls.clear()

    def _checked(self, key: Hashable, part: Callable, owner: object, *inputs: Tensor | str):
        if self.packages is not None and (found := self.packages.find(part, (owner, *inputs))):
            package, arguments = found
            trace = package.trace
            self.calls[key] = _repeated(package.code, arguments, trace.outputs, trace.several, inputs)
            return self.calls[key](*inputs)
        if not self.compiles:
            return part(owner, *inputs)
        if part not in self.functions:
            self.functions[part] = compiled(part, backend=partial(_remembering, self.last, self.packages))
        inductor.mark_symbols()
        with torch._dynamo.config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS):
            try:
                returned = self.functions[part](owner, *inputs)
            except Failed as error:
                self._unpackaged(error)
                return self._checked(key, part, owner, *inputs)
        if self.last:  # empty if torch.compile is switched off (TORCH_COMPILE_DISABLE=1)
            code, arguments, outputs = self.last.pop()
            several = isinstance(returned, tuple)
            wanted = [next(i for i, x in enumerate(outputs) if x is y) for y in (returned if several else [returned])]
            if isinstance(code, Build) and code.trace is None:
                code.describe(part, (owner, *inputs), arguments, wanted, several)
                if not self.packages.later:
                    self.settle()
            self.calls[key] = _repeated(code, arguments, wanted, several, inputs)
        return returned


def _repeated(code: Callable, arguments: list, outputs: list[int], several: bool, inputs: tuple) -> Callable:
    """A function of other inputs that calls a part's code again, with its owner's tensors, and returns `outputs`."""
    given = [(i, j) for i, x in enumerate(arguments) for j, y in enumerate(inputs) if x is y]

    def call(*inputs):
        for index, place in given:
            arguments[index] = inputs[place]
        found = code(arguments)
        return tuple(found[index] for index in outputs) if several else found[outputs[0]]

    return call


def _remembering(last: list[tuple], packages: Packages | None, graph, examples: list) -> Callable:
    """A backend of torch.compile: Inductor's code, packaged if it can be, whose last call stays in `last`."""
    code = None
    if packages is not None:
        try:
            code = packages.build(graph, examples, _machine())
        except Exception as error:  # of torch.fx and pickle, for a graph that another process cannot have
            packages.failure = reason(error)
    if code is None:
        from torch._inductor.compile_fx import compile_fx

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # Inductor then computes in fp32, as wanted
            function = compile_fx(graph, examples, config_patches=_machine())

        def code(arguments):
            return function(*arguments)

    packaged = isinstance(code, Build)

    def call(*arguments):
        arguments = [torch.empty(x, 0) if packaged and isinstance(x, int) else x for x in arguments]
        outputs = code(arguments)
        last[:] = [(code, arguments, outputs)]
        return outputs

    return call


def forms() -> str:
    """What this CPU's choices make of a step, besides each layer's `products`."""
    choices = inductor.FUSED.items(), inductor.DOUBLED, BETTER_FORM.items()
    return repr(([sorted(map(str, x)) for x in choices], torch.get_num_threads()))


def _machine() -> dict[str, str | int]:
    """Inductor's options for this CPU: with narrower vectors than it has, g++ may use no wider ones either (torch 2.11
    cannot tell it so: there vectors have their full width).

    Otherwise code is wrong (findings/torch_avx2_code_on_avx512_selects_wrong.sh).
    """
    from torch._inductor import config, cpu_vec_isa

    narrow = cpu_vec_isa.pick_vec_isa().bit_width() == 256 and torch.cpu._is_avx512_supported()
    if not narrow:
        return {}
    return {"cpp.march": "x86-64-v3"} if hasattr(config.cpp, "march") else {"cpp.simdlen": 512}


# Choices


def tune(model: nn.Module, plan: Plan, queries: int) -> dict[str, Times]:
    """Chooses products and attention for steps with `queries` tokens per row; returns what was timed.

    Raises ValueError if KV_FAST_PRODUCT names no product.
    """
    return tune_products(model, plan.batch * queries) | tune_attention(model, plan, queries)


def tune_products(model: nn.Module, rows: int) -> dict[str, Times]:
    """Sets `products` for steps of `rows` rows; returns the milliseconds by size of weight and product."""
    if rows > FEW or model.norm.weight.device.type != "cpu":
        return {}
    groups = defaultdict(list)
    for module in model.modules():
        if hasattr(module, "products"):
            groups[describe(module, rows)].append(module)

    def timed(name: str) -> Times:
        return measure(groups[name], rows) | {"floor": floor(groups[name][0].weight.nbytes)}

    best, times = decide(groups, timed, is_small(model))
    for name, product in best.items():
        for module in groups[name]:
            one, few = module.products
            module.products = (product, few) if rows == 1 else (one, product)
    return times


def tune_attention(model: nn.Module, plan: Plan, queries: int) -> dict[str, Times]:
    """Decides how compiled steps with `queries` new tokens per row attend; returns the milliseconds of each form.

    Both are timed over as many tokens as a row may hold, rounded down to a power of two.
    """
    if plan.device.type != "cpu":
        return {}
    rows, (least, most) = plan.n_head // plan.n_kv_head * queries, TOKENS
    tokens = min(max(least, 1 << plan.planned.bit_length() - 1), most)
    name = f"{dtype_name(plan.dtype)} attention, {rows} x {plan.head_dim}, {tokens} tokens"
    small, size = is_small(model) and plan.full_bytes() < LEAST, tokens * plan.n_kv_head * plan.unit_bytes
    best, times = decide([name], lambda _: measure_attention(plan, rows, tokens) | {"floor": floor(size)}, small)
    if best:  # fewer rows are fused too if these are, and more rows are not if these are not
        most = inductor.most_fused(plan.dtype, plan.head_dim)
        most = max(most, rows) if best[name] == "fused" else min(most, rows - 1)
        inductor.fuse(plan.dtype, plan.head_dim, most)
    return times


def choose_form(dtype: torch.dtype) -> None:
    """Decides whether this CPU widens 16-bit weights for many rows, and turns products of a few fp32 rows."""
    name = f"{dtype_name(dtype)}, {'few' if dtype == torch.float32 else 'many'} rows"
    BETTER_FORM[dtype] = fastest(recalled([name], lambda _: measure_form(dtype))[name])


def double(dtype: torch.dtype, dim: int) -> None:
    """Decides whether a step on this CPU attends with the one query of a KV head given twice, in 16 bits."""
    if dtype == torch.float32:
        return
    name = f"{dtype_name(dtype)} attention, one query of {dim}"
    if fastest(recalled([name], lambda _: measure_doubling(dtype, dim))[name]) == "twice":
        inductor.double(dtype, dim)


def multiply(dtype: torch.dtype, dim: int) -> None:
    """Decides whether a bf16 prompt on this CPU attends by oneDNN's products."""
    if dtype != torch.bfloat16 or not attention.can_multiply():
        return
    name = f"{dtype_name(dtype)} attention, a prompt, heads of {dim}"
    if fastest(recalled([name], lambda _: measure_multiplying(dtype, dim))[name]) == "products":
        attention.MULTIPLIED.add((dtype, dim))


def decide(
    names: Iterable[str], measure: Callable[[str], Times], small: bool
) -> tuple[dict[str, str], dict[str, Times]]:
    """The fastest for each name, or what KV_FAST_PRODUCT fixes, and what was timed.

    small: all of it stays in the CPU's caches, and the defaults are kept: nothing is decided.
    """
    fixed = os.environ.get("KV_FAST_PRODUCT", "auto")
    if fixed not in PRODUCTS:
        raise ValueError(f"KV_FAST_PRODUCT={fixed} names no product: use {', '.join(PRODUCTS)}")
    if fixed != "auto":
        return dict.fromkeys(names, fixed), {}
    times = {} if small else recalled(names, measure)
    return {name: fastest(found) for name, found in times.items()}, times


def is_small(model: nn.Module) -> bool:
    weights = {id(w): w for m in model.modules() if isinstance(w := getattr(m, "weight", None), Tensor)}
    return sum(weight.nbytes for weight in weights.values()) < LEAST


def describe(module: nn.Module, rows: int) -> str:
    """What decides the time, such as "bfloat16 3072 x 768, 1 row"."""
    out, size = module.weight.shape
    return f"{dtype_name(module.weight.dtype)} {out} x {size}, {rows} row" + "s" * (rows > 1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fastest(times: Times) -> str:
    """The first is the default."""
    default, best = next(iter(times)), min((form for form in times if form != "floor"), key=times.get)
    return best if times[best] < BETTER * times[default] else default


# Times


def least_ms(forms: dict[str, Callable[[], object]], rounds: int) -> Times:
    """The least milliseconds of each form over several rounds, after one that compiles."""
    times = dict.fromkeys(forms, torch.inf)
    for turn in range(1 + rounds):
        for name, form in forms.items():
            begin = time.perf_counter()
            form()
            if turn:
                times[name] = min(times[name], 1e3 * (time.perf_counter() - begin))
    return times


def floor(size: int) -> float:
    """The least milliseconds of what reads so many bytes of memory."""
    return CALL + size / _rate()


@cache
def _rate() -> float:
    """Bytes that this CPU reads in a millisecond."""
    x = torch.ones(READ // 8, dtype=torch.int64)
    return x.nbytes / least_ms({"sum": x.sum}, ROUNDS)["sum"]


def disturbed(times: Times) -> bool:
    least = times.get("floor", torch.inf)
    return times[fastest(times)] > FAR * least or max(times.values()) > FAR**2 * least


@torch.no_grad()
def measure(modules: list[nn.Module], rows: int) -> Times:
    """Milliseconds of each product, the default first, on weights that are together larger than the CPU's caches."""
    first = modules[0]
    modules = modules[: max(1, READ // first.weight.nbytes)]
    dtype = first.scales.dtype if hasattr(first, "scales") else first.weight.dtype
    x, before, run = torch.ones(rows, first.weight.shape[1], dtype=dtype), first.products, Parts()

    def multiply(product: str) -> None:
        for module in modules:  # `forward` alone: hooks may wait for other processes
            module.products = product, product
            run(type(module).forward, module, x) if product == "fused" else module.forward(x)

    products = ["mv"] * (rows == 1 and first.weight.dtype == torch.bfloat16) + ["kernel", "fused"]
    times = least_ms({product: partial(multiply, product) for product in products}, ROUNDS)
    for module in modules:
        module.products = before
    return {product: ms / len(modules) for product, ms in times.items()}


def measure_attention(plan: Plan, rows: int, tokens: int) -> Times:
    """Milliseconds of each form over as many caches as a model has layers, within READ."""
    heads, dim, dtype = plan.n_kv_head, plan.head_dim, plan.dtype
    before = inductor.most_fused(dtype, dim)
    count = max(1, min(plan.n_layer, READ // 2 // (tokens * heads * plan.unit_bytes)))
    caches = [torch.ones(2, 1, heads, tokens, dim, dtype=dtype).unbind() for _ in range(count)]
    q, mask = torch.ones(1, heads, rows, dim, dtype=dtype), torch.ones(1, 1, rows, tokens, dtype=torch.bool)

    def attend(_: None, *inputs: Tensor) -> Tensor:
        return ops.attend_groups(*inputs)

    def step(run: Parts, most: int) -> None:
        inductor.fuse(dtype, dim, most)
        for k, v in caches:
            run(attend, None, q, k, v, mask)

    times = least_ms({"kernel": partial(step, Parts(), 0), "fused": partial(step, Parts(), rows)}, ROUNDS)
    inductor.fuse(dtype, dim, before)
    return {form: ms / count for form, ms in times.items()}


def measure_form(dtype: torch.dtype) -> Times:
    """Milliseconds of a product as it is and widened, or turned if in fp32."""
    if dtype == torch.float32:
        x, weight = torch.ones(4, 1024), torch.ones(4096, 1024)
        forms = {"kernel": lambda: F.linear(x, weight), "turned": lambda: (weight @ x.t()).t().contiguous()}
        return least_ms(forms, 3 * ROUNDS)  # with all threads: F.linear gains little by the second
    x, weight = torch.ones(128, 1024, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    forms = {"kernel": lambda: F.linear(x, weight), "widened": lambda: widened(weight, x).to(dtype)}
    return undisturbed(forms)


def measure_doubling(dtype: torch.dtype, dim: int) -> Times:
    """Milliseconds of a step's attention with one query for each of 8 KV heads, given once and twice."""
    (q, k, v), mask = (torch.ones(1, 8, n, dim, dtype=dtype) for n in (1, 1024, 1024)), torch.ones(1, 1, 1, 1024) > 0
    queries = {"kernel": q, "twice": q.expand(-1, -1, 2, -1)}
    attend = partial(F.scaled_dot_product_attention, key=k, value=v, attn_mask=mask)
    return undisturbed({name: partial(attend, q) for name, q in queries.items()})


def measure_multiplying(dtype: torch.dtype, dim: int) -> Times:
    """Milliseconds of the attention of 512 queries of a KV head (of 4 heads and 128 tokens) to 4,096 earlier tokens."""
    q, k, v = (torch.ones(1, 1, n, dim, dtype=dtype) for n in (512, 4096, 4096))
    own, kernel = torch.full((1, 1, 512), dim**0.5), partial(F.scaled_dot_product_attention, q, k, v)
    return undisturbed({"kernel": kernel, "products": partial(attention.products, q, k, v, own)})


def undisturbed(forms: dict[str, Callable[[], object]]) -> Times:
    """`least_ms` of small forms on one thread: on a busy machine some of many rounds are then undisturbed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return least_ms(forms, 3 * ROUNDS)
    finally:
        torch.set_num_threads(threads)


# The file: {machine: {size: {product: ms}}}


def recalled(names: Iterable[str], measure: Callable[[str], Times]) -> dict[str, Times]:
    """The times of each size, measured if this machine's are not in the file; those of a busy machine do not stay."""
    here, file = where(), cache_file()
    known = read(file)
    times = known.get(here, {})
    if missing := [name for name in names if name not in times]:
        times |= {name: measure(name) for name in missing}
        write(file, known | {here: {name: own for name, own in times.items() if not disturbed(own)}})
        if busy := [name for name in missing if disturbed(times[name])]:
            print(f"warning: this machine is busy: the next start times again {'; '.join(busy)}", file=sys.stderr)
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
        known = parse_json(file.read_bytes(), file) if file.is_file() else {}
        for sizes in known.values():
            for times in sizes.values():
                if not set(times) <= KNOWN or not min(times.values()) > 0:
                    return {}
        return known
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def write(file: Path, known: dict) -> None:
    """Replaces the file as a whole; does nothing if it cannot be written, or is not a regular file."""
    with suppress(OSError):
        if file.exists() and not file.is_file():
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            new.write_text(json.dumps(known, indent=1))


def lines(times: dict[str, Times]) -> list[str]:
    """One line per size: the milliseconds of each product, the chosen one first, and how far from the floor it is."""
    found = []
    for name, by_product in times.items():
        chosen, least = fastest(by_product), by_product.get("floor")
        order = sorted(by_product.items() - {("floor", least)}, key=lambda entry: (entry[0] != chosen, entry[1]))
        far = f"; {by_product[chosen] / least:.1f}x its floor" if least else ""
        found.append(f"{name}: " + ", ".join(f"{product} {ms:.3f} ms" for product, ms in order) + far)
    return found
