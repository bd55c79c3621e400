"""A process beside this one that calls functions which take long, so that no thread of a run waits for Python's lock.

It ends with the process that started it. Functions and what they take and return go through ``pickle``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any


class Worker:
    """A process that calls functions one after the other.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self._connection, other = Pipe()
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def ask(self, function: Callable[..., object], *arguments: object) -> None:
        """Let it call a function; ``answer`` has the result.

        Raises:
            OSError: the worker has ended.
        """
        self._connection.send((function, arguments))

    @property
    def ready(self) -> bool:
        """True if ``answer`` returns at once."""
        return self._connection.poll()

    def answer(self) -> Any:
        """Wait for the result of the function asked for first.

        Raises:
            EOFError, OSError: the worker has ended, by a fault of the function or from outside.
        """
        return self._connection.recv()

    def close(self) -> None:
        """End the process. May be called more than once."""
        self.process.kill()
        self.process.wait()
        self._connection.close()


def serve(connection: Connection) -> None:
    """Call what is asked for until nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run itself knows what to do about it
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        connection.send(function(*arguments))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
