"""torch.compile as the engine uses it."""

import errno
import os
import sys
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

    class Passes(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            products_as_sums(graph)
            share_alike(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return {
        "triton.cudagraphs": True,
        "max_autotune_pointwise": True,  # tries a few block sizes for each kernel
        "combo_kernels": True,
        "post_grad_custom_pre_pass": Passes(),
        # Otherwise a concatenation whose parts are computed before and after a fetch is split into separate buffers.
        "force_pointwise_cat": True,
        "comprehensive_padding": False,  # a top-k would copy scores whose rows are padded
        "realize_opcount_threshold": 40,  # not 30: what unpacks a number would be a kernel of its own
    }


def share_alike(graph: torch.fx.Graph) -> None:
    """Computes once what layers compute alike: masks, positions, indices."""
    first: dict[str, torch.fx.Node] = {}
    for node in graph.nodes:
        name = str(node.target)
        if node.op != "call_function" or not name.startswith(("aten.", "prims.")) or "empty" in name:
            continue  # what an operator leaves unwritten is no value
        known = first.setdefault(repr((node.target, node.args, node.kwargs)), node)
        if known is not node and not node.target._schema.is_mutable:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def products_as_sums(graph: torch.fx.Graph) -> None:
    """Writes a product of one row [1,I] and a weight [I,O] as a sum, whose kernel reads the weight at nearly the
    memory's full speed and takes in what follows."""
    aten = torch.ops.aten

    def call(target: Callable, *args: object) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*[a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in args])
        return node

    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, row, weight = node.args
            if row.meta["val"].shape[0] != 1 or node.kwargs:
                continue
            with graph.inserting_before(node):
                each = call(
                    aten.mul.Tensor, call(aten.unsqueeze.default, row, 2), call(aten.unsqueeze.default, weight, 0)
                )
                y = call(aten.sum.dim_IntList, each, [1])
                node.replace_all_uses_with(call(aten.add.Tensor, y, *bias) if bias else y)
            graph.erase_node(node)


def compiled_graphs() -> int:
    """The number of graphs torch has compiled in this process, which has imported the compiler if there are any."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils.counters["stats"]["unique_graphs"] if utils else 0


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
