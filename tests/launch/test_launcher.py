"""The launcher: workers find torchrun's variables, and none of them is left behind, however the run ends."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from processes import is_alive, wait_for
from tawpipe.environment import (
    ALLOCATOR,
    CUDA_VARIABLES,
    ENDS,
    EVERYONE,
    STUCK,
    LaunchEnvironment,
    set_cuda_variables,
)
from tawpipe.errors import UserError
from tawpipe.launch.gpus import Gpu, find_gpus
from tawpipe.launch.launcher import Shape, in_this_process, launch, local_shape, reserved_port, worker_environment
from tawpipe.launch.workers import StderrKeeper
from tawpipe.topology import Topology

HEAD = "import os, sys, time, signal, subprocess\nrank = int(os.environ['RANK'])\n"


TWO_BY_TWO = Shape(2, 4)


def run_workers(code: str, shape: Shape = TWO_BY_TWO, *, grace_s: float = 2.0) -> tuple[int, str]:
    """Exit code and report of workers that run ``code``."""
    errors = io.StringIO()
    return launch([sys.executable, "-c", HEAD + code], shape, grace_s=grace_s, errors=errors), errors.getvalue()


# What workers see


@pytest.mark.parametrize("shape", [Shape(1, 2), Shape(2, 4), Shape(3, 3)])
def test_virtual_nodes_get_the_environment_of_torchrun(tmp_path: Path, shape: Shape) -> None:
    code = f"import json; json.dump(dict(os.environ), open(r'{tmp_path}/' + str(rank), 'w'))"
    assert run_workers(code, shape) == (0, "")
    environments = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(shape.nproc)]
    launched = [LaunchEnvironment.read(environ) for environ in environments]
    assert [it.rank for it in launched if it] == list(range(shape.nproc))
    places = [(it.group_rank, it.local_rank) for it in launched if it]
    assert Topology.from_group_ranks(places) == Topology.grid(shape.nodes, shape.local_size)
    for environ in environments:
        assert environ["WORLD_SIZE"] == str(shape.nproc) and environ["LOCAL_WORLD_SIZE"] == str(shape.local_size)
        assert environ["GROUP_WORLD_SIZE"] == str(shape.nodes) and environ["TAWPIPE_LOCAL_LAUNCHER"] == "1"
        assert int(environ["OMP_NUM_THREADS"]) >= 1
    assert len({(environ["MASTER_ADDR"], environ["MASTER_PORT"]) for environ in environments}) == 1


def test_single_process_needs_no_launcher_and_leaves_the_environment_as_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = dict(os.environ)
    with in_this_process():
        assert LaunchEnvironment.read(os.environ) == LaunchEnvironment(0, 1, 0, 1, 0)
    assert dict(os.environ) == before


def test_each_process_sees_one_gpu() -> None:
    gpus = [Gpu("4"), Gpu("GPU-uuid")]
    seen = [worker_environment(Shape(1, 2), rank, port=1, gpus=gpus)["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert seen == ["4", "GPU-uuid"]


def test_cuda_and_nccl_variables_are_set_unless_the_user_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CUDA_VARIABLES, *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    gpus = [Gpu("0"), Gpu("1")]
    given = worker_environment(Shape(1, 2), 0, port=1, gpus=gpus)
    assert given["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and given["NCCL_RUNTIME_CONNECT"] == "0"
    assert not CUDA_VARIABLES.keys() & worker_environment(Shape(1, 2), 0, port=1).keys()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in worker_environment(Shape(1, 2), 0, port=1, gpus=gpus)
    environ = {"NCCL_RUNTIME_CONNECT": "1"}
    set_cuda_variables(environ)
    assert environ == {**CUDA_VARIABLES, "NCCL_RUNTIME_CONNECT": "1"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_expandable_segments_are_set_unless_the_allocator_is_configured(name: str) -> None:
    environ: dict[str, str] = {}
    set_cuda_variables(environ)
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    environ = {name: "max_split_size_mb:512"}
    set_cuda_variables(environ)
    assert {key: environ[key] for key in ALLOCATOR if key in environ} == {name: "max_split_size_mb:512"}


def test_find_gpus_lists_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-a, NVIDIA A100, 8.0'\necho '1, GPU-b, NVIDIA V100, 7.0'\n")
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/bin:/usr/bin"}
    both = (Gpu("0", "NVIDIA A100", 8.0), Gpu("1", "NVIDIA V100", 7.0))
    assert find_gpus(path) == both
    assert find_gpus({**path, "CUDA_VISIBLE_DEVICES": "1"}) == both[1:]
    assert find_gpus({**path, "CUDA_VISIBLE_DEVICES": "GPU-a"}) == (Gpu("GPU-a", "NVIDIA A100", 8.0),)
    assert find_gpus({**path, "CUDA_VISIBLE_DEVICES": ""}) == ()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert find_gpus(path) == ()


@pytest.mark.parametrize(
    ("nodes", "nproc", "num_gpus", "shape"),
    [
        (None, None, 0, Shape(2, 4)),
        (None, 1, 0, Shape(1, 1)),
        (None, 3, 0, Shape(1, 3)),
        (None, 8, 0, Shape(2, 8)),
        (3, None, 0, Shape(3, 6)),
        (4, None, 0, Shape(4, 4)),
        (4, 4, 0, Shape(4, 4)),
        (None, None, 8, Shape(1, 8)),
        (2, None, 8, Shape(2, 8)),
        (None, 1, 8, Shape(1, 1)),
    ],
)
def test_nodes_and_processes_default_to_the_machine(
    nodes: int | None, nproc: int | None, num_gpus: int, shape: Shape
) -> None:
    assert local_shape(nodes, nproc, num_gpus=num_gpus) == shape


@pytest.mark.parametrize(
    ("nodes", "nproc", "num_gpus", "shape"),
    [
        (None, None, 0, Shape(1, 1)),
        (None, 4, 0, Shape(1, 4)),
        (2, None, 0, Shape(2, 2)),
        (2, 4, 0, Shape(2, 4)),
        (None, None, 8, Shape(1, 8)),
    ],
)
def test_pretrained_model_defaults_to_one_node(
    nodes: int | None, nproc: int | None, num_gpus: int, shape: Shape
) -> None:
    assert local_shape(nodes, nproc, num_gpus=num_gpus, emulates=False) == shape


def test_process_counts_that_cannot_be_grouped_are_refused() -> None:
    with pytest.raises(UserError, match="--nodes: got 3; a divisor of --nproc"):
        local_shape(3, 4, num_gpus=0)
    with pytest.raises(UserError, match="--nproc: got 4; at most 2, one process for each GPU; or --device cpu"):
        local_shape(None, 4, num_gpus=2)


def test_reserved_port_is_unique_and_can_be_listened_on() -> None:
    with reserved_port() as first, reserved_port() as second, socket.socket() as store, socket.socket() as stranger:
        assert first != second
        with pytest.raises(OSError):
            stranger.bind(("", first))
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", first))
        store.listen()
        socket.create_connection(("127.0.0.1", first), timeout=5).close()


# What users see


def test_only_output_of_rank_0_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = run_workers("print('out', rank); print('err', rank, file=sys.stderr)")
    assert (code, said) == (0, "err 0\n")
    assert capfd.readouterr().out == "out 0\n"


def test_failed_worker_is_named_and_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    code, said = run_workers("if rank == 3: raise ValueError('no such luck')\ntime.sleep(60)\nprint('late', rank)")
    assert code == 1 and "late" not in capfd.readouterr().out
    assert said.splitlines()[0] == (
        "tawpipe: error: rank 3 (node 1, local rank 1) ended with exit code 1: ValueError: no such luck"
    )
    assert said.count("Traceback") == 1


def test_a_killed_worker_is_named_with_its_signal() -> None:
    code, said = run_workers("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert code == 1
    assert "rank 1 (node 0, local rank 1) was killed by SIGKILL" in said


def test_first_worker_to_fail_is_blamed_not_the_first_to_exit(tmp_path: Path) -> None:
    """Rank 2 fails and takes its time to end; rank 0 loses its peer and is gone before."""
    code, said = run_workers(
        f"failed, gone = r'{tmp_path}/failed', r'{tmp_path}/gone'\n"
        "def wait_for(path):\n"
        "    while not os.path.exists(path): time.sleep(0.01)\n"
        "if rank == 2:\n"
        "    sys.stderr.write('Traceback (most recent call last):\\nKeyError: 7\\n'); sys.stderr.flush()\n"
        "    time.sleep(0.2); open(failed, 'w'); wait_for(gone); time.sleep(0.2); sys.exit(1)\n"
        "if rank == 0:\n"
        "    wait_for(failed); open(gone, 'w'); raise ConnectionError('peer gone')\n"
        "time.sleep(60)",
        grace_s=5.0,
    )
    assert code == 1
    assert "rank 2 (node 1, local rank 0) ended with exit code 1: KeyError: 7" in said
    assert "peer gone" not in said


STUCK_WORKER = f"""
say = lambda line: print({STUCK!r} + line, file=sys.stderr, flush=True)
say(f'rank {{rank}}: step 3, 9 s, the limit is 9 s{ENDS}; waits: INTER_W is in EXCHANGE')
say({EVERYONE!r} + 'no rank has failed; step 3 took longer than 9 s; the others wait for rank 2, which sleeps')
time.sleep(1)
"""


@pytest.mark.parametrize("alone", [True, False])
def test_worker_ended_by_its_watchdog_is_not_blamed(alone: bool) -> None:
    """Whoever loses it as a peer has not, either, though it says so at the same time."""
    ends = "sys.exit(1)" if alone else "sys.exit(1) if rank != 2 else [][0]"
    code, said = run_workers(STUCK_WORKER + ends)
    assert code == 1
    assert said.splitlines()[-1].startswith(
        "tawpipe: error: no rank has failed; step 3 took longer than 9 s; the others"
    )
    assert all(f"{STUCK}rank {rank}: step 3, 9 s" in said for rank in range(4))
    assert "exit code" not in said and "IndexError" not in said and "Traceback" not in said


@pytest.mark.parametrize("how", ["exit code 1: KeyError: 7", "killed by SIGKILL"])
def test_worker_that_failed_before_others_stalled_is_blamed(tmp_path: Path, how: str) -> None:
    ends = "os.kill(os.getpid(), 9)" if "SIGKILL" in how else "sys.exit(1)"
    code, said = run_workers(
        f"failed = r'{tmp_path}/failed'\n"
        "if rank == 1:\n"
        "    print('Traceback (most recent call last):\\nKeyError: 7', file=sys.stderr, flush=True)\n"
        f"    open(failed, 'w'); time.sleep(1.2); {ends}\n"
        "while not os.path.exists(failed): time.sleep(0.01)\n" + STUCK_WORKER + "sys.exit(1)",
        grace_s=5.0,
    )
    assert code == 1 and "rank 1 (node 0, local rank 1) " in said and how in said
    assert "tawpipe: error: no rank" not in said


def test_wrong_setting_is_reported_once() -> None:
    code, said = run_workers("print('tawpipe: error: --data: got 1; 2', file=sys.stderr); sys.exit(2)")
    assert (code, said) == (2, "tawpipe: error: --data: got 1; 2\n")


def test_expected_error_is_reported_as_the_reason() -> None:
    code, said = run_workers(
        "if rank == 0: print('tawpipe: error: the loss is not finite', file=sys.stderr); sys.exit(1)\ntime.sleep(60)"
    )
    assert code == 1
    assert "rank 0 (node 0, local rank 0) ended with exit code 1: the loss is not finite" in said


def test_standard_error_of_a_successful_run_is_passed_on_whole() -> None:
    lines = "warning\nTraceback (most recent call last):\n  caught\nthe end"
    code, said = run_workers(f"if rank == 0: sys.stderr.write({lines!r})")
    assert (code, said) == (0, lines + "\n")


def test_withheld_stderr_is_released_if_no_failure_follows() -> None:
    shown = io.StringIO()
    keeper = StderrKeeper(shown_on=shown)
    keeper.feed("before\nTraceback (most recent call last):\n  ünd".encode()[:-2])
    assert shown.getvalue() == "before\n"
    keeper.release(older_than_s=60.0)
    assert shown.getvalue() == "before\n"
    keeper.release()
    assert shown.getvalue().splitlines()[1] == "Traceback (most recent call last):"


# Nothing is left behind

FAMILY = (
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
    "with open(os.environ['PIDS'], 'a') as file: file.write(f'{os.getpid()} {child.pid}\\n')\n"
)
LAUNCHER = (
    "import sys; from tawpipe.launch.launcher import Shape, launch\n"
    "sys.exit(launch([sys.executable, '-c', sys.argv[1]], Shape(1, 2), grace_s=1.0))\n"
)


def start_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> tuple[subprocess.Popen[str], list[list[int]]]:
    """A launcher with two workers that have a child each; the process numbers of each pair."""
    file = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(file))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, HEAD + FAMILY + code],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert wait_for(lambda: file.exists() and file.read_text().count("\n") == 2)
    return launcher, [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("number", "expected", "words", "stubborn"),
    [
        (signal.SIGINT, 130, "interrupted", False),
        (signal.SIGTERM, 143, "received SIGTERM", True),
        (signal.SIGHUP, 129, "ended because the terminal was closed", False),
    ],
)
def test_a_signal_ends_workers_and_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, expected: int, words: str, stubborn: bool
) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)\n" if stubborn else ""
    launcher, family = start_family(tmp_path, monkeypatch, ignore + "time.sleep(120)")
    if stubborn:
        assert launcher.stdout is not None and launcher.stdout.readline() == "deaf\n"
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == expected
    assert said == f"tawpipe: {words}\n"
    assert wait_for(lambda: not any(is_alive(pid) for pair in family for pid in pair))


def test_a_failure_ends_workers_and_their_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, family = start_family(tmp_path, monkeypatch, "if rank == 1: sys.exit(3)\ntime.sleep(120)")
    launcher.communicate(timeout=60)
    assert launcher.returncode == 3
    assert wait_for(lambda: not any(is_alive(pid) for pair in family for pid in pair))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's help is Linux only")
def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, family = start_family(tmp_path, monkeypatch, "time.sleep(120)")
    try:
        launcher.kill()
        launcher.wait(timeout=60)
        assert wait_for(lambda: not any(is_alive(worker) for worker, _ in family))
    finally:
        for _, child in family:
            os.kill(child, signal.SIGKILL)


def test_preset_names_are_known_without_torch() -> None:
    from tawpipe.model.files.build import PRESETS
    from tawpipe.model.settings import PRESET_NAMES

    assert tuple(PRESETS) == PRESET_NAMES
