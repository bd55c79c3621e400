"""Choice of a run's schedule: from settings, from a saved plan, from a new plan, or from the checkpoint.

A decision that depends on measurements is part of the run's state. On the same nodes a resumed run repeats it, so that
measurement noise cannot change the order of sums. All ranks follow the decision of rank 0. The first case that applies
decides:

* ``plan`` names a file: use this plan. Refuse settings under ``schedule`` that contradict it.
* The user has set settings under ``schedule``: use them.
* The run resumes from a checkpoint on the same nodes: use its schedule, with or without a plan.
* ``plan`` is ``auto``: measure, predict and choose. If that fails or nothing fits, use the settings: a run that can
  work without a plan is not ended because of it.
"""

from __future__ import annotations

import math
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tawpipe.checkpoint.resume import RunState
from tawpipe.console import duration, progress
from tawpipe.errors import REPORT, UserError, is_fault
from tawpipe.model.chain import Chain
from tawpipe.plan.cost.feasible import shortage
from tawpipe.plan.cost.measure import INSIDE, SHARE, Asked, request_of
from tawpipe.plan.cost.predict import memory_quickly
from tawpipe.plan.machine.probe import machine_unprobed
from tawpipe.plan.search.plan_file import SavedPlan, load_plan
from tawpipe.runtime.dtype import reduce_dtype
from tawpipe.runtime.memory import give_back
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import AUTO_RECOMPUTE, KEPT_BY_PLANS, ScheduleSettings, chosen_by_hand
from tawpipe.topology import Topology
from tawpipe.train.settings.checks import check_schedule

if TYPE_CHECKING:
    from tawpipe.plan.cost.request import PlanRequest
    from tawpipe.plan.machine.machine import Machine

STRATEGIES = "strategies.txt"
"""File in a run's output folder with the predicted cost of every strategy."""
PLAN = "plan.yaml"
"""File in a run's output folder with the plan that it followed."""
NO_PLAN = "none: "
LAST_FRAMES = 8
"""Number of traceback frames to print for a fault, which fit on a screen."""
SETTINGS_HOLD = "plan: none, because settings under schedule are given"
AT_LEAST_S = 3.0
"""Seconds that the search for a plan may take, even in a short run."""
KEEPS = 0.85
"""Share of a device's free memory into which a step must fit for the run to recompute nothing."""
MEMORY = {"cuda": 0.95, "cpu": 0.8}
"""Share of a device's memory that a plan may fill, by its own prediction, when it is made at the start of a run.

The rest is lost between blocks in an allocator, which a sum over tensors does not include (``runtime.memory.Taken``).
Files and other processes also use the memory of a CPU."""


@dataclass(frozen=True)
class Followed:
    """Decision for the schedule of a run.

    Args:
        schedule: settings to use.
        plan: plan that they are from; None without one.
        line: line for the console; empty for none.
        request: measurements for a plan that was made now.
        measured: machine as it was measured now; None if no plan was made.
        table: lines about every strategy of a plan that was made now, on rank 0.
        left_out: lines about strategies that were not evaluated, on rank 0.
    """

    schedule: ScheduleSettings
    plan: SavedPlan | None = None
    line: str = ""
    request: PlanRequest | None = field(default=None, compare=False)
    measured: Machine | None = field(default=None, compare=False)
    table: tuple[str, ...] = field(default=(), compare=False)
    left_out: tuple[str, ...] = field(default=(), compare=False)

    @property
    def machine(self) -> Machine | None:
        """Machine as it was measured for the plan; None without a plan."""
        request = self.request or (self.plan.request if self.plan else None)
        return request.machine if request else None


def probed(world: World) -> Machine:
    """Measure the links between the processes, and return the machine; call on all ranks.

    A single process that stands for several ones (dry run) cannot measure links: usual links are assumed.
    """
    from tawpipe.plan.machine.probe import probe

    if world.group is not None or world.size == 1:
        return probe(world).machine
    usual = INSIDE["GPU" if world.device.type == "cuda" else "CPU"]
    alone = probed(World(Topology.grid(1, 1), 0, world.device, None))
    return replace(machine_unprobed(world), inside=usual, between=usual, host=alone.host)


@dataclass(frozen=True)
class Planning:
    """Inputs of a plan for a run; call its methods on all ranks.

    Args:
        world: processes of the run.
        chain: model of the run.
        asked: batch sizes and types, with the settings under ``schedule`` as the user gave them.
        by_one: True if a plan must not let several processes compute a row together.
    """

    world: World
    chain: Chain
    asked: Asked
    by_one: bool = False

    def by(self, settings: ScheduleSettings) -> Planning:
        """Return a copy with ``settings`` as the settings of the schedule."""
        return replace(self, asked=replace(self.asked, settings=settings))

    def follow(self, source: str, earlier: RunState | None) -> Followed:
        """Decide which schedule the run follows, and make a plan if necessary.

        Args:
            source: value of ``--plan``.
            earlier: state that the run resumes from; None for a new run.

        Raises:
            UserError: the plan is for other nodes, another batch or other rows, or contradicts a setting.
        """
        settings = self.asked.settings
        if earlier is not None and "recompute" not in earlier.settled and settings.recompute == "full":
            settings = replace(settings, recompute=AUTO_RECOMPUTE)  # the old default, also in config.yaml
        by_hand = chosen_by_hand(settings)
        if self.world.size == 1 and source == "auto" and not by_hand:  # no weights travel in one process
            settings = replace(settings, micro_batches_per_visit=1)
        same_nodes = earlier is not None and earlier.topology == str(self.world.nodes)
        if source not in ("none", "auto"):
            plan = SavedPlan.of(self.world.text_of_rank_0(lambda: _read(Path(source))))
            decision = Followed(settings, plan, f"plan: {source}")
        elif earlier is not None and same_nodes and earlier.plan and source == "auto":
            plan = SavedPlan.of(earlier.plan)
            assert plan is not None
            if by_hand and plan.settings(settings) != settings:
                decision = Followed(settings, line=SETTINGS_HOLD)
            elif problem := self._mismatch(plan):
                progress.warning(f"the plan of the checkpoint does not fit this run: {problem}")
                decision = self.make()
            else:
                decision = Followed(settings, plan, "plan: from the checkpoint")
        elif source == "none" or by_hand or same_nodes:
            line = SETTINGS_HOLD if by_hand and source == "auto" else ""
            if source == "none" and self.world.size > 1 and not by_hand:
                line = f"plan: none (--plan none); strategy {settings.strategy}, assuming equal devices and links"
            decision = Followed(settings, line=line)
        else:
            decision = self._alone(settings) or self.make()
        if decision.plan is not None:
            return self._followed(decision, by_hand)
        return decision

    def _alone(self, settings: ScheduleSettings) -> Followed | None:
        """Return the settings as the decision for a single process if it has the memory to recompute nothing.

        There is nothing to plan then. Returns None if memory is too small, or if there are several processes.
        """
        if self.world.size > 1:
            return None
        request, _ = self.ask(machine_unprobed(self.world), timed=False)
        if request is None or not fits_to_keep(request, replace(settings, recompute="none")):
            return None
        return Followed(settings, request=request)

    def _followed(self, decision: Followed, by_hand: list[str]) -> Followed:
        """Return ``decision`` with the settings of its plan; raise UserError if the plan does not suit the run.

        Args:
            by_hand: names of settings that the user has set and that the plan must not contradict.
        """
        plan, settings = decision.plan, self.asked.settings
        assert plan is not None
        if mismatch := self._mismatch(plan):
            raise mismatch
        chosen = plan.settings(settings)
        for name in by_hand:
            if getattr(chosen, name) != getattr(settings, name):
                option = f"--schedule.{name.replace('_', '-')}"
                expected = f"{getattr(chosen, name)}, as --plan says; or no plan"
                raise UserError(option, getattr(settings, name), expected)
        check_schedule(chosen)
        return replace(decision, schedule=chosen, line=f"{decision.line}; {plan.content['reason']}")

    def _mismatch(self, plan: SavedPlan) -> UserError | None:
        """Compare ``plan`` with this run; return an error that says why the plan is for another run, else None."""
        asked, content = self.asked, plan.content
        nodes = [len(node) for node in self.world.nodes.nodes]
        if content["nodes"] != nodes:
            return UserError("--plan", f"nodes of {content['nodes']} processes", f"a plan for these nodes, of {nodes}")
        compared = () if asked.filling else ("micro_batch",)  # under auto the run takes the plan's
        for name in ("global_batch", *compared, "sequence_length"):
            if content[name] != getattr(asked, name):
                option = f"--{name.replace('_', '-')}"
                return UserError(option, getattr(asked, name), f"{content[name]}, as in the plan; or another plan")
        for name in KEPT_BY_PLANS:
            value, chosen = getattr(asked.settings, name), content["schedule"].get(name)
            if value not in (None, "") and chosen not in (None, value):
                option = f"--schedule.{name.replace('_', '-')}"
                return UserError(option, value, f"{chosen}, as in the plan; or another plan")
        if content["weight_bytes"] != asked.dtype.itemsize:
            expected = f"a type of {content['weight_bytes']} bytes, as in the plan; or another plan"
            return UserError("--dtype", str(asked.dtype).removeprefix("torch."), expected)
        if content.get("gradient_bytes", 0) not in (0, reduce_dtype(asked.dtype, asked.settings).itemsize):
            expected = f"a type of {content['gradient_bytes']} bytes, as in the plan; or another plan"
            return UserError("--schedule.reduce-dtype", asked.settings.reduce_dtype, expected)
        return None

    def make(self) -> Followed:
        """Measure links and blocks, search for the best schedule, print progress, and return the decision.

        If planning fails or nothing fits, the decision is to use the settings under ``schedule``."""
        from tawpipe.plan.machine.probe import with_files

        begin = time.perf_counter()
        progress.info("planning: measuring links and blocks, predicting every strategy (skip with --plan none)")
        machine = probed(self.world)
        if self.asked.settings.offload_dir:
            machine = with_files(machine, self.world, self.asked.settings.offload_dir)
        request, problem = self.ask(machine)

        table, left_out, reason = (), (), NO_PLAN + problem
        if request is not None and self.world.rank == 0:
            table, left_out, reason, request = self._chosen(request, begin)
        text, settings = self.world.text_of_rank_0(lambda: reason), self.asked.settings
        if text.startswith(NO_PLAN):
            line = f"plan: none; training continues with the settings under schedule ({settings.strategy}): "
            line += text.removeprefix(NO_PLAN)
            return Followed(settings, None, line, request, machine, table, left_out)
        plan, took_s = SavedPlan.of(text), time.perf_counter() - begin
        line = f"plan: chosen in {duration(took_s)}"
        if plan and self.asked.steps and plan.step_s:
            line += f" ({took_s / (took_s + self.asked.steps * plan.step_s):.1%} of the predicted run)"
        return Followed(settings, plan, line, request, machine, table, left_out)

    def _chosen(self, request: PlanRequest, begin: float) -> tuple[tuple[str, ...], tuple[str, ...], str, PlanRequest]:
        """Search for a plan on this process.

        Args:
            request: measurements.
            begin: time at which planning began, by ``time.perf_counter``.

        Returns:
            ``table`` and ``left_out`` of ``Followed``, the text of the plan, and the request with the plan's
            micro-batch. Without a plan the text is ``NO_PLAN`` and the reason.
        """
        from tawpipe.plan.search.plan import Plan
        from tawpipe.plan.search.search import search
        from tawpipe.plan.search.sizes import with_best_size

        table, left_out, steps = (), (), self.asked.steps or math.inf
        try:
            request, spent = with_best_size(request), time.perf_counter() - begin
            candidates = search(request, most_s=lambda step_s: max(AT_LEAST_S, SHARE * steps * step_s - spent))
            plan = Plan.of(request, candidates)
            table, left_out = tuple(plan.table()), tuple(plan.left_out())
            return table, left_out, plan.text() if plan.chosen else NO_PLAN + plan.reason, request
        except Exception as error:
            return table, left_out, NO_PLAN + problem_of(error), request

    def ask(self, machine: Machine, *, timed: bool = True) -> tuple[PlanRequest | None, str]:
        """Measure the blocks of the model on all ranks, and return the inputs for a search.

        All ranks measure at the same time, as they will compute: processes on one CPU share it.

        Args:
            machine: machine with its links.
            timed: False to measure memory only.

        Returns:
            the inputs and ``""``; or None and the problem, alike on all ranks.
        """
        request, problem = None, ""
        self.world.barrier()
        try:
            request = self.ask_alone(machine, timed=timed)
        except Exception as error:
            problem = problem_of(error)
        if problem:  # the failed measurement is no longer referenced
            give_back(self.world.device)
        if problem := next(filter(None, self.world.gather_texts(problem)), ""):
            return None, problem
        return request, ""

    def ask_alone(self, machine: Machine, *, timed: bool = True) -> PlanRequest:
        """Measure the blocks of the model on this process, independent of other ranks.

        Args:
            machine: machine with its links.
            timed: False to measure memory only.

        Raises:
            UserError: a setting cannot work for this model.
        """
        settings, device = self.asked.settings, self.world.device
        if self.by_one and settings.sequence_ranks is None:
            settings = replace(settings, sequence_ranks=1)
        memory_bytes = int(machine.most_memory * MEMORY[device.type])
        asked = replace(self.asked, timed=timed, memory_bytes=memory_bytes, settings=settings)
        return request_of(self.chain, machine, asked, here=device)


def fits_to_keep(request: PlanRequest, schedule: ScheduleSettings, share: float = KEEPS) -> bool:
    """Return True if a step of the largest micro-batches fits into ``share`` of a device's memory."""
    with suppress(UserError):  # raised for rows in chunks or over several ranks, which keep no graph
        limit = replace(request, memory_bytes=int(request.machine.most_memory * share))
        return not shortage(limit, memory_quickly(limit, limit.step(schedule)))
    return False


def problem_of(error: Exception) -> str:
    """Return a text for an error in planning that is being handled; for a fault in tawpipe with its last frames."""
    words = f"{type(error).__name__}: {error}"
    return f"{words}; {REPORT}\n{traceback.format_exc(limit=-LAST_FRAMES)}".rstrip() if is_fault(error) else words


def _read(path: Path) -> str:
    """Check the plan file at ``path``, and return its text."""
    load_plan(path, setting="--plan")
    return path.read_text(encoding="utf-8")
