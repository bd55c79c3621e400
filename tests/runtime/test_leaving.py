"""Scripts that end without ``close()``: in good order, with the exit code that they gave."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tawpipe.launch.launcher import Shape, reserved_port, worker_environment

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import tawpipe
from cases import llama

torch.set_num_threads(1)
pipeline = tawpipe.Pipeline(llama(torch.float32), check="never")
ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
step = lambda one: one.step({"input_ids": ids, "labels": ids})

def main(own):
    for _ in range(2):
        step(own)

rank, how = pipeline.world.rank, sys.argv[1]
if how == "gone":  # nobody holds the pipeline when its steps are under way
    own, pipeline = pipeline, None
    main(own)
    del own
elif how == "one rank alone":
    main(pipeline)
    if rank == 0:
        step(pipeline)
    sys.exit(7)
else:
    main(pipeline)
    if how == "error":
        raise ValueError("the script's own")
    if how == "exit":
        sys.exit(7)
    if how == "hang":
        dist.destroy_process_group = lambda: time.sleep(1000)
"""


def run(how: str, nproc: int) -> list[subprocess.CompletedProcess[str]]:
    with reserved_port() as port:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests/support", *sys.path])}
        workers = []
        for rank in range(nproc):
            own = worker_environment(Shape(1, nproc), rank, port=port) if nproc > 1 else {}
            command = [sys.executable, "-c", SCRIPT, how]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            workers.append(subprocess.Popen(command, env={**environment, **own}, **pipes))
        done = []
        for worker in workers:
            out, errors = worker.communicate(timeout=240)
            done.append(subprocess.CompletedProcess(worker.args, worker.returncode, out, errors))
    assert not any("terminate called" in one.stderr for one in done), done
    return done


@pytest.mark.parametrize(
    ("how", "nproc", "code"),
    [
        ("exit", 2, 7),
        pytest.param("gone", 1, 0, marks=pytest.mark.slow),
        pytest.param("error", 2, 1, marks=pytest.mark.slow),
        pytest.param("error", 1, 1, marks=pytest.mark.slow),
        pytest.param("end", 2, 0, marks=pytest.mark.slow),
        pytest.param("gone", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_does_not_close_its_pipeline(how, nproc, code):
    done = run(how, nproc)
    assert [one.returncode for one in done] == [code] * nproc, done
    assert all(("the script's own" in one.stderr) == (how == "error") for one in done)


@pytest.mark.slow
def test_a_rank_whose_peers_are_gone_ends_with_its_own_code():
    """It says that its last step came to nothing."""
    done = run("one rank alone", 2)
    assert [one.returncode for one in done] == [7, 7], done
    assert "the last step was not finished" in done[0].stderr


@pytest.mark.slow
def test_groups_that_cannot_be_left_do_not_keep_a_process():
    assert [one.returncode for one in run("hang", 2)] == [1, 1]
