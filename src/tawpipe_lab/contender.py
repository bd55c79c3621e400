"""The subject of a measurement: something that runs complete training steps.

Every worker process of a launch makes its own contender of every strategy, after the ranks have joined, and the harness
alternates single steps of them.
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
        name: as in the tables, for example ``fsdp2``.
        knobs: every setting it runs with, those left at their default included.

    Attributes:
        origin: ``shipped`` by others, called through its public interface, or ``ours``: a schedule in this project's
            runtime.
        sleeper: computes for it, at a pace that the harness sets; None where it really computes.
        loss_share: what this rank knows of the last step's loss: those of all ranks add up to it. None for a timed
            workload, which has no loss.
    """

    origin = "shipped"
    sleeper: Sleeper | None = None
    loss_share: float | None = None

    def __init__(self, name: str, knobs: dict[str, Any]) -> None:
        self.name, self.knobs, self._busy = name, knobs, BusyTime()

    def step(self) -> None:
        """One complete training step on this rank. None of its communication is under way when it returns."""
        raise NotImplementedError

    def busy(self) -> dict[str, float]:
        """Seconds since the last call that a lane was busy, for the lanes of which that is known.

        COMPUTE is the sleeping that stands for computation, of which a real workload has none. A lane of transfers is
        also busy while it waits for the other side.
        """
        return self._busy.take()

    def close(self) -> None:
        """Give back threads, groups and memory. No step may follow."""
        raise NotImplementedError


class Maker(Protocol):
    """Makes a contender on this rank. All ranks call it in the same order, because it may create process groups.

    Raises:
        UserError: the strategy cannot run this workload on this topology, or does not know a knob.
    """

    def __call__(self, name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender: ...


def read_settings(cls: Callable[..., Settings], name: str, knobs: Mapping[str, object]) -> Settings:
    """``knobs`` as the settings dataclass ``cls`` of the strategy ``name``.

    Raises:
        UserError: a knob that the strategy does not have.
    """
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for knob in knobs:
        if knob not in known:
            raise UserError(f"knob of {name}", knob, f"one of {', '.join(known)}")
    return cls(**knobs)


def check_sharding(name: str, workload: Known, topology: Topology, per_gather: int) -> None:
    """Refuse a rival that shards where it cannot share out the micro-batches, ``per_gather`` at a time.

    Raises:
        UserError: their number does not divide, or the ranks of a node are not consecutive.
    """
    together = topology.world_size * per_gather
    if workload.micro_batches % together:
        wanted = f"{name} needs a multiple of {together} (devices x micro-batches per gather)"
        raise UserError("micro_batches", workload.micro_batches, wanted)
    if topology != Topology.grid(topology.num_nodes, topology.local_size):
        raise UserError("topology", topology.nodes, f"{name} needs the ranks of a node to be consecutive")


def check_grid(name: str, topology: Topology) -> None:
    """Refuse a topology without a node to keep something in, and another one.

    Raises:
        UserError: there is not.
    """
    if not 1 < topology.local_size < topology.world_size:
        raise UserError("topology", str(topology), f"{name} needs several nodes of several processes")
