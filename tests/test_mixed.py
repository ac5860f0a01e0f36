"""Models in which some layers have a sliding window or no RoPE: every method serves the layers without a window."""

from dataclasses import replace

import pytest
import torch
from conftest import LLAMA, slow, write_random
from conversations import outcome
from references.attention import causal, masked_attention
from test_contract import BUDGETS, SMALL, VARIANTS, Cache, Text, gap, generated, layers_of, make_plan, make_texts

import kv
from calibrate import calibrate
from engine import Engine
from kv.full import Full
from kv.kvarn import KVarN
from runtime import planning
from tasks.prefill_once import prefill_once

WINDOW = 16
NUMBERED = ("filter_layers", "quant_layers")


def mixed(plan: kv.Plan) -> kv.Plan:
    """A plan with a windowed layer after each of the plan's."""
    return replace(plan, n_layer=2 * plan.n_layer, window=WINDOW, full_layers=tuple(range(0, 2 * plan.n_layer, 2)))


def of_all(options: dict) -> dict:
    """A method's options for a `mixed` model."""
    found = {key: [2 * i for i in value] if key in NUMBERED else value for key, value in options.items()}
    if scores := options.get("head_scores"):
        found["head_scores"] = [row for row in scores for _ in range(2)]
    return found


def part(texts: dict[int, Text], layers: slice) -> dict[int, Text]:
    return {row: Text(t.q[layers], t.k[layers], t.v[layers], t.prompt) for row, t in texts.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_method_serves_the_layers_without_a_window_as_if_there_were_no_others(name, monkeypatch):
    plan, full, windowed = make_plan(n_layer=layers_of(name)), slice(0, None, 2), slice(1, None, 2)
    method, options = VARIANTS[name]
    if "head_scores" in options:  # the best head is in the last layer
        scores = [[(1 + i) * score for score in row] for i, row in enumerate(options["head_scores"])]
        options = options | {"head_scores": scores}
        monkeypatch.setitem(VARIANTS, name, (method, options))
    texts, alone = make_texts(mixed(plan)), Cache(name, plan)
    monkeypatch.setitem(VARIANTS, name, (method, of_all(options)))
    monkeypatch.setitem(BUDGETS, method, alone.budget or SMALL)
    together = Cache(name, mixed(plan))
    expected, found = alone.run(part(texts, full), 20), together.run(texts, 20)
    assert gap({row: y[full] for row, y in found.items()}, expected) == 0
    for row, text in part(texts, windowed).items():
        layers = zip(text.q, text.k, text.v, strict=True)
        ours = torch.stack([masked_attention(*qkv, causal(WINDOW), generated(text, 20)) for qkv in layers])
        assert (found[row][windowed] - ours).abs().max() <= 1e-5
    ring = Full(replace(plan, window=WINDOW), WINDOW)
    sizes = alone.layers.bytes()
    assert together.layers.bytes() == (sizes[0] + plan.n_layer * sum(ring.storages().values()), sizes[1])
    steps = [cache.layers.step_bytes(70)[0] for cache in (alone, together)]
    assert steps[1] - steps[0] == plan.n_layer * WINDOW * plan.n_kv_head * plan.unit_bytes
    assert all(layer.endless for layer in together.layers[windowed])


def test_a_method_is_told_the_layers_that_it_serves():
    plan = mixed(make_plan())
    with pytest.raises(ValueError, match=r"tailorkv: quant_layers names \[1, 3\], but .* a window are 0, 2$"):
        kv.build("tailorkv", plan, SMALL, {"quant_layers": "0+1+3"})
    with pytest.raises(ValueError, match="4 bits does not honour"):
        kv.build("full", replace(plan, full_layers=()), None, {"bits": 4})
    kinds = [type(layer) for layer in kv.build("full", plan, None, {"bits": 4})]
    assert kinds == [KVarN, Full] * 2
    layers = kv.build("full", plan, None, {})
    assert plan.full_bytes() == sum(layer.slots for layer in layers) * plan.slot_bytes
    biases = torch.randn(plan.n_layer, plan.n_kv_head, plan.head_dim)
    layers = kv.build("kvarn", replace(plan, key_biases=biases), None, {"tile": 16})
    assert all(torch.equal(layers[i].plan.key_bias, biases[i]) for i in range(plan.n_layer))


def test_options_that_name_layers_name_the_models():
    plan = replace(make_plan(n_layer=6), window=WINDOW, full_layers=(1, 3, 5))
    layers = kv.build("d2o", plan, 100, {"uncounted": [3], "full_layers": [5]})
    assert [layer.holds_all for layer in layers] == [False, False, False, True, False, True]
    with pytest.raises(ValueError, match=r"d2o: uncounted names \[0\]"):
        kv.build("d2o", plan, 100, {"uncounted": [0]})
    for rows in (2, 4, 7):
        with pytest.raises(ValueError, match="head_scores must have 3 layers"):
            kv.build("duo", plan, SMALL, {"sinks": 2, "recent": 6, "head_scores": [[1.0, 2.0]] * rows})


@pytest.mark.parametrize("prompt", (9, 40))
def test_what_a_second_pass_reads_sees_the_window_and_is_not_stored(prompt):
    plan = mixed(make_plan(batch=1))
    layers = kv.build("kvzip", replace(plan, full_layers=(1, 3)), SMALL, {"part": 8})
    assert layers.second_pass(list(range(30)), None) and not layers.second_pass(list(range(SMALL)), None)
    layer, text = layers[0], Text.random(plan, prompt, 20, 0)
    before, after = (
        [x[:1, :, part] for x in (text.q, text.k, text.v)] for part in (slice(prompt), slice(prompt, None))
    )
    layer.prefill(0, *before)
    state = layer.state(0, prompt)
    seen = layer.observe(0, *after)
    assert all(torch.equal(x, layer.state(0, prompt)[name]) for name, x in state.items())
    assert (seen - layer.extend(0, *after, prompt)).abs().max() <= 1e-6


# In the engine


MODEL = LLAMA | {
    "architectures": ["CwmForCausalLM"],
    "num_hidden_layers": 7,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_theta": 10000.0},
}
PROMPTS = [torch.randint(3, 128, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 47)]
QUESTION = [5, 9, 17]
METHODS = {
    "rocketkv": {"window": 8},
    "omnikv": {"filter_layers": [2]},
    "h2o": {},
    "kivi": {"group": 8, "recent": 12},
    "kvzip": {"part": 30},
    "streaming": {},
    "tailorkv": {"quant_layers": [], "group": 8},
    "duo": {"head_scores": [[1.0, 2.0]] * 7},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("mixed") / "model", **MODEL)


def load(folder, name: str = "full", budget: int | float | None = None, **how) -> Engine:
    budgeted = name not in ("full", "kivi")
    options = METHODS.get(name, {})
    return Engine.load(
        folder, name, budget if budgeted else None, options, **{"compile": False, "batch": 2, "room": 30} | how
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name != "kivi"])
def test_a_budget_for_everything_gives_the_answers_of_the_full_cache(name, folder):
    expected = load(folder).generate(PROMPTS, 20)
    assert outcome(load(folder, name, 1.0).generate(PROMPTS, 20)) == outcome(expected)


@pytest.mark.parametrize("name", ["rocketkv", *map(slow, [name for name in METHODS if name != "rocketkv"])])
def test_answers_are_the_same_compiled_restored_and_forked(name, folder, tmp_path):
    engine = load(folder, name, 24)
    expected = outcome(engine.generate(PROMPTS, 20))
    if name == "rocketkv":
        assert outcome(load(folder, name, 24, compile=True).generate(PROMPTS, 20)) == expected
    (row,) = engine.start(PROMPTS[:1])
    row.save(tmp_path / "prompt")
    other = load(folder, name, 24)
    rows = (engine, row.fork()), (engine, row), (other, other.load_row(tmp_path / "prompt"))
    answers = [outcome(own.ask([row], [QUESTION], 20)) for own, row in rows]
    assert answers[0] == answers[1] == answers[2]


def test_a_model_with_windows_has_no_profile_yet(folder, capsys):
    with pytest.raises(ValueError, match="sliding window have no profile"):
        calibrate(load(folder), [PROMPTS[0]], 2, 8)
    Engine.load(folder, "omnikv", 24, compile=False, max_prompt=40)
    assert "calibrate.py" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ("rocketkv", "h2o", "kivi"))
def test_methods_share_a_recorded_prompt(name, folder):
    engine, sizes = load(folder, batch=1), {"max_prompt": 100, "room": 30}
    prefill_once(engine)
    for prompt in (PROMPTS[0], PROMPTS[0] + [5]):
        for kv_name, budget in (("full", None), (name, None if name == "kivi" else 24)):
            engine.use(kv_name, budget, METHODS.get(kv_name, {}), **sizes)
            own = load(folder, kv_name, 24, batch=1, **sizes)
            assert (engine.logits(prompt, [4, 5]) - own.logits(prompt, [4, 5])).abs().max() <= 1e-4


def test_a_recorded_second_pass_is_that_of_its_options(folder, tmp_path):
    """Also where the first layer has a window."""
    kinds = ["sliding_attention", "full_attention"] * 2
    folder = write_random(tmp_path / "model", **MODEL | {"num_hidden_layers": 4, "layer_types": kinds})
    engine, sizes = load(folder, batch=1), {"max_prompt": 100, "room": 30}
    prefill_once(engine)
    for sinks in (0, 12):
        options = {"part": 30, "sinks": sinks}
        engine.use("kvzip", 24, options, **sizes)
        own = Engine.load(folder, "kvzip", 24, options, compile=False, **sizes)
        assert (engine.logits(PROMPTS[0], [4, 5]) - own.logits(PROMPTS[0], [4, 5])).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ("streaming", "infllm", "h2o"))
def test_past_the_context_nothing_turns_in_layers_without_rope(name, tmp_path):
    """In a model of such layers positions do not matter, and so neither does the context."""
    answers = []
    for context in (64, 4096):
        config = LLAMA | {
            "architectures": ["SmolLM3ForCausalLM"],
            "no_rope_layers": [0, 0],
            "max_position_embeddings": context,
        }
        folder = write_random(tmp_path / str(context), **config)
        options = {"block": 8} if name == "infllm" else {}
        engine = Engine.load(folder, name, 24, options, compile=False, max_prompt=60, room=10)
        answers.append(outcome(engine.generate([PROMPTS[1]], 60)))
    assert answers[0] == answers[1] and len(answers[0][0][0][0]) == 60


def test_a_prompt_may_be_as_long_as_the_context(folder):
    config = load(folder, "rocketkv", 24).config
    assert config.window == WINDOW and planning.longest_prompt(config, 10) == config.max_length


def test_chunks_change_nothing_that_keeps_everything(folder):
    expected = outcome(load(folder).generate(PROMPTS, 20))
    for chunk in (7, 40):
        assert outcome(load(folder, chunk=chunk).generate(PROMPTS, 20)) == expected


@pytest.mark.parametrize("name", ["rocketkv", "streaming", *map(slow, ("omnikv", "tailorkv"))])
def test_speculation_gives_the_answers_of_the_full_cache(name, folder):
    expected = outcome(load(folder).generate(PROMPTS, 30))
    assert outcome(load(folder, name, 24, speculate=3).generate(PROMPTS, 30)) == expected
