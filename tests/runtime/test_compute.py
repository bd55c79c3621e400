"""Blocks as actions run them, on a chain of two small layers: what is held, what is refused, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from schedules import llama
from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.runtime.compute.blocks import Blocks
from tawpipe.runtime.compute.compute import Compute
from tawpipe.runtime.compute.cut_layer import rows_of
from tawpipe.runtime.compute.embedding import forward as embed
from tawpipe.runtime.compute.repeated import compare, sums_when_new
from tawpipe.runtime.compute.rows import OnDevice
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.runtime.frame import Frame
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.blocks import offload, reload
from tawpipe.schedule.buffers import Buffer, block_input, context, home_weight, loss, reloaded


class SmallChain:
    """As much of a chain as forward passes need: an embedding, a layer that multiplies, and a loss that sums."""

    device, alone, name, along_tokens = torch.device("cpu"), "", "Small", ()
    model = SimpleNamespace(training=True)
    own_code = False

    def __init__(self, layer: Callable[[Tensor, Tensor], Tensor] = lambda hidden, weight: hidden * weight[0]) -> None:
        self._layer, self.bound = layer, dict[int, Tensor]()

    def bind(self, unit: int, flat: Tensor) -> Tensor:
        self.bound[unit] = flat
        return flat

    def release(self, unit: int) -> None:
        del self.bound[unit]

    def embed(self, batch: MicroBatch) -> tuple[Tensor, tuple[Any, ...]]:
        return batch.input_ids[..., None].float() * self.bound[0][0], ()

    def layer(self, block: int, hidden: Tensor, calls: tuple[Any, ...], piece: None = None) -> Tensor:
        return self._layer(hidden, self.bound[block])

    def head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return (hidden[..., 0] * (labels != IGNORE)).sum()

    def check_head(self, hidden: Tensor) -> None:
        pass

    def block_name(self, block: int) -> str:
        return f"layer {block - 1}"


def row(*labels: int) -> MicroBatch:
    ids = torch.tensor([[1, 2, 3]])
    return MicroBatch(ids, torch.tensor([labels]), torch.arange(3)[None], (3,))


GIVEN = StepInput({4: row(2, 3, IGNORE)}, scale=1.0, seed=None, step=0)
WEIGHTS = {home_weight(unit): torch.full((8,), 2.0) for unit in range(5)}
TRANSPORT: Any = None
FRAME = Frame(WEIGHTS, TRANSPORT, GIVEN)


def forward(block: int, *, frees: bool = True) -> Action:
    """FORWARD of an evaluation, as schedules have it."""
    weights = tuple(home_weight(unit) for unit in ([0], [1], [2], [3, 4])[block])
    if block == 0:
        return Action(Op.FORWARD, Lane.COMPUTE, weights, (block_input(4, 1), context(4)), block=0, micro_batch=4)
    source = block_input(4, block)
    reads = (*weights, source, context(4))
    writes = (loss(4),) if block == 3 else (block_input(4, block + 1),)
    gone: tuple[Buffer, ...] = ((source, context(4)) if block == 3 else (source,)) if frees else ()
    return Action(Op.FORWARD, Lane.COMPUTE, reads, writes, gone, block=block, micro_batch=4)


def compute(chain: SmallChain, **settings: Any) -> Compute:
    made: Any = chain
    return Compute(made, llama(2), chunk_tokens=2, **settings)


def test_forward_through_all_blocks_gives_the_loss_and_releases_weights() -> None:
    chain = SmallChain()
    made = compute(chain)
    for block in range(4):
        made.forward(forward(block), FRAME)
        assert not chain.bound  # a visit has ended
    norm = Action(Op.NORM, Lane.COMPUTE, (loss(4),), (), (loss(4),), group="world")
    (value,) = made.losses(norm, FRAME)
    assert value == (1 + 2) * 2 * 2 * 2  # of the two tokens that count
    assert made.losses(Action(Op.NORM, Lane.COMPUTE, group="world"), FRAME) == []


def test_offloaded_input_is_reloaded_unchanged() -> None:
    chain = SmallChain()
    made = compute(chain)
    made.forward(forward(0), FRAME)
    made.forward(forward(1, frees=False), FRAME)
    made.offload(offload(1, 4, 0), FRAME)
    made.reload(reload(1, 4, 0), FRAME)
    reads, writes = (home_weight(1), reloaded(0, 1), context(4)), (block_input(4, 3),)
    again = Action(Op.FORWARD, Lane.COMPUTE, reads, writes, block=1, micro_batch=4)
    seen: list[Tensor] = []
    chain._layer = lambda hidden, weight: seen.append(hidden.clone()) or hidden
    with pytest.raises(KeyError):
        made.reload(reload(1, 4, 0), FRAME)  # its place in the host's memory is free again
    made.forward(again, FRAME)
    assert torch.equal(seen[0], torch.tensor([[[2.0], [4.0], [6.0]]]))


def counted() -> Callable[[Tensor, Tensor], Tensor]:
    calls = [0]

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        calls[0] += 1
        return hidden + calls[0]

    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (counted(), "run twice on the same input it gives two results"),
        (lambda hidden, weight: hidden * weight.add_(1)[:1] * 0, "changes weights in place"),
    ],
)
def test_layer_that_is_not_a_function_of_its_input_is_refused_by_name(layer, reason) -> None:
    made = compute(SmallChain(layer))
    frame = replace(FRAME, buffers={buffer: flat.clone() for buffer, flat in WEIGHTS.items()})
    made.forward(forward(0), frame)
    with pytest.raises(UserError, match=f"layer 0 of Small.*{reason}"):
        made.forward(forward(1), frame)


def test_every_token_is_counted_on_one_rank() -> None:
    rows = {0: row(1, 2, 3), 1: row(1, IGNORE, IGNORE), 2: row(1, 1, IGNORE)}
    alone = StepInput(rows, scale=1.0, seed=0, step=0)
    assert alone.tokens == 6 and alone.is_shared(2)
    of_set = [StepInput(rows, scale=1.0, seed=0, step=0, place=place, shared=2).tokens for place in range(2)]
    assert of_set == [6, 2]  # the second rank counts what it computes alone
    assert StepInput(rows, scale=1.0, seed=0, step=0, counted={1}).tokens == 1


def blocks_of(**settings: Any) -> Blocks:
    chain: Any = SmallChain()
    return Blocks(chain, llama(2), chunk_tokens=2, **settings)


def test_embedding_keeps_batch_and_input_until_freed() -> None:
    blocks, action = blocks_of(), forward(0)
    blocks.bind(action, WEIGHTS)
    embed(blocks, action, GIVEN, None)
    held = blocks.held
    assert torch.equal(held.inputs[block_input(4, 1)], torch.tensor([[[2.0], [4.0], [6.0]]]))  # type: ignore[arg-type]
    assert set(held.batches) == {context(4)}
    held.free(Action(Op.FORWARD, Lane.COMPUTE, frees=(block_input(4, 1), context(4)), block=1, micro_batch=4))
    assert not any(held.tables.values())


def test_context_parallel_ranks_share_the_tokens_of_a_row() -> None:
    blocks = blocks_of(sequence_ranks=2)
    given = [StepInput(GIVEN.micro_batches, scale=1.0, seed=None, step=0, place=place) for place in range(2)]
    assert sum(blocks.shape(part, 4)[1] for part in given) == 3 == blocks_of().shape(GIVEN, 4)[1]


def test_new_block_is_checked_once_to_repeat_its_result() -> None:
    blocks, action = blocks_of(), forward(1)
    blocks.bind(action, WEIGHTS)
    assert sums_when_new(blocks, action)
    compare(blocks, action, torch.ones(2), torch.ones(2))
    with pytest.raises(UserError, match=r"model: got 'layer 0 of Small'; run twice .* gives two results"):
        compare(blocks, action, torch.ones(2), torch.zeros(2))
    blocks.repeated.add(blocks.state(action))
    assert sums_when_new(blocks, action) is None


def test_rows_of_wraps_a_tensor_and_returns_rows_unchanged() -> None:
    tensor = torch.arange(6.0).view(1, 3, 2)
    rows = rows_of(tensor)
    assert isinstance(rows, OnDevice) and rows_of(rows) is rows
    assert torch.equal(torch.cat(list(rows.read([slice(0, 2), slice(2, 3)])), 1), tensor)
