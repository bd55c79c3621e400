"""Memory before the first step: what the run will hold, and a refusal with a way out if that is more than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

import torch

from tawpipe.console import Console, span
from tawpipe.errors import REPORT, UserError, is_out_of_memory
from tawpipe.model.chain import Chain
from tawpipe.options.names import Change
from tawpipe.pipeline.sizes import widths_of
from tawpipe.plan.answer.remedy import WayOut, remedies
from tawpipe.plan.cost.feasible import shortage
from tawpipe.plan.cost.measure import system_of
from tawpipe.plan.cost.predict import Needs, memory_quickly, predict, state_bytes
from tawpipe.plan.cost.updates import states_of
from tawpipe.plan.machine.probe import machine_unprobed, with_files
from tawpipe.runtime.memory import give_back
from tawpipe.runtime.world import World
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.settings import AUTO_RECOMPUTE, ScheduleSettings
from tawpipe.schedule.strategies.table import find
from tawpipe.serving.generate import Wanted, why_by_evaluation
from tawpipe.serving.planner import fullest_bytes
from tawpipe.train.planned import KEEPS, MEMORY, Planning, fits_to_keep, probed
from tawpipe.train.saying.words import gib
from tawpipe.train.settings.decided import BatchShape

if TYPE_CHECKING:
    from tawpipe.plan.answer.would_fit import WouldFit
    from tawpipe.plan.cost.request import PlanRequest
    from tawpipe.plan.machine.machine import Machine

LOGITS = 8
"""Bytes of a logit besides itself, while a token is drawn: in fp32, and its logarithm."""


SAVES_LITTLE = 0.97
"""Share of the memory without a setting from which on that saves little."""


@dataclass(frozen=True)
class MemoryLoad:
    """What a run holds in memory besides a typical step.

    Args:
        saves: a checkpoint is written at some time, for which the state is copied.
        goes_on_saving: steps follow a save, and so run while it is being written.
        soon: lengths of the documents of steps to come, where they are dealt: in pipelines some steps hold much more
            than the typical one.
        copies: of the state that the memory of a node holds besides (checkpoint.memory_every).
        texts: that the model is to write between steps, or after them.
    """

    saves: bool = True
    goes_on_saving: bool = True
    soon: Sequence[tuple[int, ...]] = ()
    copies: int = 0
    texts: Wanted | None = None


def measured_for(planning: Planning, request: PlanRequest | None, console: Console) -> PlanRequest | None:
    """Measure what blocks take; return None, and say why, if that fails. Call on all ranks, before anything large is
    there.

    Args:
        planning: by the schedule that will run.
        request: what was measured for a plan, if anything was, and is returned.
    """
    if request is not None:
        return request
    measured, problem = planning.ask(_machine_of(planning.world, planning.asked.settings), timed=False)
    if measured is None:
        _say(console, f"memory is not checked before the first step: {problem}")
    return measured


def _say(console: Console, line: str) -> None:
    """Print a notice, or a warning if it is a fault to report."""
    (console.warning if REPORT in line else console.notice)(line)


def _machine_of(world: World, schedule: ScheduleSettings, request: PlanRequest | None = None) -> Machine:
    """The machine with the memory that it has, and the files that a schedule needs as a plan has measured them."""
    machine = machine_unprobed(world)
    if request is not None:
        return replace(machine, files=request.machine.files, files_bytes=request.machine.files_bytes)
    return with_files(machine, world, schedule.offload_dir) if schedule.offload_dir else machine


def settled_recompute(world: World, schedule: ScheduleSettings, request: PlanRequest | None, earlier: str = "") -> str:
    """Return ``none`` if the largest step fits into ``KEEPS`` of the free memory on every rank, else ``full``; or what
    ``schedule`` says, if it is not open. Call on all ranks.

    Args:
        request: what was measured; without it everything is computed again.
        earlier: value in the run that is resumed, which stays if it fits; ``""`` for a new run.
    """
    if schedule.recompute != AUTO_RECOMPUTE:
        return schedule.recompute
    fits = request is not None and earlier != "full"
    if request is not None and fits:
        whole = _all_of(machine_unprobed(world), request)
        fits = fits_to_keep(whole, replace(schedule, recompute="none"), 1.0 if earlier else KEEPS)
    return "none" if min(world.gather_numbers(float(fits))) > 0 else "full"


def check_memory(
    planning: Planning,
    batch: BatchShape,
    measured: PlanRequest,
    load: MemoryLoad,
    others: Callable[[PlanRequest], WouldFit],
    console: Console,
) -> tuple[Needs | None, PlanRequest]:
    """Predict what a process and a node's host will hold, with the request that says so; None if that fails. Call
    on all ranks, before anything large is there.

    Args:
        planning: by the schedule that will run.
        measured: what ``measured_for`` gave.
        others: finds what would fit in place of a request that does not.

    Raises:
        UserError: it is more than there is; on all ranks. It says what would fit.
    """
    world, schedule = planning.world, planning.asked.settings
    machine = _machine_of(world, schedule, measured)
    try:
        needs = _largest_step(machine, measured, schedule, load.soon)
    except UserError:  # it comes again, when the pipeline is made
        return None, measured
    if load.copies:
        machine = _beside(machine, measured, schedule, load.copies)
    given_back = needs.parts["activations"] + needs.parts["working"]  # between steps
    if not measured.has_host:  # no two processes have loaded and read as much
        give_back(world.device)
        loaded, _ = system_of(machine, world.device)  # a plan may have loaded the solver's libraries, 90 MiB
        system = int(max(world.gather_numbers(float(max(loaded, measured.system_bytes)))))
        measured = replace(measured, system_bytes=system)
        saving = needs.parts["saving"] if load.saves else 0
        if load.saves and not load.goes_on_saving:  # the last copy takes the place of what computing has given back
            saving, given_back = max(0, saving - given_back), max(0, given_back - saving)
        needs = replace(needs, parts=dict(needs.parts) | {"system": system, "saving": saving})
    console.notice(chunk_words(schedule, _all_of(machine, measured), needs))
    if _lacks(world, machine, measured, needs):
        if not measured.profile.update_s:  # for memory alone
            with_times, problem = planning.ask(probed(world))
            if problem:
                _say(console, f"settings that fit are listed without measured times: {problem}")
            measured = with_times or measured
        world.text_of_rank_0(lambda: _refuse(schedule, batch, machine, measured, others))
    if load.texts is not None:
        besides = texts_bytes(planning.chain, load.texts, measured, schedule, world.size) - given_back
        needs = replace(needs, parts={**needs.parts, "texts": max(0, besides)})
        if _lacks(world, machine, measured, needs):
            expected = f"0, or fewer prompts: texts take {gib(besides)} more than a step, which is not available"
            raise UserError("--sample.tokens", load.texts.tokens, expected)
    return needs, measured


def _largest_step(
    machine: Machine, request: PlanRequest, schedule: ScheduleSettings, soon: Sequence[tuple[int, ...]]
) -> Needs:
    """Needs of the typical step, or of the step of ``soon`` that holds more."""
    others = soon if find(schedule.strategy).cuts_documents else ()
    steps = [request, *(replace(request, dealt=dealt) for dealt in others)]
    each = (memory_quickly(_all_of(machine, step), step.step(schedule)) for step in steps)
    return max(each, key=lambda needs: needs.device)


def chunk_words(schedule: ScheduleSettings, request: PlanRequest, needs: Needs) -> str:
    """Line about rows in chunks that need as much memory as whole ones, else ``""``."""
    if not schedule.sequence_chunk:
        return ""
    with suppress(UserError):
        whole = memory_quickly(request, request.step(replace(schedule, **request.in_chunks(0))))
        ours, theirs = (each.device - each.parts["system"] for each in (needs, whole))
        if ours < SAVES_LITTLE * theirs:
            return ""
        lines = request.profile.memory.working.get("head", {}).values()
        head = max((fixed + per_token * request.size.tokens for fixed, per_token in lines), default=0)
        decides = 2 * head > ours
        words = (
            f"--schedule.sequence-chunk {schedule.sequence_chunk} saves little: a step needs {gib(ours)} with it and "
        )
        return (
            words
            + f"{gib(theirs)} without"
            + "; the logits of the head take most (--schedule.loss-chunk-tokens)" * decides
        )
    return ""


@contextmanager
def naming_recompute(schedule: ScheduleSettings) -> Iterator[None]:
    """Within it, an error for lack of memory says which setting needs less, if something is kept."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and schedule.recompute != "full":
            error.add_note("tawpipe: out of memory; --schedule.recompute full keeps less for backward passes")
        raise


def too_large(planning: Planning) -> str:
    """A line for a run that nothing can save, as its state alone is more than all devices and hosts together have: what
    would fit is found by measuring, which takes minutes where blocks are large. Empty if it is not. Call on all ranks.
    """
    world, chain, asked = planning.world, planning.chain, planning.asked
    machine, trainable = machine_unprobed(world), [unit for unit in chain.units if unit.trainable]
    widths = widths_of(chain, asked.dtype, asked.settings, states_of(asked.optimizer, chain.units))
    state = sum(unit.numel * (widths.state(unit.index) - widths.master) for unit in trainable)
    devices = machine.device_of or (machine.device,) * world.size
    there = sum(device.memory_bytes for device in devices) + machine.host_bytes * len(machine.nodes)
    if not there or state <= there:
        return ""
    millions = sum(unit.numel for unit in trainable) / 1e6
    return (
        f"this does not fit: weights and optimizer state of {millions:,.1f} M parameters take {gib(state)}, "
        f"all devices and hosts together have {gib(there)}; searching for settings that fit, which takes a "
        "while"
    )


def texts_bytes(chain: Chain, texts: Wanted, request: PlanRequest, schedule: ScheduleSettings, ranks: int) -> int:
    """What the process which has most of it takes for texts (``pipeline.generate``): weights of its stage, where its
    home is not what computes; keys and values; a pass. Where every token takes an evaluation, nothing: a step has it.
    """
    if not texts.prompts or not texts.tokens or why_by_evaluation(chain, ranks):
        return 0
    room, memory, width = texts.room(ranks), request.profile.memory, request.widths.weight
    staying = ranks > 1 or request.step(schedule).copies_in_host
    units, config = request.model.units, chain.config.get_text_config()
    widths = [width * unit.parameters / unit.numel if staying or unit.packed else 0.0 for unit in units]
    cache = room.groups * room.slots * room.context * memory.keys
    held = fullest_bytes(request.model, Layout.even(len(chain.blocks), ranks), widths, cache)
    tokens = room.slots + room.chunk
    fixed, per_token = memory.working.get("layer", {}).get("forward full", (0, 0.0))
    logits = (room.slots + 1) * config.vocab_size * (width + LOGITS)
    return ceil(held + 2 * tokens * memory.boundary + max(fixed + per_token * tokens, logits))


def _lacks(world: World, machine: Machine, request: PlanRequest, needs: Needs) -> bool:
    """True if some rank has not so much memory; on all ranks."""
    return any(world.gather_numbers(float(bool(shortage(_all_of(machine, request), needs)))))


def said_bytes(needs: Needs | None, device: torch.device) -> int:
    """What was said of the memory that ``peak_memory_bytes`` measures in steps: on a GPU tensors alone; 0 if nothing
    was, or only a limit.
    """
    if needs is None or "kept" in needs.parts:
        return 0
    beside = ("texts", *(("system", "apart", "saving", "host") if device.type == "cuda" else ()))
    return needs.device - sum(needs.parts.get(name, 0) for name in beside)


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
        f"{gib(wanted)} left for the step, not {gib(left)}: NCCL_RUNTIME_CONNECT=1, a strategy with fewer groups "
        "(flat, hsdp), or shorter rows need less"
    )
    world.require(wanted <= left, "memory", words, expected)


def room_to_keep(world: World, settings: ScheduleSettings, needs: Needs) -> int:
    """MiB for ``keep_mib`` with documents of uneven lengths, where it was left open: what memory has left, on all
    ranks; 0 for none. Steps differ, so that settings which fit every step leave much of it unused in most.
    """
    lasting = settings.recompute == "full" and not settings.sequence_chunk
    if settings.keep_mib is not None or not lasting or "keep_mib" in find(settings.strategy).refusals:
        return 0
    machine = machine_unprobed(world)
    device = machine.device_of[world.rank] if machine.device_of else machine.device
    limit = device.memory_bytes * MEMORY[world.device.type]
    left = min(world.gather_numbers(float(limit - needs.device)))
    return max(0, int(left / 2**20))


def _beside(machine: Machine, request: PlanRequest, schedule: ScheduleSettings, copies: int) -> Machine:
    """The machine without the memory that copies of the state take."""
    each = copies * state_bytes(request, request.step(schedule))
    if request.has_host:
        left = machine.host_bytes - each * max(machine.nodes)
        return replace(machine, host_bytes=max(1, left) if machine.host_bytes else 0)
    less = lambda device: replace(device, memory_bytes=max(1, device.memory_bytes - each))  # noqa: E731
    return replace(machine, device=less(machine.device), device_of=tuple(map(less, machine.device_of)))


def _all_of(machine: Machine, request: PlanRequest) -> PlanRequest:
    """The same request with all the memory that is there: a run that just fits is not refused."""
    there = replace(request.machine, host_bytes=machine.host_bytes, files_bytes=machine.files_bytes)
    return replace(request, memory_bytes=machine.most_memory, machine=replace(there, device_of=machine.device_of))


def _for_bins(way: WayOut, batch: BatchShape) -> WayOut:
    """Rows are bins under ``balanced``: shorter ones, of all processes that compute one, hold the longest document;
    fewer ones are fewer tokens.
    """
    changes: list[Change] = []
    for change in way.changes:
        match change:
            case Change("sequence_length", int(tokens)) if batch.dealt:
                changes.append(Change("bin_tokens", tokens // batch.ranks))
                if tokens < batch.document_tokens:
                    changes.append(Change("max_document", tokens))
            case Change("global_batch", int(rows)) if batch.dealt:
                changes.append(Change("tokens_per_step", batch.step_tokens * rows // batch.rows))
            case _:
                changes.append(change)
    return replace(way, changes=tuple(changes))


def _refuse(
    schedule: ScheduleSettings,
    batch: BatchShape,
    machine: Machine,
    request: PlanRequest,
    others: Callable[[PlanRequest], WouldFit],
) -> str:
    step, whole = request.step(schedule), _all_of(machine, request)
    lacks = shortage(whole, memory_quickly(whole, step)) or "another process has too little"
    ways = list(remedies(request, step)) or list(others(request).ways())
    seconds = span(predict(request, step).step_seconds)
    fits = "; ".join(dict.fromkeys(str(_for_bins(way, batch)) for way in ways))
    fits = fits or "no setting that was tried fits: more devices, or a smaller model"
    raise UserError(
        "memory", f"a run that needs {lacks}", (f"settings that fit ({seconds} per step without them): {fits}")
    )
