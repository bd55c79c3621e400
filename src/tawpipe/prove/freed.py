"""Debug mode of a pipeline: checks what each action frees, and on a GPU fills freed memory with NaN.

When the host drops a tensor, torch gives its memory at once to the next tensor of the stream that allocated it. Other
streams may not have read it yet, unless it was recorded on them (``Tensor.record_stream``). So an activation that one
lane allocates and another lane drops must be recorded on the other lane. This is checked for every action. On a GPU,
the memory is also filled with NaN on the lane that allocated it, without waiting, just as the next tensor would
overwrite it. If a lane is slow enough, a read that is too late then finds NaN.
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
"""Reference count of memory that only one tensor and its Python object use."""


class Freed:
    """Checks what the actions of a pipeline free.

    ``faults`` has a sentence for every tensor that one lane allocated and another lane dropped without recording it.

    Args:
        pipeline: its executor is changed so that actions are watched.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.faults: list[str] = []
        self._cuda = pipeline.world.device.type == "cuda"
        self._now = threading.local()
        self._origins: dict[Buffer, tuple[str, Any]] = {}
        """Buffer -> lane that allocated it, and its stream."""
        self._recorded: dict[int, set[Any]] = {}
        """Address of a tensor's memory -> streams on which it was recorded."""
        executor = pipeline.executor
        compute: Any = executor.compute
        compute.held = Activations(lambda: _Held(self))
        submit = executor._submit
        executor._submit = lambda action, run, *step: submit(action, partial(self._run, action, run), *step)  # type: ignore[method-assign]
        if not self._cuda:  # the code would not record tensors of a CPU
            compute.chain = _Chain(compute.chain, self._now)
            compute.stream = LaneStream(Lane.COMPUTE.value)  # as a GPU has one

    @contextlib.contextmanager
    def watching(self) -> Iterator[Freed]:
        """Watch actions within the context; yields this object.

        All actions must have ended when the context ends."""
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
        """Stream of the lane that runs now; on a CPU, the lane's name stands for it."""
        return torch.cuda.current_stream() if self._cuda else LaneStream(self._now.action.lane.value)

    def _run(self, action: Action, run: Callable[[], None]) -> None:
        """Run an action, then check all tensors that it dropped; see ``_free``."""
        self._now.action, self._now.dropped = action, []
        run()
        dropped, self._now.dropped = self._now.dropped, []
        while dropped:
            self._free(action, *dropped.pop())

    def put(self, buffer: Buffer) -> None:
        """Record the lane and the stream of the present action as those that allocated the value in ``buffer``."""
        self._origins[buffer] = self._now.action.lane.value, self._stream

    def drop(self, buffer: Buffer, value: Any) -> None:
        """Record that the present action removes a value; it is checked when the action ends."""
        self._now.dropped += [(buffer, part) for part in (value if isinstance(value, list | tuple) else (value,))]

    def _free(self, action: Action, buffer: Buffer, value: Any) -> None:
        """Add a fault if a dropped tensor of another lane was not recorded; on a GPU, also fill its memory with NaN.

        Memory is not filled if another tensor uses it, or if torch waits for a stream on which it was recorded. Values
        that are not tensors of floats are ignored."""
        lane, stream = self._origins[buffer]
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
            return  # other tensors use the memory too
        self._recorded.pop(_place(value), None)  # the next tensor at this address is another one
        if not self._cuda or streams:
            return  # torch waits for recorded streams itself
        with torch.cuda.stream(stream), torch.no_grad():
            value.fill_(float("nan"))


class _Chain:
    """Chain that claims to be on a GPU when a transfer lane asks for its device."""

    def __init__(self, chain: Any, now: threading.local) -> None:
        self._chain, self._now = chain, now

    def __getattr__(self, name: str) -> Any:
        action = getattr(self._now, "action", None)
        if name == "device" and action is not None and action.lane is not Lane.COMPUTE:
            return LooksLikeCuda("cpu")
        return getattr(self._chain, name)


class _Held(dict):
    """Dictionary of activations by buffer that reports what is stored and removed."""

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
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()
