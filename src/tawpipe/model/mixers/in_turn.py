"""Documents in turn: a model that would mix the documents of a row is called with one of them after the other, those of
one length together.

It is the model's own code on every document by itself, so nothing need be known of what mixes tokens: whatever a model
does with masks, positions and states, it cannot reach another document. Weights are there for a whole visit, in which
a layer is called as many times as the documents of a micro-batch have lengths.
"""

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
        lengths: of the documents, over the flattened tokens of the rows of a micro-batch.
        numbers: of the documents of every group.
    """

    lengths: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def by(cls, keys: Iterable[Hashable], lengths: Sequence[int]) -> Groups:
        """Documents with one key in a group.

        >>> Groups.by("aba", [3, 5, 4]).numbers
        ((0, 2), (1,))
        """
        groups: dict[Hashable, list[int]] = {}
        for number, key in enumerate(keys):
            groups.setdefault(key, []).append(number)
        return cls(tuple(lengths), tuple(map(tuple, groups.values())))

    def split(self, rows: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Of [b, S, ...] the documents of every group, [n, L, ...], with ``fill`` behind those that are shorter than L.
        A document that is its group is a view.
        """
        # Not torch.split, whose views a layer could not change in place.
        documents = torch.unsafe_split_with_sizes(rows.flatten(0, 1), self.lengths)
        return [
            documents[numbers[0]][None]
            if len(numbers) == 1
            else pad_sequence([documents[number] for number in numbers], batch_first=True, padding_value=fill)
            for numbers in self.numbers
        ]

    def join(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """[b, S, ...] of what ``split`` gave, or what was computed of it.

        Args:
            shape: of the rows; the first two count.
        """
        numbers, documents = chain.from_iterable(self.numbers), chain.from_iterable(part.unbind() for part in parts)
        by_number = dict(zip(numbers, documents, strict=True))
        in_order = [by_number[number][:length] for number, length in enumerate(self.lengths)]
        return torch.cat(in_order).unflatten(0, tuple(shape[:2]))


@dataclass(frozen=True, eq=False)
class CallsInTurn(LayerCall):
    """The calls of one layer for the documents of a micro-batch; ``args`` has the arguments of each."""

    groups: Groups

    def __call__(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Call the layer for one group after the other; [b, S, H] in and out."""
        parts = zip(self.args, self.groups.split(hidden), strict=True)
        return self.groups.join([LayerCall(*given)(layer, part) for given, part in parts], hidden.shape)


def embed_in_turn(
    batch: MicroBatch, embed: Callable[[MicroBatch], tuple[Tensor, tuple[LayerCall, ...]]]
) -> tuple[Tensor, tuple[LayerCall, ...]]:
    """Hidden states of a micro-batch and the calls of its layers.

    Args:
        embed: gives the same for a micro-batch whose rows are one document each.
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
    for ids, labels, positions in zip(*(groups.split(getattr(batch, name)) for name in TENSORS), strict=True):
        rows, length = ids.shape
        yield MicroBatch(ids, labels, positions, (length,) * rows, batch.positions_given, tokens=0)
