"""``python -m tawpipe``: what launchers start.

The process ends with what it has done, and not with Python's taking itself apart: threads of libraries may still be
letting go of their last tensors, for which they need Python, and would abort the process.
"""

import atexit
import os
import sys
from contextlib import suppress

_code = 1


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody reads it any more, or ever did
            stream.flush()
    os._exit(_code)


if __name__ == "__main__":
    atexit.register(_end)  # the first to be registered is the last to run: others' handlers have run then
    from tawpipe.cli import main

    _code = main()
    if _code:  # lanes may wait for peers that are gone, and others' handlers for the lanes
        _end()
