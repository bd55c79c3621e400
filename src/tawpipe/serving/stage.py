"""A stage whose weights stay: some blocks of a model, and the keys and values of all slots for its layers."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.attention.slots import PassBatch, SlotCache, SlotTokens
from tawpipe.model.chain import Chain
from tawpipe.model.stubs import LayerCall
from tawpipe.serving.drawing import draw, score
from tawpipe.serving.held import refuse_serving
from tawpipe.serving.passes import Drawn, Pass, Room

LOGITS = 2**24
"""Logits of a prompt's known tokens that exist at one time, at most."""


class StayingStage:
    """Computes passes; each of them, in one order, in all blocks that run here. The weights of these are held.

    Args:
        chain: is put into evaluation mode.

    Raises:
        UserError: a model that requests cannot share, or a context that it has no positions for.
    """

    def __init__(self, chain: Chain, room: Room) -> None:
        refuse_serving(chain, room.context)
        chain.set_training(False)
        self.chain, self.room = chain, room
        self.cache = SlotCache(room.groups * room.slots, room.context)
        self._vocabulary = chain.config.get_text_config().vocab_size

    @torch.no_grad()
    def embed(self, given: Pass) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Hidden states [1, T, H] of a pass with rows, and what its layers are called with."""
        batch = self._batch(given)
        if not 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < self._vocabulary:
            tokens = [int(batch.input_ids.min()), int(batch.input_ids.max())]
            raise UserError("tokens", tokens, f"from 0 to {self._vocabulary - 1}, the vocabulary of {self.chain.name}")
        return self.chain.embed(batch.to(self.chain.device))

    def calls(self, given: Pass) -> tuple[LayerCall, ...]:
        """What layers are called with, where the embedding is not; of the rows' tokens their number counts alone."""
        return self.chain.calls(self._batch(given).to(self.chain.device))

    @torch.no_grad()
    def layer(self, block: int, hidden: Tensor, calls: tuple[LayerCall, ...]) -> Tensor:
        """[1, T, H] -> [1, T, H]."""
        self.cache.begin(block)
        return self.chain.layer(block, hidden, calls)

    @torch.no_grad()
    def head(self, hidden: Tensor, given: Pass) -> list[Drawn]:
        """Score the known tokens of a pass, and draw behind the rows that want it, of [1, T, H]."""
        ends = [*accumulate(len(row.tokens) for row in given.rows)]
        scored, most = list[Drawn](), max(1, LOGITS // self._vocabulary)
        for row, end in zip(given.rows, ends, strict=True):
            for begin in range(0, len(row.known), most):
                known, start = row.known[begin : begin + most], end - len(row.tokens) + begin
                logits = self.chain.logits(hidden[:, start : start + len(known)])[0]
                scored += score(logits, known, row.slot, row.first + 1 + begin, row.likeliest)
        rows = [(row, end - 1) for row, end in zip(given.rows, ends, strict=True) if row.draw is not None]
        if not rows:
            return scored
        logits = self.chain.logits(hidden[:, [place for _, place in rows]])[0]
        wanted = [(row.slot, row.first + len(row.tokens), row.draw) for row, _ in rows if row.draw is not None]
        return scored + draw(logits, wanted)

    def _batch(self, given: Pass) -> PassBatch:
        parts = [SlotTokens(row.slot, row.first, row.tokens) for row in given.rows]
        return self.cache.batch(parts, self.chain.positions.first)
