"""``python -m tawpipe``: what launchers start."""

import os
import sys

from tawpipe.cli import main

if __name__ == "__main__":
    code = main()
    if code:
        # After a failure, lanes may wait for peers that are gone, and the interpreter would wait for the lanes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
