"""Rows of a micro-batch that are read and written one chunk of tokens at a time, wherever they are stored.

They are on the device, in CPU memory or in a file. The values that a long row keeps for its backward pass, above all
the inputs of its layers, need not be on the device at one time. While one chunk is computed, the next one is copied in
and the one before is copied out. This needs no other rank, so it is part of the computing action. Otherwise a schedule
would need several more actions for every chunk.

    place = places.of(buffer, (rows, tokens, width), dtype)
    for chunk in place.read([slice(0, 4096), slice(4096, 8192)]):   # on the device, in order; the next is prefetched
        place.write(span, result)
    place.settle()                                                  # from now on, what was written may be read

A file is deleted from its folder as soon as it is open, so its disk space is freed however the process ends.
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
"""Chunks that are copied at one time, in each direction; a further write waits."""


class Rows(Protocol):
    """A tensor [rows, tokens, ...] on the device, in CPU memory or in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        """Yield the tokens of every span, on the device.

        Each tensor is read-only, and valid until the next one is requested.
        """
        ...

    def write(self, span: slice, tokens: Tensor) -> None: ...

    def settle(self) -> None:
        """Wait until everything is in its file, and return the buffers that writing has used.

        Call it after the last ``write``, before anything is read. On the device there is nothing to do."""
        ...


class OnDevice:
    """Rows that are a tensor of the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        for span in spans:
            yield self.tensor[:, span]

    def write(self, span: slice, tokens: Tensor) -> None:
        self.tensor[:, span] = tokens

    def settle(self) -> None:
        pass


class GrowingBuffer:
    """Buffer for one tensor after another, as large as the largest so far.

    Args:
        dtype: Dtype of the tensors.
        device: Device of the buffer.
        pinned: Page-lock the memory.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False) -> None:
        self._dtype, self._device, self._pinned = dtype, device, pinned
        self._tensor = self._next = self._empty(0)

    def reserve(self, shape: Sequence[int]) -> None:
        """Allocate memory for a later tensor of this shape. The present tensor may still be read."""
        if (numel := math.prod(shape)) > max(self._tensor.numel(), self._next.numel()):
            self._next = self._empty(numel)

    def of(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of this shape in the buffer; the content of the tensor before is lost."""
        if (numel := math.prod(shape)) > self._tensor.numel():
            self.reserve(shape)
            if torch.device(self._device).type == "cuda":  # this stream has waited for all uses of the old memory
                self._tensor.record_stream(torch.cuda.current_stream())
            self._tensor, self._next = self._next, self._empty(0)
        return self._tensor[:numel].view(tuple(shape))

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype, device=self._device, pin_memory=self._pinned and numel > 0)


@dataclass(eq=False)
class Slot:
    """Device buffer through which one chunk after another is copied.

    Args:
        buffer: The memory.
        left: Event after which the last chunk is no longer needed here.
    """

    buffer: GrowingBuffer
    left: torch.Event | None = None


class Staging:
    """Device buffers and two CUDA streams through which all rows in CPU memory are copied.

    For each stream and kind of chunk there are two buffers, made once and used in turn. A new buffer for every copy
    would belong to the copying stream, which no other stream can use, and there would be as many as the host is ahead
    of the device.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.arriving, self.leaving = device, torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[tuple[Any, ...], list[Slot]] = {}

    def take(self, stream: Any, dtype: torch.dtype, width: Sequence[int]) -> list[Slot]:
        """Return two slots for chunks that are copied in ``stream``, whose tokens have this dtype and shape."""
        free = self._free.setdefault((stream, dtype, *width), [])
        while len(free) < UNDER_WAY:
            free.append(Slot(GrowingBuffer(dtype, self.device)))
        return [free.pop() for _ in range(UNDER_WAY)]

    def give_back(self, stream: Any, dtype: torch.dtype, width: Sequence[int], slots: list[Slot]) -> None:
        """Return slots that ``take`` has lent."""
        self._free[stream, dtype, *width].extend(slots)


class InHost:
    """Rows in CPU memory: pinned if the device is a GPU, and copied on streams beside the compute stream.

    It is allocated chunk by chunk, because sizes of pinned memory are powers of two.

    Args:
        dtype: Dtype of the rows.
        staging: Buffers and streams for copies; None if the device is the CPU.
    """

    def __init__(self, dtype: torch.dtype, staging: Staging | None) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype, self._staging = dtype, staging
        self._chunk_buffers: dict[int, GrowingBuffer] = {}
        """First token of a chunk -> its memory."""
        self._leaving: list[Slot] = []
        self._written: torch.Event | None = None

    def resize(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the tensor; its content is lost."""
        self.shape = shape

    def _chunk_buffer(self, span: slice) -> GrowingBuffer:
        if span.start not in self._chunk_buffers:
            self._chunk_buffers[span.start] = GrowingBuffer(self.dtype, pinned=self._staging is not None)
        return self._chunk_buffers[span.start]

    def _chunk(self, span: slice) -> Tensor:
        return self._chunk_buffer(span).of((self.shape[0], _length(span), *self.shape[2:]))

    def reserve(self, shape: Sequence[int], spans: Sequence[slice]) -> None:
        """Allocate the memory before a step, because pinning it blocks the issuing thread."""
        for span in spans:
            self._chunk_buffer(span).reserve((shape[0], _length(span), *shape[2:]))

    def read(self, spans: Sequence[slice]) -> Iterator[Tensor]:
        """Yield the tokens of every span on the device; the next chunk is copied while one is used."""
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
                    slot, chunk = slots[place % UNDER_WAY], self._chunk(spans[place])
                    with torch.cuda.stream(stream):
                        if slot.left is not None:
                            stream.wait_event(slot.left)
                        tokens = slot.buffer.of(chunk.shape).copy_(chunk, non_blocking=True)
                        coming.append((tokens, stream.record_event()))
                if place > 0:
                    tokens, arrived = coming.popleft()
                    compute.wait_event(arrived)
                    yield tokens
                    slots[(place - 1) % UNDER_WAY].left = compute.record_event()
        finally:  # runs also if the reader stops after the last chunk
            for slot in slots:
                slot.left = compute.record_event()
            self._staging.give_back(*kind, slots)

    def write(self, span: slice, tokens: Tensor) -> None:
        """Copy ``tokens`` to their chunk in CPU memory, on a GPU in the background."""
        if self._staging is None:
            self._chunk(span).copy_(tokens)
            return
        stream, compute = self._staging.leaving, torch.cuda.current_stream(self._staging.device)
        if not self._leaving:
            self._leaving = self._staging.take(stream, self.dtype, self.shape[2:])
        slot = self._leaving.pop(0)
        if slot.left is not None:
            compute.wait_event(slot.left)
        chunk = self._chunk(span)
        passing = slot.buffer.of(chunk.shape).copy_(tokens)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            chunk.copy_(passing, non_blocking=True)
            slot.left = self._written = stream.record_event()
        self._leaving.append(slot)

    def settle(self) -> None:
        if self._leaving and self._staging is not None:
            self._staging.give_back(self._staging.leaving, self.dtype, self.shape[2:], self._leaving)
            self._leaving = []


class Folder:
    """Folder for the files of rows, and the threads that read and write them.

    Args:
        path: The folder.
        device: Device for whose copies the threads wait.

    Raises:
        UserError: If no file can be made in the folder.
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
    """Rows in an unnamed file, read one chunk ahead and written in the background by the folder's threads.

    Args:
        folder: Folder of the file.
        dtype: Dtype of the rows.
        device: Device of the chunks that are read.
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
        """Set the shape of the tensor; its content is lost. The file never shrinks.

        Raises:
            UserError: If the disk is full.
        """
        self.shape, self._token = shape, self.dtype.itemsize * math.prod(shape[2:])
        self.reserve(shape)

    def reserve(self, shape: Sequence[int], spans: Sequence[slice] = ()) -> None:
        """Allocate disk space before a step. Within a step, other ranks would wait for a rank whose disk is full.

        Raises:
            UserError: If the disk is full.
        """
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
        """Yield the tokens of every span on the device; the next chunk is read from the file while one is used."""
        if not spans:
            return
        chunk_buffers = [self._chunk_buffer(max(spans, key=_length)) for _ in range(2)]
        copied: list[torch.Event | None] = [None, None]
        coming: deque[Future[None]] = deque()
        for place in range(len(spans) + 1):
            if place < len(spans):
                into = chunk_buffers[place % 2][:, : _length(spans[place])]
                coming.append(self._folder.reader.submit(self._move, os.preadv, spans[place], into, copied[place % 2]))
            if place > 0:
                coming.popleft().result()
                yield chunk_buffers[(place - 1) % 2][:, : _length(spans[place - 1])].to(self._device, non_blocking=True)
                if self._device.type == "cuda":
                    copied[(place - 1) % 2] = torch.cuda.current_stream(self._device).record_event()

    def write(self, span: slice, tokens: Tensor) -> None:
        """Copy ``tokens`` to CPU memory, and write them to the file in the background.

        Waits while ``UNDER_WAY`` chunks are being written.
        """
        while len(self._writing) >= UNDER_WAY:
            self._writing.popleft().result()
        if not self._leaving:
            self._leaving = [self._chunk_buffer(span) for _ in range(UNDER_WAY)]  # the first chunk is the longest
        out_of = self._leaving[self._written % UNDER_WAY][:, : _length(span)]
        self._written += 1
        out_of.copy_(tokens.detach(), non_blocking=True)
        on_cuda = self._device.type == "cuda"
        copied = torch.cuda.current_stream(self._device).record_event() if on_cuda else None
        self._writing.append(self._folder.writer.submit(self._move, os.pwritev, span, out_of, copied))

    def settle(self) -> None:
        """Wait until everything has been written."""
        while self._writing:
            self._writing.popleft().result()
        self._leaving.clear()

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        self._file.close()

    def _chunk_buffer(self, span: slice) -> Tensor:
        """Return new CPU memory for a chunk, pinned if the device is a GPU."""
        shape = (self.shape[0], _length(span), *self.shape[2:])
        return torch.empty(shape, dtype=self.dtype, device="cpu", pin_memory=self._device.type == "cuda")

    def _move(self, move: Any, span: slice, tokens: Tensor, copied: torch.Event | None) -> None:
        """Read or write ``tokens`` with ``preadv`` or ``pwritev``, after the device has finished with them.

        Raises:
            RunError: If the file cannot be used.
        """
        if copied is not None:
            copied.synchronize()
        try:
            self._move_rows(move, span, tokens)
        except OSError as error:
            raise RunError(f"{self._folder.path}, where rows wait in files, cannot be used: {error}") from error

    def _move_rows(self, move: Any, span: slice, tokens: Tensor) -> None:
        """Read or write each row of a chunk, repeating calls that stop early."""
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
    """Storage of rows outside the device, reused during the whole run.

    Args:
        device: Device of the chunks that are read.
        folder: Folder for files; ``""`` for CPU memory.

    Raises:
        UserError: If no file can be made in the folder.
    """

    def __init__(self, device: torch.device, folder: str = "") -> None:
        self._device, self._folder = device, Folder(folder, device) if folder else None
        self._staging = Staging(device) if device.type == "cuda" and not folder else None
        self._places: dict[tuple[Buffer, str, torch.dtype], InHost | InFile] = {}

    def of(self, buffer: Buffer, shape: Sequence[int], dtype: torch.dtype, part: str = "") -> InHost | InFile:
        """Return the rows of a buffer, or of a named part of it, for writing; their earlier content is lost.

        Raises:
            UserError: If the disk is full.
        """
        place = self._place(buffer, part, dtype)
        place.resize(tuple(shape))
        return place

    def reserve(self, buffer: Buffer, shape: Sequence[int], dtype: torch.dtype, spans: Sequence[slice]) -> None:
        """Allocate the memory of a buffer's next content, in these spans. The present content may still be read."""
        self._place(buffer, "", dtype).reserve(shape, spans)

    def _place(self, buffer: Buffer, part: str, dtype: torch.dtype) -> InHost | InFile:
        """Return the rows of a buffer, part and dtype; make them at their first use."""
        key = buffer, part, dtype
        if key not in self._places:
            folder = self._folder
            self._places[key] = InFile(folder, dtype, self._device) if folder else InHost(dtype, self._staging)
        return self._places[key]

    @property
    def file_bytes(self) -> int:
        """Bytes of all open files."""
        return sum(place.bytes for place in self._places.values() if isinstance(place, InFile))

    def close(self) -> None:
        """Close all files, which frees their disk space."""
        for place in self._places.values():
            if isinstance(place, InFile):
                place.close()
        self._places.clear()
