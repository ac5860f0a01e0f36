"""Trains the checkpoint of this folder from scratch, with tokenizer and data: python -m needle.train --minutes 90

The model is a small Llama that answers questions about long texts. It is trained on tasks of `tasks/` (RULER's
retrieval and variable tracking, the lookup of 2StageRetr) in their own wordings and others. Facts are hidden in plain
text from a Debian machine (manuals, licenses) and among each other. Texts grow from short to long:

1. random phrases that repeat: attention copies what followed the last time.
2. facts whose questions repeat the words before the value: first nothing between key and value, then a few words.
3. RULER's wording, whose questions use other words than the facts, with several questions about a text.
4. all tasks, at 512 tokens and then at twice the length, up to 4,096.

The next stage begins when most answers are right, or at a set share of the total time.

In the loss, the tokens of answers count in full, those of plain text and questions a little. To resume, run the same
command again. --ship DIR writes the current weights as a checkpoint.
"""

import runtime.startup  # noqa: F401

import argparse
import io
import json
import random
import time
from functools import partial
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor

from kv.parts.rope import rope_frequencies
from model import Transformer
from needle.data import WORDINGS, Data, Sequence, keep, paragraphs
from runtime.checkpoint import write_checkpoint
from runtime.hf_config import from_hf
from tasks import two_stage
from tasks.ruler import MANY, ONE, Drawer, all_words, tracking
from terminal.cli import run
from text.tokenizer import load_tokenizer

SHIPPED = json.loads(Path(__file__).with_name("config.json").read_text())  # sizes of the checkpoint of this folder
CONFIG = {key: SHIPPED[key] for key in SHIPPED if key != "kv_fast"} | {"max_position_embeddings": 8192}
LEARNING_RATE = 8e-4
STAGES = (  # data, sequence length, and the share of the total time at which the next stage begins at the latest
    ("repeats", 256, 0.05),
    ("direct", 256, 0.1),
    ("echo", 256, 0.15),
    ("ruler", 512, 0.3),
    ("all", 512, 0.45),
    ("all", 1024, 0.6),
    ("all", 2048, 0.8),
    ("all", 4096, 1.0),
)
ENOUGH = 0.8  # share of answers right in every token (repeats: of right tokens) at which it begins earlier

# The model


def logits(model: Transformer, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """tokens [B,T], cos and sin [T,D/2] -> [B,T,vocab] fp32"""
    x = model.tok_embeddings(tokens)
    for block in model.layers:
        q, k, v = block.attention.project(block.attention_norm(x), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + block.attention.output(y)
        x = x + block.feed_forward(block.ffn_norm(x))
    return F.linear(model.norm(x), model.tok_embeddings.weight).float()


def forward(model: Transformer, tokens: Tensor, cos: Tensor, sin: Tensor, follow: Tensor, weights: Tensor):
    """tokens, follow, weights [B,T] -> the weighted mean loss, and whether each next token was predicted [B,T]."""
    foreseen = logits(model, tokens, cos, sin)
    losses = F.cross_entropy(foreseen.flatten(0, 1), follow.flatten(), reduction="none") * weights.flatten()
    return losses.sum() / weights.sum(), foreseen.argmax(-1) == follow


def new_model(seed: int) -> Transformer:
    """Random weights, except that a few heads start as an induction circuit, which copies (Olsson et al., arXiv
    2209.11895). Training alone takes most of an hour to find one. These heads are trained like the rest.

    In layer 0, one head attends to the previous token and another to the last twenty or so; both add a code of what
    they see to the current token. In layers 1 and 2, two heads of each group copy a token: one looks for a token whose
    predecessor and surroundings are like the current token and its surroundings, the other compares surroundings alone.
    """
    c, generator = from_hf(CONFIG), torch.Generator().manual_seed(seed)
    model, group, size = Transformer(c), c.n_head // c.n_kv_head, c.head_dim

    def random(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    for name, p in model.named_parameters():
        if p.dim() > 1:  # weights that add to the residual stream start smaller
            p.data = random(*p.shape, std=0.005 if name.endswith(("wo.weight", "w2.weight")) else 0.02)
    common = F.normalize(random(c.dim), dim=0)  # a direction that all tokens share, for attention by position
    token = model.tok_embeddings.weight.data
    token += common * (token.norm(dim=-1).mean() - token @ common)[:, None]
    speed, _ = rope_frequencies(c.rope, size, 1)
    half = size // 2
    fast, slow = torch.arange(16), torch.arange(16, half)  # RoPE channels that tell near positions apart, and others
    marks = torch.cat((slow, slow + half))
    back = torch.zeros(size)  # the key of every token
    back[fast] = 8.0
    ahead, around = torch.zeros(size), torch.zeros(size)  # queries for the previous token, and the last twenty
    ahead[fast], ahead[fast + half] = 8.0 * speed[fast].cos(), -8.0 * speed[fast].sin()
    around[6:13] = torch.tensor([1.0, 2.0, 4.0, 6.0, 6.0, 6.0, 6.0])
    plain = torch.eye(c.dim) - torch.outer(common, common)
    before, near = torch.linalg.qr(random(c.dim, 2 * len(marks)))[0].chunk(2, dim=1)  # spaces for the codes
    bare = plain - before @ before.T - near @ near.T
    code = random(len(marks), c.dim, std=0.0625) @ plain

    def parts(layer: int, g: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of a group's weights: query [group,size,dim], key and value [size,dim], output [dim,group,size]."""
        a = model.layers[layer].attention
        q, k, v = a.wqkv.weight.data.unflatten(0, (-1, size)).split((c.n_head, c.n_kv_head, c.n_kv_head))
        heads = slice(g * group, (g + 1) * group)
        return q[heads], k[g], v[g], a.wo.weight.data.unflatten(1, (-1, size))[:, heads]

    q, k, v, o = parts(0, 0)
    k += torch.outer(back, common) / 11.3  # a normalized token's component along `common` is 11.3
    q[0] += torch.outer(ahead, common) / 11.3
    q[1] += torch.outer(around, common) / 11.3
    v[: len(marks)] = code
    o[:, 0, : len(marks)] = 0.07 * before
    o[:, 1, : len(marks)] = 0.14 * near
    for layer in (1, 2):
        for g in range(c.n_kv_head):
            q, k, v, o = parts(layer, g)
            q[0, marks] = 1.9 * (code + near.T)
            q[1, marks] = 1.9 * near.T
            k[marks] = 1.9 * (before + near).T
            v.copy_(random(size, c.dim, std=0.0625) @ bare)
            o[:, :2] = 0.08 * v.T[:, None]
    return model


class Trainer:
    def __init__(self, folder: Path, device: str, minutes: float, tokens_per_step: int):
        self.folder, self.device, self.minutes, self.tokens_per_step = folder, device, minutes, tokens_per_step
        self.stage, self.step, self.tokens, self.seconds = 0, 0, 0, 0.0
        self.right: dict[str, float] = {}  # for each kind of answer, the running share that is right
        speed, _ = rope_frequencies({"rope_type": "default", **CONFIG}, CONFIG["head_dim"], 1)
        angle = torch.arange(max(n for _, n, _ in STAGES))[:, None].float() * speed
        self.cos, self.sin = angle.cos().to(device), angle.sin().to(device)
        self.model = new_model(seed=0).to(device)
        self.forward = torch.compile(partial(forward, self.model), dynamic=False)
        matrices = [p for name, p in self.model.named_parameters() if p.dim() > 1 and "layers" in name]
        rest = [p for name, p in self.model.named_parameters() if p.dim() == 1 or "layers" not in name]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    def save(self) -> None:
        state = {name: getattr(self, name) for name in ("stage", "step", "tokens", "seconds", "right")}
        state |= {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}
        torch.save(state, self.folder / "state.partial")
        (self.folder / "state.partial").replace(self.folder / "state.pt")

    def resume(self) -> None:
        if (self.folder / "state.pt").exists():
            state = torch.load(self.folder / "state.pt", weights_only=True)
            self.model.load_state_dict(state.pop("model"))
            for optimizer, saved in zip(self.optimizers, state.pop("optimizers"), strict=True):
                optimizer.load_state_dict(saved)
            self.__dict__.update(state)

    def rate(self) -> float:
        """The learning rate: a warm-up, a plateau, and a linear fall to zero over the last 40% of the time."""
        left = 1 - self.seconds / 60 / self.minutes
        return LEARNING_RATE * min(1.0, (self.step + 1) / 100, max(left / 0.4, 0.0))

    def batch(self, data: Data) -> list[Sequence]:
        stage, length, _ = STAGES[self.stage]
        if stage == "all" and data.rng.random() < 0.5:  # earlier stages stay in the mix
            stage, length, _ = data.rng.choice(STAGES[2 : self.stage + 1])
        count = max(1, self.tokens_per_step // length)
        copies = [stage == "repeats" or data.rng.random() < 0.05 for _ in range(count)]
        return [data.repeats(length) if copy else data.sequence(stage, length) for copy in copies]

    def train_step(self, batch: list[Sequence]) -> float:
        """Runs one update and returns the loss; updates the shares of right answers."""
        tokens, follow = (torch.tensor([getattr(s, n) for s in batch], device=self.device) for n in ("ids", "follow"))
        weights = torch.tensor([s.weights for s in batch], device=self.device)
        length = tokens.shape[1]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            loss, foreseen = self.forward(tokens, self.cos[:length], self.sin[:length], follow, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for s, row in zip(batch, foreseen.tolist(), strict=True):
            for kind, begin, end in s.answers:
                hits = row[begin:end]
                right = sum(hits) / len(hits) if kind == "repeats" else all(hits)
                self.right[kind] = 0.98 * self.right.get(kind, 0.0) + 0.02 * right
        self.step, self.tokens = self.step + 1, self.tokens + tokens.numel()
        return loss.item()

    def promote(self) -> None:
        """Moves to the next stage once most answers of this one are right or its time is over."""
        stage, _, until = STAGES[self.stage]
        asked = ["noise", "essay", "multikey_2"] if stage == "all" else [stage]
        enough = all(self.right.get(kind, 0) > ENOUGH for kind in asked)
        if self.stage + 1 < len(STAGES) and (enough or self.seconds > 60 * self.minutes * until):
            self.stage += 1
            self.right = {kind: 0.5 * right for kind, right in self.right.items()}

    def run(self, data: Data) -> None:
        began, losses = time.perf_counter() - self.seconds, []
        while self.seconds < 60 * self.minutes:
            losses.append(self.train_step(self.batch(data)))
            self.seconds = time.perf_counter() - began
            if self.step % 50 == 0:
                entry = {
                    "step": self.step,
                    "minutes": round(self.seconds / 60, 1),
                    "tokens": self.tokens,
                    "stage": STAGES[self.stage],
                    "loss": round(sum(losses) / len(losses), 3),
                    "right": {kind: round(100 * right) for kind, right in sorted(self.right.items())},
                }
                print(json.dumps(entry), flush=True)
                losses = []
                self.promote()
                self.save()
        self.save()


# The tokenizer and the shipped checkpoint


def train_tokenizer(folder: Path, text: list[str]) -> None:
    """Trains BPE with byte fallback on plain text and the tasks' words and wordings; no space is added before a text.

    Each digit is a token. A number's first digit includes the space before it, so that it directly follows a word.
    """
    rng, model = random.Random(0), io.BytesIO()
    lines = rng.sample(text, min(len(text), 20000))
    drawer = Drawer(rng, keep)
    wordings = [ONE, MANY, *WORDINGS]
    for _ in range(15000):
        wording = rng.choice(wordings)
        key, value = drawer.words(), rng.choice([drawer.numbers, drawer.uuids])()
        lines.append(wording.needle.format(type="numbers", key=key, value=value))
        lines.append(wording.ask("numbers", key, ()).text.strip())
    lines += [two_stage.INTRO + two_stage.ask(3, 4, True) + " ".join(two_stage.COLOURS)] * 500
    lines += [q.text for i in range(500) for q in tracking(random.Random(i), 5).questions]
    lines += [word for word in all_words() if keep(word)] * 3
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=CONFIG["vocab_size"],
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        user_defined_symbols=[f"\u2581{digit}" for digit in range(10)],
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    settings = {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def ship(trainer: Trainer, out: Path) -> None:
    weights = {name: p.to(torch.bfloat16) for name, p in trainer.model.state_dict().items()}
    config = CONFIG | {"max_position_embeddings": STAGES[trainer.stage][1]}  # trained on no longer texts
    write_checkpoint(out, config, from_hf(config), weights, weights.__getitem__, copy_from=trainer.folder, force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("needle-run"), help="folder of the run (default: needle-run)")
    parser.add_argument("--minutes", type=float, default=90, help="of training, earlier runs included (default: 90)")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ship", type=Path, metavar="DIR", help="write the weights reached as a checkpoint, and exit")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args.out, args.device, args.minutes, args.tokens_per_step)
    trainer.resume()
    if args.ship:
        return ship(trainer, args.ship)
    text = paragraphs()
    if not (args.out / "tokenizer.model").exists():
        train_tokenizer(args.out, text)
    words = " ".join(random.Random(1).sample(text, len(text))).split()
    trainer.run(Data(load_tokenizer(args.out), words, seed=trainer.step + 1))


if __name__ == "__main__":
    run(main)
