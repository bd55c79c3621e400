"""Workload as rivals train it: modules, batches, a loss and an optimizer.

Timed and real contenders differ in nothing else. How modules are sharded or divided into stages, and when they compute,
is the contenders' code.
"""

from __future__ import annotations

from tawpipe_lab.real_modules import RealTask
from tawpipe_lab.rivals.timed_modules import TimedTask
from tawpipe_lab.sleeper import BusyTime
from tawpipe_lab.workload import Known, RealWorkload

Task = TimedTask | RealTask
"""Workload of one rank. Both classes have the attributes and methods that ``TimedTask`` describes."""


def task_of(workload: Known, busy: BusyTime) -> Task:
    """Return the workload for one contender on one rank."""
    return RealTask(workload) if isinstance(workload, RealWorkload) else TimedTask(workload, busy)
