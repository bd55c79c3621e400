"""Runs a model that would mix the documents of a row on one document after another.

Documents of equal length run together, each in its own row. The model's own code runs on every document separately. So
no knowledge of masks, positions and states is needed: the model cannot reach another document. Weights are loaded for a
whole visit, in which a layer is called once for each document length in the micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tawpipe.model.batch import TENSORS, MicroBatch
from tawpipe.model.stubs import LayerCall


@dataclass(frozen=True)
class Groups:
    """Documents that are computed together, each in a row of its own.

    Args:
        lengths: tokens of each document, over the flattened tokens of the rows of a micro-batch.
        numbers: indices of the documents of every group.
    """

    lengths: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def by(cls, keys: Iterable[Hashable], lengths: Sequence[int]) -> Groups:
        """Group documents with equal keys.

        >>> Groups.by("aba", [3, 5, 4]).numbers
        ((0, 2), (1,))
        """
        groups: dict[Hashable, list[int]] = {}
        for number, key in enumerate(keys):
            groups.setdefault(key, []).append(number)
        return cls(tuple(lengths), tuple(map(tuple, groups.values())))

    def split(self, rows: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Split rows [b, S, ...] into the documents of every group, [n, L, ...].

        Documents shorter than the longest one (L) are padded with ``fill``. A document that is alone in its group is a
        view."""
        # Not torch.split: a layer could not change its views in place.
        documents = torch.unsafe_split_with_sizes(rows.flatten(0, 1), self.lengths)
        return [
            documents[numbers[0]][None]
            if len(numbers) == 1
            else pad_sequence([documents[number] for number in numbers], batch_first=True, padding_value=fill)
            for numbers in self.numbers
        ]

    def join(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """Join tensors in the form that ``split`` returned to rows [b, S, ...]; padding is dropped.

        Args:
            parts: one tensor per group.
            shape: shape of the rows, of which the first two sizes count.
        """
        numbers, documents = chain.from_iterable(self.numbers), chain.from_iterable(part.unbind() for part in parts)
        by_number = dict(zip(numbers, documents, strict=True))
        in_order = [by_number[number][:length] for number, length in enumerate(self.lengths)]
        return torch.cat(in_order).unflatten(0, tuple(shape[:2]))


@dataclass(frozen=True, eq=False)
class CallsInTurn(LayerCall):
    """Calls of one layer for all groups of documents of a micro-batch.

    ``args`` has the arguments of each group."""

    groups: Groups

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Call the layer for one group after another.

        Hidden states are [b, S, H], in and out."""
        parts = zip(self.args, self.groups.split(hidden), strict=True)
        return self.groups.join([LayerCall(*arguments)(layer, part) for arguments, part in parts], hidden.shape)


def embed_in_turn(
    batch: MicroBatch, embed: Callable[[MicroBatch], tuple[Tensor, tuple[LayerCall, ...]]]
) -> tuple[Tensor, tuple[LayerCall, ...]]:
    """Return the hidden states of a micro-batch and the calls of its layers, computed group by group.

    Args:
        batch: the micro-batch.
        embed: function that returns both for a micro-batch whose rows are one document each.
    """
    rows, length = batch.input_ids.shape
    if len(batch.lengths) == rows:
        return embed(batch)
    groups = Groups.by(batch.lengths, batch.lengths)
    parts = [embed(part) for part in _in_groups(batch, groups)]
    calls = zip(*(called for _, called in parts), strict=True)
    together = [CallsInTurn(tuple((call.args, call.kwargs) for call in layer), {}, groups) for layer in calls]
    return groups.join([hidden for hidden, _ in parts], (rows, length)), tuple(together)


def _in_groups(batch: MicroBatch, groups: Groups) -> Iterator[MicroBatch]:
    """Yield one micro-batch per group, with one document per row."""
    for ids, labels, positions in zip(*(groups.split(getattr(batch, name)) for name in TENSORS), strict=True):
        rows, length = ids.shape
        yield MicroBatch(ids, labels, positions, (length,) * rows, batch.positions_given, tokens=0)
