"""The retrieval check of an evaluation: does the model find a fact that stands anywhere in a row of any length?

It reads the answer rather than writing it: every token of the answer is predicted from what really stands before it, in
one forward pass on all ranks. If each is the likeliest, the model would have written the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tawpipe.data.needles import Needles
from tawpipe.data.prepared import PreparedData
from tawpipe.errors import UserError
from tawpipe.model.files.build import longest_allowed
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.compute.measures import Answer, AnswersByRow
from tawpipe.train.saying.metrics import Value
from tawpipe.train.settings.config import TrainConfig


@dataclass(frozen=True)
class FactsCell:
    """The answers for facts at one depth of rows of one length.

    Args:
        retrieved: facts of which every token of the answer is the likeliest.
        asked: facts.
        loss: per token of the answers.
    """

    retrieved: int
    asked: int
    loss: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> FactsCell:
        loss = sum(answer.loss for answer in answers) / sum(answer.tokens for answer in answers)
        return cls(sum(answer.found for answer in answers), len(answers), loss)


@dataclass(frozen=True)
class Retrieval:
    """What one check has found.

    Args:
        cells: by length and depth, both of which rise.
    """

    cells: dict[tuple[int, float], FactsCell]

    def values(self) -> dict[str, Value]:
        """Share of facts that were found and loss per token of their answers, by length and depth."""
        named = {f"{length}/{depth:.4g}": cell for (length, depth), cell in self.cells.items()}
        shares = {name: cell.retrieved / cell.asked for name, cell in named.items()}
        return {"retrieval_found": shares, "retrieval_loss": {name: cell.loss for name, cell in named.items()}}

    def __str__(self) -> str:
        """The number of facts that were found, and the first place where one was not."""
        cells = self.cells.values()
        said = f"{sum(cell.retrieved for cell in cells)} of {sum(cell.asked for cell in cells)} facts found"
        missed = next((place for place, cell in self.cells.items() if cell.retrieved < cell.asked), None)
        return said if missed is None else f"{said}; first miss at {missed[0]:,} tokens, depth {missed[1]:.4g}"


@dataclass(frozen=True)
class RetrievalCheck:
    """What is hidden, and how long the rows are."""

    needles: Needles
    lengths: Sequence[int]

    def measure(self, pipeline: Pipeline, rows: int) -> Retrieval:
        """Evaluate all rows, up to so many in a batch; call on all ranks."""
        cells: dict[tuple[int, float], FactsCell] = {}
        needles = self.needles
        for length in self.lengths:
            answers: list[Answer] = []
            for first in range(0, needles.rows, rows):
                count = min(rows, needles.rows - first)
                measure = AnswersByRow(count, pipeline.micro_batch, pipeline.world.device)
                batch = pipeline.part_of(count, length, partial(needles.row, length, first))
                pipeline.evaluate(batch, measure=measure)
                answers += measure.answers(pipeline.world)
            for place, depth in enumerate(needles.depths):
                cells[length, depth] = FactsCell.of(answers[place * needles.samples :][: needles.samples])
        return Retrieval(cells)


def retrieval_check(
    config: TrainConfig, data: PreparedData, model_config: Any, *, ranks: int = 1
) -> RetrievalCheck | None:
    """The check that the settings ask for, if they do.

    Args:
        ranks: that compute a row together.

    Raises:
        UserError: a length that the model has no positions for, or that cannot hold a fact and its question.
    """
    settings = config.evaluation
    if not settings.retrieval_lengths:
        return None
    if config.micro_batch > 1 and ranks > 1:
        expected = "1 with --schedule.sequence-ranks, where facts are looked for: answers are told apart by row"
        raise UserError("--micro-batch", config.micro_batch, expected)
    text = data.some_text
    needles = Needles(
        text, data.tokenizer, depths=settings.retrieval_depths, samples=settings.retrieval_samples, seed=config.seed
    )
    limit = longest_allowed(model_config)
    for length in settings.retrieval_lengths:
        if length < needles.shortest:
            expected = (
                f"at least {needles.shortest}: a fact, its question and some text around them take that many tokens"
            )
            raise UserError("--evaluation.retrieval-lengths", length, expected)
        if length > limit:
            expected = f"at most {limit} for {config.model} (max_position_embeddings in its config.json)"
            raise UserError("--evaluation.retrieval-lengths", length, expected)
    return RetrievalCheck(needles, sorted(set(settings.retrieval_lengths)))
