"""How weights reach a device and how gradients go home: the choice of a route. Imports topology and schedule only."""

from __future__ import annotations

from tawpipe.schedule.collective import CollectiveRoute
from tawpipe.schedule.placement import Home
from tawpipe.schedule.residency import Residency
from tawpipe.schedule.route import Route
from tawpipe.schedule.spec import Knobs, ModelSpec
from tawpipe.schedule.staggered import ExchangeRoute
from tawpipe.schedule.visits import Visit
from tawpipe.topology import Topology

__all__ = ["CollectiveRoute", "ExchangeRoute", "Route", "make_route"]


def make_route(
    rank: int,
    topology: Topology,
    model: ModelSpec,
    knobs: Knobs,
    homes: tuple[Home, ...],
    visits: tuple[Visit, ...],
    residency: Residency,
) -> Route:
    """The route for the knobs' placement; ``striped`` on one node is one hop of collectives, on one device none."""
    staggered = knobs.placement == "whole" and topology.world_size > 1
    staggered |= knobs.placement == "striped" and topology.num_nodes > 1
    kind = ExchangeRoute if staggered else CollectiveRoute
    return kind(rank, topology, model, knobs, homes, visits, residency)
