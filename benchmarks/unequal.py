"""Devices of two speeds in a cluster: what plans make of them, dealt by speed and evenly. By the clock.

    python benchmarks/unequal.py --out benchmarks/results/DATE-unequal-plans

Half of the devices, or a third, are half as fast as the others. Weights travel: the stages of pipelines that are made
for costs know the speed of devices either way. A step would take the least if all devices computed for
equally long and waited for nothing: the seconds of all work on a fast device by the sum of the speeds. Writes
``table.md`` and ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plans import MODELS, model_folder
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.plan.cost.measure import INSIDE, LATENCY_S, Asked, request_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import Machine
from tawpipe.plan.search.search import search
from tawpipe.schedule.settings import DEFAULT
from tawpipe.simulate import LinkModel

NEW, OLD = Device("H100", 80 << 30), Device("A100", 80 << 30, speed=0.5)
MOST_S = 6.0
"""For which a plan is looked for."""
HOST = LinkModel(50e9, 1e-5, shared=False)


@dataclass(frozen=True)
class Case:
    """A cluster, a letter for every device of a node (n: new, o: old), and a batch for it."""

    nodes: tuple[str, ...]
    gbit: float
    tokens: int
    rows: int

    def machine(self, *, alike: bool) -> Machine:
        """The cluster; if asked, with new devices alone."""
        devices = tuple(OLD if letter == "o" and not alike else NEW for node in self.nodes for letter in node)
        between = LinkModel(self.gbit / 8 * 1e9, LATENCY_S)
        sizes = tuple(map(len, self.nodes))
        given = {"host": HOST, "device": devices[0], "host_bytes": 1 << 41, "device_of": devices}
        return Machine(sizes, between, INSIDE["GPU"], **given)  # type: ignore[arg-type]

    def __str__(self) -> str:
        names = {"n": "new", "o": "old"}
        return " + ".join(
            ", ".join(f"{node.count(letter)} {names[letter]}" for letter in dict.fromkeys(node)) for node in self.nodes
        )


CASES = (
    Case(("nnnn", "oooo"), 100, 32768, 48),
    Case(("nnnn", "oooo"), 10, 32768, 48),
    Case(("nnoo", "nnoo"), 100, 32768, 48),
    Case(("nnnn", "nnnn", "oooo"), 25, 32768, 60),
)


def planned(chain: Chain, case: Case, *, alike: bool = False, evenly: bool = False) -> dict[str, Any]:
    """The best plan of a case under which weights travel, and how much of all devices' speed it makes use of."""
    speeds = f"{sum(map(len, case.nodes))}x1" if evenly else ""
    asked = Asked(case.tokens, case.rows, profile="estimate", settings=replace(DEFAULT, device_speeds=speeds))
    request = request_of(chain, case.machine(alike=alike), asked)
    candidates = [candidate for candidate in search(request, most_s=lambda _: MOST_S) if candidate.fits]
    best = next(candidate for candidate in candidates if candidate.step and not candidate.step.strategy.axis)
    assert best.step is not None
    each = request.machine.speeds or (1.0,) * request.topology.world_size
    least = work_s(request, best.step) / sum(each)
    settings = best.chosen_settings()
    return {
        "strategy": best.strategy,
        "settings": settings,
        "step_seconds": best.seconds,
        "of_speeds": least / best.seconds,
    }


def work_s(request: PlanRequest, step: Any) -> float:
    """Seconds of a step's work on one device like the first, which is new."""
    return request.micro_batches * sum(request.block_seconds(step))


def main() -> None:
    """Plan and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chain = Chain(build_model(model_folder(**MODELS["8B, 32 layers"]), max_positions=32768).model)
    rows = []
    for case in CASES:
        rows.append(
            {
                "nodes": str(case),
                "gbit": case.gbit,
                "tokens": case.tokens,
                "rows": case.rows,
                "by speed": planned(chain, case),
                "evenly": planned(chain, case, evenly=True),
                "all new": planned(chain, case, alike=True),
            }
        )
        print(rows[-1], flush=True)
    lines = [
        f"`python benchmarks/unequal.py {shlex.join(sys.argv[1:])}`",
        "",
        "Llama 8B, by the clock. Old devices are half as fast as new ones. In brackets: of the sum of all speeds.",
        "",
        "| nodes | Gbit/s | tokens x rows | dealt by speed | dealt evenly | all new |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        cells = [row["nodes"], f"{row['gbit']:g}", f"{row['tokens']} x {row['rows']}"]
        for way in ("by speed", "evenly", "all new"):
            plan = row[way]
            cells.append(f"{plan['strategy']}: {plan['step_seconds']:.2f} s ({plan['of_speeds']:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (args.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
