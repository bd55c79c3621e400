"""The service in its first process: engine in the main thread, HTTP server in another thread, signals, and shutdown."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tawpipe.environment import SECOND_S
from tawpipe.errors import RunError, UserError
from tawpipe.serving.requests import Slots
from tawpipe.serving.service.settings import ServeConfig
from tawpipe.streams import lossy

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PARTS: Any = {"http": "h11", "loop": "asyncio", "ws": "none", "lifespan": "off", "log_config": None}
LEFT_OUT: Any = dict.fromkeys(("access_log", "server_header", "proxy_headers"), False)
"""Settings of uvicorn: ``PARTS`` selects its components, and ``LEFT_OUT`` switches features off."""
CONNECTIONS = 64
"""Number of connections that are allowed beyond one for every request in a slot or waiting for one."""
LAST_S = 3
"""Seconds in which clients may read the last parts of their answers at shutdown."""
FAILED = "the service has failed and ends; the answer is not complete"
OUT_OF_TIME = "the service ends; the answer was not complete in time"


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to an address and return it, without listening. This checks the address before the model is loaded.

    Raises:
        UserError: the address does not belong to this machine, or is in use.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as closed:  # closes the socket if an error occurs
            taken = closed.enter_context(socket.socket(family, kind, number))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            closed.pop_all()
    except OSError as error:
        raise UserError("--port", port, f"a free port at {host} ({error.strerror or error})") from error
    return taken


@contextlib.contextmanager
def answered_by_http(application: ASGIApp, listening: socket.socket, *, most: int) -> Iterator[None]:
    """Run uvicorn in another thread within the context. The context begins when the server accepts requests.

    At its end, the server releases its port, and clients that are reading an answer get ``LAST_S`` seconds.

    Args:
        application: answers the requests.
        listening: bound socket; the server closes it.
        most: maximum number of connections at one time.

    Raises:
        RunError: the server did not start.
    """
    limits: Any = {"limit_concurrency": most, "timeout_graceful_shutdown": LAST_S}
    server = uvicorn.Server(uvicorn.Config(application, **limits, **PARTS, **LEFT_OUT))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, name="http", daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RunError("the HTTP server has not started")
        time.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(LAST_S + 2)


def run_service(
    compute: Callable[[Slots], None],
    slots: Slots,
    application: ASGIApp,
    listening: socket.socket,
    config: ServeConfig,
    ready: str,
) -> None:
    """Serve until a signal ends the service: open requests can then finish, and new ones are refused.

    Call in the main thread.

    Args:
        compute: runs the engine on the requests until the last pass.
        slots: queue of requests.
        application: answers HTTP requests.
        listening: bound socket; it is closed at the end.
        config: settings of the service.
        ready: line that is printed when the server accepts requests.

    Raises:
        Exception: raised by ``compute``. Every open request was ended with an error before.
    """
    most = slots.slot_layout.groups * slots.slot_layout.slots + config.max_waiting + CONNECTIONS
    with drained_by_signals(slots, config.drain_s), answered_by_http(application, listening, most=most):
        try:
            print(ready, file=lossy(sys.stdout, name="standard output"), flush=True)
            compute(slots)
        finally:
            slots.fail(FAILED)  # no effect if all requests have ended


@contextlib.contextmanager
def drained_by_signals(slots: Slots, drain_s: float) -> Iterator[None]:
    """Within the context, make SIGTERM and SIGINT end the service: it accepts no requests, and finishes the open ones.

    ``drain_s`` seconds after the signal, or at a second signal, all open requests are ended with an error. The earlier
    signal handlers are restored at the end of the context. Call in the main thread."""
    signals = SimpleQueue[float | None]()  # its put is safe in a signal handler

    def watch() -> None:
        """Wait for a signal, then drain the service; end open requests at a second signal or after ``drain_s`` seconds.

        Returns without doing anything more when None arrives, at the end of the context."""
        if (first := signals.get()) is None:
            return
        slots.drain()
        with contextlib.suppress(Empty):
            while (left := first + drain_s - time.monotonic()) > 0:
                if (again := signals.get(timeout=left)) is None:
                    return
                if again - first > SECOND_S:
                    break
        slots.fail(OUT_OF_TIME)

    watching = threading.Thread(target=watch, name="signals", daemon=True)
    watching.start()
    before = {number: signal.signal(number, lambda *_: signals.put(time.monotonic())) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.put(None)
        watching.join()


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT in this process.

    For the processes of the other stages: they end with the last pass of the first process, or when it has died.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
