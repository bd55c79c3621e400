"""What the links of a lab cluster carry: measured, said, and used in bounds and by the clock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from processes import is_alive
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.simulate import LinkModel, play
from tawpipe.topology import Topology
from tawpipe_lab.bounds import Bounds, workload_costs
from tawpipe_lab.cluster import network
from tawpipe_lab.cluster.cluster import Cluster
from tawpipe_lab.cluster.delay import ends_of
from tawpipe_lab.cluster.links import Links
from tawpipe_lab.cluster.probe import PORT
from tawpipe_lab.cluster.rates import parse_latency
from tawpipe_lab.compare import bounds_of, compare, link_of, message_sizes
from tawpipe_lab.ours import INSIDE, schedule_of
from tawpipe_lab.page import compare_page
from tawpipe_lab.suite import Cell, Entry, Suite, load_suite
from tawpipe_lab.table import describe, title
from tawpipe_lab.workload import TimedWorkload

MB = 10**6
NAME = f"test{os.getpid()}links"
WORK = TimedWorkload(
    layers=6,
    layer_bytes=60_000,
    forward_s=1e-3,
    backward_input_s=2e-3,
    backward_weight_s=1e-3,
    micro_batches=6,
    activation_bytes=30_000,
)
CELL = Cell("late", 3, 1, "80mbit", WORK, latency="20ms")
READ = Links(
    one_way=9 * MB, both_ways=((10_000, 8.0 * MB), (60_000, 8.5 * MB)), latency_s=0.021, idle=(10_000, 0.03),
    named=10.0 * MB, named_latency_s=0.02,
)  # fmt: skip
OURS = ("tawpipe-spread", "tawpipe-striped", "tawpipe-whole", "tawpipe-step", "flat", "weipipe", "1f1b-ours")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes with a latency between them."""
    try:
        with Cluster.create(2, rate="80mbit", latency="20ms", name=NAME) as made:
            yield made
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_delayed_link_stays_below_its_rate_and_above_its_latency(cluster: Cluster) -> None:
    links = cluster.links([20_000, 400_000])
    assert links is not None
    assert [size for size, _ in links.both_ways] == [20_000, 400_000]
    for rate in (links.one_way, links.bytes_per_s):
        assert 0 < rate <= 10 * MB
    assert links.latency_s >= 0.02
    assert links.idle[1] + links.latency_s >= 0.04, "a message and the byte that answers it"
    assert links.named == 10 * MB and links.named_latency_s == 0.02


@pytest.mark.slow
def test_link_messages_are_measured_no_larger_than_the_time_limit_allows(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tawpipe_lab.cluster.links.MESSAGE_S", 0.02)
    monkeypatch.setattr("tawpipe_lab.cluster.links.SHORT_S", 0.001)
    links = cluster.links([10**9])
    assert links is not None
    assert [size for size, _ in links.both_ways] == [200_000] and links.idle[0] == 10_000


def test_delay_process_runs_in_the_switch_and_ends_with_the_cluster(cluster: Cluster) -> None:
    name = f"{NAME}b"
    with Cluster.create(2, rate="80mbit", latency="1ms", name=name):
        carriers = network.call("ip", "netns", "pids", network.switch_of(name)).split()
        assert len(carriers) == 1
        shaped = json.loads(network.call("tc", "-j", "-n", f"{name}0", "qdisc", "show", "dev", network.INTERFACE))
        assert shaped[0]["kind"] == "tbf"
    assert not is_alive(int(carriers[0]))
    assert network.namespaces(name) == []


def test_packet_headers_take_one_percent_and_congestion_control_is_cubic(cluster: Cluster) -> None:
    link = json.loads(network.call("ip", "-j", "-d", "-n", cluster.nodes[0], "link", "show", network.INTERFACE))[0]
    assert 80 / link["mtu"] <= 0.01
    if "cubic" in network._CONGESTION_CONTROLS.read_text().split():
        assert "congctl cubic" in network.call("ip", "-n", cluster.nodes[0], "route", "show")


def test_idle_connections_keep_their_sending_rate(cluster: Cluster) -> None:
    for node in cluster.nodes:
        assert network.call("ip", "netns", "exec", node, "cat", network.SLOW_START).strip() == "0"


def test_single_node_has_no_links() -> None:
    assert Cluster("alone", 1).links([1000]) is None


def test_missing_tun_device_is_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(network.delay, "TUN", "/nowhere/tun")
    assert main(["lab", "up", "--nodes", "2", "--latency", "5ms", "--name", f"{NAME}c"]) == 2
    assert "--latency: got '5ms'; none, or a machine with /nowhere/tun" in capsys.readouterr().err
    assert network.namespaces(f"{NAME}c") == []


@pytest.mark.parametrize(("words", "seconds"), [("5ms", 0.005), ("500 us", 0.0005), ("1s", 1.0), (None, 0.0)])
def test_latency_words_are_parsed(words: str | None, seconds: float) -> None:
    assert parse_latency(words) == pytest.approx(seconds)


@pytest.mark.parametrize("words", ["5", "-5ms", "0.1ms", "2s", "0ms", "fast", ""])
def test_impossible_latency_is_refused_with_the_possible_range(words: str) -> None:
    with pytest.raises(UserError, match=r"--latency: got .* from 0.5ms to 1s, or none"):
        parse_latency(words)


def test_link_measurements_read_back_from_results() -> None:
    assert Links.from_spelled_out(json.loads(json.dumps(READ.spelled_out()))) == READ


def test_link_far_from_its_nominal_rate_or_latency_is_reported() -> None:
    assert READ.trouble == ""
    assert replace(READ, named=11.0 * MB).trouble == "links carry 0.77 of their name: 68 Mbit/s"
    assert replace(READ, latency_s=0.04).trouble == "links have a latency of 40.00 ms instead of 20 ms"
    assert replace(READ, named=None).of_name is None


def test_slowest_node_determines_the_link_measurements() -> None:
    sides = [
        {"latency_s": 1e-3, "short_s": 2e-3, "both": [5.0, 7.0]},
        {"one_way": 9.0, "both": [6.0, 4.0]},
        {"both": [8.0, 8.0]},
    ]
    links = Links.of(sides, [100, 200], 50)
    assert links.both_ways == ((100, 5.0), (200, 4.0)) and links.one_way == 9.0 and links.bytes_per_s == 5.0


def test_measured_message_sizes_are_a_unit_its_share_and_an_activation() -> None:
    assert message_sizes(CELL) == (20_000, 30_000, 60_000)
    for name in ("real", "lengths", "mixed-layers"):
        assert all(size > 0 for size in message_sizes(load_suite(name).cells[0]))


def test_bounds_use_measured_link_rates() -> None:
    by_name, measured = link_of(CELL), link_of(CELL, READ)
    assert by_name.latency_s == 0.02 and by_name.bytes_per_s < 10 * MB
    assert (measured.bytes_per_s, measured.latency_s) == (8.5 * MB, 0.021)
    fast, slow = (bounds_of(CELL, Entry("tawpipe-spread"), LinkModel(rate)) for rate in (8.5 * MB, 4.25 * MB))
    assert isinstance(fast, Bounds) and isinstance(slow, Bounds)
    assert slow.link_s == pytest.approx(2 * fast.link_s)


@pytest.mark.parametrize("name", [*OURS, "fsdp2", "hsdp", "1f1b", "zbv"])
def test_latency_lengthens_the_dependency_bound_but_not_the_physical_bound(name: str) -> None:
    cell = replace(CELL, nodes=3, local=2, workload=replace(WORK, layers=12))
    near, far = (bounds_of(cell, Entry(name), LinkModel(1e9, latency)) for latency in (0.0, 0.02))
    assert isinstance(near, Bounds) and isinstance(far, Bounds)
    assert far.physical_s == near.physical_s
    assert far.dependency_s >= near.dependency_s + 0.019


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("latency_s", [0.0, 0.003, 0.05])
def test_simulated_time_is_never_below_the_bound_with_latency(name: str, latency_s: float) -> None:
    topology, between = Topology.grid(3, 1), LinkModel(2.0 * MB, latency_s)
    schedule = schedule_of(name, WORK, topology, {})
    costs = workload_costs(WORK, between=between, inside=INSIDE, reduce_scatter="ring")
    bound = bounds_of(CELL, Entry(name), between)
    assert isinstance(bound, Bounds)
    assert bound.dependency_s <= play(schedule, costs, steps=1).makespan * (1 + 1e-9)


def test_tables_and_pages_show_measured_link_rates() -> None:
    row = {
        "cell": CELL.spelled_out(), "links": READ.spelled_out(), "label": "flat", "strategy": "flat", "origin": "ours",
        "status": "failed", "reason": "x",
    }  # fmt: skip
    assert title(row["cell"]) == "late: 3 nodes x 1, 80mbit, 20ms of latency"
    assert "68 Mbit/s in messages of 60 kB (0.85 of the name), latency 21.00 ms" in describe(row)
    environment = {"date": "", "command": "", "machine": ""}
    assert "of the name), latency 21.00 ms" in compare_page("suite", environment, [row])


def test_row_reports_links_far_from_their_nominal_rate(
    tmp_path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    poor = replace(READ, named=100.0 * MB)
    monkeypatch.setattr(Cluster, "links", lambda *_: poor)
    monkeypatch.setattr("tawpipe_lab.compare._launch", lambda *_, **__: (0, "nobody is started"))
    said: list[str] = []
    suite = Suite("poor", (replace(CELL, nodes=2, latency=None),), (Entry("flat"),), samples=1)
    rows = compare(suite, tmp_path, tell=said.append)
    assert rows[0]["links"]["of_name"] == pytest.approx(0.085)
    assert any("links carry 0.09 of their name" in line for line in said)


def test_link_ends_have_unique_names() -> None:
    names = [name for node in range(network.MAX_NODES) for name in ends_of(node)]
    assert len(set(names)) == len(names) and all(len(name) < 16 for name in names)
    assert 1024 < PORT < 32768  # below the ports that the kernel gives out itself
