"""The service in the first process: the engine in the main thread, HTTP in another, signals, and how it ends."""

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
"""How uvicorn does its work, and what it does not do."""
CONNECTIONS = 64
"""Connections besides those of requests that have a slot or wait for one."""
LAST_S = 3
"""Seconds in which those that are told of the end read it."""
FAILED = "the service has failed and ends; the answer is not complete"
OUT_OF_TIME = "the service ends; the answer was not complete in time"


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket at an address, before the model is loaded; it does not listen yet.

    Raises:
        UserError: the address is not this machine's, or is taken.
    """
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as closed:  # but not where all goes well
            taken = closed.enter_context(socket.socket(family, kind, number))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            closed.pop_all()
    except OSError as error:
        raise UserError("--port", port, f"a free port at {host} ({error.strerror or error})") from error
    return taken


@contextlib.contextmanager
def answered_by_http(application: ASGIApp, listening: socket.socket, *, most: int) -> Iterator[None]:
    """Uvicorn answers requests in a thread of its own. In the end it lets go of the port, and gives those that read an
    answer ``LAST_S`` seconds.

    Args:
        listening: a bound socket, which is closed.
        most: connections at one time.

    Raises:
        RunError: the server has not started.
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
    """Serve until a signal ends it: requests that are open may end, new ones are refused. Call in the main thread.

    Args:
        compute: what is asked, until the last pass.
        listening: a bound socket, which is closed.
        ready: printed when requests are answered.

    Raises:
        Exception: what ``compute`` raised; every open request was told that the service has failed.
    """
    most = slots.room.groups * slots.room.slots + config.max_waiting + CONNECTIONS
    with drained_by_signals(slots, config.drain_s), answered_by_http(application, listening, most=most):
        try:
            print(ready, file=lossy(sys.stdout, name="standard output"), flush=True)
            compute(slots)
        finally:
            slots.fail(FAILED)  # of no effect on a service that has drained


@contextlib.contextmanager
def drained_by_signals(slots: Slots, drain_s: float) -> Iterator[None]:
    """SIGTERM and SIGINT drain the service; after ``drain_s`` seconds, or by a second one, what is open ends."""
    signals = SimpleQueue[float | None]()  # which a handler may put into, whatever it interrupts

    def watch() -> None:
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
    """In the other processes, which end with the first one's last pass, or as it is gone."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
