"""Assign documents of uneven lengths to ranks so that all ranks compute equally long.

A *bin* (packed micro-batch) is what a rank computes as one micro-batch: whole documents, one behind the other in a row
of its own length. A *round* contains the bins that all ranks compute in the same visits. A round lasts as long as its
longest bin, so time has to be equal within every round; different rounds may differ. A document that would make its
round too long, or that no rank can hold, is *shared*: its bin is computed by a context-parallel group of neighbouring
ranks, one share each (schedule/pieces.py). A step has a number of rounds of shared bins, one bin per group, then a
number of rounds of single bins. The schedule depends on these two numbers only.

Documents are placed longest first. Rounds get a target time (level) from the longest documents. A document is put where
most time per free token is left below the level. So the short ones, which take tokens but little time, fill what the
long ones leave. Several numbers of shared documents are tried, and the fastest assignment is used. The computation is
deterministic, and equal on every rank.

Invariants: every document is in exactly one bin, no bin exceeds the cap, all ranks agree."""

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

USUAL_PACK = 3 / 2
"""Default tokens of a bin, relative to the longest document, so that other documents fit beside it."""
SHARED_COST = 0.05
"""Extra cost of a shared document, relative to its time: its keys are computed twice, and gathered."""
CAPACITY_MARGIN = 1.03
"""Least capacity of all bins, relative to the tokens of the step. Bins that had to be completely full would leave no
choice."""
LONG = 0.125
"""Share of the mean time of a rank from which on a document may be shared."""
SHARE_GAIN = 0.05
"""Share of the step time that sharing documents must gain if single ranks could hold them. Ranks of a group wait for
each other in every layer, which costs more than ``SHARED_COST`` if one of them is delayed."""
ROUND_COST = 0.01
"""Extra cost of a round, relative to the step time: the weights are sent once more."""
RISE = 1 / 1024
"""Least increase of a round's level if no document fits below the levels, relative to the mean time of a rank. Full
bins leave time that nothing can use, so that otherwise every short document would raise a level by very little."""
TRIED = 6
"""Numbers of shared documents that are tried, besides the number that must be shared."""


def pairs_within(length: int, window: int | None = None) -> int:
    """Return the pairs of tokens of a document: its squared length.

    With a window, twice the number of pairs in which one token sees the other.

    >>> pairs_within(10), pairs_within(10, 3)
    (100, 51)
    """
    seen = length if window is None else min(length, window)
    return seen * (2 * length - seen)


def layers_that_keep(
    lengths: Sequence[int], windows: Sequence[int | None], most: int, among: Iterable[int]
) -> frozenset[int]:
    """Choose the layers, counted from 1, that keep activations which their backward pass would otherwise recompute.

    These are the ``most`` layers of ``among`` that take longest on the documents; of equal ones the last, whose
    backward pass is first. If all keep equal amounts, no other choice saves more time.

    Args:
        lengths: lengths of the documents, in tokens.
        windows: attention window of every layer.
        most: largest number of layers.
        among: layers to choose from.
    """
    pairs = {window: sum(pairs_within(length, window) for length in lengths) for window in set(windows)}
    layers = sorted(among, key=lambda layer: (pairs[windows[layer - 1]], layer))
    return frozenset(layers[max(0, len(layers) - most) :])


@dataclass(frozen=True)
class LayerKind:
    """Time that one kind of layer takes for a document, in any unit.

    Args:
        layers: number of layers of this kind.
        per_token: time per token.
        per_pair: time per pair of tokens, see ``pairs_within``.
        window: most tokens that a token attends to; None if unlimited.
        fixed: time per document, if each document is a separate call.
    """

    layers: int
    per_token: float
    per_pair: float
    window: int | None = None
    fixed: float = 0.0

    def of(self, length: int) -> float:
        """Return the time of one layer for a document of ``length`` tokens."""
        return self.fixed + self.per_token * length + self.per_pair * pairs_within(length, self.window)


@dataclass(frozen=True)
class LayerTime:
    """Time that all layers of a model take for a document."""

    kinds: tuple[LayerKind, ...]

    def of(self, length: int) -> float:
        """Return the time of all layers for a document of ``length`` tokens."""
        return sum(kind.layers * kind.of(length) for kind in self.kinds)


@dataclass(frozen=True)
class Pack:
    """Packed micro-batch: the numbers of its documents in the step, longest first.

    Args:
        ranks: ranks that compute it together.
        part: first token and end, if the bin is a slice of its only document; None for whole documents.
    """

    documents: tuple[int, ...]
    ranks: int = 1
    part: tuple[int, int] | None = None


class PacksForm(NamedTuple):
    """Shape of an assigned step, without its documents; fields as in ``Packs.shape`` and ``Packs``."""

    shared: int
    single: int
    slices: tuple[tuple[int, ...], ...] = ()
    orders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packs:
    """Step whose documents are assigned to ranks or pipelines.

    Args:
        shared: [rounds][groups] bins of context-parallel groups.
        single: [rounds][ranks] bins of single ranks.
        ranks: ranks of a context-parallel group.
        lengths: lengths of the documents.
        work: time of documents, by which they were assigned.
        speeds: speed of every rank (fastest = 1); empty if all are equal. Times hold for the fastest rank.
        positions: ranks of one pipeline, if documents are assigned to pipelines; else 1.
        stretch: time of a step through pipelines, relative to ranks that all compute equally long; 0 without pipelines.
        slices: for every pipeline, the number of slices of each document that is cut. The slices are its first bins, in
            order.
        orders: for every pipeline, the order that is made for its bins, as ``Order`` spells it; empty to use the
            strategy's order.
    """

    shared: tuple[tuple[Pack, ...], ...]
    single: tuple[tuple[Pack, ...], ...]
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
        """(Number of rounds of shared bins, number of rounds of single bins)."""
        return len(self.shared), len(self.single)

    @property
    def form(self) -> PacksForm:
        """Facts of the assignment on which a step's schedule depends, without the documents."""
        return PacksForm(*self.shape, self.slices, self.orders)

    @property
    def in_words(self) -> str:
        """Number of rounds, or of bins per pipeline, as a phrase."""
        noun = "round" if self.positions == 1 else "packed micro-batch" + "e" * (sum(self.shape) > 1)
        return f"{sum(self.shape)} {noun}{'s' * (sum(self.shape) > 1)}"

    @property
    def world_size(self) -> int:
        """Number of ranks, or pipelines, to which documents are assigned."""
        return len(self.single[0]) if self.single else len(self.shared[0]) * self.ranks

    def of(self, rank: int) -> tuple[Pack, ...]:
        """Return the bins of one rank (or pipeline), in the order of the rounds: shared ones first."""
        return (*(row[rank // self.ranks] for row in self.shared), *(row[rank] for row in self.single))

    def tokens(self, pack: Pack) -> int:
        """Return the tokens of a bin, on all ranks that compute it together."""
        return sum(end - begin for begin, end in self._spans(pack))

    def pairs(self, pack: Pack) -> int:
        """Return the pairs of tokens of a bin: the sum over its documents of the squared length (less for a slice)."""
        return sum(end**2 - begin**2 for begin, end in self._spans(pack))

    def _spans(self, pack: Pack) -> list[tuple[int, int]]:
        """Return (first token, end) of every document of a bin in itself, or of its slice."""
        return [pack.part] if pack.part else [(0, self.lengths[number]) for number in pack.documents]

    @cached_property
    def seconds(self) -> float:
        """Modelled time of the step: in every round each kind of layer takes as long as on its slowest rank.

        With pipelines it is ``stretch`` times ``mean_seconds`` instead."""
        return self.stretch * self.mean_seconds or sum(
            kind.layers * max(self._time(kind, pack) / self._speed(pack, at) for at, pack in enumerate(row))
            for row in (*self.shared, *self.single)
            for kind in self.work.kinds
        )

    @property
    def mean_seconds(self) -> float:
        """Modelled time of the step if all ranks computed equally long and nothing was computed twice."""
        return sum(map(self.work.of, self.lengths)) / (sum(self.speeds) or self.world_size) / self.positions

    @property
    def times(self) -> list[list[float]]:
        """Modelled times of the bins, [rounds][ranks]; a shared bin is listed once for each of its ranks."""
        return [
            [self.time(pack) / self._speed(pack, at) for at, pack in enumerate(row) for _ in range(pack.ranks)]
            for row in (*self.shared, *self.single)
        ]

    def time(self, pack: Pack) -> float:
        """Return the time of a bin on each of its ranks, at the speed of the fastest rank."""
        return sum(kind.layers * self._time(kind, pack) for kind in self.work.kinds)

    def _speed(self, pack: Pack, place: int) -> float:
        """Return the speed of the slowest rank that computes ``pack``.

        Args:
            pack: the pack.
            place: its index in its round.
        """
        return min(self.speeds[place * pack.ranks : (place + 1) * pack.ranks], default=1.0)

    @cached_property
    def floor(self) -> float:
        """Lower bound on the time of any assignment.

        The larger of the mean over all ranks, and the longest document divided over a context-parallel group or
        pipeline."""
        of = self.work.of
        return max(self.mean_seconds, max(map(of, self.lengths)) / (self.ranks * self.positions))

    @property
    def imbalance(self) -> float:
        """Time relative to ``floor``; at least 1."""
        return self.seconds / self.floor

    def _time(self, kind: LayerKind, pack: Pack) -> float:
        """Return the time that one layer of ``kind`` takes for a bin on each of its ranks.

        The time is for a rank of speed 1."""
        cost = 1 + SHARED_COST if pack.ranks > 1 else 1
        return cost / pack.ranks * sum(kind.of(end) - (kind.of(begin) - kind.fixed) for begin, end in self._spans(pack))


def deal(
    lengths: Sequence[int],
    *,
    world_size: int,
    cap: int,
    work: LayerTime,
    ranks: int = 1,
    speeds: tuple[float, ...] = (),
    rounds: int = 0,
) -> Packs:
    """Assign the documents of a step to ranks so that all compute about equally long, and return the assignment.

    With context-parallel groups, several numbers of shared documents are tried, and the best assignment is returned.

    Args:
        lengths: lengths of the documents, in tokens.
        world_size: number of ranks.
        cap: most tokens of a bin, for every rank that computes it.
        work: time of documents.
        ranks: ranks of a context-parallel group; 1 to share no documents.
        speeds: speed of every rank, see ``Packs``.
        rounds: least number of rounds of single ranks, if there are enough documents.

    Raises:
        UserError: there is no document, or one is empty or longer than a bin can be.
    """
    assert world_size % ranks == 0
    if not lengths or min(lengths) < 1:
        raise UserError("documents", min(lengths, default="none"), "at least one document, each of at least one token")
    if (longest := max(lengths)) > cap * ranks:
        together = f" over {ranks} processes" if ranks > 1 else ""
        raise UserError("documents", f"one of {longest} tokens", f"at most {cap * ranks}, one micro-batch{together}")
    times = [work.of(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    deals: list[tuple[float, Packs]] = []
    for count in _numbers_shared(order, lengths, times, cap, ranks, world_size):
        filled = _Filling(lengths, times, cap, world_size, ranks, speeds)
        filled.share(order[:count])
        filled.place(order[count:], rounds)
        packs = filled.packs(work)
        dearer = SHARE_GAIN if deals else 0.0  # the first try shares only what it must
        deals.append((packs.seconds * (1 + ROUND_COST * sum(packs.shape)) * (1 + dearer), packs))
    return min(deals, key=lambda dealt: dealt[0])[1]


def _numbers_shared(
    order: Sequence[int], lengths: Sequence[int], times: Sequence[float], cap: int, ranks: int, world_size: int
) -> Sequence[int]:
    """Return the numbers of documents, the longest first, that are shared by groups in each try.

    Numbers are ascending. The smallest number contains only documents that no rank can hold alone. Larger ones also
    contain documents that would make rounds long. With one rank per group there is only one number.

    Args:
        order: indices of the documents, the longest first.
        lengths: lengths of the documents, in tokens.
        times: time of every document.
        cap: most tokens of a bin of one rank.
        ranks: ranks of a context-parallel group.
        world_size: number of ranks.
    """
    must = sum(length > cap for length in lengths)
    if ranks == 1:
        return [must]
    fair = sum(times) / world_size
    long = max(must, sum(time > fair * LONG for time in times))
    return sorted({must + ceil((long - must) * part / TRIED) for part in range(TRIED + 1)})


class _Filling:
    """Bins while they are filled: rounds of shared bins first, then rounds of single bins.

    ``times`` are for the fastest rank; the times of bins include the speed of their rank.

    Args:
        lengths: lengths of the documents, in tokens.
        times: time of every document on the fastest rank.
        cap: most tokens of a bin, for every rank that computes it.
        ranks: ranks of a context-parallel group.
        speeds: speed of every rank; empty if all are equal.
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
        self.cp_group_speeds = slowest_of(each, ranks)
        self.factor = [(1 + SHARED_COST) / ranks / speed for speed in self.cp_group_speeds]
        """Time of a document in each group, relative to one rank of speed 1."""
        self.mean = sum(times) / sum(each)
        self.shared = 0
        self.levels: list[float] = []
        """Level of every round: the time of its longest bin."""
        self.documents: list[list[int]] = []

    def share(self, numbers: Sequence[int]) -> None:
        """Put documents into bins of context-parallel groups, each into the bin that then ends first.

        A new round begins if a document fits into no bin: because of the tokens, or because the bin would take longer
        than its round's longest bin and than the mean of all shared bins.

        Args:
            numbers: indices of the documents, the longest first.
        """
        cp_groups, capacity = self.world_size // self.ranks, self.cap * self.ranks
        needed = max(
            1,
            ceil(
                sum(self.lengths[number] for number in numbers)
                * CAPACITY_MARGIN
                / (capacity * sum(self.cp_group_speeds))
            ),
        )
        fair = sum(self.times[number] for number in numbers) / sum(1 / factor for factor in self.factor) / needed
        time: list[float] = []
        tokens: list[int] = []
        for number in numbers:
            length, costs = self.lengths[number], [self.times[number] * factor for factor in self.factor]
            levels = [max(self.levels[at // cp_groups], fair) for at in range(len(time))]
            after = [before + costs[at % cp_groups] for at, before in enumerate(time)]
            fitting = [at for at, end in enumerate(after) if tokens[at] + length <= capacity and end <= levels[at]]
            if not fitting:
                fitting = [len(time) + costs.index(min(costs))]
                time += [0.0] * cp_groups
                tokens += [0] * cp_groups
                self.levels.append(0.0)
                self.documents += [[] for _ in range(cp_groups)]
            at = min(fitting, key=lambda place: time[place] + costs[place % cp_groups])
            self.documents[at].append(number)
            time[at] += costs[at % cp_groups]
            tokens[at] += length
            self.levels[at // cp_groups] = max(self.levels[at // cp_groups], time[at])
        self.shared = len(self.levels)

    def place(self, numbers: Sequence[int], least: int = 0) -> None:
        """Put the remaining documents into bins, with as few rounds of single ranks as can hold them.

        Shared bins with free time and tokens get documents, too.

        Args:
            numbers: indices of the documents, the longest first.
            least: least number of rounds of single ranks.
        """
        if not numbers:
            return
        taken = sum(self.lengths[number] for pack in self.documents for number in pack)
        tokens = sum(self.lengths[number] for number in numbers)
        capacity = self.cap * (
            sum(self.speeds) or self.world_size
        )  # a slow rank reaches the level before its bin is full
        rounds = max(least, ceil(((tokens + taken) * CAPACITY_MARGIN) / capacity) - self.shared)
        while not self._placed(numbers, rounds):
            rounds += 1

    def _placed(self, numbers: Sequence[int], rounds: int) -> bool:
        """Try to place the documents with ``rounds`` rounds of single ranks; return True if they fit.

        Each document goes to a bin with enough free tokens and time; if there is none, the level of a round is raised.
        If they do not fit, nothing is changed and False is returned."""
        cp_groups, world = self.world_size // self.ranks, self.world_size
        group_packs = self.shared * cp_groups
        levels = [*self.levels, *[0.0] * rounds]
        documents = [*map(list, self.documents), *([] for _ in range(rounds * world))]
        places = range(len(documents))
        round_of = [at // cp_groups if at < group_packs else self.shared + (at - group_packs) // world for at in places]
        ranks = [self.ranks if at < group_packs else 1 for at in places]
        factor = [
            self.factor[at % cp_groups] if at < group_packs else self.single[(at - group_packs) % world]
            for at in places
        ]
        time = [sum(self.times[number] for number in documents[at]) * factor[at] for at in places]
        free_tokens = [self.cap * ranks[at] - sum(self.lengths[number] for number in documents[at]) for at in places]
        water = self._water(levels)

        def free(at: int) -> tuple[float, int]:
            """Return (negated free time per free token of bin ``at``, ``at``), a key for sorting.

            Free time is what is left below the level of its round. Sorting puts the bin with the most time per free
            token first."""
            left = (water[round_of[at]] - time[at]) / factor[at]
            return (-left / free_tokens[at] if free_tokens[at] else math.inf), at

        freest = sorted(map(free, places))
        full: list[tuple[float, int]] = []
        late: list[tuple[float, int]] = []
        """Bins to try again once documents are short enough for their free tokens (``full``) or time (``late``)."""
        for number in numbers:
            length, cost, chosen = self.lengths[number], self.times[number], -1
            for asleep, needed in ((full, length), (late, cost)):
                while asleep and -asleep[0][0] >= needed:
                    heapq.heappush(freest, free(heapq.heappop(asleep)[1]))
            while freest and chosen < 0:
                _, at = heapq.heappop(freest)
                left = (water[round_of[at]] - time[at]) / factor[at]
                if free_tokens[at] < length:
                    heapq.heappush(full, (-free_tokens[at], at))
                elif left < cost:
                    heapq.heappush(late, (-left, at))
                else:
                    chosen = at
            rises = chosen < 0
            if rises:
                over = [
                    (time[at] + cost * factor[at] - water[round_of[at]], at)
                    for at in places
                    if free_tokens[at] >= length
                ]
                if not over:
                    return False
                chosen = min(over)[1]
            documents[chosen].append(number)
            time[chosen] += cost * factor[chosen]
            free_tokens[chosen] -= length
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
        """Return the level that each round should reach, so that all rounds together have enough time for the step.

        The lowest levels are raised to one height; no level is below its present one.

        Args:
            levels: present level of every round.
        """
        left, rising = self.mean, sorted(levels)
        while len(rising) > 1 and rising[-1] > left / len(rising):
            left -= rising.pop()
        return [max(level, left / len(rising)) for level in levels]

    def packs(self, work: LayerTime) -> Packs:
        """Return the result as ``Packs``, without rounds that have no documents."""
        cp_groups = self.world_size // self.ranks
        cut = self.shared * cp_groups
        shared = [Pack(tuple(numbers), self.ranks) for numbers in self.documents[:cut]]
        single = [Pack(tuple(numbers)) for numbers in self.documents[cut:]]
        rows = _rows(shared, cp_groups), _rows(single, self.world_size)
        return Packs(*rows, self.ranks, tuple(self.lengths), work, self.speeds)


def _rows(packs: Sequence[Pack], size: int) -> tuple[tuple[Pack, ...], ...]:
    """Group bins into rounds of ``size`` bins, and return the rounds that have documents."""
    rows = (tuple(packs[at : at + size]) for at in range(0, len(packs), size))
    return tuple(row for row in rows if any(pack.documents for pack in row))
