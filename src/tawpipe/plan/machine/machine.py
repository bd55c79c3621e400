"""Machines for which a plan is made (nodes, links, devices), and their topology file.

``tawpipe doctor`` measures the machines and writes the file. A user may write or change one by hand:

    format: 1
    nodes: [8, 8, 8]              # devices of every node
    device: {name: NVIDIA H100 80GB HBM3, memory_gib: 79.1, communicator_mib: 690}      # or one for each, devices.py
    between: {gbit_per_s: 100, latency_us: 12}     # link of every node to the others, each direction
    between_of: {2: {gbit_per_s: 25}}              # nodes whose link differs
    inside: {gbyte_per_s: 380, latency_us: 6, shared: false}
    host: {gbyte_per_s: 50, latency_us: 10, shared: false, memory_gib: 1900}      # memory_gib: of every node
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
from tawpipe.options.files import NumberLoader
from tawpipe.plan.machine.devices import (
    Device,
    check_mapping,
    device_from,
    devices_from,
    is_number,
    memory_from,
    spell_device,
    spell_devices,
)
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology

FORMAT = 1
SETTING = "--topology"


@dataclass(frozen=True)
class Machine:
    """Nodes, links and devices.

    Args:
        nodes: number of devices of every node.
        between: link of a node to the others.
        inside: link between the devices of a node.
        between_of: links of single nodes that differ from ``between``.
        host: link of a device to its host's memory.
        device: device of every process; of the first process if devices differ.
        host_bytes: memory of every node's host that offloading may use; 0 if unknown.
        files: link of a node to the disk of offloaded files, which its devices share.
        files_bytes: free bytes on that disk; 0 if unknown.
        device_of: device of every process, by rank; empty if all are equal.
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
    device_of: tuple[Device, ...] = ()

    @property
    def speeds(self) -> tuple[float, ...]:
        """Computing speed of every device relative to the others; empty if all are equal."""
        speeds = tuple(device.speed for device in self.device_of)
        return speeds if len(set(speeds)) > 1 else ()

    @property
    def most_memory(self) -> int:
        """Bytes of the device with the most memory; 0 if unknown."""
        return max((device.memory_bytes for device in self.device_of), default=self.device.memory_bytes)

    @property
    def disk(self) -> LinkModel:
        """Link of one device to its node's disk, with its share of the rate if all devices use the disk."""
        devices = max(self.nodes) if self.files.shared else 1
        return replace(self.files, bytes_per_s=self.files.bytes_per_s / devices, shared=False)

    @property
    def far_share(self) -> float:
        """Bytes per second of a device's share of its node's link, while all devices of the node use it.

        0 if the rate is unknown.

        >>> uniform(2, 4, between=LinkModel(4e9), inside=LinkModel(1e9)).far_share
        1000000000.0
        """
        rate = self.between.node_rate(max(self.nodes)) / max(self.nodes)
        return rate if math.isfinite(rate) else 0.0

    @property
    def topology(self) -> Topology:
        """Topology in which ranks are numbered through node after node."""
        starts = [sum(self.nodes[:n]) for n in range(len(self.nodes))]
        return Topology(tuple(tuple(range(a, a + size)) for a, size in zip(starts, self.nodes, strict=True)))

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return sum(self.nodes)

    def link_s(self, sent_bytes: Sequence[float], received_bytes: Sequence[float]) -> float:
        """Return the seconds that the busiest link needs at its full rate, for given bytes of every node.

        Args:
            sent_bytes, received_bytes: bytes that every node sends to, and receives from, other nodes.

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
        """Return a copy in which all links between nodes have the rate ``bytes_per_s``."""
        return replace(self, between=replace(self.between, bytes_per_s=bytes_per_s), between_of={})


def uniform(nodes: int, local: int, *, between: LinkModel, inside: LinkModel, device: Device | None = None) -> Machine:
    """Return a machine of ``nodes`` equal nodes with ``local`` devices each."""
    return Machine((local,) * nodes, between, inside, device=device or Device())


def spell_machine(machine: Machine) -> dict[str, Any]:
    """Return the content of the machine's topology file, from which ``machine_from`` restores the machine."""
    content: dict[str, Any] = {"format": FORMAT, "nodes": list(machine.nodes)}
    content |= spell_devices(machine.device_of) if machine.device_of else {"device": spell_device(machine.device)}
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
    """Write the topology file (YAML) of a machine, with the lines of ``notes`` as comments at its top.

    Missing folders are made."""
    head = "".join(f"# {line}\n" for line in notes.splitlines())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        head + yaml.safe_dump(spell_machine(machine), sort_keys=False, default_flow_style=None), encoding="utf-8"
    )


def load_machine(path: Path) -> Machine:
    """Read a topology file.

    Raises:
        UserError: the file does not exist, has another format, or contradicts itself.
    """
    expected = "a file that `tawpipe doctor --out FILE` writes, or nodes, devices of each and rate as in 3x8@10gbit"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=NumberLoader)
    except OSError as error:
        raise UserError(SETTING, str(path), f"{expected} ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UserError(SETTING, str(path), f"{expected} ({error})") from error
    except yaml.YAMLError as error:
        raise UserError(SETTING, str(path), f"YAML ({str(error).splitlines()[0]})") from error
    if not isinstance(content, Mapping):
        raise UserError(SETTING, str(path), f"{expected} (it holds no mapping)")
    return machine_from(content, where=str(path))


def machine_from(content: Any, *, where: str = "topology") -> Machine:
    """Return the machine that the nested mappings of a topology file describe.

    Args:
        where: name of the file, for messages.

    Raises:
        UserError: something is missing, unknown, of the wrong type, or contradicts something else.
    """
    known = ("format", "nodes", "device", "devices", "device_of", "between", "inside", "between_of", "host", "files")
    check_mapping(content, known, where)
    if content.get("format") != FORMAT:
        raise UserError(f"{where}: format", content.get("format"), f"{FORMAT}")
    nodes = content.get("nodes")
    if not isinstance(nodes, list) or not nodes or any(not _whole(size, 1) for size in nodes):
        raise UserError(f"{where}: nodes", nodes, "a list with the number of devices of every node, as in [8, 8]")
    capacities = {"host": 0, "files": 0}
    for part, key in (("host", "memory_gib"), ("files", "free_gib")):
        values = content.get(part)
        if isinstance(values, Mapping) and key in values:
            capacities[part] = memory_from(values[key], f"{where}: {part}", key)
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
            has_rate = any(name in link for name in _RATES)
            base = {k: v for k, v in (content.get("between") or {}).items() if not has_rate or k not in _RATES}
            link = {**base, **link}
        of[node] = _link(link, f"{where}: between_of: {node}")
    free, device = LinkModel(math.inf), device_from(content.get("device") or {}, f"{where}: device")
    devices = devices_from(content, nodes, where)
    return Machine(
        tuple(nodes),
        links.get("between", free),
        links.get("inside", free),
        of,
        links.get("host", free),
        devices[0] if devices else device,
        capacities["host"],
        links.get("files", replace(free, full_duplex=False)),
        capacities["files"],
        devices if len(set(devices)) > 1 else (),
    )


_RATES = {"gbit_per_s": 1e9 / 8, "gbyte_per_s": 1e9, "bytes_per_s": 1.0}


def _link(values: Any, where: str) -> LinkModel:
    """Return the link that a mapping of a topology file describes.

    Without a rate, the link costs its latency only.

    Raises:
        UserError: a value is unknown or invalid.
    """
    check_mapping(values, (*_RATES, "latency_us", "full_duplex", "shared"), where)
    rate_names = [name for name in _RATES if name in values]
    if len(rate_names) > 1:
        raise UserError(where, ", ".join(rate_names), f"one of {', '.join(_RATES)}")
    rate = values[rate_names[0]] if rate_names else math.inf
    latency = values.get("latency_us", 0)
    if rate_names and (not is_number(rate, least=0) or rate == 0):
        raise UserError(f"{where}: {rate_names[0]}", rate, "a number above 0")
    if not is_number(latency, least=0):
        raise UserError(f"{where}: latency_us", latency, "a number, 0 or more")
    for name in ("full_duplex", "shared"):
        if not isinstance(values.get(name, True), bool):
            raise UserError(f"{where}: {name}", values[name], "true or false")
    return LinkModel(
        rate * (_RATES[rate_names[0]] if rate_names else 1.0),
        latency / 1e6,
        full_duplex=values.get("full_duplex", True),
        shared=values.get("shared", True),
    )


def _spell_link(link: LinkModel, *, bits: bool) -> dict[str, Any]:
    """Return the mapping for a link, with its rate in Gbit/s if ``bits`` is True, else in GB/s."""
    unit = "gbit_per_s" if bits else "gbyte_per_s"
    spelled: dict[str, Any] = {}
    if math.isfinite(link.bytes_per_s):
        spelled[unit] = float(f"{link.bytes_per_s / _RATES[unit]:.4g}")
    spelled["latency_us"] = float(f"{link.latency_s * 1e6:.3g}")
    return spelled | {"full_duplex": link.full_duplex, "shared": link.shared}


def _whole(value: Any, least: int) -> bool:
    """Return True if ``value`` is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
