"""The grid of homes in the host's memory: every combination once, and parts of it that are the whole together."""

from __future__ import annotations

import homes


def test_every_combination_is_in_one_batch_of_its_topology() -> None:
    grid = homes.grid()
    assert grid == homes.grid()
    combinations = {tuple(case[name] for name in homes.GRID) for case in grid}
    assert len(combinations) == len(grid) > 1000
    for seed in (None, 3):
        few = homes.batches(grid, seed)
        assert sorted(homes.key_of(case) for some in few for case in some) == sorted(map(homes.key_of, grid))
        assert all(len({case["topology"] for case in some}) == 1 for some in few)
    assert homes.batches(grid, 3) == homes.batches(grid, 3) != homes.batches(grid, 4)


def test_a_table_says_what_differs() -> None:
    case = homes.grid()[0]
    text = homes.table([{"case": case, "differs": {"state": [], "all": ["0 master"]}}], 7)
    assert "1 of 7 cases" in text and "all, " in text and text.rstrip().endswith("0 master")
