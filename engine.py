"""The engine: loads a checkpoint, prefills prompts row by row, and decodes them together.

Prompts of different lengths share a batch: each row has its own length, and a finished row takes the next prompt. The
decode step is compiled once and, on CUDA, replayed as a graph; the host only issues commands and reads tokens
(loop.py).
"""

import runtime.startup  # noqa: F401

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

import kv as methods
from caches import Caches, check_count, exclusive
from decoder import SLEEP, Sampling
from kv.parts.ranks import ALONE, Ranks
from loop import Loop
from model import ModelConfig, Transformer
from quantize import pack, read_quantization
from runtime import processes, tp
from runtime.checkpoint import fingerprint, load_checkpoint, present, read_config, read_eos_ids, read_json
from runtime.device import memory_errors, pick_device, pick_dtype
from runtime.prefix import Prefix, Shared
from sequence import Completion, Row
from terminal.progress import Listener, Phase, timed
from text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | list[int]


class Engine(Caches):
    """One model with one KV method. Create it with `Engine.load`.

    It serves one call at a time. A second call, from another thread or from a callback, raises RuntimeError.
    """

    no_tokenizer = "this engine has no tokenizer"  # the reason, for error messages

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        eos: set[int],
        profile: dict,
        compile: bool,
        seed: int | None,
        on_phase: Listener | None = None,
        ranks: Ranks = ALONE,
    ):
        """Takes a loaded model and arguments of `load`; call `use` to set up the caches."""
        super().__init__(model, eos, profile, compile, on_phase, ranks)
        self.tokenizer = tokenizer
        self.seed = torch.Generator().seed() % 2**32 if seed is None else seed
        self.lag = 1 if self.device.type == "cuda" else 0  # steps by which the host's reads trail the device
        self.interrupted = False  # whether running answers must end
        self.requests = itertools.count()
        self.folder: Path | None = None  # of the checkpoint
        self.called = 0.0  # start of the current `generate` call

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
        speculate: int = 0,
        on_phase: Listener | None = None,
        parallel: bool = True,
    ) -> "Engine":
        """Loads a converted checkpoint folder.

        budget: tokens per KV head, or a share of the prompt. options: the method's options, typed or as strings.
        max_prompt: allocates caches for it now, and rejects longer prompts; by default caches grow with the prompts.
        max_new_tokens: tokens a row may decode after its prompt, including those fed by follow-ups.
        speculate: tokens that the method drafts per step, for the full cache to verify; the answers are the full
        cache's. dtype: default, the checkpoint's. on_phase: called with each phase of the engine's work, see
        progress.py. parallel: under torchrun the processes share one model (tp.py) and make the same calls; if False,
        each has a whole one.
        Raises ValueError or FileNotFoundError with one line that says what to do.
        """
        methods.parse_options(kv, options or {})  # reject bad options before the weights are read
        ranks = processes.join() if parallel else ALONE
        with processes.together(ranks):
            engine = cls._read(Path(checkpoint), device, dtype, compile, seed, on_phase, ranks)
        engine.seed = processes.same(ranks, engine.seed)
        return engine.use(kv, budget, options, batch, max_prompt, max_new_tokens, speculate)

    @classmethod
    def _read(
        cls,
        folder: Path,
        device: str | torch.device | None,
        dtype: str | torch.dtype | None,
        compile: bool,
        seed: int | None,
        on_phase: Listener | None,
        ranks: Ranks,
    ) -> "Engine":
        """An engine without caches; arguments and errors as in `load`."""
        device, config = pick_device(device), read_config(folder)
        sizes, quantization = ModelConfig(**config["kv_fast"]["model"]), read_quantization(config)
        model = tp.skeleton(sizes, quantization, ranks)
        whole = tp.skeleton(sizes, quantization, ALONE) if ranks.count > 1 else None
        eos = read_eos_ids(folder, config, sizes.vocab_size)
        tokenizer, no_tokenizer = None, None
        try:
            tokenizer = load_tokenizer(folder)
        except (ValueError, FileNotFoundError) as error:
            no_tokenizer = str(error)  # token ids work without one
        if tokenizer is not None:
            eos |= tokenizer.eos_ids
            used = max(set(range(tokenizer.vocab_size)) - set(tokenizer.special.values()))  # <pad> may be larger
            if used >= sizes.vocab_size:
                tokens = f"{tokenizer.vocab_size} tokens and the model {sizes.vocab_size}"
                raise ValueError(f"the tokenizer in {folder} has {tokens}: it belongs to another checkpoint")
        dtype = pick_dtype(dtype or config["kv_fast"].get("dtype"))
        tensors = model.state_dict().values()
        needed = sum(t.numel() * (dtype if t.is_floating_point() else t.dtype).itemsize for t in tensors)
        free = processes.free_share(device)
        if needed > free:
            raise ValueError(f"the weights need {needed / 1e9:.2f} GB on {device} and {free / 1e9:.2f} GB are free")
        with timed(on_phase, Phase("load", f"{needed / 1e9:.2f} GB")) as phase:
            read = partial(tp.read_part, c=model.config, ranks=ranks)
            pack(load_checkpoint(folder, model, device, dtype, whole, read).requires_grad_(False))
        found = folder / "kv_profile.json"
        profile = methods.read_profile(read_json(found)) if present(found) else {}
        engine = cls(tp.connect(model, ranks), tokenizer, eos, profile, compile, seed, on_phase, ranks)
        engine.no_tokenizer, engine.folder = no_tokenizer or engine.no_tokenizer, folder
        engine.stats.load_s, engine.stats.load_bytes = phase.seconds, needed
        return engine

    @cached_property
    def weights(self) -> str:
        """What identifies the checkpoint in a saved `Prefix`."""
        return fingerprint(self.folder)

    # What a caller uses

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
        stepwise: bool = False,
        prefix: Prompt | Prefix | None = None,
        on_token: Callable[[int, int, str], None] | None = None,
        on_done: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """Answers every prompt (text or ids), in order; prompts beyond the batch size wait for a free row.

        Caches that are too small are replaced by larger ones, and the step is recompiled. Sizes grow to powers of two
        to make this rare; `load(max_prompt=...)` avoids it. Consecutive prompts that begin with the same 256 tokens or
        more prefill these once, if the method keeps every token as it is.

        max_new_tokens: per answer; default, as in `load`. stop: texts that end an answer and are cut off.
        follow_ups: per prompt, an iterable of texts or ids; when an answer is complete, the next item is requested, fed
        and answered. answer_prompts: if False, prompts are only prefilled, and only follow-ups are answered.
        stepwise: feeds follow-ups one token per decode step, with the method's own attention. By default a follow-up is
        added at once, and each of its tokens attends to everything its row holds.
        prefix: a text or ids, prefilled once, that every prompt continues; or what `prefix` or prefix.load returned.
        on_token(prompt index, token, text): called for each token of an answer, with the text that it completes.
        on_done(prompt index, completion): called as soon as all answers of a prompt are complete.
        Raises ValueError for arguments that do not fit the model or the plan.
        """
        self.called, self.interrupted = time.perf_counter(), False
        if isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int)):
            prompts = [prompts]
        ids = [self.encode(prompt, bos=prefix is None) for prompt in prompts]
        if not ids:
            return []
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        sampling = Sampling(temperature, top_k, top_p, self.seed)
        check_count("max_new_tokens", limit)
        if stop and self.tokenizer is None:
            raise ValueError(f"{self.no_tokenizer}; without one, stop texts cannot be found")
        if isinstance(stop, str) or not all(stop or []):
            raise ValueError("stop must be a list of texts, none of them empty")
        # Encode lists of follow-ups now, to find mistakes in them before anything runs.
        asked = [[]] * len(ids) if follow_ups is None else list(follow_ups)
        if any(isinstance(f, str) for f in asked):
            raise ValueError("follow_ups must hold a list of texts or ids for each prompt, not a text")
        asked = [[self.encode(q, bos=False) for q in f] if isinstance(f, list | tuple) else f for f in asked]
        if len(asked) != len(ids):
            raise ValueError(f"{len(asked)} lists of follow-ups for {len(ids)} prompts")
        answers = [answer_prompts + len(f) if isinstance(f, list) else 1 for f in asked]
        fed = [sum(map(len, f)) if isinstance(f, list) else 0 for f in asked]
        if prefix is not None:  # prompts continue it as questions do
            if not answer_prompts:
                raise ValueError("answer_prompts=False and a prefix: give the prompts as the prefix")
            begun = zip(ids, asked, strict=True)
            asked = [[prompt, *f] if isinstance(f, list) else chain([prompt], f) for prompt, f in begun]
            fed, answer_prompts = [f + len(prompt) for f, prompt in zip(fed, ids, strict=True)], False
        decoded = [limit * a + f for a, f in zip(answers, fed, strict=True)]
        self.stats.next_call()
        if prefix is not None:
            prefix = self._prepared(prefix, max(decoded))
            ids = [prefix.tokens] * len(ids)
        else:
            self.reserve(max(map(len, ids)), max(decoded))
        self.decoder.warm_up(sampling, max(map(len, ids)))
        shared = Shared.find(ids) if prefix is None and self.reuses_prompts else [None] * len(ids)
        waiting = deque()
        for i, (prompt, f, new) in enumerate(zip(ids, asked, decoded, strict=True)):
            new = new if isinstance(f, list) else self.shape.max_new_tokens
            planned = len(prompt) + new - 1  # the last sampled token is not fed
            waiting.append(Row(i, prompt, f, planned, prefix, shared[i]))
        completions = [row.completion for row in waiting]
        listeners = (listener or (lambda *_: None) for listener in (on_token, on_done))
        Loop(self, waiting, answer_prompts, limit, stop or [], stepwise, *listeners).run()
        return completions

    @exclusive
    @memory_errors()
    def prefix(self, prompt: Prompt) -> Prefix:
        """Prefills a text or ids for `generate(prefix=...)`, in this engine or, saved in a file, in another."""
        tokens = self.encode(prompt)
        self.reserve(len(tokens), self.max_new_tokens)
        self.stats.next_call()
        return self._prefilled(tokens)

    def _prefilled(self, tokens: list[int]) -> Prefix:
        with timed(self.on_phase, Phase("prefill", f"{len(tokens)} tokens", tokens=len(tokens))) as phase:
            self.prefill(0, tokens, len(tokens) + self.shape.max_new_tokens - 1, phase)
            found = self.copy(0, tokens)
        self.stats.prefill_s += phase.seconds
        self.stats.prefill_tokens += len(tokens)
        return found

    def _prepared(self, prefix: Prompt | Prefix, new: int) -> Prefix:
        """The prefix, prefilled, with caches for it and `new` more tokens. Raises ValueError if it does not fit."""
        if not isinstance(prefix, Prefix):
            tokens = self.encode(prefix)
            self.reserve(len(tokens), new)
            return self._prefilled(tokens)
        setting = prefix.setting
        self.check_length(len(prefix.tokens))
        if self.shape is None or (self.shape.max_prompt, self.shape.max_new_tokens) != setting.plan:
            self._allocate(self._plan(*setting.plan))
        for name, saved in asdict(setting).items():
            if (ours := getattr(self.setting(), name)) != saved:
                raise ValueError(f"the prefix was prefilled with {name}={saved} and this engine has {name}={ours}")
        if new > setting.max_new_tokens and not self.endless:
            raise ValueError(
                f"the prefix was prefilled with room for {setting.max_new_tokens} more tokens and {new} are needed, the"
                " prompt included: lower max_new_tokens, or prefill it with more"
            )
        return prefix

    def interrupt(self) -> None:
        """Ends the answers that `generate` is decoding: each keeps its tokens so far and gets the finish reason
        `interrupted`. Follow-ups and waiting prompts continue. Safe in a signal handler and from other threads.

        Raises RuntimeError if several ranks share the model: they would not all stop at the same token.
        """
        if self.ranks.count > 1:
            raise RuntimeError("answers that several ranks decode cannot be interrupted")
        self.interrupted = True

    @exclusive
    @memory_errors()
    def logits(
        self, prompt_ids: list[int] | list[list[int]], continuation_ids: list[int] | list[list[int]]
    ) -> Tensor | list[Tensor]:
        """Logits [n, vocab] fp32 for n continuation tokens: token i is drawn from row i.

        Prefill computes row 0; decode steps, fed the continuation, compute the others. Lists of prompts and of
        continuations, at most one for each row of the engine, are decoded together and return a list of such tensors.
        """
        if single := not (prompt_ids and isinstance(prompt_ids[0], list)):
            prompt_ids, continuation_ids = [prompt_ids], [continuation_ids]
        if len(prompt_ids) > self.batch:
            raise ValueError(f"{len(prompt_ids)} prompts are more than the {self.batch} rows of this engine")
        pairs = zip(prompt_ids, continuation_ids, strict=True)
        texts = [(self.encode(prompt), self.encode(forced, bos=False)) for prompt, forced in pairs]
        longest, new = (max(map(len, ids)) for ids in zip(*texts, strict=True))
        self.reserve(longest, new)
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
            for row in fed:
                self.decoder.allow(row, 1)
            commands, more = [fed.get(row, SLEEP) for row in range(self.batch)], self.speculate
            logits = self.decoder.launch(commands, longest + i + more, i + more)[1]
            for row in fed:
                found[row][i] = logits[row]
        return found[0] if single else found

    def encode(self, prompt: Prompt, bos: bool = True) -> list[int]:
        """The ids of a text, or the given ids, checked. Raises ValueError if the model cannot take them."""
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
