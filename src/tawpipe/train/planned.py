"""The schedule of a run, from a plan: a saved one, one that is made now, or that of the checkpoint. Imports plan and the
settings.

A plan that was made from measurements is part of the run's state: on the same nodes a resumed run follows it again, so
that a noisy measurement cannot change the order of sums. All ranks follow what rank 0 says.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.schedule.spec import ModelSpec
from tawpipe.train.checkpoint import RunState
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
    if config.plan == "none":
        return config, "", ""
    text, line = "", ""
    if earlier is not None and earlier.plan and earlier.topology == str(world.nodes):
        text, line = earlier.plan, "plan: that of the checkpoint"
    elif config.plan == "auto":
        text = world.broadcast_text(_make(config, world, vocab_size, dtype))
        line = "plan: made now"
    else:
        text, line = _read(config, world), f"plan: {config.plan}"
    plan = yaml.safe_load(text)
    _check(plan, config, world)
    known = {field.name for field in fields(ScheduleConfig)}
    chosen = {name: value for name, value in plan["schedule"].items() if name in known}
    return replace(config, schedule=replace(config.schedule, **chosen)), text, f"{line}: {plan['reason']}"


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


def _read(config: TrainConfig, world: World) -> str:
    from tawpipe.plan.answer import load_plan

    text, problem = "", ""
    if world.rank == 0:
        try:
            text = yaml.safe_dump(load_plan(Path(config.plan)), sort_keys=False)
        except UserError as error:
            problem = str(error)
    problem = world.broadcast_text(problem)
    if problem:
        _, _, expected = problem.partition("; ")
        raise UserError("--plan", config.plan, expected)
    return world.broadcast_text(text)


def _check(plan: dict[str, Any], config: TrainConfig, world: World) -> None:
    nodes = [len(node) for node in world.nodes.nodes]
    if plan["nodes"] != nodes:
        raise UserError("--plan", f"nodes of {plan['nodes']} processes", f"a plan for these nodes, of {nodes}")
    for name in ("global_batch", "micro_batch", "sequence_length"):
        if plan[name] != getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(option, getattr(config, name), f"{plan[name]}, as in the plan; or another plan")


def _make(config: TrainConfig, world: World, vocab_size: int, dtype: torch.dtype) -> str:
    """Measure links and blocks, search, choose; the plan as text on rank 0."""
    from tawpipe.plan.answer import Answer
    from tawpipe.plan.ask import question_of
    from tawpipe.plan.probe import probe
    from tawpipe.plan.search import search

    machine = probe(world).machine
    if world.rank != 0:
        return ""
    question = question_of(
        config.model,
        machine,
        sequence_length=config.sequence_length,
        global_batch=config.global_batch,
        micro_batch=config.micro_batch,
        dtype=dtype,
        reduce_dtype=dtype if config.schedule.reduce_dtype == "same" else torch.promote_types(dtype, torch.float32),
        profile="measure",
        vocab_size=vocab_size,
        clip=bool(config.optimizer.clip_norm) or config.optimizer.finite_check,
        trust_remote_code=config.trust_remote_code,
        here=world.device,
    )
    answer = Answer.of(question, search(question))
    return answer.text()
