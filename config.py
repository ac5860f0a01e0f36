"""A model's sizes and switches, read from its config.json: Llama, Mistral, Yi and Qwen, with their RoPE types."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# For each architecture: defaults for what config.json leaves out, and values that override config.json.
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
    max_length: int  # context in tokens: max_position_embeddings, or original x factor where RoPE scaling extends it
    rope: dict  # rope_type, rope_theta, max_position_embeddings and the type's own parameters
    window: int | None = None  # sliding window: tokens a query sees, including its own
    tied: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def from_dict(cls, config: dict) -> "ModelConfig":
        """From the content of a Hugging Face config.json. Raises ValueError that names an unsupported setting."""
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
    """Raises ValueError unless all layers use the sliding window or, if it is None, all use full attention."""
    expected = "full_attention" if window is None else "sliding_attention"
    if kinds is not None and (not isinstance(kinds, list) or any(kind != expected for kind in kinds)):
        found = ", ".join(sorted(set(map(str, kinds)))) if isinstance(kinds, list) else repr(kinds)
        raise ValueError(
            f"config.json: layer_types ({found}) is not supported; with sliding_window {window} every "
            f"layer must be {expected}"
        )


def _positive(key: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def _rope_parameters(config: dict, max_position: int) -> dict:
    """The RoPE settings as one dict, from rope_theta + rope_scaling or from the newer rope_parameters."""
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
    if kind == "llama3" or (kind == "yarn" and original is not None):  # others use max_position_embeddings
        rope["original_max_position_embeddings"] = original
        needs.append("original_max_position_embeddings")
    needs += ["low_freq_factor", "high_freq_factor"] if kind == "llama3" else []
    if kind == "yarn":
        optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        needs += [key for key in optional if key in rope]
    rope |= {key: _positive(f"RoPE type {kind!r}: {key}", rope.get(key)) for key in needs}
    if rope["rope_theta"] <= 1 or (kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]):
        raise ValueError("config.json: rope_theta must exceed 1, and high_freq_factor must exceed low_freq_factor")
    return {**rope, "rope_type": kind}


def _max_length(rope: dict) -> int:
    limit = rope["max_position_embeddings"]
    if rope["rope_type"] in ("linear", "dynamic", "yarn"):
        original = rope.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * rope["factor"]))
    return limit


def rope_frequencies(rope: dict, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Rotation speeds [D/2] in radians per position (fp32), and the factor on cos and sin (1 except for yarn).

    default: RoFormer, arXiv 2104.09864. linear: arXiv 2306.15595. dynamic: NTK-aware, with a base for `length` tokens.
    llama3: Llama 3.1's smoothed split at two wavelengths. yarn: arXiv 2309.00071, sections 3.2 to 3.4.
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

    def channel(turns: float) -> float:  # the (fractional) channel that makes this many turns within the context
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
