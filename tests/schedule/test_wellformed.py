"""Every action by itself: one that says something else than its operation takes is refused, and the reason is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from schedules import NAMES, llama, make
from tawpipe.schedule.actions import Action, Lane, Op, exchange
from tawpipe.schedule.buffers import BALANCE, COUNT, NORM, block_input, home_gradient, home_weight, pooled
from tawpipe.schedule.placement import Home
from tawpipe.schedule.proof.symbolic import ScheduleError
from tawpipe.schedule.proof.verify import verify
from tawpipe.schedule.proof.wellformed import check_forms, check_programs
from tawpipe.schedule.step import Schedule

Change = Callable[[Action], Action]


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    made = make(llama(3), 2, 2, 4, strategy="tawpipe-striped")
    check_forms(made)
    check_programs(made)
    return made


def edited(schedule: Schedule, op: Op, change: Change, lane: Lane | None = None) -> Schedule:
    """With the first such action of rank 0 changed."""
    program = list(schedule.programs[0])
    at = next(i for i, one in enumerate(program) if one.op is op and lane in (None, one.lane))
    program[at] = change(program[at])
    return replace(schedule, programs=(tuple(program), *schedule.programs[1:]))


def _other_group(action: Action) -> Action:
    return exchange(action.lane, action.transfers, "node")


def _into_a_home(action: Action) -> Action:
    return exchange(action.lane, (replace(action.transfers[0], send=False, buffer=home_gradient(2)),), action.group)


CASES: list[tuple[str, Op, Change, str]] = [
    ("lane", Op.FORWARD, lambda a: replace(a, lane=Lane.GATHER), "computes on a lane of transfers"),
    ("micro-batch", Op.FORWARD, lambda a: replace(a, micro_batch=1), "a micro-batch of another rank"),
    ("block", Op.BACKWARD, lambda a: replace(a, block=99), "a block that does not exist"),
    ("twice", Op.FORWARD, lambda a: replace(a, reads=(*a.reads, a.reads[0])), "names a buffer twice"),
    ("no pool", Op.ADD, lambda a: replace(a, reads=(pooled("R0", 77),)), "no pool and no home"),
    ("input", Op.FORWARD, lambda a: replace(a, reads=(*a.reads, block_input(0, 2))), "other activations"),
    ("weights", Op.FORWARD, lambda a: replace(a, reads=a.reads[1:]), "reads other weights"),
    ("gradients", Op.BACKWARD, lambda a: replace(a, writes=a.writes[:-1]), "makes other gradients"),
    ("frees", Op.BACKWARD, lambda a: replace(a, frees=(*a.frees, a.writes[0])), "frees something else"),
    ("peer", Op.EXCHANGE, _other_group, "a peer is not in the group"),
    ("home", Op.EXCHANGE, _into_a_home, "receives into a home"),
    ("weights at home", Op.ADD, lambda a: replace(a, writes=(home_weight(a.unit),)), "only UPDATE changes weights"),
    ("unit", Op.ADD, lambda a: replace(a, unit=99), "gradients of a unit"),
    ("group", Op.COLLECTIVE, lambda a: replace(a, group=""), "has a group that its operation does not take"),
    ("root", Op.COLLECTIVE, lambda a: replace(a, root=0), "the root is not in the group"),
    ("direction", Op.COLLECTIVE, lambda a: replace(a, collective="reduce_scatter"), "weights are gathered"),
    ("8 bits", Op.EXCHANGE, lambda a: replace(a, compression="fp8"), "travels as fp8"),
    ("losses", Op.NORM, lambda a: replace(a, reads=a.reads[1:]), "must read .* write norm"),
    ("update", Op.UPDATE, lambda a: replace(a, reads=(COUNT, *a.reads[1:])), f"must read {NORM}"),
]


@pytest.mark.parametrize(("op", "change", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_malformed_action_is_refused_with_its_place(schedule, op, change, reason) -> None:
    with pytest.raises(ScheduleError, match=rf"(?s){reason}.*: rank 0 #\d+: "):
        check_forms(edited(schedule, op, change))


def test_unit_that_does_not_fit_its_home_is_refused(schedule) -> None:
    model = schedule.model
    larger = replace(model, units=(replace(model.units[0], numel=10**6), *model.units[1:]))
    step = replace(schedule.step, model=larger)
    step.__dict__["homes"] = schedule.homes  # those of the smaller unit
    with pytest.raises(ScheduleError, match="unit 0 does not fit its home"):
        check_forms(replace(schedule, step=step))
    step = replace(schedule.step)
    step.__dict__["homes"] = (Home((0, 0), 1000), *schedule.homes[1:])
    with pytest.raises(ScheduleError, match="a rank has it twice"):
        check_forms(replace(schedule, step=step))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda program: [one for one in program if one.op is not Op.NORM], "rank 0 has 0 norm"),
        (lambda program: [*program, next(one for one in program if one.op is Op.UPDATE)], "rank 0 updates the units"),
        (lambda program: [one for one in program if one.op is not Op.UPDATE], r"rank 0 updates the units \[\]"),
        (lambda program: [*program, Action(Op.COUNT, Lane.INTER_G, (), (COUNT,), group="world")], "rank 0 has 1 count"),
        (lambda program: [one for one in program if one.lane is not Lane.GATHER], "buffers that nothing uses"),
    ],
)
def test_program_with_missing_or_extra_actions_is_refused(schedule, change, reason) -> None:
    program = change(list(schedule.programs[0]))
    if "nothing uses" in reason:
        program = [one for one in program if not any(b.is_weight and not b.is_home for b in one.reads)]
    with pytest.raises(ScheduleError, match=f"(?i){reason}"):
        check_programs(replace(schedule, programs=(tuple(program), *schedule.programs[1:])))


def balancing(strategy: str = "tawpipe-whole") -> Schedule:
    """A schedule for a model whose experts are balanced by a loss."""
    return make(replace(llama(8), balances=True), 2, 2, 4, strategy=strategy)


@pytest.mark.parametrize("strategy", [*NAMES, "1f1b", "zero-bubble"])
def test_norm_waits_for_the_last_layer_that_adds_to_the_balancing_loss(strategy: str) -> None:
    schedule = balancing(strategy)
    verify(schedule)
    for program in schedule.programs:
        writes = [index for index, action in enumerate(program) if BALANCE in action.writes]
        reads = [index for index, action in enumerate(program) if BALANCE in action.reads]
        later = [action for action in program[writes[0] + 1 :] if action.op is Op.BACKWARD and 0 < action.block < 9]
        assert len(writes) == len(reads) == 1 and writes < reads and program[reads[0]].op is Op.NORM and not later


def _without(action: Action) -> Action:
    reads, writes = (tuple(buffer for buffer in side if buffer != BALANCE) for side in (action.reads, action.writes))
    return replace(action, reads=reads, writes=writes)


@pytest.mark.parametrize(
    ("op", "reason"),
    [(Op.BACKWARD, "does not complete the loss that balances experts"), (Op.NORM, "must read .* write norm")],
)
def test_balancing_loss_that_norm_does_not_wait_for_is_refused(op: Op, reason: str) -> None:
    schedule = balancing()
    program = tuple(_without(action) if action.op is op else action for action in schedule.programs[0])
    changed = replace(schedule, programs=(program, *schedule.programs[1:]))
    with pytest.raises(ScheduleError, match=reason):
        check_forms(changed)
        check_programs(changed)
