"""Checks of numbers: against a plain loop in one process, between repeated runs, and for messages out of order."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tawpipe.model.units import ParameterSlot, Unit
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings, TrainingSettings
from tawpipe.plan.machine.probe import host_link
from tawpipe.prove.freed import Freed
from tawpipe.prove.models import dtype_here, rows, seeded_model, small
from tawpipe.prove.operators import attention_seen
from tawpipe.prove.outcome import Outcome, each_way
from tawpipe.runtime.homes.optimizer import OptimizerFactory, adamw
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.homes.streaming import Streaming
from tawpipe.runtime.homes.unit_optimizers import UnitOptimizers
from tawpipe.runtime.world import World
from tawpipe.schedule.actions import Lane
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import ScheduleSettings, settings_from
from tawpipe.schedule.strategies.table import strategies

LIMIT = 1e-6
"""Maximum relative difference in fp64. It is not smaller because transformers computes the norms of Llama in fp32
always."""
CHUNK_LIMITS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.05}
"""Maximum relative difference for rows in chunks, by number type. In bfloat16, every sum is rounded to 8 bits."""
IN_HOST = ("tawpipe-spread", "tawpipe-whole", "flat", "1f1b")
"""Strategies whose gradients reach their homes in different ways."""
SHARE = 0.8
"""Share of the CPU link's bandwidth that updates of homes in CPU memory must reach."""
LENGTH = 48
STEPS = 3
COMPUTES, TRANSFERS = "computing", "transfers"
MOST_FAULTS = 5
"""Maximum number of faults of a strategy that are reported."""
DELAY_S = {"cpu": 0.001, "cuda": 0.02}
"""Maximum number of seconds that a delayed lane waits before each of its actions, by type of device."""
ELEMENTS = 1 << 26
"""Elements of the unit whose update is timed: 16 portions, and 1 GiB of CPU memory."""
UP_BYTES = 16
"""Bytes per element that AdamW in fp32 copies to the device."""
Numbers = tuple[float, dict[str, Tensor]]
"""Loss, and gradients by parameter name."""


def exact(world: World) -> Outcome:
    """Check that one step of every strategy has the loss and gradients of a plain loop in one process, in fp64.

    Call on all ranks. Rank 0 compares; on the other ranks the check holds."""
    count = 2 * world.size + 1
    expected = _plain(world, count) if world.rank == 0 else (0.0, {})
    ran: set[str] = set()

    def difference(name: str) -> float:
        computed, seen = _step(world, count, schedule=name)
        ran.update(seen)
        return _difference(expected, computed) if world.rank == 0 else 0.0

    differences, refused = each_way(_names(), difference)
    worst = max(differences.values(), default=0.0)
    note = f"{len(differences)} strategies, largest relative difference {worst:.1e}"
    holds = world.rank != 0 or (bool(differences) and worst < LIMIT)
    numbers = {"differences": differences, "refused": refused, "limit": LIMIT, "attention": sorted(ran)}
    return Outcome(holds, note, numbers)


def bits(world: World) -> Outcome:
    """Check that steps give identical bits when lanes are late, and that memory is not freed too early.

    Every strategy runs a few steps three times: without delays, with COMPUTE late, and with all transfers late. Losses
    and weights must be equal. In the delayed runs, what the actions free is checked as well (freed.py).
    """
    differ: dict[str, str] = {}
    faults: dict[str, list[str]] = {}
    ran: set[str] = set()

    def compare(name: str) -> None:
        wanted, _, seen = _steps(world, name)
        ran.update(seen)
        for late in (COMPUTES, TRANSFERS):
            again, wrong, _ = _steps(world, name, late)
            if wrong:
                faults[name] = sorted({*faults.get(name, ()), *wrong})[:MOST_FAULTS]
            if world.rank == 0 and not _equal(wanted, again):
                differ[name] = f"with {late} late"

    tried, refused = each_way(_names(), compare)
    of_others = world.gather_texts(json.dumps(faults))
    faults = {name: wrong for text in of_others for name, wrong in json.loads(text).items()}
    note = f"{len(tried)} strategies, {STEPS} steps: "
    note += ", ".join([f"{name} has other bits {how}" for name, how in differ.items()]) or "the same bits"
    if faults:
        note += f"; memory may be used again too early under {', '.join(faults)}: {next(iter(faults.values()))[0]}"
    numbers = {"strategies": [*tried], "differ": differ, "freed": faults, "refused": refused, "attention": sorted(ran)}
    return Outcome(bool(tried) and not differ and not faults, note, numbers)


def in_host(world: World) -> Outcome:
    """Check that homes in CPU memory give the bits of homes on devices, with transfers late.

    On GPUs, the check also fails if updates use less than ``SHARE`` of the link's bandwidth."""
    differ: list[str] = []

    def compare(name: str) -> None:
        wanted, *_ = _steps(world, name, optimizer=adamw(1e-2))
        for level in strategies()[name].host_levels[1:]:
            actual, *_ = _steps(world, name, TRANSFERS, optimizer=adamw(1e-2), host_homes=level)
            if world.rank == 0 and not _equal(wanted, actual):
                differ.append(f"{name} ({level})")

    tried, refused = each_way(IN_HOST, compare)
    rate, most = host_share(world) if world.device.type == "cuda" else (0.0, 0.0)
    note = f"{len(tried)} strategies: "
    note += ", ".join(f"{name} has other bits" for name in differ) or "the same bits"
    note += f"; an update passes with {rate / 1e9:.1f} of {most / 1e9:.1f} GB/s" if most else ""
    numbers = {"strategies": [*tried], "differ": differ, "refused": refused}
    numbers |= {"bytes_per_s": rate, "host_bytes_per_s": most}
    return Outcome(bool(tried) and not differ and rate >= SHARE * most, note, numbers)


def _names() -> list[str]:
    """Return the names of all strategies that a plan may choose."""
    return [name for name, strategy in strategies().items() if strategy.candidate]


def _steps(
    world: World, name: str, late: str = "", *, optimizer: OptimizerFactory | None = None, host_homes: str = "none"
) -> tuple[list[Tensor], list[str], list[str]]:
    """Train ``STEPS`` steps of the small model in fp64 with one strategy. Call on all ranks.

    Args:
        world: the processes.
        name: name of the strategy.
        late: lanes that wait before each action: ``COMPUTES``, ``TRANSFERS``, or empty for none.
        optimizer: plain SGD by default.
        host_homes: value of the setting ``host_homes``.

    Returns:
        Losses, and on rank 0 all weights; faults found by ``Freed`` if lanes are late; attention operators if none is.
    """
    config, generator = small(), random.Random(world.rank)

    def delay(lane: str) -> Callable[[], float]:
        waits = late and (lane == Lane.COMPUTE.value) == (late == COMPUTES)
        most = DELAY_S[world.device.type] if waits else 0.0
        return lambda: generator.uniform(most / 2, most)

    pipeline = Pipeline(
        seeded_model(config),
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
        dtype=torch.float64,
        schedule=settings_from({"strategy": name, "host_homes": host_homes}, where="prove"),
        checks=CheckSettings(check="never", delay=delay if late else None),
        world=world,
    )
    freed, losses = Freed(pipeline) if late else None, list[float]()
    with closing(pipeline):
        with freed.watching() if freed else attention_seen(pipeline.executor.on_compute) as watched:
            for number in range(STEPS):
                losses.append(pipeline.step(rows(config, 2 * world.size, LENGTH, seed=number)).loss)
            pipeline.drain()
        weights = [pipeline.parameter(name) for name in pipeline.parameter_names]
    results = [torch.tensor(losses, dtype=torch.float64), *(weight for weight in weights if weight is not None)]
    return results, freed.faults if freed else [], watched if isinstance(watched, list) else []


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return True if all tensors are bitwise equal. NaN is equal to nothing."""
    return len(first) == len(second) and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def chunks(world: World) -> Outcome:
    """Check that rows in chunks give the numbers of whole rows, in fp64 and in the number type of a training run here.

    Each number type uses another attention kernel.
    """
    return _beside_whole_rows(world, ScheduleSettings(sequence_chunk=LENGTH // 3 - 1), CHUNK_LIMITS)


def cp_groups(world: World) -> Outcome:
    """Check that rows computed by all processes of a node together give the numbers of rows on one process.

    The number types are fp64 and the type of a training run here. In fp64 the limit is larger than for ``chunks``:
    gradients of keys and values pass the layer's norm separately, and are rounded to fp32 there.
    """
    ranks, limits = world.topology.local_size, {**CHUNK_LIMITS, "float64": LIMIT}
    return _beside_whole_rows(world, ScheduleSettings(sequence_ranks=ranks), limits, f"{ranks} processes, ")


def _beside_whole_rows(world: World, cut: ScheduleSettings, limits: Mapping[str, float], words: str = "") -> Outcome:
    """Compare a step whose rows are cut with a step of whole rows, in fp64 and in the number type of training here.

    Args:
        world: the processes.
        cut: settings that cut rows.
        limits: maximum relative difference by number type.
        words: beginning of the note.
    """
    differences, ran = {}, {}
    for dtype in dict.fromkeys((torch.float64, dtype_here(world))):
        name = str(dtype).removeprefix("torch.")
        whole, of_whole = _step(world, 2 * world.size, schedule=ScheduleSettings(), dtype=dtype)
        other, of_cut = _step(world, 2 * world.size, schedule=cut, dtype=dtype)
        differences[name] = _difference(whole, other) if world.rank == 0 else 0.0
        ran[name] = {"whole": of_whole, "cut": of_cut}
    note = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    holds = all(difference < limits[name] for name, difference in differences.items())
    return Outcome(holds, f"{words}largest relative difference {note}", {"differences": differences, "attention": ran})


def order(world: World) -> Outcome:
    """Run a step of every strategy that checks each message; it raises an error if a receiver gets an unexpected one.

    The outcome holds if any strategy ran."""
    checked, _ = each_way(_names(), lambda name: _step(world, 2 * world.size, schedule=name, strict=True))
    return Outcome(bool(checked), f"{len(checked)} strategies", {"strategies": [*checked]})


def _step(
    world: World, count: int, *, dtype: torch.dtype = torch.float64, strict: bool = False, **settings: Any
) -> tuple[Numbers, list[str]]:
    """Run one step of the small model without changing its weights. Call on all ranks.

    Args:
        world: the processes.
        count: number of rows.
        dtype: number type to compute in.
        strict: raise an error if a message is not the one that its receiver expects.
        **settings: further settings of the pipeline.

    Returns:
        (loss and, on rank 0, gradients; attention operators that ran).
    """
    config = small()
    pipeline = Pipeline(
        seeded_model(config),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        dtype=dtype,
        training=TrainingSettings(clip_norm=None),
        checks=CheckSettings(check="never", strict=strict),
        world=world,
        **settings,
    )
    with closing(pipeline):
        with attention_seen(pipeline.executor.on_compute) as seen:
            result = pipeline.step(rows(config, count, LENGTH))
            pipeline.drain()
        gradients = {name: pipeline.gradient(name) for name in pipeline.parameter_names}
        return (result.loss, {name: value for name, value in gradients.items() if value is not None}), seen


def _plain(world: World, count: int) -> Numbers:
    """Compute one step on ``count`` rows by a plain loop on this device, in fp64; return loss and gradients."""
    config = small()
    model: Any = seeded_model(config)
    model = model.to(world.device, torch.float64)
    batch = rows(config, count, LENGTH)
    tokens = count * (LENGTH - 1)
    total = 0.0
    for ids in batch["input_ids"].to(world.device).split(1):
        logits = model(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / tokens
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.cpu() for name, p in model.named_parameters()}


def _difference(expected: Numbers, computed: Numbers) -> float:
    """Return the largest relative difference of the loss and of all gradients."""
    most = abs(computed[0] / expected[0] - 1)
    assert expected[1].keys() == computed[1].keys()
    for name, value in computed[1].items():
        most = max(most, float((value - expected[1][name]).norm() / expected[1][name].norm()))
    return most


def host_share(world: World) -> tuple[float, float]:
    """Measure the bandwidth of updates of homes in CPU memory, while all ranks run them; the slowest rank counts.

    Returns:
        Bytes per second that updates copy to a device, and bytes per second that its link to the CPU carries in both
        directions at the same time.
    """
    numel, device = ELEMENTS, world.device
    unit = Unit(0, "unit", True, (ParameterSlot("unit", (numel,), 0, numel),), (0,), numel)
    storage = Storage(
        [unit],
        [Home.over((world.rank,), numel)],
        world.rank,
        device=device,
        compute_dtype=torch.bfloat16,
        master_dtype=torch.float32,
        host_homes="state",
    )
    streaming = Streaming(storage, UnitOptimizers(storage, adamw()))
    factor, seconds = torch.ones((), dtype=torch.float64, device=device), 0.0
    for _ in range(3):  # the first one creates the optimizer state
        world.barrier()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        streaming.update(0, factor, None, 1.0, None, early=False)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return UP_BYTES * numel / max(world.gather_numbers(seconds)), host_link(world).bytes_per_s
