"""Checkpoint folders: this module reads their weights, and it alone writes them.

A checkpoint holds Hugging Face's config.json with a "kv_fast" section added, model.safetensors (or numbered shards and
their index) and the tokenizer's files. Its tensors have the names of model.py's parameters. The section states the
fields of `ModelConfig`, which were checked when the folder was written; outside it, loading reads eos_token_id alone.
"""

import glob
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from reprlib import repr as shortened
from typing import get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from kv.parts.rope import rope_frequencies
from model import ModelConfig
from runtime.arguments import check_sampling
from text.files import present, read_json

FORMAT = 2
MOST = {"n_layer": 1000} | dict.fromkeys(("vocab_size", "max_length", "window"), 2**31 - 1)  # other sizes: 2**19
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
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
# Of generation_config.json: transformers' defaults, values that cut nothing, and keys that the engine does not support,
# with the values at which they change nothing; SAMPLED: keys that matter only where transformers samples.
SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
OFF = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,)}
UNSUPPORTED = {
    **dict.fromkeys(("num_beams", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings"), []),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("sequence_bias", "watermarking_config", "constraints", "force_words_ids", "dola_layers")),
    "token_healing": False,
}
SAMPLED = {"top_h": None, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True)
class Stored:
    """One tensor in a weight file; only `read` touches its data."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, *index: slice) -> Tensor:
        """The tensor, or the part at `index`: a view of the mapped file, to be copied by whoever keeps it.

        Each call maps the file anew: the touched pages of a mapping count as this process's memory until it goes.
        """
        with _opened(self.file) as file:
            return file.get_slice(self.name)[index or ...]

    def equals(self, other: "Stored") -> bool:
        """Whether both have the same shape, dtype and numbers."""
        alike = (self.shape, self.dtype) == (other.shape, other.dtype)
        return alike and torch.equal(self.read(), other.read())


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(
            f"{file} is damaged or cut off, or git lfs left a pointer in its place ({str(error)[:200]}); "
            "download or convert it again"
        ) from None


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises ValueError if it is damaged."""
    with _opened(file) as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # views: no data is read
    return {name: Stored(name, file, tuple(t.shape), t.dtype) for name, t in tensors.items()}


def open_weights(
    folder: str | Path, stem: str = "model.safetensors", header: Callable[[Path], dict[str, Stored]] = read_header
) -> dict[str, Stored]:
    """All tensors of a folder by name, from the headers of `stem` or of the shards that its index names.

    The shards decide which tensors there are and where, since indexes often name others; `check_weights` finds what is
    missing. Only a tensor in two shards is read, to compare the copies. Raises FileNotFoundError if there are no
    weights or a shard is missing, and ValueError if a file is damaged or two copies differ.
    """
    single, index = Path(folder) / stem, Path(folder) / f"{stem}.index.json"
    if present(single):
        return header(single)
    if not present(index):
        raise FileNotFoundError(f"{folder} holds no weights: no {single.name} and no {index.name}")
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
        for name, tensor in header(file).items():
            other = stored.setdefault(name, tensor)
            if other is not tensor and not other.equals(tensor):
                raise ValueError(f"{other.file} and {file} hold different tensors {name}; download both again")
    return stored


def check_weights(stored: dict[str, Stored], layout: dict[str, Tensor], folder: str | Path) -> None:
    """Raises ValueError unless `stored` has exactly the names and shapes of `layout`, which follow from config.json."""
    for what, names in (("lack", layout.keys() - stored.keys()), ("must not have", stored.keys() - layout.keys())):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            some = ", ".join(sorted(names)[:4])
            raise ValueError(f"the weights in {folder} are not those of its configuration: they {what} {some}{more}")
    for name, tensor in layout.items():
        if (found := stored[name]).shape != tensor.shape:
            needed = list(tensor.shape)
            raise ValueError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}, but config.json needs {needed}"
            )


def fingerprint(config: dict) -> str:
    """16 hex digits that identify a checkpoint's weights and config, wherever the folder is and however it is sharded.

    config: of `read_config`. The weights' part is the id that was written with them: a weight file that is changed by
    hand goes unnoticed. Tokenizer files do not count.
    """
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def read_hf_config(folder: str | Path) -> dict:
    """config.json of any checkpoint folder. Raises FileNotFoundError if the folder or the file is missing."""
    folder = Path(folder)
    if folder.is_file():
        command = f"python convert_hf_checkpoint.py {folder} --out DIR"
        raise ValueError(f"{folder} is a file, not a checkpoint's folder; convert it first: {command}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {folder}")
    if not present(folder / "config.json"):
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a checkpoint")
    return read_json(folder / "config.json")


def read_config(folder: str | Path) -> dict:
    """config.json of a converted checkpoint, of which `ModelConfig(**config["kv_fast"]["model"])` describes the model.

    Raises what `read_hf_config` raises, and ValueError if the folder is not converted, has another format or a damaged
    "kv_fast" section.
    """
    config = read_hf_config(folder)
    if "kv_fast" not in config:
        raise ValueError(
            f"{folder} is a Hugging Face folder; convert it first: "
            f"python convert_hf_checkpoint.py {folder} --out {folder}-kv-fast"
        )
    section = config["kv_fast"]
    version = section.get("format") if isinstance(section, dict) else None
    if version != FORMAT:
        again = f"convert it again: python convert_hf_checkpoint.py {folder} --out {folder}-{FORMAT}"
        raise ValueError(
            f"{folder} has checkpoint format {shortened(version)} and this code reads format {FORMAT}; "
            f"{again if version == 1 else 'update kv-fast'}"
        )
    try:
        check_model(section.get("model"))
        if not isinstance(section.get("weights"), str):
            raise ValueError(f"weights must be their id, not {shortened(section.get('weights'))}")
    except ValueError as error:
        raise ValueError(
            f"kv_fast in {folder}/config.json is damaged ({error}); convert the checkpoint again"
        ) from None
    return config


def check_fields(kind: type, values: object) -> None:
    """Raises ValueError unless `values` has the fields of the dataclass `kind`, with values of their types. Fields that
    are empty lists by default may be missing."""
    hints, lists = get_type_hints(kind), {x.name for x in fields(kind) if x.default_factory is not MISSING}
    if not isinstance(values, dict) or not hints.keys() - lists <= values.keys() <= hints.keys():
        raise ValueError(f"its fields must be {', '.join(hints)}")
    for name, value in values.items():
        hint = hints[name]
        if not isinstance(value, hint) or isinstance(value, bool) != (hint is bool):
            raise ValueError(f"{name} cannot be {shortened(value)}")


def check_model(model: object) -> None:
    """Raises ValueError unless `model` has all fields of a `ModelConfig` with values that a model can have."""
    check_fields(ModelConfig, model)
    for name, value in model.items():
        most = MOST.get(name, 2**19)
        if type(value) in (int, float) and not 0 < value <= most:
            raise ValueError(f"{name} must be positive and at most {most}, not {shortened(value)}")
    n_head, n_kv_head, head_dim, rope = (model[key] for key in ("n_head", "n_kv_head", "head_dim", "rope"))
    for name in ("full_layers", "unrotated"):
        given = model.get(name, [])
        if any(type(layer) is not int for layer in given) or given != sorted(set(given) & set(range(model["n_layer"]))):
            raise ValueError(f"{name} must be numbers of layers, ascending, not {shortened(given)}")
    if model.get("full_layers") and (model["window"] is None or len(model["full_layers"]) == model["n_layer"]):
        raise ValueError("full_layers must leave layers with a window")
    if n_head % n_kv_head:
        raise ValueError(f"{n_head} attention heads do not divide into {n_kv_head} KV heads")
    if head_dim % 2 or head_dim < 4:
        raise ValueError(f"head_dim must be even and at least 4, not {head_dim}")
    if rope.get("rope_type") not in ROPE_TYPES:
        kind = shortened(rope.get("rope_type"))
        raise ValueError(f"RoPE type {kind} is not supported; known: {', '.join(ROPE_TYPES)}")
    try:
        with torch.device("cpu"):  # a caller may build a model on the meta device
            inv_freq, factor = rope_frequencies(rope, head_dim, model["max_length"])
        finite = inv_freq.isfinite().all() and math.isfinite(factor)
        if "query_beta" in rope:  # queries grow at every multiple of the original length
            length = float(rope["original_max_position_embeddings"])
            finite &= 0 < rope["query_beta"] < math.inf and length >= 1 and length.is_integer()
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError):
        finite = False
    if not finite:
        raise ValueError(f"RoPE has no finite frequencies with {json.dumps(rope)[:200]}")


def read_eos_ids(folder: Path, config: dict, vocab: int) -> tuple[set[int], set[int]]:
    """The ids in `eos_token_id` of config.json and generation_config.json: those of the vocabulary, and others.

    Merged models have such others, -1 or the size of the vocabulary; they end no answer. Raises ValueError for
    anything but integers and null.
    """
    found, generation = set(), "generation_config.json"
    for name, content in (("config.json", config), (generation, read_json(folder / generation, missing={}))):
        ids = content.get("eos_token_id")
        ids = [i for i in (ids if isinstance(ids, list) else [ids]) if i is not None]
        if not all(type(i) is int for i in ids):
            raise ValueError(f"{folder / name}: eos_token_id must be token ids, not {shortened(ids)}")
        found |= set(ids)
    inside = {i for i in found if 0 <= i < vocab}
    return inside, found - inside


def read_sampling(folder: Path, temperature: float | None = None) -> dict[str, int | float]:
    """The sampling that transformers takes from generation_config.json, as arguments of `Engine.generate`.

    It samples if `do_sample` is true; else the repetition penalty alone counts. temperature: instead of the file's, and
    of its `do_sample`. Raises ValueError for values that the engine would refuse.
    """
    given = SAMPLING | _generation_config(folder)
    samples = given.get("do_sample", False) if temperature is None else temperature > 0
    given["temperature"] = given["temperature"] if temperature is None else temperature
    try:
        if not isinstance(samples, bool):
            raise ValueError(f"do_sample must be true or false, not {shortened(samples)}")
        names = SAMPLING if samples and given["temperature"] != 0 else ("repetition_penalty",)
        found = {name: given[name] for name in names if given[name] not in OFF.get(name, ())}
        check_sampling(**found)
    except ValueError as error:
        raise ValueError(f"{folder / 'generation_config.json'}: {error}") from None
    return found


def unsupported_sampling(folder: Path, samples: bool) -> dict[str, object]:
    """The keys of generation_config.json with which transformers answers otherwise and the engine does not."""
    given = _generation_config(folder)
    contrastive = not samples and given.get("top_k", SAMPLING["top_k"]) not in (0, 1)
    off = UNSUPPORTED | (SAMPLED if samples else {}) | ({"penalty_alpha": 0} if contrastive else {})
    return {name: given[name] for name in off if given.get(name, off[name]) != off[name]}


def _generation_config(folder: Path) -> dict:
    """generation_config.json without its nulls, for which transformers takes its defaults; {} if there is no file."""
    content = read_json(folder / "generation_config.json", missing={})
    return {name: value for name, value in content.items() if value is not None}


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
    (None: of `model`); `read` reads the part of each that belongs in a tensor of `model`. Raises what `open_weights`
    and `check_weights` raise.
    """
    stored, state = open_weights(folder), {}
    check_weights(stored, (whole or model).state_dict(), folder)
    for name, own in model.state_dict().items():
        tensor = read(stored[name], own)
        state[name] = tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)
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


def _abandoned(out: Path) -> list[Path]:
    """What is left of runs that were killed: a partial folder's name ends in its process's id."""
    partial = {file.name.rpartition("-")[2]: file for file in out.parent.glob(f".{glob.escape(out.name)}.partial-*")}
    return [file for pid, file in partial.items() if pid == str(os.getpid()) or not Path("/proc", pid).exists()]


def _restore(out: Path) -> None:
    """Restores the old checkpoint if a run was killed after setting it aside and before renaming the new one."""
    if _replaced(out).exists() and not out.exists():
        _replaced(out).rename(out)


def write_checkpoint(
    out: str | Path,
    config: dict,
    model: ModelConfig,
    layout: dict[str, Tensor],
    read: Callable[[str], Tensor],
    copy_from: str | Path | None = None,
    quantization: dict | None = None,
    force: bool = False,
    shard_bytes: int = 1_000_000_000,
) -> None:
    """Writes a checkpoint folder, one shard in memory at a time.

    `layout` gives names, shapes and dtypes (meta tensors will do); `read(name)` returns the tensor. `config`, the
    Hugging Face config.json, gains the section. COMPANIONS are copied from `copy_from`.

    Everything is written to a hidden sibling of `out`, which is renamed at the end. A killed run leaves only that
    sibling, and the next run removes it. With `force`, the old checkpoint stays until the new one replaces it.
    Raises ValueError as `check_output` and `present` do, and OSError if the disk is too small.
    """
    out = check_output(out, copy_from, force)
    companions = [Path(copy_from) / name for name in COMPANIONS] if copy_from is not None else []
    companions = [file for file in companions if present(file)]
    for left in [*_abandoned(out), _replaced(out)]:
        shutil.rmtree(left, ignore_errors=True)
    total = sum(t.nbytes for t in layout.values())
    disk = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(disk).free
    if free < total:
        raise OSError(f"{disk} has {_size(free)} of disk space left, and {out.name} needs {_size(total)}")
    dtype = next(t.dtype for t in layout.values() if t.is_floating_point())
    section = {"format": FORMAT, "dtype": str(dtype).removeprefix("torch."), "quantization": quantization}
    section["model"] = {name: value for name, value in asdict(model).items() if value != []}
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        with tqdm(total=total, unit="B", unit_scale=True, desc=str(out), disable=None) as bar:  # on a terminal only
            section["weights"] = _write_weights(partial, layout, read, shard_bytes, bar)
        for file in companions:
            shutil.copyfile(file, partial / file.name)
        _write_json(partial / "config.json", {**config, "kv_fast": section})
        if force and out.exists():
            out.rename(_replaced(out))
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{out} cannot be written ({error}): it needs {_size(total)}; nothing was kept") from None
    finally:
        _restore(out)
        for left in (partial, _replaced(out)):
            shutil.rmtree(left, ignore_errors=True)


def _write_weights(
    folder: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor], shard_bytes: int, bar: tqdm
) -> str:
    """Writes the shards and their index; returns an id of all names, shapes, dtypes and numbers."""
    from huggingface_hub import split_state_dict_into_shards_factory  # its import takes a while; only writing needs it

    digests = []
    split = split_state_dict_into_shards_factory(
        layout,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            tensor = tensors[name] = read(name).detach().to("cpu").contiguous()
            assert (tensor.shape, tensor.dtype) == (layout[name].shape, layout[name].dtype), name
            data = tensor.reshape(-1).view(torch.uint8).numpy()
            digests.append((name, list(tensor.shape), str(tensor.dtype), hashlib.sha256(data).hexdigest()))
            bar.update(tensor.nbytes)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        with open(folder / file, "rb") as written:
            os.fchmod(written.fileno(), folder.stat().st_mode & 0o666)  # save_file lets nobody else read
            os.fsync(written.fileno())
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)
    return hashlib.sha256(json.dumps(sorted(digests)).encode()).hexdigest()[:16]


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
