"""``tawpipe train --dry-run``: make the checks that a run makes before its first step, and print what would run.

The dry run uses one process, or the processes that torchrun has started, which then measure their links as the run
does. The model stays on the meta device. Documents are tokenised into a temporary folder: all documents of small data,
else the first ones. ``run`` has the same structure, and shares the functions of every check.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.load import Source
from tawpipe.checkpoint.names import passed_over, state_to_resume, step_of
from tawpipe.checkpoint.resume import Mark, ResumePoint, RunState
from tawpipe.console import Console
from tawpipe.data.reading.sources import find_sets
from tawpipe.dealing.balance import Packs
from tawpipe.job_limits import processors
from tawpipe.launch.launcher import Shape
from tawpipe.model.files.pretrained import SafetensorsSource
from tawpipe.model.flops import work_of
from tawpipe.pipeline.schedules import Schedules
from tawpipe.pipeline.setup import refuse_strategy
from tawpipe.pipeline.sizes import step_costs
from tawpipe.plan.cost.predict import Needs
from tawpipe.plan.cost.updates import states_of
from tawpipe.plan.machine.probe import machine_unprobed
from tawpipe.runtime.world import World, connect, pick_device
from tawpipe.schedule.pipelines.dealing import LONG
from tawpipe.schedule.step import StepSpec
from tawpipe.topology import Topology
from tawpipe.train.lengths import settled_lengths
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
from tawpipe.train.saying.words import gib
from tawpipe.train.settings.checks import faults_of
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.settings.optimizers import group_rows
from tawpipe.train.start import Documents, documents_of, refuse_other_form, refuse_other_run

FEW_BYTES = 4 << 20
"""Size of data in bytes up to which all documents are tokenised."""
FIRST_DOCUMENTS = 128
"""Number of documents of larger data that are tokenised."""
ASSUMED = "links: {rate:.3g} GB/s assumed; the run measures them with several processes and may choose another strategy"


def dry_run(config: TrainConfig, shape: Shape | None) -> int:
    """Check a run, print what would run, and return the exit code.

    Args:
        config: settings of the run.
        shape: processes that would be started on this machine; None in processes that torchrun has started, all of
            which must call this.

    Raises:
        UserError: the run would be refused.
    """
    if shape is None:
        world = connect(
            nodes=config.nodes if config.virtual_nodes else None,
            device=config.device,
            timeout=timedelta(seconds=config.timeouts.first_step_s),
        )
    else:  # look as rank 0 of these processes
        nodes = Topology.grid(shape.nodes, shape.local_size)
        world = World(nodes, 0, pick_device(config.device, 0), None)
    console = Console(world.rank)
    with _threads_of_one(world), _cache_of_its_own(world) as cache:
        _examine(config, world, console, cache)
    console.line("dry run: all checks passed; nothing was started and nothing was written")
    world.leave()
    return 0


def _examine(config: TrainConfig, world: World, console: Console, cache: str) -> None:
    """Take the steps of a run up to its pipeline, and print the table of what would run.

    Args:
        cache: temporary folder for tokenised documents.
    """
    _ = faults_of(config, world.size)
    check_settings(config, world, console)
    model, start = RunModel(config), _checkpoint(config)
    documents = _some_documents(config, model, world, console, start.state, cache=cache)
    run = build(settle_data(documents, model, start, world, console), world, console)
    planning, followed = follow_plan(run, world, console)
    prepared = check(run, planning, followed, console)
    config, chain, state, plan = prepared.config, prepared.chain, prepared.state, prepared.plan
    if world.group is None and world.size > 1 and followed.measured is not None:
        console.notice(ASSUMED.format(rate=followed.measured.inside.bytes_per_s / 1e9))
    if state is not None:
        refuse_other_run(config, state, chain, prepared.start.place)
    source = prepared.built.source(chain, seed=config.seed)
    if isinstance(source, SafetensorsSource):
        source.check_copies()
    chain.quantise(config.quantize, prepared.dtype)
    if plan is not None:
        plan.check_model(chain.spec)
    schedules, optimizer = Schedules(prepared.schedule, chain.spec, world), prepared.optimizer
    refuse_strategy(chain, schedules.smallest, optimizer=optimizer, compile_layers=config.compile)
    tell_without_effect(prepared.config.schedule, world, console)

    packs = _dealt(prepared, schedules.smallest) if prepared.batch.dealt else None
    count = -(-prepared.batch.rows // prepared.batch.micro_batch) if packs is None else packs.form
    costs = step_costs(
        chain,
        schedules.of(count, training=True),
        prepared.dtype,
        states_of(optimizer, chain.units),
        tokens=prepared.batch.row_tokens * prepared.batch.micro_batch,
        kept_per_token={},
        nodes=world.nodes,
    )
    rows = rows_of_run(prepared, costs, packs, world)
    weights = prepared.built.origin(seed=config.seed)
    if state is not None:
        weights = f"resumed from {prepared.start.place}, step {state.step}"
    rows.insert(1, ("weights", weights))
    rows[2:2] = group_rows(config, optimizer, chain.units)
    console.plan([*rows, *_memory_rows(world, prepared.needs)], title="would run")


@contextmanager
def _cache_of_its_own(world: World) -> Iterator[str]:
    """Return a context with the name of a temporary folder for tokens, equal on all ranks; it is deleted afterwards."""
    folder = world.broadcast_text(str(Path(tempfile.gettempdir(), f"tawpipe-dry-run-{secrets.token_hex(6)}")))
    try:
        yield folder
        world.wait_patiently()  # other ranks may still read there
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _threads_of_one(world: World) -> Iterator[None]:
    """Return a context in which torch uses the number of CPU threads that one process of the run would use.

    The processes of the run share the cores of this machine. No effect if these processes are running already."""
    before = torch.get_num_threads()
    if world.group is None and world.size > 1:
        torch.set_num_threads(max(1, processors() // world.size))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _some_documents(
    config: TrainConfig, model: RunModel, world: World, console: Console, earlier: RunState | None, *, cache: str
) -> Documents:
    """Read all documents of small data, or the first documents of larger data as if they were streamed.

    Prints a line if only the first documents are read.

    Returns:
        the settings with their lengths settled, and the documents.
    """
    files = [file for source in find_sets(config.data) for file in source.files]
    some = replace(config, cache_dir=cache)
    if any(file.format == "hub" for file in files) or sum(file.size for file in files) > FEW_BYTES:
        most = min(config.stream_window, FIRST_DOCUMENTS)
        some = replace(some, streaming=True, stream_window=most)
        if not config.streaming:
            console.line(f"data: only the first {most} documents are read here; the run reads all")
    looks = some.streaming and not config.streaming
    settled, data = documents_of(some, model, world, console, earlier, looks=looks)
    return replace(config, **settled_lengths(settled)), data


def _checkpoint(config: TrainConfig) -> ResumePoint:
    """Return the checkpoint that the run would resume from, as its manifest describes it.

    The files of the checkpoint are not read; a run compares them with their hashes first.
    """
    folder, without = state_to_resume(config.output_path, config.resume), ()
    if config.resume == "auto":
        without = passed_over(config.output_path / "checkpoints", step_of(folder) if folder is not None else 0)
    if folder is not None:
        manifest = read_manifest(folder)
        refuse_other_form(config, manifest, str(folder))
        source = Source(folder, manifest, ())
        return ResumePoint(source, RunState.of(manifest, str(folder)), str(folder), Mark(), without)
    return ResumePoint(None, None, "", Mark(), without)


def _dealt(prepared: Prepared, step: StepSpec) -> Packs:
    """Return the assignment of the next step's documents to the ranks, under ``balanced``.

    Args:
        step: any step of the schedule.
    """
    batch, plan = prepared.batch, prepared.plan
    whole = prepared.chain.why_not_chunks or prepared.chain.positions.first
    deals = step.strategy.dealing(
        step,
        cap=batch.bin_tokens,
        work=(plan.work if plan else None) or work_of(prepared.chain),
        cuts=None if whole else LONG,
    )
    return deals(prepared.data.train.step(prepared.samples, batch.step_tokens).lengths)


def _memory_rows(world: World, needs: Needs | None) -> list[tuple[str, str]]:
    """Return console rows with the memory of each process and the share of it that the run takes.

    Host memory has a row if the run needs any. Without ``needs`` only the memory of each process is shown. Call on all
    ranks."""
    machine = machine_unprobed(world)
    available = machine.most_memory - (needs.absent if needs else 0)
    if needs is None or not available:
        return [("available memory", f"{gib(available)} per process" if available else "unknown")]
    rows = [("available memory", f"{gib(available)} per process; the run uses {needs.device / available:.0%}")]
    if needs.host:
        rows.append(("available host memory", f"{gib(machine.host_bytes)} per node"))
    return rows
