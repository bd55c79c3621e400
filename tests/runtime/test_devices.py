"""Devices that cannot be used as they should be are named, with what is taken instead."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from tawpipe.environment import ALLOCATOR, CUDA_VARIABLES
from tawpipe.errors import UserError
from tawpipe.runtime import world
from tawpipe.runtime.world import LEAST_CONNECTIONS, pick_device, require_same_kind, warn_of_few_connections


def test_too_old_driver_is_named_and_auto_uses_the_cpu(monkeypatch, caplog):
    def refuse(_: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with caplog.at_level(logging.WARNING):
        assert pick_device("auto", 0) == torch.device("cpu")
    assert "too old (found version 11040). The CPU is used instead" in caplog.text.replace("..", ".")
    with pytest.raises(UserError, match=r"^device: got 'cuda'.*too old"):
        pick_device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert pick_device("auto", 0) == torch.device("cuda", 0)


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_full_gpu_is_refused_instead_of_falling_back_to_the_cpu(monkeypatch, wanted):
    def refuse(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(UserError, match=rf"^device: got '{wanted}'; a device with room .*CUDA error: out of memory\)$"):
        pick_device(wanted, 0)


def test_missing_cuda_context_warning_of_torch_is_suppressed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert pick_device("cuda", 0) == torch.device("cuda", 0)
        for words in ("Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set", "another"):
            warnings.warn(words, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["another"]


def test_rank_that_falls_back_to_the_cpu_among_gpus_is_named():
    """Its peers would wait for it on their GPUs, in a group that it does not join."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    require_same_kind(store, 0, gpu)
    require_same_kind(store, 1, gpu)
    with pytest.raises(UserError, match=r"a cpu on rank 2.*a cuda, as on rank 0: a driver"):
        require_same_kind(store, 2, cpu)


@pytest.mark.parametrize(
    ("said", "warns"), [("1", True), (str(LEAST_CONNECTIONS), False), ("32", False), (None, False)]
)
def test_too_few_cuda_connections_are_named(said, warns, caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_few_connections({"CUDA_DEVICE_MAX_CONNECTIONS": said} if said else {})
    assert (f"CUDA_DEVICE_MAX_CONNECTIONS={said}" in caplog.text) == warns


@pytest.mark.parametrize(
    ("has", "starts", "late"),
    [
        ("", False, True),
        ("backend:native", False, True),
        ("expandable_segments:True", True, False),
        (None, True, True),
        (None, False, False),
    ],
)
def test_allocator_settings_that_came_too_late_are_named(monkeypatch, caplog, has, starts, late):
    """``has`` is what the allocator says that it has read; torch may have no way to ask it."""
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    if has is not None:
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: has, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: starts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(world, "pick_device", lambda *_: torch.device("cpu"))
    for name in ("RANK", "WORLD_SIZE", *ALLOCATOR):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    for name, value in CUDA_VARIABLES.items():
        if name not in ALLOCATOR:
            monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        world.connect()
    named = "PYTORCH_ALLOC_CONF=expandable_segments:True is too late" in caplog.text
    assert named == late and len(caplog.records) == late
    caplog.clear()
    world.connect()  # the user's own setting
    assert not caplog.records
