"""Converts text to token ids and back, and encodes chat turns.

A folder's tokenizer.json decides if there is one, and the package tokenizers runs it as it is. Otherwise sentencepiece
runs tokenizer.model, or tiktoken does if it is Llama 3's rank file; or vocab.json and merges.txt are read.

Ids are those that models are trained with. transformers 5 gives others for three classes, because it rebuilds what the
files say: LlamaTokenizer omits the space before a text that begins with one (sentencepiece adds it, as do Meta's and
Mistral's own code) and, from a tokenizer.model alone, merges pieces by id instead of score; Qwen2Tokenizer and
GPT2Tokenizer replace a tokenizer.json's normalizer and pre-tokenizer by their own.

Nothing in a user's text ever becomes a special token: a typed "<|eot_id|>" or "</s>" is plain text. Special tokens come
from a tokenizer's post-processor (BOS) and from chat templates alone.

A tokenizer is trusted: patterns can backtrack for hours, and replacements multiply a text until it fills the memory.
Ctrl-C waits while the library encodes a text.
"""

import base64
import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice, pairwise
from os.path import commonprefix
from pathlib import Path

import sentencepiece
import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from text import chat
from text.files import present, read_bytes, read_json

# A rank file holds neither a split pattern nor special tokens: Llama 3 keeps both in code.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = {
    **{i: f"<|reserved_special_token_{i}|>" for i in range(256)},
    **{0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>"},
    **{8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>"},
}
# What a class of transformers adds to vocab.json and merges.txt: its normalizer, split patterns and special tokens.
QWEN2_SPLIT, END = LLAMA3_SPLIT.replace("{1,3}", ""), "<|endoftext|>"
CLASSES = {
    "Qwen2Tokenizer": (normalizers.NFC(), [QWEN2_SPLIT], {"eos_token": END, "unk_token": END, "pad_token": END}),
    "GPT2Tokenizer": (None, [], {"bos_token": END, "eos_token": END, "unk_token": END}),
}
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
# tiktoken gives up on a run of some 500,000 spaces, so longer runs are cut. Llama's own code cuts at the same length.
LONG_RUN = re.compile(r"\s{25000}|\S{25000}")

# Tokens that end an answer in every vocabulary that has them, whichever one the checkpoint's settings call EOS.
END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")
# Tokens of chat formats, special even where a tokenizer does not say so.
CONTROL_TOKENS = {"<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"}
CONTROL_TOKENS |= {"[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"}
# Tokens that every checkpoint may name. Other settings that end in _token name one if they are a text.
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MAX_ID = 2**22  # ids must be below this: a larger table of tokens would fill the memory
PENDING = 64  # tokens after which a stream no longer waits for the end of a character: they are no text
PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's private-use characters, which have no meaning

# Stand for a special token between two texts, for nothing, and for what precedes a text that goes on. The library finds
# these names in every text, so they are secret: nobody can type them.
MARK, CUT, BEFORE = (f"<{secrets.token_hex(16)}>" for _ in range(3))


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Reads the tokenizer of a checkpoint folder.

    Raises FileNotFoundError if the folder has none, and ValueError if a file is damaged or two contradict each other.
    """
    folder = Path(folder)
    model, byte_level = folder / "tokenizer.model", all(present(folder / name) for name in ("vocab.json", "merges.txt"))
    if present(folder / "tokenizer.json") or (byte_level and not present(model)):
        kind, data = JsonTokenizer, b""
    elif present(model):
        data = read_bytes(model)
        kind = RankTokenizer if RANK_LINE.match(data) else PieceTokenizer
    else:
        files = "neither tokenizer.json nor tokenizer.model nor vocab.json with merges.txt"
        raise FileNotFoundError(f"{folder} has no tokenizer: {files} is there")
    try:
        return kind(folder, data)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"tokenizer_config.json in {folder} is damaged, or a file beside it ({error!r})") from None


class Tokenizer:
    """The tokenizer of one checkpoint, made by `load_tokenizer`.

    vocab_size: highest id + 1. special: token -> id of special tokens. eos_ids: every id that ends an answer, including
    a chat's end of turn. around: the ids that it puts before and after a text (BOS, EOS).
    """

    around: tuple[list[int], list[int]]

    def __init__(self, folder: Path, vocab: dict[str, int], special: set[str]):
        """vocab: token -> id. special: tokens that are neither matched in text nor printed."""
        if not vocab or not all(type(i) is int and 0 <= i < MAX_ID for i in vocab.values()):
            raise ValueError(f"the tokenizer in {folder} is damaged: not every token has an id from 0 to {MAX_ID - 1}")
        self.special = {token: vocab[token] for token in special}
        self.silent = set(self.special.values())
        self.vocab_size = max(vocab.values()) + 1
        ends = {token for token in END_TOKENS if token in special} | {self.variables.get("eos_token")}
        self.eos_ids = {vocab[token] for token in ends if token in vocab}
        names = "|".join(map(re.escape, sorted(self.special, key=len, reverse=True)))
        starts = "".join(sorted({re.escape(token[0]) for token in self.special}))
        # Matches the first character of a spelled special token; the group is the token.
        self.spelled = re.compile(f"(?=[{starts}])(?=({names}))." if names else "(?!)", re.DOTALL)

    def read_settings(self, folder: Path, defaults: dict[str, str] | None = None) -> None:
        """Reads the files beside the tokenizer, and combines them as transformers does.

        config: `defaults`, over them tokenizer_config.json, and over both special_tokens_map.json unless the config has
        added_tokens_decoder. template, variables: those of chats. given: token -> id, where a file lists added tokens.
        """
        own = read_json(folder / "tokenizer_config.json", missing={})
        mapped = read_json(folder / "special_tokens_map.json", missing={})
        decided = own.get("added_tokens_decoder") is not None
        _say_differences(own, mapped, decided)
        settings = (defaults or {}) | own | ({} if decided else mapped)
        self.config = config = {key: value for key, value in settings.items() if value not in (None, "")}
        self.template = _template(folder, config)
        names = {key: config[key] for key in VARIABLES if key in config}
        names |= {key: text for key, text in config.items() if key.endswith("_token") and isinstance(text, str | dict)}
        names |= config.get("model_specific_special_tokens", {})
        extra = config.get("extra_special_tokens", config.get("additional_special_tokens", []))
        names, extra = (names | extra, []) if isinstance(extra, dict) else (names, extra)
        tokens = {key: _token(value) for key, value in names.items()}
        self.variables = {key: token.content for key, token in tokens.items()}
        self.named = {token.content: token for token in [*tokens.values(), *map(_token, extra)]}
        if decided:
            entries = {
                i: _token(entry, entry.get("special", False)) for i, entry in own["added_tokens_decoder"].items()
            }
            if wrong := [i for i in entries if not i.isdecimal()]:
                raise TypeError(f"the id {wrong[0]!r}")
            self.listed = {token.content: token for token in entries.values()}
            self.given = {token.content: int(i) for i, token in entries.items()}
        else:
            self.listed, self.given = {}, read_json(folder / "added_tokens.json", missing={})

    def added(self, own: dict[str, AddedToken]) -> list[AddedToken]:
        """All added tokens, in the order in which those without an id get one; `own` are the tokenizer file's.

        The flags in added_tokens_decoder count, then the file's. A token that a setting names is special. Special ones
        are matched as they are spelled, never in a normalized text: Llama 2's normalizer puts spaces before them.
        """
        # added_tokens.json does not mark special tokens. None of its tokens is a word, so all count as special.
        found = {token: _token(token) for token in self.given} | self.named | own | self.listed
        for content, token in found.items():
            if token.special or content in self.named or content in CONTROL_TOKENS:
                found[content] = AddedToken(**token.__getstate__() | {"special": True, "normalized": False})
        return sorted(found.values(), key=lambda token: self.given.get(token.content, MAX_ID))

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text, with the tokens `around` it; a sentencepiece model also adds a space before it.

        bos=False: of a text that continues another, which gets neither.
        """
        raise NotImplementedError

    def inner(self, ids: list[int]) -> list[int]:
        """A text's ids without those around it."""
        before, after = self.around
        return ids[len(before) : len(ids) - len(after)]

    def encode_special(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are meant, as in a conversation that another program rendered."""
        return self._join(self._split(_without_surrogates(text), special=True), True)

    def decode(self, ids: list[int]) -> str:
        """The text of ids. Skips special tokens and ids outside the vocabulary; broken UTF-8 becomes U+FFFD."""
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self) -> "Stream":
        return Stream(self)

    def chat(self, user: str, system: str | None = None, opening: str = "") -> list[int]:
        """Ids of a conversation's first turn, as the checkpoint's chat template renders it, up to where the answer
        begins, and then of `opening`, the text with which the answer begins.

        Special tokens are inserted where the template writes them; in messages they stay plain text.
        Raises ValueError if there is no template or it refuses the conversation (a system text, say).
        """
        return self._turns(_first_turn(user, system), opening)

    def chat_next(self, user: str, opening: str = "") -> list[int]:
        """Ids of a later turn. They begin with the end-of-turn token of the last answer, which is not in the cache yet.

        The ids are what the template writes between one answer and the next. Some templates rewrite earlier turns when
        a later one follows: they drop reasoning, or move the system text to the newest turn. This is ignored: the cache
        keeps the earlier turns as they were, and the new turn follows them.
        """
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
        return self._turns([*before, {"role": "user", "content": user}], opening)

    def chat_begin(self, user: str, system: str | None = None) -> list[int]:
        """Ids of a first turn up to the end of `user`, a text that questions follow: `chat_end` completes the turn."""
        return self._turns(_first_turn(user, system), part="begin")

    def chat_end(self, user: str) -> list[int]:
        """Ids that complete the turn of `chat_begin`: more text of the user, up to where the answer begins."""
        return self._turns([{"role": "user", "content": user}], part="end")

    def _turns(self, messages: list[dict[str, str | None]], opening: str = "", part: str = "whole") -> list[int]:
        """Ids of a rendered conversation; if it has an answer (content None), only the ids of what follows the answer.

        `part`: "begin" ends with the last message's text, "end" begins with it.
        """
        if not self.template:
            raise ValueError("this checkpoint has no chat template; use a plain prompt")
        contents = [m["content"] for m in messages]
        used = set(self.template).union(opening, *filter(None, contents))
        starts = {token[0] for token in self.special}
        free = list(islice((chr(i) for i in PRIVATE if chr(i) not in used), len(starts) + 1))
        if len(free) <= len(starts):
            raise ValueError("a message that has all private-use characters of Unicode cannot be sent")
        # In messages, the first character of special tokens is replaced until the template's own tokens are found.
        mark, *free = free
        hidden = dict(zip(starts, free, strict=True))

        def hide(text: str) -> str:
            return self.spelled.sub(lambda match: hidden[match[0]], _without_surrogates(text))

        said = [mark if content is None else hide(content) for content in contents]
        if part != "whole":
            said[-1] = said[-1] + mark if part == "begin" else mark + said[-1]
        rendered = [m | {"content": content} for m, content in zip(messages, said, strict=True)]
        text, goes_on = chat.render(self.template, rendered, self.variables), None in contents or part == "end"
        if goes_on or part == "begin":
            before, found, after = text.rpartition(mark)
            if not found:
                raise ValueError("the checkpoint's chat template leaves messages out, so a conversation cannot go on")
            text = after if goes_on else before
            if None in contents and self.spelled.match(text.lstrip()):
                text = text.lstrip()  # white space before the end of a turn belongs to the answer
        text = _without_surrogates(text + hide(opening))

        shown = str.maketrans({place: start for start, place in hidden.items()})
        pieces = [(part.translate(shown), token) for part, token in self._split(text, special=True)]
        return self._join(pieces, not goes_on)

    def _cut(self, text: str, formed: set[int]) -> list[str]:
        """A text cut after the first character of the special tokens that its model formed of it: some models hold
        special tokens that text can form."""
        cuts = [m.end() for m in self.spelled.finditer(text) if self.special[m[1]] in formed]
        return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]

    def _split(self, text: str, special: bool) -> list[tuple[str, str | None]]:
        """The text without its added tokens (the special ones or the others) and the spaces that they absorb: its
        parts, each with the token that follows it, None after the last."""
        self.finder.encode_special_tokens = not special
        with _panics():
            found = self.finder.encode(text, add_special_tokens=False)
        pieces, begin = [], 0
        for i, (start, end) in zip(found.ids, found.offsets, strict=True):
            token = self.finder.id_to_token(i)
            # Not <unk> for an unknown character.
            if (token in self.special) == special and text[start:end].strip() == token:
                pieces.append((text[begin:start], token))
                begin = end
        return [*pieces, (text[begin:], None)]

    def _join(self, pieces: list[tuple[str, str | None]], first: bool) -> list[int]:
        """Ids of texts in which nothing is a special token, each with the special token that follows it, if any.

        first: whether nothing stands before the first text.
        """
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        """The text of ids that are in the vocabulary and not special."""
        raise NotImplementedError


class Stream:
    """Decodes ids one at a time. The results of all `push` calls and a final `flush`, joined, equal `decode`."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []  # tokens whose text was returned last, then tokens that wait for the end of theirs
        self.returned = 0  # how many of them were returned

    def push(self, token: int) -> str:
        """The text that this token completes; "" in the middle of a character."""
        if token in self.tokenizer.silent or not 0 <= token < self.tokenizer.vocab_size:
            return ""
        self.ids.append(token)
        text = self._waiting()
        if not text or (text.endswith("\ufffd") and len(self.ids) - self.returned < PENDING):
            return ""
        # A decoder may treat a text's first token differently, so some tokens stay as the context of the next.
        self.ids = self.ids[self.returned :]
        self.returned = len(self.ids)
        return text

    def flush(self) -> str:
        """The rest of the text: U+FFFD if its last character is unfinished, else ""."""
        text, self.returned = self._waiting(), len(self.ids)
        return text

    def _waiting(self) -> str:
        decode = self.tokenizer._decode
        return decode(self.ids)[len(decode(self.ids[: self.returned])) :]


class JsonTokenizer(Tokenizer):
    """A tokenizer.json of any kind, or vocab.json and merges.txt, run by the package tokenizers."""

    def __init__(self, folder: Path, data: bytes):
        whole = present(folder / "tokenizer.json")
        library = self._whole(folder) if whole else self._by_class(folder)
        library.no_truncation()
        library.no_padding()
        listed = {token.content: token for token in library.get_added_tokens_decoder().values()}
        control = {token: _token(token) for token in CONTROL_TOKENS if library.token_to_id(token) is not None}
        library.add_tokens(tokens := self.added(control | listed))
        if any(token.__getstate__() != listed.get(token.content, token).__getstate__() for token in tokens):
            # The package forgets no flag that a token had: it stays special, and keeps its normalized text.
            library = tokenizers.Tokenizer.from_str(library.to_str())
        for content, i in self.given.items():
            if library.token_to_id(content) != i:
                raise ValueError(f"the files in {folder} give the token {content!r} two ids, one of them {i}")
        if not whole:
            bos, eos = (
                self.config.get(f"add_{key}", False) and self.variables.get(key) for key in ("bos_token", "eos_token")
            )
            around = [token for token in (bos, "$A", eos) if token]
            ids = [(token, library.token_to_id(token)) for token in {bos, eos} if token]
            library.post_processor = processors.TemplateProcessing(around, special_tokens=ids)
        known = library.get_vocab(with_added_tokens=True)
        token_of = {i: token for token, i in known.items()}
        for token in known.keys() - token_of.values():
            i = known[token]
            raise ValueError(f"{folder} is damaged: the tokens {token!r} and {token_of[i]!r} get the same id {i}")
        tokens = library.get_added_tokens_decoder().values()
        super().__init__(folder, known, {token.content for token in tokens if token.special})
        self.finder = library
        # A normalizer that puts a space before each text puts it before a normalized token, which absorbs it.
        names = [MARK, CUT, BEFORE]
        library.add_tokens([AddedToken(name, normalized=name == BEFORE) for name in names])
        if min(map(library.token_to_id, names)) < self.vocab_size:
            # The package numbers added tokens from the size of the vocabulary on, which is below its highest id if the
            # ids have gaps. A token of the vocabulary keeps its id, so all become one, and the names get higher ids.
            state = json.loads(library.to_str())
            state["model"]["vocab"] = known | dict(zip(names, count(self.vocab_size)))
            self.finder = library = tokenizers.Tokenizer.from_str(json.dumps(state))
        self.mark, *self.nothing = map(library.token_to_id, names)
        both = self.encode("")
        before = commonprefix([both, self.encode("a")])
        self.around = before, both[len(before) :]

    def _whole(self, folder: Path) -> tokenizers.Tokenizer:
        self.read_settings(folder)
        path = folder / "tokenizer.json"
        data = read_bytes(path)
        try:
            with _panics():
                return tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the package raises no narrower type
            raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:300]}") from None

    def _by_class(self, folder: Path) -> tokenizers.Tokenizer:
        """The tokenizer that transformers' class makes of vocab.json and merges.txt."""
        name = str(read_json(folder / "tokenizer_config.json", missing={}).get("tokenizer_class"))
        if name.removesuffix("Fast") not in CLASSES:
            known = f"vocab.json and merges.txt of {' and '.join(CLASSES)} alone are read, and its class is {name!r}"
            raise ValueError(f"{folder} has no tokenizer.json: {known}; save it with transformers' AutoTokenizer")
        form, patterns, defaults = CLASSES[name.removesuffix("Fast")]
        self.read_settings(folder, defaults)
        lines = read_bytes(folder / "merges.txt").decode(errors="replace").split("\n")
        merges = [tuple(line.split()) for line in lines if line.strip() and not line.startswith("#version")]
        try:
            library = tokenizers.Tokenizer(models.BPE(read_json(folder / "vocab.json"), merges))
        except Exception as error:  # the package raises no narrower type
            raise ValueError(
                f"vocab.json or merges.txt in {folder} is damaged ({' '.join(str(error).split())[:300]})"
            ) from None
        set_byte_level(library, patterns, bool(self.config.get("add_prefix_space")))
        library.normalizer = form
        return library

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return self._join([(_without_surrogates(text), None)], bos, bos)

    def _join(self, pieces: list[tuple[str, str | None]], first: bool, bos: bool = False) -> list[int]:
        def run(change: Callable[[str], str]) -> tokenizers.Encoding:
            text = MARK.join(change(part) for part, _ in pieces)
            with _panics():
                return self.finder.encode(text if first else BEFORE + text, add_special_tokens=bos)

        self.finder.encode_special_tokens = True
        found = run(str)
        pairs = zip(found.ids, found.special_tokens_mask, strict=True)
        if formed := {i for i, after in pairs if i in self.silent and not after}:
            found = run(lambda part: CUT.join(self._cut(part, formed)))
        tokens = (self.special[token] for _, token in pieces if token is not None)
        return [next(tokens) if i == self.mark else i for i in found.ids if i not in self.nothing]

    def _decode(self, ids: list[int]) -> str:
        with _panics():
            return self.finder.decode(ids, skip_special_tokens=False)


class ByteTokenizer(Tokenizer):
    """A tokenizer.model: a vocabulary of byte strings, and added tokens that the JSON files beside it list."""

    strips = False  # whether decoding drops the one leading space that encoding adds

    def __init__(self, folder: Path, vocab: dict[str, int], pieces: dict[int, bytes], special: set[str]):
        """pieces: id -> the bytes it prints."""
        tokens = self.added({token: _token(token) for token in special})
        self.ids = vocab | self.given
        free = count(max(self.ids.values()) + 1)
        self.ids |= {token.content: next(free) for token in tokens if token.content not in self.ids}
        if clash := [t for t in self.given if self.given[t] in pieces and vocab.get(t) != self.given[t]]:
            raise ValueError(f"the files in {folder} give {clash[0]!r} the id {self.given[clash[0]]} of another token")
        super().__init__(folder, self.ids, {token.content for token in tokens if token.special})
        self.pieces = pieces | {self.ids[token.content]: token.content.encode() for token in tokens}
        # The package tokenizers finds added tokens, with a model that knows no other token.
        self.finder = tokenizers.Tokenizer(tokenizers.models.BPE())
        self.finder.add_tokens(tokens)
        self.legacy = self.config.get("legacy", True)  # whether a text after an added token counts as a first one
        bos, eos = (self.variables.get(key) for key in ("bos_token", "eos_token"))
        before = [self.ids[bos]] if bos and self.config.get("add_bos_token", True) else []
        after = [self.ids[eos]] if eos and self.config.get("add_eos_token", False) else []
        self.around = before, after

    def encode(self, text: str, bos: bool = True) -> list[int]:
        before, after = self.around if bos else ([], [])
        return before + self._join([(_without_surrogates(text), None)], bos) + after

    def _join(self, pieces: list[tuple[str, str | None]], first: bool) -> list[int]:
        ids: list[int] = []
        for text, after in pieces:
            *parts, (rest, _) = self._split(text, special=False)
            for part, token in [*parts, (rest, after)]:
                ids += self._model(part, self.legacy if ids else first)
                ids += [] if token is None else [self.ids[token]]
        return ids

    def _model(self, text: str, spaced: bool) -> list[int]:
        """Ids of a text without added tokens. spaced: whether a sentencepiece model adds a space to it."""
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        text = b"".join(self.pieces.get(i, b"") for i in ids).decode(errors="replace")
        return text.removeprefix(" ") if self.strips else text


class PieceTokenizer(ByteTokenizer):
    """A sentencepiece model. It adds a space at the beginning of each text, also if the text begins with one.

    In a chat, a text after a special token counts as one too, unless tokenizer_config.json says `"legacy": false`: so
    transformers 4 read it, with which models were fine-tuned. A model trained without that space adds none.
    """

    def __init__(self, folder: Path, data: bytes):
        self.read_settings(folder)
        try:
            self.sp = sp = sentencepiece.SentencePieceProcessor(model_proto=data)
            # Concatenated protobuf messages merge; these bytes set normalizer_spec.add_dummy_prefix to false.
            self.bare = sentencepiece.SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")
        except (RuntimeError, ValueError) as error:
            path = folder / "tokenizer.model"
            raise ValueError(f"{path} is neither a sentencepiece model nor a rank file ({error})") from None
        if self.config.get("add_prefix_space") is False:
            self.sp = self.bare
        self.strips = self.sp.normalize("a") != self.bare.normalize("a")
        vocab, pieces, special = {}, {}, set()
        for i in range(sp.get_piece_size()):
            piece = sp.id_to_piece(i)
            vocab[piece] = i
            pieces[i] = bytes([int(piece[1:-1], 16)]) if sp.is_byte(i) else piece.replace("▁", " ").encode()
            if sp.is_control(i) or sp.is_unknown(i) or piece in CONTROL_TOKENS:
                special.add(piece)
        for key, i in (("bos_token", sp.bos_id()), ("eos_token", sp.eos_id())):
            if i >= 0:
                self.variables.setdefault(key, sp.id_to_piece(i))
        super().__init__(folder, vocab, pieces, special)

    def _model(self, text: str, spaced: bool) -> list[int]:
        sp = self.sp if spaced else self.bare
        ids = sp.encode(text)
        if formed := self.silent.intersection(ids):
            start, *rest = self._cut(text, formed)
            ids = sp.encode(start) + [i for part in rest for i in self.bare.encode(part)]
        return ids


class RankTokenizer(ByteTokenizer):
    """Llama 3's own format: each line holds a token in base64 and its rank, which is its id. tiktoken runs it."""

    def __init__(self, folder: Path, data: bytes):
        self.read_settings(folder)
        pieces = {}
        try:
            for line in data.splitlines():
                token, rank = line.split()
                pieces[int(rank)] = base64.b64decode(token, validate=True)
            if list(pieces) != list(range(len(pieces))):
                raise ValueError("the ranks are not 0, 1, 2, ...")
            ranks = {piece: i for i, piece in pieces.items()}
            if len(ranks) < len(pieces) or not all(bytes([i]) in ranks for i in range(256)):
                raise ValueError("a byte has no token, or two tokens are the same bytes")
        except ValueError as error:
            raise ValueError(f"{folder / 'tokenizer.model'} is damaged: line {len(pieces) + 1} ({error})") from None
        self.bpe = tiktoken.Encoding("ranks", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
        special = {token: len(pieces) + i for i, token in LLAMA3_SPECIAL.items()}
        self.variables = {"bos_token": LLAMA3_SPECIAL[0], "eos_token": LLAMA3_SPECIAL[1], **self.variables}
        super().__init__(folder, special, pieces, set(special))

    def _model(self, text: str, spaced: bool) -> list[int]:
        cuts = [match.end() for match in LONG_RUN.finditer(text)]
        with _panics():
            return [i for a, b in pairwise([0, *cuts, len(text)]) for i in self.bpe.encode_ordinary(text[a:b])]


def set_byte_level(library: tokenizers.Tokenizer, patterns: Iterable[str], space: bool = False) -> None:
    """Makes a BPE model's words those into which `patterns` (none: GPT-2's) cut a text one after the other, in bytes.

    space: whether a text that begins with none gets one.
    """
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    in_bytes = pre_tokenizers.ByteLevel(space, use_regex=not splits)
    library.pre_tokenizer, library.decoder = pre_tokenizers.Sequence([*splits, in_bytes]), decoders.ByteLevel()


def _template(folder: Path, config: dict) -> str:
    """The chat template: chat_template.jinja, the config's text, or the one named `default` of the config's texts."""
    path = folder / "chat_template.jinja"
    found = read_bytes(path).decode() if present(path) else config.get("chat_template", "")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        found = found.get("default", "{{ raise_exception('none of its templates is named default') }}")
    if not isinstance(found, str):
        raise TypeError("chat_template")
    return found


def _first_turn(user: str, system: str | None) -> list[dict[str, str]]:
    said = [] if system is None else [{"role": "system", "content": system}]
    return [*said, {"role": "user", "content": user}]


def _say_differences(own: dict, mapped: dict, decided: bool) -> None:
    """Says which special tokens two files give different texts, and which file counts."""
    files = [("tokenizer_config.json", own), ("special_tokens_map.json", mapped)]
    (won, kept), (lost, other) = files if decided else files[::-1]
    both = {
        key: [_token(f[key]).content for f in (kept, other)] for key in VARIABLES if own.get(key) and mapped.get(key)
    }
    if said := [f"{key} is {token!r}, not {was!r}" for key, (token, was) in both.items() if token != was]:
        print(f"{won} counts, not {lost}: {', '.join(said)}", file=sys.stderr)


def _token(value: str | dict, special: bool = True) -> AddedToken:
    """A token as JSON files write it: its text, or an object with its flags."""
    flags = {"content": value} if isinstance(value, str) else {k: v for k, v in value.items() if k != "__type"}
    if not flags["content"]:
        raise TypeError("a token without text")
    return AddedToken(**flags | {"special": special})


def _without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which UTF-8 cannot write."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@contextmanager
def _panics() -> Iterator[None]:
    """Turns a panic in tiktoken or tokenizers into a ValueError: a regular expression exceeded their step limit."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer's patterns cannot split this text ({str(error)[:100]})") from None
