"""The contract between the model and a KV cache method.

Every layer of the model owns one `KV` module. The model passes it q, k and v and receives the attention output; the
method alone decides what it stores, evicts, quantizes or moves. A method implements `keep`, which stores a prompt, and
`decode`, which runs one step; the base attends to the prompt, allocates and narrows slots, resets rows, counts bytes. A
`Method` builds all layers at once, so layers can share buffers.

Shapes: B batch rows, Hq query heads, Hk KV heads, G = Hq / Hk queries per group, T prompt tokens, S cache slots, D head
dim. Row b of every buffer holds one sequence and has its own length. Keys arrive with RoPE applied and are stored so.

The life of a row: `prefill(row)`, which attends and calls `keep`; `finish(row)` after the last layer's prefill;
`decode` once per token, `extend` for several tokens at once; `reset(row)`. Decode steps are compiled with static shapes
(`fullgraph=True`, a CUDA graph on GPUs): sizes are fixed when the method is built; whatever varies is a tensor or a
mask. `decode` therefore has no `.item()` and no data-dependent shape, and writes only in place, to registered buffers.
On a CPU each layer is compiled separately: an attribute set in `decode` is lost, even before the next layer runs.

Where several processes share a model, each has its own KV heads and builds its own layers for them. A method notices
this only where it compares heads: `shape.ranks` sums or gathers over the processes.

The laws, which tests/test_contract.py, tests/test_speculation.py (13) and tests/test_tp.py (14) check for every
registered method:

1. With a budget of at least max_prompt + max_new_tokens (and lossy parts switched off) the method equals full attention
   or, if its paper approximates even then, its slow reference.
2. Compiled equals eager.
3. A row's output does not depend on the other rows.
4. The contents of slots that hold no token change no output.
5. No output depends on a later token.
6. After `reset`, a row behaves like a row of a fresh cache.
7. `device_bytes` + `host_bytes` equals the size of the buffers, at most the paper's formula plus what
   tests/paper_bytes.py names.
8. A decode step allocates nothing that outlives it and moves no buffer.
9. Every step attends to the `recent` newest tokens; generation stays within the allocation, for `endless` methods too.
10. An inactive row's state does not change, whatever token it is fed.
11. `extend` by one token equals a decode step, for methods that attend to all they hold. With a budget for every token,
    a prompt that is extended in chunks of any sizes equals the whole prompt.
12. A row restored from its `state` continues as the row did, in any row of any batch.
13. If `rewinds`, moving `pos` back takes tokens back: once `insert` has overwritten them, the row equals one that never
    held them. Such a method can draft for the full cache (kv/parts/speculation.py), and the output is the full cache's.
14. Ranks that share a model give the output of one process (but for omnikv, which chooses per rank, as its paper does).
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kv.method import Shape
from kv.parts import attention, inductor, ops


class Held(NamedTuple):
    """What a layer holds of one row. H is Hk, or Hq if each query head stores its own tokens."""

    k: Tensor  # [H,N,D]
    v: Tensor  # [H,N,D]
    position: Tensor  # [H,N], ascending; -1: no token

    @classmethod
    def new(cls, k: Tensor, v: Tensor, pos: int = 0) -> "Held":
        """Consecutive tokens k and v [H,n,D], from position `pos` on."""
        return cls(k, v, torch.arange(pos, pos + k.shape[1], device=k.device).expand(k.shape[0], -1))

    def at(self, index: Tensor) -> "Held":
        """Copies of the tokens at index [H,n]."""
        each = index[..., None].expand(-1, -1, self.k.shape[2])
        return Held(self.k.gather(1, each), self.v.gather(1, each), self.position.gather(1, index))


class Buffers(nn.Module):
    """Buffers with one entry per row, which compiled steps write in place and checkpoints leave out."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.states: dict[str, float] = {}  # buffers that describe what a row holds, and their initial values

    def allocate(self, name: str, *size: int, dtype: torch.dtype | None = None, fill: float = 0):
        """Allocates and holds a buffer [B,*size], of the cache's dtype by default."""
        size, dtype = (self.shape.batch, *size), dtype or self.shape.dtype
        self.hold(name, torch.full(size, fill, dtype=dtype, device=self.shape.device))

    def hold(self, name: str, buffer: Tensor | None) -> None:
        """Registers a buffer."""
        self.register_buffer(name, buffer, persistent=False)

    def allocate_state(self, name: str, *size: int, dtype: torch.dtype = torch.int64, fill: float = 0) -> None:
        """Allocates a buffer [B,*size] that describes what a row holds: `reset` restores its initial value."""
        self.allocate(name, *size, dtype=dtype, fill=fill)
        self.states[name] = fill

    def reset(self, row: int) -> None:
        """Empties a row."""
        for name, fill in self.states.items():
            getattr(self, name)[row] = fill


def copy_state(views: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """Copies the tensors of `state` into the views of the same names. Raises ValueError if one does not fit."""
    for name, view in views.items():
        saved = state.get(name)
        if saved is None or saved.shape != view.shape or saved.dtype != view.dtype:
            has = "none" if saved is None else f"{list(saved.shape)}, {saved.dtype}"
            raise ValueError(f"the saved {name} does not fit this cache: {list(view.shape)}, {view.dtype}, saved {has}")
        view.copy_(saved)


class KV(Buffers, ABC):
    """One layer's cache. Subclasses allocate their buffers in `__init__`."""

    wants_lookahead = False  # the model calls `lookahead` (kv/tailorkv.py) before the layer below attends
    endless = False  # its size, smaller than the plan, is fixed: a row may generate any number of tokens
    past_context = False  # whether a row of an endless cache may exceed the model's context
    exact_prompt = True  # `attend_prompt` is exact
    keeps_prompts = False  # prefilling a prefix and extending it leaves the state of prefilling the whole prompt
    reads_all = False  # every step attends to all that the row holds
    evicts_by_chunk = False  # what stays of tokens that extend a row depends on how many are added at once
    holds_all = False  # slot i of k and v holds token i, as the full cache's does
    rewinds = False  # up to shape.rewind tokens can be taken back: `decode` changes only what `insert` overwrites
    statistics: tuple[str, ...] = ()  # of a prompt's attention: `attend_prompt` returns them, `keep` takes them
    recent = 0  # newest tokens, the current one included, that every step attends to
    slots = 0  # per KV head
    min_slots = 0  # the fewest slots a step may read, because it selects that many

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
        """What the layer holds of row `row`, which has `length` tokens: on the device, dequantized, perhaps views."""
        raise NotImplementedError

    def finish(self, row: int) -> None:
        """Runs after the last layer's prefill, for methods that shrink layers by the statistics of all."""

    # The prompt

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends to a whole prompt, then calls `keep`: q [1,Hq,T,D], k and v [1,Hk,T,D] -> [1,Hq,T,D]."""
        y, *statistics = self.attend_prompt(q, k, v)
        self.keep(row, q, k, v, *statistics)
        return y

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Causal attention of a prompt, exact if `exact_prompt`, and the statistics of it that `keep` takes, if any."""
        return (attention.causal_attention(q, k, v, self.shape.window),)

    def skip_prompt(self, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        """Invented statistics for `keep`, for a benchmark that fills the cache without attending to a prompt."""
        return ()

    # More tokens

    def extend(self, row: int, q: Tensor, k: Tensor, v: Tensor, pos: int) -> Tensor:
        """Adds n tokens after the first `pos` of a row: q [1,Hq,n,D], k and v [1,Hk,n,D] -> [1,Hq,n,D].

        Each attends to all that the row holds and to the new tokens before it; fixed caches evict afterwards.
        """
        self.append(row, k, v, pos)
        held = self.held(row, pos + k.shape[2])
        return attention.suffix_attention(q, held.k[None], held.v[None])

    # Slots

    def allocate_slots(self, slots: int, width: int | None = None) -> None:
        """Allocates k and v [B,Hk,slots+1,D], or with `width` bytes per vector; the extra slot: inductor.covering."""
        self.slots, self.read_slots = slots, inductor.symbol(slots, self.shape.device)  # those that a step reads
        for name in ("k", "v"):
            size, dtype = width or self.shape.head_dim, torch.uint8 if width else None
            self.allocate(name, self.shape.n_kv_head, slots + 1, size, dtype=dtype)

    def slots_to_read(self, length: int, new: int) -> int:
        """How many leading slots a step reads for rows of `length` tokens, `new` of them generated."""
        return min(length, self.slots)

    def before_step(self, length: int, new: int) -> tuple:
        """Runs on the host before a step: no row will hold more than `length` tokens, `new` of them generated.

        Returns what the step depends on besides tensors: while it is equal, a compiled step may run again.
        """
        if not self.slots:
            return ()
        slots = max(self.slots_to_read(length, new), self.min_slots)
        self.read_slots = inductor.covering(self.read_slots, slots, self.slots, self.shape.device)
        on_cuda = self.shape.device.type == "cuda"  # where another compile takes long
        self.past_context = self.endless and max(length, self.shape.planned * on_cuda) > self.shape.max_length
        return inductor.value(self.read_slots), self.past_context

    def read(self, buffer: Tensor) -> Tensor:
        """The slots of a buffer [B,Hk,S,...] that the current step reads."""
        return buffer.narrow(2, 0, inductor.value(self.read_slots))

    def store(self, k: Tensor, v: Tensor, slot: Tensor, active: Tensor) -> None:
        """Writes n tokens per row, k and v [B,Hk,n,D], to slot [B,n]."""
        ops.store(self.k, k, slot, active)
        ops.store(self.v, v, slot, active)

    def attend(self, q: Tensor, length: Tensor) -> Tensor:
        """Attention to each row's first slots, see `ops.attend_prefix`."""
        return ops.attend_prefix(q, self.read(self.k), self.read(self.v), length)

    # A row's state

    def state(self, row: int, length: int) -> dict[str, Tensor]:
        """Copies of the tensors that hold row `row`, which has `length` tokens; host memory stays on the host."""
        return {name: x.clone() for name, x in (self.registers(row) | self.views(row, length)).items()}

    def restore(self, row: int, length: int, state: dict[str, Tensor]) -> None:
        """Fills row `row`, which all layers have reset, with the `state` of a row of `length` tokens.

        Layers are restored in order. Raises ValueError if a tensor is missing or has another size or dtype.
        """
        copy_state(self.registers(row), state)
        self.restored(row)
        copy_state(self.views(row, length), state)

    def registers(self, row: int) -> dict[str, Tensor]:
        """Views of what describes the row, by name; `views` may depend on it."""
        return {name: getattr(self, name)[row] for name in self.states}

    def views(self, row: int, length: int) -> dict[str, Tensor]:
        """Views of what the row holds, by name, trimmed to its `length` tokens."""
        n = min(length, self.slots)
        return {"k": self.k[row, :, :n], "v": self.v[row, :, :n]}

    def restored(self, row: int) -> None:
        """Runs once `registers` are restored, for methods that know more of a row on the host."""

    def hold_rope_speed(self) -> None:
        """Registers rope_speed [B,D/2], radians per position, for methods that turn keys to other positions (ops.turn).

        It is the model's own tensor, in which the model sets a row's speeds before its prompt; without one, speeds
        follow from rope_theta.
        """
        shape, pairs, speed = self.shape, self.shape.head_dim // 2, self.shape.rope_speed
        if speed is None:
            speed = torch.tensor([shape.rope_theta ** (-i / pairs) for i in range(pairs)], device=shape.device)
            speed = speed.repeat(shape.batch, 1)
        self.hold("rope_speed", speed)

    # Accounting

    def device_bytes(self) -> int:
        """Bytes of this layer's buffers on the device."""
        return sum(self.storages().values())

    def host_bytes(self) -> int:
        """Bytes of this layer's share of host memory."""
        return 0

    def storages(self) -> dict[int, int]:
        """Bytes of each distinct storage behind the buffers; layers that share a storage report the same key."""
        return {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, self.buffers())}

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes one decode step reads for one row, which holds `length` tokens after it."""
        read = self.slots_to_read(length, max(0, length - self.shape.max_prompt))
        return self.shape.n_kv_head * read * self.shape.unit_bytes, 0

    def fetched(self) -> tuple[int, int]:
        """(requested, transferred) host rows over all steps; one layer reports those of a shared pool."""
        return 0, 0

    def close(self) -> None:
        """Stops background work such as threads; the cache cannot be used afterwards."""
