"""What layers keep, chosen with stages and order: within the memory, never longer than all layers alike."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from schedules import llama
from tawpipe.errors import UserError
from tawpipe.orders.arrange import arrange
from tawpipe.orders.drafts import Keeping
from tawpipe.orders.keeping import Annealing, choose
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.memory import fits, peak
from tawpipe.schedule.pipelines.work import BlockTimes, PipelineCosts, makespan, play
from tawpipe.schedule.settings import recompute_of_blocks

LAYERS, MICRO_BATCHES = 6, 6
LAYOUTS = [Layout.even(LAYERS + 2, 2), Layout.even(LAYERS + 2, 2, 2, folded=True)]


def options(memory: float, host: float = math.inf) -> dict[str, PipelineCosts]:
    """Nothing computed again: ten times the memory and a quarter less time; or all but a tenth of it, for twice one."""
    ways = {"none": (10.0, 10.0), "selective": (2.0, 19.0), "full": (1.0, 20.0)}
    end = BlockTimes(0.0, 0.0, 0.0, 0.0)
    head = BlockTimes(0.0, 15.0, 0.0, 1.0)
    return {
        how: PipelineCosts((end, *[BlockTimes(10.0, back, 10.0, kept, 4.0)] * LAYERS, head), 1.0, (), memory, host)
        for how, (kept, back) in ways.items()
    }


def alike(given: dict[str, PipelineCosts]) -> float:
    """The shortest step with all layers alike."""
    found = []
    for layout in LAYOUTS:
        for costs in given.values():
            try:
                found.append(makespan(play(layout, arrange(layout, costs, MICRO_BATCHES), costs)))
            except UserError:
                continue
    return min(found)


@pytest.mark.parametrize("memory", [7.0, 40.0, 80.0])
def test_keeping_choice_stays_within_memory_and_is_no_longer(memory):
    given = options(memory)
    made = choose(given, LAYOUTS, MICRO_BATCHES, tries=300)
    choice, costs = made.choice, made.costs
    assert all(fits(costs, most) for most in peak(choice.layout, made.order, costs))
    assert made.makespan == makespan(play(choice.layout, made.order, costs)) <= alike(given) * (1 + 1e-9)
    for block in range(1, LAYERS + 1):
        assert replace(costs.blocks[block], stays=0.0) == given[choice.keeps[block]].blocks[block]
    if memory == 40.0:  # between what all would keep and what none does
        assert len(set(choice.keeps[1:-1])) > 1 and made.makespan < 0.97 * alike(given)


@pytest.mark.parametrize("host", [math.inf, 0.2])
@pytest.mark.parametrize("memory", [7.0, 25.0, 60.0])
def test_every_annealed_draft_has_an_order_within_the_memory(memory, host):
    given = options(memory, host)
    annealing = Annealing(given, MICRO_BATCHES)
    here, shapes, moved = annealing.best(LAYOUTS, 0), set(), 0
    for _ in range(150):
        assert here is not None
        changed = annealing.changed(here.draft)
        if changed is None or (judged := annealing.judged(changed, 3 * here.energy, here)) is None:
            continue
        here, choice = judged, judged.draft.chosen
        costs, order = choice.costs(given), annealing.order(judged)
        done = Counter((work.kind, work.stage) for works in order.compute for work in works)
        assert all(done["F", s] == MICRO_BATCHES for s in range(choice.layout.stages))
        assert all(done["B", s] + done["W", s] == MICRO_BATCHES for s in range(choice.layout.stages))
        away = Counter(work.stage for works in order.host for work in works if work.kind == "O")
        assert away == Counter(
            {
                s: MICRO_BATCHES
                for s, hosted in enumerate(judged.draft.hosted)
                if hosted and costs.stages(choice.layout).moved[s]
            }
        )
        assert makespan(play(choice.layout, order, costs)) <= judged.length / annealing.scale * (1 + 1e-9)
        assert all(fits(costs, most) for most in peak(choice.layout, order, costs))
        shapes.add((choice.layout.places, choice.keeps, judged.draft.parted))
        moved += bool(away)
    assert len(shapes) > 10 and len({places for places, _, _ in shapes}) > 1
    assert bool(moved) == (host < math.inf)


def test_annealing_is_deterministic_and_more_tries_shorten_the_step():
    lengths = []
    for tries in (0, 200, 200):
        best = Annealing(options(40.0), MICRO_BATCHES).best(LAYOUTS, tries)
        assert best is not None
        lengths.append(best.length)
    assert lengths[0] > lengths[1] == lengths[2]


def test_keeping_choice_is_spelled_as_a_recompute_setting():
    choice = Keeping(LAYOUTS[0], ("full", "none", "none", "selective", "full", "none", "none", "full"))
    assert choice.recompute == "none:2,full:1,selective:1,none"
    assert recompute_of_blocks(choice.recompute, llama(LAYERS))[1:-1] == choice.keeps[1:-1]


def test_fast_host_link_moves_some_kept_memory_to_the_host():
    alone, made = (choose(options(20.0, host), LAYOUTS, MICRO_BATCHES, tries=400) for host in (math.inf, 0.2))
    assert not alone.choice.moving and not any(alone.order.host)
    assert made.makespan < alone.makespan and made.choice.moving and any(made.order.host)
    assert all(fits(made.costs, most) for most in peak(made.choice.layout, made.order, made.costs))
    assert all(
        (block.moves > 0) == (n in made.choice.moving) for n, block in enumerate(made.costs.blocks) if block.kept
    )


def test_memory_too_small_for_any_choice_is_refused():
    with pytest.raises(UserError, match="memory of a position"):
        choose(options(2.0), LAYOUTS[:1], MICRO_BATCHES, tries=5)
