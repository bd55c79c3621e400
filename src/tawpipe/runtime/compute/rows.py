"""Rows of a micro-batch that are read and written a chunk of tokens at a time: on the device, in the host's memory, or
in a file.

What a long row leaves for its backward pass, the inputs of its layers above all, need not be on the device as a whole:
while a chunk is computed the next one comes and the one before goes. Nothing of that meets another rank, so it happens
inside the action that computes, and not in actions of its own, of which there would be some for every chunk.

    place = places.of(buffer, (rows, tokens, width), dtype)
    for chunk in place.read([slice(0, 4096), slice(4096, 8192)]):   # on the device, in this order, one ahead
        place.write(span, result)
    place.settle()                                                  # what was written may be read from now on

A file is gone from its folder as soon as it is open: whatever ends the process gives the disk back.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tawpipe.errors import RunError, UserError
from tawpipe.runtime.threads import use_device
from tawpipe.schedule.buffers import Buffer

UNDER_WAY = 2
"""Chunks that are on their way at one time, in each direction; whoever writes more waits."""


class Rows(Protocol):
    """A tensor [rows, tokens, ...], wherever it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        """The tokens of every span, on the device; only to be read, and valid until the next one is asked for."""
        ...

    def write(self, span: slice, tokens: Tensor) -> None: ...

    def settle(self) -> None:
        """Call after the last ``write``, before anything is read."""
        ...


class OnDevice:
    """A tensor of the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        for span in spans:
            yield self.tensor[:, span]

    def write(self, span: slice, tokens: Tensor) -> None:
        self.tensor[:, span] = tokens

    def settle(self) -> None:
        pass


class GrowingRoom:
    """Memory for one tensor after another, as large as the largest so far.

    Args:
        pinned: page-locked.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        self._dtype, self._device, self._pinned = dtype, device, pinned
        self._there = self._next = self._empty(0)

    def reserve(self, shape: Sequence[int]) -> None:
        """Have memory for a tensor that comes; what is there now may still be read."""
        if (numel := math.prod(shape)) > max(self._there.numel(), self._next.numel()):
            self._next = self._empty(numel)

    def of(self, shape: Sequence[int]) -> Tensor:
        """The tensor; the one before it, of another size, is lost."""
        if (numel := math.prod(shape)) > self._there.numel():
            self.reserve(shape)
            if torch.device(self._device).type == "cuda":  # this stream has waited for all who used it
                self._there.record_stream(torch.cuda.current_stream())
            self._there, self._next = self._next, self._empty(0)
        return self._there[:numel].view(tuple(shape))

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device, pin_memory=self._pinned and numel > 0)


@dataclass(eq=False)
class Slot:
    """Memory of the device for one chunk after another on its way.

    Args:
        left: when the last of them had left it.
    """

    room: GrowingRoom
    left: torch.Event | None = None


class Staging:
    """What all places of one device copy through: two streams beside that which computes, and for each of them two
    chunks of every kind, made once and used in turn. A chunk that was made for every copy would be memory of the
    copying stream, which no other can use, and as much of it as the host is ahead of the device.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.arriving, self.leaving = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[tuple[Any, ...], list[Slot]] = {}

    def take(self, stream: Any, dtype: torch.dtype, width: Sequence[int]) -> list[Slot]:
        """Two slots for chunks that go through a stream, whose tokens are of one type and shape."""
        free = self._free.setdefault((stream, dtype, *width), [])
        while len(free) < UNDER_WAY:
            free.append(Slot(GrowingRoom(dtype, self.device)))
        return [free.pop() for _ in range(UNDER_WAY)]

    def give_back(self, stream: Any, dtype: torch.dtype, width: Sequence[int], slots: list[Slot]) -> None:
        self._free[stream, dtype, *width].extend(slots)


class InHost:
    """Memory of the host: pinned where the device is another one, and copied on streams beside that which computes.

    It comes chunk by chunk, because pinned memory comes in powers of two.

    Args:
        staging: None where the host is the device.
    """

    def __init__(self, dtype: torch.dtype, staging: Staging | None) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype, self._staging = dtype, staging
        self._rooms: dict[int, GrowingRoom] = {}
        """By the token at which a chunk begins."""
        self._leaving: list[Slot] = []
        self._written: torch.Event | None = None

    def resize(self, shape: tuple[int, ...]) -> None:
        """Be a tensor of this shape from now on; what was there is lost."""
        self.shape = shape

    def _room(self, span: slice) -> GrowingRoom:
        if span.start not in self._rooms:
            self._rooms[span.start] = GrowingRoom(self.dtype, pinned=self._staging is not None)
        return self._rooms[span.start]

    def _chunk(self, span: slice) -> Tensor:
        return self._room(span).of((self.shape[0], _length(span), *self.shape[2:]))

    def reserve(self, shape: Sequence[int], spans: Sequence[slice]) -> None:
        """Have the memory: to pin it halts the thread that issues, so it is done before a step."""
        for span in spans:
            self._room(span).reserve((shape[0], _length(span), *shape[2:]))

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        if self._staging is None:
            yield from map(self._chunk, spans)
            return
        stream, compute = self._staging.arriving, torch.cuda.current_stream(self._staging.device)
        kind = stream, self.dtype, self.shape[2:]
        slots, coming = self._staging.take(*kind), deque[tuple[Tensor, torch.Event]]()
        if self._written is not None:
            stream.wait_event(self._written)
        try:
            for place in range(len(spans) + 1):
                if place < len(spans):
                    slot, there = slots[place % UNDER_WAY], self._chunk(spans[place])
                    with torch.cuda.stream(stream):
                        if slot.left is not None:
                            stream.wait_event(slot.left)
                        tokens = slot.room.of(there.shape).copy_(there, non_blocking=True)
                        coming.append((tokens, stream.record_event()))
                if place > 0:
                    tokens, arrived = coming.popleft()
                    compute.wait_event(arrived)
                    yield tokens
                    slots[(place - 1) % UNDER_WAY].left = compute.record_event()
        finally:  # whoever reads need not ask once more after the last
            for slot in slots:
                slot.left = compute.record_event()
            self._staging.give_back(*kind, slots)

    def write(self, span: slice, tokens: Tensor) -> None:
        if self._staging is None:
            self._chunk(span).copy_(tokens)
            return
        stream, compute = self._staging.leaving, torch.cuda.current_stream(self._staging.device)
        if not self._leaving:
            self._leaving = self._staging.take(stream, self.dtype, self.shape[2:])
        slot = self._leaving.pop(0)
        if slot.left is not None:
            compute.wait_event(slot.left)
        there = self._chunk(span)
        passing = slot.room.of(there.shape).copy_(tokens)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            there.copy_(passing, non_blocking=True)
            slot.left = self._written = stream.record_event()
        self._leaving.append(slot)

    def settle(self) -> None:
        if self._leaving and self._staging is not None:
            self._staging.give_back(self._staging.leaving, self.dtype, self.shape[2:], self._leaving)
            self._leaving = []


class Folder:
    """Folder in which files are made, and the threads that read and write them.

    Args:
        device: on which these threads wait for copies.

    Raises:
        UserError: no file can be made there.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.path = path
        self.reader = ThreadPoolExecutor(1, "rows read", use_device, (device,))
        self.writer = ThreadPoolExecutor(1, "rows write", use_device, (device,))
        try:
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            expected = f"a folder that every process can write to ({error.strerror})"
            raise UserError("schedule.offload_dir", path, expected) from error


class InFile:
    """A file without a name, read one chunk ahead and written behind by the folder's threads.

    Raises:
        UserError: the disk is full.
    """

    def __init__(self, folder: Folder, dtype: torch.dtype, device: torch.device) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype, self._device, self._folder = dtype, device, folder
        self.bytes = self._token = 0
        self._file = tempfile.TemporaryFile(dir=folder.path)  # noqa: SIM115 - open for the whole run
        self._writing: deque[Future[None]] = deque()
        self._leaving: list[Tensor] = []
        self._written = 0

    def resize(self, shape: tuple[int, ...]) -> None:
        """Be a tensor of this shape from now on; what was there is lost, and the file stays as large as it was."""
        self.shape, self._token = shape, self.dtype.itemsize * math.prod(shape[2:])
        self.reserve(shape)

    def reserve(self, shape: Sequence[int], spans: Sequence[slice] = ()) -> None:
        """Have the room on the disk before a step, in which the others would wait for a rank whose disk is full."""
        if (needed := math.prod(shape) * self.dtype.itemsize) <= self.bytes:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, needed)
        except OSError as error:
            self.close()
            more = f"room for {needed - self.bytes:,} bytes more"
            expected = f"{more}, which the inputs of one layer take ({error.strerror})"
            raise UserError("schedule.offload_dir", self._folder.path, expected) from error
        self.bytes = needed

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        if not spans:
            return
        room = [self._room(max(spans, key=_length)) for _ in range(2)]
        copied: list[torch.Event | None] = [None, None]
        coming: deque[Future[None]] = deque()
        for place in range(len(spans) + 1):
            if place < len(spans):
                into = room[place % 2][:, : _length(spans[place])]
                coming.append(self._folder.reader.submit(self._move, os.preadv, spans[place], into, copied[place % 2]))
            if place > 0:
                coming.popleft().result()
                yield room[(place - 1) % 2][:, : _length(spans[place - 1])].to(self._device, non_blocking=True)
                if self._device.type == "cuda":
                    copied[(place - 1) % 2] = torch.cuda.current_stream(self._device).record_event()

    def write(self, span: slice, tokens: Tensor) -> None:
        while len(self._writing) >= UNDER_WAY:
            self._writing.popleft().result()
        if not self._leaving:
            self._leaving = [self._room(span) for _ in range(UNDER_WAY)]  # the first chunk is as long as any
        out_of = self._leaving[self._written % UNDER_WAY][:, : _length(span)]
        self._written += 1
        out_of.copy_(tokens.detach(), non_blocking=True)
        on_cuda = self._device.type == "cuda"
        copied = torch.cuda.current_stream(self._device).record_event() if on_cuda else None
        self._writing.append(self._folder.writer.submit(self._move, os.pwritev, span, out_of, copied))

    def settle(self) -> None:
        while self._writing:
            self._writing.popleft().result()
        self._leaving.clear()

    def close(self) -> None:
        """Give the disk back."""
        self._file.close()

    def _room(self, span: slice) -> Tensor:
        """Memory for a chunk."""
        shape = (self.shape[0], _length(span), *self.shape[2:])
        return torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=self._device.type == "cuda")

    def _move(self, move: Any, span: slice, tokens: Tensor, copied: torch.Event | None) -> None:
        """``preadv`` or ``pwritev``, which may stop early, once the device is done with ``tokens``."""
        if copied is not None:
            copied.synchronize()
        try:
            self._move_rows(move, span, tokens)
        except OSError as error:
            raise RunError(f"{self._folder.path}, where rows wait in files, cannot be used: {error}") from error

    def _move_rows(self, move: Any, span: slice, tokens: Tensor) -> None:
        for row in range(self.shape[0]):
            left = memoryview(tokens[row].flatten().view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
            at = (row * self.shape[1] + span.start) * self._token
            while left:
                done = move(self._file.fileno(), [left], at)
                if not done:
                    raise RunError("the file of a layer's inputs ended early")
                left, at = left[done:], at + done


def _length(span: slice) -> int:
    return span.stop - span.start


class Places:
    """Where rows wait outside of the device, for the whole run.

    Args:
        folder: for files; the host's memory if it is empty.

    Raises:
        UserError: no file can be made there.
    """

    def __init__(self, device: torch.device, folder: str = "") -> None:
        self._device, self._folder = device, Folder(folder, device) if folder else None
        self._staging = Staging(device) if device.type == "cuda" and not folder else None
        self._there: dict[tuple[Buffer, str, torch.dtype], InHost | InFile] = {}

    def of(self, buffer: Buffer, shape: Sequence[int], dtype: torch.dtype, part: str = "") -> InHost | InFile:
        """The place of a buffer, or of a named part of it, for what is written next; what was there is lost.

        Raises:
            UserError: the disk is full.
        """
        place = self._place(buffer, part, dtype)
        place.resize(tuple(shape))
        return place

    def reserve(self, buffer: Buffer, shape: Sequence[int], dtype: torch.dtype, spans: Sequence[slice]) -> None:
        """Have the memory for what is written next in these spans; what is there may still be read."""
        self._place(buffer, "", dtype).reserve(shape, spans)

    def _place(self, buffer: Buffer, part: str, dtype: torch.dtype) -> InHost | InFile:
        key = buffer, part, dtype
        if key not in self._there:
            folder = self._folder
            self._there[key] = InFile(folder, dtype, self._device) if folder else InHost(dtype, self._staging)
        return self._there[key]

    @property
    def file_bytes(self) -> int:
        """Bytes of the files that there are."""
        return sum(place.bytes for place in self._there.values() if isinstance(place, InFile))

    def close(self) -> None:
        """Give all files back."""
        for place in self._there.values():
            if isinstance(place, InFile):
                place.close()
        self._there.clear()
