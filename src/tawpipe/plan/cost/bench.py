"""A bench: single blocks of a model with random weights, to be timed and weighed one by one."""

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
"""Of a row that is cut in two, to see whether rows of a model can be."""


@dataclass(frozen=True)
class Case:
    """A block on the bench, and a micro-batch for it.

    Args:
        weights: by unit; the block's parameters are views of them.
        sums: of the gradients of trained units, by unit, in fp32.
        batch: on the CPU.
        hidden: what the block is given, and as large as what it gives.
        calls: of the layers, for this micro-batch; none unless the block is one.
    """

    spec: BlockSpec
    weights: dict[int, Tensor]
    sums: dict[int, Tensor]
    batch: MicroBatch
    hidden: Tensor
    calls: tuple[LayerCall, ...]


class Bench:
    """Holds a chain, which is of no other use afterwards.

    Args:
        chain: of a model on the meta device; it is prepared here.
        chunk_tokens: whose logits exist at one time.
    """

    def __init__(self, chain: Chain, device: torch.device, dtype: torch.dtype, chunk_tokens: int) -> None:
        chain.prepare(device, dtype)
        self.chain, self.device, self.dtype, self.chunk = chain, device, dtype, chunk_tokens

    @property
    def boundary(self) -> int:
        """Bytes of a boundary activation for every token."""
        return self.chain.width * self.dtype.itemsize

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of layers, ascending."""
        return tuple(sorted({window for window in windows(self.chain.config.get_text_config()) if window}))

    def window(self, block: int) -> int | None:
        """Tokens that a token sees at most in a block; None for all."""
        is_layer = self.chain.blocks[block].kind == "layer"
        return windows(self.chain.config.get_text_config())[block - 1] if is_layer else None

    def kinds(self) -> dict[tuple, list[int]]:
        """The blocks of every kind; those of one kind cost the same."""
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
        """A block with weights, into whose gradients' sums backward passes within the ``with`` block add.

        Args:
            lengths: of the documents of the micro-batch.
            in_chunks: of a layer, whose rows will run in chunks.

        Raises:
            UserError: rows of this model cannot.
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
        """What a unit travels as, with random values; every byte of a packed one is part of a scale of 0.01."""
        parameters = self.chain.units[unit]
        if parameters.packing is not None:
            size = parameters.packing.elements * self.dtype.itemsize
            return torch.full((size,), 0x3C, dtype=torch.uint8, device=self.device).view(self.dtype)
        return torch.randn(parameters.numel, dtype=self.dtype, device=self.device) * 0.02

    def is_packed(self, block: int) -> bool:
        """True if a block has packed units."""
        return any(self.chain.units[unit].packing for unit in self.chain.blocks[block].units)

    def unpack(self, block: int) -> Callable[[], None]:
        """What dequantises the packed units of a block, if there are any."""
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
        """The arguments that layers are called with; the embedding's weights play no part in them."""
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
        """A layer whose rows run in chunks of ``size`` tokens."""
        return LayerInChunks(self.chain, block, case.calls, size, lambda number, run: run())

    def why_whole(self) -> str:
        """The reason why rows of this model cannot run in chunks; empty if they can."""
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
        """The head's loss; where gradients are on also its gradients, of which that of its input is returned."""
        gradient = torch.empty_like(case.hidden) if torch.is_grad_enabled() else None
        loss_in_chunks(self.chain, case.hidden, case.batch.to(self.device), gradient, 1.0, self.chunk)
        return gradient
