"""Documents of uneven lengths in the lab: the ways in which a step of them is dealt to devices.

What a strategy makes of them is a timed workload whose micro-batches differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tawpipe.errors import UserError
from tawpipe.schedule.balance import SHARED_COST, Bin, Bins, LayerTime, deal
from tawpipe.schedule.spec import share_bins
from tawpipe.schedule.step import StepSpec
from tawpipe.simulate.cost_model import KEYS_SHARE, MicroBatchSize
from tawpipe.topology import Topology
from tawpipe_lab.workload import PASSES, LengthsWorkload, TimedWorkload

PACKINGS = ("balanced", "tokens", "in turn", "node", "rows")


@dataclass(frozen=True, kw_only=True)
class DealtWorkload(TimedWorkload):
    """A timed workload whose micro-batches differ: its seconds and bytes are those of the mean one.

    Args:
        bins: how the documents were dealt.
        sizes: of every micro-batch, as multiples of the mean; some may be empty.
        shares: for every rank the numbers of its micro-batches.
        shared: micro-batches below this number are computed by sets of ``bins.ranks``.
        linear: share of the mean forward pass that is no attention.
        graph_bytes: of what a layer keeps of the mean one if nothing is recomputed.
    """

    bins: Bins
    sizes: tuple[MicroBatchSize, ...]
    shares: tuple[tuple[int, ...], ...]
    shared: int
    linear: float
    graph_bytes: float = 0.0

    @property
    def ranks(self) -> int:
        """The ranks of a set, where there is any."""
        return self.bins.ranks if self.shared else 1

    def work(self, micro_batch: int) -> float:
        size = self.sizes[micro_batch]
        return self.linear * size.tokens + (1 - self.linear) * size.pairs

    def tokens(self, micro_batch: int) -> float:
        return self.sizes[micro_batch].tokens

    def keys_s(self, micro_batch: int) -> float:
        return KEYS_SHARE * self.linear * self.forward_s * self.tokens(micro_batch)

    def kept(self, step: StepSpec) -> dict[int, range]:
        """By micro-batch the layers, the last ones, of which ``keep_mib`` holds what would be computed again."""
        room = (step.settings.keep_mib or 0) * 2**20 / step.settings.micro_batches_per_visit
        numbers = range(self.shared, self.micro_batches)
        layers = {m: int(room / max(1.0, self.graph_bytes * self.tokens(m))) for m in numbers}
        return {m: range(max(1, self.layers - many + 1), self.layers + 1) for m, many in layers.items()}

    def rounds_s(self, step: StepSpec | None) -> list[list[float]]:
        """[rounds][ranks] seconds of all passes.

        Args:
            step: of a schedule of ours; without one everything is recomputed.
        """

        never = sum(step.recomputes(block) == "none" for block in range(1, self.layers + 1)) if step else 0
        kept = self.kept(step) if step else {}

        def seconds(m: int) -> float:
            passes = PASSES * self.layers - never - len(kept.get(m, ()))
            return passes * self.forward_s * self.work(m) * ((1 + SHARED_COST) / self.ranks if m < self.shared else 1)

        return [[*map(seconds, row)] for row in zip(*self.shares, strict=True)]

    def modelled_s(self, step: StepSpec | None, speeds: Sequence[float] = ()) -> float:
        """Seconds of all passes if every round takes as long as the rank that takes longest.

        Args:
            speeds: of all ranks, where they differ.
        """
        each = speeds or [1.0] * len(self.shares)
        return sum(max(took / speed for took, speed in zip(row, each, strict=True)) for row in self.rounds_s(step))


def dealt(
    workload: LengthsWorkload, packing: str, topology: Topology, ranks: int = 1, speeds: tuple[float, ...] = ()
) -> DealtWorkload:
    """A step as a strategy computes it.

    * ``balanced``: documents dealt by time (schedule/balance.py), long ones over sets of ``ranks`` where that gains.
    * ``tokens``: the same by tokens, as if documents took as long as others of equally many tokens together.
    * ``in turn``: bins are filled one after the other with what fits first, and dealt in turn.
    * ``node``: likewise, and all ranks of a node compute every bin together.
    * ``rows``: documents end to end, cut into rows of ``max_document``, which are dealt in turn. What is cut off does
      not attend to what it was cut from, so that there is less to compute.

    Args:
        speeds: of all ranks, by which documents are dealt, see ``deal``.

    Raises:
        UserError: no such packing.
    """
    if packing not in PACKINGS:
        raise UserError("packing", packing, f"one of {', '.join(PACKINGS)}")
    return _dealt(workload, packing, topology, topology.local_size if packing == "node" else ranks, speeds)


@cache
def _dealt(
    workload: LengthsWorkload, packing: str, topology: Topology, ranks: int, speeds: tuple[float, ...]
) -> DealtWorkload:
    bins = _bins(workload, packing, topology, ranks, speeds)
    # In the order of share_bins: those of a set, then those of a rank, are numbered one after the other.
    rows = [bins.shared, bins.single]
    numbered = [row[place] for some in rows for place in range(len(some[0]) if some else 0) for row in some]
    tokens, pairs = [*map(bins.tokens, numbered)], [*map(bins.pairs, numbered)]
    count, total, squares = len(numbered), sum(tokens), sum(pairs)
    linear = workload.token_s * total
    forward_s = (linear + workload.token_s * squares / workload.even_at) / count
    return DealtWorkload(
        layers=workload.layers,
        layer_bytes=workload.layer_bytes,
        forward_s=forward_s,
        backward_input_s=2 * forward_s,
        backward_weight_s=forward_s,
        micro_batches=count,
        activation_bytes=int(workload.token_bytes * total / count),
        optimizer=workload.optimizer,
        keys_bytes=int(workload.keys_bytes * total / count),
        bins=bins,
        sizes=tuple(MicroBatchSize(t * count / total, p * count / squares) for t, p in zip(tokens, pairs, strict=True)),
        shares=share_bins(*bins.shape, topology.world_size, ranks),
        shared=len(bins.shared) * (topology.world_size // ranks),
        linear=linear / count / forward_s,
        graph_bytes=workload.graph_bytes * total / count,
    )


def _bins(workload: LengthsWorkload, packing: str, topology: Topology, ranks: int, speeds: tuple[float, ...]) -> Bins:
    lengths, work, cap = workload.lengths, workload.work, workload.bin_tokens
    if packing in ("balanced", "tokens"):
        by = work if packing == "balanced" else LayerTime((replace(work.kinds[0], per_pair=0.0),))
        given = {"world_size": topology.world_size, "cap": cap, "work": by, "ranks": ranks, "speeds": speeds}
        return replace(deal(lengths, **given), work=work)
    if packing == "rows":
        lengths, bins = _cut(lengths, workload.max_document)
    else:
        bins = [*_first_fit(lengths, cap * ranks)]
    places = topology.world_size // ranks
    bins += [()] * (-len(bins) % places)
    rows = tuple(tuple(Bin(numbers, ranks) for numbers in bins[at : at + places]) for at in range(0, len(bins), places))
    return Bins(*((rows, ()) if ranks > 1 else ((), rows)), ranks, tuple(lengths), work)


def _first_fit(lengths: Sequence[int], cap: int) -> Iterator[tuple[int, ...]]:
    """Documents in bins of so many tokens, each in the first one that has room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for number, length in enumerate(lengths):
        at = next((at for at, left in enumerate(room) if left >= length), len(bins))
        if at == len(bins):
            bins.append([])
            room.append(cap)
        bins[at].append(number)
        room[at] -= length
    return map(tuple, bins)


def _cut(lengths: Sequence[int], row: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """The pieces into which documents end to end are cut every ``row`` tokens, and those of every row."""
    pieces, rows, left = list[int](), [list[int]()], row
    for length in lengths:
        while length:
            if not left:
                rows.append([])
                left = row
            rows[-1].append(len(pieces))
            pieces.append(min(length, left))
            length, left = length - pieces[-1], left - pieces[-1]
    return pieces, [*map(tuple, rows)]
