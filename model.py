"""The transformer: Llama, Mistral, Yi and Qwen, read from a checkpoint's config.json.

`Transformer.prefill` runs one prompt through the model layer by layer; `Transformer.forward` is the decode step,
one token for every row of the batch. Attention projects q, k and v and hands them to `self.kv`, the layer's KV
module (kv/base.py), which stores what it wants and returns the attention output. The model knows no method by name.

Letters in shapes: B rows, T prompt tokens, Hq query heads, Hk KV heads, D head dim, C model dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from device import WIDENED
from kv.ops import rotate

MANY = 8  # tokens for which a weight is worth widening, where that speeds its products up
SLICE = 4096  # prompt tokens that norms, projections and MLPs see at a time: bounds prefill's transients

# What an architecture takes for granted where config.json is silent, and what it has whatever config.json says.
ARCHITECTURES = {
    "LlamaForCausalLM": ({}, {}),
    "MistralForCausalLM": (
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        {"attention_bias": False, "mlp_bias": False, "windowed": True},
    ),
    "Qwen2ForCausalLM": (
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
        {"attention_bias": False, "mlp_bias": False, "qkv_bias": True},
    ),
    "Qwen3ForCausalLM": (
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
        {"mlp_bias": False, "qk_norm": True},
    ),
}
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one model, as its config.json states them."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float
    max_length: int  # longest prompt: max_position_embeddings, times the factor where RoPE scaling extends it
    rope: dict  # rope_type, rope_theta, max_position_embeddings and the type's own parameters
    window: int | None = None  # sliding window: tokens a query sees, itself included
    tied: bool = False  # the head is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """From what Hugging Face's config.json holds. Raises ValueError naming whatever this engine does not know."""
        names = config.get("architectures") or ["none"]
        name = str(names[0] if isinstance(names, list) else names)
        if name not in ARCHITECTURES:
            raise ValueError(f"architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}")
        defaults, fixed = ARCHITECTURES[name]
        get = {**defaults, **config, **fixed}.get

        def size(key: str, default=None) -> int:
            value = get(key) if get(key) is not None else default
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config.json: {key} must be a positive integer, not {value!r}")
            counts = {"num_hidden_layers": 1000, "vocab_size": 2**31}
            lengths = {"max_position_embeddings": 2**31, "sliding_window": 2**31}
            if value > (most := (counts | lengths).get(key, 2**19)):
                raise ValueError(f"config.json: {key} must be at most {most}, not {value}")
            return value

        if get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act {get('hidden_act')!r} is not supported; known: silu")
        if get("use_sliding_window"):
            raise ValueError("config.json: use_sliding_window (a window in some layers only) is not supported")
        window = size("sliding_window") if get("windowed") and get("sliding_window") is not None else None
        _check_layer_types(get("layer_types"), window)
        dim, n_head = size("hidden_size"), size("num_attention_heads")
        n_kv_head = size("num_key_value_heads", n_head)
        if n_head % n_kv_head:
            raise ValueError(f"config.json: {n_head} attention heads do not divide into {n_kv_head} KV heads")
        if get("head_dim") is None and dim % n_head:
            raise ValueError(f"config.json: hidden_size {dim} does not divide into {n_head} heads")
        head_dim = size("head_dim", dim // n_head)
        if head_dim % 2 or head_dim < 4:
            raise ValueError(f"config.json: head_dim must be even and at least 4, not {head_dim}")
        rope = _rope_parameters(config, size("max_position_embeddings", 2048))
        bias = bool(get("attention_bias"))
        return cls(
            dim=dim,
            n_layer=size("num_hidden_layers"),
            n_head=n_head,
            n_kv_head=n_kv_head,
            head_dim=head_dim,
            ffn_dim=size("intermediate_size"),
            vocab_size=size("vocab_size"),
            norm_eps=_positive("rms_norm_eps", get("rms_norm_eps", 1e-6)),
            max_length=_max_length(rope),
            rope=rope,
            window=window,
            tied=bool(get("tie_word_embeddings")),
            qkv_bias=bool(get("qkv_bias")) or bias,
            o_bias=bias,
            mlp_bias=bool(get("mlp_bias")),
            qk_norm=bool(get("qk_norm")),
        )


def _check_layer_types(kinds: object, window: int | None) -> None:
    """Raises ValueError unless every layer has the window, or none where there is none."""
    expected = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and (not isinstance(kinds, list) or any(kind != expected for kind in kinds)):
        found = ", ".join(sorted(set(map(str, kinds)))) if isinstance(kinds, list) else repr(kinds)
        raise ValueError(f"config.json: layer_types ({found}) is not supported; with sliding_window {window} every "
                         f"layer must be {expected}")


def _positive(key: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _rope_parameters(config: dict, max_position: int) -> dict:
    """One dict from either spelling: rope_theta + rope_scaling, or the newer rope_parameters."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"config.json: RoPE scaling must be an object, not {given!r}")
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"config.json: RoPE type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    rope.pop("type", None)
    if any((where.get("partial_rotary_factor") or 1.0) != 1.0 for where in (config, rope)):
        raise ValueError("config.json: partial_rotary_factor is not supported; every channel must rotate")
    rope = {"rope_theta": config.get("rope_theta") or 10000.0, **rope, "max_position_embeddings": max_position}
    needs = ["rope_theta"] if kind == "default" else ["rope_theta", "factor"]
    original = rope.pop("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if kind == "llama3" or (kind == "yarn" and original is not None):  # linear and dynamic go by the other one
        rope["original_max_position_embeddings"] = original
        needs.append("original_max_position_embeddings")
    needs += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
    if kind == "yarn":
        optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        needs += [key for key in optional if key in rope]
    rope |= {key: _positive(f"RoPE type {kind!r}: {key}", rope.get(key)) for key in needs}
    if rope["rope_theta"] <= 1 or (kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]):
        raise ValueError("config.json: rope_theta must exceed 1, and high_freq_factor low_freq_factor")
    return {**rope, "rope_type": kind}


def _max_length(rope: dict) -> int:
    limit = rope["max_position_embeddings"]
    if rope["rope_type"] in ("linear", "dynamic", "yarn"):
        original = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * rope["factor"]))
    return limit


def rope_frequencies(rope: dict, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Rotation speeds [D/2] in radians per position (fp32), and the factor on cos and sin (1 but for yarn).

    Default: RoFormer, arXiv 2104.09864. linear: arXiv 2306.15595. dynamic: NTK-aware, its base from the `length` of
    the text. llama3: Llama 3.1's smoothed split at two wavelengths. yarn: arXiv 2309.00071, sections 3.2 to 3.4.
    """
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor", 1.0)
    limit = rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]
    if kind == "dynamic" and length > limit:
        theta *= (factor * length / limit - (factor - 1)) ** (head_dim / (head_dim - 2))
    speed = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if kind == "linear":
        return speed / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = limit * speed / (2 * math.pi)  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return speed * (keep + (1 - keep) / factor), 1.0
    if kind == "yarn":
        return _yarn(rope, head_dim, speed, limit)
    return speed, 1.0


def _yarn(rope: dict, head_dim: int, speed: Tensor, limit: int) -> tuple[Tensor, float]:
    factor = rope["factor"]

    def channel(turns: float) -> float:  # the (fractional) channel that turns this often within the context
        return head_dim * math.log(limit / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = channel(rope.get("beta_fast", 32)), channel(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 if first == last else 0
    interpolate = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = magnitude(1.0)
    if "mscale" in rope and "mscale_all_dim" in rope:
        attention = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return speed * (1 - interpolate + interpolate / factor), rope.get("attention_factor", attention)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight


# torch.mv streams a 16-bit weight faster than the matmul of one row does, but Inductor would take it apart.
_library = torch.library.Library("kv_fast", "DEF")
_library.define("mv(Tensor weight, Tensor x) -> Tensor")
_library.impl("mv", torch.mv, "CPU")
_library.impl("mv", lambda weight, x: x.new_empty(weight.shape[0]), "Meta")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; on a CPU the product that reads the weight fastest for one bf16 token, and for many tokens fp32 where
    the CPU knows no product of 16-bit numbers."""
    rows = x.numel() // x.shape[-1]
    if x.device.type == "cpu" and x.dtype == torch.bfloat16 and rows == 1:
        y = torch.ops.kv_fast.mv(weight, x.flatten()).view(*x.shape[:-1], -1)
        return y if bias is None else y + bias
    if x.device.type == "cpu" and x.dtype in WIDENED and rows >= MANY:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def first(self, x: Tensor, rows: int) -> Tensor:
        """The first `rows` output channels alone."""
        return linear(x, self.weight[:rows], None if self.bias is None else self.bias[:rows])


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: weights are loaded. (On a meta tensor normal_ makes torch import its compiler: half a second.)"""

    def logits(self, x: Tensor) -> Tensor:
        """The table as the head that is tied to it."""
        return linear(x, self.weight)


class Attention(nn.Module):
    """The projections; attention itself, and what is kept for it, is the KV module's."""

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
        """x [B,T,C] -> q [B,Hq,T,D], k and v [B,Hk,T,D]; RoPE on q and k. cos, sin: [B,1,T,D/2]."""
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.heads, dim=1)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The q of `project` alone: what a KV module that looks ahead asks of the next layer."""
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
    """One layer: attention and feed-forward, each on a normed copy of x and added to it."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention = Attention(c)
        self.feed_forward = FeedForward(c)
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, row: int) -> None:
        """Runs a whole prompt, updating x [1,T,C] in place; only q, k, v and y ever span all of T."""
        a, slices = self.attention, range(0, x.shape[1], SLICE)
        (q, k, v) = (x.new_empty(1, heads, x.shape[1], a.head_dim) for heads in a.heads)
        for s in slices:
            t = slice(s, s + SLICE)
            q[:, :, t], k[:, :, t], v[:, :, t] = a.project(
                self.attention_norm(x[:, t]), cos[:, :, t], sin[:, :, t]
            )
        y = a.kv.prefill(row, q, k, v)
        for s in slices:
            t = slice(s, s + SLICE)
            x[:, t] += a.output(y[:, :, t])
            x[:, t] += self.feed_forward(self.ffn_norm(x[:, t]))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor, active: Tensor, after: "Block | None"):
        """One token a row: x [B,1,C]. `after` is the next block, whose KV module may want to see its query early."""
        a, h = self.attention, self.attention_norm(x)
        if after is not None and after.attention.kv.wants_lookahead:
            h = after.attention.kv.lookahead(after.attention.query(h, cos, sin), h, active)
        q, k, v = a.project(h, cos, sin)
        x = x + a.output(a.kv.decode(q, k, v, pos, active))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A whole prompt of one row (`prefill`), or one token of every row (`forward`); KV modules are set before."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = None if config.tied else Linear(config.dim, config.vocab_size, bias=False)

    def set_kv(self, modules: list[nn.Module], batch: int) -> None:
        """Gives every layer its KV module, and every row its RoPE speeds (dynamic NTK: they follow its length)."""
        for layer, kv in zip(self.layers, modules, strict=True):
            layer.attention.kv = kv
        for function in (torch.cos, torch.sin, torch.exp):  # MKL's first call, made by many threads, may be coarse
            function(torch.ones(1))
        speed, self.rope_factor = rope_frequencies(self.config.rope, self.config.head_dim, 1)
        speed = speed.to(self.tok_embeddings.weight.device)
        self.register_buffer("rope_speed", speed.repeat(batch, 1), persistent=False)  # [B, D/2]

    def cos_sin(self, pos: Tensor, speed: Tensor) -> tuple[Tensor, Tensor]:
        """pos [B,T], speed [B,D/2] -> cos and sin, [B,1,T,D/2] fp32"""
        angle = pos[:, None, :, None].float() * speed[:, None, None, :]
        return angle.cos() * self.rope_factor, angle.sin() * self.rope_factor

    def logits(self, x: Tensor) -> Tensor:
        """x [B,1,C], the last position only -> [B, vocab] fp32"""
        x = self.norm(x[:, -1])
        return (self.tok_embeddings.logits(x) if self.output is None else self.output(x)).float()

    @torch.no_grad()
    def prefill(
        self, tokens: Tensor, row: int, planned: int | None = None, on_layer: Callable[[], None] | None = None
    ) -> Tensor:
        """tokens [T] of one prompt -> logits [vocab] after its last token; row `row` of every layer is filled.

        planned: tokens that the row will hold at most, T by default: dynamic NTK takes the row's base from it, for a
        base that fits the prompt alone fails past the limit, and keys cannot change theirs. on_layer: called after
        each layer.
        """
        length = max(tokens.numel(), min(planned or 0, self.config.max_length))
        speed, _ = rope_frequencies(self.config.rope, self.config.head_dim, length)
        self.rope_speed[row] = speed.to(self.rope_speed.device)
        for layer in self.layers:
            layer.attention.kv.set_speed(row, self.rope_speed[row])
        cos, sin = self.cos_sin(torch.arange(tokens.numel(), device=tokens.device)[None], self.rope_speed[row, None])
        x = self.tok_embeddings(tokens[None])
        for layer in self.layers:
            layer.prefill(x, cos, sin, row)
            if on_layer is not None:
                on_layer()
        for layer in self.layers:
            layer.attention.kv.finish(row)
        return self.logits(x[:, -1:])[0]

    @torch.no_grad()
    def forward(self, tokens: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """The decode step: tokens [B,1] at positions pos [B] -> logits [B, vocab]; inactive rows change nothing."""
        cos, sin = self.cos_sin(pos[:, None], self.rope_speed)
        x = self.tok_embeddings(tokens)
        for layer, after in zip(self.layers, [*self.layers[1:], None], strict=True):
            x = layer(x, cos, sin, pos, active, after)
        return self.logits(x)
