"""The model against transformers: the same random weights and the same config.json must give the same logits."""

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import slow
from conversations import model_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import model as model_py
from convert_hf_checkpoint import convert
from engine import Engine
from kv import Plan
from kv.full import Full
from kv.parts.rope import rope_frequencies
from model import FeedForward, Transformer
from runtime import cpu
from runtime.checkpoint import write_checkpoint
from runtime.hf_config import from_hf

transformers.logging.set_verbosity_error()  # it warns about RoPE scaling at sizes this small
transformers.logging.disable_progress_bar()

STEPS = 32  # decode steps after the prefill
TOLERANCE = 1e-4  # on logits whose standard deviation is about 1, in fp32

# config.json as the families publish it, with smaller sizes.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 160,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA31 = LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 32}}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
MISTRAL_V1 = MISTRAL | {"sliding_window": 32}
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32,
    "max_window_layers": 0,
}
QWEN3 = QWEN2 | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 48,
    "attention_bias": False,
    "rope_scaling": None,
}
PLAIN, THETA = {"rope_scaling": None}, {"rope_theta": 10000.0}
WHOLE, LOCAL = "full_attention", "sliding_attention"
MIXED = {"num_hidden_layers": 4, "sliding_window": 16, "layer_types": [LOCAL, WHOLE, LOCAL, WHOLE]}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def family(kind: str, architecture: str, **more) -> dict:
    return LLAMA | {"model_type": kind, "architectures": [f"{architecture}ForCausalLM"], "head_dim": 32} | more


CWM = family("cwm", "Cwm", num_hidden_layers=5, sliding_window=16, rope_scaling=LLAMA31["rope_scaling"])
SMOLLM3 = family("smollm3", "SmolLM3", num_hidden_layers=5, tie_word_embeddings=True, pad_token_id=None)
WINDOWED = {"use_sliding_window": True, "sliding_window": 16}
MINISTRAL = family("ministral", "Ministral", **MIXED)
GROWS = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GROWS |= {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
MINISTRAL3 = family("ministral3", "Ministral3", max_position_embeddings=256, rope_parameters=GROWS)
SEED = family("seed_oss", "SeedOss", attention_bias=True)
GRANITE = family(
    *("granite", "Granite"),
    embedding_multiplier=12.0,
    logits_scaling=0.5,
    residual_multiplier=0.4,
    attention_multiplier=0.3,
)
PHI3 = family("phi3", "Phi3", pad_token_id=None)


def yarn(**more) -> dict:
    return QWEN2 | {"max_position_embeddings": 64, "rope_scaling": YARN | more}


@dataclass(frozen=True)
class Case:
    """A config.json, and changes (`without`) that remove what the case tests, which must change the logits."""

    config: dict
    without: dict = field(default_factory=dict)
    prompt: int = 80


CASES = {
    "llama-3.1": Case(LLAMA31, PLAIN),
    "llama-3.2": Case(LLAMA31 | {"tie_word_embeddings": True}, PLAIN),
    "llama-2, codellama": Case(LLAMA | {"num_key_value_heads": 4, "rope_theta": 1000000}, THETA),
    "longchat": Case(LLAMA | {"max_position_embeddings": 32, "rope_scaling": {"type": "linear", "factor": 8.0}}, PLAIN),
    "mistral-v0.1, prompt inside the window": Case(MISTRAL_V1, {"sliding_window": None}, prompt=20),
    "mistral-v0.1, prompt as long as the window": Case(MISTRAL_V1, {"sliding_window": None}, prompt=32),
    "mistral-v0.1, prompt one longer": Case(MISTRAL_V1, {"sliding_window": None}, prompt=33),
    "mistral-v0.1, prompt beyond the window": Case(MISTRAL_V1, {"sliding_window": None}),
    "mistral-v0.3": Case(MISTRAL | {"rope_theta": 1000000.0, "vocab_size": 200}, {"sliding_window": 32}),
    "mistral with narrow heads": Case(MISTRAL | {"head_dim": 24}),
    "yi-34b": Case(LLAMA | {"hidden_size": 224, "num_attention_heads": 14, "rope_theta": 5000000.0}, THETA),
    "mqa": Case(LLAMA | {"num_key_value_heads": 1}),
    "llama with biases": Case(LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Case(QWEN2, {"use_sliding_window": True}),
    "qwen2, all layers slide": Case(QWEN2 | {"use_sliding_window": True}, {"use_sliding_window": False}),
    "qwen2, no layer slides": Case(QWEN2 | {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen2, tied": Case(QWEN2 | {"tie_word_embeddings": True}),
    "qwen3": Case(QWEN3, {"use_sliding_window": True}),
    "qwen3 with biases": Case(QWEN3 | {"attention_bias": True}),
    "qwen2.5, yarn": Case(yarn(), PLAIN),
    "yarn, attention_factor": Case(yarn(attention_factor=1.4), {"rope_scaling": YARN}),
    "yarn, betas": Case(yarn(beta_fast=2, beta_slow=0.25), {"rope_scaling": YARN}),
    "yarn, not truncated": Case(yarn(truncate=False), {"rope_scaling": YARN}),
    "yarn, mscale": Case(yarn(mscale=2.0, mscale_all_dim=0.5), {"rope_scaling": YARN}),
    "yarn, no original length": Case(
        QWEN2 | {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, PLAIN
    ),
    "yarn, extended length": Case(yarn() | {"max_position_embeddings": 256}, PLAIN),
    "cwm": Case(CWM, {"layer_types": [WHOLE] * 5}),
    "cwm, by layer_types": Case(CWM | MIXED, {"layer_types": [WHOLE] * 4}),
    "ministral": Case(MINISTRAL, {"layer_types": [WHOLE] * 4}),
    "ministral, all layers slide": Case(MINISTRAL | {"layer_types": None}, {"layer_types": [WHOLE] * 4}),
    "qwen2, the last layers slide": Case(
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 1}, {"max_window_layers": 3}
    ),
    "qwen3, some layers slide": Case(
        QWEN3 | MIXED | {"use_sliding_window": True}, {"use_sliding_window": False, "layer_types": None}
    ),
    "smollm3": Case(SMOLLM3, {"no_rope_layers": [1] * 5}),
    "smollm3, by no_rope_layers": Case(SMOLLM3 | {"no_rope_layers": [0, 1, 1, 0, 1, 1]}, {"no_rope_layers": [1] * 5}),
    "smollm3, layers without RoPE slide": Case(SMOLLM3 | WINDOWED, {"use_sliding_window": False}),
    "ministral 3": Case(MINISTRAL3, {"rope_parameters": GROWS | {"llama_4_scaling_beta": 0.0}}),
    "seed-oss": Case(SEED),
    "seed-oss with all biases": Case(SEED | {"attention_out_bias": True, "mlp_bias": True}),
    "granite": Case(GRANITE, {"residual_multiplier": 1.0}),
    "granite, tied, with biases": Case(
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "phi-4": Case(PHI3),
    "phi-4, all layers slide": Case(PHI3 | {"sliding_window": 16}, {"sliding_window": None}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads gain nothing at these sizes, and MKL's first multithreaded cos or exp can lose precision."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def hf_model(config: dict, like=None):
    """transformers' model in fp32, its weights random (norms and biases too) or those of the model `like`."""
    config = AutoConfig.for_model(**copy.deepcopy(config))  # a copy, because it writes into rope_scaling
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if like is not None:
        model.load_state_dict(like.state_dict())
        return model
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.5 * noise
        else:  # scores, attention outputs and logits all of order 1
            parameter.data = noise / math.sqrt(parameter.shape[-1])
    return model


def hf_logits(model, prompt: list[int], continuation: list[int]) -> Tensor:
    """The logits that Engine.logits promises, from one forward pass over everything."""
    ids = torch.tensor([prompt + continuation[:-1]])
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0, len(prompt) - 1 :]


def converted(model, config: dict, folder: Path, **options) -> Path:
    """Our checkpoint, converted from transformers' model in a folder whose config.json is spelled as `config`."""
    model.save_pretrained(folder / "hf", **options)
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    convert(folder / "hf", folder / "ours")
    return folder / "ours"


def text(length: int, vocab: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """A random prompt, and a continuation whose logits need the prefill and STEPS decode steps."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (length + STEPS + 1,), generator=generator).tolist()
    return ids[:length], ids[length:]


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


# Logits


@pytest.mark.parametrize("name", CASES)
def test_prefill_and_decode_give_the_logits_of_transformers(name, tmp_path):
    case = CASES[name]
    theirs = hf_model(case.config)
    prompt, continuation = text(case.prompt, case.config["vocab_size"])
    expected = hf_logits(theirs, prompt, continuation)
    assert expected.std() > 0.3
    if case.without:
        assert gap(expected, hf_logits(hf_model(case.config | case.without, like=theirs), prompt, continuation)) > 0.05
    engine = Engine.load(converted(theirs, case.config, tmp_path), compile=False)
    found = engine.logits(prompt, continuation)
    assert found.shape == (STEPS + 1, case.config["vocab_size"]) and found.dtype == torch.float32
    assert gap(found, expected) <= 1e-5 * expected.abs().max()


FAMILIES = list({case.config["model_type"]: name for name, case in reversed(CASES.items())}.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_greedy_conversation_is_that_of_transformers(name, tmp_path):
    config = CASES[name].config | {"eos_token_id": None}
    theirs, (prompt, question) = hf_model(config), text(40, config["vocab_size"])
    engine = Engine.load(converted(theirs, config, tmp_path), compile=False, room=64)
    (row,) = engine.start([prompt])
    expected = []
    for turn in (prompt, question):
        (answer,) = engine.ask([row], [question] if turn is question else None, 12)
        ids = torch.tensor([expected + turn])
        found = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected = found[0].tolist()
        assert answer.tokens == expected[ids.shape[1] :]


def test_missing_config_keys_take_transformers_defaults(tmp_path):
    for i, kind in enumerate((LLAMA, MISTRAL, QWEN2)):
        needed = ["num_key_value_heads"] if kind is QWEN2 else []
        needed += ["model_type", "architectures", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"]
        config = {key: kind[key] for key in needed} | {"num_attention_heads": 16, "hidden_size": 256}
        theirs = hf_model(config)
        prompt, continuation = text(40, config["vocab_size"])
        engine = Engine.load(converted(theirs, config, tmp_path / str(i)), compile=False)
        assert gap(engine.logits(prompt, continuation), hf_logits(theirs, prompt, continuation)) <= TOLERANCE


DYNAMIC = LLAMA | {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}


def fixed_base(length: int) -> dict:
    """DYNAMIC with a fixed base for all positions: that of a prompt of `length` tokens."""
    dim = DYNAMIC["hidden_size"] // DYNAMIC["num_attention_heads"]
    growth = max(1.0, 4.0 * length / 32 - (4.0 - 1))
    return DYNAMIC | {"rope_scaling": None, "rope_theta": 10000.0 * growth ** (dim / (dim - 2))}


@pytest.mark.parametrize("length", [20, 80])
def test_dynamic_ntk_takes_its_base_from_the_length_that_the_row_will_reach(length, tmp_path):
    theirs = hf_model(DYNAMIC)
    prompt, continuation = text(length, DYNAMIC["vocab_size"])
    engine = Engine.load(converted(theirs, DYNAMIC, tmp_path), compile=False)
    found = engine.logits(prompt, continuation)
    assert gap(found, hf_logits(theirs, prompt, continuation)) <= TOLERANCE  # one forward over all of it
    of_the_prompt = hf_logits(hf_model(fixed_base(length), like=theirs), prompt, continuation)
    assert gap(found, of_the_prompt) > 0.05


def test_dynamic_ntk_counts_the_tokens_that_may_follow_a_prompt(tmp_path):
    """Those of its answer or, where questions may follow, all that the row has room for."""
    engine = Engine.load(converted(hf_model(DYNAMIC), DYNAMIC, tmp_path), compile=False, room=19)
    prompt = text(40, DYNAMIC["vocab_size"])[0]
    for call, new in ((lambda: engine.generate([prompt], 7), 7), (lambda: engine.start([prompt]), 19)):
        call()
        inv_freq, _ = rope_frequencies(engine.config.rope, engine.config.head_dim, 40 + new - 1)
        assert torch.equal(engine.model.inv_freq[0], inv_freq)


def test_each_row_decodes_at_its_own_position_and_with_its_own_base(tmp_path):
    theirs = hf_model(DYNAMIC)
    engine = Engine.load(converted(theirs, DYNAMIC, tmp_path), batch=2, max_prompt=80, compile=False)
    texts = [text(80, 160, seed=1), text(20, 160, seed=2)]
    found = [[engine.model.prefill(row, torch.tensor(prompt))] for row, (prompt, _) in enumerate(texts)]
    for i in range(STEPS):
        tokens = torch.tensor([[continuation[i]] for _, continuation in texts])
        pos = torch.tensor([len(prompt) + i for prompt, _ in texts])
        logits = model_step(engine.model, tokens, pos)
        for row in range(2):
            found[row].append(logits[row])
    for row, (prompt, continuation) in enumerate(texts):
        expected = hf_logits(hf_model(fixed_base(len(prompt)), like=theirs), prompt, continuation)
        assert gap(torch.stack(found[row]), expected) <= TOLERANCE


def test_bfloat16_stays_close_to_fp32(tmp_path):
    folder = converted(hf_model(LLAMA31), LLAMA31, tmp_path)
    prompt, continuation = text(80, 160)
    exact = Engine.load(folder, compile=False).logits(prompt, continuation)
    engine = Engine.load(folder, dtype="bfloat16", compile=False)
    assert engine.model.layers[0].attention.wqkv.weight.dtype == torch.bfloat16
    rounded = engine.logits(prompt, continuation)
    assert rounded.dtype == torch.float32 and engine.layers[0].k.dtype == torch.bfloat16
    assert F.cosine_similarity(rounded, exact, dim=-1).min() > 0.99
    assert gap(rounded, exact) > TOLERANCE


FORMS = [(dtype, form) for dtype in (torch.bfloat16, torch.float16) for form in (None, "widened")]


@pytest.mark.parametrize("dtype, form", [*FORMS, (torch.float32, "turned")])
@pytest.mark.parametrize("compiled", (False, slow(True)))
def test_a_linear_layer_is_exact_to_rounding_for_any_number_of_tokens(dtype, form, compiled, monkeypatch):
    monkeypatch.setattr(cpu, "BETTER_FORM", {dtype: form} if form else {})
    run = torch.compile(cpu.linear, fullgraph=True) if compiled else cpu.linear
    monkeypatch.setattr(cpu, "PART", 64 * 7)  # parts of 7 rows, the last of fewer
    weight, bias = torch.randn(24, 64).to(dtype), torch.randn(24).to(dtype)
    for tokens in (1, 2, 7, 8, 50, 300):
        torch._dynamo.reset()
        x = torch.randn(tokens, 1, 64).to(dtype)
        for b in (None, bias):
            y, exact = run(x, weight, b), F.linear(x.double(), weight.double(), None if b is None else b.double())
            assert y.dtype == dtype and y.is_contiguous()
            roundings = 1 if form == "widened" and tokens >= cpu.MANY else 3  # the product, the bias and their sum
            close = exact.abs() + exact.abs().amax() / 8
            assert ((y.double() - exact).abs() <= roundings * torch.finfo(dtype).eps / 2 * close + 1e-5).all()


def test_sharded_and_single_file_checkpoints_give_identical_logits(tmp_path):
    theirs = hf_model(LLAMA)
    single = converted(theirs, LLAMA, tmp_path / "single")
    from_shards = converted(theirs, LLAMA, tmp_path / "shards", max_shard_size="200KB")
    assert (tmp_path / "shards" / "hf" / "model.safetensors.index.json").exists()
    prompt, continuation = text(40, LLAMA["vocab_size"])
    engine = Engine.load(single, compile=False)
    expected = engine.logits(prompt, continuation)
    weights = engine.model.state_dict()
    write_checkpoint(tmp_path / "ours", LLAMA, from_hf(LLAMA), weights, weights.__getitem__, shard_bytes=200_000)
    assert (single / "model.safetensors").exists() and len([*(tmp_path / "ours").glob("model-*.safetensors")]) > 2
    for folder in (from_shards, tmp_path / "ours"):
        assert torch.equal(Engine.load(folder, compile=False).logits(prompt, continuation), expected)


# Long prompts


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns, weights excluded."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.weights:
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("config", [LLAMA, MISTRAL | {"sliding_window": 128}], ids=["full", "window"])
def test_no_tensor_of_a_prefill_is_larger_than_its_queries(config, tmp_path, monkeypatch):
    """Not T x T, T x vocab or T x ffn_dim: vocab and ffn_dim are 160, and a token's queries have 128 elements."""
    monkeypatch.setattr(model_py, "SLICE", 64)
    length = 1000
    engine = Engine.load(converted(hf_model(config), config, tmp_path), max_prompt=length, compile=False)
    prompt, _ = text(length, config["vocab_size"])
    with Largest(engine.model) as largest:
        engine.model.prefill(0, torch.tensor(prompt))
    assert largest.numel == length * config["hidden_size"]


def test_a_prompt_is_projected_in_slices_and_only_its_last_position_gives_logits(tmp_path, monkeypatch):
    engine = Engine.load(converted(hf_model(LLAMA), LLAMA, tmp_path), compile=False)
    prompt, continuation = text(83, LLAMA["vocab_size"])
    whole = engine.logits(prompt, continuation)
    seen = {"logits": [], "mlp": []}
    logits, mlp = Transformer.logits, FeedForward.forward
    count = lambda self, x: seen["logits"].append(x[..., 0].numel()) or logits(self, x)  # noqa: E731
    monkeypatch.setattr(Transformer, "logits", count)
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: seen["mlp"].append(x.shape[1]) or mlp(self, x))
    monkeypatch.setattr(model_py, "SLICE", 16)
    sliced = engine.logits(prompt, continuation)
    assert seen["logits"] == [1] * (STEPS + 1)
    assert seen["mlp"] == [16, 16, 16, 16, 16, 3] * 3 + [1] * (3 * STEPS)
    assert gap(sliced, whole) <= 1e-5


def test_prompts_up_to_the_scaled_context_are_accepted_and_longer_ones_refused(tmp_path):
    config = CASES["longchat"].config
    engine = Engine.load(converted(hf_model(config), config, tmp_path), compile=False)
    assert engine.logits([1] * 256, [1]).isfinite().all()
    with pytest.raises(ValueError, match="257 tokens and the model's context is 256"):
        engine.logits([1] * 257, [1])


# What KV modules are told


class Recorder(Full):
    """Full attention that records every call and, with `looks`, looks ahead."""

    def __init__(self, plan: Plan, layer: int, looks: bool, calls: list[tuple]):
        super().__init__(plan)
        self.layer, self.wants_lookahead, self.calls = layer, looks, calls

    def prefill(self, row, q, k, v, **chunk):
        self.calls.append(("prefill", self.layer, row))
        return super().prefill(row, q, k, v, **chunk)

    def finish(self, row):
        self.calls.append(("finish", self.layer, row))

    def decode(self, q, k, v, pos, active):
        self.calls.append(("decode", self.layer, q.clone()))
        return super().decode(q, k, v, pos, active)

    def lookahead(self, q, x, active):
        self.calls.append(("lookahead", self.layer, q.clone()))
        return x


def recorded(config: dict, folder: Path, looks: list[bool]) -> tuple[object, Transformer, list[tuple]]:
    """transformers' model, ours with a Recorder in each layer and two rows, and the list of calls."""
    theirs, calls = hf_model(config), []
    engine = Engine.load(converted(theirs, config, folder), batch=2, max_prompt=80, compile=False)
    engine.model.set_kv([Recorder(engine.plan, i, look, calls) for i, look in enumerate(looks)])
    return theirs, engine.model, calls


def hf_predicted_query(model, ids: list[int], layer: int) -> Tensor:
    """The query [Hq,1,D] that `layer` computes from the last token's normed input to the layer below."""
    normed = []
    hook = model.model.layers[layer - 1].input_layernorm.register_forward_hook(lambda m, x, y: normed.append(y))
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
        hook.remove()
        attention, x = model.model.layers[layer].self_attn, normed[0][:, -1:]
        q = attention.q_proj(x).view(1, 1, -1, attention.head_dim)
        q = (attention.q_norm(q) if hasattr(attention, "q_norm") else q).transpose(1, 2)
        cos, sin = model.model.rotary_emb(x, torch.tensor([[len(ids) - 1]]))
        return apply_rotary_pos_emb(q, q, cos, sin)[0][0]


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2.5, yarn", "qwen3 with biases"])
def test_a_module_that_looks_ahead_receives_the_query_predicted_by_the_layer_below(name, tmp_path):
    theirs, ours, calls = recorded(CASES[name].config, tmp_path, looks=[True, True, True])
    prompts = [text(80, 160, seed=1)[0], text(33, 160, seed=2)[0]]
    for row, prompt in enumerate(prompts):
        ours.prefill(row, torch.tensor(prompt[:-1]))
    calls.clear()
    last = torch.tensor([[prompt[-1]] for prompt in prompts])
    model_step(ours, last, torch.tensor([len(prompt) - 1 for prompt in prompts]))
    kinds = [call[:2] for call in calls]
    assert kinds == [("lookahead", 1), ("decode", 0), ("lookahead", 2), ("decode", 1), ("decode", 2)]
    offered = {layer: q for kind, layer, q in calls if kind == "lookahead"}
    actual = {layer: q for kind, layer, q in calls if kind == "decode"}
    for layer, q in offered.items():
        expected = torch.stack([hf_predicted_query(theirs, prompt, layer) for prompt in prompts])
        assert gap(q, expected) <= TOLERANCE
        assert gap(q, actual[layer]) > 0.1  # a prediction, not the query itself


def test_modules_that_do_not_look_ahead_receive_no_prediction(tmp_path):
    _, ours, calls = recorded(LLAMA, tmp_path, looks=[False, False, True])
    ours.prefill(0, torch.tensor([1, 2, 3]))
    calls.clear()
    model_step(ours, torch.tensor([[4], [5]]), torch.tensor([3, 0]))
    assert [call[:2] for call in calls] == [("decode", 0), ("lookahead", 2), ("decode", 1), ("decode", 2)]


def test_finish_is_called_once_per_layer_after_the_prefill_of_a_row(tmp_path):
    _, ours, calls = recorded(LLAMA, tmp_path, looks=[True, True, True])
    for row in (1, 0):
        calls.clear()
        ours.prefill(row, torch.tensor([1, 2, 3]))
        assert calls == [(kind, layer, row) for kind in ("prefill", "finish") for layer in range(3)]


# config.json

SCALINGS = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 2.0},
    "llama3": {key: value for key, value in LLAMA31["rope_scaling"].items() if key != "rope_type"},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_every_spelling_of_rope_gives_the_same_config(kind, tmp_path):
    rest = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    scaling, theta = SCALINGS[kind], {"rope_theta": 20000.0}
    spellings = [
        rest | theta | {"rope_scaling": {"type": kind} | scaling},
        rest | theta | {"rope_scaling": {"rope_type": kind} | scaling},
        rest | theta | {"rope_scaling": {"rope_type": kind, "type": kind} | scaling},
        rest | {"rope_parameters": {"rope_type": kind} | theta | scaling},
        rest | theta | {"rope_parameters": {"rope_type": kind} | scaling},
    ]
    if kind == "default":
        spellings += [rest | theta, rest | theta | {"rope_scaling": None}, rest | {"rope_parameters": theta}]
    hf_model(spellings[0]).config.save_pretrained(tmp_path)  # the spelling that transformers writes today
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_parameters"]["rope_type"] == kind and "rope_scaling" not in saved
    configs = [from_hf(c) for c in [*spellings, saved]]
    assert configs[0].rope["rope_type"] == kind and configs[0].rope["rope_theta"] == 20000.0
    assert all(config == configs[0] for config in configs)


def limited(limit: int, theta: float, **scaling) -> dict:
    return {"max_position_embeddings": limit, "rope_theta": theta, "rope_scaling": scaling or None}


ROPE = {  # changes of config.json, as published, rare, or contradicting themselves; and the longest prompt
    "Llama-2-7b": (limited(4096, 10000.0), 4096),
    "Llama-3.1-8B": (limited(131072, 500000.0, **LLAMA3_ROPE, original_max_position_embeddings=8192), 131072),
    "longchat-7b-v1.5-32k": (limited(4096, 10000.0, type="linear", factor=8.0), 32768),
    "dynamic NTK": (limited(4096, 10000.0, type="dynamic", factor=2.0), 8192),
    "Qwen2.5-7B-Instruct": (limited(32768, 1e6, **YARN | {"original_max_position_embeddings": 32768}), 131072),
    "yarn, no original length": (limited(32768, 1e6, rope_type="yarn", factor=4.0), 131072),
    "Yarn-Llama-2-7b-128k": (
        limited(131072, 10000.0, type="yarn", factor=32.0, original_max_position_embeddings=4096),
        131072,
    ),
    "yarn, original length outside": (
        limited(256, 10000.0, type="yarn", factor=4.0) | {"original_max_position_embeddings": 64},
        256,
    ),
    "yarn, one mscale": (limited(256, 10000.0, type="yarn", factor=4.0, mscale=2.0), 1024),
    "yarn, both": (limited(256, 10000.0, type="yarn", factor=4.0, mscale=2.0, mscale_all_dim=0.5), 1024),
    "yarn, no effect of zeros": (
        limited(256, 10000.0, type="yarn", factor=4.0, mscale=2.0, mscale_all_dim=0, beta_fast=0),
        1024,
    ),
    "yarn, null is not truncated": (limited(256, 10000.0, **YARN, truncate=None), 256),
    "llama3, no original length": (limited(256, 10000.0, **LLAMA3_ROPE), 256),
    "llama3, two original lengths": (
        limited(256, 10000.0, **LLAMA31["rope_scaling"]) | {"original_max_position_embeddings": 128},
        256,
    ),
    "both objects agree": (
        limited(256, 20000, rope_type="linear", factor=2.0)
        | {"rope_parameters": {"type": "linear", "rope_theta": 20000.0, "factor": 2}},
        512,
    ),
    "an empty object": ({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 8192),
    "null factor of rotation": ({"partial_rotary_factor": None}, 4096),
    "no architecture": ({"architectures": None}, 4096),
    "swish": ({"hidden_act": "swish"}, 4096),
}


@pytest.mark.parametrize("name", ROPE)
def test_a_config_gives_its_context_and_the_rope_speeds_of_transformers(name):
    changes, longest = ROPE[name]
    raw = LLAMA | {"head_dim": 128} | changes
    config, theirs = from_hf(raw), LlamaRotaryEmbedding(hf_model(raw).config)
    inv_freq, factor = rope_frequencies(config.rope, 128, raw["max_position_embeddings"])
    assert config.max_length == longest
    assert torch.allclose(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_rope_by_layer_type_is_read_where_all_layers_are_of_one_type():
    """transformers ignores it in these architectures, or fails."""
    full, sliding = LLAMA31["rope_scaling"] | {"rope_theta": 20000.0}, {"rope_type": "default"}
    both = {"full_attention": full, "sliding_attention": sliding}
    for family in (LLAMA, QWEN2, MISTRAL):
        flat = from_hf(family | {"rope_theta": 20000.0, "rope_parameters": full})
        for settings in (both, {"full_attention": full}, both | {"rope_theta": 5.0}):
            assert from_hf({**family, "rope_theta": None, "rope_parameters": settings}) == flat
    assert from_hf({**MISTRAL_V1, "rope_parameters": both}) == from_hf(MISTRAL_V1)


def test_dynamic_ntk_depends_on_max_position_embeddings_alone():
    plain = LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    odd = LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}}
    assert from_hf(plain) == from_hf(odd)


def test_config_json_cannot_change_what_an_architecture_fixes():
    biased = {"attention_bias": True, "mlp_bias": True}
    mistral, qwen2, qwen3, llama = (from_hf(c | biased) for c in (MISTRAL, QWEN2, QWEN3, LLAMA))
    assert not (mistral.qkv_bias or mistral.o_bias or mistral.mlp_bias)
    assert qwen2.qkv_bias and not (qwen2.o_bias or qwen2.mlp_bias)
    assert qwen3.qkv_bias and qwen3.o_bias and not qwen3.mlp_bias
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias


FULL, SLIDING = ["full_attention"] * 3, ["sliding_attention"] * 3
SLIDES = QWEN2 | {"use_sliding_window": True}
WINDOWS = [  # config.json and the window of all its layers
    ({key: value for key, value in MISTRAL.items() if key != "sliding_window"}, 4096),
    (MISTRAL, None),
    (MISTRAL_V1, 32),
    (MISTRAL_V1 | {"layer_types": SLIDING}, 32),
    (MISTRAL | {"layer_types": FULL}, None),
    (MISTRAL_V1 | {"use_sliding_window": True, "max_window_layers": 28}, 32),
    (MISTRAL_V1 | {"use_sliding_window": False}, 32),
    (QWEN2, None),
    (QWEN2 | {"use_sliding_window": None}, None),
    (SLIDES, 32),
    (SLIDES | {"layer_types": SLIDING, "max_window_layers": 28}, 32),
    ({key: value for key, value in SLIDES.items() if key != "sliding_window"}, 4096),
    ({key: value for key, value in SLIDES.items() if key != "max_window_layers"}, None),
    (SLIDES | {"max_window_layers": 3}, None),
    (SLIDES | {"sliding_window": None}, None),
    (SLIDES | {"layer_types": FULL}, None),
    (QWEN3 | {"use_sliding_window": True}, 32),
    (LLAMA | {"sliding_window": 32}, None),
    (LLAMA | {"use_sliding_window": True}, None),
    (LLAMA | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 28}, None),
]


@pytest.mark.parametrize(("raw", "window"), WINDOWS)
def test_all_layers_have_the_window_that_they_have_in_transformers(raw, window):
    assert from_hf(raw).window == window
    if raw.get("use_sliding_window", 0) is not None:  # which transformers refuses
        model = hf_model(raw)
        theirs = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
        assert ([model.config.sliding_window] * 3 if raw["model_type"] == "mistral" else theirs) == [window] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'.*LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "RoPE type 'longrope'.*yarn"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "RoPE type 'proportional'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear': factor must be a positive number .*, not None"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "'yarn': factor must be a positive number .*, not '4'"),
        (
            {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_parameters says rope_theta 1000000.0 and rope_scaling 10000.0",
        ),
        (
            {"rope_parameters": LLAMA31["rope_scaling"], "rope_scaling": {"type": "yarn", "factor": 8.0}},
            "rope_parameters says .* and rope_scaling",
        ),
        ({"rope_parameters": {"rope_theta": 1e6}}, "top level says rope_theta 10000.0 and rope_parameters 1000000.0"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}},
            "type 'linear' and rope_type 'yarn'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {}}},
            "rope_parameters .* by layer type, but not for full_attention",
        ),
        ({"rope_scaling": {"full_attention": None}}, "rope_scaling .* by layer type, but not for full_attention"),
        ({"rope_theta": 0}, "rope_theta must be a positive number .*, not 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_scaling": {**LLAMA31["rope_scaling"], "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.0}}, "attention_factor must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "64"}}, "not '64'"),
        ({"rope_scaling": [1]}, "must be an object, not \\[1\\]"),
        ({"rope_theta": 1.0}, "rope_theta must exceed 1"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number .*, not None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*silu"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu'.*silu"),
        ({"model_type": "mistral"}, "architectures LlamaForCausalLM and model_type mistral"),
        ({"architectures": "LlamaForCausalML"}, "architecture 'LlamaForCausalML'"),
        ({"architectures": None, "model_type": "gpt2"}, "architecture 'none'"),
        ({"architectures": None, "model_type": {}}, "architecture 'none'"),
        ({"use_sliding_window": True, "sliding_window": 8}, "LlamaForCausalLM ignores use_sliding_window"),
        ({"use_sliding_window": "false"}, "use_sliding_window must be true or false, not 'false'"),
        (SLIDES | {"max_window_layers": None}, "max_window_layers must be 0 or a positive integer .* not None"),
        (SLIDES | {"sliding_window": 0}, "sliding_window must be a positive integer .* not 0"),
        (
            SLIDES | {"sliding_window": None, "layer_types": SLIDING},
            "sliding_window None it must say full_attention for",
        ),
        (MISTRAL_V1 | {"layer_types": FULL}, "MistralForCausalLM ignores layer_types"),
        (MISTRAL | {"layer_types": SLIDING}, "layer_types .* must say full_attention for each of 3"),
        ({"layer_types": FULL[:2]}, "layer_types .* for each of 3 layers"),
        ({"layer_types": [{}, None, []]}, "layer_types"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window must be .* not -1"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3 KV heads"),
        ({"hidden_size": 130}, "hidden_size 130 does not divide into 4 heads"),
        ({"head_dim": 15}, "head_dim must be even and at least 4, not 15"),
        *[
            ({key: value}, f"{key} must be a positive integer below 2..31, not {value!r}")
            for key, value in [
                ("hidden_size", None),
                ("num_hidden_layers", 0),
                ("num_attention_heads", 4.0),
                ("num_key_value_heads", 0),
                ("intermediate_size", "160"),
                ("vocab_size", True),
                ("max_position_embeddings", -1),
                ("head_dim", -2),
            ]
        ],
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_unsupported_config_values_are_refused_by_name(changes, message):
    from_hf(LLAMA)
    with pytest.raises(ValueError, match=message):
        from_hf(LLAMA | changes)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_values_of_any_kind_are_read_or_refused_in_one_line(scaling):
    """Among them numbers at which a formula overflows, divides by zero or leaves its domain."""
    values = (1e308, -1e308, 10**400, 1e-308, 5e-324, 2**63, 0, float("inf"), float("nan"), True, "x" * 10**6, [], {})
    rope = {"rope_type": scaling, "rope_theta": 20000.0} | SCALINGS[scaling]
    rope |= dict.fromkeys(("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"), 1.0)
    rope |= dict.fromkeys(("original_max_position_embeddings", "partial_rotary_factor"))
    whole = LLAMA | {"layer_types": None, "use_sliding_window": False, "head_dim": 32} | {"rope_parameters": rope}
    places = [(whole, key) for key in whole] + [(rope, key) for key in rope]
    for place, key in places:
        for value in values:
            changed = whole | ({key: value} if place is whole else {"rope_parameters": rope | {key: value}})
            try:
                config = from_hf(changed)
            except ValueError as error:
                assert len(str(error).splitlines()) == 1 and len(str(error)) < 400, (key, value)
            else:
                assert rope_frequencies(config.rope, config.head_dim, config.max_length)[0].isfinite().all()
