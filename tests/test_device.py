"""Files are replaced as a whole, and what is not a file is written to; freed memory counts as free."""

import ctypes
import os
import threading

import pytest
import torch

from runtime.device import free_bytes, group_free, resident_bytes
from terminal.cli import write_json
from text.files import replacing


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")
    file.chmod(0o640)
    with replacing(file) as path:
        path.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640 and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("old", ("old", None))
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, old):
    file = tmp_path / "out.json"
    if old is not None:
        file.write_text(old)
    with pytest.raises(OSError, match="full"), replacing(file) as path:
        path.write_text("half")
        raise OSError("full")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({} if old is None else {"out.json": old})


def test_pipes_and_links_are_written_to(tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    for path in (pipe, link):
        write_json(str(path), {"a": 1})
    reader.join(10)
    assert read == ['{"a": 1}\n'] == [file.read_text()]
    assert pipe.is_fifo() and link.is_symlink() and sorted(tmp_path.iterdir()) == [file, link, pipe]


def test_a_link_like_dev_stdout_is_written_to(tmp_path, capfd):
    link = tmp_path / "stdout"  # a broken guard would replace /dev/stdout itself
    link.symlink_to("/proc/self/fd/1")
    write_json(str(link), {"a": 1})
    assert capfd.readouterr().out == '{"a": 1}\n' and link.is_symlink()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_what_the_c_library_keeps_counts_as_free():
    blocks = [torch.ones(2**14) for _ in range(3200)]
    last = blocks[-1]  # the heap cannot shrink below it
    before = resident_bytes("VmRSS")
    del blocks
    free_bytes(torch.device("cpu"))
    assert resident_bytes("VmRSS") < before - 150e6 and last.sum() == 2**14


def test_what_a_container_may_use_is_what_is_free(tmp_path):
    assert group_free(tmp_path) == float("inf")
    for name, text in (("current", "700\n"), ("stat", "anon 400\ninactive_file 300\n"), ("max", "max\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert group_free(tmp_path) == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    assert group_free(tmp_path) == 600
