"""How much crosses which link: counted from a schedule's actions, and from a formula that knows no actions, only what
stays in buffers (residency.py).

Imports topology and schedule only. Elements, not bytes: weights and gradients may travel in different dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Lane, Op, is_activation, is_weight
from tawpipe.schedule.placement import ALIKE
from tawpipe.schedule.residency import plan_residency
from tawpipe.schedule.routes.ring import Ring, Stream
from tawpipe.schedule.spec import Schedule, wire_bytes
from tawpipe.schedule.visits import forward_visits, training_visits
from tawpipe.topology import Topology


@dataclass(frozen=True)
class LinkTraffic:
    """Elements that one node's link to the other nodes carries in one step.

    Args:
        weights_sent, weights_received: in the compute dtype.
        gradients_sent, gradients_received: in the reduce dtype.
    """

    weights_sent: int = 0
    weights_received: int = 0
    gradients_sent: int = 0
    gradients_received: int = 0

    def bytes_sent(self, weight_bytes: float, gradient_bytes: float) -> int:
        return round(self.weights_sent * weight_bytes + self.gradients_sent * gradient_bytes)

    def bytes_received(self, weight_bytes: float, gradient_bytes: float) -> int:
        return round(self.weights_received * weight_bytes + self.gradients_received * gradient_bytes)


def link_elements(schedule: Schedule, *, physical: Topology | None = None) -> tuple[LinkTraffic, ...]:
    """What every node's link carries of weights and gradients, from the actions of the ranks that have some.

    A collective is counted as a ring in the order of its members, broadcast and reduce as a chain from or to the root.

    Args:
        physical: the nodes that the ranks really are on, where the schedule was built for others (without grouping: for
            nodes of one rank each).
    """
    topology = physical or schedule.topology
    assert topology.world_size == schedule.topology.world_size
    counts = [[0, 0, 0, 0] for _ in range(topology.num_nodes)]
    for rank, program in enumerate(schedule.programs):
        if not program:
            continue
        node, sizes = topology.node_of(rank), schedule.buffer_elements(rank)
        for action in program:
            if action.op is Op.EXCHANGE:
                for transfer in action.transfers:
                    if topology.node_of(transfer.peer) != node and not is_activation(transfer.buffer):
                        offset = (0 if is_weight(transfer.buffer) else 2) + (0 if transfer.send else 1)
                        counts[node][offset] += sizes[transfer.buffer]
            elif action.op is Op.COLLECTIVE:
                sent, received = _round_the_ring(schedule, topology, rank, action, sizes)
                offset = 0 if is_weight((*action.reads, *action.writes)[0]) else 2
                counts[node][offset] += sent
                counts[node][offset + 1] += received
    return tuple(LinkTraffic(*four) for four in counts)


def scratch_bytes(schedule: Schedule, rank: int) -> int:
    """Of the messages in 8 bits that one rank needs room for, those of a lane one after the other in the same place."""
    sizes, most = schedule.buffer_elements(rank), dict[Lane, int]()
    for action in schedule.programs[rank]:
        if not action.wire:
            continue
        if action.op is Op.EXCHANGE:
            needed = sum(wire_bytes(sizes[t.buffer], action.wire) for t in action.transfers)
        else:
            members = len(schedule.topology.group(action.group, rank))
            gathers = action.collective == "all_gather"
            one = wire_bytes(sizes[action.reads[0] if gathers else action.writes[0]], action.wire)
            needed = one * (1 + members if gathers else 2 * members)
        most[action.lane] = max(most.get(action.lane, 0), needed)
    return sum(most.values())


def _round_the_ring(
    schedule: Schedule, topology: Topology, rank: int, action: Action, sizes: dict[str, int]
) -> tuple[int, int]:
    """Elements that one member of a collective sends to the next one and receives from the one before, over slow
    links.
    """
    members = schedule.topology.group(action.group, rank)
    steps, at = len(members) - 1, members.index(rank)
    before, after = (topology.node_of(members[(at + d) % len(members)]) != topology.node_of(rank) for d in (-1, 1))
    if action.collective in ("broadcast", "reduce"):
        whole = sizes[(*action.reads, *action.writes)[0]]
        place = (at - members.index(action.root)) % len(members)
        away, towards = whole * (place < steps), whole * (place > 0)
        return (
            (away * after, towards * before) if action.collective == "broadcast" else (towards * before, away * after)
        )
    if action.collective == "all_gather":
        moved = steps * sizes[action.reads[0]]
    elif action.collective == "reduce_scatter":
        moved = steps * sizes[action.writes[0]]
    else:
        moved = 2 * steps * sizes[action.reads[0]] // len(members)
    return moved * after, moved * before


def link_elements_formula(schedule: Schedule) -> tuple[LinkTraffic, ...]:
    """The same from sizes alone, for a schedule on the nodes that it was built for, D of L ranks.

    Every time that a unit's weights come into a node, and every time that its gradient leaves it, which is once a
    visit or
    once a step: (1 - 1/D) of the unit over each node's link in and out (``spread``); all of it into every node but its
    home (``striped``, ``whole``); (P - 1)/P of it past each node (``flat``, a ring of P = DL ranks); no weights and
    2(1 - 1/D) of the gradient (``hybrid``). On WeiPipe's ring all of it at every hop from a node's last rank, see
    ``Ring``.
    """
    topology, model, knobs = schedule.topology, schedule.model, schedule.knobs
    if topology.num_nodes == 1:
        return (LinkTraffic(),)
    if knobs.placement == "ring":
        return _ring_formula(schedule)
    nodes, world = topology.num_nodes, topology.world_size
    visits = training_visits(model, knobs) if schedule.training else forward_visits(model, knobs)
    weights = list(plan_residency(model, topology, schedule.homes, knobs, visits).arrivals())
    gradients = [u for v in visits if v.gradients is not None for u in model.trainable_units(v.block)]
    if knobs.weights_scope == "step":
        weights = sorted(set(weights))
    if knobs.gradients_scope == "step":
        gradients = sorted(set(gradients))
    alike = knobs.placement in ALIKE  # for all nodes: one stands for them
    counts = [[0, 0, 0, 0] for _ in range(1 if alike else nodes)]
    for unit, offset in [(unit, 0) for unit in weights] + [(unit, 2) for unit in gradients]:
        home = schedule.homes[unit]
        for node in range(len(counts)):
            at_home = topology.node_of(home.ranks[0]) == node
            if knobs.placement == "spread":
                sent = received = home.padded * (nodes - 1) // nodes
            elif knobs.placement == "flat":
                sent = received = home.padded * (world - 1) // world
            elif knobs.placement == "hybrid":
                sent = received = 0 if offset == 0 else 2 * home.padded * (nodes - 1) // nodes
            else:
                there, here = (home.padded * (nodes - 1), 0) if at_home else (0, home.padded)
                sent, received = (there, here) if offset == 0 else (here, there)
            counts[node][offset] += sent
            counts[node][offset + 1] += received
    return tuple(LinkTraffic(*four) for four in (counts * nodes if alike else counts))


def _ring_formula(schedule: Schedule) -> tuple[LinkTraffic, ...]:
    topology, homes = schedule.topology, schedule.homes
    ring = Ring(schedule.model, topology, schedule.knobs, homes, schedule.training)
    out = [[0, 0] for _ in range(topology.num_nodes)]
    for journey in ring.journeys:
        for node, counts in enumerate(out):
            last = (node + 1) * topology.local_size - 1
            elements = homes[journey.unit].padded * journey.passes(last, ring.size)
            counts[journey.stream is Stream.GRADIENT] += elements
    # What leaves a node enters the next one.
    return tuple(LinkTraffic(w, out[n - 1][0], g, out[n - 1][1]) for n, (w, g) in enumerate(out))
