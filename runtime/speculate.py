"""Speculative decoding: a step is a round, in which every row gains up to n + 1 tokens.

A row drafts n tokens, one at a time, with the method's cache; the full cache then takes its last token and the drafted
ones at once (kv/parts/speculation.py). Sampling's noise is a hash of (seed, request, position), so what the full cache
samples at a position depends on its logits alone: drafted tokens are accepted up to the first that differs, and that
sample follows them. Greedy or sampled, a row's tokens are those of the full cache alone. Where an EOS or a stop text
ends an answer inside a round, the engine continues the row from that length, and the tokens after it are overwritten.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kv.parts.ops import following
from model import direct, through_layers

MORE = -4  # a command beside engine.py's: draft another token; any other begins a round
NOTHING = -1  # engine.py's: instead of a token


def rounds(state: nn.Module, n: int, sample: Callable, compile: Callable) -> Callable:
    """The step of engine.py's `RowState` in which rows draft n tokens: see `draft_step` and `verify_step`.

    It takes and returns what engine.decode_step does, for tokens [B,n+1]; the logits are those of the first. `sample`
    is the engine's; `compile` compiles a pass through the layers.
    """
    state.sample = sample
    for name, size, dtype in (("at", (), torch.int64), ("drafted", (n + 1,), torch.int64), ("active", (), torch.bool)):
        zeros = torch.zeros(state.pos.shape[0], *size, dtype=dtype, device=state.pos.device)
        state.register_buffer(name, zeros, persistent=False)
    more = torch.full_like(state.pos, MORE)
    draft, verify = compile(draft_step), compile(verify_step)

    def step(state: nn.Module, command: Tensor, *sampling) -> tuple[Tensor, Tensor]:
        for i in range(n):
            draft(state, more if i else command, *sampling)
        return verify(state, *sampling)

    return step


def draft_step(state: nn.Module, command: Tensor, variant: str, cut: Tensor, seed: Tensor, run: Callable = direct):
    """One token of every row through the method's caches; see engine.decode_step."""
    x, cos, sin, pos, active = run(draft_enter, state, command)
    x = through_layers(state.model, run, x, cos, sin, pos, active)
    return run(draft_leave, state, x, variant, cut, seed)


def draft_enter(state: nn.Module, command: Tensor) -> tuple[Tensor, ...]:
    """`drafted` is a queue: the round's first token, then each drafted token, enters at its end."""
    fed, begins = command >= 0, command != MORE
    ended = ~fed & (state.token[:, None] == state.eos).any(-1)
    state.active.copy_(torch.where(begins, (state.left > 0) & ~ended, state.active))
    state.token.copy_(torch.where(fed, command, state.token))
    state.at.copy_(torch.where(begins, first(state), state.at))
    last = torch.where(begins, state.token, state.drafted[:, -1])
    state.drafted[:, -1] = last
    return *state.model.embed(last[:, None], state.at), state.at.clone(), state.active.clone()


def first(state: nn.Module) -> Tensor:
    """The position [B] of the round's first token; for a sleeping row, a position that its cache holds."""
    return torch.where(state.active, state.pos, (state.pos - 1).clamp(min=0))


def draft_leave(state: nn.Module, x: Tensor, variant: str, cut: Tensor, seed: Tensor) -> Tensor:
    state.at.add_(state.active)
    logits = state.model.logits(x[:, -1])
    token = state.sample(logits, variant, cut, seed, state.request, state.at).clamp(min=0)
    state.drafted.copy_(torch.cat([state.drafted[:, 1:], token[:, None]], dim=1))
    return logits  # compiled code then stores them, instead of computing them inside the search for the best token


def verify_step(state: nn.Module, variant: str, cut: Tensor, seed: Tensor, run: Callable = direct):
    """The round's first token and the drafted ones through the full caches; see engine.decode_step."""
    x, cos, sin, pos, active = run(verify_enter, state)
    x = through_layers(state.model, run, x, cos, sin, pos, active)
    return run(verify_leave, state, x, variant, cut, seed)


def verify_enter(state: nn.Module) -> tuple[Tensor, ...]:
    at = first(state)
    return *state.model.embed(state.drafted, at), at, state.active.clone()


def verify_leave(state: nn.Module, x: Tensor, variant: str, cut: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts drafted tokens; a row gains these and the sample after them, at most `left`."""
    logits, n = state.model.logits(x), x.shape[1]  # [B,n,vocab]
    position = following(state.pos + 1, n).flatten()
    request = state.request.repeat_interleave(n)
    token = state.sample(logits.flatten(0, 1), variant, cut, seed, request, position).view(-1, n)
    right = state.drafted[:, 1:] == token[:, :-1]
    count = torch.minimum(right.long().cumprod(1).sum(1) + 1, state.left) * state.active  # tokens that the row gains
    last = token.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    state.pos.add_(count)
    state.left.copy_(torch.where(last < 0, 0, state.left - count))
    state.token.copy_(torch.where(state.active & (last >= 0), last, state.token))
    gained = torch.arange(n, device=x.device) < count[:, None]
    return torch.where(gained, token, NOTHING), logits[:, 0].clone()
