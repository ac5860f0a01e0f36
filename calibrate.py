"""Looks at a model's attention once, for methods that must know it: python calibrate.py --checkpoint DIR --text FILE

Writes kv_profile.json into the checkpoint, where every tool finds it. What it holds:

- head_scores (duo): for each KV head, the attention of the text's last queries to what lies between the first tokens
  and the recent ones; the mean over the queries, the most of its group. A stand-in for the gates that DuoAttention
  (arXiv 2410.10819) trains: a head that looks there retrieves.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from checkpoint import read_json
from cli import run
from device import DTYPES
from engine import Engine
from generate import read_text
from kv import ops
from kv.base import KV
from kv.duo import Options as Duo

QUERIES = 32  # last ones of the text, that are looked at


class Probe(KV):
    """Keeps nothing but what it sees of a prompt's attention."""

    def __init__(self, sinks: int, recent: int):
        super().__init__()
        self.sinks, self.recent_tokens = sinks, recent

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = k.shape[2]
        last = torch.arange(length - QUERIES, length, device=k.device)[:, None]
        key = torch.arange(length, device=k.device)
        between = (key >= self.sinks) & (key <= last - self.recent_tokens)  # [queries,T]
        groups = q[0, :, -QUERIES:].unflatten(0, (k.shape[1], -1))  # [Hk,G,queries,D]
        self.head_scores = []
        for rows, keys in zip(groups, k[0], strict=True):
            logits = rows.float() @ keys.float().mT * q.shape[-1] ** -0.5
            mass = logits.masked_fill(key > last, -torch.inf).softmax(-1)
            self.head_scores.append((mass * between).sum(-1).mean(-1).max().item())
        return ops.causal_attention(q, k, v)

    def decode(self, *_) -> Tensor:
        raise NotImplementedError("a probe only sees prompts")

    def reset(self, row: int) -> None:
        pass

    def step_bytes(self, length: int) -> tuple[int, int]:
        return 0, 0


def calibrate(engine: Engine, ids: list[int], sinks: int, recent: int) -> dict:
    """What kv_profile.json is to hold of a text. Raises ValueError if it is too short to say anything."""
    least = sinks + recent + QUERIES
    if len(ids) < least:
        raise ValueError(f"the text has {len(ids)} tokens; with {sinks} sinks and {recent} recent tokens it takes at "
                         f"least {least}")
    probes = [Probe(sinks, recent) for _ in engine.model.layers]
    engine._release()
    engine.model.set_kv(probes, 1)
    engine.model.prefill(torch.tensor(ids, device=engine.device), 0)
    return {"format": 1, "tokens": len(ids), "head_scores": [[round(s, 5) for s in p.head_scores] for p in probes]}


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", type=Path, required=True, metavar="DIR")
    p.add_argument("--text", required=True, metavar="FILE", help="like what the model will read, question included")
    p.add_argument("--length", type=int, help="read the last so many tokens of the text (default: what the model can)")
    p.add_argument("--sinks", type=int, default=Duo.sinks, help="first tokens of a streaming head")
    p.add_argument("--recent", type=int, default=Duo.recent, help="newest tokens of a streaming head")
    p.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    p.add_argument("--dtype", choices=DTYPES, help="default: the checkpoint's")
    args = p.parse_args(argv)
    text = read_text(args.text)
    engine = Engine.load(args.checkpoint, device=args.device, dtype=args.dtype, compile=False)
    ids = engine.encode(text)
    found = calibrate(engine, ids[-min(args.length or len(ids), engine.config.max_length) :], args.sinks, args.recent)
    path = args.checkpoint / "kv_profile.json"
    old = read_json(path) if path.exists() else {}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(old | {"text": Path(args.text).name} | found, indent=1) + "\n")
    partial.replace(path)
    for layer, scores in enumerate(found["head_scores"]):
        print(f"layer {layer:3}  " + "  ".join(f"{100 * score:5.1f}%" for score in scores))
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
