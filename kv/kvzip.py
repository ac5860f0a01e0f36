"""kvzip: the prompt tokens that the model needs to repeat the prompt (KVzip, Kim et al., arXiv 2505.23416).

Before anybody asks, the model repeats the prompt part by part: an instruction and the part attend to the full cache and
to themselves, and are not stored. A token's importance for a KV head is the highest that any query of the text which
repeats its part gives it, of the attention to the sinks, the part and that text. The best stay, with heads=model of all
layers and heads. The sinks always stay, and what a template writes before the user's text, if tokens tell where that
begins, up to half of the budget. A prompt that fits the budget is not repeated. Repeating takes two or three times as
long as the prompt, beyond the model's context too. Memory and traffic: the budget and generated tokens; before, all.
"""

from dataclasses import dataclass
from os.path import commonprefix
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kv.base import KV
from kv.method import Plan, option
from kv.parts import attention
from kv.parts.adaptive import HeadBudgets
from kv.parts.scored import Scored

FIRST = "\n\nRepeat the text above from the beginning, word for word:\n\n"
LATER = "\n\nRepeat the text above, word for word, from where it says: "
QUOTED = 8  # tokens of the part before, which say where a later part begins


@dataclass
class Repetition:
    """How prompts are repeated, in all layers."""

    part: int  # tokens at a time
    opening: int = 0  # first tokens of the present prompt, before the user's text

    def texts(self, prompt: list[int], tokenizer) -> list[list[int]]:
        """For each part of a prompt an instruction to repeat it, if there is a tokenizer, and its tokens."""
        self.opening = opening(prompt, tokenizer)
        asks = [tokenizer.encode(text, bos=False) if tokenizer else [] for text in (FIRST, LATER)]
        return [asks[i > 0] + prompt[max(0, i - QUOTED) : i + self.part] for i in range(0, len(prompt), self.part)]


def opening(prompt: list[int], tokenizer) -> int:
    """How many tokens a chat template writes before the user's text, a system prompt included; 0 without one."""
    try:  # what stands before the user's text, whatever the system prompt
        begins = [tokenizer.chat_begin("", system)[::-1] for system in (None, "x")] if tokenizer else [[]]
    except ValueError:  # no template, or one that takes no system prompt
        return 0
    header = commonprefix(begins)[::-1]
    while header and not tokenizer.decode(header[-1:]).strip():
        header.pop()  # white space, which the user's text may join
    ends = (i + len(header) for i in range(len(prompt)) if header and prompt[i : i + len(header)] == header)
    return next(ends, 0)


class KVzip(Scored):
    def __init__(self, plan: Plan, kept: int, sinks: int, repetition: Repetition):
        super().__init__(plan, kept, sinks=sinks)
        self.repetition, self.rewinds = repetition, False
        self.parked: tuple[Tensor, Tensor] | None = None  # K and V [1,Hk,T,D] of a prompt, until it is repeated

    def second_pass(self, prompt: list[int], tokenizer) -> list[list[int]]:
        return [] if len(prompt) <= self.kept_of(len(prompt)) else self.repetition.texts(prompt, tokenizer)

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        if self.whole <= self.kept_of(self.whole):
            super().keep(row, q, k, v)
        else:
            self.parked, self.observed = (k, v), torch.zeros(k.shape[1], 0, device=k.device)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        if self.parked is None:
            return super().prefill_next(row, q, k, v, pos)
        self.parked = tuple(torch.cat(pair, dim=2) for pair in zip(self.parked, (k, v), strict=True))
        return attention.suffix_attention(q, *self.parked)

    def observe(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (keys, values), first = self.parked, self.observed.shape[1]
        sinks = min(self.sinks, first)
        part = keys[:, :, first : first + self.repetition.part]
        most = attention.most_attention(q, torch.cat([keys[:, :, :sinks], part, k], dim=2))
        self.observed = torch.cat([self.observed, most[:, sinks : sinks + part.shape[2]]], dim=1)
        return attention.suffix_attention(q, torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2))

    def score(self, q: None, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.nn.functional.pad(self.observed, (0, k.shape[2] - self.observed.shape[1]))
        scores[:, : min(self.repetition.opening, self.kept_of(self.whole) // 2)] = torch.inf
        return scores

    def finish(self, row: int) -> None:
        if self.parked is not None:
            super().keep(row, None, *self.parked)
            self.parked, self.observed = None, None
        super().finish(row)

    def reset(self, row: int) -> None:
        super().reset(row)
        self.parked = self.observed = None  # of a prompt that was interrupted


@dataclass(frozen=True)
class KVzipMethod(HeadBudgets):
    name = "kvzip"
    paper = "https://arxiv.org/abs/2505.23416"
    help = "what the model attends to when it repeats the prompt"
    every: ClassVar[int] = 0  # generated tokens are repeated by no text
    heads: Literal["equal", "adaptive", "model"] = option("model", "one budget for each head, each layer, or for all")
    sinks: int = option(4, "first tokens that are always kept", min=0)
    part: int = option(2048, "tokens that are repeated at a time", min=1)

    def minimum(self, plan: Plan) -> int:
        return self.sinks + 1

    def parked_bytes(self, plan: Plan, budget: int) -> tuple[int, int]:
        each = plan.unit_bytes + 64 * (self.heads == "model")  # a token of a head, and what ranks all at once
        return plan.n_layer * plan.n_kv_head * plan.max_prompt * each * (budget < plan.max_prompt), 0

    def build(self, plan: Plan, budget: int) -> list[KV]:
        layer, repetition = self.layer_type(KVzip, plan), Repetition(self.part)
        return [layer(plan, budget, self.sinks, repetition) for _ in range(plan.n_layer)]
