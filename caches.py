"""A model and its KV caches: plans, allocates, grows and frees them, and prefills prompts into them."""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

import kv as methods
from config import ModelConfig
from decoder import Decoder, compiled_graphs
from kv import Shape
from kv.parts.ranks import ALONE, Ranks
from model import SLICE, Transformer
from runtime import processes
from runtime.device import compile_errors
from runtime.prefix import Prefix, Setting
from runtime.speculator import Speculator
from runtime.tune import widen
from terminal.progress import Listener, Phase, Stats


def exclusive(method: Callable) -> Callable:
    """Gives an Engine method exclusive use of rows and caches: RuntimeError while another such call runs."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if not self.guard.acquire(blocking=False):
            raise RuntimeError(
                "this engine is busy with another call: wait until it returns, or load a second engine for a second "
                "thread or for calls from on_token"
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self.guard.release()

    return guarded


class Caches:
    """One model, the caches of one KV method, and the decode step that uses them."""

    def __init__(
        self,
        model: Transformer,
        eos: set[int],
        profile: dict,
        compile: bool,
        on_phase: Listener | None = None,
        ranks: Ranks = ALONE,
    ):
        with compile_errors():
            compiled_graphs()  # imports torch's compiler, which caches need: creating the compiler's folder can fail
        self.model, self.config, self.profile, self.compile = model, model.config, profile, compile
        self.eos = eos  # ids that end an answer
        self.ranks = ranks  # the processes that share the model, see runtime/tp.py
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # makes its streams the current ones
        else:
            widen(self.dtype)
        self.on_phase, self.stats = on_phase, Stats()
        self.guard = threading.Lock()  # held by the call that is using the rows and caches
        self.warned = False  # whether `warn_past_context` has warned
        self.method, self.budget, self.options, self.speculate = "full", None, {}, 0  # see `use`
        self.batch, self.max_prompt, self.max_new_tokens = 1, None, 1
        self.shape: Shape | None = None  # None: no caches yet
        self.endless = True  # rows can decode an unlimited number of tokens
        self.layers: list[methods.KV] = []
        self.decoder: Decoder | None = None

    @exclusive
    def use(
        self,
        kv: str,
        budget: int | float | None = None,
        options: dict | None = None,
        batch: int = 1,
        max_prompt: int | None = None,
        max_new_tokens: int = 256,
        speculate: int = 0,
    ) -> "Caches":
        """Switches to another method or size on the same weights; arguments and errors as in `load`."""
        counts = {"batch": batch, "max_new_tokens": max_new_tokens}
        for name, value in (counts if max_prompt is None else counts | {"max_prompt": max_prompt}).items():
            check_count(name, value)
        if speculate != 0:
            check_count("speculate", speculate)
        self.method, self.budget, self.options, self.speculate = kv, budget, options or {}, speculate
        self.warned = False
        self.batch, self.max_prompt, self.max_new_tokens = batch, max_prompt, max_new_tokens
        self._release()
        if max_prompt is not None:
            self.reserve(max_prompt, max_new_tokens)
        else:  # raise errors in the method's budget or options now, before the first prompt
            self._planned_bytes(self._plan(self._longest_prompt(max_new_tokens), max_new_tokens))
        return self

    @property
    def reuses_prompts(self) -> bool:
        """Whether prompts may share the beginning that they have in common, and memory is free for a copy of it."""
        if self.config.rope["rope_type"] == "dynamic" or not all(layer.keeps_prompts for layer in self.layers):
            return False
        free = processes.free_share(self.device)
        return processes.least(self.ranks, free // 2 - self.shape.full_bytes() // self.batch) > 0

    def _plan(self, max_prompt: int, max_new_tokens: int) -> Shape:
        if self.batch * (max_prompt + max_new_tokens) > 2**40:
            raise ValueError(
                f"{self.batch} x {max_prompt + max_new_tokens} tokens exceed the memory of any machine; "
                "lower --max-new-tokens or --batch"
            )
        return shape_of(
            self.config, self.dtype, self.device, self.batch, max_prompt, max_new_tokens, self.speculate, self.ranks
        )

    def _planned_bytes(self, shape: Shape) -> tuple[int, int]:
        return methods.planned_bytes(self.method, shape, self.budget, self.options, self.profile)

    def reserve(self, prompt: int, new: int) -> None:
        """Ensures caches for prompts of `prompt` tokens and `new` more; keeps the present ones if large enough."""
        self.check_length(prompt)
        new = max(new, self.max_new_tokens)
        if self.shape is None:
            return self._allocate(self._plan(prompt, new))
        has = self.shape
        if prompt > has.max_prompt or (new > has.max_new_tokens and not self.endless):
            shape = self._grown(max(prompt, has.max_prompt), max(new, has.max_new_tokens))
            print(
                f"allocating larger caches, for prompts of {shape.max_prompt} tokens and {shape.max_new_tokens} more",
                file=sys.stderr,
            )
            self._allocate(shape)

    def _grown(self, prompt: int, new: int) -> Shape:
        """Plans larger caches. A size that grows becomes a power of two, so that a slightly longer prompt needs no
        recompile; sizes stay as requested if powers of two do not leave half of the free memory for prefill.

        The prompt also stays as requested if the budget is a share of it: rounding would change the method's sizes.
        """
        has, windowed = self.shape, methods.METHODS[self.method].windowed
        longest = self.config.max_length if windowed else self._longest_prompt(new)
        self._release()  # so that its memory counts as free
        share = isinstance(self.budget, float) and self.budget != 1.0
        try:
            shape = self._plan(
                prompt if share or prompt <= has.max_prompt else max(prompt, min(_power_of_two(prompt), longest)),
                new if new <= has.max_new_tokens else _power_of_two(new),
            )
            self._check_memory(shape, spare=0.5)
            return shape
        except ValueError:
            return self._plan(prompt, new)

    def _longest_prompt(self, new: int) -> int:
        """The longest prompt every method accepts: with `new` more tokens it fits the model's window, if any."""
        window, longest = self.config.window, self.config.max_length
        return min(longest, max(1, window - new)) if window else longest

    @exclusive
    def close(self) -> None:
        """Frees the caches and ends their fetching threads; the next call allocates the caches again."""
        self._release()

    def _release(self) -> None:
        for layer in self.layers:
            layer.close()
        if self.decoder is not None:
            self.decoder.close()
        self.shape, self.layers, self.decoder, self.endless = None, [], None, True
        for layer in self.model.layers:
            layer.attention.kv = None

    def _check_memory(self, shape: Shape, spare: float = 0.0) -> None:
        """Raises ValueError if the caches would leave less than the share `spare` of the free memory."""
        device, host = self._planned_bytes(shape)
        apart = self.device.type != "cpu"
        for place, bytes_ in ((self.device, device), ("cpu", host)) if apart else ((self.device, device + host),):
            free = processes.free_share(torch.device(place))
            if processes.least(self.ranks, (1 - spare) * free - bytes_) < 0:
                raise ValueError(
                    f"the {self.method} cache of {self.batch} x {shape.planned} tokens needs {bytes_ / 1e9:.2f} GB on "
                    f"{place} and {free / 1e9:.2f} GB are free: shorten the prompt, lower --max-new-tokens, --batch or "
                    "--budget, or choose a --kv that keeps less"
                )

    def _allocate(self, shape: Shape) -> None:
        self._release()  # frees the old caches first
        self._check_memory(shape)
        shape = dataclasses.replace(shape, rope_speed=self.model.rope_speeds(self.batch))
        self.layers = methods.build(self.method, shape, self.budget, self.options, self.profile)
        self.endless = processes.least(self.ranks, all(layer.endless for layer in self.layers)) > 0
        self.model.set_kv(self.layers, self.batch, shape.rope_speed)
        self.decoder = (Speculator if self.speculate else Decoder)(
            self.model, self.layers, shape, sorted(self.eos), self.compile, self.stats, self.on_phase
        )
        self.shape = shape

    def prefill(self, row: int, prompt: list[int], planned: int | None = None, phase: Phase | None = None) -> Tensor:
        """Resets row `row` and prefills it; returns the logits [vocab] after the prompt.

        planned: the most tokens the row will hold. phase: counts the finished layers of a prompt beyond SLICE tokens.
        """
        for layer in self.layers:
            layer.reset(row)
        self.decoder.reset(row)
        long = phase is not None and self.on_phase is not None and len(prompt) > SLICE

        def count() -> None:
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # otherwise the host counts ahead of the device
            phase.done += 1
            self.tell(phase)

        if long:
            phase.layers = self.config.n_layer
        return self.model.prefill(torch.tensor(prompt, device=self.device), row, planned, count if long else None)

    def setting(self) -> Setting:
        """What prefixes of these caches depend on."""
        options = dataclasses.asdict(methods.parse_options(self.method, self.options | self.from_profile()))
        has, dtype = self.shape, str(self.dtype).removeprefix("torch.")
        plan = has.max_prompt, has.max_new_tokens
        return Setting(self.method, self.budget, options, *plan, dtype, self.speculate, self.ranks.count)

    def copy(self, row: int, tokens: list[int]) -> Prefix:
        """What row `row` holds, after the prompt `tokens`."""
        states = [layer.state(row, len(tokens)) for layer in self.layers]
        return Prefix(self.setting(), tokens, self.model.rope_speed[row].clone(), states)

    def restore(self, row: int, prefix: Prefix) -> None:
        """Resets row `row` and fills it with a prefix. Raises ValueError if a tensor does not fit."""
        for layer in self.layers:
            layer.reset(row)
        self.decoder.reset(row)
        self.model.rope_speed[row] = prefix.rope_speed.to(self.device)
        for layer, state in zip(self.layers, prefix.layers, strict=True):
            layer.restore(row, len(prefix.tokens), state)

    def extend(self, row: int, tokens: list[int], pos: int) -> Tensor:
        """Adds tokens to row `row`, which holds `pos`; returns the logits [vocab] after them."""
        return self.model.extend(torch.tensor(tokens, device=self.device), row, pos)

    def check_length(self, prompt: int) -> None:
        """Raises ValueError if a prompt of `prompt` tokens exceeds the model's context or `max_prompt`."""
        for limit, what in ((self.config.max_length, "the model's context"), (self.max_prompt, "max_prompt")):
            if limit is not None and prompt > limit:
                raise ValueError(f"the prompt has {prompt} tokens and {what} is {limit}")

    def kv_bytes(self) -> tuple[int, int, int]:
        """Bytes of the cache on the device and on the host, and of a full cache for the same plan."""
        if self.shape is None:
            raise ValueError("no cache is allocated yet: give max_prompt, or generate first")
        return (*methods.total_bytes(self.layers), self.shape.full_bytes())

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes of the cache that one step reads for a row of `length` tokens."""
        read = [layer.step_bytes(length) for layer in self.layers]
        return sum(device for device, _ in read), sum(host for _, host in read)

    def from_profile(self) -> dict:
        """The method's options that come from the checkpoint's kv_profile.json."""
        return methods.from_profile(self.method, self.options, self.profile)

    def fetched(self) -> tuple[int, int]:
        """Pool rows that steps requested from the host since allocation, and how many of them had to be fetched."""
        found = [layer.fetched() for layer in self.layers]
        return sum(wanted for wanted, _ in found), sum(brought for _, brought in found)

    def tell(self, phase: Phase) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def warn_past_context(self) -> None:
        """Warns once that a row has grown past the model's context."""
        if not self.warned:
            self.warned = True
            print(
                f"warning: decoding past the model's context of {self.config.max_length} tokens, where its text may "
                "make no sense",
                file=sys.stderr,
            )


def shape_of(
    c: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    batch: int,
    max_prompt: int,
    max_new_tokens: int,
    rewind: int = 0,
    ranks: Ranks = ALONE,
) -> Shape:
    """What KV methods receive about a model and a plan."""
    return Shape(
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_kv_head=c.n_kv_head,
        head_dim=c.head_dim,
        dim=c.dim,
        rope_type=c.rope["rope_type"],
        rope_theta=c.rope["rope_theta"],
        dtype=dtype,
        device=device,
        batch=batch,
        max_prompt=max_prompt,
        max_new_tokens=max_new_tokens,
        window=c.window,
        max_length=c.max_length,
        rewind=rewind,
        ranks=ranks,
    )


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
