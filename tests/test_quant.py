"""Packed codes: the values they stand for, to the bit, and attention that reads them in packed form."""

import warnings
from dataclasses import replace

import pytest
import torch
from conftest import slow
from references.quantized import dequantize
from references.quantized import quantize as slow_quantize
from runs import make_plan

from kv.parts import quant
from runtime.cpu import Parts

BITS = (1, 2, 4, 8)
every_width = pytest.mark.parametrize("bits", BITS)
# Scales and offsets of groups. Scale 0 makes them constant, 1e-6 is below the smallest step, -3e4 is near fp16's limit.
KINDS = [(1.0, 0.0), (1.0, 100.0), (0.01, -3.0), (1e-6, 0.5), (0.0, 0.0), (0.0, 1 / 3), (200.0, 0.0), (1000.0, -3e4)]


def groups(count: int, size: int) -> torch.Tensor:
    """Random groups [kinds,count,size]."""
    x = torch.randn(len(KINDS), count, size, generator=torch.Generator().manual_seed(size))
    scale, offset = torch.tensor(KINDS)[:, :, None, None].unbind(1)
    return x * scale + offset


def decoded(x: torch.Tensor, bits: int, size: int) -> torch.Tensor:
    """Vectors x [...,D], quantized and dequantized by the reference; `size` channels share a scale."""
    parts = [dequantize(*slow_quantize(part, bits)) for part in x.reshape(-1, size)]
    return torch.stack(parts).float().view(x.shape)


def test_numbers_beyond_fp16_are_clipped():
    for x in (torch.tensor([[-3e6, 3e6]]), torch.tensor([[1e5, 1e5 + 1]]), torch.tensor([[-2e5, -1e5]])):
        codes, scale, zero = quant.quantize(x, 4, -1)
        found = codes * scale.float() + zero.float()
        assert found.isfinite().all() and ((found - x).abs() <= (x.abs() - 65504).clamp(min=0) + 1e5).all()


@every_width
@pytest.mark.parametrize("dim", (-1, -2))
def test_codes_survive_packing_into_the_fewest_bytes(dim, bits):
    for length in range(1, 41):
        every = torch.arange(2**bits).repeat(-(-3 * length // 2**bits) + 1)[: 3 * length]
        codes = every.to(torch.uint8).view(3, length)
        codes = codes if dim == -1 else codes.mT
        packed = quant.pack(codes, bits, dim)
        assert packed.dtype == torch.uint8 and packed.shape[dim] == -(-length * bits // 8)
        assert packed.numel() == 3 * packed.shape[dim]
        assert torch.equal(quant.unpack(packed, bits, dim, length), codes.int())


def test_a_byte_holds_codes_that_are_far_apart():
    codes = torch.tensor([1, 2, 3, 0, 2], dtype=torch.uint8)
    assert quant.pack(codes, 2, -1).tolist() == [1 + (3 << 2) + (2 << 4), 2 + (0 << 2)]
    assert quant.pack(codes, 4, -1).tolist() == [1 + (0 << 4), 2 + (2 << 4), 3]


@pytest.mark.parametrize("bits", (1, 2))
def test_a_word_holds_adjacent_codes(bits):
    codes = torch.randint(2**bits, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    words = quant.pack_words(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (3, 2 * bits)
    assert torch.equal(quant.unpack_words(words, bits), codes.int())
    first = sum(code << bits * i for i, code in enumerate(codes[0, : 32 // bits].tolist()))
    assert int(words[0, 0]) % 2**32 == first


def both_ways(x: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Codes, scales and zero points of groups [...,n], quantized along the last and along the second-last dimension."""
    across = [part.mT for part in quant.quantize(x.mT.contiguous(), bits, -2)]
    return [*quant.quantize(x, bits, -1), *across]


@every_width
@pytest.mark.parametrize("compiled", (False, slow(True)))
def test_quantize_equals_the_reference_to_the_bit(compiled, bits):
    x = groups(20, 16)
    found = (torch.compile(both_ways, dynamic=False) if compiled else both_ways)(x, bits)
    assert [part.dtype for part in found] == [torch.uint8, torch.float16, torch.float16] * 2
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))
    for group, *parts in zip(x.flatten(0, 1), *(part.flatten(0, 1) for part in found[:3]), strict=True):
        for part, expected in zip(parts, slow_quantize(group, bits), strict=True):
            assert torch.equal(part.to(expected.dtype), expected.expand(part.shape))


@every_width
def test_the_error_is_at_most_half_a_step_and_the_zero_points_rounding(bits):
    x = groups(500, 16)
    codes, scale, zero = quant.quantize(x, bits, -1)
    missed = (dequantize(codes, scale, zero) - x.double()).abs()
    cut = zero.double().abs() * 2**-11 + 2**-25  # fp16 has 11 significant bits, and steps of 2^-24 below 2^-14
    assert (missed <= scale.double() * (0.5 + 1e-4) + cut).all()
    assert codes.amin() == 0 and codes.amax() == 2**bits - 1


@every_width
@pytest.mark.parametrize("head_dim", (16, 64, 80, 96, 128))
def test_vectors_decode_from_rows_of_bytes_as_in_the_reference(head_dim, bits):
    x = torch.cat([groups(3, head_dim).flatten(0, 1), torch.zeros(1, head_dim)])
    rows = quant.pack_vectors(x, bits)
    assert rows.dtype == torch.uint8 and rows.shape == (len(x), quant.vector_bytes(head_dim, bits))
    scales = {16: 1, 64: 2, 80: 5, 96: 3, 128: 4}[head_dim]
    assert rows.shape[1] == head_dim * bits // 8 + 4 * scales
    assert torch.equal(quant.unpack_vectors(rows, bits, head_dim), decoded(x, bits, head_dim // scales))


@pytest.mark.slow
def test_a_compiled_round_trip_is_the_same_to_the_bit():
    def trip(x, bits, head_dim):
        rows = quant.pack_vectors(x, bits)
        return rows, quant.unpack_vectors(rows, bits, head_dim)

    for bits, head_dim in ((1, 80), (4, 128), (8, 16)):
        x = groups(3, head_dim)
        for a, b in zip(torch.compile(trip, dynamic=False)(x, bits, head_dim), trip(x, bits, head_dim), strict=True):
            assert torch.equal(a, b)


def filled(bits: int, group: int, head_dim: int) -> tuple:
    """Packed storage with two rows of five groups, four of them in use, and its K and V [B,Hk,4 group,D]."""
    plan = replace(make_plan(batch=2), head_dim=head_dim)
    packed, generator = quant.Packed(plan, 5, group, bits), torch.Generator().manual_seed(bits)
    k, v = (torch.randn(2, plan.n_kv_head, 4 * group, head_dim, generator=generator) for _ in range(2))
    for row in range(2):
        packed.fill(row, k[row], v[row])
    return packed, k, v


@every_width
@pytest.mark.parametrize("group, head_dim", [(8, 16), (24, 80), (64, 64)])  # 24 is no power of two
def test_attention_to_packed_tokens_equals_attention_to_their_dequantized_values(group, head_dim, bits, monkeypatch):
    packed, k, v = filled(bits, group, head_dim)
    keys, values = packed.keys(0, 4), packed.values(0, 4)
    assert torch.equal(keys, decoded(k.unflatten(2, (4, group)).mT, bits, group).mT.flatten(2, 3))
    assert torch.equal(values, decoded(v, bits, quant.channels(head_dim)))
    assert torch.equal(packed.keys(1, 2), keys[:, :, group : 3 * group])
    assert torch.equal(packed.values(1, 2), values[:, :, group : 3 * group])
    rows, weight = torch.randn(2, 2, 3, head_dim), torch.rand(2, 2, 3, 4 * group)
    for tokens in (4096, 2 * group, group, 1):  # tokens per slice
        monkeypatch.setattr(quant, "SLICE", tokens)
        monkeypatch.setattr(quant, "CODES", tokens * 2 * 2 * head_dim)  # of two rows and KV heads
        for n in (4, 3, 1):
            seen, part = slice(0, n * group), weight[..., : n * group]
            assert (packed.dots(rows, n) - rows @ keys[:, :, seen].mT).abs().max() <= 1e-4
            assert (packed.weighted_sum(part, n) - part @ values[:, :, seen]).abs().max() <= 1e-4
        again, *_ = filled(bits, group, head_dim)
        assert all(torch.equal(a, b) for a, b in zip(packed.buffers(), again.buffers(), strict=True))


@pytest.mark.slow
@every_width
def test_compiled_attention_to_packed_tokens_is_the_same(bits):
    packed, *_ = filled(bits, 24, 80)
    rows, weight = torch.randn(2, 2, 3, 80), torch.rand(2, 2, 3, 72)
    dots, sums = (torch.compile(function, dynamic=False) for function in (packed.dots, packed.weighted_sum))
    assert (dots(rows, 3) - packed.dots(rows, 3)).abs().max() <= 1e-4
    assert (sums(weight, 3) - packed.weighted_sum(weight, 3)).abs().max() <= 1e-4


@every_width
def test_a_group_is_stored_where_it_is_due_and_nowhere_else(bits):
    packed, k, v = filled(bits, 16, 16)
    whole = [x.clone() for x in packed.buffers()]
    packed.store(k[:, :, 16:32], v[:, :, 16:32], torch.tensor([4, 0]), torch.tensor([True, False]))
    for old, new in zip(whole, packed.buffers(), strict=True):
        assert torch.equal(new[0, :, 4], old[0, :, 1]) and torch.equal(new[0, :, :4], old[0, :, :4])
        assert torch.equal(new[1, :, :-1], old[1, :, :-1])


def test_a_group_fills_whole_bytes():
    with pytest.raises(ValueError, match="multiple of 8 tokens, not 12"):
        quant.Packed(make_plan(), 1, 12, 4)


@pytest.mark.slow
def test_a_step_that_mixes_bf16_and_fp16_compiles_without_a_warning():
    x, scale = torch.randn(3, 64).bfloat16(), torch.rand(3, 1).half()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "bf16 and fp16")
        y = Parts()(lambda _, x, scale: (x * scale.to(torch.bfloat16) + scale).half(), None, x, scale)
    assert y.dtype == torch.float16
