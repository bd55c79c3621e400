"""Documents of uneven lengths in the lab: all dealings of a step compute all of it, once; seconds, bounds, rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tawpipe.errors import UserError
from tawpipe.runtime.world import World
from tawpipe.schedule.proof.verify import verify
from tawpipe.topology import Topology
from tawpipe_lab import ours
from tawpipe_lab.bounds import Bounds
from tawpipe_lab.compare import bounds_of, link_of
from tawpipe_lab.lengths import PACKINGS, DealtWorkload, dealt
from tawpipe_lab.suite import Cell, Entry, read_suite
from tawpipe_lab.table import write_table
from tawpipe_lab.worker import make
from tawpipe_lab.workload import PASSES, LengthsWorkload, TimedWorkload, from_spelled_out, spell_out
from timed import DOCUMENTS, WORKLOAD

PRODUCTION = LengthsWorkload(
    layers=6,
    layer_bytes=426_000,
    token_s=2.7e-7,
    mu=6.35,
    sigma=2.33,
    max_document=98_304,
    bin_tokens=98_304,
    tokens=2_097_152,
)
TINY = LengthsWorkload(**DOCUMENTS)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "balanced": ("tawpipe-balanced", {}),
    "balanced, no sets": ("hsdp-balanced", {"sequence_ranks": 1}),
    "balanced, nothing recomputed": ("tawpipe-balanced", {"sequence_ranks": 1, "recompute": "none"}),
    "balanced, as memory permits": ("tawpipe-balanced", {"keep_mib": 1}),
    "tokens": ("tawpipe-spread", {"packing": "tokens"}),
    "in turn": ("tawpipe-spread", {"packing": "in turn"}),
    "in turn, sets": ("tawpipe-spread", {"packing": "in turn", "sequence_ranks": 2}),
    "node": ("tawpipe-spread", {"packing": "node"}),
    "rows": ("tawpipe-spread", {"packing": "rows"}),
    "fsdp2": ("fsdp2", {}),
    "fsdp2, two per gather": ("fsdp2", {"micro_batches_per_gather": 2}),
    "fsdp2, by tokens": ("fsdp2", {"packing": "tokens"}),
    "fsdp2, balanced": ("fsdp2", {"packing": "balanced"}),
}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_is_computed_once_under_every_packing(packing: str, ranks: int) -> None:
    topology = Topology.grid(2, 4)
    for workload in (TINY, PRODUCTION):
        work = dealt(workload, packing, topology, ranks)
        bins = work.packs
        documents = Counter(n for row in (*bins.shared, *bins.single) for one in row for n in one.documents)
        assert set(documents.values()) == {1} and len(documents) == len(bins.lengths)
        assert sum(bins.lengths) == sum(workload.lengths) == workload.tokens
        if packing != "rows":
            assert bins.lengths == workload.lengths
        held = Counter(m for own in work.shares for m in own)
        each = 4 if packing == "node" else ranks
        assert held == {m: each if m < work.shared else 1 for m in range(work.micro_batches)}
        for rank, own in enumerate(work.shares):
            tokens = [work.tokens(m) * workload.tokens / work.micro_batches for m in own]
            assert tokens == pytest.approx([bins.tokens(one) for one in bins.of(rank)])
        whole = PASSES * sum(map(workload.work.of, workload.lengths))
        assert work.compute_s < whole if packing == "rows" else work.compute_s == pytest.approx(whole)


def test_documents_dealt_by_speed_balance_the_time_of_slow_devices() -> None:
    topology, speeds = Topology.grid(2, 2), (1.0, 1.0, 0.5, 0.5)
    knobs = {"sequence_ranks": 1, "device_speeds": "2x1,2x0.5"}
    by_speed, evenly = (
        ours.computed("tawpipe-balanced", PRODUCTION, topology, given) for given in (knobs, {"sequence_ranks": 1})
    )
    assert isinstance(by_speed, DealtWorkload) and isinstance(evenly, DealtWorkload)
    floor = PRODUCTION.floor_s(topology, speeds)
    assert floor == pytest.approx(PRODUCTION.floor_s(topology) * 4 / 3)
    assert floor <= by_speed.modelled_s(None, speeds) < floor / 0.9
    assert evenly.modelled_s(None, speeds) > 1.4 * floor
    verify(ours.schedule_of("tawpipe-balanced", TINY, topology, knobs))


def test_document_lengths_depend_only_on_the_seed() -> None:
    assert replace(TINY).lengths == TINY.lengths != replace(TINY, seed=1).lengths
    assert min(TINY.lengths[:-1]) >= TINY.min_document and max(TINY.lengths) == TINY.max_document
    assert from_spelled_out(spell_out(TINY)) == TINY


@pytest.mark.parametrize(("nodes", "local", "gain"), [(3, 2, 1.45), (2, 4, 1.55)])
def test_balanced_dealing_reaches_its_promised_gain(nodes: int, local: int, gain: float) -> None:
    topology = Topology.grid(nodes, local)
    modelled = {packing: dealt(PRODUCTION, packing, topology).modelled_s(None) for packing in PACKINGS}
    balanced = dealt(PRODUCTION, "balanced", topology, local).modelled_s(None)
    assert min(modelled["in turn"], modelled["rows"] * 1.2) > gain * balanced
    assert PRODUCTION.floor_s(topology) <= balanced == min(balanced, *modelled.values())


@pytest.mark.parametrize("row", ROWS)
def test_schedules_of_document_workloads_verify_and_bounds_are_mean_times(row: str) -> None:
    topology, (name, knobs) = Topology.grid(2, 2), ROWS[row]
    cell = Cell("c", 2, 2, "100mbit", TINY)
    bounds, whole = bounds_of(cell, Entry(name, knobs), link_of(cell)), PASSES * sum(map(TINY.work.of, TINY.lengths))
    assert isinstance(bounds, Bounds)
    passes = 0.75 if knobs.get("recompute") == "none" else 1
    if row != "rows" and "keep_mib" not in knobs:
        assert bounds.physical_s == pytest.approx(max(whole * passes / 4, bounds.link_s))
    assert bounds.dependency_s >= bounds.physical_s
    if name in ours.rows():
        verify(ours.schedule_of(name, TINY, topology, knobs))


def compute(world: World, *, workload: dict[str, Any]) -> dict[str, float]:
    """Seconds that this rank computes in a step of every row."""
    found = {}
    for title, (name, knobs) in ROWS.items():
        contender: Any = make(name, LengthsWorkload(**workload), world.topology, world.rank, **knobs)
        contender.step()
        before = contender.sleeper.asked_s
        contender.step()
        found[title] = contender.sleeper.asked_s - before
        contender.close()
    return found


@pytest.mark.slow
def test_every_rank_sleeps_for_its_packs(pool: Any) -> None:
    settings = {name: value for name, value in spell_out(TINY).items() if name != "kind"}
    topology = Topology.grid(2, 2)
    assert dealt(TINY, "balanced", topology, 2).packs.shape == (1, 1)  # some documents are shared, others are not
    found = pool.run(f"{__name__}:compute", 2, 2, workload=settings)
    for title, (name, knobs) in ROWS.items():
        is_ours = name in ours.rows()
        packing = knobs.get("packing", "in turn")
        work = ours.computed(name, TINY, topology, knobs) if is_ours else dealt(TINY, packing, topology)
        assert isinstance(work, DealtWorkload)
        passes = 3 if knobs.get("recompute") == "none" else 4
        for rank, own in enumerate(work.shares):
            wanted = 0.0
            for m in own:
                share = work.layers / (work.packs.ranks if m < work.shared else 1)
                kept = 1 if "keep_mib" in knobs and m >= work.shared else 0  # a MiB holds one of the two layers
                wanted += share * ((passes - kept / work.layers) * work.forward_s * work.work(m))
                wanted += share * 5 * work.keys_s(m) if m < work.shared else 0.0
            assert found[rank][title] == pytest.approx(wanted), title


def test_impossible_lengths_settings_are_named() -> None:
    topology = Topology.grid(2, 2)
    for name, workload, knobs, setting in (
        ("tawpipe-spread", TINY, {"packing": "tight"}, "packing"),
        ("tawpipe-balanced", TimedWorkload(**WORKLOAD), {}, "packing"),
        ("tawpipe-spread", TimedWorkload(**WORKLOAD), {"keep_mib": 3}, "keep_mib"),
        ("tawpipe-balanced", TINY, {"sequence_ranks": 3}, "schedule.sequence_ranks"),
        ("tawpipe-balanced", TINY, {"parts_per_layer": 2}, "parts_per_layer"),
        ("fsdp2-cp", TINY, {}, "workload"),
        ("fsdp2", TINY, {"packing": "tight"}, "packing"),
        ("fsdp2", TimedWorkload(**WORKLOAD), {"packing": "balanced"}, "packing"),
        ("zero3", TINY, {}, "workload"),
        ("1f1b", TINY, {}, "workload"),
    ):
        with pytest.raises(UserError) as caught:
            make(name, workload, topology, 0, **knobs)
        assert caught.value.setting == setting, name
    with pytest.raises(UserError, match="bin_tokens"):
        replace(TINY, bin_tokens=100)
    with pytest.raises(UserError, match="token_s"):
        replace(TINY, token_s=0)


def test_table_of_a_lengths_suite_reports_the_gain_of_balancing(tmp_path: Any) -> None:
    cell = {"name": "c", "nodes": 2, "local": 2, "rate": "none", "workload": spell_out(TINY)}
    (read,) = read_suite({"name": "x", "cells": [cell], "strategies": [{"strategy": "fsdp2"}]}).cells
    assert read.workload == TINY
    usual: dict[str, Any] = {
        "cell": read.spelled_out(),
        "origin": "ours",
        "status": "ok",
        "physical_bound_s": 1.0,
        "dependency_bound_s": 1.0,
        "link_bytes_sent": [1],
        "link_bytes_predicted": [1],
        "exposed_communication_s": 0.1,
        "cpu_busy": 0.1,
        "peak_gib": None,
        "floor_s": 1.0,
    }
    rows = [
        {
            **usual,
            "strategy": name,
            "label": name,
            "seconds_per_step": {"median": seconds, "min": seconds, "max": seconds},
            "tokens_per_second": TINY.tokens / seconds,
            "modelled_s": modelled,
        }
        for name, seconds, modelled in (("fsdp2", 3.0, 2.0), ("tawpipe-balanced", 2.0, 1.25))
    ]
    write_table("x", {"date": "", "command": "", "machine": ""}, rows, tmp_path / "table.md")
    balanced, other = [line for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert balanced.endswith("| 20000 | 1.25 | 0.500 | 1.00 (1.00) | 1.000 |")
    assert other.endswith("| 13333 | 2.00 | 0.333 | 1.50 (1.60) | 0.938 |")
