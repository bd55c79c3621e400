"""Record what a refactoring must hold equal, and name every value that it has changed.

    python benchmarks/held_equal.py --record DIR
    python benchmarks/held_equal.py --compare DIR

``--record`` writes ``PART.json`` for every part: keys and values, sorted, without names of modules and classes.
``--compare`` makes all values anew and prints each key whose value differs, is missing or is new, with both values; the
exit code is 1 if there is one. ``--only`` takes some of the parts: ``schedules`` (hashes of the program of every rank),
``training`` (losses and weights, bit by bit), ``orders`` (searched orders of pipelines), ``plans`` (predictions and
choices), ``help`` (options of all commands), ``files`` (names and keys of what a run writes) and ``models`` (units of
small models). Searches have limits of work instead of seconds, see ``held_parts.WorkClock``.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

PARTS = {"plans": 8, "orders": 2, "training": 1, "schedules": 1, "models": 1, "files": 1, "help": 1}
"""Part to the number of pieces in which it is made, the longest first."""
PROCESSES = 2
SHOWN = 100
"""Characters of a long value that are printed on each side of the first difference."""
Values = dict[str, Any]


class ParserReady(BaseException):
    """Ends a command as soon as its parser is complete."""


def help_values(piece: int, pieces: int) -> Iterator[tuple[str, Any]]:
    """Options of every command: their names, choices, defaults and metavars."""
    cli = importlib.import_module("tawpipe.cli")
    complete, parsers = argparse.ArgumentParser.parse_known_args, dict[str, argparse.ArgumentParser]()

    def parse(parser: argparse.ArgumentParser, *words: Any, **how: Any) -> Any:
        parsers[parser.prog] = parser
        if parser.prog != "tawpipe" and parser._actions:  # those of the first word alone have none
            raise ParserReady
        return complete(parser, *words, **how)

    with patch.object(argparse.ArgumentParser, "parse_known_args", parse):
        for command in (*cli.COMMANDS, "lab"):
            try:
                cli.main([command])
            except ParserReady:
                continue
            raise RuntimeError(f"tawpipe {command} has no parser")
    for name, parser in parsers.items():
        yield from options_of(name, parser)
    with redirect_stdout(io.StringIO()) as printed:
        cli.main(["train", "--print-config"])
    yield "settings of a run", yaml.safe_load(printed.getvalue())  # the parser does not know their defaults


def options_of(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, Any]]:
    """Options of a parser and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, chosen in action.choices.items():
                yield from options_of(f"{name} {word}", chosen)
        values = {"choices": action.choices and list(action.choices), "default": action.default, "nargs": action.nargs}
        values |= {"metavar": action.metavar, "required": action.required, "const": action.const}
        spelled = {key: str(value) for key, value in values.items()}
        yield f"{name} {'/'.join(action.option_strings) or action.dest}", spelled


def made(part: str, piece: int) -> Values:
    """The values of a piece of a part."""
    maker = help_values if part == "help" else getattr(importlib.import_module("held_parts"), part)
    return plain(dict(maker(piece, PARTS[part])))


def plain(values: Values) -> Values:
    """The values as JSON returns them."""
    return json.loads(json.dumps(values, sort_keys=True))


def differences(recorded: Mapping[str, Any], values: Mapping[str, Any], at: str = "") -> list[str]:
    """A line for every key whose value differs, is missing or is new."""
    lines = []
    for key in sorted({*recorded, *values}):
        name, before, after = f"{at}{key}", recorded.get(key), values.get(key)
        if key not in values:
            lines.append(f"{name}: missing; recorded {shown(before, '')[0]}")
        elif key not in recorded:
            lines.append(f"{name}: new, {shown(after, '')[0]}")
        elif isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{name}: ")
        elif before != after:
            lines.append("{}: recorded {}, now {}".format(name, *shown(before, after)))
    return lines


def shown(before: Any, after: Any) -> tuple[str, str]:
    """Two values as text; of long ones what surrounds their first difference."""
    texts = [json.dumps(value, ensure_ascii=False) for value in (before, after)]
    pairs = enumerate(zip(*texts, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(map(len, texts)))
    begin, end = (max(0, first - SHOWN), first + SHOWN) if max(map(len, texts)) > 2 * SHOWN else (0, 2 * SHOWN)
    cut = [f"{'…' * (begin > 0)}{text[begin:end]}{'…' * (len(text) > end)}" for text in texts]
    return cut[0], cut[1]


def compare(folder: Path, part: str, values: Values) -> list[str]:
    """Differences between the record of a part and its values."""
    file = folder / f"{part}.json"
    if not file.is_file():
        return [f"{part}: no {file.name} was recorded"]
    return differences(json.loads(file.read_text(encoding="utf-8")), values, f"{part}: ")


def record(folder: Path, part: str, values: Values) -> None:
    """Write the values of a part."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / f"{part}.json").write_text(text + "\n", encoding="utf-8")


def all_made(parts: list[str]) -> Iterator[tuple[str, Values, float]]:
    """Every part with its values and the seconds of its processes; ``failed`` names a piece that was not made."""
    support = Path(__file__).resolve().parent.parent / "tests" / "support"
    sys.path.insert(0, str(support))  # processes that are started here have the same path
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "TRANSFORMERS_VERBOSITY": "error"}
    pieces = [(part, piece) for part in PARTS if part in parts for piece in range(PARTS[part])]
    values: dict[str, Values] = {part: {} for part in parts}
    left, begin = [part for part, _ in pieces], time.monotonic()
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        jobs = {pool.submit(made, part, piece): (part, piece) for part, piece in pieces}
        for job in as_completed(jobs):
            part, piece = jobs[job]
            if error := job.exception():
                values[part][f"failed {piece}"] = f"{type(error).__name__}: {error}"
            else:
                values[part] |= job.result()
            left.remove(part)
            if part not in left:
                yield part, values[part], time.monotonic() - begin


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, metavar="DIR", help="write the values")
    what.add_argument("--compare", type=Path, metavar="DIR", help="compare with the values written before")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args(words)
    wrong = 0
    for part, values, seconds in all_made(args.only):
        failed = [f"{part}: {key}: {value}" for key, value in values.items() if key.startswith("failed ")]
        if args.record and not failed:
            record(args.record, part, values)
        lines = failed or (compare(args.compare, part, values) if args.compare else [])
        wrong += len(lines)
        outcome = f"{len(lines)} differ" if lines else "all equal" if args.compare else "recorded"
        print(*lines, f"{part}: {len(values)} values, {outcome} ({seconds:.0f} s)", sep="\n", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
