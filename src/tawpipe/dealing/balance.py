"""Documents of uneven lengths dealt to ranks, so that all compute for equally long.

A *bin* is what a rank computes as one micro-batch: whole documents, one behind the other in a row of its own length. A
*round* is the bins that all ranks compute in the same visits; it lasts as long as its longest bin, and what has to be
equal is therefore time, within every round. Rounds need not be alike. A document that would make its round too long, or
that no rank can hold, is *shared*: the bin that holds it is computed by a set of neighbouring ranks, a share each
(pieces.py). A step has ``shared_rounds`` rounds of such bins, one for each set, and ``rounds`` of the others; nothing
else of what it holds is known to its schedule.

Longest first: rounds are given levels from the longest documents on, and a document goes where most time per token is
left below the level, so that the short ones, which take tokens and little time, fill up what the long ones leave.
Several numbers of shared documents are tried and the fastest deal counts. All of it is arithmetic on a few numbers,
alike on every rank; nothing is random.

What must never happen: a document in two bins or in none; a bin above the cap; two ranks that disagree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import NamedTuple

from tawpipe.dealing.speeds import slowest_of
from tawpipe.errors import UserError

USUAL_BIN = 3 / 2
"""Tokens of a bin, in those of the longest document, where nothing else is asked for: something has to stand beside it.
"""
SHARED_COST = 0.05
"""Of the time of a shared document, what its keys cost besides (they are made twice, and gathered)."""
ROOM = 1.03
"""Multiple of the tokens of a step for which there is room at least: a full bin leaves no choice."""
LONG = 0.125
"""A document of this share of the mean time of a rank may be shared."""
SHARE_GAIN = 0.05
"""Of the time of a step, what it must gain to share documents that one rank could hold: ranks of a set wait for each
other in every layer, which is more than the cost above wherever they are disturbed.
"""
ROUND_COST = 0.01
"""Of the time of a step, what a round costs besides: the weights travel once more."""
RISE = 1 / 1024
"""Of the mean time of a rank, what a round rises by at least where nothing finds a place below the levels: bins that
are full leave time there which nothing can use, and every short document would make a round longer by a little.
"""
TRIED = 6
"""Numbers of shared documents that are tried besides those that must be shared."""


def pairs_within(length: int, window: int | None = None) -> int:
    """Pairs of tokens of a document, the square of its length; within a window twice those of which one sees the other.

    >>> pairs_within(10), pairs_within(10, 3)
    (100, 51)
    """
    seen = length if window is None else min(length, window)
    return seen * (2 * length - seen)


def layers_that_keep(
    lengths: Sequence[int], windows: Sequence[int | None], most: int, among: Iterable[int]
) -> frozenset[int]:
    """The layers, counted from 1, that keep what their backward pass would compute again: those that take longest on
    these documents, and of equal ones the last, whose backward pass comes first. Where all keep equally much, no others
    would save more.

    Args:
        windows: of every layer.
        most: so many at most.
        among: the layers that may.
    """
    pairs = {window: sum(pairs_within(length, window) for length in lengths) for window in set(windows)}
    layers = sorted(among, key=lambda layer: (pairs[windows[layer - 1]], layer))
    return frozenset(layers[max(0, len(layers) - most) :])


@dataclass(frozen=True)
class LayerKind:
    """Time that layers of one kind take for a document, in any unit: ``per_token`` and, for every pair of tokens, the
    square of the length where attention sees all of them, ``per_pair``; and ``fixed``, where each is a call of its own.

    Args:
        layers: of this kind.
        window: tokens that a token sees at most.
    """

    layers: int
    per_token: float
    per_pair: float
    window: int | None = None
    fixed: float = 0.0

    def of(self, length: int) -> float:
        """Time of one layer for a document of so many tokens."""
        return self.fixed + self.per_token * length + self.per_pair * pairs_within(length, self.window)


@dataclass(frozen=True)
class LayerTime:
    """Time of a model's layers for a document."""

    kinds: tuple[LayerKind, ...]

    def of(self, length: int) -> float:
        """Time of all layers."""
        return sum(kind.layers * kind.of(length) for kind in self.kinds)


@dataclass(frozen=True)
class Bin:
    """The documents of one micro-batch, by their numbers in the step, the longest first.

    Args:
        ranks: that compute it together.
        part: of its only document the first token and the end, where it is a slice of it.
    """

    documents: tuple[int, ...]
    ranks: int = 1
    part: tuple[int, int] | None = None


class BinsForm(NamedTuple):
    """A dealt step without its documents; fields as of ``Bins.shape`` and ``Bins``."""

    shared: int
    single: int
    slices: tuple[tuple[int, ...], ...] = ()
    orders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bins:
    """A step, dealt.

    Args:
        shared: [rounds][sets] bins that a set computes.
        single: [rounds][ranks] bins of single ranks.
        ranks: of a set.
        lengths: of the documents.
        work: by which they are dealt.
        speeds: of all ranks, that of the fastest being 1; empty where they are alike. Times are those of the fastest.
        positions: of the pipelines to which they are dealt, instead of to ranks.
        stretch: time of the step through these, beside that of ranks that all compute equally long.
        slices: of every pipeline the numbers of slices of documents that are cut: its first bins, in their order.
        orders: of every pipeline the order that is made for these bins, as ``Order`` spells it; empty where the
            strategy's own does.
    """

    shared: tuple[tuple[Bin, ...], ...]
    single: tuple[tuple[Bin, ...], ...]
    ranks: int
    lengths: tuple[int, ...] = field(repr=False)
    work: LayerTime = field(repr=False)
    speeds: tuple[float, ...] = field(default=(), repr=False)
    positions: int = 1
    stretch: float = 0.0
    slices: tuple[tuple[int, ...], ...] = ()
    orders: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """Rounds of shared bins, and of single ones."""
        return len(self.shared), len(self.single)

    @property
    def form(self) -> BinsForm:
        """All that a schedule needs to know."""
        return BinsForm(*self.shape, self.slices, self.orders)

    @property
    def in_words(self) -> str:
        """How many rounds there are, or bins of every pipeline."""
        noun = "round" if self.positions == 1 else "packed micro-batch" + "e" * (sum(self.shape) > 1)
        return f"{sum(self.shape)} {noun}{'s' * (sum(self.shape) > 1)}"

    @property
    def world_size(self) -> int:
        """Ranks that it is dealt to."""
        return len(self.single[0]) if self.single else len(self.shared[0]) * self.ranks

    def of(self, rank: int) -> tuple[Bin, ...]:
        """A rank's, in the order of the rounds."""
        return (*(row[rank // self.ranks] for row in self.shared), *(row[rank] for row in self.single))

    def tokens(self, bin: Bin) -> int:
        """Tokens of a bin, of all ranks that compute it."""
        return sum(end - begin for begin, end in self._spans(bin))

    def pairs(self, bin: Bin) -> int:
        """The sum over its documents of the squared length."""
        return sum(end**2 - begin**2 for begin, end in self._spans(bin))

    def _spans(self, bin: Bin) -> list[tuple[int, int]]:
        return [bin.part] if bin.part else [(0, self.lengths[number]) for number in bin.documents]

    @cached_property
    def seconds(self) -> float:
        """Time of the step: of every round and kind of layer, that of the rank that takes longest."""
        return self.stretch * self.mean_seconds or sum(
            kind.layers * max(self._time(kind, bin) / self._speed(bin, at) for at, bin in enumerate(row))
            for row in (*self.shared, *self.single)
            for kind in self.work.kinds
        )

    @property
    def mean_seconds(self) -> float:
        """Time of the step if all ranks computed equally long, nothing of it twice."""
        return sum(map(self.work.of, self.lengths)) / (sum(self.speeds) or self.world_size) / self.positions

    @property
    def times(self) -> list[list[float]]:
        """[rounds][ranks] time of the bins."""
        return [
            [self.time(bin) / self._speed(bin, at) for at, bin in enumerate(row) for _ in range(bin.ranks)]
            for row in (*self.shared, *self.single)
        ]

    def time(self, bin: Bin) -> float:
        """Time that each of its ranks would need for a bin if it were the fastest."""
        return sum(kind.layers * self._time(kind, bin) for kind in self.work.kinds)

    def _speed(self, bin: Bin, place: int) -> float:
        """Of the ranks that compute a bin, which is at so manieth place of its round."""
        return min(self.speeds[place * bin.ranks : (place + 1) * bin.ranks], default=1.0)

    @cached_property
    def floor(self) -> float:
        """No deal is faster: the mean over all ranks, or the longest document over a set of them, or a pipeline."""
        of = self.work.of
        return max(self.mean_seconds, max(map(of, self.lengths)) / (self.ranks * self.positions))

    @property
    def imbalance(self) -> float:
        """The time beside the floor's; 1 at best."""
        return self.seconds / self.floor

    def _time(self, kind: LayerKind, bin: Bin) -> float:
        cost = 1 + SHARED_COST if bin.ranks > 1 else 1
        return cost / bin.ranks * sum(kind.of(end) - (kind.of(begin) - kind.fixed) for begin, end in self._spans(bin))


def deal(
    lengths: Sequence[int],
    *,
    world_size: int,
    cap: int,
    work: LayerTime,
    ranks: int = 1,
    speeds: tuple[float, ...] = (),
    rounds: int = 0,
) -> Bins:
    """Deal the documents of a step.

    Args:
        lengths: of the documents, in tokens.
        cap: tokens of a bin at most, for every rank that computes it.
        ranks: of a set; 1 for no sharing.
        speeds: of all ranks, see ``Bins``.
        rounds: so many at least of single ranks, if there are as many documents.

    Raises:
        UserError: a document is longer than a bin can be, or has no token; or there is none.
    """
    assert world_size % ranks == 0
    if not lengths or min(lengths) < 1:
        raise UserError("documents", min(lengths, default="none"), "at least one document, each of at least one token")
    if (longest := max(lengths)) > cap * ranks:
        together = f" over {ranks} processes" if ranks > 1 else ""
        raise UserError("documents", f"one of {longest} tokens", f"at most {cap * ranks}, one micro-batch{together}")
    times = [work.of(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    deals: list[tuple[float, Bins]] = []
    for count in _numbers_shared(order, lengths, times, cap, ranks, world_size):
        filled = _Filling(lengths, times, cap, world_size, ranks, speeds)
        filled.share(order[:count])
        filled.place(order[count:], rounds)
        bins = filled.bins(work)
        dearer = SHARE_GAIN if deals else 0.0  # the first shares what it must
        deals.append((bins.seconds * (1 + ROUND_COST * sum(bins.shape)) * (1 + dearer), bins))
    return min(deals, key=lambda dealt: dealt[0])[1]


def _numbers_shared(
    order: Sequence[int], lengths: Sequence[int], times: Sequence[float], cap: int, ranks: int, world_size: int
) -> Sequence[int]:
    """How many of the longest documents may be shared: those that must be, and some that would make rounds long."""
    must = sum(length > cap for length in lengths)
    if ranks == 1:
        return [must]
    fair = sum(times) / world_size
    long = max(must, sum(time > fair * LONG for time in times))
    return sorted({must + ceil((long - must) * part / TRIED) for part in range(TRIED + 1)})


class _Filling:
    """Bins that are being filled, those of one round one after the other, shared ones first.

    Times are those of one rank, the fastest, but for bins: theirs are longer on slower ranks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        times: Sequence[float],
        cap: int,
        world_size: int,
        ranks: int,
        speeds: tuple[float, ...],
    ) -> None:
        self.lengths, self.times, self.cap = lengths, times, cap
        self.world_size, self.ranks, self.speeds = world_size, ranks, speeds
        each = speeds or (1.0,) * world_size
        self.single = [1 / speed for speed in each]
        self.sets = slowest_of(each, ranks)
        self.factor = [(1 + SHARED_COST) / ranks / speed for speed in self.sets]
        """Of every set, what a document takes beside one rank."""
        self.mean = sum(times) / sum(each)
        self.shared = 0
        self.levels: list[float] = []
        """Of every round, the time of its longest bin."""
        self.documents: list[list[int]] = []

    def share(self, numbers: Sequence[int]) -> None:
        """Put documents into bins of sets; a new round begins where every bin would get longer than the round."""
        sets, room = self.world_size // self.ranks, self.cap * self.ranks
        needed = max(1, ceil(sum(self.lengths[number] for number in numbers) * ROOM / (room * sum(self.sets))))
        fair = sum(self.times[number] for number in numbers) / sum(1 / factor for factor in self.factor) / needed
        time: list[float] = []
        tokens: list[int] = []
        for number in numbers:
            length, costs = self.lengths[number], [self.times[number] * factor for factor in self.factor]
            levels = [max(self.levels[at // sets], fair) for at in range(len(time))]
            after = [before + costs[at % sets] for at, before in enumerate(time)]
            fitting = [at for at, end in enumerate(after) if tokens[at] + length <= room and end <= levels[at]]
            if not fitting:
                fitting = [len(time) + costs.index(min(costs))]
                time += [0.0] * sets
                tokens += [0] * sets
                self.levels.append(0.0)
                self.documents += [[] for _ in range(sets)]
            at = min(fitting, key=lambda place: time[place] + costs[place % sets])
            self.documents[at].append(number)
            time[at] += costs[at % sets]
            tokens[at] += length
            self.levels[at // sets] = max(self.levels[at // sets], time[at])
        self.shared = len(self.levels)

    def place(self, numbers: Sequence[int], least: int = 0) -> None:
        """Put the other documents where there is room, in as few rounds of single ranks as hold them."""
        if not numbers:
            return
        taken = sum(self.lengths[number] for bin in self.documents for number in bin)
        tokens = sum(self.lengths[number] for number in numbers)
        room = self.cap * (sum(self.speeds) or self.world_size)  # a slow rank is done before its bin is full
        rounds = max(least, ceil(((tokens + taken) * ROOM) / room) - self.shared)
        while not self._placed(numbers, rounds):
            rounds += 1

    def _placed(self, numbers: Sequence[int], rounds: int) -> bool:
        """Place them with so many rounds of single ranks; False if they find no room."""
        sets, world = self.world_size // self.ranks, self.world_size
        of_sets = self.shared * sets
        levels = [*self.levels, *[0.0] * rounds]
        documents = [*map(list, self.documents), *([] for _ in range(rounds * world))]
        places = range(len(documents))
        round_of = [at // sets if at < of_sets else self.shared + (at - of_sets) // world for at in places]
        ranks = [self.ranks if at < of_sets else 1 for at in places]
        factor = [self.factor[at % sets] if at < of_sets else self.single[(at - of_sets) % world] for at in places]
        time = [sum(self.times[number] for number in documents[at]) * factor[at] for at in places]
        room = [self.cap * ranks[at] - sum(self.lengths[number] for number in documents[at]) for at in places]
        water = self._water(levels)

        def free(at: int) -> tuple[float, int]:
            """Time below the level for every token that there is room for; the most comes first."""
            left = (water[round_of[at]] - time[at]) / factor[at]
            return (-left / room[at] if room[at] else math.inf), at

        freest = sorted(map(free, places))
        full: list[tuple[float, int]] = []
        late: list[tuple[float, int]] = []
        """Bins that come again when documents are short enough for the room, or the time, that is left in them."""
        for number in numbers:
            length, cost, chosen = self.lengths[number], self.times[number], -1
            for asleep, needed in ((full, length), (late, cost)):
                while asleep and -asleep[0][0] >= needed:
                    heapq.heappush(freest, free(heapq.heappop(asleep)[1]))
            while freest and chosen < 0:
                _, at = heapq.heappop(freest)
                left = (water[round_of[at]] - time[at]) / factor[at]
                if room[at] < length:
                    heapq.heappush(full, (-room[at], at))
                elif left < cost:
                    heapq.heappush(late, (-left, at))
                else:
                    chosen = at
            rises = chosen < 0
            if rises:
                over = [(time[at] + cost * factor[at] - water[round_of[at]], at) for at in places if room[at] >= length]
                if not over:
                    return False
                chosen = min(over)[1]
            documents[chosen].append(number)
            time[chosen] += cost * factor[chosen]
            room[chosen] -= length
            i = round_of[chosen]
            levels[i] = max(levels[i], time[chosen], (water[i] + self.mean * RISE) if rises else 0.0)
            if rises:
                water = self._water(levels)
                freest, full, late = sorted(map(free, places)), [], []
            else:
                heapq.heappush(freest, free(chosen))
        self.levels, self.documents = levels, documents
        return True

    def _water(self, levels: Sequence[float]) -> list[float]:
        """Levels that hold the work of the step, none below that of its round: the lowest ones are filled up alike."""
        left, rising = self.mean, sorted(levels)
        while len(rising) > 1 and rising[-1] > left / len(rising):
            left -= rising.pop()
        return [max(level, left / len(rising)) for level in levels]

    def bins(self, work: LayerTime) -> Bins:
        sets = self.world_size // self.ranks
        cut = self.shared * sets
        shared = [Bin(tuple(numbers), self.ranks) for numbers in self.documents[:cut]]
        single = [Bin(tuple(numbers)) for numbers in self.documents[cut:]]
        rows = _rows(shared, sets), _rows(single, self.world_size)
        return Bins(*rows, self.ranks, tuple(self.lengths), work, self.speeds)


def _rows(bins: Sequence[Bin], size: int) -> tuple[tuple[Bin, ...], ...]:
    rows = (tuple(bins[at : at + size]) for at in range(0, len(bins), size))
    return tuple(row for row in rows if any(bin.documents for bin in row))
