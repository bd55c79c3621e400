"""What is measured in the lab: knobs and shapes that cannot be are refused, a contender does all of its work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Lane
from tawpipe.topology import Topology
from tawpipe_lab import worker
from tawpipe_lab.cluster.network import Traffic
from tawpipe_lab.contender import check_grid, check_sharding, read_settings
from tawpipe_lab.ours_run import OurContender
from tawpipe_lab.rivals.context_parallel import KeysOfAll
from tawpipe_lab.rivals.task import task_of
from tawpipe_lab.rivals.traffic import (
    nodes_of_stages,
    pipeline_bytes,
    ranks_of_stages,
    sharded_traffic,
    stages_per_rank,
)
from tawpipe_lab.sleeper import BusyTime
from tawpipe_lab.workload import TimedWorkload
from timed import LAYERS, WORKLOAD


@dataclass(frozen=True)
class Knobs:
    depth: int = 1
    kind: str = "a"


def test_unknown_knob_is_refused_with_the_known_knobs() -> None:
    assert read_settings(Knobs, "some", {"depth": 3}) == Knobs(3)
    with pytest.raises(UserError, match="knob of some: got 'dept'; one of depth, kind"):
        read_settings(Knobs, "some", {"dept": 3})


def test_rival_refuses_micro_batches_and_topologies_that_it_cannot_shard() -> None:
    work = TimedWorkload(**WORKLOAD)
    check_sharding("fsdp2", work, Topology.grid(2, 2), 2)
    with pytest.raises(UserError, match="micro_batches: got 8; fsdp2 needs a multiple of 12"):
        check_sharding("fsdp2", work, Topology.grid(2, 2), 3)
    with pytest.raises(UserError, match="the ranks of a node to be consecutive"):
        check_sharding("fsdp2", work, Topology(((0, 2), (1, 3))), 1)
    check_grid("hsdp", Topology.grid(2, 2))
    for topology in (Topology.grid(4, 1), Topology.grid(1, 4)):
        with pytest.raises(UserError, match="hsdp needs several nodes of several processes"):
            check_grid("hsdp", topology)


# traffic


def shares(name: str, topology: Topology, count: int = 16, **knobs: Any) -> Any:
    return sharded_traffic(name, count, topology, knobs, first=0.25, last=0.125)


def test_shares_count_what_sharding_rivals_send_between_nodes() -> None:
    grid = Topology.grid(2, 4)
    plain, tree = shares("fsdp2", grid), shares("fsdp2-hierarchical", grid)
    assert (plain.rounds, plain.forward, tree.forward) == (2, 7 / 8, 1 / 2)
    # Two rounds forward and backward, less what is kept in between, and two reductions.
    assert plain.total == pytest.approx(2 * (7 / 8 + 7 / 8 * 7 / 8) - 7 / 8 / 4 + 2 * 7 / 8)
    once = shares("fsdp2", grid, reduce_every_round=False)
    assert plain.total - once.total == pytest.approx(7 / 8)
    kept = shares("fsdp2", grid, keep_weights=True)
    assert kept.gathers == 1 and kept.backward == 0 and kept.total == pytest.approx(7 / 8 + 2 * 7 / 8)
    assert shares("fsdp2", grid, micro_batches_per_gather=2).rounds == 1
    assert shares("fsdp2", Topology.grid(1, 4)).total == 0  # nothing leaves a node
    assert replace(plain, trained=0.5).total < plain.total


@pytest.mark.parametrize(("name", "each"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)])
def test_pipeline_activations_count_only_at_borders_between_nodes(name: str, each: int) -> None:
    grid = Topology.grid(2, 2)
    assert stages_per_rank(name) == each
    ranks, nodes = ranks_of_stages(name, 4, each), nodes_of_stages(name, grid, each)
    assert sorted(ranks) == sorted([*range(4)] * each) and nodes == [grid.node_of(rank) for rank in ranks]
    borders = sum(here != there for here, there in pairwise(nodes))
    assert pipeline_bytes(name, 100.0, grid, each) == (100.0 * borders,) * 2
    assert pipeline_bytes(name, 100.0, Topology.grid(1, 4), each) == (0.0,)


# what they train


def test_timed_task_has_equal_model_and_batches_in_whatever_parts() -> None:
    work = TimedWorkload(**{**WORKLOAD, "forward_s": 0.0, "backward_input_s": 0.0, "backward_weight_s": 0.0})
    task, other = task_of(work, BusyTime()), task_of(work, BusyTime())
    parts = list(task.parts())
    assert len(parts) == task.num_parts and task.sleeper is not None and task.sleeper is not other.sleeper
    inputs, targets = task.batch(3, [0, 1, 2, 3])
    assert all(
        torch.equal(a, b) for a, b in zip(other.batch(3, [1, 3]), (inputs[[1, 3]], targets[[1, 3]]), strict=True)
    )
    model = task.whole(parts)
    whole = task.loss(model(inputs), targets)
    halves = [task.loss(model(inputs[one]), targets[one]) for one in ([0, 1], [2, 3])]
    assert torch.allclose(whole, sum(halves, torch.zeros(())))
    assert task.optimizer(model.parameters()) is not None
    assert sum(p.numel() for p in model.parameters()) == LAYERS * work.layer_bytes // 4


def test_contender_sleeps_for_its_whole_workload_and_keeps_no_activation() -> None:
    work = TimedWorkload(**{**WORKLOAD, "forward_s": 0.0002, "backward_input_s": 0.0004, "backward_weight_s": 0.0002})
    for name in ("tawpipe-spread", "hsdp-ours"):
        made = OurContender(name, work, Topology.grid(1, 1), 0)
        try:
            for steps in (1, 2):
                made.step()
                assert made.sleeper.asked_s == pytest.approx(steps * work.compute_s)
            assert not made._executor.compute._held  # type: ignore[attr-defined]
            busy = made.busy()
            assert busy["COMPUTE"] >= 2 * work.compute_s and made.busy() == {}
            recorded = made.record()
            assert recorded is not None and made.sleeper.asked_s == pytest.approx(3 * work.compute_s)
            assert made.origin == "ours" and made.loss_share is None and made.knobs
        finally:
            made.close()


def test_device_holds_the_graph_bytes_of_its_layers_and_reports_the_peak() -> None:
    times = {"forward_s": 1e-4, "backward_input_s": 2e-4, "backward_weight_s": 1e-4}
    kinds = {"kinds": {"n": {"graph_bytes": 40_000}}, "pattern": "n" + "-" * (LAYERS - 1)}
    work = TimedWorkload(**{**WORKLOAD, **times, **kinds})
    held = []
    for recompute, pattern in (("full", None), ("none", None), ("none", "-" * LAYERS)):
        made = OurContender("tawpipe-spread", work, Topology.grid(1, 1), 0, recompute=recompute, pattern=pattern)
        made.step()
        held.append(made.compute.most_bytes)
        made.close()
    assert held[1] - held[2] == 40_000 - work.activation_bytes and held[0] <= held[2]


# keys and values


class Noted:
    """In the place of lanes and groups: what is submitted is noted, and an event that says when it was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def add(self, lane: str, every: Any) -> None:
        assert lane == Lane.SEQ.value and every == [(0, 1)]

    def submit(self, lane: str, run: Any) -> Any:
        self.log.append("begin")
        outer = self

        class Event:
            def wait(self) -> None:
                outer.log.append("wait")

        return Event()


class Layer(nn.Module):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log, self.weight = log, nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        self.log.append("layer")
        x.register_hook(lambda _: self.log.append("backward"))
        return x * self.weight


def test_keys_are_gathered_for_forward_and_again_for_backward(monkeypatch) -> None:
    lanes: Any = Noted()
    keys, layer = KeysOfAll(lanes, Topology.grid(2, 1), 400), Layer(lanes.log)
    asked: list[str] = []
    for name in ("gather", "reduce"):
        own = getattr(keys, name)
        monkeypatch.setattr(keys, name, lambda documents, name=name, own=own: (asked.append(name), own(documents)))
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [0, 1])
    keys.attach(layer)
    x = torch.ones(5, 2, requires_grad=True)
    out = layer(x)
    assert lanes.log == ["begin", "layer", "wait"] and asked == ["gather"]
    lanes.log.clear()
    out.sum().backward()
    # Keys set out again before the backward pass of the layer, and their gradients once it is done.
    assert lanes.log == ["begin", "backward", "wait", "begin"] and asked == ["gather", "gather", "reduce"]
    assert torch.equal(x.grad, torch.full((5, 2), 3.0)) and layer.weight.grad == 10  # type: ignore[arg-type]


def test_host_homes_stream_updates_in_the_lab() -> None:
    contender = OurContender("tawpipe-spread", TimedWorkload(**WORKLOAD), Topology.grid(1, 1), 0, host_homes="state")
    storage, streaming = contender._executor.storage, contender._executor.streaming
    storage.master[0].fill_(1.0)
    assert streaming is not None and not storage.compute_copy[0].any()
    contender.step()
    assert storage.compute_copy[0].any()  # what travels was brought up to date by an update that passed
    contender.close()


def test_recorded_weights_are_replayed_forward_and_back(tmp_path) -> None:
    """To its end and back; twice as many elements in as many bytes."""
    weights = torch.randn(4, 900).bfloat16()
    torch.save(weights, tmp_path / "1e-05.pt")
    knobs = {"bf16": True, "changes": str(tmp_path / "1e-05.pt"), "weights_compression": "exact"}
    contender = OurContender("tawpipe-step", TimedWorkload(**WORKLOAD), Topology.grid(1, 1), 0, **knobs)
    copies = contender._executor.storage.compute_copy
    for step in (0, 1, 2, 3, 2, 1, 0, 1):
        assert copies[0].dtype == torch.bfloat16 and copies[0].numel() >= 2 * 1002
        assert torch.equal(copies[0], weights[step].repeat(3)[: copies[0].numel()])
        contender.step()
    contender.close()
    with pytest.raises(UserError, match=r"changes: got 'none\.pt'; a file that `python benchmarks/coding\.py --record"):
        OurContender("tawpipe-step", TimedWorkload(**WORKLOAD), Topology.grid(1, 1), 0, changes="none.pt")


def test_steps_in_a_row_are_drained_once_and_reported_as_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of their work is done, nothing of them is under way at the end, and only there is anything awaited."""
    monkeypatch.setattr(worker, "_gather", lambda value: [value])
    monkeypatch.setattr(worker, "own_traffic", lambda: Traffic(0, 0))
    monkeypatch.setattr(worker.dist, "barrier", lambda: None)
    work = TimedWorkload(**{**WORKLOAD, "forward_s": 0.0002, "backward_input_s": 0.0004, "backward_weight_s": 0.0002})
    contender = OurContender("tawpipe-spread", work, Topology.grid(1, 1), 0)
    awaited = list[float]()
    drain = contender._executor.drain
    monkeypatch.setattr(contender._executor, "drain", lambda: (drain(), awaited.append(contender.sleeper.asked_s)))
    readings = worker.Readings()
    worker._measure(contender, readings, Topology.grid(1, 1), 0, 0, 3)
    assert awaited == [pytest.approx(3 * work.compute_s)]
    contender.close()
    assert work.compute_s <= readings.steps[0]["lanes"]["COMPUTE"] <= readings.steps[0]["seconds"]
