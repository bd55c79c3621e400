"""Result of a step for the caller: loss, gradient norm and tokens, which are waited for when they are read."""

from __future__ import annotations

from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.runtime.lanes import Event, Failure, Moment

VALUES = ("loss", "norm", "tokens", "finite", "alike", "balance_loss", "busiest_expert")
"""Values that NORM writes for a step, in this order."""


class StepResult:
    """Loss, gradient norm and token count of a step. Reading one waits for the step's NORM and nothing else."""

    def __init__(self, event: Event, values: Tensor, ended: Moment, failure: Failure) -> None:
        self._event, self._values, self._ended, self._failure = event, values, ended, failure
        self.told = False
        """True once the caller was given the error that ranks had different batches."""

    def __repr__(self) -> str:
        """Wait for the numbers and show them, or show why there are none."""
        told = self._failure.told, self.told
        try:
            self.require_alike()
        except Exception as error:
            self._failure.told, self.told = told  # printing does not count as reporting the error to the caller
            return f"StepResult(failed: {error})"
        norm = f", grad norm {self.grad_norm:.3g}" if self.grad_norm else ""  # an evaluation has no norm
        return f"StepResult(loss {self.loss:.4f}{norm}, {self.tokens:,} tokens{'' if self.finite else ', not finite'})"

    def wait(self) -> None:
        """Wait until the numbers are available; raise the error of the step if it failed."""
        waited = not self._event.done
        self._failure.wait_for(self._event)
        self._ended.seconds(waited=waited)  # fix the end time now, before more time passes

    def _read(self, name: str) -> float:
        """Wait for the numbers, check that all ranks had equal batches, and return one number."""
        self.require_alike()
        return float(self._values[VALUES.index(name)])

    def require_alike(self) -> None:
        """Wait for the numbers, and raise an error if the ranks were given different batches or rates.

        Reading any number of the step calls this first. The weights were not changed in that case, unless updates are
        early.

        Raises:
            UserError: On all ranks, if batches or learning rates differ.
        """
        self.wait()
        if not self._values[VALUES.index("alike")]:
            self.told = True
            raise UserError(
                "batch",
                "different ones on different ranks",
                "the same global batch (and learning rates) on all ranks, each of which computes its own part of it; a "
                "rank that knows only its own rows gives a LocalBatch of what Pipeline.shares says",
            )

    @property
    def ended_s(self) -> float:
        """Time of ``time.perf_counter`` at which the numbers became available. Waits for them."""
        self.wait()
        return self._ended.seconds(waited=False)

    @property
    def took_s(self) -> float:
        """Seconds from issuing the step until its numbers were available, including the rest of the step before it.

        Waits for the numbers.
        """
        return self.ended_s - self._ended.issued_s

    @property
    def loss(self) -> float:
        """Mean loss over all tokens that count, of the step, on all ranks; nan if no token counts."""
        return self._read("loss")

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient of ``loss``, before clipping."""
        return self._read("norm")

    @property
    def balance_loss(self) -> float:
        """Mean over layers of the loss that balances experts, without its coefficient; nan without this loss."""
        return self._read("balance_loss")

    @property
    def busiest_expert(self) -> float:
        """Tokens of the busiest expert of any layer, relative to an even share; nan without ``balance_loss``."""
        return self._read("busiest_expert")

    @property
    def tokens(self) -> int:
        """Number of tokens that count, on all ranks."""
        return int(self._read("tokens"))

    @property
    def finite(self) -> bool:
        """False if loss or gradient norm, of this step or of one before it, was not finite.

        The weights were not changed in that case, unless updates are early. True for a step without ``tokens``, which
        makes no update and has no loss.
        """
        return bool(self._read("finite"))
