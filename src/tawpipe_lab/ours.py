"""Rows of this project in the lab: every strategy of the table, and TawPipe without one of its ideas.

A row is a strategy and settings. ``ours_run`` runs it on timed and real workloads. Compare ``no-grouping`` and
``no-overlap`` with ``tawpipe-spread`` and ``reuse: false``; otherwise the gain of keeping weights in buffers would
count as a gain of grouping or overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tawpipe.errors import UserError
from tawpipe.orders.fitting import heuristics
from tawpipe.plan.search.pipelines import hops
from tawpipe.schedule.pipelines.cost_based import CostBasedPipeline
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.times import spell_times
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts, makespan, play
from tawpipe.schedule.settings import ScheduleSettings, recompute_of_blocks
from tawpipe.schedule.sharing import share_in_cp_groups, speeds_of
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies.build import build, shares_of, step_of, step_of_packs
from tawpipe.schedule.strategies.table import find, register, strategies
from tawpipe.schedule.strategies.weights import Spread
from tawpipe.schedule.transform import without_overlap
from tawpipe.simulate import LinkModel
from tawpipe.simulate import play as play_schedule
from tawpipe.topology import Topology
from tawpipe_lab.bounds import workload_costs, workload_model
from tawpipe_lab.lengths import DealtWorkload, dealt, mean_pack, through_stages
from tawpipe_lab.real_modules import real_model_spec
from tawpipe_lab.rivals.stages import stages_of
from tawpipe_lab.rivals.traffic import stages_per_rank
from tawpipe_lab.workload import (
    ENDS,
    Known,
    LengthsWorkload,
    RealWorkload,
    ServingWorkload,
    TimedWorkload,
    Workload,
    merge_knobs,
)


class NoGrouping(Spread):
    """TawPipe that treats every device as a node, so that nothing is grouped by node."""

    name = "no-grouping"
    summary = "tawpipe-spread as if every process were a node"
    candidate = False

    def view(self, topology: Topology) -> Topology:
        return Topology.grid(topology.world_size, 1)


class NoOverlap(Spread):
    """TawPipe that runs all actions in one lane, so that computing and transfers do not overlap."""

    name = "no-overlap"
    summary = "tawpipe-spread that computes or transfers, never both"
    candidate = False

    def build(self, step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
        schedule = super().build(step, training=training, ranks=ranks)
        return without_overlap(schedule) if training else schedule

    def stand_ins(self, topology: Topology, *, inside_is_even: bool) -> tuple[int, ...]:
        return ()


register(NoGrouping())
register(NoOverlap())
OWN_NAMES = {name: f"{name}-ours" for name in ("hsdp", "1f1b", "interleaved-1f1b")}
"""Strategy -> name of its row, where a rival's row already has the strategy's name."""
BALANCED = {"tawpipe-balanced": "tawpipe-spread", "step-balanced": "tawpipe-step", "hsdp-balanced": "hsdp"}
"""Row -> strategy. These rows assign documents of uneven lengths to ranks by time, and split long ones over a node's
ranks."""
FITTED = {
    "1f1b-fitted": ("1f1b", "1f1b-offload", "one-by-one"),
    "zero-bubble-fitted": ("zero-bubble", "zero-bubble-offload"),
}
"""Row -> fixed heuristics by which a pipeline stays within the workload's ``room``; the row takes the fastest that
fits. See orders/fitting.py."""
RIVAL_OF = {"1f1b": "1f1b", "interleaved-1f1b": "interleaved-1f1b", "zero-bubble": "zbv"}
"""Strategy with a published order -> the rival with equal stages."""
SOLVER_S = 30.0
"""Seconds that the solver may use for the row ``solved``."""
ROW_SETTINGS: dict[str, dict[str, Any]] = {
    **{row: {"packing": "balanced"} for row in BALANCED},
    "tawpipe-whole": {"reuse": False},
    "no-grouping": {"reuse": False},
    "no-overlap": {"reuse": False, "look_ahead": 0},
}
"""Row -> settings with which it measures what its paper describes, or what it leaves out. Knobs override them."""


@dataclass(frozen=True)
class OurSettings:
    """Knobs of a row.

    Args:
        schedule: settings of the schedule. They have more buffers than a user's defaults, so that no strategy waits for
            a buffer.
        parts_per_layer: number of equal layers into which every layer of the workload is cut; a ring needs one layer
            per device.
        clip_norm: largest global gradient norm. With None gradients are not clipped, and each unit is updated as soon
            as its gradient is complete.
        strict: if True, check sequence number and action of every message.
        packing: method that assigns documents of uneven lengths to ranks, see ``lengths.dealt``; None for ``in turn``.
        balance: what the stages of a pipeline with a fixed order are equal in, see ``rivals.stages.stages_of``; None
            for ``layers``.
        order: order of a pipeline, as ``Order`` writes it, instead of the strategy's own.
        bf16: if True, weights and gradients are bf16. Their number doubles, so that the workload's bytes stay.
            Gradients have random values.
        changes: file with the weights of successive steps of a run (benchmarks/coding.py), which updates copy into the
            weights. The file's name is the run's learning rate.
        pattern: kinds of a timed workload's layers, instead of the workload's own; layers that keep less for their
            backward pass are another kind.
    """

    schedule: ScheduleSettings
    parts_per_layer: int = 1
    clip_norm: float | None = 1.0
    strict: bool = True
    packing: str | None = None
    balance: str | None = None
    order: str | None = None
    bf16: bool = False
    changes: str | None = None
    pattern: str | None = None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of the weights and gradients that travel."""
        return 2 if self.bf16 else 4

    def spelled_out(self) -> dict[str, Any]:
        """Return all knobs as plain data, which ``settings_of`` accepts."""
        schedule = {name: value for name, value in vars(self.schedule).items() if value is not None}
        own_knobs = {name: value for name, value in vars(self).items() if name not in UNSAID or value}
        return {name: value for name, value in {**schedule, **own_knobs}.items() if name in KNOBS}


UNSAID = ("packing", "balance", "order", "bf16", "changes", "pattern")
"""Knobs that are left out of results if they are not set."""
OWN_KNOBS = tuple(item.name for item in fields(OurSettings) if item.name != "schedule")
IMPLIED_SETTINGS = ("strategy", "early_updates")
"""Schedule settings that are no knobs, because the row's name and ``clip_norm`` determine them."""
KNOBS = (*OWN_KNOBS, *(item.name for item in fields(ScheduleSettings) if item.name not in IMPLIED_SETTINGS))


def rows() -> dict[str, str]:
    """Return the strategy of every row, by the row's name."""
    return {OWN_NAMES.get(name, name): name for name in strategies()} | BALANCED | dict.fromkeys(FITTED, "solved")


def named(row: str) -> str:
    """Return the name of a row in results: the strategy's name if a rival has it too, else the row's.

    The field ``origin`` of a result tells the two apart.
    """
    return next((strategy for strategy, name in OWN_NAMES.items() if name == row), row)


def settings_of(name: str, knobs: Mapping[str, Any]) -> OurSettings:
    """Return the settings of the row ``name``: usual values, then those that the row stands for, then ``knobs``.

    A later one overrides an earlier one.

    Raises:
        UserError: the row or a knob does not exist.
    """
    if name not in rows():
        raise UserError("strategy", name, f"one of {', '.join(rows())}")
    for knob in knobs:
        if knob not in KNOBS:
            raise UserError(f"knob of {name}", knob, f"one of {', '.join(KNOBS)}")
    usual = {"micro_batches_per_visit": 1, "look_ahead": 3, "gradient_buffers": 3}
    wanted = {**usual, **ROW_SETTINGS.get(name, {}), **knobs}
    own_knobs = {knob: wanted.pop(knob) for knob in OWN_KNOBS if knob in wanted}
    if own_knobs.get("bf16"):
        wanted.setdefault("reduce_dtype", "same")
    early = own_knobs.get("clip_norm", 1.0) is None
    return OurSettings(ScheduleSettings(strategy=rows()[name], early_updates=early, **wanted), **own_knobs)


def computed(name: str, workload: Workload, topology: Topology, knobs: Mapping[str, Any]) -> Known:
    """Return the workload in the form in which a row computes it.

    Layers are cut into parts, and documents are assigned to ranks or pipelines.

    Args:
        name: row.
        workload: the workload of the cell.
        topology: ranks and nodes.
        knobs: knobs of the row.

    Raises:
        UserError: the row cannot compute this workload with these knobs.
    """
    settings = settings_of(name, knobs)
    if settings.pattern and isinstance(workload, TimedWorkload):
        kinds = {kind: values for kind, values in workload.kinds.items() if kind in (*settings.pattern, *ENDS)}
        workload = replace(workload, pattern=settings.pattern, kinds=kinds)
    work = workload.split(settings.parts_per_layer)
    if isinstance(work, LengthsWorkload):
        if isinstance(find(settings.schedule.strategy), ActivationPipeline):
            return _through_stages(name, work, topology, knobs)
        balanced = settings.packing == "balanced"
        ranks = knobs.get("sequence_ranks", topology.local_size if balanced else 1)
        _ = share_in_cp_groups(0, topology, replace(settings.schedule, sequence_ranks=ranks))
        return dealt(work, settings.packing or "in turn", topology, ranks, speeds_of(settings.schedule, topology))
    if settings.packing:
        raise UserError("packing", settings.packing, "a workload of the kind lengths: others have nothing to pack")
    if isinstance(work, ServingWorkload):
        raise UserError("workload", work.kind, f"timed, lengths or real: {name} trains")
    return work


def _through_stages(
    name: str, workload: LengthsWorkload, topology: Topology, knobs: Mapping[str, Any]
) -> DealtWorkload:
    """Assign the documents of a step to the pipelines of a row, and return the step as a timed workload.

    Raises:
        UserError: a knob does not work with documents of uneven lengths, or the packing is unknown.
    """
    settings = settings_of(name, merge_knobs(knobs, search_knobs(name, workload, topology, knobs)))
    chosen = settings.schedule
    refused = {"keep_mib": chosen.keep_mib, "order": settings.order, "balance": settings.balance}
    for knob, value in refused.items():
        if value:
            raise UserError(knob, value, f"nothing for {name} on documents of uneven lengths")
    none = ((),) * topology.world_size
    step = step_of(workload_model(_mean_pack(workload, topology, settings)), topology, chosen, none, shared=0)
    return through_stages(workload, settings.packing or "in turn", step)


def _mean_pack(workload: LengthsWorkload, topology: Topology, settings: OurSettings) -> TimedWorkload:
    """Return a timed workload of equal micro-batches for which a pipeline's stages and order are made.

    The micro-batches have the mean size of the packed micro-batches of ``workload``.
    """
    strategy = find(settings.schedule.strategy).configured(settings.schedule)
    assert isinstance(strategy, ActivationPipeline)
    positions = strategy.positions(topology)
    return mean_pack(workload, settings.packing or "in turn", positions.size, positions.replicas)


def recorded(path: str) -> torch.Tensor:
    """Load the weights of successive steps of a run: a bf16 tensor (steps, elements).

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return torch.load(path, mmap=True, weights_only=True)
    except OSError as error:
        expected = f"a file that `python benchmarks/coding.py --record FOLDER` writes ({error.strerror})"
        raise UserError("changes", path, expected) from error


def pipeline_costs(workload: TimedWorkload, recompute: str | None = None) -> PipelineCosts:
    """Return the costs of a timed workload's blocks, as a profile would give them.

    Times are microseconds; memory is a multiple of one boundary activation.

    Args:
        recompute: value of ``ScheduleSettings.recompute``; None for ``full``.
    """
    blocks, again = [], recompute_of_blocks(recompute or "full", workload_model(workload))
    for block, part in enumerate(workload.block_parts):
        forward, inputs, weights = part.forward_s, part.backward_input_s, part.backward_weight_s
        if block == workload.layers + 1:  # our head computes all passes in one action
            forward, inputs, weights = 0.0, part.seconds, 0.0
        waiting, kept = round(part.linear_bytes / workload.activation_bytes, 3), float(block > 0)
        if again[block] == "none":
            inputs, kept = inputs - forward, round(part.graph_bytes / workload.activation_bytes, 3)
        times = round(1e6 * forward), round(1e6 * inputs), round(1e6 * weights)
        blocks.append(BlockTimes(*times, kept=kept, kept_for_weights=waiting))
    memory = math.inf if workload.room is None else workload.room
    return PipelineCosts(tuple(blocks), memory=memory, host=1e6 * workload.host_s)


def _balanced(name: str, work: Known, topology: Topology, settings: OurSettings) -> str:
    """Return the value of the setting ``stages`` with which a published order has the stages of its rival.

    Raises:
        UserError: the balance is unknown, or this row and workload have none.
    """
    strategy, balance = find(settings.schedule.strategy), settings.balance or "layers"
    has_stages = ":" in (settings.schedule.stages or "")
    if strategy.name not in RIVAL_OF or has_stages or not isinstance(work, TimedWorkload):
        expected = f"none: of ours {', '.join(row for row, strategy in rows().items() if strategy in RIVAL_OF)} have it"
        raise UserError(f"balance of {name}", balance, f"{expected}, on a timed workload, where no stages are given")
    assert isinstance(strategy, ActivationPipeline)
    positions = strategy.configured(settings.schedule).positions(topology)
    rival = RIVAL_OF[strategy.name]
    layout = stages_of(rival, work, positions.size, stages_per_rank(rival), balance)
    return f"{positions.axis}:{layout}"


INSIDE = LinkModel(2e9)
"""Link inside a node: the loopback of the machine, which adds almost no time."""


def _played(
    name: str, workload: LengthsWorkload, topology: Topology, knobs: Mapping[str, Any], between: LinkModel
) -> float:
    """Simulate one step of a row on documents of uneven lengths, and return its seconds.

    Unlike a search for stages, the simulation knows that boundaries between stages share a link.

    Args:
        name: row.
        workload: the documents and their times.
        topology: ranks and nodes.
        knobs: knobs of the row.
        between: link between nodes.
    """
    work = computed(name, workload, topology, knobs)
    assert isinstance(work, TimedWorkload)
    schedule = schedule_of(name, workload, topology, knobs)
    return play_schedule(schedule, workload_costs(work, between=between, inside=INSIDE), steps=1).makespan


def search_knobs(
    name: str, workload: Workload, topology: Topology, knobs: Mapping[str, Any], between: LinkModel | None = None
) -> dict[str, Any]:
    """Search for the knobs that a row needs in addition to its own: ``stages``, ``order`` and ``block_times``.

    The search runs once, so that the ranks need not repeat it. ``block_times`` are the times for which a pipeline is
    made or documents are assigned. For the row ``solved``, it takes about ``SOLVER_S`` seconds.

    Args:
        name: row.
        workload: the workload of the cell.
        topology: ranks and nodes.
        knobs: given knobs of the row; with ``order`` or ``block_times`` nothing is searched.
        between: link between nodes; None if transfers take no time.

    Returns:
        The found knobs; an empty dict if the row needs no search.

    Raises:
        UserError: no order fits into the workload's ``room``.
    """
    strategy = find(rows()[name]) if name in rows() else None
    if not isinstance(strategy, ActivationPipeline) or "order" in knobs or "block_times" in knobs:
        return {}
    settings = settings_of(name, knobs)
    if isinstance(workload, LengthsWorkload):
        work = _mean_pack(workload, topology, settings)
    elif isinstance(workload, TimedWorkload) and isinstance(strategy, CostBasedPipeline):
        work = computed(name, workload, topology, knobs)
        assert isinstance(work, TimedWorkload)
    else:
        return {}
    chosen = settings.schedule
    strategy = strategy.configured(chosen)
    positions = strategy.positions(topology)
    costs = strategy.paced(pipeline_costs(work, chosen.recompute), positions)
    if between is not None:
        costs = replace(costs, **hops(positions, work.activation_bytes, costs.blocks, between=between, inside=INSIDE))
    count, times = work.micro_batches // positions.replicas, {"block_times": spell_times(costs)}
    if name == "generated" and ":" not in knobs.get("stages", ""):
        from tawpipe.orders.generate import generate

        usual = {"stages": f"{positions.axis}:{generate(costs, positions.size, count)}", **times}
        if not isinstance(workload, LengthsWorkload) or between is None:
            return usual
        even = {"stages": f"{positions.axis}:{Layout.even(len(costs.blocks), positions.size)}", **times}
        return min((usual, even), key=lambda ways: _played(name, workload, topology, {**knobs, **ways}, between))
    if name in ("zero-bubble", "generated") or isinstance(workload, LengthsWorkload):
        return times
    layout = strategy.layout_of(workload_model(work), positions)
    if name == "solved":
        from tawpipe.orders.solver.solve import solve

        return {"order": str(solve(layout, costs, count, seconds=SOLVER_S, workers=2).order), **times}
    fitting = heuristics(layout, costs, count)
    orders = [order for way, order in fitting.items() if way in FITTED[name]]
    if not orders:
        raise UserError("room", work.room, f"more for {name}; {', '.join(fitting)} would do with that")
    return {"order": str(min(orders, key=lambda order: makespan(play(layout, order, costs)))), **times}


def schedule_of(name: str, workload: Workload, topology: Topology, knobs: Mapping[str, Any]) -> Schedule:
    """Build the schedule of one step that a row runs on a workload. May search for stages or an order first.

    Args:
        name: row.
        workload: the workload of the cell.
        topology: ranks and nodes.
        knobs: knobs of the row.

    Raises:
        UserError: the strategy cannot run this workload on this topology with these knobs.
    """
    if isinstance(workload, LengthsWorkload):  # stages and times decide which documents a pipeline gets
        knobs = merge_knobs(knobs, search_knobs(name, workload, topology, knobs))
    settings, work = settings_of(name, knobs), computed(name, workload, topology, knobs)
    chosen = settings.schedule
    model = real_model_spec(work) if isinstance(work, RealWorkload) else workload_model(work)
    if settings.bf16:
        model = replace(model, units=tuple(replace(unit, numel=2 * unit.numel) for unit in model.units))
    if isinstance(work, DealtWorkload):
        chosen = replace(chosen, sequence_ranks=work.ranks)
    elif chosen.keep_mib and isinstance(work, TimedWorkload):
        raise UserError("keep_mib", chosen.keep_mib, "0, or a workload of the kind lengths: others keep nothing")
    elif isinstance(work, TimedWorkload) and work.keys_bytes and "sequence_ranks" not in knobs:
        chosen = replace(chosen, sequence_ranks=topology.local_size)
    elif isinstance(work, TimedWorkload) and chosen.sequence_ranks not in (None, 1) and not work.keys_bytes:
        raise UserError("sequence_ranks", chosen.sequence_ranks, "1, or a workload with keys_bytes")
    strategy = find(chosen.strategy)
    if "block_times" in strategy.uses and isinstance(work, TimedWorkload) and not chosen.block_times:
        chosen = replace(chosen, block_times=spell_times(pipeline_costs(work, chosen.recompute)))
    all_knobs = merge_knobs(knobs, search_knobs(name, workload, topology, knobs))
    chosen = replace(chosen, stages=all_knobs.get("stages", chosen.stages))
    if settings.balance:
        chosen = replace(chosen, stages=_balanced(name, work, topology, settings))
    if order := all_knobs.get("order"):
        assert isinstance(strategy, ActivationPipeline)
        strategy = replace(strategy, pipeline_order=order)
    if isinstance(work, DealtWorkload):
        step = step_of_packs(model, topology, chosen, work.packs.form, strategy=strategy)
    else:
        shares = shares_of(work.micro_batches, topology, chosen)
        step = step_of(model, topology, chosen, shares, strategy=strategy)
    selective = any(step.recomputes(block) == "selective" for block in range(len(model.blocks)))
    if selective and isinstance(work, TimedWorkload):
        expected = "full or none: a timed layer has no attention of its own"
        raise UserError("recompute", chosen.recompute, expected)
    return build(step)
