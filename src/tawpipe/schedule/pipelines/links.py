"""A clock for one pipeline whose bins take different times and whose boundaries share links.

What leaves a node shares its link with what else leaves there, and with what else comes to where it goes, in equal
parts, as the house's clock has it (simulate/network.py). That one knows lanes and actions and takes a hundred times as
long: orders that are made for a step's own bins are compared by this one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, needs


class LaneLoad(NamedTuple):
    """What the bins of a pipeline are beside the mean bin, for which costs are.

    Args:
        times, sizes: of every bin how often as long it computes, and as long its boundary passes a link.
        beside: of the time of a mean bin, what any costs besides its own: half of it every work.
    """

    times: Sequence[float]
    sizes: Sequence[float]
    beside: float = 0.0

    def placed(self, places: Sequence[int]) -> LaneLoad:
        """Of the bins with these numbers."""
        times, sizes = ([numbers[place] for place in places] for numbers in (self.times, self.sizes))
        return self._replace(times=times, sizes=sizes)


Listed = Callable[[Order, tuple[int, ...], LaneLoad, int], Order]
"""What makes an order for the bins of a pipeline of which the first are slices, see ``search.slicing.listed``."""


Link = tuple[int, int]
"""From one position to another."""


@dataclass(slots=True)
class _Flow:
    """A boundary on its way, to a work with this number: ``left`` of its time were left at ``since``."""

    number: int
    left: float
    since: float
    rate: float = 0.0
    version: int = 0


class Linked:
    """Works, what each waits for, and how long it and what it sends take.

    Args:
        works: of a whole step of a pipeline.
        slices: of how many bins every document is that is cut, the first bins: these pass a stage in turn.
    """

    def __init__(
        self, layout: Layout, costs: PipelineCosts, works: Iterable[Work], load: LaneLoad, slices: Sequence[int] = ()
    ) -> None:
        self.works, self.size, table = [*works], layout.size, costs.stages(layout).seconds
        numbers = {work: number for number, work in enumerate(self.works)}
        self.places = [layout.places[work.stage] for work in self.works]
        beside = [load.beside * (table["F", s] + table["B", s]) / 2 for s in range(layout.stages)]
        self.seconds = [table[kind, stage] * load.times[m] + beside[stage] for kind, stage, m in self.works]
        self.sizes = [load.sizes[work.micro_batch] for work in self.works]
        self.followers: list[list[int]] = [[] for _ in self.works]
        self.missing = [0] * len(self.works)
        parts = (range(end - size, end) for size, end in zip(slices, accumulate(slices), strict=True))
        before = {later: earlier for part in parts for earlier, later in pairwise(part)}
        after = {earlier: later for later, earlier in before.items()}
        for number, work in enumerate(self.works):
            waits = [need for choice in needs(work, layout.stages) for need in choice]
            kind, stage, m = work
            if kind == "F" and m in before:
                waits.append(Work("F", stage, before[m]))
            elif kind in "BI" and m in after:
                waits += [Work(other, stage, after[m]) for other in "BI"]
            for need in waits:
                if need in numbers:
                    self.followers[numbers[need]].append(number)
                    self.missing[number] += 1
        nodes, far = costs.nodes or range(layout.size), costs.link or costs.hop
        self.passing_s, self.ports = dict[Link, float](), dict[Link, tuple[object, ...]]()
        for a, b in (pair for pair in pairwise(layout.places) if pair[0] != pair[1]):
            for link in ((a, b), (b, a)):
                apart = nodes[a] != nodes[b]
                self.passing_s[link] = far if apart else costs.near_hop
                self.ports[link] = (("out", nodes[link[0]]), ("in", nodes[link[1]])) if apart else (link,)

    def run(self, ready: Callable[[int], None], chosen: Callable[[int], int | None]) -> float:
        """The time of the step.

        Args:
            ready: is told of every work that has all that it waits for.
            chosen: of a position that is free, what it does next.
        """
        missing, places, now, ended = [*self.missing], self.places, 0.0, 0.0
        awake, busy, events = dict.fromkeys(range(self.size)), set[int](), list[tuple[float, int, Link | None, int]]()
        flows, behind = dict[Link, _Flow](), defaultdict[Link, deque[_Flow]](deque)
        on = defaultdict[object, dict[Link, None]](dict)

        def come(number: int) -> None:
            missing[number] -= 1
            if not missing[number]:
                ready(number)
                awake[places[number]] = None

        def begin(link: Link, flow: _Flow) -> None:
            flows[link] = flow
            for port in self.ports[link]:
                on[port][link] = None
            share(link)

        def share(changed: Link) -> None:
            for link in {other: None for port in self.ports[changed] for other in on[port]}:
                flow = flows[link]
                flow.left, flow.since = flow.left - flow.rate * (now - flow.since), now
                flow.rate = 1 / max(len(on[port]) for port in self.ports[link])
                flow.version += 1
                heappush(events, (now + max(0.0, flow.left) / flow.rate, flow.version, link, flow.number))

        for number, count in enumerate(missing):
            if not count:
                ready(number)
        while True:
            for place in awake:
                if place not in busy and (number := chosen(place)) is not None:
                    busy.add(place)
                    heappush(events, (now + self.seconds[number], 0, None, number))
            awake.clear()
            if not events:
                return ended
            now = events[0][0]
            while events and events[0][0] <= now:
                _, version, link, number = heappop(events)
                if link is not None:
                    if link in flows and (flows[link].number, flows[link].version) == (number, version):
                        ended = now
                        del flows[link]
                        for port in self.ports[link]:
                            del on[port][link]
                        begin(link, behind[link].popleft()) if behind[link] else share(link)
                        come(number)
                    continue
                ended, place = now, places[number]
                busy.remove(place)
                awake[place] = None
                for other in self.followers[number]:
                    link = place, places[other]
                    if link[0] == link[1] or not (time := self.passing_s[link] * self.sizes[number]):
                        come(other)
                        continue
                    flow = _Flow(other, time, now)
                    behind[link].append(flow) if link in flows else begin(link, flow)


def played(layout: Layout, order: Order, costs: PipelineCosts, load: LaneLoad) -> float:
    """The time of a step in an order, without what passes to a host's memory."""
    linked = Linked(layout, costs, [work for works in order.compute for work in works], load)
    ends = [*accumulate(map(len, order.compute))]
    following = [iter(range(end - len(works), end)) for works, end in zip(order.compute, ends, strict=True)]
    heads, there = [next(numbers, None) for numbers in following], set[int]()

    def chosen(place: int) -> int | None:
        head = heads[place]
        if head not in there:
            return None
        heads[place] = next(following[place], None)
        return head

    return linked.run(there.add, chosen)
