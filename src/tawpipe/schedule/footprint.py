"""What a schedule costs, stated before it is paid: bytes over every node's link, memory per process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import compressed_width
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.traffic import link_elements, scratch_bytes
from tawpipe.topology import Topology


@dataclass(frozen=True)
class Widths:
    """Bytes of one element.

    Args:
        weight: of weights that travel and compute.
        gradient: of gradients that are summed and travel.
        master: of weights and gradients at home.
        optimizer_states: tensors of a parameter's size that the optimizer keeps, in the master's dtype.
    """

    weight: int
    gradient: int
    master: int
    optimizer_states: int

    def at_home(self, *, trainable: bool) -> int:
        """Bytes of an element where it lives: weight, gradient, optimizer state, the copy that travels; of a frozen one
        only the latter.
        """
        if not trainable:
            return self.weight
        return self.master * (2 + self.optimizer_states) + (self.weight if self.weight != self.master else 0)


@dataclass(frozen=True)
class Costs:
    """Costs of one step. Where processes differ, memory is that of the process that needs most.

    Args:
        strategy, schedule: in words.
        link_sent_bytes, link_received_bytes: for every node's link to the others.
        home_bytes: master weights, gradients, optimizer state and travelling copies at home.
        buffer_bytes: pools of units and slices on their way, messages in 8 bits included.
        activation_bytes: boundary activations, inputs of blocks and their gradients, and what layers keep besides.
        host_bytes: activations that wait in the host's memory, and, of a pipeline, which alone knows them, exact values
            of frozen units that the compute dtype rounds.
    """

    parameters: int
    trainable: int
    strategy: str
    schedule: str
    link_sent_bytes: tuple[int, ...]
    link_received_bytes: tuple[int, ...]
    home_bytes: int
    buffer_bytes: int
    activation_bytes: int
    host_bytes: int = 0


def far_widths(settings: ScheduleSettings, widths: Widths) -> tuple[float, float]:
    """Bytes of an element of weights, and of gradients, between nodes."""
    return (
        compressed_width(settings.weights_compression, widths.weight),
        compressed_width(settings.gradients_compression, widths.gradient),
    )


def costs(
    schedule: Schedule, widths: Widths, *, activation_bytes: Mapping[Kind, int], nodes: Topology | None = None
) -> Costs:
    """Add up a schedule.

    Args:
        activation_bytes: of one activation of every kind, see ``Schedule.peak_activations``.
        nodes: the real ones, where the schedule was built for others.
    """
    ranks = schedule.played
    traffic = link_elements(schedule, physical=nodes)
    home = [
        sum(schedule.home_elements(rank, trainable=t) * widths.at_home(trainable=t) for t in (True, False))
        for rank in ranks
    ]
    buffers = [
        schedule.pool_elements(rank, Kind.WEIGHT) * widths.weight
        + schedule.pool_elements(rank, Kind.GRADIENT) * widths.gradient
        + scratch_bytes(schedule, rank)
        for rank in ranks
    ]
    on_host = {kind: each for kind, each in activation_bytes.items() if kind is Kind.OFFLOADED}
    on_device = {kind: each for kind, each in activation_bytes.items() if kind is not Kind.OFFLOADED}
    settings, units = schedule.step.settings, schedule.model.units
    far = far_widths(settings, widths)
    return Costs(
        parameters=sum(unit.numel for unit in units),
        trainable=sum(unit.numel for unit in units if unit.trainable),
        strategy=schedule.name + (", homes as given" if settings.homes else ""),
        schedule=(
            f"{count(len(schedule.micro_batches), 'micro-batch', 'micro-batches')} "
            f"in {count(schedule.step.rounds, 'round')}, "
            f"{settings.micro_batches_per_visit} per visit, look-ahead {settings.look_ahead}"
        ),
        link_sent_bytes=tuple(link.bytes_sent(*far) for link in traffic),
        link_received_bytes=tuple(link.bytes_received(*far) for link in traffic),
        home_bytes=max(home),
        buffer_bytes=max(buffers),
        activation_bytes=max(schedule.peak_activations(rank, on_device) for rank in ranks),
        host_bytes=max(schedule.peak_activations(rank, on_host) for rank in ranks),
    )


def count(number: int, one: str, many: str | None = None) -> str:
    """
    >>> count(1, "round"), count(2, "round")
    ('1 round', '2 rounds')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"
