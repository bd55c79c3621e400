"""Groups are made within a time limit: before that, everybody waits for ranks that were busy alone, without a limit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import llama
from served_families import plain_model
from tawpipe import CheckSettings, Pipeline
from tawpipe.model.chain import Chain
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.transport import transport
from tawpipe.runtime.world import World
from tawpipe.schedule.placement import Home
from tawpipe.serving import engine
from tawpipe.serving.generate import Generator, Wanted
from tawpipe.serving.passes import Sampling, SlotLayout
from tawpipe.topology import Topology

WORLD = World(Topology.grid(2, 1), 0, torch.device("cpu"), None)


class Made(Exception):
    """A group would have been made."""


def serves(folder: Any) -> None:
    plain_model().save_pretrained(folder)
    engine.load_engine(folder, SlotLayout(1, 2, 16, 4), WORLD, dtype="float64")


def trains(_: Any) -> None:
    Pipeline(llama(torch.float32, layers=2), world=WORLD, checks=CheckSettings(check="never"), dtype=torch.float32)


def generates(_: Any) -> None:
    chain = Chain(plain_model())
    chain.prepare(WORLD.device, torch.float64)
    homes: Any = SimpleNamespace(homes=[Home.over((0, 1), unit.numel) for unit in chain.units])
    Generator(chain, homes, WORLD).run(Wanted([[1, 2]], 2, Sampling(), frozenset()))


@pytest.mark.parametrize("act", [serves, trains, generates])
def test_slow_ranks_are_awaited_before_groups_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, act: Callable[[Any], None]
) -> None:
    """As reading weights takes longer from one disk than from another."""
    done = list[str]()

    def noted(target: Any, name: str, *, calls: bool = False) -> None:
        before = getattr(target, name)
        note = lambda *given, **named: (done.append(name), before(*given, **named) if calls else None)[1]  # noqa: E731
        monkeypatch.setattr(target, name, note)

    def make_group(*_: Any, **__: Any) -> None:
        raise Made

    monkeypatch.setattr(transport, "make_group", make_group)
    noted(World, "wait_patiently")
    noted(Storage, "fill")
    noted(engine, "hold_weights")
    noted(Chain, "prepare", calls=True)
    noted(Chain, "load_buffers", calls=True)
    with pytest.raises(Made):
        act(tmp_path)
    assert done[-1] == "wait_patiently", done
