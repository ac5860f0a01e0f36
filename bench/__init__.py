"""Speed and memory of the methods: python -m bench; bench.sh has the runs behind BENCHMARKS.md."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler otherwise prints when it starts and stops
