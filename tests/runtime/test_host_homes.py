"""Homes in the host's memory: the same bits as on the device, whatever the strategy, the optimizer and the order."""

from __future__ import annotations

import threading
from itertools import groupby

import pytest
import torch

from cases import LENGTH
from host_homes import OPTIMIZERS, every_case, pairwise
from states import BATCHES, everything, make, momentum, same, train
from tawpipe import adamw
from tawpipe.checkpoint.save import Saving
from tawpipe.errors import RunError, UserError
from tawpipe.pipeline import sizes
from tawpipe.runtime.homes import portions

LEVELS = ("none", "state", "all")


def check(pool, cases) -> None:
    """Run cases, topology by topology."""
    by = lambda case: case["topology"]  # noqa: E731
    for (nodes, local), group in groupby(sorted(cases, key=by), key=by):
        mine = list(group)
        for found in pool.run("host_homes:compared", nodes, local, cases=mine, timeout_s=600):
            for case, wrong in zip(mine, found, strict=True):
                assert not wrong, (case, wrong)


def test_host_homes_change_no_bit(pool) -> None:
    """Every value of every choice, of three strategies."""
    few = [case for case in every_case() if case["strategy"] in ("tawpipe-spread", "tawpipe-whole", "1f1b")]
    cases = pairwise(few, pairs=lambda *_: False)
    assert len(cases) <= 6
    check(pool, [case | {"steps": 2} for case in cases])


@pytest.mark.slow
def test_host_homes_change_no_bit_in_any_pair_of_settings(pool) -> None:
    """Every strategy with every level, and every pair of level, topology, end of a step, rounds, scope of gradients,
    type and optimizer.
    """
    cases = pairwise(every_case(), pairs=lambda *names: "strategy" not in names or "host_homes" in names)
    assert 20 < len(cases) < 40
    check(pool, [case | {"steps": 2} for case in cases])


OTHERS = {
    "muon": {"optimizer": "muon", "strategy": "tawpipe-whole", "rows": 5},
    "muon, early": {
        "optimizer": "muon",
        "strategy": "tawpipe-whole",
        "rows": 4,
        "clip_norm": None,
        "early_updates": True,
    },
    "adafactor": {"optimizer": "adafactor", "strategy": "tawpipe-whole", "rows": 4},
    "counts of its own": {"optimizer": "counting", "strategy": "tawpipe-spread", "rows": 5},
    "a square for a matrix": {"optimizer": "preconditioned", "strategy": "tawpipe-whole", "rows": 4},
    "nothing kept": {"optimizer": "plain", "strategy": "hsdp", "rows": 8},
    "adapters": {"lora": True, "strategy": "tawpipe-spread", "rows": 5, "clip_norm": 0.1},
    "adapters on 4 bits": {"lora": True, "strategy": "tawpipe-whole", "rows": 5, "quantize": "nf4"},
    "chunks": {"strategy": "tawpipe-spread", "rows": 5, "sequence_chunk": 7, "offloaded_layers": 3},
    "sets": {"strategy": "tawpipe-striped", "rows": 4, "sequence_ranks": 2, "micro_batches_per_visit": 2},
    "gradients in the type of weights": {
        "strategy": "tawpipe-spread",
        "rows": 8,
        "dtype": torch.bfloat16,
        "reduce_dtype": "same",
    },
    "messages in 8 bits": {"strategy": "tawpipe-spread", "rows": 8, "gradients_compression": "int8"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_host_homes_change_no_bit_with_other_optimizers_and_models(pool, name: str) -> None:
    nodes, local, level = (2, OTHERS[name].get("sequence_ranks", 1), "all")
    if name in ("muon, early", "counts of its own", "nothing kept"):
        nodes, local, level = 1, 1, "state"
    cases = [{"steps": 2, "layers": 3, **OTHERS[name], "host_homes": level}]
    for found in pool.run("host_homes:compared", nodes, local, cases=cases):
        assert found and not any(found)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "level"), [("tawpipe-spread", "all"), ("1f1b", "state")])
def test_random_delays_change_no_bit_of_host_homes(pool, strategy: str, level: str) -> None:
    knobs = {"strategy": strategy, "host_homes": level, "rows": 5, "steps": 3, "layers": 3}
    for found in pool.run("host_homes:delayed", 2, 1, seeds=2, **knobs):
        assert not any(found)


def _bytes(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@pytest.mark.slow
def test_checkpoint_resumes_under_any_host_homes_and_process_count(pool, tmp_path) -> None:
    """From homes on devices to homes in the host's memory on other processes, and back; files are equal."""
    run = lambda nodes, local, **knobs: pool.run("host_homes:saved", nodes, local, folder=str(tmp_path), **knobs)[0]  # noqa: E731
    begun = run(2, 1, steps=2, save="begun")
    expected = run(2, 1, steps=2, load="begun", save="expected")
    for level in ("state", "all"):
        assert run(2, 1, steps=2, load="begun", save=level, host_homes=level) == expected
        assert _bytes(tmp_path / level) == _bytes(tmp_path / "expected")
    run(1, 1, steps=0, load="begun", save="one", host_homes="all")
    run(1, 1, steps=0, load="begun", save="other")
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "other")
    again = run(2, 2, steps=0, load="one", save="again", host_homes="state", strategy="1f1b")
    run(2, 1, steps=0, load="again", save="back")
    assert _bytes(tmp_path / "back") == _bytes(tmp_path / "begun") and not again and begun
    assert run(2, 2, steps=2, load="one", host_homes="all", strategy="tawpipe-whole") == pytest.approx(expected)


@pytest.mark.slow
def test_checkpoint_of_an_optimizer_without_steps_resumes(pool, tmp_path) -> None:
    """An optimizer that has kept nothing yet."""
    for knobs in ({}, {"host_homes": "state"}):
        pool.run("host_homes:saved", 1, 1, folder=str(tmp_path), steps=0, save="fresh", **knobs)
        first, second = (
            pool.run("host_homes:saved", 1, 1, folder=str(tmp_path), steps=2, load="fresh", **one)[0]
            for one in ({}, {"host_homes": "state"})
        )
        assert first == second


def test_nonfinite_step_changes_nothing_in_host_homes() -> None:
    poisoned = [False]

    def loss(logits, labels):
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total * float("nan") if poisoned[0] else total

    for optimizer in (adamw(1e-2), momentum):
        made = make(optimizer, loss=loss, host_homes="state", skip_limit=3)
        plain = make(optimizer, loss=loss, skip_limit=3)
        for pipeline in (made, plain):
            poisoned[0] = True
            before = {unit: master.clone() for unit, master in pipeline.storage.master.items()}
            assert not pipeline.step(BATCHES[0]).finite
            pipeline.drain()
            assert all(torch.equal(before[unit], master) for unit, master in pipeline.storage.master.items())
            poisoned[0] = False
            train(pipeline, BATCHES[1:3])
            pipeline.check_copies()
        one, other = (
            {name: value for name, value in everything(pipeline).items() if not name.startswith("gradient")}
            for pipeline in (made, plain)
        )
        assert same(one, other)
        made.close()
        plain.close()


@pytest.mark.parametrize("level", ["state", "all"])
def test_evaluation_and_export_read_updated_host_homes(tmp_path, level: str) -> None:
    made, plain = make(host_homes=level), make()
    losses = []
    for pipeline in (made, plain):
        train(pipeline, BATCHES[:2])
        losses.append(pipeline.evaluate(BATCHES[2]).loss)
    assert losses[0] == losses[1]
    folders = [pipeline.export(tmp_path / name) for pipeline, name in ((made, "made"), (plain, "plain"))]
    assert _bytes(folders[0]) == _bytes(folders[1])
    made.close()
    plain.close()


def test_optimizer_states_of_any_shape_are_kept_in_host_homes(tmp_path) -> None:
    pipelines = [make(OPTIMIZERS["preconditioned"], host_homes=level, strategy="tawpipe-whole") for level in LEVELS]
    for pipeline in pipelines:
        train(pipeline, BATCHES[:2])
    _, state, _ = pipelines
    kept = [one["left"] for unit in state.optimizers.states().values() for one in unit if one]
    assert kept and all(one.shape == (len(one), len(one)) for one in kept)
    state.save(tmp_path / "one")
    others = [make(OPTIMIZERS["preconditioned"], host_homes=level, strategy="tawpipe-whole") for level in LEVELS]
    for pipeline in others:
        pipeline.load(tmp_path / "one")
    losses = [train(pipeline, BATCHES[2:]) for pipeline in (*pipelines, *others)]
    assert all(loss == losses[0] for loss in losses)
    for pipeline in (*pipelines, *others):
        pipeline.close()


def test_save_from_host_homes_ends_at_its_time_limit(tmp_path, monkeypatch) -> None:
    pipeline, wait = make(host_homes="state"), threading.Event()
    write = Saving._write
    monkeypatch.setattr(Saving, "_write", lambda saving: wait.wait(30) and write(saving))
    with pytest.raises(RunError, match="longer than 0 s"):
        pipeline.start_saving(tmp_path / "one", limit_s=0.2)
    wait.set()
    pipeline.close()


def test_gradient_not_kept_under_early_updates_is_refused() -> None:
    knobs = {"early_updates": True, "clip_norm": None, "micro_batches_per_visit": 2}
    pipeline = make(host_homes="all", **knobs)
    train(pipeline, BATCHES[:1])
    with pytest.raises(UserError, match=r"gradient: .*is not kept"):
        pipeline.gradient(pipeline.parameter_names[0])
    pipeline.close()


def device_and_host_bytes(pipeline) -> tuple[int, int, int]:
    """What homes take on the device, pools there, and homes in the host's memory: the tensors that there are."""
    storage, executor = pipeline.storage, pipeline.executor
    inside = {id(one) for held in (storage.master, storage.gradient) for one in held.values()}
    states = [one for unit in pipeline.optimizers.states().values() for state in unit for one in state.values()]
    moments = sum(one.nbytes for one in states if one.ndim)
    state = sum(one.nbytes for held in (storage.master, storage.gradient) for one in held.values()) + moments
    copies = sum(one.nbytes for one in storage.compute_copy.values() if id(one) not in inside)
    if storage.copies_in_host:
        state, copies = state + copies, 0
    homes = inside | {id(one) for one in storage.compute_copy.values()}
    pools = sum(one.nbytes for one in executor._buffers.values() if id(one) not in homes)
    if executor.streaming is None:
        return copies + state, pools, 0
    return copies + executor.streaming.device_bytes, pools, state


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("plain", marks=pytest.mark.slow), "muon"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_device_and_host_bytes_of_host_homes_match_the_prediction(
    monkeypatch, optimizer: str, dtype: torch.dtype, cut: bool
) -> None:
    if cut and optimizer == "muon":  # no slice is smaller than a matrix, and these are small
        return
    if cut:
        for module in (portions, sizes):
            monkeypatch.setattr(module, "PORTION_SIZE", 512)
    found = {}
    for level, early in (("none", False), ("state", False), ("all", False), ("all", True)):
        knobs = {"dtype": dtype, "host_homes": level, "strategy": "tawpipe-whole", "micro_batches_per_visit": 1 + early}
        ends = {"early_updates": True, "clip_norm": None} if early else {}
        pipeline = make(OPTIMIZERS[optimizer], **knobs, **ends)
        train(pipeline, BATCHES[:2])
        said = pipeline.costs(2, LENGTH)
        device, pools, host = found[level, early] = device_and_host_bytes(pipeline)
        # In rooms every piece begins at a multiple of 64 elements, which is much for a model of this size.
        assert device == pytest.approx(said.home_bytes, rel=0.03, abs=4096)
        assert host == pytest.approx(said.host_bytes, rel=0.03)
        assert pools <= said.buffer_bytes <= 1.03 * pools + 64
        pipeline.close()
    if optimizer == "adamw" and cut:  # a device of so much memory holds the one and not the other
        limit = 200_000 if dtype == torch.float32 else 150_000
        assert sum(found["state", False][:2]) < limit < sum(found["none", False][:2])
    least, whole = found["all", True][2], found["all", False][2]
    assert least == pytest.approx(whole - 4 * pipeline.costs(2, LENGTH).trainable, rel=0.01)  # no gradients at home
