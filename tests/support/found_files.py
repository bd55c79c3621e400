"""Files of one data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tawpipe.data.reading.sources import SourceFile, find_sets


def find_files(entries: Iterable[str]) -> Sequence[SourceFile]:
    """Return the files that entries without a weight name."""
    (found,) = find_sets(list(entries))
    return found.files
