"""Table of strategies, and ways to add more of them.

A new strategy is one class in one file. ``register`` adds it to the table. Then it can be run, timed, proved, drawn,
planned and measured like the others (docs/add-a-strategy.md). An installed package adds strategies by the entry point
``tawpipe.strategies``; a command adds them by ``--import MODULE``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.cost_based import Generated, SolvedPipeline, ZeroBubble
from tawpipe.schedule.pipelines.strategy import Interleaved, OneForwardOneBackward
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.step import Schedule, Strategy
from tawpipe.schedule.strategies.groups import Grouped
from tawpipe.schedule.strategies.weights import Flat, Hybrid, NodeSharded, Spread, Step, WeiPipe, Whole

STRATEGIES: dict[str, Strategy] = {}
"""Name -> strategy, in the order in which strategies are listed everywhere."""


def register(strategy: Strategy) -> Strategy:
    """Add ``strategy`` to the table, in place of one of equal name, and return it."""
    STRATEGIES[strategy.name] = strategy
    return strategy


for _strategy in (Spread(), Step(), NodeSharded(), Whole(), Flat(), Hybrid(), Grouped(), WeiPipe()):
    register(_strategy)
for _strategy in (OneForwardOneBackward(), Interleaved(), ZeroBubble(), Generated(), SolvedPipeline()):
    register(_strategy)

COMPARED = Spread.name, Flat.name, OneForwardOneBackward.name
"""Strategies by which sizes of micro-batches are compared: weights travel in two of them, activations in one."""
IMPORTS = "TAWPIPE_IMPORT"
"""Environment variable with the modules of ``--import``, separated as in PATH, for processes that a command starts."""


def import_strategies(modules: Sequence[str]) -> None:
    """Import modules or .py files that register strategies, in this process and in every process that it starts.

    Directories of the modules are added to ``sys.path``. The modules are added to the environment variable ``IMPORTS``.

    Raises:
        UserError: a module does not exist or cannot be imported.
    """
    for module in modules:
        path = Path(module)
        name = path.stem if path.suffix == ".py" else module
        folder = str(path.parent.absolute()) if path.suffix == ".py" else str(Path.cwd())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            importlib.import_module(name)
        except Exception as error:
            expected = "a module, or a .py file, that can be imported"
            raise UserError("modules", module, f"{expected} ({type(error).__name__}: {error})") from error
    known = filter(None, os.environ.get(IMPORTS, "").split(os.pathsep))
    named = [str(Path(module).absolute()) if module.endswith(".py") else module for module in modules]
    os.environ[IMPORTS] = os.pathsep.join(dict.fromkeys((*known, *named)))


@cache
def _bring() -> None:
    """Import, once, strategies of installed packages and those that the parent process imported."""
    for point in entry_points(group="tawpipe.strategies"):
        point.load()
    import_strategies([module for module in os.environ.get(IMPORTS, "").split(os.pathsep) if module])


def strategies() -> dict[str, Strategy]:
    """Return a copy of the table, name -> strategy. Strategies of installed packages are imported first."""
    _bring()
    return dict(STRATEGIES)


def find(name: str) -> Strategy:
    """Return the strategy named ``name``.

    Raises:
        UserError: no strategy has this name.
    """
    known = strategies()
    if name not in known:
        raise UserError("schedule.strategy", name, f"one of {', '.join(strategies())}")
    return known[name]


def strategy_of(schedule: ScheduleSettings | Strategy | Schedule | str) -> tuple[Strategy, ScheduleSettings]:
    """Return the strategy and the settings that a library user means by ``schedule``.

    A name or a strategy comes with default settings; a schedule comes with its own.

    Args:
        schedule: settings, a strategy (which need not be in the table), its name, or a built schedule.

    Raises:
        UserError: ``schedule`` is anything else, or no strategy has this name.
    """
    if isinstance(schedule, Schedule):
        return schedule.step.strategy, schedule.step.settings
    name = schedule if isinstance(schedule, str) else schedule.name if isinstance(schedule, Strategy) else None
    settings = ScheduleSettings(strategy=name) if name is not None else schedule
    if not isinstance(settings, ScheduleSettings):
        raise UserError("schedule", schedule, "ScheduleSettings, a Strategy, the name of one, or a Schedule")
    strategy = schedule if isinstance(schedule, Strategy) else find(settings.strategy)
    return strategy, settings
