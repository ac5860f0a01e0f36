"""Answers in a process of its own: python packaged.py FOLDER ARGUMENTS, which are JSON; prints a line of JSON."""

import json
import sys

from engine import Engine
from runtime.packages import Packages

found: list[bool] = []
find = Packages.find


def noted(self, part, inputs):
    package = find(self, part, inputs)
    found.append(package is not None)
    return package


Packages.find = noted
folder, arguments = sys.argv[1], json.loads(sys.argv[2])
sampling, prompts = arguments.pop("sampling", {}), arguments.pop("prompts")
engine = Engine.load(folder, seed=0, dtype="float32", room=90, **{"max_prompt": 200} | arguments)
answers = [engine.generate([prompt], max_new_tokens=80, **sampling)[0].tokens for prompt in prompts]
compiler = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
print(json.dumps({"answers": answers, "compiles": engine.stats.compiles, "found": found, "compiler": compiler}))
