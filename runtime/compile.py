"""torch.compile as the engine uses it."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch


def compiled(function: Callable, **how) -> Callable:
    """torch.compile of a copy of the function: recompiles are counted, and limited, per code object.

    A size that differs from an earlier compilation (of a smaller cache, say) stays a constant.
    """

    def call(*inputs):
        return function(*inputs)

    own = FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, **how)


def cuda_options() -> dict:
    """Inductor's options for a step on a GPU. There a launch costs as much as reading several megabytes."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Pass(CustomGraphPass):
        def __init__(self, change: Callable[[torch.fx.Graph], None]):
            self.change = change

        def __call__(self, graph: torch.fx.Graph) -> None:
            self.change(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,), self.change.__name__)

    return {
        "triton.cudagraphs": True,
        "coordinate_descent_tuning": True,
        "combo_kernels": not os.environ.get("KV_FAST_SEPARATE"),  # a guess, see bench/gpu.py
        "post_grad_custom_pre_pass": Pass(share_alike),
        "post_grad_custom_post_pass": None if os.environ.get("KV_FAST_NORM") else Pass(norm_in_products),  # too
        # Otherwise a concatenation whose parts are computed before and after a fetch is split into separate buffers.
        "force_pointwise_cat": True,
        "realize_opcount_threshold": 40,  # not 30: what unpacks a number would be a kernel of its own
    }


def share_alike(graph: torch.fx.Graph) -> None:
    """Computes once what layers compute alike: masks, positions, indices."""
    first: dict[str, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith(("aten.", "prims.")):
            continue
        known = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if known is not node and not node.target._schema.is_mutable:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def norm_in_products(graph: torch.fx.Graph) -> None:
    """Makes the RMSNorm of a single row and the product that follows it one kernel: a launch fewer.

    Inductor, which tunes by coordinate descent, writes the product of [1,I] and [I,O] as a sum over [1,I,O]. Where the
    norm's mean is also a sum over [1,I,O], both share a kernel: each program adds up the row's squares again, which
    costs little, because the row lies in the L1 cache. Every operation and rounding stays the same.
    """
    aten, means = torch.ops.aten, {}
    views, convert = (aten.reshape.default, aten.unsqueeze.default), torch.ops.prims.convert_element_type.default
    repeated = convert, aten.mul.Tensor, aten.pow.Tensor_Scalar, aten.rsqrt.default, aten.add.Tensor

    def is_norm(node: torch.fx.Node) -> bool:
        factor = node.args[1] if node.target is aten.mul.Tensor else None  # may be a number
        return getattr(factor, "target", None) is aten.rsqrt.default and factor.meta["val"].numel() == 1

    def again(x: torch.fx.Node, size: torch.Size) -> torch.fx.Node:
        """x as [1,I,1] if it is the row, as [1,1,O] if its mean; a norm that is shared would be stored as [1,I,O]."""
        if x.target in views:
            return again(x.args[0], size)
        if x.target is aten.mean.dim:
            if (x, size) not in means:
                whole = graph.call_function(aten.expand.default, (again(x.args[0], size), [*size]))
                means[x, size] = graph.call_function(x.target, (whole, [1], True))
            return means[x, size]
        if x.target in repeated and not (x.target is aten.add.Tensor and isinstance(x.args[1], torch.fx.Node)):
            args = [again(arg, size) if isinstance(arg, torch.fx.Node) else arg for arg in x.args]
            return graph.call_function(x.target, tuple(args))
        return graph.call_function(aten.reshape.default, (x, [1, -1, 1]))

    for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        product = total.args[0]
        if product.target is not aten.mul.Tensor or total.args[1] != [1] or product.meta["val"].dim() != 3:
            continue
        row = product.args[0]
        while row.target in (*views, convert) or (row.target is aten.mul.Tensor and not is_norm(row)):
            row = row.args[0]
        if is_norm(row) and product.meta["val"].shape[0] == 1:
            with graph.inserting_before(product):
                product.update_arg(0, again(product.args[0], product.meta["val"].shape))


def compiled_graphs() -> int:
    """The number of graphs torch has compiled in this process. Imports the compiler, which takes a second."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@contextmanager
def compile_errors() -> Iterator[None]:
    """Turns the known reasons why torch cannot compile here into a ValueError: one line with what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(_unwritable_cache(error.strerror)) from None
    except RuntimeError as error:
        from torch._dynamo.exc import BackendCompilerFailed
        from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

        if not isinstance(error, BackendCompilerFailed):
            raise
        inner, full = error.inner_exception, os.strerror(errno.ENOSPC)
        if isinstance(inner, OSError) or full in str(inner):  # the C++ compiler reports a full disk as text
            raise ValueError(_unwritable_cache(getattr(inner, "strerror", None) or full)) from None
        if isinstance(inner, InvalidCxxCompiler | CppCompileError):
            raise ValueError(
                "the decode step cannot be compiled here: install g++ and Python's headers (Debian: g++ python3-dev), "
                "or pass --no-compile"
            ) from None
        raise


def _unwritable_cache(reason: str) -> str:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_*"
    return (
        f"the compile cache {folder} cannot be written ({reason}): free space there, or set TORCHINDUCTOR_CACHE_DIR "
        "to another folder"
    )
