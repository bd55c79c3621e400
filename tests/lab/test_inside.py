"""Links inside a node that sleep: few numbers travel, and a rank's link is asked to carry the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import home_weight
from tawpipe_lab.inside import LITTLE, SleptInside
from tawpipe_lab.worker import make
from tawpipe_lab.workload import LengthsWorkload
from timed import DOCUMENTS

PIECE = 1000


class Asked:
    """In the place of a link; what it was asked to carry."""

    def __init__(self) -> None:
        self.bytes: list[tuple[float, float]] = []

    def carry(self, since: float, *, up: float, down: float) -> None:
        self.bytes.append((up, down))


def rings(world: World) -> dict[str, Any]:
    """In a worker: an all-gather and a reduce-scatter of ones and of this rank's number."""
    link: Any = Asked()
    lane = Lane.GATHER
    groups = {(lane, name): world.group for name in ("node", "world")}
    ahead = SleptInside(world.topology, world.rank, groups, link=link, strict=True)  # type: ignore[arg-type]
    done = {}
    for group in ("node", "world"):
        given: Any = {"unit": 0, "group": group}
        gather = Action(Op.COLLECTIVE, lane, (home_weight(0),), (home_weight(1),), collective="all_gather", **given)
        whole = torch.zeros(PIECE * world.size)
        ahead.ring(gather, torch.full((PIECE,), world.rank + 1.0), whole)
        part = torch.zeros(PIECE)
        scatter = Action(
            Op.COLLECTIVE, lane, (home_weight(0),), (home_weight(1),), collective="reduce_scatter", **given
        )
        ahead.ring(scatter, torch.ones(PIECE * world.size), part)
        done[group] = int(whole.count_nonzero()), int(part.sum())
    return {"done": done, "asked": link.bytes}


def test_ranks_in_a_node_exchange_few_numbers_and_between_nodes_all(pool):
    for found in pool.run(f"{__name__}:rings", 1, 3):
        assert found["done"] == {"node": (3 * LITTLE, 3 * LITTLE), "world": (3 * PIECE, 3 * PIECE)}
        assert found["asked"] == [(2 * 4 * PIECE, 2 * 4 * PIECE)] * 2


def stepped(world: World, *, workload: dict[str, Any]) -> float:
    """In a worker: seconds that it computes in a step."""
    contender: Any = make("step-balanced", LengthsWorkload(**workload), world.topology, world.rank, sequence_ranks=1)
    contender.step()
    contender.close()
    return contender.sleeper.asked_s


def test_only_our_strategies_run_with_inside_sleeps(pool):
    workload = {**DOCUMENTS, "inside_sleeps": True}
    assert all(seconds > 0 for seconds in pool.run(f"{__name__}:stepped", 1, 2, workload=workload))
    with pytest.raises(UserError, match="inside_sleeps: got True; false: fsdp2"):
        make("fsdp2", LengthsWorkload(**workload), *([None, 0]))  # type: ignore[arg-type]
