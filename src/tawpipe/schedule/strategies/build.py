"""Construction of steps and schedules: settings are checked against model and nodes, then the strategy builds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from tawpipe.dealing.balance import PacksForm
from tawpipe.errors import UserError
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.cp_groups import with_cp_groups
from tawpipe.schedule.settings import AUTO_RECOMPUTE, ScheduleSettings, check_values
from tawpipe.schedule.spec import ModelSpec, share_packs
from tawpipe.schedule.step import SPECIAL, Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.table import find
from tawpipe.topology import Topology


def shares_of(
    count: int, topology: Topology, settings: ScheduleSettings, strategy: Strategy | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return for every rank its micro-batches, out of 0..count-1.

    Args:
        count: number of micro-batches.
        strategy: a strategy that is not in the table, in place of ``settings.strategy``.

    Raises:
        UserError: the settings are impossible on these nodes.
    """
    return (strategy or find(settings.strategy)).share(count, topology, settings)


def step_of(
    model: ModelSpec,
    topology: Topology,
    settings: ScheduleSettings,
    micro_batches: tuple[tuple[int, ...], ...],
    *,
    strategy: Strategy | None = None,
    shared: int | None = None,
    slices: tuple[tuple[int, ...], ...] = (),
    orders: tuple[str, ...] = (),
) -> StepSpec:
    """Return a step to be scheduled, with its settings checked and open choices set.

    Args:
        model: sizes of the model.
        topology: the real nodes; they must be equally large, see ``Topology.evened``.
        settings: settings of the schedule.
        micro_batches: for every rank the indices of its micro-batches.
        strategy: a strategy that is not in the table, in place of ``settings.strategy``.
        shared: see ``StepSpec``.
        slices: see ``StepSpec``.
        orders: see ``StepSpec``.

    Raises:
        UserError: a setting cannot work for this model on these nodes.
    """
    strategy = (strategy or find(settings.strategy)).configured(settings)
    recompute = "full" if settings.recompute == AUTO_RECOMPUTE else settings.recompute
    settings = replace(strategy.settle(settings), strategy=strategy.name, recompute=recompute)
    check_values(settings)
    dealt = {"slices": slices, "orders": orders}
    step = StepSpec(strategy, model, strategy.view(topology), settings, micro_batches, shared, **dealt)
    layers, offloaded = model.num_layers, settings.offloaded_layers
    if not 0 <= offloaded <= layers:
        raise UserError("schedule.offloaded_layers", offloaded, f"0 to {layers}, the layers of the model")
    strategy.check(step)
    for name in SPECIAL:
        if (value := getattr(settings, name)) and name not in strategy.uses:
            raise UserError(f"schedule.{name}", value, f"nothing under {strategy.name}, which has none")
    if step.sequence_ranks > 1 and not settings.sequence_chunk and any(map(step.saves, range(layers + 1))):
        expected = "full with sequence_ranks, or selective if sequence_chunk is set as well"
        raise UserError("schedule.recompute", settings.recompute, expected)
    if settings.keep_mib and (settings.sequence_chunk or any(map(step.saves, range(layers + 1)))):
        expected = "0 where rows run in chunks, or recompute says what layers keep"
        raise UserError("schedule.keep_mib", settings.keep_mib, expected)
    if settings.sequence_chunk and step.kept & {Kind.GRAPH, Kind.PRODUCTS}:
        expected = "full or selective with sequence_chunk: a graph is of all chunks, and as large as without them"
        raise UserError("schedule.recompute", settings.recompute, expected)
    if step.step_cache and not settings.reuse:
        raise UserError("schedule.step_cache", settings.step_cache, "0 without reuse: nothing is used again")
    assert len(micro_batches) == topology.world_size and step.topology.is_even
    _ = strategy.share(0, step.topology, settings)  # raises if sequence_ranks does not fit the strategy's nodes
    _ = step.homes  # raises if units cannot be placed on these nodes
    return step


def step_of_packs(
    model: ModelSpec,
    topology: Topology,
    settings: ScheduleSettings,
    form: PacksForm,
    *,
    strategy: Strategy | None = None,
) -> StepSpec:
    """Return a step of documents that were assigned to packed micro-batches, with its settings checked.

    Args:
        model: sizes of the model.
        topology: the real nodes, as for ``step_of``.
        settings: settings of the schedule.
        form: numbers of packed micro-batches and slices, without the documents.
        strategy: a strategy that is not in the table, in place of ``settings.strategy``.

    Raises:
        UserError: a setting cannot work.
    """
    strategy, ranks = (strategy or find(settings.strategy)).configured(settings), settings.sequence_ranks or 1
    dealt_to = strategy.dealt_to(topology)
    takers = 1 + max(dealt_to)
    each, shared = share_packs(form.shared, form.single, takers, ranks), form.shared * takers // ranks
    shares, slices = tuple(each[number] for number in dealt_to), list[tuple[int, ...]]()
    for numbers, documents in zip(each, form.slices, strict=False):
        ends = list(accumulate(documents, initial=0))
        slices += [numbers[begin:end] for begin, end in pairwise(ends)]
    dealt = {"shared": shared, "slices": tuple(slices), "orders": form.orders}
    return step_of(model, topology, settings, shares, strategy=strategy, **dealt)


def build(step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
    """Return the schedule of a step, changed for context-parallel groups if there are any.

    Args:
        step: the step.
        training: False for one forward pass with its loss.
        ranks: ranks whose programs are made; None for all. See ``Strategy.build``.

    Raises:
        UserError: no parameter of the model is trainable.
    """
    if training and not any(unit.trainable for unit in step.model.units):
        raise UserError("model", "no trainable parameter", "at least one parameter must require a gradient")
    return with_cp_groups(step.strategy.build(step, training=training, ranks=ranks))
