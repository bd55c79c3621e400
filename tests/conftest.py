"""Fixtures that several files use."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Several test processes share the processors, and threads that wait for each other spin. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
from cuda_kernels import FlashKernels, as_on_cuda
from plan_requests import FEW, looking_at
from pool import WorkerPool
from skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  # hooks
from states import save_history, stepped
from tawpipe import Pipeline
from tawpipe.garbage import leave_imports_alone
from tawpipe.model.attention import chunked
from tawpipe.orders import generate as generating
from tawpipe.plan.cost import memory
from tawpipe.schedule.pipelines import cost_based
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.strategies.table import IMPORTS, STRATEGIES

# How long an example takes says nothing on a machine that is shared.
settings.register_profile("shared", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


LONGEST = (
    "benchmarks/test_real_model.py",
    "pipeline/test_exactness.py",
    "launch/test_elastic.py",
    "train/test_train.py",
    "model/test_every_family.py",
    "prove/test_prove.py",
    "pipeline/test_bins_in_pipelines.py",
    "test_pages_commands.py",
    "lab/test_compare.py",
    "runtime/test_host_homes.py",
    "benchmarks/test_said_memory.py",
    "train/test_context.py",
    "runtime/test_exact.py",
    "plan/test_plan.py",
    "test_fine_tuning.py",
    "test_recipes.py",
    "train/test_mixed_documents.py",
    "lab/test_real.py",
    "pipeline/test_sets.py",
    "runtime/test_streams.py",
    "serving/test_serve_command.py",
    "runtime/test_runtime.py",
    "model/test_mixers.py",
    "model/test_chunks.py",
    "checkpoint/test_load.py",
    "model/test_borders_random.py",
    "runtime/test_exact_gradients.py",
    "plan/test_memory.py",
    "pipeline/test_quantized_base.py",
    "pipeline/test_hybrids.py",
    "checkpoint/test_resume.py",
    "model/test_borders.py",
    "pipeline/test_bins.py",
)
"""Files that take longest, so that none of them begins when all others have ended."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    at = {str(Path(__file__).parent / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: at.get(str(item.path), len(at)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported and collected stays: looking through it would be most of what a plan's ``gc.collect`` takes."""
    gc.collect()
    leave_imports_alone()


@pytest.fixture(scope="module")
def judges() -> Iterator[None]:
    """Packages of requirements-judges.txt can be imported, here and in processes started from here."""
    folder = str(Path(sys.prefix, "judges"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, folder])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), folder))))
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for the whole session."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def nothing_brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test's ``--import`` brings goes with it: from the table, and from what later processes are told."""
    before = dict(STRATEGIES)
    monkeypatch.setenv(IMPORTS, "")
    yield
    for name in STRATEGIES.keys() - before.keys():
        del STRATEGIES[name]


@pytest.fixture(autouse=True)
def quickly_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan's annealing and its solver have a moment, where a user's have some seconds."""
    monkeypatch.setattr(cost_based, "KEEP_TRIES", 500)
    monkeypatch.setattr(cost_based, "SOLVE_S", 0.1)


@pytest.fixture
def few_strategies() -> Iterator[None]:
    """Plans that commands and runs make are of a few strategies."""
    with looking_at(*FEW):
        yield


@pytest.fixture
def quickly_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for stages has a tenth of what a user's has."""
    whole = generating.generate

    def generate(*given: Any, budget: int, **more: Any) -> Layout:
        return whole(*given, budget=budget // 10, **more)

    monkeypatch.setattr(generating, "generate", generate)
    monkeypatch.setattr(generating, "MOST", generating.MOST // 10)


@pytest.fixture
def short_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are weighed behind some hundred tokens: kernels look at no more of the past at one time."""
    for module in (chunked, memory):
        monkeypatch.setattr(module, "PAST_KEYS", 256)


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
