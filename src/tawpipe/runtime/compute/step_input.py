"""What one step is given: its micro-batches, and the numbers that go with them; and what a lap is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tawpipe.model.batch import MicroBatch
from tawpipe.runtime.compute.measures import Measure


@dataclass(frozen=True)
class DocumentSlice:
    """Tokens ``begin`` to ``end`` of a document that is cut.

    Args:
        numbers: of the micro-batches that are its slices, in its order.
    """

    begin: int
    end: int
    numbers: tuple[int, ...]


@dataclass
class StepInput:
    """The micro-batches of one step, and the numbers that go with them.

    Args:
        micro_batches: this rank's, by their global index, on the CPU.
        scale: every token's loss is multiplied by it in the backward pass; a power of two, so that no dtype rounds it.
        seed, step: what random numbers derive from; ``seed`` None for an evaluation.
        digest: a small number that is the same on all ranks if they were given the same.
        measure: looks at an evaluation's head.
        place: of this rank among those that compute these micro-batches together.
        shared: micro-batches below this number are computed together, the others alone; None for all together.
        counted: those whose tokens this rank counts, where several ranks compute one in turn; None for all.
        kept: by micro-batch, blocks that keep all that their backward pass would compute again.
        slices: of micro-batches that are slices; in ``micro_batches`` they are the whole document.
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

    @property
    def tokens(self) -> int:
        """Labels that count, of micro-batches that no other rank counts."""
        return sum(batch.tokens for m, batch in self.micro_batches.items() if self._counts(m))

    @property
    def learns(self) -> bool:
        """True if this rank's micro-batches have a label that counts, whoever counts it."""
        return any(batch.tokens for batch in self.micro_batches.values())

    def _counts(self, m: int) -> bool:
        return m in self.counted if self.counted is not None else not (self.place and self.is_shared(m))

    def is_shared(self, m: int) -> bool:
        """True if a micro-batch is computed by a set of ranks, where there are any."""
        return self.shared is None or m < self.shared


@dataclass
class LapInput:
    """What the actions of one lap share.

    Args:
        number: of the lap, from 0.
        last: the header of one of its passes says that nothing comes behind it; set where the pass is computed.
    """

    number: int
    last: bool = False
