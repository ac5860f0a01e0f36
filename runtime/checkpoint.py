"""Checkpoint folders. Only this module reads and writes weight files.

A checkpoint holds Hugging Face's config.json with a "kv_fast" key added, model.safetensors (or numbered shards and
their index) and the tokenizer's files. Its tensors have the names of model.py's parameters.

Tensors are read and written one at a time, with plain file reads at the offsets in the safetensors header. A
safetensors file is never held in memory or mapped (touched pages of a mapping count as the process's memory too).
"""

import ctypes
import errno
import glob
import hashlib
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

FORMAT = 1
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
COMPANIONS = (  # files that accompany the weights, copied unchanged
    "generation_config.json",
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "kv_profile.json",
)
SLICES, SLICE = 16, 4096  # a fingerprint reads this many slices of a large tensor, each of this many bytes
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class Stored:
    """One tensor in a weight file; only `read` loads its data."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int | None  # bytes from the start of the file; None in a .bin

    def read(self) -> Tensor:
        """The tensor, on the CPU. Raises ValueError if the file has shrunk since its header was read."""
        if self.offset is None:
            # Mapping the file again for each tensor (milliseconds) frees the pages of the previous tensor.
            return _load_bin(self.file)[self.name].clone(memory_format=torch.contiguous_format)
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            if file.readinto(_memory(tensor)) != tensor.nbytes:
                raise ValueError(f"{self.file} is truncated: tensor {self.name} is cut off")
        return tensor

    def read_spans(self, dim: int, spans: list[tuple[int, int]]) -> Tensor:
        """Only the indices in `spans` of dimension `dim`, [start, stop) one after the other; errors as in `read`."""
        if self.offset is None:
            whole = self.read()
            return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in spans], dim)
        size = sum(stop - start for start, stop in spans)
        tensor = torch.empty((*self.shape[:dim], size, *self.shape[dim + 1 :]), dtype=self.dtype)
        memory, done = memoryview(_memory(tensor)).cast("B"), 0
        unit = math.prod(self.shape[dim + 1 :]) * self.dtype.itemsize  # bytes of one index
        with open(self.file, "rb", buffering=0) as file:  # a buffer would read beyond short spans
            for block in range(math.prod(self.shape[:dim])):
                for start, stop in spans:
                    file.seek(self.offset + (block * self.shape[dim] + start) * unit)
                    part = memory[done : done + (stop - start) * unit]
                    if file.readinto(part) != len(part):
                        raise ValueError(f"{self.file} is truncated: tensor {self.name} is cut off")
                    done += len(part)
        return tensor


def open_weights(folder: str | Path) -> dict[str, Stored]:
    """All tensors of a folder by name, from the headers of its safetensors or, without these, of pytorch_model*.bin.

    Raises FileNotFoundError if there are no weights or a shard is missing. Raises ValueError if a file is truncated,
    corrupt or a pickle with more than tensors, or if the index and the shards disagree.
    """
    folder = Path(folder)
    for stem, read_header in (("model.safetensors", _safetensors_header), ("pytorch_model.bin", _bin_header)):
        single, index = folder / stem, folder / f"{stem}.index.json"
        if present(single):
            return read_header(single)
        if present(index):
            return _open_shards(index, read_header)
    raise FileNotFoundError(
        f"{folder} holds no weights: no model.safetensors, model.safetensors.index.json, pytorch_model.bin or "
        "pytorch_model.bin.index.json"
    )


def _open_shards(index: Path, read_header: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files")
    stored: dict[str, Stored] = {}
    for shard in sorted(set(places.values())):
        file = index.parent / shard
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ValueError(f"{index} places tensors in {shard}, which is not in its folder")
        if not present(file):
            raise FileNotFoundError(f"{file} is missing, and {index.name} places tensors in it; download it again")
        for name, tensor in read_header(file).items():
            if name in stored:
                raise ValueError(f"tensor {name} is in two files: {stored[name].file} and {file}")
            stored[name] = tensor
    for name, shard in places.items():
        if name not in stored or stored[name].file != index.parent / shard:
            raise ValueError(f"{index} places tensor {name} in {shard}, which does not hold it")
    return stored


def _safetensors_header(file: Path) -> dict[str, Stored]:
    """Reads the header of a file: the header's length (8 bytes, little-endian), JSON, then the tensors end to end."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        text = f.read(length) if 8 + length <= size and length <= 100_000_000 else b""  # the format's own limit
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = sorted(
            (int(t["data_offsets"][0]), int(t["data_offsets"][1]), name, str(t["dtype"]), tuple(map(int, t["shape"])))
            for name, t in header.items()
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ValueError(
            f"{file} has no valid safetensors header: it is truncated or not a weight file "
            "(git lfs may have left a pointer in its place); download it again"
        ) from None
    stored, end, cut = {}, 8 + length, None
    for start, stop, name, kind, shape in tensors:
        if kind not in DTYPES:
            raise ValueError(f"{file}: tensor {name} is stored as {kind}; known: {', '.join(DTYPES)}")
        stored[name] = Stored(name, file, shape, DTYPES[kind], 8 + length + start)
        if stored[name].offset != end or stop - start != math.prod(shape) * DTYPES[kind].itemsize:
            raise ValueError(f"{file} has a corrupt header: tensor {name} is not where its size and shape say")
        end = 8 + length + stop
        cut = cut or (name if end > size else None)
    if end > size:
        raise ValueError(
            f"{file} is truncated: it has {size:,} of {end:,} bytes, and the first tensor cut off is "
            f"{cut}; download it again"
        )
    if end < size:
        raise ValueError(f"{file} is corrupt: {size - end:,} bytes follow its last tensor")
    return stored


def _bin_header(file: Path) -> dict[str, Stored]:
    return {name: Stored(name, file, tuple(t.shape), t.dtype, None) for name, t in _load_bin(file).items()}


def _load_bin(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{file} is refused: it is a pickle that holds more than tensors, and loading such a file "
            "can run any code; ask for safetensors"
        ) from None
    except Exception as error:  # a damaged archive fails in many ways
        raise ValueError(
            f"{file} is truncated, or not a torch.save file of torch >= 1.6 "
            f"({next(iter(str(error).splitlines()), type(error).__name__)}); download it again"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(f"{file} is not a state dict: it must map names to tensors")
    return state


def _memory(tensor: Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor as a buffer for file reads and writes; valid while the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def check_weights(stored: dict[str, Stored], shapes: dict[str, tuple[int, ...]], folder: str | Path) -> None:
    """Raises ValueError unless `stored` has exactly the names and shapes in `shapes`, which follow from config.json."""

    def some(names: list[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    missing, unknown = [n for n in shapes if n not in stored], [n for n in stored if n not in shapes]
    if missing or unknown:
        wrong = [f"{what} {some(names)}" for what, names in (("missing:", missing), ("unknown:", unknown)) if names]
        raise ValueError(f"the tensors in {folder} are not those of its config.json; {'; '.join(wrong)}")
    for name, shape in shapes.items():
        if stored[name].shape != tuple(shape):
            raise ValueError(
                f"{stored[name].file}: tensor {name} has shape {list(stored[name].shape)}, but config.json needs "
                f"{list(shape)}"
            )


def present(path: Path) -> bool:
    """Whether a file of a checkpoint folder exists.

    Raises ValueError if the path is not a regular file (a FIFO, say) or is a link out of the folder: a link in a
    downloaded checkpoint could point to any file of this machine. Links in huggingface_hub's cache, from
    snapshots/REVISION to the blobs beside snapshots, are allowed; the folder itself may be a link.
    """
    if not os.path.lexists(path):
        return False
    folder, target = path.parent.resolve(), path.resolve()
    if not target.is_file():
        raise ValueError(f"{path} is not a regular file")
    blobs = [place.parent / "blobs" for place in folder.parents if place.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in [folder, *blobs]):
        raise ValueError(f"{path} is a link out of its folder, to {target}; copy that file here instead")
    return True


def fingerprint(folder: str | Path) -> str:
    """16 hex digits that identify a checkpoint's weights and config, wherever the folder is.

    They are a hash of config.json and of each tensor's name, shape, dtype and data: a tensor of up to 64 KiB (or in a
    .bin) whole, a larger one in 16 evenly spaced slices of 4 KiB. 16 GB of weights take a second. A change of a few
    numbers in a large tensor may go unnoticed. Tokenizer files do not count. Raises what `read_config` and
    `open_weights` raise.
    """
    digest = hashlib.sha256(json.dumps(read_config(folder), sort_keys=True).encode())
    for name, tensor in sorted(open_weights(folder).items()):
        digest.update(repr((name, tensor.shape, str(tensor.dtype))).encode())
        size = math.prod(tensor.shape) * tensor.dtype.itemsize
        if tensor.offset is None:  # a .bin
            digest.update(_memory(tensor.read()))
            continue
        small = size <= SLICES * SLICE
        with open(tensor.file, "rb") as file:
            for start in [0] if small else [(size - SLICE) * i // (SLICES - 1) for i in range(SLICES)]:
                file.seek(tensor.offset + start)
                digest.update(file.read(size if small else SLICE))
    return digest.hexdigest()[:16]


def read_json(path: Path) -> dict:
    """A file's JSON object. Raises ValueError if the file holds none, and what `present` raises."""
    present(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def read_config(folder: str | Path, converted: bool = True) -> dict:
    """config.json of a checkpoint, or (`converted=False`) of a Hugging Face folder.

    Raises FileNotFoundError if the folder or the file is missing. Raises ValueError if the folder is of the other kind
    or its checkpoint format is not FORMAT.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {folder}")
    if not present(folder / "config.json"):
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a checkpoint")
    config = read_json(folder / "config.json")
    if not converted:
        if "kv_fast" in config:
            raise ValueError(f"{folder} is converted already; use it as it is")
        return config
    if "kv_fast" not in config:
        raise ValueError(
            f"{folder} is a Hugging Face folder; convert it first: "
            f"python convert_hf_checkpoint.py {folder} --out {folder}-kv-fast"
        )
    version = config["kv_fast"].get("format") if isinstance(config["kv_fast"], dict) else None
    if version != FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {version!r} and this code reads format {FORMAT}; "
            "update kv-fast or convert again"
        )
    return config


def read_eos_ids(folder: Path, config: dict, vocab: int) -> set[int]:
    """All ids in `eos_token_id` of config.json and generation_config.json.

    Raises ValueError for anything but ids of the vocabulary.
    """
    files, generation = {"config.json": config}, folder / "generation_config.json"
    if present(generation):
        files[generation.name] = read_json(generation)
    found = set()
    for name, content in files.items():
        ids = content.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(i, int) and 0 <= i < vocab for i in ids):
            raise ValueError(f"{folder / name}: eos_token_id must be ids below {vocab}, not {ids}")
        found |= set(ids)
    return found


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    whole: nn.Module | None = None,
    read: Callable[[Stored, Tensor], Tensor] = lambda stored, _: stored.read(),
) -> nn.Module:
    """Loads the weights onto `device`, one tensor at a time, into `model`, built on the meta device without KV caches.

    Floating-point tensors become `dtype` (None: as stored). The folder must hold exactly the tensors of `whole`
    (None: of `model`); `read` reads the part of each that belongs in a tensor of `model`. Raises what `read_config`,
    `open_weights` and `check_weights` raise.
    """
    read_config(folder)
    stored, expected = open_weights(folder), model.state_dict()
    check_weights(stored, {name: tuple(t.shape) for name, t in (whole or model).state_dict().items()}, folder)
    state = {}
    for name, own in expected.items():
        tensor = read(stored[name], own)
        state[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
    model.load_state_dict(state, assign=True)
    return model


def check_output(out: str | Path, source: str | Path | None = None, force: bool = False) -> Path:
    """The absolute path of `out`. Raises ValueError if a checkpoint may not be written there.

    `out` must not exist; with `force` it may be a kv-fast checkpoint or an empty folder, which will be replaced.
    """
    out = Path(out).resolve()
    _restore(out)
    if source is not None and Path(source).resolve() == out:
        raise ValueError(f"{out} is the source; choose another --out")
    if out.exists():
        if not force:
            raise ValueError(f"{out} exists; pass --force to replace it, or choose another --out")
        names = {file.name for file in out.iterdir()}
        others = [name for name in names - {"config.json", *COMPANIONS} if not WEIGHTS.fullmatch(name)]
        if others:
            raise ValueError(f"{out} holds {min(others)}, which is not part of a checkpoint; choose another --out")
        if names and not ("config.json" in names and "kv_fast" in read_json(out / "config.json")):
            raise ValueError(f"{out} is not a checkpoint of kv-fast, so --force keeps it; choose another --out")
    return out


def _replaced(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


def _restore(out: Path) -> None:
    """Restores the old checkpoint if a run was killed after setting it aside and before renaming the new one."""
    if _replaced(out).exists() and not out.exists():
        _replaced(out).rename(out)


def write_checkpoint(
    out: str | Path,
    config: dict,
    layout: dict[str, Tensor],
    read: Callable[[str], Tensor],
    copy_from: str | Path | None = None,
    quantization: dict | None = None,
    force: bool = False,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint folder, one tensor in memory at a time.

    `layout` gives names, shapes and dtypes (meta tensors will do); `read(name)` returns the tensor itself. For a model
    in memory, pass `model.state_dict()` and its `__getitem__`. `config` is written with a "kv_fast" key added, whose
    dtype is that of the first floating-point tensor. COMPANIONS such as tokenizer files are copied from `copy_from`.

    Everything is written to a hidden sibling of `out`, which is renamed to `out` at the end. A killed run leaves only
    that sibling, and the next run removes it. With `force`, the old checkpoint stays until the new one replaces it. If
    two runs write the same `out` at once, the first one fails.
    Raises ValueError as `check_output` and `present` do, and OSError if the disk is too small.
    """
    out = check_output(out, copy_from, force)
    companions = [Path(copy_from) / name for name in COMPANIONS] if copy_from is not None else []
    companions = [file for file in companions if present(file)]
    for left in [*out.parent.glob(f".{glob.escape(out.name)}.partial-*"), _replaced(out)]:
        shutil.rmtree(left, ignore_errors=True)
    total = sum(t.nbytes for t in layout.values())
    disk = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(disk).free
    if free < total:
        raise OSError(f"{disk} has {_size(free)} of disk space left, and {out.name} needs {_size(total)}")
    dtype = next(t.dtype for t in layout.values() if t.is_floating_point())
    about = {"format": FORMAT, "dtype": str(dtype).removeprefix("torch."), "quantization": quantization}
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")

    def read_one(name: str) -> Tensor:
        bar.update(layout[name].nbytes)
        return read(name)

    try:
        partial.mkdir(parents=True)
        with tqdm(total=total, unit="B", unit_scale=True, desc=str(out), disable=None) as bar:  # on a terminal only
            _write_shards(partial, layout, read_one, shard_bytes)
        for file in companions:
            shutil.copyfile(file, partial / file.name)
        _write_json(partial / "config.json", {**config, "kv_fast": about})
        if force and out.exists():
            out.rename(_replaced(out))
        partial.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(f"the disk of {out.parent} is full: {out.name} needs {_size(total)}; nothing was kept") from None
    finally:
        _restore(out)
        for left in (partial, _replaced(out)):
            shutil.rmtree(left, ignore_errors=True)


def _write_shards(folder: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor], shard_bytes: int) -> None:
    shards, room = [], 0
    for name, tensor in layout.items():
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    places = {}
    for i, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / file, {name: layout[name] for name in names}, read)
        places.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(t.nbytes for t in layout.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _write_safetensors(path: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor]) -> None:
    kinds, header, end = {dtype: kind for kind, dtype in DTYPES.items()}, {"__metadata__": {"format": "pt"}}, 0
    for name, t in layout.items():
        offsets = [end, end := end + t.nbytes]
        header[name] = {"dtype": kinds[t.dtype], "shape": list(t.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, t in layout.items():
            tensor = read(name).detach().to("cpu").contiguous()
            if tensor.shape != t.shape or tensor.dtype != t.dtype:
                raise ValueError(
                    f"tensor {name} is {list(tensor.shape)} {tensor.dtype}, its layout {list(t.shape)} {t.dtype}"
                )
            file.write(_memory(tensor))
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
