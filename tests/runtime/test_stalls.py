"""Stalls: from what all ranks do follows which one they wait for, and nobody is blamed who has not failed."""

from __future__ import annotations

import io
import random
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from cases import batches, llama
from pipelines import make_pipeline
from processes import wait_for
from schedules import llama as sizes
from schedules import make
from tawpipe import World
from tawpipe.runtime.watch import stalls
from tawpipe.runtime.watch.stalls import BEGINNING, Others, Standing, conclusion, messages_of


def standing(text: str = "waits", *, failure: str = "", messages: dict[str, list[int]] | None = None) -> Standing:
    return Standing(text, "step 3 took longer than 60 s", messages is not None, messages or {}, failure, "")


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-whole", "flat", "weipipe", "1f1b"])
def test_message_has_one_name_on_all_its_ranks(strategy: str) -> None:
    schedule = make(sizes(4), 2, 2, 4, strategy=strategy)
    ends: dict[str, set[int]] = defaultdict(set)
    named: dict[str, set[int]] = defaultdict(set)
    for rank, program in enumerate(schedule.programs):
        for action in program:
            for name, others in messages_of(action, schedule.topology, rank).items():
                assert others and rank not in others
                ends[name].add(rank)
                named[name].update(others, [rank])
    assert named == ends and len(named) > 4


def test_local_action_has_no_messages() -> None:
    schedule = make(sizes(2), 1, 1, 2)
    assert not any(messages_of(action, schedule.topology, 0) for action in schedule.programs[0])
    assert messages_of("a measurement", schedule.topology, 0) == {}


@pytest.mark.parametrize("seed", range(8))
def test_rank_at_the_end_of_all_waits_is_named(seed: int) -> None:
    """Every rank waits for one that came before it in some order; the first waits for nobody, or does not answer."""
    order = random.Random(seed).sample(range(6), 6)
    standings: dict[int, Standing | None] = {order[0]: standing("sleeps in its script") if seed % 2 else None}
    for place, rank in enumerate(order[1:], 1):
        ahead = order[random.Random(seed + place).randrange(place)]
        standings[rank] = standing(messages={f"m{rank}": [ahead]})
    said = conclusion(dict(sorted(standings.items())))
    assert f"the others wait for rank {order[0]}, which " in said and said.count("rank ") == 2, said
    assert said.startswith("no rank has failed") and "step 3 took longer than 60 s" in said
    assert ("as far as they answer" in said) == (not seed % 2)


def test_ranks_that_wait_in_a_circle_are_not_blamed() -> None:
    said = conclusion({rank: standing(messages={f"m{rank}": [(rank + 1) % 3]}) for rank in range(3)})
    assert said.startswith("no rank has failed; ") and "ranks 0, 1, 2 wait for each other" in said


def test_message_that_both_sides_have_reached_blames_nobody() -> None:
    said = conclusion({0: standing(messages={"m": [1]}), 1: standing(messages={"m": [0]})})
    assert said.startswith("no rank has failed; ") and "wait for" not in said


def test_moving_step_blames_no_rank() -> None:
    """Standings of ranks that move were true at different times, so no rank is named."""
    circle: dict[int, Standing | None] = {rank: standing(messages={f"m{rank}": [1 - rank]}) for rank in range(2)}
    assert "which is a fault of tawpipe's" in conclusion(circle)
    for moved in circle:
        said = conclusion({**circle, 2: None, moved: replace(circle[moved] or standing(), moves=True)})
        assert said.endswith("the step continues, slowly") and "fault" not in said and "wait" not in said


def test_ranks_at_steps_of_different_sizes_are_no_fault_of_tawpipe() -> None:
    said = conclusion({0: standing(messages={BEGINNING: [1]}), 1: standing(messages={"m": [0]})})
    assert said.endswith("ranks 0, 1 wait for each other")


class CountedStore(HashStore):
    """Knows how often it was asked for anything but a number."""

    reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return super().get(key)


def test_ranks_exchange_standings_with_few_store_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "SETTLE_S", 0.5)
    monkeypatch.setattr(stalls, "ANSWERS_S", 1.5)
    store, rank_count = CountedStore(), 9
    everyone = [Others(lambda: store, rank, rank_count) for rank in range(rank_count)]
    assert not any(others.ask for others in everyone)
    with ThreadPoolExecutor(rank_count) as threads:
        answers = list(threads.map(lambda it: it.gather(lambda: standing(f"is {it._rank}"), ask=True), everyone[:-1]))
    assert everyone[-1].ask and not any(others.ask for others in everyone[:-1])
    for standings in answers:
        assert [it and it.text for it in standings.values()] == [f"is {rank}" for rank in range(8)] + [None]
    assert store.reads == len(answers)


def test_failed_rank_is_reported_as_failed() -> None:
    said = conclusion({0: standing(messages={"m": [1]}), 1: standing("has failed: no memory", failure="no memory")})
    assert said.startswith("rank 1 has failed: no memory; ") and "no rank has failed" not in said


NAMES = "the others wait for "


def stalled(world: World, late: int, way: str) -> tuple[str, float]:
    """In a worker: what it says while a rank stays in its script, or in computing, until it has said so itself."""
    hold = [False]
    compute, first = way == "computes", way == "is late to its first step"

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if hold[0] and compute and world.rank == late:
            hold[0] = not wait_for(lambda: NAMES in said.getvalue())
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")

    pipeline: Any = make_pipeline(llama(torch.float32), loss=loss, world=world)
    (batch,) = batches(4, 1)
    if not first:
        pipeline.step(batch)
        pipeline.drain()
    before, sys.stderr = sys.stderr, io.StringIO()
    said, hold[0] = sys.stderr, True
    try:
        pipeline.executor.watchdog.limit_s = 0.5
        if world.rank == late and not compute:
            assert wait_for(lambda: NAMES in said.getvalue())
        value = pipeline.step(batch).loss
        assert wait_for(lambda: NAMES in said.getvalue())
    finally:
        sys.stderr = before
    pipeline.close()
    return said.getvalue(), value


@pytest.mark.parametrize(("late", "way"), [(2, "is in its script"), (1, "computes"), (3, "is late to its first step")])
def test_every_rank_reports_the_awaited_rank_and_continues(pool: Any, late: int, way: str) -> None:
    found = pool.run(f"{__name__}:stalled", 2, 2, late=late, way=way)
    compute, begins = way == "computes", way == "is late to its first step"
    assert len({value for _, value in found}) == 1
    for rank, (said, _) in enumerate(found):
        lines = said.splitlines()
        end, verdict = next((number, line) for number, line in enumerate(lines) if NAMES in line)
        assert "no rank has failed; " in verdict and f"{NAMES}rank {late}, which waits for no other rank" in verdict
        assert (f"{BEGINNING} took longer than" in verdict) == begins
        # A slow step may have been reported before; the last line before the verdict belongs to it.
        own = [line for line in lines[:end] if f"rank {rank} (node " in line and "all ranks: " not in line][-1]
        assert ("waits for no other rank" in own) == (rank == late)
        assert ("processes.py" in own) == (rank == late and not compute)  # where its script is
