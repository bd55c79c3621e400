"""``tawpipe prove --only order`` on NCCL, whose headers are messages of their own: no rank waits for ever."""

from __future__ import annotations

import pytest

from schedules import EVERY, llama, make
from strict_nccl import stuck
from tawpipe.errors import UserError
from tawpipe.schedule.strategies.table import strategies
from tawpipe.schedule.transform import for_one_thread

SHAPES = [
    (2, 2, 4),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, 1, 8), (2, 1, 4), (3, 2, 6), (1, 4, 8))),
]
"""Nodes, their ranks, and layers."""


@pytest.mark.parametrize(("nodes", "local", "layers"), SHAPES)
def test_ordered_step_in_strict_nccl_mode_never_deadlocks(nodes: int, local: int, layers: int) -> None:
    looked_at = set()
    for name in EVERY:
        if not strategies()[name].candidate:
            continue
        try:
            schedule = make(llama(layers), nodes, local, 2 * nodes * local + 1, strategy=name)
        except UserError:  # of this shape there is none
            continue
        for strict in (False, True):
            assert not stuck(for_one_thread(schedule), strict=strict), (name, strict)
        looked_at.add(name)
    assert len(looked_at) > 8


def test_unordered_programs_deadlock_in_strict_nccl_mode() -> None:
    found = [make(llama(8), 4, 1, 9, strategy=name) for name in ("tawpipe-striped", "tawpipe-whole")]
    assert all(stuck(schedule, strict=True) for schedule in found)
