#!/usr/bin/env bash
# torch 2.13.0: torch.export takes an int input with a dynamic size, and the exported program runs with other values of
# it, but AOTInductor cannot compile it: aoti_compile_and_package stops because the int has become None.
#
# In Dim.DYNAMIC's own terms the program is valid: export keeps the int as a symbol, and program.module() narrows a
# tensor to 8, 20 and 60 elements. The same value passed as the size of an empty tensor compiles, and one package then
# serves every value.
#
# Needs g++. Seen on 2026-11-29: module 28, 190, 1770; as an int: RuntimeError, "Expected a value of type 'int' for
# argument 'length' but instead found type 'NoneType'"; as a size: 28, 190, 1770.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$folder/cache" FOLDER="$folder" "$folder/venv/bin/python" - <<'PYTHON'
import os

import torch
import torch._inductor
from torch.export import Dim

numbers = torch.arange(100.0)
lengths = 8, 20, 60


class ByInt(torch.nn.Module):
    def forward(self, x, n):
        return x.narrow(0, 0, n).sum()


class BySize(torch.nn.Module):
    def forward(self, x, size):
        return x.narrow(0, 0, size.shape[0]).sum()


def package(program, name):
    path = os.path.join(os.environ["FOLDER"], f"{name}.pt2")
    return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))


right = [sum(range(n)) for n in lengths]
program = torch.export.export(ByInt(), (numbers, 8), dynamic_shapes=(None, Dim.DYNAMIC))
exported = [int(program.module()(numbers, n)) for n in lengths]
print("exported:", exported)
assert exported == right, "this has changed"

try:
    package(program, "int")
    error = ""
except RuntimeError as caught:
    error = str(caught).splitlines()[0]
print("packaged, as an int:", error)
assert "NoneType" in error, "this has changed"

program = torch.export.export(BySize(), (numbers, torch.empty(8, 0)), dynamic_shapes=(None, {0: Dim.DYNAMIC}))
code = package(program, "size")
packaged = [int(code(numbers, torch.empty(n, 0))) for n in lengths]
print("packaged, as a size:", packaged)
assert packaged == right, "this has changed"
PYTHON
