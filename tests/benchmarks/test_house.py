"""The house may not go back to classes of one name, names that say nothing, a long way of the settings, full rooms."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from house import (
    FILLERS,
    Module,
    Walk,
    assigned,
    ceilings,
    largest_folder,
    modules_of,
    parameters_of_pipeline,
    properties_read,
    rooms_of,
)

MOST_FILLERS = 0
MOST_STOPS = 51


SOURCE = Path(__file__).parents[2] / "src"
MOST_FILES, MOST_PARAMETERS = 20, 12


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return modules_of(SOURCE)


def test_class_names_are_unique(modules):
    nodes = (node for module in modules.values() for node in ast.walk(module.tree))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


def test_few_variables_have_filler_names(modules):
    fillers = [
        f"{module.name}: {name}" for module in modules.values() for name in assigned(module.tree) if name in FILLERS
    ]
    assert len(fillers) <= MOST_FILLERS, fillers


def test_only_schedules_read_the_properties_of_a_strategy(modules):
    """Others ask a strategy, or a step, what they want to know."""
    assert properties_read(modules) == []
    text = "if strategy.axis and positions.axis and strategy.improves: strategy.splits = True"
    reads = properties_read({"tawpipe.plan": Module("tawpipe.plan", ast.parse(text), text)})
    assert [read.split()[1] for read in reads] == ["strategy.axis", "strategy.improves"]


def test_settings_pass_through_few_functions(modules):
    walk = Walk(modules)
    walk.follow(("tawpipe.train.run", "run"), {})
    assert 10 < len(walk.stops) <= MOST_STOPS


def test_every_package_stays_below_its_ceiling_of_code_lines(modules):
    """A line of benchmarks/ceilings.yaml is raised only in a commit that says what pays for it."""
    rooms, most = rooms_of(modules), ceilings()
    assert set(most) == set(rooms)
    assert {room: lines for room, lines in rooms.items() if lines > most[room]} == {}


def test_folders_and_pipeline_parameters_stay_below_their_limits(modules):
    count, folder = largest_folder(SOURCE)
    assert count <= MOST_FILES, folder
    assert parameters_of_pipeline(modules) <= MOST_PARAMETERS
