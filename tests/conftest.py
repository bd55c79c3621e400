"""Fixtures that several files use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pool import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for the whole session."""
    workers = WorkerPool()
    yield workers
    workers.close()
