"""Checks of numbers: against one plain process, against themselves, and against messages that come out of order."""

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
from tawpipe.prove.models import dtype_here, made, rows, small
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
"""Largest relative difference in fp64: transformers computes the norms of Llama in fp32 whatever the dtype."""
CHUNK_LIMITS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 0.05}
"""The same for rows in chunks: of bfloat16 what rounding every sum to 8 bits makes of gradients."""
IN_HOST = ("tawpipe-spread", "tawpipe-whole", "flat", "1f1b")
"""Strategies whose gradients reach their homes in different ways."""
SHARE = 0.8
"""Of the rate of a host's link that updates of homes there have to reach."""
LENGTH = 48
STEPS = 3
COMPUTES, TRANSFERS = "computing", "transfers"
MOST_FAULTS = 5
"""Of a strategy that are written down."""
DELAY_S = {"cpu": 0.001, "cuda": 0.02}
"""Seconds that a lane which is late waits before each of its actions, at most."""
ELEMENTS = 1 << 26
"""Elements of a unit whose updates are timed: 16 slices, and 1 GiB of the host's memory."""
UP_BYTES = 16
"""That AdamW in fp32 brings for every element."""
Numbers = tuple[float, dict[str, Tensor]]
"""A loss, and gradients by their parameters."""


def exact(world: World) -> Outcome:
    """Loss and gradients of a step beside those of a plain loop on one process, in fp64."""
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
    """A few steps of every strategy, again with all transfers on time and COMPUTE late, and with COMPUTE on time and
    all transfers late: the same losses and weights. What actions free is looked at meanwhile (freed.py).
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
    """A few steps with homes in the host's memory and transfers late, beside homes on devices: the same losses and
    weights. On GPUs also the share of the host's link that an update uses.
    """
    differ: list[str] = []

    def compare(name: str) -> None:
        wanted, *_ = _steps(world, name, optimizer=adamw(1e-2))
        for level in strategies()[name].host_levels[1:]:
            there, *_ = _steps(world, name, TRANSFERS, optimizer=adamw(1e-2), host_homes=level)
            if world.rank == 0 and not _equal(wanted, there):
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
    return [name for name, strategy in strategies().items() if strategy.candidate]


def _steps(
    world: World, name: str, late: str = "", *, optimizer: OptimizerFactory | None = None, host_homes: str = "none"
) -> tuple[list[Tensor], list[str], list[str]]:
    """Losses, and on rank 0 all weights, after a few steps; with the words of ``Freed`` where something is late, and
    the operators of attention where nothing is.

    Args:
        late: ``COMPUTES`` or ``TRANSFERS``: which lanes wait before every action.
        optimizer: plain SGD by default.
    """
    config, generator = small(), random.Random(world.rank)

    def delay(lane: str) -> Callable[[], float]:
        waits = late and (lane == Lane.COMPUTE.value) == (late == COMPUTES)
        most = DELAY_S[world.device.type] if waits else 0.0
        return lambda: generator.uniform(most / 2, most)

    pipeline = Pipeline(
        made(config),
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
    """The same bits; of what is no number none are the same."""
    return len(first) == len(second) and all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def chunks(world: World) -> Outcome:
    """A step whose rows run in chunks beside one whose rows run whole: in fp64, and in the dtype of a run here, whose
    attention is another kernel.
    """
    return _beside_whole_rows(world, ScheduleSettings(sequence_chunk=LENGTH // 3 - 1), CHUNK_LIMITS)


def sets(world: World) -> Outcome:
    """A step whose rows all processes of a node compute together beside one in which each computes its own, as for
    ``chunks``. What goes back through keys and values passes a layer's norm by itself, and is rounded there.
    """
    ranks, limits = world.topology.local_size, {**CHUNK_LIMITS, "float64": LIMIT}
    return _beside_whole_rows(world, ScheduleSettings(sequence_ranks=ranks), limits, f"{ranks} processes, ")


def _beside_whole_rows(world: World, cut: ScheduleSettings, limits: Mapping[str, float], words: str = "") -> Outcome:
    """By dtype, fp64 and that of a run here: the difference that cutting rows makes on rank 0, and the operators of
    attention of rows that are whole and of those that are cut.
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
    """A step of every strategy with the check of every message's number and action."""
    checked, _ = each_way(_names(), lambda name: _step(world, 2 * world.size, schedule=name, strict=True))
    return Outcome(bool(checked), f"{len(checked)} strategies", {"strategies": [*checked]})


def _step(
    world: World, count: int, *, dtype: torch.dtype = torch.float64, strict: bool = False, **settings: Any
) -> tuple[Numbers, list[str]]:
    """Loss, and on rank 0 gradients, of one step of the small model; and its operators of attention."""
    config = small()
    pipeline = Pipeline(
        made(config),
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
    """The same from a plain loop on this device."""
    config = small()
    model: Any = made(config)
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
    """The largest relative difference of loss and gradients."""
    most = abs(computed[0] / expected[0] - 1)
    assert expected[1].keys() == computed[1].keys()
    for name, value in computed[1].items():
        most = max(most, float((value - expected[1][name]).norm() / expected[1][name].norm()))
    return most


def host_share(world: World) -> tuple[float, float]:
    """Return the bytes per second that updates of homes in the host's memory bring to a device, and those that the link
    of its host carries in both directions at once, while all ranks do so; of the slowest rank.
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
    for _ in range(3):  # states are made in the first
        world.barrier()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        streaming.update(0, factor, None, 1.0, None, early=False)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return UP_BYTES * numel / max(world.gather_numbers(seconds)), host_link(world).bytes_per_s
