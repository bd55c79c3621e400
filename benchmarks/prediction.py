"""How far the clock is from what was measured: every row in our runtime of the suites' results, predicted.

    python benchmarks/prediction.py --fit --out benchmarks/results/DATE-prediction benchmarks/results

A measured step, or some in a row, begins and ends with nothing under way; so does what is predicted. The clock knows
the setting (layers, seconds, bytes, links, knobs) and a few numbers of the machine that emulates the cluster, which are
the same for all rows: latency of a message, rate of a node's loopback, and what handing an action to its lane and
running it costs.
``--fit`` searches them on every other row, and the rows that it has not seen are told apart in the table. Beside it,
``reasons.md`` says for every row below 0.97 of what dependencies allow where the clock sees the rest. ``--published``
plans a step that others have published instead, and writes ``published.md``: nothing of ours is measured there.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.plan.cost.feasible import with_settings
from tawpipe.plan.cost.measure import Asked, machine_of, request_of
from tawpipe.plan.cost.predict import predict as predicted
from tawpipe.plan.cost.profile import FLASH_FACTOR
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.search.search import search
from tawpipe.schedule.sizes.footprint import Widths, costs
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import activation_sizes, workload_costs
from tawpipe_lab.cluster.links import Links
from tawpipe_lab.cluster.rates import parse_rates
from tawpipe_lab.lengths import DealtWorkload
from tawpipe_lab.workload import RealWorkload, TimedWorkload, Workload, from_spelled_out

FRAMES = 1448 / 1514
"""Share of a link's bytes that was payload when links were not measured: frames of 1,500 bytes."""
FAR = 0.07
STEPS = (0.5, 0.7, 1.4, 2.0)
"""The fit multiplies a number by these."""
NEAR_BOUND = 0.97
"""Share of what dependencies allow, below which a row has its reasons told."""
CAUSES = {
    "actions": {"action_s": 0.0},
    "latency": {"latency_s": 0.0, "inside_latency_s": 0.0},
    "inside a node": {"inside_bytes_per_s": 1e12},
    "sums, updates, sleeps": {"add_s": 0.0, "update_s": 0.0, "sleep_s": 0.0},
}
"""What the machine adds, and the numbers that leave it out."""
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "head_dim": 128,
}
QWEN3_8B |= {"num_key_value_heads": 8, "intermediate_size": 12288, "max_position_embeddings": 1 << 20}
TRL = "| TRL, measured, cuDNN's attention | all | 364 to 380 | 52.3 (56.2 GB) | - |"
"""One row, Qwen3-8B, all weights, 8 H100, inputs of layers offloaded; from TRL's documentation, release and example."""


@dataclass(frozen=True)
class Emulation:
    """What the machine adds to a setting.

    Args:
        action_s: of every action: the lane's thread, the call, the check of the message.
        latency_s: of a message between nodes, besides the link's.
        inside_latency_s: of a message inside a node.
        link_latencies: of its link's latencies, how many a message takes. It was three before receives were posted
            ahead, as rows of before 2026-11-26 were measured.
        inside_bytes_per_s: of a node's loopback.
        add_s: of adding one element, and what copying costs.
        update_s: of the optimizer, for one element.
        sleep_s: by which a sleep is too long.
    """

    action_s: float = 5.3e-4
    latency_s: float = 1.4e-3
    inside_latency_s: float = 2e-3
    link_latencies: float = 1.05
    inside_bytes_per_s: float = 3e8
    add_s: float = 6e-11
    update_s: float = 5e-10
    sleep_s: float = 7.5e-5


def links_of(row: dict[str, Any], machine: Emulation) -> tuple[LinkModel, LinkModel]:
    """The links between nodes and inside, by what was measured before the row; of older rows by their names."""
    inside = LinkModel(machine.inside_bytes_per_s, machine.inside_latency_s)
    if "links" in row:
        links = Links.from_spelled_out(row["links"])
        return link(links.bytes_per_s, links.latency_s, machine), inside
    rates = [rate for rate in parse_rates(row["cell"]["rate"], nodes=row["cell"]["nodes"]) if rate is not None]
    return link(min(rates) / 8 * FRAMES if rates else 1e10, 0.0, machine), inside


def link(bytes_per_s: float, latency_s: float, machine: Emulation) -> LinkModel:
    """A link that carries so much, as messages of the runtime see it."""
    return LinkModel(bytes_per_s, machine.latency_s + machine.link_latencies * latency_s)


def predict(row: dict[str, Any], machine: Emulation) -> dict[str, Any]:
    """Seconds, bytes and memory of a measured row."""
    cell, knobs = row["cell"], knobs_of(row)
    workload = workload_of(row)
    topology = Topology.grid(cell["nodes"], cell["local"])
    name = ours.OWN_NAMES.get(str(row["strategy"]), str(row["strategy"]))
    schedule = ours.schedule_of(name, workload, topology, knobs)
    workload = ours.computed(name, workload, topology, knobs)
    assert isinstance(workload, TimedWorkload)
    kept = workload.kept(schedule.step) if isinstance(workload, DealtWorkload) else {}
    between, inside = links_of(row, machine)
    if workload.inside_sleeps:
        inside = ours.INSIDE
    model = workload_costs(
        workload.with_each_sleep(machine.sleep_s),
        between=between,
        inside=inside,
        reduce_scatter="ring",
        action_s=machine.action_s,
        kept=kept,
        add_s=machine.add_s,
        update_s=machine.update_s if workload.optimizer else 0.0,
    )
    steps = cell.get("steps_in_a_row", 1)
    timeline = play(schedule, model, steps=steps, physical=topology)
    widths = Widths(4, 4, 4, 2 if workload.optimizer else 0)
    said = costs(schedule, widths, activation_bytes=activation_sizes(workload))
    return {
        "seconds": timeline.makespan / steps,
        "sent": max(node.sent for node in timeline.node_bytes[0]),
        "gib": (said.home_bytes + said.buffer_bytes + said.activation_bytes) / 2**30,
    }


def has_results(folder: Path) -> bool:
    """Whether it is a folder of one suite; if not, it is one of such folders."""
    return (folder / "results.json").exists()


def workload_of(row: dict[str, Any]) -> Workload:
    """Of a row; the oldest results know no kind but the timed one."""
    return from_spelled_out({"kind": "timed", **row["cell"]["workload"]})


def knobs_of(row: dict[str, Any]) -> dict[str, Any]:
    """Of a row, by their names of today; the row says its strategy."""
    knobs = dict(row["knobs"])
    if knobs.pop("placement", None) is None:
        return knobs
    cached = knobs.pop("kept_units")
    knobs["step_cache"] = "all" if knobs.pop("weights_scope") == "step" else cached
    for what in ("weights", "gradients"):
        knobs[f"{what}_compression"] = knobs.pop(f"{what}_wire", "dtype").replace("dtype", "none")
    return knobs


def measured(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of our runtime, without those that failed or were disturbed on purpose."""
    found = []
    for folder in folders:
        path = folder / "results.json"
        if not path.exists():
            continue
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            good = row["origin"] == "ours" and row["status"] in ("ok", "void") and not row["cell"].get("slow")
            good = good and "parts_per_layer" in row["knobs"]  # others were measured before buffers kept what they hold
            if good and not isinstance(workload_of(row), RealWorkload):
                found.append(row | {"folder": folder.name})
    return found


def fit(rows: Sequence[dict[str, Any]], machine: Emulation) -> Emulation:
    """One number at a time, as long as the median error falls."""

    def error(one: Emulation) -> float:
        return statistics.mean(abs(predict(row, one)["seconds"] / _seconds(row) - 1) for row in rows)

    best = error(machine)
    for _ in range(2):
        for name in asdict(machine):
            for factor in STEPS:
                other = replace(machine, **{name: getattr(machine, name) * factor})
                if (found := error(other)) < best * 0.995:
                    machine, best = other, found
                    print(f"{name} {getattr(machine, name):.3g}: mean error {best:.2%}", flush=True)
    return machine


def published() -> list[str]:
    """Markdown: the step that ``TRL`` has measured, and the same by our plan, with two kernels of attention."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model("qwen3", **QWEN3_8B, tie_word_embeddings=False).save_pretrained(folder)
        asked = Asked(1 << 20, 1, memory_bytes=74 << 30)
        chain = Chain(build_model(folder, max_positions=asked.row, longest=asked.longest).model)
        request = request_of(chain, machine_of("1x8", device=Device("H100")), asked)
    theirs = {"sequence_chunk": 0, "recompute": "full", "offloaded_layers": len(chain.layers)}
    lines = ["| | recomputed | s/step | GiB of a device | GiB of a host |", "| --- | --- | ---: | ---: | ---: |", TRL]
    for kernel, factor in (("2", 1.0), ("3, as fast as cuDNN's", 1 / FLASH_FACTOR)):
        one = replace(request, profile=request.profile.with_flash(factor, estimated=True))
        best = search(one)[0].step or request.step(request.settings)
        for step in (with_settings(best, **theirs), best):
            kept, said = "all but attention" * (step.settings.recompute == "selective") or "all", predicted(one, step)
            numbers = f"{said.step_seconds:.0f} | {said.peak_bytes / 2**30:.1f} | {said.needs.host / 2**30:.0f} |"
            lines.append(f"| tawpipe, planned, flash attention {kernel} | {kept} | {numbers}")
    return ["# A row of 1,048,576 tokens: planned, not measured", "", f"`{shlex.join(sys.argv)}`", "", *lines]


def _seconds(row: dict[str, Any]) -> float:
    return row["seconds_per_step"]["median"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", nargs="*", type=Path, help="with results.json, or of such folders")
    parser.add_argument("--published", action="store_true", help="plan what others have published, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("prediction"))
    parser.add_argument("--fit", action="store_true", help="search the numbers of the machine on every other row")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.published:
        (args.out / "published.md").write_text("\n".join(published()) + "\n", encoding="utf-8")
        return
    folders = [[folder] if has_results(folder) else sorted(folder.iterdir()) for folder in args.folders]
    rows = measured([one for some in folders for one in some])
    machine = Emulation()
    calm = [row for row in rows if row["status"] == "ok"]
    seen = {id(row) for row in calm[::2]} if args.fit else set()
    if args.fit:
        machine = fit(calm[::2], machine)
    found = []
    for row in rows:
        said = predict(row, machine)
        found.append(
            {
                "folder": row["folder"],
                "cell": row["cell"]["name"],
                "strategy": row["label"],
                "status": row["status"],
                "seen": id(row) in seen,
                "measured_s": _seconds(row),
                "predicted_s": said["seconds"],
                "measured_mb": max(row["link_bytes_sent"]) / 1e6,
                "predicted_mb": said["sent"] / 1e6,
                "measured_gib": row.get("peak_gib"),
                "predicted_gib": said["gib"],
            }
        )
        print(json.dumps(found[-1]), flush=True)
    environment = {"command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d")}
    content = {"environment": environment, "machine": asdict(machine), "rows": found}
    (args.out / "prediction.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (args.out / "table.md").write_text("\n".join(table(environment, machine, found)) + "\n", encoding="utf-8")
    (args.out / "reasons.md").write_text("\n".join(reasons(rows, machine)) + "\n", encoding="utf-8")
    draw(found, args.out / "chart.png")


def table(environment: dict[str, Any], machine: Emulation, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown."""
    good = [row for row in rows if row["status"] == "ok"]
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in good]
    unseen = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in good if not row["seen"]]
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in asdict(machine).items())
    near = sum(error <= FAR for error in errors)
    apart = (
        f"{len(unseen)} of them not looked at for the numbers of the machine: median {statistics.median(unseen):.1%}, "
        f"largest {max(unseen):.1%}."
        if len(unseen) < len(good)
        else "The numbers of the machine are those of `Emulation`, which were chosen with such rows in sight."
    )
    lines = [
        f"{environment['date']}, `{environment['command']}`",
        "",
        f"{len(good)} rows that are not void: {near} ({near / len(good):.0%}) within {FAR:.0%}, "
        f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}; {apart}",
        "",
        f"The machine: {numbers}.",
        "",
        "| suite | cell | strategy | measured s | predicted s | error | MB sent | predicted | GiB | predicted |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda one: -abs(one["predicted_s"] / one["measured_s"] - 1)):
        notes = ("void" * (row["status"] == "void"), "fitted" * row["seen"])
        name = row["strategy"] + "".join(f", {note}" for note in notes if note)
        known = row["measured_gib"] is not None
        gib = [f"{row[name]:.2f}" if known else "-" for name in ("measured_gib", "predicted_gib")]
        lines.append(
            f"| {row['folder']} | {row['cell']} | {name} | {row['measured_s']:.2f} | {row['predicted_s']:.2f} "
            f"| {row['predicted_s'] / row['measured_s'] - 1:+.1%} | {row['measured_mb']:.1f} "
            f"| {row['predicted_mb']:.1f} | {gib[0]} | {gib[1]} |"
        )
    return lines


def reasons(rows: Sequence[dict[str, Any]], machine: Emulation) -> list[str]:
    """Markdown: what stands between what dependencies allow and what was measured, in seconds, by the clock.

    The first is what remains without anything that the machine adds: buffers are few, links are shared, and a lane does
    one thing after another, which the bound does not know. Then what the clock would be faster without each of the
    others, and what it does not see at all. They need not add up: one hides behind another.
    """
    head = ["suite", "cell", "strategy", "measured s", "of dependencies", "order and sharing", *CAUSES, "not seen"]
    lines = ["", "| " + " | ".join(head) + " |", "| --- | --- | --- |" + " ---: |" * (len(head) - 3)]
    nothing = replace(machine, **{name: value for one in CAUSES.values() for name, value in one.items()})
    for row in rows:
        bound, seconds = row["dependency_bound_s"], _seconds(row)
        if not bound or bound >= NEAR_BOUND * seconds:
            continue
        said = predict(row, machine)["seconds"]
        parts = [said - predict(row, replace(machine, **one))["seconds"] for one in CAUSES.values()]
        numbers = [predict(row, nothing)["seconds"] - bound, *parts, seconds - said]
        name = row["label"] + ", void" * (row["status"] == "void")
        cells = [row["folder"], row["cell"]["name"], name, f"{seconds:.2f}", f"{bound / seconds:.3f}"]
        lines.append("| " + " | ".join([*cells, *(f"{number:+.2f}" for number in numbers)]) + " |")
    return ["What stands between what dependencies allow and what was measured, in seconds, by the clock.", *lines]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted over measured, with a band of 7 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7))
    for status, color in (("ok", "#2a6fdb"), ("void", "#b0b4bb")):
        some = [row for row in rows if row["status"] == status]
        x, y = [row["measured_s"] for row in some], [row["predicted_s"] for row in some]
        axes.scatter(x, y, s=18, color=color, label=status)
    ends = [min(row["measured_s"] for row in rows) * 0.8, max(row["measured_s"] for row in rows) * 1.25]
    axes.plot(ends, ends, color="#111", linewidth=1)
    axes.fill_between(ends, [one * 0.93 for one in ends], [one * 1.07 for one in ends], color="#2a6fdb", alpha=0.12)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds per step", ylabel="predicted", xlim=ends, ylim=ends)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
