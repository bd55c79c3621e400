"""Documents of uneven lengths in the lab: methods that assign a step's documents to devices.

The result is a timed workload whose micro-batches differ in size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tawpipe.dealing.balance import SHARED_COST, LayerTime, Pack, Packs, deal
from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.dealing import LONG, packs_of_a_pipeline
from tawpipe.schedule.spec import share_packs
from tawpipe.schedule.step import StepSpec
from tawpipe.simulate.cost_model import KEYS_SHARE, MicroBatchSize
from tawpipe.topology import Topology
from tawpipe_lab.workload import PASSES, LengthsWorkload, TimedWorkload

PACKINGS = ("balanced", "tokens", "in turn", "node", "rows")
OF_PIPELINES = ("balanced", "in turn", "rows")
"""Packings for documents that pass through pipelines."""


@dataclass(frozen=True, kw_only=True)
class DealtWorkload(TimedWorkload):
    """Timed workload whose micro-batches differ; its seconds and bytes describe a micro-batch of mean size.

    Args:
        packs: documents as they were assigned to ranks or pipelines.
        sizes: size of every micro-batch as a multiple of the mean; some may be empty.
        shares: per rank, the numbers of its micro-batches, or of its pipeline's.
        shared: number of micro-batches that groups of ``packs.ranks`` ranks compute together; they have the lowest
            numbers.
        linear: share of the mean forward pass that is not attention.
    """

    packs: Packs
    sizes: tuple[MicroBatchSize, ...]
    shares: tuple[tuple[int, ...], ...]
    shared: int
    linear: float

    @property
    def ranks(self) -> int:
        """Number of ranks in a context-parallel group; 1 if no micro-batch is shared."""
        return self.packs.ranks if self.shared else 1

    def work(self, micro_batch: int) -> float:
        size = self.sizes[micro_batch]
        return self.linear * size.tokens + (1 - self.linear) * size.pairs

    def tokens(self, micro_batch: int) -> float:
        return self.sizes[micro_batch].tokens

    def keys_s(self, micro_batch: int) -> float:
        return KEYS_SHARE * self.linear * self.forward_s * self.tokens(micro_batch)

    def kept(self, step: StepSpec) -> dict[int, range]:
        """Return, per micro-batch, the last layers whose activations ``keep_mib`` holds instead of recomputing them.

        Micro-batches that ranks share are not in the result.
        """
        keep_bytes = (step.settings.keep_mib or 0) * 2**20 / step.settings.micro_batches_per_visit
        numbers = range(self.shared, self.micro_batches)
        layers = {m: int(keep_bytes / max(1.0, self.graph_bytes * self.tokens(m))) for m in numbers}
        return {m: range(max(1, self.layers - many + 1), self.layers + 1) for m, many in layers.items()}

    def rounds_s(self, step: StepSpec | None) -> list[list[float]]:
        """Return the seconds of all passes of every rank in every round: [rounds][ranks].

        Args:
            step: step of a schedule of this project; None for a rival, which recomputes everything.
        """

        never = sum(step.recomputes(block) == "none" for block in range(1, self.layers + 1)) if step else 0
        kept = self.kept(step) if step else {}

        def seconds(m: int) -> float:
            """Return the seconds of all passes of micro-batch ``m`` on one rank."""
            passes = PASSES * self.layers - never - len(kept.get(m, ()))
            return passes * self.forward_s * self.work(m) * ((1 + SHARED_COST) / self.ranks if m < self.shared else 1)

        return [[*map(seconds, row)] for row in zip(*self.shares, strict=True)]

    def modelled_s(self, step: StepSpec | None, speeds: Sequence[float] = ()) -> float:
        """Return the seconds of all passes of a step, if every round takes as long as its slowest rank.

        Args:
            step: step of a schedule of this project; None for a rival, which recomputes everything.
            speeds: speeds of all ranks; empty if all are equal.
        """
        each = speeds or [1.0] * len(self.shares)
        return sum(max(took / speed for took, speed in zip(row, each, strict=True)) for row in self.rounds_s(step))


@cache
def dealt(
    workload: LengthsWorkload, packing: str, topology: Topology, ranks: int = 1, speeds: tuple[float, ...] = ()
) -> DealtWorkload:
    """Assign the documents of a step to ranks, and return the step as a timed workload.

    Values of ``packing``:

    * ``balanced``: by time (dealing/balance.py). Long documents are split over groups of ``ranks`` ranks if that gains
      time.
    * ``tokens``: like ``balanced``, as if time depended only on the number of tokens.
    * ``in turn``: packed micro-batches are filled in the order of the documents, each document into the first one with
      enough space, and go to the ranks in turn.
    * ``node``: filled like ``in turn``, but all ranks of a node compute every packed micro-batch together.
    * ``rows``: documents are concatenated and cut into rows of ``max_document`` tokens, which go to the ranks in turn.
      The parts of a cut document do not attend to each other, so there is less to compute.

    Args:
        ranks: number of ranks that compute a long document together; for ``node`` always the ranks of a node.
        speeds: speeds of all ranks, by which documents are assigned, see ``deal``; empty if all are equal.

    Raises:
        UserError: there is no such packing.
    """
    if packing not in PACKINGS:
        raise UserError("packing", packing, f"one of {', '.join(PACKINGS)}")
    ranks = topology.local_size if packing == "node" else ranks
    packs = _packs(workload, packing, topology, ranks, speeds)
    return _in_packs(workload, packs, share_packs(*packs.shape, topology.world_size, ranks))


@cache
def through_stages(workload: LengthsWorkload, packing: str, step: StepSpec) -> DealtWorkload:
    """Assign the documents of a step to pipelines, and return the step as a timed workload.

    Values of ``packing``:

    * ``balanced``: packed micro-batches and document slices as in a training run (schedule/pipelines/dealing.py).
    * ``in turn``, ``rows``: see ``dealt``. Each packed micro-batch goes to the next pipeline in turn.

    Args:
        step: step of the pipelines' strategy, with any micro-batches.

    Raises:
        UserError: there is no such packing for pipelines.
    """
    if packing not in OF_PIPELINES:
        raise UserError("packing", packing, f"one of {', '.join(OF_PIPELINES)} under {step.strategy}")
    dealt_to = step.strategy.dealt_to(step.topology)
    pipelines = 1 + max(dealt_to)
    if packing == "balanced":
        packs = step.strategy.dealing(step, cap=workload.bin_tokens, work=workload.work, cuts=LONG)(workload.lengths)
    else:
        packs = _packs(workload, packing, Topology.grid(pipelines, 1), 1, ())
        packs = replace(packs, positions=step.strategy.divided_over(step.topology))
    each = share_packs(*packs.shape, pipelines)
    return _in_packs(workload, packs, tuple(each[number] for number in dealt_to))


def mean_pack(workload: LengthsWorkload, packing: str, positions: int, pipelines: int) -> TimedWorkload:
    """Return a workload of equal micro-batches that stands for the packed ones, for which stages and orders are made.

    Its number of micro-batches is the number of packed micro-batches that ``pipelines`` pipelines over ``positions``
    positions have with this packing."""
    tokens, cap = workload.tokens / pipelines, workload.max_document if packing == "rows" else workload.bin_tokens
    each = packs_of_a_pipeline(0, positions, tokens) if packing == "balanced" else -(-tokens // cap)
    return _alike(workload, workload.lengths, int(each) * pipelines)


def _alike(workload: LengthsWorkload, lengths: Sequence[int], count: int) -> TimedWorkload:
    """Return a timed workload with the tokens and times of the documents in ``count`` equal micro-batches."""
    total, work = sum(lengths), sum(map(workload.work.of, lengths))
    forward_s = work / workload.layers / count
    return TimedWorkload(
        layers=workload.layers,
        layer_bytes=workload.layer_bytes,
        forward_s=forward_s,
        backward_input_s=2 * forward_s,
        backward_weight_s=forward_s,
        micro_batches=count,
        activation_bytes=int(workload.token_bytes * total / count),
        optimizer=workload.optimizer,
        keys_bytes=int(workload.keys_bytes * total / count),
        graph_bytes=workload.graph_bytes * total / count,
        inside_sleeps=workload.inside_sleeps,
    )


def _in_packs(workload: LengthsWorkload, packs: Packs, shares: tuple[tuple[int, ...], ...]) -> DealtWorkload:
    """Return a timed workload of the packed micro-batches ``packs``, numbered as in ``share_packs``.

    Args:
        shares: per rank, the numbers of its micro-batches.
    """
    # Numbers as in share_packs: per group its shared micro-batches, then per rank its own.
    rows = [packs.shared, packs.single]
    numbered = [row[place] for some in rows for place in range(len(some[0]) if some else 0) for row in some]
    tokens, pairs = [*map(packs.tokens, numbered)], [*map(packs.pairs, numbered)]
    count, total, squares = len(numbered), sum(tokens), sum(pairs)
    mean = _alike(workload, packs.lengths, count)
    return DealtWorkload(
        **vars(mean),
        packs=packs,
        sizes=tuple(MicroBatchSize(t * count / total, p * count / squares) for t, p in zip(tokens, pairs, strict=True)),
        shares=shares,
        shared=len(packs.shared) * (packs.world_size // packs.ranks),
        linear=workload.token_s * total / count / mean.forward_s,
    )


def _packs(workload: LengthsWorkload, packing: str, topology: Topology, ranks: int, speeds: tuple[float, ...]) -> Packs:
    """Return the packed micro-batches of a step for the packing, assigned to ranks or groups of ``ranks`` ranks."""
    lengths, work, cap = workload.lengths, workload.work, workload.bin_tokens
    if packing in ("balanced", "tokens"):
        by = work if packing == "balanced" else LayerTime((replace(work.kinds[0], per_pair=0.0),))
        arguments = {"world_size": topology.world_size, "cap": cap, "work": by, "ranks": ranks, "speeds": speeds}
        return replace(deal(lengths, **arguments), work=work)
    if packing == "rows":
        lengths, packs = _cut(lengths, workload.max_document)
    else:
        packs = [*_first_fit(lengths, cap * ranks)]
    places = topology.world_size // ranks
    packs += [()] * (-len(packs) % places)
    rows = tuple(
        tuple(Pack(numbers, ranks) for numbers in packs[at : at + places]) for at in range(0, len(packs), places)
    )
    return Packs(*((rows, ()) if ranks > 1 else ((), rows)), ranks, tuple(lengths), work)


def _first_fit(lengths: Sequence[int], cap: int) -> Iterator[tuple[int, ...]]:
    """Pack documents into micro-batches of at most ``cap`` tokens; return the numbers of the documents in each.

    Each document goes into the first micro-batch with enough space."""
    packs: list[list[int]] = []
    free_tokens: list[int] = []
    for number, length in enumerate(lengths):
        at = next((at for at, left in enumerate(free_tokens) if left >= length), len(packs))
        if at == len(packs):
            packs.append([])
            free_tokens.append(cap)
        packs[at].append(number)
        free_tokens[at] -= length
    return map(tuple, packs)


def _cut(lengths: Sequence[int], row: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Concatenate documents and cut them every ``row`` tokens.

    Returns:
        Lengths of the pieces in tokens, and for every row the numbers of its pieces.
    """
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
