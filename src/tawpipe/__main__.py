"""Entry point of ``python -m tawpipe``, which launchers start.

The process ends with ``os._exit``, without Python's usual finalization. Threads of libraries may still be releasing
their last tensors. They need the interpreter for that, and would abort the process during finalization.
"""

import atexit
import os
import sys
from contextlib import suppress

_code = 1


def _end() -> None:
    """Flush standard output and standard error, then end the process with exit code ``_code``, without finalization."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the reader has gone, or the stream is closed or None
            stream.flush()
    os._exit(_code)


if __name__ == "__main__":
    atexit.register(_end)  # handlers run in reverse order of registration, so _end runs last
    from tawpipe.cli import main

    _code = main()
    if _code:  # after a failure, other exit handlers may wait for lanes, which wait for dead ranks
        _end()
