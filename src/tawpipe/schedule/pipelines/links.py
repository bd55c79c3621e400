"""A clock for one pipeline whose bins take different times and whose boundaries share links.

What leaves a node shares its link with what else leaves there, and with what else comes to where it goes, in equal
parts, as the house's clock has it (simulate/network.py). That one knows lanes and actions and takes a hundred times as
long: orders that are made for a step's own bins are compared by this one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import Order, PipelineCosts, Work, needs


class Load(NamedTuple):
    """What the bins of a pipeline are beside the mean bin, for which costs are.

    Args:
        times, sizes: of every bin how often as long it computes, and as long its boundary passes a link.
        beside: of the time of a mean bin, what any costs besides its own: half of it every work.
    """

    times: Sequence[float]
    sizes: Sequence[float]
    beside: float = 0.0

    def placed(self, places: Sequence[int]) -> Load:
        """Of the bins with these numbers."""
        times, sizes = ([numbers[place] for place in places] for numbers in (self.times, self.sizes))
        return self._replace(times=times, sizes=sizes)


Listed = Callable[[Order, tuple[int, ...], Load, int], Order]
"""What makes an order for the bins of a pipeline of which the first are slices, see ``search.slicing.listed``."""


class Linked:
    """Works, what each waits for, and how long it and what it sends take.

    Args:
        works: of a whole step of a pipeline.
        slices: of how many bins every document is that is cut, the first bins: these pass a stage in turn.
    """

    def __init__(
        self, layout: Layout, costs: PipelineCosts, works: Iterable[Work], load: Load, slices: Sequence[int] = ()
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
        self._ports = dict[tuple[int, int], tuple[float, tuple[tuple[str, int], ...]]]()
        nodes = costs.nodes or range(layout.size)
        for a, b in {pair for pair in pairwise(layout.places) if pair[0] != pair[1]}:
            for link in ((a, b), (b, a)):
                far = nodes[a] != nodes[b]
                time = (costs.link or costs.hop) if far else costs.near_hop
                ports = (("out", nodes[link[0]]), ("in", nodes[link[1]])) if far else ()
                self._ports[link] = float(time), ports

    def run(self, ready: Callable[[int], None], chosen: Callable[[int], int | None]) -> float:
        """The time of the step.

        Args:
            ready: is told of every work that has all that it waits for.
            chosen: of a position that is free, what it does next.
        """
        missing, places, now = [*self.missing], self.places, 0.0
        running = dict[int, tuple[float, int]]()
        passing, behind = dict[tuple[int, int], list[float]](), defaultdict[tuple[int, int], deque](deque)
        rates, awake = dict[tuple[int, int], float](), set(range(self.size))

        def come(number: int) -> None:
            missing[number] -= 1
            if not missing[number]:
                ready(number)
                awake.add(places[number])

        for number, count in enumerate(missing):
            if not count:
                ready(number)
        while True:
            for place in awake:
                if place not in running and (number := chosen(place)) is not None:
                    running[place] = now + self.seconds[number], number
            awake.clear()
            ends = [end for end, _ in running.values()]
            ends += [now + left / rates[link] for link, (left, _) in passing.items()]
            if not ends:
                return now
            spent, now = min(ends) - now, min(ends)
            changed = False
            for link, flow in [*passing.items()]:
                flow[0] -= rates[link] * spent
                if flow[0] <= 1e-12 * (1 + now):
                    changed = True
                    come(int(flow[1]))
                    if behind[link]:
                        passing[link] = behind[link].popleft()
                    else:
                        del passing[link]
            for place, (end, number) in [*running.items()]:
                if end > now:
                    continue
                del running[place]
                awake.add(place)
                for other in self.followers[number]:
                    link = place, places[other]
                    if link[0] == link[1]:
                        come(other)
                        continue
                    flow = [self._ports[link][0] * self.sizes[number], other]
                    if link in passing:
                        behind[link].append(flow)
                    else:
                        passing[link], changed = flow, True
            if changed:
                there = defaultdict[tuple[str, int], int](int)
                for link in passing:
                    for port in self._ports[link][1]:
                        there[port] += 1
                rates = {link: 1 / max((there[port] for port in self._ports[link][1]), default=1) for link in passing}


def played(layout: Layout, order: Order, costs: PipelineCosts, load: Load) -> float:
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
