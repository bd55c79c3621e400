"""The checks that no step waits for a device, and of the memory that it gives, on one that is none (``fake_cuda``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_cuda import DEVICE, fake_cuda
from tawpipe.pipeline.batch import Deal
from tawpipe.plan.cost import measure, profile
from tawpipe.prove import reserved, waits
from tawpipe.prove.models import alone, llama
from tawpipe.prove.outcome import FAILS
from tawpipe.prove.run import prove
from tawpipe.runtime.compute import layer
from toy_allocator import Driver


@pytest.mark.parametrize(
    "left_out",
    [("chunks", "offloading"), pytest.param(("whole rows", "offloading, chunks"), marks=pytest.mark.slow)],
    ids=["together", "each"],
)
def test_no_step_synchronizes_with_the_device(left_out, monkeypatch) -> None:
    """Chunks and offloading together, and each by itself."""
    every = waits.ways
    some = lambda *sizes: {name: way for name, way in every(*sizes).items() if name not in left_out}  # noqa: E731
    monkeypatch.setattr(waits, "ways", some)
    with fake_cuda() as ledger:
        found = waits.waits(alone(DEVICE))
    assert found.holds, found.note
    assert found.numbers["refused"].keys() == {"a pipeline"}, "of one process"
    assert {*found.numbers["lead_s"], "a pipeline"} == waits.ways(1, 1).keys() and not ledger.faults
    assert all(found.numbers["attention"].values())


@pytest.fixture
def whole_rows(monkeypatch):
    """One of the ways to train."""
    every = waits.ways
    monkeypatch.setattr(waits, "ways", lambda *sizes: dict(list(every(*sizes).items())[:1]))


def test_device_synchronization_in_a_step_is_detected(whole_rows, tmp_path, monkeypatch) -> None:
    forward = layer._output

    def looking(*given: Any) -> Tensor:
        output = forward(*given)
        assert output.sum().item() == output.sum().item()
        return output

    monkeypatch.setattr(layer, "_output", looking)
    with fake_cuda():
        row = prove(alone(DEVICE), tmp_path / "found.json", only=["waits"]).checks["waits"]
    assert row["status"] == FAILS
    assert "synchronizing CUDA operation: _local_scalar_dense in COMPUTE FORWARD" in row["note"]


def test_unpinned_batch_is_detected(whole_rows, monkeypatch) -> None:
    local = Deal.local
    monkeypatch.setattr(Deal, "local", lambda self, batch: local(replace(self, pinned=False), batch))
    with fake_cuda():
        found = waits.waits(alone(DEVICE))
    assert not found.holds and "of int64 from memory that is not pinned" in found.note


@pytest.mark.slow
@pytest.mark.parametrize("given_back", [True, False])
def test_memory_left_by_planning_in_the_allocator_is_detected(given_back, monkeypatch) -> None:
    """Training's stream cannot use it. The counts of memory are the toy allocator's."""
    ways, system = reserved.ways, 700 << 20
    monkeypatch.setattr(reserved, "ways", lambda *sizes, **more: {"whole rows": ways(*sizes, **more)["whole rows"]})
    monkeypatch.setattr(reserved, "sized", lambda _: llama(hidden=32, layers=2, heads=2, vocabulary=100))
    monkeypatch.setattr(reserved, "dtype_here", lambda _: torch.bfloat16)
    monkeypatch.setitem(reserved.TOKENS, "cuda", 256)
    monkeypatch.setattr(reserved, "SLACK_BYTES", 600_000)  # planning leaves 1 MB more
    if not given_back:
        for module in (profile, measure):
            monkeypatch.setattr(module, "give_back", lambda _: None)
    with fake_cuda() as ledger, monkeypatch.context() as counts:
        for name, function in Driver(ledger, system).functions().items():
            counts.setattr(torch.cuda, name, function)
        found = reserved.reserved(alone(DEVICE))
    (row,) = found.numbers["ways"].values()
    assert found.holds == given_back, found.note
    taken = row["taken"]
    assert taken["allocated"] == taken["active"] < taken["reserved"] and row["predicted"]["system"] == system
    assert given_back or "GiB reserved" in found.note
