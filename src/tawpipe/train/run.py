"""The training run: from settings to a trained model in a folder.

``run`` reads as a recipe; every process of the run calls it. What happens step by step stands in ``loop``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
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
from tawpipe.train.judging.evaluation import Best, loss_words
from tawpipe.train.loop import Training
from tawpipe.train.memory import check_left, naming_recompute, said_bytes
from tawpipe.train.planned import PLAN, STRATEGIES
from tawpipe.train.prepare import Prepared, prepare, rows_of_run, tell_without_effect
from tawpipe.train.saying.metrics import last_step, peak_memory_bytes
from tawpipe.train.saying.tracking import Tracking
from tawpipe.train.saying.words import measured_words
from tawpipe.train.settings.checks import faults_of
from tawpipe.train.settings.config import SETTINGS, TrainConfig, changes_of_the_run, config_text, train_options
from tawpipe.train.settings.trackers import TrackedRun
from tawpipe.train.start import refuse_other_form, refuse_other_run
from tawpipe.train.stopping import StopRequest


def run(config: TrainConfig) -> int:
    """Train as ``config`` says; the exit code of the process. Every process of the run calls it."""
    started = time.perf_counter()
    # Of all ranks: under torchrun they share a terminal with rank 0. What libraries print ends no run, either.
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(above_bar(sys.stderr))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Or torch would fill every new tensor, to find faults by.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The processes, and what the faults of a test are.
    world = connect(
        nodes=config.nodes if config.virtual_nodes and not started_by_local_launcher() else None,
        device=config.device,
        timeout=timedelta(seconds=config.timeouts.first_step_s),
    )
    if world.device.type == "cpu":
        share_allocator()
    console = Console(world.rank, bar=config.log.progress == "auto")
    # Agents of torchrun count by themselves: a node that joins later has seen no restart.
    restarts = int(max(world.gather_numbers(float(restart_count()))))
    faults = faults_of(config, world.size)
    injector = Injector(faults, world.rank, restart=restarts) if faults else None

    # What is trained, from where on; then the pipeline with its state.
    stores: list[tuple[Disk, Memory | None]] = []

    def start() -> ResumePoint:
        stores.append(open_stores(config, world, injector))
        return _choose_start(config, console, *stores[0], injector, restarts)

    table = list[str]()
    prepared = prepare(config, world, console, start=start, show=lambda plan: table.extend(plan.table()))
    config, data, begins, built = prepared.config, prepared.data, prepared.start, prepared.built
    disk, memory = stores[0]
    if prepared.machine is not None:
        world = replace(world, far_bytes_per_s=prepared.machine.far_share)
    pipeline = _make_pipeline(prepared, world, injector)
    check_left(world, pipeline.transport.group_bytes, prepared.needs)
    if pipeline.checked:
        console.line(pipeline.checked)
    if prepared.plan is not None:
        prepared.plan.check_model(pipeline.spec)
    if begins.state is not None:
        for option, before, now in changes_of_the_run(config):
            console.notice(f"{option}: {now} from here on; {before} before")
        _resume(prepared, console, pipeline)
    else:
        if config.resume == "auto" or restarts:
            console.notice(f"no sound checkpoint in {disk.folder}; starting anew")
        console.line(f"weights: {built.origin(seed=config.seed)}")

    # What there is to say and to keep before the first step.
    if built.adapter_words:
        console.line(f"adapter: {built.adapter_words}")
    if built.frozen_words:
        console.line(f"frozen: {built.frozen_words}")
    begins.take(config.output_path, disk)
    if world.rank == 0 and (config.steps or begins.state is None):  # a look at a run is not what it goes on with
        _save_settings(prepared, table, console)
    tell_without_effect(prepared.config.schedule, world, console)
    before_rows = _rows_of_next(prepared, pipeline)
    console.plan(before_rows)

    how_to_go_on = lambda: how_this_process_goes_on(config)  # noqa: E731
    with StopRequest(world, how_to_go_on if launched_here() else None) as stop:
        # The steps, and what is made of the model while all is open.
        with _tracking(prepared, world, console) as tracking:
            training = Training(prepared, console, pipeline, disk, memory=memory, tracking=tracking)
            with naming_recompute(prepared.schedule):
                seconds = training.run(stop)
            peaks = world.gather_numbers(peak_memory_bytes(world.device.type))
            stopped, of_step = training.stopped is not None and training.last < config.steps, training.last
            of_model: list[tuple[str, str]] = []
            if config.checkpoint.best and training.evaluation.best.step and not stopped:
                of_step, words = _go_back_to_best(pipeline, disk, training.evaluation.best, training.last)
                of_model.append(("best", words))
            if config.sample.tokens and not stopped:
                of_model += [("sample", str(sample)) for sample in training.write_samples(of_step)]
            if stopped:
                tracking.outcome = "stopped"

        # What came of it.
        evaluation, saves = training.evaluation, training.saves
        results = _results(training, pipeline, data, seconds)
        results.append(("peak memory per process", measured_words(peaks, said_bytes(prepared.needs, world.device))))
        if world.device.type == "cuda":
            results.append(("of this GPU at most", str(Taken.of(world.device))))
        results += of_model
        if config.export.enabled and config.steps and training.last and not stopped:
            results += [("model", str(_export(prepared, pipeline))), ("export", "checked")]
        results.append(("whole run", duration(time.perf_counter() - started)))
        if config.report and world.rank == 0:
            with console.showing(config.report):
                from tawpipe.train.page import write_run_page

                write_run_page(Path(config.report), config, before_rows, results, evaluation.retrieval, data.report)
                results.append(("page", config.report))
        console.summary(results)
        if stopped:
            console.notice(f"stopped after step {training.last}; {how_to_go_on()}")
        pipeline.close()
        if memory is not None and not saves.unsaved:
            memory.remove()
        world.leave()
    if saves.unsaved:
        raise RunError(f"the last checkpoint could not be written: {saves.unsaved}")
    # The launcher does so after ctrl-C, too.
    by_hand = stop.caught is signal.SIGINT or (stopped and training.stopped is signal.SIGINT)
    return 128 + signal.SIGINT if by_hand else 0


def _export(prepared: Prepared, pipeline: Pipeline) -> Path:
    """The folder with the model, which a checkpoint can make again if it could not be written."""
    config, tokenizer = prepared.config, prepared.data.tokenizer
    try:
        folder = config.output_path / "model"
        return pipeline.export(folder, tokenizer=tokenizer, carried=prepared.carried, **vars(prepared.form))
    except RunError as error:
        if not complete_states(config.output_path / "checkpoints"):
            raise
        again = f"tawpipe export {shlex.quote(config.output)}"
        raise RunError(f"{error}. `{again}` writes it from a checkpoint") from error


def _results(training: Training, pipeline: Pipeline, data: PreparedData, seconds: float) -> list[tuple[str, str]]:
    """Rows that say what came of the steps."""
    done, evaluation, saves = training.last - training.first, training.evaluation, training.saves
    results = [("steps", f"{done} in {duration(seconds)}" + (f", up to {training.last}" if training.first else ""))]
    if evaluation.exhausted:
        results.append(("ended early", f"{evaluation.best.since} evaluations in a row have not lowered the loss"))
    if pipeline.without_labels:
        results.append(("left out", f"{pipeline.without_labels} steps without a token to learn"))
    if saves.stall_s is not None:
        results.append(("stood still for a checkpoint", f"at most {saves.stall_s * 1e3:.0f} ms"))
    if evaluation.loss is not None:
        results.append(("validation loss", loss_words(evaluation.loss)))
    if known := {edge: loss for edge, loss in evaluation.by_position.items() if loss is not None}:
        results.append(("by tokens before", ", ".join(f"to {edge}: {loss:.4f}" for edge, loss in known.items())))
    if evaluation.retrieval is not None:
        results.append(("retrieval", str(evaluation.retrieval)))
    passes = ", ".join(f"{times:.2f} of {name}" for name, times in data.passes(training.samples))
    results.append(("passes of the data", passes))
    return results


def _tracking(prepared: Prepared, world: World, console: Console) -> Tracking:
    """The trackers of the run, which rank 0 has."""
    config, leaves = prepared.config, train_options().leaves
    tracked = TrackedRun(
        config.output_path,
        project=config.log.project,
        name=config.log.run_name,
        settings={leaf.key: reduce(getattr, path, config) for path, leaf in leaves.items()} | prepared.decided,
        plan=prepared.plan_text,
        resumed_step=prepared.state.step if prepared.state is not None else 0,
    )
    return Tracking(config.log.trackers if world.rank == 0 else (), tracked, console.missed)


def _save_settings(prepared: Prepared, table: Sequence[str], console: Console) -> None:
    """Write settings, plan and tokenizer beside the metrics; a run can do without these files.

    Args:
        table: of all strategies, where a plan was made now.
    """
    config, plan = prepared.config, prepared.plan_text
    try:
        config.output_path.mkdir(parents=True, exist_ok=True)
        replace_text(config.output_path / SETTINGS, config_text(config))
        goes_on = prepared.state is not None and plan  # and then with the table of the run before, if there is none
        for name, text in ((PLAN, plan), (STRATEGIES, "\n".join(table))):
            if text:
                replace_text(config.output_path / name, text)
            elif not goes_on:
                (config.output_path / name).unlink(missing_ok=True)
        save_tokenizer(prepared.data.tokenizer, config.output_path / TOKENIZER)
    except OSError as error:
        console.notice(f"{error.filename or config.output_path} could not be written: {error.strerror or error}")


def open_stores(config: TrainConfig, world: World, injector: Injector | None = None) -> tuple[Disk, Memory | None]:
    """The stores of this run's states. Without one in memory, what earlier runs in this folder left there goes."""
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
    if injector is not None:
        injector.before_load()
    start = choose(config.output_path, config.resume, disk, memory, restarts=restarts)
    if start.source is not None:
        refuse_other_form(config, start.source.manifest, start.place)
    if restarts and disk.leads:
        reached, first = last_step(config.output_path), start.state.step if start.state else 0
        console.notice(f"restart {restarts}: {max(0, reached - first)} steps, from {first + 1} on, are repeated")
    return start


def _make_pipeline(prepared: Prepared, world: World, injector: Injector | None) -> Pipeline:
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


def _rows_of_next(prepared: Prepared, pipeline: Pipeline) -> list[tuple[str, str]]:
    """Rows that say what is about to happen, and what it costs."""
    batch, data, bins = prepared.batch, prepared.data, None
    if batch.dealt:
        samples = prepared.state.samples if prepared.state is not None else 0
        bins = pipeline.deal(data.train.step(samples, batch.step_tokens).lengths)
    said = pipeline.costs(batch.rows, batch.row_tokens) if bins is None else pipeline.costs_of_bins(bins)
    return rows_of_run(prepared, said, bins, pipeline.world)


def _resume(prepared: Prepared, console: Console, pipeline: Pipeline) -> None:
    config, data, begins = prepared.config, prepared.data, prepared.start
    state, place = begins.state, begins.place
    assert state is not None and begins.source is not None
    refuse_other_run(config, state, pipeline.chain, place)
    pipeline.load(begins.source)
    console.notice(f"weights: resumed from {place}: step {state.step}, {state.samples} samples consumed")
    if "tokenizer" in (changed := changed_parts(state.fingerprint, data.fingerprint)):
        kept = config.output_path / TOKENIZER
        told = f"{kept}, which has learned the run's tokens: what is used now numbers them otherwise"
        pipeline.world.require(_same_tokens(data.tokenizer, kept), "--tokenizer", config.tokenizer, told)
    if changed:
        console.notice(f"the data has changed since then ({', '.join(changed)}): sample numbers now mean other samples")
    if state.data_state and not changed:
        data.train.load_state_dict(state.data_state)
    if state.step >= config.steps:
        console.notice(f"--steps {config.steps} are done already")


def _same_tokens(tokenizer: Any, folder: Path) -> bool:
    """False if a folder holds a tokenizer whose tokens have other numbers."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return True
    return load_tokenizer(str(folder), "--tokenizer").get_vocab() == tokenizer.get_vocab()


def _go_back_to_best(pipeline: Pipeline, disk: Disk, best: Best, last: int) -> tuple[int, str]:
    """Load the state with the lowest validation loss, which is what is to be exported; the step of the model that there
    is now, and what was done, in words.
    """
    words = f"step {best.step}, validation loss {loss_words(best.loss)}"
    if best.step != last:
        try:
            pipeline.load(examine(disk, [disk.folder / step_name(best.step)]))
        except RunError as problem:
            return last, f"{words}, but its checkpoint cannot be loaded ({problem}): what follows is of step {last}"
        words += ": what follows is of its checkpoint"
    return best.step, words
