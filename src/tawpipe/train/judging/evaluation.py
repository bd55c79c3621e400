"""Evaluations of a run: the loss on held-out data, the retrieval check, and the best step so far.

The best step depends on the validation loss only. All ranks take the same decisions (keep a checkpoint, end a run that
no longer improves), because all of them compare the number of rank 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tawpipe.checkpoint.resume import RunState
from tawpipe.data.prepared import PreparedData, changed_parts
from tawpipe.data.rows import PackedDataset
from tawpipe.errors import UserError
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.runtime.compute.measures import LossByPosition, position_edges
from tawpipe.train.batches import Batches
from tawpipe.train.judging.retrieval import Retrieval, RetrievalCheck
from tawpipe.train.saying.metrics import Value
from tawpipe.train.settings.config import EvaluationConfig, TrainConfig


@dataclass(frozen=True)
class Best:
    """Lowest validation loss so far, and the number of evaluations without an improvement.

    Args:
        step: step after which the lowest loss was measured; 0 if none was.
        loss: lowest validation loss.
        beaten: limit below which the loss of an evaluation counts as an improvement for patience.
        since: number of evaluations since the last improvement.
    """

    step: int = 0
    loss: float = math.inf
    beaten: float = math.inf
    since: int = 0

    def after(self, step: int, loss: float, *, least_gain: float = 0.0) -> Best:
        """Return this record updated with the ``loss`` of another evaluation after ``step``.

        >>> best = Best().after(10, 2.0, least_gain=0.5)
        >>> best.after(20, 1.75, least_gain=0.5).after(30, 1.875, least_gain=0.5)
        Best(step=20, loss=1.75, beaten=1.5, since=2)

        Args:
            least_gain: decrease of the loss that the next improvement must exceed.
        """
        lowest = (step, loss) if loss < self.loss else (self.step, self.loss)
        return Best(*lowest, loss - least_gain, 0) if loss < self.beaten else Best(*lowest, self.beaten, self.since + 1)


def resumed_best(state: RunState | None, record: str) -> tuple[Best, str]:
    """Return the best step and patience with which a run resumes.

    Args:
        state: state that the run resumes from; None for a new run.
        record: validation data of this run; see ``Evaluation``.

    Returns:
        the ``Best``, which begins anew if the validation data has changed, and a line for the console. The line is
        ``""`` unless it begins anew, or the checkpoint does not say which validation data it had.
    """
    if state is None or not state.best:
        return Best(), ""
    best = Best(**state.best)
    words = f"best step ({best.step}, validation loss {best.loss:.4f}) and patience"
    if not state.validation:
        return best, f"{words} are kept: the checkpoint does not name its validation data, assumed to be this one"
    if record and (changed := changed_parts(state.validation, record)):
        return Best(), f"the validation data has changed ({', '.join(changed)}): {words} start again"
    return best, ""


def perplexity(loss: float) -> float:
    """Return the perplexity exp(``loss``): the number of equally likely tokens that would give this loss per token.

    >>> round(perplexity(math.log(7)), 6), perplexity(1e4)
    (7.0, inf)
    """
    return math.inf if loss >= 700 else math.exp(loss)


class Evaluation:
    """Evaluations of one run, with their latest results.

    Args:
        check: retrieval check that is part of every evaluation; None without one.

    ``record`` identifies the data that validation losses are measured on, ``""`` if nothing is held out. ``loss`` is
    the last validation loss. ``by_position`` has the last loss for each range of positions, if asked for. ``retrieval``
    is the result of the last check. ``measured`` is True after the first evaluation. ``due`` is True if the run is to
    be evaluated at all.
    """

    def __init__(
        self,
        settings: EvaluationConfig,
        pipeline: Pipeline,
        data: PreparedData,
        batches: Batches,
        *,
        check: RetrievalCheck | None = None,
    ) -> None:
        self.settings, self.pipeline, self._data, self._batches, self._check = settings, pipeline, data, batches, check
        self.best = Best()
        self.loss: float | None = None
        self.by_position: dict[str, float | None] = {}
        self.retrieval: Retrieval | None = None
        self.measured = False
        self.record = ""
        if data.validation is not None:
            self.record = f"{data.validation_fingerprint} batches:{batches.evaluated(data.validation)}"
        self.due = settings.every > 0 and (data.validation is not None or check is not None)

    @property
    def exhausted(self) -> bool:
        """True if ``patience`` consecutive evaluations have not improved the validation loss."""
        patience = self.settings.patience
        return 0 < patience <= self.best.since

    def measure(self, step: int) -> dict[str, Value]:
        """Evaluate the model as it is after ``step``, and return the values under their names in metrics.jsonl.

        Updates ``best`` unless ``step`` is 0. Call on all ranks.
        """
        self.measured, values = True, dict[str, Value]()
        if self._data.validation is not None:
            self.loss = values["validation_loss"] = self._validate(self._data.validation)
            values["validation_perplexity"] = perplexity(self.loss)
            if self.by_position:
                values["validation_by_position"] = self.by_position
            if step:
                self.best = self.best.after(step, self.loss, least_gain=self.settings.least_gain)
        if self._check is not None:
            self.retrieval = self._check.measure(self.pipeline, self._batches.shape.rows)
            values |= self.retrieval.values()
        return values

    def __str__(self) -> str:
        """Return the results of the last evaluation as text."""
        measured = [] if self.loss is None else [f"validation loss {loss_words(self.loss)}"]
        return ", ".join([*measured, *([str(self.retrieval)] if self.retrieval else [])])

    def _validate(self, source: PackedDataset) -> float:
        """Return the mean loss per token over the first batches of held-out documents.

        The batches are the same ones every time. The result is nan if they have no token to learn. Sets ``by_position``
        if the settings ask for it. Call on all ranks.
        """
        by_position = None
        if buckets := self.settings.by_position:
            edges = position_edges(buckets, self._batches.shape.document_tokens)
            by_position = LossByPosition(edges, self.pipeline.world.device)
        total, tokens = 0.0, 0
        for batch in self._batches.validation(source):
            result = self.pipeline.evaluate(batch, measure=by_position)
            if result.tokens:  # the mean loss of no tokens is nan
                total, tokens = total + result.loss * result.tokens, tokens + result.tokens
        if by_position is not None:
            self.by_position = by_position.means(self.pipeline.world)
        mean = torch.tensor([total / tokens if tokens else math.nan], dtype=torch.float64)
        return float(self.pipeline.world.broadcast(mean))


def loss_words(loss: float) -> str:
    """Return a loss per token with its perplexity as text.

    >>> loss_words(1.5), loss_words(math.nan)
    ('1.5000 (perplexity 4.482)', 'not a number (a diverged model, or no held-out token is learned)')
    """
    if math.isnan(loss):
        return "not a number (a diverged model, or no held-out token is learned)"
    return f"{loss:.4f} (perplexity {perplexity(loss):.4g})"


def check_best(config: TrainConfig, *, validation: bool) -> None:
    """Raise UserError if settings need the best step of a run that measures no validation loss.

    Args:
        validation: True if documents are held out.
    """
    wanted = {"--checkpoint.best": config.checkpoint.best, "--evaluation.patience": config.evaluation.patience}
    for name, value in wanted.items():
        if value and not config.evaluation.every:
            raise UserError(name, value, "--evaluation.every above 0: the best step is chosen by validation loss")
        if value and not validation:
            expected = (
                "held-out documents (--validation-fraction or --validation-data): the best step is chosen by their loss"
            )
            raise UserError(name, value, expected)
