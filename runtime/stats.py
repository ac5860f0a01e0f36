"""What an engine measures."""

from dataclasses import dataclass, field, replace


@dataclass
class Stats:
    """Measurements since the engine was loaded (load, compile) or of its last call (the rest)."""

    load_s: float = 0.0
    load_bytes: int = 0  # of the weights
    compile_s: float = 0.0
    compiles: int = 0  # times a step or a part of it was compiled
    products: dict[str, dict[str, float]] = field(default_factory=dict)  # what runtime/cpu.py measured
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    tokens_reused: int = 0  # of rows that were copied or loaded instead of prefilled
    extend_s: float = 0.0
    extend_tokens: int = 0  # of questions that rows took at once
    first_token_s: float | None = None  # from the call to the first token, including compile and prefill
    decode_s: float = 0.0
    steps: int = 0  # steps a row needed, not counting the one that CUDA runs before the host sees an answer's end
    fed: int = 0  # rows that took part in a step, summed over these steps; with one row, equal to steps
    decoded: int = 0  # tokens that these steps gave to rows: one per row, or more with speculation
    past_context: list[int] = field(default_factory=list)  # indices of the answers that decoded past the context

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds in which a row gains a token; with speculation, on average over the rows."""
        return 1e3 * self.decode_s / self.steps * self.fed / self.decoded if self.decoded else None

    @property
    def accepted(self) -> float | None:
        """With speculation: drafted tokens that a row accepts per step, on average."""
        return self.decoded / self.fed - 1 if self.fed else None

    def count(self, extended: int, seconds: float) -> None:
        """Counts the time that gave an answer's first token, after a question of `extended` tokens or a prompt."""
        if extended:
            self.extend_s, self.extend_tokens = self.extend_s + seconds, self.extend_tokens + extended
        else:
            self.prefill_s += seconds

    def then(self, later: "Stats") -> "Stats":
        """The figures of this call and a later one together, such as those of a conversation."""
        sums = "prefill_s prefill_tokens tokens_reused extend_s extend_tokens decode_s steps fed decoded".split()
        both = {name: getattr(self, name) + getattr(later, name) for name in sums}
        first = self.first_token_s
        if first is None and later.first_token_s is not None:
            first = self.prefill_s + later.first_token_s
        past = [*self.past_context, *(i for i in later.past_context if i not in self.past_context)]
        return replace(later, **both, first_token_s=first, past_context=past)

    def next_call(self) -> "Stats":
        """The figures with which another call begins."""
        return Stats(self.load_s, self.load_bytes, self.compile_s, self.compiles, self.products)
