"""The schedule of a run: from settings, from a saved plan, from one that is made now, or from the checkpoint.

What was decided by measuring is part of the run's state: on the same nodes a resumed run does again what it did, so
that a noisy measurement cannot change the order of sums. All ranks follow what rank 0 says. In this order:

* ``plan`` names a file: that one. Settings under ``schedule`` that say something else are refused.
* Settings under ``schedule`` were given: these.
* The run goes on from a checkpoint, on the same nodes: what it did, with or without a plan.
* ``plan`` is ``auto``: measure, predict, choose. Where that fails or finds nothing that fits, the settings hold: a run
  that could go on without a plan is not ended for want of one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from tawpipe.checkpoint.resume import RunState
from tawpipe.console import duration
from tawpipe.errors import UserError
from tawpipe.plan.plan_file import planned_settings
from tawpipe.runtime.memory import give_back
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import KEPT_BY_PLANS, PLANNED, ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.train.checks import check_bounds
from tawpipe.train.config import TrainConfig
from tawpipe.train.optimizers import factory_of

if TYPE_CHECKING:
    from tawpipe.plan.machine import Machine
    from tawpipe.plan.plan import Plan
    from tawpipe.plan.request import PlanRequest
    from tawpipe.schedule.balance import Work

logger = logging.getLogger(__name__)

PLAN = "plan.yaml"
"""The file in a run's output folder with the plan that it followed."""
NO_PLAN = "none: "
DEALT = "documents are dealt by time, --packing balanced"
"""Why no stages: a pipeline would need documents that take its positions equally long."""
SETTINGS_HOLD = "plan: none, as settings under schedule say what to do"
MEMORY = {"cuda": 0.95, "cpu": 0.8}
"""Share of what a device has that a plan made at the start of a run fills, by its own prediction: the rest falls
between blocks in an allocator, where no count of tensors sees it (``runtime.memory.Taken``), and a CPU's memory is also
that of files and other processes.
"""


@dataclass(frozen=True)
class Followed:
    """The decision of what schedule a run follows.

    Args:
        config: with the schedule that was decided.
        text: of the plan, for checkpoints and the output folder; empty without one.
        line: for the console.
        step_s: of a step, as the plan predicts it; 0 without one.
        request: what was measured for a plan that was made now.
    """

    config: TrainConfig
    text: str = ""
    line: str = ""
    step_s: float = 0.0
    request: PlanRequest | None = field(default=None, compare=False)


def probed(world: World) -> Machine:
    """The machine, with links as these processes measure them; call on all ranks."""
    from tawpipe.plan.probe import probe

    return probe(world).machine


def follow_plan(
    config: TrainConfig,
    world: World,
    earlier: RunState | None,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    lengths: Callable[[], Sequence[int]] = lambda: (),
    tell: Callable[[str], None] = lambda _: None,
    measure: Callable[[World], Machine] = probed,
    show: Callable[[Plan], None] = lambda _: None,
) -> Followed:
    """Decide; call on all ranks.

    Args:
        tell: is given what takes time, before it does.
        measure: gives the machine that a plan is made for.
        show: is given a plan that is made now, on rank 0.
        earlier: what the checkpoint says that the run goes on from.
        lengths: of the documents in a typical row.

    Raises:
        UserError: the plan is for other nodes, another batch or other rows, or contradicts a setting.
    """
    given = [
        name
        for name in PLANNED
        if name not in KEPT_BY_PLANS and getattr(config.schedule, name) != getattr(ScheduleSettings(), name)
    ]
    request: PlanRequest | None = None
    same_nodes = earlier is not None and earlier.topology == str(world.nodes)
    if config.plan not in ("none", "auto"):
        text, line = world.text_of_rank_0(lambda: _read(config)), f"plan: {config.plan}"
    elif earlier is not None and same_nodes and earlier.plan and config.plan == "auto":
        text, line = earlier.plan, "plan: that of the checkpoint"
        if given and replace(config, schedule=_schedule(config, text)) != config:
            text, line = "", SETTINGS_HOLD
        elif problem := _mismatch(yaml.safe_load(text), config, world, dtype):
            tell(f"the plan of the checkpoint is for something else: {problem}")
            text, line, request = _make(config, world, vocab_size, dtype, lengths(), tell, measure, show)
    elif config.plan == "none" or given or same_nodes:
        text, line = "", SETTINGS_HOLD if given and config.plan == "auto" else ""
    else:
        text, line, request = _make(config, world, vocab_size, dtype, lengths(), tell, measure, show)
    if not text:
        return Followed(config, "", line, request=request)
    plan = yaml.safe_load(text)
    if mismatch := _mismatch(plan, config, world, dtype):
        raise mismatch
    chosen = _schedule(config, text)
    for name in given:
        if getattr(chosen, name) != getattr(config.schedule, name):
            option = f"--schedule.{name.replace('_', '-')}"
            expected = f"{getattr(chosen, name)}, as --plan says; or no plan"
            raise UserError(option, getattr(config.schedule, name), expected)
    config = replace(config, schedule=chosen)
    check_bounds(config)
    predicted = plan.get("step_seconds")
    step_s = float(predicted) if isinstance(predicted, int | float) and predicted > 0 else 0.0
    return Followed(config, text, f"{line}: {plan['reason']}", step_s, request)


def work_of_plan(text: str) -> Work | None:
    """The time of documents as it was measured for a plan; the same on all ranks, and in a resumed run. None without
    one, or where rows were too short for attention to show in what was measured.
    """
    if not isinstance(clock := yaml.safe_load(text or "{}").get("clock"), dict):
        return None
    from tawpipe.plan.plan_file import request_from

    profile = request_from(clock, where=PLAN).profile
    seen = all(block.forward.per_pair and block.forward.per_token for block in profile.blocks[1:-1])
    return profile.work if seen else None


def machine_of(followed: Followed) -> Machine | None:
    """The machines as they were measured for the plan; None without one."""
    if followed.request is not None:
        return followed.request.machine
    if not isinstance(clock := yaml.safe_load(followed.text or "{}").get("clock"), dict):
        return None
    from tawpipe.plan.plan_file import request_from

    return request_from(clock, where=PLAN).machine


def check_model(text: str, spec: ModelSpec) -> None:
    """Refuse a plan for another model.

    Raises:
        UserError: it is one.
    """
    if not text:
        return
    expected = yaml.safe_load(text)["model"]
    # Plans of earlier versions do not know what is trained.
    actual = {name: value for name, value in spec.identity.items() if name != "trained" or name in expected}
    if expected != actual:
        there, here = (
            f"{one['parameters']} parameters in {one['blocks']} blocks"
            + (f", {one['trained']} of them trained" if "trained" in one else "")
            + (f", which travel as {one['travels']} elements (--quantize)" if "travels" in one else "")
            for one in (expected, actual)
        )
        raise UserError("--plan", f"a model of {there}", f"a plan for this model: {here}")


def _schedule(config: TrainConfig, text: str) -> ScheduleSettings:
    """The settings under ``schedule`` with what a plan decides."""
    return planned_settings(yaml.safe_load(text)["schedule"], config.schedule)


def _read(config: TrainConfig) -> str:
    from tawpipe.plan.plan_file import load_plan

    load_plan(Path(config.plan))
    return Path(config.plan).read_text(encoding="utf-8")


def _mismatch(plan: dict[str, Any], config: TrainConfig, world: World, dtype: torch.dtype) -> UserError | None:
    """The reason why a plan is not for this run; None if it is."""
    nodes = [len(node) for node in world.nodes.nodes]
    if plan["nodes"] != nodes:
        return UserError("--plan", f"nodes of {plan['nodes']} processes", f"a plan for these nodes, of {nodes}")
    for name in ("global_batch", "micro_batch", "sequence_length"):
        if plan[name] != getattr(config, name):
            option = f"--{name.replace('_', '-')}"
            return UserError(option, getattr(config, name), f"{plan[name]}, as in the plan; or another plan")
    for name in KEPT_BY_PLANS:
        value, chosen = getattr(config.schedule, name), plan["schedule"].get(name)
        if None not in (value, chosen) and value != chosen:
            option = f"--schedule.{name.replace('_', '-')}"
            return UserError(option, value, f"{chosen}, as in the plan; or another plan")
    if plan["weight_bytes"] != dtype.itemsize:
        expected = f"a type of {plan['weight_bytes']} bytes, as in the plan; or another plan"
        return UserError("--dtype", config.dtype, expected)
    if plan.get("gradient_bytes", 0) not in (0, _reduce_dtype(config, dtype).itemsize):
        expected = f"a type of {plan['gradient_bytes']} bytes, as in the plan; or another plan"
        return UserError("--schedule.reduce-dtype", config.schedule.reduce_dtype, expected)
    return None


def _reduce_dtype(config: TrainConfig, dtype: torch.dtype) -> torch.dtype:
    return dtype if config.schedule.reduce_dtype == "same" else torch.promote_types(dtype, torch.float32)


def _make(
    config: TrainConfig,
    world: World,
    vocab_size: int,
    dtype: torch.dtype,
    lengths: Sequence[int],
    tell: Callable[[str], None],
    measure: Callable[[World], Machine],
    show: Callable[[Plan], None],
) -> tuple[str, str, PlanRequest | None]:
    """Measure links and blocks, search, choose; the plan as text, or nothing, a line, and what was measured."""
    from tawpipe.plan.plan import Plan
    from tawpipe.plan.probe import with_files
    from tawpipe.plan.search import search

    begin = time.perf_counter()
    tell("planning: measuring links and blocks, predicting every strategy (--plan none leaves that out)")
    machine = measure(world)
    if config.schedule.offload_dir:
        machine = with_files(machine, world, config.schedule.offload_dir)
    request, problem = ask(config, world, machine, vocab_size=vocab_size, dtype=dtype, lengths=lengths, tell=tell)

    def choose() -> str:
        if request is None:
            return NO_PLAN + problem
        try:
            made = Plan.of(request, search(request, waiting=tell))
        except Exception as error:
            logger.debug("searching", exc_info=True)
            return f"{NO_PLAN}{type(error).__name__}: {error}"
        show(made)
        return made.text() if made.chosen else NO_PLAN + made.reason

    text = world.text_of_rank_0(choose)
    if text.startswith(NO_PLAN):
        return "", f"plan: none, the settings under schedule hold: {text.removeprefix(NO_PLAN)}", request
    return text, f"plan: measured and chosen in {duration(time.perf_counter() - begin)}", request


def ask(
    config: TrainConfig,
    world: World,
    machine: Machine,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    lengths: Sequence[int],
    timed: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[PlanRequest | None, str]:
    """What a plan for this run is made from, or None and why not, on all ranks.

    Every process measures the blocks, all at the same time, as they will compute: processes on one CPU share it.

    Args:
        timed: False for what memory is needed, without times.
    """
    from tawpipe.plan.measure import request_of

    request, problem, settings = None, "", config.schedule
    by_row = config.micro_batch > 1 and config.evaluation.retrieval_lengths  # answers are told apart by row
    if settings.sequence_ranks is None and (by_row or config.packing == "balanced"):  # bins are of so many ranks
        settings = replace(settings, sequence_ranks=1)
    world.barrier()
    try:
        request = request_of(
            config.model,
            machine,
            sequence_length=config.sequence_length,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            dtype=dtype,
            lengths=lengths,
            profile="measure",
            timed=timed,
            vocab_size=vocab_size,
            memory_bytes=int(machine.device.memory_bytes * MEMORY[world.device.type]),
            settings=settings,
            rope=config.rope,
            lora=config.lora,
            frozen=config.freeze,
            quantize=config.quantize,
            trust_remote_code=config.trust_remote_code,
            why_whole="--compile compiles layers on whole rows" if config.compile else "",
            compiled=config.compile,
            optimizer=factory_of(config),
            here=world.device,
            tell=tell,
        )
        if config.packing == "balanced":
            request = replace(request, why_not_staged=request.why_not_staged or DEALT)
    except Exception as error:  # what is wrong with the model comes again, by name, when it is made
        logger.debug("measuring", exc_info=True)
        problem = f"{type(error).__name__}: {error}"
    if problem:  # now that nothing refers to what was under way
        give_back(world.device)
    if any(world.gather_numbers(float(bool(problem)))):
        return None, problem or "another process could not measure the blocks"
    return request, ""
