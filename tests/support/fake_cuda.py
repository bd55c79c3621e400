"""A CUDA device that computes on the CPU: its streams and its memory are those of a ``Ledger``.

Within ``fake_cuda`` the code that is tested finds devices, streams, events, pinned memory and NCCL as on a GPU, and
takes its ways for one. Kernels run at once, on the CPU, in the order in which they are issued; what they would have to
wait for, the ledger knows. Peers are not there: what a rank receives is zeros, and sums are those of equal ranks, so
that any rank of any schedule runs by itself. Kernels of attention are the CPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ledger import Clock, Ledger, Stream
from tawpipe.model.attention.attention_kernel import Offer
from tawpipe.runtime.homes import storage
from tawpipe.runtime.lanes import CudaLane
from tawpipe.runtime.transport import transport

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
_DEVICE_OF: Any = vars(torch._C.TensorBase)["device"]
HOST_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
"""Operations whose result the host looks at: on a device it waits for it."""


def _is_device(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value[:4] == "cuda"
    )


def _is_cpu(value: object) -> bool:
    return (isinstance(value, torch.device) and value.type == "cpu") or value == "cpu"


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for one in values:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            found += _tensors(one)
    return found


@cache
def _about(func: Any) -> tuple[str, bool, tuple[int, ...], tuple[str, ...]]:
    """An operator's name, whether it gives a view, and which of its arguments it changes."""
    written = [
        (place, one.name)
        for place, one in enumerate(func._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    name = func._schema.name.removeprefix("aten::")
    return name, func.is_view, tuple(place for place, _ in written), tuple(name for _, name in written)


class _Uses(TorchDispatchMode):
    """Enters every operation into the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.makes_on_device = ledger, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ledger, (name, is_view, places, named) = self.ledger, _about(func)
        if is_view:
            return func(*args, **kwargs)
        writes = _tensors([*(args[place] for place in places if place < len(args)), *map(kwargs.get, named)])
        reads = _tensors((*args, *kwargs.values()))
        if name.startswith(HOST_READS) and name != "nonzero_static" and any(map(ledger.on_device, reads)):
            ledger.stands_still(name)
        if name == "copy_":
            self._copied(*args[:2], non_blocking=bool(args[2:] and args[2]) or kwargs.get("non_blocking", False))
        result = func(*args, **kwargs)
        ledger.run(name, reads, writes, _tensors((result,)), device=self.makes_on_device)
        return result

    def _copied(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        ledger = self.ledger
        if ledger.on_device(target) == ledger.on_device(source) or not ledger.knows(source):  # a number
            return
        host = source if ledger.on_device(target) else target
        if not ledger.is_pinned(host):
            ledger.unpinned.append(f"a copy in {ledger.action}")
        if not (non_blocking and ledger.is_pinned(host)):
            ledger.stands_still("a copy that blocks", torch_knows=not non_blocking)


class _Device(TorchFunctionMode):
    """Lets tensors be on the device, or in pinned memory, as far as Python sees."""

    def __init__(self, ledger: Ledger, uses: _Uses) -> None:
        super().__init__()
        self.ledger, self.uses = ledger, uses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        ledger = self.ledger
        if getattr(func, "__self__", None) is _DEVICE_OF:
            return DEVICE if ledger.on_device(args[0]) else func(*args)
        if func is Tensor.is_pinned:
            return ledger.is_pinned(args[0])
        if func is Tensor.pin_memory:
            return args[0] if ledger.is_pinned(args[0]) else self._pinned(args[0].clone())
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._to(func, args, kwargs)
        pinned = kwargs.pop("pin_memory", False)
        named = kwargs.get("device")
        if _is_device(named):
            kwargs["device"] = CPU
        elif named is None and func in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like):
            named = DEVICE if ledger.on_device(args[0]) and not pinned else None
        on_device = _is_device(named) or (func is Tensor.__setitem__ and ledger.on_device(args[0]))  # of a number
        before, self.uses.makes_on_device = self.uses.makes_on_device, on_device
        try:
            result = func(*args, **kwargs)
        finally:
            self.uses.makes_on_device = before
        return self._pinned(result) if pinned else result

    def _pinned(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self.ledger.move(tensor, device=False, pinned=True)
        return tensor

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        ledger, source = self.ledger, args[0]
        wanted = next((one for one in (*args[1:], kwargs.get("device")) if _is_device(one) or _is_cpu(one)), None)
        if func is not Tensor.to:
            wanted = CPU if func is Tensor.cpu else DEVICE
        other = next((one for one in args[1:] if isinstance(one, Tensor)), None)
        goes = _is_device(wanted) or (other is not None and ledger.on_device(other))
        stays = (wanted is None and other is None) or goes == ledger.on_device(source)
        plain = tuple(CPU if _is_device(one) else one for one in args[1:])
        if _is_device(kwargs.get("device")):
            kwargs["device"] = CPU
        if stays or source.is_meta:
            return source if func is not Tensor.to else func(source, *plain, **kwargs)
        blocking = not (kwargs.get("non_blocking", False) or any(one is True for one in plain))
        host = source if goes else None
        if host is not None and not ledger.is_pinned(host):
            ledger.unpinned.append(f"a copy to the device in {ledger.action}")
        if blocking or host is None or not ledger.is_pinned(host):
            ledger.stands_still("a copy that blocks", torch_knows=blocking)
        before, self.uses.makes_on_device = self.uses.makes_on_device, goes
        try:
            dtype = kwargs.get("dtype") or next((o for o in plain if isinstance(o, torch.dtype)), None)
            made = source.to(dtype or (source if other is None else other).dtype)
            made = made.clone() if made.untyped_storage()._cdata == source.untyped_storage()._cdata else made
        finally:
            self.uses.makes_on_device = before
        if not goes:  # the host has waited, and it is its own copy
            ledger.host_waits(ledger.current.clock)
            made = torch.from_numpy(made.detach().numpy().copy()) if made.dtype != torch.bfloat16 else made
        return made


class FakeStream:
    """``torch.cuda.Stream``."""

    ledger: Ledger

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.stream, self.device = self.ledger.stream(), DEVICE

    @classmethod
    def of(cls, stream: Stream) -> FakeStream:
        made = cls.__new__(cls)
        made.stream, made.device = stream, DEVICE
        return made

    def wait_stream(self, other: FakeStream) -> None:
        self.ledger.wait(self.stream, other.stream.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self.ledger.wait(self.stream, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.ledger.asked("a stream is synchronised")
        self.ledger.stands_still("a stream is synchronised")
        self.ledger.host_waits(self.stream.clock)

    def query(self) -> bool:
        self.ledger.asked("a stream is asked")
        return True


class FakeEvent:
    """``torch.cuda.Event``."""

    ledger: Ledger

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.ledger.asked("an event is recorded")
        self.ledger.sweep()
        self.clock = dict((stream.stream if stream else self.ledger.current).clock)

    def wait(self, stream: FakeStream | None = None) -> None:
        self.ledger.wait(stream.stream if stream else self.ledger.current, self.clock)

    def synchronize(self) -> None:
        self.ledger.asked("an event is synchronised")
        self.ledger.host_waits(self.clock)

    def query(self) -> bool:
        self.ledger.asked("an event is asked")
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1.0


class _OnDevice:
    """``torch.cuda.device``."""

    ledger: Ledger

    def __init__(self, _: Any) -> None:
        self.before = False

    def __enter__(self) -> None:
        self.before = self.ledger.set_device()

    def __exit__(self, *_: Any) -> None:
        self.ledger.set_device(to=self.before)


class _Peers:
    """``torch.distributed`` for a rank whose peers are as it is."""

    def __init__(self, ledger: Ledger, rank: int, size: int) -> None:
        self.ledger, self.rank, self.size = ledger, rank, size

    def group(self, *_: Any, **__: Any) -> dist.ProcessGroup:
        return dist.ProcessGroup(0, 1)  # pyright: ignore[reportCallIssue]

    def _received(self, tensor: Tensor) -> None:
        with torch.no_grad():
            tensor.zero_()

    def isend(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        self.ledger.run("send", [tensor], [], [], device=False)
        return _DONE

    def irecv(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        self._received(tensor)
        return _DONE

    def p2p(self, operation: Callable[..., Any], tensor: Tensor, *_: Any) -> Callable[[], Any]:
        return lambda: operation(tensor)

    def batch(self, operations: list[Callable[[], Any]]) -> list[Any]:
        return [run() for run in operations]

    def reduced(self, tensor: Tensor, *_: Any, group: Any = None, **__: Any) -> Any:
        with torch.no_grad():
            tensor.mul_(self.size)
        return _DONE

    def broadcast(self, tensor: Tensor, root: int, *_: Any, **__: Any) -> Any:
        self.ledger.run("broadcast", [tensor], [] if root == self.rank else [tensor], [], device=False)
        return _DONE

    def reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        self.ledger.run("reduce", [tensor], [tensor], [], device=False)
        return _DONE

    def gathered(self, target: Tensor, source: Tensor, *_: Any, **__: Any) -> Any:
        self.ledger.run("collective", [source], [target], [], device=False)
        with torch.no_grad():
            target.view(-1).fill_(0.01)
        return _DONE


class _Done:
    def wait(self, *_: Any) -> None:
        pass


_DONE = _Done()


@contextlib.contextmanager
def fake_cuda(rank: int = 0, size: int = 1) -> Iterator[Ledger]:
    """A ledger, and a device of which it is told everything, for one rank of ``size``."""
    ledger = Ledger()
    uses = _Uses(ledger)
    FakeStream.ledger = FakeEvent.ledger = ledger
    peers = _Peers(ledger, rank, size)
    submit = CudaLane.submit

    def submitted(self: CudaLane, run: Callable[[], None], after: Any, label: object) -> Any:
        self.stream.stream.name = str(label).split(" ", 1)[0]  # type: ignore[attr-defined]
        before, ledger.action = ledger.action, str(label)
        try:
            return submit(self, run, after, label)
        finally:
            ledger.action = before

    def synchronize(*_: Any) -> None:
        ledger.stands_still("the device is synchronised", torch_knows=False)
        for stream in ledger.streams:
            ledger.host_waits(stream.clock)

    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    def grouped(*given: Any, **named: Any) -> Any:
        return {(DEVICE, dtype): found for (_, dtype), found in group(*given, **named).items()}

    cuda = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "current_stream": lambda *_: FakeStream.of(ledger.current),
        "stream": lambda stream: ledger.on(stream.stream),
        "synchronize": synchronize,
        "current_device": lambda: 0,
        "get_sync_debug_mode": lambda: ledger.debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(ledger, "debug_mode", mode),
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: SimpleNamespace(is_integrated=0),
        "get_device_name": lambda *_: "a device of the tests",
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "set_rng_state": lambda *_: None,
        "set_device": lambda _: ledger.set_device(),
        "device": type("device", (_OnDevice,), {"ledger": ledger}),
    }
    everyone = {
        "new_group": peers.group,
        "destroy_process_group": lambda *_: None,
        "isend": peers.isend,
        "irecv": peers.irecv,
        "send": peers.isend,
        "recv": peers.irecv,
        "P2POp": peers.p2p,
        "batch_isend_irecv": peers.batch,
        "all_reduce": peers.reduced,
        "reduce": peers.reduce,
        "broadcast": peers.broadcast,
    }
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        generator = torch.Generator
        stack.enter_context(patch.object(torch, "Generator", lambda *_: generator()))
        stack.enter_context(patch.object(torch.cuda, "default_generators", (torch.Generator(),)))
        for name, value in everyone.items():
            stack.enter_context(patch.object(dist, name, value))
        stack.enter_context(patch.object(transport, "set_group_timeout", lambda *_: None))
        stack.enter_context(patch.object(transport, "_all_gather", peers.gathered))
        stack.enter_context(patch.object(transport, "_reduce_scatter", peers.gathered))
        stack.enter_context(patch.object(transport, "nccl_options", lambda *_, **__: None))
        stack.enter_context(patch.object(transport, "taken_outside_torch", lambda _: 0))
        stack.enter_context(patch.object(Offer, "of", classmethod(lambda cls, _: cls())))
        stack.enter_context(patch.object(CudaLane, "submit", submitted))
        locked = lambda shape, dtype, *_: torch.zeros(shape, dtype=dtype, pin_memory=True)  # noqa: E731
        stack.enter_context(patch.object(storage, "host_zeros", locked))
        record = lambda tensor, stream: ledger.record(tensor, stream.stream)  # noqa: E731
        stack.enter_context(patch.object(Tensor, "record_stream", record))
        stack.enter_context(
            patch.object(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(grouped))
        )
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns  # what autograd saves is seen as it is
        stack.enter_context(patch.dict(checks, default=lambda _: None))
        stack.enter_context(uses)
        stack.enter_context(_Device(ledger, uses))
        try:
            yield ledger
        finally:
            ledger.close()
