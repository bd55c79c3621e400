"""The doctor's words on a machine and its links, and a machine that is measured by processes of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tawpipe.errors import RunError
from tawpipe.plan.machine import doctor
from tawpipe.plan.machine.doctor import probe_machine, software
from tawpipe.plan.machine.machine import Device, Machine, save_machine, uniform
from tawpipe.plan.machine.probe import Probe, Rates
from tawpipe.runtime.homes import host_memory
from tawpipe.runtime.world import World
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


def machine(nodes: int, local: int) -> Machine:
    return uniform(nodes, local, between=LinkModel(1.25e9, 2e-5, False), inside=LinkModel(1e10, shared=False))


def test_software_versions_list_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(software())
    assert found["torch"].startswith("2.") and "not installed" not in found.values() and "python" in found
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package-here"))
    assert dict(software())["no-such-package-here"] == "not installed"


def test_free_memory_within_job_limits_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter((4000.0 * 2**20, float("inf")))
    for module in (doctor, host_memory):
        monkeypatch.setattr(module, "memory_left", lambda: next(left))
    rows = dict(doctor._machine(World(Topology.grid(1, 1), 0, torch.device("cpu"), None)))
    assert rows["free memory"].endswith(" GiB, within the limits of this job's control groups") and len([*left]) == 1


def test_doctor_lists_links_with_their_rates() -> None:
    rates = (Rates(1e9, 5e8, 0.0), Rates(1.25e9, 1.25e9, 0.0))
    rows = dict(doctor._links(Probe(machine(2, 2), rates, ())))
    said = "1.25 GB/s (10 Gbit/s), 20 us, one for all devices of a node, both directions together"
    assert rows["between nodes"] == said
    assert rows["inside a node"] == "10 GB/s (80 Gbit/s), 0 us, one per device"
    assert rows["node 0"] == "sends 8, receives 4 Gbit/s" and "to the host" not in rows
    assert set(dict(doctor._links(Probe(machine(1, 2), (), ())))) == {"inside a node"}
    assert dict(doctor._links(Probe(machine(1, 1), (), ()))) == {"links": "none: a single process"}


def test_single_process_starts_others_to_measure_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = uniform(2, 1, between=LinkModel(1e9, 1e-4), inside=LinkModel(1e10), device=Device())
    started: list[list[str]] = []

    def measured(command: list[str], **how: Any) -> Any:
        started.append(command)
        assert how["stdout"] is not None  # what it says must not be taken for this process's results
        save_machine(wanted, Path(command[command.index("--out") + 1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", measured)
    found = probe_machine("cpu")
    assert found is not None and found.nodes == (1, 1) and found.between == wanted.between
    assert started[0][1:4] == ["-m", "tawpipe", "doctor"] and started[0][-2:] == ["--device", "cpu"]
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3))
    with pytest.raises(RunError, match="tawpipe doctor ended with 3"):
        probe_machine("cpu")


def test_doctor_names_the_interface_that_carried_the_traffic(tmp_path: Path) -> None:
    for name, sent, speed in (("lo", 9e9, ""), ("eth0", 1e9, "1000"), ("thunder0", 5e6, "-1"), ("eth1", 0, "100000")):
        (tmp_path / name / "statistics").mkdir(parents=True)
        (tmp_path / name / "statistics" / "tx_bytes").write_text(f"{sent:.0f}\n")
        (tmp_path / name / "speed").write_text(speed)
    after = doctor.sent_bytes(tmp_path)
    assert after == {"eth0": 10**9, "eth1": 0, "thunder0": 5 * 10**6}
    said = lambda before, reached: doctor.used_between(before, after, reached, tmp_path)  # noqa: E731
    more = "; eth1 has a higher rate (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
    assert said({"eth0": 0}, 1.2e8) == f"eth0, rated 1 Gbit/s{more}"
    assert said({"eth0": 0}, 5e7) == f"eth0, rated 1 Gbit/s: 0.4 Gbit/s reached{more}"
    assert said(after, 1e8).startswith("not counted by the system")
    assert said(after | {"thunder0": -(10**8)}, 1e8) == "thunder0, of unknown rate"
    assert doctor.used_between({}, {}, 1e8, tmp_path) == ""


def test_doctor_lists_the_interface_of_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "used_between", lambda before, after, reached: f"eth0 {reached:g}")
    monkeypatch.setattr(doctor, "sent_bytes", lambda: {"eth0": 1})
    several, single = (Topology.grid(*shape) for shape in ((2, 2), (1, 4)))
    links = Probe(machine(2, 2), (), ())
    world: Any = SimpleNamespace(machines=several, rank=0, gather_texts=lambda text: [text, "", "eth1", ""])
    said = list(doctor._interfaces(world, {}, links))
    assert said == [("machine 0 uses", "eth0 1.25e+09"), ("machine 1 uses", "eth1")]
    world.machines = single
    assert not list(doctor._interfaces(world, {}, links))
