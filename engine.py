"""The engine: loads a checkpoint, prefills prompts row by row, decodes them together.

Prompts of different lengths share a batch: each row has its own length, and a row that finishes is refilled. The
decode step is compiled once and, on CUDA, replayed as a graph; the host only issues commands and reads tokens
(loop.py).
"""

import startup  # noqa: F401

import functools
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import kv as methods
from checkpoint import load_checkpoint, present, read_config, read_eos_ids, read_json
from config import ModelConfig, rope_frequencies
from decoder import SLEEP, Decoder, Sampling, compiled_graphs
from device import compile_errors, free_bytes, memory_errors, pick_device, pick_dtype
from kv import Shape
from loop import Loop
from model import SLICE, Transformer
from progress import Listener, Phase, Stats, timed
from quantize import pack, quantize_modules, read_quantization
from sequence import Completion, Row
from tokenizer import Tokenizer, load_tokenizer

Prompt = str | list[int]


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


class Engine:
    """One model with one KV method. Make it with `Engine.load`.

    It serves one call at a time: a second one, from another thread or from a callback of the first, is refused.
    """

    no_tokenizer = "this engine has no tokenizer"  # why, as an error says it

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, eos: set[int], profile: dict, compile: bool,
        seed: int | None, on_phase: Listener | None = None,
    ):  # fmt: skip
        """A loaded model and the arguments of `load`; `use` gives it its caches."""
        with compile_errors():
            compiled_graphs()  # torch's compiler makes its folder when it is imported, and caches import it
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.eos = eos  # ids that end an answer
        self.profile, self.compile = profile, compile
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # its streams are then the current ones
        self.seed = torch.Generator().seed() % 2**32 if seed is None else seed
        self.lag = 1 if self.device.type == "cuda" else 0  # steps that the host reads behind the device
        self.on_phase = on_phase
        self.interrupted = False  # running answers are to end
        self.guard = threading.Lock()  # held by the call that uses the rows and caches
        self.requests = itertools.count()
        self.stats = Stats()
        self.called = 0.0  # when the running call of `generate` began
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
    ) -> "Engine":  # fmt: skip
        """Caches of another method or another size on the same weights; arguments and errors as in `load`."""
        counts = {"batch": batch, "max_new_tokens": max_new_tokens}
        for name, value in (counts if max_prompt is None else counts | {"max_prompt": max_prompt}).items():
            _check_count(name, value)
        self.method, self.budget, self.options = kv, budget, options or {}
        self.warned = False
        self.batch, self.max_prompt, self.max_new_tokens = batch, max_prompt, max_new_tokens
        self._release()
        if max_prompt is not None:
            self._reserve(max_prompt, max_new_tokens)
        else:  # say now, before the first prompt, what is wrong with the method's budget or options
            self._planned_bytes(self._plan(self._longest_prompt(max_new_tokens), max_new_tokens))
        return self

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        kv: str = "full",
        budget: int | float | None = None,
        options: dict | None = None,
        batch: int = 1,
        max_prompt: int | None = None,
        max_new_tokens: int = 256,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        compile: bool = True,
        seed: int | None = None,
        on_phase: Listener | None = None,
    ) -> "Engine":
        """Loads a converted checkpoint folder.

        budget: tokens a KV head, or a share of the prompt. options: the method's own, typed or as strings.
        max_prompt: caches are allocated for it now, and longer prompts are refused; else they follow the prompts.
        max_new_tokens: tokens a row may decode after its prompt, those fed by follow-ups included.
        dtype: default, the checkpoint's. on_phase: is told what the engine is busy with, see progress.py.
        Raises ValueError or FileNotFoundError with one line that says what to do.
        """
        methods.parse_options(kv, options or {})  # cheap refusals before the weights are read
        device, folder = pick_device(device), Path(checkpoint)
        config = read_config(folder)
        with torch.device("meta"):
            model = Transformer(ModelConfig.from_dict(config))
        if quantization := read_quantization(config):
            quantize_modules(model, **quantization)
        eos = read_eos_ids(folder, config, model.config.vocab_size)
        tokenizer, no_tokenizer = None, None
        try:
            tokenizer = load_tokenizer(folder)
        except (ValueError, FileNotFoundError) as error:
            no_tokenizer = str(error)  # token ids need none
        if tokenizer is not None:
            eos |= tokenizer.eos_ids
            used = max(set(range(tokenizer.vocab_size)) - set(tokenizer.special.values()))  # <pad> may lie beyond
            if used >= model.config.vocab_size:
                raise ValueError(
                    f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens and the model "
                    f"{model.config.vocab_size}: it belongs to another checkpoint"
                )
        dtype = pick_dtype(dtype or config["kv_fast"].get("dtype"))
        tensors = model.state_dict().values()
        needed = sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)
        free = free_bytes(device)
        if needed > free:
            raise ValueError(f"the weights need {needed / 1e9:.2f} GB on {device} and {free / 1e9:.2f} GB are free")
        with timed(on_phase, Phase("load", f"{needed / 1e9:.2f} GB")) as phase:
            pack(load_checkpoint(folder, model, device, dtype).requires_grad_(False))
        found = folder / "kv_profile.json"
        profile = methods.read_profile(read_json(found)) if present(found) else {}
        engine = cls(model, tokenizer, eos, profile, compile, seed, on_phase)
        engine.no_tokenizer = no_tokenizer or engine.no_tokenizer
        engine.stats.load_s, engine.stats.load_bytes = phase.seconds, needed
        return engine.use(kv, budget, options, batch, max_prompt, max_new_tokens)

    # What a caller asks

    @exclusive
    @memory_errors()
    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: list[str] | None = None,
        follow_ups: list[Iterable[Prompt]] | None = None,
        answer_prompts: bool = True,
        on_token: Callable[[int, int, str], None] | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Answers every prompt (text or ids), in order; more prompts than rows wait for a row.

        Caches that are too small are replaced by larger ones, and the step is compiled again; sizes step up by powers
        of two, so that this is rare, and `load(max_prompt=...)` avoids it.

        max_new_tokens: per answer; default, what `load` was given. stop: texts that end an answer and are cut off.
        follow_ups: per prompt, texts or ids that are fed after each answer and answered in turn; any iterable, asked
        for its next item when the answer before is complete. answer_prompts: if False, prompts are only prefilled,
        and all answers are to follow-ups. on_token(prompt index, token, text): each token of an
        answer, with the text that it completes. on_done(prompt index, completion): each prompt whose answers are
        complete, at once. Raises ValueError for what does not fit the model or the plan.
        """
        self.called, self.interrupted = time.perf_counter(), False
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        ids = [self.encode(prompt) for prompt in ([prompts] if single else prompts)]
        if not ids:
            return []
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        sampling = Sampling(temperature, top_k, top_p, self.seed)
        _check_count("max_new_tokens", limit)
        if stop and self.tokenizer is None:
            raise ValueError(f"{self.no_tokenizer}; without one, stop texts cannot be found")
        if isinstance(stop, str) or not all(stop or []):
            raise ValueError("stop must be a list of texts, none of them empty")
        # Lists of follow-ups are encoded now, so that a mistake in them is known before anything runs.
        asked = [[]] * len(ids) if follow_ups is None else list(follow_ups)
        if any(isinstance(f, str) for f in asked):
            raise ValueError("follow_ups must hold a list of texts or ids for each prompt, not a text")
        asked = [[self.encode(q, bos=False) for q in f] if isinstance(f, list | tuple) else f for f in asked]
        if len(asked) != len(ids):
            raise ValueError(f"{len(asked)} lists of follow-ups for {len(ids)} prompts")
        answers = [answer_prompts + len(f) if isinstance(f, list) else 1 for f in asked]
        fed = [sum(map(len, f)) if isinstance(f, list) else 0 for f in asked]
        decoded = [limit * a + f for a, f in zip(answers, fed, strict=True)]
        self._reserve(max(map(len, ids)), max(decoded))
        self.decoder.warm_up(sampling, max(map(len, ids)))
        self.stats.next_call()
        waiting = deque()
        for i, (prompt, f, new) in enumerate(zip(ids, asked, decoded, strict=True)):
            new = new if isinstance(f, list) else self.shape.max_new_tokens
            waiting.append(Row(i, prompt, f, len(prompt) + new - 1))  # the last token sampled is not fed
        completions = [row.completion for row in waiting]
        unheard = lambda *_: None  # noqa: E731
        Loop(self, waiting, answer_prompts, limit, stop or [], on_token or unheard, on_done or unheard).run()
        return completions

    def interrupt(self) -> None:
        """Ends the answers that `generate` is decoding: each keeps its tokens so far and gets the finish reason
        `interrupted`. Follow-ups and waiting prompts go on. Safe in a signal handler and from other threads."""
        self.interrupted = True

    @exclusive
    @memory_errors()
    def logits(
        self, prompt_ids: list[int] | list[list[int]], continuation_ids: list[int] | list[list[int]]
    ) -> Tensor | list[Tensor]:
        """[n, vocab] fp32 for n continuation tokens: row i is what token i is drawn from.

        Row 0 comes out of the prefill, the others out of decode steps that are fed the forced tokens. Lists of prompts
        and of continuations, no more than the engine has rows, are decoded together: a list of such tensors.
        """
        if single := not (prompt_ids and isinstance(prompt_ids[0], list)):
            prompt_ids, continuation_ids = [prompt_ids], [continuation_ids]
        if len(prompt_ids) > self.batch:
            raise ValueError(f"{len(prompt_ids)} prompts are more than the {self.batch} rows of this engine")
        texts = [
            (self.encode(prompt), self.encode(forced, bos=False))
            for prompt, forced in zip(prompt_ids, continuation_ids, strict=True)
        ]
        longest, new = (max(map(len, ids)) for ids in zip(*texts, strict=True))
        self._reserve(longest, new)
        self.decoder.warm_up(Sampling(), longest)
        planned = [len(prompt) + len(forced) - 1 for prompt, forced in texts]
        if max(planned) > self.config.max_length and not self.endless:
            self.warn_past_context()
        found = [torch.empty(len(forced), self.config.vocab_size, device=self.device) for _, forced in texts]
        for row, (prompt, _) in enumerate(texts):
            found[row][0] = self.prefill(row, prompt, planned[row])
            self.decoder.start(row, 0, len(prompt), row)
        for i in range(1, new):
            fed = {row: forced[i - 1] for row, (_, forced) in enumerate(texts) if i < len(forced)}
            logits = self.decoder.launch([fed.get(row, SLEEP) for row in range(self.batch)], longest + i, i)[1]
            for row in fed:
                found[row][i] = logits[row]
        return found[0] if single else found

    def encode(self, prompt: Prompt, bos: bool = True) -> list[int]:
        """Ids of a text, or the ids given, checked. Raises ValueError for what the model cannot be fed."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty")
            if self.tokenizer is None:
                raise ValueError(f"{self.no_tokenizer}; give token ids instead of text")
            prompt = self.tokenizer.encode(prompt, bos=bos)
        if not prompt:
            raise ValueError("the prompt is empty")
        if not all(isinstance(i, int) and 0 <= i < self.config.vocab_size for i in prompt):
            raise ValueError(f"token ids must be integers from 0 to {self.config.vocab_size - 1}")
        return list(prompt)

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

    # Caches

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

    def _reserve(self, prompt: int, new: int) -> None:
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

    # The device's work

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


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
