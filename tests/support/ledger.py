"""A ledger of streams and memory: who allocated a tensor, on which streams it is used, and what is known to be over.

Streams run nothing here. They carry vector clocks, so that for every two uses of one tensor it is known whether the
second one waits for the first on a real device. The rules are those of CUDA's caching allocator: a block belongs to the
stream that was current when it was made; when its last tensor goes it may be given to that stream's next one at once,
whatever other streams still do with it, unless they were recorded.

Everything that happens is also written down in ``trace``, for ``toy_allocator``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Clock = dict[int, int]
"""For every stream how many of its operations are over."""


def _join(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        clock[stream] = max(clock.get(stream, 0), at)


@dataclass(eq=False)
class Stream:
    """A stream that runs nothing."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)
    last: int = 0
    """The number of its last operation among those of all streams."""

    def __repr__(self) -> str:
        return self.name


@dataclass(eq=False)
class Block:
    """Memory of one tensor and of its views.

    Args:
        stream: that it was allocated on; None for the host's memory.
        made: by which action.
        uses: stream -> its last use there: the time on that stream, and what used it.
        written: its last write: on which stream, when, by what.
    """

    number: int
    size: int
    stream: Stream | None
    is_derived: str
    pinned: bool = False
    uses: dict[Stream, tuple[int, str]] = field(default_factory=dict)
    written: tuple[Stream, int, str] | None = None
    recorded: set[Stream] = field(default_factory=set)
    parts: dict[tuple[int, int], Block] = field(default_factory=dict)
    """Of pinned memory what was used by itself, by its bytes: slices of it come and go at one time."""


class Happening(NamedTuple):
    """A line of the trace.

    Args:
        what: ``allocate``, ``free``, or ``wait`` (of the host).
        at: the number of the last operation that was issued.
        stream: where; of a free, where its memory goes.
        block: which, and its bytes.
        last: of a free, of every stream that was recorded its number, and its last operation: its time there, and its
            number among those of all.
        over: of a wait, what is over.
    """

    what: str
    at: int
    stream: Stream | None = None
    block: int = 0
    size: int = 0
    last: tuple[tuple[int, int, int], ...] = ()
    over: Clock | None = None


def _alone(method: Any) -> Any:
    """One thread at a time: those that write files use tensors, too."""

    @functools.wraps(method)
    def locked(self: Ledger, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked


class Ledger:
    """What streams do with memory, and what is wrong with it.

    ``faults`` says what could go wrong on a device, ``waits`` for what the host stands still, and ``unpinned`` what it
    copies from memory that is not page-locked.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.default = self.stream("default")
        self.current = self.default
        self.action = "outside of actions"
        self.host: Clock = {}
        """What the host knows to be over."""
        self.blocks: dict[int, Block] = {}
        """By the address of what torch keeps about the memory, to which a weak reference is held."""
        self.trace: list[Happening] = []
        self.faults: list[str] = []
        self.waits: list[str] = []
        self.debug_mode = "default"
        """``torch.cuda.set_sync_debug_mode``."""
        self.unpinned: list[str] = []
        self.pinned_bytes = 0
        self._made = self.issued = 0
        self._thread = threading.local()
        self._thread.on_device = True  # the thread of the test, which stands for the one that chose the device
        self.on_device_first: list[str] = []
        """Names of the other threads, as they set their device."""

    # streams

    def stream(self, name: str = "") -> Stream:
        """A new one."""
        made = Stream(len(self.streams), name or f"stream {len(self.streams)}")
        self.streams.append(made)
        return made

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @_alone
    def wait(self, stream: Stream, clock: Clock) -> None:
        """Let what a stream does from now on come after something."""
        self.sweep()
        _join(stream.clock, clock)

    @_alone
    def host_waits(self, clock: Clock) -> None:
        """Let everything that is issued from now on come after something."""
        self.sweep()
        _join(self.host, clock)
        self.trace.append(Happening("wait", self.issued, over=dict(clock)))

    def stands_still(self, what: str, *, torch_knows: bool = True) -> None:
        """Note that the host waits for the device; in torch's debug mode that is an error, where torch knows of it."""
        self.waits.append(f"{what} in {self.action}")
        if torch_knows and self.debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {self.waits[-1]}")

    # threads

    def set_device(self, *, to: bool = True) -> bool:
        """Note that the calling thread is on the device of its process, or no longer; returns which it was."""
        before = getattr(self._thread, "on_device", False)
        self._thread.on_device = to
        if to and not before:
            self.on_device_first.append(threading.current_thread().name)
        return before

    def asked(self, what: str) -> None:
        """Note a call to CUDA: in a thread that has not set its device it would make a context on device 0."""
        if not getattr(self._thread, "on_device", False):
            self.faults.append(f"{what} in thread {threading.current_thread().name}, which has not set its device")

    # memory

    @_alone
    def run(self, what: str, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], *, device: bool) -> None:
        """An operation on the current stream.

        Args:
            made: its results, those among them whose memory is new.
            device: whether that is the device's.
        """
        self.sweep()
        about = f"{what} in {self.action}"
        olds = [(self._block(one), False, one) for one in reads] + [(self._block(one), True, one) for one in writes]
        stream = self.current
        on_device = device or any(block is not None and block.stream is not None for block, _, _ in olds)
        for one in made:
            if self._block(one) is None:
                olds.append((self._allocate(one, about, device=on_device), True, one))
        if not on_device:  # the host does it itself, at once
            for block, _, _ in olds:
                if block and block.written and self.host.get(block.written[0].number, 0) < block.written[1]:
                    self.faults.append(f"the host does {about}, and has not waited for {block.written[2]}")
            return
        _join(stream.clock, self.host)
        self.issued += 1
        now = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        stream.last = self.issued
        for block, writes_it, tensor in olds:
            if block is not None and block.pinned:
                begin = int(tensor.storage_offset()) * tensor.itemsize
                end = begin + int(tensor.numel()) * tensor.itemsize
                own = block.parts.setdefault((begin, end), Block(block.number, end - begin, None, block.is_derived))
                for (first, last), part in block.parts.items():
                    if part is not own and first < end and begin < last:
                        self._look(part, stream, about, writes=writes_it)
                self._use(own, stream, now, about, writes=writes_it)
                block.written = (stream, now, about) if writes_it else block.written
            elif block is not None:
                self._use(block, stream, now, about, writes=writes_it)

    @_alone
    def record(self, tensor: Tensor, stream: Stream) -> None:
        """``Tensor.record_stream``."""
        self.sweep()
        block = self._block(tensor)
        assert block is not None and block.stream is not None, "record_stream of what is not on the device"
        block.recorded.add(stream)

    @_alone
    def move(self, tensor: Tensor, *, device: bool, pinned: bool = False) -> None:
        """Say where a tensor that has just been made is."""
        block = self._block(tensor)
        assert block is not None
        if device and block.stream is None:
            block.stream = self.current
            self._note("allocate", block.stream, block)
        if pinned:
            block.pinned = True
            self.pinned_bytes += block.size

    def on_device(self, tensor: Tensor) -> bool:
        block = self._block(tensor)
        return block is not None and block.stream is not None

    def knows(self, tensor: Tensor) -> bool:
        return self._block(tensor) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        block = self._block(tensor)
        return block is not None and block.pinned

    @_alone
    def sweep(self) -> None:
        """Find the memory whose last tensor has gone."""
        expired = torch.UntypedStorage._expired
        for place in [place for place in self.blocks if expired(place)]:
            torch.UntypedStorage._free_weak_ref(place)
            self._free(self.blocks.pop(place))

    def close(self) -> None:
        for place in self.blocks:
            torch.UntypedStorage._free_weak_ref(place)
        self.blocks.clear()

    def _block(self, tensor: Tensor) -> Block | None:
        return None if tensor.is_meta else self.blocks.get(tensor.untyped_storage()._cdata)

    def _allocate(self, tensor: Tensor, about: str, *, device: bool) -> Block:
        storage: Any = tensor.untyped_storage()
        self._made += 1
        block = Block(self._made, storage.nbytes(), self.current if device else None, about)
        self.blocks[storage._cdata] = block
        storage._weak_ref()
        if device:
            self._note("allocate", self.current, block)
        return block

    def _look(self, block: Block, stream: Stream, about: str, *, writes: bool) -> None:
        earlier = [(block.written[0], block.written[1:])] if block.written else []
        for other, (at, by) in [*earlier, *(block.uses.items() if writes else ())]:
            if stream.clock.get(other.number, 0) < at:
                self.faults.append(f"{about} on {stream} does not wait for {by} on {other}")

    def _use(self, block: Block, stream: Stream, now: int, about: str, *, writes: bool) -> None:
        self._look(block, stream, about, writes=writes)
        block.uses[stream] = now, about
        if writes:
            block.written = stream, now, about

    def _free(self, block: Block) -> None:
        if block.stream is None:
            return
        for stream, (at, by) in block.uses.items():
            clocks = (self.host, *(one.clock for one in (block.stream, *block.recorded)))
            if stream is not block.stream and max(clock.get(stream.number, 0) for clock in clocks) < at:
                self.faults.append(
                    f"memory of {block.is_derived} on {block.stream} is freed in {self.action}, and nothing says that "
                    f"{by} on {stream} is over"
                )
        others = [stream for stream in block.recorded if stream is not block.stream]
        last = tuple((stream.number, stream.clock.get(stream.number, 0), stream.last) for stream in others)
        self._note("free", block.stream, block, last)

    def _note(
        self, what: str, stream: Stream, block: Block | None = None, last: tuple[tuple[int, int, int], ...] = ()
    ) -> None:
        number, size = (block.number, block.size) if block else (0, 0)
        self.trace.append(Happening(what, self.issued, stream, number, size, last))
