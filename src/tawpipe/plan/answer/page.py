"""HTML pages for a plan, a saved plan, and the longest rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.answer.longest import ASSUMPTIONS, HEAD, Longest, LongestRow
from tawpipe.plan.cost.predict import Prediction, memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.candidate import GAIN, Candidate
from tawpipe.plan.search.plan import SYSTEM, Plan
from tawpipe.plan.search.plan_file import load_plan, replay
from tawpipe.report.bars import predicted_bars
from tawpipe.report.figures import lines, memory_figure, stacked_bars
from tawpipe.report.page import Section, Table, check_page, page_text, timeline_section, write_page
from tawpipe.simulate import LinkModel

RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Factors of the link rate for which step times are drawn."""
LENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors of the sequence length for which throughput is drawn."""
SHORTER = tuple(2.0**-n for n in range(6, -1, -1))
"""Lengths of rows for which curves are drawn, relative to the longest row."""
COMPARED = 4
"""Strategies in the figures over the length of rows."""
SHOWN = 5
"""Strategies in the figures over link rate and sequence length."""


def write_plan_page(plan: Plan, path: Path) -> None:
    """Write the HTML page of a plan.

    Raises:
        UserError: the folder does not exist.
    """
    check_page(str(path))
    length = f"rows of {plan.request.sequence_length} tokens"
    title = plan.chosen.strategy if plan.chosen else "Nothing fits"
    write_page(path, "Plan", title, _sections(plan), subtitle=_subtitle(plan.request, length))


def saved_plan_page(path: Path) -> str:
    """Return the HTML of a saved plan: choice, reason, settings, and the step, which is simulated again.

    Raises:
        UserError: the file is no plan.
    """
    plan = load_plan(path)
    timeline, left_out = replay(path)
    settings = [
        [name.replace("_", " "), str(value)] for name, value in plan["schedule"].items() if value not in ("", None)
    ]
    asked = ("nodes", "global_batch", "micro_batch", "sequence_length", "step_seconds")
    cells = [[name.replace("_", " "), str(plan[name])] for name in asked if name in plan]
    sections = [
        Section("Why", plan["reason"], Table(("", ""), cells), beside=True),
        Section("Settings", "As followed by the run.", Table(("", ""), settings), beside=True),
        timeline_section("Predicted step", predicted_bars(timeline), left_out),
    ]
    return page_text("Plan", str(plan.get("strategy") or plan["schedule"].get("strategy", "")), sections)


def write_longest_page(longest: Longest, path: Path) -> None:
    """Write the HTML page of the longest rows.

    Raises:
        UserError: the folder does not exist.
    """
    check_page(str(path))
    sections = _longest_sections(longest)
    write_page(path, "Plan", "Longest rows", sections, subtitle=_subtitle(longest.request, "one document per row"))


def _subtitle(request: PlanRequest, rows: str) -> str:
    """Return the line below a page's title: model size, batch, machines and source of the profile."""
    parameters = sum(unit.parameters for unit in request.model.units) / 1e9
    step = f"{rows}, {request.global_batch} per step"
    return f"{parameters:.3g} B parameters, {step}; {request.machine.topology}; {request.profile.source}"


def _sections(plan: Plan) -> Iterator[Section]:
    """Yield the sections of a plan's page: a table, then figures of time, memory, traffic and variants."""
    request = plan.request
    shown = [candidate for candidate in plan.candidates if candidate.prediction is not None]
    rows = [line.split("\t") for line in plan.table(separator="\t", everything=True)]
    marked = [i for i, candidate in enumerate(plan.listed(everything=True)) if candidate is plan.chosen]
    equal = ", ".join(candidate.strategy for candidate in plan.as_fast)
    words = plan.reason + (
        f". Equally fast, within {GAIN:.1%}: {equal}. The choice loads the links least." if equal else ""
    )
    words += f". {plan.micro_batch}" if plan.micro_batch else ""
    if left_out := list(plan.left_out(everything=True)):
        words += f". Not in the table: {'; '.join(left_out)}."
    yield Section("Strategies", words, Table(rows[0], rows[1:], marked))
    chosen = plan.chosen.strategy if plan.chosen else None
    names = [candidate.strategy for candidate in shown]
    predictions = [candidate.prediction for candidate in shown if candidate.prediction is not None]
    parts = {
        "computing": [each.step_seconds - each.idle_s if each.timeline else 0.0 for each in predictions],
        "waiting for transfers": [prediction.exposed_communication_s for prediction in predictions],
        "idle otherwise": [
            max(0.0, prediction.idle_s - prediction.exposed_communication_s) for prediction in predictions
        ],
    }
    yield Section(
        "Time of a step by activity",
        "Mean over devices.",
        figures=[stacked_bars(names, parts, unit="s", chosen=chosen)],
    )
    limit = request.memory_bytes / 2**30 if request.memory_bytes else None
    yield Section(
        "Device memory by use",
        f"Peak; {SYSTEM}.",
        figures=[stacked_bars(names, memory_parts(predictions), unit="GiB", limit=limit, chosen=chosen)],
    )
    if request.topology.num_nodes > 1:
        moved = {"over the busiest link": [prediction.link_bytes / 1e9 for prediction in predictions]}
        yield Section("Bytes between nodes per step", figures=[stacked_bars(names, moved, unit="GB", chosen=chosen)])
    yield from _chosen(plan)
    yield from _changes(plan, shown[:SHOWN])


def _chosen(plan: Plan) -> Iterator[Section]:
    """Yield the timeline of the chosen step and its memory over time; nothing if it was not simulated."""
    chosen = plan.chosen
    if chosen is None or chosen.prediction is None or chosen.prediction.timeline is None:
        return
    timeline, request = chosen.prediction.timeline, plan.request
    rounds = timeline.schedule.step.rounds
    whole = chosen.step.rounds if chosen.step else rounds
    words = f"{rounds} of {whole} rounds are drawn; the others are equal." if rounds < whole else ""
    yield timeline_section(f"A step of {chosen.strategy}", predicted_bars(timeline), words)
    rank = timeline.schedule.played[0]
    fixed = sum(size for name, size in chosen.prediction.memory.items() if name not in ("activations",))
    sizes = request.activations_of(timeline.schedule.step.sequence_ranks)
    figure = memory_figure(chosen.strategy, timeline, rank, sizes, fixed)
    yield Section("Memory during the step", figures=[figure])


def _changes(plan: Plan, shown: Sequence[Candidate]) -> Iterator[Section]:
    """Yield figures of how the step time depends on the links' rate, and the throughput on the sequence length.

    The shown candidates keep their settings; each point is simulated."""
    request = plan.request
    ours = [candidate for candidate in shown if candidate.step is not None]
    chosen = plan.chosen.strategy if plan.chosen else None

    def series(asked: Sequence[PlanRequest]) -> dict[str, list[float | None]]:
        return {candidate.strategy: [_seconds(variant, candidate) for variant in asked] for candidate in ours}

    if request.topology.num_nodes > 1:
        gbits = [request.machine.between.bytes_per_s * factor * 8 / 1e9 for factor in RATES]
        title = "Gbit/s between nodes"
        seconds = series([_on_links(request, factor) for factor in RATES])
        figure = lines(gbits, seconds, x_title=title, y_title="s per step", chosen=chosen)
        yield Section("With other links", "Seconds per step.", figures=[figure])
    lengths = [max(2, round(request.sequence_length * factor)) for factor in LENGTHS]
    rows = request.global_batch / request.topology.world_size
    per_second = {
        name: [seconds and length * rows / seconds for length, seconds in zip(lengths, curve, strict=True)]
        for name, curve in series([request.with_length(length) for length in lengths]).items()
    }
    title = "tokens per second and device"
    figure = lines(lengths, per_second, x_title="tokens in a row", y_title=title, chosen=chosen)
    yield Section(
        "With other sequence lengths", "Same number of sequences per step; one document per row.", figures=[figure]
    )


def _on_links(request: PlanRequest, factor: float) -> PlanRequest:
    """Return the request with links between nodes that are ``factor`` times as fast."""

    def faster(link: LinkModel) -> LinkModel:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    links = {node: faster(link) for node, link in request.machine.between_of.items()}
    machine = replace(request.machine, between=faster(request.machine.between), between_of=links)
    return replace(request, machine=machine)


def _seconds(request: PlanRequest, candidate: Candidate) -> float | None:
    """Return the seconds of a step with the settings of ``candidate``; None if they cannot work for ``request``."""
    assert candidate.step is not None
    with suppress(UserError):
        return predict(request, candidate.step).step_seconds
    return None


def _longest_sections(longest: Longest) -> Iterator[Section]:
    """Yield the sections of the page of the longest rows."""
    best, limit = longest.best, longest.request.memory_bytes / 2**30
    marked = [i for i, row in enumerate(longest.rows) if row is best]
    table = Table(HEAD, [row.cells() for row in longest.rows], marked)
    words = ". ".join(filter(None, (longest.reason, ASSUMPTIONS)))
    yield Section(best.strategy if best else "Nothing fits", words, table)
    if best is None:
        return
    shown = [(row.strategy, row.prediction) for row in longest.rows if row.prediction is not None]
    parts = memory_parts([prediction for _, prediction in shown])
    names = [name for name, _ in shown]
    figure = stacked_bars(names, parts, unit="GiB", limit=limit or None, chosen=best.strategy)
    yield Section("Device memory by use", f"Peak, with the longest row; {SYSTEM}.", figures=[figure])
    yield from _over_lengths([row for row in longest.rows if row.tokens][:COMPARED], limit, best.strategy)


def _over_lengths(rows: Sequence[LongestRow], limit: float, chosen: str) -> Iterator[Section]:
    """Yield figures of step time and memory over the row length, one curve for each strategy.

    Each strategy keeps the settings of its longest row, at which its curve ends. Step times are simulated."""
    most = max(row.tokens for row in rows)
    lengths = sorted({max(2, round(most * share)) for share in SHORTER} | {row.tokens for row in rows})
    asked = [
        [(row.request.with_length(length), row.step) for length in lengths if length <= row.tokens]
        for row in rows
        if row.request is not None and row.step is not None
    ]

    def figure(values: Sequence[Sequence[float]], unit: str, limit: float = 0.0) -> Any:
        """Return a figure with one curve per strategy that ends at its longest row, where a mark names the limit."""
        names = [row.strategy for row in rows]
        marks = {name: (curve[-1], row.binds) for name, curve, row in zip(names, values, rows, strict=True)}
        series = {
            name: [*curve, *[None] * (len(lengths) - len(curve))] for name, curve in zip(names, values, strict=True)
        }
        title = "tokens in a row"
        return lines(lengths, series, x_title=title, y_title=unit, ends=marks, limit=limit, chosen=chosen)

    words = "Step time of the longest rows, each with its own settings; a cross marks the end and names the limit."
    seconds = [[predict(request, step).step_seconds for request, step in of_row] for of_row in asked]
    yield Section("Seconds per step by row length", words, figures=[figure(seconds, "s per step")])
    needs = [[memory_quickly(request, step) for request, step in of_row] for of_row in asked]
    for where, name in (("a device", "device"), ("a node's host", "host"), ("a node's disk", "files")):
        held = [[getattr(total, name) / 2**30 for total in of_row] for of_row in needs]
        if any(map(any, held)):
            line = limit if name == "device" else 0.0
            yield Section(f"Memory of {where} by row length", words, figures=[figure(held, "GiB", line)])


def memory_parts(predictions: Sequence[Prediction]) -> dict[str, list[float]]:
    """Return the GiB of every part of memory, one number for each prediction; 0 where a prediction lacks the part."""
    parts = dict.fromkeys(kind for prediction in predictions for kind in prediction.memory)
    return {kind: [prediction.memory.get(kind, 0) / 2**30 for prediction in predictions] for kind in parts}
