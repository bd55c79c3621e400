"""Steps of documents that are dealt, as plans price them, beside the same documents dealt and played bin by bin."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from plan_requests import LAYERS, plan_request, profile, search_only, step_of
from tawpipe.dealing.balance import LayerKind, LayerTime, Packs, deal
from tawpipe.plan.answer.dealt import BALANCED, played
from tawpipe.plan.cost.predict import memory_of, memory_quickly, predict, short_schedule
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Device, uniform
from tawpipe.plan.search.pipelines import hops
from tawpipe.plan.search.plan_file import record_of, request_from
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.pipelines.dealing import LONG
from tawpipe.schedule.pipelines.strategy import ActivationPipeline
from tawpipe.schedule.pipelines.work import BlockTimes
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import held
from tawpipe.schedule.step import Schedule, StepSpec
from tawpipe.schedule.strategies.build import build, step_of_packs
from tawpipe.schedule.strategies.table import find
from tawpipe.simulate import BlockCost, LinkModel, MicroBatchSize, Seconds, mean_size, size_of
from tawpipe.topology import Topology

CAP = 450
SHORT, LONG_ONES = [5] * 60 + [20] * 30 + [100] * 6, [300] * 2


def lengths_of(seed: int, *, longest: int = 0) -> list[int]:
    """Some documents; one of them is longer than a bin if asked."""
    draw = Random(seed)
    return [*draw.choices(SHORT + LONG_ONES, k=150), *([longest] if longest else [])]


def request_of(lengths: list[int], *, nodes: int = 2, local: int = 2, between: float = 1e7) -> PlanRequest:
    """Layers whose attention takes as long as the rest at 100 tokens."""
    layer = BlockCost(Seconds(1e-3, 1e-3, 1e-5), Seconds(1e-3, 3e-3, 3e-5))
    memory = replace(profile().memory, keys=8, key_gradients=16)
    own = replace(profile(), blocks=(BlockCost(), *[layer] * LAYERS, BlockCost()), update_s=0.0, memory=memory)
    machine = uniform(nodes, local, between=LinkModel(between), inside=LinkModel(1e9), device=Device())
    rows = -(-sum(lengths) // CAP // nodes // local) * nodes * local
    given = {"sequence_length": CAP, "size": size_of([CAP]), "global_batch": rows, "dealt": tuple(lengths)}
    return plan_request(machine, profile=own, cuts=True, **given)


def dealt(request: PlanRequest, step: StepSpec) -> Packs:
    """The documents as a run deals them."""
    if step.strategy.axis:
        return step.strategy.dealing(step, cap=CAP, work=request.profile.work, cuts=LONG)(request.dealt)
    return deal(request.dealt, world_size=request.topology.world_size, cap=CAP, work=request.profile.work)


def test_uneven_rows_take_mean_time_and_memory_of_the_longest() -> None:
    lengths = [[10], [20], [30], [100]]
    rows = request_of([CAP])
    alike = replace(rows, dealt=(), size=size_of([100]), global_batch=8)
    uneven = replace(alike, mean=mean_size(lengths))
    step = alike.step(ScheduleSettings(strategy="flat"))
    assert memory_quickly(uneven, step) == memory_quickly(alike, step)
    expected = replace(alike, size=MicroBatchSize(40.0, mean_size(lengths).pairs))
    assert uneven.block_seconds(step) == expected.block_seconds(step) < alike.block_seconds(step)
    assert uneven.with_rows(4).mean == uneven.mean
    assert uneven.with_micro_batch(2).mean == mean_size(lengths).times(2)


CASES = [
    ("1f1b", {"stages": "world"}, 0),
    ("1f1b", {"stages": "nodes"}, 1000),
    ("1f1b", {"stages": "world"}, 1000),
    ("interleaved-1f1b", {"stages": "nodes"}, 700),
    ("generated", {"stages": "world"}, 700),
]


@pytest.mark.parametrize(("strategy", "settings", "longest"), CASES)
def test_predicted_step_of_packs_and_slices_matches_the_simulation(
    strategy: str, settings: dict[str, str], longest: int
) -> None:
    request = request_of(lengths_of(1, longest=longest))
    step = step_of(request, strategy, **settings)
    bins = dealt(request, step)
    tried = played(request, step, BALANCED, bins)
    assert tried is not None and bool(bins.slices) and max(map(len, step.micro_batches)) == len(bins.single)
    assert predict(request, step).step_seconds == pytest.approx(tried.seconds, rel=0.07)


def test_prediction_waits_for_the_longest_pack_of_every_round() -> None:
    for seed, between in ((2, 1e7), (3, 2e5)):
        request = request_of(lengths_of(seed), between=between)
        step = step_of(request, "tawpipe-spread")
        tried = played(request, step, BALANCED, dealt(request, step))
        assert tried is not None and predict(request, step).step_seconds == pytest.approx(tried.seconds, rel=0.05)


def shares_of(step: StepSpec, bins: Packs) -> dict[tuple[Kind, int], float]:
    """Of a full bin, what every bin that was dealt keeps; of keys the first slice has those of its document."""
    numbers = dict(zip(step.strategy.dealt_to(step.topology), step.micro_batches, strict=True))
    shares: dict[tuple[Kind, int], float] = {}
    for pipeline, share in numbers.items():
        for m, bin in zip(share, bins.of(pipeline), strict=True):
            shares |= {(kind, m): bins.tokens(bin) / CAP for kind in Kind}
            if bin.part:
                whole = 0 if bin.part[0] else bins.lengths[bin.documents[0]]
                shares |= {(kind, m): whole / CAP for kind in (Kind.KEYS, Kind.KEY_GRADIENTS, Kind.CONTEXT)}
    return shares


@pytest.mark.parametrize("stages", ["world", "nodes"])
def test_predicted_memory_of_slices_matches_the_dealt_step(stages: str) -> None:
    """Where most of what is kept is theirs: a document fills half of the step."""
    request = request_of([3000, *lengths_of(1)[:60]])
    step = step_of(request, "1f1b", stages=stages)
    bins = dealt(request, step)
    as_run = build(step_of_packs(step.model, request.topology, step.settings, bins.form, strategy=step.strategy))
    given, memory = shares_of(as_run.step, bins), request.profile.memory

    def working(schedule: Schedule) -> int:
        sizes = memory.activations(CAP)

        def of(action: Action) -> int:
            return memory.working_of(schedule, action, round(CAP * given.get((Kind.INPUT, action.micro_batch), 1.0)))

        said = held(schedule, request.widths, activation_bytes=sizes, working=of, shares=given)
        return said.activation_bytes + said.working_bytes

    parts = memory_of(request, short_schedule(request, step)).parts
    assert parts["activations"] + parts["working"] == pytest.approx(working(as_run), rel=0.05)


def test_parallel_pipelines_are_predicted_by_the_one_with_most_slices() -> None:
    """One is played for all; steps that are played in part begin with the same slices; and so it comes from a file."""
    request = request_of(lengths_of(1, longest=1500), nodes=2, local=8)
    step = step_of(request, "1f1b", stages="nodes")
    each = [step.cut_in(share) for share in step.micro_batches]
    assert len(set(each)) == 1 and sum(each[0]) > 3 and len(step.slices) == 8 * len(each[0])
    assert len(short_schedule(request, step).played) == 2
    few = step.with_shares(step.strategy.share(8 * (sum(each[0]) + 2), step.topology, step.settings))
    assert [few.cut_in(share) for share in few.micro_batches] == each
    sizes = [request.of(some).costs.sizes for some in (step, few)]
    first = [[size[m] for m in share[: sum(each[0])]] for some, size in zip((step, few), sizes, strict=True)
             for share in some.micro_batches]  # fmt: skip
    assert all(share == first[0] for share in first) and len(sizes[0]) == len(sizes[1]) == 8 * sum(each[0])
    again = request_from(json.loads(json.dumps(record_of(request))), where="here")
    assert again.dealt == tuple(sorted(request.dealt, reverse=True)) and again.cuts
    assert predict(again, step_of(again, "1f1b", stages="nodes")).step_seconds == predict(request, step).step_seconds


@pytest.mark.parametrize(("strategy", "settings"), [("1f1b", {"stages": "nodes"}), ("tawpipe-spread", {})])
def test_saved_plan_of_a_hybrid_deals_by_its_recorded_work(strategy: str, settings: dict[str, str]) -> None:
    """Of a hybrid's layers some have no attention, and documents are dealt by what is counted, not by the profile."""
    request = request_of(lengths_of(1, longest=400))
    first, layer, *others = request.profile.blocks
    hybrid = replace(request.profile, blocks=(first, replace(layer, forward=Seconds(1e-3, 1e-3)), *others))
    request = replace(request, profile=hybrid, work=LayerTime((LayerKind(1, 1.0, 0.05),)))
    again = request_from(json.loads(json.dumps(record_of(request))), where="here")
    before, after = (step_of(asked, strategy, **settings) for asked in (request, again))
    assert after == before and again.dealt_by(after.strategy) == request.dealt_by(before.strategy)
    assert predict(again, after).step_seconds == predict(request, before).step_seconds


@pytest.mark.slow
def test_searched_stages_are_dealt_their_own_slices() -> None:
    """A search finds other stages for what layers keep; slices are those that these are dealt."""
    request = request_of(lengths_of(1, longest=700))
    (best,) = search_only(request, "generated")
    assert best.step is not None and best.prediction is not None
    again = request.step(best.step.settings)
    assert again.slices == best.step.slices and request.of(best.step).costs.sizes
    assert predict(request, again).step_seconds == pytest.approx(best.seconds)


def test_fewer_rows_and_shorter_rows_scale_the_planned_documents() -> None:
    request = request_of(lengths_of(1))
    for order in (request.dealt, sorted(request.dealt), sorted(request.dealt)[::-1]):  # as drawn, or from a plan's file
        half = replace(request, dealt=tuple(order)).with_rows(request.global_batch // 2)
        assert len(half.dealt) == 75 and max(half.dealt) == max(request.dealt)
        assert sum(half.dealt) == pytest.approx(sum(request.dealt) / 2, rel=0.1)
    shorter = request.with_length(200)
    assert max(shorter.dealt) == 200 and sum(shorter.dealt) == sum(request.dealt)


@pytest.mark.parametrize(
    ("nodes", "shared", "stage_s", "messages"),
    [(2, True, 1, 2), (2, False, 1, 1), (3, True, 1, 4), (3, False, 1, 2), (3, True, 8, 2.5), (3, False, 10, 1.1)],
)
def test_pipeline_hop_time_counts_messages_that_share_a_link(nodes: int, shared: bool, stage_s: int, messages: float):
    """Of two pipelines over nodes: both over one link, or one over each; between two others, both ways, as often as
    they meet.
    """
    strategy, link = (
        find("1f1b").configured(ScheduleSettings(strategy="1f1b", stages="nodes")),
        LinkModel(1e6, shared=shared),
    )
    assert isinstance(strategy, ActivationPipeline)
    positions, blocks = strategy.positions(Topology.grid(nodes, 2)), [BlockTimes(0, nodes * stage_s * 10**6, 0)]
    alone = {"link": (1 + shared) * 10**6} if nodes > 2 else {}
    assert hops(positions, 1e6, blocks, between=link, inside=link) == {"hop": messages * 10**6, **alone}
