"""The steps of a run before its pipeline: settings, documents, model, plan and memory, each checked and decided.

The run and the dry run take the steps in this order: ``check_settings``, ``settle_data``, ``build``, ``follow_plan``,
``check``. Nothing large is there yet: the model is on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tawpipe.checkpoint.resume import ResumePoint, RunState
from tawpipe.checkpoint.store import memory_root
from tawpipe.console import Console
from tawpipe.data.prepared import PreparedData
from tawpipe.data.tokenizer import vocabulary_size
from tawpipe.dealing.balance import Bins
from tawpipe.errors import REPORT
from tawpipe.model.attention.attention_kernel import activate_flash, kernel_of_model
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import BuiltModel
from tawpipe.model.files.carried import NOTHING_CARRIED, Carried
from tawpipe.model.files.missing import mixer_words
from tawpipe.model.rope import rope_words
from tawpipe.options import Open
from tawpipe.pipeline.setup import refuse_cut_rows, refuse_settings
from tawpipe.plan.answer.would_fit import WouldFit
from tawpipe.plan.cost.measure import Asked
from tawpipe.plan.cost.predict import Needs
from tawpipe.plan.machine.probe import machine_unprobed
from tawpipe.plan.search.plan_file import SavedPlan
from tawpipe.runtime.dtype import DTYPES, chosen_dtype
from tawpipe.runtime.homes.optimizer import OptimizerFactory, rule_of, with_groups
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sharing import share_in_sets
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.serving.held import longest_context
from tawpipe.train.disk import DiskNeeds, check_disk, disk_needs, state_bytes
from tawpipe.train.exporting import Form
from tawpipe.train.judging.retrieval import RetrievalCheck
from tawpipe.train.judging.sample import beginnings, wanted_texts
from tawpipe.train.memory import MemoryLoad, check_memory, measured_for, room_to_keep, settled_recompute, too_large
from tawpipe.train.planned import Followed, Planning
from tawpipe.train.run_model import RunModel
from tawpipe.train.saying.words import batch_words, device_name, memory_rows, step_rows, without_effect
from tawpipe.train.settings.checks import check_steps
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.settings.decided import BatchShape
from tawpipe.train.settings.optimizers import factory_of, resumed_factory
from tawpipe.train.settings.recipe import RECIPES, settle
from tawpipe.train.start import (
    Documents,
    check_start,
    documents_of_a_step,
    documents_of_steps,
    first_micro_batches,
    other_commit_words,
    refuse_other_documents,
    require_alike,
    start_of,
    typical_lengths,
)

if TYPE_CHECKING:
    from tawpipe.plan.cost.request import PlanRequest
    from tawpipe.plan.machine.machine import Machine

SOON = 4
"""Steps whose documents are dealt beforehand, for the memory that they take."""


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """A run whose documents are read.

    Args:
        config: what the user has said, with what was left open settled; all that was decided besides stands here.
        model: the model as the settings ask for it.
        start: what the run goes on from.
        batch: its batches.
    """

    config: TrainConfig
    model: RunModel
    start: ResumePoint
    data: PreparedData
    batch: BatchShape

    @property
    def state(self) -> RunState | None:
        """What the checkpoint says that the run goes on from; None for a new run."""
        return self.start.state

    @property
    def done(self) -> int:
        """Steps that were done before."""
        return self.state.step if self.state is not None else 0

    @property
    def samples(self) -> int:
        """Samples that were consumed before."""
        return self.state.samples if self.state is not None else 0


@dataclass(frozen=True, kw_only=True)
class BuiltRun(ReadRun):
    """A run whose model is built and followed.

    Args:
        built, chain: the model, and the same as blocks.
        optimizer: makes the optimizer of every unit.
        dtype, why_dtype: in which it computes, and why in that.
    """

    built: BuiltModel
    chain: Chain
    optimizer: OptimizerFactory
    dtype: torch.dtype
    why_dtype: str

    @property
    def form(self) -> Form:
        """The form of the exported model."""
        return Form.of(self.config, self.built)

    def kernel(self, device: torch.device) -> str:
        """What computes attention, in words."""
        text, names = self.chain.config.get_text_config(), [s.name for unit in self.chain.units for s in unit.slots]
        if self.chain.own_code:
            scores = "which may hold scores of tokens x tokens per row"
            return f"the model's own ({text._attn_implementation}), {scores}"
        return kernel_of_model(text, names, device, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Prepared(BuiltRun):
    """A run that nothing speaks against.

    Args:
        followed: the decision for a plan, or against one.
        schedule: the settings that the schedule is built by, with what a plan decided.
        request: what memory and a plan were asked by; None where blocks could not be measured.
        needs: memory of a step; None where that could not be found out.
        disk: what it will write.
        retrieval: part of every evaluation; None without.
        carried: what the exported model takes over from the model's folder, on rank 0.
    """

    followed: Followed
    schedule: ScheduleSettings
    request: PlanRequest | None
    needs: Needs | None
    disk: DiskNeeds
    retrieval: RetrievalCheck | None
    carried: Carried

    @property
    def plan(self) -> SavedPlan | None:
        """The plan that is followed; None without one."""
        return self.followed.plan

    @property
    def plan_text(self) -> str:
        """The plan for checkpoints and the output folder; empty without one."""
        return self.plan.text if self.plan else ""

    @property
    def decided(self) -> dict[str, object]:
        """What was decided in the place of what the user has said, by the keys of the settings."""
        said = {f"schedule.{name}": value for name, value in vars(self.schedule).items()}
        return {"dtype": str(self.dtype).removeprefix("torch."), "packing": self.batch.packing, **said}


def check_settings(config: TrainConfig, world: World, console: Console) -> None:
    """Refuse settings that cannot work here, before anything is read; call on all ranks."""
    console.topology(f"{world.nodes} on {device_name(world)}")
    _ = share_in_sets(0, world.topology, config.schedule)
    refuse_settings(
        config.schedule,
        clip_norm=config.optimizer.clip_norm or None,
        compile_layers=config.compile,
        quantize=config.quantize,
        dtype=DTYPES.get(config.dtype),
        on_gpus=world.device.type == "cuda",
    )
    require_alike(config, world)


def settle_data(documents: Documents, model: RunModel, start: ResumePoint, world: World, console: Console) -> ReadRun:
    """Settle batches and steps by the documents that were read.

    Args:
        documents: with the settings whose lengths they have settled.
    """
    config, data = documents
    batch = BatchShape.of(config, data.report.packing, world.size)
    batch.check_longest(data.longest, data.report.longest[1])
    refuse_other_documents(start, data, partly=data.report.streamed and not config.streaming)
    console.notice(*start.notices)
    config = _settled(config, data, batch, start.state, console)
    return ReadRun(config=config, model=model, start=start, data=data, batch=batch)


def build(run: ReadRun, world: World, console: Console) -> BuiltRun:
    """Build the model on the meta device and follow it; call on all ranks."""
    config, state, vocabulary = run.config, run.state, vocabulary_size(run.data.tokenizer)
    with run.batch.naming_documents():
        run.model.check(vocabulary, run.data.longest)
        built, chain = run.model.followed(vocabulary)
    if state is not None and state.topology != str(world.nodes):
        console.notice(f"processes: {world.nodes} (before: {state.topology}; --nproc, --nodes)")
    console.notice(built.other_base_words, other_commit_words(state, built))
    name, why = chosen_dtype(config.dtype, world, state.dtype if state is not None else "")
    dtype = DTYPES[name]
    console.notice(built.balance_words, built.wide_words(chain, dtype))
    activate_flash(world.device, dtype, lambda: chain.config.get_text_config())
    optimizer, line = resumed_factory(factory_of(config), run.start, chain.units)
    console.notice(line)
    return BuiltRun(**vars(run), built=built, chain=chain, optimizer=optimizer, dtype=dtype, why_dtype=why)


def follow_plan(run: BuiltRun, world: World, console: Console) -> tuple[Planning, Followed]:
    """Decide on a plan; return what it is made from, and the decision. Call on all ranks."""
    config, batch, data, chain = run.config, run.batch, run.data, run.chain
    by_row = batch.micro_batch > 1 and bool(config.evaluation.retrieval_lengths)  # answers are told apart by row
    planning = Planning(
        world,
        chain,
        Asked(
            batch.row_tokens,
            batch.rows,
            batch.micro_batch,
            dtype=run.dtype,
            lengths=typical_lengths(data, batch),
            micro_batches=first_micro_batches(data, batch, world.size),
            profile="measure",
            settings=config.schedule,
            quantize=config.quantize,
            compiled=config.compile,
            dealt=documents_of_a_step(data, batch, chain),
            optimizer=run.optimizer,
            steps=max(0, int(config.steps) - run.done),
            learning_rate=float(config.learning_rate),
        ),
        by_one=by_row or batch.dealt,  # bins are of so many ranks
    )
    console.notice(too_large(planning))
    with console.passing():
        followed = planning.follow(config.plan, run.state)
    if followed.table and config.dry_run:
        console.line("\n".join(f"  {line}" for line in (*followed.table, *followed.left_out)))
    if followed.line:
        (console.warning if REPORT in followed.line else console.line)(followed.line)
    refuse_cut_rows(chain, followed.schedule)  # a plan from elsewhere may say what the user has not
    return planning, followed


def check(run: BuiltRun, planning: Planning, followed: Followed, console: Console) -> Prepared:
    """Check memory, disk, and that model and documents suit each other; call on all ranks.

    Args:
        planning, followed: see ``follow_plan``.
    """
    config, batch, world, built, chain = run.config, run.batch, planning.world, run.built, run.chain
    state = state_bytes(config, built, chain, run.dtype, run.optimizer)
    disk = disk_needs(config, built, chain, state=state, done=run.done)

    # What the backward passes compute again: as in the run before, on the same nodes.
    planning = planning.by(followed.schedule)
    request, needs = measured_for(planning, followed.request, console), None
    before = ""
    if run.state is not None and run.state.topology == str(world.nodes):
        before = str(run.state.settled.get("recompute", "full"))
    schedule = replace(followed.schedule, recompute=settled_recompute(world, followed.schedule, request, before))
    if before == "none" != schedule.recompute:
        console.notice(f"recompute: {schedule.recompute} (before: none, which does not fit into memory now)")

    # Memory of the largest step with all that there is besides; what is left keeps more.
    planning = planning.by(schedule)
    if request is not None:
        asks = partial(_request_for, run=run, planning=planning, machine=followed.machine)
        needs, request = check_memory(
            planning, batch, request, _load(run, disk, world), lambda short: WouldFit(short, config, asks), console
        )
    if needs is not None and batch.dealt and config.plan != "none" and (mib := room_to_keep(world, schedule, needs)):
        schedule = replace(schedule, keep_mib=mib)
        needs = replace(needs, parts={**needs.parts, "kept": mib * 2**20})

    check_disk(config, disk, world)
    retrieval = check_start(config, built, run.data, ranks=schedule.sequence_ranks or 1)
    carried, words = NOTHING_CARRIED, ""
    if config.export.enabled and config.steps:
        carried, words = world.of_rank_0(lambda: _carried(run), (NOTHING_CARRIED, ""))
    console.notice(words)
    return Prepared(
        **vars(run),
        followed=followed,
        schedule=schedule,
        request=request,
        needs=needs,
        disk=disk,
        retrieval=retrieval,
        carried=carried,
    )


def _request_for(other: TrainConfig, *, run: BuiltRun, planning: Planning, machine: Machine | None) -> PlanRequest:
    """Ask for memory and a plan with other settings, on this process alone."""
    _, chain = RunModel(other).followed(vocabulary_size(run.data.tokenizer))
    optimizer = with_groups(factory_of(other), rule_of(run.optimizer))
    asked = replace(planning.asked, quantize=other.quantize, settings=other.schedule, optimizer=optimizer)
    return replace(planning, chain=chain, asked=asked).ask_alone(machine or machine_unprobed(planning.world))


def _load(run: BuiltRun, disk: DiskNeeds, world: World) -> MemoryLoad:
    """What memory holds besides a typical step."""
    config, data, batch = run.config, run.data, run.batch
    window = min(batch.document_tokens, longest_context(run.chain))
    return MemoryLoad(
        saves=bool(config.checkpoint.memory_every or disk.states),
        goes_on_saving=_goes_on_saving(config, run.done),
        soon=documents_of_steps(data, batch, min(SOON, int(config.steps) - run.done), run.samples),
        copies=_copies_in_memory(config, world),
        texts=wanted_texts(beginnings(config.sample, data), config.sample.tokens, window),
    )


def _carried(run: BuiltRun) -> tuple[Carried, str]:
    """What the export takes over from the model's folder, and words about it."""
    carried = run.form.carry(run.chain, run.model.folder, run.data.tokenizer, run.data.ends)
    return carried, run.form.words(run.chain, run.model.folder, run.data.ends)


def rows_of_run(prepared: Prepared, said: Costs, bins: Bins | None, world: World) -> list[tuple[str, str]]:
    """Rows that say what is about to happen and what it costs, before the first step.

    Args:
        said: of the next step, by its schedule.
        bins: of the next step, where documents are dealt.
    """
    config = prepared.config
    trained = f", {said.trainable / 1e6:.2f} M of them trained" if said.trainable < said.parameters else ""
    size = f"{said.parameters / 1e6:.1f} M parameters{trained}"
    rows = [
        ("model", f"{config.model}: {size}, {str(prepared.dtype).removeprefix('torch.')} ({prepared.why_dtype})"),
        ("batch", batch_words(prepared.batch, bins, prepared.data.report.balance)),
        ("attention", prepared.kernel(world.device)),
    ]
    share = prepared.request.profile.mixers if prepared.request else 0.0
    if words := mixer_words(prepared.chain, world.device, share):
        rows.append(("mixers", words))
    if config.rope.changes:
        rows.append(("rotary positions", rope_words(prepared.chain.config.get_text_config())))
    rows += [*step_rows(said, world.nodes, prepared.schedule.recompute), ("disk", str(prepared.disk))]
    if prepared.needs is None:  # why, a notice has said
        return [*rows, ("memory", f"at least, by the schedule, {said.parts()}")]
    return rows + memory_rows(prepared.needs)


def tell_without_effect(settings: ScheduleSettings, world: World, console: Console) -> None:
    """Say which settings under ``schedule`` do nothing here."""
    for name in without_effect(settings, world):
        console.notice(f"--schedule.{name.replace('_', '-')} has no effect on one node, which has no slow link")


def _goes_on_saving(config: TrainConfig, first: int) -> bool:
    """True if steps follow a save.

    Args:
        first: the step that the run goes on from.
    """
    settings = config.checkpoint
    often = [every for every in (settings.every, settings.memory_every) if every]
    return settings.best or any((first // every + 1) * every < config.steps for every in often)


def _copies_in_memory(config: TrainConfig, world: World) -> int:
    """Copies of a process's state that its node's memory comes to hold: its own and its neighbour's, and while a new
    one is made the one before; what is there already is no longer free.
    """
    settings = config.checkpoint
    if not settings.memory_every:
        return 0
    root = memory_root(Path(settings.memory_dir), config.output_path)
    return (2 - any(root.glob("node-*/step-*"))) * (2 if world.machines.num_nodes > 1 else 1)


def _settled(
    config: TrainConfig, data: PreparedData, batch: BatchShape, earlier: RunState | None, console: Console
) -> TrainConfig:
    """The settings with nothing left open. Where only some documents were read, steps that are counted in epochs are
    not known, and as many as is usual stand for them.
    """
    start = start_of(config)
    epochs = config.epochs or (RECIPES[start].epochs if isinstance(config.steps, Open) else None)
    counted = None if data.report.streamed and not config.streaming else epochs
    if epochs and not counted and not (earlier is not None and earlier.settled.get("steps")):
        config = replace(config, epochs=None, steps=int(config.steps))
        console.line(f"steps: counted when all documents are read ({epochs} epoch{'s' if epochs != 1 else ''})")
    config, chosen = settle(
        config,
        start,
        lambda times: data.steps_in(times, rows=batch.rows, tokens=batch.step_tokens),
        earlier.settled if earlier is not None else None,
    )
    if chosen:
        console.line(chosen)
    if 0 < config.steps <= config.optimizer.warmup_steps:
        words = f"warm-up: {config.optimizer.warmup_steps} steps, but the run has {config.steps}"
        console.notice(f"{words}, so the learning rate stays below its maximum (--optimizer.warmup-steps)")
    if counted or not epochs:
        check_steps(config)
    return config
