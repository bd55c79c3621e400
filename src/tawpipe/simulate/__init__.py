"""Simulation of a schedule: a clock runs it with a cost model instead of devices.

timeline = play(schedule, CostModel.timed(...))
print(timeline.step_seconds, timeline.idle(rank=0).transfer_s)
"""

from tawpipe.simulate.clock import play
from tawpipe.simulate.cost_model import (
    BlockCost,
    CodingTimes,
    CostModel,
    LinkModel,
    MicroBatchSize,
    Seconds,
    mean_size,
    size_of,
    slice_of,
)
from tawpipe.simulate.timeline import Timeline

__all__ = [
    "BlockCost",
    "CodingTimes",
    "CostModel",
    "LinkModel",
    "MicroBatchSize",
    "Seconds",
    "Timeline",
    "mean_size",
    "play",
    "size_of",
    "slice_of",
]
