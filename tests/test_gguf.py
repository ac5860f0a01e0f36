"""GGUF files of llama.cpp: what they convert to, and what is refused. The tests write the files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from test_convert import expected, hf_model, refused, written
from test_tokenizer import CHATML_TEMPLATE, LLAMA3_SPLIT, NASTY, byte_level_folder, sentencepiece_folder, split_by
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from convert_hf_checkpoint import convert
from engine import Engine
from runtime import gguf as gguf_py
from runtime.checkpoint import read_config
from text.tokenizer import load_tokenizer

Q8 = GGMLQuantizationType.Q8_0
THEIRS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    for ours, theirs in THEIRS.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def write_gguf(path: Path, model, quantized: bool = False, tokenizer=None, **fields) -> Path:
    """A model as llama.cpp stores it: the rows of Q and K with the two halves of each head interleaved."""
    config, writer = model.config, GGUFWriter(path, fields.pop("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in fields.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(name.replace("__", "."), value)
    if tokenizer is not None:
        tokenizer(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            half = config.head_dim // 2
            order = [i // 2 + half * (i % 2) for i in range(config.head_dim)]
            rows = [head + i for head in range(0, len(values), config.head_dim) for i in order]
            values = values[rows]
        if quantized and values.ndim == 2:
            writer.add_tensor(gguf_name(name), quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(gguf_name(name), values)
    for add in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        add()
    return path


@pytest.mark.parametrize("name", ["llama", "llama-mha-tied", "llama-biases"])
def test_a_float_file_converts_to_the_weights_it_was_made_of(tmp_path, name):
    model = hf_model(name)
    file = write_gguf(tmp_path / "model.gguf", model)
    convert(file, tmp_path / "out", dtype="float32")
    assert {key: t.tolist() for key, t in written(tmp_path / "out").items()} == {
        key: t.tolist() for key, t in expected(model).items()
    }
    ids = torch.arange(2, 40)
    engine = Engine.load(tmp_path / "out", compile=False)
    theirs = model(ids[None]).logits[0, -1]
    torch.testing.assert_close(engine.logits(ids.tolist(), [5])[0], theirs, rtol=1e-4, atol=1e-4)


def test_a_quantized_file_is_dequantized_into_bfloat16(tmp_path):
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, max_position_embeddings=64, **sizes))
    convert(write_gguf(tmp_path / "model.gguf", model, quantized=True), tmp_path / "out")
    rounded = {
        name: torch.from_numpy(dequantize(quantize(t.numpy(), Q8), Q8)) if t.dim() == 2 else t
        for name, t in model.state_dict().items()
    }
    model.load_state_dict(rounded)
    for name, tensor in expected(model.bfloat16()).items():
        assert torch.equal(written(tmp_path / "out")[name], tensor), name


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
    add = lambda writer: writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())  # noqa: E731
    convert(write_gguf(tmp_path / "model.gguf", model, tokenizer=add), tmp_path / "out")
    ours = read_config(tmp_path / "out")["kv_fast"]["model"]["rope"]
    assert ours == {key: pytest.approx(value) for key, value in (rope | {"max_position_embeddings": 131072}).items()}
    with pytest.raises(ValueError, match="not Llama 3.1's"):
        add = lambda writer: writer.add_tensor("rope_freqs.weight", np.full(32, 2, np.float32))  # noqa: E731
        convert(write_gguf(tmp_path / "model.gguf", model, tokenizer=add), tmp_path / "other")


def test_rope_factors_without_a_head_dimension_are_refused():
    with pytest.raises(ValueError, match="no llama.rope.dimension_count"):
        gguf_py._config(Path("model.gguf"), {"general.architecture": "llama"}, {"rope_freqs.weight": None})


def byte_level(folder: Path, split, special: list[str], pre: str, bos: str | None):
    """A tokenizer of its own kind in `folder`, and what writes the same to a GGUF file."""
    byte_level_folder(folder, split, special, {"chat_template": CHATML_TEMPLATE, "eos_token": special[1]}, bos=bos)
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


def sentencepiece(folder: Path, **options):
    from sentencepiece import SentencePieceProcessor

    sentencepiece_folder(folder, {"chat_template": CHATML_TEMPLATE}, **options)
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
    if kind == "llama-bpe":
        special = ["<|begin_of_text|>", "<|eot_id|>"]
        return byte_level(folder, split_by(LLAMA3_SPLIT), special, kind, special[0])
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    return byte_level(folder, split, ["<|im_start|>", "<|im_end|>"], kind, None)


@pytest.mark.parametrize("kind", ["smollm", "llama-bpe", "sentencepiece"])
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
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_tokenizer_is_refused(tmp_path, capsys, case):
    kind, name, instead, words = DAMAGED[case]
    add = tokenizer(kind, tmp_path / "original")

    def damaged(writer):
        if instead is not None:
            getattr(writer, name)(instead)
        add(Without(writer, name))

    file = write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=damaged)
    refused(capsys, [file, "--out", tmp_path / "out"], "model.gguf", words, watch=tmp_path)


def test_a_tokenizer_of_an_unknown_kind_is_left_out_and_said(tmp_path, capsys):
    add = lambda writer: (writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("other"))  # noqa: E731
    convert(write_gguf(tmp_path / "model.gguf", hf_model(), tokenizer=add), tmp_path / "out")
    assert "without a tokenizer the checkpoint takes only token ids" in capsys.readouterr().err


BROKEN = {
    "another architecture": (dict(architecture="gemma3"), ["gemma3", "llama"]),
    "a part of a model": (dict(split__count=3), ["one part", "llama-gguf-split"]),
    "scaled RoPE": (dict(llama__rope__scaling__type="yarn"), ["yarn", "original"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_converted_is_refused_before_a_byte_is_written(tmp_path, capsys, case):
    fields, words = BROKEN[case]
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
