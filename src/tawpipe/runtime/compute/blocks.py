"""State shared by the computations of all blocks: the model, kept activations, and the step's random numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.runtime.compute.activations import ROWS, Activations
from tawpipe.runtime.compute.cp_groups import CpTokens
from tawpipe.runtime.compute.randomness import BlockRandomness, seed_of
from tawpipe.runtime.compute.rows import GrowingBuffer, Places
from tawpipe.runtime.compute.split import DeferredProducts
from tawpipe.runtime.compute.step_input import StepInput
from tawpipe.schedule.actions import Action, Lane
from tawpipe.schedule.buffers import Buffer
from tawpipe.schedule.spec import ModelSpec

T = TypeVar("T")


class Blocks:
    """Blocks of a model on one rank, and the values that are kept for them between actions.

    Args:
        chain: The model as a chain of blocks.
        spec: Units and kinds of the blocks.
        chunk_tokens: Tokens of a micro-batch for which logits exist at one time.
        sequence_chunk: Tokens of a row that a layer computes at one time; 0 for all.
        sequence_ranks: Number of ranks that compute a row together.
        compiled: True if layers are compiled.
        split_backward: Let the backward passes of layers have two parts (BACKWARD_INPUT). Not for compiled layers or
            chunks.
        offload_dir: Folder of files for rows that are kept outside the device; ``""`` for CPU memory.
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
        self.catches = chain.own_code and not compiled
        """True if results of attention that the model's own code calls can be kept."""
        self.random = BlockRandomness(chain.device, compiled=compiled)
        self.repeated: set[tuple[int, bool]] = set()
        """States of blocks (block, training) whose first run was repeated with an equal result."""
        self.held = Activations()
        self.bound: dict[int, Tensor] = {}
        """Unit -> the flat buffer that its parameters are views of."""
        self.growing_buffers: dict[tuple[Buffer, torch.dtype], GrowingBuffer] = {}
        """Buffers for inputs that are offloaded to CPU memory or reloaded from it; reused during the whole run."""
        self.places = Places(chain.device, offload_dir)
        self.under_way: defaultdict[Lane, deque[torch.Event]] = defaultdict(deque)
        """Lane -> end events of its latest transfers of activations, on CUDA."""
        self.stream: Any = None
        """CUDA stream of the executor's compute lane, set before anything is received; None on the CPU."""

    def bind(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """Make the parameters of the action's block views of the weight buffers that it reads."""
        if weights := action.weights:
            for unit, buffer in zip(self.spec.blocks[action.block].units, weights, strict=True):
                self.bound[unit] = self.chain.bind(unit, buffers[buffer])

    def release(self, action: Action) -> None:
        """End a computation: unbind the block's weights and drop the activations that no later action reads.

        Code that reads a weight after this finds NaN.
        """
        if action.weights:
            for unit in self.spec.blocks[action.block].units:
                self.chain.release(unit)
        self.held.free(action)

    def input(self, action: Action) -> Any:
        """Return the input of the action's block: a tensor, a kept graph, or rows outside the device."""
        return self.held.inputs[next(row for row in action.reads if row.kind in ROWS)]

    def dealt(self, step_input: StepInput, m: int) -> tuple[MicroBatch, CpTokens | None]:
        """Return micro-batch ``m``, and the assignment of its tokens to the ranks of a context-parallel group.

        For a document slice, the micro-batch holds only the slice. The second value is None if this rank computes all
        tokens.
        """
        batch = step_input.micro_batches[m]
        if (part := step_input.slices.get(m)) is not None:
            return batch.tokens_at(((part.begin, part.end),)), None
        if self.sequence_ranks == 1 or not step_input.is_shared(m):
            return batch, None
        row = batch.in_one_row()
        return row, CpTokens(row.lengths, self.sequence_ranks, step_input.place)

    def shape(self, step_input: StepInput, m: int) -> tuple[int, ...]:
        """Return the number of rows and of tokens per row of micro-batch ``m`` that this rank computes."""
        batch, dealt = self.dealt(step_input, m)
        return (1, sum(end - begin for begin, end in dealt.own)) if dealt else tuple(batch.input_ids.shape)

    def defers(self, block: int) -> DeferredProducts:
        """Return a context for a layer's forward pass that keeps what its weight gradients need later."""
        return DeferredProducts(self.chain.parameters_of(self.spec.blocks[block].units))

    def name(self, action: Action) -> str:
        """Return the name of the action's block and model, for messages."""
        return f"{self.chain.block_name(action.block)} of {self.chain.name}"

    def drawing(self, action: Action, step_input: StepInput, forward: Callable[[], T]) -> T:
        """Call ``forward`` with the random numbers of the action's block and micro-batch, and return its result."""
        return self.random.run(self.state(action), self.seed(action, step_input), forward)

    def state(self, action: Action) -> tuple[int, bool]:
        """Return the key under which the first run of a block is recorded: its index, and True in training."""
        return action.block, self.chain.model.training

    def seed(self, action: Action, step_input: StepInput) -> int:
        """Return the seed of a block and micro-batch in this step, equal on every rank and for every recomputation."""
        return seed_of(step_input.seed or 0, step_input.step, action.micro_batch, action.block)
