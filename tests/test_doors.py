"""A lower room calls what a higher one registers, which is imported at the first call."""

from __future__ import annotations

import sys

import pytest

from tawpipe.doors import Door
from tawpipe.orders import search
from tawpipe.schedule.pipelines.cost_based import SEARCH


def test_first_call_imports_the_registering_package(tmp_path, monkeypatch):
    door = Door[str]("higher_room")
    monkeypatch.setitem(sys.modules, "lower_room", type(sys)("lower_room"))
    sys.modules["lower_room"].door = door  # type: ignore[attr-defined]
    (tmp_path / "higher_room.py").write_text("from lower_room import door\n\ndoor.register('offered')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "higher_room" not in sys.modules
    assert door() == "offered" and "higher_room" in sys.modules
    del sys.modules["higher_room"]
    assert door() == "offered" and "higher_room" not in sys.modules


def test_door_returns_the_registered_object():
    door = Door[str]("no_such_room")
    with pytest.raises(ModuleNotFoundError, match="no_such_room"):
        door()
    assert door.register("offered") == door() == "offered"


def test_order_search_registers_itself():
    assert SEARCH() is SEARCH() and SEARCH().arrange is search.arrange.arrange
