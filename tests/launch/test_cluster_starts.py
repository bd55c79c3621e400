"""The scripts of examples/cluster start what they say on every machine, and end it everywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from processes import is_alive, wait_for

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
CHANGE = "# <- change this line"
SHORT = "--vocab-size 300 --sequence-length 32 --steps 2 --evaluation.every 0 --checkpoint.every 0 --sample.tokens 0"
SETTINGS = f"--data text.txt --output run --plan none --device cpu --export.enabled false {SHORT}"


def script(name: str, folder: Path, settings: str = SETTINGS) -> str:
    """A copy of a script with its one line changed."""
    text = (CLUSTER / name).read_text()
    [line] = [line for line in text.splitlines() if CHANGE in line]
    copy = folder / name
    copy.write_text(text.replace(line, f"train=({settings})"))
    return str(copy)


def command(folder: Path, name: str, text: str) -> None:
    """A program that stands before all others of its name."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / "bin" / name).chmod(0o755)


def variables(folder: Path, **more: str) -> Mapping[str, str]:
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL", "GLOO", "HF_"))}
    return {**kept, "PATH": ":".join(paths), **more}


@pytest.fixture
def local_ssh(tmp_path: Path) -> Path:
    """A folder with an ``ssh`` that knows one machine only, this one, under every name."""
    command(tmp_path, "ssh", 'test "$1" = -o && shift 2; echo "$1" >> hosts; shift; exec "$@"')
    return tmp_path


def processes_of(folder: Path) -> list[int]:
    """The numbers that the programs in ``sleeping_torchrun`` have left."""
    return [int(path.read_text() or 0) for path in folder.glob("pid-*")]


def sleeping_torchrun(folder: Path, *, fails: bool = False) -> None:
    """A ``torchrun`` that waits to be ended; or that of the first machine fails when the other one is there."""
    first = "until test -f pid-0; do sleep 0.02; done; exit 7" if fails else ":"
    command(
        folder,
        "torchrun",
        'case "$*" in *is_host=1*) me=1;; *) me=0;; esac\n'
        "trap 'touch ended-'$me'; exit 0' TERM\n"  # before anybody can know that it is there
        'printf "%s\\n" "$@" > words-$me; echo "token $HF_TOKEN" > seen-$me; echo $$ > pid-$me\n'
        f"if test $me = 1; then {first}; fi\n"
        "while :; do sleep 0.02; done",
    )


@pytest.mark.parametrize("name", ["slurm.sh", "ssh.sh"])
def test_cluster_script_is_valid_bash(name: str, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", script(name, tmp_path)], check=True)


@pytest.mark.slow
def test_ssh_script_trains_on_several_machines(local_ssh: Path) -> None:
    (local_ssh / "text.txt").write_text("A sentence of a small text. " * 80)
    words = ["bash", script("ssh.sh", local_ssh), "127.0.0.1", "somebody@127.0.0.1"]
    more = {"NPROC": "1", "PORT": str(20000 + os.getpid() % 20000), "TAWPIPE_CACHE": str(local_ssh / "cache")}
    done = subprocess.run(words, cwd=local_ssh, env=variables(local_ssh, **more), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 processes = 2 nodes x 1 on CPU" in done.stdout
    assert sorted((local_ssh / "hosts").read_text().split()) == ["127.0.0.1", "somebody@127.0.0.1"]
    assert [json.loads(row)["step"] for row in (local_ssh / "run/metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_failure_of_one_machine_ends_the_others(local_ssh: Path) -> None:
    sleeping_torchrun(local_ssh, fails=True)
    words = ["bash", script("ssh.sh", local_ssh), "one", "two"]
    done = subprocess.run(words, cwd=local_ssh, env=variables(local_ssh), capture_output=True, text=True, timeout=60)
    assert done.returncode == 7 and "exit code 7; ending the others" in done.stderr
    assert (local_ssh / "ended-0").exists() and not any(map(is_alive, processes_of(local_ssh)))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_ssh_script_ends_all_machines(local_ssh: Path, how: signal.Signals) -> None:
    sleeping_torchrun(local_ssh)
    words = ["bash", script("ssh.sh", local_ssh, "--data 'a b*' --output run"), "one", "two"]
    started = subprocess.Popen(
        words,
        cwd=local_ssh,
        env=variables(local_ssh, HF_TOKEN="a 'secret'"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # bash cannot catch what it begins to ignore
    )
    assert wait_for(lambda: len(processes_of(local_ssh)) == 2 and all(processes_of(local_ssh)))
    started.send_signal(how)
    assert started.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(how, -how)
    assert wait_for(lambda: not any(map(is_alive, processes_of(local_ssh))))
    assert (local_ssh / "ended-0").exists() and (local_ssh / "ended-1").exists()
    told = (local_ssh / "words-0").read_text().splitlines()
    assert told[-7:] == ["train", "--data", "a b*", "--output", "run", "--resume", "auto"]
    assert told[told.index("--rdzv-endpoint") + 1] == "one:29500" and told[told.index("--nnodes") + 1] == "2"
    assert (local_ssh / "seen-0").read_text() == "token a 'secret'\n"


def test_a_slurm_job_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    command(tmp_path, "scontrol", 'test "$*" = "show hostnames node[07-08]" && { echo node07; echo node08; }')
    command(
        tmp_path,
        "srun",
        'while [[ $1 == --* ]]; do shift; done; for n in 0 1; do SLURM_NODEID=$n "$@" & done; wait',
    )
    command(tmp_path, "torchrun", 'printf "%s\\n" "$@" > "words-$SLURM_NODEID"')
    job = {"SLURM_JOB_NODELIST": "node[07-08]", "SLURM_JOB_ID": "40007", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    words = ["bash", script("slurm.sh", tmp_path, "--data 'a b*' --output run")]
    subprocess.run(words, cwd=tmp_path, env=variables(tmp_path, **job), check=True)
    for node, is_host in (("0", "is_host=1"), ("1", "is_host=0")):
        told = (tmp_path / f"words-{node}").read_text().splitlines()
        options = dict(zip(told[:12:2], told[1:12:2], strict=True))
        assert options == {
            "--nnodes": "2",
            "--nproc-per-node": "8",
            "--rdzv-backend": "c10d",
            "--rdzv-id": "40007",
            "--rdzv-endpoint": "node07:20007",
            "--rdzv-conf": is_host,
        }
        assert told[12:] == ["-m", "tawpipe", "train", "--data", "a b*", "--output", "run", "--resume", "auto"]


def test_kubernetes_job_addresses_its_own_service(tmp_path: Path) -> None:
    text = (CLUSTER / "kubernetes.yaml").read_text()
    assert text.count(CHANGE) == 1
    service, job = [one for one in yaml.safe_load_all(text) if one]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    [container] = pod["containers"]
    volumes = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    given = {one["name"]: one["value"] for one in container["env"]}
    assert given["MACHINES"] == str(spec["completions"])
    command(tmp_path, "torchrun", 'printf "%s\\n" "$@"')
    (tmp_path / "data.txt").touch()
    told = subprocess.run(
        container["command"],
        cwd=tmp_path,
        env=variables(tmp_path, **{**given, "TRAIN": "--data *.txt", "JOB_COMPLETION_INDEX": "1"}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told[told.index("--rdzv-endpoint") + 1] == f"{name}-0.{pod['subdomain']}:29500"
    assert told[told.index("--rdzv-conf") + 1].startswith("is_host=0,")
    assert told[-6:] == ["tawpipe", "train", "--data", "*.txt", "--resume", "auto"]
