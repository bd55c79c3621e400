"""WeiPipe's ring: who holds what in which turn, and what that makes of a rank's program."""

from __future__ import annotations

import pytest

from schedules import llama, make, step_for
from tawpipe.schedule.actions import Lane, Op
from tawpipe.schedule.routes.ring import Ring, Stream, stages_of_blocks
from tawpipe.topology import Topology


def ring(nodes: int, local: int, count: int, *, layers: int = 0, per_visit: int = 1, training: bool = True) -> Ring:
    topology = Topology.grid(nodes, local)
    model = llama(layers or topology.world_size)
    step = step_for(model, topology, count, strategy="weipipe", micro_batches_per_visit=per_visit)
    return Ring(step, training)


@pytest.mark.parametrize(("layers", "size"), [(6, 6), (12, 6), (7, 3), (8, 5), (1, 1)])
def test_ring_stages_have_even_layer_counts(layers, size):
    stages = stages_of_blocks(llama(layers), size)
    assert list(stages) == sorted(stages)
    per_stage = [stages[1:-1].count(stage) for stage in range(size)]
    assert sum(per_stage) == layers and max(per_stage) - min(per_stage) <= 1


def test_every_ring_stage_has_its_own_home():
    made = ring(3, 2, 6, layers=12)
    homes = {
        made.home(unit)
        for unit, spec in enumerate(made.model.units)
        if made.model.blocks[spec.blocks[0]].kind == "layer"
    }
    assert homes == set(range(6))


def test_ring_turn_runs_one_forward_and_one_backward_of_different_passes():
    made = ring(2, 2, 12)
    steady = 0
    for position in range(4):
        for turn in range(made.num_turns):
            forward, backward = made.forward_at(position, turn), made.backward_at(position, turn)
            if forward and backward:
                steady += 1
                assert forward[0] == backward[0] + made.size
                assert forward[1] == made.size - 1 - backward[1]
    assert steady == 4 * 4 * (3 - 1)  # all but each rank's first forward and last backward pass


@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_ring_pass_finds_its_weights_and_gradients_in_its_turn(count):
    made = ring(2, 2, count)
    there = {
        (journey.stream, journey.stage, (journey.start + turn - journey.departure) % made.size, turn)
        for journey in made.journeys
        for turn in range(journey.departure, journey.arrival + 1)
    }
    for number in made.passes:
        for stage in range(made.size):
            position = number % made.size
            assert (Stream.FORWARD, stage, position, made.forward_turn(number, stage)) in there
            assert (Stream.BACKWARD, stage, position, made.backward_turn(number, stage)) in there
            assert (Stream.GRADIENT, stage, position, made.backward_turn(number, stage)) in there
    assert all(journey.departure >= 0 for journey in made.journeys)
    ends = {
        (journey.start + journey.hops) % made.size - made.home(journey.unit)
        for journey in made.journeys
        if journey.stream is Stream.GRADIENT
    }
    assert ends == {0}


def test_passes_over_an_edge_equal_the_hops_over_it():
    made = ring(3, 2, 13)
    for journey in made.journeys:
        walked = [(journey.start + hop) % made.size for hop in range(journey.hops)]
        assert [journey.passes(position, made.size) for position in range(made.size)] == [
            walked.count(position) for position in range(made.size)
        ]


def test_ring_turn_ends_with_one_neighbour_exchange_per_lane():
    schedule = make(llama(12), 3, 2, 18, strategy="weipipe")
    for rank, program in enumerate(schedule.programs):
        exchanges = [action for action in program if action.op is Op.EXCHANGE]
        assert {action.lane for action in exchanges} == {Lane.INTER_W, Lane.INTER_G}
        assert {action.group for action in exchanges} == {"world"}
        for action in exchanges:
            assert {t.peer for t in action.transfers if t.send} <= {(rank + 1) % 6}
            assert {t.peer for t in action.transfers if not t.send} <= {(rank - 1) % 6}
        turns = 3 * 6 + 2 * 6 - 1  # of the last rank's last backward, counted from the first forward
        assert sum(action.lane is Lane.INTER_W for action in exchanges) <= turns


def test_ring_weights_wait_only_for_buffers():
    """With more buffers the ring runs further ahead: a rank has posted more of it before it computes for the first
    time.
    """
    ahead = []
    for look_ahead in (1, 2, 4):
        program = make(llama(4), 2, 2, 8, strategy="weipipe", look_ahead=look_ahead).programs[0]
        first = next(i for i, action in enumerate(program) if action.op is Op.FORWARD)
        ahead.append(sum(action.op is Op.EXCHANGE for action in program[:first]))
    assert ahead == [1, 2, 4]
