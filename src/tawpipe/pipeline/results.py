"""Results of steps under way, each judged when its numbers are there: alike on all ranks, finite, in time."""

from __future__ import annotations

import logging
from collections import deque
from math import isfinite
from typing import NamedTuple

from tawpipe.errors import RunError
from tawpipe.pipeline.limits import Limits
from tawpipe.pipeline.wiring import Wiring
from tawpipe.runtime.homes.step_result import StepResult

logger = logging.getLogger(__name__)


class Continuation(NamedTuple):
    """What the model has written behind a prompt.

    Attributes:
        ids: of the new tokens.
        logprobs: of each the natural logarithm of its chance, by the model's logits as they are.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Results:
    """The results of a pipeline's steps.

    Args:
        skip_limit: of steps in a row that are not finite and are left out, before that is an error.
    """

    def __init__(self, wiring: Wiring, limits: Limits, skip_limit: int) -> None:
        self._wiring, self._limits, self.skip_limit = wiring, limits, skip_limit
        self._recent: deque[StepResult] = deque()
        self.skipped = 0
        """Steps that were left out in a row, up to now."""
        self.without_labels = 0
        """Steps whose labels were all -100 and which were left out."""

    def make_room(self) -> None:
        """Judge steps until at most one is ahead of its numbers."""
        while len(self._recent) > 1:
            try:
                self.judge(self._recent.popleft())
            except Exception:
                self._recent.clear()  # as in ``drain``: the caller knows now that steps have failed
                raise

    def add(self, result: StepResult) -> None:
        """A step has been issued."""
        self._recent.append(result)

    def drain(self) -> None:
        """Wait for everything under way, and judge all steps.

        Raises:
            RunError: one of them had a loss or gradient norm that was not finite.
            UserError: ranks were given different batches.
        """
        for result in self._recent:  # so that it is seen how long they take
            result.wait()
        self._wiring.executor.drain()
        results = list(self._recent)
        self._recent.clear()
        for result in results:
            self.judge(result)

    def end(self) -> None:
        """Judge at the end of the process the steps of whose faults the caller has not been told."""
        self._recent = deque(result for result in self._recent if not result.told)
        self.drain()

    def forget(self) -> None:
        """The state that the steps have led to has been replaced."""
        self._recent.clear()
        self.skipped = 0

    def judge(self, result: StepResult) -> None:
        """Count a step that was left out, and raise for one that must not be."""
        result.require_alike()
        self._limits.took(result.took_s)
        if result.finite and result.tokens:
            self.skipped = 0
            return
        if result.finite:
            self.without_labels += 1
            if self.without_labels == 1 and self._wiring.world.rank == 0:
                logger.warning("a global batch has no label to learn: its step, like all such, is left out")
            return
        if self.skipped < self.skip_limit:
            self.skipped += 1
            return
        if isfinite(result.loss) and isfinite(result.grad_norm):
            raise RunError("an earlier step was not finite; nothing is updated until a good state is loaded")
        early = self._wiring.settings.early_updates
        outcome = "they have reached the weights: updates are early" if early else "the update was left out"
        raise RunError(f"loss {result.loss} and gradient norm {result.grad_norm} are not finite; {outcome}")
