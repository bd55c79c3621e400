"""Contenders: the strategies under measurement, each able to run complete training steps.

Every worker process of a launch builds one contender per strategy after the ranks have joined, and then runs single
steps of them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from tawpipe.errors import UserError
from tawpipe.topology import Topology
from tawpipe_lab.sleeper import BusyTime, Sleeper
from tawpipe_lab.workload import Known, Workload

Settings = TypeVar("Settings")


class Contender:
    """One strategy on one rank.

    Args:
        name: name in tables, for example ``fsdp2``.
        knobs: all settings of the strategy, including those at their defaults.

    Attributes:
        origin: ``shipped`` for a rival, called through its public interface, or ``ours`` for a schedule in this
            project's runtime.
        sleeper: stands for the device and sleeps instead of computing, at a pace that the worker sets; None if the
            contender really computes.
        loss_share: part of the last step's loss that this rank knows; the sum over all ranks is the loss. None for a
            timed workload, which has no loss.
    """

    origin = "shipped"
    sleeper: Sleeper | None = None
    loss_share: float | None = None

    def __init__(self, name: str, knobs: dict[str, Any]) -> None:
        self.name, self.knobs, self._busy = name, knobs, BusyTime()

    def step(self) -> None:
        """Run one complete training step on this rank, and wait until all its communication is done."""
        raise NotImplementedError

    def busy(self) -> dict[str, float]:
        """Return the seconds for which each lane was busy since the last call, for lanes that are measured.

        COMPUTE is the sleeping that stands for computing; a real workload has no such lane. A lane of transfers also
        counts as busy while it waits for another rank.
        """
        return self._busy.take()

    def close(self) -> None:
        """Free threads, process groups and memory. No step may follow."""
        raise NotImplementedError


class Maker(Protocol):
    """Function that builds a contender on this rank.

    All ranks call it in the same order, because it may create process groups.

    Raises:
        UserError: the strategy cannot run this workload on this topology, or a knob is unknown.
    """

    def __call__(self, name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender: ...


def read_settings(cls: Callable[..., Settings], name: str, knobs: Mapping[str, object]) -> Settings:
    """Build the settings dataclass ``cls`` of the strategy ``name`` from its knobs.

    Raises:
        UserError: the strategy has no such knob.
    """
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for knob in knobs:
        if knob not in known:
            raise UserError(f"knob of {name}", knob, f"one of {', '.join(known)}")
    return cls(**knobs)


def check_sharding(name: str, workload: Known, topology: Topology, per_gather: int) -> None:
    """Raise UserError if a sharding rival cannot divide the micro-batches evenly among all devices.

    Args:
        name: strategy, for the message.
        workload: the workload.
        topology: ranks and nodes.
        per_gather: number of micro-batches that share one gather of the weights.

    Raises:
        UserError: the number of micro-batches is not a multiple of devices x ``per_gather``, or the ranks of a node are
            not consecutive.
    """
    together = topology.world_size * per_gather
    if workload.micro_batches % together:
        wanted = f"{name} needs a multiple of {together} (devices x micro-batches per gather)"
        raise UserError("micro_batches", workload.micro_batches, wanted)
    if topology != Topology.grid(topology.num_nodes, topology.local_size):
        raise UserError("topology", topology.nodes, f"{name} needs the ranks of a node to be consecutive")


def check_grid(name: str, topology: Topology) -> None:
    """Raise UserError unless the topology has several nodes with several processes each.

    The message names the strategy ``name``."""
    if not 1 < topology.local_size < topology.world_size:
        raise UserError("topology", str(topology), f"{name} needs several nodes of several processes")
