"""Measures how sparse attention is in each layer: python -m needle.sparsity --checkpoint needle --length 4096

Prints for each layer the share of the attention of a prompt's last query that falls on the 5% of the keys that receive
the most: the mean over heads, the least sparse and the most sparse head, averaged over the prompts of a needle task.
"""

import runtime.startup  # noqa: F401

import argparse
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from engine import Engine
from kv.full import Full
from tasks import Recipe
from tasks.registry import TASKS
from terminal.cli import run


class Watched(Full):
    """The full cache; also records how much a prompt's last query attends to its top keys."""

    share = 0.05

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        groups = q[0, :, -1].unflatten(0, (k.shape[1], -1)).float()  # [Hk, G, D]
        weights = (groups @ k[0].float().mT * q.shape[-1] ** -0.5).softmax(-1)
        best = weights.topk(round(self.share * k.shape[2]), sorted=False).values
        self.mass = best.sum(-1).flatten()  # [Hq]
        super().keep(row, q, k, v)


def sparsity(engine: Engine, task: str, length: int, samples: int) -> Tensor:
    """The attention on the top 5% of the keys, [samples, layers, heads]."""
    recipe = Recipe(length, engine.encode, engine.tokenizer.decode)
    shape = engine.use("full", max_prompt=length, max_new_tokens=1).shape
    layers = [Watched(shape) for _ in range(shape.n_layer)]
    engine.model.set_kv(layers)
    masses = []
    for i in tqdm(range(samples), unit="prompt", leave=False):
        prompt = engine.encode(TASKS[task].sample(recipe, i).prompt)
        engine.model.prefill(0, torch.tensor(prompt, device=engine.device))
        masses.append(torch.stack([layer.mass for layer in layers]))
    return torch.stack(masses)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, default=Path(__file__).parent)
    p.add_argument("--task", default="niah_multikey_1", choices=[name for name in TASKS if name.startswith("niah")])
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--samples", type=int, default=20)
    args = p.parse_args()
    engine = Engine.load(args.checkpoint, compile=False, max_new_tokens=1)
    mass = sparsity(engine, args.task, args.length, args.samples).mean(0)
    print(f"attention mass on the top 5% of the keys, {args.task}, {args.length} tokens, {args.samples} prompts")
    print("layer  mean  least sparse head  most sparse head")
    for i, heads in enumerate(mass):
        print(f"{i:5}  {heads.mean():.2f}  {heads.min():17.2f}  {heads.max():16.2f}")


if __name__ == "__main__":
    run(main)
