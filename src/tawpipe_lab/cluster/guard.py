"""Guards of a lab cluster, so that it is not left behind or taken away: its name claimed, signals heard."""

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
    """The cluster ``name`` is this process's while the context lasts, and no longer than the process lives.

    The claim is a socket in Linux's abstract namespace: it is no file and goes with the process, however that ends.

    Raises:
        UserError: another process has claimed it.
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
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(place)
        pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"process {pid}"
    return "another process"


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(128 + n) as SIGINT raises KeyboardInterrupt, so that ``finally`` runs.

    Handlers that somebody else has set stay. Outside the main thread nothing is changed, because nothing may be.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers(
        {number: leave for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL}
    ):
        yield


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals that would end this process are kept back and take effect at the end: a clean-up is not cut short."""
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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
