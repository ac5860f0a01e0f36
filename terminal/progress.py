"""What an engine measures, and the lines on stderr that report its phases."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass
class Stats:
    """Measurements since the engine was loaded (load, compile) or of its last `generate` call (the rest)."""

    load_s: float = 0.0
    load_bytes: int = 0  # of the weights
    compile_s: float = 0.0
    compiles: int = 0  # times the decode step was compiled
    products: dict[str, dict[str, float]] = field(default_factory=dict)  # what runtime/tune.py measured
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    tokens_reused: int = 0  # of prompts that were copied instead of prefilled
    extend_s: float = 0.0
    extend_tokens: int = 0  # of follow-ups that rows took at once
    first_token_s: float | None = None  # from the call to the first token, including compile and prefill
    decode_s: float = 0.0
    steps: int = 0  # steps a row needed, not counting the one that CUDA runs before the host sees an answer's end
    fed: int = 0  # rows that took part in a step, summed over these steps; with one row, equal to steps
    decoded: int = 0  # tokens that these steps gave to rows: one per row, or more with speculation
    past_context: list[int] = field(default_factory=list)  # indices of prompts whose rows decoded past the context

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds in which a row gains a token; with speculation, on average over the rows."""
        return 1e3 * self.decode_s / self.steps * self.fed / self.decoded if self.decoded else None

    @property
    def accepted(self) -> float | None:
        """With speculation: drafted tokens that a row accepts per step, on average."""
        return self.decoded / self.fed - 1 if self.fed else None

    def next_call(self) -> None:
        """Resets what the last call measured."""
        vars(self).update(vars(Stats(self.load_s, self.load_bytes, self.compile_s, self.compiles)))


@dataclass
class Phase:
    """A phase: load, compile, prefill, restore, extend, or first token (the time from a `generate` call to that)."""

    name: str
    about: str = ""  # what is loaded, compiled, prefilled or added
    tokens: int = 0  # tokens prefilled or added
    layers: int = 0  # the model's layers, if the prefill is long enough to report each
    done: int = 0  # layers prefilled so far
    seconds: float | None = None  # None while the phase runs


Listener = Callable[[Phase], None]


@contextmanager
def timed(listener: Listener | None, phase: Phase) -> Iterator[Phase]:
    """Times the phase; calls the listener, if there is one, at its start and at its end."""
    begin, listener = time.perf_counter(), listener or (lambda _: None)
    listener(phase)
    yield phase
    phase.seconds = time.perf_counter() - begin
    listener(phase)


class Progress:
    """A listener that prints a line on stderr per phase; a terminal also shows the running phase and its progress."""

    def __init__(self, prompts: int):
        self.terminal, self.single = sys.stderr.isatty(), prompts == 1
        self.bar = tqdm(total=prompts, unit="prompt", disable=self.single or not self.terminal)

    def __call__(self, phase: Phase) -> None:
        if phase.seconds is None:
            layers = f", layer {phase.done} of {phase.layers}" if phase.layers else ""
            self._status(f"{phase.name} {phase.about}{layers}")
            return
        if phase.name in ("prefill", "restore", "extend") and not self.single:
            return self._status("")  # the bar counts prompts
        if phase.name == "extend" and phase.seconds < 1:
            return self._status("")
        rate = f", {phase.tokens / phase.seconds:.0f} tokens/s" if phase.tokens else ""
        about = f"{phase.about}, " if phase.about else ""
        self.line(f"-- {phase.name}: {about}{phase.seconds:.2f} s{rate}")

    def finished(self) -> None:
        """Counts one more answered prompt."""
        self.bar.update()

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._status("")
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        self._status("")
        self.bar.close()

    def _status(self, text: str) -> None:
        if not self.single:
            self.bar.set_postfix_str(text)
        elif self.terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
