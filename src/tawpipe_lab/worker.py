"""One rank of a measurement: makes all contenders of a cell and alternates single steps of them.

Started by ``compare`` inside a node of a cluster: ``python -m tawpipe_lab.worker JOB RESULT``. Single steps alternate,
A B C A B C, so that drift of the machine hits all alike. Rank 0 writes what it measured; a contender that fails in a
step ends the launch with a note that says which, and ``compare`` goes on without it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tawpipe.errors import UserError
from tawpipe.topology import Topology
from tawpipe.train.metrics import peak_memory_bytes
from tawpipe_lab import ours
from tawpipe_lab.cluster.cluster import own_traffic
from tawpipe_lab.contender import Contender, Maker
from tawpipe_lab.ours_run import OurContender, PipelineContender
from tawpipe_lab.rivals import deepspeed, fsdp, pipelining
from tawpipe_lab.serving import ROWS, LapContender
from tawpipe_lab.sleeper import Pace, Slowdown
from tawpipe_lab.workload import RealWorkload, Workload, from_spelled_out, with_found

STEP_TIMEOUT = timedelta(minutes=5)


@dataclass
class Readings:
    """Measurements of one contender, on one rank or gathered."""

    seconds: list[float] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    """Bytes of every step and node."""
    received: list[list[float]] = field(default_factory=list)
    cpu_busy: list[float] = field(default_factory=list)
    """Share of the machine's processors that were busy, in every step."""
    exposed: list[float] = field(default_factory=list)
    """Seconds of every step in which a device did not compute, mean over the ranks; nothing for a real workload."""
    idle_start: list[float] = field(default_factory=list)
    """Seconds of every step before a device computed, mean over the ranks; nothing for a real workload."""
    idle_end: list[float] = field(default_factory=list)
    """Seconds of every step after a device had computed, likewise."""
    token: list[float] = field(default_factory=list)
    """Seconds from token to token in every step; nothing but for a workload that is served."""
    first: list[float] = field(default_factory=list)
    """Seconds of every step until a prompt's first token, likewise."""
    loss: list[float] = field(default_factory=list)
    """Loss of every step; nothing for a timed workload."""
    delays: list[list[float]] = field(default_factory=list)
    """Seconds of every step by which every node's computing was slowed down, mean over its ranks."""
    lanes: dict[str, float] = field(default_factory=dict)
    """Seconds per step that a lane was busy, mean over the ranks."""
    peak_bytes: list[float] = field(default_factory=list)
    """Peak memory of every rank during the steps, above what it held before the contender was made."""
    held_bytes: list[float] = field(default_factory=list)
    """The most that every rank's activations had at any time, in the device's memory; of rows of ours that sleep."""
    knobs: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


def main(job_path: str, result_path: str) -> int:
    """Measure what the job says; rank 0 writes the result."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=STEP_TIMEOUT)
    rank, local = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
    topology = Topology.grid(dist.get_world_size() // local, local)
    workload = from_spelled_out(job["workload"])
    speed = job["speeds"][rank] if job["speeds"] else 1.0
    pace = Pace(Slowdown(**job["slow"]) if job["slow"] else None, topology.node_of(rank), speed)
    readings = [Readings() for _ in job["entries"]]
    contenders: list[Contender | None] = []
    _import_rivals({entry["strategy"] for entry in job["entries"]})
    before = _resident_bytes()
    for entry, reading in zip(job["entries"], readings, strict=True):
        contender = _make(entry, workload, topology, rank, reading)
        contenders.append(contender)
        if contender is not None and contender.sleeper is not None:
            contender.sleeper.pace = pace
    _forget_peak()
    for sample in range(-job["warmup"], job["samples"]):
        for number, (contender, reading) in enumerate(zip(contenders, readings, strict=True)):
            if contender is not None:
                _note(result_path, rank, number)
                _measure(contender, reading, topology, rank, sample, job.get("steps_in_a_row", 1))
    for number, contender in enumerate(contenders):
        if job["traces"] and isinstance(contender, OurContender):
            _record(contender, Path(job["traces"]) / str(number), topology, rank)
    for contender, reading in zip(contenders, readings, strict=True):
        if contender is not None:
            reading.knobs = dict(contender.knobs)
            reading.peak_bytes = _gather(float(peak_memory_bytes("cpu") - before))
            if isinstance(contender, OurContender):
                reading.held_bytes = _gather(float(contender.compute.most_bytes))
    if rank == 0:
        Path(result_path).write_text(json.dumps([vars(reading) for reading in readings]), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # lanes and groups of many contenders need not be taken apart


def _make_ours(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    if isinstance(workload, RealWorkload):
        return PipelineContender(name, workload, topology, rank, **knobs)
    return OurContender(name, workload, topology, rank, **knobs)


def makers() -> dict[str, Maker]:
    """Row -> what makes its contender."""
    return {
        **dict.fromkeys((*fsdp.NAMES, fsdp.CONTEXT_PARALLEL), fsdp.make),
        **dict.fromkeys(deepspeed.NAMES, deepspeed.make),
        **dict.fromkeys(pipelining.NAMES, pipelining.make),
        **dict.fromkeys(ours.rows(), _make_ours),
        **dict.fromkeys(ROWS, LapContender),
    }


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """The contender called ``name`` on this rank; see `Maker`.

    Raises:
        UserError: there is no such row, or it cannot sleep inside a node where the workload says so.
    """
    known = makers()
    if name not in known:
        raise UserError("strategy", name, f"one of {', '.join(known)}")
    if getattr(workload, "inside_sleeps", False) and known[name] is not _make_ours:
        raise UserError("inside_sleeps", True, f"false: {name} does not run in this project's runtime, which can")
    return known[name](name, workload, topology, rank, **knobs)


def _make(
    entry: dict[str, Any], workload: Workload, topology: Topology, rank: int, reading: Readings
) -> Contender | None:
    """A contender, or None with the reason noted, on all ranks alike."""
    name, knobs = entry["strategy"], with_found(entry["knobs"], entry["searched"])
    contender: Contender | None = None
    try:
        contender = make(name, workload, topology, rank, **knobs)
    except (UserError, MemoryError, ValueError) as error:
        reading.failed = f"{type(error).__name__}: {error}"
    failures = _gather(float(contender is None))
    if any(failures):
        reading.failed = reading.failed or "another rank could not set it up"
        return None
    return contender


def _note(result_path: str, rank: int, number: int) -> None:
    """Leave word of what is being measured, for the case that the launch ends in it."""
    if rank == 0:
        Path(f"{result_path}.running").write_text(str(number), encoding="utf-8")


def _measure(
    contender: Contender, reading: Readings, topology: Topology, rank: int, sample: int, in_a_row: int
) -> None:
    """Some steps that follow each other, as the mean one of them; those of a negative number do not count."""
    contender.busy()
    sleeper = contender.sleeper
    before = sleeper.delay_s if sleeper is not None else 0.0
    dist.barrier()
    traffic, ticks, begin = own_traffic(), _processor_ticks(), time.perf_counter()
    if sleeper is not None:
        sleeper.pace.begin(sample)
        sleeper.forget()
    for left in reversed(range(in_a_row)):
        if left and isinstance(contender, OurContender):
            contender.begin_step()
        else:
            contender.step()
    dist.barrier()
    end = time.perf_counter()
    seconds, after = (end - begin) / in_a_row, _processor_ticks()
    moved = own_traffic() - traffic
    busy = {name: value / in_a_row for name, value in contender.busy().items()}
    sent, received = _gather(moved.sent / in_a_row), _gather(moved.received / in_a_row)
    computing = _gather(busy.get("COMPUTE", 0.0))
    lanes = {name: sum(_gather(busy.get(name, 0.0))) / topology.world_size for name in _all_lanes(busy)}
    edges = (sleeper.first_s - begin, end - sleeper.last_s) if sleeper is not None else (0.0, 0.0)
    idle = [sum(_gather(edge)) / topology.world_size for edge in edges]
    delays = _gather((sleeper.delay_s - before) / in_a_row if sleeper is not None else 0.0)
    loss = None if contender.loss_share is None else sum(_gather(contender.loss_share))
    if sample < 0:
        return
    reading.seconds.append(seconds)
    first = [node[0] for node in topology.nodes]
    reading.sent.append([sent[r] for r in first])
    reading.received.append([received[r] for r in first])
    total = after[1] - ticks[1]
    reading.cpu_busy.append((after[0] - ticks[0]) / total if total else 0.0)
    if sleeper is not None:
        reading.exposed.append(seconds - sum(computing) / len(computing))
        reading.idle_start.append(idle[0])
        reading.idle_end.append(idle[1])
    if loss is not None:
        reading.loss.append(loss)
    if isinstance(contender, LapContender):
        reading.token.append(contender.token_s)
        reading.first.append(contender.first_s)
    reading.delays.append([sum(delays[r] for r in node) / len(node) for node in topology.nodes])
    for name, value in lanes.items():
        reading.lanes[name] = reading.lanes.get(name, 0.0) + value


def _record(contender: OurContender, folder: Path, topology: Topology, rank: int) -> None:
    """Leave the timeline of one more step in ``folder``."""
    if contender.sleeper is not None:
        contender.sleeper.pace.begin(0)
    dist.barrier()
    contender.record().write(folder, rank=rank, node=topology.node_of(rank))
    dist.barrier()


def _all_lanes(busy: dict[str, float]) -> list[str]:
    """The lanes that any rank was busy in; all ranks must gather the same ones."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(busy))
    return sorted({name for names in everyone for name in names})


def _gather(value: float) -> list[float]:
    """One number of every rank, on all ranks."""
    mine = torch.tensor([value], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [float(number) for number in everyone]


def _import_rivals(names: set[str]) -> None:
    """Load all code, and what an optimizer's first step loads: it is not what a strategy holds."""
    makers()
    if names & set(deepspeed.NAMES):
        with suppress(UserError):  # the contender will say so
            deepspeed.load(sorted(names)[0])
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _forget_peak() -> None:
    """Let the kernel count its peak of resident memory anew: what making a contender took is not its step's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _processor_ticks() -> tuple[int, int]:
    """(busy, total) clock ticks of all processors since boot, busy with whatever it is, at any priority."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle, waiting = fields[3:5]
    total = sum(fields[:8])
    return total - idle - waiting, total


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
