"""Batches, follow-ups, stops and lengths: every row must give the answers that it gives alone."""

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import write_random
from decoder import Decoder

from engine import Engine
from runtime.device import pick_device

METHODS = {"full": {}, "streaming": {"budget": 16}}
PROMPTS = [list(range(5, 45)), [9, 8, 7], list(range(3, 100)), [60, 61] * 10, list(range(30, 36))]
FOLLOW_UPS = [[[1, 2, 3]], [], [[4], [5, 6]], [], [[77] * 9]]


def load(checkpoint, method="full", **plan):
    plan = {"batch": 1, "max_new_tokens": 80, "compile": False, "seed": 0} | METHODS[method] | plan
    return Engine.load(checkpoint, kv=method, **plan)


def outcome(completions):
    return [[(a.tokens, a.finish_reason) for a in c.answers] for c in completions]


def end_early(engine, prompts, after):
    """Declares tokens of the greedy answers to be end-of-sequence ids, so that rows stop at different steps."""
    answers = engine.generate(prompts, max_new_tokens=12)
    engine.eos = {c.answers[0].tokens[i] for c, i in zip(answers, after, strict=True) if i is not None}
    engine._allocate(engine.shape)
    return engine.eos


@pytest.fixture(scope="module")
def eos(checkpoint):
    return end_early(load(checkpoint, batch=5), PROMPTS, [5, None, 9, 2, None])


def with_eos(engine, eos):
    engine.eos = eos
    return engine


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("stepwise", (False, True))
def test_decoded_counts_one_token_per_row_and_step_whether_sampled_fed_or_eos(checkpoint, eos, lag, stepwise):
    alone = with_eos(load(checkpoint), eos)
    alone.lag = lag
    (completion,) = alone.generate([PROMPTS[0]], max_new_tokens=12, follow_ups=[[[1, 2, 3]]], stepwise=stepwise)
    first, second = completion.answers
    assert first.finish_reason == "stop" and len(first.tokens) == 5
    assert alone.stats.extend_tokens == (0 if stepwise else 3)
    steps = len(first.tokens) + 3 * stepwise + len(second.tokens) - (second.finish_reason == "length")
    assert alone.stats.steps == alone.stats.decoded == steps
    together = with_eos(load(checkpoint, batch=5), eos)
    together.lag = lag
    answers = [completion.answers[0] for completion in together.generate(PROMPTS, max_new_tokens=12)]
    fed = [len(answer.tokens) - (answer.finish_reason == "length") for answer in answers]
    assert together.stats.steps == max(fed) and together.stats.decoded == sum(fed)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("sampling", ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}))
def test_a_row_gives_in_a_ragged_batch_what_it_gives_alone(checkpoint, eos, method, lag, sampling):
    together = with_eos(load(checkpoint, method, batch=5), eos)
    together.lag = lag
    found = outcome(together.generate(PROMPTS, max_new_tokens=12, follow_ups=FOLLOW_UPS, **sampling))
    reasons = {reason for answers in found for _, reason in answers}
    assert sampling or reasons == {"stop", "length"}
    for i, (prompt, follow_up) in enumerate(zip(PROMPTS, FOLLOW_UPS, strict=True)):
        alone = with_eos(load(checkpoint, method, batch=5, max_prompt=97), eos)
        alone.requests = itertools.count(i)
        assert outcome(alone.generate([prompt], max_new_tokens=12, follow_ups=[follow_up], **sampling)) == [found[i]]


def test_logits_do_not_depend_on_the_other_rows(checkpoint):
    empty, busy = load(checkpoint, batch=3, max_prompt=97), load(checkpoint, batch=3, max_prompt=97)
    busy.generate(PROMPTS, max_new_tokens=12)
    tokens = list(range(20, 40))
    assert torch.equal(empty.logits(PROMPTS[0], tokens), busy.logits(PROMPTS[0], tokens))


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("batch", (1, 2))
def test_more_prompts_than_rows_refill_the_rows(checkpoint, eos, batch, lag):
    expected = with_eos(load(checkpoint, batch=5), eos).generate(PROMPTS, max_new_tokens=12, follow_ups=FOLLOW_UPS)
    engine = with_eos(load(checkpoint, batch=batch), eos)
    engine.lag = lag
    assert outcome(engine.generate(PROMPTS, max_new_tokens=12, follow_ups=FOLLOW_UPS)) == outcome(expected)


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("stops", (True, False))
def test_a_follow_up_sees_exactly_the_conversation_so_far(checkpoint, eos, stops, lag):
    """The cache holds the whole answer, but neither its EOS nor anything after it: as if all had been one prompt."""
    engine = with_eos(load(checkpoint, batch=2), eos if stops else set())
    engine.lag = lag
    question = [1, 2, 3]
    for prompt in PROMPTS:
        first, second = engine.generate([prompt, PROMPTS[1]], max_new_tokens=12, follow_ups=[[question], []])[0].answers
        whole = with_eos(load(checkpoint), engine.eos)
        assert outcome(whole.generate([prompt + first.tokens + question], max_new_tokens=12)) == [
            [(second.tokens, second.finish_reason)]
        ]


def test_a_follow_up_is_requested_only_after_the_previous_answer(checkpoint):
    engine, seen = load(checkpoint), []

    def ask():
        yield [len(seen), 3]
        yield [len(seen), 4]

    (completion,) = engine.generate(
        [PROMPTS[0]], max_new_tokens=5, follow_ups=[ask()], on_token=lambda i, token, text: seen.append(token)
    )
    assert [len(a.tokens) for a in completion.answers] == [5, 5, 5]
    assert seen == [t for a in completion.answers for t in a.tokens]
    fixed = load(checkpoint).generate([PROMPTS[0]], max_new_tokens=5, follow_ups=[[[5, 3], [10, 4]]])
    assert outcome([completion]) == outcome(fixed)


@pytest.mark.parametrize("lag", (0, 1))
def test_a_stop_text_ends_an_answer_and_is_cut_off(text_checkpoint, lag):
    """The streamed text is the returned one; the next question follows all tokens of the answer, uncut."""
    engine = Engine.load(text_checkpoint, compile=False, dtype="float32", max_new_tokens=80, batch=2)
    engine.lag = lag
    prompts, question = ["The keeper rowed", "At low tide"], [[7, 8, 9]]
    free = [c.answers[0].text for c in engine.generate(prompts, max_new_tokens=12)]
    at = len(free[0]) // 2
    stop, shown = [free[0][at : at + 3], "never said"], ["", ""]

    def show(index, token, text):
        shown[index] += text

    found = engine.generate(prompts, max_new_tokens=12, stop=stop, follow_ups=[question, question], on_token=show)
    for prompt, text, completion, seen in zip(prompts, free, found, shown, strict=True):
        first, second = completion.answers
        assert first.text == min((text.split(s)[0] for s in stop), key=len) and seen == first.text + second.text
        assert first.finish_reason == ("stop" if any(s in text for s in stop) else "length")
        whole = engine.encode(prompt) + first.tokens + question[0]
        (expected,) = engine.generate([whole], max_new_tokens=12, stop=stop)
        assert expected.answers[0].tokens == second.tokens
    assert found[0].answers[0].finish_reason == "stop"


def test_generated_tokens_are_the_argmax_of_the_forced_logits(checkpoint):
    for method in METHODS:
        engine = load(checkpoint, method)
        (completion,) = engine.generate([PROMPTS[2]], max_new_tokens=20)
        tokens = completion.answers[0].tokens
        logits = engine.logits(PROMPTS[2], tokens)
        assert logits.shape == (20, 128) and logits.dtype == torch.float32
        assert logits.argmax(-1).tolist() == tokens


def test_logits_of_decode_steps_equal_those_of_one_long_prompt(checkpoint):
    engine, tokens = load(checkpoint), list(range(50, 70))
    logits = engine.logits(PROMPTS[0], tokens)
    for i in (0, 1, 7, 19):
        assert (engine.logits(PROMPTS[0] + tokens[:i], [0])[0] - logits[i]).abs().max() < 1e-4


def test_one_compiled_step_serves_every_length(checkpoint):
    """Prompts of 40 to 6000 tokens: the step is compiled once and equals eager."""
    write = {"max_position_embeddings": 8192}
    folder = write_random(checkpoint.parent / "long", **write)
    long = torch.randint(128, (6000,), generator=torch.Generator().manual_seed(0)).tolist()
    engines = [Engine.load(folder, compile=c, max_prompt=6000, max_new_tokens=40) for c in (True, False)]
    for prompt in (PROMPTS[0], long, long[:700], long[:5000]):
        compiled, eager = (engine.logits(prompt, PROMPTS[0][:20]) for engine in engines)
        assert (compiled - eager).abs().max() < 1e-3
    assert engines[0].stats.compiles == 3 and engines[0].stats.compile_s > 0  # around the layers, and a layer


@pytest.mark.parametrize("family", ("LlamaForCausalLM", "Qwen2ForCausalLM"))  # without and with biases
def test_compiled_bfloat16_stays_as_close_to_fp32_as_eager_does(tmp_path, family):
    folder = write_random(tmp_path / "model", architectures=[family])
    exact, eager, compiled = (
        Engine.load(folder, dtype=dtype, compile=c, max_new_tokens=20).logits(PROMPTS[0], PROMPTS[2][:10])
        for dtype, c in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    assert (eager - exact).abs().mean() > 0  # the dtype is what was asked for
    assert (compiled - exact).abs().mean() < 1.5 * (eager - exact).abs().mean()
    assert (compiled - exact).abs().max() < 2 * (eager - exact).abs().max()


def test_greedy_sampled_and_cut_are_three_compiled_ends_of_a_step_and_no_more(checkpoint, traced_only):
    engine = load(checkpoint, batch=2, compile=True)
    for temperature, top_k, seed in ((0, None, 0), (1.0, None, 0), (0.7, None, 3), (0.5, 5, 0), (0.9, 3, 0)):
        engine.seed = seed
        engine.generate(PROMPTS[:3], max_new_tokens=6, temperature=temperature, top_k=top_k)
    assert engine.stats.compiles == 2 + 3


@pytest.mark.parametrize("method", METHODS)
def test_the_step_is_one_graph_for_a_gpu(checkpoint, method, traced_only):
    """Where CUDA graphs capture it, the whole step is compiled at once; here that is traced on the CPU."""
    graph, eager = (load(checkpoint, method, compile=c, max_prompt=97, max_new_tokens=4) for c in (True, False))
    graph.reserve(97, 4)
    graph.decoder.step.run = torch.compile(graph.decoder.step.forward, fullgraph=True, backend="eager")
    found, expected = (e.generate(PROMPTS[:1], max_new_tokens=4) for e in (graph, eager))
    assert outcome(found) == outcome(expected) and graph.stats.compiles == 1


def test_a_seed_fixes_what_is_sampled(checkpoint):
    how = {"max_new_tokens": 20, "temperature": 2.0}
    a, b, c = (outcome(load(checkpoint, seed=seed).generate(PROMPTS[:2], **how)) for seed in (1, 1, 2))
    assert a == b != c
    engine = load(checkpoint, seed=1)
    once, again = (outcome(engine.generate(PROMPTS[:1], **how)) for _ in range(2))
    assert once == a[:1] and again != once  # requests are numbered: a repeated one draws other tokens


def test_caches_grow_with_the_prompts_unless_max_prompt_is_set(checkpoint, capsys):
    engine = load(checkpoint)
    engine.generate([PROMPTS[1]], max_new_tokens=3)
    assert engine.shape.max_prompt == 3 and not capsys.readouterr().err
    grown = outcome(engine.generate([PROMPTS[2]], max_new_tokens=3))
    assert engine.shape.max_prompt == 128 and "128 tokens" in capsys.readouterr().err
    assert grown == outcome(load(checkpoint).generate([PROMPTS[2]], max_new_tokens=3))
    fixed = load(checkpoint, max_prompt=50)
    fixed.generate([PROMPTS[0]], max_new_tokens=3)
    with pytest.raises(ValueError, match="97 tokens and max_prompt is 50"):
        fixed.generate([PROMPTS[2]], max_new_tokens=3)


def sizes_of(engine, monkeypatch):
    """The plans that the engine allocates from now on, as (max_prompt, max_new_tokens)."""
    found, allocate = [], engine._allocate
    monkeypatch.setattr(
        engine, "_allocate", lambda shape: (found.append((shape.max_prompt, shape.max_new_tokens)), allocate(shape))
    )
    return found


def test_growing_caches_step_up_by_powers_of_two(checkpoint, monkeypatch):
    engine = load(checkpoint, max_new_tokens=5)
    plans = sizes_of(engine, monkeypatch)
    for prompt in (20, 22, 30, 32, 33, 60, 64, 1, 65, 3000):
        engine.generate([[7] * prompt], max_new_tokens=2)
    assert plans == [(20, 5), (32, 5), (64, 5), (128, 5), (4096, 5)]  # the first is as large as asked for
    engine.generate([[7]], max_new_tokens=9)
    engine.generate([[7]], max_new_tokens=15)
    assert plans[5:] == [(4096, 16)]


def test_a_grown_cache_stays_within_the_context_and_half_the_free_memory(checkpoint, monkeypatch):
    engine = Engine.load(
        write_random(checkpoint.parent / "odd", max_position_embeddings=3000), compile=False, max_new_tokens=2
    )
    plans = sizes_of(engine, monkeypatch)
    needed = 2 * 2 * 2 * 16 * 4  # bytes a token takes: layers, KV heads, K and V, head dim, fp32
    for prompt in (20, 2100):
        engine.generate([[7] * prompt])
    monkeypatch.setattr("runtime.processes.free_bytes", lambda _: 2 * 2600 * needed)
    engine.use("full", max_new_tokens=2).generate([[7] * 20])
    engine.generate([[7] * 1100])  # 2,048 + 2 leave half
    engine.generate([[7] * 2100])  # 3,000 + 2 would not
    assert plans == [(20, 2), (3000, 2), (20, 2), (2048, 2), (2100, 2)]


def test_a_budget_that_is_a_share_stays_a_share_of_the_longest_prompt(checkpoint, monkeypatch):
    engine = load(checkpoint, "streaming", budget=0.5, max_new_tokens=2)
    plans = sizes_of(engine, monkeypatch)
    for prompt in (20, 33, 97):
        found = outcome(engine.generate([PROMPTS[2][:prompt]]))
        alone = load(checkpoint, "streaming", budget=0.5, max_new_tokens=2, max_prompt=prompt)
        assert found == outcome(alone.generate([PROMPTS[2][:prompt]])) and engine.kv_bytes() == alone.kv_bytes()
    assert plans == [(20, 2), (33, 2), (97, 2)]


def test_a_cache_grows_no_further_than_the_sliding_window(tmp_path, monkeypatch):
    folder = write_random(tmp_path / "mistral", architectures=["MistralForCausalLM"], sliding_window=100)
    engine = load(folder, "streaming", max_new_tokens=2)
    plans = sizes_of(engine, monkeypatch)
    for prompt in (20, 40, 70, 98):
        engine.generate([[7] * prompt])
    assert plans == [(20, 2), (64, 2), (98, 2)]


@pytest.mark.parametrize("lag", (0, 1))
def test_an_interrupted_answer_keeps_its_tokens_and_the_conversation_goes_on(checkpoint, lag):
    """The other rows stop too. Waiting prompts and follow-ups are answered as if the answers had been that short."""
    engine, question = load(checkpoint, batch=2), [1, 2, 3]
    engine.lag = lag
    count = itertools.count(1)

    def show(index, token, text):
        if next(count) == 9:
            engine.interrupt()

    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    found = engine.generate(prompts, max_new_tokens=30, follow_ups=[[question]] * 3, on_token=show)
    free = load(checkpoint).generate(prompts, max_new_tokens=30)
    for i, (prompt, completion, whole) in enumerate(zip(prompts, found, free, strict=True)):
        first, second = completion.answers
        assert first.tokens == whole.answers[0].tokens[: len(first.tokens)]
        assert first.finish_reason == ("interrupted" if i < 2 else "length")
        assert 4 <= len(first.tokens) <= 7 if i < 2 else len(first.tokens) == 30
        (expected,) = load(checkpoint).generate([prompt + first.tokens + question], max_new_tokens=30)
        assert (second.tokens, second.finish_reason) == (expected.answers[0].tokens, "length")


@pytest.mark.parametrize("lag", (0, 1))
def test_an_interruption_while_a_question_is_fed_leaves_the_question_whole(checkpoint, lag, monkeypatch):
    engine, launch = load(checkpoint), Decoder.launch
    engine.lag = lag
    launches = itertools.count(1)

    def interrupt_in_the_question(decoder, commands, *plan):
        if next(launches) == 6:  # 3 steps for the first answer, then the question
            engine.interrupt()
        return launch(decoder, commands, *plan)

    monkeypatch.setattr(Decoder, "launch", interrupt_in_the_question)
    question, third = [1, 2, 3, 4, 5], [6]
    (found,) = engine.generate([PROMPTS[0]], max_new_tokens=4, follow_ups=[[question, third]], stepwise=True)
    first, second, last = found.answers
    assert (len(second.tokens), second.finish_reason, last.finish_reason) == (1, "interrupted", "length")
    history = PROMPTS[0] + first.tokens + question + second.tokens + third
    monkeypatch.undo()
    assert load(checkpoint).generate([history], max_new_tokens=4)[0].answers[0].tokens == last.tokens


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("sampling", ({}, {"temperature": 1.0, "top_k": 20}))
def test_a_question_taken_at_once_is_answered_like_one_fed_token_by_token(checkpoint, eos, lag, sampling):
    """With the full cache, greedy or sampled, in rows that are refilled, after answers that end in any way."""
    questions = [[[9, 8, 7, 6], [5]], [list(range(3, 40))], [[1, 2]], [], [[60] * 7, [61] * 9]]
    answers = []
    for stepwise in (False, True):
        engine = Engine.load(checkpoint, batch=2, max_new_tokens=90, compile=False, seed=3)
        with_eos(engine, eos).lag = lag
        found = engine.generate(PROMPTS, max_new_tokens=12, follow_ups=questions, stepwise=stepwise, **sampling)
        answers.append([completion.answers for completion in found])
    assert answers[0] == answers[1]
    assert len({answer.finish_reason for row in answers[0] for answer in row}) == 2


def test_extending_the_model_equals_prefilling_the_whole_text(checkpoint):
    engine = load(checkpoint, max_prompt=64)
    text = [(7 * i) % 90 + 3 for i in range(60)]
    expected = engine.prefill(0, text)
    engine.prefill(0, text[:30])
    for begin, end in ((30, 31), (31, 53), (53, 60)):
        found = engine.extend(0, text[begin:end], begin)
    assert (found - expected).abs().max() <= 1e-4


def test_a_finished_prompt_is_reported_before_the_others_finish(checkpoint):
    engine, events = load(checkpoint, batch=2), []
    found = engine.generate(
        PROMPTS[:3],
        max_new_tokens=4,
        follow_ups=[[[5]], [], []],
        stepwise=True,
        on_token=lambda i, *_: events.append(i),
        on_done=lambda i, completion: events.append((i, completion)),
    )
    assert {i: completion for i, completion in filter(lambda e: isinstance(e, tuple), events)} == dict(enumerate(found))
    done = [event if isinstance(event, int) else ("done", event[0]) for event in events]
    assert [event for event in done if isinstance(event, tuple)] == [("done", 1), ("done", 2), ("done", 0)]
    assert done.index(("done", 1)) < done.index(2) and done.index(("done", 2)) < len(done) - 2


def test_a_row_that_passes_the_context_causes_one_warning(tmp_path, capsys):
    folder = write_random(tmp_path / "short", max_position_embeddings=50)
    engine = load(folder, batch=2)
    engine.generate([PROMPTS[0], PROMPTS[1]], max_new_tokens=10)  # 40 tokens and 10 more: the last is never fed
    engine.generate([PROMPTS[0]], max_new_tokens=11)
    assert engine.stats.past_context == [] and not capsys.readouterr().err
    engine.generate([PROMPTS[1], PROMPTS[0]], max_new_tokens=12)
    assert engine.stats.past_context == [1]
    engine.generate([PROMPTS[0]], max_new_tokens=5, follow_ups=[[[1] * 20]])
    assert engine.stats.past_context == [0]
    assert capsys.readouterr().err.count("past the model's context of 50 tokens") == 1
    engine.generate([PROMPTS[0]], max_new_tokens=5)
    assert engine.stats.past_context == []
    fresh = load(folder)
    fresh.logits(PROMPTS[0], [1] * 11)
    assert not capsys.readouterr().err
    fresh.logits(PROMPTS[0], [1] * 12)
    assert "past the model's context" in capsys.readouterr().err
    endless = load(folder, "streaming")
    endless.generate([PROMPTS[0]], max_new_tokens=60)
    assert endless.stats.past_context == [] and not capsys.readouterr().err


def test_on_phase_reports_loading_compiling_and_prefilling(checkpoint, monkeypatch):
    heard = []
    monkeypatch.setattr("caches.SLICE", 50)  # longer prompts report their layers
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    engine = load(checkpoint, compile=True, on_phase=lambda p: heard.append((p.name, p.about, p.done, p.seconds)))
    engine.generate([PROMPTS[2]], max_new_tokens=3)
    engine.generate([PROMPTS[0]], max_new_tokens=3)
    ran = [(name, done, seconds is not None) for name, _, done, seconds in heard]
    assert ran == [
        ("load", 0, False),
        ("load", 0, True),
        ("compile", 0, False),
        ("compile", 0, True),
        ("prefill", 0, False),
        ("prefill", 1, False),
        ("prefill", 2, False),
        ("prefill", 2, True),
        ("first token", 0, True),
        ("prefill", 0, False),
        ("prefill", 0, True),
        ("first token", 0, True),
    ]
    about = {name: text for name, text, *_ in reversed(heard)}
    assert about["load"].endswith(" GB") and about["prefill"] == "97 tokens"
    assert about["compile"] == "greedy decode step for 1 x 177 tokens"
    stats = engine.stats
    assert stats.prefill_tokens == 40 and 0 < stats.prefill_s <= stats.first_token_s and stats.load_s > 0


def test_the_cache_holds_what_was_planned_and_reports_it(checkpoint):
    engine = load(checkpoint, max_prompt=100, max_new_tokens=28, batch=3)
    planned = 3 * 2 * 2 * 128 * 2 * 16 * 4  # rows, layers, KV heads, tokens, K and V, head dim, fp32
    device, host, full = engine.kv_bytes()
    assert full == planned and planned <= device <= 1.02 * planned and host == 0
    small = load(checkpoint, "streaming", max_prompt=3000, max_new_tokens=28)
    assert small.kv_bytes()[0] < small.kv_bytes()[2] / 20


def test_a_fixed_cache_answers_at_any_length(checkpoint, capsys):
    engine = load(checkpoint, "streaming", max_prompt=97, max_new_tokens=10)
    (completion,) = engine.generate([PROMPTS[2]], max_new_tokens=300)
    assert len(completion.answers[0].tokens) == 300 and not capsys.readouterr().err


def test_a_conversation_ends_when_its_caches_are_full_and_says_so(checkpoint, capsys):
    engine = load(checkpoint, max_prompt=40, max_new_tokens=20)
    questions = ([5] * 4 for _ in range(9))
    (completion,) = engine.generate([PROMPTS[0]], max_new_tokens=8, follow_ups=[questions])
    assert [len(a.tokens) for a in completion.answers] == [8, 8]
    assert "no room for another question: the caches hold 20" in capsys.readouterr().err


def test_caches_may_be_recompiled_any_number_of_times(checkpoint, traced_only):
    engine = load(checkpoint, compile=True, max_new_tokens=3)
    for length in range(10, 30, 2):  # torch.compile gives up at the ninth recompile of one function
        engine.close()
        prompt = list(range(length))
        expected = load(checkpoint, max_new_tokens=3).generate([prompt])
        assert outcome(engine.generate([prompt])) == outcome(expected)


def test_streaming_with_a_budget_for_everything_equals_full_even_beyond_the_plan(checkpoint):
    plan = {"budget": 1000, "max_prompt": 97, "max_new_tokens": 10}
    tokens = torch.randint(128, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    streaming, full = load(checkpoint, "streaming", **plan), load(checkpoint)
    assert outcome(streaming.generate([PROMPTS[2]], max_new_tokens=60)) == outcome(
        full.generate([PROMPTS[2]], max_new_tokens=60)
    )
    streaming = load(checkpoint, "streaming", **plan)
    assert (streaming.logits(PROMPTS[2], tokens) - full.logits(PROMPTS[2], tokens)).abs().max() < 1e-4


def test_more_sinks_than_tokens_equal_full_attention(checkpoint):
    for sinks in (4, 5, 50):
        engine = load(checkpoint, "streaming", budget=100, options={"sinks": sinks}, max_new_tokens=2)
        expected = load(checkpoint, max_new_tokens=2).generate([PROMPTS[1]])
        assert outcome(engine.generate([PROMPTS[1]])) == outcome(expected)


def test_a_budget_share_must_reach_the_minimum_for_the_prompt_at_hand(checkpoint):
    folder = write_random(checkpoint.parent / "share", max_position_embeddings=8192)
    engine = Engine.load(folder, kv="streaming", budget=0.001, compile=False, max_new_tokens=2)
    assert engine.generate([[5] * 6000])[0].new_tokens == 2
    with pytest.raises(ValueError, match="at least 5 tokens, not 1"):
        Engine.load(folder, kv="streaming", budget=0.001, compile=False).generate([[5] * 1000])


def test_a_failed_prefill_does_not_change_later_answers(checkpoint, monkeypatch):
    engine = load(checkpoint, batch=2, max_prompt=97)
    expected = outcome(engine.generate([PROMPTS[0]], max_new_tokens=9))
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "prefill", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate([PROMPTS[2]])
    assert int(engine.decoder.pos[0]) == 0
    assert outcome(engine.generate([PROMPTS[0]], max_new_tokens=9)) == expected


def test_prompts_can_be_prefilled_alone_and_asked_about_afterwards(checkpoint):
    """Only the text is in the cache when the first question comes; more texts than rows take turns."""
    texts, questions = PROMPTS[:3], [[[5, 6], [7]], [[8]], []]
    engine = load(checkpoint, batch=2)
    found = engine.generate(texts, max_new_tokens=6, follow_ups=questions, answer_prompts=False)
    assert [len(c.answers) for c in found] == [2, 1, 0]
    for text, asked, completion in zip(texts, questions, found, strict=True):
        history = list(text)
        for question, answer in zip(asked, completion.answers, strict=True):
            history += question
            logits = engine.logits(text, [*history[len(text) :], *answer.tokens])
            assert logits.argmax(-1).tolist()[len(history) - len(text) :] == answer.tokens
            history += answer.tokens


def test_an_engine_switches_to_another_method_and_back(checkpoint):
    engine = load(checkpoint)
    full = outcome(engine.generate(PROMPTS[:2], max_new_tokens=8))
    engine.use("streaming", 6, batch=2, max_new_tokens=8)
    alone = load(checkpoint, "streaming", budget=6, batch=2)
    assert outcome(engine.generate(PROMPTS[:2], max_new_tokens=8)) == outcome(
        alone.generate(PROMPTS[:2], max_new_tokens=8)
    )
    assert outcome(engine.use("full", max_new_tokens=8).generate(PROMPTS[:2], max_new_tokens=8)) == full


def test_bad_requests_are_refused_before_anything_runs(checkpoint):
    engine = load(checkpoint)
    for call, message in (
        (lambda: engine.generate([[]]), "prompt is empty"),
        (lambda: engine.generate([""]), "prompt is empty"),
        (lambda: engine.generate(["text"]), "no tokenizer"),
        (lambda: engine.generate([[128]]), "token ids must be integers from 0 to 127"),
        (lambda: engine.generate([[1]], max_new_tokens=0), "at least 1"),
        (lambda: engine.generate([[1]], temperature=-1), "temperature"),
        (lambda: engine.generate([[1]], follow_ups=[[[]]]), "empty"),
        (lambda: engine.generate([[1]], follow_ups=[[], []]), "2 lists of follow-ups for 1 prompts"),
        (lambda: engine.generate([[1]], stop=["x"]), "no tokenizer"),
        (lambda: engine.generate([[1]], max_new_tokens=2.5), "whole number"),
        (lambda: engine.generate([[1]], follow_ups=["And then?"]), "not a text"),
        (lambda: engine.generate([[1]], follow_ups=[([1], [])]), "empty"),
        (lambda: engine.kv_bytes(), "no cache"),
        (lambda: Engine.load(checkpoint, batch=10**20), "memory of any machine"),
        (lambda: Engine.load(checkpoint, max_new_tokens=10**30), "memory of any machine"),
        (lambda: engine.generate([[1] * 4097]), "4097 tokens and the model's context is 4096"),
        (lambda: engine.logits([1], []), "empty"),
        (lambda: Engine.load(checkpoint, batch=0), "at least 1"),
        (lambda: Engine.load(checkpoint, kv="streaming"), "needs --budget"),
        (lambda: Engine.load(checkpoint, kv="streaming", budget=2), "at least 5"),
        (lambda: Engine.load(checkpoint, dtype="int8"), "'int8' is not supported"),
        (lambda: Engine.load(checkpoint, device="tpu"), "'tpu' is not here"),
        (lambda: Engine.load(checkpoint, max_prompt=10**4), "context is 4096"),
        (lambda: Engine.load(checkpoint, max_new_tokens=10**9, max_prompt=10), "GB are free"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.shape is None and engine.generate([]) == []


def test_running_out_of_memory_says_what_helps(checkpoint, monkeypatch):
    def prefill(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    engine = load(checkpoint)
    monkeypatch.setattr(engine.model, "prefill", prefill)
    with pytest.raises(ValueError, match=r"2.00 GiB.*--max-new-tokens"):
        engine.generate([[1, 2]])


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu_the_step_is_one_graph_and_gives_what_eager_gives(checkpoint, method, caplog):
    from torch._dynamo.utils import counters

    counters.clear()
    graph, eager = (load(checkpoint, method, batch=5, compile=c, max_prompt=97) for c in (True, False))
    found, expected = (e.generate(PROMPTS, max_new_tokens=12, follow_ups=FOLLOW_UPS) for e in (graph, eager))
    assert outcome(found) == outcome(expected)
    assert not counters["inductor"]["cudagraph_skips"] and graph.stats.compiles == 1


def test_caches_grow_for_longer_answers_if_any_layer_needs_it(tmp_path):
    """duo with a full layer above a windowed one; the windowed one alone could generate any number of tokens."""
    folder = write_random(tmp_path / "model")
    options = {"head_scores": [[0.0, 0.0], [1.0, 1.0]], "sinks": 2, "recent": 6}
    engine, large = (Engine.load(folder, "duo", 0.5, options, compile=False, max_new_tokens=n) for n in (4, 60))
    assert engine.generate([PROMPTS[0]]) and large.generate([PROMPTS[0]])
    assert [layer.endless for layer in engine.layers] == [True, False]
    longer = engine.generate([PROMPTS[0]], max_new_tokens=60)
    assert engine.shape.max_new_tokens == 64 and outcome(longer) == outcome(large.generate([PROMPTS[0]]))


def test_a_gpu_is_known_by_its_index(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in (None, "cuda", "cuda:1")] == [torch.device("cuda", i) for i in (0, 0, 1)]


def test_an_engine_that_is_busy_refuses_a_second_call_and_stays_usable(checkpoint):
    """A call from on_token, from a follow-up or from another thread would mix the sequences."""
    engine = load(checkpoint)
    expected, refused = outcome(engine.generate([PROMPTS[0]], max_new_tokens=5)), []

    def intrude(*_):
        for call in (
            lambda: engine.generate([PROMPTS[1]]),
            lambda: engine.logits(PROMPTS[1], [1]),
            lambda: engine.use("full"),
            engine.close,
        ):
            with pytest.raises(RuntimeError, match="busy with another call"):
                call()
            refused.append(call)

    def intrude_from_a_thread(*_):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(intrude).result()

    def ask():
        intrude()
        yield [1, 2, 3]

    assert outcome(engine.generate([PROMPTS[0]], max_new_tokens=5, on_token=intrude)) == expected
    assert outcome(engine.generate([PROMPTS[0]], max_new_tokens=5, on_token=intrude_from_a_thread)) == expected
    assert outcome(engine.generate([PROMPTS[0]], max_new_tokens=5, follow_ups=[ask()]))[0][:1] == expected[0]
    assert len(refused) == 4 * (5 + 5 + 1)
    with pytest.raises(ZeroDivisionError):
        engine.generate([PROMPTS[0]], on_token=lambda *_: 1 / 0)
    for failing in (lambda: engine.generate([[]]), lambda: engine.logits([1], []), lambda: engine.use("nosuch")):
        with pytest.raises(ValueError):
            failing()
    assert outcome(engine.use("full").generate([PROMPTS[0]], max_new_tokens=5)) == expected


@pytest.mark.parametrize("options", ({}, {"compile": True}, {"kv": "streaming", "budget": 24, "speculate": 2}))
def test_closing_frees_the_caches_at_once(checkpoint, options):
    """Larger caches are allocated when the old ones are gone, not when the garbage collector finds them."""
    engine = Engine.load(checkpoint, **{"compile": False, "max_new_tokens": 4} | options)
    engine.generate([[5, 6, 7]])
    buffers = [
        weakref.ref(buffer)
        for layer in engine.layers
        for name, buffer in layer.named_buffers()
        if not name.endswith("rope_speed")  # the model's
    ]
    gc.disable()
    try:
        engine.close()
        assert buffers and not any(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()
