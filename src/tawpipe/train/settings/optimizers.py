"""Optimizer of a run as its settings name it, and the groups of parameters that it makes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tawpipe.checkpoint.resume import ResumePoint
from tawpipe.model.units import Unit
from tawpipe.runtime.homes.named_optimizers import BY_NAME
from tawpipe.runtime.homes.optimizer import OptimizerFactory, rule_of, with_groups
from tawpipe.runtime.homes.unit_optimizers import in_other_groups, options_of
from tawpipe.train.settings.config import TAKES, TrainConfig


def factory_of(config: TrainConfig) -> OptimizerFactory:
    """Return the factory of the optimizer that ``config`` names, with the settings that this optimizer uses."""
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


def resumed_factory(
    factory: OptimizerFactory, start: ResumePoint, units: Sequence[Unit]
) -> tuple[OptimizerFactory, str]:
    """Return a factory whose parameter groups are equal to the groups of the checkpoint that the run resumes from.

    Args:
        factory: optimizer factory for a new run.
        start: checkpoint that the run resumes from, or the empty start of a new run.
        units: units of the model.

    Returns:
        the factory, and a line about parameters that a new run would put into other groups; the line is ``""`` if the
        groups do not differ, and ``factory`` is returned unchanged.
    """
    others = in_other_groups(factory, start.groups, units)
    if not others:
        return factory, ""
    line = (
        f"optimizer groups: by {start.groups}, as in the checkpoint {start.place}; a new run puts "
        f"{len(others)} parameters into other groups, such as {others[0]}"
    )
    return with_groups(factory, start.groups), line


def group_rows(config: TrainConfig, factory: OptimizerFactory, units: Sequence[Unit]) -> list[tuple[str, str]]:
    """Return console rows (title, text) with the number of parameters that decay, and of those that Muon trains."""
    decay, sizes = config.optimizer.weight_decay, {s.name: s.numel for u in units if u.trainable for s in u.slots}
    counted = factory_of(replace(config, optimizer=replace(config.optimizer, weight_decay=1.0)))
    options = options_of(with_groups(counted, rule_of(factory)), units)
    by_muon = [name for name in sizes if issubclass(options[name][0], torch.optim.Muon)]

    def count(names: Sequence[str]) -> str:
        """Return how many parameters and tensors ``names`` stand for, as text."""
        return f"{sum(map(sizes.__getitem__, names)):,} parameters in {len(names)} tensors"

    decayed = [name for name in sizes if options[name][1]["weight_decay"]]
    others = [name for name in sizes if not options[name][1]["weight_decay"]]
    would = "" if decay else "nothing decays; above 0: "
    rows = [("weight decay", f"{decay:g}: {would}{count(decayed)} decay, {count(others)} do not (norms, biases)")]
    if by_muon:
        inside = (re.split(r"\.\d+\.", name.removesuffix(".weight"), maxsplit=1)[-1] for name in by_muon)
        kinds = dict.fromkeys(re.sub(r"\.\d+", ".*", name) for name in inside)
        rows.append(("Muon", f"takes {count(by_muon)} ({', '.join(kinds)}); AdamW takes the others"))
    return rows
