"""The protocol between the device, its copy stream and the threads that fetch, checked without a GPU.

Streams and events are models that keep vector clocks: what each host thread and each stream knows to have happened. Two
accesses to the same memory, one of them a write, must be ordered by what the code waits for, whichever happened first
in this run.
"""

import inspect
import textwrap
import threading
from collections import defaultdict
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kv.parts import offload
from kv.parts.offload import Pool, Staged, ThreadedPool, Workers

Clock = dict  # {actor: how many of its actions are known to have happened}


class Machine:
    """Host threads and streams, what they know, and who has accessed which memory."""

    def __init__(self):
        self.clocks: dict[object, Clock] = defaultdict(Clock)
        self.local, self.lock = threading.local(), threading.RLock()
        self.compute = Stream(self)
        self.accesses: dict[int, list] = defaultdict(list)  # by storage: (begin, end, writes, actor, clock)
        self.on_device: set[int] = set()  # storages: what touches one runs on the current stream
        self.tracked: dict[int, str] = {}
        self.races: set[str] = set()

    @property
    def stream(self) -> "Stream":
        return getattr(self.local, "stream", self.compute)

    def act(self, after: Clock | None = None, stream: "Stream | None" = None) -> Clock:
        """An action of a stream, or of this thread, which learns of what is known in `after`; returns what it knows."""
        actor = stream or threading.get_ident()
        with self.lock:
            own = self.clocks[actor]
            for other, time in (after or {}).items():
                own[other] = max(own.get(other, 0), time)
            own[actor] = own.get(actor, 0) + 1
            return dict(own)

    def access(self, tensor: Tensor, writes: bool, actor: object, clock: Clock) -> None:
        """Notes an access and, as races, the earlier ones that it should have waited for."""
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self.tracked or not tensor.numel():
            return
        first = tensor.data_ptr()
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = first + (last + 1) * tensor.itemsize
        with self.lock:
            for begin, stop, wrote, other, then in self.accesses[storage]:
                if begin < end and first < stop and (writes or wrote) and clock.get(other, 0) < then[other]:
                    self.races.add(self.tracked[storage])
            self.accesses[storage].append((first, end, writes, actor, clock))


class Event:
    def __init__(self, machine: Machine, clock: Clock):
        self.machine, self.clock = machine, clock

    def synchronize(self) -> None:
        self.machine.act(self.clock)


class Stream:
    def __init__(self, machine: Machine):
        self.machine = machine

    def record_event(self) -> Event:
        return Event(self.machine, self.machine.act(self.machine.act(), self))

    def wait_event(self, event: Event) -> None:
        self.machine.act(event.clock, self)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Watch(TorchDispatchMode):
    """Notes what every operator reads and writes. One that touches the device's memory runs on the current stream."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, machine, touched = kwargs or {}, self.machine, []  # tensors, and whether they are written to
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in func._schema.arguments if not func.is_view else ():
            value = given.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            touched += [(x, writes) for x in (value if isinstance(value, tuple | list) else [value])]
        touched = [(x, writes) for x, writes in touched if isinstance(x, Tensor)]
        actor, clock = threading.get_ident(), machine.act()
        if any(x.untyped_storage().data_ptr() in machine.on_device for x, _ in touched):  # the host queues it
            actor, clock = machine.stream, machine.act(clock, machine.stream)
        for x, writes in touched:
            machine.access(x, writes, actor, clock)
        return func(*args, **kwargs)


class Job:
    """A Future whose result tells the reader what the job's thread knew at its end."""

    def __init__(self, machine: Machine, future):
        self.machine, self.future, self.exception = machine, future, future.exception

    def result(self):
        found, clock = self.future.result()
        self.machine.act(clock)
        return found


class Executor:
    def __init__(self, machine: Machine, executor):
        self.machine, self.executor, self.shutdown = machine, executor, executor.shutdown

    def submit(self, function, *args) -> Job:
        before = self.machine.act()

        def job():
            self.machine.act(before)
            with Watch(self.machine):
                found = function(*args)
            return found, self.machine.act()

        return Job(self.machine, self.executor.submit(job))


class Queue:
    """The staging buffers that no thread uses; who takes one knows what its last user did."""

    def __init__(self, machine: Machine, free):
        self.machine, self.free, self.left = machine, free, {}

    def get(self) -> list:
        found = self.free.get()
        self.machine.act(self.left.get(id(found)))
        return found

    def put(self, buffers: list) -> None:
        self.left[id(buffers)] = self.machine.act()
        self.free.put(buffers)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()

    @contextmanager
    def use(stream):
        before, machine.local.stream = machine.stream, stream
        yield
        machine.local.stream = before

    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: machine.stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(offload, "CHUNK", 8 * WIDTH)  # bytes of two rows: a thread needs its two staging buffers twice
    return machine


ROWS, WIDTH = 32, 4


def run(machine: Machine, delta: bool, threads: int = 2, slots: int = 16) -> list[Tensor]:
    """Two pools fetch in turn, as the segments of omnikv do; returns what each step took."""
    cpu, workers = torch.device("cpu"), Workers(threads)
    shared = [Staged((1, slots, WIDTH), torch.float32, cpu, workers) for _ in range(2 if delta else 1)]
    pools = [ThreadedPool("entries", (1, ROWS, WIDTH), shared[i % len(shared)], delta) for i in range(2)]
    workers.executor, workers.free = Executor(machine, workers.executor), Queue(machine, workers.free)
    values = [torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + 1000 * i for i in range(2)]
    ids = [torch.tensor([(i + 3 * slot) % ROWS for slot in range(slots)]) for i in range(4)]
    names = [(pool.memory, "pool") for pool in pools] + [(pool.ids, "ids") for pool in pools]
    names += [(pool.arrived, "arrived") for pool in pools] + [(x.slots, "slots") for x in shared]
    names.append((workers.buffers, "staging"))
    machine.tracked = {x.untyped_storage().data_ptr(): name for x, name in names}
    on_device = [*values, *ids, *(x.slots for x in shared)]
    machine.on_device = {x.untyped_storage().data_ptr() for x in on_device}
    found = []
    for pool in pools:
        pool.stream = Stream(machine)
    with Watch(machine):
        for pool, rows in zip(pools, values, strict=True):
            pool.write(0, 0, rows[:9])
            pool.write(0, 9, rows[9:])
        for pool in pools:
            pool.settle()
        for wanted in ids:
            for pool in pools:
                pool.start(wanted)
                pool.finish()
                found.append(pool.staged.slots + 0)
        for pool in pools:  # a second pool may fetch before the first one's rows were waited for
            pool.start(ids[0])
        pools[1].finish()
        found.append(pools[1].staged.slots + 0)
        pools[0].write(0, 0, values[0])  # the row is refilled
        pools[0].settle()
        pools[0].start(ids[1])
        pools[0].finish()
    for pool in pools:
        pool.close()
    return found


@pytest.mark.parametrize("delta", (False, True))
def test_nothing_is_read_before_its_copy_or_overwritten_before_its_use(machine, delta):
    found = run(machine, delta)
    assert not machine.races
    assert torch.equal(found[0][:, 0] // WIDTH, torch.tensor([3.0 * slot % ROWS for slot in range(16)]))
    assert {actor for accesses in machine.accesses.values() for *_, actor, _ in accesses} > {machine.compute}


BREAKS = {
    "ids and slots": ("fetch", "known.synchronize()"),
    "taken early": ("drain", "torch.cuda.current_stream(self.device).wait_event(copied)"),
    "staging": ("bring", "buffer[1].synchronize()"),
    "pool": ("settle", "write.result() if isinstance(write, Future) else write.synchronize()"),
    "shared": ("start", "before.drain()"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_every_wait_is_needed(machine, monkeypatch, what):
    """The model sees a race as soon as one of the waits is left out."""
    name, wait = BREAKS[what]
    owner = ThreadedPool if name != "settle" else Pool
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(wait) == 1
    scope = dict(vars(offload))
    exec(source.replace(wait, "pass"), scope)
    monkeypatch.setattr(owner, name, scope[name])
    if name == "settle":
        monkeypatch.setattr(ThreadedPool, "settle", scope[name])
    run(machine, False, *((8, 4) if what == "shared" else ()))  # more threads than a fetch has parts
    assert machine.races
