"""A helper process that runs slow functions, so that the threads of a training run do not wait for Python's lock (GIL).

The process ends together with the process that started it. Functions, their arguments and their results are sent with
``pickle``.
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
    """Process that runs functions one after another, in the order of the ``ask`` calls.

    Raises:
        OSError: the process cannot be started.
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
        """Send a function and its arguments to the process, and return at once. ``answer`` returns the result.

        Raises:
            OSError: the process has ended.
        """
        self._connection.send((function, arguments))

    @property
    def ready(self) -> bool:
        """True if ``answer`` returns without waiting."""
        return self._connection.poll()

    def answer(self) -> Any:
        """Wait for the result of the earliest function whose result was not received yet, and return it.

        Raises:
            EOFError, OSError: the process has ended, because the function raised an exception or from outside.
        """
        return self._connection.recv()

    def close(self) -> None:
        """Kill the process and wait for its end. Can be called more than once."""
        self.process.kill()
        self.process.wait()
        self._connection.close()


def serve(connection: Connection) -> None:
    """Run the functions that arrive on ``connection`` and send their results, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too; the run itself handles it
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        connection.send(function(*arguments))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
