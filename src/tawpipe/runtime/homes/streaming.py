"""Homes in CPU memory: gradients are added there, and updates pass through the device in portions.

**Location of the data.** With ``schedule.host_homes: state``, master weights, gradients and optimizer state of every
trainable shard are in CPU memory. The compute copy and all frozen weights stay on the device. With ``all`` these are in
CPU memory, too (landing.py). In addition the device has two buffers of one portion each (slices.py) for every tensor of
a piece: weight, gradient and optimizer states.

**An update** copies a portion of these to the device, lets the optimizer step on it there, writes the compute copy, and
copies weights and states back. With AdamW in fp32 that is 16 bytes per parameter to the device and 12 back. It is the
kernel and the numbers of a home on the device, so the result has equal bits. No work on the device waits for the CPU,
whose own AdamW would be limited by the same memory. One buffer is filled while the optimizer works in the other and its
previous content is copied back: three streams, which wait for each other by events. On a CPU the copies are made one
after another.

**The optimizer** of a unit is the one that a home on the device would have. During a step its groups hold parameters
that stand for the portions, with portions of the states. One-element states (the step count) stay on the device, and
every portion gets its own copy: the state after the last portion of a piece is kept. States that an optimizer makes in
its first step are allocated then. If an optimizer needs whole matrices, a matrix is one portion.

**A gradient** is copied to its home portion by portion. If the home already holds a sum of this step, that sum is
copied to the device first, and the new sum is copied back: in the schedule's order, as on the device. While a portion
is on the device, its squares are summed (``squares``), so that NORM need not read CPU memory. Homes on devices sum
their squares in the same portions. The factor by which UPDATE multiplies a gradient stays on the device. The gradient
in CPU memory is scaled only when it is read (``Storage.collect``).

**Order.** All of this runs in actions on one lane, HOME, so two actions never use the buffers at one time. An action's
own streams begin when the lane reaches it, and the lane continues when they have ended. So the buffers that the
schedule lists for an action are the only dependencies. Without clipping (``early_updates``) a unit is updated directly
after its gradient is complete, behind the backward pass. Otherwise updates overlap with the next step's forward pass,
in the order in which it needs the units.

**Memory** is page-locked one tensor at a time, in its exact size (host_memory.py). Tensors that are not copied are not
locked. ``device_bytes`` and ``host_bytes`` are the actual sizes; ``schedule/sizes/footprint.py`` predicts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tawpipe.runtime.homes.portions import Load, Portion, elements_of, loads_of, squares_of
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers, is_elementwise
from tawpipe.schedule.landing import LOAD_BUFFERS

WEIGHT, GRADIENT, COPY = "weight", "gradient", "copy"
"""Names of the tensors in a buffer, in addition to optimizer states, which have names of their own."""


class LoadBuffer:
    """Device buffer for one load after another, with one tensor for every kind of value.

    Args:
        elements: Elements of the largest load.
        device: Device of the buffer.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._elements, self._device = elements, device
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        self.arrived: torch.Event | None = None
        self.left: torch.Event | None = None
        """Events: the last load has arrived here, and has been copied back."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def of(self, name: str, part: Portion, dtype: torch.dtype) -> Tensor:
        """Return the part of the buffer's tensor ``name`` that holds the portion ``part``.

        The tensor is allocated at its first use.
        """
        if (name, dtype) not in self._tensors:
            self._tensors[name, dtype] = torch.empty(self._elements, dtype=dtype, device=self._device)
        return self._tensors[name, dtype][part.at : part.at + part.numel]


class _Streams:
    """Two CUDA streams beside the lane's own: one for copies to the device, one for copies back. None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._arriving = torch.cuda.Stream(device) if on_cuda else None
        self._leaving = torch.cuda.Stream(device) if on_cuda else None

    def begin(self) -> None:
        """Make later copies to the device wait for all work that the lane has issued so far."""
        if self._arriving is not None:
            self._arriving.wait_stream(torch.cuda.current_stream())

    def arriving(self, buffer: LoadBuffer) -> AbstractContextManager[Any]:
        """Return a context in which copies into ``buffer`` are issued on the stream for arriving data.

        Makes that stream wait until the previous load of ``buffer`` has been copied back. On a CPU the context does
        nothing."""
        if self._arriving is None:
            return nullcontext()
        if buffer.left is not None:
            self._arriving.wait_event(buffer.left)
        return torch.cuda.stream(self._arriving)

    def brought(self, buffer: LoadBuffer) -> None:
        """Record an event in ``buffer``: the copies of its load to the device that were issued so far have ended."""
        if self._arriving is not None:
            buffer.arrived = self._arriving.record_event()

    def here(self, buffer: LoadBuffer) -> None:
        """Make the lane's stream wait until the load in ``buffer`` has arrived. The host does not wait."""
        if self._arriving is not None:
            assert buffer.arrived is not None
            torch.cuda.current_stream().wait_event(buffer.arrived)

    def leaving(self) -> AbstractContextManager[Any]:
        """Return a context in which copies back to CPU memory are issued on the stream for leaving data.

        Makes that stream wait for the lane's work so far. On a CPU the context does nothing."""
        if self._leaving is None:
            return nullcontext()
        self._leaving.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._leaving)

    def taken(self, buffer: LoadBuffer) -> None:
        """Record an event in ``buffer``: the copies of its load to CPU memory issued so far have ended."""
        if self._leaving is not None:
            buffer.left = self._leaving.record_event()

    def end(self) -> None:
        """Make the lane's stream wait for all copies back to CPU memory. The host does not wait."""
        if self._leaving is not None:
            torch.cuda.current_stream().wait_stream(self._leaving)


class Streaming:
    """Transfers between the device and the homes of one rank in CPU memory.

    ``squares`` holds for every unit the sums of squares of its gradient, one per portion, on the device.
    """

    def __init__(self, storage: Storage, optimizers: UnitOptimizers) -> None:
        self._storage, self._optimizers, self._device = storage, optimizers, storage.device
        self._pieces = {unit: optimizers.pieces.get(unit, ()) for unit in storage.scales}  # a shard may be only padding
        self._loads = {unit: loads_of(pieces) for unit, pieces in self._pieces.items()}
        most = max((elements_of(load) for loads in self._loads.values() for load in loads), default=0)
        self._buffers = [LoadBuffer(most, self._device) for _ in range(LOAD_BUFFERS)]
        self._streams = _Streams(self._device)
        wide = {"dtype": torch.float64, "device": self._device}
        self.squares = {unit: torch.zeros(sum(map(len, loads)), **wide) for unit, loads in self._loads.items()}

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers that have been allocated so far."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def fetch(self, unit: int, target: Tensor) -> None:
        """Copy the home gradient of a unit into ``target``, a buffer of the device."""
        target.copy_(self._storage.gradient[unit], non_blocking=True)

    @torch.no_grad()
    def add(self, unit: int, sources: Sequence[Tensor], *, replaces: bool) -> None:
        """Add buffers of the device to a unit's home gradient, portion by portion, and store its sums of squares.

        Args:
            unit: The unit.
            sources: Gradients on the device, with the elements of the home's shard.
            replaces: If True, the sum of ``sources`` replaces the home gradient.
        """
        dtype = self._storage.master_dtype

        def bring(load: Load, buffer: LoadBuffer) -> None:
            """Copy the home gradient of a load to the device, unless it is replaced."""
            for part in () if replaces else load:
                buffer.of(GRADIENT, part, dtype).copy_(part.of(self._gradient(unit, part.place)), non_blocking=True)

        def work(load: Load, buffer: LoadBuffer) -> None:
            """Add the sources to the load's gradient on the device, and sum its squares."""
            for part in load:
                here = buffer.of(GRADIENT, part, dtype)
                for number, source in enumerate(sources):
                    addend = part.of(self._same_place(unit, part.place, source))
                    _ = here.copy_(addend) if replaces and number == 0 else here.add_(addend)
            self._square(unit, load, buffer)

        def take(load: Load, buffer: LoadBuffer) -> None:
            """Copy the load's gradient back to CPU memory."""
            for part in load:
                part.of(self._gradient(unit, part.place)).copy_(buffer.of(GRADIENT, part, dtype), non_blocking=True)

        self._pass(unit, bring, work, take)

    @torch.no_grad()
    def update(
        self,
        unit: int,
        factor: Tensor,
        updates: Tensor | None,
        rate: float,
        chosen: Sequence[Mapping[str, Any]] | None,
        *,
        early: bool,
        gradient: Tensor | None = None,
    ) -> None:
        """Update a unit portion by portion with its optimizer, and write its compute copy and its new optimizer state.

        Also keeps ``factor`` as the scale of the home gradient, which itself stays unscaled.

        Args:
            unit: The unit.
            factor: One-element tensor that multiplies the gradient.
            updates, rate, chosen: As for ``UnitOptimizers.step``.
            early: NORM runs later and needs the squares of the gradient that was used.
            gradient: Gradient on the device; None to read it from the home.
        """
        optimizers, storage, dtype = self._optimizers, self._storage, self._storage.master_dtype
        pieces, copies = self._pieces[unit], storage.compute_copy[unit]
        goes_down = storage.copies_in_host and copies is not storage.master[unit]
        if not pieces:
            return
        step = optimizers.begin(unit, rate, chosen)

        def states_of(piece: int) -> dict[str, tuple[str, Tensor]]:
            """Return the elementwise states of a piece, each with the name of its tensor in the buffer.

            Pieces may have states of different names, so the names are numbered.
            """
            passing = [pair for pair in step.before[piece].items() if is_elementwise(pair[1], pieces[piece].value)]
            return {key: (f"state {number}", value) for number, (key, value) in enumerate(passing)}

        # New states are copied back on a stream other than the one that allocated them, so they are kept until the copy
        # is over.
        new_states: list[Any] = []

        def bring(load: Load, buffer: LoadBuffer) -> None:
            """Copy weights, gradient and states of a load to the device."""
            for part in load:
                piece = pieces[part.place]
                buffer.of(WEIGHT, part, dtype).copy_(part.of(piece.value.detach()), non_blocking=True)
                if gradient is None:
                    source = part.of(self._gradient(unit, part.place))
                    buffer.of(GRADIENT, part, dtype).copy_(source, non_blocking=True)
                for place, value in states_of(part.place).values():
                    buffer.of(place, part, value.dtype).copy_(part.of(value), non_blocking=True)

        def work(load: Load, buffer: LoadBuffer) -> None:
            """Scale the gradient, let the optimizer step on the load, and write its part of the compute copy."""
            values = []
            for part in load:
                piece = pieces[part.place]
                whole = piece.value.shape if piece.value.ndim > 1 else (part.numel,)
                value = piece.mark(buffer.of(WEIGHT, part, dtype).view(whole))
                if gradient is not None:
                    buffer.of(GRADIENT, part, dtype).copy_(part.of(self._same_place(unit, part.place, gradient)))
                value.grad = buffer.of(GRADIENT, part, dtype).mul_(factor).view(whole)
                passing = states_of(part.place)
                # Every portion starts from the state before the step. Otherwise a step count would count portions.
                others = {key: value for key, value in step.before[part.place].items() if key not in passing}
                state = {key: self._here(value) for key, value in others.items()}
                for key, (place, kept) in passing.items():
                    state[key] = buffer.of(place, part, kept.dtype).view(whole)
                values.append((part.place, value, state))
            if early:
                self._square(unit, load, buffer)
            states = optimizers.step_on(step, values, updates)
            stand_ins = (value.detach() for _, value, _ in values)
            new_states[:] = [*new_states[-1:], list(zip(stand_ins, states, strict=True))]
            for part in load:
                if goes_down:
                    buffer.of(COPY, part, copies.dtype).copy_(buffer.of(WEIGHT, part, dtype))
                elif copies is not storage.master[unit]:
                    part.of(self._same_place(unit, part.place, copies)).copy_(buffer.of(WEIGHT, part, dtype))

        def take(load: Load, buffer: LoadBuffer) -> None:
            """Copy weights and states of a load back to CPU memory, and the compute copy if it is there."""
            for part, (stand_in, state) in zip(load, new_states[-1], strict=True):
                piece = pieces[part.place]
                part.of(piece.value.detach()).copy_(buffer.of(WEIGHT, part, dtype), non_blocking=True)
                if goes_down:
                    source = buffer.of(COPY, part, copies.dtype)
                    part.of(self._same_place(unit, part.place, copies)).copy_(source, non_blocking=True)
                for key, value in state.items():
                    if not isinstance(value, Tensor) or not value.ndim:
                        step.after[part.place][key] = value
                        continue
                    elementwise = is_elementwise(value, stand_in)
                    home = step.memory(part.place, key, value, storage.host_zeros, elementwise=elementwise)
                    if elementwise:
                        part.of(home).copy_(value.reshape(-1), non_blocking=True)
                    else:  # the portion is a whole matrix
                        home.copy_(value, non_blocking=True)

        self._pass(unit, bring, work, take)
        step.end()
        storage.scales[unit].copy_(factor)

    def _here(self, value: Any) -> Any:
        """Copy a state to the device. A CPU number is filled in there, as copying unpinned memory could block."""
        if isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
            return torch.full((), value.item(), dtype=value.dtype, device=self._device)
        return value.to(self._device, copy=True, non_blocking=True) if isinstance(value, Tensor) else value

    def _square(self, unit: int, load: Load, buffer: LoadBuffer) -> None:
        """Store the sums of squares of the gradient of a load."""
        values = [buffer.of(GRADIENT, part, self._storage.master_dtype) for part in load]
        self.squares[unit][load[0].number : load[-1].number + 1] = squares_of(values)

    def _gradient(self, unit: int, place: int) -> Tensor:
        """Return the home gradient of the piece with index ``place``."""
        return self._same_place(unit, place, self._storage.gradient[unit])

    def _same_place(self, unit: int, place: int, shard: Tensor) -> Tensor:
        """Return the slice of ``shard`` with this piece's offset and length in the unit's master weights."""
        value = self._pieces[unit][place].value
        begin = value.storage_offset() - self._storage.master[unit].storage_offset()
        return shard[begin : begin + value.numel()]

    def _pass(
        self,
        unit: int,
        bring: Callable[[Load, LoadBuffer], None],
        work: Callable[[Load, LoadBuffer], None],
        take: Callable[[Load, LoadBuffer], None],
    ) -> None:
        """Copy every load of a unit into a buffer, work on it, and copy it back; the next load is copied meanwhile.

        Args:
            unit: The unit.
            bring: Copies a load into a buffer.
            work: Computes on the load in a buffer.
            take: Copies a load back to CPU memory.
        """
        loads, streams = self._loads[unit], self._streams
        streams.begin()
        for number in range(len(loads) + 1):
            if number < len(loads):
                buffer = self._buffers[number % LOAD_BUFFERS]
                with streams.arriving(buffer):
                    bring(loads[number], buffer)
                    streams.brought(buffer)
            if number > 0:
                buffer = self._buffers[(number - 1) % LOAD_BUFFERS]
                streams.here(buffer)
                work(loads[number - 1], buffer)
                with streams.leaving():
                    take(loads[number - 1], buffer)
                    streams.taken(buffer)
        streams.end()
