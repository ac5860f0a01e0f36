"""Reads and checks a Hugging Face config.json: Llama, Mistral, Yi and Qwen, with their RoPE types."""

from dataclasses import asdict
from reprlib import repr as shortened

from model import ModelConfig
from runtime.checkpoint import ROPE_TYPES, check_model

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


def from_hf(config: dict) -> ModelConfig:
    """From the content of config.json. Raises ValueError that names an unsupported setting."""
    names = config.get("architectures") or ["none"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {shortened(name)} is not supported; known: {', '.join(ARCHITECTURES)}")
    defaults, fixed = ARCHITECTURES[name]
    get = {**defaults, **config, **fixed}.get

    def size(key: str, default: int | None = None) -> int:
        value = get(key) if get(key) is not None else default
        if type(value) is not int or not 0 < value < 2**31:
            raise ValueError(f"config.json: {key} must be a positive integer below 2**31, not {shortened(value)}")
        return value

    if get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {shortened(get('hidden_act'))} is not supported; known: silu")
    if get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window (a window in some layers only) is not supported")
    window = size("sliding_window") if get("windowed") and get("sliding_window") is not None else None
    kinds, expected = get("layer_types"), "full_attention" if window is None else "sliding_attention"
    if kinds is not None and (not isinstance(kinds, list) or any(kind != expected for kind in kinds)):
        given = ", ".join(sorted(set(map(str, kinds)))) if isinstance(kinds, list) else repr(kinds)
        raise ValueError(
            f"config.json: layer_types ({given[:100]}) is not supported; with sliding_window {window} every "
            f"layer must be {expected}"
        )
    dim, n_head = size("hidden_size"), size("num_attention_heads")
    if get("head_dim") is None and dim % n_head:
        raise ValueError(f"config.json: hidden_size {dim} does not divide into {n_head} heads")
    rope = _rope(config, size("max_position_embeddings", 2048))
    bias = bool(get("attention_bias"))
    model = ModelConfig(
        dim=dim,
        n_layer=size("num_hidden_layers"),
        n_head=n_head,
        n_kv_head=size("num_key_value_heads", n_head),
        head_dim=size("head_dim", dim // n_head),
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
    try:
        check_model(asdict(model))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    return model


def _positive(key: str, value: object) -> float:
    """As a float, within bounds that keep every formula of RoPE finite."""
    if type(value) not in (int, float) or not 1e-15 < value < 1e15:
        raise ValueError(f"config.json: {key} must be a positive number from 1e-15 to 1e15, not {shortened(value)}")
    return float(value)


def _rope(config: dict, max_position: int) -> dict:
    """The RoPE settings as one dict, from rope_theta + rope_scaling or from the newer rope_parameters."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"config.json: RoPE scaling must be an object, not {shortened(given)}")
    given = {key: value for key, value in given.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"config.json: RoPE type {shortened(kind)} is not supported; known: {', '.join(ROPE_TYPES)}")
    if any((where.get("partial_rotary_factor") or 1.0) != 1.0 for where in (config, given)):
        raise ValueError("config.json: partial_rotary_factor is not supported; every channel must rotate")
    given = {"rope_theta": config.get("rope_theta") or 10000.0, **given}
    original = given.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    given["original_max_position_embeddings"] = original
    needs = ["rope_theta"] if kind == "default" else ["rope_theta", "factor"]
    if kind == "llama3":
        needs += ["original_max_position_embeddings", "low_freq_factor", "high_freq_factor"]
    if kind == "yarn":
        optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        needs += [key for key in (*optional, "original_max_position_embeddings") if given.get(key) is not None]
    rope = {"rope_type": kind, "max_position_embeddings": max_position}
    rope |= {key: _positive(f"RoPE type {kind!r}: {key}", given.get(key)) for key in needs}
    if kind == "yarn" and not given.get("truncate", True):
        rope["truncate"] = False
    if rope["rope_theta"] <= 1 or (kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]):
        raise ValueError("config.json: rope_theta must exceed 1, and high_freq_factor must exceed low_freq_factor")
    return rope


def _max_length(rope: dict) -> int:
    limit = rope["max_position_embeddings"]
    if rope["rope_type"] in ("linear", "dynamic", "yarn"):
        limit = max(limit, int(rope.get("original_max_position_embeddings", limit) * rope["factor"]))
    return limit
