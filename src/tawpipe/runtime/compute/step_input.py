"""Inputs of one step: its micro-batches and the numbers that belong to them; and the input of a decode step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tawpipe.model.batch import MicroBatch
from tawpipe.model.experts.balance import RoutedTokens, StepBalance
from tawpipe.runtime.compute.measures import Measure


@dataclass(frozen=True)
class DocumentSlice:
    """Tokens ``begin`` to ``end`` of a document that is cut into slices.

    Args:
        begin, end: Token range in the document.
        numbers: Micro-batches that are the slices of the document, in order.
    """

    begin: int
    end: int
    numbers: tuple[int, ...]


@dataclass
class StepInput:
    """Micro-batches of one step on this rank, and the numbers that belong to them.

    Args:
        micro_batches: Micro-batches of this rank, by global index, on the CPU.
        scale: Factor of every token's loss in the backward pass; a power of two, so that no dtype rounds it.
        seed: Seed of the run's random numbers; None for an evaluation.
        step: Index of the step, which the random numbers also depend on.
        digest: Small number that is equal on all ranks if they were given equal inputs.
        measure: Replaces the head in an evaluation.
        place: Index of this rank in its context-parallel group.
        shared: Micro-batches below this index are computed by context-parallel groups, the others by one rank each;
            None if all are shared.
        counted: Micro-batches whose tokens this rank counts, if several ranks compute one in turn; None for all.
        kept: Micro-batch -> blocks that keep their whole graph instead of recomputing it.
        slices: Micro-batch -> its document slice. ``micro_batches`` holds the whole document for these.
        balance: Sums of the loss that balances experts; None without it, and in an evaluation.
    """

    micro_batches: Mapping[int, MicroBatch]
    scale: float
    seed: int | None
    step: int
    digest: int = 0
    measure: Measure | None = None
    place: int = 0
    shared: int | None = None
    counted: Collection[int] | None = None
    kept: Mapping[int, Collection[int]] = field(default_factory=dict)
    slices: Mapping[int, DocumentSlice] = field(default_factory=dict)
    balance: StepBalance | None = None

    def piece(self, batch: MicroBatch, ranges: Sequence[tuple[int, int]] | None = None) -> RoutedTokens | None:
        """Return ``StepBalance.piece`` of tokens on the device, or None without ``balance``."""
        return None if self.balance is None else self.balance.piece(batch, ranges)

    @property
    def tokens(self) -> int:
        """Number of labels that count, in micro-batches that no other rank counts."""
        return sum(batch.tokens for m, batch in self.micro_batches.items() if self._counts(m))

    @property
    def learns(self) -> bool:
        """True if this rank's micro-batches have a label that counts, even if another rank counts it."""
        return any(batch.tokens for batch in self.micro_batches.values())

    def _counts(self, m: int) -> bool:
        """Return True if this rank counts the tokens of micro-batch ``m``."""
        return m in self.counted if self.counted is not None else not (self.place and self.is_shared(m))

    def is_shared(self, m: int) -> bool:
        """Return True if a context-parallel group computes micro-batch ``m``.

        True for every ``m`` if ``shared`` is None, also in runs without such groups.
        """
        return self.shared is None or m < self.shared


@dataclass
class DecodeInput:
    """Values that the actions of one decode step share.

    Args:
        number: Index of the decode step, from 0.
        last: True once the header of one of its passes marks the end; set where the pass is computed.
    """

    number: int
    last: bool = False
