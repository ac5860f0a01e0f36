"""Compiled parts of a step on disk: a later start with the same model, method, sizes and machine compiles nothing.

A part that torch.compile has traced (runtime/cpu.py) is compiled ahead of time by AOTInductor, in other processes, so
that the parts of a step are compiled side by side. The package that comes out holds a `Trace` besides the code: what
torch.compile's guards looked at, for which sizes the code is right, and where its inputs are found. A later process
looks at the same things and calls the code; it does not import torch's compiler.

Packages lie in ~/.cache/kv-fast/steps (or under XDG_CACHE_HOME), in a folder for each source, torch, machine and cache;
those that were not used for longest are deleted beyond LIMIT. KV_FAST_PACKAGES=0 neither reads nor writes any.
"""

from runtime.startup import ROOT

import hashlib
import json
import operator
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from kv import METHODS, Plan
from text.files import replacing

PYTHON = sys.executable
LIMIT = 2**29  # bytes of all packages
ENTRY = "kv_fast.json"  # a package's trace
L = "L['inputs']"  # how guards call a part's inputs
# What torch writes conditions of sizes with, besides Python's operators.
TERMS = {"Eq": operator.eq, "Ne": operator.ne, "Max": max, "Min": min, "Mod": operator.mod, "PythonMod": operator.mod}
# Of AOTInductor: headers of 300 MB, which take longer to make than they save in five parts; lines in stack traces.
WITHOUT = "aot_inductor.precompile_headers", "aot_inductor.enable_line_tables"
UNKNOWN = AttributeError, LookupError, NameError, SyntaxError, TypeError  # of an expression that is not for an object
# A graph's input, as [shape, strides, dtype]; or an integer, which the code takes as the size of an empty tensor.
Example = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | int


# What code depends on


def fact(x: object) -> str:
    """What code depends on of a value at which a guard looked."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}"
    if isinstance(x, tuple | list):
        return f"{type(x).__name__} {[*map(fact, x)]}"
    if isinstance(x, dict):
        return f"{type(x).__name__} of {[*map(fact, x)]}"
    if x is None or isinstance(x, bool | int | float | str | bytes | range | slice | Enum | torch.dtype | torch.device):
        return repr(x)
    if isinstance(x, set | frozenset):
        return f"{type(x).__name__} {sorted(map(fact, x))}"
    named = x if hasattr(x, "__qualname__") else type(x)
    return f"{named.__module__}.{named.__qualname__}"


def is_symbol(x: object) -> bool:
    """Whether x holds a size (kv/parts/inductor.py) that may be a variable of compiled code."""
    return isinstance(x, Tensor) and x.dim() == 2 and x.shape[0] > 1 and x.shape[1] == 0


def identities(values: list) -> list[int]:
    """For each value, the index of the first that is the same tensor."""
    first: dict[int, int] = {}
    tensors = [isinstance(x, Tensor) and not is_symbol(x) for x in values]
    return [first.setdefault(id(x), i) if own else i for i, (x, own) in enumerate(zip(values, tensors, strict=True))]


@dataclass
class Trace:
    """What torch.compile depended on when it traced a part, of the part's inputs, the owner first."""

    part: str
    forms: str  # how this CPU computes best: cpu.forms
    names: list[str]  # what guards looked at, as Python expressions of `inputs`
    facts: list[str | None]  # of each; None for a symbol of one of the `sizes`
    same: list[int]  # `identities` of them
    sizes: list[list[int]]  # of each size that the code takes, the symbols that hold it
    conditions: list[tuple[list[str], list[str]]]  # names of the sizes, and what is true of them
    arguments: list[int]  # the code's inputs
    outputs: list[int]  # the code's outputs that the part returns
    several: bool  # whether it returns a tuple

    def __post_init__(self):
        self.look = eval(f"lambda inputs: [{', '.join(self.names)}]")
        self.checks = [(names, [compile(x, "size", "eval") for x in every]) for names, every in self.conditions]

    def match(self, inputs: tuple) -> list[Tensor] | None:
        """The inputs of the code for these inputs of the part; None if the code is not for them."""
        try:
            values = self.look(inputs)
        except UNKNOWN:
            return None
        if any(known is not None and known != fact(x) for x, known in zip(values, self.facts, strict=True)):
            return None
        held = [[values[i] for i in every] for every in self.sizes]
        if not all(is_symbol(x) and x.shape == every[0].shape for every in held for x in every):
            return None
        if identities(values) != self.same or not self.holds([every[0].shape[0] for every in held]):
            return None
        return [values[i] for i in self.arguments]

    def holds(self, sizes: list[int]) -> bool:
        """Whether the code is right for these sizes."""
        every = [(code, dict(zip(names, sizes, strict=True))) for names, codes in self.checks for code in codes]
        try:
            return all(eval(code, TERMS, values) for code, values in every)
        except NameError:  # a term that is not among TERMS, or a size that the code does not take
            return False


# Reading


@dataclass
class Package:
    """A file of the folder."""

    trace: Trace
    code: "Code"


class Code:
    """A package's code. The public torch._inductor.aoti_load_package would import the compiler first."""

    def __init__(self, path: Path):
        self.held = [torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)]
        weakref.finalize(self, self.held.clear)  # the loader deletes the files that it unpacked, at exit as well

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        return self.held[0].run(inputs)


class Packages:
    """The packages of an engine's step. forms: see `Trace`."""

    def __init__(self, folder: Path, forms: Callable[[], str]):
        self.folder, self.forms = folder, forms
        self.known: list[Package] | None = None
        self.builds: list[Build] = []
        self.workers: list[Worker] = []
        self.later = False  # whether parts return zeros until `settle`, while their code is compiled
        self.failure = ""  # why a part's code is not in the folder

    def exist(self) -> bool:
        return self.folder.is_dir() and any(self.folder.glob("*.pt2"))

    def find(self, part: Callable, inputs: tuple) -> tuple[Package, list[Tensor]] | None:
        """A package for a part with these inputs, the owner first, and the inputs of its code."""
        if self.known is None:
            self.known = [x for path in sorted(self.folder.glob("*.pt2")) if (x := self._read(path))]
        for package in self.known:
            trace = package.trace
            if trace.part == part.__qualname__ and trace.forms == self.forms():
                if (arguments := trace.match(inputs)) is not None:
                    return package, arguments
        return None

    def _read(self, path: Path) -> Package | None:
        """None if the file is damaged: then it is deleted; or if its code cannot be loaded, now at least."""
        try:
            with zipfile.ZipFile(path) as file:
                trace = Trace(**json.loads(file.read(ENTRY)))
                if file.testzip() or not any(name.endswith(".so") for name in file.namelist()):
                    raise ValueError  # torch 2.11 may crash where it reads a damaged package
        except OSError:
            return None
        except Exception:  # whatever such content makes zipfile, json and this module raise
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        with suppress(AttributeError, RuntimeError):  # of another torch; of a temporary folder without room
            return Package(trace, Code(path))
        return None

    def build(self, graph: torch.fx.GraphModule, examples: list, options: dict) -> "Build":
        """Begins to compile a graph; before, waits until a worker has nothing else to do."""
        build = Build(graph, examples, options, self)
        if all(x.busy for x in self.workers) and len(self.workers) < torch.get_num_threads():
            self.workers.append(Worker())
        if all(x.busy for x in self.workers):
            answers = wait([x.process.stdout for x in self.workers])
            next(x for x in self.workers if x.process.stdout in answers).wait()
        build.begin(next(x for x in self.workers if not x.busy))
        self.builds.append(build)
        return build

    def settle(self) -> None:
        """Waits for all code that is compiled, and stores it where that is possible. Raises Failed."""
        failed = None
        try:
            for build in self.builds:
                try:
                    build.finish()
                except Failed as error:
                    failed = error
                    continue
                if build.trace is None:
                    self.failure = "inputs of the code cannot be found again"
                    continue
                try:
                    self.write(build.trace, build.package)
                except OSError as error:
                    self.failure = reason(error)
        finally:
            self.stop()
        if failed is not None:
            raise failed

    def stop(self) -> None:
        """Ends what is compiled."""
        for x in self.workers + self.builds:
            x.stop()
        self.workers, self.builds, self.later = [], [], False

    def write(self, trace: Trace, package: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(asdict(trace))
        path = self.folder / f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.pt2"
        with zipfile.ZipFile(package, "a") as file:
            file.writestr(ENTRY, content)
        with replacing(path) as new:
            shutil.copyfile(package, new)
        shrink(self.folder.parent)


def shrink(folder: Path) -> None:
    """Deletes the packages that were not used for longest, until all take at most LIMIT bytes."""
    files = []
    for path in folder.glob("*/*.pt2"):
        with suppress(OSError):
            files.append((path.stat().st_mtime, path.stat().st_size, path))
    left = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if left <= LIMIT:
            return
        left -= size
        with suppress(OSError):
            path.unlink()
            path.parent.rmdir()  # if it was the last


def source(*files: Path) -> str:
    """A hash of code from which steps are traced."""
    return hashlib.sha256(b"".join(hashlib.sha256(x.read_bytes()).digest() for x in sorted(files))).hexdigest()


# Now, not when it is asked for: files may change after they were imported.
SOURCE = source(
    *(ROOT / name for name in ("engine.py", "model.py")), *ROOT.glob("kv/**/*.py"), *ROOT.glob("runtime/*.py")
)


def packages_of(engine, plan: Plan, folder: Path, machine: str, forms: Callable[[], str]) -> Packages | None:
    """Those of an engine's caches of this plan, in a folder below this one; None where steps are not packaged."""
    if os.environ.get("KV_FAST_PACKAGES") == "0" or engine.ranks.count > 1:
        return None
    plan, method = replace(plan, inv_freq=None, key_biases=None), METHODS[engine.method]
    cache = engine.method, engine.budget, sorted(engine.options.items()), engine.speculate, engine.config, plan
    code = SOURCE, source(Path(sys.modules[method.__module__].__file__))  # of a method from elsewhere, too
    key = repr((code, torch.__version__, machine, cache))
    return Packages(folder / hashlib.sha256(key.encode()).hexdigest()[:16], forms)


# Building


class Failed(Exception):
    """A part could not be packaged: it is compiled as any function is."""


def reason(error: Exception) -> str:
    """The line of an error that says most: a C++ compiler's first error, or the first."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next((line for line in lines if " error: " in line), lines[0])


class Worker:
    """A process that makes packages, one after another, in a session of its own: Ctrl-C does not reach it."""

    def __init__(self):
        command, pipe = [PYTHON, "-m", "runtime.packages"], subprocess.PIPE
        how = {"cwd": ROOT, "stderr": subprocess.DEVNULL, "bufsize": 0, "start_new_session": True}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, **how)
        self.stop = weakref.finalize(self, end, self.process)
        self.busy = False

    def begin(self, folder: Path) -> None:
        """Begins to make the package that is ordered there."""
        with suppress(BrokenPipeError):  # its process has ended: so does `wait` at once
            self.process.stdin.write(f"{folder}\n".encode())
        self.busy = True

    def wait(self) -> None:
        """Returns when it is made, or cannot be."""
        self.process.stdout.readline()
        self.busy = False


def end(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended; on macOS the second
        os.killpg(process.pid, signal.SIGKILL)  # with its compilers
    process.wait()
    process.stdin.close()
    process.stdout.close()


class Build:
    """A package of a traced part, while a worker makes it."""

    def __init__(self, graph: torch.fx.GraphModule, examples: list, options: dict, packages: Packages):
        self.packages = weakref.proxy(packages)
        guards = torch._guards.TracingContext.get().guards_context.dynamo_guards
        places = sorted({x.name.replace(L, "inputs") for x in guards})
        self.names = [name for name in places if name.startswith("inputs[")]
        absent = {(x.name, getattr(x.create_fn, "keywords", {}).get("attr")) for x in guards}  # from an object's own
        self.names += sorted(f"{attr!r} in vars({x.replace(L, 'inputs')})" for x, attr in absent if attr and L in x)
        self.trace: Trace | None = None
        self.code: Code | None = None
        sizes = [x for x in examples if isinstance(x, torch.SymInt)]
        self.conditions = conditions([x.node for x in sizes])
        self.integers = [i for i, x in enumerate(examples) if not isinstance(x, Tensor)]
        self.outputs = [example(x.meta["example_value"]) for x in graph.graph.output_node().args[0]]
        code = graph.graph.python_code("self")
        modules = {name: x.__name__ for name, x in code.globals.items() if isinstance(x, ModuleType)}
        values = {name: x for name, x in code.globals.items() if name not in modules}
        order = code.src, modules, values, [example(x) for x in examples], options, torch.get_num_threads()
        self.place = tempfile.TemporaryDirectory(prefix="kv-fast-")
        self.folder = Path(self.place.name)
        self.package = self.folder / "model.pt2"
        (self.folder / "order").write_bytes(pickle.dumps(order))
        self.stop = self.place.cleanup

    def begin(self, worker: Worker) -> None:
        self.worker = worker
        worker.begin(self.folder)

    def __call__(self, arguments: list[Tensor]) -> list[Tensor]:
        if self.code is None and self.packages.later:
            return [torch.empty_strided(*x[:2], dtype=x[2]).zero_() for x in self.outputs]
        return self.finish()(arguments)

    def finish(self) -> Code:
        """The code, when it is ready. Raises Failed."""
        if self.code is None:
            ready, failure = self.package, self.folder / "failure"
            while not ready.exists() and not failure.exists() and self.worker.busy:
                self.worker.wait()
            if not ready.exists():
                raise Failed(failure.read_text() if failure.exists() else "its process ended")
            self.conditions += json.loads((self.folder / "conditions").read_bytes())
            try:
                self.code = Code(self.package)
            except (AttributeError, RuntimeError) as error:  # of another torch; of a temporary folder without room
                raise Failed(reason(error)) from None
        return self.code

    def describe(
        self, part: Callable, inputs: tuple, arguments: list[Tensor], outputs: list[int], several: bool
    ) -> None:
        """Makes its trace, unless the code's inputs are not among what guards looked at."""
        try:
            trace = Trace(part.__qualname__, self.packages.forms(), self.names, [], [], [], [], [], outputs, several)
            values = trace.look(inputs)
        except UNKNOWN:
            return
        trace.same, symbols = identities(values), {i: x.shape[0] for i, x in enumerate(values) if is_symbol(x)}
        wanted = [arguments[i].shape[0] for i in self.integers]
        trace.sizes = [[i for i, size in symbols.items() if size == one] for one in wanted]
        variable = {i for every in trace.sizes for i in every}
        trace.facts = [None if i in variable else fact(x) for i, x in enumerate(values)]
        places = {id(x): i for i, x in reversed([*enumerate(values)])}
        held = iter(trace.sizes)
        found = [next(held)[:1] if i in self.integers else [places.get(id(x))] for i, x in enumerate(arguments)]
        if all(every and every[0] is not None for every in found):
            trace.arguments, trace.conditions = [every[0] for every in found], self.conditions
            self.trace = trace


def example(x: Tensor | int) -> Example:
    if isinstance(x, Tensor):
        return tuple(map(hint, x.shape)), tuple(map(hint, x.stride())), x.dtype
    return hint(x)


def hint(size: int | torch.SymInt) -> int:
    """A size while it is traced: int(size) would make the code right for no other."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def conditions(sizes: list) -> list[tuple[list[str], list[str]]]:
    """What is true of sizes, SymNodes of one trace: see `Trace`."""
    if not sizes:
        return []
    names, environment = [str(x.expr) for x in sizes], sizes[0].shape_env
    ranges = [environment.var_to_range[x.expr] for x in sizes]
    pairs = zip(names, ranges, strict=True)
    bounds = [f"{x.lower} <= {name}" + f" <= {x.upper}" * x.upper.is_Integer for name, x in pairs]
    return [(names, bounds + [str(guard.expr) for guard in environment.guards])]


def compile_order(folder: Path) -> None:
    """Makes the package that a `Build` wants."""
    src, modules, values, examples, options, threads = pickle.loads((folder / "order").read_bytes())
    torch.set_num_threads(threads)
    names = values | {name: import_module(module) for name, module in modules.items()}
    exec(src, names)
    integers = [isinstance(x, int) for x in examples]

    class Graph(nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            given = zip(inputs, integers, strict=True)
            return names["forward"](self, *[x.shape[0] if integer else x for x, integer in given])

    inputs = tuple(
        torch.empty(x, 0) if isinstance(x, int) else torch.empty_strided(*x[:2], dtype=x[2]) for x in examples
    )
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} if integer else None for integer in integers)
    with torch.no_grad():
        program = torch.export.export(Graph(), inputs, dynamic_shapes=(dynamic,))
    package = folder / "unfinished.pt2"
    known = torch._inductor.config.get_config_copy()
    options |= {name: False for name in WITHOUT if name in known}
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
    nodes = {x.name: x.meta["val"] for x in program.graph.find_nodes(op="placeholder")}
    traced = [nodes[name] for name in program.graph_signature.user_inputs]
    sizes = [x.shape[0].node for x, integer in zip(traced, integers, strict=True) if integer]
    (folder / "conditions").write_text(json.dumps(conditions(sizes)))
    package.rename(folder / "model.pt2")


def work() -> None:
    """What a `Worker` does: answers each line of stdin, a folder, with a line, and ends when stdin does."""
    orders, answers = queue.SimpleQueue(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # drops whatever a compiler prints

    def read() -> None:
        folders = []
        for line in sys.stdin:
            folders.append(Path(line.rstrip("\n")))
            orders.put(folders[-1])
        for folder in folders:  # whoever wanted the packages was killed
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # also while it compiles

    threading.Thread(target=read, daemon=True).start()
    import runtime.cpu  # noqa: F401, whose operators steps call

    while True:
        folder = orders.get()
        try:
            compile_order(folder)
        except Exception as error:
            with replacing(folder / "failure") as new:
                new.write_text(reason(error))
        print(folder, file=answers, flush=True)


if __name__ == "__main__":
    work()
