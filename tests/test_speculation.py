"""Speculation: whatever drafts, the tokens are those of the full cache."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import exhaustive, slow, write_random
from conversations import converse, outcome
from test_contract import make_plan

import kv
from engine import Engine, sample
from eval import main as evaluate
from generate import main
from kv import METHODS, Plan
from runtime.compile import compiled
from runtime.speculate import draft_step, rounds

DRAFTS: dict[str, tuple[str, dict]] = {name: (name, {}) for name in METHODS} | {
    "full:bits": ("full", {"bits": 4}),
    "rocketkv": ("rocketkv", {"window": 8, "kernel": 5}),
    "rocketkv:bits": ("rocketkv", {"window": 8, "kernel": 5, "bits": 8}),
    "snapkv:adaptive": ("snapkv", {"window": 8, "heads": "adaptive"}),
    "quest": ("quest", {"page": 4, "skip_layers": 0}),
    "infllm": ("infllm", {"block": 6}),
    "omnikv:threads": ("omnikv", {"offload": True, "engine": "threads", "threads": 2, "delta": True}),
    "kivi": ("kivi", {"bits": 2, "group": 8, "recent": 4}),
    "kvarn": ("kvarn", {"tile": 16}),
    "tailorkv": ("tailorkv", {"group": 8, "channels": 4}),
    "tailorkv:threads": ("tailorkv", {"group": 8, "channels": 4, "engine": "threads", "threads": 2}),
    "pqcache": ("pqcache", {"codebits": 3}),
    "duo": ("duo", {"sinks": 2, "recent": 6, "head_scores": [[3.0, 1.0], [2.0, 4.0], [6.0, 5.0]]}),
    "brute_offload": ("brute_offload", {"layers": 2, "ahead": 1}),
}
NEVER = "full", "h2o", "roco", "cam", "tova", "d2o", "simlayer", "kvzip"
CANNOT = {name: (name, {}, "cannot draft") for name in NEVER} | {
    "omnikv:exp": ("omnikv", {"selector": "exp"}, "cannot draft"),
    "omnikv:prefill": ("omnikv", {"prefill": 0.5, "chunk": 8}, "cannot draft"),
    "a history on the host": ("rocketkv", {"turns": True, "offload": True}, "leave out offload"),
    "a window": ("quest", {"page": 4}, "sliding window"),
}
DRAFTS = {name: draft for name, draft in DRAFTS.items() if name != draft[0] or kv.drafts(name)}
PROMPTS = [list(range(5, 45)), [9, 8, 7], list(range(3, 100)), [60, 61] * 10, list(range(30, 36))]
FOLLOW_UPS = [[[1, 2, 3]], [], [[4], [5, 6]], [[8]], [[77] * 9]]
SAMPLINGS = ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9})
ROUND = 3  # tokens drafted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("speculation") / "m", num_hidden_layers=3)


@pytest.fixture(scope="module")
def eos(checkpoint):
    """Tokens that some rows sample in their first answer, declared as end-of-sequence ids."""
    engine = Engine.load(checkpoint, batch=5, room=80, compile=False, seed=0)
    answers = engine.generate(PROMPTS, max_new_tokens=12)
    return {answers[0].tokens[5], answers[2].tokens[8]}


def load(checkpoint, eos, method="full", options=None, budget=None, speculate=0, lag=0, **plan):
    plan = {"batch": 5, "room": 80, "compile": False, "seed": 0} | plan
    budget = budget if METHODS[method].budgeted else None
    engine = Engine.load(checkpoint, method, budget, options, speculate=speculate, **plan)
    engine.eos, engine.lag = eos, lag
    return engine


def answers(engine, **how):
    """Conversations in all rows; then, as `generate` feeds no questions, more prompts than rows."""
    found = converse(engine, PROMPTS, FOLLOW_UPS, 14, **how)
    if "stepwise" not in how:
        found += outcome(engine.generate(PROMPTS + PROMPTS[:2], 14, **how))
    return found


@pytest.fixture(scope="module")
def expected(checkpoint, eos):
    engine = load(checkpoint, eos)
    found = {i: answers(engine, **sampling) for i, sampling in enumerate(SAMPLINGS)}
    reasons = {reason for row in found[0] for _, reason in row}
    assert reasons == {"stop", "length"}
    return found | {"stepwise": answers(engine, stepwise=True)}


QUICK = ("quest", "snapkv", "kivi")  # which read, drop and pack tokens
LARGE = [slow(name, 90) for name, (method, _) in DRAFTS.items() if METHODS[method].budgeted]


@pytest.mark.parametrize(
    ("name", "budget"), [*((name, 24) if name in QUICK else slow(name, 24) for name in DRAFTS), *LARGE]
)
def test_the_tokens_are_the_full_caches(checkpoint, eos, expected, name, budget):
    """Law 13: ragged rows, refilled; EOS inside a round; questions of one token and of several; greedy and sampled."""
    engine = load(checkpoint, eos, *DRAFTS[name], budget, speculate=ROUND)
    for case, engine.lag in ((0, 1), (1, 0)) if budget == 24 else ((2, 0), (0, 0), ("stepwise", 1)):
        how = {"stepwise": True} if case == "stepwise" else SAMPLINGS[case]
        assert answers(engine, **how) == expected[case], how
        assert engine.stats.fed <= engine.stats.decoded <= engine.stats.fed * (ROUND + 1)


EACH, TOGETHER = (24, {"window": 8}), (40, {"window": 8, "heads": "adaptive"})  # of these 80 one head might keep all


@pytest.mark.parametrize(
    "name, how", (("snapkv", EACH), ("rocketkv", EACH), ("keydiff", EACH), ("snapkv", TOGETHER), ("keydiff", TOGETHER))
)
def test_a_draft_keeps_after_a_question_what_it_would_keep_of_one_prompt(name, how):
    plan, texts = replace(make_plan("gqa", 1, n_layer=1), rewind=2, max_prompt=69), []
    for n in (plan.n_head, *[plan.n_kv_head] * 2):
        texts.append(torch.randn(1, n, 69, plan.head_dim, generator=torch.Generator().manual_seed(n)))
    held = []
    for first in (60, 69):
        (layer,) = kv.build(name, plan, *how)
        layer.prefill(0, *(x[:, :, :first] for x in texts))
        if first < 69:
            layer.extend(0, *(x[:, :, first:] for x in texts), first)
        held.append(layer.draft.held(0, 69))
    assert all(torch.equal(*pair) for pair in zip(*held, strict=True))
    assert (held[0].position[0] >= 0).sum() < 60
    assert how is TOGETHER or layer.draft.filled(0, 69) == held[0].k.shape[1] < 60


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_draft_is_refused(name):
    """Methods that cannot take tokens back, a history on the host, and a sliding window."""
    method, options, message = CANNOT[name]
    plan = replace(make_plan(n_layer=3, window=100 if name == "a window" else None), rewind=ROUND)
    with pytest.raises(ValueError, match=message):
        kv.build(method, plan, 40 if METHODS[method].budgeted else None, options)
    assert name not in DRAFTS


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("exact", (("exact_topk", {}, 400), ("kivi", {"recent": 400})))
def test_a_draft_that_is_always_right_gains_every_token(checkpoint, exact, temperature):
    """One reads the full cache's tokens; the other holds its own, and must be given the last one of each round, and
    questions."""
    engine = load(checkpoint, set(), *exact, speculate=ROUND, batch=1, room=100)
    rows = engine.start([PROMPTS[0]])
    for questions in (None, [[1, 2, 3]]):
        (answer,) = engine.ask(rows, questions, 41, temperature=temperature)
        assert engine.stats.fed == engine.stats.steps == 10 and engine.stats.decoded == 40
        assert len(answer.tokens) == 41


def test_a_draft_that_is_always_wrong_gains_one(checkpoint):
    engine = load(checkpoint, set(), "exact_topk", {}, 400, speculate=ROUND, batch=1)
    expected = engine.generate([PROMPTS[0]], max_new_tokens=11)[0].tokens

    def wrong(part):
        def verify(state, *sampling):
            state.drafted[:, 1:].add_(1).remainder_(128)
            return part(state, *sampling)

        return part if part is draft_step else verify

    engine.run_step = rounds(engine.state, ROUND, sample, wrong)
    assert engine.generate([PROMPTS[0]], max_new_tokens=11)[0].tokens == expected
    assert engine.stats.fed == engine.stats.decoded == 10


@pytest.mark.parametrize("sampling, lag", [*zip(SAMPLINGS, (1, 0, 1), strict=True)])
def test_logits_that_are_not_finite_end_an_answer_inside_a_round(checkpoint, capsys, sampling, lag):
    """Once a token whose embedding is a NaN is sampled, or drafted."""
    engine = load(checkpoint, set(), "exact_topk", {}, 400, speculate=ROUND, lag=lag, batch=2)
    prompts = [PROMPTS[1], PROMPTS[4], PROMPTS[3]]
    good = outcome(engine.generate(prompts, 14, **sampling))
    at, poison = next((i, t) for i, t in enumerate(good[0][0][0]) if i > 4 and t not in sum(prompts, []))
    engine.model.tok_embeddings.weight.data[poison] = torch.nan
    found = outcome(engine.generate(prompts, 14, **sampling))
    assert found[0][0][1] == "error" and 0 < len(found[0][0][0]) <= at + 1
    for ((tokens, reason),), ((expected, _),) in zip(found, good, strict=True):
        assert tokens == expected[: len(tokens)] and reason == ("length" if len(tokens) == 14 else "error")
    errors = sum(reason == "error" for ((_, reason),) in found)
    assert capsys.readouterr().err.count("not finite in torch.float32") == errors < len(found)


@pytest.mark.parametrize("method, lag", (("quest", 0), ("snapkv++", 1), slow("streaming", 1)))
def test_a_stop_text_inside_a_round_ends_the_answer_there(tiny_checkpoint, method, lag):
    """The cache then holds the same tokens as the full cache's: the question's answer is the same."""
    engines = [load(tiny_checkpoint, set(), room=200)]
    engines.append(load(tiny_checkpoint, set(), method, {}, 60, speculate=5, lag=lag, room=200))
    texts = ["The mill stood by the river, and the miller", "Once there was a mouse"]
    text = engines[0].generate(texts[:1], max_new_tokens=40)[0].text
    for cut in (text[7:9], text[12:15], text[20:22]):
        questions = [["And then?"], ["Why?"]]
        expected, found = (converse(engine, texts, questions, 40, stop=[cut]) for engine in engines)
        assert found == expected and expected[0][0][1] == "stop"


@pytest.mark.parametrize("method, lag", (("exact_topk", 1), ("snapkv++", 0)))
def test_a_round_may_cross_the_end_of_the_slots_that_are_read_and_of_the_plan(checkpoint, method, lag):
    """A CPU reads slots in multiples of 256."""
    prompts = [[(7 * i) % 90 + 3 for i in range(n)] for n in (244, 250, 254)]
    plan = {"batch": 1, "max_prompt": 254, "room": 12}
    drafting = load(checkpoint, set(), method, {}, 250, speculate=ROUND, lag=lag, **plan)
    found, expected = (outcome(engine.generate(prompts, 12)) for engine in (drafting, load(checkpoint, set(), **plan)))
    assert found == expected


def test_an_interrupted_round_ends_where_the_host_says(checkpoint, eos):
    engine = load(checkpoint, set(), "snapkv++", {}, 24, speculate=ROUND, batch=1)

    def interrupt(index, token, text):
        if len(seen) == 6:
            engine.interrupt()
        seen.append(token)

    seen = []
    rows = engine.start([PROMPTS[0]])
    (first,) = engine.ask(rows, None, 40, on_token=interrupt)
    (second,) = engine.ask(rows, [[1, 2, 3]], 40)
    assert first.finish_reason == "interrupted" and 6 < len(first.tokens) < 20 and second.finish_reason == "length"
    history = PROMPTS[0] + first.tokens + [1, 2, 3]
    assert load(checkpoint, set()).generate([history], 40)[0].tokens == second.tokens


def test_logits_are_the_full_caches(checkpoint, eos):
    full, drafting = (load(checkpoint, eos, *given, batch=2) for given in ((), ("rocketkv", {"window": 8}, 24, ROUND)))
    texts = PROMPTS[2], PROMPTS[0]
    forced = [list(range(7, 19)), [5, 6, 7]]
    for found, expected in zip(drafting.logits(texts, forced), full.logits(texts, forced), strict=True):
        assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ("quest", "snapkv", "tailorkv"))
def test_a_saved_row_is_continued(checkpoint, name, tmp_path):
    """Also by forks, and after an answer."""
    engine, other = (load(checkpoint, set(), *DRAFTS[name], 24, speculate=ROUND) for _ in range(2))
    full = load(checkpoint, set())
    ((row,), (expected,)) = (each.start([PROMPTS[2]]) for each in (engine, full))
    for _ in range(2):
        row.save(tmp_path / "row.kv")
        first = other.load_row(tmp_path / "row.kv")
        rows, references = [first, first.fork()], [expected, expected.fork()]
        found = [each.ask(own, [[4], [5, 6]], 12) for each, own in ((other, rows), (full, references))]
        assert outcome(found[0]) == outcome(found[1])
        for each in (*rows, references[1]):
            each.close()
        (answer,) = engine.ask([row], [[4]], 12)
        assert outcome([answer]) == outcome(found[1][:1])


@pytest.mark.parametrize(("name", "case"), (slow("rocketkv", 0), exhaustive("tailorkv", 2)))
def test_compiled(checkpoint, eos, expected, name, case):
    engine = load(checkpoint, eos, *DRAFTS[name], 24, speculate=ROUND, compile=True)
    assert answers(engine, **SAMPLINGS[case]) == expected[case]


def test_the_command_line(tiny_checkpoint, tmp_path, capsys):
    out, file = tmp_path / "out.json", str(tmp_path / "book.kv")
    common = ["--checkpoint", str(tiny_checkpoint), "--no-compile", "--json", str(out), "--max-new-tokens", "30"]
    text = ["--prompt", "There was once a mouse who lived in a mill. " * 9]
    answers = []
    for more in ([], ["--kv", "quest", "--budget", "32", "--speculate", "3"]):
        main([*common, *text, *more])
        report = json.loads(out.read_text())
        answers.append(report["completions"][0]["answers"][0]["tokens"])
    assert answers[0] == answers[1] and report["speculate"] == 3
    assert 0 <= report["accepted_per_round"] <= 3 and report["decode_ms_per_step"] >= report["decode_ms_per_token"]
    assert report["kv_device_bytes"] > report["kv_full_bytes"]
    assert "of 3 drafted tokens accepted" in capsys.readouterr().err
    main([*common, *text, "--kv", "snapkv++", "--budget", "32", "--speculate", "3", "--save-prompt", file])
    assert json.loads(out.read_text())["speculate"] == 3
    main([*common[:-2], "--load-prompt", file, "--prompt", " Who?", "--seed", "1"])
    assert json.loads(out.read_text())["speculate"] == 3
    for flags, message in (
        (["--kv", "h2o", "--budget", "32", "--speculate", "2"], "h2o cannot draft"),
        (["--kv", "full", "--speculate", "2"], "cannot draft for itself"),
        (["--kv", "quest", "--budget", "32", "--speculate", "0"], "--speculate must be at least 1"),
        (["--load-prompt", file, "--speculate", "2"], "leave out"),
    ):
        with pytest.raises(ValueError, match=message):
            main([*common, "--prompt", "x", *flags])


@pytest.mark.parametrize("name", ("quest", "hybrid", "exact_topk", "sparq", "omnikv"))
def test_drafts_that_hold_every_token_take_no_memory_for_the_full_cache(name):
    plan = replace(make_plan(), n_layer=3, rewind=ROUND + 1)
    layers = kv.build(name, plan, 32, {"page": 4} if name == "quest" else {})
    assert layers.bytes() == kv.Cache(layer.draft for layer in layers).bytes()


@pytest.mark.slow
def test_an_evaluation_of_drafts_has_the_full_caches_scores(tiny_checkpoint, tmp_path):
    for more in ([], ["--speculate", "3"]):
        run = f"--checkpoint {tiny_checkpoint} --tasks niah_single_1,perplexity --length 340 --samples 1 --budget 32"
        run += f" --batch 2 --kv full,quest:page=4:skip_layers=0,snapkv++ --json {tmp_path}/{len(more)}.json"
        evaluate([*run.split(), *more])
    plain, drafted = (json.loads((tmp_path / name).read_text())["rows"] for name in ("0.json", "2.json"))
    full = {row["task"]: row["score"] for row in plain if row["kv"] == "full"}
    assert any(row["score"] != full[row["task"]] for row in plain)
    for row in drafted:
        assert row["score"] == pytest.approx(full[row["task"]], rel=1e-4)
        graded = row["task"] == "niah_single_1" and row["kv"] != "full"
        assert (row.get("accepted_per_round") is not None) == graded


@pytest.mark.slow
@pytest.mark.parametrize("name", ("rocketkv", "tailorkv"))
def test_a_round_is_two_graphs_for_a_gpu(checkpoint, eos, expected, name, traced_only):
    """Where CUDA graphs capture them, drafting and verifying are compiled as wholes; here that is traced on the CPU."""
    engine = load(checkpoint, eos, *DRAFTS[name], 24, speculate=ROUND, compile=True, max_prompt=97)
    engine.run_step = rounds(engine.state, ROUND, sample, lambda part: compiled(part, backend="eager"))
    assert answers(engine) == expected[0]
    assert engine.stats.compiles == 2


# A draft's own state


class Feed:
    """A method's layers, fed with random tokens of three rows, whose `texts` are q, k and v [L,B,H,n,D]."""

    def __init__(self, name: str, plan: Plan, budget: int):
        method, options = DRAFTS[name]
        self.layers = kv.build(method, plan, budget if METHODS[method].budgeted else None, options)
        self.layers = kv.Cache(getattr(layer, "draft", layer) for layer in self.layers)
        self.lengths = [96, 41, 7]
        g = torch.Generator().manual_seed(0)
        heads = (plan.n_head, plan.n_kv_head, plan.n_kv_head)
        prompts = [[torch.randn(plan.n_layer, 1, h, n, 16, generator=g) for h in heads] for n in self.lengths]
        for row, qkv in enumerate(prompts):
            for i, layer in enumerate(self.layers):
                layer.prefill(row, *(x[i] for x in qkv))
            for layer in self.layers:
                layer.finish(row)

    def at(self, step: int) -> torch.Tensor:
        return torch.tensor(self.lengths) + step

    def decode(self, step: int, tokens: list, known: int) -> torch.Tensor:
        """known: how many of the tokens before were accepted."""
        active, out = torch.tensor([True] * 3), []
        self.layers.make_room({row: n + known for row, n in enumerate(self.lengths)})
        for i, layer in enumerate(self.layers):
            layer.before_step(max(self.lengths) + step + 1, step + 1)
            q, k, v = (x[i] for x in tokens)
            following = self.layers[i + 1] if i + 1 < len(self.layers) else layer
            if following.wants_lookahead and following is not layer:
                following.lookahead(tokens[0][i + 1], q, active)
            out.append(layer.decode(q, k, v, self.at(step), active))
        return torch.stack(out)

    def insert(self, step: int, tokens: list) -> None:
        for i, layer in enumerate(self.layers):
            layer.insert(*(x[i] for x in tokens[1:]), self.at(step), torch.tensor([True] * 3))


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_given_back_leave_no_trace(name):
    """Rounds in which 0 to all drafted tokens are accepted, against a cache that saw only the accepted tokens."""
    plan = replace(make_plan(n_layer=3), rewind=4)
    plain = replace(plan, room=plan.room + 4, rewind=0)
    plain = plan if name == "kvarn" else plain  # it packs tokens when they can no longer be given back
    clean, drafting = Feed(name, plain, 24), Feed(name, plan, 24)
    g = torch.Generator().manual_seed(1)
    heads = (plan.n_head, plan.n_kv_head, plan.n_kv_head)
    tokens = [torch.randn(3, 3, h, 40, 16, generator=g) for h in heads]
    junk = [torch.randn(3, 3, h, 5, 16, generator=g) * 3 for h in heads]

    def part(source, first, n=1):
        return [x[..., first : first + n, :] for x in source]

    expected = [clean.decode(step, part(tokens, step), step) for step in range(32)]
    step = 0
    for accepted in (0, 2, 4, 1, 3, 4, 0, 2, 1):
        for i in range(4):  # the round's first token is right, the drafts are not
            drafting.decode(step + i, part(tokens, step) if i == 0 else part(junk, i), step)
        round_ = [
            torch.cat([a, b], dim=3)
            for a, b in zip(part(tokens, step, accepted + 1), part(junk, 0, 4 - accepted), strict=True)
        ]
        drafting.insert(step, round_)
        step += accepted + 1
        found = drafting.decode(step, part(tokens, step), step)
        assert (found - expected[step]).abs().max() <= 1e-5, accepted
    for feed in (clean, drafting):
        feed.layers.close()
