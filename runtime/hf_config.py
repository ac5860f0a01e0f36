"""Reads and checks a Hugging Face config.json: Llama, Mistral, Yi and Qwen, with their RoPE types."""

from dataclasses import asdict
from functools import partial
from reprlib import repr as shortened

from model import ModelConfig
from runtime.checkpoint import ROPE_TYPES, check_model

# For each architecture: defaults for what config.json leaves out, values that override config.json, and what
# transformers reads instead of keys about windows that it ignores there: config.json must not say otherwise.
QWEN = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32, "max_position_embeddings": 32768}
ARCHITECTURES = {
    "LlamaForCausalLM": ({"max_window_layers": 0}, {}, {"use_sliding_window": False, "layer_types": None}),
    "MistralForCausalLM": (
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        {"attention_bias": False, "mlp_bias": False, "use_sliding_window": True, "max_window_layers": 0},
        {"layer_types": None},
    ),
    "Qwen2ForCausalLM": (QWEN, {"attention_bias": False, "mlp_bias": False, "qkv_bias": True}, {}),
    "Qwen3ForCausalLM": (QWEN | {"head_dim": 128}, {"mlp_bias": False, "qk_norm": True}, {}),
}
MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in ARCHITECTURES}  # model_type -> architecture
SLIDING, ORIGINAL = "sliding_attention", "original_max_position_embeddings"


def from_hf(config: dict) -> ModelConfig:
    """From the content of config.json. Raises ValueError that names an unsupported setting."""
    name = _architecture(config)
    defaults, fixed, without_effect = ARCHITECTURES[name]
    whole = {**defaults, **config, **fixed}
    get, size = whole.get, partial(_size, whole)
    for key in ("hidden_act", "hidden_activation"):
        if get(key) not in (None, "silu", "swish"):  # two names of one function
            raise ValueError(f"config.json: {key} {shortened(get(key))} is not supported; known: silu, swish")
    n_layer = size("num_hidden_layers")
    windows = _windows(whole, n_layer)
    if windows != _windows(whole | without_effect, n_layer):
        keys = " and ".join(without_effect)
        raise ValueError(f"config.json: {name} ignores {keys}, which ask for another window; correct or delete them")
    if len(windows) > 1:
        raise ValueError(
            f"config.json: use_sliding_window, max_window_layers and layer_types give only some of {n_layer} layers "
            f"the sliding_window {get('sliding_window')}, which is not supported"
        )
    (window,) = windows
    dim, n_head = size("hidden_size"), size("num_attention_heads")
    if get("head_dim") is None and dim % n_head:
        raise ValueError(f"config.json: hidden_size {dim} does not divide into {n_head} heads")
    rope = _rope(config, size("max_position_embeddings", 2048), "full_attention" if window is None else SLIDING)
    bias = bool(get("attention_bias"))
    model = ModelConfig(
        dim=dim,
        n_layer=n_layer,
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


def _architecture(config: dict) -> str:
    """The model's class, which transformers chooses by model_type alone."""
    kind = config.get("model_type")
    by_type = MODEL_TYPES.get(kind) if isinstance(kind, str) else None
    names = config.get("architectures") or by_type or "none"
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"architecture {shortened(name)} is not supported; known: {', '.join(ARCHITECTURES)}")
    if by_type not in (None, name):
        raise ValueError(f"config.json: architectures {name} and model_type {kind} are different models; correct one")
    return name


def _size(config: dict, key: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(key) if config.get(key) is not None else default
    if type(value) is not int or not least <= value < 2**31:
        kind = "a positive integer" if least else "0 or a positive integer"
        raise ValueError(f"config.json: {key} must be {kind} below 2**31, not {shortened(value)}")
    return value


def _windows(config: dict, n_layer: int) -> set[int | None]:
    """The sliding windows that layers have, None for full attention."""
    use = config.get("use_sliding_window") or False
    if not isinstance(use, bool):
        raise ValueError(f"config.json: use_sliding_window must be true or false, not {shortened(use)}")
    window = _size(config, "sliding_window") if use and config.get("sliding_window") is not None else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = n_layer if window is None else _size(config, "max_window_layers", least=0)
        return {None if layer < full else window for layer in (0, n_layer - 1)}  # the last layers slide
    known = {"full_attention": None} | ({} if window is None else {SLIDING: window})
    if not isinstance(kinds, list) or len(kinds) != n_layer or any(kind not in list(known) for kind in kinds):
        raise ValueError(
            f"config.json: layer_types {shortened(kinds)} is not supported; with sliding_window {window} it must say "
            f"{' or '.join(known)} for each of {n_layer} layers"
        )
    return {known[kind] for kind in kinds}


def _positive(key: str, value: object) -> float:
    """As a float, within bounds that keep every formula of RoPE finite."""
    if type(value) not in (int, float) or not 1e-15 < value < 1e15:
        raise ValueError(f"config.json: {key} must be a positive number from 1e-15 to 1e15, not {shortened(value)}")
    return float(value)


def _rope(config: dict, max_position: int, layers: str) -> dict:
    """The RoPE settings of `layers`, the kind of all layers: one dict from all places where config.json may say them.

    As in transformers, rope_scaling replaces rope_parameters, and either's values replace those at the top level, but
    the top level's original length comes first. Raises ValueError where another value would be lost.
    """
    objects = {key: _settings(config, key, layers) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    top = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    first = next(iter(objects), "")
    given = {"rope_theta": 10000.0, **top, **objects.get(first, {})}
    for place, values in {"its top level": top, **objects}.items():
        for key, value in values.items():
            kept = given.get(key)
            if kept is not value and kept != value:  # NaN is not equal to itself
                both = f"{place} says {key} {shortened(value)} and {first} {shortened(kept)}"
                raise ValueError(f"config.json: {both}; correct or delete one")
    if config.get(ORIGINAL) is not None:
        given[ORIGINAL] = config[ORIGINAL]
    kind = given.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"config.json: RoPE type {shortened(kind)} is not supported; known: {', '.join(ROPE_TYPES)}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported; every channel must rotate")
    needs = ["rope_theta"] if kind == "default" else ["rope_theta", "factor"]
    if kind in ("llama3", "yarn"):
        given.setdefault(ORIGINAL, max_position)
        needs += [ORIGINAL]
    if kind == "llama3":
        needs += ["low_freq_factor", "high_freq_factor"]
    if kind == "yarn":
        off = dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim"), 0) | {"attention_factor": None}
        needs += [key for key, value in off.items() if given.get(key, value) != value]
    rope = {"rope_type": kind, "max_position_embeddings": max_position}
    rope |= {key: _positive(f"RoPE type {kind!r}: {key}", given.get(key)) for key in needs}
    if kind == "yarn" and not given.get("truncate", True):
        rope["truncate"] = False
    if rope["rope_theta"] <= 1 or (kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]):
        raise ValueError("config.json: rope_theta must exceed 1, and high_freq_factor must exceed low_freq_factor")
    return rope


def _settings(config: dict, key: str, layers: str) -> dict:
    """The content of rope_scaling or rope_parameters for `layers`, without nulls and with one name for the type."""
    given = config[key]
    if not isinstance(given, dict):
        raise ValueError(f"config.json: {key} must be an object, not {shortened(given)}")
    by_kind = {kind: own for kind, own in given.items() if isinstance(own, dict) or kind.endswith("_attention")}
    if by_kind:
        if not isinstance(by_kind.get(layers), dict):
            raise ValueError(f"config.json: {key} is given by layer type, but not for {layers}, which all layers are")
        given = {name: value for name, value in given.items() if name not in by_kind} | by_kind[layers]
    given = {name: value for name, value in given.items() if value is not None or name == "truncate"}  # null: false
    old = given.pop("type", None)
    if old is not None and given.setdefault("rope_type", old) != old:
        kind = shortened(given["rope_type"])
        raise ValueError(f"config.json: {key} says type {shortened(old)} and rope_type {kind}; correct or delete one")
    return given


def _max_length(rope: dict) -> int:
    limit = rope["max_position_embeddings"]
    if rope["rope_type"] in ("linear", "dynamic", "yarn"):
        limit = max(limit, int(rope.get(ORIGINAL, limit) * rope["factor"]))
    return limit
