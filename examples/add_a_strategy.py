"""A strategy of your own in one file: every unit lives whole on one process, which broadcasts it to all the others.

    tawpipe plan --import examples/add_a_strategy.py --model tiny --vocab-size 500 --topology 2x2@1gbit \
        --device-name CPU --sequence-length 256 --global-batch 8
    tawpipe train --import examples/add_a_strategy.py --schedule.strategy broadcast --steps 3
    tawpipe lab compare --import examples/add_a_strategy.py --suite examples/add_a_strategy.yaml --out runs/broadcast

Nothing in the package knows this file. docs/add-a-strategy.md walks through it.
"""

from __future__ import annotations

from collections.abc import Iterator

import tawpipe
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import home_weight
from tawpipe.schedule.link_traffic import LinkTraffic
from tawpipe.schedule.placement import Home
from tawpipe.schedule.routes.route import Route, Tour
from tawpipe.schedule.routes.visits import Visit
from tawpipe.topology import Topology

ONE_HOP = "a unit goes to all processes in one hop"


class BroadcastRoute(Route):
    """One broadcast over the world there, one reduction over the world back."""

    def pull(self, visit: Visit) -> Iterator[Action]:
        index = visit.weight_index
        assert index is not None
        for unit in self.model.blocks[visit.block].units:
            root = self.homes[unit].ranks[0]
            if self.rank == root:
                buffer, reads, writes = home_weight(unit), (home_weight(unit),), ()
            else:
                buffer = self.resident[unit] if self.holds(index, unit) else self._full_buffer(index, unit)
                reads, writes = (), (buffer,)
            if not self.holds(index, unit) and self.topology.world_size > 1:
                yield self._collective("broadcast", Lane.INTER_W, unit, reads, writes)
            self.full[index, unit] = self.resident[unit] = buffer

    def push(self, visit: Visit) -> Iterator[Action]:
        for unit in self.model.trainable_units(visit.block) if self.topology.world_size > 1 else ():
            assert visit.gradient_index is not None
            gradient = self.gradient[visit.gradient_index, unit]
            yield self._collective("reduce", Lane.INTER_G, unit, (gradient,), (gradient,))
            if self.rank == self.homes[unit].ranks[0]:
                yield self._add_home(unit, gradient, Lane.INTER_G)

    def _collective(self, name: str, lane: Lane, unit: int, reads: tuple, writes: tuple) -> Action:
        root = self.homes[unit].ranks[0]
        return Action(Op.COLLECTIVE, lane, reads, writes, unit=unit, collective=name, group="world", root=root)


class Broadcast(tawpipe.WeightStrategy):
    """Units whole on processes in turn; one broadcast a visit."""

    name = "broadcast"
    summary = "every unit on one process, which broadcasts it to all others at once"
    refusals = {
        "gradients_scope": ONE_HOP,
        "weights_compression": "no broadcast knows 8 bits",
        "gradients_compression": "no reduction to one process knows 8 bits",
    }

    def home(self, topology: Topology, numel: int, block: int, at: int | None) -> Home:
        return Home.over((block % topology.world_size if at is None else at,), numel)

    def places(self, topology: Topology) -> int:
        return topology.world_size

    def route(self, rank: int, tour: Tour) -> Route:
        return BroadcastRoute(rank, tour)

    def unit_traffic(self, topology: Topology, home: Home, node: int) -> LinkTraffic:
        """A chain over all ranks from the home on: it leaves every node but the last one, and enters every node but
        that of the home, unless the home is in the middle of its node.
        """
        here, after = topology.nodes[node], topology.nodes[(node + 1) % topology.num_nodes]
        out, into = (home.padded * (home.ranks[0] != first) for first in (after[0], here[0]))
        return LinkTraffic(out, into, into, out)


tawpipe.register_strategy(Broadcast())
