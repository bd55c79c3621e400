"""The optimizer that the settings of a run ask for."""

from __future__ import annotations

from typing import Any

from tawpipe.runtime.named_optimizers import BY_NAME
from tawpipe.runtime.optimizer import OptimizerFactory
from tawpipe.train.config import TAKES, TrainConfig


def factory_of(config: TrainConfig) -> OptimizerFactory:
    """Makes the optimizer of every unit, with the options that it takes."""
    settings, takes = config.optimizer, TAKES[config.optimizer.name]
    options: dict[str, Any] = {"weight_decay": settings.weight_decay}
    if "beta1" in takes:
        options["betas"] = settings.beta1, settings.beta2
    if "eps" in takes:
        options["eps"] = settings.eps
    options |= {
        name: value
        for name in ("momentum", "muon_learning_rate")
        if name in takes and (value := getattr(settings, name)) is not None
    }
    return BY_NAME[settings.name](config.learning_rate, **options)
