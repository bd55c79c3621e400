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

A workload with ``kind: real`` is a model instead of sizes and seconds, see `tawpipe_lab.workload`. A timed workload
with ``mix: {model: nemotron, tick_s: 0.00001}`` instead of seconds takes the layers of `tawpipe_lab.mixes`.
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
from tawpipe_lab.workload import KINDS, RealWorkload, Workload, merge_knobs, spell_out

PARTS = ("forward", "backward_input", "backward_weight")
"""Fields of ``BlockTimes`` that a mix turns into seconds."""
MOST = 1024
"""Largest number of nodes in a cell, of processes in a node, and of steps in a row. Beyond it memory would be full
before anything is measured."""


@dataclass(frozen=True)
class Cell:
    """One setting of a suite: a cluster and a workload.

    Args:
        name: name of the cell, unique in its suite.
        nodes: number of nodes.
        local: number of processes in each node.
        rate: rate of the links between nodes, as ``tawpipe lab up --rate`` takes it.
        workload: the work of one step.
        latency: latency of a message between nodes, as ``tawpipe lab up --latency`` takes it; None for no added
            latency.
        slow: slow spells of the nodes; None for none. Only computing that sleeps can be slowed down.
        speeds: speeds of all devices, the fastest being 1, see ``ScheduleSettings.device_speeds``; empty if all are
            equal.
        steps_in_a_row: number of steps that run before actions in flight are awaited. Results are means per step.
            Rivals and the real workload wait after every step.
        strategies: strategies of this cell instead of the suite's; empty for the suite's. Results do not list them as
            settings of the cell.

    Raises:
        UserError: a number is out of range, or speeds do not fit the devices or the workload.
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
        """Speeds of all devices as numbers; empty if all are equal.

        Raises:
            UserError: the number of speeds is not the number of devices.
        """
        return speeds_of(ScheduleSettings(device_speeds=self.speeds), Topology.grid(self.nodes, self.local))

    def spelled_out(self) -> dict[str, Any]:
        """Return all settings but ``strategies`` as plain data.

        ``speeds`` and ``steps_in_a_row`` are left out at their defaults.
        """
        spelled = {**asdict(replace(self, strategies=())), "workload": spell_out(self.workload)}
        left_out = {"strategies": True, "speeds": not self.speeds, "steps_in_a_row": self.steps_in_a_row == 1}
        return {name: value for name, value in spelled.items() if not left_out.get(name)}


@dataclass(frozen=True)
class Entry:
    """One strategy to measure, with its knobs.

    Args:
        strategy: name of the row.
        knobs: knobs from the suite.
        searched: further knobs that a search has found.
    """

    strategy: str
    knobs: dict[str, Any] = field(default_factory=dict)
    searched: dict[str, Any] = field(default_factory=dict)

    @property
    def all_knobs(self) -> dict[str, Any]:
        """Knobs of the suite together with those that a search has found, see ``merge_knobs``."""
        return merge_knobs(self.knobs, self.searched)

    @property
    def label(self) -> str:
        """Name of the strategy with its knobs from the suite, for tables."""
        knobs = ", ".join(f"{name} {value}" for name, value in self.knobs.items())
        return f"{self.strategy} ({knobs})" if knobs else self.strategy


@dataclass(frozen=True)
class Suite:
    """Job of ``tawpipe lab compare``: strategies and the cells in which they are measured.

    Args:
        name: name of the suite, which results repeat.
        cells: settings in which strategies are measured.
        strategies: strategies of all cells that have none of their own.
        samples: number of measured steps of every strategy in every cell.
        warmup: number of steps before them that are not measured.
        memory: measure peak memory, with each strategy in a separate launch.
        alone: measure each strategy in a separate launch, for strategies that do not fit into memory together.
    """

    name: str
    cells: tuple[Cell, ...]
    strategies: tuple[Entry, ...]
    samples: int = 5
    warmup: int = 1
    memory: bool = False
    alone: bool = False

    def only(self, names: list[str]) -> Suite:
        """Return a copy of the suite with only the named strategies and cells.

        If no strategy is named, all strategies stay; if no cell is named, all cells that keep a strategy stay.

        Args:
            names: names of strategies and of cells.

        Raises:
            UserError: a name is neither a strategy nor a cell, or no named cell has a named strategy.
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
    """Return the names of the suites in this package, sorted."""
    folder = resources.files("tawpipe_lab") / "suites"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def load_suite(name: str) -> Suite:
    """Load a suite from this package by its name, or from a YAML file by its path.

    Raises:
        UserError: there is no such suite or file, or its content has not the form that the module docstring shows.
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
    """Build the suite that the parsed content of a YAML file describes.

    Raises:
        UserError: a key is unknown or missing, or a value is not valid.
    """
    content = _known(Suite, values, "a suite")
    for name in ("cells", "strategies"):
        if not isinstance(content.get(name), list):
            raise UserError("--suite", {name: content.get(name)}, f"a list of {name}")
    cells = []
    for cell_values in content.get("cells", ()):
        cell = _known(Cell, cell_values, "a cell")
        workload = _read_workload(cell.get("workload"), f"the workload of cell {cell.get('name')}")
        if (slow := cell.get("slow")) is not None:
            if isinstance(workload, RealWorkload):
                raise UserError("slow", slow, f"nothing in cell {cell.get('name')}, which really computes")
            slow = _make(Slowdown, slow, f"what slows the nodes of cell {cell.get('name')}")
        entries = tuple(_make(Entry, entry, "a strategy") for entry in cell.get("strategies", ()))
        read = {**cell, "workload": workload, "slow": slow, "strategies": entries}
        cells.append(_make(Cell, read, f"cell {cell.get('name')}"))
    entries = tuple(_make(Entry, entry, "a strategy") for entry in content.get("strategies", ()))
    if not cells or not all(entries or cell.strategies for cell in cells):
        raise UserError("--suite", content.get("name"), "a suite with cells and strategies")
    return _make(Suite, {**content, "cells": tuple(cells), "strategies": entries}, "the suite")


def _read_workload(values: Any, what: str) -> Workload:
    """Build a workload from its settings; the kind is ``timed`` if none is given, and a ``mix`` becomes seconds.

    Args:
        values: settings from the YAML file.
        what: description of the workload, for error messages.

    Raises:
        UserError: there is no such kind, or the settings are not valid.
    """
    content = dict(values) if isinstance(values, dict) else values
    kind = content.pop("kind", "timed") if isinstance(content, dict) else "timed"
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError("--suite", {"kind": kind}, f"{what} is of one of the kinds {', '.join(KINDS)}")
    if kind == "timed" and isinstance(content, dict) and "mix" in content:
        content |= _mixed(content.pop("mix"), content.get("layers"), what)
    return _make(KINDS[kind], content, what)


@dataclass(frozen=True)
class _Mix:
    """Layers of a timed workload that are taken from a model of `tawpipe_lab.mixes`.

    Args:
        model: name of the model, a key of ``MIXES``.
        tick_s: seconds of one unit of the model's times.
    """

    model: str
    tick_s: float


def _mixed(values: Any, layers: Any, what: str) -> dict[str, Any]:
    """Return the settings of a timed workload for a mix: kinds and pattern of its layers, and seconds.

    There are seconds for each kind of layer and for both ends, and the mean seconds of all layers.

    Args:
        values: settings of ``_Mix``.
        layers: number of layers.
        what: description of the workload, for error messages.
    """
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
    """Return ``values`` unchanged; raise UserError unless it is a dict whose keys are fields of the dataclass ``cls``.

    Args:
        cls: the dataclass.
        values: settings from the YAML file.
        what: description of the values, for error messages.
    """
    names = [item.name for item in fields(cls)]
    if not isinstance(values, dict) or not set(values) <= set(names):
        wrong = sorted(map(str, set(values) - set(names))) if isinstance(values, dict) else values
        raise UserError("--suite", wrong, f"{what} has the keys {', '.join(names)}")
    return values


def _make(cls: Any, values: Any, what: str) -> Any:
    """Build the dataclass ``cls`` from ``values``; raise UserError if a key is unknown or missing."""
    try:
        return cls(**_known(cls, values, what))
    except TypeError as error:
        raise UserError("--suite", values, f"{what} that is complete ({error})") from error
