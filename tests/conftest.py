"""Fixtures that several files use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Several test processes share the processors, and threads that wait for each other spin. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
from cuda_kernels import FlashKernels, as_on_cuda
from pool import WorkerPool
from states import save_history, stepped
from tawpipe import Pipeline

# How long an example takes says nothing on a machine that is shared.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for the whole session."""
    workers = WorkerPool()
    yield workers
    workers.close()


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


@pytest.fixture
def cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> FlashKernels:
    """Attention in chunks computes as on CUDA, by a stand-in for its kernels."""
    return as_on_cuda(monkeypatch)
