"""A stage whose weights stay: some blocks of a model, with the keys and values of all slots for its layers."""

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
from tawpipe.serving.passes import Drawn, Pass, SlotLayout

LOGITS = 2**24
"""Maximum number of logits that exist at one time while the known tokens of a prompt are scored."""


class StayingStage:
    """Computes passes in the blocks of this stage, whose weights are loaded.

    All blocks must see the passes in one order.

    Args:
        chain: the model; it is put into evaluation mode.
        slot_layout: groups and KV-cache slots.

    Raises:
        UserError: requests cannot share a pass of this model, or the context exceeds its positions.
    """

    def __init__(self, chain: Chain, slot_layout: SlotLayout) -> None:
        refuse_serving(chain, slot_layout.context)
        chain.set_training(False)
        self.chain, self.slot_layout = chain, slot_layout
        self.cache = SlotCache(slot_layout.groups * slot_layout.slots, slot_layout.context)
        self._vocabulary = chain.config.get_text_config().vocab_size

    @torch.no_grad()
    def embed(self, pass_: Pass) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Embed the tokens of a pass that has rows.

        Returns:
            Hidden states [1, tokens, hidden], and the arguments of the layers.

        Raises:
            UserError: a token id is outside of the vocabulary.
        """
        batch = self._batch(pass_)
        if not 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < self._vocabulary:
            tokens = [int(batch.input_ids.min()), int(batch.input_ids.max())]
            raise UserError("tokens", tokens, f"from 0 to {self._vocabulary - 1}, the vocabulary of {self.chain.name}")
        return self.chain.embed(batch.to(self.chain.device))

    def calls(self, pass_: Pass) -> tuple[LayerCall, ...]:
        """Return the arguments of the layers for a pass, on a stage without the embedding.

        Only the number of tokens in each row is used, not their ids."""
        return self.chain.calls(self._batch(pass_).to(self.chain.device))

    @torch.no_grad()
    def layer(self, block: int, hidden: Tensor, calls: tuple[LayerCall, ...]) -> Tensor:
        """Compute a layer for a pass, and store the keys and values of its tokens in their slots.

        Args:
            block: number of the layer's block.
            hidden: input, [1, tokens, hidden].
            calls: arguments of the layers, from ``embed`` or ``calls``.

        Returns:
            Hidden states [1, tokens, hidden].
        """
        self.cache.begin(block)
        return self.chain.layer(block, hidden, calls)

    @torch.no_grad()
    def head(self, hidden: Tensor, pass_: Pass) -> list[Drawn]:
        """Score the known tokens of a pass, and draw a token after each row that has sampling settings.

        Args:
            hidden: output of the last layer, [1, tokens, hidden].
            pass_: the pass.

        Returns:
            First the scored tokens, then the drawn ones.
        """
        ends = [*accumulate(len(row.tokens) for row in pass_.rows)]
        scored, most = list[Drawn](), max(1, LOGITS // self._vocabulary)
        for row, end in zip(pass_.rows, ends, strict=True):
            for begin in range(0, len(row.known), most):
                known, start = row.known[begin : begin + most], end - len(row.tokens) + begin
                logits = self.chain.logits(hidden[:, start : start + len(known)])[0]
                scored += score(logits, known, row.slot, row.first + 1 + begin, row.likeliest)
        rows = [(row, end - 1) for row, end in zip(pass_.rows, ends, strict=True) if row.draw is not None]
        if not rows:
            return scored
        logits = self.chain.logits(hidden[:, [place for _, place in rows]])[0]
        wanted = [(row.slot, row.first + len(row.tokens), row.draw) for row, _ in rows if row.draw is not None]
        return scored + draw(logits, wanted)

    def _batch(self, pass_: Pass) -> PassBatch:
        """Return the rows of a pass as one batch of packed documents, with the KV-cache slot and position of each."""
        parts = [SlotTokens(row.slot, row.first, row.tokens) for row in pass_.rows]
        return self.cache.batch(parts, self.chain.positions.first)
