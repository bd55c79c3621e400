"""What the computations of all kinds of blocks share: the model, what is held, and the step's random numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.runtime.compute.activations import ROWS, Activations
from tawpipe.runtime.compute.randomness import BlockRandomness, seed_of
from tawpipe.runtime.compute.rows import GrowingRoom, Places
from tawpipe.runtime.compute.sets import SetTokens
from tawpipe.runtime.compute.split import DeferredProducts
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.schedule.actions import Action, Lane
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.spec import ModelSpec

T = TypeVar("T")


class Blocks:
    """The blocks of a model on one rank, and what is held for them between actions.

    Args:
        chunk_tokens: tokens of a micro-batch for which logits exist at one time.
        sequence_chunk: tokens of a row that a layer computes at one time; 0 for all.
        sequence_ranks: that compute a row together.
        compiled: layers are compiled.
        split_backward: the backward passes of layers may be in two parts (BACKWARD_INPUT); not of compiled ones, and
            not in chunks.
        offload_dir: folder of files for what waits outside of the device chunk by chunk; the host's memory if empty.
    """

    def __init__(
        self,
        chain: Chain,
        spec: ModelSpec,
        *,
        chunk_tokens: int,
        sequence_chunk: int = 0,
        sequence_ranks: int = 1,
        compiled: bool = False,
        split_backward: bool = False,
        offload_dir: str = "",
    ) -> None:
        self.chain, self.spec, self.chunk_tokens = chain, spec, chunk_tokens
        self.sequence_chunk, self.sequence_ranks = sequence_chunk, sequence_ranks
        self.split_backward = split_backward
        self.random = BlockRandomness(chain.device, compiled=compiled)
        self.repeated: set[tuple[int, bool]] = set()
        """Blocks that have been seen to give the same twice."""
        self.held = Activations()
        self.bound: dict[int, Tensor] = {}
        """Unit -> what its parameters are views of."""
        self.rooms: dict[tuple[Buffer, torch.dtype], GrowingRoom] = {}
        """Places in which inputs wait in the host's memory, and into which they come back; for the whole run."""
        self.places = Places(chain.device, offload_dir)
        self.under_way: defaultdict[Lane, deque[torch.Event]] = defaultdict(deque)
        """The ends of the latest transfers of activations, on CUDA."""
        self.stream: Any = None
        """The one that computes, on CUDA: that of the executor's lane, known before anything is received."""

    def bind(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        if action.weights:
            for unit, buffer in zip(self.spec.blocks[action.block].units, action.weights, strict=True):
                self.bound[unit] = self.chain.bind(unit, buffers[buffer])

    def release(self, action: Action) -> None:
        """End a computation: whatever reads a weight outside of its visit finds NaN, and what is not needed goes."""
        if action.weights:
            for unit in self.spec.blocks[action.block].units:
                self.chain.release(unit)
        self.held.free(action)

    def input(self, action: Action) -> Any:
        """The input of a block: a tensor, or rows that are elsewhere."""
        return self.held.inputs[next(row for row in action.reads if row.kind in ROWS)]

    def dealt(self, given: StepInput, m: int) -> tuple[MicroBatch, SetTokens | None]:
        """A micro-batch, of a document that is cut its slice; and which of its tokens this rank computes, where it is
        not alone.
        """
        batch = given.micro_batches[m]
        if (part := given.slices.get(m)) is not None:
            return batch.tokens_at(((part.begin, part.end),)), None
        if self.sequence_ranks == 1 or not given.is_shared(m):
            return batch, None
        row = batch.in_one_row()
        return row, SetTokens(row.lengths, self.sequence_ranks, given.place)

    def shape(self, given: StepInput, m: int) -> tuple[int, ...]:
        """Rows and tokens of a micro-batch that this rank computes."""
        batch, dealt = self.dealt(given, m)
        return (1, sum(end - begin for begin, end in dealt.own)) if dealt else tuple(batch.input_ids.shape)

    def defers(self, block: int) -> DeferredProducts:
        """A place for what the gradients of a layer's weights are made of, where they come later."""
        return DeferredProducts(self.chain.parameters_of(self.spec.blocks[block].units))

    def name(self, action: Action) -> str:
        return f"{self.chain.block_name(action.block)} of {self.chain.name}"

    def drawing(self, action: Action, given: StepInput, forward: Callable[[], T]) -> T:
        """``forward()`` with the random numbers of this block and micro-batch."""
        return self.random.run(self.state(action), self.seed(action, given), forward)

    def state(self, action: Action) -> tuple[int, bool]:
        """What a block's first run is the first of: of it in training, or in an evaluation."""
        return action.block, self.chain.model.training

    def seed(self, action: Action, given: StepInput) -> int:
        """Random numbers of a block are the same wherever and whenever it computes this micro-batch."""
        return seed_of(given.seed or 0, given.step, action.micro_batch, action.block)
