"""The borders of a pipeline's state: what is refused changes nothing, what is saved comes back bit by bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Adagrad

from cases import batches, llama
from tawpipe import Pipeline, RunError, UserError, World, adamw
from tawpipe.checkpoint import load
from tawpipe.checkpoint.state import MARKER, file_name, sealed
from tawpipe.checkpoint.store import Checkpoints, RunState
from tawpipe.topology import Topology

ALONE = World(Topology.grid(1, 1), 0, torch.device("cpu"), None)
BATCHES = batches(2, 4)
momentum = partial(SGD, lr=0.05, momentum=0.9)
plain = partial(SGD, lr=0.05)


def make(optimizer=None, **knobs) -> Pipeline:
    return Pipeline(llama(torch.float32), optimizer=optimizer or adamw(1e-2), world=ALONE, **knobs)


def train(pipeline: Pipeline, given=BATCHES) -> list[float]:
    losses = [result.loss for result in [pipeline.step(batch) for batch in given]]
    pipeline.drain()
    return losses


def everything(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Weights, gradients and optimizer state."""
    found = {}
    for unit, pieces in pipeline.storage.pieces.items():
        for piece in pieces:
            found[f"weight {piece.name}"] = piece.value.detach().clone()
            found[f"gradient {piece.name}"] = piece.gradient.clone()
            for key, value in pipeline.optimizers.optimizers[unit].state.get(piece.value, {}).items():
                found[f"{key} {piece.name}"] = value.clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    pipeline = make()
    train(pipeline, BATCHES[:2])
    folder = tmp_path_factory.mktemp("state") / "good"
    pipeline.save(folder)
    pipeline.close()
    return folder


def damaged(good: Path, folder: Path, how: str) -> Path:
    """A copy of a checkpoint that no load may take."""
    folder.mkdir()
    data, record = (good / file_name(0)).read_bytes(), json.loads((good / MARKER).read_text())
    tensors = record["tensors"]
    if how == "header":
        data = b"\xff" * len(data)
    elif how == "short":
        data = data[:-1]
    elif how == "state":
        del tensors[max(name for name in tensors if name.startswith("optimizer."))]
    elif how == "hole":
        tensors[max(tensors)]["chunks"][0][0] += 1
    elif how == "size":
        tensors[max(tensors)]["numel"] += 1
    elif how == "model":
        del record["parameters"]["lm_head.weight"]
    if how != "missing":
        (folder / file_name(0)).write_bytes(data)
    (folder / MARKER).write_text(json.dumps(sealed(record)))
    return folder


@pytest.mark.parametrize("how", ["missing", "short", "header", "state", "hole", "size", "model"])
def test_a_refused_load_changes_nothing(saved, tmp_path, how):
    bad = damaged(saved, tmp_path / "bad", how)
    new, trained = make(), make()
    train(trained, BATCHES[:1])
    for pipeline in (new, trained):
        before = everything(pipeline)
        with pytest.raises(UserError, match="--resume"):
            pipeline.load(bad)
        assert same(everything(pipeline), before)
        pipeline.step(BATCHES[1]).loss  # noqa: B018
        pipeline.close()


def test_a_load_that_breaks_off_leaves_no_pipeline_that_goes_on(saved, tmp_path, monkeypatch):
    pipeline, expected = make(), make()
    train(pipeline, BATCHES[:1])
    real, left = load.open_file, [40]

    class Breaks:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get_slice(self, name):
            piece = self.file.get_slice(name)

            class Slice:
                get_shape = staticmethod(piece.get_shape)

                def __getitem__(self, what):
                    left[0] -= 1
                    if left[0] < 0:
                        raise OSError(5, "Input/output error")
                    return piece[what]

            return Slice()

    monkeypatch.setattr(load, "open_file", lambda *where: Breaks(real(*where)))
    with pytest.raises(RunError, match="Input/output error"):
        pipeline.load(saved)
    monkeypatch.undo()
    for act in (
        lambda: pipeline.step(BATCHES[2]),
        lambda: pipeline.evaluate(BATCHES[2]),
        lambda: pipeline.save(tmp_path / "half"),
        lambda: pipeline.export(tmp_path / "half"),
    ):
        with pytest.raises(RunError, match="half of a state"):
            act()
    with pytest.raises(UserError):
        pipeline.load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="half of a state"):
        pipeline.step(BATCHES[2])
    pipeline.load(saved)
    expected.load(saved)
    assert train(pipeline, BATCHES[2:]) == train(expected, BATCHES[2:])
    assert same(everything(pipeline), everything(expected))
    pipeline.close()
    expected.close()


@pytest.mark.parametrize("fault", ["refused", "broken"])
def test_what_one_rank_cannot_read_stops_all(pool, tmp_path, fault):
    for copied in (False, True):
        found = pool.run("cases:load_with_fault", 2, 1, folder=str(tmp_path / f"{copied}"), fault=fault, copied=copied)
        for message, unchanged, stopped, goes_on in found:
            assert "no such disk" in message
            assert unchanged or fault == "broken"
            assert stopped == (fault == "broken")
            assert goes_on


@pytest.mark.parametrize("optimizer", [adamw(1e-2), momentum, plain, partial(Adagrad, lr=0.1)])
def test_a_state_without_a_step_comes_back(tmp_path, optimizer):
    pipeline, other, never = make(optimizer), make(optimizer), make(optimizer)
    Checkpoints(tmp_path, ALONE).save(pipeline, RunState(step=0, samples=0, seed=0))
    train(other, BATCHES[2:])
    found = Checkpoints(tmp_path, ALONE).find("auto").path
    assert found is not None
    other.load(found)
    assert other.step_number == 0
    expected = train(never)
    assert train(other) == train(pipeline) == expected
    assert same(everything(other), everything(never))
    for one in (pipeline, other, never):
        one.close()


@pytest.mark.parametrize("optimizer", [adamw(1e-2), momentum, partial(SGD, lr=0.05, momentum=0.9, fused=True)])
def test_steps_that_were_left_out_leave_a_state_that_comes_back(tmp_path, optimizer):
    bad = [False]  # while it is tried

    def loss(logits, labels):
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total * float("inf") if bad[0] else total

    pipeline, other, never = (make(optimizer, skip_limit=5, loss=loss) for _ in range(3))
    bad[0] = True
    for batch in BATCHES[:2]:
        assert not pipeline.step(batch).finite
    pipeline.save(tmp_path / "one")
    other.load(tmp_path / "one")
    assert other.step_number == 2
    bad[0] = False
    expected = train(never, BATCHES[2:])
    assert train(pipeline, BATCHES[2:]) == train(other, BATCHES[2:]) == expected
    for one in (pipeline, other, never):
        one.close()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (plain, adamw(), "saved with SGD, here it is AdamW"),
        (momentum, adamw(), "SGD"),
        (adamw(), plain, "AdamW"),
        (plain, momentum, None),
    ],
)
def test_state_of_another_optimizer_is_refused_by_name(tmp_path, first, second, words):
    one, other = make(first), make(second)
    train(one, BATCHES[:1])
    one.save(tmp_path / "one")
    if words is None:  # of the same class: a momentum begins with the next gradient
        other.load(tmp_path / "one")
    else:
        before = everything(other)
        with pytest.raises(UserError, match=words):
            other.load(tmp_path / "one")
        assert same(everything(other), before)
    one.close()
    other.close()


@pytest.mark.parametrize("strategy", ["tawpipe-spread", "hsdp"])
def test_frozen_values_come_out_as_they_came_in(pool, tmp_path, strategy):
    """In a run that computes in bf16: collected, saved, resumed, also by a run whose own source is exact."""
    for worst in pool.run("cases:frozen_values", 2, 2, folder=str(tmp_path), strategy=strategy):
        assert worst == {"exact", "host", "narrow"}
