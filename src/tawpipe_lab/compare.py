"""Measure a suite: one cluster per cell, all strategies in one launch, one row of results per strategy with its bounds.

``compare`` writes ``results.json`` (a format on which other programs rely) and a Markdown table.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tawpipe.errors import RunError, UserError
from tawpipe.schedule.sizes.footprint import Widths, costs
from tawpipe.schedule.spec import change_width
from tawpipe.serving.planner import HAND_S
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import (
    PIPELINES,
    Bounds,
    activation_sizes,
    schedule_bounds,
    schedule_bytes,
    shipped_bounds,
    workload_costs,
    workload_model,
)
from tawpipe_lab.cluster.cluster import Cluster
from tawpipe_lab.cluster.links import Links
from tawpipe_lab.cluster.rates import parse_latency, parse_rates
from tawpipe_lab.lengths import DealtWorkload, dealt
from tawpipe_lab.real_modules import real_model_spec
from tawpipe_lab.rivals import fsdp
from tawpipe_lab.rivals.traffic import pipeline_bytes, sharded_traffic, stages_per_rank
from tawpipe_lab.serving import ROWS, groups_of, planned, serving_bounds, serving_knobs
from tawpipe_lab.suite import Cell, Entry, Suite
from tawpipe_lab.table import write_table
from tawpipe_lab.workload import LengthsWorkload, RealWorkload, ServingWorkload, TimedWorkload, spell_out

CLUSTER = "tawpipe-compare"
TRACES = "traces"
ONE_NUMBER = ("seconds", "cpu_busy", "exposed", "idle_start", "idle_end", "token", "first")
"""Names of a worker's measurements that are one number per step; rows hold their median over the steps."""
BUSIEST = 0.6
"""Largest share of busy processors for a valid row. Above it a row measures the machine and not the network, and is
void."""
LARGEST_DIFFERENCE = 1e-4
"""Largest relative difference between the losses of two strategies for which they count as equal training."""
PAYLOAD = 0.99
"""Assumed share of payload in a link's bytes if the link was not measured. Headers take the rest."""


def compare(
    suite: Suite, out: Path, *, traces: bool = False, resume: bool = False, tell: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Measure all cells of a suite, write the results, and return the rows.

    Results are written after every cell.

    Args:
        suite: cells and strategies to measure.
        out: output folder, created if needed. Results of an earlier run in it are replaced.
        traces: record one step of every strategy that runs in this project's runtime, into ``out/traces``.
        resume: keep the rows of cells that an earlier run into ``out`` has measured, and measure only the other cells.
        tell: called with one line of text per launch and per row.

    Raises:
        UserError: the process is not root, a tool is missing, or a cell cannot be built.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = _earlier_rows(suite, out) if resume else []
    if not resume:
        shutil.rmtree(out / TRACES, ignore_errors=True)
    measured = {row["cell"]["name"] for row in rows}
    for cell in suite.cells:
        if cell.name in measured:
            tell(f"cell {cell.name}: measured before")
            continue
        late = f" and {cell.latency} of latency" if cell.latency else ""
        tell(f"cell {cell.name}: {cell.nodes} nodes x {cell.local} at {cell.rate}{late}")
        for row in _measure_cell(suite, cell, tell, out / TRACES if traces else None):
            row |= disturbance(row, rows)
            rows.append(row)
            tell(_line(row))
        write_results(suite, rows, out)
    return rows


def _earlier_rows(suite: Suite, out: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier run in ``out`` whose cells need not be measured again; ``[]`` without results.

    A cell is kept if its settings are unchanged and a row exists for each of its strategies.

    Raises:
        UserError: the results cannot be read, or belong to another suite.
    """
    path = out / "results.json"
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        known = {cell.name: cell.spelled_out() for cell in suite.cells}
        good = all(row["suite"] == suite.name for row in rows)
        kept = [row for row in rows if row["cell"] == json.loads(json.dumps(known.get(row["cell"]["name"])))]
        wanted = {cell.name: {entry.label for entry in cell.strategies or suite.strategies} for cell in suite.cells}
        labels = {name: {row["label"] for row in kept if row["cell"]["name"] == name} for name in known}
        kept = [row for row in kept if row["label"] in wanted[(name := row["cell"]["name"])] <= labels[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("--resume", str(path), f"results that `tawpipe lab compare` wrote ({error!r})") from error
    if not good:
        raise UserError("--resume", str(path), f"results of the suite {suite.name}")
    return kept


def write_results(suite: Suite, rows: list[dict[str, Any]], out: Path) -> None:
    """Write ``results.json`` and ``table.md`` into the folder ``out``, with versions, machine, command and date."""
    environment = {
        "versions": {name: version(name) for name in ("tawpipe", "torch")} | {"python": platform.python_version()},
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release().split('-')[0]}",
        "command": shlex.join(["tawpipe", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    content = {"environment": environment, "rows": rows}
    (out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_table(suite.name, environment, rows, out / "table.md")


def _measure_cell(suite: Suite, cell: Cell, tell: Callable[[str], None], traces: Path | None) -> list[dict[str, Any]]:
    """Build a cluster for one cell, measure every strategy in it, and return one row per strategy.

    All strategies share one launch (each has its own if ``suite.alone``). If a strategy ends a launch, its row is
    marked as failed, and the launch is repeated without it. Peak memory is measured in separate launches if
    ``suite.memory``.

    Args:
        suite: the strategies, and how they are measured.
        cell: cluster and workload.
        tell: called with lines of text about links and failures.
        traces: folder to which recorded timelines are copied; None to record none.
    """
    topology = Topology.grid(cell.nodes, cell.local)
    failed: dict[int, str] = {}
    readings: dict[int, dict[str, Any]] = {}
    with (
        Cluster.create(cell.nodes, rate=cell.rate, latency=cell.latency, name=CLUSTER) as cluster,
        tempfile.TemporaryDirectory(prefix="tawpipe-compare-") as folder,
    ):
        links = cluster.links(message_sizes(cell))
        if links is not None:
            tell(f"  links: {links}" + (f"; {links.trouble}" if links.trouble else ""))
        between = link_of(cell, links)
        entries = [*(cell.strategies or suite.strategies)]
        for i, entry in enumerate(entries):
            try:
                knobs = serving_knobs(entry.strategy, cell.workload, topology, between)
                knobs |= ours.search_knobs(entry.strategy, cell.workload, topology, entry.all_knobs, between)
                entries[i] = replace(entry, searched={**entry.searched, **knobs})
            except UserError as error:
                failed[i] = str(error)
        suite = replace(suite, strategies=tuple(entries))
        done: set[int] = set()
        while len(failed) + len(done) < len(suite.strategies):
            tried = [i for i in range(len(suite.strategies)) if i not in failed and i not in done]
            tried = tried[: 1 if suite.alone else None]
            samples = {"warmup": suite.warmup, "samples": suite.samples, "traces": traces is not None}
            ended = _launch(cluster, Path(folder), suite, cell, tried, **samples)
            if isinstance(ended, list):
                readings |= dict(zip(tried, ended, strict=True))
                done.update(tried)
                for number, i in enumerate(tried):
                    if traces is not None and (recording := Path(folder) / TRACES / str(number)).is_dir():
                        name = f"{cell.name} {suite.strategies[i].label}"
                        target = traces / re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")
                        shutil.rmtree(target, ignore_errors=True)
                        shutil.copytree(recording, target)
                continue
            number, reason = ended
            tell(f"  {suite.strategies[number].label} ended the launch: {reason}")
            failed[number] = reason
    running = [i for i, reading in readings.items() if not reading["failed"]]
    for i, peak in _measure_memory(suite, cell, running).items() if suite.memory and not suite.alone else ():
        readings[i]["peak_bytes"] = peak
    rows = []
    for i, entry in enumerate(suite.strategies):
        reading = readings.get(i, {"failed": failed.get(i, "not run")})
        row = _row(suite, cell, topology, entry, reading, between)
        if links is not None:
            row |= {"links": links.spelled_out(), "reason": row["reason"] or links.trouble}
        rows.append(row)
    check_losses(rows)
    return rows


def _measure_memory(suite: Suite, cell: Cell, measured: list[int]) -> dict[int, list[float]]:
    """Measure the peak memory of every rank in a new cluster, with a separate launch for each strategy.

    Each launch runs two steps on unshaped links with computing 20 times as fast, because memory does not depend on
    times. A real workload computes as fast as usual.

    Args:
        suite: the strategies.
        cell: cluster and workload.
        measured: indices of the strategies in ``suite``.

    Returns:
        Index of a strategy -> peak bytes per rank; an empty list if its launch failed.
    """
    fast = cell.workload
    if not isinstance(fast, RealWorkload):
        fast = fast.faster(20)
    peaks: dict[int, list[float]] = {}
    with (
        Cluster.create(cell.nodes, rate="none", name=CLUSTER) as cluster,
        tempfile.TemporaryDirectory(prefix="tawpipe-compare-") as folder,
    ):
        for i in measured:
            quick = replace(cell, workload=fast, slow=None)
            try:
                alone = _launch(cluster, Path(folder), suite, quick, [i], warmup=0, samples=2)
            except RunError:  # the row keeps its times
                alone = None
            peaks[i] = alone[0]["peak_bytes"] if isinstance(alone, list) else []
    return peaks


def _launch(
    cluster: Cluster,
    folder: Path,
    suite: Suite,
    cell: Cell,
    tried: list[int],
    *,
    warmup: int,
    samples: int,
    traces: bool = False,
) -> list[dict[str, Any]] | tuple[int, str]:
    """Start all ranks of a cell once, measure the strategies ``tried`` in this launch, and return a reading for each.

    The readings are in the order of ``tried``. If the launch fails while a strategy runs, return (index of this
    strategy in ``suite``, reason) instead.

    Args:
        cluster: cluster of the cell.
        folder: folder for the job file, the result file and traces.
        suite: the strategies.
        cell: cluster and workload.
        tried: indices of the strategies in ``suite``.
        warmup: number of steps before those that are measured.
        samples: number of measured samples per strategy.
        traces: record one more step of every strategy that can be recorded.

    Raises:
        RunError: the launch failed before any strategy ran.
    """
    job, result = folder / "job.json", folder / "result.json"
    running = Path(f"{result}.running")
    result.unlink(missing_ok=True)
    running.unlink(missing_ok=True)
    shutil.rmtree(folder / TRACES, ignore_errors=True)  # an earlier launch numbered its strategies differently
    entries = [asdict(suite.strategies[i]) for i in tried]
    content = {
        "workload": spell_out(cell.workload),
        "slow": cell.slow and asdict(cell.slow),
        "speeds": cell.device_speeds,
        "steps_in_a_row": cell.steps_in_a_row,
        "entries": entries,
        "warmup": warmup,
        "samples": samples,
        "traces": str(folder / TRACES) if traces else "",
    }
    job.write_text(json.dumps(content), encoding="utf-8")
    command = [sys.executable, "-m", "tawpipe_lab.worker", str(job), str(result)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch would warn on every rank that a node has no name service
        "MALLOC_MMAP_THRESHOLD_": "65536",  # return freed blocks to the system, or memory grows
    }
    try:
        cluster.launch(command, local=cell.local, env=environment)
    except RunError as error:
        if not running.exists():
            raise
        return tried[int(running.read_text())], str(error)
    return json.loads(result.read_text(encoding="utf-8"))


def message_sizes(cell: Cell) -> tuple[int, ...]:
    """Return the sizes in bytes of typical messages of a cell, ascending.

    For training these are the largest unit, the share of it that one rank owns, and an activation. For serving they are
    a pass without and a pass with a chunk of a prompt.
    """
    workload = cell.workload
    if isinstance(workload, ServingWorkload):
        return tuple(tokens * workload.token_bytes for tokens in (workload.slots, workload.slots + workload.chunk))
    if isinstance(workload, RealWorkload):
        model = real_model_spec(workload)
    else:
        whole = workload if isinstance(workload, TimedWorkload) else dealt(workload, "in turn", Topology.grid(1, 1))
        model = workload_model(whole)
    unit = 4 * max(unit.numel for unit in model.units)
    activation = getattr(workload, "activation_bytes", 0)
    return tuple(sorted({size for size in (unit // (cell.nodes * cell.local), unit, activation) if size}))


def links_of(cell: Cell) -> Links | None:
    """Build the cluster of ``cell``, measure its links, and remove it; return None if there is one node."""
    with Cluster.create(cell.nodes, rate=cell.rate, latency=cell.latency, name=CLUSTER) as cluster:
        return cluster.links(message_sizes(cell))


def link_of(cell: Cell, links: Links | None = None) -> LinkModel:
    """Return rate and latency of the slowest link between the nodes of a cell.

    Args:
        cell: cluster and workload.
        links: measured links; None to derive rate and latency from the settings of the cell.
    """
    if links is not None:
        return LinkModel(links.bytes_per_s, links.latency_s)
    rates = [rate for rate in parse_rates(cell.rate, nodes=cell.nodes) if rate is not None]
    return LinkModel(min(rates) / 8 * PAYLOAD if rates else 1e10, parse_latency(cell.latency))


@dataclass(frozen=True)
class LinkBounds:
    """Bounds of a strategy on a real workload, from its bytes alone; fields as in ``Bounds``."""

    physical_s: float
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]
    dependency_s: None = None


def bounds_of(cell: Cell, entry: Entry, between: LinkModel) -> Bounds | LinkBounds:
    """Return lower bounds of the seconds of a step, and of the bytes on links, for a strategy in a cell.

    Args:
        cell: cluster and workload.
        entry: strategy with its knobs.
        between: link between the nodes.

    Raises:
        UserError: the strategy is unknown, or cannot run in this cell.
    """
    topology = Topology.grid(cell.nodes, cell.local)
    if isinstance(cell.workload, ServingWorkload):
        if entry.strategy not in ROWS:
            raise UserError("strategy", entry.strategy, f"one of {', '.join(ROWS)}, which serve")
        groups = entry.all_knobs.get("groups") or groups_of(entry.strategy, cell.workload, topology, between)
        return serving_bounds(cell.workload, topology, between, groups)
    if isinstance(cell.workload, RealWorkload):
        return _real_bounds(entry.strategy, cell.workload, topology, between, entry.all_knobs)
    if entry.strategy in ours.rows():
        schedule = ours.schedule_of(entry.strategy, cell.workload, topology, entry.all_knobs)
        workload = ours.computed(entry.strategy, cell.workload, topology, entry.all_knobs)
        assert isinstance(workload, TimedWorkload)
        settings = ours.settings_of(entry.strategy, entry.all_knobs)
        arguments: dict[str, Any] = dict.fromkeys(("weight_bytes", "gradient_bytes"), settings.element_bytes)
        if settings.changes:
            arguments["change_bytes"] = change_width(float(Path(settings.changes).stem))
        arguments["compute_factor"] = {rank: 1 / speed for rank, speed in enumerate(cell.device_speeds)}
        costs = workload_costs(workload, between=between, inside=ours.INSIDE, reduce_scatter="ring", **arguments)
        of_documents = workload if isinstance(workload, DealtWorkload) else None
        return schedule_bounds(schedule, costs, physical=topology, dealt=of_documents, steady=cell.steps_in_a_row > 1)
    whole = cell.workload
    if cell.speeds:  # `shipped_bounds` knows one speed: the mean of all devices
        whole = whole.faster(statistics.fmean(cell.device_speeds))
    packing = entry.all_knobs.get("packing", "in turn")
    timed = dealt(whole, packing, topology) if isinstance(whole, LengthsWorkload) else whole
    return shipped_bounds(entry.strategy, timed, topology, between, entry.all_knobs)


def _real_bounds(
    name: str, workload: RealWorkload, topology: Topology, between: LinkModel, knobs: Mapping[str, Any]
) -> LinkBounds:
    """Return the bounds of a strategy on a real workload, from the bytes that its links carry.

    FSDP2 keeps the head from the forward to the backward pass, and the embedding from one round to the next.

    Args:
        name: strategy.
        workload: the real workload.
        topology: ranks and nodes.
        between: link between the nodes.
        knobs: knobs of the strategy.

    Raises:
        UserError: the strategy is unknown.
    """
    amount = workload.micro_batches * workload.activation_bytes
    if name in ours.rows():
        schedule = ours.schedule_of(name, workload, topology, knobs)
        widths = Widths(weight=4, gradient=4, master=4, optimizer_states=0)
        sent, received = schedule_bytes(schedule, topology, widths, lambda _: workload.activation_bytes)
    elif name in PIPELINES:
        sent = received = pipeline_bytes(name, amount, topology, stages_per_rank(name))
    elif name in fsdp.NAMES:
        model = real_model_spec(workload)
        parts = [4 * sum(model.units[unit].numel for unit in block.units) for block in model.blocks]
        shares = {"first": parts[0] / sum(parts), "last": parts[-1] / sum(parts)}
        moved = sum(parts) * sharded_traffic(name, workload.micro_batches, topology, knobs, **shares).total
        sent = received = (moved,) * topology.num_nodes
    else:
        raise UserError("strategy", name, f"one of {', '.join((*ours.rows(), *fsdp.NAMES, *PIPELINES))}")
    links = [between.busy_s(topology.local_size, *both) for both in zip(sent, received, strict=True)]
    return LinkBounds(max(links), sent, received)


def _predicted_memory(cell: Cell, entry: Entry) -> float | None:
    """Return the GiB that a rank needs by its schedule; None for rivals and for workloads that are not timed."""
    workload = cell.workload
    if not isinstance(workload, TimedWorkload) or entry.strategy not in ours.rows():
        return None
    schedule = ours.schedule_of(entry.strategy, workload, Topology.grid(cell.nodes, cell.local), entry.all_knobs)
    widths = Widths(weight=4, gradient=4, master=4, optimizer_states=2 if workload.optimizer else 0)
    rank_costs = costs(schedule, widths, activation_bytes=activation_sizes(workload))
    return (rank_costs.home_bytes + rank_costs.buffer_bytes + rank_costs.activation_bytes) / 2**30


def _row(
    suite: Suite, cell: Cell, topology: Topology, entry: Entry, reading: dict[str, Any], between: LinkModel
) -> dict[str, Any]:
    """Return the row of results of one strategy in one cell: settings, bounds, medians of measurements, and status.

    The status is ``ok``, ``failed``, ``out-of-memory``, or ``void`` if the machine's processors were too busy.

    Args:
        reading: measurements of the strategy, as the worker wrote them; or only ``failed`` with the reason.
        between: link between the nodes.
    """
    row: dict[str, Any] = {
        "suite": suite.name,
        "cell": cell.spelled_out(),
        "strategy": ours.named(entry.strategy),
        "origin": "ours" if entry.strategy in (*ours.rows(), *ROWS) else "shipped",
        "knobs": reading.get("knobs") or entry.all_knobs,
        "label": entry.label,
        "status": "ok",
        "reason": "",
        "loss": None,
    }
    try:
        bounds = bounds_of(cell, entry, between)
        row["physical_bound_s"], row["dependency_bound_s"] = bounds.physical_s, bounds.dependency_s
        row["link_bytes_predicted"] = [round(number) for number in bounds.sent_bytes]
        row["peak_gib_predicted"] = _predicted_memory(cell, entry) if suite.memory else None
        row |= _documents(cell, topology, entry)
    except UserError as error:
        reading = reading if reading.get("failed") else {"failed": str(error)}
    if reason := reading.get("failed"):
        memory = "MemoryError" in reason or "SIGKILL" in reason
        return row | {"status": "out-of-memory" if memory else "failed", "reason": reason}
    steps = reading["steps"]
    names = {name for step in steps for name in step}
    columns = {name: [step[name] for step in steps] for name in names}
    median = {name: statistics.median(columns[name]) for name in ONE_NUMBER if name in names}
    seconds, busy = columns["seconds"], median["cpu_busy"]
    lanes = {lane for step in steps for lane in step["lanes"]}
    row |= {
        "seconds_per_step": {"median": median["seconds"], "min": min(seconds), "max": max(seconds), "samples": seconds},
        "link_bytes_sent": [statistics.median(node) for node in zip(*columns["sent"], strict=True)],
        "link_bytes_received": [statistics.median(node) for node in zip(*columns["received"], strict=True)],
        "exposed_communication_s": median.get("exposed"),
        "idle_start_s": median.get("idle_start"),
        "idle_end_s": median.get("idle_end"),
        "lane_seconds": {lane: statistics.fmean(step["lanes"].get(lane, 0.0) for step in steps) for lane in lanes},
        "node_delay_s": columns["delays"],
        "cpu_busy": busy,
        "loss": [loss if math.isfinite(loss) else None for loss in columns.get("loss", ())] or None,
        "peak_gib": max(reading["peak_bytes"]) / 2**30 if suite.memory and reading["peak_bytes"] else None,
    }
    if isinstance(cell.workload, ServingWorkload):
        row |= _served(cell.workload, topology, between, reading["knobs"]["groups"], median["token"], median["first"])
    if isinstance(cell.workload, TimedWorkload) and cell.workload.room and reading["held_bytes"]:
        row["held"] = max(reading["held_bytes"]) / cell.workload.activation_bytes
    if isinstance(cell.workload, LengthsWorkload):
        row["tokens_per_second"] = cell.workload.tokens / median["seconds"]
    if busy > BUSIEST:
        row |= {"status": "void", "reason": f"the machine's processors were {busy:.0%} busy"}
    return row


def _served(
    workload: ServingWorkload, topology: Topology, between: LinkModel, groups: int, token: float, first: float
) -> dict[str, Any]:
    """Return measured seconds per token and until the first token, and the predictions of the plan for both.

    Args:
        groups: number of groups of slots.
        token: measured seconds from token to token.
        first: measured seconds until the first token of a prompt.
    """
    way, formula = (planned(workload, topology, between, groups, hand_s=hand_s) for hand_s in (HAND_S, 0.0))
    told = {"token_s": token, "first_s": first, "groups": groups, "tokens_per_second": groups * way.slots / token}
    told |= {"token_s_predicted": way.token_s, "first_s_predicted": way.first_s}
    return told | {"of_formula": formula.token_s / token}


def _documents(cell: Cell, topology: Topology, entry: Entry) -> dict[str, Any]:
    """Return predicted computing seconds for the assigned documents; ``{}`` for a workload without documents.

    Only a ``LengthsWorkload`` has documents. ``modelled_s`` is the computing time of a step with this assignment,
    ``floor_s`` the time that no assignment can undercut. ``rounds`` is the number of rounds whose packed micro-batches
    are shared by several ranks, and of rounds whose packed micro-batches belong to one rank or pipeline each."""
    if not isinstance(cell.workload, LengthsWorkload):
        return {}
    is_ours = entry.strategy in ours.rows()
    name, whole, knobs = entry.strategy, cell.workload, entry.all_knobs
    packing = knobs.get("packing", "in turn")
    work = ours.computed(name, whole, topology, knobs) if is_ours else dealt(whole, packing, topology)
    assert isinstance(work, DealtWorkload)
    schedule = ours.schedule_of(name, whole, topology, knobs) if is_ours else None
    if schedule is not None and schedule.step.divided_over > 1:
        free, factors = LinkModel(math.inf), {rank: 1 / speed for rank, speed in enumerate(cell.device_speeds)}
        costs = workload_costs(work, between=free, inside=free, compute_factor=factors)
        modelled_s = play(schedule, costs, steps=1).makespan
    else:
        modelled_s = work.modelled_s(schedule and schedule.step, cell.device_speeds)
    return {
        "modelled_s": modelled_s,
        "floor_s": whole.floor_s(topology, cell.device_speeds),
        "rounds": list(work.packs.shape),
    }


def check_losses(rows: list[dict[str, Any]]) -> None:
    """Set the status of rows to ``failed`` if their losses differ from the first row's or are not finite.

    Args:
        rows: rows of one cell, changed in place. Rows without a loss are skipped; void rows are checked too.
    """
    trained = [row for row in rows if row["loss"]]
    first = next((row for row in trained if None not in row["loss"]), None)
    for row in trained:
        if first is None or None in row["loss"]:
            row |= {"status": "failed", "reason": "a loss is not finite"}
            continue
        for step, (loss, other) in enumerate(zip(row["loss"], first["loss"], strict=True), start=1):
            if abs(loss - other) > LARGEST_DIFFERENCE * abs(other):
                reason = (
                    f"not the same training: the loss of step {step} is {loss:.6g}, of {first['label']} {other:.6g}"
                )
                row |= {"status": "failed", "reason": reason}
                break


def disturbance(row: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare a row whose nodes have slow spells with an earlier row without them; return the cost, or ``{}``.

    The earlier row must have the same label, the status ``ok``, and a cell with equal settings except ``slow``.

    Returns:
        ``disturbance``, a dict of means over the steps: ``added_s``: seconds by which a step took longer than without
        slow spells. ``largest_node_delay_s``: seconds added to computing on the node that lost most; a step loses at
        least this if no device idles, and more than it loses if devices idle anyway. ``sum_of_node_delays_s``: seconds
        that a step loses if every node waits for every other node.
    """
    if not row["cell"]["slow"] or "seconds_per_step" not in row:
        return {}
    for other in earlier:
        same = {**row["cell"], "name": other["cell"]["name"], "slow": None} == other["cell"]
        if same and other["label"] == row["label"] and other["status"] == "ok":
            calm, delays = statistics.mean(other["seconds_per_step"]["samples"]), row["node_delay_s"]
            added = statistics.mean(row["seconds_per_step"]["samples"]) - calm
            largest = statistics.mean(max(step) for step in delays)
            total = statistics.mean(sum(step) for step in delays)
            return {"disturbance": {"added_s": added, "largest_node_delay_s": largest, "sum_of_node_delays_s": total}}
    return {}


def _line(row: dict[str, Any]) -> str:
    """Return one line of text about a row: median seconds and share of the physical bound, or why it failed."""
    if "seconds_per_step" not in row:
        return f"  {row['label']}: {row['status']}, {row['reason']}"
    median, bound = row["seconds_per_step"]["median"], row["physical_bound_s"]
    note = f", last loss {row['loss'][-1]}" if row["loss"] else ""
    note += f", {row['status']}: {row['reason']}" if row["reason"] else ""
    return f"  {row['label']}: {median:.2f} s, {bound / median:.2f} of the physical bound{note}"
