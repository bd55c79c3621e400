"""``tawpipe train --dry-run``: what a run checks before its first step, and what would then happen.

It looks with one process, or with those that torchrun has started, which then measure their links as the run does. The
model stays on the meta device. Documents are tokenised into a temporary folder: all of them if they are few, else the
first ones. ``run`` reads alike, and every check that both make is one function.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tawpipe.checkpoint.format import read_manifest
from tawpipe.checkpoint.names import complete_states
from tawpipe.checkpoint.resume import RunState
from tawpipe.console import Console
from tawpipe.data.prepared import PreparedData
from tawpipe.data.sources import find_sets
from tawpipe.data.tokenizer import vocabulary_size
from tawpipe.launch.launcher import Shape
from tawpipe.model.attention_kernel import activate_flash, kernel_of_model
from tawpipe.model.build import BuiltModel, text_config_of
from tawpipe.model.chain import Chain
from tawpipe.model.flops import work_of
from tawpipe.model.refuse import settle_mtp
from tawpipe.options import Open
from tawpipe.pipeline.refuse import refuse_cut_rows, refuse_settings, refuse_strategy
from tawpipe.pipeline.schedules import Schedules
from tawpipe.plan.machine import Machine
from tawpipe.plan.measure import INSIDE
from tawpipe.plan.predict import Needs
from tawpipe.plan.probe import machine_unprobed
from tawpipe.plan.updates import states_of
from tawpipe.runtime.dtype import DTYPES, chosen_dtype
from tawpipe.runtime.world import World, connect, pick_device
from tawpipe.schedule.balance import Bins, deal
from tawpipe.schedule.footprint import Costs, Widths, costs
from tawpipe.schedule.sharing import share_in_sets
from tawpipe.topology import Topology
from tawpipe.train.checks import check_steps, faults_of, naming_documents
from tawpipe.train.config import TrainConfig
from tawpipe.train.memory import check_memory, with_room_to_keep
from tawpipe.train.optimizers import factory_of
from tawpipe.train.planned import check_model, follow_plan, probed, work_of_plan
from tawpipe.train.recipe import RECIPES, settle
from tawpipe.train.start import (
    build,
    check_start,
    documents_of,
    refuse_other_form,
    refuse_other_run,
    start_of,
    typical_lengths,
    with_packing,
)
from tawpipe.train.words import device_name, gib, plan_rows, without_effect

FEW_BYTES = 4 << 20
"""Of files whose documents are all tokenised."""
FIRST_DOCUMENTS = 128
"""Of larger ones, so many are."""
ASSUMED = (
    "links: {rate:.3g} GB/s assumed, as they are measured by several processes only: the run measures them, and may "
    "choose another strategy"
)


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
    console.line("dry run: nothing speaks against this run; nothing was started and nothing was written")
    world.leave()
    return 0


def _examine(config: TrainConfig, world: World, console: Console, cache: str) -> None:
    console.topology(f"{world.nodes} on {device_name(world)}")
    _ = share_in_sets(0, world.topology, config.schedule)
    refuse_settings(
        config.schedule,
        clip_norm=config.optimizer.clip_norm or None,
        compile_layers=config.compile,
        quantize=config.quantize,
    )
    _ = _chain_of(config, build(config, longest=1))  # what is wrong with a model is said before documents are read
    data = _some_documents(config, world, console, cache)
    config = with_packing(config, data, world)
    _ = faults_of(config, world.size)
    state, place, manifest = _checkpoint(config)
    if state is not None:
        refuse_other_form(config, manifest, place)
    config = _settled(config, data, state, console)
    vocab_size = vocabulary_size(data.tokenizer)
    dtype, why = chosen_dtype(config.dtype, world, state.dtype if state is not None else "")
    config = replace(config, dtype=dtype)
    activate_flash(world.device, DTYPES[dtype], lambda: text_config_of(config.model, config.trust_remote_code))

    measure = _machine_of_one if world.group is None and world.size > 1 else probed
    followed = follow_plan(
        config,
        world,
        state,
        vocab_size=vocab_size,
        dtype=DTYPES[dtype],
        lengths=lambda: typical_lengths(data, config),
        tell=console.line,
        measure=measure,
        show=lambda plan: console.line("\n".join(f"  {line}" for line in plan.table())),
    )
    config = followed.config
    if followed.line:
        console.line(followed.line)
    if followed.request is not None and measure is _machine_of_one:
        console.notice(ASSUMED.format(rate=followed.request.machine.inside.bytes_per_s / 1e9))
    needs = check_memory(
        config,
        world,
        vocab_size=vocab_size,
        dtype=DTYPES[dtype],
        lengths=typical_lengths(data, config),
        request=followed.request,
        tell=console.notice,
        measure=measure,
    )
    config, needs = with_room_to_keep(config, world, needs)

    with naming_documents(config):
        built = build(config, vocab_size=vocab_size, longest=data.longest)
    _ = check_start(config, built, data)
    chain = _chain_of(config, built)
    if state is not None:
        refuse_other_run(config, state, chain, place)
    text, names = chain.config.get_text_config(), [slot.name for unit in chain.units for slot in unit.slots]
    kernel = kernel_of_model(text, names, world.device, DTYPES[dtype])
    chain.quantise(config.quantize, DTYPES[dtype])
    check_model(followed.text, chain.spec)
    schedules = Schedules(config.schedule, chain.spec, world)
    refuse_strategy(chain, schedules.smallest, optimizer=factory_of(config), compile_layers=config.compile)
    for name in without_effect(config, world):
        console.notice(f"--schedule.{name.replace('_', '-')} has no effect on one node: nothing crosses a slow link")

    bins = None
    if config.packing == "balanced":
        bins = _dealt(config, data, chain, world, state, followed.text)
    said = _costs(config, chain, schedules, bins, DTYPES[dtype], world.nodes)
    rows = plan_rows(
        config, said, bins, data, world.nodes, needs, [("dtype", f"{dtype} ({why})"), ("attention", kernel)]
    )
    weights = f"resumed from {place}, step {state.step}" if state is not None else built.origin(seed=config.seed)
    rows.insert(1, ("weights", weights))
    console.plan([*_without_activations(rows, needs), *_room(world, needs)], title="would run")


def _chain_of(config: TrainConfig, built: BuiltModel) -> Chain:
    """The model as a pipeline takes it.

    Raises:
        UserError: it takes it not.
    """
    chain = Chain(built.model)
    settle_mtp(chain.model, without=config.without_mtp)
    refuse_cut_rows(chain, config.schedule)
    return chain


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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // world.size))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _some_documents(config: TrainConfig, world: World, console: Console, cache: str) -> PreparedData:
    """The documents if they are few, else the first ones, as if they were streamed."""
    files = [file for one in find_sets(config.data) for file in one.files]
    some = replace(config, cache_dir=cache)
    if any(file.format == "hub" for file in files) or sum(file.size for file in files) > FEW_BYTES:
        most = min(config.stream_window, FIRST_DOCUMENTS)
        some = replace(some, streaming=True, stream_window=most)
        if not config.streaming:
            console.line(f"data: a look at the first {most} documents; the run reads all of them")
    return documents_of(some, world, console)


def _checkpoint(config: TrainConfig) -> tuple[RunState | None, str, dict[str, Any]]:
    """What the run would go on from, as its manifest says: nothing, or its state, its folder and the manifest. The
    files beside it, which a run compares with their hashes first, are not read.
    """
    if config.resume == "none":
        return None, "", {}
    folders = [Path(config.resume)]
    if config.resume == "auto":
        folders = complete_states(config.output_path / "checkpoints")[-1:]
    for folder in folders:
        manifest = read_manifest(folder)
        return RunState.of(manifest, str(folder)), str(folder), manifest
    return None, "", {}


def _settled(config: TrainConfig, data: PreparedData, state: RunState | None, console: Console) -> TrainConfig:
    """Nothing is left open; where only some documents were read, steps that are counted in epochs are not known."""
    start = start_of(config)
    epochs = config.epochs or (RECIPES[start].epochs if isinstance(config.steps, Open) else None)
    counted = None if data.report.streamed and not config.streaming else epochs
    if epochs and not counted and not (state is not None and state.settled.get("steps")):
        config = replace(config, epochs=None, steps=int(config.steps))
        console.line(f"steps: {epochs} epoch{'s' if epochs != 1 else ''}, counted when all documents are there")
    config, chosen = settle(
        config,
        start,
        lambda times: data.steps_in(times, rows=config.global_batch, tokens=config.step_tokens),
        state.settled if state is not None else None,
    )
    if chosen:
        console.line(chosen)
    if counted or not epochs:
        check_steps(config)
    return config


def _machine_of_one(world: World) -> Machine:
    """The machine as one process knows it, which has nobody to measure links with: they are taken to be usual."""
    usual = INSIDE["GPU" if world.device.type == "cuda" else "CPU"]
    alone = probed(World(Topology.grid(1, 1), 0, world.device, None))
    return replace(machine_unprobed(world), inside=usual, between=usual, host=alone.host)


def _dealt(
    config: TrainConfig, data: PreparedData, chain: Chain, world: World, state: RunState | None, plan: str
) -> Bins:
    """The documents of the next step as they would be dealt."""
    assert config.bin_tokens is not None
    return deal(
        data.train.step(state.samples if state is not None else 0, config.step_tokens).lengths,
        world_size=world.size,
        cap=config.bin_tokens,
        work=work_of_plan(plan) or work_of(chain),
        ranks=config.schedule.sequence_ranks or 1,
    )


def _costs(
    config: TrainConfig,
    chain: Chain,
    schedules: Schedules,
    bins: Bins | None,
    dtype: torch.dtype,
    nodes: Topology,
) -> Costs:
    """What a step costs by its schedule, which is proved; without activations, which no schedule knows."""
    count = math.ceil(config.global_batch / config.micro_batch) if bins is None else bins.shape
    wide = torch.promote_types(dtype, torch.float32)
    reduce = dtype if config.schedule.reduce_dtype == "same" else wide
    states = states_of(factory_of(config), chain.units)
    widths = Widths(dtype.itemsize, reduce.itemsize, wide.itemsize, states, unpacked=chain.unpacked_elements)
    return costs(schedules.of(count, training=True), widths, activation_bytes={}, nodes=nodes)


def _without_activations(rows: list[tuple[str, str]], needs: Needs | None) -> list[tuple[str, str]]:
    return [row for row in rows if needs is not None or row[0] != "activations"]


def _room(world: World, needs: Needs | None) -> list[tuple[str, str]]:
    """Rows with the memory that is there, against what is needed."""
    machine = machine_unprobed(world)
    there = machine.device.memory_bytes
    rows = [("memory there", f"{gib(there)} per process" if there else "not known")]
    if needs is not None and there:
        rows[0] = ("memory there", f"{rows[0][1]}, of which the run takes {needs.device / there:.0%}")
    if needs is not None and needs.host:
        rows.append(("host memory", f"{gib(needs.host)} of {gib(machine.host_bytes)} of a node"))
    if needs is not None and needs.files:
        rows.append(("files", f"{gib(needs.files)} of a node's disk"))
    return rows
