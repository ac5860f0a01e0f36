"""Runs a step's kernels for a GPU on a CPU: Inductor generates them, and Triton's interpreter runs them one by one.

    TRITON_INTERPRET=1 python tests/interpreted.py rocketkv [--batch 1] [--cut] [--drafts 2] [--ranks] [--quantize int4]

A decoder on a GPU that is not here (bench/generated.py) is compiled as the engine does it. The same decoder is made on
the CPU, with random weights, and prefills its rows. From one state, the eager step and the wrapper that Inductor wrote
around its kernels each take a step; then the tokens, the logits and every tensor that the decoder holds are compared.
A line of JSON tells the largest differences of each step, relative to the largest value of the tensor.

Memory that the wrapper allocates holds NaN at first, and every address that a kernel loads or stores lies in a tensor
that it was given, or the run ends.
"""

import argparse
import json
import math
import re
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton.language as tl
from test_cuda_trace import VARIANTS, build
from torch import Tensor, nn
from triton.runtime import interpreter

import kv
from bench import generated
from engine import CONTINUE, Sampling, decode_step, sample
from kv.parts import inductor, offload
from kv.parts.ranks import ALONE, Ranks
from runtime import speculate
from runtime.compile import cuda_options
from runtime.linear import MODES, Int4Linear, Int8Linear

BEST = inductor.best
PROMPTS, NEW, WARM = (700, 333), 64, 3  # tokens of each row; planned; decoded before
SPLITS = 8  # parts of a row's slots in flex_attention; 132 on an H100, most of them empty here
inductor.PARTS = 16  # the rows of these small caches are long enough, too
STEPS = ([CONTINUE, CONTINUE], [5, CONTINUE], [CONTINUE, 9])  # commands; in the second, the second row sleeps
Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle


# Triton's interpreter, corrected


def plain(x: tl.tensor) -> np.ndarray:
    return x.handle.data


def lifted(function, kind: tl.dtype | None = None):
    """A function of numpy arrays as one of Triton's tensors; its results have the first one's dtype, or `kind`."""

    def call(*inputs, **_):
        inputs = [x if isinstance(x, tl.tensor) else interpreter.interpreter_semantic.to_tensor(x) for x in inputs]
        return tensor(function(*map(plain, inputs)), kind or inputs[0].dtype.scalar)

    return call


def tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    data = np.asarray(data).astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(Handle(data, dtype), tl.block_type(dtype, list(data.shape)) if data.ndim else dtype)


NAMES = "exp exp2 expm1 log log2 log1p sqrt sin cos tanh floor ceil trunc rint fmod isnan isinf signbit".split()
MATH = {name: getattr(np, name) for name in NAMES} | {
    "abs": np.abs, "fabs": np.abs, "nearbyint": np.rint, "llrint": np.rint, "pow": np.power, "ldexp": np.ldexp,
    "rsqrt": lambda x: 1 / np.sqrt(x), "erf": np.vectorize(math.erf),
}  # fmt: skip


def reduce(self: interpreter.ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """A reduction by any function: of both halves along the axis, until one slice is left."""
    whole, axis = self.axis is None, self.axis or 0
    parts = [plain(x).reshape(-1) if whole else np.moveaxis(plain(x), axis, 0) for x in inputs]
    kinds = [x.dtype.scalar for x in inputs]
    while (half := len(parts[0]) // 2) > 0:
        both = [
            [tensor(p[s], kind) for p, kind in zip(parts, kinds, strict=True)] for s in (slice(half), slice(half, None))
        ]
        found = self.combine_fn(*both[0], *both[1])
        found = found if isinstance(found, tuple) else (found,)
        parts = [np.broadcast_to(plain(x), p[:half].shape) for x, p in zip(found, parts, strict=True)]
    parts = [np.expand_dims(p[0], axis) if self.keep_dims else p[0] for p in parts]
    return [self.to_tensor(p, kind) for p, kind in zip(parts, kinds, strict=True)]


def scan(self: interpreter.ScanOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """A scan by any function, a slice at a time."""
    parts = [np.moveaxis(plain(x), self.axis, 0) for x in inputs]
    kinds, done = [x.dtype.scalar for x in inputs], [p.copy() for p in parts]
    for i in range(1, len(parts[0])):
        before = [tensor(p[i - 1], kind) for p, kind in zip(done, kinds, strict=True)]
        own = [tensor(p[i], kind) for p, kind in zip(parts, kinds, strict=True)]
        found = self.combine_fn(*before, *own)
        for p, x in zip(done, found if isinstance(found, tuple) else (found,), strict=True):
            p[i] = plain(x)
    return [self.to_tensor(np.moveaxis(p, 0, self.axis), kind) for p, kind in zip(done, kinds, strict=True)]


def total(self: interpreter.ReduceOps, x: tl.tensor) -> tl.tensor:
    dtype = plain(x).dtype if x.dtype.scalar.is_floating() else None
    return self.to_tensor(plain(x).sum(self.axis, dtype, keepdims=self.keep_dims), x.dtype.scalar)


class Bounds:
    """The addresses that a kernel may load and store: those of its tensors."""

    low = high = np.empty(0, np.uint64)

    def set(self, tensors: list[Tensor]) -> None:
        spans = []
        for x in tensors:
            size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
            spans.append((x.data_ptr(), x.data_ptr() + size * x.element_size()))
        merged = []
        for low, high in sorted(spans):
            if merged and low <= merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        self.low, self.high = (np.array(x, np.uint64) for x in zip(*merged, strict=True))

    def check(self, pointers: Handle, mask: Handle) -> None:
        at, inside = np.broadcast_arrays(pointers.data, mask.data)
        if (at := at[inside]).size:
            i = np.searchsorted(self.low, at, side="right") - 1
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            if (i < 0).any() or (at + np.uint64(size) > self.high[i]).any():
                raise IndexError("an address outside of the kernel's tensors")


BOUNDS = Bounds()


def correct() -> None:
    """Adds what the interpreter lacks, and makes whole slices of what it does element by element."""
    from torch._inductor.runtime import triton_helpers

    np.seterr(all="ignore")
    integers = dict.fromkeys(("isnan", "isinf", "signbit"), tl.int32)
    table = {name: lifted(function, integers.get(name)) for name, function in MATH.items()}
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_helpers.libdevice = types.SimpleNamespace(**table)
    # As max.f32 does: of NaN and a number, the number.
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = reduce, scan
    interpreter.ReduceOps.sum = total
    load, store = Builder.create_masked_load, Builder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        BOUNDS.check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        BOUNDS.check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    # Once for all calls: by itself, the interpreter does it again in each function.
    interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


# A kernel, and the wrapper around all of them


def widened(config: dict[str, int], sizes: dict[str, int]) -> dict[str, int]:
    """Larger blocks, so that Python runs fewer programs.

    They divide the sizes, on which a kernel without masks relies; kernels that share a launch have masks.
    """
    config, room = dict(config), 1 << (12 if "num_kernels" in sizes else 16)  # of kernels that share a launch, each
    for block, size in (("R0_BLOCK", "r0_numel"), ("R1_BLOCK", "r1_numel")):
        room //= 1 << (config.get(block, sizes.get(size, 1)) - 1).bit_length()
    for block in ("XBLOCK", "YBLOCK", "ZBLOCK"):
        numels = [size for name, size in sizes.items() if name.startswith(f"{block[0].lower()}numel")]
        if block in config and numels:
            fits = [1 << (size - 1).bit_length() if "num_kernels" in sizes else size & -size for size in numels]
            config[block] = max(config[block], min(room, max(fits)))
            room //= config[block]
    return config


@dataclass
class Kernel:
    """What the wrapper launches, in place of Inductor's tuner."""

    tuner: object
    shorter: bool = False  # leave out the last program of the grid

    def run(self, *given, stream=None, **named) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        tuner, config = self.tuner, self.tuner.configs[0].kwargs
        names = [name for name in tuner.fn.arg_names if name not in config]
        values = dict(zip(names, given, strict=False)) | named
        extra = dict(zip(("_grid_0", "_grid_1", "_grid_2"), given[len(names) :], strict=False))
        sizes = {name: value for name, value in (values | extra).items() if isinstance(value, int)}
        shared = tuner.inductor_meta.get("combo_grid_meta", {})
        config = widened(config, sizes | {name: x for name, x in shared.items() if type(x) is int})
        grid = [int(x) for x in GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(sizes | config)]
        inputs, tensors = dict(config), []
        for name, value in values.items():
            kind = tuner.triton_meta["signature"][name]
            if kind == "constexpr":
                inputs[name] = value
                continue
            if isinstance(value, Tensor):
                tensors.append(value)
                data = np.array([value.data_ptr()], np.uint64)
            dtype = tl.str_to_ty(kind, None)
            if not isinstance(value, Tensor):
                data = np.array([value], interpreter._get_np_dtype(dtype))
            inputs[name] = tl.tensor(Handle(data, dtype), dtype)
        BOUNDS.set(tensors)
        code = tuner.fn.rewrite()
        interpreter.interpreter_builder.set_grid_dim(*grid)
        cells = np.ndindex(*grid)
        for cell in list(cells)[: -1 if self.shorter else None]:
            interpreter.interpreter_builder.set_grid_idx(*cell)
            code(**inputs)


def unwritten(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that no one has written: it must not matter what it holds."""
    found = torch.empty_strided(size, stride, dtype=dtype)
    storage = torch.empty(0, dtype=dtype).set_(found.untyped_storage())
    if dtype != torch.bool:
        storage.fill_(math.nan if dtype.is_floating_point else 77 if dtype.itemsize == 1 else 2**30 + 7)
    return found


def wrapper(code: str, shorter: bool = False):
    """The function that Inductor wrote around its kernels; memory of the GPU is the CPU's. shorter: see `Kernel`."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def triton(self, name: str, source: str, **_) -> Kernel:
        return Kernel(getattr(PyCodeCache.load(source), name), shorter)

    scope, parts = {"__name__": "wrapper"}, code.split("'''")  # every second part is a kernel
    for old, new in {
        "with torch.cuda._DeviceGuard(0):": "if True:",
        "torch.cuda.set_device(0)": "pass",
        "type='cuda', index=0": "type='cpu'",
        "device='cuda:0'": "device='cpu'",
    }.items():
        parts[::2] = [part.replace(old, new) for part in parts[::2]]
    with (
        patch.object(AsyncCompile, "triton", triton),
        patch.object(AsyncCompile, "wait", lambda *_: None),
        patch("torch._C._cuda_getCurrentRawStream", lambda _: 0, create=True),
        patch("torch._C._dynamo.guards._empty_strided_cuda", unwritten),
    ):
        exec(compile("'''".join(parts), "wrapper", "exec"), scope)
    return scope["call"]


# Both decoders


def tensors(root: object) -> dict[str, Tensor]:
    """All tensors that an object holds, by path."""
    found, seen = {}, set()

    def walk(x: object, path: str) -> None:
        if isinstance(x, Tensor):
            found[path] = x
        elif id(x) not in seen:
            seen.add(id(x))
            if isinstance(x, nn.Module):
                items = {k: v for k, v in vars(x).items() if k not in ("_parameters", "_buffers", "_modules")}
                items = (items | x._parameters | x._buffers | x._modules).items()
            elif isinstance(x, dict | list | tuple):
                items = x.items() if isinstance(x, dict) else enumerate(x)
            elif type(x).__module__.partition(".")[0] in ("kv", "engine", "model", "runtime") and hasattr(
                x, "__dict__"
            ):
                items = vars(x).items()
            elif isinstance(x, types.FunctionType | types.MethodType) and x.__closure__:
                items = enumerate(cell.cell_contents for cell in x.__closure__)
            else:
                return
            for key, value in list(items):
                walk(value, f"{path}.{key}")

    walk(root, "")
    return found


def reordered(pairs: dict[str, tuple[Tensor, Tensor]]) -> set[str]:
    """The paths of choices that are the same in another order, and of the slots that they fill.

    In which order a top-k returns what it chose depends on the last bit of the scores.
    """
    choices = {path: pair for path, pair in pairs.items() if path.endswith(".index")}
    same = {path for path, (a, b) in choices.items() if torch.equal(a.sort().values, b.sort().values)}
    moved = {path.removesuffix("index") for path in same if not torch.equal(*choices[path])}
    return {module + name for module in moved for name in ("index", "k", "v")}


def ordered(rank: Tensor, k: int, sorted: bool) -> Tensor:
    """inductor.best in an eager step, in the order in which a compiled step ranks few scores."""
    return BEST(rank, k, True)


def as_on_a_gpu(self: offload.OffloadMethod, plan: kv.Plan, early: bool = False) -> bool:
    """OffloadMethod.threaded, on any device."""
    return self.offload and (self.engine == "threads" or (self.engine == "auto" and early))


def handles(state: nn.Module) -> list[int]:
    """The numbers by which a step's code refers to the pools."""
    return [pool.handle for pool in generated.caches(state).pools if hasattr(pool, "handle")]


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value of b; of integers, how many differ."""
    if not a.dtype.is_floating_point:
        return float((a != b).sum())
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    largest = b[b.isfinite()].abs().amax() if b.isfinite().any() else torch.tensor(1.0)
    gap = torch.where(same, 0.0, (a - b).abs() / largest.clamp(min=1e-30))
    return float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0


class Part:
    """A pass through the layers, which runs as it is written or, with `call`, by its kernels for a GPU."""

    def __init__(self, function: Callable):
        self.function, self.call, self.inputs, self.here = function, None, [], {}

    def __call__(self, state: nn.Module, *inputs):
        if self.call is None:
            return self.function(state, *inputs)
        *command, _, cut, seed = inputs
        extra = {"cut": cut, "seed": seed} | ({"command": command[0]} if command else {})
        found = self.call([(self.here | extra)[path] for path in self.inputs])
        return found if len(found) > 1 else found[0]


@dataclass
class Case:
    """A decoder, and how it decodes."""

    name: str
    batch: int = 2
    sampling: Sampling = Sampling()
    drafts: int = 0
    ranks: Ranks = ALONE
    mode: str | None = None  # of quantized weights

    def step(self, state: nn.Module, compile: Callable) -> Callable:
        """The engine's step, of one or several parts."""
        return speculate.rounds(state, self.drafts, sample, compile) if self.drafts else compile(decode_step)

    def build(self, device: torch.device):
        with patch.object(offload.OffloadMethod, "threaded", as_on_a_gpu):
            return build(self.name, device, self.batch, self.drafts, self.ranks, torch.float32, self.mode)

    def generate(self) -> tuple[list[tuple[str, list[str]]], list[int]]:
        """The code that Inductor writes for each part of a step, and the path of each of its inputs; pools' handles."""
        made = []
        with generated.fake_gpu() as device:
            state, parts = self.build(device), []
            self.step(state, parts.append)
            command, given = torch.zeros(self.batch, dtype=torch.int64, device=device), self.sampling.tensors(device)
            paths = {id(x): path for path, x in reversed(tensors(state).items())}
            paths |= {id(x): name for name, x in zip(("command", "cut", "seed"), (command, *given), strict=True)}
            for part in parts:
                inputs = [state] if part is speculate.verify_step else [state, command]

                def run(backend: Callable, part=part, inputs=inputs) -> None:
                    generated.launch(part, backend, *inputs, self.sampling.variant, *given)

                with patch("torch._inductor.kernel.flex.flex_decoding.get_split_k", lambda *_: SPLITS):
                    found = generated.generate(run, cuda_options())
                [code] = found.code
                made.append((code, [paths[id(x)] for x in found.inputs]))
            generated.caches(state).close()
        return made, handles(state)

    def decoder(self):
        """The same rows on the CPU, with random weights and prompts."""
        random = torch.Generator().manual_seed(0)
        state = self.build(torch.device("cpu"))
        for name, weight in state.model.named_parameters():
            scale = 0.1 if weight.dim() > 1 and "embeddings" not in name else 1.0
            weight.copy_(torch.randn(weight.shape, generator=random) * scale + (weight.dim() == 1))
        for module in state.model.modules():
            if isinstance(module, Int8Linear | Int4Linear):
                module.weight.random_(generator=random)
                module.scales.uniform_(0.0, 0.1 / 2 ** (7 if self.mode == "int8" else 3), generator=random)
        for row, n in enumerate(PROMPTS[: self.batch]):
            generated.caches(state).reset(row)
            prompt = torch.randint(3, 100, (n,), generator=random)
            state.model.prefill(row, prompt)
            state.set_row(row, int(prompt[-1]), n, NEW, row)
        return state

    def compare(self, corrupt: str | None = None) -> list[dict[str, float]]:
        """The differences of the tokens, logits and tensors of each of STEPS, by path.

        corrupt: an error that a test must see: in a kernel, or a grid that lacks its last program.
        """
        made, theirs = self.generate()
        state, parts = self.decoder(), []
        step = self.step(state, lambda function: parts.append(Part(function)) or parts[-1])
        ours, calls = dict(zip(map(str, theirs), map(str, handles(state)), strict=True)), []
        for code, _ in made:
            code = re.sub(r"\b\d{13}\b", lambda found: ours.get(found[0], found[0]), code)
            code = code.replace("rsqrt(", "sqrt(", 1) if corrupt == "kernel" else code
            calls.append(wrapper(code, corrupt == "grid"))
        knobs, results = self.sampling.tensors(torch.device("cpu")), []

        def run(commands: list[int], new: int) -> list[Tensor]:
            length = max(PROMPTS) + new * (1 + self.drafts)
            generated.caches(state).make_room({row: n + new - 1 for row, n in enumerate(PROMPTS[: self.batch])})
            generated.caches(state).before_step(length, length - max(PROMPTS))
            command = torch.tensor(commands[: self.batch])
            with patch.object(inductor, "best", ordered):
                return [x.clone() for x in step(state, command, self.sampling.variant, *knobs)]

        for new in range(1, WARM + 1):
            run(STEPS[0], new)
        for new, commands in enumerate(STEPS, WARM + 1):
            state.left.fill_(NEW)
            state.left[1:] *= new != WARM + 2
            for pool in generated.caches(state).pools:
                pool.settle()
            held = tensors(state)
            before = {path: x.clone() for path, x in held.items()}
            expected = run(commands, new)
            after = {path: x.clone() for path, x in held.items()}
            for path, x in held.items():
                x.copy_(before[path])
            for part, call, (_, inputs) in zip(parts, calls, made, strict=True):
                part.call, part.inputs, part.here = call, inputs, held
            found = run(commands, new)
            pairs = dict(zip(("token", "logits"), zip(found, expected, strict=True), strict=True))
            pairs |= {path: (x, after[path]) for path, x in held.items() if ".workers." not in path}  # two take turns
            moved = reordered(pairs)
            results.append({path: error(*pair) for path, pair in pairs.items() if path not in moved})
            for part in parts:
                part.call = None
            for path, x in held.items():
                x.copy_(after[path])
        generated.caches(state).close()
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=VARIANTS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--cut", action="store_true", help="sample from the 20 best tokens")
    parser.add_argument("--drafts", type=int, default=0, help="tokens of a draft")
    parser.add_argument("--ranks", action="store_true", help="the second of two ranks")
    parser.add_argument("--quantize", choices=MODES, help="quantize the weights of linear layers")
    parser.add_argument("--corrupt", choices=("kernel", "grid"))
    args = parser.parse_args()
    correct()
    ranks = ALONE
    if args.ranks:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        ranks = Ranks(1, 2, torch.distributed.group.WORLD.group_name)
    sampling = Sampling(1.0, 20) if args.cut else Sampling()
    begin = time.perf_counter()
    with torch.no_grad():
        results = Case(args.name, args.batch, sampling, args.drafts, ranks, args.quantize).compare(args.corrupt)
    always = {"token", "logits"}
    worst = [dict(sorted(r.items(), key=lambda item: (item[0] not in always, -item[1]))[:6]) for r in results]
    print(json.dumps({"tensors": len(results[0]), "worst": worst, "s": round(time.perf_counter() - begin, 1)}))


if __name__ == "__main__":
    main()
