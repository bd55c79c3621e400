"""Commands of other installed packages: entry points of the group ``tawpipe.commands``.

Each entry point names a module with ``run(argv)``, which returns an exit code, and ``LINE``, its line in the help. The
module may have ``pages(folder)``, which returns pages that ``tawpipe open`` shows for a folder that the command wrote,
and ``checks(arguments)``, which returns checks that ``tawpipe prove`` runs only when ``--only`` names them, with
``check_options(parser)``, which adds their options.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from types import ModuleType

GROUP = "tawpipe.commands"


def brought() -> dict[str, ModuleType]:
    """Load and return the command modules of other installed packages, by the command's name."""
    return {point.name: point.load() for point in entry_points(group=GROUP)}
