"""Orders by simulation: works start one by one, as soon as their inputs have arrived and the memory has space.

``listed`` makes the compute orders. It prefers backward works, then forward works of late stages, with a limit on
micro-batches in flight. ``with_host`` then plays such an order with offloading: it sends the activations of given works
to the CPU memory right after F, and loads them back as soon as the memory has space for all works before. Works wait
until the memory has space for them.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from tawpipe.orders.order_memory import all_end
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import guarded
from tawpipe.schedule.pipelines.work import ROUNDING, Order, PipelineCosts, Work, needs


class _Play:
    """Simulation of works on two lanes (compute and link to the CPU memory) of every position.

    The caller starts each work.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        away: (stage, micro-batch) of the activations that are offloaded.
    """

    def __init__(self, layout: Layout, costs: PipelineCosts, away: Collection[tuple[int, int]] = ()) -> None:
        self.layout, self.costs, self.away, self.table = layout, costs, away, costs.stages(layout)
        self.now = 0.0
        self.times: dict[Work, tuple[float, float]] = {}
        self.held = [0.0] * layout.size
        self.busy = [[False, False] for _ in range(layout.size)]
        self.awake = [True] * layout.size
        """True for positions where something has changed since the last ``woken``. Only these can start a work."""
        self._events: list[tuple[float, int, int, Work | None]] = []
        self._count = count()

    def ready(self, work: Work) -> bool:
        """Return True if all inputs of ``work`` have been computed and have arrived at the present simulated time."""
        place = self.layout.places[work.stage]
        for choice in needs(work, self.layout.stages):
            if choice[0].kind == "R" and (work.stage, work.micro_batch) not in self.away:
                continue
            for need in choice:
                if (span := self.times.get(need)) is not None:
                    if span[1] + self.costs.travel(self.layout.places[need.stage], place) > self.now:
                        return False
                    break
            else:
                return False
        return True

    def fits(self, work: Work) -> bool:
        """Return True if the memory of a work fits in addition to what its position holds."""
        place = self.layout.places[work.stage]
        return self.held[place] + self.table.taken[work.kind, work.stage] <= self.table.limits[place]

    def start(self, work: Work) -> None:
        """Start a work at the present simulated time: occupy its lane and memory, and schedule its end and its arrival.

        The arrival is that of its output on the position of the next stage."""
        place, places = self.layout.places[work.stage], self.layout.places
        end = self.now + self.table.seconds[work.kind, work.stage]
        self.times[work] = self.now, end
        self.held[place] += self.table.taken[work.kind, work.stage]
        self.busy[place][work.kind in "OR"] = True
        heapq.heappush(self._events, (end, next(self._count), place, work))
        following = work.stage + {"F": 1, "B": -1, "I": -1}.get(work.kind, 0)
        if following != work.stage and 0 <= following < len(places):
            arrives = end + self.costs.travel(place, places[following])
            if arrives <= self.now:
                self.awake[places[following]] = True
            heapq.heappush(self._events, (arrives, next(self._count), places[following], None))

    def woken(self) -> Iterator[int]:
        """Yield the positions that may be able to start a work, and mark them as unchanged."""
        for place in range(self.layout.size):
            if self.awake[place]:
                self.awake[place] = False
                yield place

    def advance(self) -> bool:
        """Advance the time to the next end or arrival; return False if there is none."""
        if not self._events:
            return False
        self.now = self._events[0][0]
        while self._events and self._events[0][0] <= self.now:
            _, _, place, work = heapq.heappop(self._events)
            self.awake[place] = True
            if work is not None:
                self.held[place] -= self.table.frees[work.kind, work.stage]
                self.busy[place][work.kind in "OR"] = False
        return True


class _Listed:
    """Selection of the next work on one position. The micro-batches of a stage run in order.

    Args:
        played: the simulation.
        place: the position.
        micro_batches: number of micro-batches.
        caps: maximum number of micro-batches in flight, by stage.
        split: split backward passes into I and W.
        free_memory: memory of the position for activations.
        late: number of waiting W at which a W runs first.
    """

    def __init__(
        self,
        played: _Play,
        place: int,
        micro_batches: int,
        caps: Sequence[int],
        split: bool,
        free_memory: float,
        late: float,
    ):
        self.played, self.micro_batches, self.caps, self.free_memory, self.late = (
            played,
            micro_batches,
            caps,
            free_memory,
            late,
        )
        self.table = played.table
        self.stages = played.layout.stages_of(place)
        self.backward = "I" if split else "B"
        self.next = {(kind, stage): 0 for kind in "FX" for stage in self.stages}
        self.weights: deque[Work] = deque()
        self.order: list[Work] = []

    def choose(self) -> Work | None:
        """Return the work that the position should start now, or None if it should wait. Nothing is started.

        If ``late`` W are waiting, it is the oldest W. Otherwise it is the B or I of the oldest micro-batch, else the F
        of the latest stage, else the oldest W. B, I and F count only if their inputs have arrived, ``caps`` allows the
        F, and all micro-batches in flight can still finish with the memory that is left."""
        if len(self.weights) >= self.late:
            return self.weights[0]
        ready = []
        for stage in self.stages:
            number = self.next["X", stage]
            if number < self.micro_batches and self.played.ready(work := Work(self.backward, stage, number)):
                ready.append(((0, number, -stage), work))
            number = self.next["F", stage]
            flying = number - self.next["X", stage]
            if number < self.micro_batches and flying < self.caps[stage]:
                work = Work("F", stage, number)
                if self.played.ready(work):
                    ready.append(((1, -stage, number), work))
        for _, work in sorted(ready):
            if self._safe(work):
                return work
        return self.weights[0] if self.weights else None

    def started(self, work: Work) -> None:
        """Record that the selected work has started."""
        self.order.append(work)
        if work.kind == "W":
            self.weights.popleft()
            return
        self.next["F" if work.kind == "F" else "X", work.stage] += 1
        if work.kind == "I":
            self.weights.append(Work("W", work.stage, work.micro_batch))

    def _safe(self, work: Work) -> bool:
        """Return True if all micro-batches in flight can still finish after this work, the oldest first."""
        more = self.table.taken[work.kind, work.stage]
        if not more:
            return True
        holds: dict[int, float] = {}
        wants: dict[int, float] = {}
        for stage in self.stages:
            kept = self.table.taken["F", stage]
            parts = self.table.taken["I", stage] if self.backward == "I" else 0.0
            first, last = self.next["X", stage], max(self.next["F", other] for other in self.stages)
            for number in range(first, max(last, work.micro_batch + 1)):
                if number < self.next["F", stage]:
                    holds[number] = holds.get(number, 0.0) + kept
                else:
                    wants[number] = wants.get(number, 0.0) + kept
                wants[number] = max(wants.get(number, 0.0), wants.get(number, 0.0) + parts)
        for waiting in self.weights:
            parts = self.table.taken["I", waiting.stage]
            holds[waiting.micro_batch] = holds.get(waiting.micro_batch, 0.0) + parts
        number = work.micro_batch
        holds[number] = holds.get(number, 0.0) + more
        wants[number] = wants.get(number, 0.0) - more
        free, numbers = self.free_memory - sum(holds.values()), sorted(holds)
        return free >= 0 and all_end(free, [wants.get(m, 0.0) for m in numbers], [holds[m] for m in numbers])


def listed(
    layout: Layout,
    costs: PipelineCosts,
    micro_batches: int,
    caps: Sequence[int],
    split: bool,
    memory: float,
    late: float = math.inf,
) -> tuple[tuple[Work, ...], ...] | None:
    """Simulate list scheduling without offloading; return the compute order of every position.

    None is returned if ``memory`` is too little for all works to finish.

    Args:
        layout: stages and their positions.
        costs: times and memory of the blocks.
        micro_batches: number of micro-batches.
        caps: maximum number of micro-batches in flight, by stage.
        split: split backward passes into I and W.
        memory: memory of a position, instead of ``costs.memory``.
        late: maximum number of W that wait on a position while other works could run.
    """
    played = _Play(layout, costs)
    free_memory = [memory * (1 + ROUNDING) - resident for resident in played.table.resident]
    places = [
        _Listed(played, place, micro_batches, caps, split, free_memory[place], late) for place in range(layout.size)
    ]
    while True:
        for place in played.woken():
            chooser = places[place]
            if not played.busy[place][0] and (work := chooser.choose()) is not None:
                played.start(work)
                chooser.started(work)
        if not played.advance():
            break
    total = micro_batches * layout.stages * (3 if split else 2)
    return tuple(tuple(chooser.order) for chooser in places) if len(played.times) == total else None


def with_host(
    layout: Layout,
    compute: Sequence[Sequence[Work]],
    away: Collection[tuple[int, int]],
    costs: PipelineCosts,
    most: float = math.inf,
) -> Order | None:
    """Add transfers to and from the CPU memory to given compute orders, so that they stay within the memory limit.

    Activations leave right after their F. They return as soon as the memory has space for them and for all works before
    the one that needs them.

    Args:
        layout: stages and their positions.
        compute: compute order of each position.
        away: (stage, micro-batch) of activations that are in the CPU memory between F and B.
        costs: times and memory of the blocks.
        most: maximum time.

    Returns:
        The order, or None if the simulation comes to a halt for lack of memory or takes longer than ``most``.
    """
    played = _Play(layout, costs, away)
    table = played.table
    at = [0] * layout.size
    index = {work: number for works in compute for number, work in enumerate(works)}
    reloads = [[w for w in works if w.kind in "BI" and (w.stage, w.micro_batch) in away] for works in compute]
    offloads: list[deque[Work]] = [deque() for _ in compute]
    host: list[list[Work]] = [[] for _ in compute]

    def reload(place: int) -> Work | None:
        """Return the next R of a position, or None if it cannot start now.

        The memory must have space for it, and for all works before the one that needs it.
        """
        works = compute[place]
        if not reloads[place]:
            return None
        wants = reloads[place][0]
        work = Work("R", wants.stage, wants.micro_batch)
        if not played.ready(work):
            return None
        level = played.held[place] + table.taken["R", work.stage]
        if level > table.limits[place]:
            return None
        if at[place] and played.busy[place][0]:
            last = works[at[place] - 1]
            level -= table.frees[last.kind, last.stage]
        for between in works[at[place] : index[wants]]:
            level += table.taken[between.kind, between.stage]
            if level > table.limits[place]:
                return None
            level -= table.frees[between.kind, between.stage]
        return work

    while True:
        for place in played.woken():
            works = compute[place]
            if not played.busy[place][0] and at[place] < len(works):
                work = works[at[place]]
                if played.ready(work) and played.fits(work):
                    played.start(work)
                    at[place] += 1
                    if work.kind == "F" and (work.stage, work.micro_batch) in away:
                        offloads[place].append(Work("O", work.stage, work.micro_batch))
            if not played.busy[place][1]:
                work = reload(place)
                leaves = offloads[place][0] if offloads[place] and played.ready(offloads[place][0]) else None
                if work and leaves:
                    before = works[at[place] : index[reloads[place][0]]]
                    until = sum(table.seconds[earlier.kind, earlier.stage] for earlier in before)
                    if until > table.seconds["O", leaves.stage] + table.seconds["R", work.stage]:
                        work = None
                work = work or leaves
                if work:
                    (reloads[place].pop(0) if work.kind == "R" else offloads[place].popleft())
                    played.start(work)
                    host[place].append(work)
        if not played.advance() or played.now > most:
            break
    if any(at[place] < len(works) for place, works in enumerate(compute)):
        return None
    order = Order(tuple(map(tuple, compute)), tuple(map(tuple, host)) if any(host) else ())
    return guarded(layout, order, played.times, costs)
