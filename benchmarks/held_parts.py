"""Make the values of each part of held_equal.py, as plain keys and values.

Every part is a function of its piece and the number of pieces. Its values have no names of modules or classes, no paths
and no times.
"""

from __future__ import annotations

import io
import json
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

import choice
import generated
import optpipe
import plans as plan_cases
import solved as solved_cells
from cases import LENGTH, batches, llama
from family_configs import families, tiny_config
from model_families import FAMILIES, MORE_FAMILIES, family_config, meta_model
from pipelines import make_pipeline
from plan_requests import looking_at
from pool import WorkerPool
from prediction import Emulation
from runs import command, environment
from schedules import EVERY, group_sizes, step_for
from schedules import llama as llama_spec
from small import make_small
from tawpipe import adamw
from tawpipe.dealing.balance import PacksForm
from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.orders.arrange import arrange
from tawpipe.orders.generate import generate
from tawpipe.orders.solver.solve import heuristics, solve
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.search import search
from tawpipe.schedule.decode_steps import build_decode_steps
from tawpipe.schedule.pipelines.layout import Layout
from tawpipe.schedule.pipelines.work import makespan, play
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.spec import ModelSpec
from tawpipe.schedule.step import Schedule
from tawpipe.schedule.strategies.build import build, step_of_packs
from tawpipe.schedule.strategies.table import strategies
from tawpipe.topology import Topology
from tawpipe_lab.mixes import MIXES

Pairs = Iterator[tuple[str, Any]]


class WorkClock:
    """Stands still but for the solver's own count of work, so that limits of seconds end a search at the same place."""

    LEAST, RATE, MOST = 0.05, 5.0, 1.0
    """Seconds of a run of the solver at least, seconds for a unit of its count, and units of a run at most."""

    def __init__(self) -> None:
        self.now = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace the clocks of ``time``, and the solver's limit of seconds by a limit of work."""
        from ortools.sat.python import cp_model

        run = cp_model.CpSolver.solve

        def solve(solver: Any, *given: Any, **how: Any) -> Any:
            limits = solver.parameters
            work = min(limits.max_deterministic_time, limits.max_time_in_seconds / self.RATE, self.MOST)
            limits.max_deterministic_time, limits.max_time_in_seconds, limits.num_workers = work, 1e6, 1
            status = run(solver, *given, **how)
            self.now += max(self.LEAST, self.RATE * solver.response_proto.deterministic_time)
            return status

        with ExitStack() as stack:
            for name in ("monotonic", "perf_counter", "process_time", "thread_time"):
                stack.enter_context(patch.object(time, name, lambda: self.now))
            stack.enter_context(patch.object(cp_model.CpSolver, "solve", solve))
            yield


def digest(text: str | bytes) -> str:
    """Sixteen hexadecimal digits of a SHA-256."""
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def refusal(error: UserError) -> str:
    """A refusal as a user reads it."""
    return f"refused: {error}"


# schedules

DRAWN = 60
"""Schedules of every strategy with settings drawn at random, besides the grid."""
SIZES = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4))
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "lora": {"lora": True},
    "frozen": {"frozen": 2},
}
OPEN: dict[str, tuple[Any, ...]] = {
    "micro_batches_per_visit": (1, 2, 3),
    "look_ahead": (0, 1, 3),
    "gradient_buffers": (1, 3),
    "reuse": (True, False),
    "step_cache": (None, 0, 2, "all"),
    "gradients_scope": (None, "visit", "step"),
    "host_homes": ("none", "none", "state", "all"),
    "recompute": ("full", "full", "selective", "none", "none:1,selective:2,full"),
    "keep_mib": (None, None, 0, 1),
    "offloaded_layers": (0, 0, 2, 9),
    "weights_compression": ("none", "none", "int8", "exact"),
    "gradients_compression": ("none", "none", "fp8", "exact"),
    "early_updates": (False, True),
    "sequence_chunk": (None, 0, 4),
    "sequence_ranks": (None, 1, 2),
    "device_speeds": ("", "", "", "1x1,1x0.5"),
}
"""Settings of any strategy, and the values that are drawn."""
LAYOUTS = ("", "world", "nodes", "locals")


def packed(model: ModelSpec) -> ModelSpec:
    """The model with frozen units in 4 bits."""
    units = [one if one.trainable else replace(one, numel=one.numel // 2 + 9, packed=one.numel) for one in model.units]
    return replace(model, units=tuple(units))


def model_spec(kind: str, layers: int) -> ModelSpec:
    """A model of some layers; ``packed`` has adapters on a base of 4 bits."""
    return packed(llama_spec(layers, lora=True)) if kind == "packed" else llama_spec(layers, **MODELS[kind])


def ranks_of(schedule: Schedule) -> dict[str, str]:
    """A hash of every rank's program, one of what it holds, and one of the homes."""
    values = {}
    for rank in range(schedule.topology.world_size):
        pools = [f"{pool.name} {pool.kind.value} {pool.count} {pool.elements}" for pool in schedule.pools[rank]]
        values[f"rank {rank}"] = f"{digest(schedule.text(rank))} {digest(repr(pools))}"
    homes = [(home.ranks, home.shard_size, home.replicas) for home in schedule.homes]
    return values | {"homes": digest(repr(homes))}


def schedule_values(model: ModelSpec, topology: Topology, count: int, training: bool, **settings: Any) -> Any:
    """Hashes of a schedule, or its refusal."""
    try:
        return ranks_of(build(step_for(model, topology, count, **settings), training=training))
    except UserError as error:
        return refusal(error)


def schedules(piece: int, pieces: int) -> Pairs:
    """Programs of every strategy: a grid of sizes and models, settings drawn at random, bins, and laps."""
    yield "strategies", " ".join(strategies())
    for name, (nodes, local), kind in product(EVERY, SIZES, (*MODELS, "packed")):
        for training in (True, False):
            key = f"{name} {nodes}x{local} {kind} {'training' if training else 'evaluation'}"
            topology, count = Topology.grid(nodes, local), 3 * nodes * local
            yield key, schedule_values(model_spec(kind, 18), topology, count, training, strategy=name)
    for name, number in product(EVERY, range(DRAWN)):
        yield drawn_schedule(name, number)
    yield from bins_schedules()
    for ranks, groups, kind in product((1, 2, 3, 5), (1, 4, 7), ("plain", "tied")):
        laps = build_decode_steps(model_spec(kind, 6), Topology.grid(ranks, 1), groups)
        yield f"laps of {groups} groups on {ranks}, {kind}", ranks_of(laps)


def drawn_schedule(name: str, number: int) -> tuple[str, Any]:
    """A schedule with up to four settings that are drawn."""
    dice, strategy = random.Random(f"{name} {number}"), strategies()[name]
    nodes, local = dice.choice(SIZES)
    topology = Topology.grid(nodes, local)
    if number % 10 == 9:  # nodes of unequal sizes
        topology = Topology(((0, 1, 2), (3,))).evened()
    settings: dict[str, Any] = {}
    for setting in dice.sample(sorted(OPEN), dice.randint(0, 4)):
        value = dice.choice(OPEN[setting])
        settings[setting] = f"{topology.world_size}x1" if setting == "device_speeds" and value else value
        if setting == "device_speeds" and value and topology.world_size > 1:
            settings[setting] = f"1x1,{topology.world_size - 1}x0.5"
    if "groups" in strategy.uses:
        settings["groups"] = dice.choice(["", *group_sizes(topology)])
    if "stages" in strategy.uses:
        settings["stages"] = dice.choice(LAYOUTS)
    layers, count, kind = dice.randint(3, 20), dice.randint(1, 20), dice.choice((*MODELS, "packed"))
    model, training = model_spec(kind, layers), dice.random() < 0.7
    if strategy.places(topology) and dice.random() < 0.3:
        settings["homes"] = ",".join(str(dice.randrange(strategy.places(topology))) for _ in model.units)
    spelled = " ".join(f"{setting}={value}" for setting, value in sorted(settings.items()))
    key = f"{name} drawn {number}: {topology}, {kind} of {layers} layers, {count} micro-batches, "
    key += f"{'training' if training else 'evaluation'} {spelled}"
    return key.strip(), schedule_values(model, topology, count, training, strategy=name, **settings)


def bins_schedules() -> Pairs:
    """Schedules of packed micro-batches, some of which several ranks share or hold slices of a document."""
    forms = {"two rounds": PacksForm(0, 2), "shared": PacksForm(1, 2), "sliced": PacksForm(0, 5, ((3,),))}
    for name, (form, bins), ranks in product(EVERY, forms.items(), (1, 2)):
        settings = ScheduleSettings(strategy=name, sequence_ranks=ranks, micro_batches_per_visit=1)
        values: Any = None
        try:
            values = ranks_of(build(step_of_packs(model_spec("plain", 18), Topology.grid(2, 2), settings, bins)))
        except UserError as error:
            values = refusal(error)
        yield f"{name} bins {form}, sequence_ranks={ranks}", values


# training

LAYERS, STEPS = 4, 3
TRAINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "state in the host, early": {"host_homes": "state", "early_updates": True, "clip_norm": None},
    "all in the host": {"host_homes": "all"},
}
"""Runs of every strategy, by name."""
MORE_TRAINED: dict[str, dict[str, Any]] = {
    "adapters on nf4": {"lora": True, "quantize": "nf4"},
    "adapters on nf4, hsdp": {"lora": True, "quantize": "nf4", "strategy": "hsdp"},
    "bins": {"bin_tokens": 2 * LENGTH},
    "bins, kept": {"bin_tokens": 2 * LENGTH, "keep_mib": 1},
    "bins, shared": {"bin_tokens": 15, "sequence_ranks": 2},
    "bins, 1f1b": {"bin_tokens": 2 * LENGTH, "strategy": "1f1b"},
    "chunks": {"sequence_chunk": 7},
    "rows of two processes": {"sequence_ranks": 2},
    "offloaded": {"offloaded_layers": 3, "recompute": "selective"},
    "int8 between nodes": {"weights_compression": "int8", "gradients_compression": "int8"},
    "exact between nodes": {"strategy": "tawpipe-step", "weights_compression": "exact", "dtype": torch.bfloat16},
    "without reuse": {"reuse": False},
    "fp64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16, "recompute": "none"},
    "bfloat16, zero-bubble": {"strategy": "zero-bubble", "stages": "nodes", "dtype": torch.bfloat16},
}


def trained(world: Any, *, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Losses, norms and a hash of the final weights of every run, or its refusal."""
    values: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            values[name] = run_values(world, **case)
        except UserError as error:
            values[name] = refusal(error)
    return values


def run_values(world: Any, *, lora: bool = False, **settings: Any) -> dict[str, Any]:
    """Values of one run of a small model."""
    model: Any = llama(torch.float64 if settings.get("dtype") == torch.float64 else torch.float32, layers=LAYERS)
    torch.manual_seed(5)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters: Any = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, adapters)
    how = {"dtype": torch.float32, "optimizer": adamw(1e-2), **settings}
    pipeline = make_pipeline(model, world=world, strict=True, loss_chunk_tokens=8, **how)
    values: dict[str, Any] = {}
    try:
        for step, batch in enumerate(batches(8, STEPS)):
            result = pipeline.step(documents_of(pipeline, batch) if "bin_tokens" in settings else batch)
            values[f"step {step}"] = f"{result.loss!r} {result.grad_norm!r}"
        if "bin_tokens" not in settings:
            values["evaluation"] = repr(pipeline.evaluate(batches(4, 1)[0]).loss)
        weights = sha256()
        for name in sorted(pipeline.parameter_names):
            if (value := pipeline.parameter(name)) is None:  # other ranks than the first
                continue
            weights.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        values["weights"] = weights.hexdigest()[:16]
    finally:
        pipeline.close()
    return values


def documents_of(pipeline: Any, batch: Mapping[str, torch.Tensor]) -> Any:
    """A batch's rows as documents of different lengths, packed."""
    lengths = [LENGTH - 2 * row for row in range(len(batch["input_ids"]))]
    made = [
        MicroBatch.of_documents(ids[None, :length], labels[None, :length], [length])
        for ids, labels, length in zip(batch["input_ids"], batch["labels"], lengths, strict=True)
    ]
    return pipeline.part_of_documents(lengths, made.__getitem__)


def training(piece: int, pieces: int) -> Pairs:
    """Runs of three steps on 2 x 2 processes."""
    cases = {f"{name}, {how}": {"strategy": name, **case} for name in EVERY for how, case in TRAINED.items()}
    for case in cases.values():
        if case["strategy"] in ("interleaved-1f1b", "zero-bubble"):
            case["stages"] = "nodes"
    workers = WorkerPool()
    try:
        for name, case in (cases | MORE_TRAINED).items():
            first, *_ = workers.run("held_parts:trained", 2, 2, cases={name: case})
            yield from first.items()
    finally:
        workers.close()


# orders

SOLVED_S, KEEP_TRIES = 4.0, 2000
"""Seconds of the solver by ``WorkClock``, and tries of annealing."""


def orders(piece: int, pieces: int) -> Pairs:
    """Searched stages and orders: of layers of unequal costs, and under a limit of memory."""
    cells = [*unequal_layers(), *limited_cells()]
    for key, make in cells[piece::pieces]:
        with WorkClock().running():
            try:
                yield key, make()
            except UserError as error:
                yield key, refusal(error)


def unequal_layers() -> Pairs:
    """Cells of generated.py: mix, positions x micro-batches."""
    for mix, cell in product(("nemotron", "gemma", "dense-and-experts"), ("4x8", "6x30")):
        positions, count = map(int, cell.split("x"))

        def make(mix: str = mix, positions: int = positions, count: int = count) -> Any:
            costs = optpipe.PipelineCosts(MIXES[mix]())
            made = generate(costs, positions, count)
            values = {"generated": spelled(made, arrange(made, costs, count), costs)}
            for name, length, layout in generated.Cell(costs, positions, count).fixed():
                values[name] = {"length": length, "layout": layout}
            return values

        yield f"{mix} {cell}", make


def limited_cells() -> Pairs:
    """Cells of solved.py and optpipe.py with the solver's orders."""
    for share, uneven in product((1.0, 0.5), (False, True)):
        cell = solved_cells.Cell(4, 8, share, 1.0, uneven)

        def make(cell: Any = cell) -> Any:
            layout, costs = cell.problem()
            ways = heuristics(layout, costs, cell.micro_batches)
            values = {name: spelled(layout, order, costs) for name, order in ways.items()}
            best = solve(layout, costs, cell.micro_batches, seconds=SOLVED_S, seed=0)
            return values | {"solved": spelled(layout, best.order, costs) | {"bound": best.bound}}

        yield f"solved {cell.name}", make
    for cell in optpipe.CELLS[2:3]:

        def choose(cell: Any = cell) -> Any:
            lengths, _ = optpipe.uniform(cell.tokens, cell.share)
            with patch.object(optpipe, "TRIES", KEEP_TRIES):
                kept = optpipe.chosen(cell.tokens, cell.share, cell.link)
            values = {name: {"length": length} for name, length in lengths.items()}
            kept_values = spelled(kept.choice.layout, kept.order, kept.costs) | {"recompute": kept.choice.recompute}
            return values | {"kept": kept_values}

        yield f"optpipe {cell.name}", choose


def spelled(layout: Layout, order: Any, costs: Any) -> dict[str, Any]:
    """A layout, its order and the time of a step."""
    return {"layout": str(layout), "order": str(order), "length": makespan(play(layout, order, costs))}


# plans

QUICK = tuple(name for name in EVERY if name not in ("zero-bubble", "generated", "solved"))
"""Strategies in the cases of plans.py: searches for orders of the others take minutes there, and are in ``orders`` and,
for small models, in the cells of choice.py.
"""
LEFT_OUT = (1, 2, 5, 7, 9, 13, 18, 20, 22, 23, 24, 29)
"""Numbers of cases of plans.py that are left out, for the whole to take minutes: those of most rows."""
CHOICES = 8
"""Cells of choice.py."""


def plans(piece: int, pieces: int) -> Pairs:
    """Every candidate of the plans of plans.py and choice.py."""
    cases = [case for number, case in enumerate(plan_cases.CASES) if number not in LEFT_OUT]
    for model, nodes, local, gbit, tokens, rows in cases[piece::pieces]:
        case = {**plan_cases.PLAIN, "model": plan_cases.MODELS[model], "nodes": [local] * nodes, "gbit": gbit}
        case |= {"memory_gib": 76, "tokens": tokens, "rows": rows}
        key = f"{model}, {nodes}x{local} at {gbit:g} Gbit/s, {rows} rows of {tokens}"
        with WorkClock().running(), looking_at(*QUICK):
            yield key, plan_values(plan_cases.ask(case))
    dice = random.Random(7)
    for number in range(CHOICES):
        cell = choice.draw_cell(dice, number)
        limit = choice.limit_of(cell, Emulation(), dice)
        if number % pieces == piece:
            with WorkClock().running():
                yield f"choice {cell.name}", plan_values(choice.request_of(cell, Emulation(), memory_bytes=limit))


def plan_values(request: Any) -> dict[str, Any]:
    """A plan's candidates and its choice, digit by digit."""
    plan = Plan.of(request, search(request))
    values: dict[str, Any] = {"order": " ".join(one.strategy for one in plan.candidates)}
    values["chosen"] = plan.chosen.strategy if plan.chosen else None
    values["runner-up"] = plan.runner_up.strategy if plan.runner_up else None
    values["as fast"] = " ".join(one.strategy for one in plan.as_fast)
    for one in plan.candidates:
        settings = {name: str(value) for name, value in one.chosen_settings().items()}
        found = {"fits": one.fits, "why_not": str(one.why_not), "settings": settings}
        if (said := one.prediction) is not None:
            found |= {"seconds": said.step_seconds, "bound": said.bound_s, "idle": said.idle_s}
            found |= {"exposed": said.exposed_communication_s, "link bytes": said.link_bytes}
            found |= {"memory": dict(said.memory), "host": said.needs.host, "files": said.needs.files}
        values[one.strategy] = found
    return values


# files


def files(piece: int, pieces: int) -> Pairs:
    """Names of the files of a run and of a plan, with the names and types of the values in them."""
    with tempfile.TemporaryDirectory(prefix="held-equal-") as folder:
        home = Path(folder)
        make_small(home, files=20, layers=4, positions=64)
        checked(command(home, "run", "--nproc", "2", "--nodes", "2"), "train")
        sizes = ("--sequence-length", "64", "--global-batch", "6", "--topology", "2x2@1gbit", "--device-name", "H100")
        saved = ("--save", str(home / "plan.yaml"))
        checked(["-m", "tawpipe", "plan", "--model", str(home / "model"), *sizes, *saved], "plan")
        for path in sorted((home / "run").rglob("*")):
            if path.is_file():
                yield f"run/{path.relative_to(home / 'run')}", " ".join(keys_of(path))
        yield "plan", " ".join(keys_of(home / "plan.yaml"))


def checked(words: Sequence[str], what: str) -> None:
    """Run a command.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    done = subprocess.run([sys.executable, *words], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def keys_of(path: Path) -> list[str]:
    """Names and types of the values of a file of text, or of the tensors of a file of weights."""
    data = path.read_bytes()
    if path.suffix == ".jsonl":
        return sorted({key for line in data.decode().splitlines() for key in typed(json.loads(line))})
    if path.suffix == ".json":
        return sorted(set(typed(json.loads(data))))
    if path.suffix in (".yaml", ".yml"):
        return sorted(set(typed(yaml.safe_load(data))))
    if path.suffix == ".safetensors":
        (length,) = struct.unpack("<Q", data[:8])
        return sorted(json.loads(data[8 : 8 + length]))
    return []


def typed(value: Any, at: str = "") -> Iterator[str]:
    """``key.key:type`` of every plain value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from typed(inner, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from typed(inner, f"{at}[]")
    else:
        yield f"{at}:{type(value).__name__}"


# models


def models(piece: int, pieces: int) -> Pairs:
    """Units of small models, and what tested.py lists."""
    from tawpipe.model.tested import TESTED_FAMILIES

    yield "tested", " ".join(sorted(TESTED_FAMILIES))
    for name in (*FAMILIES, *MORE_FAMILIES):
        yield name, units_of(family_config(name))
    for name in families():
        if name in TESTED_FAMILIES:
            yield f"tiny {name}", units_of(tiny_config(name))


def units_of(config: Any) -> Any:
    """Names, sizes and blocks of a model's units, and how it may be run, or its refusal."""
    try:
        with redirect_stdout(io.StringIO()):
            chain = Chain(meta_model(config))
    except UserError as error:
        return refusal(error)
    values = {unit.name: f"{unit.numel} in {unit.blocks}" for unit in chain.units}
    return values | {"layers": chain.path, "chunks": chain.why_not_chunks, "sets": chain.why_not_cp_groups}
