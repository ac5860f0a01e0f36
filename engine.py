"""The engine in one file, in the order in which a token meets it.

1. `Sampling`, `sample`: how the device chooses a token.
2. `RowState`, `decode_step`: the step that the device runs, one token in, one token out, for every row of the batch.
3. `Row`, `Answer`, `Decoding`: a sequence in the caches, and an answer while it is decoded.
4. `Engine`: loads a checkpoint, plans and allocates caches, prefills rows, and decodes them together in three verbs:
   schedule, launch, read.

Prompts of different lengths share a batch: each row has its own length, and a finished row takes the next prompt. On
CUDA the step is one graph and the host reads its tokens one step late, so that the device never waits. The host waits
for the device only at a prompt or question, to copy its ids and to read the token that continues it (with d2o and
simlayer also where attention decides what a layer keeps: tests/test_cuda_trace.py counts these waits), and for the
tokens of the previous step.
"""

import runtime.startup  # noqa: F401

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import kv as methods
from kv import Shape
from kv.parts.ops import hashed
from kv.parts.ranks import ALONE, Ranks
from model import Transformer, direct, through_layers
from runtime import cpu, prefix, speculate
from runtime.arguments import Prompt, as_prompts, check_count, check_sampling, is_prompt, token_ids
from runtime.checkpoint import fingerprint
from runtime.compile import compile_errors, compiled, compiled_graphs
from runtime.device import memory_errors, read_later
from runtime.forced import forced_logits
from runtime.parallel import join, least, load_model, same, together
from runtime.plan import check_memory, grown, longest_prompt, shape_of
from runtime.stats import Stats
from text.answer import AnswerText
from text.tokenizer import Tokenizer

CONTINUE = -1  # a command to a row: feed the token that it sampled last. A command of 0 or more is a token to feed
NOTHING, FAILED = -1, -2  # instead of a token: the row was asleep; its logits were not finite


# 1. Sampling


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. Temperature 0 or top_k 1 is greedy; else top_k and top_p cut the distribution."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed)

    @property
    def variant(self) -> str:
        """Which of three compiled steps this needs: greedy, plain or cut. Only `cut` sorts the vocabulary."""
        if self.temperature < 1e-6 or self.top_k == 1:  # dividing logits by less would overflow
            return "greedy"
        return "plain" if self.top_k is None and self.top_p is None else "cut"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What can change without a recompile: (temperature, top_k, top_p) as float64, and the seed."""
        cut = (self.temperature, min(self.top_k or 2**31, 2**31), self.top_p or 1.0)
        return torch.tensor(cut, dtype=torch.float64, device=device), torch.tensor(self.seed % 2**32, device=device)


def sample(logits: Tensor, variant: str, cut: Tensor, seed: Tensor, request: Tensor, pos: Tensor) -> Tensor:
    """logits [B, vocab] -> tokens [B], for requests [B] at positions [B]; FAILED where a logit is NaN or infinite."""
    finite = logits.amax(-1).isfinite()  # of a NaN and others, the maximum is NaN
    if variant != "greedy":
        logits = logits / cut[0].float()
        if variant == "cut":
            ordered = logits.sort(-1, descending=True).values
            rank = torch.arange(logits.shape[-1], device=logits.device)
            p = ordered.masked_fill(rank >= cut[1], -torch.inf).softmax(-1)
            kept = (p.cumsum(-1) - p < cut[2]) & (rank < cut[1]) | (rank == 0)
            threshold = ordered.masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < threshold, -torch.inf)
        logits = logits + gumbel(seed, request, pos, logits.shape[-1])
    return torch.where(finite, logits.argmax(-1), FAILED)


def gumbel(seed: Tensor, request: Tensor, pos: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [B, vocab]: the argmax of logits plus noise is a draw from their softmax.

    It is a hash of (seed, request, position): what a row samples depends on no other row, and on no timing.
    """
    state = hashed(hashed(hashed(seed) ^ request) ^ pos)[:, None]
    bits = hashed(state ^ hashed(torch.arange(vocab, device=pos.device)))
    u = ((bits >> 9).float() + 0.5) / 2**23  # exact in fp32 (23 bits plus a half), so never 0 or 1
    return -torch.log(-torch.log(u))


# 2. The step


class RowState(nn.Module):
    """The model, and what the device knows of each row, in buffers [B] that every step updates in place."""

    def __init__(self, model: Transformer, batch: int, eos: Iterable[int]):
        super().__init__()
        self.model, device = model, model.norm.weight.device
        # The token sampled last, how many tokens the row holds, how many it may still sample, its number for the noise.
        for name in ("token", "pos", "left", "request"):
            self.register_buffer(name, torch.zeros(batch, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("eos", torch.tensor(sorted(eos) or [-1], device=device), persistent=False)

    def wake(self, row: int, token: int, pos: int, left: int, request: int) -> None:
        """Lets row `row`, which holds `pos` tokens and has just sampled `token`, sample `left` more."""
        for buffer, value in ((self.token, token), (self.pos, pos), (self.left, left), (self.request, request)):
            buffer[row] = value


def decode_step(
    state: RowState, command: Tensor, variant: str, cut: Tensor, seed: Tensor, run: Callable = direct
) -> tuple[Tensor, Tensor]:
    """command [B] -> the token that each row samples [B,1], NOTHING where it is asleep, and the logits [B, vocab].

    CUDA compiles the step as a whole; a CPU compiles its parts, which are then called by `run` (cpu.Parts).
    """
    x, cos, sin, pos, live = run(enter, state, command)
    x = through_layers(state.model, run, x, cos, sin, pos, live)
    return run(leave, state, x, live, variant, cut, seed)


def enter(state: RowState, command: Tensor) -> tuple[Tensor, ...]:
    """command [B] -> what the layers take: x [B,1,C], cos and sin, positions [B] and which rows are live [B].

    A row falls asleep after its last token, and after an EOS, which is not fed. A token to feed wakes it.
    """
    fed = command >= 0
    ended = ~fed & (state.token[:, None] == state.eos).any(-1)
    state.token.copy_(torch.where(fed, command, state.token))
    live = (state.left > 0) & ~ended
    pos = torch.where(live, state.pos, (state.pos - 1).clamp(min=0))  # asleep: a position that the row holds
    return *state.model.embed(state.token[:, None], pos), pos, live


def leave(state: RowState, x: Tensor, live: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """x [B,1,C] -> the tokens that rows sample, and the logits that they are drawn from."""
    logits = state.model.logits(x[:, -1])
    state.pos.add_(live)
    token = sample(logits, variant, cut, seed, state.request, state.pos)
    state.left.copy_(torch.where(token == FAILED, 0, state.left - live.long()))
    state.token.copy_(torch.where(live & (token != FAILED), token, state.token))
    return torch.where(live, token, NOTHING)[:, None], logits


# 3. A row and its answers


class Row:
    """One sequence in the caches of an engine, from `Engine.start` until `close`; `Engine.ask` continues it."""

    def __init__(self, engine: "Engine", slot: int, tokens: list[int]):
        self.engine, self.slot = engine, slot
        self.tokens = tokens  # what the caches hold, or will hold once all launched steps have run
        self.prompt = len(tokens)  # how many of them were prefilled; the caches have room for max_new_tokens more
        self.pending: int | None = None  # the last token of an answer, if it is not in the caches yet
        self.logits: Tensor | None = None  # [vocab], after `tokens`, where no token was sampled from them yet

    def fork(self) -> "Row":
        """A copy of this row in a free row of the batch. Raises ValueError if none is free."""
        return self.engine.fork(self)

    def save(self, path: str | Path, chat: bool = False) -> int:
        """Writes the row to a file, which `Engine.load_row` reads (runtime/prefix.py); returns its tensors' bytes."""
        return self.engine.save_row(self, path, chat)

    def close(self) -> None:
        """Frees the row for another prompt."""
        self.engine.close_row(self)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)  # without the EOS
    text: str = ""
    finish_reason: str = ""  # stop, length, interrupted, or error if the logits were not finite; empty while it runs


@dataclass
class Completion:
    """What `Engine.generate` returns for one prompt."""

    prompt_tokens: int
    answers: list[Answer]  # to the prompt and, in a conversation, to each question after it

    @property
    def new_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def to_dict(self) -> dict:
        """text, tokens and finish_reason are those of the first answer; new_tokens counts all answers."""
        answers = [asdict(answer) for answer in self.answers]
        return {"prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens, **answers[0], "answers": answers}


@dataclass
class Call:
    """What `generate` and `ask` were asked for."""

    limit: int  # the most tokens of an answer
    stop: list[str]
    stepwise: bool  # questions are fed one token a step
    on_token: Callable[[int, int, str], None]
    on_answer: Callable[[int, Row, Answer], None]


class Decoding:
    """An answer that is being decoded."""

    def __init__(self, index: int, row: Row, limit: int, text: AnswerText):
        self.index, self.row, self.limit, self.text = index, row, limit, text
        self.answer = Answer()
        self.feed: deque[int] = deque()  # tokens of the question to feed, one a step
        self.wanted = limit  # samples to request from the device
        self.launched = 0  # steps whose tokens are not read yet
        self.interrupted = False  # the next token is the last

    def command(self) -> tuple[int, bool]:
        """The command for the row's next step, and whether the token that it samples belongs to the answer."""
        command = self.feed.popleft() if self.feed else CONTINUE
        counts = not self.feed
        self.wanted -= counts
        self.launched += 1
        return command, counts

    def take(self, token: int, ended: bool) -> str:
        """Adds a sampled token, or an EOS that ended the answer; returns the text that may now be shown."""
        answer = self.answer
        if not ended:
            answer.tokens.append(token)
        full = self.interrupted or len(answer.tokens) == self.limit
        visible = self.text.push(None if ended else token, ended or full)
        answer.text = self.text.text
        if ended or self.text.stopped:
            answer.finish_reason = "stop"
        elif full:
            answer.finish_reason = "interrupted" if self.interrupted else "length"
        return visible


@dataclass
class Step:
    """A launched step: what each row was given, and how to read what it gained."""

    rows: list[tuple[Decoding, int, bool]]  # with `Decoding.command`
    tokens: Callable[[], list[list[int]]]  # waits for the tokens [B][n] that rows gained, NOTHING after the last


# 4. The engine


def one_call(method: Callable) -> Callable:
    """Gives an Engine method the engine for itself: RuntimeError while another call runs."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(
                "this engine is busy with another call: wait until it returns, or load a second engine for a second "
                "thread or for calls from on_token"
            )
        try:
            with memory_errors():
                return method(self, *args, **kwargs)
        finally:
            self.lock.release()

    return guarded


class Engine:
    """One model with one KV method. Create it with `Engine.load`.

    It serves one call at a time. A second call, from another thread or from a callback, raises RuntimeError.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        eos: Iterable[int] = (),
        profile: dict | None = None,
        compile: bool = True,
        seed: int | None = None,
        ranks: Ranks = ALONE,
        progress: Callable[[Iterable, str], Iterable] = lambda items, what: items,
    ):
        """Takes a loaded model and arguments of `load`; call `use` to set up the caches."""
        self.model, self.config, self.ranks = model, model.config, ranks
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.tokenizer, self.eos, self.profile = tokenizer, set(eos), profile or {}
        self.compile, self.progress = compile, progress
        check_sampling(0.0, None, None, seed)
        self.seed = torch.Generator().seed() % 2**32 if seed is None else int(seed)
        self.lag = 1 if self.device.type == "cuda" else 0  # steps by which the host's reads trail the device
        self.lock, self.interrupted, self.called = threading.Lock(), False, 0.0
        self.stats, self.folder, self.no_tokenizer = Stats(), None, "this engine has no tokenizer"
        self.method, self.budget, self.options, self.speculate = "full", None, {}, 0  # see `use`
        self.batch, self.max_prompt, self.max_new_tokens = 1, None, 256
        self.shape: Shape | None = None  # None: no caches yet
        self.state, self.step, self.parts = None, None, []
        self.rows: list[Row | None] = []
        self.layers: list[methods.KV] = []
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # makes its streams the current ones
        with compile_errors():
            compiled_graphs()  # imports torch's compiler, which caches need: creating the compiler's folder can fail

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        kv: str = "full",
        budget: int | float | None = None,
        options: dict | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        compile: bool = True,
        seed: int | None = None,
        parallel: bool = True,
        progress: Callable[[Iterable, str], Iterable] = lambda items, what: items,
        **plan,
    ) -> "Engine":
        """Loads a converted checkpoint folder.

        kv, budget, options and plan: see `use`. dtype: default, the checkpoint's. parallel: under torchrun the
        processes share one model and make the same calls; if False, each has a whole one. progress: wraps what takes
        long, as tqdm(items, what) does. Raises ValueError or FileNotFoundError with one line that says what to do.
        """
        methods.parse_options(kv, options or {})  # reject bad options before the weights are read
        ranks = join() if parallel else ALONE
        begin = time.perf_counter()
        with together(ranks):
            loaded = load_model(Path(checkpoint), device, dtype, ranks)
            engine = cls(loaded.model, loaded.tokenizer, loaded.eos, loaded.profile, compile, seed, ranks, progress)
        engine.no_tokenizer, engine.folder = loaded.no_tokenizer or engine.no_tokenizer, Path(checkpoint)
        engine.stats.load_s, engine.stats.load_bytes = time.perf_counter() - begin, loaded.bytes
        engine.seed = same(ranks, engine.seed)
        return engine.use(kv, budget, options, **plan)

    # Caches

    @one_call
    def use(
        self,
        kv: str,
        budget: int | float | None = None,
        options: dict | None = None,
        batch: int = 1,
        max_prompt: int | None = None,
        max_new_tokens: int = 256,
        speculate: int = 0,
    ) -> "Engine":
        """Sets the KV method and the sizes of its caches; closes all rows.

        budget: tokens per KV head, or a share of the prompt. options: the method's options, typed or as strings.
        batch: rows decoded together. max_prompt: allocates caches for it now, and rejects longer prompts; by default
        caches grow with the prompts, by powers of two. max_new_tokens: tokens a row may hold after its prompt,
        questions included. speculate: tokens that the method drafts per step, for the full cache to verify; the answers
        are the full cache's. Raises ValueError with one line that says what to do.
        """
        counts = {"batch": batch, "max_new_tokens": max_new_tokens, "max_prompt": max_prompt, "speculate": speculate}
        for name, value in counts.items():
            if (name, value) not in (("max_prompt", None), ("speculate", 0)):
                check_count(name, value)
        if batch > 2**16:
            raise ValueError(f"{batch} rows exceed the memory of any machine; lower --batch")
        self.method, self.budget, self.options, self.speculate = kv, budget, options or {}, speculate
        self.batch, self.max_prompt, self.max_new_tokens = batch, max_prompt, max_new_tokens
        self._release()
        if max_prompt is not None:
            self._reserve(max_prompt, max_new_tokens)
        else:  # raise errors in the method's budget or options now, before the first prompt
            shape = self._plan(longest_prompt(self.config, max_new_tokens), max_new_tokens)
            methods.planned_bytes(kv, shape, *self._method()[1:])
        return self

    @one_call
    def close(self) -> None:
        """Frees the caches, closes all rows and ends fetching threads; the next call allocates the caches again."""
        self._release()

    def _release(self) -> None:
        for pool in methods.pools(self.layers):
            pool.close()
        for layer in self.model.layers:
            layer.attention.kv = None
        self.shape, self.layers, self.rows = None, [], [None] * self.batch
        self.state, self.step, self.parts = None, None, []

    def _plan(self, max_prompt: int, max_new_tokens: int) -> Shape:
        plan = self.batch, max_prompt, max_new_tokens, self.speculate
        return shape_of(self.config, self.dtype, self.device, *plan, self.ranks)

    def _reserve(self, prompt: int, new: int) -> None:
        """Ensures caches for prompts of `prompt` tokens and `new` more; keeps the present ones if large enough."""
        self.check_length(prompt)
        has, new = self.shape, max(new, self.max_new_tokens)
        if has is None:
            return self._allocate(self._plan(prompt, new))
        if prompt <= has.max_prompt and (new <= has.max_new_tokens or self.endless):
            return None
        if any(self.rows):
            has = f"{has.max_prompt} tokens and {has.max_new_tokens} more"
            raise ValueError(f"rows are in use, and the caches hold prompts of {has}: close rows, or load larger ones")
        self._release()  # so that its memory counts as free
        shape = grown(has, self._method(), prompt, new, self.config)
        sizes = f"prompts of {shape.max_prompt} tokens and {shape.max_new_tokens} more"
        print(f"allocating larger caches, for {sizes}", file=sys.stderr)
        self._allocate(shape)

    def _allocate(self, shape: Shape) -> None:
        self._release()
        check_memory(shape, self._method())
        self.model.set_rows(shape.batch)
        shape = replace(shape, rope_speed=self.model.rope_speed)
        self.layers = methods.build(self.method, shape, *self._method()[1:])
        self.model.set_kv(self.layers)
        self.state, self.parts = RowState(self.model, shape.batch, self.eos), []
        if self.speculate:
            self.step = speculate.rounds(self.state, self.speculate, sample, self._compiled)
        else:
            self.step = self._compiled(decode_step)
        self.shape, self.endless = shape, least(self.ranks, all(layer.endless for layer in self.layers)) > 0
        self.context = float("inf") if self.endless else self.config.max_length
        self.warm: set[str] = set()  # compiled variants of the step
        self.sizes, self.commands, self.warned = [], None, False

    def _method(self) -> tuple:
        """What kv.build takes besides the shape."""
        return self.method, self.budget, self.options, self.profile

    def _compiled(self, step: Callable) -> Callable:
        """A step, or a pass of one, as this device runs it fastest: a CUDA graph, or compiled parts."""
        if not self.compile:
            return step
        if self.device.type == "cuda":
            return compiled(step, options={"triton.cudagraphs": True, "coordinate_descent_tuning": True})
        self.parts.append(cpu.Parts())
        return partial(step, run=self.parts[-1])

    # Rows

    @one_call
    def start(self, prompts: Prompt | list[Prompt]) -> list[Row]:
        """Prefills each prompt into a free row of the batch. Raises ValueError if there are too few."""
        ids = self._encode_all(prompts)
        self._check_free(len(ids))
        self._begin_call()
        if ids:
            self._reserve(max(map(len, ids)), self.max_new_tokens)
        rows: list[Row] = []
        try:
            for prompt in ids:
                rows.append(self._prefill(prompt, self.max_new_tokens))
        except BaseException:
            for row in rows:
                self._free(row)
            raise
        return rows

    def _prefill(self, prompt: list[int], new: int) -> Row:
        """A prompt, which `new` tokens are expected to follow, in the first free row."""
        row, begin = self._free_row(prompt), time.perf_counter()
        layers = partial(self.progress, what=f"prefill {len(prompt)} tokens")
        ids = torch.tensor(prompt, device=self.device)
        row.logits = self.model.prefill(row.slot, ids, len(prompt) + new - 1, layers)
        self.rows[row.slot] = row
        self.stats.prefill_s += time.perf_counter() - begin
        self.stats.prefill_tokens += len(prompt)
        return row

    def _free_row(self, tokens: list[int]) -> Row:
        """An empty row that is to hold these tokens; it stays free until it is entered in `rows`."""
        self._check_free(1)
        row = Row(self, self.rows.index(None), tokens)
        for layer in self.layers:
            layer.reset(row.slot)
        self.state.wake(row.slot, 0, 0, 0, 0)
        self._forget()
        return row

    @one_call
    def fork(self, row: Row) -> Row:
        """`Row.fork`."""
        self._check_rows([row])
        states = [layer.state(row.slot, len(row.tokens)) for layer in self.layers]
        copy = self._restore(list(row.tokens), row.prompt, self.model.rope_speed[row.slot], states)
        copy.pending, copy.logits = row.pending, row.logits
        return copy

    def _restore(self, tokens: list[int], prompt: int, rope_speed: Tensor, states: list[dict[str, Tensor]]) -> Row:
        """A row with the `KV.state` of each layer. Raises ValueError if a tensor does not fit."""
        row = self._free_row(tokens)
        row.prompt = prompt
        self.model.rope_speed[row.slot] = rope_speed.to(self.device)
        for layer, state in zip(self.layers, states, strict=True):
            layer.restore(row.slot, len(tokens), state)
        self.rows[row.slot] = row
        self.stats.tokens_reused += len(tokens)
        return row

    @one_call
    def save_row(self, row: Row, path: str | Path, chat: bool = False) -> int:
        """`Row.save`."""
        self._check_rows([row])
        return prefix.save(row, path, chat)

    @one_call
    def load_row(self, path: str | Path) -> Row:
        """A row that `Row.save` wrote, in a free row of caches with the same plan, which are allocated if need be.

        Raises ValueError if the file is damaged or was saved with another checkpoint, method or plan.
        """
        return prefix.load(self, path)

    @one_call
    def close_row(self, row: Row) -> None:
        """`Row.close`."""
        self._free(row)

    def _free(self, row: Row) -> None:
        if self.rows[row.slot : row.slot + 1] == [row]:
            self.rows[row.slot] = None
            self.state.left[row.slot] = 0

    def _check_free(self, rows: int) -> None:
        if rows > self.rows.count(None):
            free = f"{self.rows.count(None)} of {self.batch} rows are free"
            raise ValueError(f"{free} and {rows} are needed: close rows, or load with a larger batch")

    def _check_rows(self, rows: list[Row]) -> None:
        if any(self.rows[row.slot : row.slot + 1] != [row] for row in rows):
            raise ValueError("a row was closed, or belongs to another engine")
        if len(set(map(id, rows))) < len(rows):
            raise ValueError("a row is given twice")

    # Answers

    @one_call
    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_new_tokens: int | None = None,
        stop: list[str] | None = None,
        on_token: Callable[[int, int, str], None] | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
        **sampling,
    ) -> list[Completion]:
        """Answers every prompt (text or ids), in order; prompts beyond the free rows wait for one.

        max_new_tokens: per answer; default, as in `use`. stop: texts that end an answer and are cut off. sampling:
        temperature, top_k and top_p, see `Sampling`. on_token(index, token, text): called for each token of an answer,
        with the text that it completes. on_done(index, completion): called as soon as an answer is complete.
        Raises ValueError for arguments that do not fit the model or the plan.
        """
        ids = self._encode_all(prompts)
        completions = [Completion(len(prompt), []) for prompt in ids]

        def complete(index: int, row: Row, answer: Answer) -> None:
            self._free(row)
            completions[index].answers.append(answer)
            if on_done is not None:
                on_done(index, completions[index])

        call = self._begin_answers(max_new_tokens, stop, sampling, on_token=on_token, on_answer=complete)
        if ids:
            self._check_free(1)
            self._reserve(max(map(len, ids)), call.limit)
            self._warm_up(max(map(len, ids)))
            self._decode(deque((index, None, prompt) for index, prompt in enumerate(ids)), call)
        return completions

    @one_call
    def ask(
        self,
        rows: list[Row],
        questions: list[Prompt] | None = None,
        max_new_tokens: int | None = None,
        stop: list[str] | None = None,
        stepwise: bool = False,
        on_token: Callable[[int, int, str], None] | None = None,
        **sampling,
    ) -> list[Answer]:
        """Adds a question (text or ids) to each row and answers them all together; without questions, continues rows.

        Each token of a question attends to everything that its row holds. stepwise: feeds questions one token per
        decode step instead, with the method's own attention. Other arguments and errors as in `generate`; ValueError
        also if a row has no room for its question.
        """
        questions = [[] for _ in rows] if questions is None else [self.encode(q, bos=False) for q in questions]
        if len(questions) != len(rows):
            raise ValueError(f"{len(questions)} questions for {len(rows)} rows")
        self._check_rows(rows)
        answers: dict[int, Answer] = {}
        call = self._begin_answers(
            max_new_tokens,
            stop,
            sampling,
            on_token,
            lambda index, row, answer: answers.update({index: answer}),
            stepwise,
        )
        for row, question in zip(rows, questions, strict=True):
            self._room(row, question)
        if rows:
            self._warm_up(self.shape.max_prompt)
        self._decode(deque(zip(range(len(rows)), rows, questions, strict=True)), call)
        return [answers[index] for index in range(len(rows))]

    def interrupt(self) -> None:
        """Ends each answer that is being decoded with its next token, and the finish reason `interrupted`. Waiting
        prompts are still answered. Safe in a signal handler and from other threads.

        Raises RuntimeError if several ranks share the model: they would not all stop at the same token.
        """
        if self.ranks.count > 1:
            raise RuntimeError("answers that several ranks decode cannot be interrupted")
        self.interrupted = True

    @one_call
    def logits(self, prompts: Prompt | list[Prompt], continuations: Prompt | list[Prompt]) -> Tensor | list[Tensor]:
        """Logits [n, vocab] fp32 for the n ids of a continuation: token i is drawn from row i.

        Prefill computes row 0; decode steps, fed the continuation, compute the others. Lists of prompts and of
        continuations, at most one for each free row, are decoded together and return a list of such tensors.
        """
        single, continuations = is_prompt(prompts), [continuations] if is_prompt(prompts) else continuations
        ids, forced = self._encode_all(prompts), [self.encode(ids, bos=False) for ids in continuations]
        if len(ids) != len(forced) or not ids:
            raise ValueError(f"{len(forced)} continuations for {len(ids)} prompts")
        self._check_free(len(ids))
        self._begin_answers(max(map(len, forced)), None, {})
        self._reserve(max(map(len, ids)), max(map(len, forced)))
        self._warm_up(max(map(len, ids)))
        if max(len(prompt) + len(tokens) - 1 for prompt, tokens in zip(ids, forced, strict=True)) > self.context:
            self._warn_past_context()
        found = forced_logits(self, ids, forced)
        return found[0] if single else found

    # Decoding: schedule, launch, read

    def _decode(self, waiting: deque[tuple[int, Row | None, list[int]]], call: Call) -> None:
        """Answers what waits: a question (perhaps none) to a row, or a prompt, for which there is no row yet."""
        running, asked = [], [row for _, row, _ in waiting if row is not None]
        flight: deque[Step] = deque()
        begin, before = time.perf_counter(), self.stats.prefill_s + self.stats.extend_s
        try:
            while self._schedule(running, waiting, call) or flight:
                step = self._launch(running)
                if step is not None:
                    flight.append(step)
                while len(flight) > (self.lag if step else 0):
                    self._read(flight.popleft(), call)
        except BaseException:
            for row in [*asked, *(decoding.row for decoding in running)]:  # what they hold is not known
                self._free(row)
            raise
        elsewhere = self.stats.prefill_s + self.stats.extend_s - before
        self.stats.decode_s = time.perf_counter() - begin - elsewhere

    def _schedule(self, running: list[Decoding], waiting: deque, call: Call) -> list[Decoding]:
        """Takes complete answers out, and lets what waits begin where a row is free."""
        if self.interrupted:
            self.interrupted = False
            for decoding in running:
                decoding.interrupted = True
                # The last token is a step's in flight, or else the next sample's.
                last = 0 if decoding.launched and not decoding.feed else 1
                decoding.wanted = self.state.left[decoding.row.slot] = last
        while True:
            for decoding in [decoding for decoding in running if decoding.answer.finish_reason]:
                running.remove(decoding)
                call.on_answer(decoding.index, decoding.row, decoding.answer)
            if not waiting or (waiting[0][1] is None and None not in self.rows):
                return running
            index, row, question = waiting.popleft()
            row, question = (self._prefill(question, call.limit), []) if row is None else (row, question)
            self._open(index, row, question, running, call)

    def _launch(self, running: list[Decoding]) -> Step | None:
        """Launches a step for the rows that need one; None if all wait for tokens that are not read yet."""
        stepping = [decoding for decoding in running if decoding.wanted > 0]
        if not stepping:
            return None
        rows, fed = [(decoding, *decoding.command()) for decoding in stepping], {}
        for decoding, command, counts in rows:
            if command != CONTINUE:
                fed[decoding.row.slot] = command
                self.state.left[decoding.row.slot] = decoding.wanted + 1 if counts else 1
        most = [(decoding.row, decoding.launched * (self.speculate + 1)) for decoding in running]
        length, new = (max(len(row.tokens) - start * row.prompt + n for row, n in most) for start in (0, 1))
        tokens, _ = self._step(fed, length, new)
        return Step(rows, read_later(tokens))

    def _step(self, fed: dict[int, int], length: int, new: int) -> tuple[Tensor, Tensor]:
        """Launches a step, after which no row holds more than `length` tokens, `new` of them decoded.

        fed: tokens by row; the other rows continue. Returns what `decode_step` does, valid until the next step.
        """
        commands = [fed.get(row, CONTINUE) for row in range(self.batch)]
        sizes = [layer.before_step(length, new) for layer in self.layers]
        if sizes != self.sizes:
            self._forget()
            self.sizes = sizes
        if commands != self.commands:  # pinned: a copy from other memory would wait for the last step
            pinned = torch.tensor(commands, pin_memory=self.device.type == "cuda")
            self.commands, self.command = commands, pinned.to(self.device, non_blocking=True)
        before = compiled_graphs()
        if self.compile and self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            found = self.step(self.state, self.command, self.sampling.variant, *self.knobs)
        self.stats.compiles += compiled_graphs() - before
        return found

    def _read(self, step: Step, call: Call) -> None:
        """Waits for a step's tokens and adds them to the rows and their answers."""
        tokens, fed, decoded = step.tokens(), 0, 0
        for decoding, command, counts in step.rows:
            row, gained = decoding.row, [t for t in tokens[decoding.row.slot] if t != NOTHING]
            decoding.launched -= 1
            if decoding.answer.finish_reason:  # it ended while this step was in flight
                if gained and not self.speculate:  # which fed the answer's last token
                    row.tokens.append(row.pending)
                    row.pending = None
                continue
            decoding.wanted -= max(0, len(gained) - 1)
            fed += bool(gained)
            for token in gained:
                row.tokens.append(row.pending if command == CONTINUE else command)
                row.pending, command = token, CONTINUE
                decoded += 1
                if counts:
                    self._take(decoding, token, call)
                if decoding.answer.finish_reason:
                    break
        self.stats.fed, self.stats.decoded = self.stats.fed + fed, self.stats.decoded + decoded
        self.stats.steps += decoded > 0

    def _take(self, decoding: Decoding, token: int, call: Call) -> None:
        """Adds the row's `pending` token to its answer."""
        row, ended = decoding.row, token in self.eos
        if self.stats.first_token_s is None:
            self.stats.first_token_s = time.perf_counter() - self.called
        if token == FAILED:
            decoding.answer.finish_reason, row.pending = "error", None
            print(f"the model's logits are not finite in {self.dtype}: try another --dtype", file=sys.stderr)
            return
        if len(row.tokens) > self.context and decoding.index not in self.stats.past_context:
            self._warn_past_context()
            self.stats.past_context.append(decoding.index)
        text = decoding.take(token, ended)
        if ended:
            row.pending = None  # it is not fed
        if decoding.answer.finish_reason:
            self.state.left[row.slot] = 0
        if text or not ended:
            call.on_token(decoding.index, token, text)

    def _room(self, row: Row, question: list[int]) -> int:
        """The most tokens of an answer to a question. Raises ValueError if there is no room for one."""
        tokens = len(row.tokens) + (row.pending is not None) + len(question)
        if tokens == len(row.tokens) and row.logits is None:
            raise ValueError("the answer is complete: give a question")
        room = row.prompt + self.shape.max_new_tokens - tokens + 1
        if room < 1 and not self.endless:
            raise ValueError(
                f"no room for another question: the caches hold {self.shape.max_new_tokens} tokens after the prompt"
            )
        return 2**31 if self.endless else room

    def _open(self, index: int, row: Row, question: list[int], running: list[Decoding], call: Call) -> None:
        """Begins an answer: adds the question to the row, and samples the first token unless steps feed it."""
        text = AnswerText(self.tokenizer.stream() if self.tokenizer else None, call.stop)
        decoding = Decoding(index, row, min(call.limit, self._room(row, question)), text)
        running.append(decoding)
        tokens, begin = question if row.pending is None else [row.pending, *question], time.perf_counter()
        logits, row.logits = row.logits, None
        if len(tokens) == 1 or (tokens and call.stepwise):
            decoding.feed.extend(tokens)
            self.state.wake(row.slot, 0, len(row.tokens), 0, index)
            return
        if tokens:
            logits = self.model.extend(row.slot, torch.tensor(tokens, device=self.device), len(row.tokens))
            row.tokens += tokens
            self._forget()
        counter = torch.tensor([[index], [len(row.tokens)]], device=self.device)
        row.pending = int(sample(logits[None], self.sampling.variant, *self.knobs, *counter))
        self.stats.count(len(tokens), time.perf_counter() - begin)
        self.state.wake(row.slot, max(row.pending, 0), len(row.tokens), decoding.limit - 1, index)
        decoding.wanted -= 1
        self._take(decoding, row.pending, call)

    def _begin_call(self) -> None:
        self.called, self.interrupted, self.stats = time.perf_counter(), False, self.stats.next_call()

    def _begin_answers(
        self,
        limit: int | None,
        stop: list[str] | None,
        sampling: dict,
        on_token: Callable | None = None,
        on_answer: Callable | None = None,
        stepwise: bool = False,
    ) -> Call:
        """Checks what `generate` and `ask` share."""
        limit, nothing = self.max_new_tokens if limit is None else limit, lambda *_: None
        check_count("max_new_tokens", limit)
        sampling = Sampling(**sampling, seed=self.seed)
        if stop and self.tokenizer is None:
            raise ValueError(f"{self.no_tokenizer}; without one, stop texts cannot be found")
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop or []):
            raise ValueError("stop must be a list of texts, none of them empty")
        self._begin_call()
        self.sampling, self.knobs = sampling, sampling.tensors(self.device)
        return Call(limit, stop or [], stepwise, on_token or nothing, on_answer or nothing)

    def _warm_up(self, prompt: int) -> None:
        """Compiles (and on CUDA captures) the step with every row asleep, before anything is timed."""
        if not self.compile or self.sampling.variant in self.warm:
            return
        begin = time.perf_counter()
        with compile_errors():
            for _ in self.progress([None], what=f"compile the {self.sampling.variant} decode step"):
                # Verification first: drafts, of which there are more, decide last.
                for tokens in [] if self.warm else sorted({1, self.speculate + 1}, reverse=True):
                    self.stats.products |= cpu.tune(self.model, self.shape, tokens)
                for _ in range(3 if self.device.type == "cuda" else 1):  # CUDA graph: run, record, replay
                    self._step({}, prompt + 1, 1)[0].tolist()
        self.stats.compile_s += time.perf_counter() - begin
        self.warm.add(self.sampling.variant)

    def _forget(self) -> None:
        for parts in self.parts:
            parts.forget()

    # Arguments and figures

    def encode(self, prompt: Prompt, bos: bool = True) -> list[int]:
        """The ids of a text, or the given ids, checked. Raises ValueError if the model cannot take them."""
        if isinstance(prompt, str) and prompt:
            if self.tokenizer is None:
                raise ValueError(f"{self.no_tokenizer}; give token ids instead of text")
            prompt = self.tokenizer.encode(prompt, bos=bos)
        return token_ids(prompt, self.config.vocab_size)

    def _encode_all(self, prompts: Prompt | list[Prompt]) -> list[list[int]]:
        return [self.encode(prompt) for prompt in as_prompts(prompts)]

    def check_length(self, prompt: int) -> None:
        """Raises ValueError if a prompt of `prompt` tokens exceeds the model's context or `max_prompt`."""
        for limit, what in ((self.config.max_length, "the model's context"), (self.max_prompt, "max_prompt")):
            if limit is not None and prompt > limit:
                raise ValueError(f"the prompt has {prompt} tokens and {what} is {limit}")

    def _warn_past_context(self) -> None:
        if not self.warned:
            past = f"past the model's context of {self.config.max_length} tokens, where its text may make no sense"
            print(f"warning: decoding {past}", file=sys.stderr)
        self.warned = True

    @functools.cached_property
    def weights(self) -> str:
        """What identifies the checkpoint in a saved row."""
        return fingerprint(self.folder)

    def kv_bytes(self) -> tuple[int, int, int]:
        """Bytes of the cache on the device and on the host, and of a full cache for the same plan."""
        if self.shape is None:
            raise ValueError("no cache is allocated yet: give max_prompt, or generate first")
        return (*methods.total_bytes(self.layers), self.shape.full_bytes())

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes of the cache that one step reads for a row of `length` tokens."""
        device, host = zip(*(layer.step_bytes(length) for layer in self.layers), strict=True)
        return sum(device), sum(host)

    def from_profile(self) -> dict:
        """The method's options that come from the checkpoint's kv_profile.json."""
        return methods.from_profile(self.method, self.options, self.profile)

    def fetched(self) -> tuple[int, int]:
        """Pool rows that steps requested from the host since allocation, and how many of them had to be fetched."""
        wanted, brought = zip((0, 0), *(pool.counts for pool in methods.pools(self.layers)), strict=True)
        return sum(wanted), sum(brought)
