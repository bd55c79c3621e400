"""What happens when things break: every kind of fault in every place, on several topologies; and many in a long run.

    python benchmarks/faults.py matrix --out benchmarks/results/DATE-faults     # under 20 minutes on two cores
    python benchmarks/faults.py soak --out benchmarks/results/DATE-soak         # 2,000 steps

A case is a small run of a few steps that saves now and then. Its fault is injected (`tawpipe.runtime.watch.faults`),
the run ends or does not, and is started again as a launcher with restarts would, until it is done. It **survived** if
the fault has happened, no start had to be ended by force, the newest checkpoint is then the same, bit by bit, as that
of a run without a fault, all that are listed as complete are sound, and no more steps were repeated than promised.
Counted are the steps that were done twice, the seconds from a start to its first new step, and what is left behind:
processes, files that belong to no complete checkpoint, shared memory. Processes are forked from one that has imported
everything, so that a start takes a fraction of a second; the launcher's own part is in ``tests``. Ends with 1 if a case
was lost."""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from faulty_runs import EVERY, STEPS, TOPOLOGIES, Bench, Start, adopt_strays, fingerprint, left_behind, shared_memory
from tawpipe.checkpoint.format import damage, read_manifest
from tawpipe.checkpoint.names import complete_states
from tawpipe.runtime.watch.faults import KINDS, ONLY, PLACES
from tawpipe.train.saying.metrics import last_step

FAULTY_STEP = 5
NOT_PROMISED = "bitflip in memory"
MOST_REPEATED = 2 * EVERY
"""A save's distance, and the steps that ran while the newest one was being written."""
ENDS = ("kill", "exit", "hang", "nan", "error")
"""Kinds after which a run has to be started again, but for an error at a save."""
SPOILED = ("save", "bitflip")


def cases(topologies: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(topology, kind, place): every kind in every place that it can have and the topology has."""
    for topology in topologies:
        nodes, local, _ = TOPOLOGIES[topology]
        for kind in KINDS:
            for place in ONLY.get(kind, PLACES):
                if (place in ("pull", "push") and nodes == 1) or (place in ("gather", "reduce") and local == 1):
                    continue
                if place == "pull" and topology.endswith("hsdp"):  # every node has all weights
                    continue
                if topology.endswith("memory") and kind not in ("kill", "exit", "hang"):
                    continue
                yield topology, kind, place


def faults_of(kind: str, place: str, ranks: int) -> str:
    """As --inject has them. What happens while loading needs an earlier fault, so that something is loaded."""
    rank = ranks - 1
    if place == "load":
        return f"rank=0,step={FAULTY_STEP},at=update,kind=exit;rank={rank},step=1,at=load,kind={kind},restart=1"
    step = FAULTY_STEP - 1 if place == "save" else FAULTY_STEP
    fault = f"rank={rank},step={step},at={place},kind={kind},seconds=0.5"
    if (place, kind) == ("save", "bitflip"):  # something must make it be read again; the next save waits for this one
        fault += f";rank=0,step={STEPS},at=save,kind=exit"
    return fault


def run_case(bench: Bench, topology: str, kind: str, place: str, expected: list[str]) -> dict[str, Any]:
    """One case from its first start to its last."""
    nodes, local, _ = TOPOLOGIES[topology]
    output = bench.folder / "runs" / f"{topology}-{kind}-{place}".replace(" ", "")
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    before = shared_memory()
    config = bench.config(output, topology, "--inject", faults_of(kind, place, nodes * local))
    starts: list[Start] = []
    repeated: list[int] = []
    recovery = 0.0
    while len(starts) < 4:
        reached = last_step(output)
        starts.append(bench.start(config, len(starts)))
        if len(starts) > 1:
            first = re.search(r"resumed from .*?: step (\d+)", starts[-1].output)
            if starts[-1].first_step_s is not None:  # else it has ended before it repeated anything
                repeated.append(max(0, reached - int(first[1]) if first else reached))
            recovery = max(recovery, starts[-1].first_step_s or starts[-1].seconds)
        if not any(starts[-1].codes):
            break
    problems = []
    if any(starts[-1].codes) or any(2 in one.codes for one in starts):
        problems.append("it did not end well")
    if any(one.forced for one in starts):
        problems.append("it had to be ended by force")
    if fingerprint(output) != expected:
        problems.append("other weights")
    if max(repeated, default=0) > MOST_REPEATED + (kind == "bitflip") * EVERY:  # the damaged one is skipped
        problems.append("too many steps repeated")
    needed = 1 + (kind in ENDS and (place, kind) != ("save", "error")) + (place == "load" or (place, kind) == SPOILED)
    if kind != "bitflip" or place == "save":
        problems += ["the fault has not happened"] if len(starts) < needed else []
    if (place, kind) == SPOILED and not any("skipped step-" in one.output for one in starts):
        problems.append("the fault has not happened")
    for path in complete_states(output / "checkpoints"):
        record = read_manifest(path)
        if (place, kind) != SPOILED and (bad := damage(path, record, range(len(record["files"])))):
            problems.append(f"{path.name}: {bad}")
    left = left_behind(output, bench, before)
    result = {
        "kind": kind,
        "place": place,
        "topology": topology,
        "survived": not problems,
        "problems": problems,
        "promised": not (kind == "bitflip" and place != "save"),
        "starts": len(starts),
        "detected_s": round(starts[place == "load"].seconds, 2),
        "repeated_steps": sum(repeated),
        "recovery_s": round(recovery, 2),
        "left_behind": left,
        "codes": [start.codes for start in starts],
        "forced": any(start.forced for start in starts),
    }
    if result["survived"]:
        shutil.rmtree(output)
    return result


def matrix(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """All cases."""
    expected = {}
    for topology in args.topologies:
        output = bench.folder / "runs" / f"reference-{topology}".replace(" ", "")
        output.mkdir(parents=True)
        start = bench.start(bench.config(output, topology), 0)
        assert not any(start.codes), start.output
        expected[topology] = fingerprint(output)
        again = bench.folder / "runs" / f"again-{topology}".replace(" ", "")
        again.mkdir(parents=True)
        bench.start(bench.config(again, topology), 0)
        assert fingerprint(again) == expected[topology], "two runs without a fault differ"
    begin = time.perf_counter()
    found = []
    for topology, kind, place in cases(args.topologies):
        if args.only and args.only not in (kind, place):
            continue
        if args.cases and f"{kind}:{place}" not in args.cases:
            continue
        found.append(run_case(bench, topology, kind, place, expected[topology]))
        one = found[-1]
        print(
            f"{time.perf_counter() - begin:6.0f} s  {topology:14} {kind:9} {place:8} "
            f"{'survived' if one['survived'] else 'LOST'} {'; '.join(one['problems'] + one['left_behind'])}, "
            f"{one['repeated_steps']} repeated, {one['codes']}",
            flush=True,
        )
    return {"cases": found, "seconds": round(time.perf_counter() - begin)}


def matrix_table(content: dict[str, Any]) -> list[str]:
    """Markdown: a row for every kind and place."""
    found = content["cases"]
    promised = [one for one in found if one["promised"]]
    others = [one for one in found if not one["promised"]]
    survived, most = sum(one["survived"] for one in promised), max(one["repeated_steps"] for one in promised)
    lines = [
        f"{content['environment']['date']}, `{content['environment']['command']}`, {content['seconds']} s",
        "",
        f"{survived} of {len(promised)} cases survived that the promises cover; at most {most} steps repeated; "
        f"{sum(bool(one['left_behind']) for one in found)} left something behind. Not covered: {NOT_PROMISED}, of "
        f"which {sum(one['survived'] for one in others)} of {len(others)} ended with the same weights.",
        "",
        "| kind | place | survived | starts | until the end, s: median (most) | steps repeated "
        "| until the next step, s: median (most) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind in KINDS:
        for place in PLACES:
            same = [one for one in found if (one["kind"], one["place"]) == (kind, place)]
            if same:
                lines.append(
                    f"| {kind} | {place} | {sum(one['survived'] for one in same)} of {len(same)} "
                    f"| {max(one['starts'] for one in same)} "
                    f"| {_typical([one['detected_s'] for one in same])} "
                    f"| {max(one['repeated_steps'] for one in same)} "
                    f"| {_typical([one['recovery_s'] for one in same])} |"
                )
    return lines


def _typical(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})"


def soak(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Many steps with faults at random, and the same without."""
    topology = "2 x 2"
    words = ("--steps", str(args.steps), "--checkpoint.every", "25", "--checkpoint.keep", "2", "--log.every", "50")
    words += ("--timeouts.step-s", "6")
    (bench.folder / "runs").mkdir(exist_ok=True)
    plain = bench.folder / "runs" / "plain"
    plain.mkdir()
    first = bench.start(bench.config(plain, topology, *words), 0, watch=True)
    assert not any(first.codes), first.output
    random_ = random.Random(args.seed)
    kinds = [kind for kind in KINDS if kind not in ("bitflip", "slow", "disk-full")]  # those that end a run
    spread = range(60, args.steps - 60, max(60, (args.steps - 120) // args.faults))
    steps = [step + random_.randrange(25) for step in spread][: args.faults]
    faults = []
    for restart, step in enumerate(steps):
        kind = random_.choice(kinds)
        never = ("load", "save") if kind == "error" else ("load",)  # a save that fails does not end a run
        place = random_.choice([one for one in ONLY.get(kind, PLACES) if one not in never])
        if place == "save":
            step = -(-step // 25) * 25
        faults.append(f"rank={random_.randrange(4)},step={step},at={place},kind={kind},restart={restart}")
    shared = shared_memory()
    output = bench.folder / "runs" / "soaked"
    output.mkdir()
    config = bench.config(output, topology, *words, "--inject", ";".join(faults))
    starts = []
    repeated = []
    while len(starts) <= len(faults) + 3:
        reached = last_step(output)
        starts.append(bench.start(config, len(starts), watch=True))
        if len(starts) > 1:
            resumed = re.search(r"resumed from .*?: step (\d+)", starts[-1].output)
            if starts[-1].first_step_s is not None:
                repeated.append(max(0, reached - int(resumed[1]) if resumed else reached))
        print(f"start {len(starts)}: {starts[-1].codes}, {starts[-1].seconds:.0f} s", flush=True)
        if not any(starts[-1].codes):
            break
    assert len(starts) == len(faults) + 1, "a fault that was to end the run has not"
    longest = first.peaks
    quarter = max(1, len(longest["rss_mb"]) // 4)
    flat = {
        name: [
            round(statistics.median(values[quarter : 2 * quarter]), 1),
            round(statistics.median(values[-quarter:]), 1),
        ]
        for name, values in longest.items()
        if values
    }
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (plain, output)
    ]
    return {
        "steps": args.steps,
        "faults": faults,
        "starts": len(starts),
        "repeated_steps": repeated,
        "same_weights": fingerprint(plain) == fingerprint(output),
        "same_losses": losses[0] == losses[1],
        "left_behind": left_behind(output, bench, shared),
        "second_and_last_quarter": flat,
        "seconds": [round(first.seconds, 1), round(sum(start.seconds for start in starts), 1)],
        "codes": [start.codes for start in starts],
    }


def soak_table(content: dict[str, Any]) -> list[str]:
    """Markdown."""
    flat = content["second_and_last_quarter"]
    lines = [
        f"{content['environment']['date']}, `{content['environment']['command']}`",
        "",
        f"{content['steps']} steps on 2 x 2, {len(content['faults'])} faults, {content['starts']} starts, "
        f"{content['seconds'][1]:.0f} s ({content['seconds'][0]:.0f} s without faults). Weights of the newest "
        f"checkpoint {'the same bit by bit' if content['same_weights'] else 'NOT the same'}, losses of all steps "
        f"{'the same' if content['same_losses'] else 'NOT the same'}. Steps repeated after a fault: at most "
        f"{max(content['repeated_steps'], default=0)}, {sum(content['repeated_steps'])} in all.",
        "",
        "Rank 0 without faults, medians of the second and of the last quarter of the time: "
        + ", ".join(f"{name} {first} and {last}" for name, (first, last) in flat.items())
        + ".",
        "",
        "| fault | exit codes |",
        "| --- | --- |",
    ]
    for fault, codes in zip(content["faults"], content["codes"], strict=False):
        lines.append(f"| {fault} | {codes} |")
    return lines


def main() -> int:
    adopt_strays()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=("matrix", "soak"))
    parser.add_argument("--out", type=Path, default=Path("faults"))
    parser.add_argument("--topologies", nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES))
    parser.add_argument("--only", help="cases of one kind or place")
    parser.add_argument("--cases", nargs="+", metavar="KIND:PLACE", help="these alone")
    parser.add_argument("--steps", type=int, default=2000, help="of the soak")
    parser.add_argument("--faults", type=int, default=12, help="of the soak")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    environment = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory(prefix="tawpipe-faults-") as folder:
        bench = Bench(Path(folder))
        content = {"environment": environment, **(matrix if args.what == "matrix" else soak)(bench, args)}
        args.out.mkdir(parents=True, exist_ok=True)
        name = "cases" if args.what == "matrix" else "soak"
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        lines = (matrix_table if args.what == "matrix" else soak_table)(content)
        (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for case in content.get("cases", ()):
            if case["promised"] and not case["survived"]:
                case_folder = Path(folder) / "runs"
                for log in sorted(
                    case_folder.glob(f"{case['topology']}-{case['kind']}-{case['place']}*.log".replace(" ", ""))
                ):
                    shutil.copy(log, args.out)
        print("\n".join(lines[2:3]))
    if args.what == "soak":
        return 0 if content["same_weights"] and content["same_losses"] and not content["left_behind"] else 1
    return 0 if all(one["survived"] or not one["promised"] for one in content["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
