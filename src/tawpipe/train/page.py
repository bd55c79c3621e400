"""HTML page of a run: plan, curves and recorded step, from the files in the run's folder."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tawpipe.console import duration
from tawpipe.data.report import DataReport
from tawpipe.errors import UserError
from tawpipe.report.bars import executed_bars, predicted_bars, recordings
from tawpipe.report.figures import heat_map, lines
from tawpipe.report.page import Section, Table, page_text, timeline_section, write_page
from tawpipe.train.judging.retrieval import Retrieval
from tawpipe.train.judging.sample import FILE as SAMPLES
from tawpipe.train.lock import is_held
from tawpipe.train.planned import PLAN, STRATEGIES
from tawpipe.train.settings.config import TrainConfig

CURVES = (
    ("Loss", ("loss", "validation_loss"), "loss per token"),
    ("Gradient norm", ("grad_norm",), "norm"),
    ("Speed", ("tokens_per_second",), "tokens per second"),
    ("Imbalance", ("imbalance", "compute_imbalance"), "busiest process / mean"),
    ("Busiest expert", ("busiest_expert",), "its tokens / an even share"),
    ("Memory", ("peak_memory_gib", "predicted_memory_gib"), "peak memory in GiB, rank 0"),
)
"""Title, names in metrics.jsonl and unit of each chart."""

METRICS = "metrics.jsonl"
SAMPLES_SHOWN = 50
"""Number of texts on the page, the latest ones."""
RECENT_S = 300.0
"""Seconds since its last row in which a run is expected to write more, although no process is seen to hold its lock."""

PAGE_SETTINGS = ("model", "data", "sequence_length", "global_batch", "steps", "learning_rate", "seed")
"""Settings of config.yaml that ``run_page`` shows."""


def write_run_page(
    path: Path,
    config: TrainConfig,
    before: Sequence[tuple[str, str]],
    after: Sequence[tuple[str, str]],
    retrieval: Retrieval | None = None,
    data: DataReport | None = None,
) -> None:
    """Write the page of a finished run: settings, plan, results and curves over the steps.

    Args:
        path: HTML file to write.
        config: settings of the run.
        before: rows that the console printed before the first step.
        after: rows that the console printed after the last step.
        retrieval: result of the last retrieval check; None without one.
        data: report about the data; None to leave out.
    """
    folder = config.output_path
    rows, damage = read_rows(folder / METRICS)
    sections = [
        *_damage(damage),
        Section("Result", table=Table(("", ""), [list(row) for row in after if row[0] != "sample"]), beside=True),
        Section("Settings", table=Table(("", ""), [list(row) for row in before]), beside=True),
        *_plan(folder, rows),
        *_lengths(data),
        *_learned(data),
        *_curves(rows),
        *_by_position(rows),
        *_retrieval(retrieval),
        *_samples(folder),
        *_recorded(folder),
    ]
    write_page(path, "Run", _title(config.model, folder), sections, subtitle=f"{config.output}, {config.steps} steps")


def run_page(folder: Path) -> str:
    """Return the HTML page of a run from the files in its output folder; the run may still be training.

    The page says whether the run goes on, and lists the damaged lines of metrics.jsonl.

    Raises:
        UserError: metrics.jsonl is missing or wholly damaged, or config.yaml is damaged.
    """
    rows, damage = read_rows(folder / METRICS)
    settings = _settings(folder)
    known = [
        [name.replace("_", " "), _in_words(settings[name])] for name in PAGE_SETTINGS if settings.get(name) is not None
    ]
    state, changes = _state(folder, rows[-1]["step"] if rows else None, settings.get("steps"))
    sections = [
        *_damage(damage),
        Section("So far", state, Table(("", ""), _so_far(rows, settings)), beside=True),
        *([Section("Settings", table=Table(("", ""), known), beside=True)] if known else []),
        *_plan(folder, rows),
        *_curves(rows),
        *_by_position(rows),
        *_samples(folder),
    ]
    title = _title(settings.get("model") or "", folder)
    subtitle = f"{folder}, {len(rows)} rows of {METRICS}"
    return page_text("Run", title, sections, subtitle=subtitle, changes=changes)


def _state(folder: Path, step: int | None, steps: object) -> tuple[str, bool]:
    """Return a sentence about the state of a run, and True if the run may still write to its files.

    Args:
        folder: output folder of the run.
        step: last step with a row; None before the first.
        steps: number of steps in the settings; another type if not known.
    """
    written, now = (folder / METRICS).stat().st_mtime, time.time()
    total = steps if isinstance(steps, int) else None
    progress = "no step yet" if step is None else f"step {step:,}" + (f" of {total:,}" if total else "")
    at, as_of = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) for moment in (written, now))
    if is_held(folder):
        ago = duration(max(0.0, now - written))
        return f"Running: {progress}, last written {ago} ago (as of {as_of}).", True
    if step is not None and total is not None and step >= total:
        return f"All steps done: {progress}, last written {at}.", False
    return f"Not running on this machine: {progress}, last written {at}.", now - written < RECENT_S


def _title(model: str, folder: Path) -> str:
    """Return the title of the page: the last part of the model's name, and the name of the run's folder."""
    return ": ".join(filter(None, (Path(model).name, folder.resolve().name)))


def _in_words(value: Any) -> str:
    """Return the value of a setting as text; numbers have thousands separators, lists have commas."""
    return ", ".join(map(str, value)) if isinstance(value, list) else f"{value:,}" if type(value) is int else str(value)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read metrics.jsonl, and return its rows and the line numbers of damaged lines.

    A last line without a line end, which is still being written, is ignored. Rows get ``peak_memory_gib`` and
    ``predicted_memory_gib`` from the values in bytes.

    Raises:
        UserError: the file cannot be read, or all of its lines are damaged.
    """
    try:
        lines_read = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError("metrics", str(path), f"the file of numbers that a run writes ({error.strerror})") from error
    rows: list[dict[str, Any]] = []
    damage: list[int] = []
    for number, line in enumerate(lines_read[:-1], 1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError("step")
        except (ValueError, KeyError, TypeError):
            damage.append(number)
            continue
        for name in ("peak_memory", "predicted_memory"):
            if row.get(f"{name}_bytes") is not None:
                row[f"{name}_gib"] = row[f"{name}_bytes"] / 2**30
        rows.append(row)
    if damage and not rows:
        raise UserError("metrics", str(path), "a JSON object with `step` on every line, as a run writes it")
    return rows, damage


def _settings(folder: Path) -> dict[str, Any]:
    """Read the settings of the run from config.yaml; an empty dict if there is no such file."""
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError("settings", str(path), f"the YAML that a run writes ({error})") from error
    return settings if isinstance(settings, dict) else {}


def _damage(lines_left_out: Sequence[int]) -> Iterator[Section]:
    """Yield a section that names the damaged lines of metrics.jsonl, if there are any."""
    if lines_left_out:
        some = ", ".join(map(str, lines_left_out[:10])) + (", ..." if len(lines_left_out) > 10 else "")
        words = f"Skipped in {METRICS}: {len(lines_left_out)} lines that are no rows of numbers ({some})."
        yield Section("Damaged lines", words)


def _so_far(rows: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> list[list[str]]:
    """Return table rows (name, value) about a run so far: latest step and losses, median speed, peak memory."""
    if not rows:
        return [["steps", "none yet"]]
    steps = settings.get("steps")
    cells = [["step", f"{rows[-1]['step']:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")]]
    for name, words in (("loss", "{:.4f}"), ("validation_loss", "{:.4f}"), ("grad_norm", "{:.3g}")):
        last = next((row for row in reversed(rows) if row.get(name) is not None), None)
        if last is not None:
            cells.append([name.replace("_", " "), f"{words.format(last[name])} after step {last['step']}"])
    for name, title in (("tokens_per_second", "tokens per second, median"), ("seconds", "seconds per step, median")):
        if values := [row[name] for row in rows[1:] or rows if row.get(name)]:
            median = statistics.median(values)
            cells.append([title, f"{median:,.0f}" if median >= 100 else f"{median:.3g}"])
    if peaks := [row["peak_memory_gib"] for row in rows if "peak_memory_gib" in row]:
        predicted_gib = rows[-1].get("predicted_memory_gib")
        cells.append(
            [
                "peak memory, rank 0",
                f"{max(peaks):.2f} GiB" + (f", predicted {predicted_gib:.2f} GiB" if predicted_gib else ""),
            ]
        )
    return cells


def _learned(data: DataReport | None) -> Iterator[Section]:
    """Yield a section with the learned text of the first document and with the counts of data that was left out."""
    if data is not None and data.example:
        learned_lines = [*data.read.lines("training files"), *data.example_lines()]
        yield Section("Learned tokens", lines="\n".join(learned_lines))


def _lengths(data: DataReport | None) -> Iterator[Section]:
    """Yield a section with the distribution of document lengths, and with the balance between processes."""
    if data is None or (histogram := data.histogram) is None:
        return
    shares = {"documents": histogram.documents, "tokens": histogram.tokens}
    names = [f"up to {edge:,}" for edge in histogram.edges]
    figure = lines(
        names,
        {name: [100 * share for share in values] for name, values in shares.items()},
        x_title="tokens of a document",
        y_title="percent of all",
        log=False,
    )
    table = None
    if (balance := data.balance) is not None:
        cells = [["packed by tokens", f"{balance.before:.3f}"], ["balanced by time", f"{balance.after:.3f}"]]
        table = Table(("documents of the first steps", "busiest process over the mean, modelled"), cells)
    yield Section("Lengths of documents", table=table, figures=[figure])


def _plan(folder: Path, rows: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Yield sections about the plan, if there is one: prediction of a step beside measured ones, other strategies."""
    if not (folder / PLAN).is_file():
        return
    plan = yaml.safe_load((folder / PLAN).read_text(encoding="utf-8"))
    took = sorted(row["seconds"] for row in rows[1:] if row.get("seconds"))
    table = None
    if took and plan.get("step_seconds"):
        predicted, median = plan["step_seconds"], took[len(took) // 2]
        cells = {
            "predicted": f"{predicted:.3f}",
            "median": f"{median:.3f}",
            "difference": f"{median / predicted - 1:+.1%}",
        }
        table = Table(("", "seconds per step"), [[name, value] for name, value in cells.items()])
    strategy = plan.get("strategy") or plan["schedule"].get("strategy", "")  # a plan for training may lack it
    others = folder / STRATEGIES
    listed = others.read_text(encoding="utf-8") if others.is_file() else ""
    words = plan["reason"] if plan["reason"].startswith(strategy) else f"{strategy}: {plan['reason']}"
    yield Section("Plan", words, table, beside=True)
    if listed:
        yield Section("Reason for each strategy not chosen", lines=listed)


def _curves(rows: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Yield a section with a chart for each of ``CURVES`` that has values."""
    steps = [row["step"] for row in rows]
    for title, names, unit in CURVES:
        series = {name.removesuffix("_gib").replace("_", " "): [row.get(name) for row in rows] for name in names}
        series = {name: values for name, values in series.items() if any(value is not None for value in values)}
        if series:
            chart = lines(steps, series, x_title="step", y_title=unit, log=False)
            chart.update_traces(connectgaps=True, selector={"name": "validation loss"})  # few steps have one
            yield Section(title, figures=[chart], beside=True)


def _by_position(rows: Sequence[dict[str, Any]]) -> Iterator[Section]:
    """Yield a section with the loss over positions in a document, for the first and the last evaluation."""
    measured = [row for row in rows if row.get("validation_by_position")]
    if measured:
        last = measured[-1]["validation_by_position"]
        same = [row for row in measured if row["validation_by_position"].keys() == last.keys()]
        series = {f"step {row['step']}": list(row["validation_by_position"].values()) for row in (same[0], same[-1])}
        x_title = "tokens of the document before the predicted one"
        curve = lines([f"to {e}" for e in last], series, x_title=x_title, y_title="loss per token", log=False)
        yield Section("Validation loss by position", figures=[curve])


def _retrieval(retrieval: Retrieval | None) -> Iterator[Section]:
    """Yield a section with the results of the last retrieval check, by length and depth."""
    if retrieval is None:
        return
    lengths, depths = (list(dict.fromkeys(each)) for each in zip(*retrieval.cells, strict=True))
    cells = [[retrieval.cells[length, depth] for length in lengths] for depth in depths]
    figure = heat_map(
        [f"{length:,}" for length in lengths],
        [f"{depth:.4g}" for depth in depths],
        [[cell.retrieved / cell.asked for cell in row] for row in cells],
        [[f"{cell.retrieved} of {cell.asked}<br>loss {cell.loss:.2f}" for cell in row] for row in cells],
        x_title="tokens of the row",
        y_title="depth of the fact",
    )
    words = f"{retrieval}. Depth 0 is the beginning of the row, 1 stands before the question. A fact is found if every "
    words += "token of its answer is the likeliest; the loss is that per token of the answers."
    yield Section("Hidden facts", words, figures=[figure])


def _samples(folder: Path) -> Iterator[Section]:
    """Yield a section with the latest sample texts, the newest first."""
    if (path := folder / SAMPLES).is_file():
        rows = [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"
        ]
        cells = [[str(row["step"]), row["prompt"], row["text"]] for row in rows[: -SAMPLES_SHOWN - 1 : -1]]
        yield Section("Samples", table=Table(("step", "prompt", "text"), cells))


def _recorded(folder: Path) -> Iterator[Section]:
    """Yield sections with the timeline of the recorded step (``--log.trace-step``) and of the same step in the plan."""
    recorded = recordings(folder)
    if not recorded:
        return
    if (folder / PLAN).is_file():
        from tawpipe.plan.search.plan_file import replay

        timeline, left_out = replay(folder / PLAN)
        title = "Predicted step" + (f": {left_out}" if left_out else "")
        yield timeline_section(title, predicted_bars(timeline))
    yield timeline_section(f"{recorded[-1].name} as recorded", executed_bars(recorded[-1]))
