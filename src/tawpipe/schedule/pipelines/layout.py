"""Layout of a pipeline: which blocks form a stage, and which position has which stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tawpipe.dealing.speeds import by_speed
from tawpipe.errors import UserError
from tawpipe.schedule.refusal import LeastLayers


@dataclass(frozen=True)
class Layout:
    """Stages of consecutive blocks, each on a position.

    Args:
        blocks: number of blocks of the model, including the embedding and the head.
        cuts: first block of every stage, ascending from 0; no stage is empty.
        places: position of every stage; every position from 0 on has at least one stage.

    Raises:
        UserError: the cuts or places do not form a layout.

    >>> layout = Layout.parse("0,3,6@0,1,0", 8)
    >>> layout.stages, layout.size, layout.blocks_of(1), layout.stages_of(0), str(layout)
    (3, 2, range(3, 6), (0, 2), '0,3,6@0,1,0')
    """

    blocks: int
    cuts: tuple[int, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        ends = (*self.cuts[1:], self.blocks)
        if not self.cuts or self.cuts[0] != 0 or any(a >= b for a, b in zip(self.cuts, ends, strict=True)):
            raise UserError(
                "schedule.stages", str(self), f"first blocks of stages, ascending from 0 below {self.blocks}"
            )
        if len(self.places) != len(self.cuts) or set(self.places) != set(range(self.size)):
            raise UserError("schedule.stages", str(self), "for every stage its position, none of them without a stage")

    def __str__(self) -> str:
        return f"{','.join(map(str, self.cuts))}@{','.join(map(str, self.places))}"

    @classmethod
    def parse(cls, text: str, blocks: int) -> Layout:
        """Return the layout of ``blocks`` blocks whose text form (``str(layout)``) is ``text``.

        Raises:
            UserError: ``text`` is not the text of a layout, or the layout is impossible.
        """
        cuts, _, places = text.partition("@")
        try:
            numbers = [tuple(int(word) for word in part.split(",")) for part in (cuts, places)]
        except ValueError as error:
            expected = "first blocks and positions of stages, as in 0,5,9@0,1,0"
            raise UserError("schedule.stages", text, expected) from error
        return cls(blocks, numbers[0], numbers[1])

    @classmethod
    def even(cls, blocks: int, size: int, per_position: int = 1, *, folded: bool = False) -> Layout:
        """Return a layout whose stages have nearly equal numbers of layers.

        The embedding joins the first stage and the head the last.

        Args:
            blocks: number of blocks of the model.
            size: number of positions.
            per_position: number of stages of each position.
            folded: True if every second group of stages goes through the positions backwards, so that with two stages
                per position the first and the last one are on one position.

        Raises:
            UserError: the model has fewer layers than stages.

        >>> str(Layout.even(10, 2, 2, folded=True))
        '0,3,5,7@0,1,1,0'
        """
        layers, stages = blocks - 2, size * per_position
        if layers < stages:
            expected = f"at least {stages}, one for each of the {per_position} stages of {size} positions"
            expected += f"; or a pipeline of {max(1, layers // per_position)}"
            raise UserError("layers of the model", layers, expected, need=LeastLayers(stages))
        cuts = [next(1 + layer for layer in range(layers) if layer * stages // layers == s) for s in range(stages)]
        places = [s % size if not folded or s // size % 2 == 0 else size - 1 - s % size for s in range(stages)]
        return cls(blocks, (0, *cuts[1:]), tuple(places))

    def by_speed(self, speeds: Sequence[float]) -> Layout:
        """Return a layout with the same positions and layers in proportion to their speeds.

        Every stage has at least one layer.

        >>> str(Layout.even(10, 2, 2, folded=True).by_speed((1, 0.5)))
        '0,4,5,6@0,1,1,0'
        """
        each = by_speed(self.blocks - 2, [speeds[place] for place in self.places], least=1)
        return Layout(self.blocks, (0, *accumulate(each[1:-1], initial=1 + each[0])), self.places)

    @cached_property
    def size(self) -> int:
        """Number of positions."""
        return max(self.places) + 1

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts)

    def blocks_of(self, stage: int) -> range:
        """Return the blocks of ``stage``."""
        return range(self.cuts[stage], (*self.cuts, self.blocks)[stage + 1])

    def stages_of(self, position: int) -> tuple[int, ...]:
        """Return the stages of ``position``, ascending."""
        return tuple(stage for stage, place in enumerate(self.places) if place == position)

    def stage_of(self, block: int) -> int:
        """Return the stage of ``block``."""
        return max(stage for stage, first in enumerate(self.cuts) if first <= block)

    def positions_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the positions that compute ``blocks``, each once, in the order of the blocks."""
        return tuple(dict.fromkeys(self.places[self.stage_of(block)] for block in blocks))
