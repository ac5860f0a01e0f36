"""GGUF files of llama.cpp: what they convert to, and what is refused. The tests write the files."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, dequantize, get_tensor_name_map, quantize
from sentencepiece import SentencePieceProcessor
from test_convert import assert_same, expected, hf_model, refused, written
from test_model import GROWS as YARN16
from test_model import MINISTRAL3, MISTRAL, QWEN3, SMOLLM3
from test_model import hf_model as random_model
from test_tokenizer import CHATML_TEMPLATE, LLAMA3_SPLIT, NASTY, byte_level_folder, sentencepiece_folder, split_by
from tokenizers import normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from convert_hf_checkpoint import convert
from engine import Engine
from runtime.checkpoint import read_config
from text.tokenizer import load_tokenizer

Q8 = GGMLQuantizationType.Q8_0


def write_gguf(path: Path, model, quantized=False, tokenizer=None, architecture=None, metadata=()) -> Path:
    """A model as llama.cpp stores it: the rows of Llama's Q and K with the two halves of each head interleaved.

    metadata: more of the architecture's, without its prefix.
    """
    config = model.config
    writer = GGUFWriter(path, architecture or config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
    for name, value in dict(metadata).items():
        add = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
        getattr(writer, add[type(value)])(f"{writer.arch}.{name}", value)
    if tokenizer is not None:
        tokenizer(writer)
    arch = MODEL_ARCH.QWEN3 if config.model_type == "qwen3" else MODEL_ARCH.LLAMA
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if config.model_type in ("llama", "smollm3", "mistral", "ministral3") and (
            "q_proj" in name or "k_proj" in name
        ):
            halves = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])  # of each head
            values = halves.swapaxes(1, 2).reshape(values.shape)
        raw = Q8 if quantized and values.ndim == 2 else None
        stored = quantize(values, raw) if raw else values
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=raw)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def same_logits(folder: Path, model) -> None:
    ids = torch.arange(2, 40)
    ours = Engine.load(folder, compile=False).logits(ids.tolist(), [5])[0]
    theirs = model(ids[None]).logits[0, -1]
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("name", ["llama", "llama-mha-tied", "llama-biases", "llama-wide-heads", "qwen2"])
def test_a_float_file_converts_to_the_weights_it_was_made_of(tmp_path, name):
    model = hf_model(name)
    convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "out", dtype="float32")
    assert_same(written(tmp_path / "out"), expected(model))
    same_logits(tmp_path / "out", model)


GROWS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 16}
GROWS |= {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
PLAIN16 = {
    key: value for key, value in YARN16.items() if key not in ("mscale", "mscale_all_dim", "llama_4_scaling_beta")
}
MORE = {  # architecture, metadata and the config.json that it means
    "qwen3": ("qwen3", {}, QWEN3 | {"head_dim": 32}),
    "smollm3": ("smollm3", {}, SMOLLM3),
    "mistral3": ("mistral3", {}, MISTRAL),
    "mistral3, yarn": ("mistral3", GROWS, MISTRAL | {"max_position_embeddings": 256, "rope_parameters": PLAIN16}),
    "mistral3, temperature": (
        "mistral3",
        GROWS | {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
        MINISTRAL3,
    ),
}


@pytest.mark.parametrize("case", MORE)
def test_other_architectures_give_the_logits_of_transformers(tmp_path, case):
    architecture, metadata, config = MORE[case]
    model = random_model(config)
    if "rope.scaling.type" not in metadata:
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    file = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, metadata=metadata)
    convert(file, tmp_path / "out", dtype="float32")
    same_logits(tmp_path / "out", model)


def test_a_temperature_is_read_with_yarn_alone(tmp_path, capsys):
    model = random_model(MISTRAL)
    for architecture, metadata in (("mistral3", {}), ("llama", GROWS)):
        metadata = metadata | {"attention.temperature_scale": 0.1}
        file = write_gguf(tmp_path / "model.gguf", model, architecture=architecture, metadata=metadata)
        refused(
            capsys, [file, "--out", tmp_path / "out"], f"{architecture}.attention.temperature_scale", watch=tmp_path
        )


def test_a_quantized_file_is_dequantized_into_bfloat16(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.gguf.BLOCK", 64 * 7)  # tensors are read in blocks, the last of fewer rows
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, max_position_embeddings=64, **sizes))
    convert(write_gguf(tmp_path / "model.gguf", model, quantized=True), tmp_path / "out")
    rounded = {
        name: torch.from_numpy(dequantize(quantize(t.numpy(), Q8), Q8)) if t.dim() == 2 else t
        for name, t in model.state_dict().items()
    }
    model.load_state_dict(rounded)
    assert_same(written(tmp_path / "out"), expected(model.bfloat16()))


def slower_rope(writer: GGUFWriter, factors=(2,) * 4) -> None:
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaled_rope_of_llama_3_is_read_from_its_factors(tmp_path, factor):
    rope = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=500000.0)
    rope["original_max_position_embeddings"] = 8192
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=64, num_attention_heads=1, vocab_size=96)
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, max_position_embeddings=131072, rope_parameters=rope, **sizes)
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    add = partial(slower_rope, factors=(plain / scaled).numpy())
    convert(write_gguf(tmp_path / "model.gguf", model, tokenizer=add), tmp_path / "out")
    ours = read_config(tmp_path / "out")["kv_fast"]["model"]["rope"]
    assert ours == {key: pytest.approx(value) for key, value in (rope | {"max_position_embeddings": 131072}).items()}
    with pytest.raises(ValueError, match="not Llama 3.1's"):
        add = partial(slower_rope, factors=[2] * 32)
        convert(write_gguf(tmp_path / "model.gguf", model, tokenizer=add), tmp_path / "other")


LINEAR, YARN = dict(rope_type="linear", factor=4.0), dict(rope_type="yarn", factor=4.0)
SCALED = {  # metadata, and the RoPE that it means to llama.cpp
    "no type": ({"rope.scaling.factor": 4.0}, LINEAR),
    "the old key": ({"rope.scale_linear": 4.0}, LINEAR),
    "both keys": ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, LINEAR),
    "a type": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, LINEAR),
    "an unused length": ({"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}, LINEAR),
    "no factor": ({"rope.scaling.type": "linear"}, {}),
    "factor 0": ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, {}),
    "factor 1": ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {}),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
    "yarn": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
        YARN | {"original_max_position_embeddings": 16},
    ),
    "yarn of the whole context": (
        {"rope.scaling.type": "yarn", "rope.scale_linear": 4.0, "rope.scaling.yarn_ext_factor": 1.0},
        YARN | {"original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("case", SCALED)
def test_scaled_rope_means_what_it_means_to_llama_cpp(tmp_path, name, case):
    metadata, rope = SCALED[case]
    model = hf_model(name)
    model.config.rope_parameters |= rope
    scaled = type(model)(model.config)
    scaled.load_state_dict(model.state_dict())
    convert(write_gguf(tmp_path / "model.gguf", model, metadata=metadata), tmp_path / "out", dtype="float32")
    same_logits(tmp_path / "out", scaled)


HARMLESS = dict.fromkeys(["attention.clamp_kqv", "attention.scale", "attention.max_alibi_bias", "logit_scale"], 0.0)
HARMLESS |= dict.fromkeys(["attention.sliding_window", "expert_count", "expert_used_count", "pooling_type"], 0)
HARMLESS |= {"attention.causal": True, "attention.key_length": 8, "attention.value_length": 8, "vocab_size": 96}
HARMLESS |= {"attention.head_count_kv": [2, 2], "feed_forward_length": [48, 48], "residual_scale": 1.0}
HARMLESS |= {"attention.layer_norm_epsilon": 1e-5, "rope.scaling.finetuned": True, "rope.scaling.attn_factor": 1.0}
HARMLESS |= {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0, "rope.freq_base": 10000}


def test_metadata_that_changes_nothing_is_accepted(tmp_path):
    convert(write_gguf(tmp_path / "plain.gguf", hf_model()), tmp_path / "plain")
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), metadata=HARMLESS), tmp_path / "out")
    assert read_config(tmp_path / "out") == read_config(tmp_path / "plain")


REFUSED = [
    *[("attention.sliding_window", 32), ("attention.scale", 0.5), ("attention.clamp_kqv", 8.0)],
    *[("attention.max_alibi_bias", 8.0), ("attention.causal", False), ("attention.value_length", 16)],
    *[("rope.dimension_count", 4), ("rope.dimension_sections", [2, 2, 0, 0]), ("rope.freq_base_swa", 1e4)],
    *[("logit_scale", 0.25), ("embedding_scale", 12.0), ("residual_scale", 0.2), ("use_parallel_residual", True)],
    *[("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("nextn_predict_layers", 1)],
    *[("expert_count", 8), ("expert_used_count", 2), ("expert_shared_count", 1), ("pooling_type", 1)],
    *[("rope.scaling.attn_factor", 1.2), ("rope.scaling.yarn_attn_factor", 1.2), ("rope.scaling.alpha", 1000.0)],
    *[("rope.scaling.yarn_ext_factor", 1.0), ("rope.scaling.yarn_log_multiplier", 0.1)],
    *[("rope.scaling.yarn_beta_fast", 16.0), ("rope.scaling.yarn_beta_slow", 2.0)],
    *[("rope.scaling.type", "longrope"), ("rope.scaling.type", 1), ("rope.scaling.type", ["linear", "none"])],
    *[("rope.scaling.factor", -4.0), ("rope.scaling.factor", "4"), ("rope.scale_linear", float("inf"))],
    *[("rope.freq_base", float("nan")), ("attention.layer_norm_rms_epsilon", "small")],
    *[("block_count", "two"), ("embedding_length", 32.0), ("feed_forward_length", True), ("context_length", 0)],
    *[("attention.head_count_kv", [2, 1]), ("attention.head_count", [4]), ("attention.key_length", [8, 16])],
    *[("attention.key_length_mla", 8), ("a.key.of.the.future", 1)],
]


@pytest.mark.parametrize("key, value", REFUSED, ids=str)
def test_metadata_that_config_json_cannot_say_is_refused_by_name(tmp_path, capsys, key, value):
    file = write_gguf(tmp_path / "model.gguf", hf_model(), metadata={key: value})
    refused(capsys, [file, "--out", tmp_path / "out"], f"llama.{key}", watch=tmp_path)


def test_a_size_that_is_missing_is_named(tmp_path, capsys):
    writer = GGUFWriter(tmp_path / "model.gguf", "qwen2")
    writer.add_block_count(2)
    finish(writer)
    refused(capsys, [tmp_path / "model.gguf", "--out", tmp_path / "out"], "qwen2.context_length", watch=tmp_path)


def byte_level(folder: Path, split, special: list[str], pre: str, bos: str | None, form=None):
    """A tokenizer of its own kind in `folder`, and what writes the same to a GGUF file."""
    config = {"chat_template": CHATML_TEMPLATE, "eos_token": special[1]}
    byte_level_folder(folder, split, special, config, form=form, bos=bos)
    library = json.loads((folder / "tokenizer.json").read_text())
    vocab = library["model"]["vocab"] | {token["content"]: token["id"] for token in library["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)

    def add(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in library["model"]["merges"]])
        writer.add_bos_token_id(tokens.index(special[0]))
        writer.add_eos_token_id(tokens.index(special[1]))
        writer.add_chat_template(CHATML_TEMPLATE)

    return add


def sentencepiece(folder: Path):
    """Likewise, of a sentencepiece model."""
    sentencepiece_folder(folder, {"chat_template": CHATML_TEMPLATE})
    sp = SentencePieceProcessor(str(folder / "tokenizer.model"))
    ids = range(sp.get_piece_size())
    kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in ids]

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([sp.id_to_piece(i) for i in ids])
        writer.add_token_scores([sp.get_score(i) for i in ids])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(sp.bos_id())
        writer.add_eos_token_id(sp.eos_id())
        writer.add_unk_token_id(sp.unk_id())
        writer.add_chat_template(CHATML_TEMPLATE)

    return add


def tokenizer(kind: str, folder: Path):
    if kind == "sentencepiece":
        return sentencepiece(folder)
    if kind in ("llama-bpe", "llama3", "llama-v3"):
        special = ["<|begin_of_text|>", "<|eot_id|>"]
        return byte_level(folder, split_by(LLAMA3_SPLIT), special, kind, special[0])
    split, form = pre_tokenizers.ByteLevel(False), None
    if kind in ("smollm", "starcoder", "refact"):
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), split])
    elif kind == "smaug-bpe":
        split = split_by(LLAMA3_SPLIT)
    elif kind in ("qwen2", "deepseek-r1-qwen"):
        split, form = split_by(PRETOKENIZE_REGEX), normalizers.NFC()
    return byte_level(folder, split, ["<|im_start|>", "<|im_end|>"], kind, None, form)


KINDS = ["sentencepiece", "smollm", "starcoder", "refact", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "qwen2"]


@pytest.mark.parametrize("kind", [*KINDS, "deepseek-r1-qwen", "gpt-2"])
def test_the_tokenizer_is_the_one_that_the_file_was_made_of(tmp_path, kind):
    add = tokenizer(kind, tmp_path / "original")
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=add), tmp_path / "out")
    theirs, ours = load_tokenizer(tmp_path / "original"), load_tokenizer(tmp_path / "out")
    assert ours.eos_ids == theirs.eos_ids
    for text in NASTY:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.chat(text, "Be brief.") == theirs.chat(text, "Be brief."), text
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids), text


class Without:
    """A GGUFWriter, one of whose methods does nothing."""

    def __init__(self, writer, name: str):
        self.writer, self.name = writer, name

    def __getattr__(self, name: str):
        return (lambda *_: None) if name == self.name else getattr(self.writer, name)


@pytest.mark.parametrize("kind", ["llama-bpe", "sentencepiece"])
@pytest.mark.parametrize("missing", ["add_bos_token_id", "add_token_types"])
def test_a_tokenizer_may_name_no_bos_and_no_types(tmp_path, kind, missing):
    add = tokenizer(kind, tmp_path / "original")
    file = write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=lambda writer: add(Without(writer, missing)))
    convert(file, tmp_path / "out")
    bos, *ids = load_tokenizer(tmp_path / "original").encode("the keeper")
    assert load_tokenizer(tmp_path / "out").encode("the keeper") == [bos] * (missing != "add_bos_token_id") + ids


DAMAGED = {
    "no merges": ("llama-bpe", "add_token_merges", None, "merges are missing or damaged"),
    "a merge outside": ("llama-bpe", "add_token_merges", ["no such"], "merges are missing or damaged"),
    "no scores": ("sentencepiece", "add_token_scores", None, "and 0 scores"),
    "few types": ("llama-bpe", "add_token_types", [1, 1], "and 2 types"),
    "an id that is none": ("llama-bpe", "add_bos_token_id", None, "the tokenizer's metadata is damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_tokenizer_is_refused(tmp_path, capsys, case):
    kind, name, instead, words = DAMAGED[case]
    add = tokenizer(kind, tmp_path / "original")

    def damaged(writer):
        if instead is not None:
            getattr(writer, name)(instead)
        elif name == "add_bos_token_id":
            writer.add_string("tokenizer.ggml.bos_token_id", "<s>")
        add(Without(writer, name))

    file = write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=damaged)
    refused(capsys, [file, "--out", tmp_path / "out"], "model.gguf", words, watch=tmp_path)


TEXT = "I'LL $1234.5 getURLFor(x);\n\n    日本語12 \r\nwasn't\u3000¡Sí© "
WORDS = {  # of TEXT
    "default": "I ' LL _ $ 123 4 . 5 _getURLFor ( x ); ⏎⏎___ _日本語 12 _\r ⏎ wasn ' t \u3000 ¡ Sí © _",
    "tekken": "I 'LL _$ 1 2 3 4 . 5 _get URLFor (x );⏎⏎ ___ _日本語 1 2 _\r⏎ wasn 't \u3000 ¡Sí © _",
    "deepseek-coder": "I ' LL _$ 1 2 3 4 . 5 _getURLFor ( x ); ⏎ ⏎ ___ _ 日本語 1 2 _ \r ⏎ wasn ' t \u3000 ¡ Sí ©_",
}


@pytest.mark.parametrize("pre", WORDS)
def test_a_text_is_split_into_the_words_of_its_tokenizers_kind(tmp_path, pre):
    add = byte_level(tmp_path / "original", pre_tokenizers.ByteLevel(False), ["<s>", "</s>"], pre, None)
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=add), tmp_path / "out")
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).pre_tokenizer.pre_tokenize_str(TEXT)
    words = [TEXT[start:end] for _, (start, end) in found]
    assert words == [word.replace("_", " ").replace("⏎", "\n") for word in WORDS[pre].split(" ")]


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_a_file_that_does_not_say_how_texts_are_split_is_named(tmp_path, capsys, pre):
    add = byte_level(tmp_path / "original", pre_tokenizers.ByteLevel(False), ["<s>", "</s>"], pre, None)
    damaged = lambda writer: add(Without(writer, "add_tokenizer_pre") if pre is None else writer)  # noqa: E731
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=damaged), tmp_path / "out")
    assert "does not say how its tokenizer splits (tokenizer.ggml.pre)" in capsys.readouterr().err
    assert load_tokenizer(tmp_path / "out").decode(load_tokenizer(tmp_path / "out").encode(TEXT)) == TEXT


@pytest.mark.parametrize("model, pre, name", [("gpt2", "viking", "pre 'viking'"), ("t5", "default", "model 't5'")])
def test_a_tokenizer_of_an_unknown_kind_is_left_out_and_named(tmp_path, capsys, model, pre, name):
    add = lambda writer: (writer.add_tokenizer_model(model), writer.add_tokenizer_pre(pre))  # noqa: E731
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=add), tmp_path / "out")
    kind, consequence, _ = capsys.readouterr().err.split("\n")
    assert f"tokenizer.ggml.{name} is not known; copy the original's tokenizer.json" in kind
    assert "without a tokenizer the checkpoint takes only token ids" in consequence


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "sentencepiece"])
@pytest.mark.parametrize("bos, eos", [(True, True), (False, True), (True, False), (False, False)])
def test_the_file_says_which_tokens_stand_around_a_text(tmp_path, kind, bos, eos):
    add = tokenizer(kind, tmp_path / "original")
    ends = lambda writer: (add(writer), writer.add_add_bos_token(bos), writer.add_add_eos_token(eos))  # noqa: E731
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=ends), tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    end = [ours.special[ours.variables[f"{name}_token"]] for name in ("bos", "eos")]
    before, after = end[:1] * bos, end[1:] * eos
    ids = ours.encode("the keeper")
    assert (before, after) == ours.around and ids == before + ids[bos : len(ids) - eos] + after
    assert ours.decode(ids) == "the keeper"


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(architecture="gemma3"), ["gemma3", "only llama, qwen2, qwen3"]),
        (dict(tokenizer=lambda writer: writer.add_uint32("split.count", 3)), ["one part", "llama-gguf-split"]),
        (dict(metadata={"block_count": 9}), ["model.gguf ", "they lack"]),
        (dict(tokenizer=slower_rope, metadata={"rope.scaling.factor": 4.0}), ["linear", "rope_freqs.weight"]),
    ],
    ids=["architecture", "part", "tensors", "rope"],
)
def test_what_cannot_be_converted_is_refused_before_a_byte_is_written(tmp_path, capsys, fields, words):
    file = write_gguf(tmp_path / "model.gguf", hf_model(), **fields)
    refused(capsys, [file, "--out", tmp_path / "out"], *words, watch=tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.98])
def test_a_damaged_file_is_refused(tmp_path, capsys, keep):
    file = write_gguf(tmp_path / "model.gguf", hf_model())
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(capsys, [file, "--out", tmp_path / "out"], "model.gguf", watch=tmp_path)
    file.write_bytes(b"any text")
    refused(capsys, [file, "--out", tmp_path / "out"], "model.gguf", watch=tmp_path)


def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused(capsys, [tmp_path / "model.gguf", "--out", tmp_path / "out"], "pip install gguf", watch=tmp_path)
