"""A workload as rivals train it: modules, batches, a loss and an optimizer.

It is all that timed and real contenders differ in. How modules are sharded or put in stages, and when what is
computed, is the contenders' own.
"""

from __future__ import annotations

from tawpipe_lab.real_modules import RealTask
from tawpipe_lab.rivals.timed_modules import TimedTask
from tawpipe_lab.sleeper import BusyTime
from tawpipe_lab.workload import Known, RealWorkload

Task = TimedTask | RealTask
"""One rank's workload: the same attributes and methods, which ``TimedTask`` describes."""


def task_of(workload: Known, busy: BusyTime) -> Task:
    """The workload for one contender on one rank."""
    return RealTask(workload) if isinstance(workload, RealWorkload) else TimedTask(workload, busy)
