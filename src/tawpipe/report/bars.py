"""One step over time, as bars of actions: predicted by the clock or recorded in a run.

A recording is a folder with a JSON file for every rank, written by ``runtime.recording``: ``{"format": 1, "rank": 0,
"node": 0, "step": 7, "spans": [["COMPUTE FORWARD b1 m0 | ...", begin, end], ...]}``. Times are seconds of the machine's
clock. Times of ranks on different machines differ by the offset of their clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tawpipe.errors import UserError
from tawpipe.schedule.actions import Action, Lane, Op, Transfer
from tawpipe.schedule.buffers import Kind
from tawpipe.simulate.timeline import Timeline

FORMAT = 1
TRACES = "traces"
"""Name of the folder with recorded steps, in the output folder of a run."""


KINDS = {
    "forward": "#4c78a8",
    "backward": "#1f4e79",
    "update": "#7a5195",
    "weights between nodes": "#e4572e",
    "weights inside a node": "#f3a683",
    "gradients between nodes": "#2e933c",
    "gradients inside a node": "#9bc995",
    "sums, norm": "#8d99ae",
    "host": "#c9a227",
    "keys and values": "#d67ab1",
    "backward, for weights": "#8fb3d9",
    "activations": "#00a6a6",
    "gradients of activations": "#7fd1ae",
}
"""Kinds of actions that are distinguished, and their colours."""


@dataclass(frozen=True)
class Bar:
    """One action over time, in seconds.

    Args:
        rank: rank that runs the action.
        node: node of the rank.
        action: the action.
        start: time from which its lane is free.
        begin: time at which the action begins. The time from ``start`` is waiting: in a prediction for everything that
            the action needs, in a recording only for what it needs on its own rank. A recording counts waiting for
            other ranks as part of the bar.
        end: time at which the action ends.
    """

    rank: int
    node: int
    action: Action
    start: float
    begin: float
    end: float


def predicted_bars(timeline: Timeline, *, step: int | None = None) -> list[Bar]:
    """Return the bars of one step of a simulation. Times count from the beginning of its first bar.

    Args:
        timeline: the simulation.
        step: number of the step; by default a step in the steady state.
    """
    step = timeline.steady_step if step is None else step
    ranks = range(timeline.schedule.topology.world_size)
    spans = [span for rank in ranks for span in timeline.spans(rank, step=step)]
    zero = min((span.begin for span in spans), default=0.0)
    nodes = timeline.physical
    return [
        Bar(span.rank, nodes.node_of(span.rank), span.action, span.start - zero, span.begin - zero, span.end - zero)
        for span in spans
    ]


def executed_bars(folder: Path) -> list[Bar]:
    """Read the bars of a recorded step. Times count from the beginning of its first bar.

    Args:
        folder: has a ``rank-*.json`` file for every rank.

    Raises:
        UserError: the folder has no recording, or a file is damaged or has another format.
    """
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        raise UserError("trace", str(folder), "a folder with rank-*.json, which a run with --log.trace-step writes")
    bars: list[Bar] = []
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise UserError("trace", str(path), f"a recording of format {FORMAT}, not {content['format']}")
            free: dict[Lane, float] = {}
            rank, node = int(content["rank"]), int(content["node"])
            for text, *times in content["spans"]:
                action = Action.parse(str(text))
                begin, end = map(float, times)
                start = min(begin, free.get(action.lane, begin))
                bars.append(Bar(rank, node, action, start, begin, end))
                free[action.lane] = end
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError("trace", str(path), f"a recording of a step ({error})") from error
    zero = min((bar.begin for bar in bars), default=0.0)
    return [Bar(bar.rank, bar.node, bar.action, bar.start - zero, bar.begin - zero, bar.end - zero) for bar in bars]


def recordings(run: Path) -> list[Path]:
    """Return the folders of recorded steps in a run's output folder, sorted by name: the oldest step first."""
    return sorted(folder for folder in (run / TRACES).glob("step-*") if any(folder.glob("rank-*.json")))


def find_recording(path: Path) -> Path:
    """Return the folder with the files of the ranks: ``path`` itself, or the newest recording in a run's output folder.

    Raises:
        UserError: there is no recording.
    """
    if not path.is_dir():
        raise UserError("RUN", str(path), "the output folder of a run, a folder of a recorded step, or a plan")
    if any(path.glob("rank-*.json")):
        return path
    if not (recorded := recordings(path)):
        raise UserError("RUN", str(path), "a run with a recorded step: train with --log.trace-step N")
    return recorded[-1]


def first_of_nodes(bars: Sequence[Bar]) -> list[int]:
    """Return the lowest rank of every node, sorted; for a pipeline, whose ranks do different work, all ranks."""
    if any(map(_passes_activations, bars)):
        return sorted({bar.rank for bar in bars})
    lowest: dict[int, int] = {}
    for bar in bars:
        lowest[bar.node] = min(bar.rank, lowest.get(bar.node, bar.rank))
    return sorted(lowest.values())


def _passes_activations(bar: Bar) -> bool:
    """Return True if the action of the bar transfers activations or their gradients."""
    return any(transfer.buffer.is_activation for transfer in bar.action.transfers)


def kind_of(bar: Bar) -> str:
    """Return the kind of the bar's action, a key of ``KINDS``."""
    action = bar.action
    if action.op in (Op.OFFLOAD, Op.RELOAD, Op.RAISE):
        return "host"
    if action.op is Op.COLLECTIVE and action.reads and action.reads[0].is_activation:
        return "keys and values"
    if _passes_activations(bar):
        forward = action.transfers[0].buffer.kind is Kind.INPUT
        return "activations" if forward else "gradients of activations"
    if action.op in (Op.EXCHANGE, Op.COLLECTIVE):
        what = "weights" if (*action.reads, *action.writes)[0].is_weight else "gradients"
        far = action.lane in (Lane.INTER_W, Lane.INTER_G) or action.group in ("rail", "world")
        return f"{what} {'between nodes' if far else 'inside a node'}"
    known = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.ZERO: "backward", Op.UPDATE: "update"}
    known |= {Op.KEYS: "forward", Op.KEYS_BACKWARD: "backward", Op.PREPARE: "forward"}
    known |= {Op.BACKWARD_INPUT: "backward", Op.BACKWARD_WEIGHT: "backward, for weights"}
    return known.get(action.op, "sums, norm")


def lanes_of(bars: Sequence[Bar], ranks: Iterable[int]) -> list[tuple[int, Lane]]:
    """Return the rows of a timeline: (rank, lane) of every lane that each rank uses, in the order of ``Lane``."""
    used = {(bar.rank, bar.action.lane) for bar in bars}
    return [(rank, lane) for rank in ranks for lane in Lane if (rank, lane) in used]


def _what(transfer: Transfer) -> str:
    """Return the name of the transferred data: the buffer of an activation, or the unit as ``u4``."""
    return str(transfer.buffer) if transfer.buffer.is_activation else f"u{transfer.unit}"


def label(bar: Bar) -> str:
    """Return a short text for the action of a bar: ``FORWARD b3 m1``, ``all_gather u4``.

    >>> label(Bar(0, 0, Action.parse("COMPUTE FORWARD b3 m1 | W0.0 x.1.3 -> x.1.4"), 0, 0, 1))
    'FORWARD b3 m1'
    """
    action = bar.action
    words = [action.collective or action.op.value]
    if action.transfers:
        words.append(" ".join(f"{'>' if t.send else '<'}{t.peer}:{_what(t)}" for t in action.transfers))
    for letter, number in (("b", action.block), ("m", action.micro_batch), ("u", action.unit)):
        if number >= 0:
            words.append(f"{letter}{number}")
    return " ".join(words)
