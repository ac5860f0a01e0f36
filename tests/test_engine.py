"""Rows, answers, stops and lengths: every row must give the answers that it gives alone."""

import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import slow, write_random
from conversations import answers_to, converse, number, outcome

import kv
from engine import Engine, decode_step
from runtime.device import pick_device
from runtime.planning import figures

METHODS = {"full": {}, "streaming": {"budget": 16}, "h2o": {"budget": 16}, "snapkv": {"budget": 16}}
PROMPTS = [list(range(5, 45)), [9, 8, 7], list(range(3, 100)), [60, 61] * 10, list(range(30, 36))]
QUESTIONS = [[[1, 2, 3]], [], [[4], [5, 6]], [], [[77] * 9]]
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}


def load(checkpoint, method="full", lag=0, eos=(), **plan):
    plan = {"batch": 1, "room": 80, "compile": False, "seed": 0} | METHODS.get(method, {}) | plan
    engine = Engine.load(checkpoint, kv=method, **plan)
    engine.lag, engine.eos = lag, set(eos)
    return engine


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """The slots that a step reads grow within a test."""
    monkeypatch.setattr("kv.parts.inductor.STEP", 8)


@pytest.fixture(scope="module")
def eos(checkpoint):
    """Tokens of three greedy answers, declared to end texts, so that rows stop at different steps."""
    answers = outcome(load(checkpoint, batch=5).generate(PROMPTS, 12))
    return {answers[row][0][0][i] for row, i in ((0, 5), (2, 9), (3, 2))}


@pytest.mark.parametrize("lag", (0, 1))
def test_decoded_counts_one_token_per_row_and_step_whether_sampled_or_eos(checkpoint, eos, lag):
    engine = load(checkpoint, lag=lag, eos=eos)
    rows = engine.start([PROMPTS[0]])
    (first,) = engine.ask(rows, None, 12)
    assert first.finish_reason == "stop" and len(first.tokens) == 5
    assert engine.stats.steps == engine.stats.decoded == 5  # prefill gives the first token; the EOS is the last
    (second,) = engine.ask(rows, [[1, 2, 3]], 12)
    assert engine.stats.extend_tokens == 3
    assert engine.stats.steps == engine.stats.decoded == len(second.tokens) - (second.finish_reason == "length")
    together = load(checkpoint, batch=5, lag=lag, eos=eos)
    answers = together.generate(PROMPTS, 12)
    fed = [len(answer.tokens) - (answer.finish_reason == "length") for answer in answers]
    assert together.stats.steps == max(fed) and together.stats.decoded == sum(fed)


RAGGED = [("full", 1, SAMPLED), ("h2o", 0, {}), slow("full", 1, {"temperature": 1.0}), slow("full", 0, SAMPLED)]
RAGGED += [slow(method, lag, {}) for method in METHODS for lag in (0, 1) if (method, lag) != ("h2o", 0)]
RAGGED += [slow(method, lag, {"stepwise": True}) for method, lag in zip(METHODS, (0, 1, 0, 1), strict=True)]


@pytest.mark.parametrize("method, lag, sampling", RAGGED)
def test_a_row_gives_in_a_ragged_batch_what_it_gives_alone(checkpoint, eos, method, lag, sampling, monkeypatch):
    plan = {"method": method, "batch": 5, "max_prompt": 97, "eos": eos, "lag": lag}
    found = converse(load(checkpoint, **plan), PROMPTS, QUESTIONS, **sampling)
    assert sampling or {reason for answers in found for _, reason in answers} == {"stop", "length"}
    for i, (prompt, questions) in enumerate(zip(PROMPTS, QUESTIONS, strict=True)):
        number(monkeypatch, i)
        alone = load(checkpoint, **plan)
        rows = alone.start([prompt])
        answers = [outcome(answers_to(alone, rows, None, 12, **sampling))[0][0]]
        for turn, question in enumerate(questions):
            number(monkeypatch, sum(len(asked) > turn for asked in QUESTIONS[:i]))
            answers += outcome(answers_to(alone, rows, [question], 12, **sampling))[0]
        assert answers == found[i]


def test_logits_do_not_depend_on_the_other_rows(checkpoint):
    empty, busy = load(checkpoint, batch=3, max_prompt=97), load(checkpoint, batch=3, max_prompt=97)
    busy.generate(PROMPTS, max_new_tokens=12)
    tokens = list(range(20, 40))
    assert torch.equal(empty.logits(PROMPTS[0], tokens), busy.logits(PROMPTS[0], tokens))


@pytest.mark.parametrize(
    "method, batch, lag, sampling",
    (
        ("full", 1, 0, SAMPLED),
        ("snapkv", 2, 1, SAMPLED),
        slow("full", 2, 1, {}),
        slow("streaming", 2, 0, {}),
        slow("h2o", 2, 1, {}),
    ),
)
def test_more_prompts_than_rows_refill_the_rows(checkpoint, eos, batch, lag, method, sampling):
    expected = load(checkpoint, method, batch=5, eos=eos).generate(PROMPTS, 12, **sampling)
    engine = load(checkpoint, method, batch=batch, lag=lag, eos=eos)
    assert outcome(engine.generate(PROMPTS, 12, **sampling)) == outcome(expected)


@pytest.mark.parametrize("lag", (0, 1))
@pytest.mark.parametrize("stops", (True, False))
def test_a_question_sees_exactly_the_conversation_so_far(checkpoint, eos, stops, lag):
    """The cache holds the whole answer, but neither its EOS nor anything after it: as if all had been one prompt."""
    ends = eos if stops else ()
    engine, whole = load(checkpoint, batch=2, lag=lag, eos=ends), load(checkpoint, eos=ends)
    for prompt in PROMPTS:
        rows = engine.start([prompt, PROMPTS[1]])
        first, _ = engine.ask(rows, None, 12)
        assert rows[0].tokens == prompt + first.tokens[: len(first.tokens) - (first.finish_reason == "length")]
        second = engine.ask(rows, [[1, 2, 3], [4]], 12)[:1]
        assert outcome(whole.generate([prompt + first.tokens + [1, 2, 3]], 12)) == outcome(second)
        for row in rows:
            row.close()


@pytest.mark.parametrize("lag", (0, 1))
def test_an_answer_in_pieces_is_the_whole_answer(checkpoint, lag):
    engine = load(checkpoint, batch=2, lag=lag)
    rows = engine.start(PROMPTS[:2])
    found = [engine.ask(rows, None, n, temperature=1.0) for n in (1, 1, 10)]
    whole = load(checkpoint, batch=2).generate(PROMPTS[:2], 12, temperature=1.0)
    for row, answer in enumerate(whole):
        assert [t for piece in found for t in piece[row].tokens] == answer.tokens


@pytest.mark.parametrize("method, lag", (("full", 0), ("h2o", 1), slow("streaming", 0), slow("snapkv", 1)))
def test_a_fork_and_its_origin_are_independent(checkpoint, method, lag):
    engine, asked = load(checkpoint, method, batch=3, lag=lag, max_prompt=97), [[1, 2, 3], [9, 9]]
    (row,) = engine.start([PROMPTS[0]])
    fresh = row.fork()
    (first,) = engine.ask([row], None, 6)
    assert engine.ask([fresh], None, 6) == [first] and row.tokens == fresh.tokens
    fork = row.fork()
    assert engine.stats.prefill_tokens == 0 and fork.index not in (row.index, fresh.index)
    found = [(a.tokens, a.finish_reason) for a in engine.ask([row, fork], asked, 8)]
    row.close()
    engine.start([PROMPTS[2]])  # in the row that was closed
    found += [(a.tokens, a.finish_reason) for a in engine.ask([fork, fresh], [[4], asked[0]], 8)]
    for i, questions in enumerate((asked[:1], asked[1:], [asked[1], [4]], asked[:1])):
        alone = load(checkpoint, method)
        rows = alone.start([PROMPTS[0]])
        alone.ask(rows, None, 6)
        answers = [alone.ask(rows, [question], 8) for question in questions]
        assert outcome(answers)[-1] == [found[i]]


@pytest.mark.parametrize("ends, lag", (("returns", 0), ("fails", 1)))
def test_a_row_that_is_not_asked_keeps_its_conversation(checkpoint, lag, ends):
    """While other prompts are answered in the rows beside it, or fail."""
    engine = load(checkpoint, batch=3, lag=lag, max_prompt=97)
    (row,) = engine.start([PROMPTS[0]])
    (first,) = engine.ask([row], None, 6)

    def fail(*_):
        raise KeyboardInterrupt

    if ends == "fails":
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[1:], 7, on_token=fail)
    else:
        assert len(engine.generate(PROMPTS[1:], 7)) == 4
    assert engine.rows == [row, None, None]
    whole = load(checkpoint).generate([PROMPTS[0] + first.tokens + [1, 2, 3]], 9)
    assert outcome(engine.ask([row], [[1, 2, 3]], 9)) == outcome(whole)


def test_a_sleeping_row_is_at_its_newest_token(checkpoint, monkeypatch):
    engine, seen = load(checkpoint, batch=3), []
    rows = engine.start(PROMPTS[:2])
    decode = engine.layers[0].decode
    monkeypatch.setattr(engine.layers[0], "decode", lambda *x: (seen.append(torch.stack(x[3:])), decode(*x))[1])
    engine.ask(rows[:1], None, 4)
    engine.ask(rows[1:], None, 4)
    assert [step.tolist() for step in seen] == [
        *([[n, 0, 0], [1, 0, 0]] for n in range(40, 43)),
        *([[42, n, 0], [0, 1, 0]] for n in range(3, 6)),
    ]


@pytest.mark.parametrize("lag", (0, 1))
def test_a_stop_text_ends_an_answer_and_is_cut_off(tiny_checkpoint, lag):
    """The streamed text is the returned one; the next question follows all tokens of the answer, uncut."""
    engine = load(tiny_checkpoint, batch=3, lag=lag, max_prompt=60)
    prompts, question = ["The keeper rowed", "At low tide"], [7, 8, 9]
    free = [c.text for c in engine.generate(prompts, 12)]
    at = len(free[0]) // 2
    stop, shown = [free[0][at : at + 3], "never said"], ["", ""]

    def show(index, token, text):
        shown[index] += text

    rows = engine.start(prompts)
    found = engine.ask(rows, None, 12, stop=stop, on_token=show)
    for text, answer, seen in zip(free, found, shown, strict=True):
        assert answer.text == seen == min((text.split(s)[0] for s in stop), key=len)
        assert answer.finish_reason == ("stop" if any(s in text for s in stop) else "length")
    assert found[0].finish_reason == "stop" and 0 < len(found[0].tokens) < 12
    again = engine.ask(rows, [question, question], 12, stop=stop)
    for prompt, first, second in zip(prompts, found, again, strict=True):
        (expected,) = engine.generate([engine.encode(prompt) + first.tokens + question], 12, stop=stop)
        assert expected == second


def test_a_step_in_flight_when_a_stop_text_is_found_leaves_the_same_conversation(tiny_checkpoint):
    """h2o would count a token twice that is fed again."""
    found = []
    for lag in (0, 1):
        engine = load(tiny_checkpoint, "h2o", lag=lag)
        text = engine.generate("The keeper rowed", 12)[0].text
        rows = engine.start("The keeper rowed")
        (first,) = engine.ask(rows, None, 12, stop=[text[10:12]])
        assert first.finish_reason == "stop" and len(first.tokens) < 12
        found.append([first, *engine.ask(rows, [[7, 8, 9]], 12)])
    assert found[0] == found[1]


def test_generated_tokens_are_the_argmax_of_the_forced_logits(checkpoint):
    for method in METHODS:
        engine = load(checkpoint, method)
        (answer,) = engine.generate([PROMPTS[2]], max_new_tokens=20)
        tokens = answer.tokens
        logits = engine.logits(PROMPTS[2], tokens)
        assert logits.shape == (20, 128) and logits.dtype == torch.float32
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.slow
def test_one_compiled_step_serves_every_length(checkpoint):
    """Prompts of 40 to 6000 tokens: the step is compiled once and equals eager."""
    folder = write_random(checkpoint.parent / "long", max_position_embeddings=8192)
    long = torch.randint(128, (6000,), generator=torch.Generator().manual_seed(0)).tolist()
    engines = [Engine.load(folder, compile=c, max_prompt=6000, room=40) for c in (True, False)]
    for prompt in (PROMPTS[0], long, long[:700], long[:5000]):
        compiled, eager = (engine.logits(prompt, PROMPTS[0][:20]) for engine in engines)
        assert (compiled - eager).abs().max() < 1e-3
    assert engines[0].stats.compiles == 3 and engines[0].stats.compile_s > 0  # around the layers, and a layer


@pytest.mark.slow
def test_compiled_bfloat16_stays_as_close_to_fp32_as_eager_does(tmp_path):
    folder = write_random(tmp_path / "model", architectures=["Qwen2ForCausalLM"])  # with biases
    exact, eager, compiled = (
        Engine.load(folder, dtype=dtype, compile=c, room=20).logits(PROMPTS[0], PROMPTS[2][:10])
        for dtype, c in (("float32", False), ("bfloat16", False), ("bfloat16", True))
    )
    assert (eager - exact).abs().mean() > 0  # the dtype is what was asked for
    assert (compiled - exact).abs().mean() < 1.5 * (eager - exact).abs().mean()
    assert (compiled - exact).abs().max() < 2 * (eager - exact).abs().max()


@pytest.mark.slow
def test_greedy_sampled_and_cut_are_three_compiled_ends_of_a_step_and_no_more(checkpoint, traced_only):
    engine = load(checkpoint, batch=2, compile=True)
    for temperature, top_k, seed in ((0, None, 0), (1.0, None, 0), (0.7, None, 3), (0.5, 5, 0), (0.9, 3, 0)):
        engine.seed = seed
        engine.generate(PROMPTS[:3], max_new_tokens=6, temperature=temperature, top_k=top_k)
    assert engine.stats.compiles == 2 + 3


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_step_is_one_graph_for_a_gpu(checkpoint, method, traced_only):
    """Where CUDA graphs capture it, the whole step is compiled at once; here that is traced on the CPU."""
    graph, eager = (load(checkpoint, method, compile=c, max_prompt=97, room=4) for c in (True, False))
    graph.run_step = torch.compile(decode_step, fullgraph=True, backend="eager")
    found, expected = (e.generate(PROMPTS[:1], 4) for e in (graph, eager))
    assert outcome(found) == outcome(expected) and graph.stats.compiles == 1


def test_a_seed_gives_a_prompt_the_same_answer_whatever_ran_before(checkpoint):
    how = {"max_new_tokens": 20, "temperature": 2.0}
    engine, other = load(checkpoint, seed=1, batch=2), load(checkpoint, seed=2, batch=2)
    first = outcome(engine.generate(PROMPTS[:2], **how))
    engine.logits(PROMPTS[2], [4, 5])
    engine.generate(PROMPTS[3:], **how)
    assert (
        first == outcome(engine.generate(PROMPTS[:2], **how)) == converse(engine, PROMPTS[:2], new=20, temperature=2.0)
    )
    assert first[:1] == outcome(engine.generate(PROMPTS[:1], **how))
    assert first != outcome(other.generate(PROMPTS[:2], **how))
    same = outcome(engine.generate([PROMPTS[0]] * 2, **how))
    assert same[0] != same[1]  # answers to one prompt in a call are different draws


def test_a_refused_method_leaves_the_engine_as_it_was(checkpoint):
    engine = load(checkpoint, room=6)
    (row,) = engine.start([PROMPTS[0]])
    for refused in (("streaming",), ("nothing",), ("streaming", 10**9, {"sinks": "x"}), ("full", None, {}, 1, 10**6)):
        with pytest.raises(ValueError):
            engine.use(*refused)
    assert outcome(engine.ask([row])) == outcome(load(checkpoint, room=6).generate([PROMPTS[0]]))


def test_the_old_name_of_room_is_accepted_for_now_and_named(checkpoint, capsys):
    engine = Engine.load(checkpoint, compile=False, max_prompt=8, max_new_tokens=7)
    assert engine.plan.room == 7 and engine.use("full", max_prompt=8, max_new_tokens=9).plan.room == 9
    assert capsys.readouterr().err.count("now called room") == 2


def test_caches_grow_with_the_prompts_unless_max_prompt_is_set(checkpoint, capsys):
    engine = load(checkpoint)
    engine.generate([PROMPTS[1]], max_new_tokens=3)
    assert engine.plan.max_prompt == 3 and not capsys.readouterr().err
    grown = outcome(engine.generate([PROMPTS[2]], max_new_tokens=3))
    assert engine.plan.max_prompt == 128 and "128 tokens" in capsys.readouterr().err
    assert grown == outcome(load(checkpoint).generate([PROMPTS[2]], max_new_tokens=3))
    fixed = load(checkpoint, max_prompt=50)
    fixed.generate([PROMPTS[0]], max_new_tokens=3)
    with pytest.raises(ValueError, match="97 tokens and max_prompt is 50"):
        fixed.generate([PROMPTS[2]], max_new_tokens=3)
    fixed.close()
    fixed.generate([PROMPTS[1]], max_new_tokens=3)
    assert fixed.plan.max_prompt == 50


def sizes_of(engine, monkeypatch):
    """The plans that the engine allocates from now on, as (max_prompt, room)."""
    found, allocate = [], engine._allocate
    monkeypatch.setattr(engine, "_allocate", lambda plan: (found.append((plan.max_prompt, plan.room)), allocate(plan)))
    return found


WINDOW = {"architectures": ["MistralForCausalLM"], "sliding_window": 100}


@pytest.mark.parametrize(
    "config, method, prompts, allocated",
    (
        ({}, "full", (20, 22, 30, 32, 33, 60, 64, 1, 65, 3000), [20, 32, 64, 128, 4096]),
        ({"max_position_embeddings": 3000}, "full", (20, 2100), [20, 3000]),
        (WINDOW, "streaming", (20, 40, 70, 98), [20, 64, 98]),
    ),
    ids=("powers", "context", "window"),
)
def test_growing_caches_step_up_by_powers_of_two_within_what_the_model_takes(
    tmp_path, monkeypatch, config, method, prompts, allocated
):
    engine = load(write_random(tmp_path / "m", **config), method, room=2)
    plans = sizes_of(engine, monkeypatch)
    for prompt in prompts:
        engine.generate([[7] * prompt])
    assert plans == [(size, 2) for size in allocated]  # the first is as large as asked for
    if method == "full":
        engine.generate([[7]], max_new_tokens=9)
        engine.generate([[7]], max_new_tokens=15)
        assert plans[len(allocated) :] == [(allocated[-1], 16)]


def test_a_grown_cache_takes_at_most_half_the_free_memory(checkpoint, monkeypatch):
    engine = load(checkpoint, room=2)
    plans = sizes_of(engine, monkeypatch)
    needed = 2 * 2 * 2 * 16 * 4  # bytes a token takes: layers, KV heads, K and V, head dim, fp32
    monkeypatch.setattr("runtime.parallel.free_bytes", lambda _: 2 * 2600 * needed)
    for prompt in (20, 1100, 2100):  # 2,048 + 2 leave half; 4,096 + 2 would not
        engine.generate([[7] * prompt])
    assert plans == [(20, 2), (2048, 2), (2100, 2)]


def test_a_budget_that_is_a_share_stays_one_of_each_prompt_while_caches_grow(checkpoint, monkeypatch):
    engine = load(checkpoint, "streaming", budget=0.5, room=2)
    plans = sizes_of(engine, monkeypatch)
    for prompt in (20, 33, 97):
        found = outcome(engine.generate([PROMPTS[2][:prompt]]))
        alone = load(checkpoint, "streaming", budget=0.5, room=2, max_prompt=prompt)
        assert found == outcome(alone.generate([PROMPTS[2][:prompt]]))
    assert plans == [(20, 2), (64, 2), (128, 2)]


@pytest.mark.parametrize("lag", (0, 1))
def test_an_interrupted_answer_keeps_its_tokens_and_the_conversation_goes_on(checkpoint, lag):
    """All rows stop; the next questions are answered as if the answers had been that short."""
    engine, count = load(checkpoint, batch=2, lag=lag), itertools.count(1)
    rows = engine.start([PROMPTS[0], PROMPTS[2]])
    firsts = engine.ask(rows, None, 30, on_token=lambda *_: next(count) == 9 and engine.interrupt())
    seconds = engine.ask(rows, [[1, 2, 3]] * 2, 30)
    for row, (prompt, first, second) in enumerate(zip((PROMPTS[0], PROMPTS[2]), firsts, seconds, strict=True)):
        (whole,) = load(checkpoint).generate([prompt], 30)
        assert first.tokens == whole.tokens[: len(first.tokens)], row
        assert first.finish_reason == "interrupted" and 4 <= len(first.tokens) <= 7
        assert outcome(load(checkpoint).generate([prompt + first.tokens + [1, 2, 3]], 30)) == outcome([second])


@pytest.mark.parametrize("lag", (0, 1))
def test_an_interrupted_answer_can_be_continued(checkpoint, lag):
    engine, count = load(checkpoint, batch=2, lag=lag), itertools.count(1)
    rows, how = engine.start(PROMPTS[:2]), {"temperature": 1.0}
    found = engine.ask(rows, PROMPTS[3:], 20, on_token=lambda *_: next(count) == 9 and engine.interrupt(), **how)
    assert {answer.finish_reason for answer in found} == {"interrupted"}
    rest = engine.ask(rows, None, 20 - len(found[0].tokens), **how)
    fresh = load(checkpoint, batch=2)
    whole = fresh.ask(fresh.start(PROMPTS[:2]), PROMPTS[3:], 20, **how)
    for first, second, both in zip(found, rest, whole, strict=True):
        tokens = (first.tokens + second.tokens)[:20]
        assert tokens == both.tokens[: len(tokens)] and second.finish_reason == "length"


def test_prompts_that_wait_are_answered_after_an_interruption(checkpoint):
    engine, count = load(checkpoint, batch=2), itertools.count(1)
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    found = engine.generate(prompts, 20, on_token=lambda *_: next(count) == 9 and engine.interrupt())
    assert [c.finish_reason for c in found] == ["interrupted", "interrupted", "length"]
    assert outcome(found[2:]) == outcome(load(checkpoint).generate(prompts[2:], 20))


@pytest.mark.parametrize("lag, sampling", ((0, {}), (1, {"temperature": 1.0, "top_k": 20})))
def test_a_question_taken_at_once_is_answered_like_one_fed_token_by_token(checkpoint, eos, lag, sampling):
    """With the full cache, greedy or sampled, after answers that end in any way."""
    questions = [[[9, 8, 7, 6], [5]], [list(range(3, 40))], [[1, 2]], [], [[60] * 7, [61] * 9]]
    engine = load(checkpoint, batch=5, room=90, seed=3, lag=lag, eos=eos)
    once, fed = (converse(engine, PROMPTS, questions, stepwise=stepwise, **sampling) for stepwise in (False, True))
    assert once == fed and len({reason for row in once for _, reason in row}) == 2


def test_what_is_fed_gives_the_logits_of_a_whole_prompt(checkpoint):
    """After an answer too, whose last token is fed first; then `ask` continues, and errors name themselves."""
    engine, alone = load(checkpoint, batch=2), load(checkpoint)
    rows = engine.start(PROMPTS[:2])
    answers = engine.ask(rows, None, 4)
    fed = engine.feed(rows, [[5, 6, 7], [8]])
    assert [len(x) for x in fed] == [4, 2]
    for row, prompt, answer, text, logits in zip(rows, PROMPTS, answers, ([5, 6, 7], [8]), fed, strict=False):
        assert row.tokens == prompt + answer.tokens + text
        expected = alone.logits(prompt, answer.tokens + text + [0])[-len(logits) :]
        assert (logits - expected).abs().max() <= 1e-5
    held = [list(row.tokens) for row in rows]
    assert outcome(engine.ask(rows, None, 3)) == outcome(load(checkpoint, batch=2).generate(held, 3))
    assert engine.feed([], []) == []
    for texts, words in (([[1]], "1 texts for 2 rows"), ([[1] * 500, [1]], "no room"), ([[], [1]], "empty")):
        with pytest.raises(ValueError, match=words):
            engine.feed(rows, texts)


def test_a_finished_prompt_is_reported_before_the_others_finish(checkpoint, eos):
    engine, events, done = load(checkpoint, batch=2, eos=eos), [], {}
    found = engine.generate(
        [PROMPTS[2], PROMPTS[0], PROMPTS[4]],
        12,
        on_token=lambda i, *_: events.append(i),
        on_answer=lambda i, answer: (events.append(f"done {i}"), done.update({i: answer})),
    )
    assert done == dict(enumerate(found)) and len(found[0].tokens) > len(found[1].tokens)
    assert events.index("done 1") < events.index(2) < events.index("done 0")
    assert 0 in events[events.index(2) :]


def test_a_row_that_passes_the_context_causes_one_warning(tmp_path, capsys):
    folder = write_random(tmp_path / "short", max_position_embeddings=50)
    engine = load(folder, batch=2)
    engine.generate([PROMPTS[0], PROMPTS[1]], 10)  # 40 tokens and 10 more: the last is never fed
    engine.generate([PROMPTS[0]], 11)
    assert engine.stats.past_context == [] and not capsys.readouterr().err
    engine.generate([PROMPTS[1], PROMPTS[0]], 12)
    assert engine.stats.past_context == [1]
    rows = engine.start([PROMPTS[1], PROMPTS[0]])
    engine.ask(rows, None, 5)
    engine.ask(rows, [[1] * 20] * 2, 5)
    assert engine.stats.past_context == [1]
    assert capsys.readouterr().err.count("past the model's context of 50 tokens") == 1
    for row in rows:
        row.close()
    engine.generate([PROMPTS[0]], 5)
    assert engine.stats.past_context == []
    fresh = load(folder)
    fresh.logits(PROMPTS[0], [1] * 11)
    assert not capsys.readouterr().err
    fresh.logits(PROMPTS[0], [1] * 12)
    assert "past the model's context" in capsys.readouterr().err
    endless = load(folder, "streaming")
    endless.generate([PROMPTS[0]], 60)
    assert endless.stats.past_context == [] and not capsys.readouterr().err


def test_progress_wraps_what_takes_long(checkpoint, monkeypatch):
    heard = []

    def progress(items, what):
        for item in items:
            yield item
            heard.append(what)

    monkeypatch.setattr("engine.compiled", lambda step, **_: step)
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    engine = load(checkpoint, compile=True, progress=progress)
    engine.generate([PROMPTS[2]], 3)
    engine.generate([PROMPTS[0]], 3)
    layers = ["prefill 97 tokens"] * 2 + ["prefill 40 tokens"] * 2
    assert heard == ["compile the greedy decode step, a minute or more the first time", *layers]
    stats = engine.stats
    assert stats.prefill_tokens == 40 and 0 < stats.prefill_s <= stats.first_token_s and stats.load_s > 0


def test_the_cache_holds_what_was_planned_and_reports_it(checkpoint):
    engine = load(checkpoint, max_prompt=100, room=28, batch=3)
    planned = 3 * 2 * 2 * 128 * 2 * 16 * 4  # rows, layers, KV heads, tokens, K and V, head dim, fp32
    known = figures(engine, 1)
    assert planned <= known["kv_full_bytes"] == known["kv_device_bytes"] <= 1.02 * planned
    assert known["kv_host_bytes"] == 0
    small = load(checkpoint, "streaming", max_prompt=3000, room=28)
    assert figures(small, 1)["kv_device_bytes"] < figures(small, 1)["kv_full_bytes"] / 20


def test_a_question_without_room_is_refused_and_changes_nothing(checkpoint):
    engine = load(checkpoint, max_prompt=40, room=20, batch=2)
    rows = engine.start([PROMPTS[0]])
    answers = [engine.ask(rows, None, 8), engine.ask(rows, [[5] * 4], 7)]
    for question, row in itertools.product(([[5] * 4], [[5] * 3], [[5] * 10**5]), (rows[0], rows[0].fork())):
        with pytest.raises(ValueError, match="no room for another question: the caches hold 20"):
            engine.ask([row], question, 8)
    answers.append(engine.ask(rows, [[5]], 8))  # after 8 + 4 + 7 tokens and this one
    assert [len(a.tokens) for (a,) in answers] == [8, 7, 1]
    history = PROMPTS[0] + answers[0][0].tokens + [5] * 4 + answers[1][0].tokens + [5]
    assert outcome(load(checkpoint).generate([history], 1)) == outcome(answers[2])


@pytest.mark.slow
def test_caches_may_be_recompiled_any_number_of_times(checkpoint, traced_only):
    engine = load(checkpoint, compile=True, room=3)
    for length in range(10, 30, 2):  # torch.compile gives up at the ninth recompile of one function
        engine.close()
        prompt = list(range(length))
        expected = load(checkpoint, room=3).generate([prompt])
        assert outcome(engine.generate([prompt])) == outcome(expected)


def test_streaming_answers_at_any_length_beyond_its_plan(checkpoint, capsys):
    """With a budget for everything as the full cache does; with a smaller one in the same caches."""
    plan, full = {"max_prompt": 97, "room": 10}, load(checkpoint)
    tokens = torch.randint(128, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    streaming = load(checkpoint, "streaming", budget=1000, **plan)
    assert outcome(streaming.generate([PROMPTS[2]], 60)) == outcome(full.generate([PROMPTS[2]], 60))
    streaming.close()
    assert (streaming.logits(PROMPTS[2], tokens) - full.logits(PROMPTS[2], tokens)).abs().max() < 1e-4
    capsys.readouterr()
    (answer,) = load(checkpoint, "streaming", **plan).generate([PROMPTS[2]], max_new_tokens=300)
    assert len(answer.tokens) == 300 and not capsys.readouterr().err


def test_a_failed_prefill_leaves_the_engine_as_it_was(checkpoint, monkeypatch):
    engine = load(checkpoint, batch=2, max_prompt=97)
    expected, prefill = outcome(engine.generate([PROMPTS[0]], 9)), engine.model.prefill

    def fail(row, ids, *more):
        if len(ids) == 97:  # after a first layer
            engine.layers[0].prefill(row, *(torch.full((1, heads, 97, 16), 1e4) for heads in (4, 2, 2)))
            raise KeyboardInterrupt
        return prefill(row, ids, *more)

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "prefill", fail)
        for call in (engine.generate, engine.start, lambda prompts: engine.logits(prompts, [[1]] * len(prompts))):
            for prompts in ([PROMPTS[2]], [PROMPTS[1], PROMPTS[2]]):
                with pytest.raises(KeyboardInterrupt):
                    call(prompts)
                assert engine.rows == [None, None]
    assert outcome(engine.generate([PROMPTS[0]], 9)) == expected


def test_an_interrupted_prompt_of_d2o_frees_what_waits_for_its_end(checkpoint, monkeypatch):
    engine = load(checkpoint, method="d2o", budget=24, max_prompt=97)
    expected, last = engine.generate([PROMPTS[0]], 9), engine.layers[-1]
    shared = last.shared

    def fail(*_, **more):
        assert shared.parked
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "prefill", fail)
        engine.generate([PROMPTS[2]], 9)
    assert not shared.parked
    assert engine.generate([PROMPTS[0]], 9) == expected


@pytest.mark.parametrize("lag, speculate", ((0, 0), (1, 0), slow(1, 2)))
def test_an_error_in_on_token_leaves_an_engine_that_answers(checkpoint, lag, speculate):
    kv = {"method": "streaming", "speculate": speculate} if speculate else {}
    engine, expected = load(checkpoint, batch=2, lag=lag, **kv), load(checkpoint, batch=2).generate(PROMPTS[:2], 9)
    for failing in (1, 2, 5, 8):
        count = itertools.count(1)

        def fail(*_):
            if next(count) == failing:  # noqa: B023
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:3], 9, on_token=fail)
        assert engine.rows == [None, None]
        rows, count = engine.start(PROMPTS[:2]), itertools.count(1)
        with pytest.raises(KeyboardInterrupt):
            engine.ask(rows, None, 9, on_token=fail)
        assert engine.rows == [None, None]
        with pytest.raises(ValueError, match="a row was closed"):
            engine.ask(rows, [[1], [2]])
        assert outcome(engine.generate(PROMPTS[:2], 9)) == outcome(expected)


@pytest.mark.parametrize("lag, value, sampling", ((0, torch.nan, {}), (1, torch.inf, SAMPLED), slow(1, torch.nan, {})))
def test_logits_that_are_not_finite_end_an_answer(checkpoint, capsys, lag, value, sampling):
    """At the first token, or where a token is fed whose embedding is not finite; the rows beside it go on."""
    prompts = PROMPTS[:2]
    good = outcome(load(checkpoint, batch=2).generate(prompts, 12, **sampling))
    poison = next(t for t in good[0][0][0] if t not in prompts[0] + prompts[1] + good[1][0][0])
    engine = load(checkpoint, batch=2, lag=lag)
    engine.model.tok_embeddings.weight.data[poison] = value
    rows = engine.start(prompts)
    first, beside = engine.ask(rows, None, 12, **sampling)
    at = good[0][0][0].index(poison)
    assert (first.tokens, first.finish_reason) == (good[0][0][0][: at + 1], "error")
    assert outcome([beside]) == good[1:]
    assert capsys.readouterr().err == "the model's logits are not finite in torch.float32: try another --dtype\n"
    for row in rows:
        row.close()
    (row,) = engine.start([[poison]])
    (found,) = engine.ask([row], None, 12, **sampling)
    assert found.finish_reason == "error" and found.tokens == [] and not engine.state.left.any()
    row.close()
    assert capsys.readouterr().err.count("\n") == 1
    fresh = load(checkpoint, batch=2)
    fresh.model.tok_embeddings.weight.data[poison] = value
    expected = outcome(fresh.generate(prompts[::-1], 12, **sampling))  # prompts[1] where the rows met it
    assert sampling or expected[0] == good[1]
    assert outcome(engine.generate(prompts[::-1], 12, **sampling)) == expected


def test_prompts_can_be_prefilled_alone_and_asked_about_afterwards(checkpoint):
    engine = load(checkpoint, batch=2)
    rows = engine.start(PROMPTS[:2])
    assert [row.tokens for row in rows] == PROMPTS[:2] and engine.stats.prefill_tokens == 43
    found = engine.ask(rows[::-1], [[5, 6], [7]], 6)  # in any order
    whole = load(checkpoint, batch=2).generate([PROMPTS[1] + [5, 6], PROMPTS[0] + [7]], 6)
    assert outcome(found) == outcome(whole)
    with pytest.raises(ValueError, match="0 of 2 rows are free and 2 are needed"):
        engine.start(PROMPTS[:2])
    with pytest.raises(ValueError, match="0 of 2 rows are free"):
        engine.generate(PROMPTS[:1])
    with pytest.raises(ValueError, match="0 of 2 rows are free"):
        rows[0].fork()
    rows[0].close()
    rows[0].close()
    assert outcome(engine.generate(PROMPTS[:2], 6)) == outcome(load(checkpoint, batch=2).generate(PROMPTS[:2], 6))


def test_rows_that_are_closed_or_anothers_are_refused(checkpoint, tmp_path):
    engine, other = load(checkpoint, batch=3), load(checkpoint, batch=3)
    closed, row, moved = engine.start(PROMPTS[:3])
    closed.close()
    (again,) = engine.start([PROMPTS[3]])  # in its place
    (foreign,) = other.start([PROMPTS[0]])
    for bad in (closed, foreign, None):
        with pytest.raises(ValueError, match="closed, or belongs to another engine"):
            engine.ask([row, bad], [[1], [2]])
    with pytest.raises(ValueError, match="closed, or"):
        closed.fork()
    with pytest.raises(ValueError, match="closed, or"):
        closed.save(tmp_path / "row.kv")
    with pytest.raises(ValueError, match="twice"):
        engine.ask([row, row], [[1], [2]])
    with pytest.raises(ValueError, match="1 questions for 2 rows"):
        engine.ask([row, moved], [[1]])
    closed.close()
    assert engine.rows == [again, row, moved] and not [*tmp_path.iterdir()]
    assert outcome(engine.ask([again], None, 5)) == outcome(load(checkpoint).generate([PROMPTS[3]], 5))
    again.close()
    with pytest.raises(ValueError, match="rows are in use"):
        engine.generate([PROMPTS[2] * 2])
    engine.use("full", batch=1)
    moved.close()
    with pytest.raises(ValueError, match="closed, or"):
        engine.ask([moved], [[1]])
    engine.close()
    assert engine.rows == [None]


def test_an_engine_switches_to_another_method_and_back(checkpoint):
    engine = load(checkpoint)
    full = outcome(engine.generate(PROMPTS[:2], max_new_tokens=8))
    engine.use("streaming", 6, batch=2, room=8)
    alone = load(checkpoint, "streaming", budget=6, batch=2)
    assert outcome(engine.generate(PROMPTS[:2], max_new_tokens=8)) == outcome(
        alone.generate(PROMPTS[:2], max_new_tokens=8)
    )
    assert outcome(engine.use("full", room=8).generate(PROMPTS[:2], max_new_tokens=8)) == full


def test_prompts_may_be_arrays(checkpoint):
    engine = load(checkpoint, batch=2)
    expected = outcome(engine.generate([PROMPTS[1]], 4))
    for prompt in (
        torch.tensor(PROMPTS[1]),
        np.array(PROMPTS[1]),
        np.array(PROMPTS[1], dtype=np.uint8),
        [np.int64(token) for token in PROMPTS[1]],
        tuple(PROMPTS[1]),
    ):
        assert outcome(engine.generate(prompt, 4)) == outcome(engine.generate([prompt], 4)) == expected
    assert outcome(engine.generate(torch.tensor([PROMPTS[1]] * 2), np.int64(4))) == expected * 2
    engine.use("full", batch=np.int64(2), max_prompt=np.int64(50), room=np.int64(3))
    assert len(engine.generate(PROMPTS[1], np.int64(300))[0].tokens) == 300
    (row,) = engine.start(np.array(PROMPTS[0]))
    answers = engine.ask([row], [torch.tensor(PROMPTS[1])], 4)
    assert outcome(answers) == outcome(engine.generate(PROMPTS[0] + PROMPTS[1], 4))
    assert engine.logits(torch.tensor([9, 8]), np.array([7, 6])).shape == (2, 128)
    for empty in ([], (), iter(())):
        assert engine.generate(empty) == []


NO_PROMPTS = [
    [True],
    [1.0],
    torch.tensor([1.0]),
    torch.tensor([True]),
    torch.tensor(1),
    np.array([1.5]),
    np.array(["a"]),
]
NO_PROMPTS += [np.array([]), {1: 2}, {"input_ids": [1, 2]}, {1, 2}, b"ab", None, 5, [None], [[1], 2], [[[1]]], [1, "a"]]
NO_PROMPTS += [[-1], [[]], [""], "", [1024]]


def test_prompts_of_no_known_kind_are_refused(tiny_checkpoint, checkpoint):
    engines = load(checkpoint), load(tiny_checkpoint)
    for engine, prompt, call in itertools.product(engines, NO_PROMPTS, ("generate", "start")):
        with pytest.raises(ValueError, match=r"^[^\n]*$"):
            getattr(engine, call)(prompt)
            pytest.fail(f"{call} took {prompt!r}")
        assert engine.plan is None


def test_bad_requests_are_refused_before_anything_runs(checkpoint):
    engine = load(checkpoint)
    for call, message in (
        (lambda: engine.generate(["text"]), "no tokenizer"),
        (lambda: engine.generate([[128]]), "token ids must be integers from 0 to 127"),
        (lambda: engine.generate([[1]], max_new_tokens=0), "at least 1"),
        (lambda: engine.generate([[1]], max_new_tokens=2.5), "whole number"),
        (lambda: engine.generate([[1]], temperature=-1), "temperature"),
        (lambda: engine.generate([[1]], temperature=1.0, top_k=2.5), "top-k must be a whole number"),
        (lambda: engine.generate([[1]], stop=["x"]), "no tokenizer"),
        (lambda: figures(engine, 1), "no cache"),
        (lambda: engine.logits([1], []), "empty"),
        (lambda: engine.logits([], []), "0 continuations for 0 prompts"),
        (lambda: engine.logits(5, [1]), "prompts are texts or lists of token ids, not int"),
        (lambda: engine.logits([[1]], [[2], [3]]), "2 continuations for 1 prompts"),
        (lambda: engine.generate([[1] * 4097]), "4097 tokens and the model's context is 4096"),
        (lambda: Engine.load(checkpoint, seed=1.5), "seed must be a whole number, not 1.5"),
        (lambda: Engine.load(checkpoint, batch=0), "at least 1"),
        (lambda: Engine.load(checkpoint, batch=10**20), "memory of any machine"),
        (lambda: Engine.load(checkpoint, room=10**30), "memory of any machine"),
        (lambda: Engine.load(checkpoint, room=True), "whole number"),
        (lambda: Engine.load(checkpoint, kv="streaming"), "needs --budget"),
        (lambda: Engine.load(checkpoint, kv="streaming", budget=2), "at least 5"),
        (lambda: Engine.load(checkpoint, dtype="int8"), "'int8' is not supported"),
        (lambda: Engine.load(checkpoint, device="tpu"), "'tpu' is not here"),
        (lambda: Engine.load(checkpoint, max_prompt=10**4), "context is 4096"),
        (lambda: Engine.load(checkpoint, room=10**9, max_prompt=10), "GB are free"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.ask([]) == [] and engine.plan is None
    rows = engine.start([[1, 2]])
    for ask, message in (
        (lambda: engine.ask(rows, [[]]), "empty"),
        (lambda: engine.ask(rows, [[128]]), "integers from 0 to 127"),
        (lambda: engine.ask(rows, ["And then?"]), "no tokenizer"),
        (lambda: engine.ask(rows, [[1]], top_k=2.5), "whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    assert rows[0].tokens == [1, 2] and len(engine.ask(rows, None, 3)[0].tokens) == 3 and engine.ask([], []) == []


def test_running_out_of_memory_says_what_helps(checkpoint, monkeypatch):
    def prefill(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    engine = load(checkpoint)
    monkeypatch.setattr(engine.model, "prefill", prefill)
    with pytest.raises(ValueError, match=r"2.00 GiB.*--max-new-tokens"):
        engine.generate([[1, 2]])


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
def test_on_a_gpu_the_step_is_one_graph_and_gives_what_eager_gives(checkpoint, method):
    from torch._dynamo.utils import counters

    counters.clear()
    graph, eager = (load(checkpoint, method, lag=1, batch=5, compile=c, max_prompt=97) for c in (True, False))
    assert converse(graph, PROMPTS, QUESTIONS) == converse(eager, PROMPTS, QUESTIONS)
    assert not counters["inductor"]["cudagraph_skips"] and graph.stats.compiles == 1


def test_caches_grow_for_longer_answers_if_any_layer_needs_it(tmp_path):
    """duo with a full layer above a windowed one; the windowed one alone could generate any number of tokens."""
    folder = write_random(tmp_path / "model")
    options = {"head_scores": [[0.0, 0.0], [1.0, 1.0]], "sinks": 2, "recent": 6}
    engine, large = (Engine.load(folder, "duo", 0.5, options, compile=False, room=n) for n in (4, 60))
    assert engine.generate([PROMPTS[0]]) and large.generate([PROMPTS[0]])
    assert [layer.endless for layer in engine.layers] == [True, False]
    longer = engine.generate([PROMPTS[0]], max_new_tokens=60)
    assert engine.plan.room == 64 and outcome(longer) == outcome(large.generate([PROMPTS[0]]))


def test_a_gpu_is_known_by_its_index(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device(name) for name in (None, "cuda", "cuda:1")] == [torch.device("cuda", i) for i in (0, 0, 1)]


def test_an_engine_that_is_busy_refuses_a_second_call_and_stays_usable(checkpoint, tmp_path):
    """A call from on_token or from another thread would mix the sequences."""
    engine, refused = load(checkpoint, batch=2), []
    expected = outcome(engine.generate([PROMPTS[0]], 5))
    (row,) = engine.start([PROMPTS[1]])

    def intrude(*_):
        for call in (
            lambda: engine.generate([PROMPTS[1]]),
            lambda: engine.start([PROMPTS[1]]),
            lambda: engine.ask([row]),
            lambda: engine.logits(PROMPTS[1], [1]),
            lambda: engine.use("full"),
            lambda: engine.load_row(tmp_path / "none"),
            row.fork,
            lambda: row.save(tmp_path / "row.kv"),
            row.close,
            engine.close,
        ):
            with pytest.raises(RuntimeError, match="busy with another call"):
                call()
            refused.append(call)

    def intrude_from_a_thread(*_):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(intrude).result()

    assert outcome(engine.generate([PROMPTS[0]], 5, on_token=intrude)) == expected
    assert outcome(engine.generate([PROMPTS[0]], 5, on_token=intrude_from_a_thread)) == expected
    assert len(refused) == 10 * (5 + 5) and engine.rows.count(row) == 1
    for failing in (lambda: engine.generate([[]]), lambda: engine.logits([1], []), lambda: engine.use("nosuch")):
        with pytest.raises(ValueError):
            failing()
    assert outcome(engine.use("full").generate([PROMPTS[0]], 5)) == expected


@pytest.mark.parametrize("options", ({}, slow({"compile": True}), {"kv": "streaming", "budget": 24, "speculate": 2}))
def test_closing_frees_the_caches_at_once(checkpoint, options):
    """Larger caches are allocated when the old ones are gone, not when the garbage collector finds them."""
    engine = Engine.load(checkpoint, **{"compile": False, "room": 4} | options)
    engine.generate([[5, 6, 7]])
    buffers = [
        weakref.ref(buffer)
        for layer in engine.layers
        for name, buffer in layer.named_buffers()
        if not name.endswith("inv_freq")  # the model's
    ]
    gc.disable()
    try:
        engine.close()
        assert buffers and not any(buffer() is not None for buffer in buffers)
    finally:
        gc.enable()


BUDGETED = [name for name in kv.METHODS if kv.METHODS[name].budgeted and name not in ("duo", "omnikv")]


@pytest.mark.parametrize("method", [name if name in ("snapkv", "infllm") else slow(name) for name in BUDGETED])
def test_an_answer_depends_on_no_other_prompt_now_or_before(checkpoint, method, capsys):
    """A share is one of each prompt; what follows from the longest prompt is said, and fixed by max_prompt."""
    options = {"block": 8} if method == "infllm" else {}
    prompts = [list(range(3, 43)), list(range(5, 125)) + list(range(3, 43))]

    def engine(budget, batch=1, **plan):
        return Engine.load(checkpoint, method, budget, options, batch=batch, room=24, compile=False, **plan)

    for budget in (0.3, 40):
        alone = engine(budget).generate(prompts[:1])[0].tokens
        capsys.readouterr()
        after = engine(budget)
        after.generate(prompts[1:])
        before = figures(after, 1)["plan_sizes"]
        assert "answers change" not in capsys.readouterr().err
        grown = engine(budget)
        grown.generate(prompts[:1])
        first = figures(grown, 1)["plan_sizes"]
        grown.generate(prompts[1:])
        changed = first != figures(grown, 1)["plan_sizes"]
        assert ("answers change with them" in capsys.readouterr().err) == changed
        together = engine(budget, batch=2).generate(prompts)[0].tokens
        if not before or method == "tailorkv":  # whose channels grow only beyond 32K tokens
            assert alone == after.generate(prompts[:1])[0].tokens == together
        fixed = engine(budget, max_prompt=200).generate(prompts[:1])[0].tokens
        assert fixed == engine(budget, batch=2, max_prompt=200).generate(prompts)[0].tokens


@pytest.mark.parametrize("method", ("sparq", "hybrid"))
def test_a_budget_too_small_for_its_prompts_is_said_once_with_one_that_does(checkpoint, method, capsys):
    engine = Engine.load(checkpoint, method, 8, batch=2, room=8, compile=False)
    prompt = list(range(3, 123)) * 3
    engine.generate([prompt, prompt[:40]])
    engine.generate(prompt)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "too coarsely" in line]
    enough = int(line.split("give it ")[1].split()[0])
    engine.use(method, enough, room=8).generate(prompt)
    assert "too coarsely" not in capsys.readouterr().err
    engine.use(method, enough - 1, room=8).generate(prompt)
    assert f"give it {enough} or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method, fails", (("snapkv", False), ("rocketkv", True), ("streaming", False), slow("h2o", True))
)
def test_a_step_ignores_a_row_that_was_never_asked_or_whose_prefill_failed(checkpoint, method, fails, monkeypatch):
    """What compresses it far must not let its position point outside of its slots."""
    plan = {"method": method, "room": 8, "budget": 16}
    alone, engine = load(checkpoint, **plan), load(checkpoint, batch=2, **plan)
    alone._reserve(400, 8)
    expected = outcome(alone.ask(alone.start([PROMPTS[0]]), None, 5))
    engine._reserve(400, 8)
    rows, long = engine.start([PROMPTS[0]]), [7, 11, 13, 17] * 100
    if fails:
        monkeypatch.setattr(engine.layers[-1], "keep", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.start([long])
    else:
        engine.start([long])
    assert outcome(engine.ask(rows, None, 5)) == expected
