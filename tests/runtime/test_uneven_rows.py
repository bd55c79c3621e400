"""Steps with fewer rows than processes, in mixed order: they end, with the numbers of one process, or are refused."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from pool import WorkerPool
from tawpipe.runtime.transport.early_transfers import EarlyTransfers
from tawpipe.runtime.transport.transport import UNUSED_TAG
from tawpipe.schedule.actions import Action, Lane, Op, Transfer, exchange
from tawpipe.schedule.buffers import pooled
from tawpipe.topology import Topology
from uneven_rows import CASES, REFUSED, TOPOLOGIES, Case, outcomes

FEW: list[Case] = [
    ("flat", "all", "2x2"),
    ("flat", "state, early", "3+1"),
    ("tawpipe-groups", "early", "4x1"),
    ("tawpipe-groups", "all", "3+1"),
    ("tawpipe-spread", "all, early", "2x2"),
    ("tawpipe-striped", "state", "2x2"),
    ("tawpipe-whole", "all", "4x1"),
    ("tawpipe-step", "early", "3+1"),
    ("hsdp", "state", "4x1"),
    ("hsdp", "all, early", "2x2"),
    ("weipipe", "state, early", "2x2"),
    ("1f1b", "state", "3+1"),
]


def test_messages_of_different_counters_never_share_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = Action(Op.NORM, Lane.INTER_G, group="world")
    ring = Action(
        Op.COLLECTIVE, Lane.INTER_G, (pooled("G", 0),), (pooled("R", 0),), collective="all_gather", group="world"
    )
    sent = exchange(Lane.INTER_G, (Transfer(True, 1, 0, pooled("G", 0)),), "world")
    tags: set[int] = set()
    monkeypatch.setattr(dist, "isend", lambda *_, tag, **__: tags.add(tag) or 0)
    ahead = EarlyTransfers(Topology.grid(2, 1), 0, {(Lane.INTER_G, "world"): Mock()}, strict=True)
    used = list[set[int]]()
    for action in (norm, ring, sent):
        for number in range(600):
            ahead._message(action, 1, torch.zeros(1), number, "one text for all", send=True)
        used.append(set(tags))
        tags.clear()
    assert all(len(numbers) == 2 * 256 for numbers in used)  # a header and its message
    assert not (used[0] & used[1] or used[0] & used[2] or used[1] & used[2])
    assert all(0 < tag < 1 << 31 and tag != UNUSED_TAG for numbers in used for tag in numbers)


@pytest.mark.slow
def test_steps_with_fewer_rows_than_ranks_match_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    assert [found for found in outcomes(pool, FEW, tmp_path) if found[1]] == []


@pytest.mark.slow
def test_all_settings_with_few_rows_match_one_process_or_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    """Every strategy with every setting, in turn on the three topologies."""
    pairs = sorted({case[:2] for case in CASES})
    chosen = [case for case in CASES if pairs.index(case[:2]) % len(TOPOLOGIES) == [*TOPOLOGIES].index(case[2])]
    assert len(chosen) == len(pairs)
    found = dict(outcomes(pool, chosen, tmp_path))
    wrong = {case: said for case, said in found.items() if REFUSED.get(case[:2], "") not in said}
    assert not wrong
    assert {case for case, said in found.items() if said} == {case for case in chosen if case[:2] in REFUSED}
