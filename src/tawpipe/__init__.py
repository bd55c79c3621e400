"""tawpipe: train long-context language models where the activations stay and the weights travel.

The library's front door is ``Pipeline``; the names below are imported when they are first used, so that the command
line can print help without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tawpipe.errors import RunError, UserError
    from tawpipe.model.batch import MicroBatch
    from tawpipe.model.pretrained import SafetensorsSource
    from tawpipe.model.weights import InitSource, ModuleSource
    from tawpipe.pipeline.batches import LocalBatch, Share
    from tawpipe.pipeline.pipeline import Pipeline
    from tawpipe.runtime.executor import StepResult
    from tawpipe.runtime.optimizer import adamw
    from tawpipe.runtime.storage import piece_of
    from tawpipe.runtime.world import World, connect
    from tawpipe.topology import Topology

__version__ = "0.1.0"

_HOMES = {
    "InitSource": "tawpipe.model.weights",
    "LocalBatch": "tawpipe.pipeline.batches",
    "MicroBatch": "tawpipe.model.batch",
    "ModuleSource": "tawpipe.model.weights",
    "Pipeline": "tawpipe.pipeline.pipeline",
    "RunError": "tawpipe.errors",
    "SafetensorsSource": "tawpipe.model.pretrained",
    "Share": "tawpipe.pipeline.batches",
    "StepResult": "tawpipe.runtime.executor",
    "Topology": "tawpipe.topology",
    "UserError": "tawpipe.errors",
    "World": "tawpipe.runtime.world",
    "adamw": "tawpipe.runtime.optimizer",
    "connect": "tawpipe.runtime.world",
    "piece_of": "tawpipe.runtime.storage",
}

__all__ = [
    "InitSource",
    "LocalBatch",
    "MicroBatch",
    "ModuleSource",
    "Pipeline",
    "RunError",
    "SafetensorsSource",
    "Share",
    "StepResult",
    "Topology",
    "UserError",
    "World",
    "adamw",
    "connect",
    "piece_of",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tawpipe' has no attribute {name!r}")
