"""What a rank does in a step, piece by piece: the visits of blocks, what computes in them, and the step's end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from schedules import llama, make, step_for
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.blocks import backward, forward, left_behind, offload, reload
from tawpipe.schedule.buffers import COUNT, NORM, Buffer, Kind, home_gradient, home_weight, loss
from tawpipe.schedule.routes.visits import Visit, forward_visits, training_visits
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import StepSpec
from tawpipe.schedule.step_end import StepEnd
from tawpipe.schedule.strategies.weight_strategy import WeightStrategy
from tawpipe.topology import Topology

# visits


def step_of(model: ModelSpec, count: int = 4, nodes: int = 1, local: int = 1, **settings) -> StepSpec:
    return step_for(model, Topology.grid(nodes, local), count, **settings)


@pytest.mark.parametrize("model", [llama(3), llama(3, tied=True), llama(3, lora=True), llama(4, frozen=2)])
def test_every_round_visits_blocks_forward_and_back_to_the_first_trained(model: ModelSpec) -> None:
    step, blocks = step_of(model, 3), len(model.blocks)
    visits = training_visits(step)
    for number in range(3):
        own = [visit for visit in visits if visit.round == number]
        assert [visit.block for visit in own if not visit.backward] == list(range(blocks - 1))
        back = [visit.block for visit in own if visit.backward]
        assert back == list(range(blocks))[::-1][: len(back)] and min(back) == model.first_backward
        made = {
            unit for visit in own if visit.gradient_index is not None for unit in model.trainable_units(visit.block)
        }
        assert made == {number for number, unit in enumerate(model.units) if unit.trainable}


@pytest.mark.parametrize("visits_of", [training_visits, forward_visits])
def test_weight_and_gradient_visits_are_numbered_without_gaps(visits_of) -> None:
    visits: tuple[Visit, ...] = visits_of(step_of(llama(4, frozen=2), 2))
    weights = [visit.weight_index for visit in visits if visit.weight_index is not None]
    gradients = [visit.gradient_index for visit in visits if visit.gradient_index is not None]
    assert weights == list(range(len(weights))) and gradients == list(range(len(gradients)))
    assert all(visit.backward for visit in visits if visit.gradient_index is not None)
    assert all(visit.weight_index is not None for visit in visits if not visit.backward)


def test_embedding_backward_needs_no_weights() -> None:
    (last,) = (visit for visit in training_visits(step_of(llama(2), 1)) if visit.backward and visit.block == 0)
    assert last.weight_index is None and last.gradient_index is not None


# computing


def computed(step: StepSpec, own: tuple[int, ...]) -> list[Action]:
    """All blocks forward and backward on the micro-batches of one visit; inputs go to the host's memory and back."""
    model, actions = step.model, []
    weights = [[home_weight(unit) for unit in block.units] for block in model.blocks]
    for block in range(len(model.blocks) - 1):
        for place, m in enumerate(own):
            actions.append(forward(step, block, m, weights[block], place=place))
            if step.moves(block) and block >= model.first_backward:
                actions.append(offload(block, m, place))
    for block in range(len(model.blocks) - 1, model.first_backward - 1, -1):
        if step.moves(block):
            actions += [reload(block, m, place) for place, m in enumerate(own)]
        gradients = {unit: (home_gradient(unit), False) for unit in model.trainable_units(block)}
        actions += backward(step, block, own, weights[block], gradients)
    return actions


@pytest.mark.parametrize("model", [llama(4), llama(4, frozen=3), llama(4, lora=True)])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": "none"},
        {"recompute": "none:1,selective:2,full"},
        {"offloaded_layers": 4},
        {"offloaded_layers": 2, "recompute": "none:1,full"},
        {"sequence_chunk": 4, "offloaded_layers": 2, "recompute": "selective"},
    ],
    ids=str,
)
def test_visits_leave_only_losses_behind(model: ModelSpec, settings: dict) -> None:
    """Every activation is there when it is read, and goes once: nothing is left over, nothing read after its end."""
    step = step_of(model, 3, micro_batches_per_visit=3, **settings)
    held: set[Buffer] = set()
    for action in computed(step, (0, 1, 2)):
        missing = {one for one in action.reads if one.is_activation} - held
        assert not missing, f"{action} reads what is not there"
        assert set(action.frees) <= held
        held = (held | {one for one in action.writes if one.is_activation}) - set(action.frees)
    assert held == set(map(loss, range(3)))


def test_visit_gradients_accumulate_from_the_second_micro_batch() -> None:
    step, unit = step_of(llama(2), 3, micro_batches_per_visit=3), 1
    for already in (False, True):
        made = list(backward(step, 1, (0, 1, 2), [home_weight(unit)], {unit: (home_gradient(unit), already)}))
        assert [home_gradient(unit) in action.reads for action in made] == [already, True, True]
    (zero,) = backward(step, 1, (), [], {unit: (home_gradient(unit), False)})
    assert zero.op is Op.ZERO and zero.writes == (home_gradient(unit),)
    assert not list(backward(step, 1, (), [], {unit: (home_gradient(unit), True)}))  # it holds the step's sum so far


def test_offloaded_input_frees_its_buffer_two_blocks_later() -> None:
    step = step_of(llama(4), 1, offloaded_layers=2)
    actions = computed(step, (0,))
    given = {buffer: action.block for action in actions for buffer in action.frees if buffer.kind is Kind.INPUT}
    assert [given[Buffer.parse(f"x.0.{block}")] for block in (1, 2)] == [3, 4]
    assert left_behind(step_of(llama(4), 1), 3, 0) == ()


# the end


@pytest.fixture(scope="module")
def program() -> list[Action]:
    """Rank 0's actions of a step but for its end."""
    made = make(llama(5), 2, 2, 8, gradient_buffers=1)
    return [action for action in made.programs[0] if action.op not in (Op.NORM, Op.UPDATE)]


def ended(program: list[Action], *, training: bool = True, **settings) -> list[Action]:
    step = step_of(llama(5), 8, 2, 2, **settings)
    return list(StepEnd(0, step, training=training).close(program))


def test_updates_wait_for_the_norm_and_cover_every_unit(program) -> None:
    closed = ended(program)
    assert closed[: len(program)] == program and closed[len(program)].op is Op.NORM
    updates = closed[len(program) + 1 :]
    assert all(one.op is Op.UPDATE and NORM in one.reads for one in updates)
    assert sorted(one.unit for one in updates) == list(range(8))
    assert {home_gradient(unit) for unit in range(8)} < set(closed[len(program)].reads)


def test_early_updates_follow_their_complete_gradient_once(program) -> None:
    for buffers in (1, 2):
        closed = ended(program, early_updates=True, gradient_buffers=buffers)
        assert closed[0].op is Op.COUNT and closed[-1].op is Op.NORM
        assert [one for one in closed if one.op not in (Op.COUNT, Op.NORM, Op.UPDATE)] == program
        updates = {one.unit: at for at, one in enumerate(closed) if one.op is Op.UPDATE}
        assert sorted(updates) == list(range(8))
        for unit, at in updates.items():
            complete = max(i for i, one in enumerate(closed) if home_gradient(unit) in one.writes and i != at)
            between = [one for one in closed[complete:at] if one.lane is Lane.COMPUTE and one.op is not Op.UPDATE]
            visits = sum(a.block != b.block for a, b in pairwise(between))
            later = [one for one in closed[at:] if one.op is Op.BACKWARD]
            assert at > complete and COUNT in closed[at].reads
            assert visits >= 2 * buffers - 1 or not later  # a push under way must not stop the device


def test_evaluation_ends_with_only_the_sum_of_losses() -> None:
    (norm,) = ended([], training=False)
    assert norm.op is Op.NORM and norm.reads == norm.frees == (loss(0), loss(1))


# all of it


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "tawpipe-striped", "tawpipe-whole", "flat", "hsdp"])
def test_long_step_is_a_short_step_with_repeated_rounds(strategy: str) -> None:
    step = step_of(llama(3), 6 * 4, 2, 2, strategy=strategy)
    assert isinstance(step.strategy, WeightStrategy)

    def counts(one: StepSpec) -> Counter:
        built = step.strategy.build(one)
        return Counter((rank, a.op, a.lane) for rank, program in enumerate(built.programs) for a in program)

    short, longer, times = step.strategy.extended(step, 2)
    assert (short.rounds, longer.rounds, step.rounds) == (2, 3, 6)
    less, more, all_of_it = counts(short), counts(longer), counts(step)
    assert all_of_it == Counter({key: less[key] + times * (more[key] - less[key]) for key in more})


def test_build_for_some_ranks_gives_others_empty_programs() -> None:
    step = step_of(llama(3), 8, 2, 2)
    some, everybody = step.strategy.build(step, ranks=[2]), step.strategy.build(step)
    assert [bool(program) for program in some.programs] == [False, False, True, False]
    assert some.programs[2] == everybody.programs[2] and some.pools[2] == everybody.pools[2]


def test_units_are_placed_at_given_homes_and_wrong_homes_are_refused() -> None:
    step = step_of(llama(2), 4, 3, 1, strategy="tawpipe-striped")
    strategy, model, topology = step.strategy, step.model, step.topology
    assert isinstance(strategy, WeightStrategy)
    wanted = (2, 0, 0, 1, 2)
    assert tuple(topology.node_of(home.ranks[0]) for home in strategy.place(model, topology, wanted)) == wanted
    for wrong in ((0, 1), (0, 0, 0, 0, 3), (0, 0, 0, 0, -1)):
        with pytest.raises(UserError, match=r"schedule.homes: .*5 nodes, one for every unit, from 0 to 2"):
            strategy.place(model, topology, wrong)
    flat = replace(step_of(llama(2), 4, 3, 1, strategy="flat")).strategy
    assert isinstance(flat, WeightStrategy)
    with pytest.raises(UserError, match=r"schedule.homes: .*nothing under flat"):
        flat.place(model, topology, wanted)
