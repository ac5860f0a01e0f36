"""KVarN: its slow reference against the equations, then the method against the reference."""

from dataclasses import replace
from functools import reduce
from itertools import product

import pytest
import references.kvarn as slow_kvarn
import torch
from conftest import write_random
from references.kvarn import SlowKVarN
from runs import LAYERS, D, Run, generations, make_plan, prefill_both, tokens, with_heads
from torch._inductor.utils import run_and_get_cpp_code
from torch.nn.functional import normalize

import kv
from engine import Engine
from kv import kvarn
from kv.kvarn import balance
from kv.parts import inductor, ops, quant
from model import Transformer

TILE = 16


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    monkeypatch.setattr(inductor, "STEP", 8)


@pytest.mark.parametrize("size, block", [(64, 64), (96, 32), (128, 128), (80, 16)])
def test_the_hadamard_matrix_is_sylvesters_orthonormal_and_symmetric(size, block):
    h, pair = slow_kvarn.hadamard(size), torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double() / 2**0.5
    assert torch.allclose(h @ h.T, torch.eye(size).double(), atol=1e-12) and torch.equal(h, h.T)
    sylvester = reduce(torch.kron, [pair] * (block.bit_length() - 1))
    assert torch.allclose(h, torch.block_diag(*[sylvester] * (size // block)), atol=1e-12)
    assert torch.equal(quant.hadamard(size, torch.device("cpu")), h.float())


def test_a_tile_of_scaled_noise_is_balanced():
    noise, channels, scales = normal(128, 64), normal(64).mul(2).exp(), normal(128).exp()
    x = noise * channels * scales[:, None]
    assert slow_kvarn.imbalance(x) > 1000
    for s_c, s_t in (slow_kvarn.balance(x), [s.flatten() for s in balance(x)]):
        assert slow_kvarn.imbalance(x / (s_c * s_t[:, None])) < 2.01
        for found, true in ((s_c, channels), (s_t, scales)):
            assert (found / true).std() < 0.1 * (found / true).mean()


def test_channels_whose_mean_is_not_0_do_not_shift_both_scales():
    x = normal(128, 64) + 30 * normal(64)
    s_c, s_t = balance(x)
    assert s_t.float().log().mean().abs() < 1e-3
    for bits, most in ((8, 0.007), (4, 0.12)):  # of the noise
        codes, scale, zero = quant.quantize((x / s_t).mT, bits, -1)
        assert ((codes * scale.float() + zero).mT * s_t - x).norm() < most * (x - x.mean(0)).norm()


def test_a_channel_that_hardly_varies_costs_the_others_little():
    x = normal(128, 64)
    x[:, 7] = 3 + 1e-4 * x[:, 7]
    s_c, _ = balance(x)
    codes, scale, zero = quant.quantize(x / s_c, 8, -1)
    assert ((codes * scale.float() + zero) * s_c - x).norm() < 0.03 * x.norm()


def test_the_earliest_of_equally_balanced_scales_is_kept():
    x = torch.full((8, 4), 0.5)
    for scale in (*slow_kvarn.balance(x), *balance(x)):
        assert torch.equal(scale, torch.ones_like(scale))


def test_deviations_by_moments_are_those_of_the_quotient():
    x = normal(128, 64) * normal(64).exp() + 30 * normal(64)
    x[:, 7] = 3 + 1e-4 * x[:, 7]
    along, across = normal(1, 128).exp(), normal(1, 64).exp()
    found = kvarn.deviation(x, x.square(), along, across)[0]
    assert (found / slow_kvarn.deviation((along.T * x * across).double(), 0) - 1).abs().max() < 1e-4


def test_slices_change_nothing(monkeypatch):
    plan, found = biased(make_plan("gqa", new=4), 2), []
    for prompt, step in ((quant.SLICE, quant.CODES), (2 * TILE, 2 * TILE * plan.n_kv_head * D), (1, 1)):
        monkeypatch.setattr(quant, "SLICE", prompt)
        monkeypatch.setattr(quant, "CODES", step)
        run, generator = Run("kvarn", plan, None, {"tile": TILE}), torch.Generator().manual_seed(0)
        run.prefill(0, tokens(plan, 1, 90, generator))
        words = [layer.packed.k.view(torch.int32) for layer in run.layers]
        found.append((run.step(tokens(plan, 1, 1, generator)), torch.stack(words)))
    for y, words in found[1:]:
        assert torch.equal(words, found[0][1]) and (y - found[0][0]).abs().max() < 1e-5


def biased(plan: kv.Plan, norm: float) -> kv.Plan:
    """A shape whose keys have biases of such a norm."""
    return replace(plan, key_biases=norm * normalize(normal(plan.n_layer, plan.n_kv_head, D), dim=-1))


@pytest.mark.parametrize(
    "bits, norm, heads", with_heads(product(((4, 2), (4, 4), (2, 8)), (0, 2)), lambda case: case[1])
)
def test_kvarn_equals_its_reference(bits, norm, heads, monkeypatch):
    """Both have the reference's scales: rounding decides at which of two equally good pairs the balancing ends.

    A key whose turned bias is rounded otherwise may become another code.
    """
    monkeypatch.setattr("kv.kvarn.balance", reference_balance)
    plan = make_plan(heads, n_layer=2)
    plan, most = (biased(plan, norm), 0.02) if norm else (plan, 1e-5)
    run = Run("kvarn", plan, None, {"kbits": bits[0], "vbits": bits[1], "tile": TILE})
    slow = SlowKVarN(plan, *bits, TILE, plan.key_biases)
    for prompt, steps in generations((100, 61, 17, 9, 5), plan.room):
        generator = torch.Generator().manual_seed(prompt)
        prefill_both(run, slow, prompt, generator)
        for _ in range(steps):
            inputs = tokens(plan, 1, 1, generator)
            for found, layer, qkv in zip(run.step(inputs), range(2), inputs, strict=True):
                assert (found[0] - slow.decode(layer, *(x[0, :, 0] for x in qkv))).abs().max() <= most
        count = max(0, (prompt + steps - 2) // TILE - 1)
        for index, layer in enumerate(run.layers):
            held, text = layer.held(0, prompt + steps), slow.texts[index]
            assert text.packed == count * TILE
            for head in range(plan.n_kv_head if count else 0):
                codes = torch.stack([codes for codes, *_ in text.key_groups[head]])
                found = kvarn.unpack(layer.packed.k[0, :count, head], bits[0])
                assert (found != codes).sum() <= codes.numel() * (0.01 if norm else 0)
            for ours, theirs in ((held.k, text.keys), (held.v, text.values)):
                assert (ours - theirs).abs().mean((1, 2)).max() <= (1e-3 if norm else 1e-6)


def reference_balance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [slow_kvarn.balance(tile) for tile in x.flatten(0, -3)]
    channel, token = (torch.stack(scales).clamp(min=quant.EPS).half() for scales in zip(*pairs, strict=True))
    return channel[:, None].view(*x.shape[:-2], 1, -1), token[..., None].view(*x.shape[:-1], 1)


@pytest.mark.parametrize(
    "method, options", [("kvarn", {"tile": TILE}), ("rocketkv", {"bits": 4}), ("omnikv", {"bits": 4})]
)
def test_a_bias_that_is_nearly_the_whole_key_costs_nothing(method, options):
    plan, errors = make_plan(), []
    budget = None if method == "kvarn" else 96
    for s in (plan, biased(plan, 300)):
        biases = torch.zeros(LAYERS, 2, D) if s.key_biases is None else s.key_biases
        run, (q, k, v) = Run(method, s, budget, options), tokens(replace(s, n_layer=1), 1, 90, torch.Generator())[0]
        turned = [ops.rerotate(b[None, :, None], torch.arange(90)[None, None], ops.inv_freq(s)) for b in biases]
        run.prefill(0, [(q, k + x, v) for x in turned])
        held = run.layers[-1].held(0, 90)
        errors.append((held.k - (k + turned[-1])[0, torch.arange(2)[:, None], held.position.long()]).norm() / k.norm())
    assert 0.01 < errors[1] < 1.01 * errors[0] + 1e-3


@pytest.mark.parametrize("name, options", (("kvarn", {"tile": 1024}), ("kivi", {"group": 1024})))
def test_a_plan_too_short_for_a_tile_takes_what_the_full_cache_takes(name, options):
    """Beside the rotation of a head's channels."""
    plan = replace(make_plan(), max_prompt=100)
    rotations = plan.n_layer * D * D * 4 * (name == "kvarn")
    full, own = (kv.planned_bytes(*args)[0] for args in (("full", plan, None, {}), (name, plan, None, options)))
    assert own <= full + rotations
    with pytest.raises(ValueError, match="must lie between"):
        kv.build(name, plan, None, dict.fromkeys(options, 1032))


def test_a_tile_that_words_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=f"a tile of 24 tokens and a head of {D} channels must be multiples of 16"):
        kv.build("kvarn", make_plan(), None, {"tile": 24})


@pytest.mark.slow
def test_a_compiled_loop_over_tiles_runs_in_threads_not_each_of_its_sums():
    """Inductor starts threads for every sum of a row that is shorter than this CPU's vectors."""
    tiles = torch.randint(16, (1, 64, 2, 64, 128))
    _, code = run_and_get_cpp_code(torch.compile(kvarn.products), torch.ones(1, 64, 2, 3, 64), kvarn.pack(tiles, 4), 4)
    kernel = code[code.index('extern "C"') :]
    assert "#pragma omp parallel" not in kernel[kernel.index("for(") :]


@pytest.mark.parametrize("v", (torch.zeros(1, 2, 90, D), torch.full((1, 2, 90, D), torch.nan)))
def test_an_output_of_zero_or_nan_has_no_error(v):
    layer = kv.build("kvarn", make_plan(), None, {"tile": TILE})[0]
    layer.prefill(0, normal(1, 6, 90, D), normal(1, 2, 90, D), v)
    assert layer.error == 0


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("rope", ({}, {"rope_scaling": YARN}))
def test_an_engine_knows_its_models_key_biases_and_warns_of_large_errors(rope, tmp_path, capsys, monkeypatch):
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512} | rope
    engine = Engine.load(write_random(tmp_path / "m", **qwen2), compile=False)
    for attention in (layer.attention for layer in engine.model.layers):
        for parameter in attention.wqkv.parameters():  # larger key biases, and as much smaller queries
            q, k, _ = parameter.data.unflatten(0, (-1, attention.head_dim)).split(attention.heads)
            q /= 20
            k *= 20 if parameter.dim() == 1 else 1
    monkeypatch.setattr("runtime.planning.WRONG", 0.015)
    for known in (True, False):
        engine.use("kvarn", options={"tile": 16, "vbits": 8})
        engine.generate([i * i % 90 + 3 for i in range(200)], max_new_tokens=2)
        assert (max(layer.error for layer in engine.layers) < 0.007) == known
        assert ("too few bits, the attention of layer 0 is off by" not in capsys.readouterr().err) == known
        monkeypatch.setattr(Transformer, "key_biases", lambda model: None)
