"""streaming: attention sinks and a recent window (StreamingLLM, Xiao et al., arXiv 2309.17453).

Keeps the first `sinks` tokens and the newest budget - sinks, the current one among them, in a ring of fixed size.
Keys keep their original positions (the paper renumbers them inside the cache). Memory and traffic: `budget` tokens a
KV head, however long the text.
"""

from dataclasses import dataclass, field

from kv.base import KV, Shape
from kv.full import Full

SINKS = field(default=4, metadata={"help": "first tokens that are never dropped", "min": 0})  # an option of methods


@dataclass(frozen=True)
class Options:
    sinks: int = SINKS


class Streaming(Full):
    endless = True


def minimum(shape: Shape, options: Options) -> int:
    return options.sinks + 1


def memory(shape: Shape, budget: int, options: Options) -> int:
    return shape.bytes(budget)


def build(shape: Shape, budget: int, options: Options) -> list[KV]:
    return [Streaming(shape, budget, options.sinks) for _ in range(shape.n_layer)]
