"""One rank of a measurement: builds all contenders of a cell and runs single steps of them in turn.

``compare`` starts this module inside a node of a cluster: ``python -m tawpipe_lab.worker JOB RESULT``. Single steps
alternate (A B C A B C), so that a drift of the machine's speed affects all contenders equally. Rank 0 writes the
measurements. A contender that fails in a step ends the launch. The file ``RESULT.running`` then says which one failed,
and ``compare`` starts again without it.
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
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from tawpipe.errors import UserError
from tawpipe.topology import Topology
from tawpipe.train.saying.metrics import peak_memory_bytes
from tawpipe_lab import ours
from tawpipe_lab.cluster.cluster import own_traffic
from tawpipe_lab.contender import Contender, Maker
from tawpipe_lab.ours_run import OurContender, PipelineContender
from tawpipe_lab.rivals import deepspeed, fsdp, pipelining
from tawpipe_lab.serving import ROWS, DecodeContender
from tawpipe_lab.sleeper import Pace, Slowdown
from tawpipe_lab.workload import RealWorkload, Workload, from_spelled_out, merge_knobs

STEP_TIMEOUT = timedelta(minutes=5)


@dataclass
class Readings:
    """Measurements of one contender, on one rank or gathered from all ranks."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """Measurements of every step, see ``_measure``."""
    peak_bytes: list[float] = field(default_factory=list)
    """Peak memory of every rank during the steps, minus what the rank held before the contenders were built."""
    held_bytes: list[float] = field(default_factory=list)
    """Most bytes of activations that every rank held at one time in device memory. Only for this project's timed
    contenders."""
    knobs: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


def main(job_path: str, result_path: str) -> int:
    """Run the measurements that the job file describes, on this rank and all others; then end this process with code 0.

    Rank 0 writes the result file. Never returns.

    Args:
        job_path: JSON file with workload, entries, numbers of warmup steps and samples, device speeds and traces
            folder.
        result_path: JSON file to write: one object with the fields of ``Readings`` per entry.
    """
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
    os._exit(0)  # exit at once: closing all lanes and process groups takes time


def _make_ours(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """Build the contender of one of this project's rows, for a real or a timed workload."""
    if isinstance(workload, RealWorkload):
        return PipelineContender(name, workload, topology, rank, **knobs)
    return OurContender(name, workload, topology, rank, **knobs)


def makers() -> dict[str, Maker]:
    """Return the maker of the contender for every row name, rivals included."""
    return {
        **dict.fromkeys((*fsdp.NAMES, fsdp.CONTEXT_PARALLEL), fsdp.make),
        **dict.fromkeys(deepspeed.NAMES, deepspeed.make),
        **dict.fromkeys(pipelining.NAMES, pipelining.make),
        **dict.fromkeys(ours.rows(), _make_ours),
        **dict.fromkeys(ROWS, DecodeContender),
    }


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """Build the contender called ``name`` on this rank; see `Maker`.

    Raises:
        UserError: there is no row of this name, or it cannot run this workload. This includes a rival on a workload
            with ``inside_sleeps``, which only this project's runtime supports.
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
    """Build the contender of an entry on every rank; return None on all ranks if any rank cannot build it.

    The reason of a failure is written into ``reading.failed``. Waits for all ranks.

    Args:
        entry: strategy, knobs and knobs found by a search, as plain data.
        workload: workload of the cell.
        topology: ranks and nodes.
        rank: this rank.
        reading: measurements of the entry.
    """
    name, knobs = entry["strategy"], merge_knobs(entry["knobs"], entry["searched"])
    contender: Contender | None = None
    try:
        contender = make(name, workload, topology, rank, **knobs)
    except (UserError, MemoryError, ValueError) as error:
        reading.failed = f"{type(error).__name__}: {error}"
    if any(_gather(contender is None)):
        reading.failed = reading.failed or "another rank could not set it up"
        return None
    return contender


def _note(result_path: str, rank: int, number: int) -> None:
    """On rank 0, write the index of the contender that runs next to ``RESULT.running``.

    If the launch fails, the file says which contender was running."""
    if rank == 0:
        Path(f"{result_path}.running").write_text(str(number), encoding="utf-8")


def _measure(
    contender: Contender, reading: Readings, topology: Topology, rank: int, sample: int, in_a_row: int
) -> None:
    """Run ``in_a_row`` consecutive steps and append their means to ``reading.steps``; warmup samples are not kept.

    All ranks take part, with barriers before and after the steps. The entry in ``reading.steps`` has these keys, per
    step:

    * ``seconds``; ``sent`` and ``received``: bytes over the link of every node; ``cpu_busy``: share of the machine's
      processors that were busy; ``lanes``: seconds for which each lane was busy, mean over the ranks.
    * If computing sleeps: ``exposed``: seconds in which a device did not compute; ``idle_start`` and ``idle_end``:
      seconds before its first and after its last computation, means over the ranks.
    * ``delays``: seconds that slow spells added to computing, per node; 0 if computing does not sleep.
    * If a model is served: ``token``: seconds from token to token; ``first``: seconds until the first token of a
      prompt.
    * For a real workload: ``loss``.

    Args:
        sample: number of the sample; negative for warmup. Equal numbers give equal slow spells of the nodes.
        in_a_row: number of steps. An ``OurContender`` waits for actions in flight only after the last one.
    """
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
    edges = (sleeper.first_s - begin, end - sleeper.last_s) if sleeper is not None else (0.0, 0.0)
    delay = (sleeper.delay_s - before) / in_a_row if sleeper is not None else 0.0
    own_values = (moved.sent / in_a_row, moved.received / in_a_row, delay, edges, busy, contender.loss_share)
    sent, received, delays, idle, lanes, losses = zip(*_gather(own_values), strict=True)
    if sample < 0:
        return
    total, first = after[1] - ticks[1], [node[0] for node in topology.nodes]
    step: dict[str, Any] = {
        "seconds": seconds,
        "sent": [sent[r] for r in first],
        "received": [received[r] for r in first],
    }
    step["cpu_busy"] = (after[0] - ticks[0]) / total if total else 0.0
    step["delays"] = [fmean(delays[r] for r in node) for node in topology.nodes]
    names = sorted({name for each in lanes for name in each})
    step["lanes"] = {name: fmean(each.get(name, 0.0) for each in lanes) for name in names}
    if sleeper is not None:
        step["exposed"] = seconds - step["lanes"].get("COMPUTE", 0.0)
        step["idle_start"], step["idle_end"] = map(fmean, zip(*idle, strict=True))
    if None not in losses:
        step["loss"] = sum(losses)
    if isinstance(contender, DecodeContender):
        step |= {"token": contender.token_s, "first": contender.first_s}
    reading.steps.append(step)


def _record(contender: OurContender, folder: Path, topology: Topology, rank: int) -> None:
    """Run one more step on all ranks, and write this rank's actions with their times into ``folder``.

    The file is ``rank-N.json``. All ranks wait for each other before and after the step."""
    if contender.sleeper is not None:
        contender.sleeper.pace.begin(0)
    dist.barrier()
    contender.record().write(folder, rank=rank, node=topology.node_of(rank))
    dist.barrier()


def _gather(value: Any) -> list[Any]:
    """Gather the values that all ranks pass; return them as a list by rank, on every rank. Waits for all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _import_rivals(names: set[str]) -> None:
    """Import the code of all rivals and run one optimizer step, before the memory is measured.

    So the memory that code takes is not counted as memory of a contender.

    Args:
        names: strategies of the job; DeepSpeed is imported only if one of them needs it.
    """
    makers()
    if names & set(deepspeed.NAMES):
        with suppress(UserError):  # `make` reports the error
            deepspeed.load(sorted(names)[0])
    weight = torch.zeros(1, requires_grad=True)
    weight.sum().backward()
    torch.optim.AdamW([weight]).step()


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _forget_peak() -> None:
    """Reset the kernel's peak of resident memory, so that the memory to build contenders does not count as a step's."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _processor_ticks() -> tuple[int, int]:
    """Return (busy, total) clock ticks of all processors since boot, counting all processes of the machine as busy."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle, waiting = fields[3:5]
    total = sum(fields[:8])
    return total - idle - waiting, total


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
