"""One rank that stands for all.

Where nodes, links and shares of the work are alike, all ranks of many strategies run the same
program at the same time; only the names of their micro-batches and of their peers differ. Playing one of them
is then playing all: its collectives begin when it is there, and of the links it sees what its whole node sends. So
thousands of devices take as long as one.
"""

from __future__ import annotations

from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies import build
from tawpipe.simulate.cost_model import CostModel


def foldable(step: StepSpec, costs: CostModel | None = None) -> bool:
    """True if one rank can stand for all."""
    shares = {len(own) for own in step.micro_batches}
    even = costs is None or costs.inside.shared or costs.inside.full_duplex
    if not step.strategy.one_stands_for_all(inside_is_even=even) or not step.topology.is_even or len(shares) > 1:
        return False
    if costs is None:
        return True
    sizes = {*costs.sizes.values(), costs.size} if costs.sizes else {costs.size}
    return not costs.between_of and not costs.compute_factor and len(sizes) == 1


def build_folded(step: StepSpec) -> Schedule:
    """The schedule of a step with the program of rank 0 alone; for the clock."""
    assert foldable(step)
    return build(step, ranks=(0,))
