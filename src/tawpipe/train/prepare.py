"""Preparation of a run before its pipeline: settings, documents, model, plan and memory are checked and settled.

The run and the dry run take these steps in this order: ``check_settings``, ``settle_data``, ``build``, ``follow_plan``,
``check``. No large tensors are made: the model is on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tawpipe.checkpoint.resume import ResumePoint, RunState
from tawpipe.checkpoint.store import memory_root
from tawpipe.console import Console
from tawpipe.data.prepared import PreparedData
from tawpipe.data.tokenizer import vocabulary_size
from tawpipe.dealing.balance import Packs
from tawpipe.errors import REPORT
from tawpipe.model.attention.attention_kernel import activate_flash, kernel_of_model
from tawpipe.model.bits.quantized import AUTO, NONE
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import BuiltModel
from tawpipe.model.files.carried import NOTHING_CARRIED, Carried
from tawpipe.model.files.missing import mixer_words
from tawpipe.model.rope import rope_words
from tawpipe.options import Open
from tawpipe.pipeline.kernels import choose_kernels
from tawpipe.pipeline.setup import refuse_cut_rows, refuse_settings
from tawpipe.plan.answer.would_fit import WouldFit
from tawpipe.plan.cost.filling import FILLS, Filling
from tawpipe.plan.cost.measure import Asked, filling_of
from tawpipe.plan.cost.predict import Needs
from tawpipe.plan.machine.probe import machine_unprobed
from tawpipe.plan.search.plan_file import SavedPlan
from tawpipe.runtime.dtype import DTYPES, chosen_dtype
from tawpipe.runtime.homes.optimizer import OptimizerFactory, rule_of, with_groups
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import AUTO_RECOMPUTE, ScheduleSettings
from tawpipe.schedule.sharing import share_in_cp_groups
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.serving.held import longest_context
from tawpipe.train.disk import DiskNeeds, check_disk, disk_needs, state_bytes
from tawpipe.train.exporting import Form
from tawpipe.train.judging.retrieval import RetrievalCheck
from tawpipe.train.judging.sample import beginnings, wanted_texts
from tawpipe.train.memory import (
    MemoryLoad,
    check_memory,
    keepable_mib,
    measured_for,
    settled_micro_batch,
    settled_recompute,
    too_large,
)
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

PADDED = 1.1
"""Tokens with padding, relative to those without, that a micro-batch of several rows may have under ``auto``."""
SOON = 4
"""Number of steps whose documents are assigned to ranks beforehand, to predict their memory."""


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """Run whose documents are read.

    Args:
        config: settings of the user, with open settings settled. Other decisions are in the other fields.
        model: model as the settings ask for it.
        start: checkpoint that the run resumes from, or an empty start.
        data: documents of the run.
        batch: sizes of the batches.
    """

    config: TrainConfig
    model: RunModel
    start: ResumePoint
    data: PreparedData
    batch: BatchShape

    @property
    def state(self) -> RunState | None:
        """State from the checkpoint that the run resumes from; None for a new run."""
        return self.start.state

    @property
    def done(self) -> int:
        """Number of steps that were done before."""
        return self.state.step if self.state is not None else 0

    @property
    def samples(self) -> int:
        """Number of samples that were consumed before."""
        return self.state.samples if self.state is not None else 0


@dataclass(frozen=True, kw_only=True)
class BuiltRun(ReadRun):
    """Run whose model is built and split into blocks.

    Args:
        built: the model.
        chain: the model as a chain of blocks.
        optimizer: makes the optimizer of every unit.
        dtype: type in which the model computes.
        why_dtype: reason for this type, for the console.
    """

    built: BuiltModel
    chain: Chain
    optimizer: OptimizerFactory
    dtype: torch.dtype
    why_dtype: str

    @property
    def form(self) -> Form:
        """Form of the exported model."""
        return Form.of(self.config, self.built)

    def kernel(self, device: torch.device) -> str:
        """Return a description of the attention kernel that the model uses on ``device``, for the console."""
        text, names = self.chain.config.get_text_config(), [s.name for unit in self.chain.units for s in unit.slots]
        if self.chain.own_code:
            scores = "which may hold scores of tokens x tokens per row"
            return f"the model's own ({text._attn_implementation}), {scores}"
        return kernel_of_model(text, names, device, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Prepared(BuiltRun):
    """Run that has passed all checks.

    Args:
        followed: decision for or against a plan.
        schedule: settings of the schedule, including the decisions of a plan.
        request: measurements and sizes that memory and a plan were predicted from; None if blocks could not be
            measured.
        needs: predicted memory of a step; None if it could not be predicted.
        disk: bytes that the run will write.
        retrieval: retrieval check of every evaluation; None without one.
        carried: files that the exported model takes over from the model's folder; set on rank 0.
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
        """Plan that the run follows; None without one."""
        return self.followed.plan

    @property
    def plan_text(self) -> str:
        """Text of the plan, for checkpoints and the output folder; empty without a plan."""
        return self.plan.text if self.plan else ""

    @property
    def decided(self) -> dict[str, object]:
        """Values that the run decided in place of the user, by the keys of their settings."""
        schedule = {f"schedule.{name}": value for name, value in vars(self.schedule).items()}
        batch = {"packing": self.batch.packing, "micro_batch": self.batch.micro_batch}
        return {"dtype": str(self.dtype).removeprefix("torch."), **batch, **schedule}


def check_settings(config: TrainConfig, world: World, console: Console) -> None:
    """Refuse settings that cannot work on these processes, before anything is read; call on all ranks.

    Raises:
        UserError: a setting cannot work, or ranks have different settings.
    """
    console.topology(f"{world.nodes} on {device_name(world)}")
    _ = share_in_cp_groups(0, world.topology, config.schedule)
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
    """Settle the batches and the number of steps from the documents that were read.

    Args:
        documents: settings whose lengths are settled, and the documents.
        start: checkpoint that the run resumes from, or an empty start.

    Raises:
        UserError: a document is too long, or the resumed run had other documents.
    """
    config, data = documents
    kept = _kept(start.state, "bin_tokens", 0, world)
    batch = BatchShape.of(config, data.report.packing, world.size, FILLS[world.device.type] if kept is None else kept)
    batch.check_longest(data.longest, data.report.longest[1])
    refuse_other_documents(start, data, partly=data.report.streamed and not config.streaming)
    console.notice(*start.notices)
    config = _settled(config, data, batch, start.state, console)
    return ReadRun(config=config, model=model, start=start, data=data, batch=batch)


def build(run: ReadRun, world: World, console: Console) -> BuiltRun:
    """Build the model on the meta device, split it into blocks, and settle type and optimizer; call on all ranks.

    Raises:
        UserError: the tokenizer or the longest document does not fit the model.
    """
    config, state, vocabulary = run.config, run.state, vocabulary_size(run.data.tokenizer)
    with run.batch.naming_documents():
        run.model.check(vocabulary, run.data.longest)
        built, chain = run.model.followed(vocabulary)
    if state is not None and state.topology != str(world.nodes):
        console.notice(f"processes: {world.nodes} (before: {state.topology}; --nproc, --nodes)")
    console.notice(built.other_base_words, other_commit_words(state, built))
    name, why = chosen_dtype(config.dtype, world, state.dtype if state is not None else "")
    dtype = DTYPES[name]
    config = replace(config, quantize=_form_of(config.quantize, built, chain, run.start))
    console.notice(built.published_words(config.quantize), run.model.balance_words, built.wide_words(chain, dtype))
    activate_flash(world.device, dtype, lambda: chain.config.get_text_config())
    console.notice(choose_kernels(chain, config.kernels, world, dtype, config.schedule.recompute))
    optimizer, line = resumed_factory(factory_of(config), run.start, chain.units)
    console.notice(line)
    run = replace(run, config=config)
    whole = BuiltRun(**vars(run), built=built, chain=chain, optimizer=optimizer, dtype=dtype, why_dtype=why)
    return _with_packs_in_memory(whole, world)


def _with_packs_in_memory(run: BuiltRun, world: World) -> BuiltRun:
    """Return ``run`` with the usual packed micro-batches, if those that fill a device need too much memory.

    They do if layers could not keep all activations with them. Call on all ranks."""
    usual = BatchShape.of(run.config, run.batch.packing, world.size)
    if run.batch.bin_tokens <= usual.bin_tokens:
        return run
    request, _ = _planning_of(run, world).ask(machine_unprobed(world), timed=False)
    schedule = replace(run.config.schedule, recompute=AUTO_RECOMPUTE)
    keeps = run.chain.balance is None and settled_recompute(world, schedule, request) == "none"
    return run if keeps else replace(run, batch=usual)


def _kept(state: RunState | None, setting: str, old: Any, world: World) -> Any:
    """Return the value that the resumed run chose for ``setting``; None for a new run, and on other nodes.

    Args:
        state: state that the run resumes from; None for a new run.
        old: value of a run of an earlier version, which chose none.
    """
    if state is None or state.topology != str(world.nodes):
        return None
    return state.settled.get(setting, old)


def _form_of(quantize: str, built: BuiltModel, chain: Chain, start: ResumePoint) -> str:
    """Return the form of frozen matrices that ``--quantize`` stands for: for ``auto`` that of a resumed run, if any."""
    if quantize == AUTO and start.source is not None:
        return start.source.manifest.get("quantize", NONE)
    return chain.form_of(quantize) if built.folder is not None or quantize != AUTO else NONE


def _planning_of(run: BuiltRun, world: World) -> Planning:
    """Return the inputs of a plan for the run."""
    config, batch, data, chain = run.config, run.batch, run.data, run.chain
    filling = _filling(run, world)
    batch = replace(batch, micro_batch=filling.sizes[-1]) if filling else batch
    by_row = batch.micro_batch > 1 and bool(config.evaluation.retrieval_lengths)  # answers are found by row
    return Planning(
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
            filling=filling,
        ),
        by_one=by_row or batch.dealt,  # packed micro-batches are already sized for a number of ranks
    )


def follow_plan(run: BuiltRun, world: World, console: Console) -> tuple[Planning, Followed]:
    """Decide whether to follow a plan, make it if necessary, and print the decision; call on all ranks.

    Returns:
        the inputs of a plan, and the decision.

    Raises:
        UserError: a plan given by the user does not suit the run.
    """
    config, planning = run.config, _planning_of(run, world)
    console.notice(too_large(planning))
    with console.passing():
        followed = planning.follow(config.plan, run.state)
    if followed.table and config.dry_run:
        console.line("\n".join(f"  {line}" for line in (*followed.table, *followed.left_out)))
    if followed.line:
        (console.warning if REPORT in followed.line else console.line)(followed.line)
    refuse_cut_rows(run.chain, followed.schedule)  # the plan may cut rows where the user's settings do not
    return planning, followed


def _filling(run: BuiltRun, world: World) -> Filling | None:
    """Return the numbers of rows that ``--micro-batch auto`` may choose for the run; None if the number is given.

    On the nodes of the resumed run these are its number and smaller ones; 1 for a run of an earlier version."""
    config, batch = run.config, run.batch
    if batch.dealt or not isinstance(config.micro_batch, Open):
        return None
    filling = filling_of(run.chain, world.topology, world.device.type, config.schedule, batch.rows, batch.row_tokens)
    if config.evaluation.retrieval_lengths and world.size > 1:
        filling = filling.up_to(1, "processes may share the rows of the retrieval check")
    shapes = [replace(batch, micro_batch=size) for size in (1, filling.sizes[-1])]
    tokens, padded = (sum(map(sum, first_micro_batches(run.data, shape, 1))) for shape in shapes)
    if padded > tokens * PADDED:
        filling = filling.up_to(1, "several rows of unequal lengths would be padded")
    kept = _kept(run.state, "micro_batch", 1, world)
    return filling.up_to(kept, "as in the resumed run") if kept and batch.rows % kept == 0 else filling


def check(run: BuiltRun, planning: Planning, followed: Followed, console: Console) -> Prepared:
    """Check memory and disk, and that model and documents suit each other; settle what memory decides.

    Memory decides the rows of a micro-batch and recomputation, if they are ``auto``. Call on all ranks.

    Args:
        planning: inputs of a plan, from ``follow_plan``.
        followed: decision, from ``follow_plan``.

    Raises:
        UserError: memory or disk space is too small, or model and documents do not suit each other.
    """
    config, batch, world, built, chain = run.config, run.batch, planning.world, run.built, run.chain
    state = state_bytes(config, built, chain, run.dtype, run.optimizer)
    disk = disk_needs(config, built, chain, state=state, done=run.done)

    # Settle the micro-batch and what the backward passes compute again: on the same nodes, as in the resumed run.
    planning = planning.by(followed.schedule)
    request, needs = measured_for(planning, followed.request, console), None
    before = _kept(run.state, "recompute", "full", world) or ""
    if (filling := planning.asked.filling) is not None:
        if followed.plan is not None:
            tried, size = followed.request and followed.request.filling, followed.plan.content["micro_batch"]
            filling = (tried or filling).up_to(size, filling.reason or "as in the plan" * (tried is None))
        size = settled_micro_batch(world, followed.schedule, request, filling.sizes, before)
        batch = replace(batch, micro_batch=size, why=f" ({filling.words(size)})")
        run, request = replace(run, batch=batch), request and request.with_micro_batch(size)
        planning = replace(planning, asked=replace(planning.asked, micro_batch=size))
    schedule = replace(followed.schedule, recompute=settled_recompute(world, followed.schedule, request, before))
    if before == "none" != schedule.recompute:
        console.notice(f"recompute: {schedule.recompute} (before: none, which does not fit into memory now)")

    # Check the memory of the largest step with all other uses; free memory then keeps more activations.
    planning = planning.by(schedule)
    if request is not None:
        asks = partial(_request_for, run=run, planning=planning, machine=followed.machine)
        needs, request = check_memory(
            planning, batch, request, _load(run, disk, world), lambda short: WouldFit(short, config, asks), console
        )
    if needs is not None and batch.dealt and config.plan != "none" and (mib := keepable_mib(world, schedule, needs)):
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
    """Return the inputs of a plan for the settings ``other``, measured on this process alone.

    Args:
        run: run whose data and optimizer groups are used.
        planning: inputs of the plan for the run's own settings.
        machine: machine as it was measured for the plan; None to assume usual links.
    """
    _, chain = RunModel(other).followed(vocabulary_size(run.data.tokenizer))
    optimizer = with_groups(factory_of(other), rule_of(run.optimizer))
    asked = replace(planning.asked, quantize=other.quantize, settings=other.schedule, optimizer=optimizer)
    return replace(planning, chain=chain, asked=asked).ask_alone(machine or machine_unprobed(planning.world))


def _load(run: BuiltRun, disk: DiskNeeds, world: World) -> MemoryLoad:
    """Return what the run holds in memory in addition to a typical step: copies for saves, and sample texts.

    The result also has the document lengths of the next steps. They are read, but not consumed."""
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
    """Return the files that the export takes over from the model's folder, and a line about the export."""
    carried = run.form.carry(run.chain, run.model.folder, run.data.tokenizer, run.data.ends)
    return carried, run.form.words(run.chain, run.model.folder, run.data.ends)


def rows_of_run(prepared: Prepared, costs: Costs, packs: Packs | None, world: World) -> list[tuple[str, str]]:
    """Return console rows (title, text) that describe the run and its cost, before the first step.

    Args:
        prepared: the run.
        costs: predicted cost of the next step, from its schedule.
        packs: assignment of the next step's documents under ``balanced``, else None.
    """
    config = prepared.config
    trained = f", {costs.trainable / 1e6:.2f} M of them trained" if costs.trainable < costs.parameters else ""
    size = f"{costs.parameters / 1e6:.1f} M parameters{trained}"
    rows = [
        ("model", f"{config.model}: {size}, {str(prepared.dtype).removeprefix('torch.')} ({prepared.why_dtype})"),
        ("batch", batch_words(prepared.batch, packs, prepared.data.report.balance)),
        ("attention", prepared.kernel(world.device)),
    ]
    share = prepared.request.profile.mixers if prepared.request else 0.0
    if words := mixer_words(prepared.chain, world.device, share):
        rows.append(("mixers", words))
    if config.rope.changes:
        rows.append(("rotary positions", rope_words(prepared.chain.config.get_text_config())))
    rows += [*step_rows(costs, world.nodes, prepared.schedule.recompute), ("disk", str(prepared.disk))]
    if prepared.needs is None:  # a notice has already given the reason
        return [*rows, ("memory", f"at least, by the schedule, {costs.parts()}")]
    return rows + memory_rows(prepared.needs)


def tell_without_effect(settings: ScheduleSettings, world: World, console: Console) -> None:
    """Print which settings under ``schedule`` have no effect on this number of nodes."""
    for name in without_effect(settings, world):
        console.notice(f"--schedule.{name.replace('_', '-')} has no effect on one node, which has no slow link")


def _goes_on_saving(config: TrainConfig, first: int) -> bool:
    """Return True if training steps follow a save, so that both need memory at the same time.

    Args:
        first: step that the run resumes from; 0 for a new run.
    """
    settings = config.checkpoint
    often = [every for every in (settings.every, settings.memory_every) if every]
    return settings.best or any((first // every + 1) * every < config.steps for every in often)


def _copies_in_memory(config: TrainConfig, world: World) -> int:
    """Return the number of further state copies that the memory of a node will hold for each process.

    These are the copies of a process and of its neighbour, each twice while a new copy replaces an old one. Copies that
    exist already are not counted.
    """
    settings = config.checkpoint
    if not settings.memory_every:
        return 0
    root = memory_root(Path(settings.memory_dir), config.output_path)
    return (2 - any(root.glob("node-*/step-*"))) * (2 if world.machines.num_nodes > 1 else 1)


def _settled(
    config: TrainConfig, data: PreparedData, batch: BatchShape, earlier: RunState | None, console: Console
) -> TrainConfig:
    """Return the settings with the open ones settled (learning rate, steps, warm-up, weight decay), and print them.

    If only some documents were read, a number of steps given in epochs is not known, and the default number stands for
    it. Prints a notice if the warm-up is as long as the run.

    Raises:
        UserError: epochs of a stream are asked for; or decay, trace or faults lie outside of the run's steps.
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
