"""What an engine measures of its work, and the lines on stderr that report its phases."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass
class Stats:
    """What the engine measured since it was loaded (load, compile) or in its last call of `generate` (the rest)."""

    load_s: float = 0.0
    load_bytes: int = 0  # of the weights
    compile_s: float = 0.0
    compiles: int = 0  # times the decode step was compiled
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    first_token_s: float | None = None  # from the call to the first token: compiling and prefill are in it
    decode_s: float = 0.0
    steps: int = 0  # that a row needed; on CUDA one more runs before the host knows that an answer has ended
    decoded: int = 0  # tokens that rows fed these steps, those of follow-ups too: with one row, as many as steps
    past_context: list[int] = field(default_factory=list)  # prompts whose rows decoded past the model's context

    def next_call(self) -> None:
        """Forgets what the last call measured."""
        vars(self).update(vars(Stats(self.load_s, self.load_bytes, self.compile_s, self.compiles)))


@dataclass
class Phase:
    """load, compile, prefill, or first token: the time from a call of `generate` to its first token."""

    name: str
    about: str = ""  # what is loaded, compiled or prefilled
    tokens: int = 0  # of the prompt that is prefilled
    layers: int = 0  # of a prefill long enough to report each
    done: int = 0  # layers so far
    seconds: float | None = None  # None while the phase runs


Listener = Callable[[Phase], None]


@contextmanager
def timed(listener: Listener | None, phase: Phase) -> Iterator[Phase]:
    """Measures the phase; the listener, if there is one, hears of its start and of its end."""
    begin, listener = time.perf_counter(), listener or (lambda _: None)
    listener(phase)
    yield phase
    phase.seconds = time.perf_counter() - begin
    listener(phase)


class Progress:
    """Listens to an engine: one line on stderr per phase. A terminal also shows what is running, and how far."""

    def __init__(self, prompts: int):
        self.terminal, self.single = sys.stderr.isatty(), prompts == 1
        self.bar = tqdm(total=prompts, unit="prompt", disable=self.single or not self.terminal)

    def __call__(self, phase: Phase) -> None:
        if phase.seconds is None:
            layers = f", layer {phase.done} of {phase.layers}" if phase.layers else ""
            self._status(f"{phase.name} {phase.about}{layers}")
            return
        if phase.name == "prefill" and not self.single:
            return self._status("")  # the bar counts prompts
        rate = f", {phase.tokens / phase.seconds:.0f} tokens/s" if phase.tokens else ""
        about = f"{phase.about}, " if phase.about else ""
        self.line(f"-- {phase.name}: {about}{phase.seconds:.2f} s{rate}")

    def finished(self) -> None:
        """One more prompt is answered."""
        self.bar.update()

    def line(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
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
