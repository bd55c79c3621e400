"""Scripts that end without ``close()``: in good order, with the exit code that they gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

import tawpipe
from cases import batches, llama
from states import ALONE, BATCHES, make, stepped
from tawpipe import World
from tawpipe.errors import UserError
from tawpipe.launch.launcher import Shape, reserved_port, worker_environment
from tawpipe.runtime import leaving
from tawpipe.runtime.leaving import leave_at_exit

CPU = torch.device("cpu")
IMPORTED = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
import tawpipe
from cases import batches, llama
from tawpipe.runtime import leaving

def asked():
    for line in sys.stdin:
        children = []
        for worker in json.loads(line):
            child = os.fork()
            if not child:
                return worker
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    sys.exit()

torch.set_num_threads(1)
how, variables, *said = asked()
signal.alarm(240)
os.environ.update(variables)
for number, path in enumerate(said, 1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
"""
"""What takes seconds, once for all scripts: each goes on from here in children, whose interpreters end as any does."""

SCRIPT = """
unchecked = tawpipe.CheckSettings(check="never")
pipeline = tawpipe.Pipeline(llama(torch.float32, layers=2), checks=unchecked)
ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
step = lambda one: one.step({"input_ids": ids, "labels": ids})

def main(own):
    for _ in range(2):
        step(own)

rank = pipeline.world.rank
if how == "gone":  # nobody holds the pipeline when its steps are under way
    own, pipeline = pipeline, None
    main(own)
    del own
elif how == "caught on one rank":
    fails = rank == 0
    loss = lambda logits, labels: [logits.float().sum() * 0][fails and pipeline is None]
    own, pipeline = tawpipe.Pipeline(llama(torch.float32, layers=2), checks=unchecked, loss=loss), None
    leaving.PATIENCE_S = 1.0
    try:
        step(own).loss
    except Exception:
        sys.exit(7)
elif how == "caught":  # the model is refused by its check, a loss fails, then all is well; no group is left by hand
    loss = lambda logits, labels: [][0]
    other = tawpipe.Pipeline(llama(torch.float32, layers=2), checks=unchecked, loss=loss)
    try:
        step(other).loss
        sys.exit("not raised")
    except IndexError:
        main(pipeline)
    sys.exit(7)
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
    if how == "other batches":  # in one more step, whose numbers nobody reads
        ids = ids.roll(rank)
        step(pipeline)
    if how == "hang":
        leaving.PATIENCE_S = 0.5
        dist.destroy_process_group = lambda: time.sleep(1000)
"""


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    errors: str


@pytest.fixture(scope="module")
def scripts() -> Iterator[subprocess.Popen[str]]:
    """A process that runs the script in children of its own; see ``IMPORTED``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests/support", *sys.path])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", IMPORTED + SCRIPT], env=environment, **pipes) as process:
        yield process


@pytest.fixture
def run(scripts: subprocess.Popen[str], tmp_path: Path) -> Callable[[str, int], list[Ended]]:
    def run_script(how: str, nproc: int) -> list[Ended]:
        assert scripts.stdin and scripts.stdout
        said = [[str(tmp_path / f"{name} {rank}") for name in ("out", "errors")] for rank in range(nproc)]
        with reserved_port() as port:
            place = lambda rank: worker_environment(Shape(1, nproc), rank, port=port) if nproc > 1 else {}  # noqa: E731
            workers = [[how, place(rank), *paths] for rank, paths in enumerate(said)]
            print(json.dumps(workers), file=scripts.stdin, flush=True)
            codes = json.loads(scripts.stdout.readline())
        done = [
            Ended(code, *(Path(path).read_text() for path in paths)) for code, paths in zip(codes, said, strict=True)
        ]
        assert not any("terminate called" in one.errors for one in done), done
        return done

    return run_script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "nproc", "code"), [("exit", 2, 7), ("gone", 2, 0), ("error", 1, 1), ("caught", 1, 7), ("caught", 2, 7)]
)
def test_script_that_does_not_close_its_pipeline_keeps_its_exit_code(run, how, nproc, code):
    done = run(how, nproc)
    assert [one.code for one in done] == [code] * nproc, done
    assert all(("the script's own" in one.errors) == (how == "error") for one in done)


@pytest.mark.slow
def test_rank_whose_peers_are_gone_ends_with_an_error(run):
    done = run("one rank alone", 2)
    assert [one.code for one in done] == [1, 7], done
    assert "the last step was not finished" in done[0].errors


@pytest.mark.slow
def test_caught_error_on_one_rank_ends_all_ranks_with_an_error(run):
    done = run("caught on one rank", 2)
    assert done[0].code == 1 and "other ranks may be waiting for it: list index" in done[0].errors, done
    assert done[1].code == 1, done


@pytest.mark.slow
def test_script_ends_with_an_error_if_last_batches_differed(run):
    done = run("other batches", 2)
    assert [one.code for one in done] == [1, 1], done
    assert all("tawpipe: error: batch: got 'different ones on different ranks'" in one.errors for one in done)


@pytest.mark.slow
def test_process_ends_although_its_groups_hang(run):
    assert [one.code for one in run("hang", 2)] == [1, 1]


class Busy:
    """As much of an executor as its end needs: lanes that end when they are told so and nothing is under way."""

    def __init__(self, *, idle: bool = False, failure: BaseException | None = None) -> None:
        self.idle, self.failure, self.untold, self.closed, self.asked = idle, failure, failure, False, 0
        self.watchdog = SimpleNamespace(close=lambda: setattr(self, "closed", True))

    def end_lanes(self, limit_s: float) -> list[bool]:
        self.asked += 1
        return [self.idle]


class Pipeline:
    """Something that its script lets go of."""


def look_after(pipeline: Pipeline, executor: Any, *savings: Any):
    world: Any = SimpleNamespace(device=CPU)
    steps: Any = SimpleNamespace(end=lambda: None)
    return leave_at_exit(pipeline, executor, steps, savings, world)


@pytest.fixture
def looked_after(monkeypatch):
    """Those that are looked after; none of what other tests have left."""
    running: dict = {}
    monkeypatch.setattr(leaving, "_running", running)
    monkeypatch.setattr(leaving, "PATIENCE_S", 0.05)
    monkeypatch.setattr(leaving, "LOOK_S", 0.01)
    return running


@pytest.mark.parametrize(("idle", "saved"), [(True, True), (False, True), (True, False)])
def test_deleted_pipeline_is_kept_until_its_step_and_save_end(looked_after, idle, saved):
    executor, pipeline, saving = Busy(idle=idle), Pipeline(), SimpleNamespace(done=saved)
    look_after(pipeline, executor, saving)
    assert len(looked_after) == 1
    del pipeline
    gone = idle and saved
    assert bool(looked_after) is not gone and executor.asked == executor.closed == gone
    executor.idle = saving.done = True
    for _ in range(1000):
        if looked_after:
            time.sleep(0.01)
    assert not looked_after and executor.asked == executor.closed == 1


def test_closed_pipeline_is_no_longer_looked_after(looked_after):
    executor, pipeline = Busy(idle=True), Pipeline()
    closed = look_after(pipeline, executor)
    closed()
    closed()
    assert not looked_after
    del pipeline
    assert executor.asked == 0


def test_running_step_is_awaited_at_exit_unless_the_script_failed(looked_after, capsys):
    executor, pipeline = Busy(), Pipeline()
    saving = SimpleNamespace(done=False)
    look_after(pipeline, executor, saving)
    (one,) = looked_after.values()
    assert not one.end(failing=True) and not executor.closed  # given up: the script has failed, peers may be gone
    executor.failure = executor.untold = RuntimeError("in a lane")
    assert not one.end(failing=False) and "the last step was not finished: in a lane" in capsys.readouterr().err
    executor.failure = executor.untold = None
    threading.Timer(0.1, lambda: (setattr(saving, "done", True), setattr(executor, "idle", True))).start()
    assert one.end(failing=False) and executor.closed  # more than the patience: nothing has failed


def test_bad_last_step_is_reported_at_exit(looked_after, capsys):
    executor: Any = Busy(idle=True)
    pipeline = Pipeline()

    def drain() -> None:
        raise UserError("batch", "different ones", "the same")

    world: Any = SimpleNamespace(device=CPU)
    steps: Any = SimpleNamespace(end=drain)
    leave_at_exit(pipeline, executor, steps, (), world)
    (one,) = looked_after.values()
    assert not one.end(failing=False) and "tawpipe: error: batch: got 'different ones'" in capsys.readouterr().err
    assert one.end(failing=True) and not capsys.readouterr().err  # the script's own error says more


def refused_model() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "lru_width": 16}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 32, "attention_window_size": 8}
    config = RecurrentGemmaConfig(**sizes)
    tawpipe.Pipeline(RecurrentGemmaForCausalLM(config), world=ALONE)


def broken(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    raise ValueError("the user's loss")


def poisoned(pipeline: tawpipe.Pipeline) -> None:
    for values in (*pipeline.storage.master.values(), *pipeline.storage.compute_copy.values()):
        values.fill_(float("nan"))


def in_a_loop(pipeline: tawpipe.Pipeline) -> None:
    poisoned(pipeline)
    for _ in range(4):
        pipeline.step(BATCHES[0])


def in_a_save(pipeline: tawpipe.Pipeline) -> None:
    poisoned(pipeline)
    pipeline.step(BATCHES[0])
    pipeline.save("nowhere")


CAUGHT: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "the model is refused by its check": (UserError, refused_model),
    "a setting is refused": (UserError, lambda: make(micro_batch=0)),
    "the optimizer is refused": (UserError, lambda: make(optimizer=lambda parameters: 3)),
    "a batch is refused": (UserError, lambda: make().step({name: value + 1000 for name, value in BATCHES[0].items()})),
    "a loss fails": (ValueError, lambda: make(loss=broken).step(BATCHES[0]).loss),
    "a loss fails in an evaluation": (ValueError, lambda: make(loss=broken).evaluate(BATCHES[0])),
    "steps are not finite": (tawpipe.RunError, lambda: in_a_loop(make())),
    "a save finds that a step was not finite": (tawpipe.RunError, lambda: in_a_save(make())),
    "there is nothing to load": (UserError, lambda: stepped().load("nowhere")),
}


@pytest.mark.parametrize("what", CAUGHT)
def test_raised_error_is_not_reported_again_at_exit(looked_after, capsys, what):
    error, act = CAUGHT[what]
    with pytest.raises(error) as caught:
        act()
    assert caught  # whose traceback holds what has failed until the process ends
    running = list(looked_after.values())
    assert leaving._over([one for one in running if one.executor.failure is not None])
    assert all(one.end(failing=False) for one in running) and not capsys.readouterr().err


def test_error_after_a_caught_error_is_reported_at_exit(looked_after, capsys):
    with pytest.raises(UserError):
        make(micro_batch=0)
    made = make(loss=broken)
    print(made.step(BATCHES[0]))  # which says it, and raises nothing
    running = list(looked_after.values())
    assert not leaving._over(running) and not running[0].end(failing=False)
    assert "the last step was not finished: the user's loss" in capsys.readouterr().err


def left(world: World) -> tuple[bool, list[bool]]:
    """In a worker: whether all is over at the end of a script that has caught the error of a loss, and lanes ended."""
    leaving._running.clear()
    tried = []

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if tried:  # before the first step it is called on random logits
            world.barrier()  # a rank that fails earlier would let the others wait for it
        return broken(logits, labels)

    made = tawpipe.Pipeline(llama(torch.float32), loss=loss, world=world, checks=tawpipe.CheckSettings(check="never"))
    tried.append(True)
    with pytest.raises(ValueError, match="the user's loss"):
        made.step(*batches(4, 1)).wait()
    running = list(leaving._running.values())
    over = leaving._over(running)
    return over, [one.end(failing=False) for one in running]


def test_lanes_end_after_all_ranks_have_caught_an_error(pool):
    assert pool.run(f"{__name__}:left", 2, 2) == [(True, [True])] * 4
