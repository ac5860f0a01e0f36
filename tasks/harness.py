"""The tasks of lm-eval (EleutherAI's evaluation harness) on this engine, with the options of its own command:

    python -m tasks.harness --model kv-fast --model_args checkpoint=DIR,kv=rocketkv,budget=512 --tasks lambada_openai

model_args: checkpoint, kv, budget, device, dtype, compile, truncation (left or middle: where a prompt that is too long
for the model is cut), and the method's options by name (bits=4).

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
from tasks.answers import parts
from tasks.prefill_once import prefill_once
from terminal.cli import number, run
from text import chat
from text.tokenizer import CUT

ROUND = 128  # caches are planned for a multiple of this many decoded tokens
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

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
        max_batch_size: int | None = None,
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
        how = {"device": device, "dtype": dtype, "compile": compile, "seed": 0, "max_new_tokens": ROUND}
        self.engine = Engine.load(checkpoint, kv, budget, options, batch=int(batch_size), **how)
        self.prefilled, self.tokenizer = prefill_once(self.engine), self.engine.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"{self.engine.no_tokenizer}; lm-eval's tasks need a tokenizer")
        if truncation not in ("left", "middle"):
            raise ValueError(f"truncation must be left or middle, not {truncation}")
        self.checkpoint, self.middle = checkpoint, truncation == "middle"
        self.max_length = self.engine.config.max_length

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
        if not found:
            raise ValueError("the checkpoint's chat template leaves out the begun answer (gen_prefix)")
        return begun if after.startswith(" ") else begun.rstrip()

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The ids of a text in which special tokens are meant: chat templates have been applied already."""
        ids = self.tokenizer.encode_special(string)
        before = [] if add_special_tokens is False else self.tokenizer.encode("")
        return ids if ids[: len(before)] == before else before + ids

    def cut(self, ids: list[int], room: int) -> list[int]:
        """A prompt cut to `room` tokens, what an answer leaves: those at its end, or as many at its beginning."""
        if room < 1:
            raise ValueError(f"max_gen_toks must be below the model's context, {self.max_length} tokens")
        head = room // 2 if self.middle else 0
        return ids if len(ids) <= room else ids[:head] + ids[head - room :]

    def use(self, new: int) -> None:
        """Plans for rows that decode `new` tokens."""
        engine, new = self.engine, -(-new // ROUND) * ROUND
        if new > engine.max_new_tokens:
            engine.use(engine.method, engine.budget, engine.options, batch=engine.batch, max_new_tokens=new)

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy) of each request's continuation."""
        kept = self.max_length + 1  # the last token is scored and not fed
        texts = [((given + continuation)[-kept:], len(continuation)) for _, given, continuation in requests]
        splits = [max(1, len(ids) - scored - 1) for ids, scored in texts]  # where the prompt ends
        self.use(max(len(ids) - at for (ids, _), at in zip(texts, splits, strict=True)))
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
        with tqdm(total=len(requests), disable=disable_tqdm, desc="answers") as bar:
            for _, group in groupby(sorted(range(len(requests)), key=by_how), by_how):
                group = list(group)
                how = normalize_gen_kwargs(requests[group[0]].args[1], default_max_gen_toks=256)
                limit, stop = how["max_gen_toks"], handle_stop_sequences(how["until"], eos=None)
                sampling = {name: how[name] for name in SAMPLING if how.get(name) is not None}
                prompts = [self.cut(self.tok_encode(requests[i].args[0]), self.max_length - limit) for i in group]
                self.use(limit)
                answers = self.engine.generate(prompts, limit, stop=stop, on_answer=lambda *_: bar.update(), **sampling)
                self.prefilled.clear()
                for i, answer in zip(group, answers, strict=True):
                    found[i] = answer.text
                    self.cache_hook.add_partial("generate_until", requests[i].args, answer.text)
        return [found[i] for i in range(len(requests))]


if __name__ == "__main__":
    run(cli_evaluate)
