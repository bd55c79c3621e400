"""Guards of a lab cluster, so that it is neither left behind nor removed by mistake.

They reserve the cluster's name, and control signals while it exists.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from types import FrameType

from tawpipe.errors import UserError


@contextlib.contextmanager
def claimed(name: str) -> Iterator[None]:
    """Reserve the cluster name ``name`` for this process within the context.

    The reservation is a socket in Linux's abstract namespace. It is no file, and it ends with the process, however that
    ends.

    Raises:
        UserError: another process has reserved the name.
    """
    place = f"\0tawpipe-lab-{name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as holder:
        try:
            holder.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            expected = f"a name that is free; {_owner(place)} is using the cluster of this name"
            raise UserError("--name", name, expected) from None
        holder.listen()
        yield


def _owner(place: str) -> str:
    """Return ``process N`` for the process that holds the socket ``place``; ``another process`` if unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(place)
        pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}"
    return "another process"


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit(128 + number) within the context, so that ``finally`` blocks run.

    Handlers that were set before stay. Outside the main thread nothing changes, because Python allows no handlers
    there."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers(
        {number: leave for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL}
    ):
        yield


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP within the context, so that they do not interrupt a clean-up.

    At the end the first signal that arrived takes effect; further ones are dropped. Outside the main thread nothing
    changes."""
    got: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        got.append(number)

    try:
        with _handlers(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), note)):
            yield
    finally:
        if got:
            signal.raise_signal(got[0])


@contextlib.contextmanager
def _handlers(handlers: dict[signal.Signals, signal._HANDLER]) -> Iterator[None]:
    """Set signal handlers within the context; the earlier ones are restored at its end.

    Outside the main thread it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
