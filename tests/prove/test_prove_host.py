"""The share of a host's link that updates reach, on a device that is none."""

from __future__ import annotations

import math

import pytest
import torch

from tawpipe.prove import exactness
from tawpipe.runtime.world import World
from tawpipe.topology import Topology


def test_host_share_measures_the_rate_of_adamw_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exactness, "ELEMENTS", 1 << 12)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    rate, link = exactness.host_share(World(Topology.grid(1, 1), 0, torch.device("cpu"), None))
    assert 0 < rate < math.inf and link == math.inf
