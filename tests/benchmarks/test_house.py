"""What the house may not go back to: classes of one name, names that say nothing, a long way of the settings."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from house import FILLERS, Module, Walk, assigned, modules_of

MOST_FILLERS = 0
MOST_STOPS = 51


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return modules_of(Path(__file__).parents[2] / "src")


def test_no_two_classes_have_one_name(modules):
    nodes = (node for module in modules.values() for node in ast.walk(module.tree))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_name_says_nothing(modules):
    fillers = [
        f"{module.name}: {name}" for module in modules.values() for name in assigned(module.tree) if name in FILLERS
    ]
    assert len(fillers) <= MOST_FILLERS, fillers


def test_settings_go_a_short_way(modules):
    walk = Walk(modules)
    walk.follow(("tawpipe.train.run", "run"), {})
    assert 10 < len(walk.stops) <= MOST_STOPS
