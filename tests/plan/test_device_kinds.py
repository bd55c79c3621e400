"""Machines whose devices differ: files, what doctor measures, homes by memory, and plans that deal by speed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plan_requests import LAYERS, plan_request, profile, search_only, step_of
from schedules import llama
from tawpipe.dealing.speeds import spell_speeds
from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import fits, shortage
from tawpipe.plan.cost.measure import machine_of
from tawpipe.plan.cost.predict import bound_of, memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine import doctor, probe, speeds
from tawpipe.plan.machine.devices import Device
from tawpipe.plan.machine.machine import Machine, load_machine, machine_from, save_machine
from tawpipe.plan.search.pipelines import pipeline_costs
from tawpipe.plan.search.place import BY_MEMORY, find_homes, homes_by_memory
from tawpipe.plan.search.plan_file import record_of, request_from, settings_of
from tawpipe.plan.search.search import search
from tawpipe.schedule.pipelines.positions import Positions
from tawpipe.schedule.settings import spell_homes
from tawpipe.simulate import LinkModel
from tawpipe.topology import Topology

GIB = 2**30
NEW, OLD = Device("H100", 80 * GIB), Device("A100", 40 * GIB, speed=0.5)
FREE = LinkModel(1e12)
CONTENT: dict[str, Any] = {
    "format": 1,
    "nodes": [2, 1],
    "between": {"gbit_per_s": 10},
    "inside": {"gbyte_per_s": 10},
    "device": {"name": "H100", "memory_gib": 80},
    "devices": {"new": {}, "old": {"name": "A100", "memory_gib": 40, "speed": 0.5}},
    "device_of": ["new", "old"],
}


def unequal(*devices: Device, local: int = 2, between: LinkModel = FREE) -> Machine:
    return Machine((local,) * (len(devices) // local), between, FREE, device=devices[0], device_of=devices)


def asked(machine: Machine, **changes: Any) -> PlanRequest:
    """As ``request_of`` makes it: dealt by the speeds of the devices."""
    request = plan_request(machine, **changes)
    return replace(request, settings=replace(request.settings, device_speeds=spell_speeds(machine.speeds)))


def test_machine_file_names_the_device_of_every_node_or_process(tmp_path: Any) -> None:
    machine = machine_from(CONTENT)
    assert machine.device == NEW and machine.device_of == (NEW, NEW, OLD)
    assert machine.speeds == (1.0, 1.0, 0.5) and machine.most_memory == 80 * GIB
    assert machine_from({**CONTENT, "device_of": ["new", "old", "new"]}).device_of == (NEW, OLD, NEW)
    alike = machine_from({**CONTENT, "device_of": ["old", "old"]})
    assert alike.device == OLD and not alike.device_of and not alike.speeds
    for some in (machine, replace(machine, device_of=(NEW, OLD, replace(NEW, speed=0.9)))):
        save_machine(some, tmp_path / "a.yaml")
        assert load_machine(tmp_path / "a.yaml") == some


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_of": ["new"]}, r"device_of: got '1 names'; a list of 2 names, of every node, or of 3"),
        ({"device_of": ["new"] * 4}, r"device_of: got '4 names'.*of every process: new, old"),
        ({"device_of": "new"}, r"device_of: got 'new'; a list"),
        ({"device_of": ["new", "odd"]}, r"device_of: got 'odd'; one of devices: new, old"),
        ({"device_of": None}, r"device_of: got None; a list"),
        ({"devices": None}, r"devices: got None; what device_of names"),
        ({"devices": 8}, r"devices: got 8; what device_of names"),
        ({"devices": {"new": 3}}, r"devices: new: got 3; a mapping"),
        ({"devices": {"new": {"sped": 3}}}, r"devices: new: got 'sped'"),
        *(({"devices": {"new": {"speed": s}}}, rf"new: speed: got {s}; a number above 0") for s in (0, -1, "'fast'")),
        *(({"devices": {"new": {"memory_gib": m}}}, rf"new: memory_gib: got {m}; a number above 0") for m in (0, -1)),
        ({"devices": {"new": {"speed": float("nan")}}}, r"new: speed: got nan"),
        ({"device": {}}, r"devices: new: memory_gib: got None; a number, as the other devices have one"),
        ({"device": 3}, r"device: got 3; a mapping"),
    ],
)
def test_contradictions_in_device_kinds_are_named(change: dict[str, Any], reason: str) -> None:
    if change.get("devices") == {"new": {"speed": "'fast'"}}:
        change = {"devices": {"new": {"speed": "fast"}}}
    with pytest.raises(UserError, match=reason):
        machine_from({**CONTENT, **change})


def test_device_name_option_is_refused_for_machines_of_several_kinds(tmp_path: Any) -> None:
    save_machine(machine_from(CONTENT), tmp_path / "a.yaml")
    with pytest.raises(UserError, match=r"--device-name: got 'H200'; nothing: device_of in .* says what"):
        machine_of(str(tmp_path / "a.yaml"), device=Device(), name="H200")


def test_doctor_measures_device_speeds_and_names_slow_ranks() -> None:
    machine = unequal(*[replace(NEW, speed=1.0)] * 3, replace(OLD, speed=1.0))
    kinds, rates = ["H100"] * 3 + ["A100"], [100.0, 102.0, 60.0, 45.0]
    measured, notes = speeds.with_speeds(machine, kinds, rates)
    assert [device.speed for device in measured.device_of] == [1.0, 1.0, 1.0, 0.45] and measured.device.speed == 1.0
    assert notes == ["rank 2 is 1.7 times as slow as other devices of its kind (H100)"]
    near, notes = speeds.with_speeds(machine, kinds, [100.0, 100.0, 100.0, 97.0])
    assert not near.speeds and near.device_of and not notes
    alike, _ = speeds.with_speeds(replace(machine, device_of=()), ["H100"] * 4, [100.0] * 4)
    assert alike == replace(machine, device_of=())


def test_doctor_lists_devices_with_their_ranks_speed_and_memory() -> None:
    rows = dict(doctor._devices(unequal(NEW, NEW, OLD, NEW)))
    assert rows == {"ranks 0, 1, 3": "H100, speed 1, 80.0 GiB", "ranks 2": "A100, speed 0.5, 40.0 GiB"}


def test_memory_of_a_device_kind_is_that_of_its_smallest_device(monkeypatch: Any) -> None:
    topology = Topology.grid(2, 2)
    world: Any = SimpleNamespace(machines=topology, nodes=topology, rank=0, device=torch.device("cpu"))
    world.gather_numbers = lambda number: [8.0 * GIB, 6.0 * GIB, 3.0 * GIB, 4.0 * GIB]
    world.gather_texts = lambda text: ["new", "new", "old", "old"] if text == "kind" else [text] * 4
    monkeypatch.setattr(probe, "kind_of", lambda _: "kind")
    machine = probe.machine_unprobed(world)
    assert [device.memory_bytes // GIB for device in machine.device_of] == [6, 6, 3, 3]
    assert machine.device == machine.device_of[0] and {device.name for device in machine.device_of} == {"CPU"}


def test_device_speeds_are_measured_only_if_kinds_differ() -> None:
    """Processes on the processors of one machine are of one kind, which needs no measuring."""
    world: Any = SimpleNamespace(device=torch.device("cpu"), barrier=lambda: None)
    assert speeds.products_per_s(world) > 1 and speeds.kind_of(world.device)
    world.gather_texts = lambda text: [text] * 4
    machine = unequal(NEW, NEW, NEW, NEW)
    assert speeds.speeds_measured(machine, world) == (machine, [])
    world.gather_texts, world.gather_numbers = lambda _: ["a", "a", "b", "b"], lambda _: [2.0, 2.0, 1.0, 1.0]
    measured, _ = speeds.speeds_measured(machine, world)
    assert measured.speeds == (1.0, 1.0, 0.5, 0.5)


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "1f1b"])
def test_prediction_follows_the_dealing_by_device_speed(strategy: str) -> None:
    """Two fast devices and two of half their speed; a profile is of the first device, whichever that is."""
    given = {"recompute": "full", "micro_batches_per_visit": 8 if strategy != "1f1b" else 1}
    model = {"model": llama(24), "profile": profile(24)} if strategy == "1f1b" else {}
    fast = asked(unequal(NEW, NEW, OLD, OLD), global_batch=48, **model)
    slow = asked(unequal(OLD, OLD, NEW, NEW), global_batch=48, **model)
    even = replace(fast, settings=replace(fast.settings, device_speeds=""))
    alike = plan_request(unequal(NEW, NEW, NEW, NEW), global_batch=48, **model)
    seconds = [
        predict(request, step_of(request, strategy, **given)).step_seconds for request in (fast, slow, even, alike)
    ]
    assert seconds[0] == pytest.approx(seconds[3] * 4 / 3, rel=0.1)
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=0.1)  # the same seconds are those of a slow device there
    assert seconds[2] > 1.3 * seconds[0]
    for request, took in zip((fast, slow, even), seconds, strict=False):
        assert bound_of(request, step_of(request, strategy, **given)) <= took * (1 + 1e-9)


def test_stage_search_receives_the_speed_of_every_position() -> None:
    request = asked(unequal(NEW, NEW, OLD, OLD))
    paces = {
        axis: pipeline_costs(request, Positions(request.topology, axis), "full").pace for axis in ("world", "nodes")
    }
    assert paces == {"world": (1, 1, 2, 2), "nodes": (1, 2)}
    inside = pipeline_costs(request, Positions(request.topology, "locals"), "full").pace
    assert inside == pytest.approx((4 / 3, 4 / 3))
    assert pipeline_costs(plan_request(), Positions(request.topology, "world"), "full").pace == ()


def test_best_plan_deals_by_speed_and_is_read_back_from_its_file() -> None:
    request = asked(unequal(NEW, NEW, OLD, OLD, between=LinkModel(2e6)), global_batch=12)
    best = search(request)[0]
    assert best.step is not None and best.prediction is not None
    assert best.step.settings.device_speeds == "2x1,2x0.5" == settings_of(best.step)["device_speeds"]
    again = request_from(record_of(request), where="here")
    assert again.machine == request.machine
    assert again.costs.compute_factor == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0} == request.costs.compute_factor


def test_homes_by_memory_fit_on_devices_of_unequal_memory() -> None:
    """In turn, a small node has too little for its units; by memory it keeps fewer."""
    wide = plan_request(unequal(NEW, NEW, NEW, NEW, between=LinkModel(2e6)))
    needs = memory_quickly(wide, step_of(wide, "tawpipe-striped"))
    besides = needs.device - needs.parts["homes"]
    small = replace(NEW, memory_bytes=besides + needs.parts["homes"] // 8)
    large = replace(NEW, memory_bytes=besides + 2 * needs.parts["homes"])
    for devices in ((large, large, small, small), (small, small, large, large)):
        machine = unequal(*devices, between=LinkModel(2e6))
        request = plan_request(machine, memory=large.memory_bytes)
        assert not request.machine.speeds and len(request.absent) == 4 and 0 in request.absent
        in_turn = step_of(request, "tawpipe-striped")
        lacks = memory_quickly(request, in_turn)
        assert not fits(request, lacks) and "on a smaller device" in shortage(request, lacks)
        homes = homes_by_memory(request, in_turn)
        step = step_of(request, "tawpipe-striped", homes=spell_homes(homes))
        assert fits(request, memory_quickly(request, step))
        sought = find_homes(request, in_turn)
        assert sought is not None and BY_MEMORY in sought.seconds and sought.of_unit
        best = step_of(request, "tawpipe-striped", homes=spell_homes(sought.of_unit))
        assert fits(request, memory_quickly(request, best))
        (striped,) = search_only(request, "tawpipe-striped")
        assert striped.fits and striped.step is not None and striped.step.settings.homes
    assert homes_by_memory(wide, step_of(wide, "tawpipe-striped")) == ()
    whole = homes_by_memory(request, step_of(request, "tawpipe-whole"))
    assert len(whole) == len(request.model.units) and set(whole) <= {0, 1, 2, 3}
    assert homes_by_memory(request, step_of(request, "tawpipe-spread")) == ()


def test_absent_memory_is_zero_for_equal_device_memory() -> None:
    request = plan_request(unequal(NEW, replace(NEW, speed=0.5), NEW, NEW), memory=2**30)
    assert request.absent == () and request.model.num_layers == LAYERS
    assert plan_request(unequal(NEW, NEW, OLD, OLD)).absent == ()  # nobody asks for memory
    half = plan_request(unequal(NEW, NEW, OLD, OLD), memory=1000)
    assert half.absent == (0, 0, 500, 500)
