"""The tasks of lm-eval (EleutherAI's evaluation harness) on this engine, with the options of its own command:

    python -m tasks.harness --model kv-fast --model_args checkpoint=DIR,kv=rocketkv,budget=512 --tasks lambada_openai

model_args: checkpoint, kv, budget, device, dtype, compile, max_length (the context in tokens: by default the model's,
which RoPE scaling may extend; lm-eval's hf takes max_position_embeddings), truncation (left or middle: where a prompt
that is too long for it is cut), and the method's options by name (bits=4).

Generation kwargs are a task's alone. Those of lm-eval's hf also come from the checkpoint's generation_config.json (a
repetition penalty even for greedy answers), and it samples from the 50 best tokens if nothing gives top_k.

A context is compressed as a prompt is, and the tokens to be scored are fed to the method one at a time. Prefill itself
attends to every token, so what it predicts would be the same for all methods: a context's last token is fed too, and
every scored token comes out of a step.
"""

import runtime.startup  # noqa: F401

import logging
from itertools import groupby

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from tqdm import tqdm

from engine import Engine
from runtime import planning
from runtime.parallel import free_share
from tasks.answers import parts
from tasks.prefill_once import prefill_once
from terminal.cli import number, run
from text import chat
from text.tokenizer import CUT

ROUND = 128  # caches are planned for a multiple of this many decoded tokens
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Other generation kwargs of transformers, with the values that change nothing.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1, "typical_p": 1, "no_repeat_ngram_size": 0}

log = logging.getLogger("lm_eval.kv-fast")


@register_model("kv-fast")
class KVFast(TemplateLM):
    """An `Engine` as lm-eval's requests see it; `options` are the KV method's."""

    def __init__(
        self,
        checkpoint: str,
        kv: str = "full",
        budget: int | float | str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        compile: bool = False,
        truncation: str = "left",
        **options,
    ):
        super().__init__()
        budget = number(budget) if isinstance(budget, str) else budget
        options = {name: str(value) for name, value in options.items()}
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            device = None  # lm-eval's default is cuda:0
        rows, _, _ = str(batch_size).partition(":")  # auto:N redetects N times in lm-eval, and here for every call
        if rows != "auto" and not rows.isdecimal():
            raise ValueError(f"batch_size must be a number or auto, not {batch_size}")
        self.most = max_batch_size if rows == "auto" else None  # rows, if `use` chooses how many
        how = {"device": device, "dtype": dtype, "compile": compile, "seed": 0, "room": ROUND}
        self.engine = Engine.load(checkpoint, kv, budget, options, batch=1 if self.most else int(rows), **how)
        self.prefilled, self.tokenizer = prefill_once(self.engine), self.engine.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"{self.engine.no_tokenizer}; lm-eval's tasks need a tokenizer")
        if truncation not in ("left", "middle"):
            raise ValueError(f"truncation must be left or middle, not {truncation}")
        self.checkpoint, self.middle = checkpoint, truncation == "middle"
        longest = self.engine.config.max_length
        self.max_length = longest if max_length is None else max_length
        if not 1 <= self.max_length <= longest:
            raise ValueError(f"max_length must lie between 1 and the model's context, {longest}, not {max_length}")

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.special.get(self.tokenizer.variables.get("eos_token"), min(self.engine.eos))

    @property
    def prefix_token_id(self) -> int:
        """What an empty context stands for."""
        return self.tokenizer.special.get(self.tokenizer.variables.get("bos_token"), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        return str(self.checkpoint).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return self.tokenizer.template if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the template writes it; without the prompt, its last message is to be continued.

        A begun answer loses the spaces at its end if the template trims messages, and a conversation its system
        messages if the template rejects it with them, both as in lm-eval's hf.
        """
        if not self.tokenizer.template:
            raise ValueError("this checkpoint has no chat template: leave out --apply_chat_template")
        messages = chat_history
        if not add_generation_prompt:
            *before, last = messages
            messages = [*before, last | {"content": f"{last['content']}{CUT} "}]
        try:
            text = chat.render(self.tokenizer.template, messages, self.tokenizer.variables)
        except ValueError as error:
            others = [message for message in messages if message["role"] != "system"]
            if others == messages:
                raise
            warning_once(log, f"{error}: system messages are left out where it fails")
            text = chat.render(self.tokenizer.template, others, self.tokenizer.variables)
        if add_generation_prompt:
            return text
        begun, found, after = text.rpartition(CUT)
        if not found or not begun.rstrip().endswith(last["content"].strip()):
            raise ValueError("the checkpoint's chat template leaves out the begun answer (gen_prefix), or parts of it")
        return begun if after.startswith(" ") else begun.rstrip()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The ids of a text in which special tokens are meant: chat templates have been applied already."""
        ids = self.tokenizer.encode_special(string)
        before = [] if add_special_tokens is False else self.tokenizer.around[0]
        return ids if ids[: len(before)] == before else before + ids

    def cut(self, ids: list[int], room: int) -> list[int]:
        """A prompt cut to `room` tokens, what an answer leaves: those at its end, or as many at its beginning."""
        head = room // 2 if self.middle else 0
        return ids if len(ids) <= room else ids[:head] + ids[head - room :]

    def warn_of_cuts(self, lost: list[int]) -> None:
        """Says how many contexts lost tokens; `lost`: how many tokens each context lost."""
        if cut := sum(n > 0 for n in lost):
            log.warning(
                f"{cut} of {len(lost)} contexts are too long and lose {sum(lost)} tokens: with what follows they must "
                f"fit into {self.max_length} tokens"
            )

    def use(self, rows: int, prompt: int, new: int, scored: int = 1) -> None:
        """Plans for `rows` prompts of at most `prompt` tokens that decode `new` more, of which `scored` keep logits.

        batch_size auto: as many are decoded together as fit into a quarter of the free memory.
        """
        engine, new = self.engine, max(self.engine.room, -(-new // ROUND) * ROUND)
        batch = engine.batch
        if self.most:
            engine.close()  # so that its memory counts as free
            batch = min(rows, self.most)
            while batch > 1 and not self.fits(batch, prompt, new, scored):
                batch //= 2
        if (batch, new) != (engine.batch, engine.room):
            engine.use(engine.method, engine.budget, engine.options, batch=batch, room=new)

    def fits(self, batch: int, prompt: int, new: int, scored: int) -> bool:
        """Whether caches of such a plan, and the logits, each take less than a quarter of the free memory."""
        engine = self.engine
        plan = planning.plan_for(engine.config, engine.dtype, engine.device, batch, prompt, new, ranks=engine.ranks)
        try:
            planning.check_memory(engine, plan, spare=0.75)
        except ValueError:
            return False
        return 4 * batch * scored * engine.config.vocab_size < free_share(engine.device) / 4

    def how(self, kwargs: dict) -> tuple[int, list[str], dict]:
        """(most tokens, stop texts, the engine's sampling) of an answer with these generation kwargs.

        Raises ValueError for kwargs that would change the answer in a way that the engine does not have.
        """
        given = {name: value for name, value in normalize_gen_kwargs(kwargs).items() if value is not None}
        limit, stop = given.pop("max_gen_toks"), handle_stop_sequences(given.pop("until"), eos=None)
        sampled, sampling = given.pop("do_sample"), {name: given.pop(name) for name in SAMPLING if name in given}
        if others := [f"{name}={value}" for name, value in given.items() if NEUTRAL.get(name) != value]:
            known = ", ".join(("until", "max_gen_toks", "do_sample", *SAMPLING))
            raise ValueError(f"generation kwargs {', '.join(others)}: not supported; leave them out, or use {known}")
        if not 1 <= limit < self.max_length:
            raise ValueError(f"max_gen_toks is {limit}, and must be 1 or more and below the context, {self.max_length}")
        if not sampled:  # the other names choose among the tokens to draw from
            sampling = {name: value for name, value in sampling.items() if name == "repetition_penalty"}
        elif not sampling.get("temperature"):
            raise ValueError("do_sample=True needs a temperature above 0")
        elif sampling.get("top_k") in (0, -1):
            del sampling["top_k"]
        return limit, stop, sampling

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        for context, continuation in (request.args for request in requests):
            if not continuation:
                raise ValueError(f"the continuation of {context[-40:]!r} is empty")
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each request's continuation."""
        if not requests:
            return []
        for said, given, continuation in requests:
            if not given or not continuation:
                context, scored = (repr(text[-40:]) for text in said)
                what = f"{scored} adds no token to" if given else f"{scored} follows no token of"
                raise ValueError(f"the continuation {what} its context, {context}, so nothing can be scored")
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation has {len(continuation)} tokens and the context is {self.max_length}")
        kept = self.max_length + 1  # the last token is scored and not fed
        texts = [((given + continuation)[-kept:], len(continuation)) for _, given, continuation in requests]
        self.warn_of_cuts([len(r[1]) + len(r[2]) - len(ids) for r, (ids, _) in zip(requests, texts, strict=True)])
        splits = [max(1, len(ids) - scored - 1) for ids, scored in texts]  # where the prompt ends
        new = max(len(ids) - at for (ids, _), at in zip(texts, splits, strict=True))
        self.use(len(texts), max(splits), new, new)
        # Choices that continue the same prompt are neighbors and share its prefill. The longest prompt comes first.
        order = sorted(range(len(texts)), key=lambda i: (splits[i], texts[i][0][: splits[i]]), reverse=True)
        found = {}
        with tqdm(total=len(order), disable=disable_tqdm, desc="log-likelihoods") as bar:
            for part in parts(order, self.engine.batch):
                prompts = [texts[i][0][: splits[i]] for i in part]
                rest = [texts[i][0][splits[i] :] for i in part]
                kept = set(map(tuple, prompts))
                for old in [key for key in self.prefilled if key[0] not in kept]:
                    del self.prefilled[old]
                for i, own, logits in zip(part, rest, self.engine.logits(prompts, rest), strict=True):
                    scored = texts[i][1]
                    wanted = logits.new_tensor(own[-scored:]).long()[:, None]
                    logs = logits[-scored:].log_softmax(-1)
                    greedy = bool((logs.argmax(-1, keepdim=True) == wanted).all())
                    found[i] = float(logs.gather(1, wanted).sum()), greedy
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                bar.update(len(part))
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of the model's context."""
        windows = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(i, ((None, None), *make_disjoint_window(window))) for window in rolling]
        found = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm)
        sums = [0.0] * len(requests)
        for (i, _), (score, _) in zip(windows, found, strict=True):
            sums[i] += score
        return sums

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The engine's answers; requests that ask for the same sampling are decoded together."""
        found = {}
        by_how = lambda i: repr(requests[i].args[1])  # noqa: E731
        groups = [list(group) for _, group in groupby(sorted(range(len(requests)), key=by_how), by_how)]
        groups = [(group, *self.how(requests[group[0]].args[1])) for group in groups]  # all are checked before answers
        whole = [self.tok_encode(request.args[0]) for request in requests]
        prompts = {i: self.cut(whole[i], self.max_length - limit) for group, limit, *_ in groups for i in group}
        self.warn_of_cuts([len(ids) - len(prompts[i]) for i, ids in enumerate(whole)])
        with tqdm(total=len(requests), disable=disable_tqdm, desc="answers") as bar:
            for group, limit, stop, how in groups:
                own = [prompts[i] for i in group]
                self.use(len(group), max(map(len, own)), limit)
                answers = self.engine.generate(own, limit, stop=stop, on_answer=lambda *_: bar.update(), **how)
                self.prefilled.clear()
                for i, answer in zip(group, answers, strict=True):
                    found[i] = answer.text
                    self.cache_hook.add_partial("generate_until", requests[i].args, answer.text)
        return [found[i] for i in range(len(requests))]


if __name__ == "__main__":
    run(cli_evaluate)
