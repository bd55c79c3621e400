"""The rivals as shipped by torch, on the timed workload: they compute what they should, in steps that alternate."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pool import WorkerPool
from selected import asked_for, quick_ones
from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe_lab import bounds, ours, serving
from tawpipe_lab.rivals import deepspeed, fsdp
from tawpipe_lab.rivals.fsdp_collectives import (
    HierarchicalGather,
    HierarchicalReduction,
    RingReduction,
    TransferLanes,
)
from tawpipe_lab.rivals.pipelining import ZBV_NEEDS
from tawpipe_lab.rivals.stages import stages_of
from tawpipe_lab.rivals.timed_modules import INITIAL_WEIGHT
from tawpipe_lab.sleeper import MOST_OVERSLEPT_S, BusyTime, Sleeper
from tawpipe_lab.worker import make, makers
from tawpipe_lab.workload import TimedWorkload
from timed import LAYERS, STEPS, WORKLOAD

DOCUMENTS = {**WORKLOAD, "micro_batches": 2, "keys_bytes": 40_000}
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {}),
    "fsdp2 by itself": ("fsdp2", {"prefetch": 0}),
    "fsdp2, two per gather": ("fsdp2", {"micro_batches_per_gather": 2}),
    "fsdp2, far ahead": ("fsdp2", {"prefetch": LAYERS}),
    "fsdp2, ring": ("fsdp2", {"reduction": "ring"}),
    "fsdp2, reduced once": ("fsdp2", {"reduce_every_round": False}),
    "fsdp2, kept": ("fsdp2", {"keep_weights": True}),
    "fsdp2-node": ("fsdp2-node", {}),
    "hsdp": ("hsdp", {}),
    "hsdp, kept": ("hsdp", {"keep_weights": True}),
    "fsdp2-hierarchical": ("fsdp2-hierarchical", {}),
    "fsdp2-hierarchical, reduced once": ("fsdp2-hierarchical", {"reduce_every_round": False}),
    "fsdp2-hierarchical, two per gather": ("fsdp2-hierarchical", {"micro_batches_per_gather": 2}),
    "1f1b": ("1f1b", {}),
    "interleaved-1f1b": ("interleaved-1f1b", {"parts_per_layer": 2}),
    "zbv": ("zbv", {"parts_per_layer": 2}),
}
UNEVEN = {
    **WORKLOAD,
    "pattern": "baa ",
    "kinds": {
        "a": {"forward_s": 0.0, "linear_bytes": 400},
        "b": {"backward_input_s": 0.01},
        "head": {"forward_s": 0.003},
    },
    "room": 3,
    "host_s": 1e-4,
}
FIXED_OURS = ("1f1b-ours", "interleaved-1f1b-ours", "zero-bubble")
UNEVEN_ROWS: list[tuple[str, dict[str, Any]]] = [
    *((name, knobs) for name in ("1f1b", "interleaved-1f1b", "zbv") for knobs in ({}, {"balance": "cost"})),
    *((name, knobs) for name in FIXED_OURS for knobs in ({}, {"balance": "cost"})),
    ("1f1b-ours", {"stages": "nodes:0,4@0,1"}),
    ("1f1b-fitted", {}),
    ("generated", {"stages": "world:0,1,3@1,0,1"}),
]
if torch.__version__ < ZBV_NEEDS:
    del CONTENDERS["zbv"], UNEVEN_ROWS[4:6]
QUICK = ("fsdp2", "hsdp", "1f1b", "zbv")


# what the workers run


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _watch_unsharded(contender: Any) -> list[int]:
    """How many layers have their whole weights, at every piece of computation."""
    seen: list[int] = []
    computing = contender.sleeper.computing

    def watched(seconds: float) -> Any:
        seen.append(sum(not isinstance(layer.weight, DTensor) for layer in getattr(contender, "layers", ())))
        return computing(seconds)

    contender.sleeper.computing = watched
    return seen


def alternate(world: World, titles: list[str]) -> dict[str, dict[str, Any]]:
    """Single steps of all contenders in turn, all in one set of processes; what each one did."""
    workload = TimedWorkload(**WORKLOAD)
    made: dict[str, Any] = {
        title: make(CONTENDERS[title][0], workload, world.topology, world.rank, **CONTENDERS[title][1])
        for title in titles
    }
    found: dict[str, dict[str, Any]] = {
        title: {"unsharded": _watch_unsharded(contender), "asked_s": [], "busy_s": []}
        for title, contender in made.items()
    }
    for _ in range(STEPS):
        for title, contender in made.items():
            before = contender.sleeper.asked_s
            contender.busy()
            contender.step()
            found[title]["asked_s"].append(contender.sleeper.asked_s - before)
            found[title]["busy_s"].append(contender.busy()["COMPUTE"])
    for title, contender in made.items():
        norm = contender.gradient_norm
        found[title]["norm"] = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        weights = [_local(p.detach()) for p in contender.model.parameters()]
        found[title]["weights"] = [float(f(w)) for w in weights if w.numel() for f in (torch.min, torch.max)]
        contender.close()
    return found


def run_once(world: World, *, name: str, workload: dict[str, Any], knobs: dict[str, Any]) -> list[float]:
    contender: Any = make(name, TimedWorkload(**workload), world.topology, world.rank, **knobs)
    contender.step()
    contender.step()
    weights = [_local(p.detach()) for p in contender.model.parameters()]
    found = [float(f(w)) for w in weights if w.numel() for f in (torch.min, torch.max)]
    contender.close()
    return found


def compare_collectives(world: World) -> list[bool]:
    """Ours beside torch's, on values that are all different."""
    topology, rank, size, length = world.topology, world.rank, world.size, 5
    lanes, everyone = TransferLanes(BusyTime()), dist.group.WORLD
    assert everyone is not None
    right = []
    whole = torch.arange(size * length, dtype=torch.float32)
    gather = HierarchicalGather(topology, rank, lanes)
    for asynchronous in (False, True):
        gathered = torch.zeros(size * length)
        mine = gathered[rank * length : (rank + 1) * length]
        mine.copy_(whole[rank * length : (rank + 1) * length])
        work = gather(gathered, mine, everyone, async_op=asynchronous)
        if work is not None:
            work.wait()
        right.append(torch.equal(gathered, whole))
    expected = (whole * sum(r + 1 for r in range(size)))[rank * length : (rank + 1) * length]
    for reduction in (
        RingReduction(topology, lanes),
        HierarchicalReduction(topology, rank, lanes),
    ):
        outputs = [torch.zeros(length) for _ in range(4)]
        for output in outputs:
            reduction(output, whole * (rank + 1), everyone, op=dist.ReduceOp.SUM)
        reduction.finish()
        right += [torch.equal(output, expected) for output in outputs]
    lanes.close()
    return right


# tests


@pytest.fixture(scope="module")
def alternated(pool: WorkerPool, request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return pool.run(f"{__name__}:alternate", 2, 2, titles=asked_for(request))


@pytest.mark.parametrize("title", quick_ones(CONTENDERS, QUICK))
def test_every_rank_of_a_rival_sleeps_for_its_share(alternated: list[dict[str, dict[str, Any]]], title: str) -> None:
    """Whatever the schedule, also where the backward pass is cut in two: no part runs twice and none is left out."""
    share = TimedWorkload(**WORKLOAD).compute_s / len(alternated)
    for rank in alternated:
        found = rank[title]
        assert found["asked_s"][1:] == pytest.approx([share] * (STEPS - 1)), "after the first step, which infers shapes"
        least = [asked - MOST_OVERSLEPT_S for asked in found["asked_s"]]  # a sleep makes up for the one before
        assert all(busy >= asked for busy, asked in zip(found["busy_s"], least, strict=True))


@pytest.mark.parametrize("title", quick_ones(CONTENDERS, QUICK))
def test_rival_gradients_and_weights_equal_those_of_one_process(
    alternated: list[dict[str, dict[str, Any]]], title: str
) -> None:
    """Every element's gradient is the number of micro-batches over the activation's elements, in all layers."""
    workload = TimedWorkload(**WORKLOAD)
    each = workload.micro_batches / (workload.activation_bytes // 4)
    norm = each * math.sqrt(workload.layers * workload.layer_bytes // 4)
    weight = torch.tensor([INITIAL_WEIGHT], requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-4)
    for _ in range(STEPS):
        weight.grad = torch.tensor([each / norm])
        optimizer.step()
    for rank in alternated:
        assert rank[title]["norm"] == pytest.approx(norm, rel=1e-5)
        assert rank[title]["weights"] == pytest.approx([weight.item()] * len(rank[title]["weights"]), abs=1e-7)


def compute_uneven(world: World) -> dict[str, float]:
    """Seconds that a rank computes in the second step of every pipeline, of layers that differ."""
    found = {}
    for name, knobs in UNEVEN_ROWS:
        contender: Any = make(name, TimedWorkload(**UNEVEN), world.topology, world.rank, **knobs)
        contender.step()
        before = contender.sleeper.asked_s
        contender.step()
        found[f"{name} {knobs}"] = contender.sleeper.asked_s - before
        if name == "1f1b-fitted":
            found["host"] = contender.busy().get("HOST", 0.0)
        contender.close()
    return found


@pytest.mark.slow
def test_uneven_pipeline_stages_sleep_for_their_own_layers(pool: WorkerPool) -> None:
    """Equal in layers or in time, or as given; with a backward pass in two, too; torch's and ours."""
    workload = TimedWorkload(**UNEVEN)
    found = pool.run(f"{__name__}:compute_uneven", 2, 1)
    for name, knobs in UNEVEN_ROWS:
        strategy, own_stages = ours.rows().get(name, name), knobs.get("stages", "").partition(":")[2]
        rival = {"zero-bubble": "zbv", "solved": "1f1b"}.get(strategy, strategy)
        layout = stages_of(rival, workload, 2, 1 if rival == "1f1b" else 2, knobs.get("balance", "layers"))
        layout = Layout.parse(own_stages, workload.layers + 2) if own_stages else layout
        for rank, own in enumerate(found):
            blocks = [block for stage in layout.stages_of(rank) for block in layout.blocks_of(stage)]
            seconds = workload.micro_batches * sum(workload.block_parts[block].seconds for block in blocks)
            assert own[f"{name} {knobs}"] == pytest.approx(seconds), (name, knobs, rank)
    assert found[0]["host"] > 0 and found[1]["host"] == 0, (
        "the first keeps inputs of two micro-batches, the last of one"
    )


SHARDED = ("fsdp2 by itself", "fsdp2", "fsdp2-node", "hsdp", "fsdp2-hierarchical", "hsdp, kept")


@pytest.mark.parametrize("title", quick_ones(SHARDED, QUICK))
def test_sharded_layers_are_gathered_only_while_used(alternated: list[dict[str, dict[str, Any]]], title: str) -> None:
    for rank in alternated:
        seen = rank[title]["unsharded"]
        assert min(seen) >= 1 and (max(seen) == LAYERS if "kept" in title else max(seen) <= 2), seen


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (2, 1), (1, 3)])
def test_our_fsdp2_collectives_equal_those_of_torch(pool: WorkerPool, shape: tuple[int, int]) -> None:
    assert all(all(rank) for rank in pool.run(f"{__name__}:compare_collectives", *shape))


@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "fsdp2-hierarchical", "1f1b"])
def test_rival_weights_are_unchanged_without_an_optimizer(pool: WorkerPool, name: str) -> None:
    workload = {**WORKLOAD, "optimizer": False}
    for rank in pool.run(f"{__name__}:run_once", 1, 2, name=name, workload=workload, knobs={}):
        assert rank == pytest.approx([INITIAL_WEIGHT] * len(rank))


def test_frozen_weights_of_a_layer_are_unchanged(pool: WorkerPool) -> None:
    workload = {**WORKLOAD, "frozen_bytes": 400}
    # torch keeps groups of meshes beyond their processes' use: another mesh than that of the contenders above.
    for name, shape in (("fsdp2", (2, 2)), ("hsdp", (2, 1))):
        for rank in pool.run(f"{__name__}:run_once", *shape, name=name, workload=workload, knobs={}):
            assert rank.count(pytest.approx(INITIAL_WEIGHT, rel=1e-7)) == len(rank) // 2
            assert rank.count(pytest.approx(INITIAL_WEIGHT - 2e-4, rel=1e-4)) == len(rank) // 2


@pytest.mark.parametrize("shape", [(4, 1), pytest.param((1, 4), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["fsdp2", "hsdp", "fsdp2-hierarchical"])
def test_rivals_train_on_one_node_and_on_one_device_per_node(
    pool: WorkerPool, name: str, shape: tuple[int, int]
) -> None:
    for rank in pool.run(f"{__name__}:run_once", *shape, name=name, workload=WORKLOAD, knobs={}):
        assert rank == pytest.approx([INITIAL_WEIGHT - 2e-4] * len(rank), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "knobs", "change", "setting"),
    [
        ("nonsense", {}, {}, "strategy"),
        ("fsdp2", {"nonsense": 1}, {}, "knob of fsdp2"),
        ("fsdp2", {}, {"micro_batches": 6}, "micro_batches"),
        ("fsdp2", {"micro_batches_per_gather": 3}, {}, "micro_batches"),
        ("fsdp2", {"micro_batches_per_gather": 0}, {}, "micro_batches_per_gather"),
        ("fsdp2", {"reduction": "nonsense"}, {}, "reduction"),
        ("hsdp", {"reduction": "ring"}, {}, "reduction"),
        ("1f1b", {}, {"layers": 3}, "layers"),
        ("1f1b", {"balance": "nonsense"}, {}, "balance"),
        ("1f1b", {}, {"micro_batches": 3}, "micro_batches"),
        ("interleaved-1f1b", {"parts_per_layer": 2}, {"micro_batches": 9}, "micro_batches"),
        ("interleaved-1f1b", {}, {}, "layers"),
        ("1f1b", {"parts_per_layer": 0}, {}, "parts_per_layer"),
    ],
)
def test_impossible_rival_settings_are_named(
    name: str, knobs: dict[str, Any], change: dict[str, Any], setting: str
) -> None:
    with pytest.raises(UserError) as caught:
        make(name, TimedWorkload(**{**WORKLOAD, **change}), Topology.grid(2, 2), 0, **knobs)
    assert caught.value.setting == setting


def test_every_strategy_name_has_a_maker() -> None:
    others = {"zbv", fsdp.CONTEXT_PARALLEL, *deepspeed.NAMES, *ours.rows(), *serving.ROWS}
    assert {name for name, _ in CONTENDERS.values()} | others == set(makers())


def share_documents(world: World) -> dict[str, tuple[float, float]]:
    """Seconds that one rank computes in a step, and whether keys and values travelled, of rows that share documents."""
    found = {}
    for name in (fsdp.CONTEXT_PARALLEL, "tawpipe-spread", "hsdp-ours"):
        contender: Any = make(name, TimedWorkload(**DOCUMENTS), world.topology, world.rank)
        contender.busy()
        contender.step()
        contender.step()
        found[name] = contender.sleeper.asked_s / 2, contender.busy().get("SEQ", 0.0)
        contender.close()
    return found


def test_shared_documents_split_computing_equally_over_ranks(pool: Any) -> None:
    """Everyone computes as much of them, whoever shares them, and keys and values travel."""
    workload = TimedWorkload(**DOCUMENTS)
    for rank in pool.run(f"{__name__}:share_documents", 2, 2):
        for name, (asked, busy) in rank.items():
            assert asked == pytest.approx(workload.compute_s / 4), name
            assert busy > 0, name


@pytest.mark.parametrize(
    ("name", "change", "setting"),
    [
        (fsdp.CONTEXT_PARALLEL, {"keys_bytes": 0}, "strategy"),
        ("tawpipe-spread", {"keys_bytes": 0}, "sequence_ranks"),
    ],
)
def test_documents_without_keys_cannot_be_shared(name: str, change: dict[str, Any], setting: str) -> None:
    knobs = {} if name == fsdp.CONTEXT_PARALLEL else {"sequence_ranks": 2}
    with pytest.raises(UserError) as caught:
        make(name, TimedWorkload(**{**DOCUMENTS, **change}), Topology.grid(2, 2), 0, **knobs)
    assert caught.value.setting == setting


def test_context_parallel_bounds_count_keys_three_times() -> None:
    """Keys and values of every document thrice, (P-1)/P of them over every node's link, beside FSDP2's weights."""
    topology, between = Topology.grid(2, 2), LinkModel(1e6)
    workload = TimedWorkload(**DOCUMENTS)
    sent = [
        bounds.shipped_bounds(fsdp.CONTEXT_PARALLEL, one, topology, between).sent_bytes[0]
        for one in (replace(workload, keys_bytes=0), workload)
    ]
    every = workload.micro_batches * workload.layers * workload.keys_bytes
    assert sent[1] - sent[0] == pytest.approx(3 * 3 / 4 * every)


def test_sleeping_time_is_counted_as_busy() -> None:
    sleeper = Sleeper(BusyTime())
    begin = time.perf_counter()
    sleeper.compute(0.01)
    passed = time.perf_counter() - begin
    assert sleeper.asked_s == 0.01
    assert 0.01 <= sleeper.busy.take()["COMPUTE"] <= passed
    assert sleeper.busy.take() == {}
