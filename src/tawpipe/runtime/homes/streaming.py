"""Homes in the host's memory: gradients that arrive there, and updates that pass through the device.

**What is where.** Under ``schedule.host_homes: state`` master weights, gradients and the optimizer's state of every
trainable stripe are in the host's memory; the copy that travels, in the compute dtype, stays on the device, and so does
all that is frozen; under ``all`` these are in the host's memory, too (landing.py). The device has two rooms of a slice
each besides (slices.py), for as many tensors as a piece has: weight, gradient and what its optimizer keeps.

**An update** brings a slice of these up, lets the optimizer make its step on it there, writes the copy that travels,
and takes weights and states down again: 16 bytes a parameter up and 12 down under AdamW in fp32. It is the same kernel
on the same numbers as on a home on the device, so it has the same bits; and nothing on the device waits for the
processor, whose AdamW would be bound by the same memory. One room is brought while the optimizer works in the other
one and what was there before leaves: three streams, which wait for one another by events. On a CPU copies are made all
the same, one after another.

**The optimizer** of a unit is the one that a home on the device would have. For the time of a step its groups hold
parameters that stand for the slices, with slices of the states. One-element states (the number of steps) stay on the
device, and every slice gets a copy of its own: what the last slice of a piece leaves is the piece's. States that an
optimizer makes in its first step get memory then. Where an optimizer wants whole matrices, a matrix is a slice.

**A gradient** that arrives at home goes down slice by slice; where something of the step is there already, that comes
up first, and the sum goes down: in the schedule's order, as at home on the device. While a slice is on the device, its
squares are summed up (``squares``), so that NORM need not read the host's memory, and homes on devices sum theirs in
the same order. What UPDATE multiplies a gradient by stays on the device: the host's gradient is scaled when somebody
asks for it (``Storage.collect``).

**Order.** All of this happens in actions on one lane, HOME, so the rooms are never in two hands. An action's own
streams begin when the lane comes to it, and the lane goes on when they have ended: what the schedule knows of an
action's buffers is all that anybody has to wait for. Without clipping (``early_updates``) a unit's update follows its
gradient at once, behind the backward pass; else it is hidden behind the next step's forward pass, in whose order units
are updated.

**Memory** of the host is page-locked a tensor at a time and in its own size (host_memory.py); what is not copied is not
locked. ``device_bytes`` and ``host_bytes`` say what there is; ``schedule/sizes/footprint.py`` says it before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tawpipe.runtime.homes.slices import Load, Slice, loads_of, room_of, squares_of
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers, is_elementwise
from tawpipe.schedule.landing import ROOMS

WEIGHT, GRADIENT, COPY = "weight", "gradient", "copy"
"""What passes through a room besides the states of an optimizer, which have names of their own."""


class PassingRoom:
    """Memory of the device for one load after another, a tensor for everything that passes.

    Args:
        elements: of the largest load.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._elements, self._device = elements, device
        self._tensors: dict[tuple[str, torch.dtype], Tensor] = {}
        self.arrived: torch.Event | None = None
        self.left: torch.Event | None = None
        """When what was here last had been brought, and taken away."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def of(self, name: str, part: Slice, dtype: torch.dtype) -> Tensor:
        """The place of a slice of something."""
        if (name, dtype) not in self._tensors:
            self._tensors[name, dtype] = torch.empty(self._elements, dtype=dtype, device=self._device)
        return self._tensors[name, dtype][part.at : part.at + part.numel]


class _Streams:
    """Two streams beside the lane's own: what arrives, and what leaves. On a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._arriving = torch.cuda.Stream(device) if on_cuda else None
        self._leaving = torch.cuda.Stream(device) if on_cuda else None

    def begin(self) -> None:
        """What comes now waits for what the lane has done."""
        if self._arriving is not None:
            self._arriving.wait_stream(torch.cuda.current_stream())

    def arriving(self, room: PassingRoom) -> AbstractContextManager[Any]:
        """Where to bring something into a room."""
        if self._arriving is None:
            return nullcontext()
        if room.left is not None:
            self._arriving.wait_event(room.left)
        return torch.cuda.stream(self._arriving)

    def brought(self, room: PassingRoom) -> None:
        if self._arriving is not None:
            room.arrived = self._arriving.record_event()

    def here(self, room: PassingRoom) -> None:
        """The lane works in a room from now on."""
        if self._arriving is not None:
            assert room.arrived is not None
            torch.cuda.current_stream().wait_event(room.arrived)

    def leaving(self) -> AbstractContextManager[Any]:
        """Where to take something away."""
        if self._leaving is None:
            return nullcontext()
        self._leaving.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._leaving)

    def taken(self, room: PassingRoom) -> None:
        if self._leaving is not None:
            room.left = self._leaving.record_event()

    def end(self) -> None:
        """What the lane does next waits for all that has left."""
        if self._leaving is not None:
            torch.cuda.current_stream().wait_stream(self._leaving)


class Streaming:
    """What passes between the device and the homes of one rank.

    ``squares`` has for every unit the sums of squares of its gradient, slice by slice, on the device.
    """

    def __init__(self, storage: Storage, optimizers: UnitOptimizers) -> None:
        self._storage, self._optimizers, self._device = storage, optimizers, storage.device
        self._pieces = {unit: optimizers.pieces.get(unit, ()) for unit in storage.scales}  # a stripe may be padding
        self._loads = {unit: loads_of(pieces) for unit, pieces in self._pieces.items()}
        most = max((room_of(load) for loads in self._loads.values() for load in loads), default=0)
        self._rooms = [PassingRoom(most, self._device) for _ in range(ROOMS)]
        self._streams = _Streams(self._device)
        wide = {"dtype": torch.float64, "device": self._device}
        self.squares = {unit: torch.zeros(sum(map(len, loads)), **wide) for unit, loads in self._loads.items()}

    @property
    def device_bytes(self) -> int:
        """The rooms, as far as there are any yet."""
        return sum(room.nbytes for room in self._rooms)

    def fetch(self, unit: int, target: Tensor) -> None:
        """Bring the gradient at home into a buffer of the device."""
        target.copy_(self._storage.gradient[unit], non_blocking=True)

    @torch.no_grad()
    def add(self, unit: int, sources: Sequence[Tensor], *, replaces: bool) -> None:
        """Add buffers of the device to the gradient at home, or put their sum in its place."""
        dtype = self._storage.master_dtype

        def bring(load: Load, room: PassingRoom) -> None:
            for part in () if replaces else load:
                room.of(GRADIENT, part, dtype).copy_(part.of(self._gradient(unit, part.place)), non_blocking=True)

        def work(load: Load, room: PassingRoom) -> None:
            for part in load:
                here = room.of(GRADIENT, part, dtype)
                for number, source in enumerate(sources):
                    given = part.of(self._same_place(unit, part.place, source))
                    _ = here.copy_(given) if replaces and number == 0 else here.add_(given)
            self._square(unit, load, room)

        def take(load: Load, room: PassingRoom) -> None:
            for part in load:
                part.of(self._gradient(unit, part.place)).copy_(room.of(GRADIENT, part, dtype), non_blocking=True)

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
        """The optimizer's step on a unit, and the copy that travels.

        Args:
            gradient: on the device, where it does not come from home.
            factor: multiplies the gradient.
            updates, rate, chosen: see ``UnitOptimizers.step``.
            early: NORM comes later, and wants the squares of the gradient that was used.
        """
        optimizers, storage, dtype = self._optimizers, self._storage, self._storage.master_dtype
        pieces, copies = self._pieces[unit], storage.compute_copy[unit]
        goes_down = storage.copies_in_host and copies is not storage.master[unit]
        if not pieces:
            return
        step = optimizers.begin(unit, rate, chosen)

        def states_of(piece: int) -> dict[str, tuple[str, Tensor]]:
            """The states of a piece that pass, each with its place in a room: pieces may have states of other names."""
            passing = [pair for pair in step.before[piece].items() if is_elementwise(pair[1], pieces[piece].value)]
            return {key: (f"state {number}", value) for number, (key, value) in enumerate(passing)}

        # What an optimizer makes goes down on another stream than the one whose memory it is: kept until that is over.
        states_made: list[Any] = []

        def bring(load: Load, room: PassingRoom) -> None:
            for part in load:
                piece = pieces[part.place]
                room.of(WEIGHT, part, dtype).copy_(part.of(piece.value.detach()), non_blocking=True)
                if gradient is None:
                    given = part.of(self._gradient(unit, part.place))
                    room.of(GRADIENT, part, dtype).copy_(given, non_blocking=True)
                for place, value in states_of(part.place).values():
                    room.of(place, part, value.dtype).copy_(part.of(value), non_blocking=True)

        def work(load: Load, room: PassingRoom) -> None:
            values = []
            for part in load:
                piece = pieces[part.place]
                whole = piece.value.shape if piece.value.ndim > 1 else (part.numel,)
                value = piece.mark(room.of(WEIGHT, part, dtype).view(whole))
                if gradient is not None:
                    room.of(GRADIENT, part, dtype).copy_(part.of(self._same_place(unit, part.place, gradient)))
                value.grad = room.of(GRADIENT, part, dtype).mul_(factor).view(whole)
                passing = states_of(part.place)
                # Every slice begins from what was before the step: a count that all changed would count slices.
                others = {key: value for key, value in step.before[part.place].items() if key not in passing}
                state = {key: self._here(value) for key, value in others.items()}
                for key, (place, kept) in passing.items():
                    state[key] = room.of(place, part, kept.dtype).view(whole)
                values.append((part.place, value, state))
            if early:
                self._square(unit, load, room)
            states = optimizers.step_on(step, values, updates)
            stand_ins = (value.detach() for _, value, _ in values)
            states_made[:] = [*states_made[-1:], list(zip(stand_ins, states, strict=True))]
            for part in load:
                if goes_down:
                    room.of(COPY, part, copies.dtype).copy_(room.of(WEIGHT, part, dtype))
                elif copies is not storage.master[unit]:
                    part.of(self._same_place(unit, part.place, copies)).copy_(room.of(WEIGHT, part, dtype))

        def take(load: Load, room: PassingRoom) -> None:
            for part, (stand_in, state) in zip(load, states_made[-1], strict=True):
                piece = pieces[part.place]
                part.of(piece.value.detach()).copy_(room.of(WEIGHT, part, dtype), non_blocking=True)
                if goes_down:
                    given = room.of(COPY, part, copies.dtype)
                    part.of(self._same_place(unit, part.place, copies)).copy_(given, non_blocking=True)
                for key, value in state.items():
                    if not isinstance(value, Tensor) or not value.ndim:
                        step.after[part.place][key] = value
                        continue
                    elementwise = is_elementwise(value, stand_in)
                    home = step.memory(part.place, key, value, storage.host_zeros, elementwise=elementwise)
                    if elementwise:
                        part.of(home).copy_(value.reshape(-1), non_blocking=True)
                    else:  # of a matrix, which is a slice
                        home.copy_(value, non_blocking=True)

        self._pass(unit, bring, work, take)
        step.end()
        storage.scales[unit].copy_(factor)

    def _here(self, value: Any) -> Any:
        """Copy a state to the device. A number is written there: copying plain memory could block."""
        if isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
            return torch.full((), value.item(), dtype=value.dtype, device=self._device)
        return value.to(self._device, copy=True, non_blocking=True) if isinstance(value, Tensor) else value

    def _square(self, unit: int, load: Load, room: PassingRoom) -> None:
        values = [room.of(GRADIENT, part, self._storage.master_dtype) for part in load]
        self.squares[unit][load[0].number : load[-1].number + 1] = squares_of(values)

    def _gradient(self, unit: int, place: int) -> Tensor:
        """The gradient at home of a piece."""
        return self._same_place(unit, place, self._storage.gradient[unit])

    def _same_place(self, unit: int, place: int, stripe: Tensor) -> Tensor:
        """What of a stripe is where a piece is in the master's."""
        value = self._pieces[unit][place].value
        begin = value.storage_offset() - self._storage.master[unit].storage_offset()
        return stripe[begin : begin + value.numel()]

    def _pass(
        self,
        unit: int,
        bring: Callable[[Load, PassingRoom], None],
        work: Callable[[Load, PassingRoom], None],
        take: Callable[[Load, PassingRoom], None],
    ) -> None:
        """Bring every load of a unit into a room, work on it and take it away; the next one comes meanwhile."""
        loads, streams = self._loads[unit], self._streams
        streams.begin()
        for number in range(len(loads) + 1):
            if number < len(loads):
                room = self._rooms[number % ROOMS]
                with streams.arriving(room):
                    bring(loads[number], room)
                    streams.brought(room)
            if number > 0:
                room = self._rooms[(number - 1) % ROOMS]
                streams.here(room)
                work(loads[number - 1], room)
                with streams.leaving():
                    take(loads[number - 1], room)
                    streams.taken(room)
        streams.end()
