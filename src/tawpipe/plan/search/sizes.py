"""Comparison of micro-batches of several sizes, before a plan is searched for the best one (``--micro-batch auto``)."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import holds, unplayed, with_settings
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.candidate import GAIN
from tawpipe.schedule.strategies.table import COMPARED


def with_best_size(request: PlanRequest) -> PlanRequest:
    """Return the request with the micro-batch whose step is predicted to be the fastest; see ``PlanRequest.filling``.

    Sizes are tried from the largest down, until one that fits is not faster by ``GAIN`` than the one before. If no
    strategy in ``COMPARED`` fits on the devices, the result has the smallest size. A request without a choice is
    returned unchanged.
    """
    if request.filling is None or len(request.filling.sizes) == 1:
        return request
    best, best_s, tried = request.filling.sizes[0], math.inf, list[int]()
    for size in request.filling.sizes[::-1]:
        step_s = _seconds(request.with_micro_batch(size))
        tried += [size] * (step_s < math.inf)
        if step_s > best_s * (1 - GAIN):
            break
        best, best_s = (size, step_s) if step_s < math.inf else (best, best_s)
    return replace(request.with_micro_batch(best), filling=replace(request.filling, tried=tuple(tried[::-1])))


def _seconds(request: PlanRequest) -> float:
    """Return the least predicted seconds of a step of the strategies in ``COMPARED``; infinite if none fits."""
    seconds = [math.inf]
    for name in COMPARED:
        with suppress(UserError):  # the strategy cannot run this model on these machines
            step = request.step(replace(request.settings, strategy=name))
            visits = step.strategy.visits(request.micro_batches, request.topology, request.settings)
            for number in () if unplayed(request, step) else visits:
                ways = [with_settings(step, micro_batches_per_visit=number, recompute=way) for way in ("none", "full")]
                seconds += [predict(request, way).step_seconds for way in ways if holds(request, way)]
    return min(seconds)
