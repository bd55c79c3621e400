"""The rows that documents of uneven lengths make: one for every bin of a rank (schedule/balance.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tawpipe.errors import UserError
from tawpipe.model.batch import IGNORE, MicroBatch
from tawpipe.schedule.balance import Bin, Bins

NOTHING = MicroBatch.of_documents(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), IGNORE), [1])
"""What an empty bin holds: a token of which nothing is learned."""


def rows_of(bins: Bins, number: int, document: Callable[[int], MicroBatch]) -> list[MicroBatch]:
    """A rank's bins, in the order of its rounds; the whole document for each of its slices.

    Args:
        number: of whom they are dealt to.
        document: makes one by its number, as a micro-batch of one row.

    Raises:
        UserError: a document has another length than that by which it was dealt.
    """

    def row(dealt: Bin) -> MicroBatch:
        joined = MicroBatch.in_a_row([document(number) for number in dealt.documents] or [NOTHING])
        said = sum(bins.lengths[number] for number in dealt.documents) or 1
        if (tokens := joined.input_ids.numel()) != said:
            given = f"{tokens} tokens in documents {', '.join(map(str, dealt.documents[:5]))}"
            raise UserError("documents", given, f"{said}, as their lengths say")
        return joined

    return [row(dealt) for dealt in bins.of(number)]
