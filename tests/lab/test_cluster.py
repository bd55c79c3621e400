"""The lab's cluster: links as fast as asked, and nothing left of it, however its owner ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import is_alive, wait_for
from tawpipe.cli import main
from tawpipe.errors import RunError, UserError
from tawpipe_lab.cluster import network
from tawpipe_lab.cluster.cluster import Cluster, Traffic, own_traffic
from tawpipe_lab.cluster.network import INTERFACE
from tawpipe_lab.cluster.rates import format_rate, parse_rates

MB = 10**6
PREFIX = f"test{os.getpid()}"
TAWPIPE = [sys.executable, "-m", "tawpipe", "lab"]


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Skips where no cluster can be made."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("needs Linux and root")
    try:
        with Cluster.create(1, rate="1gbit", name=f"{PREFIX}try"):
            pass
    except UserError as error:
        pytest.skip(str(error))


needs_network = pytest.mark.usefixtures("namespaces")


def run_lab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TAWPIPE, *words], capture_output=True, text=True, timeout=60)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=True).stdout


def left_of(name: str) -> list[str]:
    return [word for word in ip("netns", "list").split() if word.startswith(name)]


# Rates


def test_single_rate_applies_to_all_nodes_and_several_to_each() -> None:
    assert parse_rates("400mbit", nodes=3) == (400 * MB,) * 3
    assert parse_rates("1.5Gbit, 200mbit/s,none", nodes=3) == (1500 * MB, 200 * MB, None)
    assert parse_rates(None, nodes=2) == parse_rates("none", nodes=2) == (None, None)
    assert format_rate(1500 * MB) == "1.5 Gbit/s"


@pytest.mark.parametrize(
    "text", ["", "fast", "400", "400mb", "400mbps", "-1mbit", "0mbit", "1kbit", "1000gbit", "1e3mbit"]
)
def test_invalid_link_rate_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "up", "--nodes", "2", f"--rate={text}"]) == 2
    assert f"--rate: got {text!r}; a number with kbit, mbit or gbit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--rate", "1mbit,2mbit"], "--rate: got '1mbit,2mbit'; one rate for all nodes, or 3 with commas"),
        (["up", "--nodes", "0"], "--nodes: got 0; from 1 to"),
        (["up", "--name", "node1"], "--name: got 'node1'; 1 to 32 lower-case letters"),
        (["down", "--name", "../x"], "--name: got '../x'"),
        (["exec", "0"], "COMMAND: got 'nothing'; a command behind --"),
        (["up", "--", "ls"], "`tawpipe lab up` runs no command"),
    ],
)
def test_invalid_lab_settings_are_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *words]) == 2
    assert said in capsys.readouterr().err


# What it needs


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the message is about Linux")
@pytest.mark.parametrize("words", [["up"], ["down"], ["exec", "0", "--", "true"]])
def test_lab_refuses_to_run_without_root_or_iproute2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["lab", *words]) == 2
    assert "tawpipe: error: tawpipe lab: got 'user id 1000'; root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program, path: None)
    assert main(["lab", *words]) == 2
    assert "iproute2 installed" in capsys.readouterr().err


@needs_network
@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        ("Error: Specified qdisc kind is unknown.", "a kernel with veth, bridge and tbf"),
        ("RTNETLINK answers: Operation not permitted", "root with the right to make networks"),
    ],
)
def test_kernel_error_is_a_user_error_and_leaves_no_cluster(
    complaint: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tc").write_text(f"#!/bin/sh\necho '{complaint}' >&2\nexit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["lab", "up", "--name", f"{PREFIX}k"]) == 2
    assert said in capsys.readouterr().err
    assert left_of(f"{PREFIX}k") == []


# The links

RATES = "200mbit,100mbit,200mbit"

# Every transfer is acknowledged by its receiver, so they run one after the other: rank 0 takes part in all.
TRANSFERS = """
import json, os, socket, sys, time
rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
addresses, plan, out = json.loads(sys.argv[1])
chunk = bytearray(1 << 18)
for number, (source, target, size) in enumerate(plan):
    place = addresses[target // local], 7000 + number
    if rank == target:
        with socket.create_server(place) as server, server.accept()[0] as link:
            got, began = 0, None
            while got < size:
                got += link.recv_into(chunk)
                began = began or time.perf_counter()
            seconds = time.perf_counter() - began
            link.sendall(b"!")
        with open(f"{out}/{number}", "w") as file:
            file.write(str(seconds))
    if rank == source:
        while True:
            try:
                link = socket.create_connection(place)
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        with link:
            for _ in range(0, size, len(chunk)):
                link.sendall(chunk)
            link.recv(1)
"""


@pytest.fixture(scope="module")
def cluster(namespaces: None) -> Iterator[Cluster]:
    with Cluster.create(3, rate=RATES, name=f"{PREFIX}a") as made:
        yield made


@needs_network
def test_links_stay_below_their_rate_are_counted_and_nodes_are_faster(cluster: Cluster, tmp_path: Path) -> None:
    slow, fast = 4 << 20, 256 << 20
    plan = [(0, 1, fast), (0, 4, 2 * slow), (0, 2, slow), (2, 0, slow)]
    before = list(map(network.traffic, cluster.nodes))
    word = json.dumps([cluster.addresses, plan, str(tmp_path)])
    cluster.launch([sys.executable, "-c", TRANSFERS, word], local=2, timeout_s=60)
    carried = [network.traffic(node) - earlier for node, earlier in zip(cluster.nodes, before, strict=True)]

    inside, *between = (size / float((tmp_path / str(n)).read_text()) for n, (_, _, size) in enumerate(plan))
    for measured, rate in zip(between, [25 * MB, 12.5 * MB, 12.5 * MB], strict=True):
        assert measured < 1.05 * rate
    assert inside > between[0]

    sent, received = [3 * slow, slow, 0], [slow, slow, 2 * slow]
    for node in range(3):
        assert carried[node].sent == pytest.approx(sent[node], rel=0.03, abs=0.02 * slow)
        assert carried[node].received == pytest.approx(received[node], rel=0.03, abs=0.02 * slow)


@needs_network
def test_token_bucket_of_a_link_holds_at_most_two_milliseconds(cluster: Cluster) -> None:
    """What the bucket of a link holds takes a few milliseconds of it, and the packets that come are no larger."""
    sizes = []
    for node, rate in enumerate([25 * MB, 12.5 * MB, 25 * MB]):
        own = f"{PREFIX}a{node}"
        shaper = json.loads(network.call("tc", "-j", "-n", own, "qdisc", "show", "dev", "lab0"))[0]
        link = json.loads(network.call("ip", "-j", "-d", "-n", own, "link", "show", "lab0"))[0]
        sizes.append(link["gso_max_size"])
        assert sizes[-1] < shaper["options"]["burst"] < 2e-3 * rate
    assert len(set(sizes)) == 1


@needs_network
def test_two_clusters_exist_side_by_side(cluster: Cluster) -> None:
    with Cluster.create(1, rate=None, name=f"{PREFIX}b") as other:
        other.launch(["true"], local=2, timeout_s=60)
        assert len(left_of(f"{PREFIX}a")) == 4 and len(left_of(f"{PREFIX}b")) == 2
    assert left_of(f"{PREFIX}b") == [] and Cluster.find(cluster.name) == cluster


# Processes in the nodes

LOOK = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from tawpipe_lab.cluster.cluster import own_traffic
seen = dict(os.environ, argv=sys.argv[1:], counted=asdict(own_traffic()), interfaces=os.listdir("/sys/class/net"))
Path(os.environ["OUT"], os.environ["RANK"]).write_text(json.dumps(seen))
"""


@needs_network
def test_workers_see_the_ranks_and_network_of_their_cluster_node(cluster: Cluster, tmp_path: Path) -> None:
    cluster.launch([sys.executable, "-c", LOOK, "word"], local=2, env={"OUT": str(tmp_path)}, timeout_s=60)
    for rank in range(6):
        seen = json.loads((tmp_path / str(rank)).read_text())
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
        assert [int(seen[name]) for name in names] == [rank, rank % 2, 6, 2, rank // 2, 3]
        assert seen["MASTER_ADDR"] == cluster.addresses[0] and int(seen["MASTER_PORT"]) > 0
        assert seen["GLOO_SOCKET_IFNAME"] == INTERFACE and seen["OMP_NUM_THREADS"] == "1"
        assert "TAWPIPE_LOCAL_LAUNCHER" not in seen
        assert seen["argv"] == ["word"]
        assert sorted(seen["interfaces"]) == sorted(["lo", INTERFACE])
        assert Traffic(**seen["counted"]) == network.traffic(cluster.nodes[rank // 2])


def test_process_outside_the_cluster_has_no_link_counters() -> None:
    with pytest.raises(RunError, match="runs in no node"):
        own_traffic()


@needs_network
def test_failing_worker_is_named_and_ends_the_others(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        f"import os, time; rank = os.environ['RANK']; open(r'{tmp_path}/' + rank, 'w').write(str(os.getpid()))\n"
        f"while len(os.listdir(r'{tmp_path}')) < 6: time.sleep(0.01)\n"
        f"if rank == '3': raise ValueError('no such luck')\ntime.sleep(60); open(r'{tmp_path}-late', 'w')"
    )
    reason = r"^rank 3 \(node 1, local rank 1\) ended with exit code 1: ValueError: no such luck$"
    with pytest.raises(RunError, match=reason):
        cluster.launch([sys.executable, "-c", code], local=2)
    assert not Path(f"{tmp_path}-late").exists()
    assert "  | Traceback" in capsys.readouterr().err
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.iterdir())


@needs_network
def test_hanging_launch_is_ended(cluster: Cluster, tmp_path: Path) -> None:
    code = f"import time; time.sleep(60); open(r'{tmp_path}/late', 'w')"
    with pytest.raises(RunError, match=r"^not done after 0\.5 s: rank \d .*SIGALRM"):
        cluster.launch([sys.executable, "-c", code], local=1, timeout_s=0.5)
    assert not list(tmp_path.iterdir())


# The command


@pytest.mark.slow
@needs_network
def test_up_exec_and_down_leave_foreign_namespaces_untouched() -> None:
    name = f"{PREFIX}c"
    strangers, bridge = [f"{name}-other0", f"{name}x0", f"{name}"], f"tp{os.getpid()}"
    for stranger in strangers:
        ip("netns", "add", stranger)
    ip("link", "add", bridge, "type", "bridge")
    try:
        interfaces, routes = ip("-o", "link"), ip("route")
        assert run_lab("up", "--nodes", "2", "--rate", "50mbit", "--name", name).returncode == 0
        up = run_lab("up", "--nodes", "3", "--rate", "50mbit", "--name", name)
        assert up.returncode == 0 and f"node 2: namespace {name}2" in up.stdout
        assert (ip("-o", "link"), ip("route")) == (interfaces, routes)

        shown = run_lab("exec", "--name", name, "1", "--", "sh", "-c", "echo $GLOO_SOCKET_IFNAME $MASTER_ADDR; exit 7")
        assert (shown.returncode, shown.stdout) == (7, "lab0 10.77.0.1\n")
        assert "10.77.0.2" in run_lab("exec", "--name", name, "1", "--", "ip", "address").stdout
        for words in (["9", "--", "true"], ["0", "--", "no-such-program"]):
            assert run_lab("exec", "--name", name, *words).returncode == 2

        assert run_lab("down", "--name", name).stdout == f"cluster {name} removed\n"
        assert sorted(left_of(name)) == sorted(strangers)
        assert (ip("-o", "link"), ip("route")) == (interfaces, routes)
        again = run_lab("down", "--name", name)
        assert (again.returncode, again.stdout) == (0, f"there is no cluster {name}\n")
        assert run_lab("exec", "--name", name, "0", "--", "true").returncode == 2
    finally:
        ip("link", "delete", bridge)
        for stranger in strangers:
            ip("netns", "delete", stranger)


# Nothing is left behind

HOLDER = """
import sys
from tawpipe_lab.cluster.cluster import Cluster
with Cluster.create(2, rate="50mbit", name=sys.argv[1]) as cluster:
    cluster.launch([sys.executable, "-c", sys.argv[2]], local=2)
"""
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
with open(os.environ["PIDS"], "a") as file: file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(120)
"""


def start_holder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that holds a cluster with four workers, each with a child; the numbers of workers and children."""
    file = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(file))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, name, FAMILY], stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: file.exists() and file.read_text().count("\n") == 4, 30.0)
    return holder, [int(word) for word in file.read_text().split()]


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_processes_and_remove_the_cluster(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children that left the process groups of the workers are ended too, because they are in the namespaces."""
    holder, family = start_holder(f"{PREFIX}d", tmp_path, monkeypatch)
    holder.send_signal(number)
    holder.communicate(timeout=30)
    assert holder.returncode in (128 + number, -number)
    assert wait_for(lambda: not any(map(is_alive, family)), 5.0)
    assert left_of(f"{PREFIX}d") == []


@needs_network
@pytest.mark.parametrize("remedy", ["down", "up"])
def test_leftovers_of_a_killed_holder_are_removed(remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{PREFIX}e"
    holder, family = start_holder(name, tmp_path, monkeypatch)
    refused = run_lab("up", "--name", name)
    assert refused.returncode == 2 and f"process {holder.pid} is using the cluster of this name" in refused.stderr
    assert all(map(is_alive, family))

    holder.kill()
    holder.communicate(timeout=30)
    workers = family[::2]
    assert wait_for(lambda: not any(map(is_alive, workers)), 5.0)
    # A namespace whose making was cut short is a file on which nothing is mounted.
    Path("/var/run/netns", f"{name}7").touch()
    if remedy == "up":
        assert run_lab("up", "--nodes", "1", "--name", name).returncode == 0
        assert sorted(left_of(name)) == [f"{name}-switch", f"{name}0"]
    assert run_lab("down", "--name", name).returncode == 0
    assert wait_for(lambda: not any(map(is_alive, family)), 5.0)
    assert left_of(name) == []


@needs_network
def test_an_error_in_the_block_removes_the_cluster() -> None:
    with pytest.raises(ZeroDivisionError), Cluster.create(1, rate=None, name=f"{PREFIX}f"):
        raise ZeroDivisionError
    assert left_of(f"{PREFIX}f") == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and the tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@needs_network
def test_a_signal_during_the_clean_up_waits_for_its_end(monkeypatch: pytest.MonkeyPatch, interruptible: None) -> None:
    remove = network.remove

    def interrupted(name: str) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(name)

    with pytest.raises(KeyboardInterrupt), Cluster.create(1, rate=None, name=f"{PREFIX}g"):
        monkeypatch.setattr(network, "remove", interrupted)
    assert left_of(f"{PREFIX}g") == []


@needs_network
def test_incomplete_cluster_is_refused() -> None:
    with Cluster.create(2, rate=None, name=f"{PREFIX}h") as half:
        ip("netns", "delete", half.nodes[0])
        with pytest.raises(UserError, match="a cluster that is up"):
            Cluster.find(half.name)
