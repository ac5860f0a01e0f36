"""Text to token ids and back: sentencepiece, tiktoken rank files and byte-level tokenizer.json; and chat formats.

Ids are those of transformers, but nothing in a user's text ever becomes a special token: a typed "<|eot_id|>" or
"</s>" is plain text, and only `Tokenizer.chat` and `Tokenizer.chat_next` put control tokens in.
"""

import base64
import codecs
import json
import unicodedata
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import regex
import sentencepiece
import tiktoken

from checkpoint import read_json

# A split pattern keeps a run of one of these together, and tiktoken's regex engine gives up on a run of some 500,000
# spaces: a run of fewer characters than MAX_RUN is never cut, one of twice as many always.
MAX_RUN = 25_000
ONE_KIND = regex.compile(r"[\p{L}\p{M}]+|\p{N}+|\s+|[^\s\p{L}\p{N}]+")

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# A rank file holds neither its split pattern nor its special tokens: Llama 3 keeps both in code.
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

# Tokens that end an answer wherever they exist, whichever of them a checkpoint's settings call EOS.
END_TOKENS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>")


@dataclass(frozen=True)
class ChatFormat:
    """How one family writes a conversation: {} is what somebody says, <s> is BOS and </s> is EOS.

    start, then user ... answer, then end, user ... answer, and so on. `system` is a turn between start and user or,
    if in_turn, precedes what the user says first.
    """

    sign: str  # what a chat template of this format contains
    start: str
    user: str  # up to where the answer begins
    system: str
    end: str  # between an answer and the next user
    control: tuple[str, ...] = ()  # tokens put in by id, which the checkpoint must have
    in_turn: bool = False
    strip: bool = False  # spaces around what is said are dropped
    default_system: str | None = None


CHAT_FORMATS = {
    "llama-3": ChatFormat(
        sign="<|start_header_id|>",
        start="<s>",
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        system="<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        end="<|eot_id|>",
        control=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        strip=True,
    ),
    "chatml": ChatFormat(
        sign="<|im_start|>",
        start="",
        user="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        system="<|im_start|>system\n{}<|im_end|>\n",
        end="<|im_end|>\n",
        control=("<|im_start|>", "<|im_end|>"),
    ),
    "mistral-v0.3": ChatFormat(
        sign="[INST]",
        start="<s>",
        user="[INST] {}[/INST]",
        system="{}\n\n",
        end="</s>",
        control=("[INST]", "[/INST]"),
        in_turn=True,
    ),
    "llama-2": ChatFormat(
        sign="<<SYS>>",
        start="<s>",
        user="[INST] {} [/INST]",
        system="<<SYS>>\n{}\n<</SYS>>\n\n",
        end="</s><s>",
        in_turn=True,
        strip=True,
    ),
    "mistral": ChatFormat(
        sign="[INST]", start="<s>", user=" [INST] {} [/INST]", system="{}\n\n", end="</s>", in_turn=True
    ),
}
CONTROL_TOKENS = {token for chat in CHAT_FORMATS.values() for token in chat.control}


def load_tokenizer(folder: str | Path) -> "Tokenizer":
    """Reads the tokenizer of a checkpoint folder.

    Raises FileNotFoundError if the folder has none, ValueError if a file is damaged or of a kind that is not read.
    """
    folder = Path(folder)
    files = Files.read(folder)
    # A byte-level tokenizer.json is what the model was published with, special tokens included, which a rank file
    # beside it lacks. Where there is a sentencepiece model the json is a conversion of it: the model is the source.
    if files.byte_level:
        return _from_json(files)
    path = folder / "tokenizer.model"
    if path.is_file():
        data = path.read_bytes()
        return (_from_ranks if RANK_LINE.match(data) else SentencePieceTokenizer)(files, path, data)
    if files.json:
        model = files.json["model"]
        kind = f"{model.get('type')}{' with byte fallback' if model.get('byte_fallback') else ''}"
        raise ValueError(
            f"{files.json_path} holds a {kind} model, not byte-level BPE; "
            "put the checkpoint's sentencepiece tokenizer.model beside it"
        )
    raise FileNotFoundError(f"{folder} has no tokenizer: neither tokenizer.model nor tokenizer.json is there")


@dataclass
class Files:
    """What the JSON files of a checkpoint folder say of its tokenizer; empty where a file is missing."""

    json_path: Path
    json: dict  # tokenizer.json
    config: dict  # tokenizer_config.json, over special_tokens_map.json
    template: str  # the chat template: searched for signs, never executed
    first: str | None  # the token that tokenizer.json's post-processor puts before a text
    added: dict[str, int]  # tokens that were added to the vocabulary
    special: set[str]  # those of them that are special: never met in text, never printed

    @classmethod
    def read(cls, folder: Path) -> "Files":
        data, own = _read_json(folder / "tokenizer.json"), _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "special_tokens_map.json")
        config.update((key, value) for key, value in own.items() if value is not None)
        added = _read_json(folder / "added_tokens.json")
        special = set(added)  # this oldest of the files does not say which are; none of them is a word
        try:
            listed = [{**token, "id": int(i)} for i, token in config.get("added_tokens_decoder", {}).items()]
            for token in [*(data.get("added_tokens") or []), *listed]:
                added[token["content"]] = token["id"]
                (special.add if token["special"] else special.discard)(token["content"])
            special |= CONTROL_TOKENS & added.keys()
            template = config.get("chat_template", "")
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
            jinja = folder / "chat_template.jinja"
            template = jinja.read_text(encoding="utf-8") if jinja.is_file() else str(template)
            first, after = None, data.get("post_processor") or {}
            for step in after.get("processors", [after]):
                if step.get("type") == "TemplateProcessing":
                    first = step["single"][0].get("SpecialToken", {}).get("id")
            if data and not isinstance(data["model"], dict):
                raise TypeError("model")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"tokenizer.json or tokenizer_config.json in {folder} is damaged ({error!r})") from None
        return cls(folder / "tokenizer.json", data, config, template, first, added, special)

    @property
    def byte_level(self) -> bool:
        model = self.json.get("model", {})
        splits_bytes = '"ByteLevel"' in json.dumps(self.json.get("pre_tokenizer"))
        return model.get("type", "BPE") == "BPE" and splits_bytes and not model.get("byte_fallback")

    def token(self, key: str) -> str | None:
        """bos_token or eos_token, which is stored bare or as an object."""
        value = self.config.get(key)
        return value.get("content") if isinstance(value, dict) else value


def _read_json(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


class Tokenizer:
    """The tokenizer of one checkpoint; made by `load_tokenizer`.

    vocab_size: highest id + 1. bos_id, eos_id: None if there is none. eos_ids: every id that ends an answer, the chat
    format's end of turn included. chat_format: a key of CHAT_FORMATS, or None.
    """

    strips = False  # decoding drops one leading space: the one that encoding put there

    def __init__(self, files: Files, vocab: dict[str, int], pieces: dict[int, bytes], special: set[str]):
        """vocab: token -> id. pieces: id -> the bytes it prints. special: the tokens of `vocab` that are special."""
        vocab = {**vocab, **files.added}
        self.special = {token: vocab[token] for token in special | files.special}
        self.added = {token: i for token, i in files.added.items() if token not in self.special}
        self.added_split = regex.compile("|".join(map(regex.escape, sorted(self.added, key=len, reverse=True))))
        pieces = {**pieces, **{i: token.encode() for token, i in self.added.items()}}
        silent = set(self.special.values())
        self.vocab_size = max(vocab.values()) + 1
        self.pieces = [b"" if i in silent else pieces.get(i, b"") for i in range(self.vocab_size)]

        self.bos_id = vocab.get(files.token("bos_token") or files.first)
        self.eos_id = vocab.get(files.token("eos_token"))
        self.eos_ids = {self.special[token] for token in END_TOKENS if token in self.special} | {self.eos_id} - {None}
        # A tokenizer.json overrules add_bos_token, as in transformers. With neither, Llama's default counts.
        add_bos = files.first if files.json else files.config.get("add_bos_token", True)
        self.add_bos = bool(add_bos) and self.bos_id is not None
        self.chat_format, self.format = _chat_format(files.template, self.special)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Ids of a text, after BOS if `bos` and if this checkpoint's tokenizer adds one. Any length is taken.

        Byte-level: where MAX_RUN (25,000) or more letters, digits, spaces or symbols follow one another, they are cut
        into shorter runs, which may change a token or two at each cut. Any other text is encoded whole.
        """
        return [self.bos_id] * (bos and self.add_bos) + self._encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids. Special tokens and ids outside the vocabulary are skipped; broken UTF-8 becomes U+FFFD."""
        stream = self.stream()
        return "".join(map(stream.push, ids)) + stream.flush()

    def stream(self) -> "Stream":
        return Stream(self)

    def chat(self, user: str, system: str | None = None) -> list[int]:
        """Ids of the first turn, BOS and the answer's header included. Raises ValueError without a chat format."""
        chat = self._known_format()
        say = str.strip if chat.strip else str
        system = chat.default_system if system is None else system
        parts = self._fill(chat.start)
        if system is not None and chat.in_turn:
            user = chat.system.format(system) + user
        elif system is not None:
            parts += self._fill(chat.system, say(system))
        return self._join(parts + self._fill(chat.user, say(user)))

    def chat_next(self, user: str) -> list[int]:
        """Ids of a later turn, fed after an answer whose end-of-turn token is not in the cache: they begin with it."""
        chat = self._known_format()
        return self._join(self._fill(chat.end) + self._fill(chat.user, user.strip() if chat.strip else user))

    def _known_format(self) -> ChatFormat:
        if self.format is None:
            known = ", ".join(CHAT_FORMATS)
            raise ValueError(f"this checkpoint's chat format is not known (known: {known}); use a plain prompt")
        return self.format

    def _fill(self, template: str, said: str = "") -> list[int | str | None]:
        """A part of the chat format as control ids and the texts between them."""
        control = {"<s>": self.bos_id, "</s>": self.eos_id}
        control.update((token, self.special[token]) for token in self.format.control)
        parts = regex.split(f"({'|'.join(map(regex.escape, control))})", template)
        return [control[part] if part in control else part.format(said) for part in parts]

    def _join(self, parts: list[int | str | None]) -> list[int]:
        ids = []
        for part in parts:
            ids += self._encode(part, first=not ids) if isinstance(part, str) else [] if part is None else [part]
        return ids

    def _encode(self, text: str, first: bool = True) -> list[int]:
        """Ids of plain text; `first`: no token precedes it."""
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a lone surrogate is no character
        ids, start = [], 0
        for match in self.added_split.finditer(text) if self.added else ():  # such as Qwen's <tool_call>: plain text
            ids += self._bpe(text[start : match.start()], first and not ids) + [self.added[match[0]]]
            start = match.end()
        return ids + self._bpe(text[start:], first and not ids)

    def _bpe(self, text: str, first: bool) -> list[int]:
        raise NotImplementedError


class Stream:
    """Decodes ids one at a time: what all `push` calls and the last `flush` return is, joined, `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer):
        self.pieces, self.strips = tokenizer.pieces, tokenizer.strips
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete with this token: "" in the middle of a character."""
        return self._text(self.pieces[token] if 0 <= token < len(self.pieces) else b"")

    def flush(self) -> str:
        """What an unfinished character leaves, at the end of the text."""
        return self._text(b"", final=True)

    def _text(self, piece: bytes, final: bool = False) -> str:
        text = self.utf8.decode(piece, final)
        if self.strips and text:
            text, self.strips = text.removeprefix(" "), False
        return text


def _chat_format(template: str, special: dict[str, int]) -> tuple[str | None, ChatFormat | None]:
    """The format that the special tokens allow and the chat template, if there is one, does not contradict."""
    for name, chat in CHAT_FORMATS.items():
        if special.keys() >= set(chat.control) and (chat.sign in template or (chat.control and not template)):
            return name, _variant(name, chat, template)
    return None, None


def _variant(name: str, chat: ChatFormat, template: str) -> ChatFormat:
    """What the members of a family do differently."""
    if name == "llama-3" and "Cutting Knowledge Date" in template:  # 3.1 and later
        date = regex.search(r'date_string = "([^"]+)"', template)  # 3.2 may write today's: prompts would change daily
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {date[1] if date else '26 Jul 2024'}\n\n"
        return replace(chat, system=chat.system.replace("{}", dates + "{}"), default_system="")
    if name == "chatml":
        default = regex.search(r"<\|im_start\|>system(?:\\n|\n)([^<>{}'\"]+)<\|im_end\|>", template)  # Qwen 2 and 2.5
        return replace(chat, default_system=default and default[1], start="<s>" if "bos_token" in template else "")
    if name == "mistral-v0.3" and template and "[INST] " not in template:  # Nemo
        return replace(chat, user="[INST]{}[/INST]")
    return chat


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, with the leading space as transformers' LlamaTokenizer has it.

    A text gets the space that sentencepiece puts before its first word, but, unlike in plain sentencepiece, not if it
    begins with a space already: " hi" encodes like "hi". In a chat, text after a control token gets one only if
    tokenizer_config.json says `"legacy": true` (as Meta's own Llama 2 code always does). A model trained without that
    space gets none anywhere, where transformers would add it.
    """

    def __init__(self, files: Files, path: Path, data: bytes):
        try:
            self.sp = sentencepiece.SentencePieceProcessor(model_proto=data)
            # Serialized messages merge when joined: these bytes are normalizer_spec.add_dummy_prefix = false.
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
            if sp.is_control(i) or sp.is_unknown(i) or piece in CONTROL_TOKENS:
                special.add(piece)
        for key, i in (("bos_token", sp.bos_id()), ("eos_token", sp.eos_id())):
            if i >= 0:
                files.config.setdefault(key, sp.id_to_piece(i))
        super().__init__(files, vocab, pieces, special)
        # Control pieces never come out of text, but some models have a chat token as a piece of another type.
        seen = [token for token, i in self.special.items() if i in sp.encode(token)]
        self.lookalike = regex.compile("|".join(map(regex.escape, seen))) if seen else None

    def _bpe(self, text: str, first: bool) -> list[int]:
        cuts = [match.start() + 1 for match in self.lookalike.finditer(text)] if self.lookalike else []
        parts = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        spaced = self.bare.normalize(parts[0][:1]) == "▁"
        sp = self.sp if (first or self.legacy) and not spaced else self.bare
        return sp.encode(parts[0]) + [i for part in parts[1:] for i in self.bare.encode(part)]


class ByteLevelTokenizer(Tokenizer):
    """Byte-level BPE, done by tiktoken.

    tiktoken knows no merges: it joins whichever neighbours make the token of lowest rank. Ranks are therefore the order
    of the merges, and `order` takes a rank to the id that the checkpoint gave the token.
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
        """order: ids by rank. splits: the patterns a text is split by, in turn. form: of Unicode, NFC and the like."""
        ranks = {pieces[i]: rank for rank, i in enumerate(order)}
        missing = [i for i in range(256) if bytes([i]) not in ranks]
        if missing or len(ranks) < len(order):
            what = f"no token for the byte 0x{missing[0]:02x}" if missing else "two tokens are the same bytes"
            raise ValueError(f"{path} is damaged: {what}")
        self.order, self.form = order, form
        *self.splits, last = splits or [r"[\s\S]+"]
        # tiktoken drops what its pattern does not match; the second half keeps it, as one piece.
        pattern = f"{last}|(?:(?!{last})[\\s\\S])+"
        self.bpe = tiktoken.Encoding(str(path), pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        super().__init__(files, vocab, pieces, special=set())

    def _bpe(self, text: str, first: bool) -> list[int]:
        parts = [unicodedata.normalize(self.form, text) if self.form else text]
        for split in self.splits:
            parts = [piece for part in parts for piece in regex.split(f"({split})", part) if piece]
        ids = []
        for part in parts:
            middles = range(MAX_RUN, len(part) - MAX_RUN // 2 + 1, MAX_RUN)
            cuts = [i for i in middles if ONE_KIND.fullmatch(part, i - MAX_RUN // 2, i + MAX_RUN // 2)]
            for a, b in pairwise([0, *cuts, len(part)]):
                ids += [self.order[rank] for rank in self.bpe.encode_ordinary(part[a:b])]
        return ids


def _from_ranks(files: Files, path: Path, data: bytes) -> Tokenizer:
    """Llama 3's own format: one token a line, base64 and rank; the rank is the id."""
    pieces = {}
    try:
        for line in data.splitlines():
            token, rank = line.split()
            pieces[int(rank)] = base64.b64decode(token, validate=True)
        if list(pieces) != list(range(len(pieces))):
            raise ValueError("the ranks are not 0, 1, 2, ...")
    except ValueError as error:
        raise ValueError(f"{path} is damaged: line {len(pieces) + 1} ({error})") from None
    if max(files.added.values(), default=0) < len(pieces):
        files.added.update((token, len(pieces) + i) for i, token in LLAMA3_SPECIAL.items())
        files.special.update(LLAMA3_SPECIAL.values())
        files.config.setdefault("bos_token", LLAMA3_SPECIAL[0])
        files.config.setdefault("eos_token", LLAMA3_SPECIAL[1])
    return ByteLevelTokenizer(files, path, {}, pieces, list(pieces), [LLAMA3_SPLIT])


def _from_json(files: Files) -> Tokenizer:
    path, model = files.json_path, files.json["model"]
    # Printable bytes stand for themselves in a vocabulary; the others, in order, for the characters from 256 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte = {chr(i): i for i in plain}
    byte |= {chr(256 + n): i for n, i in enumerate(i for i in range(256) if i not in plain)}
    try:
        vocab = model["vocab"]
        pieces = {
            i: bytes(byte[c] for c in token) if byte.keys() >= set(token) else token.encode()
            for token, i in vocab.items()
        }
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        tokens = dict.fromkeys([*byte, *(left + right for left, right in merges)])  # in rank order, each once
        if model.get("ignore_merges"):  # then a token that no merge makes is still met as a whole word
            tokens |= dict.fromkeys(token for token in vocab if token not in files.added)
        order = [vocab[token] for token in tokens]
        splits = _splits(files.json.get("pre_tokenizer"))
        form = (files.json.get("normalizer") or {}).get("type")
        if form not in (None, "NFC", "NFD", "NFKC", "NFKD"):
            raise ValueError(f"its normalizer {form} is not supported")
    except KeyError as error:
        raise ValueError(f"{path} is damaged: {error} is missing") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return ByteLevelTokenizer(files, path, vocab, pieces, order, splits, form)


def _splits(step: dict) -> list[str]:
    """The patterns by which a pre-tokenizer splits text, one after the other."""
    match step:
        case {"type": "Sequence", "pretokenizers": steps}:
            return [split for step in steps for split in _splits(step)]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return [pattern]
        case {"type": "Digits", "individual_digits": alone}:
            return [r"\p{N}" if alone else r"\p{N}+"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return [GPT2_SPLIT] if step.get("use_regex", True) else []
    raise ValueError(f"its pre_tokenizer step {json.dumps(step)} is not supported")
