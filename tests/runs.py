"""A driver for a method's layers, shared by the tests of several methods."""

from collections.abc import Callable, Hashable, Iterable

import torch

import kv
from kv import Plan

HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (4, 1)}
D, LAYERS, MAX_PROMPT = 16, 8, 100


def make_plan(heads: str = "gqa", batch: int = 1, new: int = 30, n_layer: int = LAYERS) -> Plan:
    n_head, n_kv_head = HEADS[heads]
    sizes = n_layer, n_head, n_kv_head, D, n_head * D
    return Plan(*sizes, "default", 1e4, torch.float32, torch.device("cpu"), batch, MAX_PROMPT, new)


def with_heads(cases: Iterable[tuple], kind: Callable[[tuple], Hashable] = lambda case: None) -> list[tuple]:
    """(*case, heads): all cases with GQA, and the first of each kind with MHA and MQA too."""
    cases = list(cases)
    first = {kind(case): case for case in reversed(cases)}
    return [(*case, "gqa") for case in cases] + [(*case, h) for case in first.values() for h in ("mha", "mqa")]


def generations(prompts: tuple[int, ...], new: int) -> list[tuple[int, int]]:
    """(prompt, generated) lengths in tokens: `new` after the first and the last prompt, fewer after the others."""
    return [(prompt, new if prompt in (prompts[0], prompts[-1]) else min(8, new)) for prompt in prompts]


class Run:
    """All layers of a method, fed with tokens."""

    def __init__(self, name: str, plan: Plan, budget: int | None, options: dict):
        self.plan, self.layers = plan, kv.build(name, plan, budget, options)
        self.position, self.generated = [0] * plan.batch, [0] * plan.batch

    def prefill(self, row: int, inputs: list) -> None:
        self.position[row], self.generated[row] = inputs[0][0].shape[2], 0
        self.layers.reset(row)
        for layer, qkv in zip(self.layers, inputs, strict=True):
            layer.prefill(row, *qkv)
        for layer in self.layers:
            layer.finish(row)

    def step(self, inputs: list, active: list[bool] | None = None, decode: Callable | None = None) -> torch.Tensor:
        """`decode`, or what is given in its place, for the `active` rows, by default all -> [L,B,Hq,D]"""
        active = torch.tensor(active or [True] * self.plan.batch)
        pos = torch.tensor(self.position) - ~active * 1
        self.layers.make_room(dict(enumerate(self.position)))
        self.layers.before_step(max(self.position) + 1, max(self.generated) + 1)
        found = (decode or self.decode)(inputs, pos, active)  # may fail, and is then repeated
        for row in active.nonzero().flatten().tolist():
            self.position[row], self.generated[row] = self.position[row] + 1, self.generated[row] + 1
        return found

    def decode(self, inputs: list, pos: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        x, found = inputs[0][0], []
        for i, (layer, (q, k, v)) in enumerate(zip(self.layers, inputs, strict=True)):
            q = q + 1e-30 * x  # each layer needs the one before
            if i + 1 < len(inputs) and self.layers[i + 1].wants_lookahead:
                q = self.layers[i + 1].lookahead(foreseen(inputs[i + 1][0] + 1e-30 * x), q, active)
            x = layer.decode(q, k, v, pos, active)
            found.append(x[:, :, 0])
        return torch.stack(found)


def foreseen(q: torch.Tensor) -> torch.Tensor:
    """An inexact prediction of a query."""
    return q + 0.7 * q.roll(1, -1)


def answer(layer: kv.KV, texts: list, prompt: int, questions: tuple[int, ...] = ()) -> torch.Tensor:
    """Feeds one layer q [Hq,N,D], k and v [Hk,N,D]: a prompt, texts of so many tokens, then single tokens.

    Returns what follows the prompt: [Hq,N-prompt,D].
    """
    layer.reset(0)
    layer.prefill(0, *(x[None, :, :prompt] for x in texts))
    pos, found = prompt, []
    for n in (*questions, *[1] * (texts[0].shape[1] - prompt - sum(questions))):
        inputs = [x[None, :, pos : pos + n] for x in texts]
        if n > 1:
            found.append(layer.extend(0, *inputs, pos)[0])
        else:
            layer.make_room(0, pos)
            layer.before_step(pos + 1, pos + 1 - prompt)
            found.append(layer.decode(*inputs, torch.tensor([pos]), torch.tensor([True]))[0])
        pos += n
    return torch.cat(found, dim=1)


def tokens(plan: Plan, batch: int, n: int, generator: torch.Generator) -> list:
    """Per layer q [batch,Hq,n,D], k and v [batch,Hk,n,D]."""
    heads = (plan.n_head, plan.n_kv_head, plan.n_kv_head)
    return [[torch.randn(batch, h, n, D, generator=generator) for h in heads] for _ in range(plan.n_layer)]


def text(plan: Plan, n: int, seed: int) -> list[torch.Tensor]:
    """Of one layer and row: q [Hq,n,D], k and v [Hk,n,D]."""
    return [x[0] for x in tokens(plan, 1, n, torch.Generator().manual_seed(seed))[0]]


def prefill_both(run: Run, slow, prompt: int, generator: torch.Generator) -> None:
    """Prefills a method and a slow reference with the same prompt."""
    inputs = tokens(run.plan, 1, prompt, generator)
    run.prefill(0, inputs)
    for layer, (q, k, v) in enumerate(inputs):
        slow.prefill(layer, q[0], k[0], v[0])


def step_both(run: Run, slow, generator: torch.Generator) -> None:
    """Feeds both one more token; their outputs must agree."""
    inputs = tokens(run.plan, 1, 1, generator)
    found = run.step(inputs)
    for layer, (q, k, v) in enumerate(inputs):
        expected = slow.decode(layer, q[0, :, 0], k[0, :, 0], v[0, :, 0])
        assert (found[layer, 0] - expected).abs().max() <= 1e-5


def compare(here: Run, there: Run, same) -> None:
    """Refills the rows of two methods with prompts of several lengths; `same` must hold for every step's outputs."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for row, prompt in enumerate((100, 50, 9)):
            inputs = tokens(here.plan, 1, prompt, generator)
            here.prefill(row, inputs)
            there.prefill(row, inputs)
        for _ in range(12):
            inputs = tokens(here.plan, 3, 1, generator)
            assert same(here.step(inputs), there.step(inputs))
    there.layers.close()


class TensorSizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of every tensor that an operator other than view returns in this context."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func._schema.name.startswith("aten::view"):
            self.found.append(out.numel())
        return out
