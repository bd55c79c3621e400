"""Markdown table of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from tawpipe_lab.cluster.links import Links
from tawpipe_lab.workload import KINDS

COLUMNS = (
    "strategy",
    "origin",
    "s/step (min-max)",
    "physical bound",
    "of it",
    "dependency bound",
    "of it",
    "MB sent per node (predicted)",
    "not computing s (at the start, at the end)",
    "CPU",
    "peak GiB (predicted)",
)
LOSS = "loss of the last step"
"""Header of the column that is added if a real model was trained."""
HELD = "boundary activations held, of room for"
"""Header of the column that is added if the memory of a device is limited."""
DOCUMENTS = (
    "tokens/s",
    "s that the dealing alone takes",
    "of the floor",
    "balanced is faster by (modelled)",
    "of that",
)
"""Headers of the columns that are added for documents of uneven lengths."""
SERVED = ("groups", "ms to the next token (predicted)", "s to the first (predicted)", "tokens/s", "of the formula")
"""Headers of the columns that are added if a model is served."""


MORE = {"real": (LOSS,), "lengths": DOCUMENTS, "serving": SERVED}
"""Kind of workload -> headers of its additional columns."""


def cells_of(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by the name of their cell, in their order."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["cell"]["name"], []).append(row)
    return cells


def write_table(name: str, environment: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Write a Markdown file with one table per cell, the fastest strategy first.

    Args:
        name: name of the suite.
        environment: date, command and machine of the run.
        path: file to write.
    """
    lines = [f"# {name}", "", f"{environment['date']}, `{environment['command']}`, {environment['machine']}", ""]
    for some in cells_of(rows).values():
        head, texts = table_of(some)
        lines += [f"## {title(some[0]['cell'])}", "", describe(some[0]), "", "| " + " | ".join(head) + " |"]
        lines.append("| --- | --- " + "| ---: " * (len(head) - 2) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in texts]
        lines += ["", *_disturbance_table(some)]
    path.write_text("\n".join(lines), encoding="utf-8")


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header of a cell's table, and its rows as texts, the fastest strategy first."""
    head = [*COLUMNS, *MORE.get(_kind(rows[0]), ())]
    head += [HELD] * any("held" in row for row in rows)
    balanced = next((row for row in rows if "tokens_per_second" in row and "balanced" in row["strategy"]), None)
    return head, [_table_row(row, len(head), balanced) for row in sorted(rows, key=order_of)]


def title(cell: dict[str, Any]) -> str:
    """Return the title of a cell: its name, and its cluster as text."""
    latency = f", {late} of latency" if (late := cell.get("latency")) else ""
    speeds = f", devices of speeds {cell['speeds']}" if cell.get("speeds") else ""
    in_a_row = f", {many} steps in a row" if (many := cell.get("steps_in_a_row")) else ""
    return f"{cell['name']}: {cell['nodes']} nodes x {cell['local']}, {cell['rate']}{latency}{speeds}{in_a_row}"


def describe(row: dict[str, Any]) -> str:
    """Return text about the workload of a row, and what its links carried if they were measured."""
    if "links" not in row:
        return _workload(row)
    links = Links.from_spelled_out(row["links"])
    return f"{_workload(row)} Links carry {links}." + (f" Note: {links.trouble}." if links.trouble else "")


def _kind(row: dict[str, Any]) -> str:
    return row["cell"]["workload"].get("kind", "timed")


def _workload(row: dict[str, Any]) -> str:
    """Return text with the settings of a row's workload that are not at their defaults."""
    workload = {name: value for name, value in row["cell"]["workload"].items() if not isinstance(value, dict)}
    usual = {item.name: item.default for item in fields(KINDS[_kind(row)])} | {"kind": _kind(row)}
    settings = [(name, value) for name, value in workload.items() if value != usual.get(name)]
    words = [f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings]
    floor = f" No dealing is faster than {row['floor_s']:.2f} s." if "floor_s" in row else ""
    return f"Workload ({_kind(row)}): {', '.join(words)}.{floor}"


def _disturbance_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table of the seconds that slow spells of the nodes added to a step.

    Returns no lines if they were not measured.
    """
    disturbed = sorted((row for row in rows if "disturbance" in row), key=lambda row: row["disturbance"]["added_s"])
    if not disturbed:
        return []
    slow = rows[0]["cell"]["slow"]
    lines = [
        f"Every node, by itself, computes {slow['factor']:g} times as slowly for {slow['share']:.0%} of the time, in "
        f"spells of {slow['spell_s']:g} s. Seconds per step, means:",
        "",
        "| strategy | added | largest delay of a node | sum of the nodes' delays | of the way from largest to sum |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in disturbed:
        added, largest, total = (
            row["disturbance"][key] for key in ("added_s", "largest_node_delay_s", "sum_of_node_delays_s")
        )
        way = f"{(added - largest) / (total - largest):.2f}" if total > largest else "-"
        lines.append(f"| {row['label']} | {added:.2f} | {largest:.2f} | {total:.2f} | {way} |")
    return [*lines, ""]


def order_of(row: dict[str, Any]) -> float:
    """Return the median seconds per step of a row for sorting; infinity for a row without measurements."""
    return row["seconds_per_step"]["median"] if "seconds_per_step" in row else float("inf")


def _number(value: float | None, places: int) -> str:
    """Return a number with ``places`` decimal places; ``-`` for None."""
    return "-" if value is None else f"{value:.{places}f}"


def _idle(row: dict[str, Any]) -> str:
    """Return the seconds in which a device did not compute, as text.

    Seconds before its first and after its last computation follow in parentheses if they are known.
    """
    edges = row.get("idle_start_s"), row.get("idle_end_s")
    whole = _number(row["exposed_communication_s"], 2)
    return whole if None in edges else f"{whole} ({edges[0]:.2f}, {edges[1]:.2f})"


def _documents(row: dict[str, Any], balanced: dict[str, Any] | None) -> list[str]:
    """Return the texts of the additional columns for a row with documents of uneven lengths.

    Args:
        row: the row.
        balanced: row to compare with: the first one that assigns documents by time; None if there is none.
    """
    seconds, dealt_s = order_of(row), row["modelled_s"]
    columns = [f"{row['tokens_per_second']:.0f}", f"{dealt_s:.2f}", f"{row['floor_s'] / seconds:.3f}"]
    if balanced is None:
        return [*columns, "-", "-"]
    gain, modelled = seconds / order_of(balanced), dealt_s / balanced["modelled_s"]
    return [*columns, f"{gain:.2f} ({modelled:.2f})", f"{gain / modelled:.3f}"]


def _served(row: dict[str, Any]) -> list[str]:
    """Return the texts of the additional columns for a row that serves a model."""
    token, first = row["token_s"], row["first_s"]
    return [
        str(row["groups"]),
        f"{1e3 * token:.1f} ({1e3 * row['token_s_predicted']:.1f})",
        f"{first:.3f} ({row['first_s_predicted']:.3f})",
        f"{row['tokens_per_second']:.0f}",
        f"{row['of_formula']:.3f}",
    ]


def _table_row(row: dict[str, Any], num_columns: int, balanced: dict[str, Any] | None) -> list[str]:
    """Return the texts of all columns of a row; for a row without measurements its status and reason."""
    if "seconds_per_step" not in row:
        return [row["label"], row["origin"], f"{row['status']}: {row['reason']}", *[""] * (num_columns - 3)]
    seconds = row["seconds_per_step"]
    median = seconds["median"]
    sent, predicted = max(row["link_bytes_sent"]) / 1e6, max(row["link_bytes_predicted"]) / 1e6
    physical, dependency = row["physical_bound_s"], row["dependency_bound_s"]
    note = row.get("reason") if row["status"] == "ok" else row["status"]
    columns = [
        f"{row['label']} ({note})" if note else row["label"],
        row["origin"],
        f"{median:.2f} ({seconds['min']:.2f}-{seconds['max']:.2f})",
        f"{physical:.2f}",
        f"{physical / median:.3f}",
        _number(dependency, 2),
        _number(dependency and dependency / median, 3),
        f"{sent:.1f} ({predicted:.1f})",
        _idle(row),
        f"{row['cpu_busy']:.0%}",
        _number(row["peak_gib"], 2)
        + (f" ({predicted_gib:.2f})" if (predicted_gib := row.get("peak_gib_predicted")) else ""),
    ]
    if "token_s" in row:
        columns += _served(row)
    elif _kind(row) == "real":
        columns.append(_number(row["loss"][-1], 5))
    elif _kind(row) == "lengths":
        columns += _documents(row, balanced)
    elif len(columns) < num_columns:
        memory_limit = row["cell"]["workload"]["room"]
        columns.append(f"{row['held']:.1f}, {memory_limit:g}" if "held" in row else "-")
    return columns
