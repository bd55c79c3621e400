"""Checks of memory: a step's measured against its predicted memory, and the longest row that should fit."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig

from tawpipe.model.chain import Chain
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings
from tawpipe.plan.answer.longest import longest_that
from tawpipe.plan.cost.measure import Asked, device_name, request_of
from tawpipe.plan.cost.predict import Needs, memory_of, predict
from tawpipe.plan.cost.request import MOST_TOKENS, PlanRequest
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import uniform
from tawpipe.plan.machine.probe import resident_memory
from tawpipe.prove.models import alone, dtype_here, on_meta, packed, sized
from tawpipe.prove.outcome import Outcome
from tawpipe.prove.speed import TOKENS
from tawpipe.runtime.homes.optimizer import adamw
from tawpipe.runtime.memory import Taken
from tawpipe.runtime.peak import peak_of_step
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import LinkModel

RECOMPUTE = ("full", "selective", "none", "none:1,selective:1,full")
LIMIT = 0.05
SHORT = 64
"""Tokens of the row in the warm-up step before the measured one."""
MEMORY_BYTES = {"cpu": 2**28, "cuda": 2**36}
"""Bytes of tensors that the longest row may need, by type of device; small enough that a step takes about a minute."""
MOST_SECONDS = 90.0
BESIDES = ("system", "apart", "saving")
"""Parts of a prediction that are not tensors of a step: driver memory, fragmentation of allocators, saved copies."""


def predicted(world: World) -> Outcome:
    """Check that a step on one row takes the predicted memory, with a relative error below ``LIMIT``.

    Several values of the setting ``recompute`` are tried, on a CPU fewer of them."""
    config, dtype, tokens = sized(world.device), dtype_here(world), 4 * TOKENS[world.device.type]
    settings = RECOMPUTE if world.device.type == "cuda" else RECOMPUTE[::3]  # the tests check all settings
    rows = [by_itself(config, [tokens], recompute, dtype, world.device) for recompute in settings]
    worst = max((row["error"] for row in rows), key=abs)
    note = f"largest error {worst:+.1%} in {len(rows)} settings"
    if taken := next((row["taken"] for row in rows if row["taken"]), ""):
        note += f"; {settings[0]}: {taken}"
    return Outcome(abs(worst) < LIMIT, note, {"rows": rows})


def longest(world: World) -> Outcome:
    """Train one step on the longest row whose predicted tensors fit in a fixed memory, and check that they do.

    The memory is ``MEMORY_BYTES`` for the type of device, on a GPU at most 90 % of what is free. The check holds if the
    measured bytes exceed it by at most ``LIMIT``. Recomputation has its default, so that all layers keep their inputs.
    If the predicted time of the step exceeds ``MOST_SECONDS``, the step is not run and the check is not decided."""
    config, dtype = sized(world.device), dtype_here(world)
    memory_bytes, settings = MEMORY_BYTES[world.device.type], ScheduleSettings()
    if world.device.type == "cuda":
        memory_bytes = min(memory_bytes, int(torch.cuda.mem_get_info(world.device)[0] * 0.9))

    plan = ask(alone(world.device), on_meta(config), [2 * TOKENS[world.device.type]], settings, dtype, timed=True)

    schedule = build(plan.step(settings))

    def fits(tokens: int) -> bool:
        return _tensors(memory_of(plan.with_length(tokens), schedule)) <= memory_bytes

    least = longest_that(fits, SHORT, MOST_TOKENS)
    seconds = predict(plan.with_length(least), schedule.step).step_seconds
    numbers: dict[str, Any] = {"tokens": least, "room_bytes": memory_bytes, "predicted_seconds": seconds}
    if seconds > MOST_SECONDS:
        return Outcome(
            None, f"{least:,} tokens in {memory_bytes / 2**30:.1f} GiB would take {seconds:.0f} s a step", numbers
        )
    row = by_itself(config, [least], settings.recompute, dtype, world.device)
    numbers |= {name: row[name] for name in ("predicted_bytes", "measured_bytes", "seconds")}
    taken, seconds = row["measured_bytes"] / 2**30, row["seconds"]
    note = f"{least:,} tokens in {taken:.2f} of {memory_bytes / 2**30:.2f} GiB, {seconds:.1f} s"
    return Outcome(row["measured_bytes"] <= memory_bytes * (1 + LIMIT), note, numbers)


def by_itself(*arguments: Any) -> dict[str, Any]:
    """Run ``compare`` with these arguments in a new process, and return its result.

    Memory left by other pipelines in this process would count."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(compare, arguments)


def compare(
    config: LlamaConfig, documents: Sequence[int], recompute: str, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Train two steps on a row of packed documents; return predicted and measured bytes, errors, and seconds.

    The second step is measured. Call in an otherwise idle process.

    Args:
        config: configuration of the model.
        documents: tokens of each document.
        recompute: value of the setting ``recompute``.
        dtype: number type to compute in.
        device: device to compute on.

    Returns:
        A dict of plain values: sizes in bytes (``*_bytes``), relative errors of the prediction, and ``seconds``.
    """
    settings = ScheduleSettings(recompute=recompute, micro_batches_per_visit=1)
    chain = on_meta(config)
    asked = ask(alone(device), chain, documents, settings, dtype)
    needs = memory_of(asked, build(asked.step(settings)))
    pipeline = Pipeline(
        chain,
        optimizer=adamw(),
        schedule=settings,
        dtype=dtype,
        checks=CheckSettings(check="never"),
        world=alone(device),
    )
    pipeline.step(packed(config, [SHORT]))
    pipeline.drain()
    batch, began = packed(config, documents), time.perf_counter()
    before = live_bytes(device)
    passing = peak_of_step(pipeline.executor, lambda: pipeline.step(batch))
    seconds = time.perf_counter() - began
    taken = Taken.of(device) if device.type == "cuda" else None
    pipeline.close()
    parts = {name: size for name, size in needs.parts.items() if name not in BESIDES}
    return {
        "tokens": sum(documents),
        "document": documents[0],
        "recompute": recompute,
        "dtype": str(dtype).removeprefix("torch."),
        "predicted": parts,
        "predicted_bytes": sum(parts.values()),
        "before_bytes": before,
        "passing_bytes": passing,
        "measured_bytes": before + passing,
        "taken": str(taken or ""),
        "taken_bytes": vars(taken) if taken else {},
        "error": sum(parts.values()) / (before + passing) - 1,
        "passing_error": (parts["activations"] + parts["working"]) / passing - 1,
        "system_bytes": needs.parts["system"],
        "process_bytes_after": resident_memory(),
        "seconds": seconds,
    }


def live_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on devices of this type. Memory that tensors share counts once."""
    storages: dict[int, int] = {}
    for candidate in gc.get_objects():
        real = issubclass(type(candidate), Tensor) and not issubclass(type(candidate), FakeTensor)
        if real and candidate.device.type == device.type:
            storages[candidate.untyped_storage().data_ptr()] = candidate.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(needs: Needs) -> int:
    """Return the predicted bytes of tensors alone."""
    return sum(size for name, size in needs.parts.items() if name not in BESIDES)


def ask(
    world: World,
    chain: Chain,
    documents: Sequence[int],
    settings: ScheduleSettings,
    dtype: torch.dtype,
    *,
    rows: int = 1,
    timed: bool = False,
) -> PlanRequest:
    """Build the plan request that predicts a step of these processes on rows of the given documents.

    Profiles are measured on this device.

    Args:
        world: the processes.
        chain: model on the meta device.
        documents: tokens of each document of a row.
        settings: schedule settings.
        dtype: number type to compute in.
        rows: number of rows in a step.
        timed: also measure times.
    """
    device, size, link = world.device, (world.topology.num_nodes, world.topology.local_size), LinkModel(1e9)
    machine = uniform(*size, between=link, inside=link, device=Device(device_name(device)))
    asked = Asked(
        sum(documents), rows, dtype=dtype, lengths=documents, settings=settings, timed=timed, profile="measure"
    )
    return request_of(chain, machine, asked, here=device)
