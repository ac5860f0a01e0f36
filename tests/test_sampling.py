"""Sampling: temperature, top-k, top-p and the noise."""

import pytest
import torch

from engine import FAILED, Sampling, sample

VOCAB = 50


def draw(logits, n=4000, seed=0, request=0, **how):
    """n tokens of one request at positions 0 ... n-1."""
    how = Sampling(seed=seed, **how)
    position = torch.arange(n)
    requests = torch.full((n,), request)
    return sample(logits.expand(n, -1), how.variant, *how.tensors(torch.device("cpu")), requests, position)


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def test_temperature_zero_takes_the_best(logits):
    assert draw(logits, temperature=0.0).unique().tolist() == [logits.argmax()]


@pytest.mark.parametrize("temperature", (0.5, 1.0, 2.0))
def test_samples_follow_the_softmax(logits, temperature):
    share = draw(logits, 20000, temperature=temperature).bincount(minlength=VOCAB) / 20000
    assert (share - (logits / temperature).softmax(-1)).abs().max() < 0.015


def test_top_k_keeps_the_k_best_in_proportion(logits):
    share = draw(logits, 20000, temperature=1.0, top_k=3).bincount(minlength=VOCAB) / 20000
    best = logits.topk(3).indices
    expected = torch.zeros(VOCAB).index_copy(0, best, logits[best].softmax(-1))
    assert (share - expected).abs().max() < 0.015
    assert set(draw(logits, temperature=1.0, top_k=1).tolist()) == {int(logits.argmax())}


def test_top_p_keeps_the_fewest_tokens_that_hold_the_mass(logits):
    p, order = logits.softmax(-1).sort(descending=True)
    count = int((p.cumsum(-1) < 0.6).sum()) + 1
    assert set(draw(logits, 20000, temperature=1.0, top_p=0.6).tolist()) == set(order[:count].tolist())
    assert set(draw(logits, temperature=1.0, top_p=1e-9).tolist()) == {int(logits.argmax())}


def test_noise_is_a_function_of_seed_request_and_position(logits):
    one = draw(logits, temperature=1.0)
    assert torch.equal(one, draw(logits, temperature=1.0))
    assert not torch.equal(one, draw(logits, temperature=1.0, seed=1))
    assert not torch.equal(one, draw(logits, temperature=1.0, request=1))
    how = Sampling(temperature=1.0)
    alone = [
        int(sample(logits[None], "plain", *how.tensors(torch.device("cpu")), torch.tensor([0]), torch.tensor([i])))
        for i in (0, 17, 99)
    ]
    assert alone == one[[0, 17, 99]].tolist()


def test_extreme_settings_are_greedy(logits):
    best = {int(logits.argmax())}
    for how in ({"temperature": 1e-40}, {"temperature": 1.0, "top_p": 1e-300}, {"temperature": 1.0, "top_k": 1}):
        assert set(draw(logits, 50, **how).tolist()) == best
    assert len(set(draw(logits, 50, temperature=1.0, top_k=10**400).tolist())) > 5


def test_top_k_1_takes_the_first_of_equally_good_tokens():
    tied = torch.tensor([0.0, 3.0, 3.0, 1.0, 3.0])
    assert set(draw(tied, 200, temperature=1.0, top_k=1).tolist()) == {1} == set(draw(tied, 9).tolist())
    assert Sampling(0, top_k=1).variant == Sampling(1.0, top_k=1, top_p=0.9).variant == "greedy"


@pytest.mark.parametrize("cut", ({"top_k": 5}, {"top_p": 0.9}, {"top_k": 1, "top_p": 0.9}))
def test_top_k_and_top_p_are_refused_at_temperature_zero(cut):
    with pytest.raises(ValueError, match="temperature 0 takes the best token"):
        Sampling(temperature=0, **cut)


@pytest.mark.parametrize("bad", ({"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}))
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError):
        Sampling(**{"temperature": 1.0} | bad)


@pytest.mark.parametrize("how", ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}))
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
def test_a_row_with_a_logit_that_is_not_finite_fails_alone(logits, how, bad):
    rows = logits.repeat(3, 1)
    rows[1, 7] = bad
    sampling, counter = Sampling(**how), torch.arange(3)
    knobs = sampling.tensors(torch.device("cpu"))
    tokens = sample(rows, sampling.variant, *knobs, counter, counter)
    expected = sample(logits.repeat(3, 1), sampling.variant, *knobs, counter, counter)
    assert tokens[1] == FAILED and expected.min() >= 0
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()
