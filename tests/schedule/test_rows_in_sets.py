"""Rows that several ranks compute together: keys and values are gathered and their gradients summed up on a lane of
their own, and everything else of a schedule stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from schedule_numbers import check_numbers
from schedules import llama, make
from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane, Op
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.cp_groups import with_cp_groups
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sharing import share_in_cp_groups
from tawpipe.schedule.sizes.activations import activations_held
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths, costs
from tawpipe.schedule.spec import share_packs
from tawpipe.schedule.strategies.build import build, step_of
from tawpipe.schedule.strategies.weight_strategy import WeightStrategy
from tawpipe.schedule.transform import for_one_thread
from tawpipe.simulate import CostModel, LinkModel, MicroBatchSize, play
from tawpipe.topology import Topology

STRATEGIES = ["tawpipe-spread", "tawpipe-striped", "tawpipe-whole", "tawpipe-step", "flat", "hsdp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("nodes", "local", "ranks", "count"), [(1, 2, 2, 3), (2, 4, 2, 7), (2, 4, 4, 3), (3, 2, 2, 5)])
def test_context_parallel_schedules_verify_for_one_thread(strategy, nodes, local, ranks, count):
    """Sets with fewer micro-batches than others included."""
    made = make(
        llama(3, tied=True), nodes, local, count, strategy=strategy, sequence_ranks=ranks, micro_batches_per_visit=2
    )
    verify(for_one_thread(made), one_thread=True)


def test_context_parallelism_leaves_weight_transfers_unchanged():
    plain = make(llama(4), 2, 2, 4, micro_batches_per_visit=2)
    together = make(llama(4), 2, 2, 2, micro_batches_per_visit=2, sequence_ranks=2)
    for before, after in zip(plain.programs, together.programs, strict=True):
        lanes = (Lane.GATHER, Lane.REDUCE, Lane.INTER_W)
        assert [one for one in before if one.lane in lanes] == [one for one in after if one.lane in lanes]
        for one in after:
            assert (one.lane is Lane.SEQ) == (one.group == "set2")
            assert one.lane is not Lane.COMPUTE or not one.group
        counts = Counter((one.op, one.collective) for one in after if one.lane is Lane.SEQ)
        layers, own = 4, 1
        assert counts == {
            (Op.COLLECTIVE, "all_gather"): 2 * layers * own,
            (Op.COLLECTIVE, "reduce_scatter"): layers * own,
        }


def test_context_parallelism_changes_only_layers_and_gathers_keys_first() -> None:
    whole = make(llama(3), 2, 2, 4, micro_batches_per_visit=2, sequence_ranks=2)
    step = whole.step
    assert isinstance(step.strategy, WeightStrategy)
    before = step.strategy.build(step)
    after = with_cp_groups(before)
    assert after == whole and with_cp_groups(replace(before, step=replace(step, shared=0))).programs == before.programs
    for old, new in zip(before.programs, after.programs, strict=True):
        layers = [one for one in old if one.lane is Lane.COMPUTE and 0 < one.block < 4]
        assert [one for one in old if one not in layers] == [one for one in new if not 0 < one.block < 4]
        gathered = set()
        for one in new:
            if one.collective == "all_gather" and one.lane is Lane.SEQ:
                gathered |= set(one.writes)
            if one.op in (Op.FORWARD, Op.BACKWARD) and 0 < one.block < 4:
                used = [buffer for buffer in one.reads if buffer.kind is Kind.KEYS]
                assert len(used) == 1 and used[0] in gathered and used[0] in one.frees
                gathered -= set(used)
        assert not gathered


def test_keys_are_transferred_while_another_micro_batch_computes():
    """The clock: links that take as long as a layer cost nothing from the second micro-batch of a visit on."""
    steps = {}
    for count in (1, 4):
        made = make(llama(3), 1, 2, count, micro_batches_per_visit=count, sequence_ranks=2)
        inside = LinkModel(1e6, shared=False)
        model = CostModel.timed(layers=3, forward_s=0.2, backward_s=0.2, between=inside, inside=inside, key_elements=25)
        model = replace(model, size=MicroBatchSize(1000, 2), weight_bytes=4)
        seq = sum(span.end - span.begin for span in play(made, model).spans(0, step=1) if span.action.lane is Lane.SEQ)
        # Half of the tokens come from, or go to, the other rank; weights take some of the link.
        assert seq == pytest.approx(count * 3 * 3 * 0.05, rel=0.05)
        steps[count] = play(made, model).step_seconds
    alone = 3 * (0.2 + 0.2)
    assert steps[1] - alone > 3 * 3 * 0.05
    assert steps[4] / 4 - alone < 3 * 3 * 0.05 / 2


def test_schedule_without_key_gradients_is_refused():
    made = make(llama(3), 1, 2, 1, sequence_ranks=2)
    for op in (Op.KEYS, Op.KEYS_BACKWARD):
        programs = [tuple(one for one in own if one.op is not op) for own in made.programs]
        with pytest.raises(ScheduleError):
            verify(replace(made, programs=tuple(programs)))


def test_memory_counts_keys_of_all_tokens_and_boundaries_of_own_tokens():
    memory = BlockMemory(
        8, {"ctx": 2}, {"layer": {"forward full": (0, 0), "backward full": (0, 16)}}, keys=4, key_gradients=8
    )
    made = make(llama(3), 1, 2, 1, sequence_ranks=2)
    said = costs(
        made,
        Widths(2, 4, 4, 2),
        activation_bytes=memory.activations(1000, ranks=2),
        working=lambda action: memory.working_of(made, action, 1000),
    )
    inputs, arriving, of_input = 3 * 8 * 500, 8 * 500, 8 * 500
    assert said.activation_bytes + said.working_bytes == inputs + arriving + of_input + 2000 + 12 * 1000 + 16 * 500
    peak = max(activations_held(made, 0, {Kind.KEYS: 1, Kind.KEY_GRADIENTS: 1}), key=lambda one: one[1])
    assert peak[1] == 2


@pytest.mark.parametrize("ranks", [0, 3, 8])
def test_impossible_context_parallel_sizes_are_refused(ranks):
    with pytest.raises(UserError, match=r"sequence_ranks.*1, 2 or 4: it must divide the 4 processes"):
        share_in_cp_groups(2, Topology.grid(2, 4), ScheduleSettings(sequence_ranks=ranks))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"recompute": "none"}, "full with"),
        ({"recompute": "none", "sequence_chunk": 4}, "full or selective"),
        ({"strategy": "weipipe"}, "at different layers"),
        ({"strategy": "1f1b"}, "whole rows"),
    ],
)
def test_settings_incompatible_with_context_parallelism_are_refused(settings, reason):
    with pytest.raises(UserError, match=reason):
        make(llama(4), 1, 2, 1, sequence_ranks=2, **settings)


SOME = [(1, 2, 2, 1, 1, 1), (2, 4, 2, 1, 2, 2), (2, 4, 4, 2, 1, 3), (1, 4, 2, 0, 2, 1), (1, 4, 2, 3, 0, 2)]


@pytest.mark.parametrize(
    ("strategy", "nodes", "local", "ranks", "shared_rounds", "rounds", "per_visit"),
    [
        (strategy, *some)
        for number, strategy in enumerate(STRATEGIES)
        for other, some in enumerate(SOME)
        if (number + other) % 2 == 0
    ],
)
def test_mixed_shared_and_single_micro_batches_verify_and_sum_right(
    strategy, nodes, local, ranks, shared_rounds, rounds, per_visit
):
    """As a step of bins has them: proved, and played with numbers."""
    topology, model = Topology.grid(nodes, local), llama(3, tied=True)
    shares = share_packs(shared_rounds, rounds, nodes * local, ranks)
    settings = ScheduleSettings(strategy=strategy, sequence_ranks=ranks, micro_batches_per_visit=per_visit)
    shared = shared_rounds * nodes * local // ranks
    made = for_one_thread(build(step_of(model, topology, settings, shares, shared=shared)))
    verify(made, one_thread=True)
    check_numbers(made, seed=shared_rounds)
    in_sets = {one.micro_batch for program in made.programs for one in program if one.op is Op.KEYS}
    assert in_sets == set(range(shared))
