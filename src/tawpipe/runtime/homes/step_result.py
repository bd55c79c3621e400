"""What the caller of a step gets: loss, gradient norm and tokens, which are read when they are asked for."""

from __future__ import annotations

from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.runtime.lanes import Event, Failure, Moment

VALUES = ("loss", "norm", "tokens", "finite", "alike")
"""What NORM leaves of a step, in this order."""


class StepResult:
    """Loss, gradient norm and token count of a step; reading one waits for the step's NORM and nothing else."""

    def __init__(self, event: Event, values: Tensor, ended: Moment, failure: Failure) -> None:
        self._event, self._values, self._ended, self._failure = event, values, ended, failure
        self.told = False
        """True once the caller has been told that ranks were given different batches."""

    def __repr__(self) -> str:
        """The numbers, which are waited for; or why there are none."""
        told = self._failure.told, self.told
        try:
            self.require_alike()
        except Exception as error:
            self._failure.told, self.told = told  # a text is no error
            return f"StepResult(failed: {error})"
        norm = f", grad norm {self.grad_norm:.3g}" if self.grad_norm else ""  # an evaluation has none
        return f"StepResult(loss {self.loss:.4f}{norm}, {self.tokens:,} tokens{'' if self.finite else ', not finite'})"

    def wait(self) -> None:
        """Wait until the numbers are there."""
        waited = not self._event.done
        self._failure.wait_for(self._event)
        self._ended.seconds(waited=waited)  # before more time passes

    def _read(self, name: str) -> float:
        self.require_alike()
        return float(self._values[VALUES.index(name)])

    def require_alike(self) -> None:
        """Raises UserError, on all ranks, if they were given different batches or rates. The weights were not touched,
        unless updates are early. Whatever number of the step is read asks for it first.
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
        """The moment at which the numbers were there, as a time of ``time.perf_counter``, however much later it is that
        somebody looks.
        """
        self.wait()
        return self._ended.seconds(waited=False)

    @property
    def took_s(self) -> float:
        """Seconds from issuing the step until its numbers were there, the rest of the step before it included."""
        return self.ended_s - self._ended.issued_s

    @property
    def loss(self) -> float:
        """Mean over all tokens of the step, on all ranks, that count; not a number if none does."""
        return self._read("loss")

    @property
    def grad_norm(self) -> float:
        """Global norm of the gradient of that mean, before clipping."""
        return self._read("norm")

    @property
    def tokens(self) -> int:
        """Tokens that count, on all ranks."""
        return int(self._read("tokens"))

    @property
    def finite(self) -> bool:
        """False if loss or norm, of this step or of one before it, was not finite. The weights were not touched, unless
        updates are early. True for a step without ``tokens``, which is left out and has no loss.
        """
        return bool(self._read("finite"))
