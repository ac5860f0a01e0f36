"""The host's loop over a batch: gives prompts to free rows, commands the device and reads its tokens.

On CUDA the host reads one step late, so that the device never waits for it. The host waits for the device:

- at a prompt or a follow-up, to copy its ids to the device and to read the token that continues it. With d2o and
  simlayer it also waits where the attention decides what a layer keeps (tests/test_cuda_trace.py counts these waits),
  and with methods that offload until few of their copies to the host are in flight.
- in a step, for the tokens of the previous step. Threads that fetch wait for the ids of their rows.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from decoder import SLEEP, read_later, sample
from sequence import Answer, Completion, Row
from terminal.progress import Phase, timed
from text.tokenizer import Stream


class Loop:
    """One call of `Engine.generate`; `engine` is that Engine."""

    def __init__(
        self,
        engine,
        waiting: deque[Row],
        answer_prompts: bool,
        limit: int,
        stop: list[str],
        stepwise: bool,
        on_token: Callable[[int, int, str], None],
        on_done: Callable[[int, Completion], None],
    ):
        self.engine, self.waiting, self.answer_prompts = engine, waiting, answer_prompts
        self.limit, self.stop, self.on_token, self.on_done = limit, stop, on_token, on_done
        self.stepwise = stepwise  # whether follow-ups are fed one token per step
        self.context = math.inf if engine.endless else engine.config.max_length
        self.waited_s = 0.0  # spent waiting for follow-ups

    def run(self) -> None:
        """Until every row is done: fills free rows, launches a step, and reads the step launched `lag` steps before."""
        engine, stats = self.engine, self.engine.stats
        self.begin, before = time.perf_counter(), stats.prefill_s
        rows: list[Row | None] = [None] * engine.batch
        flight: deque[tuple[list[tuple[Row, Answer] | None], int, Callable[[], list[list[int]]]]] = deque()
        while self.waiting or flight or any(rows):
            if engine.interrupted:
                engine.interrupted = False
                for row in filter(None, rows):
                    row.interrupt()
            self._fill(rows)
            commands = [row.command() if row else (SLEEP, False) for row in rows]
            launch = any(command != SLEEP for command, _ in commands)
            if launch:
                for b, (command, counts) in enumerate(commands):
                    if command >= 0:
                        engine.decoder.allow(b, rows[b].wanted + 1 if counts else 1)
                more = engine.speculate * (len(flight) + 1)  # tokens that rows may hold beyond their `length`
                length, new = (max(getattr(row, name) for row in rows if row) + more for name in ("length", "new"))
                tokens, _ = engine.decoder.launch([command for command, _ in commands], length, new)
                owed = [(row, row.answer) if counts else None for row, (_, counts) in zip(rows, commands, strict=True)]
                forced = sum(command != SLEEP and not counts for command, counts in commands)
                flight.append((owed, forced, read_later(tokens)))
            while len(flight) > (engine.lag if launch else 0):
                owed, fed, tokens = flight.popleft()
                decoded = fed
                for b, (debt, found) in enumerate(zip(owed, tokens(), strict=True)):
                    if debt and not debt[1].finish_reason:
                        ahead = sum(any(later and later[0] is debt[0] for later in step) for step, *_ in flight)
                        read = self._read_round(b, debt[0], found, ahead)
                        decoded, fed = decoded + read, fed + (read > 0)
                stats.decoded += decoded
                stats.fed += fed
                stats.steps += decoded > 0
        elsewhere = stats.prefill_s - before + stats.extend_s + self.waited_s
        stats.decode_s = time.perf_counter() - self.begin - elsewhere

    def _fill(self, rows: list[Row | None]) -> None:
        """Gives idle rows their next follow-up, and rows that are finished or empty the next prompt."""
        for b, row in enumerate(rows):
            if row and row.idle and not self._ask(b, row):
                self.on_done(row.index, row.completion)
                rows[b] = None
            if self.waiting and rows[b] is None:
                row = rows[b] = self.waiting.popleft()
                if row.prefix is not None:
                    self._restore(b, row)
                    continue
                token = self._start(b, row)
                if self.answer_prompts:
                    self._open(b, row, self.limit, token)

    def _start(self, b: int, row: Row) -> int:
        """Prefills a prompt into batch row b; returns the token that would begin its answer."""
        engine, n, row.request = self.engine, len(row.prompt), next(self.engine.requests)
        with timed(engine.on_phase, Phase("prefill", f"{n} tokens", tokens=n)) as phase:
            token = self._sample(b, row, self._prefill(b, row, phase))
        engine.stats.prefill_s += phase.seconds
        return token

    def _prefill(self, b: int, row: Row, phase: Phase) -> Tensor:
        """Logits [vocab] after a prompt, whose beginning may be prefilled already."""
        engine, shared = self.engine, row.shared
        if shared is None:
            engine.stats.prefill_tokens += len(row.prompt)
            return engine.prefill(b, row.prompt, row.planned, phase)
        n = len(shared.tokens)
        if shared.prefix is None:
            engine.prefill(b, shared.tokens, row.planned, phase)
            shared.prefix = engine.copy(b, shared.tokens)
            engine.stats.prefill_tokens += n
        else:
            engine.restore(b, shared.prefix)
            engine.stats.tokens_reused += n
        shared.users -= 1
        if not shared.users:
            shared.prefix = None  # frees its memory
        engine.stats.prefill_tokens += len(row.prompt) - n
        return engine.extend(b, row.prompt[n:], n)

    def _restore(self, b: int, row: Row) -> None:
        """Copies a prompt that is prefilled already into batch row b."""
        engine, n, row.request = self.engine, len(row.prompt), next(self.engine.requests)
        with timed(engine.on_phase, Phase("restore", f"{n} tokens")) as phase:
            engine.restore(b, row.prefix)
            engine.decoder.start(b, 0, n, row.request)
        engine.stats.prefill_s += phase.seconds
        engine.stats.tokens_reused += n

    def _extend(self, b: int, row: Row, tokens: list[int]) -> int:
        """Adds tokens to batch row b; returns the token that would continue them."""
        engine, n = self.engine, len(tokens)
        with timed(engine.on_phase, Phase("extend", f"{n} tokens", tokens=n)) as phase:
            logits = engine.extend(b, tokens, row.length)
            row.length += n
            token = self._sample(b, row, logits)
        engine.stats.extend_s += phase.seconds
        engine.stats.extend_tokens += n
        return token

    def _sample(self, b: int, row: Row, logits: Tensor) -> int:
        """Samples the next token from logits [vocab], and wakes batch row b with it."""
        decoder = self.engine.decoder
        counter = torch.tensor([[row.request], [row.length]], device=logits.device)
        token = int(sample(logits[None], decoder.sampling.variant, *decoder.knobs, *counter))
        decoder.start(b, token, row.length, row.request)
        return token

    def _ask(self, b: int, row: Row) -> bool:
        """Gives batch row b its next follow-up; returns False if there is none, or no room for it."""
        engine, begin = self.engine, time.perf_counter()
        question = next(row.follow_ups, None)  # may wait for a user who types it
        self.waited_s += time.perf_counter() - begin
        if question is None:
            return False
        ids = row.unfed + engine.encode(question, bos=False)
        room = self.limit if engine.endless else engine.shape.max_new_tokens - row.new - len(ids) + 1
        if room < 1:
            new = engine.shape.max_new_tokens
            print(f"no room for another question: the caches hold {new} tokens after the prompt", file=sys.stderr)
            return False
        if len(ids) == 1 or self.stepwise:
            row.feed.extend(ids)
            row.open(min(self.limit, room), self._stream())
        else:
            self._open(b, row, min(self.limit, room), self._extend(b, row, ids))
        return True

    def _open(self, b: int, row: Row, limit: int, token: int) -> None:
        """Begins an answer of at most `limit` tokens, of which the first is sampled already."""
        row.open(limit, self._stream(), sampled=1)
        self.engine.decoder.allow(b, row.wanted)
        self._read(row, token, 0)

    def _read_round(self, b: int, row: Row, found: list[int], ahead: int) -> int:
        """Adds the tokens of a step to the row's answer, until it ends; returns how many. Arguments as in `_read`."""
        if not self.engine.speculate:
            self._read(row, found[0], ahead)
            return 1
        tokens = [token for token in found if token >= 0]  # none if the row had gone to sleep
        row.length += len(tokens) - 1
        row.wanted -= len(tokens) - 1
        for i, token in enumerate(tokens, 1):
            self._read(row, token, 0)
            if row.answer.finish_reason:
                row.length -= len(tokens) - i + ahead
                self.engine.decoder.rewind(b, row.length)
                return i
        return len(tokens)

    def _read(self, row: Row, token: int, ahead: int) -> None:
        """Adds a token to the row's answer; `ahead` later steps that continue the row are already launched."""
        engine, stats = self.engine, self.engine.stats
        if stats.first_token_s is None:
            stats.first_token_s = time.perf_counter() - engine.called
            engine.tell(Phase("first token", seconds=stats.first_token_s))
        if row.length - ahead > self.context and row.index not in stats.past_context:
            stats.past_context.append(row.index)
            engine.warn_past_context()
        text = row.take(token, token in engine.eos, ahead, self.stop)
        if text or token not in engine.eos:
            self.on_token(row.index, token, text)

    def _stream(self) -> Stream | None:
        return self.engine.tokenizer.stream() if self.engine.tokenizer else None
