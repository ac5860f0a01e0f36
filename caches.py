"""A model and its KV caches: planned, allocated, grown, given up; prompts prefilled into them."""

import functools
import sys
import threading
from collections.abc import Callable

import torch
from torch import Tensor

import kv as methods
from config import ModelConfig, rope_frequencies
from decoder import Decoder, compiled_graphs
from device import compile_errors, free_bytes
from kv import Shape
from model import SLICE, Transformer
from progress import Listener, Phase, Stats


def exclusive(method: Callable) -> Callable:
    """A method of Engine that needs its rows and caches for itself: RuntimeError while another such call runs."""

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
    """One model with the caches of one KV method, and the decode step over them."""

    def __init__(
        self, model: Transformer, eos: set[int], profile: dict, compile: bool, on_phase: Listener | None = None
    ):
        with compile_errors():
            compiled_graphs()  # torch's compiler makes its folder when it is imported, and caches import it
        self.model, self.config, self.profile, self.compile = model, model.config, profile, compile
        self.eos = eos  # ids that end an answer
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # its streams are then the current ones
        self.on_phase, self.stats = on_phase, Stats()
        self.guard = threading.Lock()  # held by the call that uses the rows and caches
        self.warned = False  # of a row past the model's context
        self.method, self.budget, self.options = "full", None, {}  # see `use`
        self.batch, self.max_prompt, self.max_new_tokens = 1, None, 1
        self.shape: Shape | None = None  # None: no caches yet
        self.layers: list[methods.KV] = []
        self.decoder: Decoder | None = None

    @exclusive
    def use(
        self, kv: str, budget: int | float | None = None, options: dict | None = None, batch: int = 1,
        max_prompt: int | None = None, max_new_tokens: int = 256,
    ) -> "Caches":  # fmt: skip
        """Caches of another method or another size on the same weights; arguments and errors as in `load`."""
        counts = {"batch": batch, "max_new_tokens": max_new_tokens}
        for name, value in (counts if max_prompt is None else counts | {"max_prompt": max_prompt}).items():
            check_count(name, value)
        self.method, self.budget, self.options = kv, budget, options or {}
        self.warned = False
        self.batch, self.max_prompt, self.max_new_tokens = batch, max_prompt, max_new_tokens
        self._release()
        if max_prompt is not None:
            self.reserve(max_prompt, max_new_tokens)
        else:  # say now, before the first prompt, what is wrong with the method's budget or options
            self._planned_bytes(self._plan(self._longest_prompt(max_new_tokens), max_new_tokens))
        return self

    @property
    def endless(self) -> bool:
        """Whether rows can decode any number of tokens."""
        return all(layer.endless for layer in self.layers)

    def _plan(self, max_prompt: int, max_new_tokens: int) -> Shape:
        if self.batch * (max_prompt + max_new_tokens) > 2**40:
            raise ValueError(f"{self.batch} x {max_prompt + max_new_tokens} tokens are more GB than there are; lower "
                             "--max-new-tokens or --batch")  # fmt: skip
        return shape_of(self.config, self.dtype, self.device, self.batch, max_prompt, max_new_tokens)

    def _planned_bytes(self, shape: Shape) -> tuple[int, int]:
        return methods.planned_bytes(self.method, shape, self.budget, self.options, self.profile)

    def reserve(self, prompt: int, new: int) -> None:
        """Caches for prompts of that many tokens and `new` more; those there are stay if they are large enough."""
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
        """The plan for caches that must grow: what grows becomes a power of two, so that the next prompt, a little
        longer, needs no other compile. The sizes asked for, if that does not leave half of the free memory to prefill.

        A budget that is a share of the prompt fixes a method's sizes: prompts are then planned as they are.
        """
        has, windowed = self.shape, methods.METHODS[self.method].windowed
        longest = self.config.max_length if windowed else self._longest_prompt(new)
        self._release()  # its memory counts as free
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
        """What every method can take: with `new` tokens more it stays within the model's window, if it has one."""
        window, longest = self.config.window, self.config.max_length
        return min(longest, max(1, window - new)) if window else longest

    @exclusive
    def close(self) -> None:
        """Gives up the caches, and threads that fetched for them; the next call allocates them again."""
        self._release()

    def _release(self) -> None:
        for layer in self.layers:
            layer.close()
        if self.decoder is not None:
            self.decoder.step = None  # it refers to the decoder, and that to the caches: their memory is to be free now
        self.shape, self.layers, self.decoder = None, [], None
        for layer in self.model.layers:
            layer.attention.kv = None

    def _check_memory(self, shape: Shape, spare: float = 0.0) -> None:
        """Raises ValueError if the caches leave less than the share `spare` of the free memory."""
        device, host = self._planned_bytes(shape)
        apart = self.device.type != "cpu"
        for place, bytes_ in ((self.device, device), ("cpu", host)) if apart else ((self.device, device + host),):
            if bytes_ > (1 - spare) * (free := free_bytes(torch.device(place))):
                raise ValueError(
                    f"the {self.method} cache of {self.batch} x {shape.planned} tokens needs {bytes_ / 1e9:.2f} GB on "
                    f"{place} and {free / 1e9:.2f} GB are free: shorten the prompt, lower --max-new-tokens, --batch or "
                    "--budget, or choose a --kv that keeps less"
                )

    def _allocate(self, shape: Shape) -> None:
        self._release()  # the old caches go first
        self._check_memory(shape)
        self.layers = methods.build(self.method, shape, self.budget, self.options, self.profile)
        self.model.set_kv(self.layers, self.batch)
        self.decoder = Decoder(
            self.model, self.layers, shape, sorted(self.eos), self.compile, self.stats, self.on_phase
        )
        self.shape = shape

    def prefill(
        self, row: int, prompt: list[int], planned: int | None = None, phase: Phase | None = None
    ) -> Tensor:
        """Resets row `row` and fills it: logits [vocab] after the prompt.

        planned: tokens that the row will hold at most. A long prompt's layers count in `phase`.
        """
        for layer in self.layers:
            layer.reset(row)
        self.decoder.reset(row)
        long = phase is not None and self.on_phase is not None and len(prompt) > SLICE

        def count() -> None:
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the host runs ahead of the device
            phase.done += 1
            self.tell(phase)

        if long:
            phase.layers = self.config.n_layer
        return self.model.prefill(torch.tensor(prompt, device=self.device), row, planned, count if long else None)

    def check_length(self, prompt: int) -> None:
        """Raises ValueError for more prompt tokens than the model's context, or `max_prompt`, allows."""
        for limit, what in ((self.config.max_length, "the model's context"), (self.max_prompt, "max_prompt")):
            if limit is not None and prompt > limit:
                raise ValueError(f"the prompt has {prompt} tokens and {what} is {limit}")

    def kv_bytes(self) -> tuple[int, int, int]:
        """Bytes of the cache on the device and on the host, and what the full cache would take for the same plan."""
        if self.shape is None:
            raise ValueError("no cache is allocated yet: give max_prompt, or generate first")
        return (*methods.total_bytes(self.layers), self.shape.full_bytes())

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes of its cache that a step reads for a row of so many tokens."""
        read = [layer.step_bytes(length) for layer in self.layers]
        return sum(device for device, _ in read), sum(host for _, host in read)

    def from_profile(self) -> dict:
        """The method's options that the checkpoint's kv_profile.json set."""
        return methods.from_profile(self.method, self.options, self.profile)

    def fetched(self) -> tuple[int, int]:
        """Rows that steps wanted from the host since the caches were allocated, and those that had to be fetched."""
        found = [layer.fetched() for layer in self.layers]
        return sum(wanted for wanted, _ in found), sum(brought for _, brought in found)

    def tell(self, phase: Phase) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def warn_past_context(self) -> None:
        """Says once that a row has outgrown the model's context."""
        if not self.warned:
            self.warned = True
            print(
                f"warning: decoding past the model's context of {self.config.max_length} tokens, where its text may "
                "make no sense",
                file=sys.stderr,
            )


def shape_of(
    c: ModelConfig, dtype: torch.dtype, device: torch.device, batch: int, max_prompt: int, max_new_tokens: int
) -> Shape:
    """What the KV methods are told of a model and a plan."""
    return Shape(
        n_layer=c.n_layer, n_head=c.n_head, n_kv_head=c.n_kv_head, head_dim=c.head_dim, dim=c.dim,
        rope_type=c.rope["rope_type"], rope_theta=c.rope["rope_theta"], dtype=dtype, device=device,
        batch=batch, max_prompt=max_prompt, max_new_tokens=max_new_tokens, window=c.window, max_length=c.max_length,
        rope_speeds=tuple(rope_frequencies(c.rope, c.head_dim, 1)[0].tolist()),
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    """The least that is not below n."""
    return 1 << (n - 1).bit_length()


def check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
