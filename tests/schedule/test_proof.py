"""The proof refuses what is wrong: a broken schedule that it accepts still gives the right numbers in every order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from schedule_numbers import WrongNumbers, check_numbers
from schedules import llama, make, step_for
from tawpipe.schedule.actions import COLLECTIVES, Action, Lane, Op, exchange
from tawpipe.schedule.buffers import Buffer, Kind
from tawpipe.schedule.pipelines.cost_based import SolvedPipeline
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.build import build
from tawpipe.topology import Topology

Program = list[Action]


def _names(schedule: Schedule, rank: int) -> list[Buffer]:
    names = {name for action in schedule.programs[rank] for name in (*action.reads, *action.writes)}
    return sorted(names | set(schedule.buffer_elements(rank)))


def _rename(dice: random.Random, schedule: Schedule, rank: int, action: Action) -> Action:
    """Another buffer in one place of reads, writes or frees; of a transfer in the transfer."""
    name = dice.choice(_names(schedule, rank))
    if action.transfers:
        i = dice.randrange(len(action.transfers))
        transfers = [replace(t, buffer=name) if i == k else t for k, t in enumerate(action.transfers)]
        return exchange(action.lane, tuple(transfers), action.group)
    where = dice.choice(["reads", "writes", "frees"])
    names = list(getattr(action, where))
    if names:
        names[dice.randrange(len(names))] = name
    return replace(action, **{where: tuple(names)})


def _more_or_less(dice: random.Random, schedule: Schedule, rank: int, action: Action) -> Action:
    """One name more, less or in another place in reads, writes or frees, whatever the transfers say."""
    where = dice.choice(["reads", "writes", "frees"])
    names = list(getattr(action, where))
    if names and dice.random() < 0.4:
        del names[dice.randrange(len(names))]
    elif dice.random() < 0.3:
        dice.shuffle(names)
    else:
        names.insert(dice.randint(0, len(names)), dice.choice([*_names(schedule, rank), *action.reads, *action.writes]))
    return replace(action, **{where: tuple(names)})


def _field(dice: random.Random, schedule: Schedule, rank: int, action: Action) -> Action:
    """Another number, lane, group or operation."""
    values = {
        "unit": range(-1, len(schedule.model.units) + 1),
        "block": range(-1, len(schedule.model.blocks) + 1),
        "micro_batch": range(-1, len(schedule.micro_batches) + 1),
        "root": range(-1, schedule.topology.world_size + 1),
        "lane": list(Lane),
        "group": ["", "node", "rail", "world", "set2", "1:2", "2:4"],
        "collective": ["", *COLLECTIVES],
        "op": list(Op),
    }
    name = dice.choice(list(values))
    return replace(action, **{name: dice.choice(values[name])})


def _transfers(dice: random.Random, schedule: Schedule, rank: int, action: Action) -> Action:
    """Transfers dropped, doubled, in another order, to another peer, of another unit, in the other direction."""
    parts = list(action.transfers)
    if not parts:
        return _rename(dice, schedule, rank, action)
    i = dice.randrange(len(parts))
    match dice.randrange(6):
        case 0:
            del parts[i]
        case 1:
            parts.append(parts[i])
        case 2:
            dice.shuffle(parts)
        case 3:
            parts[i] = replace(parts[i], peer=dice.randrange(schedule.topology.world_size))
        case 4:
            parts[i] = replace(parts[i], unit=dice.randrange(len(schedule.model.units)))
        case _:
            parts[i] = replace(parts[i], send=not parts[i].send)
    return exchange(action.lane, tuple(parts), action.group)


def _drop(dice: random.Random, program: Program, i: int) -> None:
    del program[i]


def _double(dice: random.Random, program: Program, i: int) -> None:
    program.insert(dice.choice([i, dice.randint(0, len(program))]), program[i])


def _next(dice: random.Random, program: Program, i: int) -> None:
    j = (i + 1) % len(program)
    program[i], program[j] = program[j], program[i]


def _next_in_lane(dice: random.Random, program: Program, i: int) -> None:
    later = [j for j in range(i + 1, len(program)) if program[j].lane is program[i].lane]
    if later:
        program[i], program[later[0]] = program[later[0]], program[i]


def _swap(dice: random.Random, program: Program, i: int) -> None:
    j = dice.randrange(len(program))
    program[i], program[j] = program[j], program[i]


def _move(dice: random.Random, program: Program, i: int) -> None:
    program.insert(dice.randrange(len(program)), program.pop(i))


EDITS: list[Callable[[random.Random, Schedule, int, Action], Action]] = [_rename, _more_or_less, _field, _transfers]
MOVES: list[Callable[[random.Random, Program, int], None]] = [_drop, _double, _next, _next_in_lane, _swap, _move]


def mutant(schedule: Schedule, seed: int) -> tuple[str, Schedule]:
    """A schedule with one thing changed: on one rank, on all ranks alike, or in a pool."""
    dice = random.Random(seed)
    world = range(schedule.topology.world_size)
    programs = [list(program) for program in schedule.programs]
    rank = dice.choice(world)
    if dice.random() < 0.05:
        pools = [list(own) for own in schedule.pools]
        if own := pools[rank]:
            i = dice.randrange(len(own))
            changed = {"count": own[i].count + dice.choice([-1, 1]), "elements": own[i].elements + dice.choice([-8, 8])}
            name = dice.choice(["count", "elements", "kind"])
            other = Kind.GRADIENT if own[i].kind is Kind.WEIGHT else Kind.WEIGHT
            own[i] = replace(own[i], **{name: changed.get(name, other)})
        return "pool", replace(schedule, pools=tuple(map(tuple, pools)))
    i = dice.randrange(len(programs[rank]))
    ranks = [rank] if dice.random() < 0.6 else list(world)
    if dice.random() < 0.5:
        move = dice.choice(MOVES)
        state = dice.getstate()
        for one in ranks:  # alike on all of them
            dice.setstate(state)
            move(dice, programs[one], min(i, len(programs[one]) - 1))
        what = move.__name__
    else:
        edit = dice.choice(EDITS)
        state = dice.getstate()
        for one in ranks:
            dice.setstate(state)
            at = min(i, len(programs[one]) - 1)
            programs[one][at] = edit(dice, schedule, one, programs[one][at])
        what = edit.__name__
    return what, replace(schedule, programs=tuple(map(tuple, programs)))


IN_THE_HOST = (
    "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2|F1.0 B1.0 F1.1 B1.1 F1.2 B1.2;O0.1 O0.2 R0.1 R0.2|;F0.2>O0.1 R0.1>B0.0 R0.2>B0.1"
)
BASES = {
    "spread": {"strategy": "tawpipe-spread", "nodes": 2, "local": 2},
    "spread, scope step": {
        "strategy": "tawpipe-spread",
        "nodes": 2,
        "local": 2,
        "step_cache": "all",
        "gradients_scope": "step",
    },
    "striped": {"strategy": "tawpipe-striped", "nodes": 3, "local": 2},
    "striped, scope step": {
        "strategy": "tawpipe-striped",
        "nodes": 2,
        "local": 2,
        "step_cache": "all",
        "gradients_scope": "step",
    },
    "whole": {"strategy": "tawpipe-whole", "nodes": 2, "local": 2},
    "whole, scope step": {
        "strategy": "tawpipe-whole",
        "nodes": 3,
        "local": 1,
        "step_cache": "all",
        "gradients_scope": "step",
    },
    "flat": {"strategy": "flat", "nodes": 2, "local": 2},
    "hybrid": {"strategy": "hsdp", "nodes": 2, "local": 2, "gradients_scope": "step"},
    "groups of two": {"strategy": "tawpipe-groups", "nodes": 4, "local": 1, "groups": "2/2/4"},
    "groups within a node, and copies": {"strategy": "tawpipe-groups", "nodes": 2, "local": 2, "groups": "1/2/2"},
    "exact changes": {"strategy": "tawpipe-step", "nodes": 2, "local": 2, "weights_compression": "exact"},
    "exact changes of one device": {
        "strategy": "tawpipe-step",
        "nodes": 3,
        "local": 1,
        "weights_compression": "exact",
        "early_updates": True,
    },
    "ring": {"strategy": "weipipe", "nodes": 3, "local": 1},
    "spread, homes in the host": {"strategy": "tawpipe-spread", "nodes": 2, "local": 2, "host_homes": "state"},
    "one device, homes in the host": {
        "strategy": "tawpipe-spread",
        "nodes": 1,
        "local": 1,
        "host_homes": "state",
        "micro_batches": 3,
    },
    "early updates, homes in the host": {
        "strategy": "flat",
        "nodes": 2,
        "local": 1,
        "host_homes": "state",
        "early_updates": True,
    },
    "whole, all in the host": {"strategy": "tawpipe-whole", "nodes": 2, "local": 2, "host_homes": "all"},
    "one device, all in the host": {
        "strategy": "tawpipe-spread",
        "nodes": 1,
        "local": 1,
        "host_homes": "all",
        "early_updates": True,
        "micro_batches": 3,
    },
    "spread, in sets": {"strategy": "tawpipe-spread", "nodes": 1, "local": 4, "sequence_ranks": 2},
    "whole, in sets": {
        "strategy": "tawpipe-whole",
        "nodes": 2,
        "local": 2,
        "sequence_ranks": 2,
        "micro_batches_per_visit": 2,
        "offloaded_layers": 2,
    },
    "whole, kept graphs in the host": {
        "strategy": "tawpipe-whole",
        "nodes": 2,
        "local": 1,
        "micro_batches_per_visit": 2,
        "offloaded_layers": 3,
        "recompute": "none:2,selective",
    },
    "pipeline, kept graphs in the host": {"order": IN_THE_HOST, "recompute": "none:2,selective"},
}


def base(name: str) -> Schedule:
    knobs = dict(BASES[name])
    if "order" in knobs:
        times = "0/0/0,2x1/2/1,1/2/1/1/0/0/1,0/1/0;host=1"
        use = SolvedPipeline("world:0,3@0,1", times, knobs.pop("order"))
        return build(step_for(llama(3, tied=True), Topology.grid(2, 1), 3, use=use, **knobs))
    nodes, local = knobs.pop("nodes"), knobs.pop("local")
    model = llama(3, tied=True) if name != "flat" else llama(3, lora=True)
    count = knobs.pop("micro_batches", 2 * nodes * local // knobs.get("sequence_ranks", 1) - 1)
    return make(model, nodes, local, count, look_ahead=1, **knobs)


def hunt(name: str, seeds: range) -> Counter[str]:
    """How many mutants were refused, harmless, or no change at all; fails on one that is neither."""
    schedule = base(name)
    verify(schedule)
    found: Counter[str] = Counter()
    for seed in seeds:
        what, changed = mutant(schedule, seed)
        if (changed.programs, changed.pools) == (schedule.programs, schedule.pools):
            found["unchanged"] += 1
            continue
        try:
            verify(changed)
        except ScheduleError:
            found["refused"] += 1
            continue
        found["harmless"] += 1
        for order in range(4):
            try:
                check_numbers(changed, seed=order)
            except WrongNumbers as error:
                before = [action for program in schedule.programs for action in program]
                after = [action for program in changed.programs for action in program]
                new = [str(action) for action in after if action not in before]
                pytest.fail(f"{name}, seed {seed}: {what} is accepted, but {error}; new actions: {new}")
    return found


@pytest.mark.parametrize("name", BASES)
def test_mutated_schedules_that_verify_compute_right_sums(name):
    found = hunt(name, range(16))
    assert found["refused"] > 8, found


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_more_mutated_schedules_that_verify_compute_right_sums(name):
    hunt(name, range(1000, 1030))
