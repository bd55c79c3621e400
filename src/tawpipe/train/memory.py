"""Memory before the first step: what the run will hold, and a refusal with a way out if that is more than there is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tawpipe.errors import UserError
from tawpipe.plan.predict import Needs, memory_quickly, predict
from tawpipe.plan.probe import machine_unprobed, with_files
from tawpipe.plan.remedy import remedies
from tawpipe.plan.search import shortage
from tawpipe.runtime.world import World
from tawpipe.schedule.strategies.table import find
from tawpipe.train.config import TrainConfig
from tawpipe.train.planned import MEMORY, ask, probed
from tawpipe.train.words import gib

if TYPE_CHECKING:
    from tawpipe.plan.machine import Machine
    from tawpipe.plan.request import PlanRequest


def check_memory(
    config: TrainConfig,
    world: World,
    *,
    vocab_size: int,
    dtype: torch.dtype,
    lengths: Sequence[int],
    request: PlanRequest | None = None,
    tell: Callable[[str], None] = lambda _: None,
    measure: Callable[[World], Machine] = probed,
) -> Needs | None:
    """What a process will hold, and a node's host; None where that could not be found out, and ``tell`` is given why.
    Call on all ranks, before anything large is there.

    Args:
        config: with the schedule that will run.
        request: what was measured for a plan, if anything was.
        measure: gives the machine by which seconds are predicted.

    Raises:
        UserError: it is more than there is; on all ranks. It says what would fit.
    """
    asking = {"vocab_size": vocab_size, "dtype": dtype, "lengths": lengths}
    machine = machine_unprobed(world)
    if request is not None:
        machine = replace(machine, files=request.machine.files, files_bytes=request.machine.files_bytes)
    elif config.schedule.offload_dir:
        machine = with_files(machine, world, config.schedule.offload_dir)
    measured = request
    if measured is None:
        measured, problem = ask(config, world, machine, timed=False, **asking)
        if measured is None:
            tell(f"memory is not checked before the first step: {problem}")
            return None
    try:
        needs = memory_quickly(measured, measured.step(config.schedule))
    except UserError:  # it comes again, when the pipeline is made
        return None
    lacking = bool(shortage(_all_of(machine, measured), needs))
    if any(world.gather_numbers(float(lacking))):
        if request is None:
            timed, _ = ask(config, world, measure(world), **asking)
            measured = timed or measured
        world.text_of_rank_0(lambda: _refuse(config, machine, measured))
    return needs


def check_left(world: World, group_bytes: Mapping[Any, int], needs: Needs | None) -> None:
    """Refuse a run before its first step if what NCCL has taken leaves less of a GPU than the step takes. Call on all
    ranks, when the groups and homes are there.

    Args:
        group_bytes: of every group, as measured when it was made.
        needs: as predicted.

    Raises:
        UserError: it does; on all ranks.
    """
    if needs is None or world.device.type != "cuda":
        return
    free, _ = torch.cuda.mem_get_info(world.device)
    allocated = torch.cuda.memory_allocated(world.device)
    left = free + torch.cuda.memory_reserved(world.device) - allocated
    wanted = needs.device - needs.parts["system"] - allocated
    words = f"{gib(sum(group_bytes.values()))} for {len(group_bytes)} groups of NCCL"
    expected = (
        f"{gib(wanted)} left for the step, where {gib(left)} are: NCCL_RUNTIME_CONNECT=1, a strategy with fewer groups "
        "(flat, hsdp), or shorter rows"
    )
    world.require(wanted <= left, "memory", words, expected)


def with_room_to_keep(config: TrainConfig, world: World, needs: Needs | None) -> tuple[TrainConfig, Needs | None]:
    """For documents of uneven lengths, ``keep_mib`` where it was left open: what memory has left, on all ranks. Steps
    differ, so that settings which fit every step leave much of it unused in most.
    """
    settings = config.schedule
    open_ = settings.keep_mib is None and config.packing == "balanced" and config.plan != "none"
    lasting = settings.recompute == "full" and not settings.sequence_chunk
    if needs is None or not open_ or not lasting or "keep_mib" in find(settings.strategy).refusals:
        return config, needs
    limit = machine_unprobed(world).device.memory_bytes * MEMORY[world.device.type]
    left = min(world.gather_numbers(float(limit - needs.device)))
    if left < 2**20:
        return config, needs
    mib = int(left / 2**20)
    config = replace(config, schedule=replace(settings, keep_mib=mib))
    return config, replace(needs, parts={**needs.parts, "kept": mib * 2**20})


def _all_of(machine: Machine, request: PlanRequest) -> PlanRequest:
    """The same request with all the memory that is there: a run that just fits is not refused."""
    there = replace(request.machine, host_bytes=machine.host_bytes, files_bytes=machine.files_bytes)
    return replace(request, memory_bytes=machine.device.memory_bytes, machine=there)


def _for_bins(way: str, config: TrainConfig) -> str:
    """Shorter rows are smaller bins under ``balanced``, which hold the longest document."""
    if config.packing != "balanced":
        return way
    longest = config.document_tokens // (config.schedule.sequence_ranks or 1)
    return re.sub(
        r"--sequence-length (\d+)",
        lambda one: f"--bin-tokens {one[1]}" + f" --max-document {one[1]}" * (int(one[1]) < longest),
        way,
    )


def _refuse(config: TrainConfig, machine: Machine, request: PlanRequest) -> str:
    step, whole = request.step(config.schedule), _all_of(machine, request)
    lacks = shortage(whole, memory_quickly(whole, step)) or "another process lacks some"
    ways = list(dict.fromkeys(_for_bins(way, config) for way in remedies(request, step)))
    seconds = predict(request, step).step_seconds
    found = "; ".join(ways) or "no setting that was tried does: more devices, or a smaller model"
    raise UserError(
        "memory", f"a run that needs {lacks}", f"what fits (this would take {seconds:.4g} s a step): {found}"
    )
