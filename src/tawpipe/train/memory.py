"""Memory check before the first step: predict what the run will hold, and refuse the run if that is too much.

A refusal names settings that would fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
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
from tawpipe.runtime.transport.transport import needed_groups
from tawpipe.runtime.world import World
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.settings import AUTO_RECOMPUTE, ScheduleSettings
from tawpipe.schedule.strategies.table import find
from tawpipe.serving.generate import Wanted, why_by_evaluation
from tawpipe.serving.planner import fullest_bytes
from tawpipe.topology import Topology
from tawpipe.train.planned import KEEPS, MEMORY, Planning, fits_to_keep, probed
from tawpipe.train.saying.words import gib
from tawpipe.train.settings.decided import BatchShape

if TYPE_CHECKING:
    from tawpipe.plan.answer.would_fit import WouldFit
    from tawpipe.plan.cost.request import PlanRequest
    from tawpipe.plan.machine.machine import Machine

LOGITS = 8
"""Bytes of further copies of a logit while a token is drawn: as fp32, and its logarithm."""


SAVES_LITTLE = 0.97
"""Share of the memory without a setting above which the setting is said to save little."""


@dataclass(frozen=True)
class MemoryLoad:
    """Uses of memory in a run besides a typical step.

    Args:
        saves: True if a checkpoint is written at some time, for which the state is copied.
        goes_on_saving: True if training steps run while a checkpoint is being written.
        soon: document lengths of the next steps under ``balanced``. In pipelines, some steps hold much more than the
            typical step.
        copies: further copies of the state of each process in the memory of a node (``checkpoint.memory_every``).
        texts: sample texts that the model will write between or after steps; None for none.
    """

    saves: bool = True
    goes_on_saving: bool = True
    soon: Sequence[tuple[int, ...]] = ()
    copies: int = 0
    texts: Wanted | None = None


def measured_for(planning: Planning, request: PlanRequest | None, console: Console) -> PlanRequest | None:
    """Return the measured sizes of blocks for the schedule that will run; None, with a notice, if measuring fails.

    Call on all ranks, before large tensors are made.

    Args:
        planning: inputs of a plan, with the schedule that will run.
        request: measurements that were made for a plan, which are returned; None to measure now.
    """
    if request is not None:
        return request
    measured, problem = planning.ask(_machine_of(planning.world, planning.asked.settings), timed=False)
    if measured is None:
        _say(console, f"memory is not checked before the first step: {problem}")
    return measured


def _say(console: Console, line: str) -> None:
    """Print a notice, or a warning if ``line`` asks the user to report a fault."""
    (console.warning if REPORT in line else console.notice)(line)


def _machine_of(world: World, schedule: ScheduleSettings, request: PlanRequest | None = None) -> Machine:
    """Return the machine with the memory that is available now; call on all ranks.

    Args:
        world: all processes.
        schedule: settings of the schedule; with ``offload_dir``, disk space and speed are part of the result.
        request: measurements of a plan, whose values for the disk are used; None to measure the disk.
    """
    machine = machine_unprobed(world)
    if request is not None:
        return replace(machine, files=request.machine.files, files_bytes=request.machine.files_bytes)
    return with_files(machine, world, schedule.offload_dir) if schedule.offload_dir else machine


def settled_recompute(world: World, schedule: ScheduleSettings, request: PlanRequest | None, earlier: str = "") -> str:
    """Return the value of ``schedule.recompute``; if it is ``auto``, choose ``none`` or ``full``. Call on all ranks.

    ``auto`` becomes ``none`` if the largest step fits into ``KEEPS`` of the free memory on every rank, else ``full``.

    Args:
        request: measured sizes of blocks; None gives ``full``.
        earlier: value in the resumed run. ``none`` stays if the step fits into all of the free memory, and ``full``
            stays always. ``""`` for a new run.
    """
    if schedule.recompute != AUTO_RECOMPUTE:
        return schedule.recompute
    fits = request is not None and earlier != "full"
    if request is not None and fits:
        whole = _all_of(machine_unprobed(world), request)
        fits = fits_to_keep(whole, replace(schedule, recompute="none"), 1.0 if earlier else KEEPS)
    return "none" if min(world.gather_numbers(float(fits))) > 0 else "full"


def settled_micro_batch(
    world: World, schedule: ScheduleSettings, request: PlanRequest | None, sizes: Sequence[int], recompute: str = ""
) -> int:
    """Return the largest of ``sizes`` with which a step fits into ``KEEPS`` of the free memory; call on all ranks.

    A size with which nothing is recomputed comes before a larger one, as recomputing takes longer than small
    micro-batches do. The result is the least size if none fits.

    Args:
        request: measured sizes of blocks; None gives the least size.
        sizes: rows of a micro-batch, ascending.
        recompute: value of ``recompute`` in the resumed run; ``""`` for a new run.
    """
    if len(sizes) == 1 or request is None:
        return sizes[0]
    ways = ["none", "full"] if schedule.recompute == AUTO_RECOMPUTE else [schedule.recompute]
    whole, share = _all_of(machine_unprobed(world), request), 1.0 if recompute else KEEPS
    for way, size in product(ways[recompute == "full" :], sizes[::-1]):
        fits = fits_to_keep(whole.with_micro_batch(size), replace(schedule, recompute=way), share)
        if min(world.gather_numbers(float(fits))) > 0:
            return size
    return sizes[0]


def check_memory(
    planning: Planning,
    batch: BatchShape,
    measured: PlanRequest,
    load: MemoryLoad,
    others: Callable[[PlanRequest], WouldFit],
    console: Console,
) -> tuple[Needs | None, PlanRequest]:
    """Predict the memory of a process and of a node, and refuse the run if there is not enough.

    Call on all ranks, before large tensors are made.

    Args:
        planning: inputs of a plan, with the schedule that will run.
        batch: sizes of the batches.
        measured: result of ``measured_for``.
        load: uses of memory besides a typical step.
        others: finds settings that would fit in place of a request that does not.

    Returns:
        the predicted memory, and ``measured`` with the memory of libraries updated. The prediction is None if the
        schedule cannot be made; the pipeline then raises the error.

    Raises:
        UserError: the run needs more memory than there is; on all ranks. The message says what would fit.
    """
    world, schedule = planning.world, planning.asked.settings
    machine = _machine_of(world, schedule, measured)
    try:
        needs = _largest_step(machine, measured, schedule, load.soon)
    except UserError:  # this error is raised again when the pipeline is made
        return None, measured
    if load.copies:
        machine = _beside(machine, measured, schedule, load.copies)
    idle_bytes = needs.parts["activations"] + needs.parts["working"]  # free again between steps
    if not measured.has_host:  # use the largest value of all processes: each has loaded other libraries and data
        give_back(world.device)
        loaded, _ = system_of(machine, world.device)  # with the solver's libraries (90 MiB) if a plan has loaded them
        system = int(max(world.gather_numbers(float(max(loaded, measured.system_bytes)))))
        measured = replace(measured, system_bytes=system)
        saving = needs.parts["saving"] if load.saves else 0
        if load.saves and not load.goes_on_saving:  # the last copy uses memory that computing no longer needs
            saving, idle_bytes = max(0, saving - idle_bytes), max(0, idle_bytes - saving)
        needs = replace(needs, parts=dict(needs.parts) | {"system": system, "saving": saving})
    console.notice(chunk_words(schedule, _all_of(machine, measured), needs))
    if _lacks(world, machine, measured, needs):
        if not measured.profile.update_s:  # only memory was measured so far
            with_times, problem = planning.ask(probed(world))
            if problem:
                _say(console, f"settings that fit are listed without measured times: {problem}")
            measured = with_times or measured
        world.text_of_rank_0(lambda: _refuse(schedule, batch, machine, measured, others))
    if load.texts is not None:
        taken = texts_bytes(planning.chain, load.texts, measured, schedule, world.size)
        besides = max(0, taken - idle_bytes) + (texts_groups_bytes(load.texts, measured, world.size) if taken else 0)
        needs = replace(needs, parts={**needs.parts, "texts": besides})
        if _lacks(world, machine, measured, needs):
            expected = f"0, or fewer prompts: texts take {gib(besides)} more than a step, which is not available"
            raise UserError("--sample.tokens", load.texts.tokens, expected)
    return needs, measured


def _largest_step(
    machine: Machine, request: PlanRequest, schedule: ScheduleSettings, soon: Sequence[tuple[int, ...]]
) -> Needs:
    """Return the memory of the step that holds the most: the typical step, or one of ``soon`` in a pipeline."""
    others = soon if find(schedule.strategy).cuts_documents else ()
    steps = [request, *(replace(request, dealt=dealt) for dealt in others)]
    each = (memory_quickly(_all_of(machine, step), step.step(schedule)) for step in steps)
    return max(each, key=lambda needs: needs.device)


def chunk_words(schedule: ScheduleSettings, request: PlanRequest, needs: Needs) -> str:
    """Return a notice if rows in chunks need nearly as much memory as whole rows, else ``""``.

    Args:
        request: measured sizes of blocks.
        needs: predicted memory with chunks.
    """
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
    """Return a context that adds a note to an out-of-memory error: ``recompute full`` needs less memory.

    There is no note if everything is recomputed already.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and schedule.recompute != "full":
            error.add_note("tawpipe: out of memory; --schedule.recompute full keeps less for backward passes")
        raise


def too_large(planning: Planning) -> str:
    """Return a warning if weights and optimizer state exceed the memory of all devices and hosts together, else ``""``.

    Such a run cannot fit. The search for settings that would fit may take minutes, so that the user is warned before.
    Call on all ranks.
    """
    world, chain, asked = planning.world, planning.chain, planning.asked
    machine, trainable = machine_unprobed(world), [unit for unit in chain.units if unit.trainable]
    widths = widths_of(chain, asked.dtype, asked.settings, states_of(asked.optimizer, chain.units))
    state = sum(unit.numel * (widths.state(unit.index) - widths.master) for unit in trainable)
    devices = machine.device_of or (machine.device,) * world.size
    available = sum(device.memory_bytes for device in devices) + machine.host_bytes * len(machine.nodes)
    if not available or state <= available:
        return ""
    millions = sum(unit.numel for unit in trainable) / 1e6
    return (
        f"this does not fit: weights and optimizer state of {millions:,.1f} M parameters take {gib(state)}, "
        f"all devices and hosts together have {gib(available)}; searching for settings that fit, which takes a "
        "while"
    )


def texts_bytes(chain: Chain, texts: Wanted, request: PlanRequest, schedule: ScheduleSettings, ranks: int) -> int:
    """Return the bytes that generating sample texts takes on the process that needs the most.

    The sum has the weights of its pipeline stage, if they are not used in place, keys and values, and one forward pass.
    The result is 0 if there are no texts, or if every token takes one evaluation, whose memory a step has already.

    Args:
        texts: sample texts to write.
        request: measured sizes of blocks.
        ranks: number of processes.
    """
    if not texts.prompts or not texts.tokens or why_by_evaluation(chain, ranks):
        return 0
    slot_layout, memory, width = texts.slot_layout(ranks), request.profile.memory, request.widths.weight
    staying = ranks > 1 or request.step(schedule).copies_in_host
    units, config = request.model.units, chain.config.get_text_config()
    widths = [width * unit.parameters / unit.numel if staying or unit.packed else 0.0 for unit in units]
    cache = slot_layout.groups * slot_layout.slots * slot_layout.context * memory.keys
    held = fullest_bytes(request.model, Layout.even(len(chain.blocks), ranks), widths, cache)
    tokens = slot_layout.slots + slot_layout.chunk
    fixed, per_token = memory.working.get("layer", {}).get("forward full", (0, 0.0))
    logits = (slot_layout.slots + 1) * config.vocab_size * (width + LOGITS)
    return ceil(held + 2 * tokens * memory.boundary + max(fixed + per_token * tokens, logits))


def texts_groups_bytes(texts: Wanted, request: PlanRequest, ranks: int) -> int:
    """Return the GPU bytes of the communicators that the first sample texts make. Later steps have them beside them.

    Weights go to the stages on communicators of the decode steps.

    Args:
        texts: sample texts that ``ranks`` pipeline stages write.
        request: sizes of the model and of a communicator.
    """
    schedule = build_decode_steps(request.model, Topology.grid(ranks, 1), texts.slot_layout(ranks).groups)
    return request.communicator_bytes * len(needed_groups([schedule]))


def _lacks(world: World, machine: Machine, request: PlanRequest, needs: Needs) -> bool:
    """Return True if some rank has too little memory; call on all ranks."""
    return any(world.gather_numbers(float(bool(shortage(_all_of(machine, request), needs)))))


def predicted_bytes(needs: Needs | None, device: torch.device) -> int:
    """Return the predicted bytes to compare with ``peak_memory_bytes``, which on a GPU counts tensors only.

    Returns 0 without a prediction, or if the prediction is only a limit (``keep_mib``).
    """
    if needs is None or "kept" in needs.parts:
        return 0
    beside = ("texts", *(("system", "apart", "saving", "host") if device.type == "cuda" else ()))
    return needs.device - sum(needs.parts.get(name, 0) for name in beside)


def check_left(world: World, group_bytes: Mapping[Any, int], needs: Needs | None) -> None:
    """Refuse a run before its first step if NCCL has left too little memory of a GPU for the step.

    Call on all ranks, after process groups and homes are made.

    Args:
        group_bytes: measured bytes of each process group.
        needs: predicted memory; None to check nothing.

    Raises:
        UserError: there is too little memory; on all ranks.
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


def keepable_mib(world: World, settings: ScheduleSettings, needs: Needs) -> int:
    """Return the MiB of device memory in which layers may keep activations instead of recomputing them.

    This is the default of ``keep_mib`` for documents of uneven lengths: the memory that the largest step leaves free on
    the fullest rank. Most steps are smaller and leave more. Returns 0 if the user has set ``keep_mib``, or if it does
    not work with the other settings. The result is equal on all ranks; call on all of them.

    Args:
        world: all processes.
        settings: settings of the schedule.
        needs: predicted memory of the largest step.
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
    """Return ``machine`` without the memory that ``copies`` copies of each process's state take."""
    each = copies * state_bytes(request, request.step(schedule))
    if request.has_host:
        left = machine.host_bytes - each * max(machine.nodes)
        return replace(machine, host_bytes=max(1, left) if machine.host_bytes else 0)
    less = lambda device: replace(device, memory_bytes=max(1, device.memory_bytes - each))  # noqa: E731
    return replace(machine, device=less(machine.device), device_of=tuple(map(less, machine.device_of)))


def _all_of(machine: Machine, request: PlanRequest) -> PlanRequest:
    """Return ``request`` with all memory of ``machine``, not a share of it: a run that just fits is accepted."""
    full_machine = replace(request.machine, host_bytes=machine.host_bytes, files_bytes=machine.files_bytes)
    return replace(
        request, memory_bytes=machine.most_memory, machine=replace(full_machine, device_of=machine.device_of)
    )


def _for_packs(way: WayOut, batch: BatchShape) -> WayOut:
    """Return ``way`` with changes of row settings replaced by changes of the settings that ``balanced`` uses.

    Shorter rows become smaller packed micro-batches, and shorter documents if necessary. Fewer rows become fewer tokens
    in a step.
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
    """Always raise UserError: the message has the memory that is lacking and settings that would fit.

    Args:
        schedule: settings of the schedule that does not fit.
        batch: sizes of the batches.
        machine: machine with its memory now.
        request: measured sizes and times of blocks.
        others: finds settings that would fit if neither changed settings nor a new plan for ``request`` do.
    """
    step, whole = request.step(schedule), _all_of(machine, request)
    lacks = shortage(whole, memory_quickly(whole, step)) or "another process has too little"
    ways = list(remedies(request, step)) or list(others(request).ways())
    seconds = span(predict(request, step).step_seconds)
    fits = "; ".join(dict.fromkeys(str(_for_packs(way, batch)) for way in ways))
    fits = fits or "no setting that was tried fits: more devices, or a smaller model"
    raise UserError(
        "memory", f"a run that needs {lacks}", f"settings that fit (without them a step would take {seconds}): {fits}"
    )
