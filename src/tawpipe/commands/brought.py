"""Commands that installed packages bring: entry points of the group ``tawpipe.commands``.

Each names a module with ``run(argv)``, which returns an exit code, and ``LINE``, what the help says of it. It may have
``pages(folder)``: what ``tawpipe open`` shows of a folder that the command wrote.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import ModuleType

GROUP = "tawpipe.commands"


def brought() -> dict[str, ModuleType]:
    """The modules of the commands that installed packages bring, by the word on the command line."""
    return {point.name: point.load() for point in entry_points(group=GROUP)}
