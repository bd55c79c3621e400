"""What a GPU's streams and its allocator make of every schedule: the real runtime on a device that is none
(``fake_cuda``), each use of memory in a ledger, and a toy allocator that is fed by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fake_cuda import FakeEvent, fake_cuda
from ledger import Ledger
from pipelines import SETTINGS
from schedules import EVERY, llama, make
from streams import LENGTH, decoded, played, tiny
from tawpipe.checkpoint import save
from tawpipe.checkpoint.format import StatePiece
from tawpipe.pipeline.batch import Deal
from tawpipe.runtime.compute import moves, rows
from tawpipe.runtime.homes import portions, streaming
from tawpipe.runtime.homes.named_optimizers import BY_NAME
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.sizes.footprint import BlockMemory, early_receive_bytes, held_apart
from tawpipe.schedule.strategies.table import strategies
from tawpipe.serving.decode_steps import drawn_bytes, header_bytes
from tawpipe.serving.passes import Row, Sampling, SlotLayout
from toy_allocator import FAR_AHEAD, Bytes, ToyAllocator

IN_CHUNKS = {"sequence_chunk": 4, "offloaded_layers": 3, "recompute": "selective"}
BOUNDARY, CHUNK = LENGTH * 16 * 4, 4 * 16 * 4
"""Bytes of a layer's input, and of a chunk of it."""
LOSSES = 100
"""Bytes of scalars that NORM has read."""
_LAYERS = "0/0/0,4x10/20/10,0/9/0"
CASES = [
    {"strategy": "tawpipe-spread", "rank": 1},
    {"strategy": "tawpipe-step", "rank": 2},
    {"strategy": "tawpipe-striped", "offloaded_layers": 2, "recompute": "selective:1,full", "lengths": (7, LENGTH)},
    {"strategy": "tawpipe-whole", "clip_norm": None, "early_updates": True, "evaluate": True},
    {"strategy": "flat", "weights_compression": "int8", "rank": 3},
    {"strategy": "hsdp", "recompute": "none", "rows": 8, "micro_batches_per_visit": 2},
    {"strategy": "weipipe"},
    {"strategy": "tawpipe-spread", "sequence_ranks": 2, "rank": 1},
    {"strategy": "tawpipe-whole", "sequence_ranks": 2, "rank": 2, **IN_CHUNKS},
    {"strategy": "tawpipe-spread", "rows": 8, "micro_batches_per_visit": 2, **IN_CHUNKS},
    {"strategy": "flat", "rank": 1, "offload_dir": "/tmp", **IN_CHUNKS},
    {"strategy": "tawpipe-spread", "bin_tokens": 24, "documents": (24, 3, 5, 9, 11, 2, 7), "keep_mib": 1},
    {"strategy": "tawpipe-spread", "bin_tokens": 12, "documents": (24, 3, 5, 9), "sequence_ranks": 2, "rank": 1},
    {"strategy": "1f1b", "stages": "world", "rows": 5, "rank": 1, "evaluate": True},
    {"strategy": "1f1b", "stages": "nodes", "rows": 6, "rank": 3, "recompute": "selective"},
    {"strategy": "interleaved-1f1b", "stages": "nodes:0,2,3,4@0,1,0,1", "rows": 8, "rank": 2},
    {"strategy": "zero-bubble", "stages": "locals", "rows": 6, "rank": 1},
    {"strategy": "generated", "stages": "world:0,1,2,3,4@0,1,2,3,0", "rows": 6},
    {"strategy": "solved", "stages": "world", "rows": 5, "rank": 1, "block_times": f"{_LAYERS};memory=8;host=3"},
    {"strategy": "tawpipe-groups", "groups": "1/2/4", "rank": 2},
    {"strategy": "tawpipe-step", "weights_compression": "exact", "rank": 1, "dtype": torch.bfloat16, "evaluate": True},
]


def named(case: dict) -> str:
    return " ".join(str(value) for value in case.values())


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (number % 5 > 0)) for number, case in enumerate(CASES)],
    ids=named,
)
def test_no_memory_is_reused_while_a_stream_uses_it(case):
    """A use waits for those that it must come after; freed memory is recorded on other streams that used it, or its own
    stream has waited for them. And nothing in a step waits for the device, or copies from memory that is not pinned.
    However far ahead the host is, what has gone and may still be used is no more than a plan has counted.
    """
    ledger = played(**case)
    assert not ledger.faults, "\n".join(dict.fromkeys(ledger.faults))
    in_files = "offload_dir" in case  # whose threads the host waits for
    assert not ledger.unpinned, set(ledger.unpinned)
    agreed = [wait for wait in ledger.waits if " SIZE " in wait]  # once a step, on the sizes of messages
    assert len(agreed) == (case.get("weights_compression") == "exact")
    assert agreed == ledger.waits or in_files, set(ledger.waits)
    found = ToyAllocator(ledger.trace, ahead=FAR_AHEAD).most
    settings = {name: value for name, value in case.items() if name in SETTINGS}
    schedule = make(llama(4), 2, 2, case.get("rows", 4), **settings)
    apart = held_apart(schedule, case.get("rank", 0), dict.fromkeys((Kind.INPUT, Kind.INPUT_GRADIENT), BOUNDARY))
    assert found.allocated <= found.active <= found.reserved
    assert found.active - found.allocated <= apart + LOSSES, "the plan's part `apart`"


DECODING = [(rank, ranks, form) for ranks in (2, 3) for rank in range(ranks) for form in ("", "int8")]
QUICK_ROUNDS = [(0, 2, ""), (1, 3, "int8")]


@pytest.mark.parametrize(
    ("rank", "ranks", "compression"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one not in QUICK_ROUNDS)) for one in DECODING],
)
def test_hidden_states_are_kept_while_their_message_is_sent(rank, ranks, compression):
    """In rounds of decoding, as a service and ``Pipeline.generate`` have them."""
    ledger = decoded(rank, ranks=ranks, compression=compression)
    assert ledger.issued > 100
    assert not ledger.faults, "\n".join(dict.fromkeys(ledger.faults))


@pytest.mark.parametrize(("compression", "most"), [("", 64), ("int8", 20)])
def test_a_message_of_a_decoding_round_has_its_own_size(compression, most):
    """And not that of as many tokens as could be in it: a piece of a prompt for one of 8 slots, then its tokens."""
    room, sent, drawn = SlotLayout(1, 8, 512, 256), list[int](), list[int]()
    decoded(0, room=room, prompt=256, compression=compression, sent=sent)
    decoded(1, room=room, prompt=256, compression=compression, sent=drawn)
    header, beginning = header_bytes([Row(0, 0, ())]), header_bytes([Row(0, 0, ())] * 9)
    assert sent[0] == beginning and header < sum(sent[:2]) <= header + 256 * most
    assert len(sent) > 6 and set(sent[2:]) == {beginning} and beginning < 512
    assert set(drawn) == {drawn_bytes(()), drawn_bytes([Row(0, 0, (), Sampling())])} and max(drawn) < 32


BY_HOME = [(name, homes) for name in BY_NAME for homes in ("none", "state", "all")]
QUICK = [("rmsprop", "none"), ("adafactor", "state"), ("muon", "none")]


@pytest.mark.parametrize(
    ("name", "homes"), [pytest.param(*one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in BY_HOME]
)
def test_optimizer_synchronizes_with_the_host_at_most_once_per_step(name, homes):
    """However many units and parameters there are."""
    case = {"strategy": "tawpipe-whole", "nodes": 1, "local": 1, "rows": 1, "layers": 2, "lengths": (4,) * 3}
    ledger = played(optimizer=BY_NAME[name](1e-3), host_homes=homes, **case)
    assert not ledger.faults, "\n".join(dict.fromkeys(ledger.faults))
    assert len(ledger.waits) <= 2, set(ledger.waits)  # in the two steps behind the first
    assert not ledger.unpinned, set(ledger.unpinned)


def test_stream_cases_cover_every_strategy():
    assert {case["strategy"] for case in CASES} == {name for name in EVERY if strategies()[name].candidate}


IN_HOST = [
    {"strategy": "tawpipe-spread", "rank": 1},
    {"strategy": "tawpipe-whole", "rows": 8},
    {"strategy": "flat", "rows": 8, "clip_norm": None, "early_updates": True},
    {"strategy": "tawpipe-spread", "nodes": 1, "local": 1, "rows": 3},
    {"strategy": "1f1b", "stages": "world", "rows": 5, "rank": 1, "evaluate": True, "momentum": 0.0},
    {"strategy": "tawpipe-whole", "rows": 5, "host_homes": "all", "evaluate": True},
    {"strategy": "tawpipe-spread", "nodes": 1, "local": 1, "rows": 2, "host_homes": "all"}
    | {"clip_norm": None, "early_updates": True},
]


def in_host(**case) -> Ledger:
    """Three steps with homes in the host's memory, which pass in small slices."""
    return played(**{"host_homes": "state", "momentum": 0.9, "lengths": (LENGTH,) * 3, **case})


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (number % 4 > 0)) for number, case in enumerate(IN_HOST)],
    ids=named,
)
def test_streamed_host_homes_are_used_by_no_other_stream(monkeypatch, case):
    monkeypatch.setattr(portions, "PORTION_SIZE", 256)
    ledger = in_host(**case)
    assert not ledger.faults, "\n".join(dict.fromkeys(ledger.faults))
    assert not ledger.unpinned and not ledger.waits, (set(ledger.unpinned), set(ledger.waits))


def _forgets(name: str):
    """A room that does not know when something had come or gone."""

    class Careless(streaming.LoadBuffer):
        def __setattr__(self, attribute: str, value: object) -> None:
            object.__setattr__(self, attribute, FakeEvent() if attribute == name and value is not None else value)

    return streaming, "LoadBuffer", Careless


FORGOTTEN = {
    "a room that has not been left": lambda: _forgets("left"),
    "a room to which nothing has come": lambda: _forgets("arrived"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_missing_wait_of_host_homes_is_detected(monkeypatch, what):
    monkeypatch.setattr(portions, "PORTION_SIZE", 256)
    monkeypatch.setattr(*FORGOTTEN[what]())
    assert any("does not wait for" in one for one in in_host(**IN_HOST[1]).faults)


# what the ledger is there for


def test_unrecorded_received_tensor_is_detected(monkeypatch):
    """As was so of what a pipeline received before anything had computed."""
    record = Ledger.record

    def some(self: Ledger, tensor: Tensor, stream: object) -> None:
        if not re.search(r"RECV<0:u\d:x\.0", self.action):
            record(self, tensor, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "record", some)
    faults = played(strategy="1f1b", stages="world", rank=1).faults
    assert faults and all("what was made by zero_ in INTER_W" in one or "RECV<0" in one for one in faults), faults[:2]


@pytest.mark.parametrize("missing", [pytest.param("arriving", marks=pytest.mark.slow), "leaving"])
def test_chunk_overwritten_too_early_is_detected(monkeypatch, missing):
    """A slot that does not wait for its last chunk."""

    class Careless(rows.Slot):
        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, None if name == "left" else value)

    take = rows.Staging.take

    def taken(self: rows.Staging, stream: object, *kind: object) -> list[rows.Slot]:
        found = take(self, stream, *kind)  # type: ignore[arg-type]
        for one in found if stream is getattr(self, missing) else ():
            one.__class__ = Careless
        return found

    monkeypatch.setattr(rows.Staging, "take", taken)
    assert any("does not wait for" in one for one in played(**CASES[9]).faults)


def test_unrecorded_reload_buffer_is_detected(monkeypatch):
    """As was so of inputs that come back, when rows grew and larger room took the place of theirs."""
    record = Ledger.record

    def some(self: Ledger, tensor: Tensor, stream: object) -> None:
        if "RELOAD" not in self.action:
            record(self, tensor, stream)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "record", some)
    faults = played(**CASES[2]).faults
    assert faults and all("is freed in HOST RELOAD" in one for one in faults), faults[:2]
    assert any("on COMPUTE is over" in one for one in faults)


def test_unpinned_batch_copy_is_detected(monkeypatch):
    local = Deal.local
    monkeypatch.setattr(Deal, "local", lambda self, batch: local(replace(self, pinned=False), batch))
    assert "a copy to the device in COMPUTE" in played(strategy="flat").unpinned[0]


# the toy allocator


def most(**case: object) -> Bytes:
    return ToyAllocator(played(**case).trace, ahead=FAR_AHEAD).most  # type: ignore[arg-type]


def test_recorded_memory_counts_as_active_not_allocated():
    """Freed at once, and of no use to anybody until the other stream is done with it."""
    found = most(strategy="1f1b", stages="world", rank=1, rows=8)
    assert found.reserved >= found.active > found.allocated


@pytest.mark.slow
def test_streams_and_their_memory_are_constant_in_the_number_of_layers():
    """Of offloaded rows: as many streams, and beyond what tensors take as much memory, for any number of places."""
    few, many = (played(layers=layers, **{**CASES[9], "offloaded_layers": layers}) for layers in (2, 5))
    assert len(few.streams) == len(many.streams)
    less, more = (ToyAllocator(one.trace, ahead=FAR_AHEAD).most for one in (few, many))
    assert more.active - more.allocated <= less.active - less.allocated + CHUNK
    assert more.reserved - more.allocated <= less.reserved - less.allocated + 4 * CHUNK


@pytest.mark.slow
def test_separate_streams_for_every_layer_are_detected(monkeypatch):
    """As was so of the places of offloaded rows, each of which copied on streams of its own."""
    place = rows.Places._place

    def apart(self: rows.Places, *given: object) -> object:
        self._staging = rows.Staging(self._device)
        return place(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(rows.Places, "_place", apart)
    once = {**CASES[9], "lengths": (LENGTH,)}
    few, many = (played(layers=layers, **{**once, "offloaded_layers": layers}) for layers in (2, 5))
    assert len(many.streams) > len(few.streams) + 6
    less, more = (ToyAllocator(one.trace, ahead=FAR_AHEAD).most for one in (few, many))
    assert more.reserved - more.allocated > less.reserved - less.allocated + 4 * CHUNK


@pytest.mark.parametrize("recompute", [pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_staging_buffers_match_the_planned_bytes(recompute, monkeypatch):
    """Two chunks that come and two that go, of inputs and of what attention gave; and of inputs two more."""
    made = list[rows.Staging]()

    class Counted(rows.Staging):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(rows, "Staging", Counted)
    case = {"strategy": "tawpipe-spread", **IN_CHUNKS, "recompute": recompute}
    played(**case, lengths=(LENGTH,))
    slots = [slot for one in made for free in one._free.values() for slot in free]
    memory = BlockMemory(16 * 4, {"kept": 2 * 8 * 4})  # by explicit scores, which have no log-sum-exp
    said = memory.staged(make(llama(4), 2, 2, 4, **case), IN_CHUNKS["sequence_chunk"])
    assert sum(slot.buffer._tensor.nbytes for slot in slots) == said > 0


SLOW_RANKS = [1, *(pytest.param(rank, marks=pytest.mark.slow) for rank in (0, 3))]


@pytest.mark.slow
@pytest.mark.parametrize("rank", SLOW_RANKS)
def test_host_running_ahead_holds_no_more_activations(rank, monkeypatch):
    """However many micro-batches a pipeline has, and however far ahead its actions could be issued."""
    case = {"strategy": "1f1b", "stages": "world", "rank": rank, "evaluate": True}
    few, many = most(rows=6, **case), most(rows=14, **case)
    lanes = 4 if 0 < rank < 3 else 2
    assert few.active - few.allocated <= lanes * moves.TRAVELLING * BOUNDARY + LOSSES
    assert many.active - few.active <= BOUNDARY
    monkeypatch.setattr(moves, "TRAVELLING", 1000)
    assert most(rows=14, **case).active > many.active + 2 * BOUNDARY, "without the wait it would"


PIPELINES = [{"strategy": "1f1b", "stages": "world"}, {"strategy": "zero-bubble", "stages": "nodes"}]


@pytest.mark.parametrize("case", PIPELINES, ids=named)
@pytest.mark.parametrize("rank", SLOW_RANKS)
def test_stream_private_memory_is_within_the_plan(case, rank):
    schedule = make(llama(4), 2, 2, 8, **case)
    apart = held_apart(schedule, rank, dict.fromkeys((Kind.INPUT, Kind.INPUT_GRADIENT), BOUNDARY))
    found = most(rank=rank, rows=8, **case)
    assert 0 < found.active - found.allocated <= apart + LOSSES < 12 * BOUNDARY


# copies between host and device


def test_dealt_batches_are_pinned():
    with fake_cuda() as ledger:
        ids = torch.zeros(3, 8, dtype=torch.int64)
        local = Deal(micro_batch=2, rank=0, world_size=1, pinned=True).local({"input_ids": ids, "labels": ids})
        again = Deal(micro_batch=2, rank=0, world_size=1, pinned=True).local(local)
        for batch in (*local.micro_batches, *again.micro_batches):
            assert all(ledger.is_pinned(one) for one in (batch.input_ids, batch.labels, batch.position_ids))


@pytest.mark.parametrize("pieces", [2, 0], ids=["in two pieces", "as it was"])
def test_a_save_pins_a_fixed_amount_of_memory(monkeypatch, pieces):
    """And not a copy of the whole state, which pinned memory would stay for good."""
    monkeypatch.setattr(save, "PINNED_BYTES", 64)
    state = list(tiny(1).state_dict().items())
    if not pieces:
        monkeypatch.setattr(save, "_through_pinned", _pinned_as_a_whole)
    with fake_cuda() as ledger:
        given = [StatePiece(name, value.numel(), 0, value.to("cuda", copy=True)) for name, value in state]
        staged = save.stage(given)
        assert not ledger.faults
    assert ledger.pinned_bytes == (pieces * 64 or sum(value.nbytes for _, value in state))
    assert all(torch.equal(one.value, value) for one, (_, value) in zip(staged, state, strict=True))


def _pinned_as_a_whole(values: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    for value, copy in zip(values, copies, strict=True):
        passing = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
        torch.cuda.synchronize()
        copy.copy_(passing)


def test_plan_counts_messages_that_gloo_posts_ahead():
    """On a lane all but the message that the schedule counts: up to 16, or 16 MiB, and never less than two."""
    middle, weights = (make(llama(8), 4, 1, 8, strategy=name) for name in ("1f1b", "tawpipe-spread"))
    for size, ahead in ((1000, 15), (4 << 20, 3), (1 << 30, 1)):
        sizes: dict[Kind, int] = {Kind.INPUT: size, Kind.INPUT_GRADIENT: size}
        assert [early_receive_bytes(middle, rank, sizes) for rank in (0, 1)] == [ahead * size, 2 * ahead * size]
        assert early_receive_bytes(weights, 1, sizes) == 0
