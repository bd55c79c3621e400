"""How much crosses which link: counted from a schedule's actions, and from a closed formula that knows no actions.

Imports schedule only. Elements, not bytes: weights and gradients may travel in different dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tawpipe.schedule.actions import Action, Op, is_weight
from tawpipe.schedule.spec import Schedule
from tawpipe.schedule.visits import forward_visits, training_visits


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

    def bytes_sent(self, weight_bytes: int, gradient_bytes: int) -> int:
        return self.weights_sent * weight_bytes + self.gradients_sent * gradient_bytes

    def bytes_received(self, weight_bytes: int, gradient_bytes: int) -> int:
        return self.weights_received * weight_bytes + self.gradients_received * gradient_bytes


def link_elements(schedule: Schedule) -> tuple[LinkTraffic, ...]:
    """What every node's link carries, from the actions. A collective over the world is a ring in the order of the ranks."""
    counts = [[0, 0, 0, 0] for _ in range(schedule.topology.num_nodes)]
    for rank, program in enumerate(schedule.programs):
        node = schedule.topology.node_of(rank)
        for action in program:
            sent, received, weights = _crossing(schedule, rank, action)
            offset = 0 if weights else 2
            counts[node][offset] += sent
            counts[node][offset + 1] += received
    return tuple(LinkTraffic(*four) for four in counts)


def _crossing(schedule: Schedule, rank: int, action: Action) -> tuple[int, int, bool]:
    """Elements that one rank's action sends over and receives from the slow link, and whether they are weights."""
    topology = schedule.topology
    if action.op is Op.EXCHANGE:
        sizes = [(t.send, schedule.homes[t.unit].stripe) for t in action.transfers]
        weights = is_weight(action.transfers[0].buffer)
        return sum(n for send, n in sizes if send), sum(n for send, n in sizes if not send), weights
    if action.op is not Op.COLLECTIVE or action.group == "node":
        return 0, 0, True
    members = topology.group(action.group, rank)
    home = schedule.homes[action.unit]
    piece = home.padded // topology.local_size // topology.num_nodes
    moved = (len(members) - 1) * piece
    i = members.index(rank)
    before, after = members[i - 1], members[(i + 1) % len(members)]
    here = topology.node_of(rank)
    sends, receives = topology.node_of(after) != here, topology.node_of(before) != here
    return moved * sends, moved * receives, action.collective == "all_gather"


def link_elements_formula(schedule: Schedule) -> tuple[LinkTraffic, ...]:
    """The same from sizes alone: every visit of a unit brings (1 - 1/D) of it into each of the D nodes (``spread``), or all of it
    into every node but its home (``striped``, ``whole``), or (P - 1)/P of it past each node (``flat``, a ring of P ranks)."""
    topology, model, knobs = schedule.topology, schedule.model, schedule.knobs
    nodes, world = topology.num_nodes, topology.world_size
    visits = training_visits(model, knobs) if schedule.training else forward_visits(model, knobs)
    counts = [[0, 0, 0, 0] for _ in range(nodes)]
    for visit in visits:
        moves = [(unit, 0) for unit in model.blocks[visit.block].units if visit.weights is not None]
        moves += [(unit, 2) for unit in model.trainable_units(visit.block) if visit.gradients is not None]
        for unit, offset in moves:
            home = schedule.homes[unit]
            for node in range(nodes):
                outward, inward = offset, offset + 1
                if knobs.placement == "spread":
                    share = home.padded * (nodes - 1) // nodes
                    counts[node][outward] += share
                    counts[node][inward] += share
                elif knobs.placement == "flat":
                    share = home.padded * (world - 1) // world if nodes > 1 else 0
                    counts[node][outward] += share
                    counts[node][inward] += share
                elif topology.node_of(home.ranks[0]) == node:
                    counts[node][outward if offset == 0 else inward] += home.padded * (nodes - 1)
                else:
                    counts[node][inward if offset == 0 else outward] += home.padded
    return tuple(LinkTraffic(*four) for four in counts)
