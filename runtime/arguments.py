"""Checks of calls of the engine from Python, and of what they pass to it."""

import functools
import sys
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from reprlib import repr as shortened

from runtime.device import memory_errors

Prompt = str | Iterable[int]  # a text, or token ids: a list, an array or a tensor


def one_call(method: Callable) -> Callable:
    """Gives a method of an engine, or of a row, the engine for itself: RuntimeError while another call runs."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        lock = getattr(self, "engine", self).lock
        if not lock.acquire(blocking=False):
            raise RuntimeError(
                "this engine is busy with another call: wait until it returns, or load a second engine for a second "
                "thread or for calls from on_token"
            )
        try:
            with memory_errors():
                return method(self, *args, **kwargs)
        finally:
            lock.release()

    return guarded


def is_prompt(x: object) -> bool:
    """Whether x is one prompt, a text or token ids, rather than a list of prompts."""
    if hasattr(x, "tolist"):
        return x.ndim == 1
    return isinstance(x, str) or (isinstance(x, list | tuple | range) and bool(x) and isinstance(x[0], Integral))


def as_prompts(x: object) -> list:
    """The prompts of one prompt, or of a list of prompts. Raises ValueError if x is neither."""
    if is_prompt(x):
        return [x]
    prompts = x.tolist() if hasattr(x, "tolist") else x
    if not isinstance(prompts, Iterable) or isinstance(prompts, dict | set | bytes):
        raise ValueError(f"prompts are texts or lists of token ids, not {type(x).__name__}")
    return list(prompts)


def token_ids(prompt: Prompt, vocab: int) -> list[int]:
    """The ids as a list. Raises ValueError if they are none, or not below `vocab`."""
    empty = isinstance(prompt, list | tuple | str) and not prompt
    if not empty and (isinstance(prompt, str) or not is_prompt(prompt)):
        raise ValueError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
    ids = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
    if not ids:
        raise ValueError("the prompt is empty")
    if not all(isinstance(i, Integral) and not isinstance(i, bool) and 0 <= i < vocab for i in ids):
        raise ValueError(f"token ids must be integers from 0 to {vocab - 1}")
    return [int(i) for i in ids]


def check_count(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {shortened(value)}")


def check_sampling(
    temperature: object = 0.0,
    top_k: object = None,
    top_p: object = None,
    min_p: object = None,
    repetition_penalty: object = 1.0,
    seed: object = None,
) -> None:
    optional = [("top-k", top_k, Integral), ("top-p", top_p, Real), ("min-p", min_p, Real), ("seed", seed, Integral)]
    required = [("temperature", temperature, Real), ("repetition penalty", repetition_penalty, Real)]
    for name, value, kind in required + [x for x in optional if x[1] is not None]:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"the {name} must be a {'whole ' * (kind is Integral)}number, not {shortened(value)}")
    if not 0 <= temperature <= 1e30:
        raise ValueError(f"the temperature must be 0 or more, not {str(temperature)[:9]}")
    if top_k is not None and top_k < -1:
        raise ValueError(f"top-k must be at least 1, or 0 or -1 for all tokens, not {shortened(top_k)}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top-p must lie between 0 and 1, not {shortened(top_p)}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min-p must lie between 0 and 1, not {shortened(min_p)}")
    if not 1e-6 <= repetition_penalty <= 1e6:  # beyond, logits could overflow
        raise ValueError(f"the repetition penalty must lie between 1e-6 and 1e6, not {shortened(repetition_penalty)}")
    if temperature == 0 and (top_p not in (None, 1) or min_p or top_k not in (None, 0, -1, 1)):
        raise ValueError("temperature 0 takes the best token: top-k, top-p and min-p need a --temperature above 0")


def check_penalty(repetition_penalty: float, speculate: int | None) -> None:
    if speculate and repetition_penalty != 1:
        raise ValueError(
            "speculation verifies several tokens at once, and a repetition penalty changes with each: leave out "
            "--speculate, or set --repetition-penalty 1"
        )


def check_stop(stop: object, tokenizer: object, no_tokenizer: str) -> None:
    if stop and tokenizer is None:
        raise ValueError(f"{no_tokenizer}; without one, stop texts cannot be found")
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop or []):
        raise ValueError("stop must be a list of texts, none of them empty")


def renamed(max_new_tokens: object) -> object:
    """The `room` of `Engine.use` under its old name, which the next release will not accept."""
    print("note: max_new_tokens of Engine.load and use is now called room", file=sys.stderr)
    return max_new_tokens


def check_sizes(batch: object, max_prompt: object, room: object, speculate: object, chunk: object) -> None:
    check_count("batch", batch)
    check_count("room", room)
    if max_prompt is not None:
        check_count("max_prompt", max_prompt)
    if speculate != 0:
        check_count("speculate", speculate)
    if chunk != 0:
        check_count("chunk", chunk)
    if batch > 2**16:
        raise ValueError(f"{batch} rows exceed the memory of any machine; lower --batch")


def check_length(tokens: int, limit: int | None, what: str) -> None:
    if limit is not None and tokens > limit:
        raise ValueError(f"the prompt has {tokens} tokens and {what} is {limit}")


def check_free(engine, rows: int) -> None:
    """Raises ValueError unless the engine has so many free rows."""
    if rows > engine.rows.count(None):
        free = f"{engine.rows.count(None)} of {engine.batch} rows are free"
        raise ValueError(f"{free} and {rows} are needed: close rows, or load with a larger batch")


def check_rows(engine, rows: list) -> None:
    """Raises ValueError unless these are different open rows of the engine."""
    if any(row is None or not any(row is other for other in engine.rows) for row in rows):
        raise ValueError("a row was closed, or belongs to another engine")
    if len(set(map(id, rows))) < len(rows):
        raise ValueError("a row is given twice")
