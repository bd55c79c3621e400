"""``tawpipe train --dry-run``: what a run checks before its first step, and what would then happen.

It looks with one process, or with those that torchrun has started, which then measure their links as the run does. The
model stays on the meta device. Documents are tokenised into a temporary folder: all of them if they are few, else the
first ones. ``run`` reads alike, and every check that both make is one function.
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
from tawpipe.dealing.balance import Bins
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
"""Of files whose documents are all tokenised."""
FIRST_DOCUMENTS = 128
"""Of larger ones, so many are."""
ASSUMED = "links: {rate:.3g} GB/s assumed; the run measures them with several processes and may choose another strategy"


def dry_run(config: TrainConfig, shape: Shape | None) -> int:
    """Look, say what would run, and return the exit code.

    Args:
        shape: of the processes that would be started here; None in processes that torchrun has started, all of which
            call this.

    Raises:
        UserError: what the run would be refused for.
    """
    if shape is None:
        world = connect(
            nodes=config.nodes if config.virtual_nodes else None,
            device=config.device,
            timeout=timedelta(seconds=config.timeouts.first_step_s),
        )
    else:  # as one process of them sees it
        nodes = Topology.grid(shape.nodes, shape.local_size)
        world = World(nodes, 0, pick_device(config.device, 0), None)
    console = Console(world.rank)
    with _threads_of_one(world), _cache_of_its_own(world) as cache:
        _examine(config, world, console, cache)
    console.line("dry run: all checks passed; nothing was started and nothing was written")
    world.leave()
    return 0


def _examine(config: TrainConfig, world: World, console: Console, cache: str) -> None:
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

    bins = _dealt(prepared, schedules.smallest) if prepared.batch.dealt else None
    count = -(-prepared.batch.rows // prepared.batch.micro_batch) if bins is None else bins.form
    said = step_costs(
        chain,
        schedules.of(count, training=True),
        prepared.dtype,
        states_of(optimizer, chain.units),
        tokens=prepared.batch.row_tokens * prepared.batch.micro_batch,
        kept_per_token={},
        nodes=world.nodes,
    )
    rows = rows_of_run(prepared, said, bins, world)
    weights = prepared.built.origin(seed=config.seed)
    if state is not None:
        weights = f"resumed from {prepared.start.place}, step {state.step}"
    rows.insert(1, ("weights", weights))
    rows[2:2] = group_rows(config, optimizer, chain.units)
    console.plan([*rows, *_room(world, prepared.needs)], title="would run")


@contextmanager
def _cache_of_its_own(world: World) -> Iterator[str]:
    """The name of a folder for tokens, the same on all machines, which is gone afterwards."""
    folder = world.broadcast_text(str(Path(tempfile.gettempdir(), f"tawpipe-dry-run-{secrets.token_hex(6)}")))
    try:
        yield folder
        world.wait_patiently()  # others may still read there
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _threads_of_one(world: World) -> Iterator[None]:
    """As many threads for what is measured as one of the processes will have, which share the processors."""
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
    """The documents if they are few, else the first ones, as if they were streamed."""
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
    """What the run would go on from, as its manifest says. The files beside it, which a run compares with their hashes
    first, are not read.
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


def _dealt(prepared: Prepared, step: StepSpec) -> Bins:
    """The documents of the next step as they would be dealt.

    Args:
        step: any of the schedule.
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


def _room(world: World, needs: Needs | None) -> list[tuple[str, str]]:
    """Rows with the memory that is there, against what is needed."""
    machine = machine_unprobed(world)
    there = machine.most_memory - (needs.absent if needs else 0)
    if needs is None or not there:
        return [("available memory", f"{gib(there)} per process" if there else "unknown")]
    rows = [("available memory", f"{gib(there)} per process; the run uses {needs.device / there:.0%}")]
    if needs.host:
        rows.append(("available host memory", f"{gib(machine.host_bytes)} per node"))
    return rows
