"""Changes with which a request would fit that does not: single settings, then smaller batches, then more machines."""

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
    {"lora.rank": (None, 16), "quantize": ("auto", "nf4")},
    {"schedule.sequence_chunk": (0, 2048)},
    {"schedule.early_updates": (False, True)},
)
"""Changes of settings that need less memory, in the order of the answer: setting -> (value now, value to try). A plan
chooses open settings itself. To try a further change, add a line."""
EARLY, UNCLIPPED = Change("schedule.early_updates", True), Change("optimizer.clip_norm", 0)
"""``EARLY`` saves memory on one device without gradient clipping (``UNCLIPPED``): gradients then need no home in host
memory."""
SMALLER: Mapping[str, tuple[int, Callable[[PlanRequest, int], PlanRequest]]] = {
    "micro_batch": (1, PlanRequest.with_micro_batch),
    "global_batch": (1, PlanRequest.with_rows),
    "sequence_length": (128, PlanRequest.with_length),
}
"""Numbers of the batch that are halved until it fits: the least value, and the function that returns the changed
request. Each is changed alone."""
SECONDS, OF_ONE, VAIN_S = 8.0, 2.0, 5.0
"""Seconds of CPU time after which no further change is tried (``SECONDS``), limit of one plan (``OF_ONE``), and limit
of a plan before anything fits (``VAIN_S``)."""
MOST_NODES = 64
"""Largest multiple of the present machines that is tried."""
ASSUMED = LinkModel(25e9 / 8, 3e-5)
"""Assumed link between nodes, if there is one node and no link is known."""


@dataclass
class WouldFit:
    """Search for changes with which a request would fit.

    Args:
        request: the request that does not fit.
        config: settings of its run, in nested dataclasses.
        ask: makes the request for other settings; may raise ``UserError``.
    """

    request: PlanRequest
    config: Any
    ask: Callable[[Any], PlanRequest]
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        self._end = time.thread_time() + SECONDS

    def ways(self) -> Iterator[WayOut]:
        """Yield the changes with which the run fits, with predicted seconds, until the time is over.

        Every setting change that suffices alone is yielded first, then smaller batches. If nothing has fitted yet,
        batches are also made smaller together with the last of ``CHANGES``. The last entry is the number of machines
        that would suffice."""
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
        """Yield (setting changes, resulting request) for each entry of ``CHANGES`` that applies to this run.

        An entry applies if its settings have the values that it replaces, and if the request can be made with the new
        ones."""
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
            except Exception:  # not for this model, or measuring it needs more memory than is free
                continue
            machine_values = {name: getattr(self.request, name) for name in ("machine", "memory_bytes", "system_bytes")}
            yield (*changes, UNCLIPPED) if early else changes, replace(request, **machine_values)

    def _smaller(self, changes: tuple[Change, ...], request: PlanRequest) -> Iterator[WayOut]:
        """Yield smaller batches that fit, each with one number halved until some strategy fits.

        Args:
            changes: setting changes that ``request`` contains; they are part of every result.
            request: the request that does not fit.
        """
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
                    # A global batch below the micro-batch makes the micro-batch smaller, too.
                    values = ((key, getattr(other, key)) for key in SMALLER)
                    less = (Change(key, value) for key, value in values if value != getattr(request, key))
                    yield from self._planned(other, (*changes, *less))
                    break

    def _more_machines(self) -> Iterator[WayOut]:
        """Yield the smallest number of machines with which the request fits; nothing if none is found in time.

        Doubles the number until the request fits, then halves the interval."""
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
        assumed = f", links of {link.bytes_per_s * 8 / 1e9:.3g} Gbit/s" if link == ASSUMED else ""
        each = max(request.machine.nodes)
        fewest = "" if enough - short == 1 and not self._is_over() else "at most "
        what = f"{fewest}{enough} machines of {each} device{'s' if each > 1 else ''} each{assumed}"
        yield from self._planned(request, (), what)

    def _on(self, nodes: int) -> PlanRequest:
        """Return the request on ``nodes`` machines; additional ones are as large as the largest present one."""
        machine = self.request.machine
        more = (max(machine.nodes),) * (nodes - len(machine.nodes))
        between = machine.between if math.isfinite(machine.between.bytes_per_s) and len(machine.nodes) > 1 else ASSUMED
        return replace(self.request, machine=replace(machine, nodes=(*machine.nodes, *more), between=between))

    def _is_over(self) -> bool:
        """Return True if the time for trying changes is over."""
        return time.thread_time() > self._end

    def _planned(self, request: PlanRequest, changes: tuple[Change, ...], machines: str = "") -> Iterator[WayOut]:
        """Search a plan for ``request`` and yield its choice as a way out; nothing if nothing fits."""
        chosen = Plan.of(request, search(request, most_s=lambda _: OF_ONE, vain_s=VAIN_S)).chosen
        if chosen is not None and chosen.prediction is not None:
            yield WayOut(changes, chosen.seconds, chosen.strategy, chosen.prediction.peak_bytes, machines)


def _with(config: Any, changes: Iterable[Change]) -> Any:
    """Return a copy of the nested dataclass with the values of ``changes`` (dotted setting names)."""
    for change in changes:
        group, _, rest = change.setting.partition(".")
        inner = getattr(config, group)
        config = replace(config, **{group: _with(inner, [Change(rest, change.value)]) if rest else change.value})
    return config
