"""Train long-context language models where activations stay on their device and weights travel.

Start with ``Pipeline``. The public names below are imported on first use, so that the command line can print its help
without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tawpipe.extras import VERSION

if TYPE_CHECKING:
    from tawpipe.errors import RunError, UserError
    from tawpipe.model.batch import MicroBatch
    from tawpipe.model.files.pretrained import SafetensorsSource
    from tawpipe.model.weights import InitSource, ModuleSource
    from tawpipe.pipeline.batch import LocalBatch, Share
    from tawpipe.pipeline.pipeline import Pipeline
    from tawpipe.pipeline.setup import CheckSettings, TrainingSettings
    from tawpipe.runtime.homes.named_optimizers import muon
    from tawpipe.runtime.homes.optimizer import adamw, whole_matrices
    from tawpipe.runtime.homes.step_result import StepResult
    from tawpipe.runtime.homes.storage import piece_of
    from tawpipe.runtime.world import World, connect
    from tawpipe.schedule.settings import ScheduleSettings
    from tawpipe.schedule.step import Schedule, StepSpec, Strategy
    from tawpipe.schedule.strategies.table import register as register_strategy
    from tawpipe.schedule.strategies.weight_strategy import WeightStrategy
    from tawpipe.topology import Topology

__version__ = VERSION

_HOMES = {
    "CheckSettings": "tawpipe.pipeline.setup",
    "InitSource": "tawpipe.model.weights",
    "LocalBatch": "tawpipe.pipeline.batch",
    "MicroBatch": "tawpipe.model.batch",
    "ModuleSource": "tawpipe.model.weights",
    "Pipeline": "tawpipe.pipeline.pipeline",
    "RunError": "tawpipe.errors",
    "SafetensorsSource": "tawpipe.model.files.pretrained",
    "Schedule": "tawpipe.schedule.step",
    "ScheduleSettings": "tawpipe.schedule.settings",
    "Share": "tawpipe.pipeline.batch",
    "StepResult": "tawpipe.runtime.homes.step_result",
    "StepSpec": "tawpipe.schedule.step",
    "Strategy": "tawpipe.schedule.step",
    "Topology": "tawpipe.topology",
    "TrainingSettings": "tawpipe.pipeline.setup",
    "UserError": "tawpipe.errors",
    "WeightStrategy": "tawpipe.schedule.strategies.weight_strategy",
    "World": "tawpipe.runtime.world",
    "adamw": "tawpipe.runtime.homes.optimizer",
    "connect": "tawpipe.runtime.world",
    "muon": "tawpipe.runtime.homes.named_optimizers",
    "piece_of": "tawpipe.runtime.homes.storage",
    "whole_matrices": "tawpipe.runtime.homes.optimizer",
}

__all__ = [
    "CheckSettings",
    "InitSource",
    "LocalBatch",
    "MicroBatch",
    "ModuleSource",
    "Pipeline",
    "RunError",
    "SafetensorsSource",
    "Schedule",
    "ScheduleSettings",
    "Share",
    "StepResult",
    "StepSpec",
    "Strategy",
    "Topology",
    "TrainingSettings",
    "UserError",
    "WeightStrategy",
    "World",
    "adamw",
    "connect",
    "muon",
    "piece_of",
    "register_strategy",
    "whole_matrices",
]


def __getattr__(name: str) -> Any:
    """Import and return the public name ``name`` on first use.

    Raises:
        AttributeError: ``name`` is not a public name of this package.
    """
    if name == "register_strategy":
        return importlib.import_module("tawpipe.schedule.strategies.table").register
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tawpipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names in sorted order, whether or not they have been imported yet."""
    return sorted(__all__)
