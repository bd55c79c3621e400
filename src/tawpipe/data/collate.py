"""Rows to micro-batches. Imports numpy, torch and ``tawpipe.model.batch``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from tawpipe.data.rows import Row, RowSource
from tawpipe.model.batch import MicroBatch


def collate(rows: Sequence[Row], index: int = 0) -> MicroBatch:
    """Stack rows of S tokens to a micro-batch [len(rows), S] on the CPU; ``index`` is its number in its step."""
    assert rows, "a micro-batch has at least one row"
    return MicroBatch.of_documents(
        torch.from_numpy(np.stack([row.input_ids for row in rows])),
        torch.from_numpy(np.stack([row.labels for row in rows])),
        [length for row in rows for length in row.lengths],
        index=index,
    )


def micro_batches(source: RowSource, parts: Iterable[tuple[int, Sequence[int]]]) -> Iterator[MicroBatch]:
    """Make the micro-batch of each part in turn; a part is (index of the micro-batch, global sample numbers)."""
    for index, numbers in parts:
        yield collate([source.sample(number) for number in numbers], index)
