"""Lower bounds on the seconds of a step, for the timed workload.

Every strategy has two bounds, from workload, topology and link alone. A step begins and ends with nothing in flight.

* Physical: a device must do its share of the computing, and a node's link must carry the bytes that the strategy cannot
  avoid. ``max(compute seconds per device, least bytes into or out of a node / rate)``; W is the bytes of all weights, D
  the number of nodes, P the number of devices. Wasted bytes do not count (gloo's reduce-scatter is an all-reduce).
* Dependencies: in addition, nothing can begin before its inputs exist. For schedules of this project,
  `tawpipe_lab.critical` follows the schedule's own order. For rivals, only the waits count that no order avoids;
  docstrings name them.

For documents of uneven lengths, the physical bound takes the mean over all devices, whatever the assignment of a
strategy is. The latency of a link counts in the second bound, once wherever an action waits for a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane, Op
from tawpipe.schedule.buffers import TRAVELLING, Kind
from tawpipe.schedule.sizes.footprint import Widths, far_widths
from tawpipe.schedule.sizes.traffic import borders_passed, link_elements
from tawpipe.schedule.spec import BlockSpec, ModelSpec, UnitSpec
from tawpipe.schedule.step import Schedule
from tawpipe.simulate import BlockCost, CostModel, LinkModel
from tawpipe.topology import Topology
from tawpipe_lab.critical import dependency_bound
from tawpipe_lab.lengths import DealtWorkload
from tawpipe_lab.rivals.stages import stages_of
from tawpipe_lab.rivals.traffic import ShardedTraffic, nodes_of_stages, pipeline_bytes, sharded_traffic, stages_per_rank
from tawpipe_lab.workload import TimedWorkload

SHARDED = ("fsdp2", "fsdp2-node", "fsdp2-hierarchical", "fsdp2-cp", "hsdp", "zero3", "zero-hpz")
PIPELINES = ("1f1b", "interleaved-1f1b", "zbv")


@dataclass(frozen=True)
class Bounds:
    """Bounds of one strategy in one setting.

    Args:
        compute_s: seconds of the device that computes most; the mean of all devices if documents have uneven lengths or
            devices unequal speeds.
        link_s: seconds of the node's link that is busy longest.
        dependency_s: bound by dependencies in seconds; at least the physical bound.
        sent_bytes, received_bytes: least bytes of every node's link, per step.
    """

    compute_s: float
    link_s: float
    dependency_s: float
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]

    @property
    def physical_s(self) -> float:
        """Physical bound in seconds: the longer of computing and sending."""
        return max(self.compute_s, self.link_s)


def workload_model(workload: TimedWorkload) -> ModelSpec:
    """Return the model of a timed workload for schedule builders: embedding, layers and head.

    Embedding and head have no unit if their size is 0.
    """
    last, units = workload.layers + 1, list[UnitSpec]()

    def unit(size_bytes: int, *blocks: int, trainable: bool = True) -> tuple[int, ...]:
        if not size_bytes:
            return ()
        units.append(UnitSpec(size_bytes // 4, trainable, blocks))
        return (len(units) - 1,)

    def layer(block: int) -> BlockSpec:
        part = workload.block_parts[block]
        return BlockSpec((*unit(4 * part.frozen, block, trainable=False), *unit(4 * part.elements, block)), "layer")

    ends = (0, last) if workload.tied else (0,)
    embedding = unit(workload.embedding_bytes, *ends)
    layers = [layer(block) for block in range(1, last)]
    head = embedding if workload.tied else unit(workload.head_bytes, last)
    first = BlockSpec(embedding, "embedding", backward_reads_weights=False, needs_backward=bool(embedding))
    return ModelSpec((first, *layers, BlockSpec(head, "head")), tuple(units))


def workload_costs(workload: TimedWorkload, *, between: LinkModel, inside: LinkModel, **settings: Any) -> CostModel:
    """Return the cost model of a timed workload for simulations; elements are fp32.

    Args:
        between: link between nodes.
        inside: link inside a node.
        settings: further fields of ``CostModel``.
    """
    linear = 0.0
    if isinstance(workload, DealtWorkload):
        settings, linear = {"sizes": dict(enumerate(workload.sizes)), **settings}, workload.linear
    embedding, *layers, head = workload.block_parts
    blocks = (
        BlockCost.timed(embedding.forward_s, embedding.backward_s, embedding.backward_weight_s),
        *(BlockCost.timed(part.forward_s, part.backward_s, part.backward_weight_s, linear=linear) for part in layers),
        BlockCost.timed(0.0, head.seconds, head.backward_weight_s),  # our head computes all passes in BACKWARD
    )
    host = LinkModel(workload.activation_bytes / workload.host_s if workload.host_s else math.inf)
    homes = LinkModel(workload.homes_bytes_per_s or math.inf, shared=False)
    defaults = {"key_elements": workload.keys_bytes // 4, "boundary_bytes": workload.activation_bytes}
    defaults |= {"host": host, "homes": homes}
    return CostModel(blocks, between, inside, **{**defaults, **settings})


def activation_sizes(workload: TimedWorkload) -> dict[Kind, int]:
    """Return the bytes of one activation by its kind; sizes that depend on the layer are means of all layers."""
    sizes, layers = dict.fromkeys((Kind.RELOADED, *TRAVELLING), workload.activation_bytes), workload.layer_parts
    sizes[Kind.GRAPH] = round(fmean(part.graph_bytes for part in layers))
    return {**sizes, Kind.LINEAR: round(fmean(part.linear_bytes for part in layers))}


def schedule_bounds(
    schedule: Schedule,
    costs: CostModel,
    *,
    physical: Topology | None = None,
    dealt: DealtWorkload | None = None,
    steady: bool = False,
) -> Bounds:
    """Return lower bounds of the seconds of a step for a schedule of this project, from its own bytes and order.

    Bytes follow from ``link_elements``, the order from ``dependency_bound``. Reductions count as rings, which send the
    least bytes, whatever the cost model says. If devices have unequal speeds, their computing counts as shared ideally.

    Args:
        schedule: schedule of one step.
        costs: cost model of the workload.
        physical: nodes on which the ranks really run, if the schedule was built for other nodes.
        dealt: documents of the schedule, if it assigns some. The computing seconds are then the mean of all devices
            instead of the longest, because another assignment could be more even.
        steady: bound one step in a series of steps, see ``dependency_bound``.
    """
    topology = physical or schedule.topology
    widths = Widths(costs.weight_bytes, costs.gradient_bytes, 4, 0, change=costs.change_bytes)
    sent, received = schedule_bytes(schedule, topology, widths, costs.boundary)
    if dealt is not None:
        costs = replace(costs, kept=dealt.kept(schedule.step))
    ranks, slower = range(topology.world_size), costs.compute_factor
    each = [_compute_seconds(schedule, costs, rank) / slower.get(rank, 1.0) for rank in ranks]
    speeds = [1 / slower.get(rank, 1.0) for rank in ranks]
    compute = max(each) if dealt is None and not slower else sum(each) / sum(speeds)
    pairs = enumerate(zip(sent, received, strict=True))
    links = [costs.node_link(node).busy_s(topology.local_size, *both) for node, both in pairs]
    costs = replace(costs, reduce_scatter="ring")
    needed = max(compute, *links, dependency_bound(schedule, costs, physical=topology, steady=steady))
    return Bounds(compute, max(links), needed, sent, received)


def schedule_bytes(
    schedule: Schedule, topology: Topology, widths: Widths, boundary: Callable[[int], float] = lambda _: 0.0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two tuples by node: the bytes that its link sends, and that it receives, in a step of a schedule.

    Args:
        schedule: schedule of one step.
        topology: nodes of the ranks.
        widths: bytes of one element of weights, gradients and changes.
        boundary: function of a micro-batch that returns the bytes of its activation between two layers.
    """
    far = far_widths(schedule.step.settings, widths, step=schedule.step)
    passed = borders_passed(schedule, lambda m: round(boundary(m)), physical=topology)
    pairs = [*zip(link_elements(schedule, physical=topology), passed, strict=True)]
    sent = tuple(elements.bytes_sent(*far) + away for elements, (away, _) in pairs)
    return sent, tuple(elements.bytes_received(*far) + back for elements, (_, back) in pairs)


def _compute_seconds(schedule: Schedule, costs: CostModel, rank: int) -> float:
    """Return the seconds for which ``rank`` computes in one step of ``schedule``."""
    total = 0.0
    for action in schedule.programs[rank]:
        cp_costs = costs.with_cp_groups(schedule.step.ranks_of(action.micro_batch))
        if action.op is Op.FORWARD:
            total += cp_costs.forward_s(rank, action.block, action.micro_batch)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            again = schedule.step.recomputes(action.block, action.micro_batch)
            total += cp_costs.backward_s(rank, action.block, action.micro_batch, again)
            if action.op is Op.BACKWARD_INPUT:
                total -= cp_costs.backward_weight_s(rank, action.block, action.micro_batch)
        elif action.op is Op.BACKWARD_WEIGHT:
            total += cp_costs.backward_weight_s(rank, action.block, action.micro_batch)
        elif action.op is Op.UPDATE and action.lane is Lane.COMPUTE:
            total += costs.update_seconds(rank, schedule.homes[action.unit].shard_size, action.unit)
    return total


def shipped_bounds(
    name: str, workload: TimedWorkload, topology: Topology, between: LinkModel, knobs: Mapping[str, Any] | None = None
) -> Bounds:
    """Return lower bounds of the seconds of a step for a rival as torch or DeepSpeed ship it, with given knobs.

    Sharding (``fsdp2`` and its settings; R rounds of ``micro_batches_per_gather``): weights are gathered and gradients
    reduced over all ranks in a ring, which passes (P-1)/P of the weights over every node's link in each direction. The
    last layer is kept from its forward to its backward pass, the first layer (FSDP2) from one round to the next, and
    all layers over the whole step with ``keep_weights``.

    * ``fsdp2``: (P-1)/P (W forward + W (1 - 1/L) backward + W gradients) per round; W / L less from the second round
      on.
    * ``fsdp2-node`` (integer ``reshard_after_forward``): no weights between nodes in the backward pass.
    * ``fsdp2-hierarchical``: (1 - 1/D) instead of (P-1)/P, because every byte enters a node once.
    * ``fsdp2-cp``: like ``fsdp2`` in rounds of documents that all devices compute. In addition, keys and values go
      round all devices in the forward and in the backward pass, and their gradients once: (P-1)/P of their bytes over
      every node's link each time.
    * ``hsdp``: every node holds all weights, and none of them cross. Gradients are all-reduced over the nodes once per
      step, 2 (1 - 1/D) W.
    * ``zero3``: like ``fsdp2``, but it keeps as many last layers as it prefetches (``prefetch``).
    * ``zero-hpz``: weights between nodes only in the forward pass of the first round.

    Pipelines: see ``_pipeline_bounds``.

    Raises:
        UserError: there is no such rival.
    """
    knobs = dict(knobs or {})
    if name in PIPELINES:
        return _pipeline_bounds(name, workload, topology, between, knobs)
    if name not in SHARDED:
        raise UserError("strategy", name, f"one of {', '.join((*SHARDED, *PIPELINES))}")
    keys_bytes = 0.0
    if name == "fsdp2-cp":
        devices = topology.world_size
        passed = 1 - 1 / devices if topology.num_nodes > 1 else 0.0
        keys_bytes = 3 * workload.micro_batches * workload.layers * workload.keys_bytes * passed
        workload = replace(workload.faster(devices), micro_batches=workload.micro_batches * devices)
    first, last = 1, 1
    sizes = [part.elements + part.frozen for part in workload.parts]
    if name == "zero3":
        first, last = 0, min(max(1, int(knobs.get("prefetch", 1))), len(sizes))
    shares = {"first": sum(sizes[:first]) / sum(sizes), "last": sum(sizes[-last:]) / sum(sizes)}
    shares["trained"] = _trained(workload)
    kind = sharded_traffic(name, workload.micro_batches, topology, knobs, **shares)
    return sharded_bounds(workload, topology, between, kind, besides=keys_bytes)


def _trained(workload: TimedWorkload) -> float:
    """Return the share of all weights that is trained."""
    trained, frozen = (sum(sizes) for sizes in zip(*((p.elements, p.frozen) for p in workload.parts), strict=True))
    return trained / (trained + frozen)


def sharded_bounds(
    workload: TimedWorkload, topology: Topology, between: LinkModel, kind: ShardedTraffic, besides: float = 0.0
) -> Bounds:
    """Return lower bounds of the seconds of a step for data parallelism with sharded weights.

    Waits at the begin, however well transfers overlap with computing; the longer one counts:

    * No part can compute before the weights of the first part that takes time have arrived, and the weights of all
      parts before it.
    * The last part cannot compute before all weights have arrived. Until then only the forward passes of the other
      parts in the first round can run.

    Waits at the end; the longer one counts:

    * The gradients of the first part leave after all computing, because its backward pass is the last one.
    * No gradient of the last round exists before the backward pass of the last part. So only the backward passes of the
      other parts in that round can overlap with sending them.

    Args:
        workload: the workload.
        topology: ranks and nodes.
        between: link between nodes.
        kind: shares of the weights that cross a node's link.
        besides: further bytes that cross every node's link.
    """
    parts = workload.parts
    weight = 4 * sum(part.elements + part.frozen for part in parts)
    per_device = -(-workload.micro_batches // topology.world_size)
    compute = per_device * sum(part.forward_s + part.backward_s for part in parts)
    begins = next(i for i, part in enumerate(parts) if part.forward_s or i == len(parts) - 1)
    share_of_first = 4 * sum(part.elements + part.frozen for part in parts[: begins + 1]) / weight
    size = -(-per_device // kind.rounds)
    first = min(size, per_device)
    last = per_device - (kind.rounds - 1) * size
    moved = weight * kind.total + besides
    rate = between.node_rate(topology.local_size)
    weights_in, gradients_out = weight * kind.forward / rate, weight * kind.trained * kind.gradients / rate
    before = max(weights_in * share_of_first, weights_in - first * sum(part.forward_s for part in parts[:-1]))
    last_s = last * sum(part.backward_s for part in parts[:-1])
    after = max(4 * parts[0].elements * kind.gradients / rate, gradients_out - last_s)
    before, after = (wait + between.latency_s * (wait > 0) for wait in (before, after))
    link = between.busy_s(topology.local_size, moved, moved)
    each = (moved,) * topology.num_nodes
    return Bounds(compute, link, max(link, before + compute + after), each, each)


def _pipeline_bounds(
    name: str, workload: TimedWorkload, topology: Topology, between: LinkModel, knobs: Mapping[str, Any]
) -> Bounds:
    """Return lower bounds of the seconds of a step for a pipeline over all P ranks in rank order.

    There are M micro-batches, and v stages per rank.

    Physical: the rank with the longest stages computes them M times. Where stages s and s + 1 are on different nodes, M
    activations cross forward and M gradients of equal size cross backward. 1F1B passes every border between
    neighbouring nodes once. Interleaving passes it v times, and goes from the last rank to the first v - 1 times. ZBV
    goes down and back up.

    Dependencies: a rank's first pass follows the forward passes of all stages before its own, and an activation over
    every border between. Where weight gradients are not split off, the backward passes of these stages follow the
    rank's last pass. With equal stages this is the bubble: (P-1)/v of a micro-batch's time. ZBV fills the end with
    weight gradients, so only the forward passes count there."""
    each = stages_per_rank(name)
    cut = workload.split(int(knobs.get("parts_per_layer", 1)))
    layout = stages_of(name, cut, topology.world_size, each, knobs.get("balance", "layers"))
    node = nodes_of_stages(name, topology, each)
    moved = pipeline_bytes(name, workload.micro_batches * workload.activation_bytes, topology, each)
    stages = [[cut.block_parts[block] for block in layout.blocks_of(stage)] for stage in range(layout.stages)]
    compute, needed = 0.0, 0.0
    for rank in range(topology.world_size):
        held, before = layout.stages_of(rank), stages[: layout.stages_of(rank)[0]]
        busy = workload.micro_batches * sum(part.seconds for stage in held for part in stages[stage])
        borders = sum(a != b for a, b in pairwise(node[: held[0] + 1]))
        crossing = borders * (workload.activation_bytes / between.bytes_per_s + between.latency_s)
        waits = sum(part.forward_s for stage in before for part in stage) + crossing
        if name != "zbv":
            waits += sum(part.backward_s for stage in before for part in stage) + crossing
        compute, needed = max(compute, busy), max(needed, busy + waits)
    link = max(between.busy_s(topology.local_size, size, size) for size in moved)
    return Bounds(compute, link, max(link, needed), moved, moved)
