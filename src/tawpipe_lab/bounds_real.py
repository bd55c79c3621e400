"""The part of a bound that is known for a real workload: its bytes, and so what its links need at least.

How long a device computes does not follow from the setting. So there is no bound by dependencies, and the physical one
is that of the node's link that is busy longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tawpipe.errors import UserError
from tawpipe.schedule.footprint import Widths
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import PIPELINES, schedule_bytes
from tawpipe_lab.real_modules import real_model_spec
from tawpipe_lab.rivals import fsdp
from tawpipe_lab.rivals.traffic import pipeline_bytes, sharded_traffic, stages_per_rank
from tawpipe_lab.workload import RealWorkload

WIDTH = 4
"""Bytes of an element, fp32 everywhere."""


@dataclass(frozen=True)
class LinkBounds:
    """Bounds of one strategy in one setting; what ``Bounds`` has as well means the same.

    Args:
        sent_bytes, received_bytes: least bytes of every node's link.
    """

    physical_s: float
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    dependency_s: None = None


def real_bounds(
    name: str, workload: RealWorkload, topology: Topology, between: LinkModel, knobs: Mapping[str, Any]
) -> LinkBounds:
    """Bounds of any strategy, shipped or ours.

    Raises:
        UserError: no such strategy or knob, or it cannot run there.
    """
    if name in ours.rows():
        schedule = ours.schedule_of(name, workload, topology, knobs)
        widths = Widths(WIDTH, WIDTH, WIDTH, 0)
        sent, received = schedule_bytes(schedule, topology, widths, lambda _: workload.activation_bytes)
    else:
        sent = received = _shipped_bytes(name, workload, topology, knobs)
    links = [between.busy_s(topology.local_size, *both) for both in zip(sent, received, strict=True)]
    return LinkBounds(max(links), tuple(sent), tuple(received))


def _shipped_bytes(name: str, workload: RealWorkload, topology: Topology, knobs: Mapping[str, Any]) -> Sequence[float]:
    """Bytes of every node's link each way, as ``bounds.shipped_bounds`` counts them, for parts of unequal size.

    Of FSDP2 the head is kept from the forward to the backward pass, and the embedding from one round to the next.
    """
    if name in PIPELINES:
        amount = workload.micro_batches * workload.activation_bytes
        return pipeline_bytes(name, amount, topology, stages_per_rank(name, knobs))
    if name not in fsdp.NAMES:
        raise UserError("strategy", name, f"one of {', '.join((*ours.rows(), *fsdp.NAMES, *PIPELINES))}")
    model = real_model_spec(workload)
    parts = [WIDTH * sum(model.units[unit].numel for unit in block.units) for block in model.blocks]
    if name == "hsdp":
        moved = 2 * (1 - 1 / topology.num_nodes) * sum(parts)
    else:
        first, last = parts[0] / sum(parts), parts[-1] / sum(parts)
        moved = (
            sum(parts) * sharded_traffic(name, workload.micro_batches, topology, knobs, first=first, last=last).total
        )
    return (moved,) * topology.num_nodes
