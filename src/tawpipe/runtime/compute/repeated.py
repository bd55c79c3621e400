"""Check of blocks at their first run: a block runs twice, and both results must be equal.

A block's output may depend on nothing but its input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.randomness import seed_of
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.schedule.actions import Action


def sums_when_new(blocks: Blocks, action: Action) -> list[Tensor] | None:
    """Return sums over the bits of a block's weights if the block runs for the first time, else None."""
    if blocks.state(action) in blocks.repeated:
        return None
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flats = [blocks.bound[unit] for unit in blocks.spec.blocks[action.block].units]
    return [flat.view(integers[flat.itemsize]).sum() for flat in flats]


def check_head(blocks: Blocks, action: Action, step_input: StepInput, hidden: Tensor) -> None:
    """Run ``Chain.check_head`` if the head runs for the first time, and mark the head as checked.

    The check draws from separate random numbers."""
    state = blocks.state(action)
    if state not in blocks.repeated:
        blocks.repeated.add(state)
        with blocks.random.seeded(seed_of(blocks.seed(action, step_input), 1)):
            blocks.chain.check_head(hidden)


@torch.no_grad()
def check_new(
    blocks: Blocks,
    action: Action,
    step_input: StepInput,
    before: list[Tensor] | None,
    first: Tensor,
    forward: Callable[[], Tensor],
) -> None:
    """Run a block again if it is new; raise an error if the result differs or if its weights have changed.

    Args:
        blocks: Model and kept values.
        action: FORWARD of the block.
        step_input: Inputs of the step.
        before: Result of ``sums_when_new`` before the first run. With None nothing is done.
        first: Output of the first run.
        forward: Runs the block again.
    """
    if before is not None:
        compare(blocks, action, first, blocks.drawing(action, step_input, forward))
        expect_unchanged(blocks, action, before)


def expect_unchanged(blocks: Blocks, action: Action, before: list[Tensor]) -> None:
    """Raise a UserError if the weights' checksums differ from ``before``; else mark the block as checked."""
    if any(old != new for old, new in zip(before, sums_when_new(blocks, action) or (), strict=True)):
        expected = "its forward pass changes weights in place, which only the optimizer may do"
        raise UserError("model", blocks.name(action), expected)
    blocks.repeated.add(blocks.state(action))


def compare(blocks: Blocks, action: Action, first: Tensor, second: Tensor) -> None:
    """Raise a UserError if two outputs of a block differ."""
    # Some GPU kernels add in an arbitrary order.
    limit = torch.finfo(first.dtype).eps if first.is_cuda else 0.0
    reach = limit * float(first.abs().nan_to_num().max())
    if not torch.allclose(first, second, rtol=limit, atol=reach, equal_nan=True):
        raise UserError(
            "model",
            blocks.name(action),
            "run twice on the same input it gives two results, so its gradients would belong to neither: it keeps "
            "state from call to call, or draws random numbers elsewhere than from torch's default generators",
        )
