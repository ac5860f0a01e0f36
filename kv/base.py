"""The contract between the model and a KV cache method.

Every layer of the model owns one `KV` module. The model passes it q, k and v and receives the attention output; the
method alone decides what it stores, evicts, quantizes or moves. A method implements `keep`, which stores a prompt,
`decode`, which runs one step, and `append` and `held`, by which a text extends a row; or it stands on a base in
kv/parts that does (`Scored`, `Evicting`: the README shows both). `KV` attends to the prompt, allocates and narrows
slots, resets rows, counts bytes. A `Method` (kv/method.py) has the options, and its `build(plan, budget)` makes the KV
of all layers at once, so layers can share buffers.

Shapes: B batch rows, Hq query heads, Hk KV heads, G = Hq / Hk queries per group, T prompt tokens, S cache slots, D head
dim. Row b of every buffer holds one sequence and has its own length. Keys arrive with RoPE applied and are stored so.

The life of a row: `prefill(row)`, which attends and calls `keep` or, for a later chunk of the prompt, `prefill_next`;
after the last layer's prefill of the last chunk `observe(row)` for each text of a `second_pass`, then `finish(row)`;
`decode` once per token, `extend` for several at once; `reset(row)`. Decode steps are compiled with static shapes
(`fullgraph=True`, a CUDA graph on GPUs; on a CPU the slots that are read may grow): sizes are fixed when the method is
built; whatever varies is a tensor or a mask. `decode` therefore has no `.item()` and no data-dependent shape, and
writes only in place, to registered buffers. On a CPU each layer is compiled separately: an attribute set in `decode` is
lost, even before the next layer runs.

Where several processes share a model, each builds layers for its own KV heads. A method that compares heads, as a mean
over all of them does, asks the others: `plan.ranks.sum(x)` and `plan.ranks.gather(x)` (kv/parts/ranks.py).

The laws, for every registered method: tests/test_contract.py (13: test_speculation, 14: test_tp, 15: test_interpreted).

1. With a budget for every planned token, and lossy parts switched off, the method equals full attention.
2. Compiled equals eager.
3. A row's output does not depend on the other rows, not even if they hold NaN, nor on the longest prompt of the plan,
   but for what `Method.plan_sizes` names. A budget that is a share is one of the row's own prompt.
4. The contents of slots that hold no token change no output.
5. No output depends on a later token.
6. After `reset`, a row behaves like a row of a fresh cache, even if it held NaN.
7. The bytes reported are the buffers' and pools'. At the size of Llama-3.1-8B and 32,768 tokens they are at most a
   sixteenth more than `Method.paper_bytes`.
8. A decode step allocates nothing that outlives it and moves no buffer.
9. Every step attends to the `recent` newest tokens; generation stays within the allocation, for `endless` methods too.
10. An inactive row's state does not change, whatever token it is fed.
11. `extend` by one token equals a decode step, for methods that attend to all they hold. With a budget for every token,
    a prompt that is extended in chunks of any sizes equals the whole prompt.
12. A row restored from its `state` continues as the row did, in any row of any batch.
13. If `rewinds`, moving `pos` back takes tokens back: once `insert` has overwritten them, the row equals one that never
    held them. Such a method can draft (kv/parts/speculation.py); the output is the full cache's.
14. Ranks that share a model give the output of one process; omnikv and heads that share a budget choose per rank.
15. The kernels that Inductor generates for a GPU, run in Triton's interpreter, give the eager step.
16. A prompt read in chunks of any sizes: a method that keeps all of it in 16 bits, or reads it twice, holds the same,
    and continues alike; any other evicts after every chunk. Those without `in_chunks` refuse.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kv.method import Plan
from kv.parts import attention, ops
from kv.parts.buffers import Buffers

Views = Iterator[tuple[str, Tensor]]  # of a row, by name


class Held(NamedTuple):
    """What a layer holds of one row. H is Hk, or Hq if each query head stores its own tokens."""

    k: Tensor  # [H,N,D]
    v: Tensor  # [H,N,D]
    position: Tensor  # [H,N], ascending; -1: no token

    @classmethod
    def new(cls, k: Tensor, v: Tensor, pos: int = 0) -> "Held":
        """Consecutive tokens k and v [H,n,D], from position `pos` on."""
        return cls(k, v, torch.arange(pos, pos + k.shape[1], device=k.device).expand(k.shape[0], -1))

    def followed_by(self, k: Tensor, v: Tensor, pos: int) -> "Held":
        """These tokens, then the `new` ones."""
        return Held(*(torch.cat(pair, dim=1) for pair in zip(self, Held.new(k, v, pos), strict=True)))


class KV(Buffers, ABC):
    """One layer's cache. Subclasses allocate their buffers in `__init__`."""

    wants_lookahead = False  # the model calls `lookahead` (kv/tailorkv.py) before the layer below attends
    endless = False  # its size, smaller than the plan, is fixed: a row may generate any number of tokens
    past_context = False  # whether a row of an endless cache may exceed the model's context
    exact_prompt = True  # `attend_prompt` is exact
    in_chunks = True  # a prompt may be read in chunks
    extends_alike = True  # a row holds after `extend` what it would after as many steps
    attends_to_all = True  # every step attends to all that the row holds
    holds_all = False  # slot i of k and v holds token i, as the full cache's does
    rewinds = False  # up to plan.rewind tokens can be taken back: `decode` changes only what `insert` overwrites
    quantizes = False  # what it stores of a prompt is rounded to few bits
    error: float | None = None  # of the first prompt's attention, by rounding: see attention.error
    statistics: tuple[str, ...] = ()  # of a prompt's attention: `attend_prompt` returns them, `keep` takes them
    observed: Tensor | None = None  # what `observe` found in a prompt that is being prefilled, at any budget
    recent = 0  # newest tokens, the current one included, that every step attends to
    slots = 0  # per KV head
    min_slots = 0  # the fewest slots a step may read, because it selects that many
    more_bytes = 0  # that a step reads for each slot of a KV head, beside K and V
    pools: Sequence = ()  # memory beside the buffers, on the host: kv/parts/offload.py
    whole = 0  # tokens of the prompt that is read, of which `keep` may get the first chunk alone

    def __init__(self, plan: Plan):
        super().__init__(plan)
        # Buffers of which only the filled part is saved: name -> (dimension of slots in a row's part, slots per entry).
        self.contents: dict[str, tuple[int, int]] = {}

    # What a method implements

    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor, *statistics: Tensor) -> None:
        """Stores a prompt in row `row`, or what the method keeps of it, by default all.

        q [1,Hq,T,D], k and v [1,Hk,T,D], and the `statistics` that `attend_prompt` returned.
        """
        self.append(row, k, v, 0)

    @abstractmethod
    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """Stores one token per row and attends: q [B,Hq,1,D], k and v [B,Hk,1,D], pos [B] int64 -> [B,Hq,1,D].

        A row whose `active` [B] is False stores nothing, and its output is ignored; its `pos` is the position of its
        newest token, or 0.
        """

    def insert(self, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> None:
        """Stores n tokens per row, the first at pos [B], over any that the row held there: k and v [B,Hk,n,D]."""
        raise NotImplementedError

    def append(self, row: int, k: Tensor, v: Tensor, pos: int) -> None:
        """Stores n tokens after the first `pos` of row `row`, as n steps would: k and v [1,Hk,n,D]."""
        raise NotImplementedError

    def held(self, row: int, length: int) -> Held:
        """What `extend` attends to of a row of `length` tokens: on the device, dequantized, perhaps views."""
        raise NotImplementedError

    # Many tokens at once

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int = 0, whole: int = 0) -> Tensor:
        """Attends to a whole prompt, then calls `keep`: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D].

        Of a prompt of `whole` tokens that is read in chunks, T tokens after its first `pos`.
        """
        if pos:
            y = self.prefill_next(row, q, k, v, pos)
        else:
            y, *statistics = self.attend_prompt(q, k, v)
            self.begin(row, whole or k.shape[2])
            self.keep(row, q, k, v, *statistics)
        if self.quantizes and not self.error:  # 0: none of these tokens was rounded yet
            held = self.held(row, pos + k.shape[2])
            self.error = attention.error(q, k, v, held.k, held.v, held.position - pos)
        return y

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Causal attention of a prompt, exact if `exact_prompt`, and the statistics of it that `keep` takes, if any."""
        return (attention.causal_attention(q, k, v, self.plan.window),)

    def begin(self, row: int, whole: int) -> None:
        """Runs before the first `keep` of a prompt of `whole` tokens."""
        self.whole = whole
        self.set_sizes(row, whole)

    def prefill_next(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """Attends to a later chunk of a prompt, and stores it: q [1,Hq,n,D], k and v [1,Hk,n,D] -> [1,Hq,n,D].

        Unlike `extend`, it adds to the prompt, and no token of the chunk sees another one rounded or evicted.
        """
        _, y = self.attend_with(self.held(row, pos), q, k, v, pos)
        self.append(row, k, v, pos)
        return y

    def attend_with(self, held: Held, q: Tensor, k: Tensor, v: Tensor, pos: int) -> tuple[Held, Tensor]:
        """`held`, of the first `pos` tokens, joined with n new ones, and their attention to it [1,Hq,n,D].

        k and v [1,H,n,D] for the H heads of `held`; q [1,Hq,n,D].
        """
        both = held.followed_by(k[0], v[0], pos)
        return both, attention.suffix_attention(q, both.k[None], both.v[None])

    def finish(self, row: int) -> None:
        """Runs after the last layer's prefill: a method may shrink layers by the statistics of all."""
        for pool in self.pools:
            pool.settle()

    def second_pass(self, prompt: list[int], tokenizer) -> list[list[int]]:
        """Texts that the method wants to see run through the model before `finish`; the first layer names them.

        tokenizer: text/tokenizer.py's, or None.
        """
        return []

    def observe(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of such a text, which follows the prompt and is not stored: q [1,Hq,n,D] -> [1,Hq,n,D]."""
        raise NotImplementedError

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """Adds n tokens after the first `pos` of a row: q [1,Hq,n,D], k and v [1,Hk,n,D] -> [1,Hq,n,D].

        Each attends to all that the row holds and to the new tokens before it; fixed caches evict afterwards.
        """
        self.append(row, k, v, pos)
        held = self.held(row, pos + k.shape[2])
        return attention.suffix_attention(q, held.k[None], held.v[None])

    # Slots

    def allocate_slots(self, slots: int, width: int | None = None) -> None:
        """Allocates k and v [B,Hk,slots+1,D], or with `width` bytes per vector; the extra slot: ops.store."""
        self.slots, self.read_slots = slots, ops.symbol(slots, self.plan.device)  # those that a step reads
        for name in ("k", "v"):
            size, dtype = width or self.plan.head_dim, torch.uint8 if width else None
            self.allocate(name, self.plan.n_kv_head, slots + 1, size, dtype=dtype)
            self.contents[name] = 1, 1

    def slots_to_read(self, length: int, new: int) -> int:
        """How many leading slots a step reads for rows of `length` tokens, `new` of them generated."""
        return min(length, self.slots)

    def make_room(self, row: int, length: int) -> None:
        """Runs on the host before a step of a row of at least `length` tokens: a method may drop some of them."""

    def before_step(self, length: int, new: int) -> tuple:
        """Runs on the host before a step: no row will hold more than `length` tokens, `new` of them generated.

        Returns what the step depends on besides tensors: while it is equal, a compiled step may run again.
        """
        if not self.slots:
            return ()
        on_cuda = self.plan.device.type == "cuda"  # where another compile takes long, and block masks follow lengths
        slots = self.slots if on_cuda else max(self.slots_to_read(length, new), self.min_slots)
        self.read_slots = ops.covering(self.read_slots, slots, self.slots)
        self.past_context = self.endless and max(length, self.plan.planned * on_cuda) > self.plan.max_length
        return ops.value(self.read_slots), self.past_context

    def read(self, buffer: Tensor) -> Tensor:
        """The slots of a buffer [B,Hk,S,...] that the current step reads."""
        return buffer.narrow(2, 0, ops.value(self.read_slots))

    def store(self, k: Tensor, v: Tensor, slot: Tensor, active: Tensor) -> None:
        """Writes n tokens per row, k and v [B,Hk,n,D], to slot [B,n]."""
        ops.store(self.k, k, slot, active)
        ops.store(self.v, v, slot, active)

    # A row's state

    def reset(self, row: int) -> None:
        super().reset(row)
        for pool in self.pools:
            pool.reset(row)

    def state(self, row: int, length: int) -> dict[str, Tensor]:
        """Copies of the tensors that hold row `row`, which has `length` tokens; host memory stays on the host."""
        return {name: view.clone() for name, view in self.views(row, length)}

    def restore(self, row: int, length: int, state: dict[str, Tensor]) -> None:
        """Fills row `row`, which all layers have reset, with the `state` of a row of `length` tokens.

        Layers are restored in order. Raises ValueError if a tensor is missing or has another size or dtype.
        """
        for name, view in self.views(row, length):
            saved = state.get(name)
            has, wants = ("none" if x is None else f"{list(x.shape)}, {x.dtype}" for x in (saved, view))
            if has != wants:
                raise ValueError(f"the saved {name} does not fit this cache: {wants}, saved {has}")
            view.copy_(saved)

    def views(self, row: int, length: int) -> Views:
        """Names and views of what holds a row of `length` tokens; a view may depend on what those before it hold."""
        for name in self.states:
            yield name, getattr(self, name)[row]
        slots = self.filled(row, length)
        for name, (dim, each) in self.contents.items():
            buffer, entries = getattr(self, name)[row], max(0, -(-slots // each))
            yield name, buffer.narrow(dim, 0, min(entries, buffer.shape[dim]))

    def filled(self, row: int, length: int) -> int:
        """How many leading slots hold row `row`, which has `length` tokens."""
        return min(length, self.slots)

    def unrotate(self) -> None:
        """Tells the cache of a layer without RoPE that moving a key to another position does not change it."""
        for part in self.modules():
            if getattr(part, "inv_freq", None) is not None:
                part.hold("inv_freq", torch.zeros_like(part.inv_freq))

    # Accounting

    def storages(self) -> dict[int, int]:
        """Bytes of each storage behind the buffers, by a key that is the same in all layers that share it."""
        return {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, self.buffers())}

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes one decode step reads for one row, which holds `length` tokens after it."""
        read = self.slots_to_read(length, max(0, length - self.plan.max_prompt))
        return self.plan.n_kv_head * read * (self.plan.unit_bytes + self.more_bytes), 0
