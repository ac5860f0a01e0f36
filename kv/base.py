"""The contract between the model and a KV cache method.

Every layer of the model owns one `KV` module. The model hands it q, k and v and takes back the attention output; what
is stored, evicted, quantized or moved in between is the method's own affair. A method writes `keep`, what stays of a
prompt, and `decode`, one step; the base attends to the prompt, allocates and narrows slots, resets rows and counts
bytes. A `Method` builds all layers at once, so that layers can share what they must.

Shapes: B batch rows, Hq query heads, Hk KV heads, G = Hq / Hk queries a group, T prompt tokens, S cache slots, D head
dim. Row b of every buffer is one sequence with a length of its own. Keys arrive with RoPE applied and are stored so.

The life of a row: `prefill(row)`, which attends and calls `keep`; `finish(row)` after the last layer's prefill;
`decode` once a token; `reset(row)`. Decode steps are compiled with static shapes (`fullgraph=True`, a CUDA graph on
GPUs): a size is fixed when the method is built, what varies is a tensor and a mask. So `decode` has no `.item()`, no
shape that depends on data, and writes only in place, into registered buffers.

The laws, which tests/test_contract.py checks for every registered method:

1. With a budget of at least max_prompt + max_new_tokens (and lossy parts switched off) a method, as its own `build`
   makes it, equals full attention. A method that approximates even then says so, and equals its slow reference.
2. Compiled equals eager.
3. A row's output does not depend on the other rows.
4. Slots that hold no token are never read: whatever lies there, no output changes.
5. No output depends on a later token.
6. After `reset`, a second prompt gives what a fresh cache gives.
7. `device_bytes` + `host_bytes` is what the buffers take, and at most the paper's formula plus the declared `overhead`.
8. A decode step allocates nothing that outlives it and moves no buffer.
9. The `recent` newest tokens are attended to; generation never exceeds the allocation; `endless` methods never end.
10. An inactive row's state does not change, whatever token it is fed.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kv import ops


@dataclass(frozen=True)
class Shape:
    """What a method may know of the model and of the plan when it allocates."""

    n_layer: int
    n_head: int
    n_kv_head: int
    head_dim: int
    dim: int
    rope_type: str
    rope_theta: float
    dtype: torch.dtype
    device: torch.device
    batch: int
    max_prompt: int
    max_new_tokens: int
    window: int | None = None  # the model's sliding window in tokens, where it has one
    max_length: int = 2**31  # the model's context in tokens
    rope_speeds: tuple[float, ...] = ()  # radians a position for each of D / 2 channel pairs; empty: from rope_theta

    @property
    def planned(self) -> int:
        """S: the most tokens a row will hold."""
        return self.max_prompt + self.max_new_tokens

    @property
    def unit_bytes(self) -> int:
        """One K and one V vector of one KV head."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """One slot of a layer: a unit for each KV head of each row."""
        return self.batch * self.n_kv_head * self.unit_bytes

    def bytes(self, tokens: int) -> int:
        """So many slots of every layer."""
        return self.n_layer * tokens * self.slot_bytes

    def full_bytes(self) -> int:
        """What the full cache of all layers and rows takes at the planned length."""
        return self.bytes(self.planned)

    def tokens(self, budget: int | float) -> int:
        """A budget in tokens a KV head: an int is that already, a float in (0, 1) a share of max_prompt, 1.0 all."""
        if isinstance(budget, int):
            return budget
        return self.planned if budget == 1.0 else int(budget * self.max_prompt + 0.5)


def option(default: object, help: str, min: float | None = None, max: float | None = None) -> Any:
    """A field of a `Method`: its default, what the method's help says of it, and its bounds."""
    return field(default=default, metadata={"help": help, "min": min, "max": max})


@dataclass(frozen=True)
class Method(ABC):
    """A method as the command line names it: its fields are its options, and it builds the layers' caches."""

    help: ClassVar[str]  # a line of --list-kv
    budgeted: ClassVar[bool] = True  # it takes a budget
    instead: ClassVar[str | None] = None  # an option that may stand in for the budget
    windowed: ClassVar[bool] = False  # it honours the model's sliding window
    lossless: ClassVar[dict] = {}  # options that switch the lossy parts off
    approximates: ClassVar[str | None] = None  # what a budget for everything computes, if not full attention
    approximates_with: ClassVar[dict] = {}  # the options with which it does

    @abstractmethod
    def build(self, shape: Shape, budget: int | None) -> list["KV"]:
        """One module a layer, for a budget in tokens a KV head."""

    def memory(self, shape: Shape, budget: int | None) -> int:
        """Bytes of all layers and rows by the paper's formula: here, the budget's tokens."""
        return shape.bytes(budget)

    def minimum(self, shape: Shape) -> int:
        """The smallest budget, in tokens a KV head."""
        return 1

    @property
    def takes_budget(self) -> bool:
        """Whether the method, with these options, is to be given a budget."""
        return self.budgeted and (self.instead is None or getattr(self, self.instead) is None)

    def approximation(self) -> str | None:
        """What a budget for everything computes with these options, where that is not full attention."""
        return self.approximates if self._has(self.approximates_with) else None

    def keeps_all(self, shape: Shape, budget: int | None) -> bool:
        """Whether the budget leaves nothing to drop or to choose, and no option but `bits` loses anything."""
        lossless = {name: value for name, value in self.lossless.items() if name != "bits"}
        return budget is not None and budget >= shape.planned and self._has(lossless)

    def _has(self, options: dict) -> bool:
        return all(getattr(self, name) == value for name, value in options.items())


class Buffers(nn.Module):
    """Tensors of a row's state, which a compiled step may write in place and a checkpoint does not hold."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.states: dict[str, float] = {}  # buffers that say what a row holds, and what they are filled with at first

    def allocate(self, name: str, *size: int, dtype: torch.dtype | None = None, fill: float = 0) -> None:
        """A buffer [B,*size], of the cache's dtype unless told."""
        shape, dtype = self.shape, dtype or self.shape.dtype
        buffer = torch.full((shape.batch, *size), fill, dtype=dtype, device=shape.device)
        self.register_buffer(name, buffer, persistent=False)

    def state(self, name: str, *size: int, dtype: torch.dtype = torch.int64, fill: float = 0) -> None:
        """A buffer [B,*size] that says what a row holds: `reset` fills it again, `overhead` counts it."""
        self.allocate(name, *size, dtype=dtype, fill=fill)
        self.states[name] = fill

    def state_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.states)

    def reset(self, row: int) -> None:
        """Forgets a row."""
        for name, fill in self.states.items():
            getattr(self, name)[row] = fill


class KV(Buffers, ABC):
    """One layer's cache. Subclasses allocate their buffers in `__init__`."""

    wants_lookahead = False  # the model calls `lookahead` before the layer below attends
    endless = False  # the cache is fixed: a row may generate any number of tokens
    recent = 0  # newest tokens, the current one included, that every step attends to
    slots = 0  # of k and v, of each KV head
    least = 0  # slots that a step reads at least, because it chooses so many
    sums: tuple[str, ...] = ()  # the statistics of a prompt's attention that `keep` needs,
    observed: tuple | None = None  # and where `attend_prompt` leaves them

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.register_buffer("rope_speed", None, persistent=False)

    # What a method writes

    @abstractmethod
    def keep(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores in row `row` what stays of a prompt: q [1,Hq,T,D], k and v [1,Hk,T,D]."""

    @abstractmethod
    def decode(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        """Stores one token a row and attends: q [B,Hq,1,D], k and v [B,Hk,1,D], pos [B] int64 -> [B,Hq,1,D].

        A row whose `active` [B] is False stores nothing, and its output is ignored; its `pos` is that of its newest
        token, or 0.
        """

    def finish(self, row: int) -> None:
        """Called after the last layer's prefill: for methods that must see every layer before they shrink any."""

    def lookahead(self, q: Tensor, x: Tensor, active: Tensor) -> Tensor:
        """Takes this layer's query as the input of the layer below predicts it: [B,Hq,1,D], RoPE applied.

        The layer below continues with what is returned, x, which fixes the order for a compiler.
        """
        return x

    # The prompt

    def prefill(self, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends to a whole prompt and keeps what the method keeps of it: q [1,Hq,T,D], k, v [1,Hk,T,D] -> like q."""
        y = self.attend_prompt(q, k, v)
        self.keep(row, q, k, v)
        return y

    def attend_prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exact causal attention; overridden where `keep` needs statistics of it, never to approximate it."""
        return ops.causal_attention(q, k, v, self.shape.window)

    def skip_prompt(self, q: Tensor, k: Tensor) -> None:
        """Replaces `attend_prompt` where a benchmark fills the cache with random tokens: makes the statistics up."""

    # Slots

    def allocate_slots(self, slots: int, width: int | None = None) -> None:
        """Buffers k and v [B,Hk,slots+1,D], or of `width` bytes: one slot past the end, see ops.span."""
        self.slots, self.span = slots, ops.span(None, slots, slots, self.shape.device)
        for name in ("k", "v"):
            size, dtype = width or self.shape.head_dim, torch.uint8 if width else None
            self.allocate(name, self.shape.n_kv_head, slots + 1, size, dtype=dtype)

    def reads(self, length: int, new: int) -> int:
        """How many of the first slots a step reads for rows of `length` tokens, `new` of them generated."""
        return min(length, self.slots)

    def fit(self, length: int, new: int) -> None:
        """Called on the host before a step: no row will hold more than `length` tokens, `new` of them generated."""
        if self.slots:
            self.span = ops.span(self.span, max(self.reads(length, new), self.least), self.slots, self.shape.device)

    def read(self, buffer: Tensor) -> Tensor:
        """The slots of a buffer [B,Hk,S,...] that this step reads."""
        return buffer.narrow(2, 0, self.span.shape[0])

    def store(self, k: Tensor, v: Tensor, slot: Tensor, active: Tensor) -> None:
        """Writes one token a row, k and v [B,Hk,1,D], at slot [B]."""
        ops.store(self.k, k, slot, active)
        ops.store(self.v, v, slot, active)

    def attend(self, q: Tensor, length: Tensor) -> Tensor:
        """Attention to each row's first `length` [B] slots."""
        return ops.attend_prefix(q, self.read(self.k), self.read(self.v), length)

    # RoPE, for methods that move keys to other positions

    def allocate_speeds(self) -> None:
        """The buffer rope_speed [B,D/2] fp32, radians a position: what `ops.turn` needs."""
        pairs, shape = self.shape.head_dim // 2, self.shape
        speeds = shape.rope_speeds or [shape.rope_theta ** (-i / pairs) for i in range(pairs)]
        self.rope_speed = torch.tensor(speeds, device=shape.device).repeat(shape.batch, 1)

    def set_speed(self, row: int, speed: Tensor) -> None:
        """Called before a prompt: RoPE turns the keys of row `row` by speed [D/2] (dynamic NTK: by length)."""
        if self.rope_speed is not None:
            self.rope_speed[row] = speed

    # Accounting

    def device_bytes(self) -> int:
        """Bytes that this layer's buffers take on the device."""
        return sum(self.storages().values())

    def host_bytes(self) -> int:
        """Bytes that this layer's share of host memory takes."""
        return 0

    def storages(self) -> dict[int, int]:
        """Each distinct storage behind the buffers, with its bytes: layers that share one report the same key."""
        return {storage._cdata: storage.nbytes() for storage in map(Tensor.untyped_storage, self.buffers())}

    def step_bytes(self, length: int) -> tuple[int, int]:
        """(device, host) bytes that one decode step reads for one row that holds `length` tokens after it."""
        read = self.reads(length, max(0, length - self.shape.max_prompt))
        return self.shape.n_kv_head * read * self.shape.unit_bytes, 0

    def overhead(self) -> dict[str, int]:
        """Bytes allocated beyond the paper's formula, by name."""
        found = {"slot past the end": 2 * self.k[:, :, 0].nbytes} if self.slots else {}
        return found | ({"row state": self.state_bytes()} if self.states else {})

    def fetched(self) -> tuple[int, int]:
        """Rows that steps wanted from the host, and those that had to be fetched; a shared pool reports them once."""
        return 0, 0

    def close(self) -> None:
        """Ends what runs beside the caller, threads for example; the cache is not used again."""


class Kept(KV):
    """Slots for `kept` tokens of a prompt, in order, and for every generated token behind them."""

    def __init__(self, shape: Shape, kept: int):
        super().__init__(shape)
        self.kept = min(kept, shape.max_prompt)
        self.allocate_slots(self.kept + shape.max_new_tokens)
        self.state("dropped")  # tokens of each row's prompt, [B]

    def fill(self, row: int, k: Tensor, v: Tensor, kept: Tensor) -> None:
        """Stores a prompt's tokens at positions kept [H,n]: k and v [1,Hk,T,D], H = Hk heads or G times as many."""
        heads, n = kept.shape
        head = torch.arange(heads, device=k.device)[:, None] // (heads // k.shape[1])
        self.k[row, :, :n], self.v[row, :, :n] = (self.coded(x[0, head, kept]) for x in (k, v))
        self.dropped[row] = k.shape[2] - n

    def coded(self, x: Tensor) -> Tensor:
        """Vectors as they are stored."""
        return x

    def reads(self, length: int, new: int) -> int:
        return min(length, self.kept + new)

    def overhead(self) -> dict[str, int]:
        return super().overhead() | {"generated": self.shape.max_new_tokens * self.shape.slot_bytes}
