"""Training run: from settings to a trained model in a folder.

``run`` is a recipe in eight steps; every process of the run calls it. Steps 2 to 4 are in ``prepare``, which the dry
run uses, too. The work of one training step is in ``loop``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from tawpipe.checkpoint.names import complete_states, step_name
from tawpipe.checkpoint.resume import ResumePoint, choose, examine
from tawpipe.checkpoint.store import Disk, Memory, memory_root
from tawpipe.console import Console, above_bar, duration
from tawpipe.data.prepared import PreparedData, changed_parts
from tawpipe.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from tawpipe.environment import ERROR_PREFIX, restart_count, started_by_local_launcher
from tawpipe.errors import RunError
from tawpipe.files import replace_text
from tawpipe.launch.launcher import launched_here
from tawpipe.launch.torchrun import leave_words
from tawpipe.model.files.carried import save_tokenizer
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings, TrainingSettings
from tawpipe.runtime.memory import Taken, share_allocator
from tawpipe.runtime.watch.faults import Injector
from tawpipe.runtime.world import World, connect
from tawpipe.streams import lossy
from tawpipe.train.exporting import TOKENIZER
from tawpipe.train.going_on import how_this_process_goes_on
from tawpipe.train.judging.evaluation import loss_words
from tawpipe.train.loop import Training
from tawpipe.train.memory import check_left, naming_recompute, predicted_bytes
from tawpipe.train.planned import PLAN, STRATEGIES
from tawpipe.train.prepare import (
    Prepared,
    build,
    check,
    check_settings,
    follow_plan,
    rows_of_run,
    settle_data,
    tell_without_effect,
)
from tawpipe.train.run_model import RunModel
from tawpipe.train.saying.metrics import last_step, peak_memory_bytes
from tawpipe.train.saying.tracking import Tracking
from tawpipe.train.saying.words import brief, measured_words
from tawpipe.train.settings.checks import faults_of
from tawpipe.train.settings.config import SETTINGS, TrainConfig, changes_of_the_run, config_text, train_options
from tawpipe.train.settings.trackers import TrackedRun
from tawpipe.train.start import documents_of, refuse_other_form, refuse_other_run
from tawpipe.train.stopping import StopRequest

Rows = list[tuple[str, str]]
"""Rows (title, text) of a table on the console."""


def run(config: TrainConfig) -> int:
    """Train a model by the settings ``config``, and return the exit code of this process.

    Every process of the run calls it. It writes checkpoints, metrics and the exported model into the output folder. The
    exit code is 0, or 130 after ctrl-C, also if the run then saved a checkpoint and ended in order.

    Raises:
        UserError: a setting cannot work.
        RunError: training failed, or the last checkpoint or the model could not be written.
    """
    begin = time.perf_counter()

    # 1 Connect the processes, and refuse settings that cannot work.
    _set_up_process(config)
    world = _connected(config)
    console = Console(world.rank, bar=config.log.progress == "auto")
    # Take the largest count: each torchrun agent counts its own restarts, and a node that joined later has seen none.
    restarts = int(max(world.gather_numbers(float(restart_count()))))
    faults = faults_of(config, world.size)
    injector = Injector(faults, world.rank, restart=restarts) if faults else None
    check_settings(config, world, console)

    # 2 Read the data. Choose the checkpoint first: it contains the length of the rows.
    model = RunModel(config)
    disk, memory = open_stores(config, world, injector)
    start = _choose_start(config, console, disk, memory, injector, restarts)
    documents = documents_of(config, model, world, console, start.state)
    read = settle_data(documents, model, start, world, console)

    # 3 Build the model, without weights.
    built = build(read, world, console)

    # 4 Plan the schedule. All refusals of this run should be raised by now.
    planning, followed = follow_plan(built, world, console)
    prepared = check(built, planning, followed, console)
    config = prepared.config

    # 5 Make the pipeline: weights, optimizer states, buffers and links.
    if followed.machine is not None:
        world = replace(world, far_bytes_per_s=followed.machine.far_share)
    pipeline = _make_pipeline(prepared, world, injector)
    check_left(world, pipeline.transport.group_bytes, prepared.needs)
    if pipeline.checked:
        console.line(pipeline.checked)
    if prepared.plan is not None:
        prepared.plan.check_model(pipeline.spec)

    # 6 Resume from the checkpoint, or begin anew.
    if start.state is not None:
        _resume(prepared, console, pipeline)
    else:
        if config.resume == "auto" or restarts:
            console.notice(f"no sound checkpoint in {disk.folder}; starting at step 0")
    for name, words in (("adapter", prepared.built.adapter_words), ("frozen", prepared.built.frozen_words)):
        if words:
            console.line(f"{name}: {words}")
    start.take(config.output_path, disk)
    if world.rank == 0 and (config.steps or start.state is None):  # `--steps 0` must not change a run's settings
        _save_settings(prepared, console)
    tell_without_effect(config.schedule, world, console)
    before_rows = _rows_of_next(prepared, pipeline)
    console.plan(brief(before_rows, world.device))

    # 7 Take the steps, then write samples with the best weights.
    with StopRequest(world, partial(how_this_process_goes_on, config) if launched_here() else None) as stop:
        with _tracking(prepared, world, console) as tracking:
            training = Training(prepared, console, pipeline, disk, memory=memory, tracking=tracking)
            with naming_recompute(prepared.schedule):
                seconds = training.run(stop)
            peaks = world.gather_numbers(peak_memory_bytes(world.device.type))
            if training.ended_early:
                tracking.outcome = "stopped"
            model_rows = [] if training.ended_early else _judge_model(training)

        # 8 Report the results, export the model, leave.
        rows = _results(training, pipeline, prepared.data, seconds)
        rows.append(("peak memory per process", measured_words(peaks, predicted_bytes(prepared.needs, world.device))))
        if world.device.type == "cuda":
            rows.append(("GPU memory at most", str(Taken.of(world.device))))
        rows += model_rows
        if config.export.enabled and config.steps and training.last and not training.ended_early:
            rows += [("model", str(_export(prepared, pipeline))), ("export", "checked")]
        rows.append(("whole run", duration(time.perf_counter() - begin)))
        if config.report and world.rank == 0:
            _write_page(prepared, training, before_rows, rows, console)
        console.summary(rows)
        if training.ended_early:
            console.notice(f"stopped after step {training.last}; {how_this_process_goes_on(config)}")
        pipeline.close()
        if memory is not None and not training.saves.unsaved:
            memory.remove()
        world.leave()
    if training.saves.unsaved:
        raise RunError(f"the last checkpoint could not be written: {training.saves.unsaved}")
    # After ctrl-C the launcher returns the same exit code.
    by_hand = stop.caught is signal.SIGINT or (training.ended_early and training.stopped is signal.SIGINT)
    return 128 + signal.SIGINT if by_hand else 0


def _set_up_process(config: TrainConfig) -> None:
    """Replace the output streams by streams that ignore errors; with ``deterministic``, set torch accordingly."""
    # On all ranks, as under torchrun they share a terminal with rank 0. A print in a library must not end the run.
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(above_bar(sys.stderr))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Otherwise torch fills every new tensor to make faults visible, which costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _connected(config: TrainConfig) -> World:
    """Connect the processes of the run, and return the ``World``; on CPUs, also set up the memory allocator."""
    world = connect(
        nodes=config.nodes if config.virtual_nodes and not started_by_local_launcher() else None,
        device=config.device,
        timeout=timedelta(seconds=config.timeouts.first_step_s),
    )
    if world.device.type == "cpu":
        share_allocator()
    return world


def _judge_model(training: Training) -> Rows:
    """Load the weights with the lowest validation loss and write samples, as far as the settings ask for them.

    Returns:
        console rows about the best step and the samples.
    """
    config, best, step, rows = training.config, training.evaluation.best, training.last, Rows()
    if config.checkpoint.best and best.step:
        words = f"step {best.step}, validation loss {loss_words(best.loss)}"
        if best.step != step:
            try:
                training.pipeline.load(examine(training.disk, [training.disk.folder / step_name(best.step)]))
                step, words = best.step, f"{words}: the following is from its checkpoint"
            except RunError as problem:
                words += f", but its checkpoint cannot be loaded ({problem}): the following is from step {step}"
        rows.append(("best", words))
    if config.sample.tokens:
        rows += [("sample", str(sample)) for sample in training.write_samples(step)]
    return rows


def _write_page(prepared: Prepared, training: Training, before: Rows, results: Rows, console: Console) -> None:
    """Write the HTML page of the run and add a row about it to ``results``; an error does not end the run.

    Args:
        before: rows that the console printed before the first step.
        results: rows of the results.
    """
    config = prepared.config
    with console.showing(config.report):
        from tawpipe.train.page import write_run_page

        retrieval = training.evaluation.retrieval
        write_run_page(Path(config.report), config, before, results, retrieval, prepared.data.report)
        results.append(("page", config.report))


def _export(prepared: Prepared, pipeline: Pipeline) -> Path:
    """Write the exported model into the output folder, and return its path.

    Raises:
        RunError: the model could not be written. If there is a checkpoint, the message has the command that exports it.
    """
    config, tokenizer = prepared.config, prepared.data.tokenizer
    try:
        folder = config.output_path / "model"
        return pipeline.export(folder, tokenizer=tokenizer, carried=prepared.carried, **vars(prepared.form))
    except RunError as error:
        if not complete_states(config.output_path / "checkpoints"):
            raise
        again = f"tawpipe export {shlex.quote(config.output)}"
        raise RunError(f"{error}. `{again}` writes it from a checkpoint") from error


def _results(training: Training, pipeline: Pipeline, data: PreparedData, seconds: float) -> Rows:
    """Return console rows with the results of the steps.

    Args:
        seconds: duration of all steps of this start.
    """
    done, evaluation, saves = training.last - training.first, training.evaluation, training.saves
    results = [("steps", f"{done} in {duration(seconds)}" + (f", up to {training.last}" if training.first else ""))]
    if evaluation.exhausted:
        results.append(("ended early", f"no lower loss in {evaluation.best.since} evaluations"))
    if pipeline.without_labels:
        results.append(("skipped", f"{pipeline.without_labels} steps without a token to learn"))
    if saves.stall_s is not None:
        results.append(("checkpoint stall", f"at most {saves.stall_s * 1e3:.0f} ms"))
    if evaluation.loss is not None:
        results.append(("validation loss", loss_words(evaluation.loss)))
    if known := {edge: loss for edge, loss in evaluation.by_position.items() if loss is not None}:
        results.append(
            ("validation loss by position", ", ".join(f"to {edge}: {loss:.4f}" for edge, loss in known.items()))
        )
    if evaluation.retrieval is not None:
        results.append(("retrieval", str(evaluation.retrieval)))
    passes = ", ".join(f"{times:.2f} of {name}" for name, times in data.passes(training.samples))
    results.append(("epochs", passes))
    return results


def _tracking(prepared: Prepared, world: World, console: Console) -> Tracking:
    """Return the trackers of the run; on ranks other than 0 there are none."""
    config, leaves = prepared.config, train_options().leaves
    tracked = TrackedRun(
        config.output_path,
        project=config.log.project,
        name=config.log.run_name,
        settings={leaf.key: reduce(getattr, path, config) for path, leaf in leaves.items()} | prepared.decided,
        plan=prepared.plan_text,
        resumed_step=prepared.done,
    )
    return Tracking(config.log.trackers if world.rank == 0 else (), tracked, console.missed)


def _save_settings(prepared: Prepared, console: Console) -> None:
    """Write settings, plan and tokenizer into the output folder; if that fails, print a notice and continue.

    Without a plan, the plan and the table of an earlier start are deleted there. A resumed run that follows a plan
    keeps its earlier table. Call on one rank."""
    config, plan = prepared.config, prepared.plan_text
    try:
        config.output_path.mkdir(parents=True, exist_ok=True)
        replace_text(config.output_path / SETTINGS, config_text(config))
        goes_on = prepared.state is not None and plan  # a resumed run without a new table keeps the earlier one
        for name, text in ((PLAN, plan), (STRATEGIES, "\n".join(prepared.followed.table))):
            if text:
                replace_text(config.output_path / name, text)
            elif not goes_on:
                (config.output_path / name).unlink(missing_ok=True)
        save_tokenizer(prepared.data.tokenizer, config.output_path / TOKENIZER)
    except OSError as error:
        console.notice(f"{error.filename or config.output_path} could not be written: {error.strerror or error}")


def open_stores(config: TrainConfig, world: World, injector: Injector | None = None) -> tuple[Disk, Memory | None]:
    """Return the stores of the run's states: the disk, and the memory of the nodes.

    Without ``checkpoint.memory_every`` there is no store in memory, and copies of earlier runs in this folder are
    deleted.

    Returns:
        the disk, and the memory or None.
    """
    settings = config.checkpoint
    folder = config.output_path / "checkpoints"
    disk = Disk(folder, world, keep=settings.keep, keep_every=settings.keep_every, injector=injector)
    root = memory_root(Path(settings.memory_dir), config.output_path)
    if settings.memory_every:
        return disk, Memory(root, world, world.with_group("copies", timedelta(days=7)))
    shutil.rmtree(root, ignore_errors=True)
    return disk, None


def _choose_start(
    config: TrainConfig, console: Console, disk: Disk, memory: Memory | None, injector: Injector | None, restarts: int
) -> ResumePoint:
    """Choose the checkpoint to resume from, and return it; after a restart, report how many steps are repeated.

    Raises:
        UserError: the checkpoint's frozen weights have another form than the settings ask for.
    """
    if injector is not None:
        injector.before_load()
    start = choose(config.output_path, config.resume, disk, memory, restarts=restarts)
    if start.source is not None:
        refuse_other_form(config, start.source.manifest, start.place)
    if restarts and disk.leads:
        reached, first = last_step(config.output_path), start.state.step if start.state else 0
        console.notice(f"restart {restarts}: repeating {max(0, reached - first)} steps, from step {first + 1}")
    return start


def _make_pipeline(prepared: Prepared, world: World, injector: Injector | None) -> Pipeline:
    """Make the pipeline of the run, set its time limits, and make the schedule of rows beforehand."""
    config, batch, plan = prepared.config, prepared.batch, prepared.plan
    settings, first_step = config.optimizer, timedelta(seconds=config.timeouts.first_step_s)
    pipeline = Pipeline(
        prepared.chain,
        weights=lambda chain: prepared.built.source(chain, seed=config.seed),
        optimizer=prepared.optimizer,
        micro_batch=batch.micro_batch,
        schedule=prepared.schedule,
        dtype=prepared.dtype,
        world=world,
        training=TrainingSettings(
            clip_norm=settings.clip_norm or None,
            skip_limit=settings.skip_limit if settings.nonfinite == "skip" else 0,
            seed=config.seed,
            bin_tokens=batch.bin_tokens,
            work=plan.work if plan else None,
            compile_layers=config.compile,
            quantize=config.quantize,
            without_mtp=config.without_mtp,
            balance=config.experts.balance,
            kernels=config.kernels,
        ),
        checks=CheckSettings(check=config.check, timeout=first_step, strict=config.strict, injector=injector),
    )
    pipeline.limit.predicted_s = plan.step_s if plan else 0.0
    pipeline.set_timeout(first_step)
    pipeline.executor.watchdog.leave_words = lambda verdict: leave_words(ERROR_PREFIX + verdict)
    pipeline.record_hangs(config.output_path / "flight")
    if not batch.dealt:
        pipeline.schedule(batch.rows)
    return pipeline


def _rows_of_next(prepared: Prepared, pipeline: Pipeline) -> Rows:
    """Return console rows that describe the run and the cost of its next step."""
    batch, data, packs = prepared.batch, prepared.data, None
    if batch.dealt:
        packs = pipeline.deal(data.train.step(prepared.samples, batch.step_tokens).lengths)
    costs = pipeline.costs(batch.rows, batch.row_tokens) if packs is None else pipeline.costs_of_packs(packs)
    (label, model), *rows = rows_of_run(prepared, costs, packs, pipeline.world)
    if prepared.start.state is None:
        model += f", weights: {prepared.built.origin(seed=prepared.config.seed)}"
    return [(label, model), *rows]


def _resume(prepared: Prepared, console: Console, pipeline: Pipeline) -> None:
    """Load the checkpoint into the pipeline, and restore the position in the data if the data has not changed.

    Prints changed settings, changed data, and a notice if all steps are done already.

    Raises:
        UserError: the checkpoint belongs to another run, or the tokenizer has other token ids.
    """
    config, data, begins = prepared.config, prepared.data, prepared.start
    state, place = begins.state, begins.place
    assert state is not None and begins.source is not None
    for option, before, now in changes_of_the_run(config):
        console.notice(f"{option} changed from {before} to {now}")
    refuse_other_run(config, state, pipeline.chain, place)
    pipeline.load(begins.source)
    console.notice(f"weights: resumed from {place}: step {state.step}, {state.samples} samples consumed")
    if "tokenizer" in (changed := changed_parts(state.fingerprint, data.fingerprint)):
        kept = config.output_path / TOKENIZER
        told = f"the tokenizer of the run, {kept}: the current one gives other token ids"
        pipeline.world.require(_same_tokens(data.tokenizer, kept), "--tokenizer", config.tokenizer, told)
    if changed:
        console.notice(
            f"the data has changed since then ({', '.join(changed)}): sample numbers now refer to other samples"
        )
    if state.data_state and not changed:
        data.train.load_state_dict(state.data_state)
    if state.step >= config.steps:
        console.notice(f"--steps {config.steps} are already done")


def _same_tokens(tokenizer: Any, folder: Path) -> bool:
    """Return False if ``folder`` has a tokenizer with other token ids; True if not, or if it has no tokenizer."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return True
    return load_tokenizer(str(folder), "--tokenizer").get_vocab() == tokenizer.get_vocab()
