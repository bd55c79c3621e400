"""A workload as rivals train it: modules, batches, a loss and an optimizer.

It is all that timed and real contenders differ in. How modules are sharded or put in stages, and when what is
computed, is the contenders' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from tawpipe_lab.sleeper import BusyTime, Sleeper
from tawpipe_lab.workload import Known, RealWorkload


class Task(Protocol):
    """One rank's workload.

    Attributes:
        num_parts: of the model, which are sharded one by one.
        largest_norm: to which the global gradient norm is clipped.
        has_loss: whether the loss means anything.
    """

    num_parts: int
    largest_norm: float
    has_loss: bool

    @property
    def sleeper(self) -> Sleeper | None:
        """Computes in the place of modules that are timed; None for those that compute."""
        ...

    def parts(self) -> Iterator[nn.Module]:
        """The parts of the whole model, in their order, each of them made when it is wanted where that can be."""
        ...

    def whole(self, parts: Sequence[nn.Module]) -> nn.Module:
        """The model made of all ``parts``. It takes inputs and gives outputs, see ``batch`` and ``loss``."""
        ...

    def stage(self, blocks: range, *, parts_per_layer: int) -> nn.Module:
        """A pipeline's stage: a module from inputs, or the output of the stage before, to its own output.

        Args:
            blocks: of the model with its layers cut; 0 is the embedding and the last one the head.
        """
        ...

    def batch(self, step: int, micro_batches: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some micro-batches of a step, [micro-batches, ...]; the same on whatever rank."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The part that these micro-batches add to the loss of a step."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer | None:
        """None where weights are left as they are."""
        ...


def task_of(workload: Known, busy: BusyTime) -> Task:
    """The workload for one contender on one rank."""
    if isinstance(workload, RealWorkload):
        from tawpipe_lab.real_modules import RealTask

        return RealTask(workload)
    from tawpipe_lab.rivals.timed_modules import TimedTask

    return TimedTask(workload, busy)
