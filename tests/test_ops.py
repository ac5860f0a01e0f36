"""The tensor primitives against loops."""

from functools import partial

import pytest
import torch
from conftest import slow
from references.attention import masked_attention

from kv.parts import attention, inductor, ops


def naive(q, k, v, seen):
    """Attention of every query, [B,Hq,N,D], to the slots that `seen(row, n)` lists."""
    rows = [masked_attention(q[b], k[b], v[b], partial(seen, b)) for b in range(q.shape[0])]
    return torch.stack(rows).to(q.dtype)


def qkv(batch, heads, kv_heads, queries, slots, dim=8, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, slots, dim), (batch, kv_heads, slots, dim))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def test_a_softmax_by_parts_is_a_softmax_where_parts_have_no_token():
    logits = torch.randn(2, 3, 8 * inductor.PARTS, generator=torch.Generator().manual_seed(0)) * 20
    logits[0, :, 5:], logits[1, 0, 7], logits[1, 2, : 8 * inductor.PARTS - 1] = -torch.inf, 1e5, -torch.inf
    assert torch.allclose(inductor.softmax(logits), logits.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("kv_heads", (1, 2, 6))
@pytest.mark.parametrize("window", (None, 1, 5, 40, 100))
def test_causal_attention_sees_the_past_within_the_window(kv_heads, window):
    q, k, v = qkv(1, 6, kv_heads, 41, 41)
    expected = naive(q, k, v, lambda b, n: list(range(max(0, n + 1 - (window or 41)), n + 1)))
    assert torch.allclose(attention.causal_attention(q, k, v, window), expected, atol=1e-5)


multiplies = pytest.mark.skipif(not attention.can_multiply(), reason="this CPU multiplies bf16 otherwise")


@multiplies
@pytest.mark.parametrize("queries", (1300, 300, 5))
@pytest.mark.parametrize("dim, kv_heads", ((64, 2), (80, 1), (128, 4)))
@pytest.mark.parametrize("outlier", (0, 12, 25, 300))  # how far the logits of three keys are above those of others
def test_attention_by_products_is_as_exact_as_the_kernel(monkeypatch, queries, dim, kv_heads, outlier):
    q, k, v = qkv(1, 4, kv_heads, queries, 1300, dim, torch.bfloat16)
    k[..., 0] += 300  # about the same for all keys: logits in the hundreds
    k[..., 2], q[..., 2] = 300, 60  # the same: in the thousands
    q[..., 1], k[:, :, [103, 700, 1000], 1] = 8, torch.tensor([1, 1.04, 2]).bfloat16() * outlier * dim**0.5 / 8
    exact = attention.suffix_attention(q.double(), k.double(), v.double())
    monkeypatch.setattr(attention, "MULTIPLIED", chosen := set())  # whatever an earlier test chose
    kernel = attention.suffix_attention(q, k, v)
    chosen.add((torch.bfloat16, dim))
    found = attention.suffix_attention(q, k, v)
    assert outlier > 12 or torch.equal(found, kernel) == (queries == 5)  # few take longer by products
    assert (found - exact).norm() <= 0.004 * exact.norm()  # of the kernel 0.002 to 0.003
    if queries == 1300:
        assert torch.equal(attention.causal_attention(q, k, v), found)


@multiplies
@pytest.mark.parametrize(
    "dim, offset", ((64, 0), (80, 0), (128, 0), (64, 20000), (80, 2000), (128, 2000))
)  # of all logits
def test_attention_by_products_is_exact_where_logits_are_sharp(monkeypatch, dim, offset):
    q, k, v = qkv(1, 4, 2, 600, 1300, dim, torch.bfloat16)
    k[..., 2], q[..., 2] = 256, offset * dim**0.5 / 256
    q[..., 1] = 60 if offset else 0  # 200 tokens far before the others
    if not offset:
        q *= 6
    k[:, :, :200, 1] += 4
    exact = attention.suffix_attention(q.double(), k.double(), v.double())
    monkeypatch.setattr(attention, "MULTIPLIED", {(torch.bfloat16, dim)})
    found = attention.suffix_attention(q, k, v)
    worst = ((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max()  # of a row
    assert worst <= (0.008 if dim == 64 and not offset else 0.03), worst  # of the kernel 0.005, 0.02 with an offset


def test_attention_by_products_accepts_only_exponentials():
    assert torch.tensor(attention.EXACT).logit().exp() == pytest.approx(attention.EXACT, rel=5e-4)


@multiplies
def test_attention_by_products_passes_on_what_is_not_finite(monkeypatch):
    q, k, v = qkv(1, 2, 1, 600, 600, 64, torch.bfloat16)
    k[0, 0, 3, 5] = torch.nan
    monkeypatch.setattr(attention, "MULTIPLIED", {(torch.bfloat16, 64)})
    assert attention.causal_attention(q, k, v)[:, :, 3:].isnan().all()


def test_a_window_may_cross_the_blocks_of_banded_attention():
    q, k, v = qkv(1, 1, 1, 2500, 2500)
    found = attention.causal_attention(q, k, v, window=1100)
    for n in (0, 1023, 1024, 1099, 1100, 2047, 2048, 2499):
        seen = list(range(max(0, n - 1099), n + 1))
        expected = naive(q[:, :, n, None], k, v, lambda b, _, seen=seen: seen)
        assert torch.allclose(found[:, :, n, None], expected, atol=1e-5)


@pytest.mark.parametrize("heads", ((4, 4), (6, 2), (4, 1)))
def test_attend_reads_what_the_mask_allows(heads):
    q, k, v = qkv(2, *heads, 1, 100)
    mask = torch.rand(2, 100, generator=torch.Generator().manual_seed(1)) < 0.3
    expected = naive(q, k, v, lambda b, n: mask[b].nonzero()[:, 0].tolist())
    assert torch.allclose(ops.attend(q, k, v, mask), expected, atol=1e-5)


@pytest.mark.parametrize("heads, flex", [((4, 4), False), ((6, 2), False), ((4, 1), False), slow((6, 2), True)])
def test_each_of_several_queries_sees_one_slot_more(heads, flex):
    q, k, v = qkv(3, *heads, 5, 320, dim=16)
    attend = torch.compile(inductor.flex_prefix, fullgraph=True) if flex else ops.attend_prefix
    for lengths in ((1, 124, 128), (129, 255, 316), (2, 300, 252)):
        expected = naive(q, k, v, lambda b, n, lengths=lengths: list(range(lengths[b] + n)))
        assert torch.allclose(attend(q, k, v, torch.tensor(lengths)), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", (1, 2))
def test_flash_decoding_by_block_mask_reads_each_heads_region(heads):
    q, k, v = qkv(3, 6, 2, 1, 500, dim=16)
    k, v = (x[:, :heads].expand(-1, 2, -1, -1) for x in (k, v))  # of one head: all regions are in the same slots
    flex = torch.compile(inductor.flex_regions, fullgraph=True)
    for starts, lengths in (
        ((384, 0, 256, 1, 127, 499), (1, 127, 128, 1, 2, 1)),
        ((250, 0, 129, 3, 0, 255), [245] * 6),
    ):
        first, length = torch.tensor(starts).view(3, 2), torch.tensor(lengths).view(3, 2)
        slot = torch.arange(500) - first[..., None]
        mask, block = (slot >= 0) & (slot < length[..., None]), torch.arange(500) // inductor.BLOCK
        expected = ops.attend(q, k, v, mask)
        if heads == 2:  # blocks that are not read
            last = (first + length - 1)[..., None] // inductor.BLOCK
            unread = ((block < first[..., None] // inductor.BLOCK) | (block > last))[..., None]
            k, v = k.masked_fill(unread, torch.nan), v.masked_fill(unread, torch.nan)
        assert torch.allclose(flex(q, k, v, first, length), expected, atol=1e-5)
        k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)


@pytest.mark.slow
def test_flash_decoding_reads_the_blocks_that_are_used_by_any_mask(monkeypatch):
    q, k, v = qkv(2, 6, 2, 1, 500, dim=16)
    used, mask = torch.tensor([130, 384]), torch.rand(2, 2, 500) < 0.5
    mask &= torch.arange(500) < used[:, None, None]
    expected = ops.attend(q, k, v, mask)
    for row, n in enumerate((256, 384)):  # blocks that are not read
        k[row, :, n:], v[row, :, n:] = torch.nan, torch.nan
    monkeypatch.setattr(inductor, "flexes", lambda q, k: True)
    found = torch.compile(ops.attend_used, fullgraph=True)(q, k, v, mask, used)
    assert torch.allclose(found, expected, atol=1e-5)


def test_store_writes_active_rows_only_and_others_past_the_end():
    buffer, new = torch.zeros(3, 2, 5, 4), torch.ones(3, 2, 1, 4)
    ops.store(buffer, new, torch.tensor([[3], [0], [2]]), torch.tensor([True, False, True]))
    expected = torch.zeros(3, 2, 5, 4)
    expected[0, :, 3] = expected[1, :, 4] = expected[2, :, 2] = 1
    assert torch.equal(buffer, expected)


def test_a_span_covers_the_length_and_follows_it():
    cpu = torch.device("cpu")
    span = inductor.symbol(8192, cpu)
    for length in (1, 255, 256, 257, 5000):
        before, span = span, inductor.covering(span, length, 8192)
        assert length <= span.shape[0] < length + inductor.STEP
        assert (span is before) == (length in (255, 256))
    assert inductor.covering(span, 8190, 8192).shape[0] == 8192
    assert inductor.covering(span, 70, 128).shape[0] == 128


@pytest.mark.cuda
def test_flash_decoding_on_a_gpu_equals_attend():
    q, k, v = (x.cuda() for x in qkv(3, 28, 4, 1, 5000, dim=128, dtype=torch.bfloat16))
    flex = torch.compile(inductor.flex_prefix, fullgraph=True)
    for lengths in ((1, 127, 4999), (129, 4096, 5000)):
        length = torch.tensor(lengths, device="cuda")
        expected = ops.attend(q, k, v, torch.arange(5000, device="cuda") < length[:, None])
        assert torch.allclose(flex(q, k, v, length).float(), expected.float(), atol=2e-2)


def long_sums(device: str):
    """K or V of 2 rows and 3 heads, in the buffer of a cache; queries and weights; what exact sums give."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(2, 3, 5004, 32, generator=generator).bfloat16().to(device)
    x = buffer[:, :, :-1]  # 5,003: neither rows of 16 bytes nor equal parts
    q, weight = (torch.randn(2, 3, 4, n, generator=generator).bfloat16().to(device) for n in (32, 5003))
    return x, q, weight, q.double() @ x.double().mT, weight.double() @ x.double()


def test_long_products_in_parts_are_the_sums(monkeypatch):
    x, q, weight, dots, sums = long_sums("cpu")
    # Only a GPU's bmm has an out_dtype.
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: torch.einsum("bij,bjk->bik", a.to(out_dtype), b.float()))
    assert torch.allclose(inductor.products(q, x).double(), dots, atol=1e-4)
    assert torch.allclose(inductor._in_parts(weight.float(), x).double(), sums, atol=1e-3)


@pytest.mark.cuda
def test_on_a_gpu_long_sums_are_exact():
    x, q, weight, dots, sums = long_sums("cuda")
    assert inductor.multiplies(x)
    found = torch.compile(lambda q, weight, x: (ops.dots(q, x, 0.5), ops.weighted_sum(weight, x)), fullgraph=True)
    scores, y = found(q, weight.float(), x)
    assert torch.allclose(scores.double(), dots / 2, atol=1e-3) and torch.allclose(y.double(), sums, atol=1e-1)


@pytest.mark.parametrize("compiled", (False, slow(True)))
def test_a_query_of_zeros_attends_to_all_keys_alike(compiled):
    rows, keys, empty = torch.zeros(1, 2, 3, 8), torch.randn(1, 2, 4, 10), torch.arange(10)[None] >= 6
    weights = torch.compile(ops.sparq_weights) if compiled else ops.sparq_weights
    found = weights(rows, torch.arange(4).expand(1, 2, 4), keys, empty)
    assert torch.allclose(found, torch.where(empty, 0.0, 1 / 6).expand(1, 2, 3, 10))


def test_ranking_finds_what_a_top_k_finds():
    scores = torch.randint(-3, 3, (2, 5, 300), generator=torch.Generator().manual_seed(0)).float()
    expected = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = (scores.long() << 32) - torch.arange(300)
    for k in (1, 7, 300):
        assert torch.equal(inductor.ranked(rank, k), expected[..., :k])
