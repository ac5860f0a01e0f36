"""The transformer: Llama, Mistral, Yi and Qwen.

`Transformer.prefill` runs one prompt through the model layer by layer, `Transformer.extend` a text that continues a
row; `Transformer.forward` is the decode step, one token for every row of the batch. Attention projects q, k and v and
hands them to `self.kv`, the layer's KV module (kv/base.py), which stores what it needs and returns the attention
output. The model names no KV method.

Letters in shapes: B rows, T prompt tokens, Hq query heads, Hk KV heads, D head dim, C model dim.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import ModelConfig, rope_frequencies
from kv.parts.ops import following, rotate
from runtime.linear import Embedding, Linear

SLICE = 4096  # prompt tokens per call of norms, projections and MLPs: bounds prefill's temporary memory


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

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.heads = (c.n_head, c.n_kv_head, c.n_kv_head)
        self.head_dim = c.head_dim
        self.wqkv = Linear(c.dim, sum(self.heads) * c.head_dim, bias=c.qkv_bias)
        self.wo = Linear(c.n_head * c.head_dim, c.dim, bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.kv: nn.Module | None = None  # set by Transformer.set_kv

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B,T,C] -> q [B,Hq,T,D], k and v [B,Hk,T,D]; q and k get RoPE. cos, sin: [B,1,T,D/2]."""
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Only the q of `project`: the query that a KV module's `lookahead` receives."""
        q = self.wqkv.first(x, self.heads[0] * self.head_dim).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotate(self.q_norm(q), cos, sin)

    def output(self, y: Tensor) -> Tensor:
        """y [B,Hq,T,D] -> [B,T,C]"""
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.w1 = Linear(c.dim, c.ffn_dim, bias=c.mlp_bias)  # gate
        self.w3 = Linear(c.dim, c.ffn_dim, bias=c.mlp_bias)  # up
        self.w2 = Linear(c.ffn_dim, c.dim, bias=c.mlp_bias)  # down

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: attention, then feed-forward; each reads a normed copy of x and adds its output to x."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention = Attention(c)
        self.feed_forward = FeedForward(c)
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """Runs T tokens of one row and updates x [1,T,C] in place; besides x, only q, k, v and y span all of T."""
        a, slices = self.attention, range(0, x.shape[1], SLICE)
        (q, k, v) = (x.new_empty(1, heads, x.shape[1], a.head_dim) for heads in a.heads)
        for s in slices:
            t = slice(s, s + SLICE)
            q[:, :, t], k[:, :, t], v[:, :, t] = a.project(self.attention_norm(x[:, t]), cos[:, :, t], sin[:, :, t])
        y = attend(q, k, v)
        for s in slices:
            t = slice(s, s + SLICE)
            x[:, t] += a.output(y[:, :, t])
            x[:, t] += self.feed_forward(self.ffn_norm(x[:, t]))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, active: Tensor, after: "Block | None"):
        """n tokens per row, usually one: x [B,n,C], the first at pos [B] -> [B,n,C].

        `after`: the next block, if its KV module looks ahead.
        """
        a, h = self.attention, self.attention_norm(x)
        if after is not None:
            h = after.attention.kv.lookahead(after.attention.query(h, cos, sin), h, active)
        q, k, v = a.project(h, cos, sin)
        x = x + a.output(a.kv.decode(q, k, v, pos, active))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """The whole model: `prefill` and `extend` run tokens of one row, `forward` one of each. Call `set_kv` first."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tied else Linear(config.dim, config.vocab_size, bias=False)

    def rope_speeds(self, batch: int) -> Tensor:
        """Every row's RoPE speeds [B,D/2], which layers may share (dynamic NTK adapts them to a row's length)."""
        speed, self.rope_factor = rope_frequencies(self.config.rope, self.config.head_dim, 1)
        return speed.to(self.tok_embeddings.weight.device).repeat(batch, 1)

    def set_kv(self, modules: list[nn.Module], batch: int, rope_speed: Tensor | None = None) -> None:
        """Gives every layer its KV module, and rows the RoPE speeds that the modules share, or new ones."""
        for layer, kv in zip(self.layers, modules, strict=True):
            layer.attention.kv = kv
        for function in (torch.cos, torch.sin, torch.exp):  # MKL's first call, if multithreaded, can lose precision
            function(torch.ones(1))
        rope_speed = self.rope_speeds(batch) if rope_speed is None else rope_speed
        self.register_buffer("rope_speed", rope_speed, persistent=False)

    def cos_sin(self, pos: Tensor, speed: Tensor) -> tuple[Tensor, Tensor]:
        """pos [B,T], speed [B,D/2] -> cos and sin, [B,1,T,D/2] fp32"""
        angle = pos[:, None, :, None].float() * speed[:, None, None, :]
        return angle.cos() * self.rope_factor, angle.sin() * self.rope_factor

    def logits(self, x: Tensor) -> Tensor:
        """x [...,C] -> [...,vocab] fp32"""
        x = self.norm(x)
        return (self.tok_embeddings.logits(x) if self.output is None else self.output(x)).float()

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, row: int, planned: int | None = None, on_layer: Callable[[], None] | None = None
    ) -> Tensor:
        """tokens [T] of one prompt -> logits [vocab] after its last token; fills row `row` of every layer.

        planned: the most tokens the row will hold (default: T). Dynamic NTK computes the row's RoPE base from it: a
        base that fits only the prompt fails past max_position_embeddings, and stored keys cannot change their base.
        on_layer: called after each layer.
        """
        length = max(tokens.numel(), min(planned or 0, self.config.max_length))
        speed, _ = rope_frequencies(self.config.rope, self.config.head_dim, length)
        self.rope_speed[row] = speed.to(self.rope_speed.device)
        cos, sin = self.cos_sin(torch.arange(tokens.numel(), device=tokens.device)[None], self.rope_speed[row, None])
        x = self.tok_embeddings(tokens[None])
        for layer in self.layers:
            layer.prefill(x, cos, sin, partial(layer.attention.kv.prefill, row))
            if on_layer is not None:
                on_layer()
        for layer in self.layers:
            layer.attention.kv.finish(row)
        return self.logits(x[:, -1])[0]

    @torch.no_grad()
    def extend(self, tokens: Tensor, row: int, pos: int) -> Tensor:
        """tokens [n] that continue row `row` after its first `pos` -> logits [vocab] after the last of them."""
        at = torch.arange(pos, pos + tokens.numel(), device=tokens.device)[None]
        cos, sin = self.cos_sin(at, self.rope_speed[row, None])
        x = self.tok_embeddings(tokens[None])
        for layer in self.layers:
            layer.prefill(x, cos, sin, partial(layer.attention.kv.extend, row, pos=pos))
        return self.logits(x[:, -1])[0]

    @torch.no_grad()
    def forward(self, tokens: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """The decode step: tokens [B,1] at positions pos [B] -> logits [B, vocab]; inactive rows keep their state."""
        x, cos, sin = self.embed(tokens, pos)
        for layer, after in self.pairs():
            x = layer(x, cos, sin, pos, active, after)
        return self.logits(x[:, -1])

    def embed(self, tokens: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A step's tokens [B,n], the first at positions pos [B] -> x [B,n,C], and cos and sin [B,1,n,D/2]"""
        return self.tok_embeddings(tokens), *self.cos_sin(following(pos, tokens.shape[1]), self.rope_speed)

    def pairs(self) -> Iterator[tuple[Block, Block | None]]:
        """Each layer, and the one after it if that looks ahead."""
        following = [layer if layer.attention.kv.wants_lookahead else None for layer in self.layers[1:]]
        return zip(self.layers, [*following, None], strict=True)
