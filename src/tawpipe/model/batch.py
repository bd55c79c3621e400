"""What one rank computes at once: packed rows with shifted labels and document lengths. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that predicts nothing, as everywhere in the Hugging Face libraries."""


@dataclass(frozen=True)
class MicroBatch:
    """Some packed rows that one rank computes at once."""

    input_ids: Tensor
    """[b, S] int64."""
    labels: Tensor
    """[b, S] int64, already shifted: ``labels[:, t]`` is what position t must predict, -100 where nothing counts."""
    position_ids: Tensor
    """[b, S] int64; restarts at 0 at each document's first token."""
    lengths: tuple[int, ...]
    """Document lengths over the flattened b x S tokens. No document crosses a row; padding is a document of its own."""
    index: int = 0
    """Global number of the micro-batch in its step. Random numbers depend on it, not on the rank."""
    tokens: int = -1
    """Number of labels that count; counted here when left out, which waits for the device if the labels are on one."""

    def __post_init__(self) -> None:
        assert self.input_ids.ndim == 2, f"input_ids must be [rows, tokens], got {tuple(self.input_ids.shape)}"
        assert self.input_ids.shape == self.labels.shape == self.position_ids.shape
        assert sum(self.lengths) == self.input_ids.numel(), "document lengths must add up to the tokens of the rows"
        if self.tokens < 0:
            object.__setattr__(self, "tokens", int((self.labels != IGNORE).sum()))

    @classmethod
    def from_rows(
        cls,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        index: int = 0,
    ) -> MicroBatch:
        """Build from rows in the Hugging Face convention, on the CPU.

        Args:
            input_ids: [b, S] token ids.
            labels: [b, S], not shifted: the same positions as the inputs, -100 for what must not be learned.
            position_ids: [b, S]; a new document starts wherever it is 0. Without it every row is one document.
            attention_mask: [b, S], 1 for tokens, 0 for padding on the right. Padding becomes a document of its own.
            index: global number of the micro-batch in its step.

        Labels are shifted by one, and a target in another document than its input is dropped.
        """
        rows, row_length = input_ids.shape
        starts = torch.zeros(rows, row_length, dtype=torch.bool)
        starts[:, 0] = True
        if position_ids is not None:
            starts |= position_ids == 0
        if attention_mask is not None:
            real = attention_mask.bool()
            padding_start = real[:, :-1] & ~real[:, 1:]
            if bool((~real[:, :-1] & real[:, 1:]).any()):
                raise ValueError("attention_mask: padding must be on the right of each row")
            starts &= real  # padding is one document, whatever the positions in it say
            starts[:, 0] = True
            starts[:, 1:] |= padding_start
            labels = labels.masked_fill(~real, IGNORE)

        flat_starts = starts.flatten().nonzero().flatten()
        ends = torch.cat([flat_starts[1:], torch.tensor([rows * row_length])])
        lengths = ends - flat_starts
        positions = torch.arange(rows * row_length) - flat_starts.repeat_interleave(lengths)

        shifted = torch.full_like(labels, IGNORE)
        shifted[:, :-1] = labels[:, 1:].masked_fill(starts[:, 1:], IGNORE)
        return cls(
            input_ids=input_ids,
            labels=shifted,
            position_ids=positions.view(rows, row_length),
            lengths=tuple(lengths.tolist()),
            index=index,
        )

    def pin_memory(self) -> MicroBatch:
        """The same micro-batch in page-locked memory, from which ``to`` does not block."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
        )

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with its tensors on ``device``; copies from pinned memory do not block."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
        )
