"""What a pipeline is made of, by itself: its schedules, its parameters by name, its bins, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from schedules import llama
from tawpipe.dealing.balance import LayerKind, LayerTime, PacksForm, deal
from tawpipe.errors import RunError, UserError
from tawpipe.model.batch import MicroBatch
from tawpipe.model.units import build_units
from tawpipe.orders.fitting import one_by_one
from tawpipe.pipeline.batch import NOTHING, rows_of
from tawpipe.pipeline.schedules import Schedules
from tawpipe.pipeline.setup import refuse_cut_rows, refuse_settings, refuse_strategy
from tawpipe.pipeline.state import Parameters
from tawpipe.runtime.homes.optimizer import adamw, whole_matrices
from tawpipe.runtime.homes.storage import Storage
from tawpipe.runtime.world import World
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.placement import Home
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.build import build
from tawpipe.topology import Topology

CPU = torch.device("cpu")


def world(nodes: int, local: int, rank: int = 0) -> World:
    return World(Topology.grid(nodes, local), rank, CPU, None)


# schedules


def test_schedule_is_built_once_per_number_of_micro_batches() -> None:
    made = Schedules(ScheduleSettings(micro_batches_per_visit=1), llama(3), world(2, 2))
    four = made.of(4, training=True)
    assert made.of(4, training=True) is four and len(four.micro_batches) == 4
    assert made.of(4, training=False) is not four and not made.of(4, training=False).training
    assert len(made.of(7, training=True).micro_batches) == 7
    assert made.shares(7) == made.of(7, training=True).step.micro_batches
    assert [one.training for one in made.samples()] == [True, False]
    assert made.of(PacksForm(1, 2), training=True).step.shared == 4  # a round of bins of four sets of one


def test_reordered_schedule_holds_only_for_its_number_of_micro_batches() -> None:
    made = Schedules("1f1b", llama(4), world(2, 1))
    before, other = made.of(4, training=True), made.of(2, training=True)
    strategy: Any = before.step.strategy
    order = one_by_one(strategy.layout_of(before.model, strategy.positions(before.topology)), 4)
    made.reorder(4, Order(order))
    assert made.of(4, training=True) is not before and made.of(2, training=True) is other


def test_unsuitable_ready_schedules_are_refused() -> None:
    settings = ScheduleSettings(micro_batches_per_visit=1)
    ready = Schedules(settings, llama(3), world(2, 2)).of(4, training=True)
    given = Schedules(ready, llama(3), world(2, 2))
    assert given.of(4, training=True).programs == ready.programs
    with pytest.raises(UserError, match="batch: got '5 micro-batches'; 4 micro-batches, as the schedule"):
        given.of(5, training=True)
    with pytest.raises(UserError, match="schedule: got 'a ready one'"):
        given.of_packs(PacksForm(0, 1))
    with pytest.raises(UserError, match="one for this model on"):
        Schedules(ready, llama(4), world(2, 2))
    with pytest.raises(UserError, match="one that only goes forward"):
        Schedules(build(ready.step, training=False), llama(3), world(2, 2))
    with pytest.raises(UserError, match="one whose activations travel, to have an order"):
        Schedules(settings, llama(3), world(2, 2)).reorder(4, Order(()))


# parameters


def parameters(gather: Any = lambda text: [text], dtype: torch.dtype = torch.float32) -> tuple[Parameters, Storage]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)
    units = build_units(model, {name: (int(name[0]),) for name, _ in model.named_parameters()}, ("first", "second"))
    homes = [Home.over((0,), unit.numel, replicas=((1,),)) for unit in units]
    storage = Storage(units, homes, 0, device=CPU, compute_dtype=dtype, master_dtype=torch.float32)
    for unit, master in storage.master.items():
        master.copy_(torch.arange(len(master)) + 100 * unit)
        storage.refresh(unit)
    seen: Any = SimpleNamespace(group=None, gather_texts=gather)
    return Parameters(storage, seen), storage


def test_collected_parameter_is_a_copy_read_anew_after_updates() -> None:
    found, storage = parameters()
    assert set(found.names) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    first = found.collect("0.weight", 1)
    assert first is not None and first.shape == (3, 2)
    first.zero_()
    again = found.collect("0.weight", 1)
    assert again is not None and again.unique().numel() == 6
    storage.master[0].add_(1)
    assert torch.equal(found.collect("0.weight", 2), again + 1)  # type: ignore[arg-type]
    storage.gradient[0].fill_(5)
    assert (found.collect("0.bias", 2, gradient=True) == 5).all()  # type: ignore[union-attr]


def test_uncollectable_parameter_or_gradient_is_refused() -> None:
    found, _ = parameters()
    found.check("0.bias", gradient=True)
    for name, gradient, words in (("2.bias", False, "parameter: got '2.bias'"), ("1.bias", True, "this one is frozen")):
        with pytest.raises(UserError, match=words):
            found.check(name, gradient=gradient)


def test_differing_or_stale_copies_of_a_unit_are_named() -> None:
    found, _ = parameters(lambda text: [text, text])
    found.check_copies()
    found, _ = parameters(lambda text: [text, text.replace("\n1 ", "\n1 x")])
    with pytest.raises(RunError, match="unit 1: the copies on rank 0 and rank 1 differ"):
        found.check_copies()
    found, storage = parameters(lambda text: [text, text], torch.bfloat16)
    storage.master[0].add_(50)
    with pytest.raises(RunError, match="rank 0: what travels of unit 0 is not what its home holds"):
        found.check_copies()


# bins


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_is_part_of_the_row_of_its_pack(ranks: int) -> None:
    lengths = [17, 3, 9, 20 * ranks, 1, 8]
    work = LayerTime((LayerKind(2, 20.0, 8.0),))
    bins = deal(lengths, world_size=4, cap=20, work=work, ranks=ranks)

    def document(number: int) -> MicroBatch:
        ids = torch.full((1, lengths[number]), number)
        return MicroBatch.of_documents(ids, ids, [lengths[number]])

    held: dict[int, list[int]] = {}
    for rank in range(4):
        rows = rows_of(bins, rank, document)
        assert len(rows) == sum(bins.shape)
        for row, one in zip(rows, bins.of(rank), strict=True):
            if not one.documents:
                assert row.tokens == NOTHING.tokens == 0
                continue
            assert row.lengths == tuple(lengths[number] for number in one.documents)
            for number in one.documents:
                held.setdefault(number, []).append(rank)
    assert set(held) == set(range(6))
    for number, who in held.items():  # one rank, or the ranks of a set
        assert who in ([who[0]], [*range(who[0], who[0] + ranks)]), number
    with pytest.raises(UserError, match=r"documents: got '.* tokens in documents"):
        [rows_of(bins, rank, lambda _: document(4)) for rank in range(4)]


# refusals


@pytest.mark.parametrize(
    ("settings", "arguments", "setting"),
    [
        ({"early_updates": True}, {"clip_norm": 1.0}, "schedule.early_updates"),
        ({"sequence_chunk": 4}, {"compile_layers": True}, "compile_layers"),
        ({"sequence_ranks": 2}, {"compile_layers": True}, "compile_layers"),
        ({"weights_compression": "int8"}, {"quantize": "nf4"}, "schedule.weights_compression"),
    ],
)
def test_only_contradicting_settings_are_refused(settings, arguments, setting) -> None:
    usual: dict[str, Any] = {"clip_norm": None, "compile_layers": False, "quantize": "none"}
    refuse_settings(ScheduleSettings(**settings), **usual)
    refuse_settings(ScheduleSettings(), **usual | arguments)
    with pytest.raises(UserError) as refused:
        refuse_settings(ScheduleSettings(**settings), **usual | arguments)
    assert refused.value.setting == setting


def test_rows_that_a_model_needs_whole_refuse_cutting() -> None:
    chain: Any = SimpleNamespace(why_not_chunks="it counts", why_not_cp_groups="it counts", mixing=(), name="Odd")
    refuse_cut_rows(chain, ScheduleSettings(sequence_ranks=1))
    even: Any = SimpleNamespace(why_not_chunks="", why_not_cp_groups="", mixing=(), name="Even")
    for settings in (ScheduleSettings(sequence_chunk=1), ScheduleSettings(sequence_ranks=2)):
        refuse_cut_rows(even, settings)
        with pytest.raises(UserError, match="unset: rows of Odd cannot be cut, because it counts") as refused:
            refuse_cut_rows(chain, settings)
        assert getattr(settings, refused.value.setting.removeprefix("schedule.")) == refused.value.value


def test_strategy_that_a_model_or_optimizer_cannot_run_is_refused() -> None:
    chain: Any = SimpleNamespace(why_not_staged="layers share a tensor", name="Odd", units=[])
    made = Schedules("zero-bubble", llama(4), world(2, 1)).smallest
    usual: dict[str, Any] = {"optimizer": adamw(), "compile_layers": False}
    with pytest.raises(UserError, match="weights travel for Odd: layers share a tensor"):
        refuse_strategy(chain, made, **usual)
    chain.why_not_staged = ""
    with pytest.raises(UserError, match=r"compile_layers: got True; .*backward passes are taken apart"):
        refuse_strategy(chain, made, **{**usual, "compile_layers": True})
    model = nn.Linear(2, 2)
    chain.units = build_units(model, {name: (0,) for name, _ in model.named_parameters()}, ("only",))
    step: Any = SimpleNamespace(
        strategy=SimpleNamespace(name="flat"),
        divided_over=1,
        kept=frozenset(),
        homes=[Home.over((0, 1), 6)],
        settings=replace(ScheduleSettings(), strategy="flat"),
    )
    refuse_strategy(chain, step, **usual)
    with pytest.raises(UserError, match=r"schedule.strategy: got 'flat'; tawpipe-whole"):
        refuse_strategy(chain, step, **{**usual, "optimizer": whole_matrices(adamw())})
