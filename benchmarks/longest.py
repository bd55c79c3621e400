"""How long a row does everybody train on in the same memory? One model in fp32, on the CPU of this machine.

    python benchmarks/longest.py --memory-gib 2 --out benchmarks/results/DATE-longest
    python benchmarks/longest.py --memory-gib 0.08 --shape 256,4,4,1,896,2048 --out DIR    # 15 minutes on two cores
    python benchmarks/longest.py --family qwen3_5 ... --systems huggingface deepspeed tawpipe-chunked    # a hybrid

Memory is what a step takes of anonymous memory above the loaded model (weights, gradients, states of AdamW), per
process: it stands for a device's. Bytes in files have a column of their own; a folder in memory stands for the host's.
Two short rows, and a third where the step is long, give memory as a line in the tokens; that predicts the longest row,
which is then looked for: what is written down has run, and a row at most a tenth longer has taken too much, of memory
or of time, and was ended there.

All sides first train on the same row, and have to agree on losses and norms of gradients. After that our own count of
memory is compared with what steps take. Rows that ``longest.json`` in --out has already are not run again, unless it
was made with other settings. A side is a system and a place.

Systems: ``huggingface`` is transformers' model with gradient checkpointing, ``-chunked-loss`` the same with logits of
1,024 positions at a time; ``fsdp2`` that on two processes with a row each. ``deepspeed`` is DeepSpeed's ALST, tiled MLP
and tiled loss, ``-kept`` the same without gradient checkpointing, ``-x2`` one row on two processes by Ulysses; they
need ``pip install deepspeed``. ``tawpipe`` computes whole rows, ``-chunked`` rows in chunks, ``-x2`` one row on two
processes. Places, where that waits which the backward pass needs: the device; ``-host``, its memory; ``-files``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from longest_probe import THREADS, CannotMeasure, Job, Reading, measure
from longest_sides import FAMILIES, LOSS_TOKENS, SIDES, TWO, Shape, parts_of, predicted_bytes

WARM_TOKENS = 64
"""Of the row before the one that is measured."""
WITHIN = 0.1
"""How much longer the row is that does not fit."""
GRAIN = 64
"""Lengths are multiples of it."""
TOLERANCE = 1e-4
COUNTED = (("tawpipe", 16384, None), ("tawpipe-chunked", 16384, None), ("tawpipe-chunked", 65536, "128,2,2,1,448,2048"))
"""Side, tokens and shape (that of the rows where none is given) where our count is compared."""
TITLES = {"device": "without offloading", "host": "the host's memory", "files": "files"}
OWN = "tawpipe-chunked"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--memory-gib", type=float, default=2.0, help="anonymous memory of a step, per process")
    parser.add_argument(
        "--shape",
        default=Shape().numbers,
        help="hidden size, layers, heads, heads of keys and values, intermediate size, vocabulary (%(default)s)",
    )
    parser.add_argument("--family", default="llama", choices=FAMILIES, help="of the model (%(default)s)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a layer's chunk (%(default)s)")
    parser.add_argument("--most-seconds", type=float, default=600.0, help="of a step (%(default)s)")
    parser.add_argument("--systems", nargs="*", default=SIDES, choices=SIDES, metavar="SYSTEM", help="all by default")
    parser.add_argument("--without-count", action="store_true", help="leave out what our count is compared with")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def next_length(readings: Sequence[Reading], *, most_bytes: float, most_seconds: float, first: int) -> int | None:
    """The next row to try; None if the longest is known within ``WITHIN``, or if none fits."""
    fitting = sorted((one for one in readings if not one.ended), key=lambda one: one.tokens)
    low = fitting[-1].tokens if fitting else 0
    high = min((one.tokens for one in readings if one.ended), default=None)
    if high is not None and high - low <= max(GRAIN, low * WITHIN):
        return None
    if len(fitting) < 2:
        wanted = (high + low) / 2 if high else 2 * low or first
    else:
        # A line through two that are apart, or noise would tilt it.
        shorter = [one for one in fitting if one.tokens <= 0.7 * low] or fitting[:1]
        guess = min(predict(shorter[-1], fitting[-1], most_bytes, most_seconds), 4 * low)
        wanted = guess * 0.97 if guess > low * 1.06 else max(guess * 1.03, low * 1.06)
        if high is not None and wanted > high * 0.99:
            wanted = math.sqrt(low * high)
    most = high - GRAIN if high is not None else math.inf
    return int(min(max(wanted // GRAIN * GRAIN, low + GRAIN), most))


def predict(short: Reading, long: Reading, most_bytes: float, most_seconds: float) -> float:
    """Tokens that take all that there is: memory is a line in the tokens, seconds a line and a square."""
    slope = (long.peak_bytes - short.peak_bytes) / (long.tokens - short.tokens)
    by_memory = long.tokens + (most_bytes - long.peak_bytes) / slope if slope > 0 else math.inf
    rates = [one.seconds / one.tokens for one in (short, long)]
    square = (rates[1] - rates[0]) / (long.tokens - short.tokens)
    line = rates[1] - square * long.tokens
    if square <= 0 or line < 0:  # noise
        line, square = rates[1], 0.0
    root = line + math.sqrt(line * line + 4 * square * most_seconds)
    return min(by_memory, 2 * most_seconds / root)


def longest(
    probe: Callable[[int], Reading], *, most_bytes: float, most_seconds: float, first: int
) -> tuple[Reading | None, list[Reading]]:
    """The longest row that fits, None if not even ``GRAIN`` tokens do; and all readings."""
    readings: list[Reading] = []
    while tokens := next_length(readings, most_bytes=most_bytes, most_seconds=most_seconds, first=first):
        readings.append(probe(tokens))
    return max((one for one in readings if not one.ended), key=lambda one: one.tokens, default=None), readings


class Benchmark:
    """The rows of one file of results."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.shape, self.path = args, Shape.read(args.shape, args.family), args.out / "longest.json"
        self.settings = {
            "memory_gib": args.memory_gib,
            "shape": asdict(self.shape),
            "dtype": "float32",
            "chunk": args.chunk,
            "loss_tokens": LOSS_TOKENS,
            "most_seconds": args.most_seconds,
            "threads": THREADS,
            "within": WITHIN,
            "optimizer": "AdamW",
        }
        self.content: dict[str, Any] = {"settings": self.settings, "equality": None, "count": [], "rows": []}
        if self.path.exists():
            there = json.loads(self.path.read_text())
            if there["settings"] == self.settings:
                self.content = there
        self.content |= {
            "command": shlex.join(["python", *sys.argv]),
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"python": platform.python_version(), **_versions("torch", "transformers", "deepspeed")},
            "machine": platform.platform(),
        }

    def job(self, side: str, *lengths: int, shape: Shape | None = None) -> Job:
        processes = 2 if parts_of(side)[0] in TWO else 1
        return Job(side, processes, asdict(shape or self.shape), self.args.chunk, lengths, self.args.out)

    def equality(self) -> None:
        """Two steps of every side on the same row, which does not end with a chunk."""
        tokens, before = 2 * self.args.chunk + self.args.chunk // 3, self.content["equality"] or {}
        losses, norms, missing = before.get("losses", {}), before.get("norms", {}), dict[str, str]()
        for side in self.args.systems:
            if side in losses:
                continue
            try:
                reading = measure(self.job(side, tokens, tokens))
                losses[side], norms[side] = reading.losses, reading.norms
            except CannotMeasure as error:
                missing[side] = str(error)
        off = max(_spread(list(losses.values())), _spread(list(norms.values())))
        self.content["equality"] = {
            "tokens": tokens,
            "losses": losses,
            "norms": norms,
            "missing": missing,
            "largest_relative_difference": off,
            "within": TOLERANCE,
            "agree": off <= TOLERANCE,
        }
        print(f"{len(losses)} sides differ by {off:.1e} in two losses and norms", flush=True)
        self.write()
        if not off <= TOLERANCE:  # or one of them is not a number
            raise SystemExit(f"the sides differ by {off:.1e}: see equality in {self.path}")

    def run(self, side: str) -> None:
        """The row of one side."""
        limits = {"most_bytes": self.args.memory_gib * 2**30, "most_seconds": self.args.most_seconds}

        def probe(tokens: int) -> Reading:
            reading = measure(self.job(side, WARM_TOKENS, tokens), **limits)
            said = f"too much {reading.ended}" if reading.ended else "fits"
            taken = f"{reading.peak_bytes / 2**20:.0f} MiB, {reading.seconds:.0f} s"
            print(f"{side} {tokens:,} tokens: {taken}, {said}", flush=True)
            return reading

        system, place = parts_of(side)
        row: dict[str, Any] = {"side": side, "system": system, "place": place or "device"}
        row["processes"] = 2 if system in TWO else 1
        row |= dict.fromkeys(("tokens", "peak_gib", "elsewhere_gib", "seconds", "binds", "why_not"))
        try:
            best, readings = longest(probe, **limits, first=self.args.chunk)
            row["readings"] = [asdict(one) for one in readings]
            if best is not None:
                row |= {"tokens": best.tokens, "peak_gib": best.peak_bytes / 2**30, "seconds": best.seconds}
                row |= {"elsewhere_gib": best.file_bytes / 2**30, "binds": _binds(readings)}
            else:
                row["why_not"] = f"not even {GRAIN} tokens fit"
        except CannotMeasure as error:
            row["why_not"] = str(error)
        kept = [one for one in self.content["rows"] if one["side"] != side]
        self.content["rows"] = sorted([*kept, row], key=lambda one: SIDES.index(one["side"]))
        self.write()

    def count(self, side: str, tokens: int, shape: Shape) -> None:
        """What our own count says of a step, beside what it takes."""
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            expected = pool.submit(predicted_bytes, side, shape, self.args.chunk, tokens).result()
        reading = measure(self.job(side, WARM_TOKENS, tokens, shape=shape))
        counted = {"system": side, "tokens": tokens, "shape": asdict(shape), "predicted_gib": expected / 2**30}
        counted |= {"measured_gib": reading.peak_bytes / 2**30, "ratio": expected / reading.peak_bytes}
        self.content["count"].append(counted | {"seconds": reading.seconds})
        print(f"{side} {tokens:,} tokens: counted {counted['ratio']:.3f} of what it takes", flush=True)
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        (self.args.out / "table.md").write_text(page(self.content))

    def missing(self) -> list[str]:
        """Sides that have no row yet, or one that says why not."""
        there = {one["side"] for one in self.content["rows"] if one["tokens"] is not None}
        return [side for side in self.args.systems if side not in there]

    def uncounted(self) -> list[tuple[str, int, Shape]]:
        """Of ``COUNTED``, what has not been compared yet."""
        family = self.shape.family
        wanted = [(side, tokens, Shape.read(text, family) if text else self.shape) for side, tokens, text in COUNTED]
        there = [(one["system"], one["tokens"], Shape(**one["shape"])) for one in self.content["count"]]
        return [one for one in wanted if one not in there]


def _binds(readings: Sequence[Reading]) -> str:
    """What the shortest row that did not fit took too much of."""
    return min((one for one in readings if one.ended), key=lambda one: one.tokens).ended


def _spread(values: Sequence[Sequence[float]]) -> float:
    """The largest relative difference between the sides."""
    apart = [one / other - 1 for column in zip(*values, strict=True) for one in column for other in column]
    return math.nan if any(map(math.isnan, apart)) else max(apart, default=0.0)


def _versions(*names: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


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
        f"| system | processes | {' | '.join(TITLES.values())} |",
        "| --- | --: | --: | --: | --: |",
    ]
    by_system: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_system.setdefault(row["system"], {})[row["place"]] = row
    lines += [
        f"| {system} | {next(iter(places.values()))['processes']} | "
        + " | ".join(_tokens(places.get(place)) for place in TITLES)
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
    for place, title in TITLES.items():
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


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(args)
    if wanted := benchmark.missing():
        benchmark.equality()
    for side in wanted:
        benchmark.run(side)
    for side, tokens, shape in [] if args.without_count else benchmark.uncounted():
        benchmark.count(side, tokens, shape)
    benchmark.write()


if __name__ == "__main__":
    main()
