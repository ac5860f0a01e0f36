"""Quantized weights: their error bound, storage and streaming, what is refused, and every method run on them."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import LLAMA, slow, write_random
from test_convert import peak, refused
from torch.nn import Linear

import model as model_py
import quantize as q
from engine import Engine
from kv import METHODS
from model import Transformer
from runtime import linear
from runtime.checkpoint import open_weights, read_config, write_checkpoint
from runtime.hf_config import from_hf
from runtime.linear import Int4Linear, Int8Linear, levels_of, levels_of_packed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = {
    "normal": torch.randn(24, 64),
    "outlier": torch.randn(24, 64).index_fill(1, torch.tensor([7]), 30.0),
    "positive": torch.rand(24, 64) + 5,
    "negative": -torch.rand(24, 64) - 5,
    "constant": torch.full((24, 64), 0.3),
    "zero": torch.zeros(24, 64),
    "tiny": torch.randn(24, 64) * 1e-6,
}


def levels_one_by_one(packed: torch.Tensor, groupsize: int) -> torch.Tensor:
    """[O,I/2] bytes -> [O,I] levels, one by one: a group's first half lies in the low bits, its second in the high."""
    out, half = packed.shape[0], groupsize // 2
    levels = torch.zeros(out, 2 * packed.shape[1])
    for row in range(out):
        for i, byte in enumerate(packed[row].tolist()):
            group, place = divmod(i, half)
            levels[row, group * groupsize + place] = byte % 16
            levels[row, group * groupsize + half + place] = byte // 16
    return levels


def restored(parts: tuple, groupsize: int | None) -> torch.Tensor:
    """The weight that quantized parts stand for, fp32."""
    if groupsize is None:
        return parts[0].float() * parts[1].float()[:, None]
    scales, zeros = (x.float().repeat_interleave(groupsize, dim=1) for x in parts[1].transpose(0, 1).unbind(-1))
    return (levels_one_by_one(parts[0], groupsize) - 8) * scales + zeros


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groupsize", (None, 16, 64))
@pytest.mark.parametrize("weight", WEIGHTS)
def test_no_weight_is_off_by_more_than_half_a_step(weight, groupsize, dtype):
    w = WEIGHTS[weight].to(dtype).float()
    parts = q.quantize_int8(w.to(dtype)) if groupsize is None else q.quantize_int4(w.to(dtype), groupsize)
    assert parts[1].dtype == dtype
    steps = parts[1].float()[:, None] if groupsize is None else parts[1].float()[..., 0].T  # [O,1] or [O,groups]
    wide = steps.repeat_interleave(groupsize or 64, dim=1)
    assert ((restored(parts, groupsize) - w).abs() <= wide / 2 * 1.0001 + 1e-6 * w.abs()).all()
    groups = w.unflatten(1, (-1, groupsize or 64))  # the step is the textbook's, up to rounding
    extent = groups.abs().amax(-1) / 127 if groupsize is None else (groups.amax(-1) - groups.amin(-1)) / 15
    slack = torch.finfo(dtype).eps * w.abs().amax() + torch.finfo(dtype).tiny
    assert (steps <= extent * 1.01 + slack).all()


@pytest.mark.parametrize("mode", q.MODES)
@pytest.mark.parametrize("bias, compiled", ((False, False), (True, False), slow(True, True)))
@pytest.mark.parametrize("out, groupsize, packs", [(40, 16, False), (128, 32, True)])
def test_a_layer_computes_what_its_restored_weight_would(mode, bias, compiled, out, groupsize, packs, monkeypatch):
    """With torch's CPU kernels (`packs`), and without them, as on a GPU."""
    torch.manual_seed(0)
    layer = Linear(64, out, bias=bias)
    eight = mode == "int8"
    module = Int8Linear(layer) if eight else Int4Linear(layer, groupsize)
    parts = q.quantize_int8(layer.weight.data) if eight else q.quantize_int4(layer.weight.data, groupsize)
    module.load_state_dict({**module.state_dict(), "weight": parts[0], "scales": parts[1]})
    weight = restored(parts, None if eight else groupsize)
    if packs and not eight:
        module.pack()
    elif not packs:
        monkeypatch.setattr(linear, "few", lambda x: False)

    def both(x):
        return module(x), module.first(x, 24)

    torch._dynamo.reset()  # it stops compiling a function that was compiled too often
    run = torch.compile(both, fullgraph=True) if compiled else both
    for rows in (1, 3, 9) if compiled else (1, 3, 40):
        x = torch.randn(rows, 1, 64)
        found, first = run(x)
        expected = F.linear(x, weight, layer.bias)
        assert (found - expected).abs().max() < 1e-4
        assert (first - expected[..., :24]).abs().max() < 1e-4


def test_packing_changes_no_level():
    layer = Linear(64, 2048)
    module, parts = Int4Linear(layer, 32), q.quantize_int4(layer.weight.data, 32)
    module.load_state_dict({**module.state_dict(), "weight": parts[0], "scales": parts[1]})
    module.pack()
    if module.packed:  # on a CPU with AVX2 or AVX-512
        assert not torch.equal(module.weight, parts[0])
        assert torch.equal(levels_of_packed(module.weight, module.packed), levels_of(parts[0], 32))
    assert module.weight.untyped_storage().nbytes() == 2048 * 32


def test_a_gpus_order_is_that_of_a_tensor_cores_operand():
    """Each of 32 threads holds, of a tile of 8 rows and 16 columns, 4 levels: of row t // 4, columns 2 (t % 4) and the
    next, and 8 further. A word has two tiles' levels, in the order 0 2 4 6 1 3 5 7."""
    levels, words = torch.randint(0, 16, (16, 256)), torch.zeros(2, 2, 32, 4, dtype=torch.int64)
    for thread in range(32):
        for word in range(4):
            column = 32 * word + 2 * (thread % 4)
            for place, of in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                part = levels[thread // 4 :: 8, column + of :: 128]
                words[:, :, thread, word] |= part << 4 * place
    words = words.to(torch.int32)  # wraps
    assert torch.equal(levels_of_packed(words, linear.TILES), levels.to(torch.uint8))
    stored = words.view(torch.uint8).view(16, 128)
    assert torch.equal(levels_of_packed(stored, linear.TILES), levels.to(torch.uint8))


@pytest.mark.cuda
def test_on_a_gpu_torchs_kernel_multiplies_int4():
    torch.manual_seed(0)
    for size, out, groupsize in ((256, 64, 32), (4096, 1024, 128)):
        layer = Linear(size, out).bfloat16()
        module, parts = Int4Linear(layer, groupsize), q.quantize_int4(layer.weight.data, groupsize)
        module.load_state_dict({**module.state_dict(), "weight": parts[0], "scales": parts[1]})
        module, weight = module.cuda(), restored(parts, groupsize).cuda()
        module.pack()
        assert module.packed == linear.TILES
        for rows in (1, 8, 40):
            x = torch.randn(rows, 1, size, device="cuda").bfloat16()
            expected = F.linear(x.float(), weight.float(), layer.bias.float().cuda())
            for run in (module, torch.compile(module, fullgraph=True)):
                assert (run(x) - expected).norm() < 1e-2 * expected.norm()


def test_four_bits_are_half_a_byte(checkpoint, tmp_path):
    q.quantize(checkpoint, tmp_path / "four", "int4", groupsize=32)
    before, after = open_weights(checkpoint), open_weights(tmp_path / "four")
    name = "layers.0.feed_forward.w1.weight"
    assert after[name].dtype == torch.uint8
    assert after[name].shape == (before[name].shape[0], before[name].shape[1] // 2)
    engine = Engine.load(tmp_path / "four", compile=False)
    assert engine.model.layers[0].feed_forward.w1.weight.untyped_storage().nbytes() * 2 == 96 * 64
    assert engine.model.tok_embeddings.weight.dtype == torch.float32


def dequantized(folder: Path, out: Path) -> Path:
    """A plain checkpoint with the weights that a quantized one stands for."""
    config, stored = read_config(folder), open_weights(folder)
    groupsize = config.pop("kv_fast")["quantization"]["groupsize"]
    state = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "scales":
            continue
        scales = stored.get(f"{module}.scales")
        if part == "bias" or scales is None:
            state[name] = tensor.read()
        else:
            state[name] = restored((tensor.read(), scales.read()), groupsize if len(scales.shape) > 1 else None)
    write_checkpoint(out, config, from_hf(config), state, state.__getitem__)
    return out


@pytest.fixture(scope="module", params=[("int8", False), ("int4", False), ("int4", True)], ids=str)
def pair(request, tmp_path_factory):
    """A quantized checkpoint, with biases and a head of its own, and the plain one that it equals."""
    folder, (mode, embeddings) = tmp_path_factory.mktemp("pair"), request.param
    write_random(folder / "plain", num_hidden_layers=3, attention_bias=True, mlp_bias=True)
    q.quantize(folder / "plain", folder / "quantized", mode, 32, embeddings)
    return folder / "quantized", dequantized(folder / "quantized", folder / "restored")


@pytest.mark.parametrize("method", ("full", "rocketkv", "tailorkv"))  # tailorkv asks for the next layer's queries
def test_methods_run_on_quantized_weights(method, pair):
    plan = {"batch": 2, "room": 32, "compile": False, "seed": 0}
    budget = 40 if METHODS[method].budgeted else None
    found, expected = (Engine.load(folder, method, budget, **plan) for folder in pair)
    prompt, forced = list(range(3, 60)), list(range(80, 100))
    a, b = found.logits(prompt, forced), expected.logits(prompt, forced)
    assert (a - b).abs().max() < 1e-3 * b.abs().max()


@pytest.mark.parametrize("length", (16, 83))
def test_a_prompts_slices_share_each_restored_weight(length, pair, monkeypatch):
    """Each of a layer's 5 weights is restored once, however many slices there are, and does not stay."""
    found, expected = (Engine.load(folder, compile=False) for folder in pair)
    monkeypatch.setattr(linear, "few", lambda x: x.shape[-2] == 1)
    monkeypatch.setattr(model_py, "SLICE", 16)
    prompt, forced = list(range(3, 3 + length)), [80]  # no step: in those, too, some sizes are restored
    b, count = expected.logits(prompt, forced), []
    for kind in (Int4Linear, Int8Linear):
        restore = kind.restore
        counted = lambda self, *x, restore=restore: count.append(self) or restore(self, *x)  # noqa: E731
        monkeypatch.setattr(kind, "restore", counted)
    a = found.logits(prompt, forced)
    assert (a - b).abs().max() < 1e-3 * b.abs().max()
    assert len(count) == len(set(count)) == 5 * 3
    assert not any("floats" in vars(module) for module in count)


def test_a_tied_embedding_table_may_be_quantized_too(tmp_path):
    write_random(tmp_path / "plain", tie_word_embeddings=True)
    q.quantize(tmp_path / "plain", tmp_path / "eight", "int8", embeddings=True)
    found = Engine.load(tmp_path / "eight", compile=False)
    expected = Engine.load(dequantized(tmp_path / "eight", tmp_path / "restored"), compile=False)
    prompt, forced = list(range(3, 60)), list(range(80, 90))
    assert torch.allclose(found.logits(prompt, forced), expected.logits(prompt, forced), rtol=1e-3, atol=1e-2)
    assert found.model.tok_embeddings.weight.dtype == torch.int8


def test_mistakes_are_refused_in_one_line_and_leave_nothing(checkpoint, tmp_path, capsys):
    q.quantize(checkpoint, tmp_path / "eight", "int8")
    four, eight = ["--mode", "int4", "--groupsize"], ["--mode", "int8"]
    for source, out, mode, words in (
        *[(checkpoint, "out", [*four, n], (f"groupsize {n} must", "use --groupsize 32")) for n in (5, 48, 0, -2, 1000)],
        (tmp_path / "eight", "out", [*four, 32], ["quantized already (int8)"]),
        (checkpoint, "out", [*eight, "--groupsize", 7], ["leave out --groupsize"]),
        (checkpoint, "eight", eight, ["exists"]),
        (tmp_path / "none", "out", eight, ["no checkpoint folder"]),
    ):
        args = ["--checkpoint", source, "--out", tmp_path / out, *mode]
        refused(capsys, args, *words, watch=tmp_path, tool=q.main)
    q.quantize(checkpoint, tmp_path / "four", "int4", groupsize=32)  # what the refusal names works


@pytest.mark.parametrize(
    ("width", "groupsize"), [(256, 128), (576, 64), (96, 32), (48, "use --groupsize 16"), (50, "use --groupsize 2")]
)
def test_without_a_group_size_the_largest_that_divides_is_taken_and_said(width, groupsize, tmp_path, capsys):
    """576 channels are SmolLM2's."""
    sizes = {"hidden_size": width, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 2 * width}
    args = ["--checkpoint", str(write_random(tmp_path / "plain", **sizes)), "--out", str(tmp_path / "q")]
    if isinstance(groupsize, str):
        refused(capsys, [*args, "--mode", "int4"], groupsize, watch=tmp_path, tool=q.main)
        return
    q.main([*args, "--mode", "int4"])
    assert f"groups of {groupsize} channels" in capsys.readouterr().err
    assert read_config(tmp_path / "q")["kv_fast"]["quantization"]["groupsize"] == groupsize


@pytest.mark.parametrize("about", ({"mode": "int3"}, "int8", {"mode": "int4"}, {"mode": "int4", "groupsize": 48}))
def test_an_unknown_kind_of_quantization_is_refused(about, checkpoint, tmp_path):
    q.quantize(checkpoint, tmp_path / "odd", "int4", 32)
    config = json.loads((tmp_path / "odd" / "config.json").read_text())
    config["kv_fast"]["quantization"] = about
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="int4|groupsize|shape"):
        Engine.load(tmp_path / "odd", compile=False)


MEMORY = """
from functools import partial
import quantize
quantize.write_checkpoint = partial(quantize.write_checkpoint, shard_bytes=100_000_000)
quantize.quantize(sys.argv[4], sys.argv[2] + "-small", sys.argv[3], 32)  # what first uses leave
def work():
    quantize.quantize(sys.argv[1], sys.argv[2], sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("mode", q.MODES)
def test_memory_stays_below_one_shard(mode, checkpoint, tmp_path):
    sizes = {"vocab_size": 16000, "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 8}
    config = LLAMA | sizes
    with torch.device("meta"):
        layout = Transformer(from_hf(config)).to(torch.bfloat16).state_dict()
    write_checkpoint(
        tmp_path / "plain",
        config,
        from_hf(config),
        layout,
        lambda name: torch.full(layout[name].shape, 0.5, dtype=torch.bfloat16),
        shard_bytes=200_000_000,
    )
    shards = sorted((tmp_path / "plain").glob("*.safetensors"))
    assert len(shards) > 1
    largest = max(file.stat().st_size for file in shards)
    assert peak(MEMORY, tmp_path / "plain", tmp_path / "out", mode, checkpoint) < largest
