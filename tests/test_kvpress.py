"""Methods against kvpress 0.5.4, where it is installed (it wants transformers below 5.3): same tokens, same logits.

kvpress differs in details that the papers leave open. Each is aligned here by an option, or by a press that says so.
"""

import pytest
import torch
import torch.nn.functional as F

kvpress = pytest.importorskip("kvpress")

from test_model import LLAMA, converted, hf_model  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from engine import Engine  # noqa: E402

PROMPT, STEPS = 100, 12
CONFIG = LLAMA | {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """KV heads -> transformers' model with 4 query heads, and our checkpoint with the same weights."""
    found = {}
    for heads in (2, 4):
        config = CONFIG | {"num_key_value_heads": heads}
        model = hf_model(config)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 3  # makes attention clearly prefer some tokens
        found[heads] = model, converted(model, config, tmp_path_factory.mktemp(f"heads-{heads}"))
    return found


@pytest.fixture(scope="module")
def ids():
    return torch.randperm(160, generator=torch.Generator().manual_seed(0))[: PROMPT + STEPS].tolist()  # no equal keys


def pressed(
    model, press, ids: list[int], decoding: bool = False, attention: str = "sdpa"
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of every step, and the keys [Hk,n,D] that each layer holds after the prompt.

    With `decoding`, the press also works after the prompt. Tokens keep their positions whatever was dropped.
    """
    cache, logits, held = DynamicCache(), [], []
    model.set_attn_implementation(attention)

    def feed(tokens: list[int], at: int) -> None:
        place = torch.arange(at, at + len(tokens))
        out = model(torch.tensor([tokens]), past_key_values=cache, position_ids=place[None], cache_position=place)
        logits.append(out.logits[0, -1])

    with torch.no_grad():
        with press(model):
            feed(ids[:PROMPT], 0)
            held += [layer.keys[0].clone() for layer in cache.layers]
            for at in range(PROMPT, PROMPT + STEPS) if decoding else ():
                feed([ids[at]], at)
        for at in () if decoding else range(PROMPT, PROMPT + STEPS):
            feed([ids[at]], at)
    return torch.stack(logits[:-1]), held


def ours(folder, kv: str, budget: int, ids: list[int], **options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same from this engine."""
    engine = Engine.load(
        folder, kv=kv, budget=budget, options=options, max_prompt=PROMPT, max_new_tokens=STEPS, compile=False
    )
    logits = engine.logits(ids[:PROMPT], ids[PROMPT:])
    return logits, [layer.k[0] for layer in engine.layers]


def same(found, expected, full: torch.Tensor, kept: list[int] | None = None) -> None:
    """Asserts equal logits, which differ from full attention's, and equal sets of keys, `kept` of them per layer."""
    assert (found[0] - expected[0]).abs().max() <= 1e-4
    assert (full[1:] - expected[0][1:]).abs().amax(1).min() > 1e-2
    for here, there, n in zip(found[1], expected[1], kept or (), strict=True):
        assert there.shape[1] == n
        for mine, theirs in zip(here[:, :n], there, strict=True):
            nearest = (theirs[:, None] - mine).norm(dim=2)  # the engines order slots differently
            assert nearest.amin(1).max() <= 1e-3 and len(set(nearest.argmin(1).tolist())) == n


def uncompressed(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids[:-1]]), use_cache=False).logits[0, PROMPT - 1 :]


class MaxPooled:
    """torch.nn.functional for kvpress, which pools by the mean: pools by the maximum; ties go to the first."""

    pad = staticmethod(F.pad)
    softmax = staticmethod(F.softmax)

    @staticmethod
    def avg_pool1d(x: torch.Tensor, **how) -> torch.Tensor:
        place = torch.arange(x.shape[-1], dtype=torch.float64)
        return F.max_pool1d(x, **how) * (1 - 1e-10 * place)


# kvpress pools each query head's scores, snapkv the group's sum: they agree with one head per group, or without pooling
@pytest.mark.parametrize("heads, kernel", [(4, 5), (2, 1)])
def test_snapkv_equals_kvpress(models, ids, monkeypatch, heads, kernel):
    model, folder = models[heads]
    monkeypatch.setattr("kvpress.presses.snapkv_press.F", MaxPooled)
    press = kvpress.SnapKVPress(compression_ratio=0.6, window_size=8, kernel_size=kernel)
    found = ours(folder, "snapkv", 40, ids, window=8, kernel=kernel)
    same(found, pressed(model, press, ids), uncompressed(model, ids), [40] * 4)


SCORES = {  # method: its options, and kvpress's press with the same ones
    "keynorm": ({"sinks": 0, "window": 0}, lambda: kvpress.KnormPress(compression_ratio=0.6)),
    "keydiff": ({"sinks": 0, "window": 0}, lambda: kvpress.KeyDiffPress(compression_ratio=0.6)),
    "lagkv": ({"lag": 16}, lambda: kvpress.LagKVPress(0.6, lag_size=16)),  # of 5 partitions 4 tokens each: no ties
    "expected": ({"future": 30}, lambda: kvpress.ExpectedAttentionPress(0.6, n_future_positions=30, epsilon=0.0)),
}


@pytest.mark.parametrize("heads", (2, 4))
@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_kvpress(models, ids, name, heads):
    (model, folder), (options, press) = models[heads], SCORES[name]
    found = ours(folder, name, 40, ids, **options)
    same(found, pressed(model, press(), ids), uncompressed(model, ids), [40] * 4)


@pytest.mark.parametrize("heads", (2, 4))
@pytest.mark.parametrize("name", [name for name in SCORES if name != "lagkv"])  # its ranks tie between heads
def test_adaptive_heads_equal_kvpress(models, ids, name, heads):
    """kvpress keeps all keys and masks some."""
    (model, folder), (options, press) = models[heads], SCORES[name]
    found = ours(folder, name, 40, ids, heads="adaptive", alpha=0.3, **options)
    expected = pressed(model, kvpress.AdaKVPress(press(), alpha_safeguard=0.3), ids)
    same((found[0], []), (expected[0], []), uncompressed(model, ids))


@pytest.mark.parametrize("heads", (2, 4))
def test_tova_equals_kvpress_while_decoding(models, ids, heads):
    """Our budget includes the new token until it has attended; kvpress evicts after each step, too."""
    model, folder = models[heads]
    step = kvpress.DecodingPress(
        kvpress.TOVAPress(), compression_interval=1, target_size=40, hidden_states_buffer_size=1
    )
    press = kvpress.PrefillDecodingPress(kvpress.TOVAPress(compression_ratio=0.6), step)
    found, expected = ours(folder, "tova", 40, ids), pressed(model, press, ids, True, "eager")
    same((found[0], []), (expected[0], []), uncompressed(model, ids))


class PyramidPress(kvpress.PyramidKVPress):
    """kvpress counts the window within a layer's budget; the paper's authors add it."""

    def get_layer_budget(self, module, q_len: int) -> int:
        return super().get_layer_budget(module, q_len) + self.window_size


@pytest.mark.parametrize("ratio, window, kept", [(0.6, 2, [80, 55, 29, 4]), (0.4, 8, [100, 79, 57, 36])])
def test_pyramidkv_equals_kvpress(models, ids, monkeypatch, ratio, window, kept):
    """With the second ratio, the lowest layer would keep more tokens than the prompt has."""
    model, folder = models[4]
    monkeypatch.setattr("kvpress.presses.snapkv_press.F", MaxPooled)
    press = PyramidPress(compression_ratio=ratio, window_size=window, kernel_size=5)
    found = ours(folder, "pyramidkv", round(PROMPT * (1 - ratio)) + window, ids, window=window, kernel=5)
    same(found, pressed(model, press, ids), uncompressed(model, ids), kept)


class H2OPress(kvpress.ObservedAttentionPress):
    """kvpress scores by the mean of one call's attention; h2o sums it over all queries and keeps the newest half."""

    def __post_init__(self):
        super().__post_init__()
        self.sums: dict[int, torch.Tensor] = {}

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        n, layer = keys.shape[2], module.layer_idx
        visits = torch.arange(n, 0, -1)
        seen = super().score(module, hidden_states, keys, values, attentions, kwargs) * visits  # [1,Hk,n]
        seen[..., : n - hidden_states.shape[1]] += self.sums.get(layer, seen[..., :0])
        size = int(n * (1 - self.compression_ratio))
        ranked = seen.clone()
        ranked[..., n - size // 2 :] = torch.inf
        kept = ranked.topk(size).indices.sort().values
        self.sums[layer] = seen.gather(2, kept)
        each = kept[..., None].expand(-1, -1, -1, keys.shape[3])
        return keys.gather(2, each), values.gather(2, each)


@pytest.mark.parametrize("heads", (2, 4))
def test_h2o_equals_kvpress_while_decoding(models, ids, heads):
    model, folder = models[heads]
    scores = H2OPress(compression_ratio=0.6)
    step = kvpress.DecodingPress(scores, compression_interval=1, target_size=40, hidden_states_buffer_size=0)
    press = kvpress.PrefillDecodingPress(scores, step)
    found, expected = ours(folder, "h2o", 40, ids), pressed(model, press, ids, True, "eager")
    same((found[0], []), (expected[0], []), uncompressed(model, ids))


class StreamingPress(kvpress.StreamingLLMPress):
    """kvpress leaves tokens of equal scores in any order, yet drops by order; here earlier tokens come first."""

    def score(self, module, hidden_states, keys, *more):
        return super().score(module, hidden_states, keys, *more) - 1e-4 * torch.arange(keys.shape[2])


@pytest.mark.parametrize("heads", (2, 4))
def test_streaming_equals_kvpress(models, ids, heads):
    """Our budget includes the new token; in kvpress the new token comes on top."""
    model, folder = models[heads]
    prompt = StreamingPress(compression_ratio=0.61, n_sink=4)
    step = kvpress.DecodingPress(
        StreamingPress(n_sink=4), compression_interval=1, target_size=39, hidden_states_buffer_size=0
    )
    press = kvpress.PrefillDecodingPress(prompt, step)
    found, expected = ours(folder, "streaming", 40, ids), pressed(model, press, ids, decoding=True)
    assert expected[1][0].shape[1] == 39
    same((found[0], []), (expected[0], []), uncompressed(model, ids))
