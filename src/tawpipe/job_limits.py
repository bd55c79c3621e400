"""Memory and processors that control groups (cgroups) leave to this process.

Slurm, systemd and containers limit a group of processes, or one of its parent groups. Cgroups exist in two versions,
and a system may use both. A container may see only a part of the tree. So every visible group is read, from the group
of this process up to the root of each mount. The smallest remaining memory and the smallest number of processors count.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def memory_left() -> float:
    """Return the bytes of memory that the cgroups of this process still leave to it, ``math.inf`` if none has a limit.

    Cached pages of files (``active_file``, ``inactive_file``) count as free, as in ``MemAvailable``, because the kernel
    can drop them.
    """
    left = math.inf
    for group in _groups("memory"):
        counts = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
        above = counts.get("hierarchical_memory_limit", "")  # limit of parent groups, which a container does not see
        names = "memory.max", "memory.high", "memory.limit_in_bytes"
        limits = [int(word) for word in (*(_text(group / name) for name in names), above) if word.isdecimal()]
        if limits:
            used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes") or 0
            kinds = "active_file", "inactive_file"  # in version 1, the names without total_ leave out the groups below
            read = sum(int(counts.get(f"total_{kind}") or counts.get(kind, 0)) for kind in kinds)
            left = min(left, min(limits) - int(used) + read)
    return left


def processors() -> int:
    """Return the number of processors that this process may use, at least 1.

    The system keeps the process's affinity within the processors of its groups (``cpuset``). A limit on CPU time is
    rounded down to whole processors: with one thread more, all threads would wait for the end of each period.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        old = f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
        share = re.fullmatch(r"(\d+) ([1-9]\d*)", _text(group / "cpu.max") or old)  # no match: unlimited
        if share:
            count = min(count, int(share[1]) // int(share[2]))
    return max(1, count)


def _groups(controller: str) -> list[Path]:
    """Return the folders of all visible cgroups that limit this process for ``controller``; some may not exist.

    Args:
        controller: ``memory`` or ``cpu``.
    """
    of_process = [line.split(":", 2) for line in _text(ROOT / "proc/self/cgroup").splitlines()]
    paths = {name: path for _, names, path in of_process for name in names.split(",")}  # version 2 has an empty name
    groups = list[Path]()
    for line in _text(ROOT / "proc/self/mountinfo").splitlines():
        place, _, source = line.partition(" - ")
        kind, options = source.split(" ", 1)[0], source.rpartition(" ")[2].split(",")
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is not None and (kind == "cgroup2" or (kind == "cgroup" and controller in options)):
            mounted, at = (re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), w) for w in place.split()[3:5])
            group = PurePosixPath(path)
            below = group.relative_to(mounted).parts if group.is_relative_to(mounted) else ("..",)
            below = () if ".." in below else below  # outside of the mount: use its root only
            groups += [ROOT / at[1:] / Path(*below[:depth]) for depth in range(len(below) + 1)]
    return groups


def _text(file: Path) -> str:
    """Return the content of a file without surrounding white space, or ``""`` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
