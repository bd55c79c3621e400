"""Memory of the host for homes: as much as was asked for, and how much there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tawpipe.errors import UserError
from tawpipe.runtime import host_memory


def test_zeros_of_a_host_are_plain_where_no_gpu_copies_from_them():
    zeros = host_memory.host_zeros((3, 2), torch.float32, torch.device("cpu"), "state")
    assert zeros.shape == (3, 2) and not zeros.any() and not zeros.is_pinned()


def test_a_container_has_what_its_limit_leaves(tmp_path: Path, monkeypatch):
    most, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(host_memory, "CONTAINER", ((str(tmp_path), "max", "current", ""),))
    whole = host_memory.free_memory()
    assert whole > 2**20
    used.write_text("1000\n")
    most.write_text("max\n")
    assert host_memory.free_memory() > 2**20, "no limit"
    most.write_text("5000\n")
    assert host_memory.free_memory() == 4000
    (tmp_path / "memory.stat").write_text("anon 700\nactive_file 200\ninactive_file 100\n")
    assert host_memory.free_memory() == 4300, "files that were read give way"
    used.write_text("6000\n")
    assert host_memory.free_memory() == 1, "known, and nothing"


def test_memory_that_is_not_given_is_named_with_its_setting(monkeypatch):
    monkeypatch.setattr(host_memory, "_Pages", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    with pytest.raises(UserError, match=r"schedule.host_homes: got 'all'; none, or a host with 0.00 GiB more .*Cannot"):
        host_memory.host_zeros((3, 2), torch.float32, torch.device("cuda"), "all")


@pytest.mark.parametrize(
    ("limit", "kept", "said"), [(-1, True, 0), (2**40, True, 0), (4096, False, 0), (4096, True, 4096)]
)
def test_a_limit_on_locked_memory_is_one_if_the_driver_keeps_to_it(monkeypatch, limit: int, kept: bool, said: int):
    def register(pages: host_memory._Pages, address: int) -> None:
        if kept and len(pages) > limit:
            raise OSError("no more")

    monkeypatch.setattr(host_memory.resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(host_memory._Pages, "register", register)
    assert host_memory.lock_limit(2**30) == said
