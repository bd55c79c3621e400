"""Packed rows that one rank computes together: the only form in which tokens pass from the data to a layer.

Document borders, positions and shifted labels are derived once, in this module. All later code only reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tawpipe.errors import UserError
from tawpipe.model.kernels import Documents

IGNORE = -100
"""Label of a position that does not count in the loss, as in all Hugging Face libraries."""
TENSORS = ("input_ids", "labels", "position_ids")


def tokens_of(tensor: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the tokens of ``tensor`` [b, S, ...] in ``ranges`` of each row, concatenated along dimension 1."""
    return torch.cat([tensor[:, :0], *(tensor[:, begin:end] for begin, end in ranges)], dim=1)


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows that one rank computes together."""

    input_ids: Tensor
    """[b, S] int64."""
    labels: Tensor
    """[b, S] int64, already shifted: ``labels[:, t]`` is the token that position t must predict, or -100 if it does not
    count."""
    position_ids: Tensor
    """[b, S] int64. Positions restart at 0 at each document's first token, unless ``positions_given``."""
    lengths: tuple[int, ...]
    """Document lengths over the flattened b x S tokens. No document crosses a row. Padding is a document of its own."""
    positions_given: bool = False
    """True if ``position_ids`` are passed to the model unchanged. Otherwise positions are counted in each document as
    the model counts them: RoBERTa and similar models do not start at 0."""
    tokens: int = -1
    """Number of labels that count. If omitted it is counted here, which waits for a device that holds the labels."""

    def __repr__(self) -> str:
        rows, tokens = self.input_ids.shape
        return f"MicroBatch({rows} x {tokens} tokens, {len(self.lengths)} documents, {self.tokens} labels that count)"

    def __post_init__(self) -> None:
        assert self.input_ids.ndim == 2, f"input_ids must be [rows, tokens], got {tuple(self.input_ids.shape)}"
        assert self.input_ids.shape == self.labels.shape == self.position_ids.shape
        assert sum(self.lengths) == self.input_ids.numel(), "document lengths must add up to the tokens of the rows"
        if self.tokens < 0:
            object.__setattr__(self, "tokens", int((self.labels != IGNORE).sum()))

    @classmethod
    def from_rows(
        cls, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> MicroBatch:
        """Build a micro-batch from rows in the Hugging Face convention, on the CPU.

        All tensors are copied. Labels are shifted by one. A target in another document than its input is dropped.

        Args:
            input_ids: [b, S] token ids.
            labels: [b, S], not shifted: at the same positions as the inputs, -100 for tokens that must not be learned.
            position_ids: [b, S], passed to the model unchanged. A new document starts where positions do not increase.
                Without them every row is one document.
            attention_mask: [b, S], 1 for tokens, 0 for padding on the right. Padding becomes a document of its own.

        Raises:
            UserError: the attention mask is not ones followed by zeros, or positions are negative or have gaps.
        """
        starts = torch.zeros(input_ids.shape, dtype=torch.bool, device="cpu")
        starts[:, 0] = True
        real = torch.ones_like(starts) if attention_mask is None else attention_mask.bool()
        if position_ids is not None:
            position_ids = position_ids.masked_fill(~real, 0)
            if bool((position_ids < 0).any()):
                raise UserError("position_ids", int(position_ids.min()), "0 or more")
            step = position_ids.diff(dim=1)
            starts[:, 1:] |= step <= 0
            # A repeated position can only mean two documents, the first of one token.
            unclear = ((step > 1) | ((step == 0) & ~starts[:, :-1])) & real[:, 1:]
            if bool(unclear.any()):
                row, at = unclear.nonzero()[0].tolist()
                raise UserError(
                    "position_ids",
                    position_ids[row, max(0, at - 1) : at + 3].tolist(),
                    "positions that go on by one inside a document and start anew with the next one",
                )
        if attention_mask is not None:
            if bool((attention_mask != real).any()):
                raise UserError(
                    "attention_mask",
                    sorted({float(value) for value in attention_mask.unique()[:5]}),
                    "1 for tokens and 0 for padding; position_ids that start anew say where documents begin",
                )
            if bool((~real[:, :-1] & real[:, 1:]).any()):
                raise UserError("attention_mask", "a 0 before a 1", "padding on the right of each row only")
            starts &= real  # padding is one document, regardless of its positions
            starts[:, 0] = True
            starts[:, 1:] |= real[:, :-1] & ~real[:, 1:]
            labels = labels.masked_fill(~real, IGNORE)
        first = starts.flatten().nonzero().flatten()
        lengths = first.diff(append=first.new_tensor([starts.numel()])).tolist()
        batch = cls.of_documents(input_ids, labels, lengths, position_ids)
        # Padding gets position 0: a model may have fewer positions than a row has tokens.
        return replace(batch, position_ids=batch.position_ids.masked_fill(~real, 0))

    @classmethod
    def of_documents(
        cls, input_ids: Tensor, labels: Tensor, lengths: Sequence[int], position_ids: Tensor | None = None
    ) -> MicroBatch:
        """Build a micro-batch from rows and the lengths of their documents.

        Only this method turns borders into positions and shifts labels.

        Args:
            input_ids: [b, S] token ids.
            labels: [b, S], not shifted, -100 for tokens that must not be learned.
            lengths: tokens of each document over the flattened tokens, padding included.
            position_ids: [b, S], passed to the model unchanged; by default positions are counted in each document.
        """
        each = torch.tensor(lengths, device="cpu")
        ends = each.cumsum(0)
        shifted = labels.flatten().roll(-1)
        shifted[ends - 1] = IGNORE  # the last token of a document predicts nothing
        positions = torch.arange(input_ids.numel(), device="cpu") - (ends - each).repeat_interleave(each)
        return cls(
            input_ids=input_ids.clone(),
            labels=shifted.view_as(labels),
            position_ids=positions.view_as(input_ids) if position_ids is None else position_ids.clone(),
            lengths=tuple(lengths),
            positions_given=position_ids is not None,
        )

    def documents(self, device: torch.device) -> Documents:
        """Return the borders of the documents, for attention on ``device``."""
        rows, length = self.input_ids.shape
        return Documents.of(self.lengths, (rows, length), device)

    @classmethod
    def cat(cls, parts: Sequence[MicroBatch], dim: int = 0) -> MicroBatch:
        """Concatenate micro-batches: their rows, or with ``dim`` 1 the tokens of their rows.

        Along dimension 0 all rows must have one length."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            *(torch.cat([getattr(part, name) for part in parts], dim) for name in TENSORS),
            lengths=tuple(length for part in parts for length in part.lengths),
            positions_given=parts[0].positions_given,
        )

    @classmethod
    def padded(cls, parts: Sequence[MicroBatch]) -> MicroBatch:
        """Concatenate the rows of several micro-batches, padding each to the longest row.

        A micro-batch that is padded must have one row. Padding is a separate document without labels."""
        longest = max(part.input_ids.shape[1] for part in parts)
        return cls.cat([part.longer(longest) for part in parts])

    def longer(self, length: int) -> MicroBatch:
        """Return this micro-batch of one row padded to ``length`` tokens.

        Padding is a separate document without labels."""
        rows, tokens = self.input_ids.shape
        if tokens == length:
            return self
        assert rows == 1, "padding stands behind the documents of one row"
        padding = torch.zeros(1, length - tokens, dtype=torch.int64, device="cpu")
        behind = MicroBatch(padding, padding + IGNORE, padding, (length - tokens,), self.positions_given)
        return MicroBatch.cat([self, behind], dim=1)

    @classmethod
    def in_a_row(cls, parts: Sequence[MicroBatch]) -> MicroBatch:
        """Return one row with the documents of several micro-batches, one after the other."""
        return cls.cat([part.in_one_row() for part in parts], dim=1)

    def part(self, rows: range) -> MicroBatch:
        """Return a micro-batch of the given ``rows``, as views."""
        length = self.input_ids.shape[1]
        borders = [0, *accumulate(self.lengths)]
        documents = slice(borders.index(rows.start * length), borders.index(rows.stop * length))
        return MicroBatch(
            *(getattr(self, name)[rows.start : rows.stop] for name in TENSORS),
            lengths=self.lengths[documents],
            positions_given=self.positions_given,
        )

    def in_one_row(self) -> MicroBatch:
        """Return this micro-batch with all its rows concatenated into one row."""
        return self if self.input_ids.shape[0] == 1 else self._with(lambda tensor: tensor.reshape(1, -1))

    def tokens_at(self, ranges: Sequence[tuple[int, int]]) -> MicroBatch:
        """Return the tokens in ``ranges`` of this micro-batch of one row, as one document.

        ``tokens`` stays the number of labels in the whole row."""
        changed: dict[str, Any] = {name: tokens_of(getattr(self, name), ranges) for name in TENSORS}
        return replace(self, **changed, lengths=(changed["input_ids"].shape[1],))

    def copy(self, *, pinned: bool = False) -> MicroBatch:
        """Return a copy with its own tensors, in page-locked memory if ``pinned``."""
        return self._with(lambda tensor: torch.empty_like(tensor, pin_memory=pinned).copy_(tensor))

    def pin_memory(self) -> MicroBatch:
        """Return a copy in page-locked memory, from which ``to`` copies without waiting."""
        return self._with(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return this micro-batch with its tensors on ``device``.

        Copies from page-locked memory do not wait."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def _with(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a copy in which every tensor is replaced by ``change(tensor)``."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in TENSORS}
        return replace(self, **changed)
