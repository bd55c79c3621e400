"""What would fit where nothing does: single changes of the run, each planned anew; then more machines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from operator import attrgetter
from typing import Any

from tawpipe.options.names import Change
from tawpipe.plan.answer.remedy import WayOut
from tawpipe.plan.cost.feasible import some_fit
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.search import search
from tawpipe.simulate import LinkModel

CHANGES: tuple[Mapping[str, tuple[Any, Any]], ...] = (
    {"lora.rank": (None, 16)},
    {"lora.rank": (None, 16), "quantize": ("none", "nf4")},
    {"schedule.sequence_chunk": (0, 2048)},
    {"schedule.early_updates": (False, True)},
)
"""Settings of a run that need less memory, as what they are now and what they would be, in the order of the answer. A
plan itself chooses what is left open. A further change is a further line.
"""
EARLY, UNCLIPPED = Change("schedule.early_updates", True), Change("optimizer.clip_norm", 0)
"""The first needs less memory where one device's gradients then need no home in the host's memory, without clipping."""
SMALLER: Mapping[str, tuple[int, Callable[[PlanRequest, int], PlanRequest]]] = {
    "micro_batch": (1, PlanRequest.with_micro_batch),
    "global_batch": (1, PlanRequest.with_rows),
    "sequence_length": (128, PlanRequest.with_length),
}
"""Numbers of a batch that are halved until it fits: the least, and the request with another one."""
SECONDS, OF_ONE, VAIN_S = 8.0, 2.0, 5.0
"""Seconds of computing after which no other change is looked at; seconds that one plan may take; seconds that it may
take before anything fits.
"""
MOST_NODES = 64
"""Times as many machines as there are, up to which it is looked how many would do."""
ASSUMED = LinkModel(25e9 / 8, 3e-5)
"""Between nodes, where there is one node and nobody has said what would connect it."""


@dataclass
class WouldFit:
    """What would fit in place of a request that does not.

    Args:
        request: that does not fit.
        config: the settings of its run, in nested dataclasses.
        ask: makes the request for other settings; it may raise ``UserError``.
    """

    request: PlanRequest
    config: Any
    ask: Callable[[Any], PlanRequest]
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.thread_time() + SECONDS

    def ways(self) -> Iterator[WayOut]:
        """Every single change that suffices, with its seconds a step; if none does, smaller batches and rows together
        with the last of ``CHANGES``; then how many machines would do.
        """
        none, changes, request = True, (), self.request
        for changes, request in self._changed():
            for way in self._planned(request, changes):
                none = False
                yield way
        smaller = list(self._smaller((), self.request))
        if none and not smaller and changes:
            smaller = list(self._smaller(changes, request))
        yield from smaller
        yield from self._more_machines()

    def _changed(self) -> Iterator[tuple[tuple[Change, ...], PlanRequest]]:
        tried = set[tuple[Change, ...]]()
        for values in CHANGES:
            open_ = ((name, new) for name, (old, new) in values.items() if attrgetter(name)(self.config) == old)
            changes = tuple(Change(name, new) for name, new in open_)
            early = EARLY in changes
            if not changes or changes in tried or self._is_over():
                continue
            if early and (self.request.machine.world_size > 1 or "state" not in self.request.levels):
                continue
            tried.add(changes)
            try:
                request = self.ask(_with(self.config, changes))
            except Exception:  # not for this model, or not here: measuring it may take more than there is
                continue
            given = {name: getattr(self.request, name) for name in ("machine", "memory_bytes", "system_bytes")}
            yield (*changes, UNCLIPPED) if early else changes, replace(request, **given)

    def _smaller(self, changes: tuple[Change, ...], request: PlanRequest) -> Iterator[WayOut]:
        for name, (least, changed) in SMALLER.items():
            now = getattr(request, name)
            if now <= least or not some_fit(changed(request, least), self._is_over):
                continue
            halves = (now >> n for n in count(1))
            for number in takewhile(lambda half, least=least: half >= least, halves):
                if self._is_over():
                    return
                other = changed(request, number)
                if some_fit(other, self._is_over):
                    # A batch of fewer rows than a micro-batch has makes that smaller, too.
                    values = ((key, getattr(other, key)) for key in SMALLER)
                    less = (Change(key, value) for key, value in values if value != getattr(request, key))
                    yield from self._planned(other, (*changes, *less))
                    break

    def _more_machines(self) -> Iterator[WayOut]:
        """The fewest machines like these with which it fits."""
        self._end = max(self._end, time.thread_time() + OF_ONE)
        now = len(self.request.machine.nodes)
        short, enough = now, 2 * now
        while not some_fit(self._on(enough), self._is_over):
            short, enough = enough, 2 * enough
            if enough > now * MOST_NODES or self._is_over():
                return
        while enough - short > 1 and not self._is_over():
            middle = (short + enough) // 2
            short, enough = (short, middle) if some_fit(self._on(middle), self._is_over) else (middle, enough)
        request = self._on(enough)
        link = request.machine.between
        assumed = f", links of {link.bytes_per_s * 8 / 1e9:g} Gbit/s" if link == ASSUMED else ""
        each = max(request.machine.nodes)
        fewest = "" if enough - short == 1 and not self._is_over() else "at most "
        what = f"{fewest}{enough} machines of {each} device{'s' if each > 1 else ''} each{assumed}"
        yield from self._planned(request, (), what)

    def _on(self, nodes: int) -> PlanRequest:
        machine = self.request.machine
        more = (max(machine.nodes),) * (nodes - len(machine.nodes))
        between = machine.between if math.isfinite(machine.between.bytes_per_s) and len(machine.nodes) > 1 else ASSUMED
        return replace(self.request, machine=replace(machine, nodes=(*machine.nodes, *more), between=between))

    def _is_over(self) -> bool:
        return time.thread_time() > self._end

    def _planned(self, request: PlanRequest, changes: tuple[Change, ...], machines: str = "") -> Iterator[WayOut]:
        """Yield what a plan chooses for a request, if anything fits."""
        chosen = Plan.of(request, search(request, most_s=lambda _: OF_ONE, vain_s=VAIN_S)).chosen
        if chosen is not None and chosen.prediction is not None:
            yield WayOut(changes, chosen.seconds, chosen.strategy, chosen.prediction.peak_bytes, machines)


def _with(config: Any, changes: Iterable[Change]) -> Any:
    """The dataclass with other values by their dotted names."""
    for change in changes:
        group, _, rest = change.setting.partition(".")
        inner = getattr(config, group)
        config = replace(config, **{group: _with(inner, [Change(rest, change.value)]) if rest else change.value})
    return config
