"""The machines that a plan is for: nodes, links, devices; as a file.

``tawpipe doctor`` measures one and writes it; a user may write or change one by hand:

    format: 1
    nodes: [8, 8, 8]              # devices of every node
    device: {name: NVIDIA H100 80GB HBM3, memory_gib: 79.1, communicator_mib: 690}
    between: {gbit_per_s: 100, latency_us: 12}     # of every node's link, each way
    between_of: {2: {gbit_per_s: 25}}              # what differs
    inside: {gbyte_per_s: 380, latency_us: 6, shared: false}
    host: {gbyte_per_s: 50, latency_us: 10, shared: false, memory_gib: 1900}      # memory: of every node
    files: {gbyte_per_s: 6, free_gib: 3500}        # the disk of schedule.offload_dir, of every node
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tawpipe.errors import UserError
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology

FORMAT = 1
SETTING = "--topology"


@dataclass(frozen=True)
class Device:
    """The device of every process.

    Args:
        name: as the driver calls it; ``CPU`` for none; empty where a file does not say it.
        memory_bytes: that a process may use; 0 if that is not known.
        flops: per second in the dtype of the run, where a user knows better than the table of device peaks.
        communicator_bytes: that NCCL takes for one communicator; 0 if that was not measured.
        beside: how many times as long it computes beside transfers as alone; 1 if that was not measured.
    """

    name: str = "CPU"
    memory_bytes: int = 0
    flops: float | None = None
    communicator_bytes: int = 0
    beside: float = 1.0


@dataclass(frozen=True)
class Machine:
    """Nodes, links and devices.

    Args:
        nodes: how many devices each has.
        between, inside: links of a node to the others, and of its devices to one another.
        between_of: links of single nodes that differ from ``between``.
        host: of a device to its host's memory.
        host_bytes: of memory that every node's host has for what its devices offload; 0 if that is not known.
        files: of a node to the disk on which its devices keep what they offload into files; shared by them.
        files_bytes: free on that disk; 0 if that is not known.
    """

    nodes: tuple[int, ...]
    between: LinkModel
    inside: LinkModel
    between_of: Mapping[int, LinkModel] = field(default_factory=dict)
    host: LinkModel = field(default_factory=lambda: LinkModel(math.inf))
    device: Device = field(default_factory=Device)
    host_bytes: int = 0
    files: LinkModel = field(default_factory=lambda: LinkModel(math.inf, full_duplex=False))
    files_bytes: int = 0

    @property
    def disk(self) -> LinkModel:
        """The share of a device in its node's disk, while all devices of the node read and write."""
        devices = max(self.nodes) if self.files.shared else 1
        return replace(self.files, bytes_per_s=self.files.bytes_per_s / devices, shared=False)

    @property
    def far_share(self) -> float:
        """Bytes per second of a device's share of its node's link to the others, while all of its devices use it; 0
        where that is not known.

        >>> uniform(2, 4, between=LinkModel(4e9), inside=LinkModel(1e9)).far_share
        1000000000.0
        """
        rate = self.between.node_rate(max(self.nodes)) / max(self.nodes)
        return rate if math.isfinite(rate) else 0.0

    @property
    def topology(self) -> Topology:
        """The topology, with ranks that count up through node after node."""
        starts = [sum(self.nodes[:n]) for n in range(len(self.nodes))]
        return Topology(tuple(tuple(range(a, a + size)) for a, size in zip(starts, self.nodes, strict=True)))

    @property
    def world_size(self) -> int:
        return sum(self.nodes)

    def link_s(self, sent_bytes: Sequence[float], received_bytes: Sequence[float]) -> float:
        """Seconds for which the busiest link of a node carries what each node sends and receives, at its full rate.

        >>> slow = LinkModel(1e9, full_duplex=False)
        >>> machine = replace(uniform(2, 4, between=LinkModel(4e9), inside=slow), between_of={1: slow})
        >>> machine.link_s([8e9, 1e9], [4e9, 2e9])
        3.0
        """
        seconds = [0.0]
        for node, (sent, received) in enumerate(zip(sent_bytes, received_bytes, strict=True)):
            link = self.between_of.get(node, self.between)
            carried = max(sent, received) if link.full_duplex else sent + received
            seconds.append(carried / link.node_rate(self.nodes[node]))
        return max(seconds)

    def with_rate(self, bytes_per_s: float) -> Machine:
        """The same with other links between nodes, all alike."""
        return replace(self, between=replace(self.between, bytes_per_s=bytes_per_s), between_of={})


def uniform(nodes: int, local: int, *, between: LinkModel, inside: LinkModel, device: Device | None = None) -> Machine:
    """``nodes`` alike."""
    return Machine((local,) * nodes, between, inside, device=device or Device())


def spell_machine(machine: Machine) -> dict[str, Any]:
    """The content of a file, which ``machine_from`` reads."""
    content: dict[str, Any] = {"format": FORMAT, "nodes": list(machine.nodes)}
    content["device"] = {"name": machine.device.name, "memory_gib": round(machine.device.memory_bytes / 2**30, 2)}
    if machine.device.flops:
        content["device"]["flops"] = machine.device.flops
    if machine.device.communicator_bytes:
        content["device"]["communicator_mib"] = round(machine.device.communicator_bytes / 2**20, 1)
    if machine.device.beside != 1:
        content["device"]["beside"] = machine.device.beside
    for name in ("between", "inside", "host"):
        content[name] = _spell_link(getattr(machine, name), bits=name == "between")
    if machine.host_bytes:
        content["host"]["memory_gib"] = round(machine.host_bytes / 2**30, 2)
    if machine.files_bytes or math.isfinite(machine.files.bytes_per_s):
        content["files"] = _spell_link(machine.files, bits=False)
        content["files"]["free_gib"] = round(machine.files_bytes / 2**30, 2)
    if machine.between_of:
        content["between_of"] = {node: _spell_link(link, bits=True) for node, link in machine.between_of.items()}
    return content


def save_machine(machine: Machine, path: Path, *, notes: str = "") -> None:
    """Write the file; ``notes`` become its first lines."""
    head = "".join(f"# {line}\n" for line in notes.splitlines())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        head + yaml.safe_dump(spell_machine(machine), sort_keys=False, default_flow_style=None), encoding="utf-8"
    )


def load_machine(path: Path) -> Machine:
    """Read a file.

    Raises:
        UserError: it is not there, not of this format, or contradicts itself.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(SETTING, str(path), f"a file that `tawpipe doctor --out FILE` writes ({error})") from error
    except yaml.YAMLError as error:
        raise UserError(SETTING, str(path), f"YAML ({str(error).splitlines()[0]})") from error
    return machine_from(content, where=str(path))


def machine_from(content: Any, *, where: str = "topology") -> Machine:
    """The machine that the nested mappings of a file describe.

    Raises:
        UserError: something is missing, unknown, of the wrong kind, or contradicts something else.
    """
    known = ("format", "nodes", "device", "between", "inside", "between_of", "host", "files")
    _check_mapping(content, known, where)
    if content.get("format") != FORMAT:
        raise UserError(f"{where}: format", content.get("format"), f"{FORMAT}")
    nodes = content.get("nodes")
    if not isinstance(nodes, list) or not nodes or any(not _whole(size, 1) for size in nodes):
        raise UserError(f"{where}: nodes", nodes, "a list with the number of devices of every node, as in [8, 8]")
    room = {"host": 0, "files": 0}
    for part, key in (("host", "memory_gib"), ("files", "free_gib")):
        values = content.get(part)
        if isinstance(values, Mapping) and key in values:
            room[part] = _memory(values[key], f"{where}: {part}", key)
            content = {**content, part: {name: value for name, value in values.items() if name != key}}
    if isinstance(content.get("files"), Mapping):
        content = {**content, "files": {"full_duplex": False, **content["files"]}}
    parts = ("between", "inside", "host", "files")
    links = {name: _link(content[name], f"{where}: {name}") for name in parts if name in content}
    if len(nodes) > 1 and "between" not in links:
        raise UserError(f"{where}: between", None, "the link of a node to the others, as there are several nodes")
    if max(nodes) > 1 and "inside" not in links:
        raise UserError(f"{where}: inside", None, "the link between devices of a node, as a node has several")
    others = content.get("between_of") or {}
    if not isinstance(others, Mapping):
        raise UserError(f"{where}: between_of", others, "a mapping from nodes to links")
    of = {}
    for node, link in others.items():
        if not _whole(node, 0) or node >= len(nodes):
            raise UserError(f"{where}: between_of", node, f"a node, 0 to {len(nodes) - 1}")
        if isinstance(link, Mapping):
            given = any(name in link for name in _RATES)
            base = {k: v for k, v in (content.get("between") or {}).items() if not given or k not in _RATES}
            link = {**base, **link}
        of[node] = _link(link, f"{where}: between_of: {node}")
    free = LinkModel(math.inf)
    return Machine(
        tuple(nodes),
        links.get("between", free),
        links.get("inside", free),
        of,
        links.get("host", free),
        _device(content.get("device") or {}, f"{where}: device"),
        room["host"],
        links.get("files", replace(free, full_duplex=False)),
        room["files"],
    )


def _device(values: Any, where: str) -> Device:
    _check_mapping(values, ("name", "memory_gib", "flops", "communicator_mib", "beside"), where)
    flops = values.get("flops")
    if flops is not None and not _number(flops, least=0):
        raise UserError(f"{where}: flops", flops, "a number, 0 or more")
    mib = values.get("communicator_mib") or 0
    if not _number(mib, least=0):
        raise UserError(f"{where}: communicator_mib", mib, "a number, 0 or more")
    beside = values.get("beside", 1.0)
    if not _number(beside, least=1):
        raise UserError(f"{where}: beside", beside, "a number, 1 or more")
    memory = _memory(values.get("memory_gib") or 0, where)
    return Device(str(values.get("name") or ""), memory, flops, int(mib * 2**20), float(beside))


def _memory(gib: Any, where: str, key: str = "memory_gib") -> int:
    """Bytes of a number of GiB."""
    if not _number(gib, least=0):
        raise UserError(f"{where}: {key}", gib, "a number, 0 or more")
    if gib > MOST_GIB:
        raise UserError(f"{where}: {key}", gib, f"at most {MOST_GIB:.0e}")
    return int(gib * 2**30)


MOST_GIB = 1e9
_RATES = {"gbit_per_s": 1e9 / 8, "gbyte_per_s": 1e9, "bytes_per_s": 1.0}


def _link(values: Any, where: str) -> LinkModel:
    _check_mapping(values, (*_RATES, "latency_us", "full_duplex", "shared"), where)
    given = [name for name in _RATES if name in values]
    if len(given) > 1:
        raise UserError(where, ", ".join(given), f"one of {', '.join(_RATES)}")
    rate = values[given[0]] if given else math.inf
    latency = values.get("latency_us", 0)
    if given and (not _number(rate, least=0) or rate == 0):
        raise UserError(f"{where}: {given[0]}", rate, "a number above 0")
    if not _number(latency, least=0):
        raise UserError(f"{where}: latency_us", latency, "a number, 0 or more")
    for name in ("full_duplex", "shared"):
        if not isinstance(values.get(name, True), bool):
            raise UserError(f"{where}: {name}", values[name], "true or false")
    return LinkModel(
        rate * (_RATES[given[0]] if given else 1.0),
        latency / 1e6,
        full_duplex=values.get("full_duplex", True),
        shared=values.get("shared", True),
    )


def _spell_link(link: LinkModel, *, bits: bool) -> dict[str, Any]:
    unit = "gbit_per_s" if bits else "gbyte_per_s"
    spelled: dict[str, Any] = {}
    if math.isfinite(link.bytes_per_s):
        spelled[unit] = float(f"{link.bytes_per_s / _RATES[unit]:.4g}")
    spelled["latency_us"] = float(f"{link.latency_s * 1e6:.3g}")
    return spelled | {"full_duplex": link.full_duplex, "shared": link.shared}


def _check_mapping(values: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(values, Mapping):
        raise UserError(where, values, f"a mapping with {', '.join(known)}")
    for name in values:
        if name not in known:
            raise UserError(where, name, f"one of {', '.join(known)}")


def _number(value: Any, *, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
