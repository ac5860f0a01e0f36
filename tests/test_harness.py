"""lm-eval on this engine gives what lm-eval gives with transformers; compressing methods change what they should."""

import json
import logging

import lm_eval
import pytest
import torch
from chat_templates import LLAMA2, LLAMA3
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from test_tokenizer import CHATML_TEMPLATE, byte_level_folder, corpus
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from convert_hf_checkpoint import convert
from model import Transformer
from tasks.harness import KVFast

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["ee"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model in Hugging Face's form (hf) and converted (ours), and tasks about a few texts."""
    root = tmp_path_factory.mktemp("harness")
    config = {"chat_template": CHATML_TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    special = ["<|im_start|>", "<|im_end|>"]
    split = pre_tokenizers.ByteLevel(False)
    byte_level_folder(root / "hf", split, special, config | {"tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = AutoTokenizer.from_pretrained(root / "hf")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **SIZES))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(root / "hf")
    convert(root / "hf", root / "ours")
    lines = [
        {"text": " ".join(corpus()[i : i + n]), "choices": ["the", " model's cache", " answer a"], "gold": i % 3}
        for i, n in enumerate((1, 3, 9, 2, 5))
    ]
    (root / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, task in TASKS.items():
        data = {"dataset_kwargs": {"data_files": {"test": str(root / "docs.jsonl")}}}
        (root / f"{name}.yaml").write_text(json.dumps({"task": f"kv_{name}"} | COMMON | task | data))
    return root


def responses(folder, model, **more) -> dict[str, list]:
    tasks = [f"kv_{name}" for name in TASKS]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, **more)
    return {task: [sample["filtered_resps"] for sample in own] for task, own in found["samples"].items()}


def ours(folder, kv="full", budget=None, **more):
    return KVFast(str(folder / "ours"), kv, budget, batch_size=2, dtype="float32", **more)


@pytest.fixture(scope="module")
def theirs(folder):
    return HFLM(str(folder / "hf"), dtype="float32", device="cpu", batch_size=1)


def assert_same(found: dict[str, list], expected: dict[str, list]) -> None:
    assert found["kv_answer"] == expected["kv_answer"] and any(map(any, found["kv_answer"]))
    for task in ("kv_choice", "kv_rolling"):
        numbers = [torch.tensor(x[task], dtype=torch.float64).flatten() for x in (found, expected)]
        assert numbers[0].isfinite().all() and torch.allclose(*numbers, rtol=1e-4), task


@pytest.mark.parametrize("chat", (False, True))
def test_the_full_caches_responses_are_those_of_transformers(folder, theirs, chat):
    how = {"apply_chat_template": True, "system_instruction": "Be brief."} if chat else {}
    assert_same(responses(folder, ours(folder), **how), responses(folder, theirs, **how))


def test_a_method_changes_even_choices_of_one_token(folder):
    full, small = responses(folder, ours(folder)), responses(folder, ours(folder, "streaming", 12))
    for i, (a, b) in enumerate(zip(full["kv_choice"], small["kv_choice"], strict=True)):
        if i:  # the first text is shorter than the budget, or nearly
            assert all(abs(x[0] - y[0]) > 1e-3 for x, y in zip(a, b, strict=True)), i
    assert full["kv_answer"] != small["kv_answer"] and full["kv_rolling"] != small["kv_rolling"]
    assert_same(responses(folder, ours(folder, "streaming", "500")), full)


def test_a_prompt_that_is_too_long_is_cut_where_asked(folder):
    ids = list(range(10))
    assert ours(folder).cut(ids, 10) == ids and ours(folder).cut(ids, 4) == [6, 7, 8, 9]
    assert ours(folder, truncation="middle").cut(ids, 5) == [0, 1, 7, 8, 9]
    with pytest.raises(ValueError, match="left or middle"):
        ours(folder, truncation="right")
    with pytest.raises(ValueError, match="max_gen_toks must be below the model's context, 512 tokens"):
        ours(folder).cut(ids, 0)


@pytest.fixture(scope="module")
def mine(folder):
    return ours(folder)


@pytest.fixture
def warned(caplog, monkeypatch):
    """What is logged; lm-eval keeps its log lines from the root logger."""
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    return caplog


NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML_TEMPLATE


@pytest.fixture
def with_template(mine, theirs, monkeypatch):
    def give(template: str) -> None:
        monkeypatch.setattr(mine.tokenizer, "template", template)
        monkeypatch.setattr(theirs.tokenizer, "chat_template", template)

    return give


@pytest.mark.parametrize("template", (CHATML_TEMPLATE, LLAMA2, LLAMA3), ids=("chatml", "llama2", "llama3"))
@pytest.mark.parametrize("begun", ("", "end", "im", "assistant", "Hi", " lead", "Code:\n```python\n", "def f():\n \n"))
def test_an_answer_is_begun_as_with_transformers(mine, theirs, with_template, template, begun):
    with_template(template)
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    messages.append({"role": "assistant", "content": begun})
    assert mine.apply_chat_template(messages, False) == theirs.apply_chat_template(messages, False)


@pytest.mark.parametrize("begun", (False, True))
def test_a_template_that_rejects_system_messages_gets_the_others(mine, theirs, warned, with_template, begun):
    with_template(NO_SYSTEM)
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    messages += [{"role": "assistant", "content": "Yes, "}] if begun else []
    text = mine.apply_chat_template(messages, not begun)
    assert text == theirs.apply_chat_template(messages, not begun) and "Hi" in text
    assert begun or "no system: system messages are left out" in warned.text  # said once


@pytest.mark.parametrize(
    "template, error",
    [
        ("", "no chat template: leave out --apply_chat_template"),
        ("{{ raise_exception('never') }}", "never"),
        ("{{ messages[0]['content'] }}", "leaves out the begun answer"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_an_error(mine, with_template, template, error):
    with_template(template)
    with pytest.raises(ValueError, match=error):
        mine.apply_chat_template([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}], False)


def test_choices_that_continue_a_prompt_share_its_prefill(folder, monkeypatch):
    prefill, prompts = Transformer.prefill, []

    def counted(model, row, tokens, *args):
        prompts.append(tokens.tolist())
        return prefill(model, row, tokens, *args)

    monkeypatch.setattr(Transformer, "prefill", counted)
    own = ours(folder)
    own._loglikelihood_tokens([(None, [first, 5, 6, 7], [choice]) for first in (3, 4) for choice in (8, 9, 10)], True)
    assert sorted(prompts) == [[3, 5, 6], [4, 5, 6]]


def test_options_reach_the_method(folder):
    assert ours(folder, bits=4).engine.options == {"bits": "4"}
    with pytest.raises(ValueError, match="has no option"):
        ours(folder, beans=4)
