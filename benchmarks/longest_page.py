"""The results of the longest row as a page."""

from __future__ import annotations

from typing import Any

PLACES = {"device": "without offloading", "host": "the host's memory", "files": "files"}
OWN = "tawpipe-chunked"


def page(content: dict[str, Any]) -> str:
    """The results as a page."""
    settings, rows, equal = content["settings"], content["rows"], content["equality"]
    lines = [
        f"# The longest row in {settings['memory_gib']} GiB",
        "",
        f"`{content['command']}`, {content['date']}, "
        + ", ".join(f"{name} {number}" for name, number in content["versions"].items() if number),
        "",
        "Anonymous memory of a step above the loaded model, per process: it stands for a device's. "
        f"{'A hybrid, Qwen3.5,' if settings['shape'].get('family') == 'qwen3_5' else 'A Llama'} in fp32: "
        f"{_spelled(settings['shape'])}. Layers' chunks of {settings['chunk']:,} tokens, {settings['loss_tokens']:,} "
        f"tokens of a chunked loss, {settings['threads']} thread a process, at most {settings['most_seconds']:.0f} s a "
        f"step. A row {settings['within']:.0%} longer than that written here did not fit.",
        "",
        "What waits for the backward pass waits on the device, or is written to files and read back: in a folder in "
        "memory, which stands for the host's, or on a disk. Neither is limited. That of others is everything that "
        "autograd saves outside of the recomputed layers, ours the inputs of layers.",
        "",
        f"| system | processes | {' | '.join(PLACES.values())} |",
        "| --- | --: | --: | --: | --: |",
    ]
    by_system: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_system.setdefault(row["system"], {})[row["place"]] = row
    lines += [
        f"| {system} | {next(iter(places.values()))['processes']} | "
        + " | ".join(_tokens(places.get(place)) for place in PLACES)
        + " |"
        for system, places in by_system.items()
    ]
    if compared := _compared(by_system):
        lines += ["", compared]
    lines += [
        "",
        "| system | waits in | longest row | GiB | GiB elsewhere | s a step | binds |",
        "| --- | --- | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        name = f"| {row['system']} | {row['place']} | "
        if row["tokens"] is None:
            lines.append(f"{name}- | - | - | - | {row['why_not']} |")
            continue
        lines.append(
            f"{name}{row['tokens']:,} | {row['peak_gib']:.3f} | {row['elsewhere_gib']:.3f} | {row['seconds']:.0f} | "
            f"{row['binds']} |"
        )
    lines += ["", "Seconds are one reading each, on a machine that others used too: they compare nothing."]
    if equal:
        lines += [
            "",
            f"On the same {equal['tokens']:,} tokens, {len(equal['losses'])} sides differ by at most "
            f"{equal['largest_relative_difference']:.0e} in the losses and gradient norms of two steps"
            + (f"; {', '.join(equal['missing'])} could not run." if equal["missing"] else "."),
        ]
    if content["count"]:
        lines += [
            "",
            "What the schedule counts for a step, beside what it takes above the loaded model:",
            "",
            "| system | tokens | model | counted GiB | taken GiB | counted / taken |",
            "| --- | --: | --- | --: | --: | --: |",
        ]
        lines += [
            f"| {one['system']} | {one['tokens']:,} | {_spelled(one['shape'])} | {one['predicted_gib']:.3f} | "
            f"{one['measured_gib']:.3f} | {one['ratio']:.3f} |"
            for one in content["count"]
        ]
    return "\n".join(lines) + "\n"


def _tokens(row: dict[str, Any] | None) -> str:
    return f"{row['tokens']:,}" if row and row["tokens"] is not None else "-"


def _compared(by_system: dict[str, dict[str, Any]]) -> str:
    """Ours divided by the best of the others on one process, place by place."""
    ratios = []
    for place, title in PLACES.items():
        here = [row[place] for row in by_system.values() if place in row and row[place]["tokens"]]
        own = next((row for row in here if row["system"] == OWN), None)
        others = [row for row in here if row["processes"] == 1 and not row["system"].startswith("tawpipe")]
        if own and others:
            best = max(others, key=lambda row: row["tokens"])
            ratios.append(f"{own['tokens'] / best['tokens']:.2f} of {best['system']} ({title})")
    return f"{OWN} is {', '.join(ratios)}." if ratios else ""


def _spelled(shape: dict[str, int]) -> str:
    return (
        "H {hidden}, {layers} layers, {heads} heads of {key_heads} keys and values, intermediate {intermediate}, "
        "vocabulary {vocabulary}"
    ).format(**shape)
