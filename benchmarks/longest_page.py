"""The results of the longest row as a page."""

from __future__ import annotations

from typing import Any


def page(content: dict[str, Any]) -> str:
    """The results as a page."""
    settings, rows, equal = content["settings"], content["rows"], content["equality"]
    tokens = {row["system"]: row["tokens"] for row in rows}
    ratio = lambda row, to: f"{row['tokens'] / tokens[to]:.1f}" if tokens.get(to) else "-"  # noqa: E731
    lines = [
        f"# The longest row in {settings['memory_gib']} GiB",
        "",
        f"`{content['command']}`, {content['date']}, "
        + ", ".join(f"{name} {number}" for name, number in content["versions"].items() if number),
        "",
        "Anonymous memory of a step above the loaded model, per process. A Llama in fp32: "
        f"{_spelled(settings['shape'])}. Layers' chunks of {settings['chunk']:,} tokens, {settings['threads']} thread "
        f"a process, at most {settings['most_seconds']:.0f} s a step. A row {settings['within']:.0%} longer than that "
        "written here did not fit. Seconds are one reading each, on a machine that others used too.",
        "",
        "| system | processes | longest row | x tawpipe | x huggingface-chunked-loss | GiB | GiB in files | s a step "
        "| binds |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for row in rows:
        name, processes = row["system"], row["processes"]
        if row["tokens"] is None:
            lines.append(f"| {name} | {processes} | - | - | - | - | - | - | {row['why_not']} |")
            continue
        lines.append(
            f"| {name} | {processes} | {row['tokens']:,} | {ratio(row, 'tawpipe')} | "
            f"{ratio(row, 'huggingface-chunked-loss')} | {row['peak_gib']:.3f} | {row['file_gib']:.3f} | "
            f"{row['seconds']:.0f} | {row['binds']} |"
        )
    if equal:
        lines += [
            "",
            f"On the same {equal['tokens']:,} tokens, {len(equal['losses'])} systems differ by at most "
            f"{equal['largest_relative_difference']:.0e} in the losses and gradient norms of two steps"
            + (f" (not seen: {', '.join(equal['missing'])})." if equal["missing"] else "."),
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


def _spelled(shape: dict[str, int]) -> str:
    return (
        "H {hidden}, {layers} layers, {heads} heads of {key_heads} keys and values, intermediate {intermediate}, "
        "vocabulary {vocabulary}"
    ).format(**shape)
