"""The transformer: Llama, Mistral, Yi and Qwen.

`Transformer.prefill` runs one prompt through the model layer by layer, `Transformer.extend` a text that continues a
row. A decode step (engine.py) calls `embed`, each layer and `logits` with one token of every row. Attention projects q,
k and v and hands them to `self.kv`, the layer's KV module (kv/base.py), which stores what it needs and returns the
attention output. The model names no KV method.

Letters in shapes: B rows, T prompt tokens, Hq query heads, Hk KV heads, D head dim, C model dim.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kv.parts.ops import first_rows, following, rotate
from kv.parts.rope import rope_frequencies

SLICE = 2048  # prompt tokens per call of norms, projections and MLPs: glibc keeps buffers of this size, not twice that


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model, as `kv_fast` in a checkpoint's config.json states them."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    max_length: int  # context in tokens: max_position_embeddings, or original x factor where RoPE scaling extends it
    rope: dict  # see kv/parts/rope.py
    window: int | None = None  # sliding window: tokens a query sees, including its own
    tied: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    full_layers: list = field(default_factory=list)  # with a window: the numbers of the layers that see every token
    unrotated: list = field(default_factory=list)  # the numbers of the layers without RoPE


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight


class Attention(nn.Module):
    """The q, k, v and output projections; the KV module stores the cache and computes attention."""

    def __init__(self, c: ModelConfig, rotates: bool = True):
        super().__init__()
        self.rotates = rotates
        self.heads = (c.n_head, c.n_kv_head, c.n_kv_head)
        self.head_dim = c.head_dim
        self.wqkv = nn.Linear(c.dim, sum(self.heads) * c.head_dim, bias=c.qkv_bias)
        self.wo = nn.Linear(c.n_head * c.head_dim, c.dim, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.kv: nn.Module | None = None  # set by Transformer.set_kv

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,T,C] -> q [B,Hq,T,D], k and v [B,Hk,T,D]; q and k get RoPE. cos, sin: see `Transformer.cos_sin`."""
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        k = self.k_norm(k)
        return self.rotated(self.q_norm(q), cos, sin), rotate(k, cos[:, -1:], sin[:, -1:]) if self.rotates else k, v

    def rotated(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(q, cos[:, :1], sin[:, :1]) if self.rotates else q

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Only the q of `project`: the query that a KV module's `lookahead` receives."""
        q = first_rows(self.wqkv, x, self.heads[0] * self.head_dim).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.rotated(self.q_norm(q), cos, sin)

    def output(self, y: Tensor) -> Tensor:
        """y [B,Hq,T,D] -> [B,T,C]"""
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.ffn_dim, bias=c.mlp_bias)  # gate
        self.w3 = nn.Linear(c.dim, c.ffn_dim, bias=c.mlp_bias)  # up
        self.w2 = nn.Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)  # down

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def slices(x: Tensor, *modules: nn.Module) -> Iterator[slice]:
    """The slices of x [1,T,C]; if there are several, the modules restore quantized weights once for all of them."""
    starts = range(0, x.shape[1], SLICE)
    every = (m for module in modules for m in module.modules()) if len(starts) > 1 else ()
    quantized = [m for m in every if hasattr(m, "hold_floats")]
    try:
        for m in quantized:
            m.hold_floats(x.dtype)
        for start in starts:
            yield slice(start, start + SLICE)
    finally:
        for m in quantized:
            m.drop_floats()


def in_chunks(tokens: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """tokens [n] in parts of at most `chunk` (0: all), alike, so that none has few queries to rank by."""
    return tokens.tensor_split(-(-len(tokens) // (chunk or len(tokens))))


class Block(nn.Module):
    """One layer: attention, then feed-forward; each reads a normed copy of x and adds its output to x."""

    def __init__(self, c: ModelConfig, index: int):
        super().__init__()
        self.attention = Attention(c, index not in c.unrotated)
        self.feed_forward = FeedForward(c)
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.above: tuple[Block, ...] = ()  # the next layer, if its KV module looks ahead

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Runs T tokens of one row and updates x [1,T,C] in place; besides x, only q, k, v and y span all of T."""
        a = self.attention
        q, k, v = (x.new_empty(1, heads, x.shape[1], a.head_dim) for heads in a.heads)
        for t in slices(x, a.wqkv):
            q[:, :, t], k[:, :, t], v[:, :, t] = a.project(self.attention_norm(x[:, t]), cos[:, :, t], sin[:, :, t])
        y = attend(q, k, v)
        for t in slices(x, a.wo, self.feed_forward):
            x[:, t] += a.output(y[:, :, t])
            x[:, t] += self.feed_forward(self.ffn_norm(x[:, t]))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """n tokens per row, usually one: x [B,n,C], the first at pos [B] -> [B,n,C]."""
        a, h = self.attention, self.attention_norm(x)
        for layer in self.above:
            h = layer.attention.kv.lookahead(layer.attention.query(h, cos, sin), h, active)
        q, k, v = a.project(h, cos, sin)
        x = x + a.output(a.kv.decode(q, k, v, pos, active))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The whole model. Before use, `set_rows` and `set_kv` give it rows and caches."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        # With _weight no random values are drawn: on a meta tensor, that would import torch's compiler.
        table = torch.empty(config.vocab_size, config.dim)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim, _weight=table)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False)  # load.connect

    def set_rows(self, batch: int) -> None:
        """Gives every row RoPE frequencies, which dynamic NTK adapts to the row's length."""
        inv_freq, self.rope_factor = rope_frequencies(self.config.rope, self.config.head_dim, 1)
        inv_freq = inv_freq.to(self.norm.weight.device)
        self.register_buffer("inv_freq", inv_freq.repeat(batch, 1), persistent=False)  # [B,D/2]

    def key_biases(self) -> Tensor | None:
        """What projections add to every key before RoPE, [L,Hk,D] fp32, times RoPE's factor; None: nothing."""
        if not self.config.qkv_bias or self.config.qk_norm:
            return None
        attention = [layer.attention for layer in self.layers]
        parts = [a.wqkv.bias.float().view(-1, a.head_dim).split(a.heads)[1] for a in attention]
        return torch.stack([k * self.rope_factor if a.rotates else k for a, k in zip(attention, parts, strict=True)])

    def set_kv(self, modules: list[nn.Module]) -> None:
        """Gives every layer its KV module."""
        for layer, module in zip(self.layers, modules, strict=True):
            layer.attention.kv = module
        for layer, above in pairwise(self.layers):
            layer.above = (above,) if above.attention.kv.wants_lookahead else ()

    def embed(self, tokens: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A step's tokens [B,n], the first at positions pos [B] -> x [B,n,C], and `cos_sin`"""
        return self.tok_embeddings(tokens), *self.cos_sin(following(pos, tokens.shape[1]), self.inv_freq)

    def cos_sin(self, pos: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        """pos [B,T], inv_freq [B,D/2] -> cos and sin, [B,1,T,D/2] fp32, or [B,2,T,D/2]: of queries, and of keys"""
        rope, at = self.config.rope, pos[:, None, :, None]
        angle, factor = at.float() * inv_freq[:, None, None, :], self.rope_factor
        if beta := rope.get("query_beta"):  # queries grow with their position: Llama 4's temperature
            grown = 1 + beta * torch.log1p(at // int(rope["original_max_position_embeddings"]))
            factor = factor * torch.cat([grown, torch.ones_like(grown)], dim=1)
        return angle.cos() * factor, angle.sin() * factor

    def logits(self, x: Tensor) -> Tensor:
        """x [...,C] -> [...,vocab] fp32"""
        return self.output(self.norm(x)).float()

    @torch.no_grad()
    def prefill(
        self,
        row: int,
        tokens: Tensor,
        length: int = 0,
        progress: Callable[[Iterable], Iterable] = iter,
        texts: Iterable[Tensor] = (),
        chunk: int = 0,
    ) -> Tensor:
        """tokens [T] of one prompt -> logits [vocab] after its last token; fills row `row` of every layer.

        length: how many tokens the row is to hold; dynamic NTK computes the row's RoPE base from it, because stored
        keys cannot change their base. progress: wraps the layers, as tqdm does. texts: see `finish`. chunk: the most
        tokens that pass through all layers before the next ones are read; 0: all.
        """
        whole, pos = tokens.numel(), 0
        length = max(whole, min(length, self.config.max_length))
        self.inv_freq[row] = rope_frequencies(self.config.rope, self.config.head_dim, length)[0]
        chunks = in_chunks(tokens, chunk)
        layers = iter(progress([*self.layers] * len(chunks)))
        for part in chunks:
            once = islice(layers, len(self.layers))
            logits = self._run(row, part, pos, lambda kv, pos=pos: partial(kv.prefill, row, pos=pos, whole=whole), once)
            pos += len(part)
        next(layers, None)  # ends what shows the progress
        self.finish(row, whole, texts)
        return logits

    @torch.no_grad()
    def finish(self, row: int, pos: int, texts: Iterable[Tensor]) -> None:
        """Ends the prefill of `pos` tokens; before, runs the texts [n] of a second pass, each as if it came next."""
        for text in texts:
            self._run(row, text, pos, lambda cache: partial(cache.observe, row), self.layers)
        for layer in self.layers:
            layer.attention.kv.finish(row)

    @torch.no_grad()
    def extend(self, row: int, tokens: Tensor, pos: int, chunk: int = 0) -> Tensor:
        """tokens [n] that continue row `row` after its first `pos` -> logits [vocab] after the last of them.

        chunk: as in `prefill`.
        """
        for part in in_chunks(tokens, chunk):
            logits = self._run(row, part, pos, lambda kv, pos=pos: partial(kv.extend, row, pos=pos), self.layers)
            pos += len(part)
        return logits

    def _run(self, row: int, tokens: Tensor, pos: int, attend: Callable, layers: Iterable[Block]) -> Tensor:
        at = torch.arange(pos, pos + tokens.numel(), device=tokens.device)
        cos, sin = self.cos_sin(at[None], self.inv_freq[row, None])
        x = self.tok_embeddings(tokens[None])
        for layer in layers:
            layer.prefill(x, cos, sin, attend(layer.attention.kv))
        return self.logits(x[:, -1])[0]


def direct(part: Callable, *inputs):
    """How a step runs a part of itself, unless a device has a faster way (runtime/cpu.py)."""
    return part(*inputs)


def through_layers(
    model: Transformer, run: Callable, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, active: Tensor
) -> Tensor:
    """A step's tokens x [B,n,C] through all layers, each called by `run`; arguments as in `Block.forward`."""
    for layer in model.layers:
        x = run(Block.forward, layer, x, cos, sin, pos, active)
    return x
