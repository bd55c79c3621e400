"""Rows of a comparison as a Markdown table and as a chart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tawpipe_lab.cluster.links import Links

COLORS = {"ours": "#2a6fdb", "shipped": "#b0b4bb"}
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
"""A column more, where a real model was trained."""
HELD = "boundary activations held, of room for"
"""A column more, where the memory of a device is limited."""
DOCUMENTS = (
    "tokens/s",
    "s that the dealing alone takes",
    "of the floor",
    "balanced is faster by (modelled)",
    "of that",
)
"""Columns more, where documents of uneven lengths were dealt."""
SERVED = ("groups", "ms to the next token (predicted)", "s to the first (predicted)", "tokens/s", "of the formula")
"""Columns more, where a model is served."""


MORE = {"real": (LOSS,), "lengths": DOCUMENTS, "serving": SERVED}
"""Columns more, by kind of workload."""


def cells_of(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by the name of their cell, in their order."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(row["cell"]["name"], []).append(row)
    return cells


def write_table(name: str, environment: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """A table per cell, the fastest strategy first."""
    lines = [f"# {name}", "", f"{environment['date']}, `{environment['command']}`, {environment['machine']}", ""]
    for some in cells_of(rows).values():
        columns = [*COLUMNS, *MORE.get(some[0]["cell"]["workload"].get("kind", ""), ())]
        columns += [HELD] * any("held" in row for row in some)
        balanced = next((row for row in some if "tokens_per_second" in row and "balanced" in row["strategy"]), None)
        lines += [
            f"## {title(some[0]['cell'])}",
            "",
            describe(some[0]),
            "",
            "| " + " | ".join(columns) + " |",
            "| --- | --- " + "| ---: " * (len(columns) - 2) + "|",
        ]
        lines += [_table_row(row, len(columns), balanced) for row in sorted(some, key=order_of)]
        lines += ["", *_disturbance_table(some)]
    path.write_text("\n".join(lines), encoding="utf-8")


def title(cell: dict[str, Any]) -> str:
    """A cell's name and its cluster."""
    latency = f", {late} of latency" if (late := cell.get("latency")) else ""
    speeds = f", devices of speeds {cell['speeds']}" if cell.get("speeds") else ""
    in_a_row = f", {many} steps in a row" if (many := cell.get("steps_in_a_row")) else ""
    return f"{cell['name']}: {cell['nodes']} nodes x {cell['local']}, {cell['rate']}{latency}{speeds}{in_a_row}"


def describe(row: dict[str, Any]) -> str:
    """The workload of a row, and what its links carried, in words."""
    sleeps = row["cell"]["workload"].get("inside_sleeps")
    said = _workload(row) + (" What passes inside a node sleeps, too." if sleeps else "")
    if "links" not in row:
        return said
    links = Links.from_spelled_out(row["links"])
    return f"{said} Links carry {links}." + (f" Note: {links.trouble}." if links.trouble else "")


def _is_real(row: dict[str, Any]) -> bool:
    return row["cell"]["workload"].get("kind") == "real"


def _is_of_documents(row: dict[str, Any]) -> bool:
    return row["cell"]["workload"].get("kind") == "lengths"


def _workload(row: dict[str, Any]) -> str:
    workload = row["cell"]["workload"]
    if _is_of_documents(row):
        floor = f" No dealing is faster than {row['floor_s']:.2f} s." if "floor_s" in row else ""
        return (
            f"{workload['layers']} layers of {workload['layer_bytes'] / 1e6:g} MB, each {workload['token_s'] * 1e6:g} "
            f"us forward for a token, and as long for its attention in a document of {workload['even_at']} tokens; "
            f"{workload['tokens']} tokens in documents of lognormal({workload['mu']:g}, {workload['sigma']:g}) tokens, "
            f"at most {workload['max_document']}, in bins of at most {workload['bin_tokens']}.{floor}"
        )
    if workload.get("kind") == "serving":
        return (
            f"{workload['layers']} layers, each {1e3 * workload['forward_s']:g} ms on a pass of {workload['slots']} "
            f"users and {1e3 * workload['chunk_s']:g} ms more with a chunk of {workload['chunk']} tokens, the "
            f"embedding {1e3 * workload['embedding_s']:g} ms; a token has {workload['token_bytes']} bytes between "
            f"stages. A step is {workload['laps']} laps, then prompts of {workload['chunks']} chunks, in turn."
        )
    if _is_real(row):
        return (
            f"A Llama of {workload['layers']} layers, hidden size {workload['hidden_size']}, intermediate size "
            f"{workload['intermediate_size']}, {workload['heads']} heads, {workload['vocabulary']} tokens in the "
            f"vocabulary; {workload['micro_batches']} micro-batches of {workload['sequence_length']} tokens, AdamW."
        )
    backward_s = workload["backward_input_s"] + workload["backward_weight_s"]
    ends, frozen = "", ""
    if untrained := workload.get("frozen_bytes"):
        frozen = f" and {untrained / 1e6:g} MB that are frozen"
    if embedding := workload.get("embedding_bytes"):
        head = "tied to it" if workload["tied"] else f"of {workload['head_bytes'] / 1e6:g} MB"
        ends = f"an embedding of {embedding / 1e6:g} MB, a head {head} with {workload['head_s']:g} s, "
    if "head" in workload.get("kinds", {}):
        ends = f"a head with {sum(workload['kinds']['head'].values()):.3g} s, "
    if room := workload.get("room"):
        ends += f"room for {room:g} boundary activations, of which one passes the host's link in "
        ends += f"{workload['host_s']:g} s, "
    if rate := workload.get("homes_bytes_per_s"):
        ends += f"{rate / 1e6:g} MB/s to homes in the host's memory, "
    each = "on the mean" if workload.get("pattern") else "each"
    return (
        f"{workload['layers']} layers of {workload['layer_bytes'] / 1e6:g} MB{frozen}, {each} "
        f"{workload['forward_s']:.4g} s forward and {backward_s:.4g} s backward, {ends}"
        f"{workload['micro_batches']} micro-batches."
    )


def _disturbance_table(rows: list[dict[str, Any]]) -> list[str]:
    """A table of what slow spells of the nodes have added, where they were measured."""
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
    """Seconds per step; rows without come last."""
    return row["seconds_per_step"]["median"] if "seconds_per_step" in row else float("inf")


def _number(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _idle(row: dict[str, Any]) -> str:
    """Seconds in which a device did not compute, and those before its first and after its last computing."""
    edges = row.get("idle_start_s"), row.get("idle_end_s")
    whole = _number(row["exposed_communication_s"], 2)
    return whole if None in edges else f"{whole} ({edges[0]:.2f}, {edges[1]:.2f})"


def _documents(row: dict[str, Any], balanced: dict[str, Any] | None) -> list[str]:
    """The columns of documents of uneven lengths.

    Args:
        balanced: the row with which others are compared: the first one that deals documents by time.
    """
    seconds, dealt_s = order_of(row), row["modelled_s"]
    columns = [f"{row['tokens_per_second']:.0f}", f"{dealt_s:.2f}", f"{row['floor_s'] / seconds:.3f}"]
    if balanced is None:
        return [*columns, "-", "-"]
    gain, modelled = seconds / order_of(balanced), dealt_s / balanced["modelled_s"]
    return [*columns, f"{gain:.2f} ({modelled:.2f})", f"{gain / modelled:.3f}"]


def _served(row: dict[str, Any]) -> list[str]:
    """The columns of a model that is served."""
    token, first = row["token_s"], row["first_s"]
    return [
        str(row["groups"]),
        f"{1e3 * token:.1f} ({1e3 * row['token_s_predicted']:.1f})",
        f"{first:.3f} ({row['first_s_predicted']:.3f})",
        f"{row['tokens_per_second']:.0f}",
        f"{row['of_formula']:.3f}",
    ]


def _table_row(row: dict[str, Any], num_columns: int, balanced: dict[str, Any] | None) -> str:
    if "seconds_per_step" not in row:
        empty = "| " * (num_columns - 3)
        return f"| {row['label']} | {row['origin']} | {row['status']}: {row['reason']} {empty}|"
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
        _number(row["peak_gib"], 2) + (f" ({said:.2f})" if (said := row.get("peak_gib_predicted")) else ""),
    ]
    if "token_s" in row:
        columns += _served(row)
    elif _is_real(row):
        columns.append(_number(row["loss"][-1], 5))
    elif _is_of_documents(row):
        columns += _documents(row, balanced)
    elif len(columns) < num_columns:
        room = row["cell"]["workload"]["room"]
        columns.append(f"{row['held']:.1f}, {room:g}" if "held" in row else "-")
    return "| " + " | ".join(columns) + " |"


def write_chart(name: str, rows: list[dict[str, Any]], path: Path) -> None:
    """Seconds per step as bars, the physical bound as a mark on each, void rows hatched; one panel per cell."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = {
        cell: [r for r in some if "seconds_per_step" in r and r["status"] != "failed"]
        for cell, some in cells_of(rows).items()
    }
    cells = {cell: sorted(some, key=order_of, reverse=True) for cell, some in cells.items() if some}
    if not cells:
        return
    heights = [len(some) for some in cells.values()]
    figure, axes = pyplot.subplots(
        len(cells), 1, figsize=(9, 1.2 + 0.34 * sum(heights) + 0.8 * len(cells)), squeeze=False, height_ratios=heights
    )
    for axis, (cell, some) in zip(axes[:, 0], cells.items(), strict=True):
        medians = [row["seconds_per_step"]["median"] for row in some]
        bars = axis.barh([row["label"] for row in some], medians, color=[COLORS[row["origin"]] for row in some])
        for bar, row in zip(bars, some, strict=True):
            if row["status"] == "void":
                bar.set_hatch("//")
            middle = bar.get_y() + bar.get_height() / 2
            bound = row["physical_bound_s"]
            axis.plot([bound, bound], [bar.get_y(), bar.get_y() + bar.get_height()], color="#111", linewidth=2)
            axis.text(bar.get_width(), middle, f" {bar.get_width():.2f} s", va="center", fontsize=8)
        axis.set_title(f"{name}, {cell}", loc="left", fontsize=10)
        axis.set_xlim(0, max(medians) * 1.12)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    legend = "seconds per step; black: physical bound; blue: in this project's runtime; hatched: void"
    figure.supxlabel(legend, x=0.01, ha="left", fontsize=9)  # under long labels, too
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
