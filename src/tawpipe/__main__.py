"""``python -m tawpipe``: what torchrun starts."""

import sys

from tawpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
