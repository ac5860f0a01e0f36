"""Chat turns through checkpoints' own templates, compared with transformers; and malicious templates."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from chat_templates import TEMPLATES
from test_tokenizer import LLAMA3_SPLIT, byte_level_folder, edited, rendered, sentencepiece_folder, split_by
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from text.tokenizer import load_tokenizer

SYSTEM_AT_THE_END = ("Mistral-7B-v0.3", "Mistral-Nemo")  # the system text stands in the newest turn
DROPS_REASONING = ("Qwen3-Thinking", "QwQ")  # an answer's header opens <think>, which later renderings leave out


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict:
    """(kind, control tokens) -> a folder with a small tokenizer of that kind and these tokens."""
    root, made = tmp_path_factory.mktemp("bases"), {}
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    for kind, tokens, _ in TEMPLATES.values():
        folder = root / f"{kind}-{len(made)}"
        if (kind, tokens) in made:
            continue
        if kind == "sentencepiece":
            sentencepiece_folder(folder, {**ends, "unk_token": "<unk>", "legacy": False}, control_symbols=list(tokens))
        else:
            special = ["<s>", "</s>", *tokens]
            byte_level_folder(folder, split_by(LLAMA3_SPLIT), special, ends, plain=["<think>", "</think>"])
        made[kind, tokens] = folder
    return made


@pytest.fixture(scope="module")
def pairs(bases, tmp_path_factory) -> dict:
    """name -> our tokenizer and transformers', with a public checkpoint's template."""
    root, made = tmp_path_factory.mktemp("chat"), {}
    for name, (kind, tokens, template) in TEMPLATES.items():
        folder = edited(bases[kind, tokens], root / name, chat_template=template)
        oracle = LlamaTokenizer if kind == "sentencepiece" else PreTrainedTokenizerFast
        made[name] = load_tokenizer(folder), oracle.from_pretrained(folder)
    return made


@pytest.fixture
def with_template(bases, tmp_path):
    """A function from a template to our tokenizer and transformers'."""

    def made(template: object) -> tuple:
        folder = edited(bases["byte-level", TEMPLATES["Llama-3"][1]], tmp_path / "own", chat_template=template)
        return load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)

    return made


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_first_turn_equals_transformers(pairs, name):
    ours, theirs = pairs[name]
    for system in (None, "Be brief.", "\tLine one.\nLine {{ two }}.\n"):
        for user in ("hello world", "  keep {} this? \n", "日本語 it's\n\n12", "<think>no</think> {% x %} \\n"):
            assert ours.chat(user, system) == rendered(theirs, user, system=system)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_later_turn_is_what_transformers_writes_after_the_answer(pairs, name, system):
    ours, theirs = pairs[name]
    moved = system is not None and name in SYSTEM_AT_THE_END
    whole = rendered(theirs, "hello", "the answer", " and the world? ", system=None if moved else system)
    first, later = ours.chat("hello", None if moved else system), ours.chat_next(" and the world? ")
    assert whole[-len(later) :] == later and later[0] in ours.eos_ids
    if name in DROPS_REASONING:
        first = first[: -len(ours.encode("<think>\n", bos=False))]
    assert whole[: len(first)] == first
    assert ours.decode(whole[len(first) : -len(later)]).strip() == "the answer"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_first_turn_in_two_parts_reads_like_one(pairs, name):
    """A saved prompt is the beginning of a turn; each question completes it."""
    ours = pairs[name][0]
    for system in (None, "Be brief."):
        for text, question in (("a book.\n", "\nWho? "), (" <|eot_id|> [/INST]", " 日本語\n")):
            parts = ours.chat_begin(text, system), ours.chat_end(question)
            if system is None or name not in SYSTEM_AT_THE_END:
                assert ours.decode([*parts[0], *parts[1]]) == ours.decode(ours.chat(text + question, system))
            assert ours.chat_begin(text, system)[:3] == ours.chat(text, system)[:3]


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_that_a_user_types_stay_text(pairs, name):
    ours, control = pairs[name][0], set(pairs[name][0].special.values())
    typed = "a" + "".join(f"{token}{token[:-1]}{token} " for token in ours.special) + "b"
    turns = (
        (ours.chat(typed), ours.chat("x")),
        (ours.chat("x", system=typed), ours.chat("x", system="x")),
        (ours.chat_next(typed), ours.chat_next("x")),
    )
    for turn, plain in turns:
        assert [i for i in turn if i in control] == [i for i in plain if i in control]
        assert typed in ours.decode(turn)


def test_a_template_may_inspect_and_change_messages(with_template):
    ours, theirs = with_template(
        "{% for m in messages %}{% if m.content.startswith('/think ') %}{% set text = m.content[7:] | upper %}"
        "{% else %}{% set text = m.content | trim | replace('a', 'b') %}{% endif %}{{ text }}<|eot_id|>{% endfor %}"
    )
    for text in ("/think a ", " a <|eot_id", "aaa"):
        assert ours.chat(text) == rendered(theirs, text)
    eot = ours.special["<|eot_id|>"]
    assert ours.chat("/think a<|eot_id|>").count(eot) == 1
    assert "A<|EOT_ID|>" in ours.decode(ours.chat("/think a<|eot_id|>"))


def test_templates_have_the_features_that_transformers_offers(with_template):
    template = """\
    {%- set ns = namespace(n=0) %}
    {%- for m in messages %}
        {%- if loop.index > 9 %}{% break %}{% endif %}
        {%- generation %}{{ m | tojson }}{% endgeneration %}
        {{ {'<é>': [1, none]} | tojson(indent=2) }}
    {%- endfor %}
    {{ strftime_now('%d %b %Y') }} {{ bos_token }}{{ eos_token }} {{ tools is none }} {{ documents is none }}
    {{ add_generation_prompt }} {{ pad_token is defined }} {{ unheard_of }}
    {% if true %}
        block
    {% endif %}
    """
    ours, theirs = with_template(template)
    assert ours.chat("<hi> & 'you'") == rendered(theirs, "<hi> & 'you'")


def test_a_list_of_templates_without_a_default_is_refused_when_it_is_used(with_template):
    folder = [{"name": "rag", "template": "x"}, {"name": "tool_use", "template": "y"}]
    ours, _ = with_template(folder)
    with pytest.raises(ValueError, match="none of its templates is named default"):
        ours.chat("hello")


def test_an_answer_may_open_with_a_given_text(pairs):
    for ours, theirs in pairs.values():
        said = [{"role": "user", "content": "hi"}]
        text = theirs.apply_chat_template(said, add_generation_prompt=True, tokenize=False) + " Answer: the"
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.chat("hi", opening=" Answer: the") == expected
        later = ours.chat_next("hi", opening=" Answer: the")
        assert ours.decode(later).endswith(" Answer: the") and later[:3] == ours.chat_next("hi")[:3]
        token, special = list(ours.special.items())[-1]
        assert ours.chat("x", opening=token).count(special) == ours.chat("x").count(special)


# Templates that refuse, fail or are malicious


@pytest.mark.parametrize(
    "template, message",
    (
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}", "fails: no system"),
        ("{{ messages[0] }", "unexpected '}'"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ messages + 1 }}", "can only concatenate list"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{% include 'text/chat.py' %}", "no loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'x' * 10**14 }}", "MemoryError"),
        ("{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}", "adds more than 1000000 characters"),
        ("{{ raise_exception('\x1b[2Jred\x07' + 'x' * 10**7) }}", "fails: \ufffd[2Jred\ufffdxxx"),
        ("{#" + "x" * 300_000 + "#}", "more than 200000 characters"),
        ("{{ 'x' * 10**7 }}", "adds more than 1000000 characters"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{" + "(" * 5000 + ")" * 5000 + "}}", "recursion"),
    ),
)
def test_a_template_that_fails_is_refused_in_one_line(with_template, template, message):
    ours, _ = with_template(template)
    with pytest.raises(ValueError) as error:
        ours.chat("hello", system="x")
    assert len(str(error.value)) < 400
    assert message in str(error.value) and "\n" not in str(error.value) and "chat template" in str(error.value)


def test_a_message_may_hold_private_use_characters(with_template):
    ours, theirs = with_template(TEMPLATES["Llama-3"][2])
    text = "".join(map(chr, range(0xE000, 0xF900))) + "\U000f0000<|eot_id|>"
    control = set(ours.special.values())
    assert ours.decode(ours.chat(text)).count(text) == 1
    assert [i for i in ours.chat(text) if i in control] == [i for i in ours.chat("x") if i in control]


def test_a_template_renders_after_a_fork(with_template):
    ours, _ = with_template("{{ messages[0].content }}<|eot_id|>")
    expected = ours.chat("hello")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if ours.chat("hello") == expected else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_template_that_leaves_answers_out_allows_one_turn(with_template):
    ours, theirs = with_template("{{ messages[-1].content }}<|eot_id|>")
    assert ours.chat("hello") == rendered(theirs, "hello")
    with pytest.raises(ValueError, match="leaves messages out"):
        ours.chat_next("hello")


@pytest.mark.parametrize("template", [5, [1], [{"name": "default", "template": 5}], {"default": []}])
def test_a_template_that_is_not_text_is_refused_with_its_file_name(bases, tmp_path, template):
    folder = tmp_path / "odd"
    shutil.copytree(bases["byte-level", TEMPLATES["Llama-3"][1]], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    Path(folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    with pytest.raises(ValueError, match="tokenizer_config.json in .* is damaged"):
        load_tokenizer(folder)
