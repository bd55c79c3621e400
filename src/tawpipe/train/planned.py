"""The schedule of a run, from a plan: a saved one, one that is made now, or that of the checkpoint. Imports plan and the
settings.

A plan that was made from measurements is part of the run's state: on the same nodes a resumed run follows it again, so
that a noisy measurement cannot change the order of sums. All ranks follow what rank 0 says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.schedule.spec import ModelSpec
from tawpipe.train.checkpoint import RunState
from tawpipe.train.checks import check_bounds
from tawpipe.train.config import ScheduleConfig, TrainConfig


def follow_plan(
    config: TrainConfig, world: World, earlier: RunState | None, *, vocab_size: int, dtype: torch.dtype
) -> tuple[TrainConfig, str, str]:
    """Settings with the plan's schedule; the plan as text, for the checkpoint; and a line for the console.

    Args:
        earlier: what the checkpoint says that the run goes on from.

    Raises:
        UserError: the plan is for other nodes, another batch or other rows.
    """
    text, line = "", ""
    if config.plan in ("none", "auto") and earlier and earlier.plan and earlier.topology == str(world.nodes):
        text, line = earlier.plan, "plan: that of the checkpoint"
    elif config.plan == "none":
        return config, "", ""
    elif config.plan == "auto":
        text, line = _make(config, world, vocab_size, dtype), "plan: made now"
    else:
        text, line = _from_rank_0(world, lambda: _read(config)), f"plan: {config.plan}"
    plan = yaml.safe_load(text)
    _check(plan, config, world, dtype)
    known = {field.name for field in fields(ScheduleConfig)}
    chosen = {name: value for name, value in plan["schedule"].items() if name in known}
    config = replace(config, schedule=replace(config.schedule, **chosen))
    check_bounds(config)
    return config, text, f"{line}: {plan['reason']}"


def check_model(text: str, spec: ModelSpec) -> None:
    """Whether a plan is one for this model.

    Raises:
        UserError: it is not.
    """
    if not text:
        return
    expected = yaml.safe_load(text)["model"]
    found = {"blocks": len(spec.blocks), "parameters": sum(unit.numel for unit in spec.units)}
    if expected != found:
        raise UserError(
            "--plan",
            f"a model of {expected['parameters']} parameters in {expected['blocks']} blocks",
            f"a plan for this model: {found['parameters']} parameters in {found['blocks']} blocks",
        )


def _read(config: TrainConfig) -> str:
    from tawpipe.plan.answer import load_plan

    return yaml.safe_dump(load_plan(Path(config.plan)), sort_keys=False)


def _from_rank_0(world: World, make: Callable[[], str]) -> str:
    """What ``make`` gives on rank 0, which may take its time, on all ranks; a UserError is raised on all."""
    text, problem = "", ""
    if world.rank == 0:
        try:
            text = make()
        except UserError as error:
            problem = "\0".join((error.setting, str(error.value), error.expected))
    world.wait_patiently()
    if problem := world.broadcast_text(problem):
        raise UserError(*problem.split("\0"))
    return world.broadcast_text(text)


def _check(plan: dict[str, Any], config: TrainConfig, world: World, dtype: torch.dtype) -> None:
    nodes = [len(node) for node in world.nodes.nodes]
    if plan["nodes"] != nodes:
        raise UserError("--plan", f"nodes of {plan['nodes']} processes", f"a plan for these nodes, of {nodes}")
    for name in ("global_batch", "micro_batch", "sequence_length"):
        if plan[name] != getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(option, getattr(config, name), f"{plan[name]}, as in the plan; or another plan")
    if plan["weight_bytes"] != dtype.itemsize:
        expected = f"a type of {plan['weight_bytes']} bytes, as in the plan; or another plan"
        raise UserError("--dtype", config.dtype, expected)


def _make(config: TrainConfig, world: World, vocab_size: int, dtype: torch.dtype) -> str:
    """Measure links and blocks, search, choose; the plan as text."""
    from tawpipe.plan.answer import Answer
    from tawpipe.plan.ask import question_of
    from tawpipe.plan.probe import probe
    from tawpipe.plan.search import search

    machine = probe(world).machine
    wide = torch.promote_types(dtype, torch.float32)

    def make() -> str:
        question = question_of(
            config.model,
            machine,
            sequence_length=config.sequence_length,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            dtype=dtype,
            reduce_dtype=dtype if config.schedule.reduce_dtype == "same" else wide,
            profile="measure",
            vocab_size=vocab_size,
            clip=bool(config.optimizer.clip_norm) or config.optimizer.finite_check,
            trust_remote_code=config.trust_remote_code,
            here=world.device,
        )
        return Answer.of(question, search(question)).text()

    return _from_rank_0(world, make)
