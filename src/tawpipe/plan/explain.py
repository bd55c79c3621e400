"""One candidate of a plan in detail, for ``tawpipe plan --explain``."""

from __future__ import annotations

from collections.abc import Iterator

from tawpipe.plan.plan import Plan
from tawpipe.plan.search import settle


def explain(plan: Plan, strategy: str) -> Iterator[str]:
    """Lines that say where time and memory of one candidate go."""
    candidate = next(one for one in plan.candidates if one.strategy == strategy)
    yield f"{strategy}:"
    if candidate.prediction is None:
        yield f"  {candidate.why_not}"
        return
    for name, value in plan.row(candidate)["knobs"].items():
        if value not in ("", None):
            yield f"  {name}: {value}"
    made = candidate.prediction
    yield f"  step {made.step_seconds:.4f} s, at least {made.bound_s:.4f} s by computing and links"
    yield f"  devices idle {made.idle_s:.4f} s, of it {made.exposed_communication_s:.4f} s for transfers"
    if plan.request.topology.num_nodes > 1:
        share = plan.link_share(candidate)
        yield f"  the busiest link carries {made.link_bytes / 1e6:.1f} MB, {share:.0%} of the step"
    if candidate.step is not None:
        settled = candidate if candidate.homes is not None else settle(plan.request, candidate)
        if settled.homes is not None:
            yield f"  {settled.homes}"
        if settled.step != candidate.step:
            yield f"  with the best of these homes a step takes {settled.seconds:.4f} s"
    for name, size in made.memory.items():
        yield f"  {name}: {size / 2**30:.3f} GiB"
    yield f"  together: {made.peak_bytes / 2**30:.3f} GiB"
