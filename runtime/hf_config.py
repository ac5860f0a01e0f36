"""Reads and checks a Hugging Face config.json: Llama and the families that differ little, with their RoPE types."""

from dataclasses import asdict
from functools import partial
from reprlib import repr as shortened

from model import ModelConfig
from runtime.checkpoint import ROPE_TYPES, check_model

# For each architecture: defaults for what config.json leaves out, values that override config.json, and what
# transformers reads instead of keys about windows that it ignores there: config.json must not say otherwise.
# OWN are names that are not config.json's: `full_every`, without layer_types one in so many layers sees all tokens;
# `default_rope`, RoPE's settings if there are none; `query_beta`, the key of those by which queries grow; `rope_types`,
# those supported; `no_rope`, some layers may have no RoPE; `qkv_bias` and `qk_norm`.
OWN = {"full_every", "default_rope", "query_beta", "rope_types", "no_rope", "qkv_bias", "qk_norm"}
NO_WINDOW = {"use_sliding_window": False, "layer_types": None}
WINDOW = {"use_sliding_window": True, "max_window_layers": 0}  # the one of sliding_window, if there is any
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
QWEN = {"sliding_window": 4096, "max_window_layers": 28, "num_key_value_heads": 32, "max_position_embeddings": 32768}
ARCHITECTURES = {
    "LlamaForCausalLM": ({"max_window_layers": 0}, {}, NO_WINDOW),
    "MistralForCausalLM": (MISTRAL, NO_BIAS | WINDOW, {"layer_types": None}),
    "MinistralForCausalLM": (MISTRAL, NO_BIAS | WINDOW, {}),
    "Ministral3ForCausalLM": (
        {
            **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
            "default_rope": YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 16384},
        },
        NO_BIAS | WINDOW | {"query_beta": "llama_4_scaling_beta"},
        {"layer_types": None},
    ),
    "Qwen2ForCausalLM": (QWEN, NO_BIAS | {"qkv_bias": True}, {}),
    "Qwen3ForCausalLM": (QWEN | {"head_dim": 128}, {"mlp_bias": False, "qk_norm": True}, {}),
    "SmolLM3ForCausalLM": (
        {
            **{"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6},
            **{"tie_word_embeddings": True, "no_rope_layer_interval": 4},
        },
        {"no_rope": True},
        {},
    ),
    "CwmForCausalLM": (
        {
            **{"sliding_window": 8192, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
            **{"max_position_embeddings": 131072, "rope_theta": 1e6},
            "default_rope": LLAMA3 | {"rope_theta": 1e6, "original_max_position_embeddings": 8192},
        },
        WINDOW | {"attention_bias": False, "full_every": 4},
        {},
    ),
    "SeedOssForCausalLM": (
        {
            **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True},
            "max_window_layers": 0,
        },
        {},
        NO_WINDOW,
    ),
    "GraniteForCausalLM": ({"max_window_layers": 0}, {}, NO_WINDOW),
    "Phi3ForCausalLM": (
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        NO_BIAS | WINDOW | {"rope_types": ["default"]},  # its yarn is LongRoPE
        {"layer_types": None},
    ),
}
TYPES = {"SeedOssForCausalLM": "seed_oss"}  # model_type, where it is not the name in small letters
MODEL_TYPES = {TYPES.get(name, name.removesuffix("ForCausalLM").lower()): name for name in ARCHITECTURES}
FULL, SLIDING, ORIGINAL = "full_attention", "sliding_attention", "original_max_position_embeddings"


def from_hf(config: dict) -> ModelConfig:
    """From the content of config.json. Raises ValueError that names an unsupported setting."""
    name = architecture(config)
    defaults, fixed, without_effect = ARCHITECTURES[name]
    config = {key: value for key, value in config.items() if key not in OWN}
    whole = {**defaults, **config, **fixed}
    get, size = whole.get, partial(_size, whole)
    for key in ("hidden_act", "hidden_activation"):
        if get(key) not in (None, "silu", "swish"):  # two names of one function
            raise ValueError(f"config.json: {key} {shortened(get(key))} is not supported; known: silu, swish")
    n_layer = size("num_hidden_layers")
    unrotated = _unrotated(whole, n_layer)
    windows = _windows(whole, n_layer, unrotated)
    if windows != _windows(whole | without_effect, n_layer, unrotated):
        keys = " and ".join(without_effect)
        raise ValueError(f"config.json: {name} ignores {keys}, which ask for another window; correct or delete them")
    window = next(filter(None, windows), None)
    dim, n_head = size("hidden_size"), size("num_attention_heads")
    if get("head_dim") is None and dim % n_head:
        raise ValueError(f"config.json: hidden_size {dim} does not divide into {n_head} heads")
    rotated = {SLIDING if window else FULL for i, window in enumerate(windows) if i not in unrotated}
    rope = _rope(whole, config, size("max_position_embeddings", 2048), sorted(rotated or {FULL}))
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
        o_bias=bool(get("attention_out_bias")) if name == "SeedOssForCausalLM" else bias,
        mlp_bias=bool(get("mlp_bias")),
        qk_norm=bool(get("qk_norm")),
        full_layers=[i for i, own in enumerate(windows) if own is None] if window else [],
        unrotated=unrotated,
    )
    try:
        check_model(asdict(model))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    return model


def architecture(config: dict) -> str:
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


def _unrotated(config: dict, n_layer: int) -> list[int]:
    """The numbers of the layers without RoPE, where the architecture has any."""
    if "no_rope" not in config:
        return []
    interval, given = _size(config, "no_rope_layer_interval"), config.get("no_rope_layers")
    rotates = [(i + 1) % interval for i in range(n_layer)] if given is None else given  # 1: the layer has RoPE
    if not isinstance(rotates, list) or len(rotates) < n_layer or any(type(x) not in (int, bool) for x in rotates):
        raise ValueError(
            f"config.json: no_rope_layers must say 1 (RoPE) or 0 for each of {n_layer} layers, not {shortened(rotates)}"
        )
    return [i for i in range(n_layer) if not rotates[i]]


def _windows(config: dict, n_layer: int, unrotated: list[int]) -> list[int | None]:
    """The sliding window of each layer, None for full attention."""
    use = config.get("use_sliding_window") or False
    if not isinstance(use, bool):
        raise ValueError(f"config.json: use_sliding_window must be true or false, not {shortened(use)}")
    window = _size(config, "sliding_window") if use and config.get("sliding_window") is not None else None
    kinds = config.get("layer_types")
    if kinds is None and "no_rope" in config:
        return [window if layer in unrotated else None for layer in range(n_layer)]
    if kinds is None and window is not None and "full_every" in config:
        return [window if layer % config["full_every"] else None for layer in range(n_layer)]
    if kinds is None:
        full = n_layer if window is None else _size(config, "max_window_layers", least=0)
        return [None if layer < full else window for layer in range(n_layer)]  # the last layers slide
    known = {FULL: None} | ({} if window is None else {SLIDING: window})
    if not isinstance(kinds, list) or len(kinds) != n_layer or any(kind not in list(known) for kind in kinds):
        raise ValueError(
            f"config.json: layer_types {shortened(kinds)} is not supported; with sliding_window {window} it must say "
            f"{' or '.join(known)} for each of {n_layer} layers"
        )
    return [known[kind] for kind in kinds]


def _positive(key: str, value: object) -> float:
    """As a float, within bounds that keep every formula of RoPE finite."""
    if type(value) not in (int, float) or not 1e-15 < value < 1e15:
        raise ValueError(f"config.json: {key} must be a positive number from 1e-15 to 1e15, not {shortened(value)}")
    return float(value)


def _rope(whole: dict, config: dict, max_position: int, kinds: list[str]) -> dict:
    """The RoPE settings of layers of some kinds, which must be the same; `whole`: config.json with defaults."""
    if not (config.get("rope_scaling") or config.get("rope_parameters")) and "default_rope" in whole:
        config = config | {"rope_parameters": whole["default_rope"], "rope_theta": None}
    first, *others = [_rope_of(kind, whole, config, max_position) for kind in kinds]
    if any(other != first for other in others):
        raise ValueError(f"config.json: RoPE differs between {' and '.join(kinds)}, which is not supported")
    return first


def _rope_of(layers: str, whole: dict, config: dict, max_position: int) -> dict:
    """The RoPE settings of `layers`, a kind of layers: one dict from all places where config.json may say them.

    As in transformers, rope_scaling replaces rope_parameters, and either's values replace those at the top level, but
    the top level's original length comes first. Raises ValueError where another value would be lost.
    """
    objects = {key: _settings(config, key, layers) for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    top = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    first = next(iter(objects), "")
    given = {"rope_theta": whole.get("rope_theta") or 10000.0, **top, **objects.get(first, {})}
    for place, values in {"its top level": top, **objects}.items():
        for key, value in values.items():
            kept = given.get(key)
            if kept is not value and kept != value:  # NaN is not equal to itself
                both = f"{place} says {key} {shortened(value)} and {first} {shortened(kept)}"
                raise ValueError(f"config.json: {both}; correct or delete one")
    if config.get(ORIGINAL) is not None:
        given[ORIGINAL] = config[ORIGINAL]
    kind = given.get("rope_type", "default")
    if kind not in (known := whole.get("rope_types", ROPE_TYPES)):
        raise ValueError(f"config.json: RoPE type {shortened(kind)} is not supported; known: {', '.join(known)}")
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
    if (beta := given.get(whole.get("query_beta"))) not in (None, 0):
        rope["query_beta"] = _positive(f"RoPE: {whole['query_beta']}", beta)
        needs += [] if ORIGINAL in needs else [ORIGINAL]
        given.setdefault(ORIGINAL, max_position)
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
            raise ValueError(f"config.json: {key} is given by layer type, but not for {layers}")
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
