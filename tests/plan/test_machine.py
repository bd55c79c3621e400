"""Topology files: what is written is read back; what contradicts itself is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.plan.cost.measure import machine_of
from tawpipe.plan.machine import probe as probe_module
from tawpipe.plan.machine.machine import Device, Machine, load_machine, machine_from, save_machine, uniform
from tawpipe.plan.machine.probe import loopback, tournament
from tawpipe.runtime.transport.transport import FAR_BLOCKS, NEAR_BLOCKS
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology

MACHINE = Machine(
    (4, 2),
    LinkModel(1.25e9, 2e-5),
    LinkModel(5e10, 5e-6, shared=False),
    {1: LinkModel(2.5e8, 2e-5)},
    LinkModel(2e10, 1e-5, full_duplex=False),
    Device("NVIDIA H100", 80 * 2**30, beside=1.07),
)


def test_machine_file_reads_back_equal(tmp_path):
    save_machine(MACHINE, tmp_path / "a.yaml", notes="measured\ntoday")
    assert (tmp_path / "a.yaml").read_text().startswith("# measured\n# today\n")
    assert load_machine(tmp_path / "a.yaml") == MACHINE
    assert MACHINE.topology == Topology(((0, 1, 2, 3), (4, 5))) and MACHINE.world_size == 6


def test_numbers_with_exponents_are_numbers_and_a_key_given_twice_is_refused(tmp_path):
    """YAML 1.1, which PyYAML reads, takes 1.25e14 as a text, and the last of two equal keys."""
    (file := tmp_path / "a.yaml").write_text(
        "format: 1\nnodes: [1]\ndevice: {name: CPU, memory_gib: 8, flops: 1.25e14}\n"
    )
    assert load_machine(file).device.flops == 1.25e14
    file.write_text("format: 1\nnodes: [1]\nnodes: [2]\n")
    with pytest.raises(UserError, match="'nodes' stands in line 2 already"):
        load_machine(file)


def test_unlimited_links_read_back_equal(tmp_path):
    free = Machine((1,), LinkModel(math.inf), LinkModel(math.inf))
    save_machine(free, tmp_path / "a.yaml")
    assert load_machine(tmp_path / "a.yaml") == free


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 2}, "format: got 2; 1"),
        ({"nodes": []}, "nodes: got"),
        ({"nodes": [2, 0]}, "nodes: got"),
        ({"nodes": [2, True]}, "nodes: got"),
        ({"between": None}, "between: got None"),
        ({"between": {"gbit_per_s": 0}}, "gbit_per_s: got 0; a number above 0"),
        ({"between": {"gbit_per_s": 1, "gbyte_per_s": 1}}, "one of gbit_per_s, gbyte_per_s"),
        ({"between": {"speed": 3}}, "between: got 'speed'"),
        ({"inside": {"gbyte_per_s": 1, "shared": "yes"}}, "shared: got 'yes'; true or false"),
        ({"inside": {"gbyte_per_s": 1, "latency_us": -1}}, "latency_us: got -1"),
        ({"between_of": {5: {"gbit_per_s": 1}}}, "between_of: got 5; a node, 0 to 1"),
        ({"device": {"memory_gib": "80 GB"}}, "memory_gib: got '80 GB'"),
        ({"device": {"beside": 0.9}}, "beside: got 0.9; a number, 1 or more"),
        ({"gpus": 8}, "got 'gpus'"),
    ],
)
def test_contradictions_in_a_machine_file_are_named(change, reason):
    content = {"format": 1, "nodes": [2, 2], "between": {"gbit_per_s": 10}, "inside": {"gbyte_per_s": 10}} | change
    with pytest.raises(UserError, match=reason):
        machine_from(content)


def test_missing_link_of_several_nodes_is_named():
    with pytest.raises(UserError, match="between: got None; the link of a node to the others"):
        machine_from({"format": 1, "nodes": [2, 2], "inside": {"gbyte_per_s": 10}})
    with pytest.raises(UserError, match="inside: got None"):
        machine_from({"format": 1, "nodes": [2], "between": {"gbit_per_s": 10}})


def test_short_topologies_are_parsed_and_wrong_ones_refused(tmp_path):
    made = machine_of("3x8@10gbit", device=Device("CPU"))
    assert made.nodes == (8, 8, 8) and made.between.bytes_per_s == 1.25e9 and made.inside.shared
    assert machine_of("1x4", device=Device("NVIDIA H100")).nodes == (4,)
    with pytest.raises(UserError, match="3x8@10gbit"):
        machine_of("3x8", device=Device())
    with pytest.raises(UserError, match="--topology"):
        machine_of(str(tmp_path / "nothing.yaml"), device=Device())
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "unnamed.yaml").write_text("format: 1\nnodes: [1]\n")
    assert machine_of(str(tmp_path / "unnamed.yaml"), device=Device()).device.name == ""
    with pytest.raises(UserError, match="YAML"):
        machine_of(str(tmp_path / "broken.yaml"), device=Device())
    (tmp_path / "text.yaml").write_text("hello\n" * 100)
    with pytest.raises(UserError, match=r"--topology: got '.*text.yaml'; .*3x8@10gbit.* no mapping"):
        machine_of(str(tmp_path / "text.yaml"), device=Device())


LOOPBACK = "nodes 0 and 1 are on one machine: their link is the loopback, not a network"


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_tournament_pairs_every_two_nodes_once(count):
    rounds = list(tournament(count, 99))
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({one for pair in pairs for one in pair}) == 2 * len(pairs) for pairs in rounds)


def test_probe_finds_equal_nodes_and_links_on_all_ranks(pool):
    """The numbers are those of a loopback; what counts is that all ranks agree and nothing is odd by construction."""
    found = pool.run("cases:probed", 2, 2)
    machine, rates, *_ = found[0]
    assert all(other[0] == machine for other in found)
    assert machine.nodes == (2, 2) and len(rates) == 2
    assert 1e6 < machine.between.bytes_per_s < 1e12 and machine.between.latency_s > 0
    assert machine.device.name == "CPU" and machine.device.memory_bytes > 2**20
    assert torch.get_num_threads() >= 1
    assert all(other[2:] == ((), LOOPBACK) for other in found), "all of it is noise of this machine's processors"


@pytest.mark.parametrize(
    ("stacks", "answer"),
    [
        ("aabb", (True, "")),
        ("aaaa", (False, LOOPBACK)),
    ],
)
def test_nodes_on_one_machine_are_detected_as_loopback(stacks, answer):
    assert loopback(stacks, [[0, 1], [2, 3]]) == answer
    assert loopback(stacks, [[0, 1, 2, 3]]) == (True, "")


@pytest.mark.slow
@pytest.mark.usefixtures("few_strategies")
def test_plan_with_topology_probe_measures_this_machine(capfd):
    words = ["plan", "--model", "tiny", "--vocab-size", "300", "--topology", "probe", "--sequence-length", "64"]
    assert main([*words, "--global-batch", "4", "--dtype", "float32", "--device", "cpu", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["chosen"]


def test_gpu_links_take_the_slower_of_pairs_and_collectives(monkeypatch):
    """Where gathers of all groups at once are slower than pairs, they count; and a machine knows what a group takes."""
    asked: list[tuple[str, int, int]] = []

    def gathers(world: Any, every: Any, blocks: int, name: str) -> tuple[float, int]:
        asked.append((name, len(every), blocks))
        return (50e9, 600 << 20) if name == "node" else (2e9, 700 << 20)

    monkeypatch.setattr(probe_module, "collective", gathers)
    world: Any = SimpleNamespace(topology=Topology.grid(2, 4))
    even = uniform(2, 4, between=LinkModel(12e9), inside=LinkModel(200e9, shared=False))
    machine = replace(even, between_of={1: LinkModel(6e9)})
    found = probe_module.with_collectives(machine, world)
    assert asked == [("node", 2, NEAR_BLOCKS), ("rail", 4, FAR_BLOCKS[0])]
    assert found.inside.bytes_per_s == 50e9 and found.device.communicator_bytes == 700 << 20
    assert found.far_share == pytest.approx(2e9)
    assert found.between_of[1].bytes_per_s == pytest.approx(4e9), "as much slower as the others"
    monkeypatch.setattr(probe_module, "collective", lambda *_: (1e12, 0))
    assert probe_module.with_collectives(machine, world) == machine


@pytest.mark.parametrize(("rate", "kind", "some"), [(50e9, "cuda", True), (1e8, "cuda", False), (50e9, "cpu", False)])
def test_large_gpu_messages_are_repeated_if_too_short_to_time(rate, kind, some):
    """Where the largest one is over before the host has looked; on a slow link one is long enough."""
    sent: list[tuple[int, int]] = []
    world: Any = SimpleNamespace(
        rank=0,
        device=SimpleNamespace(type=kind),
        machines=SimpleNamespace(num_nodes=2),
        barrier=lambda: None,
        gather_numbers=lambda number: [number, number],
    )
    ruler = probe_module._Ruler(world)

    def stream(first: bool, peer: int, size: int, forth: bool, back: bool, times: int = 1) -> float:
        sent.append((size, times))
        return size / rate

    ruler._stream = stream  # type: ignore[method-assign]
    assert ruler.rate([(0, 1)], forth=True, back=False) == [pytest.approx(rate)]
    (_, once), (size, times) = sent
    assert once == 1 and (times == probe_module.MOST_TIMES) is some
    assert (size == probe_module.LARGEST_CUDA_BYTES) is some


def test_communicator_memory_is_measured_only_with_nccl(monkeypatch):
    monkeypatch.setattr(probe_module, "_Ruler", lambda _: None)
    monkeypatch.setattr(probe_module, "network_stack", lambda: "one")
    monkeypatch.setattr(probe_module, "_inside", lambda *_: (MACHINE.inside, []))
    monkeypatch.setattr(probe_module, "_between", lambda *_: (MACHINE.between, {}, (), []))
    monkeypatch.setattr(probe_module, "host_link", lambda _: LinkModel(1e10))
    monkeypatch.setattr(probe_module, "machine_unprobed", lambda _: MACHINE)
    monkeypatch.setattr(probe_module, "speeds_measured", lambda machine, _: (machine, []))
    device = replace(MACHINE.device, communicator_bytes=5)
    monkeypatch.setattr(probe_module, "with_collectives", lambda machine, _: replace(machine, device=device))
    for nccl, size, taken in ((True, 2, 5), (True, 1, 0), (False, 2, 0)):
        monkeypatch.setattr(probe_module, "uses_nccl", lambda _, nccl=nccl: nccl)
        world: Any = SimpleNamespace(
            size=size, device=None, nodes=Topology.grid(1, 2), gather_texts=lambda text: [text, text]
        )
        assert probe_module.probe(world).machine.device.communicator_bytes == taken


def test_gpu_messages_are_timed_by_events(monkeypatch):
    """The stand-in's clock runs on the device alone; some messages go between two events."""
    state = {"at": 0.0, "sent": 0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = state["at"]

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * (other.at - self.at)

    def send() -> None:
        state["sent"] += 1
        state["at"] += 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert probe_module.timed(send, torch.device("cuda"), 8) == 0.25 and state["sent"] == 8
