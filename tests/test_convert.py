"""Converting Hugging Face checkpoints: the weights that come out, what is refused, and what a failure leaves behind."""

import errno
import fnmatch
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
import torch
from conftest import LLAMA
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from convert_hf_checkpoint import convert, main
from engine import Engine
from model import ModelConfig, Transformer
from quantize import quantize
from runtime import checkpoint
from runtime.checkpoint import load_checkpoint, open_weights, read_config, write_checkpoint
from runtime.hf_config import from_hf
from terminal import cli

ROOT = Path(__file__).parent.parent
SIZES = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(intermediate_size=48, max_position_embeddings=64, head_dim=8, tie_word_embeddings=False)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-mha-tied": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "llama-wide-heads": (LlamaForCausalLM, LlamaConfig, dict(head_dim=16)),
    "qwen3-wide-heads": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=16)),
}


def hf_model(name="llama", dtype=torch.float32):
    kind, config, options = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **options}))
    for parameter in model.parameters():  # biases and norms too, which start as constants
        parameter.data.normal_()
    return model.to(dtype)


def save(model, folder, shards=False):
    model.save_pretrained(folder, max_shard_size="16KB" if shards else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == shards
    (folder / "tokenizer.json").write_text('{"any": "bytes \\u00e9"}')
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return folder


def save_bin(model, folder, shards=False):
    """The older format: torch.save of the state dict, including duplicates and RoPE's frequencies."""
    save(model, folder)
    (folder / "model.safetensors").unlink()
    state = dict(model.state_dict()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    if not shards:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    files = {name: f"pytorch_model-{1 + i % 3:05}-of-00003.bin" for i, name in enumerate(state)}
    for file in set(files.values()):
        torch.save({name: t for name, t in state.items() if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


OURS = {
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def expected(model):
    """The state dict of the Hugging Face model under our names and stacking."""
    hf, ours = model.state_dict(), {}
    for name, tensor in hf.items():
        layer, module, kind = re.fullmatch(r"(?:model\.(layers\.\d+\.))?(.+)\.(weight|bias)", name).groups()
        if module in OURS and not (module == "lm_head" and model.config.tie_word_embeddings):
            ours[f"{layer or ''}{OURS[module]}.{kind}"] = tensor
        elif module == "self_attn.q_proj":
            qkv = [hf[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            ours[f"{layer}attention.wqkv.{kind}"] = torch.cat(qkv)
    return ours


def written(folder):
    """All tensors of a folder, read by the safetensors library."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def everything(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in sorted(Path(folder).rglob("*"))}


def refused(capsys, args, *words, watch, tool=main):
    """Runs the command line, which must fail in one line that has all the words and change nothing under `watch`."""
    before = everything(watch)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: tool([str(arg) for arg in args]))
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1, message
    for word in words:
        assert str(word) in message, (word, message)
    assert everything(watch) == before


FORMS = {
    "safetensors": (save, False),
    "sharded": (save, True),
    "bin": (save_bin, False),
    "sharded bin": (save_bin, True),
}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "safetensors") for name in MODELS), *(("llama-mha-tied", form) for form in FORMS)]
)
def test_every_architecture_and_source_form_keeps_the_weights(name, form, tmp_path):
    model, (save_as, shards) = hf_model(name), FORMS[form]
    convert(save_as(model, tmp_path / "hf", shards), tmp_path / "out")
    assert_same(written(tmp_path / "out"), expected(model))
    assert_same(load_checkpoint(tmp_path / "out", meta_model(tmp_path / "out")).state_dict(), expected(model))


def meta_model(folder):
    with torch.device("meta"):
        return Transformer(ModelConfig(**read_config(folder)["kv_fast"]["model"]))


def test_config_gains_one_key_and_companion_files_are_copied(tmp_path):
    src, out = save(hf_model(dtype=torch.bfloat16), tmp_path / "hf"), tmp_path / "new" / "parents" / "out"
    convert(src, out)
    config = json.loads((out / "config.json").read_text())
    section = config.pop("kv_fast")
    assert ModelConfig(**section.pop("model")) == from_hf(config)
    assert len(section.pop("weights")) == 16
    assert section == {"format": 2, "dtype": "bfloat16", "quantization": None}
    assert config == json.loads((src / "config.json").read_text())
    copied = ["generation_config.json", "tokenizer.json", "tokenizer.model"]
    assert sorted(p.name for p in out.iterdir()) == sorted(["config.json", "model.safetensors", *copied])
    assert all((out / name).read_bytes() == (src / name).read_bytes() for name in copied)
    assert os.listdir(out.parent) == ["out"]


def test_dtype_casts_every_tensor(tmp_path):
    model = hf_model()
    convert(save(model, tmp_path / "hf"), tmp_path / "out", dtype="float16")
    assert_same(written(tmp_path / "out"), expected(model.to(torch.float16)))
    assert read_config(tmp_path / "out")["kv_fast"]["dtype"] == "float16"


def test_float16_refuses_values_that_it_cannot_hold(tmp_path, capsys):
    model = hf_model(dtype=torch.bfloat16)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = 1e5
    src = save(model, tmp_path / "hf")
    args = [src, "--out", tmp_path / "out", "--dtype", "float16"]
    refused(capsys, args, "layers.1.feed_forward.w3.weight", "--dtype bfloat16", watch=tmp_path)


@pytest.mark.parametrize(
    ("stated", "chosen", "reason"),
    [
        ("float32", "float32", "as config.json says"),
        ("bfloat16", "bfloat16", "as config.json says"),
        (None, "float32", "the widest"),
    ],
)
def test_tensors_of_several_dtypes_are_written_in_the_configurations_or_the_widest(
    stated, chosen, reason, tmp_path, capsys
):
    model = hf_model()
    model.model.embed_tokens.to(torch.bfloat16)
    src = save(model, tmp_path / "hf")
    edit_json(src / "config.json", dtype=stated)
    convert(src, tmp_path / "out")
    said = f"the tensors are in bfloat16 and float32; all are written in {chosen}, {reason}"
    assert said in capsys.readouterr().err
    assert_same(written(tmp_path / "out"), expected(model.to(getattr(torch, chosen))))


def test_a_tied_source_may_store_the_head_alone(tmp_path, capsys):
    model = hf_model("llama-mha-tied")
    src = save(model, tmp_path / "hf")
    edit_weights(src / "model.safetensors", lambda s: s.update({"lm_head.weight": s.pop("model.embed_tokens.weight")}))
    convert(src, tmp_path / "out")
    assert_same(written(tmp_path / "out"), expected(model))


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_stored_beside_tied_embeddings_is_used_if_it_differs_from_them(tmp_path, capsys, differs):
    model = hf_model("llama-mha-tied")
    src = save(model, tmp_path / "hf")
    state = load_file(src / "model.safetensors")
    head = state["model.embed_tokens.weight"] + differs
    save_file(state | {"lm_head.weight": head}, src / "model.safetensors", metadata={"format": "pt"})
    convert(src, tmp_path / "out")
    own = {"output.weight": head} if differs else {}
    assert_same(written(tmp_path / "out"), expected(model) | own)
    assert ("lm_head.weight is not the embedding table" in capsys.readouterr().err) is differs
    engine = Engine.load(tmp_path / "out", compile=False, room=2)
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(src)(torch.tensor([[3, 4, 5]])).logits[0, -1]
    torch.testing.assert_close(engine.logits([3, 4, 5], [6])[0], theirs, rtol=1e-4, atol=1e-4)


INV_FREQ, HEAD = "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"


def shards_hold_unneeded_tensors(places, src):
    table = load_file(src / places["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    edit_weights(shard(src, 1), lambda state: state.update({INV_FREQ: torch.ones(4), HEAD: table}))
    return places


def index_names_other_shards(places, src):
    return dict(zip(places, reversed(places.values()), strict=True))


def index_names_few_tensors(places, src):
    return {file.name: file.name for file in src.glob("model-*.safetensors")}


def copy_in_another_shard(places, src):
    norm = load_file(src / places["model.norm.weight"])["model.norm.weight"]
    for number in (0, 1):
        edit_weights(shard(src, number), lambda state: state.update({"model.norm.weight": norm}))
    return places


HARMLESS = [shards_hold_unneeded_tensors, index_names_other_shards, index_names_few_tensors, copy_in_another_shard]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda f: f.__name__)
def test_shards_are_read_as_they_are_whatever_their_index_says(change, tmp_path, capsys):
    model = hf_model("llama-mha-tied")
    src = save(model, tmp_path / "hf", shards=True)
    index = src / "model.safetensors.index.json"
    edit_json(index, weight_map=change(json.loads(index.read_text())["weight_map"], src))
    convert(src, tmp_path / "out")
    assert_same(written(tmp_path / "out"), expected(model))


@pytest.mark.parametrize(
    ("config", "generation", "kept", "outside"),
    [
        (96, None, set(), "[96]"),
        (-1, 5, {5}, "[-1]"),
        ([2, 96, None], [3, 10**20], {2, 3}, "[96, 100000000000000000000]"),
        (None, [2, 95], {2, 95}, None),
    ],
)
def test_eos_ids_outside_the_vocabulary_are_noted_and_end_no_answer(
    config, generation, kept, outside, tmp_path, capsys
):
    src = save(hf_model(), tmp_path / "hf")
    edit_json(src / "config.json", eos_token_id=config)
    edit_json(src / "generation_config.json", eos_token_id=generation)
    convert(src, tmp_path / "out")
    said = capsys.readouterr().err
    assert f"eos_token_id {outside} is outside the vocabulary of 96" in said if outside else "eos_token_id" not in said
    assert Engine.load(tmp_path / "out", compile=False).eos == kept


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", ["</s>", [2, "</s>"], 2.0, True], ids=repr)
def test_eos_ids_that_are_no_integers_are_refused_before_a_download(name, ids, hub):
    repo, cache = hub
    edit_json(repo / name, eos_token_id=ids)
    with pytest.raises(ValueError, match=f"{name}: eos_token_id must be token ids, not "):
        convert("some/model", repo.parent / "out", revision="v2")
    assert not list(cache.glob("*.safetensors")) and not (repo.parent / "out").exists()


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(file, change):
    state = load_file(file)
    change(state)
    save_file(state, file)


def edit_tensor(src, name, tensor=None):
    """Replaces or (None) deletes a tensor of a sharded folder, whose index still names it; returns its file."""
    file = src / json.loads((src / "model.safetensors.index.json").read_text())["weight_map"][name]
    edit_weights(file, lambda state: state.pop(name) if tensor is None else state.update({name: tensor}))
    return file


def shard(src, number):
    return sorted(src.glob("model-*.safetensors"))[number]


def missing_shard(src):
    shard(src, 1).unlink()
    return ["model-00002-of-", "missing"]


def truncated_shard(src):
    file = shard(src, 1)
    size = file.stat().st_size - 9000  # two tensors before the end
    os.truncate(file, size)
    return [file, "damaged or cut off", "git lfs"]


def copies_that_differ(src):
    name = "model.norm.weight"
    for number, values in enumerate((torch.ones(32), torch.zeros(32))):
        edit_weights(shard(src, number), lambda state, values=values: state.update({name: values}))
    return [shard(src, 0), shard(src, 1), f"hold different tensors {name}"]


def index_without_map(src):
    (src / "model.safetensors.index.json").write_text('{"metadata": {}}')
    return ["model.safetensors.index.json", "weight_map"]


def missing_tensor_that_the_index_names(src):
    edit_tensor(src, "model.layers.1.self_attn.k_proj.weight")
    return ["they lack model.layers.1.self_attn.k_proj.weight", src]


def unknown_tensors(src):
    more = {f"model.layers.{i}.adapter.weight": torch.ones(1) for i in range(6)}
    edit_weights(shard(src, 0), lambda state: state.update(more))
    return ["must not have model.layers.0.adapter.weight, ", "and 2 more"]


def wrong_shape(src):
    name = "model.layers.0.self_attn.v_proj.weight"
    file = edit_tensor(src, name, torch.ones(24, 32))
    return [name, "[24, 32]", "[16, 32]", file]


def integer_weights(src):
    name = "model.layers.0.self_attn.v_proj.weight"
    file = edit_tensor(src, name, torch.ones(16, 32, dtype=torch.int8))
    return [name, "int8", "quantized", file]


def quantized(src):
    edit_json(src / "config.json", quantization_config={"quant_method": "awq", "bits": 4})
    return ["awq", "quantized"]


def other_architecture(src):
    edit_json(src / "config.json", architectures=["MambaForCausalLM"])
    return ["MambaForCausalLM", "LlamaForCausalLM"]


def converted_already(src):
    edit_json(src / "config.json", kv_fast={"format": 2})
    return [src, "converted already"]


DAMAGE = [missing_shard, truncated_shard, copies_that_differ, index_without_map, missing_tensor_that_the_index_names]
DAMAGE += [unknown_tensors, wrong_shape, integer_weights, quantized, other_architecture, converted_already]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_source_that_cannot_be_converted_is_refused_before_anything_is_written(damage, tmp_path, capsys, monkeypatch):
    src = save(hf_model(), tmp_path / "hf", shards=True)
    words = damage(src)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("something was written"))
    refused(capsys, [src, "--out", tmp_path / "out"], *words, watch=tmp_path)


def test_a_missing_folder_and_a_revision_of_a_folder_are_refused(tmp_path, capsys):
    args = [tmp_path / "absent", "--out", tmp_path / "out"]
    refused(capsys, args, "absent is neither a folder here nor a repository", watch=tmp_path)
    refused(capsys, [tmp_path / "absent.gguf", *args[1:]], "there is no file", "absent.gguf", watch=tmp_path)
    src = save(hf_model(), tmp_path / "hf")
    refused(capsys, [src, "--out", tmp_path / "out", "--revision", "main"], "--revision", watch=tmp_path)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain pickle"])
def test_a_pickle_with_code_is_refused_and_does_not_run(zipped, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    src = save_bin(hf_model(), tmp_path / "hf")
    state = dict(hf_model().state_dict()) | {"model.norm.weight": Evil()}
    if zipped:
        torch.save(state, src / "pytorch_model.bin")
    else:
        (src / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Evil()}))
    refused(capsys, [src, "--out", tmp_path / "out"], src / "pytorch_model.bin", watch=tmp_path)
    assert not (tmp_path / "evil").exists()


def test_a_damaged_bin_is_refused(tmp_path, capsys):
    src = save_bin(hf_model(), tmp_path / "hf", shards=True)
    file = src / "pytorch_model-00002-of-00003.bin"
    os.truncate(file, file.stat().st_size // 2)
    refused(capsys, [src, "--out", tmp_path / "out"], file, "truncated", watch=tmp_path)
    torch.save({"model.norm.weight": 3}, file)
    refused(capsys, [src, "--out", tmp_path / "out"], file, "state dict", watch=tmp_path)


def test_an_existing_folder_is_replaced_only_with_force(tmp_path, capsys):
    src, out = save(hf_model(), tmp_path / "hf"), tmp_path / "out"
    convert(src, out)
    refused(capsys, [src, "--out", out], out, "--force", watch=tmp_path)
    other = hf_model("llama-biases")
    convert(save(other, tmp_path / "other"), out, force=True)
    assert_same(written(out), expected(other))
    assert sorted(os.listdir(tmp_path)) == ["hf", "other", "out"]


def test_force_keeps_the_old_checkpoint_when_the_new_one_fails(tmp_path, capsys):
    src, out = save(hf_model(), tmp_path / "hf"), tmp_path / "out"
    convert(src, out)
    truncated_shard(save(hf_model(), tmp_path / "bad", shards=True))
    refused(capsys, [tmp_path / "bad", "--out", out, "--force"], "cut off", watch=tmp_path)
    large = hf_model(dtype=torch.bfloat16)
    large.model.norm.weight.data[0] = 1e5  # known only when the tensor is read
    save(large, tmp_path / "large")
    args = [tmp_path / "large", "--out", out, "--force", "--dtype", "float16"]
    refused(capsys, args, "norm.weight", watch=tmp_path)


def test_force_replaces_nothing_but_a_checkpoint(tmp_path, capsys):
    src = save(hf_model(), tmp_path / "hf")
    refused(capsys, [src, "--out", src, "--force"], "is the source", watch=tmp_path)
    other = save(hf_model(), tmp_path / "other")
    refused(capsys, [src, "--out", other, "--force"], "not a checkpoint of kv-fast", watch=tmp_path)
    convert(src, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused(capsys, [src, "--out", tmp_path / "out", "--force"], "notes.txt", watch=tmp_path)
    (tmp_path / "file").write_text("mine")
    refused(capsys, [src, "--out", tmp_path / "file", "--force"], tmp_path / "file", watch=tmp_path)


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path, capsys, monkeypatch):
    src = save(hf_model(), tmp_path / "hf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(capsys, [src, "--out", tmp_path / "out"], "0.0 MB", "0.1 MB", watch=tmp_path)


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    def full_disk(tensors, path, metadata):  # what save_file raises, and the part it may leave
        Path(path).write_bytes(b"part")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    src = save(hf_model(), tmp_path / "hf")
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    refused(capsys, [src, "--out", tmp_path / "out"], "No space left on device", "0.1 MB", watch=tmp_path)


def test_a_companion_that_cannot_be_copied_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    def full_disk(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    src = save(hf_model(), tmp_path / "hf")
    monkeypatch.setattr(shutil, "copyfile", full_disk)
    refused(capsys, [src, "--out", tmp_path / "out"], "No space left on device", watch=tmp_path)


# Forks children that convert. The n-th one signals itself at its n-th read or write of weights, open, mkdir, rename or
# delete. Prints each child's exit code, the names it left and which checkpoint is in `out`.
INTERRUPT = """
import json, os, shutil, sys
from pathlib import Path
import convert_hf_checkpoint
from runtime import checkpoint
from terminal import cli
src, out, old, new, number = sys.argv[1:]
src, out, old, new, number = Path(src), Path(out), old and Path(old), Path(new), int(number)

def convert(moment):
    seen = 0
    def step():
        nonlocal seen
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), number)
    def watch(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove") and str(src.parent) in str(args[0]):
            step()
    def counted(function):
        def call(*args, **options):
            step()
            return function(*args, **options)
        return call
    checkpoint.safe_open, checkpoint.save_file = counted(checkpoint.safe_open), counted(checkpoint.save_file)
    sys.addaudithook(watch)
    cli.run(lambda: convert_hf_checkpoint.main([str(src), "--out", str(out)] + ["--force"] * bool(old)))

for moment in range(1, 1000):
    if old:
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(old, out)
    child = os.fork()
    if not child:
        try:
            convert(moment)
        except SystemExit as end:
            os._exit(end.code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = sorted(os.listdir(out.parent))
    if old:
        checkpoint.check_output(out, force=True)
    content = (out / "model.safetensors").read_bytes() if out.exists() else b""
    state = "new" if content == (new / "model.safetensors").read_bytes() else "old" if content else "none"
    print(json.dumps([code, left, state]))
    if code == 0:
        break
    if not old and state == "new":
        shutil.rmtree(out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize(("number", "ended"), [(9, -9), (2, 130)], ids=["killed", "Ctrl-C"])
def test_a_run_that_ends_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(number, ended, force, tmp_path):
    src, parent, old = save(hf_model(), tmp_path / "hf"), tmp_path / "parent", ""
    edit_json(src / "config.json", num_hidden_layers=1)  # fewer moments
    edit_weights(src / "model.safetensors", lambda state: [state.pop(n) for n in list(state) if ".layers.1." in n])
    convert(src, tmp_path / "new")
    if force:
        old = tmp_path / "old"
        convert(save(hf_model("llama-biases"), tmp_path / "other"), old)
    parent.mkdir()
    args = [sys.executable, "-c", INTERRUPT, src, parent / "out", old, tmp_path / "new", number]
    done = subprocess.run(list(map(str, args)), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    *lines, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert last == [0, ["out"], "new"]  # the run after the last interruption cleans up and succeeds
    assert len(lines) > 20 and {code for code, _, _ in lines} == {ended}
    states, before = [state for _, _, state in lines], "old" if force else "none"
    assert set(states) == {before, "new"} and states[0] == before
    assert number == 2 or states == sorted(states, key=[before, "new"].index)  # the change is one moment
    for _, left, state in lines:
        others = [name for name in left if name != "out"]
        if number == 9:
            assert all(name.startswith((".out.partial-", ".out.replaced")) for name in others) and len(others) <= 2
        else:
            assert not others or state == "new"


def test_a_run_leaves_the_partial_folder_of_another_that_is_running(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    for pid in (1, ended.pid):
        (tmp_path / f".out.partial-{pid}").mkdir()
    convert(save(hf_model(), tmp_path / "hf"), tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".out.partial-1", "hf", "out"]


PEAK = """
import sys
from pathlib import Path
from runtime.device import resident_bytes
exec(sys.argv.pop())
Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is there now
before = resident_bytes("VmRSS")
work()
print(resident_bytes("VmHWM") - before)
"""


def peak(code, *args):
    """By how many bytes a function `work`, which the code defines, raises the memory of a process with these args."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back to the system at once
    command = [sys.executable, "-c", PEAK, *map(str, args), code]
    return int(subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)


MEMORY = """
from functools import partial
import convert_hf_checkpoint
convert_hf_checkpoint.write_checkpoint = partial(convert_hf_checkpoint.write_checkpoint, shard_bytes=30_000_000)
def work():
    convert_hf_checkpoint.convert(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_memory_stays_below_one_shard(form, tmp_path):
    config = LlamaConfig(**SIZES | dict(vocab_size=8000, hidden_size=1024, intermediate_size=4096, head_dim=256))
    config.num_hidden_layers, config.architectures = 3, ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "hf")
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in LlamaForCausalLM(config).state_dict().items()}
    names, files = list(shapes), {}
    for i in range(3):
        file = f"model-0000{i + 1}-of-00003.safetensors" if form == "safetensors" else f"pytorch_model-{i}.bin"
        part = {name: torch.full(shapes[name], 0.5, dtype=torch.bfloat16) for name in names[i::3]}
        (save_file if form == "safetensors" else torch.save)(part, tmp_path / "hf" / file)
        files.update(dict.fromkeys(part, file))
    index = "model.safetensors.index.json" if form == "safetensors" else "pytorch_model.bin.index.json"
    (tmp_path / "hf" / index).write_text(json.dumps({"weight_map": files}))
    largest = max((tmp_path / "hf" / file).stat().st_size for file in files.values())
    assert largest > 40e6 and peak(MEMORY, tmp_path / "hf", tmp_path / "out") < largest


def error(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))
    return kind("a long\n\nmessage", response=response)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository of files, downloaded by pattern as huggingface_hub would; returns its folder and the cache."""
    repo, cache = save(hf_model(), tmp_path / "repo", shards=True), tmp_path / "cache"

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        assert (repo_id, revision) == ("some/model", "v2")
        for file in repo.rglob("*"):
            name = str(file.relative_to(repo))
            if file.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, cache / name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return repo, cache


def test_a_repository_is_downloaded_without_unneeded_files(hub, tmp_path):
    repo, cache = hub
    needed = {file.name for file in repo.iterdir()}
    for name in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "original/model.safetensors"):
        (repo / name).parent.mkdir(exist_ok=True)
        (repo / name).write_text("not needed")
    convert("some/model", tmp_path / "out", revision="v2")
    assert {str(file.relative_to(cache)) for file in cache.rglob("*")} == needed
    assert_same(written(tmp_path / "out"), expected(hf_model()))


def test_a_repository_without_safetensors_is_converted_from_its_bins(hub, tmp_path):
    repo, cache = hub
    shutil.rmtree(repo)
    save_bin(hf_model(), repo, shards=True)
    convert("some/model", tmp_path / "out", revision="v2")
    assert_same(written(tmp_path / "out"), expected(hf_model()))


def test_an_unsupported_repository_is_refused_before_its_weights_are_downloaded(hub, tmp_path, capsys):
    repo, cache = hub
    quantized(repo)
    with pytest.raises(ValueError, match="awq"):
        convert("some/model", tmp_path / "out", revision="v2")
    assert (cache / "config.json").exists() and not list(cache.glob("*.safetensors"))


@pytest.mark.parametrize(
    "failure, word",
    [
        (error(GatedRepoError, 403), "accept its terms at https://huggingface.co/some/model"),
        (error(RepositoryNotFoundError, 401), "neither a folder here nor a repository"),
        (error(RevisionNotFoundError, 404), "no revision v2"),
        (httpx.ConnectError("no route"), "no route"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_failed_download_is_one_line_that_says_what_to_do(failure, word, tmp_path, capsys, monkeypatch):
    def snapshot_download(*_, **__):
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    args = ["some/model", "--out", tmp_path / "out", "--revision", "v2"]
    refused(capsys, args, word, watch=tmp_path)


def test_shards_and_integer_tensors_survive_writing_and_loading(tmp_path):
    state = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.uint8), "c": torch.randn(5, 4).t()}
    state |= {"d": torch.ones(()), "e": torch.randint(-128, 127, (2, 3, 4), dtype=torch.int8)}
    about = {"mode": "int8", "groupsize": 128}
    model = from_hf(LLAMA)
    write_checkpoint(tmp_path / "out", {"x": 1}, model, state, state.__getitem__, quantization=about, shard_bytes=70)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["x"] == 1 and config["kv_fast"]["dtype"] == "float32" and config["kv_fast"]["quantization"] == about
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # the weights can be read by whoever can read config.json
    assert len(set(index["weight_map"].values())) == 3 and index["weight_map"].keys() == state.keys()
    assert_same(written(tmp_path / "out"), state)
    assert_same({name: stored.read() for name, stored in open_weights(tmp_path / "out").items()}, state)


def test_reading_a_checkpoint_says_what_to_do_with_a_folder_that_is_none(tmp_path):
    src, out = save(hf_model(), tmp_path / "hf"), tmp_path / "out"
    command = f"python convert_hf_checkpoint.py {src} --out {src}-kv-fast"
    with pytest.raises(ValueError, match=f"convert it first: {command}"):
        read_config(src)
    with pytest.raises(FileNotFoundError, match="no checkpoint folder"):
        read_config(out)
    convert(src, out)
    model, stored = meta_model(out), open_weights(out)["norm.weight"]
    os.truncate(out / "model.safetensors", 60_000)
    for read in (stored.read, lambda: load_checkpoint(out, model)):
        with pytest.raises(ValueError, match=f"{out}/model.safetensors is damaged or cut off"):
            read()
    (out / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load_checkpoint(out, model)
    (out / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        read_config(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_kv_head": 4}, r"layers.0.attention.wqkv.weight has shape \[64, 32\].* needs \[96, 32\]"),
        ({"n_layer": 1}, "must not have layers.1"),
        ({"n_layer": 3}, "they lack layers.2"),
    ],
)
def test_weights_that_disagree_with_the_config_are_refused(changes, message, tmp_path):
    convert(save(hf_model(), tmp_path / "hf"), tmp_path / "out")
    edit_section(tmp_path / "out", model=section_of(tmp_path / "out")["model"] | changes)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "out", meta_model(tmp_path / "out"))


# The kv_fast section


def section_of(folder):
    return json.loads((folder / "config.json").read_text())["kv_fast"]


def edit_section(folder, **changes):
    edit_json(folder / "config.json", kv_fast=section_of(folder) | changes)


HOSTILE = (None, True, -1, 0, 1.5, 2**63, 10**400, 1e308, float("nan"), "x", "\n" * 99, [], {}, {"rope_type": "yarn"})


def test_a_damaged_section_is_refused_in_one_line(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "m")
    section, accepted = section_of(checkpoint), []
    cases = [(name, section["model"] | {name: value}, value) for name in section["model"] for value in HOSTILE]
    for name, model, value in [*cases, ("model", None, None), ("model", {}, {})]:
        edit_section(tmp_path / "m", model=model)
        try:
            read_config(tmp_path / "m")
            accepted.append((name, value))
        except ValueError as error:
            assert "kv_fast in " in str(error) and len(str(error).splitlines()) == 1 and len(str(error)) < 500
    flags = ("tied", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    assert accepted == [("norm_eps", 1.5), ("window", None), *((flag, True) for flag in flags)]
    edit_section(tmp_path / "m", model=section["model"] | {"n_kv_head": 3})
    with pytest.raises(ValueError, match="4 attention heads do not divide into 3 KV heads"):
        read_config(tmp_path / "m")
    edit_section(tmp_path / "m", model=section["model"], weights=None)
    with pytest.raises(ValueError, match="weights must be their id"):
        read_config(tmp_path / "m")


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folder_of_format_1_is_refused_with_the_command_that_converts_it(quantized, checkpoint, tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    if quantized:
        quantize(checkpoint, old, "int4", groupsize=16, embeddings=True)
    else:
        shutil.copytree(checkpoint, old)
    whole = section_of(old)
    section = {key: whole[key] for key in ("dtype", "quantization")} | {"format": 1}
    edit_json(old / "config.json", kv_fast=section)
    with pytest.raises(ValueError, match=f"format 1 .* again: python convert_hf_checkpoint.py {old} --out {old}-2$"):
        Engine.load(old, compile=False)
    refused(capsys, [old, "--out", new, "--dtype", "float16"], "keeps its dtype", watch=tmp_path)
    main([str(old), "--out", str(new)])
    assert section_of(new) == whole
    assert_same(written(new), written(old))
    edit_json(old / "config.json", kv_fast=section | {"format": 3})
    with pytest.raises(ValueError, match="format 3 .* update kv-fast"):
        Engine.load(old, compile=False)
