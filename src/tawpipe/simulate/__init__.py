"""The clock that plays a schedule with a cost model instead of running it. Imports topology and schedule, never torch.

timeline = play(schedule, CostModel.timed(...))
print(timeline.step_seconds, timeline.idle(rank=0).transfer_s)
"""

from tawpipe.simulate.clock import play
from tawpipe.simulate.cost_model import BlockCost, CostModel, LinkModel, MicroBatchSize, Seconds
from tawpipe.simulate.critical import dependency_bound
from tawpipe.simulate.relax import unlimited_buffers
from tawpipe.simulate.timeline import Idle, NodeBytes, Span, Timeline

__all__ = [
    "BlockCost",
    "CostModel",
    "Idle",
    "LinkModel",
    "MicroBatchSize",
    "NodeBytes",
    "Seconds",
    "Span",
    "Timeline",
    "dependency_bound",
    "play",
    "unlimited_buffers",
]
