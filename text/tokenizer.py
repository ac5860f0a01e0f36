"""Converts text to token ids and back (sentencepiece, tiktoken rank files, tokenizer.json); encodes chat turns.

Ids equal those of transformers, but nothing in a user's text ever becomes a special token: a typed "<|eot_id|>" or
"</s>" is plain text. Apart from BOS, only `Tokenizer.chat` and the other chat_* methods insert control tokens.
"""

import base64
import codecs
import json
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import regex
import sentencepiece
import tiktoken

from runtime.checkpoint import present, read_json
from text import chat

# A split pattern keeps a run of one kind of characters together, and tiktoken's regex engine gives up on a run of some
# 500,000 spaces. A run shorter than MAX_RUN is never cut; one of 2 MAX_RUN characters or more always is.
MAX_RUN = 25_000
ONE_KIND = regex.compile(r"[\p{L}\p{M}]+|\p{N}+|\s+|[^\s\p{L}\p{N}]+")

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
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
RANK_LINE = regex.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")

# Tokens that end an answer in every vocabulary that has them, whichever one the checkpoint's settings call EOS.
END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


SECONDS = 10  # time limit for splitting a text by one pattern, plus one second per 10,000 characters
MAX_ID = 2**22  # ids must be below this: a larger table of tokens would fill the memory

# As in the tokenizers package: characters that may not touch a single_word token, and what lstrip and rstrip absorb.
WORD = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]")
SPACES = regex.compile(r"\p{White_Space}*")
PRIVATE = range(0xE000, 0xF900)  # Unicode's private-use characters, which have no meaning
# The variables of a chat template.
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class UnsupportedTokenizer(ValueError):
    """An intact tokenizer of a kind that this module cannot read. The model still accepts token ids."""


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Reads the tokenizer of a checkpoint folder.

    Raises FileNotFoundError if the folder has none, ValueError if a file is damaged, and UnsupportedTokenizer, a
    ValueError, if it is of an unsupported kind.
    """
    folder = Path(folder)
    files = Files.read(folder)
    # A byte-level tokenizer.json is the original and has the special tokens, which a rank file beside it lacks.
    # A tokenizer.json beside a sentencepiece model is only a conversion of that model, so the model is read instead.
    if files.byte_level:
        try:
            return _from_json(files)
        except UnsupportedTokenizer as error:
            return _from_library(files, str(error))
    path = folder / "tokenizer.model"
    if present(path):
        data = path.read_bytes()
        return (_from_ranks if RANK_LINE.match(data) else SentencePieceTokenizer)(files, path, data)
    if files.json:
        model = files.json["model"]
        kind = f"{model.get('type')}{' with byte fallback' if model.get('byte_fallback') else ''}"
        return _from_library(files, f"{files.json_path} holds a {kind} model, not byte-level BPE")
    raise FileNotFoundError(f"{folder} has no tokenizer: neither tokenizer.model nor tokenizer.json is there")


@dataclass(frozen=True)
class Added:
    """A token added to the vocabulary. Unless it is special, it is matched in text before anything else."""

    id: int
    special: bool  # never matched in a user's text, never printed
    lstrip: bool = False  # absorbs the white space before it
    rstrip: bool = False  # absorbs the white space after it
    single_word: bool = False  # matched only where no letter or digit touches it
    normalized: bool = False  # matched in the normalized text

    @classmethod
    def of(cls, token: dict, id: object) -> "Added":
        """Reads a file's entry for a token. Raises TypeError, KeyError or ValueError if the entry is invalid."""
        name = token["content"]
        flags = {flag: token.get(flag, False) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
        if not isinstance(name, str) or not name:
            raise TypeError("an added token without content")
        if not all(isinstance(flag, bool) for flag in [token["special"], *flags.values()]):
            raise TypeError(f"a flag of the added token {name!r} is neither true nor false")
        _check_id(name, id)
        return cls(id, token["special"], **flags)


def _check_id(token: str, i: object) -> None:
    if type(i) is not int or not 0 <= i < MAX_ID:
        raise ValueError(f"the token {token!r} has the invalid id {i!r}")


@dataclass
class Files:
    """What a checkpoint folder's JSON files say about its tokenizer; empty where a file is missing."""

    json_path: Path
    json: dict  # tokenizer.json
    config: dict  # tokenizer_config.json, over special_tokens_map.json
    template: str  # the chat template, or ""
    first: str | None  # the token that tokenizer.json's post-processor puts before a text
    added: dict[str, Added]

    @classmethod
    def read(cls, folder: Path) -> "Files":
        data, own = _read_json(folder / "tokenizer.json"), _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "special_tokens_map.json")
        config.update((key, value) for key, value in own.items() if value is not None)
        try:
            # This oldest format does not mark special tokens. None of its tokens is a word, so all count as special.
            oldest = _read_json(folder / "added_tokens.json")
            listed = [({"content": token, "special": True}, i) for token, i in oldest.items()]
            listed += [(token, token["id"]) for token in data.get("added_tokens") or []]
            listed += [(token, int(i)) for i, token in config.get("added_tokens_decoder", {}).items()]
            added = {token["content"]: Added.of(token, i) for token, i in listed}
            for token in chat.CONTROL_TOKENS & added.keys():
                added[token] = replace(added[token], special=True)
            first, after = None, data.get("post_processor") or {}
            for step in after.get("processors", [after]):
                if step.get("type") == "TemplateProcessing":
                    first = step["single"][0].get("SpecialToken", {}).get("id")
            if data and not isinstance(data["model"], dict):
                raise TypeError("model")
            files = cls(folder / "tokenizer.json", data, config, _template(folder, config), first, added)
            if not all(isinstance(files.token(key), str | None) for key in VARIABLES):
                raise TypeError("a token that is not text")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"tokenizer.json or tokenizer_config.json in {folder} is damaged ({error!r})") from None
        return files

    @property
    def byte_level(self) -> bool:
        model = self.json.get("model", {})
        splits_bytes = '"ByteLevel"' in json.dumps(self.json.get("pre_tokenizer"))
        return model.get("type", "BPE") == "BPE" and splits_bytes and not model.get("byte_fallback")

    def token(self, key: str) -> str | None:
        """The token of a key such as bos_token, whether stored as a string or as an object."""
        value = self.config.get(key)
        return value.get("content") if isinstance(value, dict) else value


def _read_json(path: Path) -> dict:
    return read_json(path) if present(path) else {}


def _template(folder: Path, config: dict) -> str:
    """The chat template: chat_template.jinja, the config's text, or the one named `default` of the config's texts."""
    path = folder / "chat_template.jinja"
    found = path.read_text(encoding="utf-8") if present(path) else config.get("chat_template", "")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    if isinstance(found, dict):
        found = found.get("default", "{{ raise_exception('none of its templates is named default') }}")
    if not isinstance(found, str):
        raise TypeError("chat_template")
    return found


class Tokenizer:
    """The tokenizer of one checkpoint, made by `load_tokenizer`.

    vocab_size: highest id + 1. bos_id, eos_id: None if there is none. eos_ids: every id that ends an answer, including
    a chat's end of turn. special: token -> id of special tokens. added: token -> id of other added tokens.
    """

    strips = False  # whether decoding drops the one leading space that encoding adds

    def __init__(self, files: Files, vocab: dict[str, int], pieces: dict[int, bytes], special: set[str]):
        """vocab: token -> id. pieces: id -> the bytes it prints. special: the special tokens of `vocab`.

        Raises ValueError for an invalid id.
        """
        vocab = {**vocab, **{token: added.id for token, added in files.added.items()}}
        for token, i in vocab.items():
            try:
                _check_id(token, i)
            except ValueError as error:
                raise ValueError(f"the tokenizer in {files.json_path.parent} is damaged: {error}") from None
        self.special = {token: vocab[token] for token in special}
        self.special |= {token: added.id for token, added in files.added.items() if added.special}
        self.added = {token: i.id for token, i in files.added.items() if token not in self.special}
        self.tokens = {token: Added(i, special=True) for token, i in self.special.items()} | {
            token: replace(added, special=token in self.special) for token, added in files.added.items()
        }
        pieces = {**pieces, **{i: token.encode("utf-8", "replace") for token, i in self.added.items()}}
        silent = set(self.special.values())
        self.vocab_size = max(vocab.values()) + 1
        self.pieces = [b"" if i in silent else pieces.get(i, b"") for i in range(self.vocab_size)]

        self.bos_id = vocab.get(files.token("bos_token") or files.first)
        self.eos_id = vocab.get(files.token("eos_token"))
        self.eos_ids = {self.special[token] for token in END_TOKENS if token in self.special} | {self.eos_id} - {None}
        # A tokenizer.json overrides add_bos_token, as in transformers. With neither, Llama's default applies.
        add_bos = files.first if files.json else files.config.get("add_bos_token", True)
        self.add_bos = bool(add_bos) and self.bos_id is not None

        self.variables = {key: token for key in VARIABLES if (token := files.token(key)) is not None}
        fitting = (template for tokens, template in chat.DEFAULTS.values() if self.special.keys() >= set(tokens))
        self.template = files.template or next(fitting, "")
        # Special tokens are matched only in templates, and verbatim. Of the others, `late` ones are normalized and
        # matched in normalized text.
        late = {t: a for t, a in self.tokens.items() if a.normalized and not a.special}
        self.early = {token: added for token, added in self.tokens.items() if token not in late}
        self.late = {self._normalize(token): added for token, added in late.items()}
        self.early_split, self.late_split = _any_of(self.early), _any_of(self.late)
        self.special_start = regex.compile(f"(?={_any_of(self.special).pattern})(.)", regex.DOTALL)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text of any length, after BOS if `bos` is set and this checkpoint's tokenizer adds one.

        A byte-level tokenizer may cut a run of MAX_RUN (25,000) or more letters, digits, spaces or symbols into shorter
        runs, which can change a token or two at each cut. Any other text is encoded whole.
        """
        return [self.bos_id] * (bos and self.add_bos) + self._encode(text)

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
        said = [] if system is None else [{"role": "system", "content": system}]
        return self._turns([*said, {"role": "user", "content": user}], opening)

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
        said = [] if system is None else [{"role": "system", "content": system}]
        return self._turns([*said, {"role": "user", "content": user}], part="begin")

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
        free = (chr(i) for i in PRIVATE if chr(i) not in used)
        # In messages, the first character of special tokens is replaced until the template's own tokens are found.
        hidden = {start: next(free) for start in sorted({token[0] for token in self.special})}
        mark, first = next(free), True

        def hide(text: str) -> str:
            return self.special_start.sub(lambda match: hidden[match[0]], text)

        said = [mark if content is None else hide(content) for content in contents]
        if part != "whole":
            said[-1] = said[-1] + mark if part == "begin" else mark + said[-1]
        rendered = [m | {"content": content} for m, content in zip(messages, said, strict=True)]
        text = chat.render(self.template, rendered, self.variables)
        if None in contents or part != "whole":
            before, found, after = text.rpartition(mark)
            if not found:
                raise ValueError("the checkpoint's chat template leaves messages out, so a conversation cannot go on")
            text, first = (before, True) if part == "begin" else (after, False)
            if None in contents and self.early_split.match(text.lstrip()):
                text = text.lstrip()  # white space before the end of a turn belongs to the answer
        shown = str.maketrans({place: start for start, place in hidden.items()})
        return self._encode(text + hide(opening), first, shown)

    def _encode(self, text: str, first: bool = True, hidden: dict[int, str] | None = None) -> list[int]:
        """Ids of a text. `first`: no token precedes it. With `hidden` (replacement -> original character), special
        tokens are matched, and then replaced characters are restored."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a lone surrogate becomes U+FFFD
        ids = []
        for part in _sections(text, self.early, self.early_split, hidden is not None):
            if isinstance(part, int):
                ids.append(part)
                continue
            part = self._normalize(part.translate(hidden or {}))
            for piece in _sections(part, self.late, self.late_split, False):
                ids += [piece] if isinstance(piece, int) else self._bpe(piece, first and not ids)
        return ids

    def _normalize(self, text: str) -> str:
        return text

    def _bpe(self, text: str, first: bool) -> list[int]:
        raise NotImplementedError


def _any_of(tokens: dict[str, object]) -> regex.Pattern:
    """A pattern for the longest token at a position; it matches nothing if there are no tokens."""
    return regex.compile("|".join(map(regex.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _sections(text: str, tokens: dict[str, Added], split: regex.Pattern, special: bool) -> Iterator[str | int]:
    """Splits a text into ids of added tokens and the texts between them; matches special tokens only if `special`."""
    if not special and all(added.special for added in tokens.values()):
        yield text
        return
    begin = 0
    for match in split.finditer(text):
        added, (start, end) = tokens[match[0]], match.span()
        if added.special and not special:
            continue
        if added.single_word and (WORD.match(text[start - 1 : start]) or WORD.match(text, end)):
            continue
        while added.lstrip and start > begin and SPACES.fullmatch(text, start - 1, start):
            start -= 1
        if added.rstrip:
            end = SPACES.match(text, end).end()
        if begin < start:
            yield text[begin:start]
        yield added.id
        begin = end
    if begin < len(text) or not text:
        yield text[begin:]


class Stream:
    """Decodes ids one at a time. The results of all `push` calls and a final `flush`, joined, equal `decode`."""

    def __init__(self, tokenizer: Tokenizer):
        self.pieces, self.strips = tokenizer.pieces, tokenizer.strips
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes; "" in the middle of a character."""
        return self._text(self.pieces[token] if 0 <= token < len(self.pieces) else b"")

    def flush(self) -> str:
        """The rest of the text: U+FFFD if its last character is unfinished, else ""."""
        return self._text(b"", final=True)

    def _text(self, piece: bytes, final: bool = False) -> str:
        text = self.utf8.decode(piece, final)
        if self.strips and text:
            text, self.strips = text.removeprefix(" "), False
        return text


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model that handles leading spaces like transformers' LlamaTokenizer.

    A space is added before a text's first word. Unlike in plain sentencepiece, none is added if the text already begins
    with one: " hi" encodes like "hi". In a chat, text after a control token gets a space only if tokenizer_config.json
    says `"legacy": true` (Meta's own Llama 2 code always adds it). If the model was trained without that space, none is
    added anywhere; transformers would add it.
    """

    def __init__(self, files: Files, path: Path, data: bytes):
        try:
            self.sp = sentencepiece.SentencePieceProcessor(model_proto=data)
            # Concatenated protobuf messages merge; these bytes set normalizer_spec.add_dummy_prefix to false.
            self.bare = sentencepiece.SentencePieceProcessor(model_proto=data + b"\x1a\x02\x18\x00")
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is neither a sentencepiece model nor a rank file ({error})") from None
        if files.config.get("add_prefix_space") is False:
            self.sp = self.bare
        self.strips = self.sp.normalize("a") != self.bare.normalize("a")
        self.legacy = bool(files.config.get("legacy"))
        sp, vocab, pieces, special = self.sp, {}, {}, set()
        for i in range(sp.get_piece_size()):
            piece = sp.id_to_piece(i)
            vocab[piece] = i
            pieces[i] = bytes([int(piece[1:-1], 16)]) if sp.is_byte(i) else piece.replace("▁", " ").encode()
            if sp.is_control(i) or sp.is_unknown(i) or piece in chat.CONTROL_TOKENS:
                special.add(piece)
        for key, i in (("bos_token", sp.bos_id()), ("eos_token", sp.eos_id())):
            if i >= 0:
                files.config.setdefault(key, sp.id_to_piece(i))
        super().__init__(files, vocab, pieces, special)
        # Text never encodes to control pieces, but some models store chat tokens as pieces of another type. Text that
        # spells one of these is cut after its first character.
        seen = [token for token, i in self.special.items() if i in sp.encode(token)]
        self.lookalike = regex.compile("|".join(map(regex.escape, seen))) if seen else None

    def _bpe(self, text: str, first: bool) -> list[int]:
        cuts = [match.start() + 1 for match in self.lookalike.finditer(text)] if self.lookalike else []
        parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        spaced = self.bare.normalize(parts[0][:1]) == "▁"
        sp = self.sp if (first or self.legacy) and not spaced else self.bare
        return sp.encode(parts[0]) + [i for part in parts[1:] for i in self.bare.encode(part)]


class ByteLevelTokenizer(Tokenizer):
    """Byte-level BPE, run by tiktoken.

    tiktoken has no merge list: it joins the neighbors that form the token of lowest rank. So ranks follow the order of
    the merges, and `order` maps a rank to the checkpoint's id of the token.
    """

    def __init__(
        self,
        files: Files,
        path: Path,
        vocab: dict[str, int],
        pieces: dict[int, bytes],
        order: list[int],
        splits: list[str],
        form: str | None = None,
    ):
        """order: ids by rank. splits: patterns that split a text, in turn. form: a Unicode normal form such as NFC."""
        ranks = {pieces[i]: rank for rank, i in enumerate(order)}
        missing = [i for i in range(256) if bytes([i]) not in ranks]
        if missing or len(ranks) < len(order):
            what = f"no token for the byte 0x{missing[0]:02x}" if missing else "two tokens are the same bytes"
            raise ValueError(f"{path} is damaged: {what}")
        self.order, self.lengths, self.form = order, list(map(len, ranks)), form
        *self.splits, last = splits or [r"[\s\S]+"]
        # tiktoken drops text that its pattern does not match; the second alternative keeps it, as one piece.
        pattern = f"{last}|(?:(?!{last})[\\s\\S])+"
        try:
            self.bpe = tiktoken.Encoding(str(path), pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        super().__init__(files, vocab, pieces, special=set())

    def _normalize(self, text: str) -> str:
        return unicodedata.normalize(self.form, text) if self.form else text

    def _bpe(self, text: str, first: bool) -> list[int]:
        try:
            with panics():
                return self._split_and_merge(text)
        except TimeoutError:
            raise ValueError(
                f"splitting a text of {len(text)} characters by the tokenizer's patterns takes more than {SECONDS} s"
            ) from None

    def _split_and_merge(self, text: str) -> list[int]:
        parts, ids = [text], []
        for split in self.splits:  # tiktoken applies the last pattern itself, and limits the steps of a match
            timeout = SECONDS + len(text) / 10_000
            parts = [piece for part in parts for piece in _isolated(split, part, timeout)]
        for part in parts:
            middles = range(MAX_RUN, len(part) - MAX_RUN // 2 + 1, MAX_RUN)
            cuts = [i for i in middles if ONE_KIND.fullmatch(part, i - MAX_RUN // 2, i + MAX_RUN // 2)]
            for a, b in pairwise([0, *cuts, len(part)]):
                ids += self.bpe.encode_ordinary(part[a:b])
        if sum(self.lengths[rank] for rank in ids) != len(text.encode()):
            raise ValueError("the tokenizer's patterns leave out a part of this text")
        return [self.order[rank] for rank in ids]


def _isolated(pattern: str, text: str, timeout: float) -> Iterator[str]:
    """Splits a text into a pattern's matches and the texts between them. Raises TimeoutError."""
    begin = 0
    for match in regex.finditer(pattern, text, timeout=timeout):
        yield from filter(None, (text[begin : match.start()], match[0]))
        begin = match.end()
    yield from filter(None, (text[begin:],))


@contextmanager
def panics() -> Iterator[None]:
    """Turns a panic in tiktoken or tokenizers into a ValueError: a regular expression exceeded their step limit."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer's patterns cannot split this text ({str(error)[:100]})") from None


class LibraryTokenizer(Tokenizer):
    """A tokenizer.json of a kind that only the tokenizers package reads, such as sentencepiece BPE with byte fallback.

    The package matches the added tokens of a text, except special ones, which the base class matches.
    """

    def __init__(self, files: Files, text: str):
        """text: of tokenizer.json. Raises UnsupportedTokenizer if ids cannot be decoded one at a time."""
        import tokenizers

        decoder = json.dumps(files.json.get("decoder"))
        kinds = set(regex.findall(r'"type": "(\w+)"', decoder))
        if not kinds or not kinds <= {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "ByteLevel"}:
            raise UnsupportedTokenizer(f"its decoder {decoder} is not supported")
        self.strips = "Strip" in kinds or ("Metaspace" in kinds and '"never"' not in decoder)
        try:
            with panics():
                self.start = tokenizers.Tokenizer.from_str(text)
                # If only a text's first word gets a leading space, text after a special token gets none.
                inner = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
                self.inner = tokenizers.Tokenizer.from_str(inner)
        except Exception as error:  # the package raises no narrower type
            raise ValueError(f"the package tokenizers cannot read it: {error}") from None
        for library in (self.start, self.inner):
            library.no_truncation()
            library.no_padding()
            library.encode_special_tokens = True
        vocab = self.start.get_vocab(with_added_tokens=False)
        known = self.start.get_vocab(with_added_tokens=True)
        lost = [token for token, added in files.added.items() if known.get(token) != added.id]
        if lost:
            raise UnsupportedTokenizer(f"it lacks the added token {lost[0]!r} of tokenizer_config.json")
        if "ByteLevel" in kinds:
            pieces = {i: _bytes_of(token) for token, i in vocab.items()}
        else:
            pieces = {i: _sentencepiece_bytes(token) for token, i in vocab.items()}
        super().__init__(files, vocab, pieces, special=set())
        self.early = {token: added for token, added in self.tokens.items() if added.special}
        self.late, self.early_split = {}, _any_of(self.special)

    def _bpe(self, text: str, first: bool) -> list[int]:
        with panics():
            return (self.start if first else self.inner).encode(text, add_special_tokens=False).ids


def _from_ranks(files: Files, path: Path, data: bytes) -> Tokenizer:
    """Reads Llama 3's own format: each line holds a token in base64 and its rank, which is its id."""
    pieces = {}
    try:
        for line in data.splitlines():
            token, rank = line.split()
            pieces[int(rank)] = base64.b64decode(token, validate=True)
        if list(pieces) != list(range(len(pieces))):
            raise ValueError("the ranks are not 0, 1, 2, ...")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: line {len(pieces) + 1} ({error})") from None
    if max((added.id for added in files.added.values()), default=0) < len(pieces):
        files.added.update((token, Added(len(pieces) + i, special=True)) for i, token in LLAMA3_SPECIAL.items())
        files.config.setdefault("bos_token", LLAMA3_SPECIAL[0])
        files.config.setdefault("eos_token", LLAMA3_SPECIAL[1])
    return ByteLevelTokenizer(files, path, {}, pieces, list(pieces), [LLAMA3_SPLIT])


# A byte-level vocabulary writes printable bytes as themselves and the others, in order, as characters from 256 on.
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE = {chr(i): i for i in PLAIN} | {chr(256 + n): i for n, i in enumerate(i for i in range(256) if i not in PLAIN)}


def _bytes_of(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary prints."""
    return bytes(BYTE[c] for c in token) if BYTE.keys() >= set(token) else token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    """The bytes that a token of a sentencepiece vocabulary prints: <0x0A> is a byte, and ▁ a space."""
    byte = regex.fullmatch("<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _from_library(files: Files, why: str) -> Tokenizer:
    """Reads tokenizer.json with the tokenizers package, if installed. `why`: the reason it is not read here."""
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise UnsupportedTokenizer(
            f"{why}; install the package that reads it (pip install tokenizers), or put the checkpoint's "
            f"sentencepiece tokenizer.model beside it: {files.json_path}"
        ) from None
    try:
        return LibraryTokenizer(files, json.dumps(files.json))
    except UnsupportedTokenizer as error:
        raise UnsupportedTokenizer(f"{files.json_path} is not read: {error}") from None
    except ValueError as error:
        raise ValueError(f"{why}, and {error}") from None


def _from_json(files: Files) -> Tokenizer:
    path, model = files.json_path, files.json["model"]
    try:
        vocab = model["vocab"]
        pieces = {i: _bytes_of(token) for token, i in vocab.items()}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        tokens = dict.fromkeys([*BYTE, *(left + right for left, right in merges)])  # in rank order, each once
        if model.get("ignore_merges"):  # then a whole word becomes its token even if no merge forms it
            tokens |= dict.fromkeys(token for token in vocab if token not in files.added)
        order = [vocab[token] for token in tokens]
        splits = _splits(files.json.get("pre_tokenizer"))
        form = (files.json.get("normalizer") or {}).get("type")
        if form not in (None, "NFC", "NFD", "NFKC", "NFKD"):
            raise UnsupportedTokenizer(f"its normalizer {form} is not supported")
    except UnsupportedTokenizer as error:
        raise UnsupportedTokenizer(f"{path} cannot be read: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path} is damaged: {error} is missing") from None
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return ByteLevelTokenizer(files, path, vocab, pieces, order, splits, form)


def _splits(step: dict) -> list[str]:
    """The patterns by which a pre-tokenizer splits text, in order."""
    match step:
        case {"type": "Sequence", "pretokenizers": steps}:
            return [split for step in steps for split in _splits(step)]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            if not pattern:
                raise ValueError("an empty pattern splits nothing")
            try:
                empty = regex.match(pattern, "")
            except regex.error as error:
                raise UnsupportedTokenizer(f"its pattern {pattern!r} is not supported ({error})") from None
            if empty:
                raise UnsupportedTokenizer(f"its pattern {pattern!r}, which an empty text matches, is not supported")
            return [pattern]
        case {"type": "Digits", "individual_digits": alone}:
            return [r"\p{N}" if alone else r"\p{N}+"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [GPT2_SPLIT] if step.get("use_regex", True) else []
    raise UnsupportedTokenizer(f"its pre_tokenizer step {json.dumps(step)} is not supported")
