"""Memory of the host for homes: as much as was asked for, and how much there is."""

from __future__ import annotations

import pytest
import torch

from tawpipe.errors import UserError
from tawpipe.runtime.homes import host_memory


def test_host_zeros_are_not_pinned_for_a_cpu():
    zeros = host_memory.host_zeros((3, 2), torch.float32, torch.device("cpu"), "state")
    assert zeros.shape == (3, 2) and not zeros.any() and not zeros.is_pinned()


def test_free_memory_respects_the_job_limit(monkeypatch):
    whole = host_memory.free_memory()
    assert whole > 2**20
    for left, free in ((4000.0, 4000), (-5.0, 1), (2.0**62, None)):  # known, and nothing; absurd
        monkeypatch.setattr(host_memory, "memory_left", lambda left=left: left)
        assert host_memory.free_memory() == free if free else host_memory.free_memory() > 2**20


def test_failed_host_allocation_names_its_setting(monkeypatch):
    monkeypatch.setattr(host_memory, "_Pages", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    with pytest.raises(UserError, match=r"schedule.host_homes: got 'all'; none, or a host with 0.00 GiB more .*Cannot"):
        host_memory.host_zeros((3, 2), torch.float32, torch.device("cuda"), "all")


@pytest.mark.parametrize(
    ("limit", "kept", "said"), [(-1, True, 0), (2**40, True, 0), (4096, False, 0), (4096, True, 4096)]
)
def test_lock_limit_counts_only_if_the_driver_enforces_it(monkeypatch, limit: int, kept: bool, said: int):
    def register(pages: host_memory._Pages, address: int) -> None:
        if kept and len(pages) > limit:
            raise OSError("no more")

    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(host_memory._Pages, "register", register)
    assert host_memory.lock_limit(2**30) == said
