"""Steps of a strategy: its settings checked against model and nodes, and the schedule that it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from tawpipe.dealing.balance import BinsForm
from tawpipe.errors import UserError
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.sets import in_sets
from tawpipe.schedule.settings import AUTO_RECOMPUTE, ScheduleSettings, check_values
from tawpipe.schedule.spec import ModelSpec, share_bins
from tawpipe.schedule.step import SPECIAL, Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.table import find
from tawpipe.topology import Topology


def shares_of(
    count: int, topology: Topology, settings: ScheduleSettings, strategy: Strategy | None = None
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches 0..count-1 for every rank.

    Args:
        strategy: one that is not in the table, in place of ``settings.strategy``.

    Raises:
        UserError: settings that these nodes cannot have.
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
    """A step to be scheduled, with its settings checked.

    Args:
        topology: the real one; nodes must be equally large, see ``Topology.evened``.
        strategy: one that is not in the table, in place of ``settings.strategy``.
        shared, slices, orders: see ``StepSpec``.

    Raises:
        UserError: a setting that cannot work for this model on these nodes.
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
    if settings.sequence_chunk and any(step.saves(block) is Kind.GRAPH for block in range(1, layers + 1)):
        expected = "full or selective with sequence_chunk: a graph is of all chunks, and as large as without them"
        raise UserError("schedule.recompute", settings.recompute, expected)
    if step.step_cache and not settings.reuse:
        raise UserError("schedule.step_cache", settings.step_cache, "0 without reuse: nothing is used again")
    assert len(micro_batches) == topology.world_size and step.topology.is_even
    _ = strategy.share(0, step.topology, settings)  # the view of the strategy may know smaller nodes
    _ = step.homes  # and whether units can live there
    return step


def step_of_bins(
    model: ModelSpec,
    topology: Topology,
    settings: ScheduleSettings,
    form: BinsForm,
    *,
    strategy: Strategy | None = None,
) -> StepSpec:
    """A step of documents that were dealt, like ``step_of``.

    Args:
        form: of the bins.

    Raises:
        UserError: a setting that cannot work.
    """
    strategy, ranks = (strategy or find(settings.strategy)).configured(settings), settings.sequence_ranks or 1
    dealt_to = strategy.dealt_to(topology)
    takers = 1 + max(dealt_to)
    each, shared = share_bins(form.shared, form.single, takers, ranks), form.shared * takers // ranks
    shares, slices = tuple(each[number] for number in dealt_to), list[tuple[int, ...]]()
    for numbers, documents in zip(each, form.slices, strict=False):
        ends = list(accumulate(documents, initial=0))
        slices += [numbers[begin:end] for begin, end in pairwise(ends)]
    dealt = {"shared": shared, "slices": tuple(slices), "orders": form.orders}
    return step_of(model, topology, settings, shares, strategy=strategy, **dealt)


def build(step: StepSpec, *, training: bool = True, ranks: Sequence[int] | None = None) -> Schedule:
    """The schedule of a step.

    Args:
        training: False for one forward pass with its loss.
        ranks: those whose programs are made, all by default; see ``Strategy.build``.

    Raises:
        UserError: nothing in the model is trainable.
    """
    if training and not any(unit.trainable for unit in step.model.units):
        raise UserError("model", "no trainable parameter", "at least one parameter must require a gradient")
    return in_sets(step.strategy.build(step, training=training, ranks=ranks))
