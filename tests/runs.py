"""A driver for a method's layers, shared by the tests of several methods."""

from collections.abc import Callable, Hashable, Iterable

import torch

import kv
from kv import Plan

HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (4, 1)}
D, LAYERS, MAX_PROMPT = 16, 8, 100


def make_plan(heads: str = "gqa", batch: int = 1, new: int = 30) -> Plan:
    n_head, n_kv_head = HEADS[heads]
    return Plan(
        LAYERS,
        n_head,
        n_kv_head,
        D,
        n_head * D,
        "default",
        1e4,
        torch.float32,
        torch.device("cpu"),
        batch,
        MAX_PROMPT,
        new,
    )


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
        self.position, self.new = [0] * plan.batch, 0

    def prefill(self, row: int, inputs: list) -> None:
        self.position[row], self.new = inputs[0][0].shape[2], 0
        for layer in self.layers:
            layer.reset(row)
        for layer, qkv in zip(self.layers, inputs, strict=True):
            layer.prefill(row, *qkv)
        for layer in self.layers:
            layer.finish(row)

    def step(self, inputs: list) -> torch.Tensor:
        """-> [L,B,Hq,D]"""
        pos, active = torch.tensor(self.position), torch.ones(self.plan.batch, dtype=torch.bool)
        self.position, self.new = [n + 1 for n in self.position], self.new + 1
        found = []
        for layer, qkv in zip(self.layers, inputs, strict=True):
            for row, n in enumerate(self.position):
                layer.make_room(row, n - 1)
            layer.before_step(max(self.position), self.new)
            found.append(layer.decode(*qkv, pos, active)[:, :, 0])
        return torch.stack(found)

    def close(self) -> None:
        self.layers.close()


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
    there.close()


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
