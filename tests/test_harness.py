"""lm-eval on this engine gives what lm-eval gives with transformers; compressing methods change what they should."""

import json
import logging

import lm_eval
import pytest
import torch
from chat_templates import LLAMA2, LLAMA3
from conftest import slow
from lm_eval.api.instance import Instance
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


def ours(folder, kv="full", budget=None, batch_size=2, **more):
    return KVFast(str(folder / "ours"), kv, budget, batch_size, dtype="float32", **more)


@pytest.fixture(scope="module")
def theirs(folder):
    return HFLM(str(folder / "hf"), dtype="float32", device="cpu", batch_size=1)


def assert_same(found: dict[str, list], expected: dict[str, list]) -> None:
    assert found["kv_answer"] == expected["kv_answer"] and any(map(any, found["kv_answer"]))
    for task in ("kv_choice", "kv_rolling"):
        numbers = [torch.tensor(x[task], dtype=torch.float64).flatten() for x in (found, expected)]
        assert numbers[0].isfinite().all() and torch.allclose(*numbers, rtol=1e-4), task


@pytest.mark.parametrize("chat", (False, slow(True)))
def test_the_full_caches_responses_are_those_of_transformers(folder, theirs, chat):
    how = {"apply_chat_template": True, "system_instruction": "Be brief."} if chat else {}
    assert_same(responses(folder, ours(folder), **how), responses(folder, theirs, **how))


@pytest.mark.slow
def test_a_method_changes_even_choices_of_one_token(folder):
    full, small = responses(folder, ours(folder)), responses(folder, ours(folder, "streaming", 12))
    for i, (a, b) in enumerate(zip(full["kv_choice"], small["kv_choice"], strict=True)):
        if i:  # the first text is shorter than the budget, or nearly
            assert all(abs(x[0] - y[0]) > 1e-3 for x, y in zip(a, b, strict=True)), i
    assert full["kv_answer"] != small["kv_answer"] and full["kv_rolling"] != small["kv_rolling"]
    assert_same(responses(folder, ours(folder, "streaming", "500")), full)


def ask(model, kind: str, *requests: tuple) -> list:
    return getattr(model, kind)([Instance(kind, {}, request, i) for i, request in enumerate(requests)])


@pytest.fixture(scope="module")
def mine(folder):
    return ours(folder)


@pytest.fixture
def warned(caplog, monkeypatch):
    """What is logged; lm-eval keeps its log lines from the root logger."""
    monkeypatch.setattr(logging.getLogger("lm_eval"), "propagate", True)
    return caplog


@pytest.mark.parametrize(
    "context, continuation, error",
    [
        ("t", "he", "'he' adds no token to its context, 't'"),
        ("", "<|im_start|>", "'<|im_start|>' adds no token to its context, ''"),
        (" ", "the", "'the' follows no token of its context, ' '"),
        ("the", "", "the continuation of 'the' is empty"),
        ("", "", "the continuation of '' is empty"),
        ("the", " the" * 600, r"has \d+ tokens and the context is 512"),
    ],
)
def test_what_lm_eval_cannot_score_is_refused(mine, theirs, context, continuation, error):
    with pytest.raises((AssertionError, IndexError)):
        ask(theirs, "loglikelihood", (context, continuation))
    with pytest.raises(ValueError, match=error):
        ask(mine, "loglikelihood", (context, continuation))


def test_a_cut_context_is_said_and_equals_that_of_transformers(mine, theirs, warned, monkeypatch):
    for model, name in ((mine, "max_length"), (theirs, "_max_length")):
        monkeypatch.setattr(model, name, 24)
    long, short = " the model answers" * 12, "the model"
    scored = [ask(model, "loglikelihood", (long, " the cache"), (short, " the cache")) for model in (mine, theirs)]
    assert "1 of 2 contexts are too long and lose 25 tokens" in warned.text
    assert [x[1] for x in scored[0]] == [x[1] for x in scored[1]]
    assert torch.allclose(*(torch.tensor([x[0] for x in own]) for own in scored), rtol=1e-4)
    rolling = [ask(model, "loglikelihood_rolling", (long,)) for model in (mine, theirs)]
    assert rolling[0] == pytest.approx(rolling[1], rel=1e-4)
    how = {"until": ["ee"], "max_gen_toks": 6}
    assert ask(mine, "generate_until", (long, how), (short, how)) == [
        *ask(theirs, "generate_until", (long, how)),
        *ask(theirs, "generate_until", (short, how)),
    ]
    assert "1 of 2 contexts are too long and lose 30 tokens" in warned.text


def test_the_context_and_where_a_prompt_is_cut_are_the_users(folder, mine):
    ids, own = list(range(10)), ours(folder, max_length=40, truncation="middle")
    assert own.max_length == 40 and own.cut(ids, 5) == [0, 1, 7, 8, 9]
    assert mine.cut(ids, 10) == ids and mine.cut(ids, 4) == [6, 7, 8, 9]
    for wrong, error in (
        ({"truncation": "right"}, "left or middle"),
        ({"max_length": 513}, "max_length must lie between 1 and the model's context, 512, not 513"),
        ({"max_length": 0}, "max_length must lie between"),
    ):
        with pytest.raises(ValueError, match=error):
            ours(folder, **wrong)


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"top_k": 0},
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": True, "temperature": 1e-3, "top_k": 0, "top_p": 1.0},
        {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "repetition_penalty": None},
        {"repetition_penalty": 1.3},
        {"max_gen_toks": None, "max_new_tokens": 3},
    ],
)
def test_generation_kwargs_mean_what_they_mean_to_transformers(mine, theirs, how):
    request = "the model's cache", {"until": ["ee"], "max_gen_toks": 6} | how
    assert ask(mine, "generate_until", request) == ask(theirs, "generate_until", request)


@pytest.mark.parametrize(
    "how, error",
    [
        ({"num_beams": 2}, "num_beams=2: not supported"),
        ({"max_length": 20}, "max_length=20: not supported; leave them out, or use until, max_gen_toks"),
        ({"truncation": True, "typical_p": 0.5}, "truncation=True, typical_p=0.5: not supported"),
        ({"do_sample": True}, "needs a temperature above 0"),
        ({"max_gen_toks": 512}, "max_gen_toks is 512, and must be 1 or more and below the context, 512"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ],
)
def test_other_generation_kwargs_are_refused_before_the_first_answer(mine, monkeypatch, how, error):
    monkeypatch.setattr(mine.engine, "generate", lambda *_, **__: pytest.fail("answered"))
    with pytest.raises(ValueError, match=error):
        ask(mine, "generate_until", ("a", {"until": [], "max_gen_toks": 6}), ("a", {"until": []} | how))


def test_texts_that_are_all_empty_roll(mine, theirs):
    assert ask(mine, "loglikelihood_rolling", ("",), ("",)) == ask(theirs, "loglikelihood_rolling", ("",), ("",))


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
        ("{{ messages[1]['content'][1:] }}", "leaves out the begun answer"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_an_error(mine, with_template, template, error):
    with_template(template)
    with pytest.raises(ValueError, match=error):
        mine.apply_chat_template([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "A"}], False)


def test_the_batch_size_is_chosen_by_memory(folder, mine, monkeypatch):
    requests = [("the model's cache", " answer"), ("the", " the"), ("a cache", " a cache a")]
    auto = ours(folder, batch_size="auto:2", max_batch_size=8)
    expected = [pytest.approx(x, rel=1e-4) for x in ask(mine, "loglikelihood", *requests)]
    assert ask(auto, "loglikelihood", *requests) == expected and auto.engine.batch == 3
    monkeypatch.setattr("tasks.harness.free_share", lambda _: 0)
    assert ask(auto, "loglikelihood", *requests) == expected and auto.engine.batch == 1
    monkeypatch.undo()
    how = {"until": ["ee"], "max_gen_toks": 6}
    asked = [(text, how) for text, _ in requests]
    assert ask(auto, "generate_until", *asked) == ask(mine, "generate_until", *asked) and auto.engine.batch == 3
    with pytest.raises(ValueError, match="batch_size must be a number or auto, not some"):
        ours(folder, batch_size="some")


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
