"""Limits of a job: what control groups leave to a process, in both versions, wherever a limit is set."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tawpipe import job_limits

GIB = 2**30
NO_LIMIT = 9223372036854771712
"""Bytes that version 1 says where there is no limit."""
V2 = "30 24 0:27 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/{place} rw,relatime shared:9 - cgroup cgroup rw,{names}"
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a system with these groups of the process, mounts and files below ``/sys/fs/cgroup``."""
    monkeypatch.setattr(job_limits, "ROOT", tmp_path)
    monkeypatch.setattr(job_limits.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def make(groups: list[str], mounts: list[str], files: dict[str, object]) -> None:
        contents = {"proc/self/cgroup": "\n".join(groups), "proc/self/mountinfo": "\n".join(mounts)}
        contents |= {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
        for name, content in contents.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{content}\n")

    return make


def memory(folder: str, limit: object, used: int, *, read: int = 0, old: bool = False) -> dict[str, object]:
    """Files of a group of version 2, or of the old one, which has ``read`` bytes of files, half of them lately."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    of_all = "total_" if old else ""
    counts = f"anon 5\nfile {read}\n{of_all}active_file {read // 2}\n{of_all}inactive_file {read // 2}"
    return {f"{folder}{names[0]}": limit, f"{folder}{names[1]}": used, f"{folder}memory.stat": counts}


@pytest.mark.parametrize("jobs", [("max", 3 * GIB), (3 * GIB, "max"), (3 * GIB, 8 * GIB), (NO_LIMIT, 3 * GIB)])
def test_smallest_memory_limit_of_all_parent_groups_counts(system, jobs):
    """Slurm limits the job, or its step; systemd a slice above a service."""
    files = memory("slice/", jobs[0], GIB, read=GIB // 2) | memory("slice/job_7/", jobs[1], GIB, read=GIB // 2)
    files |= memory("slice/job_7/task/", "max", GIB) | memory("slice/other/", GIB, 0)  # and of others nothing
    system(["0::/slice/job_7/task"], [V2.format(root="/")], files)
    assert job_limits.memory_left() == 2.5 * GIB


def test_memory_high_counts_as_a_limit(system):
    files = memory("a.service/", 8 * GIB, GIB) | {"a.service/memory.high": 2 * GIB}
    system(["0::/a.service"], [V2.format(root="/")], files)
    assert job_limits.memory_left() == GIB


@pytest.mark.parametrize("both", [False, True])
def test_limits_of_cgroup_v1_and_of_both_versions_are_read(system, both: bool):
    groups = ["4:memory:/slurm/uid_1/job_7/step_0", "2:cpu,cpuacct:/slurm/uid_1", "1:name=systemd:/x"]
    mounts = [
        V1.format(root="/", place="memory", names="memory"),
        V1.format(root="/", place="cpu", names="cpu,cpuacct"),
    ]
    files = memory("memory/", NO_LIMIT, 99 * GIB, old=True) | memory(
        "memory/slurm/uid_1/", NO_LIMIT, 20 * GIB, old=True
    )
    files |= memory("memory/slurm/uid_1/job_7/", 8 * GIB, 5 * GIB, read=GIB, old=True)
    files |= memory("memory/slurm/uid_1/job_7/step_0/", NO_LIMIT, GIB, old=True)
    files |= {"cpu/slurm/uid_1/cpu.cfs_quota_us": 250_000, "cpu/slurm/uid_1/cpu.cfs_period_us": 100_000}
    files |= {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100_000}
    system([*groups, *["0::/"] * both], [*mounts, *[HYBRID] * both], files)
    assert job_limits.memory_left() == 4 * GIB
    assert job_limits.processors() == 2


def test_cgroup_v1_limit_outside_a_container_is_read_from_memory_stat(system):
    files = memory("memory/", NO_LIMIT, GIB, old=True)
    files["memory/memory.stat"] = f"cache 0\nhierarchical_memory_limit {4 * GIB}\ntotal_active_file 0"
    system(["4:memory:/docker/a"], [V1.format(root="/docker/a", place="memory", names="memory")], files)
    assert job_limits.memory_left() == 3 * GIB


@pytest.mark.parametrize(
    ("path", "root", "folder"),
    [
        ("/", "/", ""),  # a container with a name space of its own
        ("/docker/a", "/docker/a", ""),  # one without
        ("/docker/a/inner", "/docker/a", "inner/"),  # another one in it
        ("/", "/../..", ""),  # its folders are those of the host
        ("/../job", "/..", "job/"),
        ("/../../elsewhere", "/", ""),
        ("/kubepods/pod", "/", ""),  # a path of the host, of which nothing is here
        ("/a b", "/a\\040b", ""),
    ],
)
def test_control_groups_are_found_from_within_containers(system, path: str, root: str, folder: str):
    system([f"0::{path}"], [V2.format(root=root)], memory(folder, 3 * GIB, GIB) | memory("../stray/", 1, 1))
    assert job_limits.memory_left() == 2 * GIB


@pytest.mark.parametrize(
    ("shares", "count"),
    [
        (("max 100000", "max 100000"), 16),
        (("400000 100000", "max 100000"), 4),
        (("400000 100000", "350000 100000"), 3),
        (("max 100000", "50000 100000"), 1),
        (("6400000 100000", "max"), 16),
        (("", "0 0"), 16),
    ],
)
def test_processors_are_rounded_from_cpu_shares(system, shares: tuple[str, str], count: int):
    files: dict[str, object] = {"cpu.max": "max 100000", "job/cpu.max": shares[0], "job/step/cpu.max": shares[1]}
    system(["0::/job/step"], [V2.format(root="/")], files)
    assert job_limits.processors() == count


def test_missing_control_groups_mean_no_limit(system, monkeypatch: pytest.MonkeyPatch):
    assert job_limits.memory_left() == math.inf and job_limits.processors() == 16, "no /proc"
    system(["0::/a"], ["22 1 8:1 / / rw - ext4 /dev/sda1 rw"], {"a/memory.max": 1})
    assert job_limits.memory_left() == math.inf, "no mount"
    system([], [V2.format(root="/")], {})
    assert job_limits.memory_left() == math.inf, "in no group"
    system(["0::/b"], [V2.format(root="/")], memory("b/", "max", 5))
    assert job_limits.memory_left() == math.inf
    monkeypatch.delattr(job_limits.os, "sched_getaffinity")
    assert job_limits.processors() == (os.cpu_count() or 1)


def test_real_control_group_limit_is_measured():
    """The kernel is the judge: a process in a new group, below one with the limit."""
    version_1, version_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/cgroup.controllers")
    root = version_1 if version_1.is_dir() else version_2.parent
    job = root / f"tawpipe-test-{os.getpid()}"
    try:
        (job / "step").mkdir(parents=True)
        (job / ("memory.limit_in_bytes" if root == version_1 else "memory.max")).write_text(str(GIB))
    except OSError as error:
        for folder in (job / "step", job):
            if folder.is_dir():
                folder.rmdir()
        pytest.skip(f"needs control groups that this process may make: {error}")
    code = "import sys; sys.stdin.read(); from tawpipe.job_limits import memory_left; print(memory_left())"
    try:
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            (job / "step" / "cgroup.procs").write_text(str(process.pid))
            said, _ = process.communicate("")
        assert GIB * 0.9 < float(said) < GIB, "a process of Python is in it"
    finally:
        (job / "step").rmdir()
        job.rmdir()
