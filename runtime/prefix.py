"""Rows as files: a prompt that is prefilled once, saved, and continued later in another process.

A file is a safetensors file of a row's tokens, its RoPE frequencies and what every layer holds of it (`KV.state`). Its
header says which weights, method, options, budget and plan the row belongs to, and has a checksum of each tensor. An
engine that continues the row must have the same.
"""

import json
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import kv as methods
from runtime.checkpoint import check_fields
from runtime.planning import check_length
from text.files import parse_json, replacing

FORMAT = "kv-fast prompt 12"


@dataclass(frozen=True)
class Header:
    """What a saved row depends on besides its tensors."""

    weights: str  # the checkpoint's fingerprint
    kv: str
    budget: int | float | None
    options: dict  # with those of the checkpoint's kv_profile.json
    max_prompt: int
    max_new_tokens: int  # the plan's `room`
    dtype: str
    speculate: int
    prompt: int  # how many of the tokens were prefilled
    pending: int | None  # a token that follows them: the last of an answer, which the caches do not hold yet
    chat: bool  # the tokens are `Tokenizer.chat_begin`'s: questions take `chat_end`

    @property
    def sizes(self) -> tuple[int, int]:
        return self.max_prompt, self.max_new_tokens

    def check(self, engine) -> None:
        """Raises ValueError if the engine differs in what the row depends on."""
        settings = Header.of(engine, self.sizes, prompt=self.prompt, pending=self.pending, chat=self.chat)
        for name, ours in asdict(settings).items():
            if (saved := getattr(self, name)) != ours:
                raise ValueError(f"the prompt was saved with {name}={saved} and this engine has {name}={ours}")

    @classmethod
    def of(cls, engine, sizes: tuple[int, int], **row) -> "Header":
        """The header of a row (`prompt`, `pending`, `chat`) in the engine's caches, if they have that plan."""
        profile = methods.from_profile(engine.method, engine.options, engine.profile)
        options = asdict(methods.parse_options(engine.method, engine.options | profile))
        dtype = str(engine.dtype).removeprefix("torch.")
        return cls(engine.fingerprint, engine.method, engine.budget, options, *sizes, dtype, engine.speculate, **row)

    @classmethod
    def parse(cls, about: object) -> "Header":
        """From a file's JSON. Raises ValueError, TypeError or KeyError if a field is missing or has another type."""
        values = {field.name: about[field.name] for field in fields(cls)}
        check_fields(cls, values)
        header = cls(**values)
        if not 0 < header.prompt <= header.max_prompt < 2**40 or not 0 < header.max_new_tokens < 2**40:
            raise ValueError("plan")
        if header.speculate < 0:
            raise ValueError("speculate")
        return header


def save(row, path: str | Path, chat: bool = False) -> int:
    """Writes a `Row`, whole or not at all; returns the bytes of its tensors. chat: see `Header`."""
    engine, path = row.engine, Path(path).resolve()  # safetensors replaces what it writes to: not a link, not a device
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: name one to save the prompt in")
    if engine.ranks.count > 1:
        raise ValueError("a row whose heads are on several ranks cannot be saved: save it in one process")
    tensors = {"tokens": torch.tensor(row.tokens), "inv_freq": engine.model.inv_freq[row.index]}
    for i, layer in enumerate(engine.layers):
        tensors |= {f"{i}.{name}": x for name, x in layer.state(row.index, len(row.tokens)).items()}
    tensors = {name: x.cpu().contiguous() for name, x in tensors.items()}
    sizes = engine.plan.max_prompt, engine.plan.room
    about = asdict(Header.of(engine, sizes, prompt=row.prompt_tokens, pending=row.pending, chat=chat))
    about = json.dumps(about | {"checksums": {name: checksum(x) for name, x in tensors.items()}})
    try:
        with replacing(path) as new:
            save_file(tensors, new, {"format": FORMAT, "about": about, "checksum": str(zlib.crc32(about.encode()))})
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be written ({error})") from None
    return sum(x.nbytes for x in tensors.values())


def read_header(path: str | Path) -> Header:
    """The header of a file. Raises FileNotFoundError, or ValueError if it is no saved row."""
    return _read(path, whole=False)[0]


def read(engine, path: str | Path) -> tuple[Header, list[int], Tensor, list[dict[str, Tensor]]]:
    """A file's header, tokens, RoPE frequencies and the state of each layer, before anything is allocated for them.

    Raises ValueError if the file is damaged, holds NaN, or was saved with another checkpoint, method or budget.
    """
    header, tensors = _read(path)
    if header.weights != engine.fingerprint:
        raise ValueError(f"{path} was saved with another checkpoint")
    check_length(engine, header.prompt)
    header.check(engine)
    try:
        tokens, inv_freq = tensors.pop("tokens"), tensors.pop("inv_freq")
        layers: list[dict[str, Tensor]] = [{} for _ in engine.model.layers]
        for name, x in tensors.items():
            layer, _, name = name.partition(".")
            layers[range(len(layers))[int(layer)]][name] = x
        ids = tokens.dtype == torch.int64 and tokens.dim() == 1 and tokens.numel() >= header.prompt
        ids = ids and all(0 <= i < engine.config.vocab_size for i in (*tokens.tolist(), header.pending or 0))
        if not ids or inv_freq.dtype != torch.float32 or inv_freq.shape != (engine.config.head_dim // 2,):
            raise ValueError("tokens")
        if any(x.is_floating_point() and x.isnan().any() for x in (inv_freq, *tensors.values())):
            raise ValueError("NaN")
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error}): save the prompt again") from None
    return header, tokens.tolist(), inv_freq, layers


def _read(path: str | Path, whole: bool = True) -> tuple[Header, dict[str, Tensor]]:
    """The header and, of a file that is read whole, the tensors, whose checksums are right."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, "pt") as file:
            about = (file.metadata() or {}).get("about", "")
            if (file.metadata() or {}).get("format") != FORMAT:
                raise ValueError("it is no saved prompt of this version")
            if file.metadata().get("checksum") != str(zlib.crc32(about.encode())):
                raise ValueError("its header")
            content = parse_json(about, "its header")
            header, checksums = Header.parse(content), content["checksums"]
            if set(checksums) != set(file.keys()):
                raise ValueError("its tensors")
            tensors = {name: file.get_tensor(name) for name in checksums if whole}
        if bad := [name for name, x in tensors.items() if checksum(x) != checksums[name]]:
            raise ValueError(f"its tensor {bad[0]}")
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a saved prompt, or is damaged ({error}): save the prompt again") from None
    return header, tensors


def checksum(x: Tensor) -> int:
    """CRC-32 of a tensor's shape, dtype and bytes."""
    about = zlib.crc32(repr((list(x.shape), str(x.dtype))).encode())
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy(), about) if x.numel() else about
