"""Prompts that are prefilled once and continued many times: kept in memory, or in a file.

A `Prefix` holds a prompt's tokens and what every layer holds of it. A file is a safetensors file. Its header says which
weights, method, options, budget and plan the prompt was prefilled with, and has a checksum of each tensor.
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "kv-fast prompt 4"
LEAST = 256  # tokens that prompts must share to prefill them once


@dataclass(frozen=True)
class Setting:
    """What a prefix depends on besides its tokens: an engine that continues it must have the same."""

    kv: str
    budget: int | float | None
    options: dict  # with those of the checkpoint's kv_profile.json
    max_prompt: int
    max_new_tokens: int
    dtype: str
    speculate: int = 0
    ranks: int = 1  # processes that share the model

    @property
    def plan(self) -> tuple[int, int]:
        return self.max_prompt, self.max_new_tokens


@dataclass
class Prefix:
    """`Engine.prefix` and `load` make it; `Engine.generate(prefix=...)` continues it."""

    setting: Setting
    tokens: list[int]
    rope_speed: Tensor  # [D/2], radians per position
    layers: list[dict[str, Tensor]]  # `KV.state` of each layer
    chat: bool = False  # the tokens are `Tokenizer.chat_begin`'s: questions take `chat_end`

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        found = {"tokens": torch.tensor(self.tokens), "rope_speed": self.rope_speed}
        return found | {f"{i}.{name}": x for i, layer in enumerate(self.layers) for name, x in layer.items()}

    def save(self, path: str | Path, weights: str) -> None:
        """Writes a file, whole or not at all; `weights` is the checkpoint's `fingerprint`."""
        if self.setting.ranks > 1:
            raise ValueError("a prompt whose heads are on several ranks cannot be saved: save it in one process")
        path = Path(path)
        tensors = {name: x.cpu().contiguous() for name, x in self.tensors().items()}
        about = asdict(self.setting) | {"layers": len(self.layers), "weights": weights, "chat": self.chat}
        about = json.dumps(about | {"checksums": {name: checksum(x) for name, x in tensors.items()}})
        header = {"format": FORMAT, "about": about, "checksum": str(zlib.crc32(about.encode()))}
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(tensors, temporary, header)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@dataclass
class Shared:
    """The tokens that consecutive prompts begin with; the first prompt prefills them for all."""

    tokens: list[int]
    users: int  # prompts that have yet to start
    prefix: Prefix | None = None

    @classmethod
    def find(cls, prompts: list[list[int]]) -> list["Shared | None"]:
        """What each prompt shares with its neighbors: at least LEAST tokens, at most all but its last."""
        found: list[Shared | None] = []
        while len(found) < len(prompts):
            group, common = 1, prompts[len(found)][:-1]
            for other in prompts[len(found) + 1 :]:
                fewer = os.path.commonprefix([common, other[:-1]])
                if len(fewer) < LEAST or (group > 1 and 2 * len(fewer) < len(common)):
                    break
                group, common = group + 1, fewer
            found += [cls(common, group) if group > 1 else None] * group
        return found


def checksum(x: Tensor) -> int:
    """CRC-32 of a tensor's shape, dtype and bytes."""
    about = zlib.crc32(repr((list(x.shape), str(x.dtype))).encode())
    return zlib.crc32(x.reshape(-1).view(torch.uint8).numpy(), about) if x.numel() else about


def read_about(path: str | Path) -> dict:
    """The header of a file: the fields of `Setting`, layers, weights, chat, checksums. Raises ValueError."""
    with opened(path) as file:
        header = file.metadata() or {}
        if header.get("format") != FORMAT:
            raise ValueError(f"{path} is not a saved prompt")
        if header.get("checksum") != str(zlib.crc32(header.get("about", "").encode())):
            raise ValueError(f"{path} is damaged: save the prompt again")
        return json.loads(header["about"])


def load(path: str | Path, weights: str) -> Prefix:
    """Reads a file. Raises ValueError if it is damaged, or saved with weights of another fingerprint."""
    about = read_about(path)
    if about["weights"] != weights:
        raise ValueError(f"{path} was saved with another checkpoint")
    setting = Setting(**{name: about[name] for name in Setting.__dataclass_fields__})
    layers: list[dict[str, Tensor]] = [{} for _ in range(about["layers"])]
    with opened(path) as file:
        found = {}
        for name, expected in about["checksums"].items():
            try:
                found[name] = file.get_tensor(name)
            except SafetensorError:
                raise ValueError(f"{path} is damaged, it has no {name}: save the prompt again") from None
            if checksum(found[name]) != expected:
                raise ValueError(f"{path} is damaged in {name}: save the prompt again")
    tokens, rope_speed = found.pop("tokens").tolist(), found.pop("rope_speed")
    for name, x in found.items():
        layer, _, name = name.partition(".")
        layers[int(layer)][name] = x
    return Prefix(setting, tokens, rope_speed, layers, about["chat"])


def opened(path: str | Path):
    """An open safetensors file. Raises FileNotFoundError, or ValueError if it is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a saved prompt, or is damaged ({error})") from None
