"""A run before its first step: settings, documents, model, plan and memory, checked and decided in one order.

The run, and a dry run of it, prepare alike; they differ in how documents are read, in what is found of a checkpoint and
in who measures links. Nothing large is there yet: the model is on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tawpipe.checkpoint.resume import ResumePoint, RunState
from tawpipe.checkpoint.store import memory_root
from tawpipe.console import Console, progress_to
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
from tawpipe.train.memory import check_memory, measured_for, room_to_keep, settled_recompute, too_large
from tawpipe.train.planned import Planning, probed
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
    documents_of,
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
    from tawpipe.plan.search.plan import Plan

SOON = 4
"""Steps whose documents are dealt beforehand, for the memory that they take."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A run that nothing speaks against.

    Args:
        config: what the user has said, with what was left open settled; all that was decided besides stands here.
        start: what the run goes on from.
        built, chain: the model, and the same as blocks.
        optimizer: makes the optimizer of every unit.
        batch: its batches.
        dtype, why_dtype: in which it computes, and why in that.
        schedule: the settings that the schedule is built by, with what a plan decided.
        plan: that is followed; None without one.
        machine: as it was measured for the plan; None without one.
        request: what memory and a plan were asked by; None where blocks could not be measured.
        needs: memory of a step; None where that could not be found out.
        disk: what it will write.
        folder: of the model; None for a preset.
        carried: what the exported model takes over from that folder, on rank 0.
        retrieval: part of every evaluation; None without.
    """

    config: TrainConfig
    data: PreparedData
    start: ResumePoint
    built: BuiltModel
    chain: Chain
    optimizer: OptimizerFactory
    batch: BatchShape
    dtype: torch.dtype
    why_dtype: str
    schedule: ScheduleSettings
    plan: SavedPlan | None
    machine: Machine | None
    request: PlanRequest | None
    needs: Needs | None
    disk: DiskNeeds
    retrieval: RetrievalCheck | None
    folder: Path | None = None
    carried: Carried = NOTHING_CARRIED

    @property
    def state(self) -> RunState | None:
        """What the checkpoint says that the run goes on from; None for a new run."""
        return self.start.state

    @property
    def form(self) -> Form:
        """The form of the exported model."""
        return Form.of(self.config, self.built)

    @property
    def plan_text(self) -> str:
        """The plan for checkpoints and the output folder; empty without one."""
        return self.plan.text if self.plan else ""

    @property
    def decided(self) -> dict[str, object]:
        """What was decided in the place of what the user has said, by the keys of the settings."""
        said = {f"schedule.{name}": value for name, value in vars(self.schedule).items()}
        return {"dtype": str(self.dtype).removeprefix("torch."), "packing": self.batch.packing, **said}

    def kernel(self, device: torch.device) -> str:
        """What computes attention, in words."""
        text, names = self.chain.config.get_text_config(), [s.name for unit in self.chain.units for s in unit.slots]
        if self.chain.own_code:
            scores = "which may hold scores of a row's tokens times its tokens"
            return f"the model's own ({text._attn_implementation}), {scores}"
        return kernel_of_model(text, names, device, self.dtype)


def prepare(
    config: TrainConfig,
    world: World,
    console: Console,
    *,
    start: Callable[[], ResumePoint],
    documents: Callable[[TrainConfig, RunModel, World, Console, RunState | None], Documents] = documents_of,
    measure: Callable[[World], Machine] = probed,
    show: Callable[[Plan], None] = lambda _: None,
) -> Prepared:
    """Prepare a run; call on all ranks.

    Args:
        start: finds what the run goes on from, before its documents are read: their lengths may be in its state.
        documents: reads them, and settles the lengths of rows and steps by them.
        measure: gives the machine that a plan is made for.
        show: is given a plan that is made now, on rank 0.

    Raises:
        UserError: what the run is refused for.
    """
    # Settings, before anything is read.
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

    # From where the run goes on, and documents.
    model = RunModel(config)
    begins = start()
    config, data = documents(config, model, world, console, begins.state)
    batch = BatchShape.of(config, data.report.packing, world.size)
    batch.check_longest(data.longest, data.report.longest[1])
    refuse_other_documents(begins, data, partly=data.report.streamed and not config.streaming)
    console.notice(*begins.notices)
    config = _settled(config, data, batch, begins.state, console)

    # The model, built and followed once.
    vocabulary = vocabulary_size(data.tokenizer)
    with batch.naming_documents():
        model.check(vocabulary, data.longest)
        built, chain = model.followed(vocabulary)
    if begins.state is not None and begins.state.topology != str(world.nodes):
        console.notice(f"processes: {world.nodes} (before: {begins.state.topology}; --nproc, --nodes)")
    console.notice(built.other_base_words, other_commit_words(begins.state, built))
    name, why = chosen_dtype(config.dtype, world, begins.state.dtype if begins.state is not None else "")
    dtype = DTYPES[name]
    console.notice(built.balance_words, built.wide_words(chain, dtype))
    activate_flash(world.device, dtype, lambda: chain.config.get_text_config())

    optimizer, line = resumed_factory(factory_of(config), begins, chain.units)
    console.notice(line)

    # The plan.
    by_row = batch.micro_batch > 1 and bool(config.evaluation.retrieval_lengths)  # answers are told apart by row
    planning = Planning(
        world,
        chain,
        Asked(
            batch.row_tokens,
            batch.rows,
            batch.micro_batch,
            dtype=dtype,
            lengths=typical_lengths(data, batch),
            micro_batches=first_micro_batches(data, batch, world.size),
            profile="measure",
            settings=config.schedule,
            quantize=config.quantize,
            compiled=config.compile,
            dealt=documents_of_a_step(data, batch, chain),
            optimizer=optimizer,
            steps=max(0, int(config.steps) - (begins.state.step if begins.state is not None else 0)),
            learning_rate=float(config.learning_rate),
        ),
        by_one=by_row or batch.dealt,  # bins are of so many ranks
        measure=measure,
        show=show,
    )
    console.notice(too_large(planning))
    with progress_to(console.line):
        followed = planning.follow(config.plan, begins.state)
    if followed.line:
        (console.warning if followed.fault else console.line)(followed.line)
    schedule = followed.schedule
    refuse_cut_rows(chain, schedule)  # a plan from elsewhere may say what the user has not

    # Memory and disk.
    def ask(other: TrainConfig) -> PlanRequest:
        """What memory and a plan are asked by where other settings hold; on this process alone."""
        _, chain = RunModel(other).followed(vocabulary)
        optimizer = with_groups(factory_of(other), rule_of(planning.asked.optimizer))
        asked = replace(planning.asked, quantize=other.quantize, settings=other.schedule, optimizer=optimizer)
        return replace(planning, chain=chain, asked=asked).ask_alone(followed.machine or machine_unprobed(world))

    done, samples = (begins.state.step, begins.state.samples) if begins.state is not None else (0, 0)
    window = min(batch.document_tokens, longest_context(chain))
    disk = disk_needs(config, built, chain, state=state_bytes(config, built, chain, dtype, optimizer), done=done)
    tell = lambda line: (console.warning if REPORT in line else console.notice)(line)  # noqa: E731
    measured = measured_for(planning, schedule, followed.request, tell)
    earlier = begins.state if begins.state is not None and begins.state.topology == str(world.nodes) else None
    before = str(earlier.settled.get("recompute", "full")) if earlier is not None else ""
    schedule = replace(schedule, recompute=settled_recompute(world, schedule, measured, before))
    if before == "none" != schedule.recompute:
        console.notice(f"recompute: {schedule.recompute} (before: none, for which memory is lacking)")
    needs, request = None, measured
    if measured is not None:
        needs, request = check_memory(
            planning,
            schedule,
            batch,
            measured,
            others=lambda short: WouldFit(short, config, ask),
            saves=bool(config.checkpoint.memory_every or disk.states),
            goes_on_saving=_goes_on_saving(config, done),
            soon=documents_of_steps(data, batch, min(SOON, int(config.steps) - done), samples),
            copies=_copies_in_memory(config, world),
            texts=wanted_texts(beginnings(config.sample, data), config.sample.tokens, window),
            tell=tell,
        )
    if needs is not None and batch.dealt and config.plan != "none" and (mib := room_to_keep(world, schedule, needs)):
        schedule = replace(schedule, keep_mib=mib)
        needs = replace(needs, parts={**needs.parts, "kept": mib * 2**20})
    check_disk(config, disk, world)
    retrieval = check_start(config, built, data, ranks=schedule.sequence_ranks or 1)
    prepared = Prepared(
        config=config,
        data=data,
        start=begins,
        built=built,
        chain=chain,
        optimizer=optimizer,
        batch=batch,
        dtype=dtype,
        why_dtype=why,
        schedule=schedule,
        plan=followed.plan,
        machine=followed.machine,
        request=request,
        needs=needs,
        disk=disk,
        retrieval=retrieval,
        folder=model.folder,
    )
    return _with_carried(prepared, world, console) if config.export.enabled and config.steps else prepared


def _with_carried(prepared: Prepared, world: World, console: Console) -> Prepared:
    """The run with what its export takes over from the model's folder, captured on rank 0; call on all ranks."""
    form, chain, data, carried = prepared.form, prepared.chain, prepared.data, NOTHING_CARRIED

    def make() -> str:
        nonlocal carried
        carried = form.carry(chain, prepared.folder, data.tokenizer, data.ends)
        return form.words(chain, prepared.folder, data.ends)

    console.notice(world.text_of_rank_0(make))
    return replace(prepared, carried=carried)


def rows_of_run(prepared: Prepared, said: Costs, bins: Bins | None, world: World) -> list[tuple[str, str]]:
    """Rows that say what is about to happen and what it costs, before the first step.

    Args:
        said: of the next step, by its schedule.
        bins: of the next step, where documents are dealt.
    """
    config = prepared.config
    trained = f", {said.trainable / 1e6:.2f} M of them trained" if said.trainable < said.parameters else ""
    rows = [
        ("model", f"{config.model}: {said.parameters / 1e6:.1f} M parameters{trained}"),
        ("batch", batch_words(prepared.batch, bins, prepared.data.report.balance)),
        ("dtype", f"{str(prepared.dtype).removeprefix('torch.')} ({prepared.why_dtype})"),
        ("attention", prepared.kernel(world.device)),
    ]
    share = prepared.request.profile.mixers if prepared.request else 0.0
    if words := mixer_words(prepared.chain, world.device, share):
        rows.append(("mixers", words))
    if config.rope.changes:
        rows.append(("rotary positions", rope_words(prepared.chain.config.get_text_config())))
    if prepared.schedule.recompute != "full":
        rows.append(("recompute", prepared.schedule.recompute))
    rows += [*step_rows(said, world.nodes), ("disk", str(prepared.disk))]
    if prepared.needs is None:  # why, a notice has said
        return [*rows, ("memory", f"at least, by the schedule, {said.parts()}")]
    return rows + memory_rows(prepared.needs)


def tell_without_effect(settings: ScheduleSettings, world: World, console: Console) -> None:
    """Say which settings under ``schedule`` do nothing here."""
    for name in without_effect(settings, world):
        console.notice(f"--schedule.{name.replace('_', '-')} has no effect on one node: nothing crosses a slow link")


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
        console.line(f"steps: {epochs} epoch{'s' if epochs != 1 else ''}, counted when all documents are there")
    config, chosen = settle(
        config,
        start,
        lambda times: data.steps_in(times, rows=batch.rows, tokens=batch.step_tokens),
        earlier.settled if earlier is not None else None,
    )
    if chosen:
        console.line(chosen)
    if 0 < config.steps <= config.optimizer.warmup_steps:
        words = f"the learning rate rises for {config.optimizer.warmup_steps} steps, and the run has {config.steps}"
        console.notice(f"{words}: it does not reach its highest (--optimizer.warmup-steps)")
    if counted or not epochs:
        check_steps(config)
    return config
