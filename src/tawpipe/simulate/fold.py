"""One rank that stands for all. Imports topology, schedule and simulate only.

Where nodes, links and shares of the work are alike, all ranks of the placements ``spread``, ``flat`` and ``hybrid`` run
the same program at the same time; only the names of their micro-batches and of their peers differ. Playing one of them
is then playing all: its collectives begin when it is there, and of the links it sees what its whole node sends. So
thousands of devices take as long as one.
"""

from __future__ import annotations

from tawpipe.schedule.build import build_training
from tawpipe.schedule.placement import ALIKE
from tawpipe.schedule.spec import Knobs, ModelSpec, Schedule
from tawpipe.simulate.cost_model import CostModel
from tawpipe.topology import Topology


def foldable(topology: Topology, knobs: Knobs, costs: CostModel | None = None) -> bool:
    """Whether one rank can stand for all."""
    shares = {len(own) for own in knobs.micro_batches}
    if knobs.placement not in ALIKE or not topology.is_even or len(shares) > 1:
        return False
    if costs is None:
        return True
    if knobs.placement == "flat" and not (costs.inside.shared or costs.inside.full_duplex):
        return False  # ranks at the ends of a node send less inside it than those between them
    sizes = {*costs.sizes.values(), costs.size} if costs.sizes else {costs.size}
    return not costs.between_of and not costs.compute_factor and len(sizes) == 1


def build_folded(model: ModelSpec, topology: Topology, knobs: Knobs) -> Schedule:
    """The schedule of a step with the program of rank 0 alone; for the clock.

    Raises:
        UserError: as ``build_training`` does.
    """
    assert foldable(topology, knobs)
    return build_training(model, topology, knobs, ranks=(0,))
