"""Laps in the lab: rows of the suite, their bounds, and what a step of them measures."""

from __future__ import annotations

from typing import Any

import pytest

from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.serving.planner import HAND_S
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe_lab.compare import _served, bounds_of, link_of
from tawpipe_lab.serving import ROWS, groups_of, planned, serving_knobs
from tawpipe_lab.suite import Cell, Entry, load_suite
from tawpipe_lab.table import write_table
from tawpipe_lab.worker import make
from tawpipe_lab.workload import ServingWorkload, from_spelled_out, spell_out

WORK = ServingWorkload(
    layers=4, forward_s=0.01, slots=4, token_bytes=1000, laps=5, chunk=8, chunks=3, chunk_s=0.01, embedding_s=0.001
)
QUICK = WORK.faster(10)
FOUR = Topology.grid(4, 1)


def test_groups_of_decode_steps_follow_from_the_latency():
    links = [LinkModel(1e12, latency) for latency in (0.0, 0.005, 0.025)]
    assert [groups_of("laps", WORK, FOUR, link) for link in links] == [4, 6, 13]
    assert [groups_of(row, WORK, FOUR, links[2]) for row in ROWS] == [13, 4, 1]
    assert serving_knobs("laps", WORK, FOUR, links[1]) == {"groups": 6}
    assert serving_knobs("1f1b", WORK, FOUR, links[1]) == {}


def test_plan_predicts_token_times_of_decode_steps():
    link = LinkModel(1e12, 0.005)
    formula, way = planned(WORK, FOUR, link, 4, hand_s=0.0), planned(WORK, FOUR, link, 4)
    assert formula.token_s == pytest.approx(0.041 + 4 * 0.005, rel=1e-4)
    assert way.token_s == pytest.approx(formula.token_s + 4 * HAND_S, rel=1e-4)
    # What waits does it before the first stage, which is the slowest.
    way = planned(WORK, FOUR, link, 6)
    assert way.first_s == pytest.approx(0.081 + 4 * (0.005 + HAND_S) + 2 * 0.021, rel=1e-3)


def test_serving_bounds_count_bytes_at_borders_between_nodes():
    cell, entry = Cell("c", 2, 2, "1gbit", WORK), Entry("laps", {"groups": 2})
    bounds = bounds_of(cell, entry, link_of(cell))
    tokens = 2 * (8 * 4 + 3 * 8)
    assert bounds.sent_bytes == (tokens * 1000, 2 * 8 * 4 * 8)
    assert bounds.received_bytes == (2 * 8 * 4 * 8, tokens * 1000)
    with pytest.raises(UserError, match="which serve"):
        bounds_of(cell, Entry("1f1b"), link_of(cell))


def served(world: World) -> list[Any]:
    """In a worker: what two steps of a row measure."""
    contender: Any = make("laps", QUICK, world.topology, world.rank, groups=3)
    found = []
    for _ in range(2):
        contender.step()
        found.append((contender.decode_steps, contender.token_s, contender.first_s))
    asked = contender.sleeper.asked_s
    contender.close()
    return [found, asked]


def test_serving_step_measures_its_decode_steps_and_the_prompt(pool):
    for rank, (found, asked) in enumerate(pool.run(f"{__name__}:served", 2, 1)):
        for laps, token_s, first_s in found:
            assert laps == 5 + 3 + 2
            assert (token_s >= 3 * 2 * 0.001 and first_s >= 4 * 0.002) if rank == 0 else token_s == first_s == 0
        assert asked == pytest.approx(2 * 3 * (2 * (8 * 0.001 + 3 * 0.001) + 8 * 0.0001 * (rank == 0)))


def test_table_of_a_serving_suite_shows_planned_times(tmp_path):
    cell = load_suite("serving").cells[1]
    assert isinstance(cell.workload, ServingWorkload)
    assert from_spelled_out(spell_out(cell.workload)) == cell.workload
    row: dict[str, Any] = {
        "cell": cell.spelled_out(),
        "strategy": "laps",
        "label": "laps",
        "origin": "ours",
        "status": "ok",
        "seconds_per_step": {"median": 2.5, "min": 2.4, "max": 2.6},
        "physical_bound_s": 2.0,
        "dependency_bound_s": 2.3,
        "link_bytes_sent": [1e6],
        "link_bytes_predicted": [1e6],
        "exposed_communication_s": 0.1,
        "cpu_busy": 0.1,
        "peak_gib": None,
        **_served(cell.workload, FOUR, LinkModel(125e6, 0.005), 6, 0.0612, 0.45),
    }
    write_table("serving", {"date": "", "command": "", "machine": ""}, [row], tmp_path / "table.md")
    table = (tmp_path / "table.md").read_text()
    assert "| 6 | 61.2 (63.7) | 0.450 (" in table
    assert "forward_s 0.01, slots 4" in table


def test_other_serving_knobs_are_refused():
    with pytest.raises(UserError, match="kind serving"):
        make("laps", QUICK, FOUR, 0, groups=1, stages=2)
