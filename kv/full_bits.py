"""full: every token's K and V, in the model's dtype (kv/full.py) or, with bits=8 or 4, quantized as in kv/kivi.py.

Memory and traffic: one K and one V vector per token and KV head; with bits=8 or 4, bits / 16 of that, 16-bit scales and
zero points, and the newest tokens unquantized. If the model has a sliding window, the slots of the unquantized cache
are a ring of that many tokens.
"""

from dataclasses import dataclass

from kv.base import KV
from kv.full import Full, FullMethod
from kv.kivi import RECENT, Quantized, layer_bytes
from kv.method import Shape
from kv.parts.quant import BITS, Bits


@dataclass(frozen=True)
class FullBitsMethod(FullMethod):
    help = "every token's K and V; quantized with --kv-bits"
    lossless = {"bits": 16}
    bits: Bits = BITS

    def memory(self, shape: Shape, budget: None) -> int:
        return shape.n_layer * full_layer_bytes(shape, self.bits)

    def build(self, shape: Shape, budget: None) -> list[KV]:
        return [full_layer(shape, self.bits) for _ in range(shape.n_layer)]


def full_layer(shape: Shape, bits: int) -> KV:
    """One layer that stores every token in `bits` bits per value."""
    if bits == 16:
        return Full(shape, shape.window)
    if shape.window is not None and shape.window < shape.planned:
        raise ValueError(f"a cache in {bits} bits does not honour this model's sliding window: leave out --kv-bits")
    return Quantized(shape, bits, recent=RECENT)


def full_layer_bytes(shape: Shape, bits: int) -> int:
    """Bytes of a `full_layer` by the paper's formula."""
    return layer_bytes(shape, bits) if bits < 16 else FullMethod().memory(shape, None) // shape.n_layer
