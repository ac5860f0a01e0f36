"""needle/train.py: what its sequences teach, that a run can be resumed, and that it ships what it trained."""

import gzip
import random

import pytest
import torch

from engine import Engine
from kv.parts.rope import rope_frequencies
from needle import data, train
from tasks.ruler import wordlist
from text.tokenizer import load_tokenizer

TEXT = [
    f"The {noun} is said to be {i} feet long, and nobody has measured it again."
    for i, noun in enumerate("rope wall river road table garden bridge tower field harbour".split() * 40)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    train.train_tokenizer(out, TEXT)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def make_data(tokenizer, seed=0):
    return train.Data(tokenizer, " ".join(TEXT * 2).split(), seed)


def test_every_digit_is_a_token_and_the_first_one_takes_the_space_before_it(tokenizer):
    ids = tokenizer.encode("is 4071.", bos=False)
    assert [tokenizer.decode([i]) for i in ids] == ["is", " 4", "0", "7", "1", "."]


@pytest.mark.parametrize("stage, length", [("direct", 256), ("echo", 256), ("ruler", 512), ("all", 256), ("all", 2048)])
def test_every_token_predicts_the_next_and_the_last_of_an_answer_predicts_eos(tokenizer, stage, length):
    source = make_data(tokenizer)
    kinds = set()
    for _ in range(40):
        s = source.sequence(stage, length)
        assert len(s.ids) == len(s.follow) == len(s.weights) == length
        ends = {end - 1 for _, _, end in s.answers}
        for i in range(length - 1):
            assert s.follow[i] == (data.EOS if i in ends else s.ids[i + 1])
        weight_one = {i for _, begin, end in s.answers for i in range(begin, end)}
        assert {i for i, w in enumerate(s.weights) if w == 1} == weight_one
        kinds |= {kind for kind, _, _ in s.answers}
    everything = {"essay", "lookup", "multikey_2", *["vt"] * (length > 256)}
    assert kinds >= {"direct": {"direct"}, "echo": {"echo"}, "ruler": {"ruler"}}.get(stage, everything)


def test_answers_are_in_the_text_before_them(tokenizer):
    source = make_data(tokenizer, seed=3)
    for _ in range(60):
        episode = source.episode("all", 1024)
        for question, answer in zip(episode.sample.questions, episode.answers, strict=True):
            for value in question.answers:
                assert value in answer and value in episode.sample.text


def test_paragraphs_are_prose_without_markup_each_once(tmp_path):
    prose = "The quick brown fox jumps over the lazy dog and then it sleeps in the sun until the evening comes. " * 2
    manual = f".TH FOX 1\n.SH NAME\n.PP\n\\fB{prose.strip()}\\fR\n\n.B fox\n\n"
    (tmp_path / "man/man1").mkdir(parents=True)
    (tmp_path / "man/man1/fox.1.gz").write_bytes(gzip.compress(manual.encode()))
    (tmp_path / "man/man1/broken.1.gz").write_bytes(b"not gzip")
    (tmp_path / "common-licenses").mkdir()
    (tmp_path / "common-licenses/FOX").write_text(f"{prose}\n\nToo short.\n\n{'7 * 8 = 56; ' * 30}\n\n{prose}\n")
    assert data.paragraphs(tmp_path) == [prose.strip()]


@pytest.mark.parametrize("kind", [data.Drawer, data.Alike])
def test_held_out_words_and_numbers_are_never_drawn(kind):
    drawer = kind(random.Random(0), data.keep)
    seen = [{word for word in wordlist(kind) if data.keep(word)} for kind in ("adjective", "noun")]
    for _ in range(500):
        key, number = drawer.draw("words"), drawer.draw("numbers")
        cuts = [i for i, letter in enumerate(key) if letter == "-"]
        assert any(key[:i] in seen[0] and key[i + 1 :] in seen[1] for i in cuts)
        assert data.keep(number)
    assert 0.7 < sum(data.keep(str(n)) for n in range(10**6, 10**6 + 5000)) / 5000 < 0.9


def test_a_new_model_copies_before_any_training():
    """When a random stretch repeats, the initial circuit makes the right tokens likelier than the first time."""
    model, gain = train.new_model(0), 0.0
    inv_freq, _ = rope_frequencies(model.config.rope, model.config.head_dim, 1)
    for seed in range(4):
        rng = random.Random(seed)
        stretch = [rng.randrange(3, train.CONFIG["vocab_size"]) for _ in range(40)]
        tokens = torch.tensor([[data.BOS, *stretch, *stretch]])
        angle = torch.arange(tokens.shape[1])[:, None].float() * inv_freq
        follow = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
        for span, sign in ((slice(1, 40), 1), (slice(42, 80), -1)):
            weights = torch.zeros(tokens.shape)
            weights[:, span] = 1
            gain += sign * train.forward(model, tokens, angle.cos(), angle.sin(), follow, weights)[0].item() / 4
    assert gain > 0.05


def test_alike_keys_share_words_and_alike_numbers_digits():
    drawer = data.Alike(random.Random(0))
    keys, numbers = [drawer.draw("words") for _ in range(40)], [drawer.draw("numbers") for _ in range(40)]
    assert len(set(keys)) == len(set(numbers)) == 40
    words = [word for key in keys for word in key.split("-", 1)]
    assert len(set(words)) < 0.8 * len(words)
    assert len(set("".join(numbers))) == 3 and all(len(number) == 7 for number in numbers)


@pytest.fixture
def small(monkeypatch):
    """Three narrow layers, nothing compiled."""
    sizes = {"num_hidden_layers": 3, "intermediate_size": 64}
    monkeypatch.setattr(train, "CONFIG", train.CONFIG | sizes)
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)


def test_a_run_resumes_where_it_was_saved(small, tokenizer, folder):
    run = train.Trainer(folder, "cpu", minutes=10, tokens_per_step=512)
    source = make_data(tokenizer)
    run.train_step(run.batch(source))
    run.save()
    again = train.Trainer(folder, "cpu", minutes=10, tokens_per_step=512)
    again.resume()
    batch = [source.sequence("all", 256)]
    assert (again.step, again.tokens, again.right) == (run.step, run.tokens, run.right)
    assert again.train_step(batch) == pytest.approx(run.train_step(batch), rel=1e-5)
    assert again.train_step(batch) == pytest.approx(run.train_step(batch), rel=1e-3)  # the optimizer was restored


def test_stages_follow_one_another_when_most_answers_are_right_or_their_time_is_over(small, folder):
    run = train.Trainer(folder, "cpu", minutes=10, tokens_per_step=512)
    run.right = {"repeats": train.ENOUGH - 0.01}
    run.promote()
    assert train.STAGES[run.stage][0] == "repeats"
    run.right = {"repeats": train.ENOUGH + 0.01}
    run.promote()
    assert train.STAGES[run.stage][0] == "direct"
    run.seconds = 600 * train.STAGES[1][2] - 1
    run.promote()
    assert train.STAGES[run.stage][0] == "direct"
    run.seconds += 2
    run.promote()
    assert train.STAGES[run.stage][0] == "echo"


def test_what_is_shipped_is_what_was_trained(small, tokenizer, folder, tmp_path):
    run = train.Trainer(folder, "cpu", minutes=10, tokens_per_step=512)
    for _ in range(3):
        run.train_step([make_data(tokenizer).sequence("direct", 256)])
    train.ship(run, tmp_path / "shipped")
    engine = Engine.load(tmp_path / "shipped", compile=False, dtype="float32", room=8)
    ids = engine.encode("One of the magic numbers is 1234567. What is it?")
    state = {name: p.to(torch.bfloat16).float() for name, p in run.model.state_dict().items()}
    run.model.load_state_dict(state)
    cos, sin = run.cos[: len(ids)], run.sin[: len(ids)]
    expected = train.logits(run.model, torch.tensor([ids]), cos, sin)[0]
    assert torch.allclose(engine.logits(ids[:5], ids[5:]), expected[4:-1], atol=1e-4)
    assert engine.config.max_length == train.STAGES[run.stage][1]
