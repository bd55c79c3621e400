"""Loading a state: what is refused changes nothing, what breaks off is said, what was saved comes back bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adagrad
from transformers import LlamaForCausalLM

from cases import LENGTH, batches, llama
from pipelines import make_pipeline
from states import ALONE, BATCHES, everything, make, memory_of, momentum, plain, resumable, run_of, same, train
from tawpipe import Pipeline, RunError, UserError, World, adamw
from tawpipe.checkpoint import load
from tawpipe.checkpoint.format import sealed
from tawpipe.checkpoint.names import MARKER, file_name
from tawpipe.checkpoint.resume import find, newest
from tawpipe.checkpoint.store import Disk


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
        with pytest.raises(UserError, match="where: got "):
            pipeline.load(bad)
        assert same(everything(pipeline), before)
        pipeline.step(BATCHES[1]).loss  # noqa: B018
        pipeline.close()


def breaking(open_file: Callable[..., Any], *, after: int) -> Callable[..., Any]:
    """Opens files of which so many reads succeed."""
    left = [after]

    class Slice:
        def __init__(self, piece: Any) -> None:
            self.get_shape, self.piece = piece.get_shape, piece

        def __getitem__(self, what: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "Input/output error")
            return self.piece[what]

    class File:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def get_slice(self, name: str) -> Any:
            return Slice(self.file.get_slice(name))

    return lambda *where: File(open_file(*where))


def test_pipeline_refuses_all_work_after_an_interrupted_load(saved, tmp_path, monkeypatch):
    pipeline, expected = make(), make()
    train(pipeline, BATCHES[:1])
    monkeypatch.setattr(load, "open_file", breaking(load.open_file, after=40))
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


@pytest.mark.parametrize(
    ("fault", "copied"), [("refused", False), pytest.param("broken", True, marks=pytest.mark.slow)]
)
def test_load_failure_of_one_rank_stops_all_ranks(pool, tmp_path, fault, copied):
    for message, unchanged, stopped, goes_on in pool.run(
        "test_load:load_with_fault", 2, 1, folder=str(tmp_path / "state"), fault=fault, copied=copied
    ):
        assert "no such disk" in message or (fault == "broken" and "Input/output error" in message)
        assert unchanged or fault == "broken"
        assert stopped == (fault == "broken")
        assert goes_on


@pytest.mark.parametrize(
    "optimizer",
    [adamw(1e-2), partial(Adagrad, lr=0.1), *(pytest.param(one, marks=pytest.mark.slow) for one in (momentum, plain))],
)
def test_state_saved_before_any_step_is_restored(tmp_path, optimizer):
    pipeline, other, never = make(optimizer), make(optimizer), make(optimizer)
    pipeline.save(Disk(tmp_path, ALONE), run=run_of(0))
    train(other, BATCHES[2:])
    source = find(Disk(tmp_path, ALONE), "auto").source
    assert source is not None
    other.load(source)
    assert other.step_number == 0
    expected = train(never)
    assert train(other) == train(pipeline) == expected
    assert same(everything(other), everything(never))
    for one in (pipeline, other, never):
        one.close()


def loss_that_may_be_bad() -> tuple[list[bool], Callable[[Tensor, Tensor], Tensor]]:
    """A switch, and a loss that is not finite while it is on."""
    bad = [False]

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total * float("inf") if bad[0] else total

    return bad, loss


@pytest.mark.parametrize("optimizer", [adamw(1e-2), momentum, partial(SGD, lr=0.05, momentum=0.9, fused=True)])
def test_state_saved_after_skipped_steps_is_restored(tmp_path, optimizer):
    bad, loss = loss_that_may_be_bad()  # not while it is tried
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


def test_loading_a_state_of_step_0_forgets_a_nonfinite_step(tmp_path):
    """Fused SGD, whose first momentum is the first gradient: after the load as in a new pipeline."""
    bad, loss = loss_that_may_be_bad()
    fused = partial(SGD, lr=0.05, momentum=0.9, fused=True)
    pipeline, never = (make(fused, skip_limit=5, loss=loss) for _ in range(2))
    pipeline.save(tmp_path / "one")
    train(pipeline, BATCHES[:1])
    bad[0] = True
    assert not pipeline.step(BATCHES[0]).finite
    bad[0] = False
    pipeline.load(tmp_path / "one")
    assert train(pipeline) == train(never)
    assert same(everything(pipeline), everything(never))
    for one in (pipeline, never):
        one.close()


def test_momentum_set_before_a_nonfinite_step_starts_with_next_gradient():
    bad, loss = loss_that_may_be_bad()
    pipeline, never = (make(partial(SGD, lr=0.05, fused=True), skip_limit=5, loss=loss) for _ in range(2))
    for one in (pipeline, never):
        train(one, BATCHES[:1])
        for group in one.optimizer.param_groups:
            group["momentum"] = 0.9
    torch.use_deterministic_algorithms(True)  # fills memory that nobody has set with NaN
    try:
        bad[0] = True
        assert not pipeline.step(BATCHES[1]).finite
        bad[0] = False
        assert train(pipeline, BATCHES[1:]) == train(never, BATCHES[1:])
    finally:
        torch.use_deterministic_algorithms(False)
    for one in (pipeline, never):
        one.close()


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (plain, adamw(), "saved with SGD, loaded into AdamW"),
        (adamw(), partial(torch.optim.Adam, lr=0.1), "saved with AdamW, loaded into Adam"),
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


@pytest.mark.parametrize("strategy", ["tawpipe-spread", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_frozen_values_survive_save_and_resume_exactly(pool, tmp_path, strategy):
    """In a run that computes in bf16: collected, saved, resumed, also by a run whose own source is exact."""
    for worst in pool.run("test_load:frozen_values", 2, 2, folder=str(tmp_path), strategy=strategy):
        assert worst == {"exact", "host", "narrow"}


def test_a_checkpoint_of_another_model_is_refused_by_name(pool, saved):
    message = pool.run("test_load:load_into_another_model", 1, 2, folder=str(saved))[0]
    assert message.startswith("where: ") and "mlp" in message


def load_into_another_model(world: World, *, folder: str) -> str:
    """The message for a checkpoint of another model."""
    config = llama(torch.float32).config
    config.intermediate_size += 4
    pipeline = make_pipeline(LlamaForCausalLM(config), world=world)
    try:
        pipeline.load(folder)
    except UserError as error:
        return str(error)
    finally:
        pipeline.close()
    return "loaded"


def load_with_fault(world: World, *, folder: str, fault: str, copied: bool) -> tuple[str, bool, bool, bool]:
    """A load of which rank 1 cannot read a file: before anything has changed, or afterwards.

    Returns:
        what is raised, whether weights are as before, whether a step raises then, and whether a load that succeeds goes
        on as if nothing had been.
    """
    pipeline, expected = (resumable(world, dtype="float32") for _ in range(2))
    given = batches(5, 4)
    expected.step(given[0])
    where: Any = Path(folder) / "one"
    memory = memory_of(world, folder)
    expected.save(memory if copied else where, run=run_of(1))
    if copied:
        where = newest(memory).source
        assert where is not None
    for batch in given[2:]:
        pipeline.step(batch)
    pipeline.drain()
    before = {unit: master.clone() for unit, master in pipeline.storage.master.items()}

    def fail(*_: Any) -> Any:
        raise OSError("no such disk")

    real = load.open_file
    if world.rank == 1:
        load.open_file = fail if fault == "refused" else breaking(real, after=0)
    message, stopped = "nothing was raised", False
    try:
        pipeline.load(where)
    except (UserError, RunError) as error:
        message = f"{type(error).__name__} {error}"
    load.open_file = real
    unchanged = all(torch.equal(before[unit], master) for unit, master in pipeline.storage.master.items())
    if fault == "broken":
        try:
            pipeline.step(given[1])
        except RunError:
            stopped = True
    pipeline.load(where)
    losses = [[one.step(batch).loss for batch in given[1:]] for one in (pipeline, expected)]
    pipeline.close()
    expected.close()
    return message, unchanged, stopped, losses[0] == losses[1]


def frozen_values(world: World, *, folder: str, **knobs: Any) -> set[str]:
    """A bf16 run over a frozen model whose fp32 values bf16 would round, and one over a model whose values are exact.

    Returns:
        ``exact`` if collecting, saving, loading and copies give the values that came in; ``host`` if the cost of that
        in the host's memory is stated as it is; ``narrow`` if nothing is kept where nothing is rounded.
    """

    def make(*, exact: bool) -> Any:
        model = llama(torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
            if exact:
                parameter.data = parameter.data.bfloat16().float() * 2
        given = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        pipeline = make_pipeline(model, optimizer=adamw(1e-2), dtype=torch.bfloat16, world=world, strict=True, **knobs)
        return pipeline, given

    def holds(pipeline: Pipeline, given: Mapping[str, Tensor]) -> bool:
        pipeline.drain()
        pipeline.check_copies()
        found = {name: pipeline.parameter(name) for name in given if "q_proj" not in name}
        return all(value is None or torch.equal(value, given[name]) for name, value in found.items())

    (rounded, values), (narrow, others) = make(exact=False), make(exact=True)
    batch, checks = batches(5, 1)[0], []
    for pipeline, given in ((rounded, values), (narrow, others)):
        pipeline.step(batch)
        checks.append(holds(pipeline, given))
    storage = rounded.storage
    held = sum(m.nbytes for m in storage.master.values() if m.dtype == torch.float32) - sum(
        gradient.nbytes for gradient in storage.gradient.values()
    )
    said = rounded.costs(5, LENGTH).host_bytes
    kept = narrow.storage.exact
    memory = memory_of(world, folder)
    rounded.save(Path(folder) / "rounded")
    narrow.save(Path(folder) / "narrow")
    losses = [rounded.step(batch).loss]
    rounded.load(Path(folder) / "narrow")
    checks.append(holds(rounded, others) and not rounded.storage.exact)
    narrow.load(Path(folder) / "rounded")
    checks.append(holds(narrow, values))
    losses.append(narrow.step(batch).loss)
    narrow.save(memory, run=run_of(narrow.step_number))
    source = newest(memory).source
    assert source is not None
    rounded.load(source)
    checks.append(holds(rounded, values))
    rounded.close()
    narrow.close()
    results = {"exact"} if all(checks) and losses[0] == losses[1] else {f"not exact: {checks} {losses}"}
    return (
        results
        | ({"host"} if max(world.gather_numbers(held)) == said > 0 else {f"{held} held, {said} said"})
        | ({"narrow"} if not kept else {f"kept {kept}"})
    )
