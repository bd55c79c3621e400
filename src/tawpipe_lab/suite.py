"""Suites: which strategies are measured in which settings, as small YAML files.

name: smoke
samples: 5
cells:
  - name: 2x2
    nodes: 2
    local: 2
    rate: 400mbit
    workload: {layers: 4, layer_bytes: 1000000, forward_s: 0.01, ...}
strategies:
  - {strategy: fsdp2, knobs: {micro_batches_per_gather: 2}}
  - {strategy: tawpipe-spread, knobs: {micro_batches_per_visit: 2}}

A workload with ``kind: real`` is a model instead of sizes and seconds, see `tawpipe_lab.workload`. A timed one with
``mix: {model: nemotron, tick_s: 0.00001}`` in the place of seconds has the layers of `tawpipe_lab.mixes`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from statistics import fmean
from string import ascii_letters
from typing import Any

import yaml

from tawpipe.errors import UserError
from tawpipe.schedule.pipelines.work import BlockTimes
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sharing import speeds_of
from tawpipe.topology import Topology
from tawpipe_lab.mixes import MIXES
from tawpipe_lab.sleeper import Slowdown
from tawpipe_lab.workload import KINDS, RealWorkload, Workload, spell_out, with_found

PARTS = ("forward", "backward_input", "backward_weight")
"""Of a block's times."""
MOST = 1024
"""Nodes of a cell, processes of a node and steps in a row: more would fill the memory before anything is measured."""


@dataclass(frozen=True)
class Cell:
    """One setting: a cluster and a workload.

    Args:
        rate: of the links between nodes, as ``tawpipe lab up`` takes it.
        latency: of a message between nodes, as ``tawpipe lab up`` takes it; None for what the machine takes.
        slow: how nodes are slowed down now and then; None for not at all. Only computation that sleeps can be slowed.
        speeds: of all devices, the fastest 1, see ``ScheduleSettings.device_speeds``; empty where they are alike.
        steps_in_a_row: how many steps follow each other before what is under way is awaited; a result is of one of
            them, in the mean. Rows of others, and what really computes, await every step.
        strategies: in the place of the suite's, where there are some; results have them in their rows.
    """

    name: str
    nodes: int
    local: int
    rate: str
    workload: Workload
    latency: str | None = None
    slow: Slowdown | None = None
    speeds: str = ""
    steps_in_a_row: int = 1
    strategies: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        if self.speeds and isinstance(self.workload, RealWorkload):
            raise UserError("speeds", self.speeds, f"nothing in cell {self.name}, which really computes")
        for name in ("nodes", "local", "steps_in_a_row"):
            if not 1 <= (number := getattr(self, name)) <= MOST:
                raise UserError(name, number, f"1 to {MOST:,} in cell {self.name}")
        _ = self.device_speeds

    @property
    def device_speeds(self) -> tuple[float, ...]:
        """The speeds as numbers; empty where they are alike.

        Raises:
            UserError: not one for every device.
        """
        return speeds_of(ScheduleSettings(device_speeds=self.speeds), Topology.grid(self.nodes, self.local))

    def spelled_out(self) -> dict[str, Any]:
        spelled = {**asdict(replace(self, strategies=())), "workload": spell_out(self.workload)}
        left_out = {"strategies": True, "speeds": not self.speeds, "steps_in_a_row": self.steps_in_a_row == 1}
        return {name: value for name, value in spelled.items() if not left_out.get(name)}


@dataclass(frozen=True)
class Entry:
    """One strategy with its knobs.

    Args:
        searched: more of them, which a search gave.
    """

    strategy: str
    knobs: dict[str, Any] = field(default_factory=dict)
    searched: dict[str, Any] = field(default_factory=dict)

    @property
    def all_knobs(self) -> dict[str, Any]:
        return with_found(self.knobs, self.searched)

    @property
    def label(self) -> str:
        knobs = ", ".join(f"{name} {value}" for name, value in self.knobs.items())
        return f"{self.strategy} ({knobs})" if knobs else self.strategy


@dataclass(frozen=True)
class Suite:
    """The job of ``tawpipe lab compare``.

    Args:
        samples: measured steps of every strategy in every cell.
        warmup: steps before them.
        memory: measure peak memory, every strategy in a launch of its own.
        alone: measure everything in launches of their own; for strategies that do not fit beside one another.
    """

    name: str
    cells: tuple[Cell, ...]
    strategies: tuple[Entry, ...]
    samples: int = 5
    warmup: int = 1
    memory: bool = False
    alone: bool = False

    def only(self, names: list[str]) -> Suite:
        """The suite with the named strategies or cells alone.

        Raises:
            UserError: a name that is neither, or nothing that is both.
        """
        entries = [*self.strategies, *(entry for cell in self.cells for entry in cell.strategies)]
        known = {entry.strategy for entry in entries} | {cell.name for cell in self.cells}
        for name in names:
            if name not in known:
                raise UserError("--only", name, f"some of {', '.join(sorted(known))}")
        wanted = {entry.strategy for entry in entries} & set(names)

        def named(some: tuple[Entry, ...]) -> tuple[Entry, ...]:
            return tuple(entry for entry in some if not wanted or entry.strategy in wanted)

        cells = tuple(cell for cell in self.cells if cell.name in names) or self.cells
        cells = tuple(
            replace(cell, strategies=named(cell.strategies))
            for cell in cells
            if named(cell.strategies or self.strategies)
        )
        if not cells:
            raise UserError("--only", ",".join(names), "a cell and a strategy that it has")
        return replace(self, cells=cells, strategies=named(self.strategies))


def shipped_suites() -> list[str]:
    """Names of the suites that come with the package."""
    folder = resources.files("tawpipe_lab") / "suites"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_suite(name: str) -> Suite:
    """A suite by its name or from a file.

    Raises:
        UserError: there is none, or it is not of the form that the module's head shows.
    """
    if name in shipped_suites():
        text = (resources.files("tawpipe_lab") / "suites" / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        path = Path(name)
        if not path.is_file():
            raise UserError("--suite", name, f"a file, or one of {', '.join(shipped_suites())}")
        text = path.read_text(encoding="utf-8")
    try:
        return read_suite(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise UserError("--suite", name, f"YAML that can be read ({error})") from error


def read_suite(values: Any) -> Suite:
    """The suite that the content of a YAML file describes."""
    given = _known(Suite, values, "a suite")
    for name in ("cells", "strategies"):
        if not isinstance(given.get(name), list):
            raise UserError("--suite", {name: given.get(name)}, f"a list of {name}")
    cells = []
    for cell_values in given.get("cells", ()):
        cell = _known(Cell, cell_values, "a cell")
        workload = _read_workload(cell.get("workload"), f"the workload of cell {cell.get('name')}")
        if (slow := cell.get("slow")) is not None:
            if isinstance(workload, RealWorkload):
                raise UserError("slow", slow, f"nothing in cell {cell.get('name')}, which really computes")
            slow = _make(Slowdown, slow, f"what slows the nodes of cell {cell.get('name')}")
        entries = tuple(_make(Entry, entry, "a strategy") for entry in cell.get("strategies", ()))
        read = {**cell, "workload": workload, "slow": slow, "strategies": entries}
        cells.append(_make(Cell, read, f"cell {cell.get('name')}"))
    entries = tuple(_make(Entry, entry, "a strategy") for entry in given.get("strategies", ()))
    if not cells or not all(entries or cell.strategies for cell in cells):
        raise UserError("--suite", given.get("name"), "a suite with cells and strategies")
    return _make(Suite, {**given, "cells": tuple(cells), "strategies": entries}, "the suite")


def _read_workload(values: Any, what: str) -> Workload:
    given = dict(values) if isinstance(values, dict) else values
    kind = given.pop("kind", "timed") if isinstance(given, dict) else "timed"
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError("--suite", {"kind": kind}, f"{what} is of one of the kinds {', '.join(KINDS)}")
    if kind == "timed" and isinstance(given, dict) and "mix" in given:
        given |= _mixed(given.pop("mix"), given.get("layers"), what)
    return _make(KINDS[kind], given, what)


@dataclass(frozen=True)
class _Mix:
    """The layers of a mix; a unit of its times in seconds."""

    model: str
    tick_s: float


def _mixed(values: Any, layers: Any, what: str) -> dict[str, Any]:
    """The settings of a timed workload that a mix says: seconds of every layer and of the ends."""
    mix: _Mix = _make(_Mix, values, f"the mix of {what}")
    if mix.model not in MIXES or not isinstance(layers, int) or layers < 1:
        raise UserError("--suite", {"mix": mix.model, "layers": layers}, f"{', '.join(MIXES)}, and how many layers")
    blocks = MIXES[mix.model](layers)

    def seconds(*some: BlockTimes) -> dict[str, float]:
        return {f"{name}_s": mix.tick_s * fmean(getattr(block, name) for block in some) for name in PARTS}

    letters = dict(zip(dict.fromkeys(blocks[1:-1]), ascii_letters, strict=False))
    kinds = {letter: seconds(block) for block, letter in letters.items()}
    kinds |= {"embedding": seconds(blocks[0]), "head": seconds(blocks[-1])}
    pattern = "".join(letters[block] for block in blocks[1:-1])
    return {"kinds": kinds, "pattern": pattern, **seconds(*blocks[1:-1])}


def _known(cls: type, values: Any, what: str) -> dict[str, Any]:
    names = [item.name for item in fields(cls)]
    if not isinstance(values, dict) or not set(values) <= set(names):
        wrong = sorted(map(str, set(values) - set(names))) if isinstance(values, dict) else values
        raise UserError("--suite", wrong, f"{what} has the keys {', '.join(names)}")
    return values


def _make(cls: Any, values: Any, what: str) -> Any:
    try:
        return cls(**_known(cls, values, what))
    except TypeError as error:
        raise UserError("--suite", values, f"{what} that is complete ({error})") from error
