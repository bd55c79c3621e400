"""A small pipeline, and the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from states import save_history, stepped
from tawpipe import Pipeline


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    """A pipeline that has made one step."""
    made = stepped()
    yield made
    made.close()


@pytest.fixture
def history(pipeline: Pipeline, tmp_path: Path) -> Path:
    """The output folder of a run with checkpoints of steps 10, 20 and 30."""
    return save_history(pipeline, tmp_path)
