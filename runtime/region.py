"""Regional compilation: code that a step runs many times, such as a layer, is compiled once for all of them.

Before each call, torch.compile checks that whatever the code read while it was traced is unchanged; for a layer this
takes 0.1 ms. A `Region` runs these guards on a caller's first call, and then calls the compiled code directly.
"""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import Tensor

VERSIONS = 1000  # of a region, at most: layers may all have different sizes


@dataclass
class Call:
    """A call of compiled code, to be repeated with other tensors."""

    key: Hashable
    code: Callable
    inputs: list  # of the code: among them the module's tensors
    given: list[tuple[int, int]]  # (index in `inputs`, index among the tensors that the caller gives)
    outputs: list[int]  # which of the code's outputs the function returns


class Region:
    """A compiled function(*tensors, *rest), which returns a tensor or several."""

    def __init__(self, function: Callable):
        self.calls: dict[Hashable, Call] = {}  # by caller
        self.last: tuple = ()  # the code that ran last, its inputs and outputs
        self.function = compiled(function, backend=self._backend)

    def __call__(self, caller: Hashable, key: Hashable, tensors: tuple[Tensor, ...], *rest):
        """Calls the function. While a caller gives an equal `key`, only the values in `tensors` may change, until
        `forget`. The modules in `rest`, and the tensors and numbers that they hold, must stay the same."""
        call = self.calls.get(caller)
        if call is None or call.key != key:
            return self._guarded(caller, key, tensors, *rest)
        for index, tensor in call.given:
            call.inputs[index] = tensors[tensor]
        outputs = call.code(*call.inputs)
        found = tuple(outputs[index] for index in call.outputs)
        return found if len(found) > 1 else found[0]

    def forget(self) -> None:
        """Makes every caller's next call check the guards."""
        self.calls.clear()

    def close(self) -> None:
        """Breaks reference cycles; the region cannot be called afterwards."""
        self.function, self.last = None, ()
        self.forget()

    def _guarded(self, caller: Hashable, key: Hashable, tensors: tuple[Tensor, ...], *rest):
        from torch._dynamo import config  # not at the top: it imports the compiler

        with config.patch(recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS):
            found = self.function(*tensors, *rest)
        if not self.last:  # torch.compile is switched off (TORCH_COMPILE_DISABLE=1)
            return found
        (code, inputs, outputs), self.last = self.last, ()
        given = [(i, j) for i, x in enumerate(inputs) for j, tensor in enumerate(tensors) if x is tensor]
        returned = found if isinstance(found, tuple) else (found,)
        places = [next(i for i, x in enumerate(outputs) if x is y) for y in returned]
        self.calls[caller] = Call(key, code, list(inputs), given, places)
        return found

    def _backend(self, graph, examples: list) -> Callable:
        from torch._inductor.compile_fx import compile_fx

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # Inductor then computes in fp32, as wanted
            code = compile_fx(graph, examples)

        def call(*inputs):
            outputs = code(*inputs)
            self.last = code, inputs, outputs
            return outputs

        return call


def compiled(function: Callable, **how) -> Callable:
    """torch.compile of a copy of the function: recompiles are counted, and limited, per code object.

    A size that differs from an earlier compilation (of a smaller cache, say) stays a constant.
    """

    def call(*inputs):
        return function(*inputs)

    own = FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, **how)
