"""Devices of a machine in topology files: one for all processes, or one for each process.

One for all:

    device: {name: NVIDIA H100 80GB HBM3, memory_gib: 79.1, communicator_mib: 690}

If devices differ, ``devices`` defines them under names, and ``device_of`` lists one name per node or per process:

    devices: {new: {name: NVIDIA H100, memory_gib: 79.1}, old: {name: NVIDIA A100, speed: 0.45, memory_gib: 39.4}}
    device_of: [new, new, old]

Values that `devices` leaves out are those under `device`. Speeds are relative to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tawpipe.errors import UserError

MOST_GIB = 1e9


@dataclass(frozen=True)
class Device:
    """Device of a process.

    Args:
        name: name that the driver reports; ``CPU`` for a CPU; empty if a file does not give it.
        memory_bytes: memory that a process may use; 0 if unknown.
        flops: peak operations per second in the dtype of the run; replaces the value of the table of devices.
        communicator_bytes: memory that NCCL takes for one communicator; 0 if not measured.
        beside: factor by which computing takes longer during transfers; 1 if not measured.
        speed: computing speed relative to the other devices of the machine.
    """

    name: str = "CPU"
    memory_bytes: int = 0
    flops: float | None = None
    communicator_bytes: int = 0
    beside: float = 1.0
    speed: float = 1.0


def device_from(values: Any, where: str) -> Device:
    """Return the device that a mapping of a topology file describes; missing keys get the defaults of ``Device``.

    Args:
        values: the mapping.
        where: place in the file, for messages.

    Raises:
        UserError: ``values`` is no mapping, a key is unknown, or a value is invalid.
    """
    check_mapping(values, ("name", "memory_gib", "flops", "communicator_mib", "beside", "speed"), where)
    flops = values.get("flops")
    if flops is not None and not is_number(flops, least=0):
        raise UserError(f"{where}: flops", flops, "a number, 0 or more")
    mib = values.get("communicator_mib") or 0
    if not is_number(mib, least=0):
        raise UserError(f"{where}: communicator_mib", mib, "a number, 0 or more")
    beside = values.get("beside", 1.0)
    if not is_number(beside, least=1):
        raise UserError(f"{where}: beside", beside, "a number, 1 or more")
    speed = values.get("speed", 1.0)
    if not is_number(speed, least=0) or not speed:
        raise UserError(f"{where}: speed", speed, "a number above 0, beside the other devices'")
    memory = memory_from(values.get("memory_gib") or 0, where)
    return Device(str(values.get("name") or ""), memory, flops, int(mib * 2**20), float(beside), float(speed))


def devices_from(content: Mapping[str, Any], nodes: Sequence[int], where: str) -> tuple[Device, ...]:
    """Return the device of every process from the keys ``devices`` and ``device_of``; empty if the file has neither.

    ``devices`` maps names to devices. ``device_of`` lists one name for every node, or for every process.

    Args:
        content: content of the file.
        nodes: number of devices of every node.
        where: name of the file, for messages.

    Raises:
        UserError: only one of the two is given, the number of names is wrong, a name is unknown, or a device is
            invalid.
    """
    named, names = content.get("devices"), content.get("device_of")
    if named is None and names is None:
        return ()
    if not isinstance(named, Mapping) or not named:
        expected = "what device_of names, as in {new: {name: NVIDIA H100}, old: {name: NVIDIA A100, speed: 0.45}}"
        raise UserError(f"{where}: devices", named, expected)
    kinds = dict[str, Device]()
    for name, values in named.items():
        at = f"{where}: devices: {name}"
        check_mapping(values, ("name", "memory_gib", "flops", "communicator_mib", "beside", "speed"), at)
        if "memory_gib" in values and (not is_number(values["memory_gib"], least=0) or not values["memory_gib"]):
            raise UserError(f"{at}: memory_gib", values["memory_gib"], "a number above 0")
        kinds[str(name)] = device_from({**(content.get("device") or {}), **values}, at)
    processes, known = sum(nodes), ", ".join(kinds)
    if not isinstance(names, list) or len(names) not in (len(nodes), processes):
        value = f"{len(names)} names" if isinstance(names, list) else names
        expected = f"a list of {len(nodes)} names, of every node, or of {processes}, of every process: {known}"
        raise UserError(f"{where}: device_of", value, expected)
    for name in names:
        if str(name) not in kinds:
            raise UserError(f"{where}: device_of", name, f"one of devices: {known}")
    each = [names] if len(names) == processes else ([name] * size for name, size in zip(names, nodes, strict=True))
    devices = tuple(kinds[str(name)] for name in chain(*each))
    if len({bool(device.memory_bytes) for device in devices}) > 1:
        without = next(name for name in names if not kinds[str(name)].memory_bytes)
        raise UserError(f"{where}: devices: {without}: memory_gib", None, "a number, as the other devices have one")
    return devices


def spell_device(device: Device) -> dict[str, Any]:
    """Return the mapping from which ``device_from`` restores a device, with rounded numbers."""
    content: dict[str, Any] = {"name": device.name, "memory_gib": round(device.memory_bytes / 2**30, 2)}
    if device.flops:
        content["flops"] = device.flops
    if device.communicator_bytes:
        content["communicator_mib"] = round(device.communicator_bytes / 2**20, 1)
    if device.beside != 1:
        content["beside"] = device.beside
    if device.speed != 1:
        content["speed"] = float(f"{device.speed:.4g}")
    return content


def spell_devices(devices: Sequence[Device]) -> dict[str, Any]:
    """Return the mappings ``devices`` and ``device_of`` from which ``devices_from`` restores the devices.

    Equal devices share a name. ``device_of`` has one name for every process."""
    names = dict[Device, str]()
    for device in devices:
        taken = sum(other.name == device.name for other in names)
        names.setdefault(device, f"{device.name} {taken + 1}" if taken else device.name or "device")
    named = {name: spell_device(device) for device, name in names.items()}
    for values in named.values():
        if not values["memory_gib"]:
            del values["memory_gib"]
    return {"devices": named, "device_of": [names[device] for device in devices]}


def memory_from(gib: Any, where: str, key: str = "memory_gib") -> int:
    """Return the bytes for a number of GiB.

    Raises:
        UserError: it is no number, negative, or above ``MOST_GIB``.
    """
    if not is_number(gib, least=0):
        raise UserError(f"{where}: {key}", gib, "a number, 0 or more")
    if gib > MOST_GIB:
        raise UserError(f"{where}: {key}", gib, f"at most {MOST_GIB:.0e}")
    return int(gib * 2**30)


def check_mapping(values: Any, known: tuple[str, ...], where: str) -> None:
    """Raise UserError if ``values`` is no mapping, or has a key that is not in ``known``."""
    if not isinstance(values, Mapping):
        raise UserError(where, values, f"a mapping with {', '.join(known)}")
    for name in values:
        if name not in known:
            raise UserError(where, name, f"one of {', '.join(known)}")


def is_number(value: Any, *, least: float) -> bool:
    """Return True if ``value`` is a finite number of at least ``least``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf
