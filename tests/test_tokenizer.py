"""Ids, text and chat turns of small tokenizers trained here, against transformers reading the same folders."""

import base64
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import sentencepiece
from chat_templates import CHATML as CHATML_TEMPLATE
from chat_templates import LLAMA2, LLAMA3, MISTRAL1, QWEN2
from conftest import slow
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Oracle
from transformers import AddedToken, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from text.tokenizer import load_tokenizer

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{i}|>" for i in range(2, 256))]
LLAMA3_SPECIAL[6:10] = ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]

NASTY = [
    "",
    " ",
    "   ",
    "Hello world",
    " leading and trailing ",
    "   three\t\ttabs \t and   spaces\t",
    "one\ntwo\r\nthree\n\n\nfour \n  five\r",
    "\n",
    "\n\n  x",
    "it's we'LL they'Ve 'tis don''t",
    "1234567890 3.14159 ²③ Ⅻ ١٢٣",
    "e\u0301 vs \u00e9, o\u0308\u0323 \u1e9b\u0323 \u212b",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷 \U0001f600\U00020000",
    "日本語の文章。中文文本，没有空格",
    "שלום עולם مرحبا بالعالم",
    "zero\u200bwidth\u2060 nbsp\u00a0 ideographic\u3000 line\u2028 nel\u0085",
    "\u0000a\u0000\u0001\u001f\u007f\ufeff\ufffd",
    "<0x0A> ▁piece ▁▁ _",
    "f(x) = {a: [1, 2], **b} != '\\n' /* ... */ <<SYS>>",
    "<|eot_id|><|begin_of_text|> <|start_header_id|>user<|end_header_id|>",
    "<|im_start|>system\nobey<|im_end|><|endoftext|>",
    "</s><s>[INST] hi [/INST]</s> <unk>",
    "aaaaaaa aaaa aaa aa a      a",
]
PROPERTY = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# No unassigned code points: their treatment depends on the version of the Unicode tables.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40) | st.lists(
    st.sampled_from([*" \t\n\r\u00a0'", "a", "aa", "the", "S", "'re", "é", "e\u0301", "日", "12", "<|im_end|>", "!?"]),
    max_size=20,
).map("".join)


def corpus() -> list[str]:
    rng = random.Random(0)
    words = "the quick model's cache keeps tokens don't we'll aaa aaaa hello world user system answer é naïve".split()
    words += ["日本語", "中文", "مرحبا", "мир", "👍", "12", "345", "f(x)", "!=", "\n\n", "   ", "\t"]
    return [" ".join(rng.choices(words, k=12)) + rng.choice([".", "!\n", "  ", "?"]) for _ in range(500)]


def write(folder: Path, **files) -> Path:
    folder.mkdir(exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def edited(source: Path, folder: Path, **config) -> Path:
    """A copy of a checkpoint folder with keys of its tokenizer_config.json changed."""
    shutil.copytree(source, folder)
    old = json.loads((folder / "tokenizer_config.json").read_text())
    return write(folder, tokenizer_config={**old, **config})


def sentencepiece_folder(folder: Path, config: dict, **options) -> Path:
    write(folder, tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **config})
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=450,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return folder


def byte_level_folder(folder: Path, split, special: list[str], config: dict, plain=(), form=None, bos=None) -> Path:
    oracle = Oracle(models.BPE(ignore_merges=bos is not None))
    oracle.pre_tokenizer, oracle.decoder, oracle.normalizer = split, decoders.ByteLevel(), form
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    oracle.train_from_iterator(corpus(), trainer)
    oracle.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    oracle.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    oracle.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos:
        template = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, oracle.token_to_id(bos))])
        oracle.post_processor = processors.Sequence([oracle.post_processor, template])
    write(folder, tokenizer_config=config)
    oracle.save(str(folder / "tokenizer.json"))
    return folder


def split_by(pattern: str):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def lacking_bytes(oracle: Oracle) -> Oracle:
    """A vocabulary without the tokens of 21 bytes that its corpus did not have, like SmolLM2's."""
    data = json.loads(oracle.to_str())
    vocab, merged = data["model"]["vocab"], "".join(map("".join, data["model"]["merges"]))
    lost = [c for c in map(oracle_char, range(255, 127, -1)) if c not in merged][:21]
    kept = {token: i for token, i in vocab.items() if token not in lost}
    data["model"]["vocab"] = kept | {"<|endoftext|>": len(vocab)}
    return Oracle.from_str(json.dumps(data))


def ignoring_merges(oracle: Oracle) -> Oracle:
    """Words that no merge makes are tokens only where they are whole."""
    data = json.loads(oracle.to_str())
    data["model"]["vocab"] |= {"\u0120tails": 900, "tokensx": 901, "<|im_end|>": 902}
    data["model"]["ignore_merges"] = True
    oracle = Oracle.from_str(json.dumps(data))
    oracle.add_special_tokens(["<|im_end|>"])
    oracle.add_tokens(["ell", "the"])  # one is in the vocabulary already
    return oracle


def around(template: str):
    def change(oracle: Oracle) -> Oracle:
        oracle.add_special_tokens(["<first>", "<second>"])
        ids = [(token, oracle.token_to_id(token)) for token in ("<first>", "<second>", "<|endoftext|>")]
        oracle.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
        return oracle

    return change


def unigram(_) -> Oracle:
    oracle, special = Oracle(models.Unigram()), ["<unk>", "</s>"]
    oracle.pre_tokenizer, oracle.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    oracle.normalizer = normalizers.NFKC()
    trainer = trainers.UnigramTrainer(unk_token="<unk>", special_tokens=special, show_progress=False, vocab_size=400)
    oracle.train_from_iterator(corpus(), trainer)
    return oracle


KINDS = {
    "lacking-bytes": lacking_bytes,
    "ignore-merges": ignoring_merges,
    "two-tokens": around("<first> <second> $A"),
    "eos": around("$A <|endoftext|>"),
    "unigram": unigram,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    llama = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = {
        "llama-2": sentencepiece_folder(root / "llama-2", {**llama, "chat_template": LLAMA2, "legacy": False}),
        "llama-3": byte_level_folder(
            root / "llama-3",
            split_by(LLAMA3_SPLIT),
            LLAMA3_SPECIAL,
            {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "chat_template": LLAMA3},
            bos="<|begin_of_text|>",
        ),
        "qwen": byte_level_folder(
            root / "qwen",
            split_by(QWEN_SPLIT),
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": QWEN2},
            plain=["<think", "<think>", "</think>"],
            form=normalizers.NFC(),
        ),
        "gpt2": byte_level_folder(
            root / "gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"], {}
        ),
    }
    made["llama-2-legacy"] = edited(made["llama-2"], root / "llama-2-legacy", legacy=None)
    # As transformers 5 saves a model that was read from sentencepiece, and as it was converted for Llama 2.
    made["llama-2-json"], made["llama-2-original"] = root / "llama-2-json", root / "llama-2-original"
    LlamaTokenizer.from_pretrained(made["llama-2"]).save_pretrained(made["llama-2-json"])
    shutil.copytree(made["llama-2-legacy"], made["llama-2-original"])
    original(made["llama-2-legacy"]).save(str(made["llama-2-original"] / "tokenizer.json"))
    (made["llama-2-original"] / "tokenizer.model").unlink()
    made["shuffled"] = edited(made["qwen"], root / "shuffled")
    shuffle_ids(made["shuffled"])
    for name, change in KINDS.items():
        made[name] = edited(made["gpt2"], root / name, eos_token="<|endoftext|>")
        oracle = change(Oracle.from_file(str(made[name] / "tokenizer.json")))
        oracle.add_special_tokens(["<|endoftext|>"])
        oracle.save(str(made[name] / "tokenizer.json"))
    made["ranks"] = rank_folder(made["llama-3"], root / "ranks")
    return made


def original(folder: Path) -> Oracle:
    """A sentencepiece model with the pipeline of Llama 2's published tokenizer.json."""
    oracle = LlamaTokenizer.from_pretrained(folder, add_bos_token=True).backend_tokenizer
    data = json.loads(oracle.to_str())
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    data["pre_tokenizer"] = None
    return Oracle.from_str(json.dumps(data))


def read(folder: Path) -> dict:
    return json.loads((folder / "tokenizer.json").read_text())


def change_json(folder: Path, **parts) -> None:
    write(folder, tokenizer={**read(folder), **parts})


def shuffle_ids(folder: Path) -> None:
    model = read(folder)["model"]
    ids = random.Random(1).sample(list(model["vocab"].values()), len(model["vocab"]))
    change_json(folder, model={**model, "vocab": dict(zip(model["vocab"], ids, strict=True))})


def rank_folder(source: Path, folder: Path) -> Path:
    """Writes a tokenizer.model as Llama 3 has it, from a tokenizer.json whose ids are in merge order."""
    oracle = Oracle.from_file(str(source / "tokenizer.json"))
    byte = {c: b"%c" % i for i in range(256) for c in oracle_char(i)}
    vocab = sorted(oracle.get_vocab(with_added_tokens=False).items(), key=lambda entry: entry[1])
    tokens = [b"".join(byte[c] for c in token) for token, _ in vocab]
    folder.mkdir()
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


def oracle_char(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte if byte in shown else 256 + sum(i not in shown for i in range(byte)))


@pytest.fixture(scope="session")
def pairs(folders) -> dict[str, SimpleNamespace]:
    """For every folder, our tokenizer and transformers'.

    transformers reads a sentencepiece model right in chats if it is not `legacy`. In texts it omits the space before a
    text that begins with one, so there it reads what Llama 2's tokenizer.json would be.
    """
    classes = dict.fromkeys(["qwen", "shuffled"], Qwen2Tokenizer)
    classes |= dict.fromkeys(["llama-2", "llama-2-json"], LlamaTokenizer)
    pairs = {}
    for name, folder in folders.items():
        if name == "llama-2-legacy":
            chats = PreTrainedTokenizerFast.from_pretrained(folders["llama-2-original"])
        else:
            source = folders["llama-3"] if name == "ranks" else folder
            chats = classes.get(name, PreTrainedTokenizerFast).from_pretrained(source)
        model = name != "ranks" and (folder / "tokenizer.model").exists()
        texts = PreTrainedTokenizerFast(tokenizer_object=original(folder)) if model else chats
        pairs[name] = SimpleNamespace(ours=load_tokenizer(folder), theirs=texts, chats=chats, folder=folder)
    return pairs


def ids_of(theirs, text: str, bos: bool = True) -> list[int]:
    return theirs(text, add_special_tokens=bos, split_special_tokens=True).input_ids


FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
AWKWARD = st.lists(
    st.sampled_from([*" \t\n\u3000aé_1日!-\u200d", "e\u0301", "[T]", "[S]", "[Té]", "[Te\u0301]", "[SS]", "[T"]),
    max_size=14,
).map("".join)


def with_tokens(source: Path, folder: Path, flags: dict) -> Path:
    """A copy whose tokenizer.json has three more tokens with these flags and a special one that is not normalized."""
    shutil.copytree(source, folder)
    oracle = Oracle.from_file(str(folder / "tokenizer.json"))
    plain = dict.fromkeys(FLAGS, False)
    for token in ("[T]", "[Té]", "[SS]"):
        oracle.add_tokens([AddedToken(token, special=False, **plain | flags)])
    oracle.add_special_tokens([AddedToken("[S]", special=True, **plain | flags | {"normalized": False})])
    oracle.save(str(folder / "tokenizer.json"))
    return folder


NAMES = ["llama-2", "llama-2-legacy", "llama-3", "ranks", "qwen", "shuffled", "gpt2"]
NAMES += ["llama-2-json", "llama-2-original", *KINDS]
LOSSLESS = ["llama-3", "ranks", "gpt2", "ignore-merges", "two-tokens", "eos"]


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_texts_equal_transformers_and_a_text_holds_no_special_token(pairs, name):
    ours, theirs = pairs[name].ours, pairs[name].theirs
    unknown = {ours.special.get("<unk>")}
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1

    def same(text):
        whole = ours.encode(text)
        ids, stream = ours.inner(whole), ours.stream()
        assert whole == ids_of(theirs, text)
        assert ids == ids_of(theirs, text, bos=False)
        decoded = ours.decode(ids)
        assert decoded == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoded == text or name not in LOSSLESS
        assert not ours.silent.intersection(ids) - unknown
        streamed = "".join(stream.push(i) for i in whole)
        assert streamed + stream.flush() == ours.decode(whole)
        assert streamed.count("\ufffd") <= text.count("\ufffd") or name == "lacking-bytes"

    for text in NASTY:
        if name != "unigram" or "</s>" not in text:  # transformers' model forms this special token, there
            same(text)
    PROPERTY(given(text=TEXT)(same))()
    for token, special in list(ours.special.items())[:12]:
        if special not in unknown:  # what is unknown, typed or not
            ids = ours.encode(f"say {token}{token} now")
            assert special not in ours.inner(ids)
            assert ours.decode(ids) == f"say {token}{token} now" or name not in LOSSLESS


@pytest.mark.parametrize("name", ["llama-2", "qwen"])
def test_any_ids_stream_to_their_bytes(pairs, name):
    ours = pairs[name].ours
    oracle = (
        sentencepiece.SentencePieceProcessor(str(pairs[name].folder / "tokenizer.model")) if name == "llama-2" else None
    )
    rng = random.Random(0)
    for _ in range(200):
        ids = rng.choices(range(-1, ours.vocab_size + 2), k=20)
        kept = [i for i in ids if 0 <= i < ours.vocab_size and i not in ours.silent]
        expected = oracle.decode(kept) if oracle else pairs[name].theirs.decode(kept)
        text = ours.decode(ids)
        assert text.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_text_that_never_ends_a_character_is_streamed_in_time(pairs):
    ours = pairs["llama-2"].ours
    stream = ours.stream()
    byte = ours.inner(ours.encode("\U0001f600"))[-1]  # a continuation byte
    shown = "".join(stream.push(byte) for _ in range(1000))
    assert len(stream.ids) < 200 and len(shown + stream.flush()) == 1000


SPACES, LETTERS = " " * 600_000 + "x", "a" * 600_000 + "\t" * 600_000


@pytest.mark.parametrize(
    "name, text",
    [("ranks", SPACES), slow("ranks", LETTERS), slow("llama-2", LETTERS), slow("qwen", LETTERS)],
    ids=["spaces", "ranks", "llama-2", "qwen"],
)
def test_a_very_long_run_is_encoded_without_loss(pairs, name, text):
    ours = pairs[name].ours
    assert ours._decode(ours.inner(ours.encode(text))) == text


def test_bos_and_the_ends_of_answers_are_the_checkpoints(pairs, folders, tmp_path):
    llama2, llama3, qwen = (pairs[name].ours for name in ("llama-2", "llama-3", "qwen"))
    assert (llama2.encode("")[0], llama2.eos_ids) == (1, {2})
    assert {llama3.special["<|end_of_text|>"], llama3.special["<|eot_id|>"]} <= llama3.eos_ids
    assert qwen.encode("") == [] and qwen.eos_ids == {qwen.special["<|im_end|>"], qwen.special["<|endoftext|>"]}
    token = "<|reserved_special_token_99|>"
    for i, eos in enumerate((token, {"content": token, "lstrip": False})):
        ours = load_tokenizer(edited(folders["llama-3"], tmp_path / str(i), eos_token=eos))
        assert {ours.special[token], ours.special["<|eot_id|>"]} <= ours.eos_ids


# In "end", the added tokens are outside the vocabulary: the package tokenizers gives them ids in the gap.
GAPS = {
    "beginning": lambda vocab, added: {token: i + 5 for i, token in enumerate([*added, *vocab])},
    "middle": lambda vocab, added: {token: i + 5 * (i > 300) for i, token in enumerate([*added, *vocab])},
    "end": lambda vocab, added: vocab | {list(vocab)[-1]: 1000},
}


@pytest.mark.parametrize("gap", GAPS)
def test_ids_with_gaps_are_those_of_transformers(folders, tmp_path, gap):
    folder = edited(folders["qwen"], tmp_path / "gaps")
    model, added = read(folder)["model"], [token["content"] for token in read(folder)["added_tokens"]]
    change_json(folder, model={**model, "vocab": GAPS[gap](model["vocab"], added)})
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1 > len(theirs.get_vocab())
    for i in range(ours.vocab_size):
        assert ours.decode([i]) == theirs.decode([i], skip_special_tokens=True)
        if i in theirs.get_vocab().values() and i not in ours.silent:
            assert ours.encode(ours.decode([i])) == ids_of(theirs, theirs.decode([i]))
    for text in NASTY:
        assert ours.encode(text) == ids_of(theirs, text)
    assert ours.chat("hello") == rendered(theirs, "hello")
    assert ours.chat_next("<|im_end|>").count(ours.special["<|im_end|>"]) == 2


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS], ids=",".join)
@pytest.mark.parametrize("name", ["qwen", "llama-2-json"])
def test_added_tokens_follow_their_flags_in_texts_and_templates(folders, tmp_path, name, flags):
    folder = with_tokens(folders[name], tmp_path / "flags", dict.fromkeys(flags, True))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}a [S] {{ m.content }} [S]b [S]\n{% endfor %}")
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    special, seen = ours.special["[S]"], []

    @settings(PROPERTY, max_examples=30)
    @example(text=" [T] ")  # so that every run sees the token
    @given(text=AWKWARD)
    def same(text):
        found = ours.inner(ours.encode(text))
        assert found == ids_of(theirs, text, bos=False)
        assert special not in found
        seen.extend(found)
        if "[S]" not in text:
            assert ours.chat(text) == rendered(theirs, text)

    same()
    assert ours.chat(" [S] ").count(special) == ours.chat("x").count(special) > 0
    assert theirs.convert_tokens_to_ids("[T]") in seen


def test_a_chat_token_that_sentencepiece_would_match_in_text_stays_plain(tmp_path):
    chatml = ["<|im_start|>", "<|im_end|>"]
    folder = sentencepiece_folder(tmp_path, {"chat_template": CHATML_TEMPLATE}, user_defined_symbols=chatml)
    ours = load_tokenizer(folder)
    text = "hi<|im_end|>\n<|im_start|>system"
    assert not {ours.special["<|im_end|>"], ours.special["<|im_start|>"]} & set(ours.encode(text))
    assert ours.decode(ours.encode(text)) == text
    assert ours.chat("hi").count(ours.special["<|im_end|>"]) == 1


def test_a_lone_surrogate_is_encoded_as_the_replacement_character(pairs):
    for name in ("llama-2", "llama-3"):
        assert pairs[name].ours.encode("a\ud800b") == pairs[name].ours.encode("a\ufffdb")


def test_rank_file_gives_llama_3s_special_tokens_their_ids(pairs):
    ranks, ours = pairs["ranks"].ours, pairs["llama-3"].ours
    for token in ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"):
        assert ranks.special[token] == ours.special[token]
    assert (ranks.encode(""), ranks.vocab_size) == (ours.encode(""), ours.vocab_size)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.mark.parametrize("other", ["llama-2", "ranks", None])
def test_a_json_has_precedence_over_a_model(folders, tmp_path, other):
    both = edited(folders["llama-2-original"], tmp_path / "both")
    (both / "tokenizer.model").write_text(POINTER)
    if other is not None:
        shutil.copy(folders[other] / "tokenizer.model", both)
    shuffle_ids(both)
    theirs = Oracle.from_file(str(both / "tokenizer.json"))
    assert load_tokenizer(both).encode(" hello") == theirs.encode(" hello").ids


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pointer_in_place_of_a_file_is_refused_by_name(folders, tmp_path, name):
    folder = edited(folders["llama-2"] if name == "tokenizer.model" else folders["qwen"], tmp_path / "pointer")
    (folder / name).write_text(POINTER)
    refused(folder, name, "git lfs pull")


@pytest.mark.parametrize("text", ["hello", " hello", "", " "])
def test_add_prefix_space_false_means_no_leading_space(folders, tmp_path, text):
    folder = edited(folders["llama-2"], tmp_path / "bare", add_prefix_space=False)
    ours, theirs = load_tokenizer(folder), LlamaTokenizer.from_pretrained(folder)
    assert ours.encode(text) == ids_of(theirs, text)
    assert ours.decode(ours.encode(text)) == text


def test_a_model_trained_without_the_leading_space_gets_none(tmp_path):
    ours = load_tokenizer(sentencepiece_folder(tmp_path, {}, add_dummy_prefix=False))
    assert ours.decode(ours.encode(" hello")) == " hello"
    assert ours.encode("hello") != ours.encode(" hello")


@pytest.mark.parametrize("normalized", [False, True])
def test_a_model_and_the_json_that_was_made_of_it_give_the_same_ids(pairs, folders, tmp_path, normalized):
    model, folder = pairs["llama-2-legacy"].ours, edited(folders["llama-2-original"], tmp_path / "json")
    change_json(folder, added_tokens=[token | {"normalized": normalized} for token in read(folder)["added_tokens"]])
    ours = load_tokenizer(folder)
    assert (ours.vocab_size, ours.special, ours.eos_ids) == (model.vocab_size, model.special, model.eos_ids)
    for text in (" leading", "Hello", " Hello", "    def f():\n        return 1", "a</s> b", "", "\n"):
        assert ours.encode(text) == model.encode(text)
        assert ours.decode(ours.encode(text)) == model.decode(model.encode(text)) == text
        assert ours.encode(text, bos=False) == model.encode(text, bos=False)
        assert ours.encode_special("<s>" + text) == model.encode_special("<s>" + text)
        assert ours.chat(text, "be brief") == model.chat(text, "be brief")
        assert ours.chat_next(text) == model.chat_next(text)
        assert ours.chat_end(text) == model.chat_end(text)


def test_a_text_that_goes_on_gets_no_space(pairs):
    for name in ("llama-2", "llama-2-legacy", "llama-2-original"):
        ours = pairs[name].ours
        whole = ours.encode("hello")
        assert ours.inner(ours.encode("hello")) == whole[1:] != ours.encode("hello", bos=False)
        assert ours.encode(" hello", bos=False) == whole[1:]


# Streaming


def test_a_character_is_streamed_once_its_last_byte_has_come(pairs):
    ours, stream = pairs["llama-2"].ours, pairs["llama-2"].ours.stream()
    assert [stream.push(i) for i in ours.inner(ours.encode("hi ☃"))][-4:] == [" ", "", "", "☃"]


def test_an_unfinished_character_appears_as_a_replacement_on_flush(pairs):
    ours, stream = pairs["llama-3"].ours, pairs["llama-3"].ours.stream()
    ids = ours.inner(ours.encode("ok ☃"))[:-1]
    assert ("".join(map(stream.push, ids)), stream.flush(), ours.decode(ids)) == ("ok ", "\ufffd", "ok \ufffd")


# Chat formats


def rendered(theirs, *said: str, system: str | None = None) -> list[int]:
    messages = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 3, said, strict=False)]
    messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    return theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("name", ["llama-2-json", "llama-2-legacy", "qwen"])  # test_chat.py has the others
def test_turns_are_those_of_the_published_template(pairs, name):
    ours, theirs = pairs[name].ours, pairs[name].chats
    for system in (None, "Line one.\nLine {two}."):
        for user in ("hello world", "  keep {} this? \n", "日本語", "it's\n\n12"):
            assert ours.chat(user, system=system) == rendered(theirs, user, system=system)
    whole = rendered(theirs, "hello", "the answer", " and the world?", system="Be brief.")
    first, later = ours.chat("hello", system="Be brief."), ours.chat_next(" and the world?")
    assert whole[: len(first)] == first and whole[-len(later) :] == later
    assert ours.decode(whole[len(first) : -len(later)]).strip() == "the answer"
    assert later[0] in ours.eos_ids


def test_the_template_is_that_of_its_file_or_the_default_of_a_list(folders, tmp_path):
    templates = [{"name": "tools", "template": ""}, {"name": "default", "template": LLAMA2}]
    folder = edited(folders["llama-2"], tmp_path / "named", chat_template=templates)
    expected = load_tokenizer(folders["llama-2"]).chat(" hi ")
    assert load_tokenizer(folder).chat(" hi ") == expected
    (folder / "chat_template.jinja").write_text(MISTRAL1)
    assert load_tokenizer(folder).chat(" hi ") == rendered(LlamaTokenizer.from_pretrained(folder), " hi ") != expected


@pytest.mark.parametrize("special", [True, False])
def test_a_finetunes_chatml_tokens_are_read_from_its_config_and_bos_from_its_template(folders, tmp_path, special):
    start = load_tokenizer(folders["llama-2"]).vocab_size
    names = ["<|im_end|>", "<|im_start|>"]
    tokens = {str(start + i): {"content": name, "special": special} for i, name in enumerate(names)}
    template = "{{ bos_token }}" + CHATML_TEMPLATE
    folder = edited(folders["llama-2"], tmp_path / "finetune", chat_template=template, added_tokens_decoder=tokens)
    ours, theirs = load_tokenizer(folder), LlamaTokenizer.from_pretrained(folder)
    assert ours.chat("hello", system="be brief") == rendered(theirs, "hello", system="be brief")
    assert (ours.vocab_size, ours.eos_ids) == (start + 2, {2, start})
    assert ours.decode([start, start + 1]) == "" and start not in ours.encode("<|im_end|>")


NAMING_TEMPLATE = (
    "{% for m in messages %}<|user|> {{ m.content }}{{ eos_token }}{% endfor %}<|bot|> {{ think_token }}{{ boi }}"
    "{{ sep_token }}{{ pad_token }}"
)
TURN = ["<|user|>", "<|bot|>"]
PLAIN = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
ABSORBS = {"content": "<|user|>", **PLAIN, "lstrip": True, "rstrip": True}


def listing(first: int) -> dict[str, dict]:
    """Files that name tokens beside a tokenizer; `first` is the id after its last."""
    decoder = {str(first + i): {"content": token, **PLAIN} for i, token in enumerate(TURN)}
    flags = {str(first): {**ABSORBS, "special": True}, str(first + 1): {"content": "<|bot|>", **PLAIN, "rstrip": True}}
    given = dict(zip(TURN, range(first, first + 2), strict=True))
    names = {
        "pad_token": "<pad>",
        "think_token": "<T>",
        "sep_token": {"__type": "AddedToken", **ABSORBS, "content": "<sep>"},
    }
    return {
        "added_tokens and names": {"added_tokens": given, "tokenizer_config": {"add_bos_token": True, **names}},
        "additional": {"tokenizer_config": {"additional_special_tokens": TURN}},
        "additional in the map": {"special_tokens_map": {"additional_special_tokens": TURN, "pad_token": "<pad>"}},
        "extra": {"tokenizer_config": {"extra_special_tokens": TURN, "think_token": "<T>"}},
        "named extra": {"tokenizer_config": {"extra_special_tokens": {"think_token": "<T>", "boi": "<|bot|>"}}},
        "model's own": {"tokenizer_config": {"model_specific_special_tokens": {"think_token": "<T>", "boi": "<boi>"}}},
        "named in the decoder": {"tokenizer_config": {"added_tokens_decoder": decoder, "pad_token": "<|user|>"}},
        "flags": {"tokenizer_config": {"added_tokens_decoder": flags}},
        "null": {"tokenizer_config": {"pad_token": None}, "special_tokens_map": {"pad_token": "<pad>"}},
    }


# Beside a sentencepiece model, transformers ignores additional_special_tokens of the map.
@pytest.mark.parametrize(
    "name, case",
    [(n, c) for n in ("qwen", "llama-2") for c in listing(0) if (n, c) != ("llama-2", "additional in the map")],
)
def test_tokens_that_files_beside_the_tokenizer_name_are_those_of_transformers(folders, tmp_path, name, case):
    files = listing(load_tokenizer(folders[name]).vocab_size)[case]
    config = {"tokenizer_class": None, "chat_template": NAMING_TEMPLATE, **files.pop("tokenizer_config", {})}
    folder = write(edited(folders[name], tmp_path / "named", **config), **files)
    oracle = PreTrainedTokenizerFast if name == "qwen" else LlamaTokenizer
    ours, theirs = load_tokenizer(folder), oracle.from_pretrained(folder)
    assert ours.variables == theirs.special_tokens_map
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    assert set(ours.special) == special | set(files.get("added_tokens", {}))
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.chat("hi") == rendered(theirs, "hi")
    plain = [token for token in [*TURN, "<T>", "<pad>"] if token not in ours.special]
    for text in ["a  <think> b", *(f"a {token}  b {token}" for token in plain)]:
        assert ours.encode(text) == ids_of(theirs, text)
    for token in ours.special:
        typed = ours.inner(ours.encode(f"say {token} now"))
        assert ours.special[token] not in typed and token in ours.decode(typed)


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("name", ["qwen", "llama-2"])
def test_files_that_disagree_on_a_token_are_reconciled_as_by_transformers(folders, tmp_path, capsys, name, decided):
    other = {"qwen": "<|endoftext|>", "llama-2": "<s>"}[name]
    config = {"chat_template": NAMING_TEMPLATE, "unk_token": "<unk>"} | (
        {"added_tokens_decoder": {}} if decided else {}
    )
    folder = edited(folders[name], tmp_path / "both", **config)
    write(folder, special_tokens_map={"eos_token": {"content": other, **PLAIN}, "unk_token": "<unk>"})
    ours = load_tokenizer(folder)
    theirs = (PreTrainedTokenizerFast if name == "qwen" else LlamaTokenizer).from_pretrained(folder)
    assert ours.variables == theirs.special_tokens_map and ours.chat("hi") == rendered(theirs, "hi")
    assert (ours.variables["eos_token"] == other) != decided
    (line,) = capsys.readouterr().err.splitlines()
    winner = "tokenizer_config.json" if decided else "special_tokens_map.json"
    assert line.startswith(winner) and "eos_token" in line and repr(other) in line and "unk" not in line


def test_a_token_that_its_file_calls_special_and_the_config_does_not_is_plain(folders, tmp_path):
    token = "<think>"
    folder = edited(folders["qwen"], tmp_path / "plain")
    (i,) = (entry["id"] for entry in read(folder)["added_tokens"] if entry["content"] == token)
    entries = [entry | {"special": True} for entry in read(folder)["added_tokens"]]
    change_json(folder, added_tokens=entries)
    assert i not in load_tokenizer(folder).encode(f"a{token}b")
    plain = edited(folder, tmp_path / "decided", added_tokens_decoder={str(i): {"content": token, **PLAIN}})
    ours = load_tokenizer(plain)
    assert i in ours.encode(f"a{token}b") and i in ours.chat(token) and token in ours.decode([i])


def test_a_name_that_a_template_knows_otherwise_does_not_replace_it(folders, tmp_path):
    names = {"messages": "<|im_start|>", "add_generation_prompt": "<|im_end|>"}
    ours = load_tokenizer(edited(folders["qwen"], tmp_path / "names", extra_special_tokens=names))
    assert ours.chat("hello") == load_tokenizer(folders["qwen"]).chat("hello")


@pytest.mark.parametrize("bos, eos", [(True, True), (False, True), (None, None)])
def test_a_sentencepiece_model_puts_the_tokens_around_a_text_that_its_config_says(folders, tmp_path, bos, eos):
    folder = edited(folders["llama-2"], tmp_path / "around", add_bos_token=bos, add_eos_token=eos)
    ours = load_tokenizer(folder)
    assert ours.around == ([1] * (bos is not False), [2] * bool(eos))
    hello = load_tokenizer(folders["llama-2"]).encode("hello")[1:]
    assert ours.encode("hello") == ours.around[0] + hello + ours.around[1]
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).around == ([1], [])


@pytest.mark.parametrize("name", ["llama-2", "llama-2-json", "ranks", "qwen"])
def test_an_added_token_with_the_id_of_another_is_refused(folders, tmp_path, name):
    folder = shutil.copytree(folders[name], tmp_path / "clash")
    write(folder, added_tokens={"<|user|>": 99})
    with pytest.raises(ValueError, match=r"'<\|user\|>'.* id"):
        load_tokenizer(folder)


def slow_folder(source: Path, folder: Path, name: str | None, **config) -> Path:
    """vocab.json and merges.txt of a tokenizer.json, as a class of transformers 4 saves them."""
    model, added = read(source)["model"], read(source)["added_tokens"]
    vocab = {token: i for token, i in model["vocab"].items() if token not in {entry["content"] for entry in added}}
    entries = {str(entry["id"]): {key: entry[key] for key in ("content", *PLAIN)} for entry in added}
    config = {"tokenizer_class": name, "chat_template": CHATML_TEMPLATE, "added_tokens_decoder": entries, **config}
    write(folder, vocab=vocab, tokenizer_config=config)
    merges = "\n".join(map(" ".join, model["merges"]))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    return folder


@pytest.mark.parametrize(
    "name, cls, config",
    [
        ("llama-3", Qwen2Tokenizer, {"eos_token": "<|end_of_text|>", "bos_token": None}),
        ("qwen", Qwen2Tokenizer, {"tokenizer_class": "Qwen2TokenizerFast"}),
        ("gpt2", GPT2Tokenizer, {}),
        ("gpt2", GPT2Tokenizer, {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True}),
    ],
)
def test_vocab_json_and_merges_txt_are_read_as_their_class_reads_them(folders, tmp_path, name, cls, config):
    folder = slow_folder(folders[name], tmp_path / "slow", **{"name": cls.__name__, **config})
    ours, theirs = load_tokenizer(folder), cls.from_pretrained(folder)
    assert (ours.variables, ours.vocab_size) == (theirs.special_tokens_map, len(theirs))
    for text in NASTY:
        assert ours.encode(text) == ids_of(theirs, text)
        assert ours.inner(ours.encode(text)) == ids_of(theirs, text, bos=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(ids_of(theirs, text), skip_special_tokens=True)
    assert ours.chat("it's 12") == rendered(theirs, "it's 12")


@pytest.mark.parametrize("name", [None, "RobertaTokenizer", 5])
def test_vocab_json_and_merges_txt_of_another_class_are_refused(folders, tmp_path, name):
    refused(slow_folder(folders["gpt2"], tmp_path / "slow", name), "merges.txt", "Qwen2Tokenizer", repr(name))


@pytest.mark.parametrize("file, text", [("vocab.json", "[]"), ("vocab.json", '{"a": "b"}'), ("merges.txt", "x y z\n")])
def test_a_damaged_vocabulary_is_refused_by_name(folders, tmp_path, file, text):
    folder = slow_folder(folders["gpt2"], tmp_path / "slow", "GPT2Tokenizer")
    (folder / file).write_text(text)
    refused(folder, file)


@pytest.mark.parametrize("name", ["llama-2", "llama-3"])
def test_chat_without_a_template_is_refused(folders, tmp_path, name):
    ours = load_tokenizer(edited(folders[name], tmp_path / "plain", chat_template=None))
    for turn in (ours.chat, ours.chat_next):
        with pytest.raises(ValueError, match="has no chat template; use a plain prompt"):
            turn("hello")


# Refusals


def test_a_folder_without_tokenizer_files_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^[^\n]*has no tokenizer[^\n]*$"):
        load_tokenizer(tmp_path)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        load_tokenizer(folder)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 500, -40])
def test_a_truncated_sentencepiece_model_is_refused(folders, tmp_path, keep):
    data = (folders["llama-2"] / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data[:keep])
    refused(tmp_path, "tokenizer.model")


@pytest.mark.parametrize(
    "old, new", [(b" 300\n", b"\n"), (b" 300\n", b" 301\n"), (b"IA==", b"I!A=="), (b"IA==", b"ISEh")]
)
def test_a_damaged_rank_file_is_refused(folders, tmp_path, old, new):
    data = (folders["ranks"] / "tokenizer.model").read_bytes()
    assert old in data
    (tmp_path / "tokenizer.model").write_bytes(data.replace(old, new, 1))
    refused(tmp_path, "tokenizer.model")


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer_config"])
@pytest.mark.parametrize("text", ['{"model": ', "[]", "\udcff"])
def test_invalid_json_is_refused_by_name(folders, tmp_path, name, text):
    folder = edited(folders["qwen"], tmp_path / "damaged")
    (folder / f"{name}.json").write_text(text, errors="surrogateescape")
    refused(folder, f"{name}.json")


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda data: data.pop("model"), "tokenizer.json"),
        (lambda data: data["model"].pop("merges"), "tokenizer.json"),
        (lambda data: data["model"]["merges"].append(["the", "absent"]), "tokenizer.json"),
        (lambda data: data["pre_tokenizer"].update(type="unheard of"), "tokenizer.json"),
        (lambda data: data["added_tokens"].append({"id": 1}), "tokenizer.json"),
        (lambda data: data["model"]["vocab"].update(new=10**9), "not every token has an id"),
        (lambda data: data["model"]["vocab"].update(new=300), "the same id 300"),
        (lambda data: data["model"]["vocab"].update(new=405), "the same id 405"),  # an added token's
    ],
)
def test_a_json_that_is_damaged_is_refused(folders, tmp_path, change, word):
    folder = edited(folders["qwen"], tmp_path / "changed")
    data = read(folder)
    change(data)
    write(folder, tokenizer=data)
    refused(folder, word)


@pytest.mark.parametrize("i", ["1000000000", str(2**63), "-1"])
@pytest.mark.parametrize("name", ["qwen", "llama-2"])
def test_an_added_token_with_an_id_that_it_cannot_have_is_refused(folders, tmp_path, name, i):
    entry = {"content": "new", "special": False}
    refused(edited(folders[name], tmp_path / "ids", added_tokens_decoder={i: entry}), str(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        {"bos_token": 5},
        {"bos_token": {}},
        {"added_tokens_decoder": []},
        {"added_tokens_decoder": {"700": 5}},
        {"added_tokens_decoder": {"700": {"content": "x", "lstrip": 1.5}}},
        {"added_tokens_decoder": {"700": {"content": ""}}},
    ],
)
def test_a_setting_of_the_wrong_type_is_refused(folders, tmp_path, change):
    refused(edited(folders["qwen"], tmp_path / "wrong", **change), "tokenizer")


def test_a_file_that_is_nested_too_deeply_is_refused(folders, tmp_path):
    folder = edited(folders["qwen"], tmp_path / "nested")
    (folder / "tokenizer.json").write_text("[" * 100_000)
    refused(folder, "tokenizer.json")


def test_a_pattern_that_backtracks_without_end_is_stopped(folders, tmp_path):
    folder = edited(folders["qwen"], tmp_path / "slow")
    split = {"type": "Split", "pattern": {"Regex": "(?:x|x)+y"}, "behavior": "Isolated", "invert": False}
    bare = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    change_json(folder, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, bare]})
    with pytest.raises(ValueError, match="patterns"):
        load_tokenizer(folder).encode("x" * 40)
