"""Sampling: temperature, top-k, top-p, min-p, the repetition penalty, generation_config.json and the noise."""

import json

import pytest
import torch
from conversations import answers_to
from test_model import LLAMA, converted, hf_model
from transformers import GenerationConfig, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from engine import FAILED, Engine, Sampling, sample
from runtime.checkpoint import read_sampling, unsupported_sampling

VOCAB = 50
PROMPTS = [[(7 * i) % 90 + 3 for i in range(n)] for n in (40, 3, 97)]


def draw(logits, n=4000, seed=0, request=0, seen=None, **how):
    """n tokens of one request at positions 0 ... n-1."""
    how = Sampling(seed=seed, **how)
    position = torch.arange(n)
    requests = torch.full((n,), request)
    return sample(logits.expand(n, -1), how.variant, *how.tensors(torch.device("cpu")), requests, position, seen)


@pytest.fixture
def logits():
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def shares(logits, **how):
    return draw(logits, 20000, **how).bincount(minlength=VOCAB) / 20000


@pytest.mark.parametrize("temperature", (0.5, 1.0, 2.0))
def test_samples_follow_the_softmax(logits, temperature):
    assert (shares(logits, temperature=temperature) - (logits / temperature).softmax(-1)).abs().max() < 0.015


def test_top_k_keeps_the_k_best_in_proportion(logits):
    best = logits.topk(3).indices
    expected = torch.zeros(VOCAB).index_copy(0, best, logits[best].softmax(-1))
    assert (shares(logits, temperature=1.0, top_k=3) - expected).abs().max() < 0.015
    assert len(draw(logits, 50, temperature=1.0, top_k=10**400).unique()) > 5


def test_top_p_keeps_the_fewest_tokens_that_hold_the_mass(logits):
    p, order = logits.softmax(-1).sort(descending=True)
    count = int((p.cumsum(-1) < 0.6).sum()) + 1
    assert set(draw(logits, 20000, temperature=1.0, top_p=0.6).tolist()) == set(order[:count].tolist())


@pytest.mark.parametrize("temperature", (0.5, 2.0))
@pytest.mark.parametrize("cut", ({}, {"top_k": 20}))
def test_min_p_cuts_what_transformers_cuts(logits, temperature, cut):
    expected = MinPLogitsWarper(0.2)(None, logits[None] / temperature)[0].softmax(-1)
    share = shares(logits, temperature=temperature, min_p=0.2, **cut)
    assert 1 < (expected > 0).sum() < 20 and (share - expected).abs().max() < 0.015
    assert not share[expected == 0].any()


@pytest.mark.parametrize("penalty", (0.7, 1.8))
def test_the_penalty_is_that_of_transformers_and_precedes_temperature_and_cuts(logits, penalty):
    seen = torch.arange(VOCAB) % 3 == 0
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen.nonzero().T, logits[None])[0]
    assert draw(logits, 9, seen=seen, repetition_penalty=penalty).unique().tolist() == [expected.argmax()]
    for how in ({"temperature": 1.5}, {"temperature": 1.5, "top_k": 9, "min_p": 0.05}):
        found = draw(logits, 200, seen=seen, repetition_penalty=penalty, **how)
        assert torch.equal(found, draw(expected, 200, **how)) and not torch.equal(found, draw(logits, 200, **how))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """transformers' model, and our checkpoint with its weights."""
    theirs = hf_model(LLAMA)
    return theirs, converted(theirs, LLAMA, tmp_path_factory.mktemp("penalty"))


def hf_answer(model, prompt: list[int], new: int = 20, penalty: float = 1.3) -> list[int]:
    how = {"do_sample": False, "repetition_penalty": penalty, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([prompt]), max_new_tokens=new, **how)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("lag", (0, 1))
def test_penalized_greedy_answers_of_ragged_prompts_are_those_of_transformers(pair, lag):
    model, folder = pair
    engine = Engine.load(folder, batch=2, compile=False)
    engine.lag = lag
    plain = engine.generate(PROMPTS, 20)
    assert engine.state.seen is None  # no cost without a penalty
    found = [answer.tokens for answer in engine.generate(PROMPTS, 20, repetition_penalty=1.3)]
    assert found == [hf_answer(model, prompt) for prompt in PROMPTS]
    assert all(answer.tokens != tokens for answer, tokens in zip(plain, found, strict=True))
    assert engine.generate(PROMPTS, 20) == plain


@pytest.mark.parametrize("lag, stepwise", ((0, False), (1, True)))
def test_the_penalty_knows_what_questions_forks_and_saved_rows_hold(pair, lag, stepwise, tmp_path):
    model, folder = pair
    engine, how = Engine.load(folder, batch=3, compile=False), {"repetition_penalty": 1.3, "stepwise": stepwise}
    engine.lag, text = lag, PROMPTS[0]
    (row,) = engine.start(text)
    text = text + engine.ask([row], None, 6)[0].tokens  # without a penalty, and before there is anything to know
    rows = [row, row.fork()]
    row.save(tmp_path / "row.kv")
    rows.append(engine.load_row(tmp_path / "row.kv"))
    texts = [text] * 3
    for questions in ([[1, 2, 3], [77], [9] * 8], [[5], [4, 150], [8]], None):
        answers = answers_to(engine, rows, questions, 12, **how)
        texts = [text + question for text, question in zip(texts, questions or [[]] * 3, strict=True)]
        assert [answer.tokens for answer in answers] == [hf_answer(model, text, 12) for text in texts]
        texts = [text + answer.tokens for text, answer in zip(texts, answers, strict=True)]


@pytest.mark.slow
def test_compiled_penalties_equal_eager_ones_and_cost_the_other_steps_nothing(pair):
    compiled, eager = (Engine.load(pair[1], batch=2, compile=c, seed=0) for c in (True, False))
    sampled = {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02}
    hows = ({}, {"repetition_penalty": 1.3}, sampled | {"repetition_penalty": 1.3}, {"repetition_penalty": 0.8}, {})
    counts, found = [], []
    for how in hows:
        found.append([answer.tokens for answer in compiled.generate(PROMPTS, 12, **how)])
        assert found[-1] == [answer.tokens for answer in eager.generate(PROMPTS, 12, **how)]
        counts.append(compiled.stats.compiles)
    assert found[0] == found[4] != found[1] and counts[1] == counts[0] + 1 and counts[2:] == [counts[2]] * 3


def test_a_penalty_is_refused_where_several_tokens_are_verified_at_once(pair):
    engine = Engine.load(pair[1], "exact_topk", 400, speculate=2, compile=False, seed=0)
    with pytest.raises(ValueError, match="leave out --speculate"):
        engine.generate(PROMPTS[:1], 4, repetition_penalty=1.1)
    how = {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1}
    full = Engine.load(pair[1], compile=False, seed=0)
    assert engine.generate(PROMPTS[0], 20, **how) == full.generate(PROMPTS[0], 20, **how)


def hf_processors(model, config: dict, monkeypatch, **given):
    """Whether transformers samples, how it searches, and its logits processors, under a generation_config.json."""
    monkeypatch.setattr(model, "generation_config", GenerationConfig.from_dict(config | {"eos_token_id": 2}))
    merged, _ = model._prepare_generation_config(None, **given)
    model._prepare_special_tokens(merged, device="cpu")
    ids = torch.tensor([[3, 4]])
    processors = model._get_logits_processor(merged, input_ids_seq_length=2, encoder_input_ids=ids, device="cpu")
    return merged.do_sample, merged.get_generation_mode(), processors


def written(folder, config: dict):
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


CONFIGS = (
    {},
    {"temperature": 0.7},
    {"do_sample": None, "temperature": 0.7, "top_p": 0.5},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "top_k": None, "top_p": None, "temperature": None, "min_p": 0.2},
    {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1.0},
    {"do_sample": True, "top_k": 5, "repetition_penalty": 1.7},
    {"do_sample": False, "top_k": 5, "repetition_penalty": 1.7},
)


@pytest.mark.parametrize("flag", (None, 0.0, 0.5))
@pytest.mark.parametrize("config", CONFIGS)
def test_generation_config_means_what_transformers_makes_of_it(pair, tmp_path, monkeypatch, config, flag):
    given = {} if flag is None else {"do_sample": flag > 0} | ({"temperature": flag} if flag else {})
    samples, _, processors = hf_processors(pair[0], config, monkeypatch, **given)
    logits = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 2  # more tokens than the default top_k
    expected = processors(torch.tensor([[3, 4]]), logits[None])[0]
    expected = expected.softmax(-1) if samples else torch.eye(len(logits))[expected.argmax()]
    seen = (torch.arange(len(logits)) == 3) | (torch.arange(len(logits)) == 4)
    found = draw(logits, 20000, seen=seen, **read_sampling(written(tmp_path, config), flag))
    share = found.bincount(minlength=len(logits)) / 20000
    assert not share[expected == 0].any() and (share - expected).abs().max() < 0.015


UNSUPPORTED = {  # values that change what transformers does, and one that does not
    "num_beams": (4, 1),
    "guidance_scale": (1.5, 1.0),
    "no_repeat_ngram_size": (3, 0),
    "encoder_no_repeat_ngram_size": (3, 0),
    "encoder_repetition_penalty": (1.2, 1.0),
    "min_length": (9, 0),
    "min_new_tokens": (9, 0),
    "suppress_tokens": ([5], None),
    "begin_suppress_tokens": ([5], None),
    "bad_words_ids": ([[5]], None),
    "forced_bos_token_id": (5, None),
    "forced_eos_token_id": (2, None),
    "exponential_decay_length_penalty": ([5, 1.1], None),
    "sequence_bias": ([[[5], 2.0]], None),
    "watermarking_config": ({"bias": 2.0}, None),
    "penalty_alpha": (0.6, 0),
    "top_h": (0.5, None),
    "typical_p": (0.9, 1.0),
    "epsilon_cutoff": (3e-4, 0.0),
    "eta_cutoff": (3e-4, 0.0),
}


@pytest.mark.parametrize("samples", (False, True))
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_key_that_changes_what_transformers_does_is_named_and_no_other(pair, tmp_path, monkeypatch, name, samples):
    def done(**config) -> tuple:
        _, mode, processors = hf_processors(pair[0], {"do_sample": samples} | config, monkeypatch)
        return mode, [type(x) for x in processors]

    for value in UNSUPPORTED[name]:
        config = {"do_sample": samples, name: value}
        changes = {name: value} if done(**config) != done() else {}
        assert unsupported_sampling(written(tmp_path, config), samples) == changes


def test_values_that_cut_nothing_are_taken_at_every_temperature():
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_p": 1}, {"top_p": 1.0}, {"min_p": 0}, {"top_k": 0, "top_p": 1.0}):
        assert Sampling(**off).variant == "greedy" and Sampling(1.0, **off).variant == "plain"
        one, other = (Sampling(0.7, seed=3, **how).tensors(torch.device("cpu")) for how in (off, {}))
        assert torch.equal(one[0], other[0])


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


EXTREME = [
    {"temperature": 1e-40},
    *({"temperature": 1.0} | cut for cut in ({"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1})),
]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, *EXTREME])
def test_extreme_settings_are_greedy(logits, how):
    assert draw(logits, 50, **how).unique().tolist() == [logits.argmax()]


def test_top_k_1_takes_the_first_of_equally_good_tokens():
    tied = torch.tensor([0.0, 3.0, 3.0, 1.0, 3.0])
    assert set(draw(tied, 200, temperature=1.0, top_k=1).tolist()) == {1} == set(draw(tied, 9).tolist())
    assert Sampling(0, top_k=1).variant == Sampling(1.0, top_k=1, top_p=0.9).variant == "greedy"


BAD = [
    *(
        ({"temperature": 0} | cut, "temperature 0 takes the best")
        for cut in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1})
    ),
    *(({"temperature": x}, "temperature") for x in (-1, "0.7", None, torch.nan, torch.inf, 10**400)),
    *(({"top_k": x}, "top-k") for x in (-2, 1.5, True)),
    *(({"top_p": x}, "top-p") for x in (0, 1.1, "1")),
    *(({"min_p": x}, "min-p") for x in (-0.1, 1.1, torch.nan)),
    *(({"repetition_penalty": x}, "penalty") for x in (0, -1.0, torch.nan, torch.inf, 10**400, "1", None)),
]


@pytest.mark.parametrize("bad, message", BAD)
def test_settings_out_of_range_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
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
