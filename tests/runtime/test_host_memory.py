"""Memory of the host for homes: as much as was asked for, and how much there is."""

from __future__ import annotations

from pathlib import Path

import torch

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
