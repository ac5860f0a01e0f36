"""OmniKV's prefill in chunks, against a slow reference written from its description."""

import pytest
import torch
from conftest import write_random
from references.attention import causal, masked_attention
from references.omnikv import choose_chunk, chunked_attention
from runs import HEADS, TensorSizes, make_shape, tokens

import kv
from engine import Engine
from kv.omnikv_prefill import Chunks

FILTER, SPARSE = 1, (3, 4)  # layer 2 is full


def build(shape, **options):
    return kv.build("omnikv", shape, 24, {"filter_layers": [FILTER, 5], **options})


def prefill(layers, inputs) -> list[torch.Tensor]:
    return [layer.prefill(0, *qkv)[0] for layer, qkv in zip(layers, inputs, strict=True)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("r, chunk", ((1, 16), (2, 16), (0.3, 20), (0.01, 7), (1, 100)))
def test_chunks_equal_their_reference(heads, r, chunk):
    shape = make_shape(heads)
    layers, count = build(shape, prefill=r, chunk=chunk), max(1, int(r * chunk + 0.5))
    for prompt in (100, 97, 33, 7, 1):
        inputs = tokens(shape, 1, prompt, torch.Generator().manual_seed(prompt))
        found = prefill(layers, inputs)
        expected = [masked_attention(*(x[0] for x in qkv), causal()) for qkv in inputs]
        q, k, _ = (x[0] for x in inputs[FILTER])
        starts = range(0, prompt, chunk)
        chosen = [choose_chunk(q, k, start, min(start + chunk, prompt), count) for start in starts]
        for layer in SPARSE:
            expected[layer] = chunked_attention(*(x[0] for x in inputs[layer]), chosen, chunk)
        for layer, y in enumerate(found):
            if layer <= SPARSE[-1]:
                assert (y - expected[layer]).abs().max() <= 1e-5


def test_more_than_the_prompt_is_exact_and_less_is_not(tmp_path):
    folder = write_random(tmp_path / "m", num_hidden_layers=4)
    prompt = [(7 * i) % 90 + 3 for i in range(120)]
    logits = []
    for options in ({}, {"prefill": 8, "chunk": 16}, {"prefill": 1, "chunk": 16}):
        options = {"filter_layers": [0], **options}
        engine = Engine.load(folder, "omnikv", 24, options, max_prompt=120, max_new_tokens=8, compile=False)
        logits.append(engine.prefill(0, prompt))
    assert (logits[0] - logits[1]).abs().max() <= 1e-4 < (logits[0] - logits[2]).abs().max()


def test_a_long_prompt_allocates_no_square_matrix():
    shape = make_shape()
    inputs = tokens(shape, 1, 2000, torch.Generator().manual_seed(0))[0]
    chunks = Chunks(1, 50)
    with TensorSizes() as sizes:
        chunks.choose(*inputs[:2])
        chunks.attend(*inputs)
    assert max(sizes.found) <= 2000 * shape.n_head * 32 < 2000 * 2000
