"""Debug mode of a pipeline: what an action frees is looked at, and on a GPU filled with NaN.

Torch gives the memory of a tensor that has gone to the next tensor of the stream that allocated it, at once, as soon as
the host has dropped it: long before other streams have read it, unless they were recorded (``Tensor.record_stream``).
So an activation that one lane allocates and another one drops must be recorded on that one, and this is checked for
every action. On a GPU the memory is also filled with NaN on the lane that allocated it, without waiting, as the next
tensor there would: with a lane that is slow enough, a read that comes too late finds NaN.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.prove.stand_in import LaneStream, LooksLikeCuda
from tawpipe.runtime.compute.activations import Activations
from tawpipe.schedule.actions import Action, Lane
from tawpipe.schedule.buffers import Buffer

SOLE = 2
"""References to memory that nobody has but one tensor and Python's object of it."""


class Freed:
    """What the actions of a pipeline free.

    ``faults`` has a sentence for every tensor that one lane allocated and another one dropped without being recorded.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.faults: list[str] = []
        self._cuda = pipeline.world.device.type == "cuda"
        self._now = threading.local()
        self._made: dict[Buffer, tuple[str, Any]] = {}
        """Buffer -> the lane that allocated it, and its stream."""
        self._recorded: dict[int, set[Any]] = {}
        """Address of a tensor's memory -> streams that it was recorded on."""
        executor = pipeline.executor
        compute: Any = executor.compute
        compute.held = Activations(lambda: _Held(self))
        submit = executor._submit
        executor._submit = lambda action, run, step: submit(action, partial(self._run, action, run), step)  # type: ignore[method-assign]
        if not self._cuda:  # it would not record anything
            compute.chain = _Chain(compute.chain, self._now)
            compute.stream = LaneStream(Lane.COMPUTE.value)  # as on a GPU

    @contextlib.contextmanager
    def watching(self) -> Iterator[Freed]:
        """A context in which actions are watched; what is under way is over before it ends."""
        record = Tensor.record_stream

        def recorded(tensor: Tensor, stream: Any) -> None:
            self._recorded.setdefault(_place(tensor), set()).add(stream)
            if self._cuda:
                record(tensor, stream)

        with contextlib.ExitStack() as stack:
            stack.enter_context(patch.object(Tensor, "record_stream", recorded))
            if not self._cuda:
                stack.enter_context(patch.object(torch.cuda, "current_stream", lambda *_: self._stream))
            yield self

    @property
    def _stream(self) -> Any:
        """The present lane's: on a CPU its name stands for it."""
        return torch.cuda.current_stream() if self._cuda else LaneStream(self._now.action.lane.value)

    def _run(self, action: Action, run: Callable[[], None]) -> None:
        self._now.action, self._now.dropped = action, []
        run()
        dropped, self._now.dropped = self._now.dropped, []
        while dropped:
            self._free(action, *dropped.pop())

    def put(self, buffer: Buffer) -> None:
        """An action has put something there."""
        self._made[buffer] = self._now.action.lane.value, self._stream

    def drop(self, buffer: Buffer, value: Any) -> None:
        """An action has taken it away; it goes when the action is over."""
        self._now.dropped += [(buffer, part) for part in (value if isinstance(value, list | tuple) else (value,))]

    def _free(self, action: Action, buffer: Buffer, value: Any) -> None:
        lane, stream = self._made[buffer]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        streams = self._recorded.get(_place(value), set())
        if lane != action.lane.value and self._stream not in streams:
            self.faults.append(
                f"{buffer}, allocated on {lane}, is dropped by {action.lane} ({action}) and was not recorded there: "
                f"{lane} may use its memory again before {action.lane} has read it"
            )
        storage = value.untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > SOLE:
            return  # others have it, too
        self._recorded.pop(_place(value), None)  # what comes next to this address is another tensor
        if not self._cuda or streams:
            return  # torch itself waits for those that were recorded
        with torch.cuda.stream(stream), torch.no_grad():
            value.fill_(float("nan"))


class _Chain:
    """A chain that is on a GPU, as far as those see who move its activations."""

    def __init__(self, chain: Any, now: threading.local) -> None:
        self._chain, self._now = chain, now

    def __getattr__(self, name: str) -> Any:
        action = getattr(self._now, "action", None)
        if name == "device" and action is not None and action.lane is not Lane.COMPUTE:
            return LooksLikeCuda("cpu")
        return getattr(self._chain, name)


class _Held(dict):
    """Activations by their buffers."""

    def __init__(self, freed: Freed) -> None:
        super().__init__()
        self._freed = freed

    def __setitem__(self, buffer: Buffer, value: Any) -> None:
        if buffer not in self:
            self._freed.put(buffer)
        super().__setitem__(buffer, value)

    def __delitem__(self, buffer: Buffer) -> None:
        self._freed.drop(buffer, self[buffer])
        super().__delitem__(buffer)

    def pop(self, buffer: Buffer, *default: Any) -> Any:
        if buffer in self:
            self._freed.drop(buffer, self[buffer])
        return super().pop(buffer, *default)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
