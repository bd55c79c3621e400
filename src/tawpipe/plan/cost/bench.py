"""Bench: single blocks of a model with random weights, to measure their time and memory one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.discovery.watch import WithoutValues
from tawpipe.model.flops import windows
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.chunks import LayerInChunks
from tawpipe.runtime.compute.head import loss_in_chunks
from tawpipe.runtime.compute.rows import OnDevice
from tawpipe.schedule.spec import BlockSpec

TRIED_TOKENS = 3
"""Tokens of a row that is cut in two, to test whether rows of a model can be cut."""


@dataclass(frozen=True)
class Case:
    """A block on the bench, and a micro-batch for it.

    Args:
        weights: flat weights by unit; the block's parameters are views of them.
        sums: sums of gradients of trained units, by unit, in fp32.
        batch: the micro-batch, on the CPU.
        hidden: input of the block; its output has the same size.
        calls: arguments of the layers for this micro-batch; empty unless the block is a layer.
    """

    spec: BlockSpec
    weights: dict[int, Tensor]
    sums: dict[int, Tensor]
    batch: MicroBatch
    hidden: Tensor
    calls: tuple[LayerCall, ...]


class Bench:
    """Blocks of a chain, ready to run one by one; the chain cannot be used for anything else afterwards.

    Args:
        chain: chain of a model on the meta device; it is prepared here.
        chunk_tokens: tokens whose logits exist at one time.
    """

    def __init__(self, chain: Chain, device: torch.device, dtype: torch.dtype, chunk_tokens: int) -> None:
        chain.prepare(device, dtype)
        self.chain, self.device, self.dtype, self.chunk = chain, device, dtype, chunk_tokens

    @property
    def boundary(self) -> int:
        """Bytes of a boundary activation per token."""
        return self.chain.width * self.dtype.itemsize

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention windows of the layers, ascending."""
        return tuple(sorted({window for window in windows(self.chain.config.get_text_config()) if window}))

    def window(self, block: int) -> int | None:
        """Return the most tokens that a token attends to in a block; None if unlimited, or if the block is no layer."""
        is_layer = self.chain.blocks[block].kind == "layer"
        return windows(self.chain.config.get_text_config())[block - 1] if is_layer else None

    def kinds(self) -> dict[tuple, list[int]]:
        """Return the indices of the blocks of every kind: kind -> blocks. Blocks of one kind have equal costs.

        A key begins with ``embedding``, ``layer`` or ``head``; its other parts tell different layers apart."""
        types = getattr(self.chain.config.get_text_config(), "layer_types", None)
        blocks_of: dict[tuple, list[int]] = {}
        for block, spec in enumerate(self.chain.blocks):
            units = [self.chain.units[unit] for unit in spec.units]
            shapes = tuple((unit.trainable, slot.shape) for unit in units for slot in unit.slots)
            kind = spec.kind, shapes, types[block - 1] if types and spec.kind == "layer" else None, spec.needs_backward
            blocks_of.setdefault(kind, []).append(block)
        return blocks_of

    @contextmanager
    def case(self, block: int, lengths: Sequence[int], *, in_chunks: bool = False) -> Iterator[Case]:
        """Provide a block with random weights and a micro-batch, for a ``with`` statement that may run it.

        Backward passes inside the statement add their gradients to ``Case.sums``. The weights are released at its end.

        Args:
            block: index of the block.
            lengths: tokens of the micro-batch's documents.
            in_chunks: True if the rows of a layer will run in chunks.

        Raises:
            UserError: rows of this model cannot run in chunks.
        """
        chain, spec = self.chain, self.chain.blocks[block]
        ids = torch.randint(0, chain.config.get_text_config().vocab_size, (1, sum(lengths)))
        positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
        batch = MicroBatch.from_rows(ids, ids, positions)
        hidden = torch.randn(
            1, sum(lengths), self.boundary // self.dtype.itemsize, dtype=self.dtype, device=self.device
        )
        calls = self._calls(batch, in_chunks=in_chunks) if spec.kind == "layer" else ()
        weights = {unit: chain.bind(unit, self.values(unit)) for unit in spec.units}
        sums = {u: torch.zeros_like(weights[u], dtype=torch.float32) for u in spec.units if chain.units[u].trainable}
        for unit, flat in sums.items():
            chain.collect(unit, flat, accumulate=True)
        try:
            yield Case(spec, weights, sums, batch, hidden, calls)
        finally:
            for unit in sums:
                chain.finish_collect(unit)
            for unit in weights:
                chain.release(unit)

    def values(self, unit: int) -> Tensor:
        """Make random weights for a unit, as one flat tensor in the form in which it travels.

        In a packed unit every byte is 0x3C, so that its scales are about 0.01."""
        parameters = self.chain.units[unit]
        if parameters.packing is not None:
            size = parameters.packing.elements * self.dtype.itemsize
            return torch.full((size,), 0x3C, dtype=torch.uint8, device=self.device).view(self.dtype)
        return torch.randn(parameters.numel, dtype=self.dtype, device=self.device) * 0.02

    def is_packed(self, block: int) -> bool:
        """Return True if a block has packed (quantised) units."""
        return any(self.chain.units[unit].packing for unit in self.chain.blocks[block].units)

    def unpack(self, block: int) -> Callable[[], None]:
        """Return a function that dequantises the packed units of a block, after dropping earlier results.

        The function dequantises nothing if the block has no packed units."""
        packed = [
            (unit, self.values(unit)) for unit in self.chain.blocks[block].units if self.chain.units[unit].packing
        ]

        def run() -> None:
            self.chain.forget()
            for unit, flat in packed:
                self.chain.bind(unit, flat)
                self.chain.release(unit)

        return run

    def _calls(self, batch: MicroBatch, *, in_chunks: bool) -> tuple[LayerCall, ...]:
        """Run the embedding on ``batch``; return the arguments (masks, rotary tables) for the layers.

        The embedding has zero weights, on which they do not depend.

        Args:
            batch: the micro-batch.
            in_chunks: True to find out as well which arguments are cut along the tokens.
        """
        units = self.chain.blocks[0].units
        for unit in units:
            self.chain.bind(unit, torch.zeros(self.chain.units[unit].numel, dtype=self.dtype, device=self.device))
        try:
            with torch.no_grad(), WithoutValues():
                calls = self.chain.embed(batch.to(self.device))[1]
                if in_chunks and not self.chain.along_tokens:
                    self.chain.find_tokens()
        finally:
            for unit in units:
                self.chain.release(unit)
        return calls

    def layer_in_chunks(self, block: int, case: Case, size: int) -> LayerInChunks:
        """Return an object that runs a layer forward and backward on rows in chunks of ``size`` tokens."""
        return LayerInChunks(self.chain, block, case.calls, size, lambda number, run: run())

    def why_whole(self) -> str:
        """Return the reason why rows of this model cannot run in chunks, or ``""`` if they can.

        To find out, one layer of every kind runs forward on a row of two chunks."""
        layers = [blocks[0] for (kind, *_), blocks in self.kinds().items() if kind == "layer"]
        try:
            for block in layers:
                with self.case(block, (TRIED_TOKENS,), in_chunks=True) as case:
                    output = OnDevice(torch.empty_like(case.hidden))
                    self.layer_in_chunks(block, case, TRIED_TOKENS - 1).forward(OnDevice(case.hidden), output)
        except UserError as error:
            return str(error)
        return ""

    def head(self, case: Case) -> Tensor | None:
        """Run the head with its loss; return the gradient of its input, or None if gradients are disabled."""
        gradient = torch.empty_like(case.hidden) if torch.is_grad_enabled() else None
        loss_in_chunks(self.chain, case.hidden, case.batch.to(self.device), gradient, 1.0, self.chunk)
        return gradient
