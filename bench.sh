#!/usr/bin/env bash
# The benchmark with its defaults for this machine: bash bench.sh, or with any of bench.py's arguments.
# bash bench.sh paper: the settings of the methods' papers, beside the figures that they print.
set -euo pipefail
cd "$(dirname "$0")"
make --quiet .venv/requirements
[ "${1-}" != paper ] || set -- --paper "${@:2}"
exec .venv/bin/python bench.py "$@"
