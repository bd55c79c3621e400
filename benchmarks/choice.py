"""Does the planner choose what is fastest? Settings drawn at random, the choice made by the clock, then all measured.

    python benchmarks/choice.py --out benchmarks/results/DATE-choice --settings 20

Needs root, as the lab does; about two minutes for every setting. Where the folder has some settings already, measured
with the same --seed and --machine, it goes on with the next. A setting is a cluster (2 to 4 nodes of 1 to 3
devices, at most 6), a timed workload of 1.5 to 4 s of computing per device (less per layer is lost in the noise of two
processors), links that are busy from a tenth to three times as long with one micro-batch per visit, and in three of
five a limit of memory. In every other one layers are wide, links slower and boundary activations small, where pipelines
should win. The search gets what ``tawpipe plan`` would get, and the numbers of the emulating machine that
``prediction.py`` has fitted. Measured are the search's best setting of every strategy, and ``tawpipe-spread`` and
``flat`` with other numbers of micro-batches per visit, as far as they fit and are not predicted to be slower than the
choice by more than ``NEAR``, which is twice as much as any prediction was ever wrong. Right is a choice within 3 % of
the fastest of them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prediction import FAR, Emulation, link
from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import fits
from tawpipe.plan.cost.predict import memory_quickly, predict
from tawpipe.plan.cost.profile import Profile
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import uniform
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.search import search
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import BlockMemory, Widths
from tawpipe.schedule.step import StepSpec
from tawpipe.schedule.strategies.table import strategies
from tawpipe.simulate import BlockCost, CostModel, LinkModel, MicroBatchSize, Seconds
from tawpipe_lab.bounds import workload_model
from tawpipe_lab.cluster.links import Links
from tawpipe_lab.compare import compare, link_of, links_of
from tawpipe_lab.ours import OWN_NAMES
from tawpipe_lab.suite import Cell, Entry, Suite
from tawpipe_lab.workload import TimedWorkload

NEVER = 10**15
"""Bytes: recomputing less is left out, which a timed layer cannot do in all ways."""
GOOD = 0.03
NEAR = 0.3
KNOBS = ("micro_batches_per_visit", "look_ahead", "gradient_buffers", "step_cache", "gradients_scope")


@dataclass(frozen=True)
class LabRequest(PlanRequest):
    """A plan asked for on the lab's cluster, with what the machine that emulates it adds."""

    emulation: Emulation = field(default_factory=Emulation)

    @cached_property
    def costs(self) -> CostModel:
        machine = self.emulation
        usual = PlanRequest.costs.func(self)  # pyright: ignore[reportAttributeAccessIssue]
        return replace(usual, action_s=machine.action_s, add_s=machine.add_s, update_s=machine.update_s)


def draw_cell(random_: random.Random, number: int) -> Cell:
    """A cluster and a workload."""
    nodes, local = random_.choice([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1)])
    layers, per_device = random_.randint(4, 12), random_.choice([1, 2, 3, 4, 6])
    wide = number % 2 == 0
    layer_bytes = 4 * round(2 ** (random_.uniform(19, 21) if wide else random_.uniform(17, 21)))
    compute = random_.uniform(1.5, 4)
    ratio = 10 ** (random_.uniform(math.log10(2), 1) if wide else random_.uniform(-1, math.log10(3)))
    bits = 8 * 3 * layers * layer_bytes * per_device * (1 - 1 / nodes) / (ratio * compute)
    megabits = min(600, max(10, round(bits / 1e6)))
    forward = compute / (4 * layers * per_device)
    workload = TimedWorkload(
        layers,
        layer_bytes,
        forward_s=round(forward, 5),
        backward_input_s=round(2 * forward, 5),
        backward_weight_s=round(forward, 5),
        micro_batches=per_device * nodes * local,
        activation_bytes=4 * round(2 ** (random_.uniform(13, 16) if wide else random_.uniform(15, 19))),
    )
    return Cell(f"setting {number}", nodes, local, f"{megabits}mbit", workload)


def request_of(cell: Cell, machine: Emulation, links: Links | None = None, memory_bytes: int = 0) -> LabRequest:
    """What the planner is asked about a cell.

    Args:
        links: what they carry, as a probe of a real cluster would say it; None for what their names say.
    """
    workload = cell.workload
    assert isinstance(workload, TimedWorkload)
    forward = workload.forward_s + machine.sleep_s
    backward = workload.backward_input_s + workload.backward_weight_s + 2 * machine.sleep_s
    layer = BlockCost(Seconds(forward), Seconds(backward))
    blocks = (BlockCost(), *[layer] * workload.layers, BlockCost())
    between = link_of(cell, links)
    return LabRequest(
        model=workload_model(workload),
        profile=Profile(
            blocks,
            machine.update_s,
            BlockMemory(workload.activation_bytes, {"graph": NEVER, "kept": NEVER}),
            cell.name,
        ),
        machine=uniform(
            cell.nodes,
            cell.local,
            between=link(between.bytes_per_s, between.latency_s, machine),
            inside=LinkModel(machine.inside_bytes_per_s, machine.inside_latency_s),
        ),
        global_batch=workload.micro_batches,
        micro_batch=1,
        sequence_length=2,
        size=MicroBatchSize(1, 1),
        widths=Widths(4, 4, 4, 2),
        memory_bytes=memory_bytes or NEVER // 2,
        emulation=machine,
    )


def limit_of(cell: Cell, machine: Emulation, random_: random.Random) -> int:
    """In three of five settings, a limit between what little and what much per visit needs."""
    share = random_.random()
    if share < 0.4:
        return 0
    asked = request_of(cell, machine)
    most = asked.micro_batches // asked.topology.world_size
    few, many = (
        memory_quickly(asked, asked.step(ScheduleSettings(micro_batches_per_visit=k))).device for k in (1, most)
    )
    return int(few + (share - 0.4) / 0.6 * (many - few) * 1.2)


def others(request: PlanRequest) -> list[StepSpec]:
    """``tawpipe-spread`` and ``flat`` with other numbers of micro-batches per visit, as far as they fit."""
    most = request.micro_batches // request.topology.world_size
    steps = [
        request.step(ScheduleSettings(strategy=strategy, micro_batches_per_visit=per_visit))
        for strategy in ("tawpipe-spread", "flat")
        for per_visit in sorted({1, min(2, most), most})
    ]
    return [step for step in steps if fits(request, memory_quickly(request, step))]


def entry_of(step: StepSpec) -> Entry:
    """For the lab."""
    if step.strategy.axis:
        found = {name: getattr(step.settings, name) for name in ("stages", "block_times")}
        return Entry(OWN_NAMES.get(step.strategy.name, step.strategy.name), {}, found)
    chosen: dict[str, Any] = {name: getattr(step.settings, name) for name in KNOBS}
    return Entry(OWN_NAMES.get(step.strategy.name, step.strategy.name), chosen | {"reuse": True})


def measure(cell: Cell, machine: Emulation, memory_bytes: int, out: Path, samples: int) -> dict[str, Any]:
    """Choose, then measure."""
    request = request_of(cell, machine, links_of(cell), memory_bytes)
    begin = time.perf_counter()
    plan = Plan.of(request, search(request))
    took = time.perf_counter() - begin
    if plan.chosen is None or plan.chosen.step is None:
        raise UserError("memory", memory_bytes, "enough for some strategy")
    good = [one.step for one in plan.candidates if one.fits and one.step]
    runnable = [step for step in good if not step.settings.offloaded_layers]
    chosen = entry_of(plan.chosen.step)
    seconds = plan.chosen.seconds * (1 + NEAR)
    predicted_s = {step: predict(request, step).step_seconds for step in [*runnable, *others(request)]}
    steps = {entry_of(step).label: step for step in predicted_s if predicted_s[step] < seconds}
    entries = tuple(map(entry_of, steps.values()))
    suite = Suite(f"choice-{cell.name}", (cell,), entries, samples=samples, warmup=1)
    rows = compare(suite, out, tell=lambda _: None)
    found = []
    for row in rows:
        if "seconds_per_step" not in row:
            print(f"  {row['label']}: {row['reason']}", flush=True)
            continue
        seconds = {"measured_s": row["seconds_per_step"]["median"], "predicted_s": predicted_s[steps[row["label"]]]}
        found.append({"label": row["label"], "status": row["status"], **seconds})
    found.sort(key=lambda one: one["measured_s"])
    mine = next((one for one in found if one["label"] == chosen.label), None)
    return {
        "cell": cell.spelled_out(),
        "memory_bytes": memory_bytes,
        "search_s": took,
        "chosen": chosen.label,
        "behind": mine["measured_s"] / found[0]["measured_s"] - 1 if mine else math.inf,
        "rows": found,
    }


def predictions(results: Sequence[dict[str, Any]]) -> list[str]:
    """How far off the seconds were that were predicted, in a line for pipelines and one for weights that travel."""
    stay = {OWN_NAMES.get(name, name) for name, one in strategies().items() if one.axis}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in (row for one in results for row in one["rows"]):
        errors[row["label"].split(" (")[0] in stay].append(abs(row["predicted_s"] / row["measured_s"] - 1))
    named = ("all", errors[True] + errors[False]), ("pipelines", errors[True]), ("weights that travel", errors[False])
    return [
        f"* Seconds predicted, {name}: {len(some)} rows, {sum(one <= FAR for one in some)} within {FAR:.0%}; "
        f"median {statistics.median(some):.1%}, largest {max(some):.1%} off."
        for name, some in named
        if some
    ]


def table(environment: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    good = sum(one["behind"] <= GOOD for one in results)
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        f"{good} of {len(results)} choices are the fastest or within {GOOD:.0%} of it.",
        "",
        *predictions(results),
        "",
        "| setting | nodes | link | layers | MB | micro-batches | s forward | limit MB | chosen | s "
        "| behind | fastest |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- |",
    ]
    for one in results:
        cell, work = one["cell"], one["cell"]["workload"]
        limit = f"{one['memory_bytes'] / 1e6:.0f}" if one["memory_bytes"] else "-"
        mine = next((row for row in one["rows"] if row["label"] == one["chosen"]), {"measured_s": math.inf})
        void = " (void)" if any(row["status"] != "ok" for row in one["rows"]) else ""
        fastest = one["rows"][0]
        other = "the same" if fastest is mine else f"{short(fastest['label'])} ({fastest['measured_s']:.2f} s)"
        lines.append(
            f"| {cell['name']}{void} | {cell['nodes']} x {cell['local']} | {cell['rate']} | {work['layers']} "
            f"| {work['layer_bytes'] / 1e6:.1f} | {work['micro_batches']} | {work['forward_s']:.4f} | {limit} "
            f"| {short(one['chosen'])} | {mine['measured_s']:.2f} | {one['behind']:.1%} | {other} |"
        )
    return lines


def measured_before(file: Path, environment: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a run that was cut off."""
    if not file.is_file():
        return []
    content = json.loads(file.read_text(encoding="utf-8"))
    for name in ("seed", "machine"):
        if content["environment"].get(name) != environment[name]:
            raise UserError("--out", str(file.parent), f"a folder without results of another {name}")
    return content["results"]


def short(label: str) -> str:
    """A label without the knobs that are as usual."""
    name, _, knobs = label.partition(" (")
    usual = ("look_ahead 2", "gradient_buffers 2", "step_cache 0", "gradients_scope visit")
    kept = [one for one in knobs.rstrip(")").split(", ") if one not in (*usual, "reuse True")]
    return f"{name}, {', '.join(kept)}".replace("micro_batches_per_visit", "per visit").replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("choice"))
    parser.add_argument("--settings", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--machine", type=Path, help="prediction.json, whose numbers of the machine are taken")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = Emulation()
    if args.machine:
        machine = Emulation(**json.loads(args.machine.read_text(encoding="utf-8"))["machine"])
    random_ = random.Random(args.seed)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    environment |= {"seed": args.seed, "machine": asdict(machine)}
    results = measured_before(args.out / "choice.json", environment)
    for number in range(1, args.settings + 1):
        cell = draw_cell(random_, number)
        limit = limit_of(cell, machine, random_)
        if number <= len(results):
            continue
        results.append(measure(cell, machine, limit, args.out / "last", args.samples))
        print(table(environment, results)[-1], flush=True)
        content = json.dumps({"environment": environment, "results": results}, indent=1)
        (args.out / "choice.json").write_text(content + "\n", encoding="utf-8")
        (args.out / "table.md").write_text("\n".join(table(environment, results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
