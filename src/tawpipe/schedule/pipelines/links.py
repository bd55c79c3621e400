"""Clock for one pipeline whose packed micro-batches take different times and whose boundaries share links.

A transfer that leaves a node shares the node's link in equal parts with other transfers that leave it, and with
transfers that enter the receiving node. The full clock (simulate/network.py) shares links in the same way, but it knows
lanes and actions and takes a hundred times longer. So orders made for one step's packed micro-batches are compared by
this clock.
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
    """Times and sizes of a pipeline's packed micro-batches, relative to the mean packed micro-batch of the costs.

    Args:
        times: for every packed micro-batch its computing time / the mean time.
        sizes: for every packed micro-batch its transfer time / the mean transfer time.
        beside: fixed time of a packed micro-batch / the mean time. Each work item has half of it.
    """

    times: Sequence[float]
    sizes: Sequence[float]
    beside: float = 0.0

    def placed(self, places: Sequence[int]) -> LaneLoad:
        """Return this load with only the packed micro-batches at ``places``, in that order."""
        times, sizes = ([numbers[place] for place in places] for numbers in (self.times, self.sizes))
        return self._replace(times=times, sizes=sizes)


Listed = Callable[[Order, tuple[int, ...], LaneLoad, int], Order]
"""Function that makes an order for a pipeline's packed micro-batches of which the first are document slices. Its
arguments are the usual order, the slices of each document, the load, and the number of work items that it may try, see
``orders.slicing.listed``."""


Link = tuple[int, int]
"""Connection from one position to another."""


@dataclass(slots=True)
class _Flow:
    """A boundary activation in transfer.

    Args:
        number: number of the work item that waits for it.
        left: time of the transfer that was left at ``since``, at full rate.
        since: time at which ``left`` was computed.
        rate: present share of the link.
        version: number of changes of the rate, to recognise outdated events.
    """

    number: int
    left: float
    since: float
    rate: float = 0.0
    version: int = 0


class Linked:
    """Work items of one step of a pipeline, with their dependencies, times and transfer times.

    Args:
        layout: the stages and their positions.
        costs: costs of the mean packed micro-batch.
        works: all work items of the step.
        load: times and sizes of the packed micro-batches.
        slices: number of slices of every cut document. Its slices are the first packed micro-batches, and they pass
            each stage in order.
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
        """Simulate the step, with transfers that share links, and return the time at which it ends.

        Each position runs one work item at a time. When a position becomes free, or one of its items becomes ready,
        ``chosen`` selects its next item. The step ends with its last work item or transfer.

        Args:
            ready: function that is called with the number of each work item once all its dependencies have ended.
            chosen: function that returns the number of the item that a free position runs next, or None to wait.
        """
        missing, places, now, ended = [*self.missing], self.places, 0.0, 0.0
        awake, busy, events = dict.fromkeys(range(self.size)), set[int](), list[tuple[float, int, Link | None, int]]()
        flows, behind = dict[Link, _Flow](), defaultdict[Link, deque[_Flow]](deque)
        on = defaultdict[object, dict[Link, None]](dict)

        def come(number: int) -> None:
            """Count one dependency of a work item as ended; after the last one the item is ready."""
            missing[number] -= 1
            if not missing[number]:
                ready(number)
                awake[places[number]] = None

        def begin(link: Link, flow: _Flow) -> None:
            """Start a transfer on ``link``, and recompute the rates of all transfers that share a port with it."""
            flows[link] = flow
            for port in self.ports[link]:
                on[port][link] = None
            share(link)

        def share(changed: Link) -> None:
            """Recompute the rates and ends of all transfers that share a port with ``changed``, at the present time."""
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
    """Simulate one pipeline's step in ``order``, with transfers that share links, and return its time.

    Offloading is ignored. The time is in the unit of ``costs``.

    Args:
        layout: the stages and their positions.
        order: the order to simulate.
        costs: costs of a packed micro-batch of mean size.
        load: times and sizes of the packed micro-batches.
    """
    linked = Linked(layout, costs, [work for works in order.compute for work in works], load)
    ends = [*accumulate(map(len, order.compute))]
    following = [iter(range(end - len(works), end)) for works, end in zip(order.compute, ends, strict=True)]
    heads, ready = [next(numbers, None) for numbers in following], set[int]()

    def chosen(place: int) -> int | None:
        """Return the number of the next item of a position's order and advance to the one after it.

        Returns None, and does not advance, if a dependency of the item has not ended or no item is left."""
        head = heads[place]
        if head not in ready:
            return None
        heads[place] = next(following[place], None)
        return head

    return linked.run(ready.add, chosen)
