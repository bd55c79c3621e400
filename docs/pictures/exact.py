"""What coding saves without loss: seconds per step over a slow link, with and without exact changes of weights."""

from __future__ import annotations

import json

from drawing import Drawing
from measured import RESULTS

FOLDER, CELL = "2026-11-26-exact-again", "100 Mbit/s"
CHANGES = "bf16 True, changes runs/exact/{}.pt, weights_compression exact"
STEP = {
    "exact weights and gradients, rate 1e-5": CHANGES.format("1e-05") + ", gradients_compression exact",
    "exact weights, rate 1e-5": CHANGES.format("1e-05"),
    "exact weights, rate 3e-4": CHANGES.format("3e-04"),
    "8 bits both ways, rounded": "bf16 True, weights_compression int8, gradients_compression int8",
    "as it is": "bf16 True",
}
RIVALS = {"HSDP": "hsdp", "FSDP2, weights kept": "fsdp2 (reduction ring, keep_weights True, reduce_every_round False)"}
"""Labels of the lab's rows."""
LEFT, TOP, PITCH, WIDTH = 334, 66, 24, 486


def exact() -> str:
    """The picture as SVG."""
    results = json.loads((RESULTS / FOLDER / "results.json").read_text(encoding="utf-8"))
    seconds = {
        row["label"]: row["seconds_per_step"]["median"] for row in results["rows"] if row["cell"]["name"] == CELL
    }
    bars = [(f"tawpipe-step, {name}", seconds[f"tawpipe-step ({knobs})"], "weight") for name, knobs in STEP.items()]
    bars += [(name, seconds[label], "rival") for name, label in RIVALS.items()]
    picture = Drawing(880, TOP + PITCH * len(bars) + 12, "Seconds per step with and without exact changes of weights")
    picture.text(16, 26, "Seconds per step, 2 nodes x 2, 100 Mbit/s between nodes", size=15, bold=True)
    picture.text(16, 46, "shorter is better; exact: every number has the same bits", "soft")
    scale = WIDTH / max(value for _, value, _ in bars)
    for number, (name, value, color) in enumerate(bars):
        y = TOP + PITCH * number
        picture.text(LEFT - 8, y + 13, name, anchor="end", size=12)
        picture.rect(LEFT, y, value * scale, PITCH - 7, color)
        picture.text(LEFT + value * scale + 6, y + 13, f"{value:.2f}", size=12)
    return picture.svg()
