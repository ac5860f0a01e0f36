"""Checkpoints as other families release them: multimodal ones, weights in fp8, fused matrices, multipliers."""

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import (
    CWM,
    GRANITE,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    PHI3,
    SEED,
    SMOLLM3,
    TOLERANCE,
    gap,
    hf_logits,
    hf_model,
    text,
)
from transformers import AutoConfig

from convert_hf_checkpoint import convert
from engine import Engine
from runtime.checkpoint import check_model
from runtime.hf_config import from_hf

VISION = {"model_type": "pixtral", "hidden_size": 8}


def save(folder, config: dict, tensors: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def of(config: dict) -> tuple:
    """transformers' model of a config.json, with its tensors."""
    model = hf_model(config)
    return model, {name: x.detach().clone() for name, x in model.state_dict().items()}


def same(folder, model, vocab: int) -> None:
    """Converts folder/hf, and compares the logits with those of transformers."""
    convert(folder / "hf", folder / "ours")
    prompt, continuation = text(60, vocab)
    found = Engine.load(folder / "ours", compile=False).logits(prompt, continuation)
    assert gap(found, hf_logits(model, prompt, continuation)) <= TOLERANCE


def multimodal(name: str, newer: bool) -> str:
    """A language model's tensor in the two releases of multimodal checkpoints."""
    if newer:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return f"language_model.{name}"


@pytest.mark.parametrize("newer", (False, True))
@pytest.mark.parametrize("kind", (MINISTRAL3, MISTRAL), ids=("ministral3", "mistral"))
def test_a_multimodal_checkpoint_gives_its_text_part(kind, newer, tmp_path, capsys):
    model, tensors = of(kind)
    inner = {key: value for key, value in kind.items() if key != "architectures"}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "eos_token_id": 7}
    vision = {f"{'model.' * newer}{part}.weight": torch.ones(8) for part in ("vision_tower.x", "multi_modal_projector")}
    parts = {multimodal(name, newer): x for name, x in tensors.items()} | vision
    save(tmp_path / "hf", outer | {"text_config": inner, "vision_config": VISION}, parts)
    convert(tmp_path / "hf", tmp_path / "ours")
    prefix = "model." * newer
    assert (
        f"left out: 2 tensors of other models, such as {prefix}multi_modal_projector.weight" in capsys.readouterr().err
    )
    prompt, continuation = text(60, kind["vocab_size"])
    engine = Engine.load(tmp_path / "ours", compile=False)
    assert gap(engine.logits(prompt, continuation), hf_logits(model, prompt, continuation)) <= TOLERANCE
    assert engine.eos == {7}


@pytest.mark.parametrize("outer", ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": None}), ids=str)
def test_a_multimodal_checkpoint_ties_its_head_by_the_outer_setting(outer, tmp_path):
    model, tensors = of(MISTRAL | {"tie_word_embeddings": True})
    parts = {multimodal(name, False): x for name, x in tensors.items() if name != "lm_head.weight"}
    config = {"model_type": "mistral3", "text_config": MISTRAL | {"tie_word_embeddings": False}}
    save(tmp_path / "hf", config | outer, parts)
    same(tmp_path, model, MISTRAL["vocab_size"])


@pytest.mark.parametrize("kind", ("gemma3", "seed_oss_", None, 3))
def test_another_text_model_is_refused(kind, tmp_path):
    save(tmp_path / "hf", {"model_type": "mistral3", "text_config": {"model_type": kind}}, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match=rf"text_config is a '?{kind}'?; known: llama, mistral"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    _, tensors = of(PHI3)
    name = "model.layers.0.self_attn.q_proj.weight"
    save(tmp_path / "hf", PHI3, tensors | {name: torch.ones(4)})
    with pytest.raises(ValueError, match=f"holds both .*qkv_proj.weight and {name}"):
        convert(tmp_path / "hf", tmp_path / "ours")
    _, tensors = of(MISTRAL)
    parts = {multimodal(name, False): x for name, x in tensors.items()} | {"lm_head.weight": torch.ones(4)}
    save(tmp_path / "hf", {"model_type": "mistral3", "text_config": MISTRAL}, parts)
    with pytest.raises(ValueError, match="holds a tensor of the language model twice"):
        convert(tmp_path / "hf", tmp_path / "ours")


BLOCKS = ("16", 16, [16], [16, 16, 16], [16.0, 16.0], [0, 16], [None, None], {"a": 1}, [True, 16])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_of_scales_are_two_sizes(block, tmp_path):
    config = LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    save(tmp_path / "hf", config, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match="weight_block_size must be two positive integers"):
        convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize("block", ([16, 32], None), ids=("blocks", "tensors"))
def test_weights_in_fp8_are_multiplied_by_their_scales(block, tmp_path):
    model, tensors = of(LLAMA)
    stored, exact = {}, {}
    for name, x in tensors.items():
        if "proj" not in name:
            stored[name] = exact[name] = x
            continue
        rows, columns = block or x.shape
        parts = x.unfold(0, rows, rows).unfold(1, columns, columns)  # [R,C,rows,columns]
        scale = parts.abs().amax((2, 3)) / 448
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        stored[name] = (x / wide).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale if block else scale[0, 0]
        stored[name.replace("weight", "activation_scale")] = torch.tensor(1.0)
        exact[name] = stored[name].float() * wide
    config = LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    save(tmp_path / "hf", config, stored)
    convert(tmp_path / "hf", tmp_path / "ours", dtype="float32")
    model.load_state_dict(exact)
    prompt, continuation = text(60, LLAMA["vocab_size"])
    engine = Engine.load(tmp_path / "ours", compile=False)
    assert gap(engine.logits(prompt, continuation), hf_logits(model, prompt, continuation)) <= TOLERANCE
    assert "quantization_config" not in json.loads((tmp_path / "ours/config.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    for scale in (None, torch.ones(3, 3)):
        damaged = {key: x for key, x in stored.items() if key != f"{name}_scale_inv"}
        damaged |= {} if scale is None else {f"{name}_scale_inv": scale}
        save(tmp_path / "damaged", config, damaged)
        with pytest.raises(ValueError, match=f"{name} is in fp8 and its scales have shape"):
            convert(tmp_path / "damaged", tmp_path / "no")
    for other in ({"quant_method": "fp8", "fmt": "e5m2"}, {"quant_method": "compressed-tensors"}, "fp8", ["fp8"]):
        (tmp_path / "damaged/config.json").write_text(json.dumps(config | {"quantization_config": other}))
        with pytest.raises(ValueError, match="is quantized .*; convert the unquantized model"):
            convert(tmp_path / "damaged", tmp_path / "no")


def test_fused_matrices_of_other_sizes_are_refused(tmp_path):
    _, tensors = of(PHI3)
    for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
        name = f"model.layers.1.{name}.weight"
        save(tmp_path / "hf", PHI3, tensors | {name: tensors[name][:-1]})
        with pytest.raises(ValueError, match=rf"tensor {name} has shape .*, but config.json needs \d+ rows"):
            convert(tmp_path / "hf", tmp_path / "ours")
    for more in ({"partial_rotary_factor": 0.5}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}):
        save(tmp_path / "hf", PHI3 | more, tensors)
        with pytest.raises(ValueError, match="partial_rotary_factor|RoPE type 'yarn' is not supported; known: default"):
            convert(tmp_path / "hf", tmp_path / "ours")


@pytest.mark.parametrize("names", (None, [], "GraniteForCausalLM", ["GraniteForCausalLM", "X"]), ids=str)
def test_multipliers_are_an_architectures_however_it_is_named(names, tmp_path):
    model, tensors = of(GRANITE)
    save(tmp_path / "hf", GRANITE | {"architectures": names}, tensors)
    same(tmp_path, model, GRANITE["vocab_size"])


@pytest.mark.parametrize("value", (0, -1, "2", None))
def test_multipliers_must_be_positive_numbers(value, tmp_path):
    _, tensors = of(GRANITE)
    save(tmp_path / "hf", GRANITE | {"residual_multiplier": value}, tensors)
    with pytest.raises(ValueError, match="residual_multiplier must be a positive number"):
        convert(tmp_path / "hf", tmp_path / "ours")


def test_a_granite_in_bfloat16_keeps_its_rounding(tmp_path):
    """Each weight is multiplied in fp32 and rounded once."""
    _, tensors = of(GRANITE)
    save(tmp_path / "hf", GRANITE, {name: x.bfloat16() for name, x in tensors.items()})
    convert(tmp_path / "hf", tmp_path / "ours")
    ours = load_file(tmp_path / "ours/model.safetensors")["layers.0.attention.wo.weight"]
    exact = tensors["model.layers.0.self_attn.o_proj.weight"].bfloat16().float() * GRANITE["residual_multiplier"]
    assert ours.dtype == torch.bfloat16 and torch.equal(ours, exact.bfloat16())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must say 1 .* for each of 5 layers"),
        ({"no_rope_layers": "x"}, "no_rope_layers must say 1"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive integer"),
        ({"layer_types": ["full_attention", "chunked_attention"] * 3}, "layer_types .* is not supported"),
    ],
)
def test_settings_of_layers_are_checked(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_hf(SMOLLM3 | change)


DEVSTRAL2 = {  # what is particular to a release; sizes are reduced
    **{"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "sliding_window": None},
    **{
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    **{"num_hidden_layers": 2, "vocab_size": 160, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
    "rope_parameters": {
        **{"rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 64.0, "beta_fast": 4.0},
        **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0},
        "original_max_position_embeddings": 4096,
    },
}
GRANITE33 = LLAMA | {
    **{"architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.0078125},
    **{"embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22, "rope_scaling": None},
    **{"rope_theta": 10000000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
}
SMOLLM3B = SMOLLM3 | {
    **{"rope_theta": 5000000.0, "rope_scaling": None, "max_window_layers": 28, "pretraining_tp": 2},
    **{"use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4},
    **{"no_rope_layers": [1, 1, 1, 0, 1], "layer_types": ["full_attention"] * 5},
}


@pytest.mark.parametrize("config", (DEVSTRAL2, GRANITE33, SMOLLM3B), ids=("devstral-2", "granite-3.3", "smollm3-3b"))
def test_released_configurations_give_the_logits_of_transformers(config, tmp_path):
    model, tensors = of(config)
    tied = config.get("tie_word_embeddings")
    save(tmp_path / "hf", config, {name: x for name, x in tensors.items() if not (tied and name == "lm_head.weight")})
    convert(tmp_path / "hf", tmp_path / "ours")
    prompt, continuation = text(60, config["vocab_size"])
    expected = hf_logits(model, prompt, continuation)
    engine = Engine.load(tmp_path / "ours", compile=False)
    assert gap(engine.logits(prompt, continuation), expected) <= TOLERANCE * max(1, expected.std().item())


@pytest.mark.parametrize(
    "config", (LLAMA, MISTRAL | {"sliding_window": 16}, SMOLLM3), ids=("llama", "mistral", "smollm3")
)
def test_config_json_sets_none_of_the_tables_own_names(config):
    junk = {"query_beta": [1], "rope_types": 5, "full_every": 2, "no_rope": True, "default_rope": {"rope_type": "yarn"}}
    assert from_hf(config | junk | {"qkv_bias": True, "qk_norm": True}) == from_hf(config)
    assert from_hf(LLAMA | {"no_rope_layer_interval": 2, "no_rope_layers": [0, 0, 0]}) == from_hf(LLAMA)


@pytest.mark.parametrize("rope", ({}, {"rope_parameters": None}, {"rope_scaling": None, "rope_theta": 5e5}), ids=str)
def test_a_family_has_its_own_rope_if_config_json_has_none(rope):
    for base, kind in ((CWM, "llama3"), (MINISTRAL3, "yarn")):
        config = {key: x for key, x in base.items() if not key.startswith("rope_")} | rope
        theirs = AutoConfig.for_model(**config).rope_parameters
        ours = from_hf(config).rope
        assert ours["rope_type"] == theirs["rope_type"] == kind and ours["rope_theta"] == theirs["rope_theta"] == 1e6
        assert ours.get("query_beta") == theirs.get("llama_4_scaling_beta")


@pytest.mark.parametrize("config", (LLAMA, GRANITE, SEED), ids=("llama", "granite", "seed-oss"))
def test_a_window_that_the_family_ignores_is_refused(config):
    with pytest.raises(ValueError, match="ForCausalLM ignores use_sliding_window and layer_types"):
        from_hf(config | {"use_sliding_window": True, "sliding_window": 16})


@pytest.mark.parametrize("length", (16.5, 0.5, 0))
def test_queries_grow_at_multiples_of_a_whole_length(length):
    rope = MINISTRAL3["rope_parameters"] | {"original_max_position_embeddings": length}
    with pytest.raises(ValueError, match="original_max_position_embeddings|RoPE has no finite"):
        from_hf(MINISTRAL3 | {"rope_parameters": rope})


@pytest.mark.parametrize("damage", ({"query_beta": x} for x in (0, -1.0, float("nan"), "1", [1])), ids=str)
def test_a_damaged_temperature_is_refused(damage):
    good = asdict(from_hf(MINISTRAL3))
    check_model(good)
    rope = {key: x for key, x in good["rope"].items() if key != "original_max_position_embeddings"}
    for changed in (good["rope"] | damage, rope, good["rope"] | {"original_max_position_embeddings": 0.5}):
        with pytest.raises(ValueError, match="RoPE has no finite frequencies"):
            check_model(good | {"rope": changed})
