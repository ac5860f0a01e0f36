"""Files: those of a checkpoint folder, which may come from anywhere, JSON, and whole ones that replace others."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def read_bytes(path: Path) -> bytes:
    """A file's content. Raises ValueError if it is a pointer that git left in place of a large file."""
    data = path.read_bytes()
    if data.startswith(b"version https://git-lfs.github.com/"):
        raise ValueError(f"{path} is a git-lfs pointer, not the file: fetch it with git lfs pull")
    return data


def parse_json(text: str | bytes, what: object) -> Any:
    """The value of a JSON text. Raises ValueError, which names `what` it is, if it is damaged or nested too deeply."""
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is not valid JSON ({error})") from None


def read_json(path: Path, missing: dict | None = None) -> dict:
    """A file's JSON object, or `missing` if there is no file. Raises ValueError if it holds none, and as `present`."""
    if not present(path) and missing is not None:
        return missing
    content = parse_json(read_bytes(path), path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives the path of a file beside `path`, which takes its place after the block; an error leaves nothing behind.

    Only a regular file is replaced. A link, a device or a pipe, such as /dev/stdout, is written to directly, and so is
    a file in a folder that cannot be written.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK))):
        yield path
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
