"""Retrieval check of an evaluation, which tests if a model finds a fact at any position in a row.

The model does not generate the answer. One forward pass on all ranks predicts every token of the answer from the
correct tokens before it. If each token is the likeliest one, greedy generation would have given the answer.
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
    """Result for the facts at one depth in rows of one length.

    Args:
        retrieved: number of facts for which every token of the answer is the likeliest.
        asked: number of facts.
        loss: loss per token of the answers.
    """

    retrieved: int
    asked: int
    loss: float

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> FactsCell:
        """Return the summary of ``answers``."""
        loss = sum(answer.loss for answer in answers) / sum(answer.tokens for answer in answers)
        return cls(sum(answer.exact_match for answer in answers), len(answers), loss)


@dataclass(frozen=True)
class Retrieval:
    """Result of one retrieval check.

    Args:
        cells: results by (length, depth), in rising order.
    """

    cells: dict[tuple[int, float], FactsCell]

    def values(self) -> dict[str, Value]:
        """Return the metrics of this check: the share of facts found and the loss per token, by length and depth."""
        named = {f"{length}/{depth:.4g}": cell for (length, depth), cell in self.cells.items()}
        shares = {name: cell.retrieved / cell.asked for name, cell in named.items()}
        return {"retrieval_found": shares, "retrieval_loss": {name: cell.loss for name, cell in named.items()}}

    def __str__(self) -> str:
        """Return the number of facts found, and the first length and depth with a fact that was not found, as text."""
        cells = self.cells.values()
        summary = f"{sum(cell.retrieved for cell in cells)} of {sum(cell.asked for cell in cells)} facts found"
        missed = next((place for place, cell in self.cells.items() if cell.retrieved < cell.asked), None)
        return summary if missed is None else f"{summary}; first miss at {missed[0]:,} tokens, depth {missed[1]:.4g}"


@dataclass(frozen=True)
class RetrievalCheck:
    """Hidden facts and row lengths of a retrieval check."""

    needles: Needles
    lengths: Sequence[int]

    def measure(self, pipeline: Pipeline, rows: int) -> Retrieval:
        """Evaluate all rows of the check with the weights of ``pipeline``, and return the result; call on all ranks.

        Args:
            pipeline: pipeline of the run; it waits for all issued steps.
            rows: largest number of rows in a global batch, over all ranks.
        """
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
    """Return the retrieval check that the settings ask for; None if they ask for none.

    Args:
        data: documents, from which the text around the facts is taken.
        model_config: configuration of the model, with its number of positions.
        ranks: number of processes that compute a row together.

    Raises:
        UserError: a length exceeds the model's positions, or is too short for a fact and its question; or several
            processes compute a micro-batch of several rows.
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
