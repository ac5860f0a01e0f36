"""The engine in one file, in the order in which a token meets it.

1. `Sampling`, `sample`: how the device chooses a token.
2. `RowState`, `decode_step`: the step that the device runs, one token in, one token out, for every row of the batch.
3. `Row`, `Request`, `Launched`: a sequence in the caches, an answer while it is decoded, a step with unread tokens.
4. `Engine`: its calls, then what they do: check, allocate caches, prefill rows, and schedule, launch and read steps.

Prompts of different lengths share a batch: each row has its own length, and a finished row takes the next prompt.
`RowState` and the KV modules, on the device, reflect every launched step; `Row` and `Request`, on the host, those whose
tokens the host has read. On a CPU the two agree between steps. On CUDA the step is one graph and the host reads its
tokens one step late, so that the device never waits. The host waits for the device only at a prompt or question, to
copy its ids and to read the token that continues it (tests/test_cuda_trace.py counts these waits), and for the previous
step's tokens. A few methods make it wait in each layer of a prompt too, to learn how much they keep: d2o and simlayer,
and evicting methods whose budget is a share; with `every` it waits whenever a row drops tokens, with `chunk` in most
layers of every later chunk.
"""

import runtime.startup  # noqa: F401

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import kv as methods
from kv import Cache, Plan
from kv.parts.ops import hashed
from kv.parts.ranks import ALONE, Ranks
from model import Transformer, direct, through_layers
from runtime import arguments, cpu, planning, prefix, speculate
from runtime.arguments import Prompt, one_call
from runtime.compile import compile_errors, compiled, compiled_graphs, cuda_options
from runtime.device import read_later, synchronize
from runtime.load import Loaded, load_model, read_known
from runtime.packages import Packages, packages_of
from runtime.parallel import join, minimum, same, together
from runtime.stats import Stats
from text.answer import AnswerText

NOTHING, FAILED = -1, -2  # instead of a token: the row was asleep; its logits were not finite
CONTINUE = -3  # a command to a row: feed the token that it sampled last. A command of 0 or more is a token to feed


# 1. Sampling


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token, as in transformers.

    repetition_penalty: logits of tokens that the row holds are divided by it if positive, and multiplied if negative.
    Temperature 0 or top_k 1 is greedy; else top_k, top_p and min_p cut the distribution: min_p cuts tokens less
    probable than min_p times the most probable one. None, and top_k 0 or -1, top_p 1 and min_p 0, cut nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        arguments.check_sampling(**vars(self))

    @property
    def cuts(self) -> tuple[int, float, float]:
        """top_k, top_p and min_p in numbers."""
        return min(self.top_k, 2**31) if (self.top_k or 0) > 0 else 2**31, self.top_p or 1.0, self.min_p or 0.0

    @property
    def variant(self) -> str:
        """Which compiled step this needs: greedy, plain or cut, penalized or not. Only `cut` sorts the vocabulary."""
        kind = "plain" if self.cuts == (2**31, 1, 0) else "cut"
        kind = "greedy" if self.temperature < 1e-6 or self.top_k == 1 else kind  # dividing by less would overflow
        return f"penalized {kind}" if self.repetition_penalty != 1 else kind

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What can change without a recompile: the numbers above, in order, as float64, and the seed."""
        cut = torch.tensor((self.temperature, *self.cuts, self.repetition_penalty), dtype=torch.float64, device=device)
        return cut, torch.tensor(self.seed % 2**32, device=device)


def sample(
    logits: Tensor, variant: str, cut: Tensor, seed: Tensor, request: Tensor, pos: Tensor, seen: Tensor | None = None
) -> Tensor:
    """logits [B, vocab] -> tokens [B], for requests [B] at positions [B]; FAILED: the largest logit is not finite.

    seen [B, vocab]: the tokens to penalize.
    """
    finite = logits.amax(-1).isfinite()  # of a NaN and others, the maximum is NaN
    if seen is not None:
        penalty = cut[4].float()
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if not variant.endswith("greedy"):
        logits = logits / cut[0].float()
        if variant.endswith("cut"):
            ordered = logits.sort(-1, descending=True).values
            rank = torch.arange(logits.shape[-1], device=logits.device)
            p = ordered.masked_fill(rank >= cut[1], -torch.inf).softmax(-1)
            kept = (p.cumsum(-1) - p < cut[2]) & (p >= cut[3] * p[:, :1]) & (rank < cut[1]) | (rank == 0)
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
        self.register_buffer("seen", None, persistent=False)  # [B, vocab]: tokens that the row holds, for a penalty

    def set_seen(self, row: int, tokens: list[int]) -> None:
        self.seen[row] = False
        self.seen[row, torch.tensor(tokens, device=self.seen.device)] = True

    def set_row(self, row: int, token: int = 0, pos: int = 0, left: int = 0, request: int = 0) -> None:
        """Row `row` holds `pos` tokens, has just sampled `token`, and may sample `left` more: with 0, it sleeps."""
        for buffer, value in ((self.token, token), (self.pos, pos), (self.left, left), (self.request, request)):
            buffer[row] = value


def decode_step(
    state: RowState, command: Tensor, variant: str, cut: Tensor, seed: Tensor, run: Callable = direct
) -> tuple[Tensor, Tensor]:
    """command [B] -> the token that each row samples [B,1], NOTHING where it is asleep, and the logits [B, vocab].

    CUDA compiles the step as a whole; a CPU compiles its parts, which are then called by `run` (cpu.Parts).
    """
    x, cos, sin, pos, active = run(enter, state, command)
    x = through_layers(state.model, run, x, cos, sin, pos, active)
    return run(leave, state, x, active, variant, cut, seed)


def enter(state: RowState, command: Tensor) -> tuple[Tensor, ...]:
    """command [B] -> what the layers take: x [B,1,C], cos and sin, positions [B] and which rows are active [B].

    A row sleeps once it has sampled its last token, or an EOS, which is not fed.
    """
    fed = command >= 0
    ended = ~fed & (state.token[:, None] == state.eos).any(-1)
    state.token.copy_(torch.where(fed, command, state.token))
    active = (state.left > 0) & ~ended
    pos = torch.where(active, state.pos, (state.pos - 1).clamp(min=0))  # asleep: a position that the row holds
    return *state.model.embed(state.token[:, None], pos), pos, active


def leave(state: RowState, x: Tensor, active: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """x [B,1,C] -> the tokens that rows sample, and the model's logits."""
    logits, seen = state.model.logits(x[:, -1]), None
    state.pos.add_(active)
    if variant.startswith("penalized"):
        fed = torch.arange(logits.shape[-1], device=x.device) == state.token[:, None]
        seen = state.seen.logical_or_(fed & active[:, None])
    token = sample(logits, variant, cut, seed, state.request, state.pos, seen)
    state.left.copy_(torch.where(token == FAILED, 0, state.left - active.long()))
    state.token.copy_(torch.where(active & (token != FAILED), token, state.token))
    return torch.where(active, token, NOTHING)[:, None], logits


# 3. A row and its answers


class Row:
    """One sequence in the caches of an engine, from `Engine.start` until `close`; `Engine.ask` continues it."""

    def __init__(self, engine: "Engine", index: int, tokens: list[int]):
        self.engine, self.index = engine, index
        self.tokens = tokens  # what the caches hold, as far as the host has read
        self.prompt_tokens = len(tokens)  # how many of them were prefilled; the caches hold `room` more
        self.pending: int | None = None  # the last token of an answer, if it is not in the caches yet
        self.logits: Tensor | None = None  # [vocab], after `tokens`, where no token was sampled from them yet

    @one_call
    def fork(self) -> "Row":
        """A copy of this row in a free row of the batch. Raises ValueError if there is none."""
        arguments.check_rows(self.engine, [self])
        states = [layer.state(self.index, len(self.tokens)) for layer in self.engine.layers]
        frequencies = self.engine.model.inv_freq[self.index]
        copy = self.engine._restore(list(self.tokens), self.prompt_tokens, frequencies, states)
        copy.pending, copy.logits = self.pending, self.logits
        return copy

    @one_call
    def save(self, path: str | Path, chat: bool = False) -> int:
        """Writes the row to a file, which `Engine.load_row` reads (runtime/prefix.py); returns its tensors' bytes."""
        arguments.check_rows(self.engine, [self])
        return prefix.save(self, path, chat)

    @one_call
    def close(self) -> None:
        """Frees the row for another prompt."""
        self.engine._free(self)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)  # without the EOS
    text: str = ""
    finish_reason: str = ""  # stop, length, interrupted, or error if the logits were not finite; empty while it runs


@dataclass(eq=False)
class Request:
    """A prompt, or a question to a row, and its answer while it is decoded."""

    index: int
    row: Row | None  # None: the tokens are a prompt, which waits for a row
    tokens: list[int]  # of the prompt or the question
    limit: int  # the most tokens of the answer
    text: AnswerText
    on_token: Callable[[int, int, str], None] | None = None
    on_answer: Callable[[int, Answer], None] | None = None
    closes: bool = False  # the answer closes the row
    answer: Answer = field(default_factory=Answer)
    unread: int = 0  # launched steps whose tokens the host has not read
    interrupted: bool = False

    @property
    def to_launch(self) -> int:
        """How many tokens of the answer no step has been launched for; speculation may bring them sooner."""
        return self.limit - len(self.answer.tokens) - self.unread

    def interrupt(self) -> None:
        """Makes the next token, which may be on its way, the last."""
        self.interrupted, self.limit = True, len(self.answer.tokens) + 1

    def take(self, token: int, ends: bool) -> None:
        """Adds a sampled token, or an EOS, which ends the answer."""
        answer = self.answer
        if not ends:
            answer.tokens.append(token)
        full = len(answer.tokens) == self.limit
        visible = self.text.push(None if ends else token, ends or full)
        answer.text = self.text.text
        if ends or self.text.stopped:
            answer.finish_reason = "stop"
        elif full:
            answer.finish_reason = "interrupted" if self.interrupted else "length"
        if self.on_token is not None and (visible or not ends):
            self.on_token(self.index, token, visible)


@dataclass
class Launched:
    """A step whose tokens the host has not read."""

    requests: list[Request]
    wait: Callable[[], list[list[int]]]  # for the tokens [B][n] that rows gained, NOTHING after the last


# 4. The engine


class Engine:
    """One model with one KV method. Create it with `Engine.load`.

    It serves one call at a time. A second call, from another thread or from a callback, raises RuntimeError.
    """

    def __init__(
        self,
        loaded: Loaded,
        compile: bool | None = True,
        seed: int | None = None,
        ranks: Ranks = ALONE,
        progress: Callable[[Iterable, str], Iterable] = lambda items, what: items,
    ):
        """Takes a loaded model and arguments of `load`; call `use` to set up the caches."""
        self.model, self.config, self.ranks = loaded.model, loaded.model.config, ranks
        self.device, self.dtype = self.model.norm.weight.device, self.model.norm.weight.dtype
        self.tokenizer, self.no_tokenizer, self.eos = loaded.tokenizer, loaded.no_tokenizer, loaded.eos
        self.fingerprint, self.profile = loaded.fingerprint, loaded.profile
        self.compile, self.progress = compile, progress
        arguments.check_sampling(seed=seed)
        self.seed = torch.Generator().seed() % 2**32 if seed is None else int(seed)
        self.lag = 1 if self.device.type == "cuda" else 0  # steps by which the host's reads trail the device
        self.lock, self.interrupted, self.stats = threading.Lock(), False, Stats()
        self.warnings: set[str] = set()  # printed
        self.layers = Cache()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # makes its streams the current ones

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        kv: str = "full",
        budget: int | float | None = None,
        options: dict | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        compile: bool | None = True,
        seed: int | None = None,
        parallel: bool = True,
        text: bool = False,
        progress: Callable[[Iterable, str], Iterable] = lambda items, what: items,
        **sizes,
    ) -> "Engine":
        """Loads a converted checkpoint folder.

        kv, budget, options and sizes: see `use`. dtype: default, the checkpoint's. compile: the decode step; None: only
        where an earlier process left its code (runtime/packages.py). parallel: under torchrun the
        processes share one model and make the same calls; if False, each has a whole one. text: prompts will be texts,
        so a tokenizer that cannot be read is an error. progress: wraps what takes long, as tqdm(items, what) does.
        Raises ValueError or FileNotFoundError, before it reads weights, with one line that says what to do.
        """
        if (old := sizes.pop("max_new_tokens", None)) is not None:
            sizes["room"] = arguments.renamed(old)
        ranks = join() if parallel else ALONE
        begin = time.perf_counter()
        with together(ranks):
            known = read_known(Path(checkpoint), device, dtype, ranks)
            planning.check(known, kv, budget, options or {}, **sizes)
            loaded = load_model(Path(checkpoint), known, text)
            engine = cls(loaded, compile, seed, ranks, progress)
        engine.stats.load_s, engine.stats.load_bytes = time.perf_counter() - begin, loaded.bytes
        engine.seed = same(ranks, engine.seed)
        return engine.use(kv, budget, options, **sizes)

    @one_call
    def use(
        self,
        kv: str,
        budget: int | float | None = None,
        options: dict | None = None,
        batch: int = 1,
        max_prompt: int | None = None,
        room: int = 256,
        speculate: int = 0,
        chunk: int = 0,
        max_new_tokens: int | None = None,
    ) -> "Engine":
        """Sets the KV method and the sizes of its caches; closes all rows.

        budget: tokens per KV head, or a share of the prompt. options: the method's options, typed or as strings.
        batch: rows decoded together. max_prompt: allocates caches for it now, and rejects longer prompts; by default
        caches fit the first prompts, and grow to powers of two. room: tokens a row may hold after its prompt, questions
        included; max_new_tokens is its old name. speculate: tokens that the method drafts per step, for the full cache
        to verify; the answers are the full cache's. chunk: reads prompts and questions at most so many tokens at a
        time, which takes less memory; a method that evicts does so after each. Raises ValueError with one line that
        says what to do.
        """
        room = room if max_new_tokens is None else arguments.renamed(max_new_tokens)
        planning.check(self, kv, budget, options or {}, batch, max_prompt, room, speculate, chunk)
        self.method, self.budget, self.options, self.speculate = kv, budget, options or {}, int(speculate)
        self.batch, self.max_prompt, self.room = int(batch), max_prompt and int(max_prompt), int(room)
        self.chunk = int(chunk)
        self._release()
        if self.max_prompt is not None:
            self._reserve(self.max_prompt, self.room)
        return self

    @one_call
    def close(self) -> None:
        """Frees the caches, closes all rows and ends fetching threads; the next call allocates the caches again."""
        self._release()

    # Calls: each has the engine for itself

    @one_call
    def generate(
        self,
        prompts: Prompt | list[Prompt],
        max_new_tokens: int | None = None,
        stop: list[str] | None = None,
        on_token: Callable[[int, int, str], None] | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
        **sampling,
    ) -> list[Answer]:
        """Answers every prompt (text or ids), in order; prompts beyond the free rows wait for one.

        max_new_tokens: per answer; default, as in `use`. stop: texts that end an answer and are cut off. sampling:
        temperature, top_k, top_p, min_p and repetition_penalty, see `Sampling`. on_token(index, token, text): called
        for each token of an answer, with the text that it completes, and for an EOS that completes text.
        on_answer(index, answer): called as soon as an answer is complete. Raises ValueError for arguments that do not
        fit the model or the plan.
        """
        ids = [self.encode(prompt) for prompt in arguments.as_prompts(prompts)]
        limit = self._begin_answers(max_new_tokens, stop, sampling)
        if not ids:
            return []
        arguments.check_free(self, 1)
        self._reserve(max(map(len, ids)), limit)
        self._warm_up(max(map(len, ids)))
        requests = []
        for i, prompt in enumerate(ids):
            text = AnswerText(self.tokenizer, stop)
            requests.append(Request(i, None, prompt, limit, text, on_token, on_answer, closes=True))
        return self._decode(requests)

    @one_call
    def ask(
        self,
        rows: list[Row],
        questions: Prompt | list[Prompt] | None = None,
        max_new_tokens: int | None = None,
        stop: list[str] | None = None,
        on_token: Callable[[int, int, str], None] | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
        **sampling,
    ) -> list[Answer]:
        """Adds a question (text or ids) to each row and answers them all together; without questions, continues rows.

        Each token of a question attends to everything that its row holds. Other arguments and errors as in `generate`;
        ValueError also if a row has no room for its question.
        """
        if questions is None:
            questions = [[] for _ in rows]
        else:
            questions = self._encode_for(rows, questions, "questions")
        arguments.check_rows(self, rows)
        limit, requests = self._begin_answers(max_new_tokens, stop, sampling), []
        for i, (row, question) in enumerate(zip(rows, questions, strict=True)):
            most, text = min(limit, planning.room_left(self, row, question)), AnswerText(self.tokenizer, stop)
            requests.append(Request(i, row, question, most, text, on_token, on_answer))
        if rows:
            self._warm_up(self.plan.max_prompt)
        return self._decode(requests)

    @one_call
    def start(self, prompts: Prompt | list[Prompt]) -> list[Row]:
        """Prefills each prompt into a free row of the batch. Raises ValueError if there are too few."""
        ids = [self.encode(prompt) for prompt in arguments.as_prompts(prompts)]
        arguments.check_free(self, len(ids))
        self._begin_call()
        if ids:
            self._reserve(max(map(len, ids)), self.room)
        rows, begin = [], time.perf_counter()
        try:
            for prompt in ids:
                rows.append(self._prefill(prompt, self.room))
            synchronize(self.device)
        except BaseException:
            for row in rows:
                self._free(row)
            raise
        self.stats.prefill_s = time.perf_counter() - begin
        return rows

    @one_call
    def load_row(self, path: str | Path) -> Row:
        """A row that `Row.save` wrote, in a free row of caches with the same plan, which are allocated if need be.

        Raises ValueError if the file is damaged or was saved with another checkpoint, method or plan.
        """
        begin, (header, tokens, inv_freq, states) = time.perf_counter(), prefix.read(self, path)
        if self.plan is None or (self.plan.max_prompt, self.plan.room) != header.sizes:
            if any(self.rows):
                raise ValueError(f"{path} needs caches of another size, and rows are in use: close them")
            self._release()
            self._allocate(planning.plan_of(self, *header.sizes))
        if len(tokens) > header.prompt + header.max_new_tokens and not self.endless:
            raise ValueError(f"{path} is damaged (too many tokens): save the prompt again")
        self._begin_call()
        row = self._restore(tokens, header.prompt, inv_freq, states)
        row.pending = header.pending
        self.stats.prefill_s += time.perf_counter() - begin
        return row

    @one_call
    def logits(self, prompts: Prompt | list[Prompt], continuations: Prompt | list[Prompt]) -> Tensor | list[Tensor]:
        """Logits [n, vocab] fp32 for the n ids of a continuation: token i is drawn from row i.

        Prefill computes row 0; decode steps, fed the continuation, compute the others. Lists of prompts and of
        continuations, at most one for each free row, are decoded together and return a list of such tensors.
        """
        single, rows = arguments.is_prompt(prompts), []
        prompts = [self.encode(prompt) for prompt in arguments.as_prompts(prompts)]
        continuations = [continuations] if single else arguments.as_prompts(continuations)
        continuations = [self.encode(ids, bos=False) for ids in continuations]
        if len(prompts) != len(continuations) or not prompts:
            raise ValueError(f"{len(continuations)} continuations for {len(prompts)} prompts")
        arguments.check_free(self, len(prompts))
        new = self._begin_answers(max(map(len, continuations)), None, {})
        self._reserve(max(map(len, prompts)), new)
        self._warm_up(self.plan.max_prompt)
        try:
            for prompt, ids in zip(prompts, continuations, strict=True):
                rows.append(self._prefill(prompt, len(ids)))
            first = [row.logits[None] for row in rows]
            others = self._feed(rows, [ids[:-1] for ids in continuations])
        finally:
            for row in rows:
                self._free(row)
        logits = [torch.cat(pair) for pair in zip(first, others, strict=True)]
        return logits[0] if single else logits

    @one_call
    def feed(self, rows: list[Row], texts: Prompt | list[Prompt]) -> list[Tensor]:
        """Adds a text (or ids) to each row, one token per decode step, through the method's own attention.

        Returns the logits [n, vocab] fp32 after each token; without a question, `ask` then answers. For evaluation:
        `ask` adds a question at once. Raises ValueError as it does.
        """
        texts = self._encode_for(rows, texts, "texts")
        arguments.check_rows(self, rows)
        for row, ids in zip(rows, texts, strict=True):
            planning.room_left(self, row, ids)
        self._begin_answers(None, None, {})
        if rows:
            self._warm_up(self.plan.max_prompt)
        try:
            return self._feed(rows, texts)
        except BaseException:
            for row in rows:
                self._free(row)
            raise

    def interrupt(self) -> None:
        """Ends each answer that is being decoded with its next token; waiting prompts are still answered.

        Safe in a signal handler and from other threads. RuntimeError if ranks share the model: they would stop apart.
        """
        if self.ranks.count > 1:
            raise RuntimeError("answers that several ranks decode cannot be interrupted")
        self.interrupted = True

    # Arguments

    def encode(self, prompt: Prompt, bos: bool = True) -> list[int]:
        """The ids of a text, or the given ids, checked; bos: as in `Tokenizer.encode`.

        Raises ValueError if the model cannot take them.
        """
        if isinstance(prompt, str) and prompt:
            if self.tokenizer is None:
                raise ValueError(f"{self.no_tokenizer}; give token ids instead of text")
            prompt = self.tokenizer.encode(prompt, bos)
        return arguments.token_ids(prompt, self.config.vocab_size)

    def _encode_for(self, rows: list[Row], texts: Prompt | list[Prompt], what: str) -> list[list[int]]:
        """The ids of a text for each row."""
        ids = [self.encode(text, bos=False) for text in arguments.as_prompts(texts)]
        if len(ids) != len(rows):
            raise ValueError(f"{len(ids)} {what} for {len(rows)} rows")
        return ids

    def _begin_call(self) -> None:
        self.called, self.interrupted, self.stats = time.perf_counter(), False, self.stats.next_call()

    def _begin_answers(self, limit: int | None, stop: list[str] | None, sampling: dict) -> int:
        """Checks what `generate` and `ask` share, and begins the call; returns the most tokens of an answer."""
        limit = self.room if limit is None else limit
        arguments.check_count("max_new_tokens", limit)
        arguments.check_stop(stop, self.tokenizer, self.no_tokenizer)
        sampling = Sampling(**sampling, seed=self.seed)
        arguments.check_penalty(sampling.repetition_penalty, self.speculate)
        self._begin_call()
        self.sampling, self.sampling_tensors = sampling, sampling.tensors(self.device)
        return int(limit)

    # Caches

    def _reserve(self, length: int, new: int) -> None:
        """Ensures caches for prompts of `length` tokens and `new` more; keeps the present ones if large enough."""
        if planning.suffices(self, length, new):
            return
        has = self.plan
        self._release()
        self._allocate(planning.needed(self, has, length, max(new, self.room)))

    def _allocate(self, plan: Plan) -> None:
        """Allocates caches; `_release` has freed those before, so that their memory counts as free."""
        planning.check_budget(self, plan)
        planning.check_memory(self, plan)
        self.model.set_rows(plan.batch)
        self.plan = replace(plan, inv_freq=self.model.inv_freq, key_biases=self.model.key_biases())
        self.layers = methods.build(self.method, self.plan, self.budget, self.options, self.profile)
        self.model.set_kv(self.layers)
        self.state = RowState(self.model, plan.batch, self.eos)
        rounds = self.speculate and speculate.rounds(self.state, self.speculate, sample, self._compiled)
        self.run_step = rounds or self._compiled(decode_step)
        self.endless = minimum(self.ranks, all(layer.endless for layer in self.layers)) > 0
        self.context = float("inf") if self.endless else self.config.max_length

    def _compiled(self, step: Callable) -> Callable:
        """A step, or a pass of one, as this device runs it fastest: a CUDA graph, or compiled parts."""
        if not self.compiles(self.plan):
            return step
        if self.device.type == "cuda":
            return compiled(step, options=cuda_options())
        self.parts.append(cpu.Parts(self.packages(self.plan), bool(self.compile)))
        return partial(step, run=self.parts[-1])

    def compiles(self, plan: Plan) -> bool:
        """Whether the step of caches of this plan is compiled, or its code is there."""
        if self.compile is not None or self.device.type == "cuda":
            return bool(self.compile)
        packages = self.packages(plan)
        return packages is not None and packages.exist()

    def packages(self, plan: Plan) -> Packages | None:
        """Compiled parts of a step on disk, for caches of this plan."""
        return packages_of(self, plan, cpu.cache_file().parent / "steps", cpu.where(), cpu.forms)

    def _release(self) -> None:
        self.layers.close()
        for layer in self.model.layers:
            layer.attention.kv = None
        self.plan: Plan | None = None  # None: no caches yet
        self.layers, self.rows = Cache(), [None] * self.batch  # rows: Row | None
        self.state, self.run_step, self.parts = None, None, []
        self.sizes: list[tuple] = []  # what the next step depends on besides tensors, see KV.before_step
        self.commands, self.command = None, None  # of the last step, as a list and on the device
        self.warm: set[str] = set()  # compiled variants of the step

    def _warm_up(self, length: int) -> None:
        """Prepares the step for a call's sampling, for rows of `length` tokens, before anything is timed.

        Allocates what a first repetition penalty needs; compiles a new variant (on CUDA captures it), with rows asleep.
        """
        variant, state = self.sampling.variant, self.state
        if self.sampling.repetition_penalty != 1 and state.seen is None:
            state.seen = torch.zeros(self.batch, self.config.vocab_size, dtype=torch.bool, device=self.device)
        on_cuda = self.device.type == "cuda"
        if variant in self.warm or not (self.compile if on_cuda else self.parts):
            return
        begin = time.perf_counter()
        with compile_errors(), ExitStack() as interrupted:
            for parts in self.parts:
                interrupted.callback(parts.stop)
            what = f"compile the {variant} decode step, a minute or more the first time"
            known = self.parts and all(parts.packages is not None and parts.packages.exist() for parts in self.parts)
            for _ in [None] if known else self.progress([None], what):  # only shows the text
                # Verification first: drafts, of which there are more, decide last.
                for tokens in [] if self.warm else sorted({1, self.speculate + 1}, reverse=True):
                    self.stats.products |= cpu.tune(self.model, self.plan, tokens)
                for parts in self.parts:
                    parts.settle(later=True)
                for _ in range(3 if on_cuda else 1):  # CUDA graph: run, record, replay
                    self._step({}, length + 1, 1)[0].tolist()
                if not all([parts.settle() for parts in self.parts]):
                    self._step({}, length + 1, 1)
            interrupted.pop_all()
        self.stats.compile_s += time.perf_counter() - begin
        self.warm.add(variant)

    # Decoding: schedule, launch, read

    def _decode(self, requests: list[Request]) -> list[Answer]:
        waiting, running, flight = deque(requests), [], deque()
        begin, before = time.perf_counter(), self.stats.prefill_s + self.stats.extend_s
        try:
            while self._schedule(waiting, running) or flight:
                step = self._launch(running)
                if step is not None:
                    flight.append(step)
                while len(flight) > (self.lag if step else 0):
                    self._read(flight.popleft())
        except BaseException:
            for request in requests:  # what their rows hold is not known
                if request.row is not None:
                    self._free(request.row)
            raise
        elsewhere = self.stats.prefill_s + self.stats.extend_s - before
        self.stats.decode_s = time.perf_counter() - begin - elsewhere
        return [request.answer for request in requests]

    def _schedule(self, waiting: deque[Request], running: list[Request]) -> list[Request]:
        """Takes complete answers out, and lets what waits begin where a row is free; returns what is running."""
        if self.interrupted:
            self.interrupted = False
            for request in running:
                if not request.answer.finish_reason:
                    request.interrupt()
                    self.state.left[request.row.index] = request.to_launch
        while True:
            for request in [request for request in running if request.answer.finish_reason]:
                running.remove(request)
                if request.closes:
                    self._free(request.row)
                if request.on_answer is not None:
                    request.on_answer(request.index, request.answer)
            if not waiting or (waiting[0].row is None and None not in self.rows):
                return running
            running.append(waiting.popleft())
            self._open(running[-1])

    def _open(self, request: Request) -> None:
        """Begins an answer: adds the question to the row and samples the first token, or continues the last answer."""
        row, tokens = request.row, request.tokens
        if row is None:
            row, tokens = self._prefill(tokens, request.limit), []
            request.row = row
        begin, continues = time.perf_counter(), not tokens and row.pending is not None
        tokens = tokens if row.pending is None else [row.pending, *tokens]
        logits, row.logits, seen = row.logits, None, None
        if self.sampling.repetition_penalty != 1:
            self.state.set_seen(row.index, row.tokens + tokens)
            seen = self.state.seen[row.index, None]
        if continues:  # the last answer
            self.state.set_row(row.index, row.pending, len(row.tokens), request.to_launch, request.index)
            return
        if tokens:
            ids = torch.tensor(tokens, device=self.device)
            logits = self.model.extend(row.index, ids, len(row.tokens), self.chunk)
            row.tokens += tokens
            self._forget()
        counter = torch.tensor([[request.index], [len(row.tokens)]], device=self.device)
        row.pending = int(sample(logits[None], self.sampling.variant, *self.sampling_tensors, *counter, seen))
        self.stats.count(len(tokens), time.perf_counter() - begin)
        self.state.set_row(row.index, max(row.pending, 0), len(row.tokens), request.to_launch - 1, request.index)
        self._take(request, row.pending)

    def _prefill(self, prompt: list[int], new: int) -> Row:
        """A prompt, which `new` tokens are expected to follow, in the first free row."""
        row, begin = self._free_row(prompt), time.perf_counter()

        def progress(layers: Iterable) -> Iterable:
            return self.progress(layers, f"prefill {len(prompt)} tokens")

        def texts() -> Iterable:
            if found := self.layers.second_pass(prompt, self.tokenizer):
                found = [torch.tensor(text, device=self.device) for text in found]
                yield from self.progress(found, "prefill again, to rank the tokens: two or three times as long")

        ids = torch.tensor(prompt, device=self.device)
        try:
            row.logits = self.model.prefill(row.index, ids, len(prompt) + new - 1, progress, texts(), self.chunk)
        except BaseException:
            with suppress(Exception):
                self.layers.reset(row.index)  # frees what waits for the prompt's end
            raise
        self.rows[row.index] = row
        planning.check_error(self)
        self.stats.prefill_s += time.perf_counter() - begin
        self.stats.prefill_tokens += len(prompt)
        return row

    def _free_row(self, tokens: list[int]) -> Row:
        """An empty row that is to hold these tokens; it stays free until it is entered in `rows`."""
        arguments.check_free(self, 1)
        row = Row(self, self.rows.index(None), tokens)
        self.layers.reset(row.index)
        self.state.set_row(row.index)
        self._forget()
        return row

    def _restore(self, tokens: list[int], prompt: int, inv_freq: Tensor, states: list[dict[str, Tensor]]) -> Row:
        """A row with the `KV.state` of each layer. Raises ValueError if a tensor does not fit."""
        row = self._free_row(tokens)
        row.prompt_tokens = prompt
        self.model.inv_freq[row.index] = inv_freq.to(self.device)
        for layer, state in zip(self.layers, states, strict=True):
            layer.restore(row.index, len(tokens), state)
        self.rows[row.index] = row
        self.stats.tokens_reused += len(tokens)
        return row

    def _launch(self, running: list[Request]) -> Launched | None:
        """Launches a step for the rows that need one; None if all wait for tokens that are not read yet."""
        stepping = [request for request in running if request.to_launch > 0]
        if not stepping:
            return None
        # As if one token were unread, as on CUDA: what a method drops must not depend on when tokens are read.
        self.layers.make_room({r.row.index: len(r.row.tokens) + r.unread - 1 for r in stepping})
        for request in stepping:
            request.unread += 1
        ahead = (self.lag + 1) * (self.speculate + 1)  # the most tokens of launched steps, this one included
        length = max(len(request.row.tokens) for request in running)
        new = max(len(request.row.tokens) - request.row.prompt_tokens for request in running)
        tokens, _ = self._step({}, length + ahead, new + ahead)
        return Launched(stepping, read_later(tokens))

    def _step(self, fed: dict[int, int], length: int, new: int) -> tuple[Tensor, Tensor]:
        """Launches a step, after which no row holds more than `length` tokens, `new` of them decoded.

        fed: tokens by row; the other rows continue. Returns what `decode_step` does, valid until the next step.
        """
        commands = [fed.get(row, CONTINUE) for row in range(self.batch)]
        sizes = self.layers.before_step(length, new)
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
            outputs = self.run_step(self.state, self.command, self.sampling.variant, *self.sampling_tensors)
        self.stats.compiles += compiled_graphs() - before
        return outputs

    def _read(self, step: Launched) -> None:
        """Waits for a step's tokens and adds them to the rows and their answers."""
        tokens, fed, decoded = step.wait(), 0, 0
        for request in step.requests:
            row, gained = request.row, [t for t in tokens[request.row.index] if t != NOTHING]
            request.unread -= 1
            if request.answer.finish_reason:  # it ended while this step was in flight
                if gained and not self.speculate:  # which fed the answer's last token
                    row.tokens.append(row.pending)
                    row.pending = None
                continue
            fed += bool(gained)
            for token in gained:
                row.tokens.append(row.pending)
                row.pending = token
                decoded += 1
                self._take(request, token)
                if request.answer.finish_reason:
                    break
        self.stats.fed, self.stats.decoded = self.stats.fed + fed, self.stats.decoded + decoded
        self.stats.steps += decoded > 0

    def _take(self, request: Request, token: int) -> None:
        """Adds the row's `pending` token to its answer."""
        row = request.row
        if self.stats.first_token_s is None:
            self.stats.first_token_s = time.perf_counter() - self.called
        if len(row.tokens) > self.context and request.index not in self.stats.past_context:
            planning.warn_past_context(self)
            self.stats.past_context.append(request.index)
        ends = token == FAILED or token in self.eos
        request.take(token, ends)
        if token == FAILED:
            print(f"the model's logits are not finite in {self.dtype}: try another --dtype", file=sys.stderr)
            request.answer.finish_reason = "error"
        if ends:
            row.pending = None  # it is not fed
        if request.answer.finish_reason:
            self.state.left[row.index] = 0

    def _feed(self, rows: list[Row], texts: list[list[int]]) -> list[Tensor]:
        """Decode steps that are fed texts: the logits [n, vocab] after each token of each row."""
        texts = [ids if row.pending is None else [row.pending, *ids] for row, ids in zip(rows, texts, strict=True)]
        results = [torch.empty(len(ids), self.config.vocab_size, device=self.device) for ids in texts]
        every, ahead = list(zip(rows, texts, results, strict=True)), 1 + self.speculate
        for row in rows:
            row.pending = None
            self.state.set_row(row.index, pos=len(row.tokens))
        for i in range(max(map(len, texts), default=0)):
            longer = [x for x in every if i < len(x[1])]
            for row, _, _ in longer:
                self.state.left[row.index] = 1
            self.layers.make_room({row.index: len(row.tokens) - 1 for row, _, _ in longer})
            length = max(len(row.tokens) for row in rows)
            new = max(len(row.tokens) - row.prompt_tokens for row in rows)
            _, logits = self._step({row.index: ids[i] for row, ids, _ in longer}, length + ahead, new + ahead)
            for row, ids, own in longer:
                own[i] = logits[row.index]
                row.tokens.append(ids[i])
        for row, ids, own in every:
            row.logits = own[-1].clone() if ids else row.logits
        if any(len(row.tokens) > self.context for row in rows):
            planning.warn_past_context(self)
        return results

    def _free(self, row: Row) -> None:
        if self.rows[row.index : row.index + 1] == [row]:
            self.rows[row.index] = None
            self.state.left[row.index] = 0

    def _forget(self) -> None:
        """On a CPU, makes the next step check what its parts were compiled for."""
        for parts in self.parts:
            parts.forget()
