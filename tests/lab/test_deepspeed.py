"""DeepSpeed's rivals on the timed workload. What trains is left out where DeepSpeed is not installed."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pool import WorkerPool
from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology
from tawpipe_lab.bounds import shipped_bounds
from tawpipe_lab.rivals.deepspeed import load
from tawpipe_lab.rivals.timed_modules import INITIAL_WEIGHT
from tawpipe_lab.sleeper import MOST_OVERSLEPT_S
from tawpipe_lab.worker import make
from tawpipe_lab.workload import TimedWorkload
from timed import LAYERS, STEPS, WORKLOAD

WORLD, NODE = 4, 2
PADDED = 1004
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("zero3", {}),
    "zero3 without prefetch": ("zero3", {"prefetch": 0}),
    "zero3, far ahead": ("zero3", {"prefetch": 2}),
    "zero-hpz": ("zero-hpz", {}),
    "zero-hpz, two per gather": ("zero-hpz", {"micro_batches_per_gather": 2}),
    "zero3 after zero-hpz, two per gather": ("zero3", {"micro_batches_per_gather": 2}),
}


# what the workers run


class _Gathers:
    """Watches the all-gathers that are issued: what over how many ranks, and how many nobody has waited for yet."""

    def __init__(self) -> None:
        self.elements: Counter[int] = Counter()
        self.under_way = 0
        self._gather = dist.all_gather_into_tensor

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        work = self._gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self.elements[dist.get_world_size(group)] += output_tensor.numel()
        if not async_op:
            return work
        self.under_way += 1
        return _Work(self, work)


class _Work:
    def __init__(self, gathers: _Gathers, work: Any) -> None:
        self._gathers, self._work = gathers, work

    def wait(self) -> None:
        self._work.wait()
        self._gathers.under_way -= 1


def compile_nothing() -> None:
    """DeepSpeed would compile an all-reduce in shared memory, in a minute and with a lock that a killed test leaves."""
    load("zero3").ops.__compatible_ops__["deepspeed_shm_comm"] = False


def alternate(world: World) -> dict[str, dict[str, Any]]:
    """Single steps of all contenders in turn, FSDP2 among them; what each one did."""
    compile_nothing()
    workload = TimedWorkload(**WORKLOAD)
    fsdp2: Any = make("fsdp2", workload, world.topology, world.rank)
    gathers = _Gathers()
    dist.all_gather_into_tensor = gathers  # DeepSpeed looks it up once, when it starts
    made: dict[str, Any] = {
        title: make(name, workload, world.topology, world.rank, **knobs) for title, (name, knobs) in CONTENDERS.items()
    }
    found: dict[str, dict[str, Any]] = {title: {"asked_s": [], "busy_s": []} for title in made}
    for _ in range(STEPS):
        fsdp2.step()
        for title, contender in made.items():
            before = contender.sleeper.asked_s
            contender.busy()
            gathers.elements.clear()
            computing = contender.sleeper.computing
            ahead: list[int] = []

            def watched(seconds: float, computing: Any = computing, ahead: list[int] = ahead) -> Any:
                ahead.append(gathers.under_way)
                return computing(seconds)

            contender.sleeper.computing = watched
            contender.step()
            contender.sleeper.computing = computing
            assert gathers.under_way == 0
            found[title]["asked_s"].append(contender.sleeper.asked_s - before)
            found[title]["busy_s"].append(contender.busy()["COMPUTE"])
            found[title]["gathered"] = tuple(gathers.elements[ranks] / PADDED for ranks in (WORLD, NODE))
            found[title]["ahead"] = max(ahead)
    expected = [p.full_tensor() for p in fsdp2.parameters if isinstance(p, DTensor)]
    norm = fsdp2.gradient_norm.full_tensor()
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-not-found]

    for title, contender in made.items():
        weights = [safe_get_full_fp32_param(p) for p in contender.model.parameters()]
        assert len(weights) == len(expected) == LAYERS
        found[title]["difference"] = max(float((a - b).abs().max()) for a, b in zip(weights, expected, strict=True))
        found[title]["learnt"] = min(float((w - INITIAL_WEIGHT).abs().min()) for w in weights)
        found[title]["norm"] = float(contender.gradient_norm) / float(norm)
        contender.close()
    return found


def step_without_optimizer(world: World) -> float:
    compile_nothing()
    workload = TimedWorkload(**WORKLOAD, optimizer=False)
    contender: Any = make("zero3", workload, world.topology, world.rank)
    contender.step()
    from deepspeed.utils import safe_get_full_fp32_param  # type: ignore[import-not-found]

    return max(float((safe_get_full_fp32_param(p) - INITIAL_WEIGHT).abs().max()) for p in contender.model.parameters())


# tests


@pytest.fixture(scope="module")
def deepspeed_pool(pool: WorkerPool, judges: None) -> WorkerPool:
    """Workers that are started anew, with DeepSpeed on their path."""
    if find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    pool.close()
    return pool


@pytest.fixture(scope="module")
def alternated(deepspeed_pool: WorkerPool) -> list[dict[str, dict[str, Any]]]:
    # DeepSpeed keeps the process groups of its first start, so the workers cannot be used again.
    return deepspeed_pool.run_once(f"{__name__}:alternate", WORLD // NODE, NODE)


@pytest.mark.slow
@pytest.mark.parametrize("title", CONTENDERS)
def test_deepspeed_trains_as_fsdp2_does(alternated: list[dict[str, dict[str, Any]]], title: str) -> None:
    share = TimedWorkload(**WORKLOAD).compute_s / WORLD
    for rank in alternated:
        found = rank[title]
        assert found["asked_s"] == pytest.approx([share] * STEPS)
        least = [asked - MOST_OVERSLEPT_S for asked in found["asked_s"]]  # a late end of the step before is taken off
        assert all(busy >= seconds for busy, seconds in zip(found["busy_s"], least, strict=True))
        assert found["norm"] == pytest.approx(1.0, rel=1e-5)
        assert found["difference"] < 1e-7 < 2e-4 < found["learnt"]


@pytest.mark.slow
def test_deepspeed_gathers_as_often_as_the_bounds_count(alternated: list[dict[str, dict[str, Any]]]) -> None:
    """Layers over all ranks and inside the node; two rounds where a gather serves one micro-batch."""
    expected = {
        "zero3": (2 * (2 * LAYERS - 1), 0),
        "zero3 without prefetch": (2 * (2 * LAYERS - 1), 0),
        "zero3, far ahead": (2 * (2 * LAYERS - 2), 0),  # what would be gathered ahead is there, and is kept
        "zero-hpz": (LAYERS, (LAYERS - 1) + (2 * LAYERS - 1)),
        "zero-hpz, two per gather": (LAYERS, LAYERS - 1),
        "zero3 after zero-hpz, two per gather": (2 * LAYERS - 1, 0),
    }
    for rank in alternated:
        assert {title: rank[title]["gathered"] for title in CONTENDERS} == expected


@pytest.mark.slow
def test_deepspeed_gathers_run_while_a_layer_computes(alternated: list[dict[str, dict[str, Any]]]) -> None:
    for rank in alternated:
        ahead = {title: rank[title]["ahead"] for title in CONTENDERS}
        assert (ahead["zero3 without prefetch"], ahead["zero3"], ahead["zero-hpz"]) == (0, 1, 1)
        assert ahead["zero3, far ahead"] == 2


@pytest.mark.slow
def test_deepspeed_weights_are_unchanged_without_an_optimizer(deepspeed_pool: WorkerPool) -> None:
    assert max(deepspeed_pool.run_once(f"{__name__}:step_without_optimizer", 1, 2)) < 1e-8


@pytest.mark.parametrize(
    ("name", "knobs", "change", "shape", "setting"),
    [
        ("zero3", {"nonsense": 1}, {}, (2, 2), "knob of zero3"),
        ("zero3", {"prefetch": -1}, {}, (2, 2), "prefetch"),
        ("zero3", {"micro_batches_per_gather": 3}, {}, (2, 2), "micro_batches"),
        ("zero-hpz", {}, {"micro_batches": 6}, (2, 2), "micro_batches"),
        ("zero-hpz", {}, {}, (4, 1), "topology"),
        ("zero-hpz", {}, {}, (1, 4), "topology"),
    ],
)
def test_impossible_deepspeed_settings_are_named(
    name: str, knobs: dict[str, Any], change: dict[str, Any], shape: tuple[int, int], setting: str
) -> None:
    with pytest.raises(UserError) as caught:
        make(name, TimedWorkload(**{**WORKLOAD, **change}), Topology.grid(*shape), 0, **knobs)
    assert caught.value.setting == setting


def test_missing_deepspeed_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="pip install deepspeed"):
        make("zero3", TimedWorkload(**WORKLOAD), Topology.grid(2, 2), 0)


def test_bounds_count_the_bytes_of_deepspeed_between_nodes() -> None:
    work, link, topology = TimedWorkload(12, 8_000_000, 0.1, 0.2, 0.1, 24, 0), LinkModel(50e6), Topology.grid(3, 2)

    def sent(name: str, **knobs: Any) -> float:
        return shipped_bounds(name, work, topology, link, knobs).sent_bytes[0] / (12 * 8e6)

    ring = 5 / 6
    assert sent("zero3") == pytest.approx(4 * ring * (3 - 1 / 12))
    assert sent("zero3", prefetch=2) == pytest.approx(4 * ring * (3 - 2 / 12))
    assert sent("zero-hpz", micro_batches_per_gather=2) == pytest.approx(ring * (1 + 2))
