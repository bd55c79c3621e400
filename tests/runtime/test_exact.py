"""Exact changes of weights: a copy that messages alone have changed has its owner's bits, whatever they are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from exact import run_cases
from schedule_numbers import check_numbers
from schedules import group_sizes, llama, make
from tawpipe.errors import UserError
from tawpipe.pipeline.setup import refuse_settings
from tawpipe.runtime.peak import peaks
from tawpipe.runtime.transport import exact as exact_module
from tawpipe.runtime.transport.compression import CPU, ThreadBuffers
from tawpipe.runtime.transport.exact import (
    ABSENT,
    CODED,
    GPU_SEGMENT,
    HASHED,
    NOTHING,
    WHOLE,
    ChangeForm,
    best_form,
    changes,
    checksum,
    coding_bytes,
    decode_change,
    encode_change,
)
from tawpipe.schedule.actions import Action, Op
from tawpipe.schedule.buffers import SIZE, Kind, home_weight, weight_copy
from tawpipe.schedule.proof.verify import ScheduleError, verify
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import Widths, costs
from tawpipe.schedule.step import Schedule
from tawpipe.simulate import CostModel, LinkModel, play
from tawpipe.topology import Topology

SLICE = 1 << 12
PLAIN: dict[str, Any] = {"strategy": "tawpipe-step"}
EXACT: dict[str, Any] = {"strategy": "tawpipe-step", "weights_compression": "exact"}


@pytest.fixture(autouse=True, scope="module")
def short_slices():
    """Messages of several slices do not take long here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tawpipe.runtime.transport.exact.CPU_SEGMENT", SLICE)
        yield


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


def there(home: torch.Tensor, copy: torch.Tensor, form: ChangeForm) -> torch.Tensor:
    """The copy after a message in a form."""
    message = torch.full((form.message_bytes(home.numel()),), 0xA5, dtype=torch.uint8)
    encode_change(home, copy, form, message)
    changed = copy.clone()
    decode_change(message, form, changed)
    return changed


def check(home: torch.Tensor, copy: torch.Tensor) -> None:
    """Every form changes the copy into what is at home, and no message is longer than the weights."""
    counts = changes(home, copy).tolist()
    for bits, count in zip(CODED, counts[1:], strict=True):
        for more in (0, 3):  # of the member that has most
            listed, whole = (min(home.numel(), one + more) for one in (count, counts[-1]))
            form = ChangeForm(bits, listed if bits < 8 else 0, whole)
            assert torch.equal(there(home, copy, form).view(torch.int16), home.view(torch.int16))
    form = best_form(counts, home.numel())
    assert (form.bits == NOTHING) == torch.equal(home.view(torch.int16), copy.view(torch.int16))
    assert form.message_bytes(home.numel()) <= 2 * home.numel()


@settings(max_examples=60, deadline=None)
@given(
    length=st.one_of(st.integers(1, 70), st.integers(1, 10_000), st.sampled_from((SLICE, SLICE + 1))),
    most=st.sampled_from((0, 1, 2, 7, 8, 127, 128, 40_000, 65_535)),
    rare=st.sampled_from((1, 2, 50)),
    seed=st.integers(0, 2**31),
)
def test_exact_compression_restores_random_bits(length, most, rare, seed):
    dice = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 1 << 16, (length,), generator=dice)
    moved = torch.randint(-most, most + 1, (length,), generator=dice)
    moved *= torch.randint(0, rare, (length,), generator=dice) == 0
    check(bf16(before + moved), bf16(before))
    check(bf16(torch.randint(0, 1 << 16, (length,), generator=dice) & 0x8000), bf16(before))  # zeros of both signs


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("distance", [0, 1, 7, 8, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF])
def test_exact_compression_restores_every_bit_pattern_at_any_distance(distance, on_gpu, monkeypatch):
    """As on a CPU, and without a shape that depends on numbers."""
    monkeypatch.setattr("tawpipe.runtime.transport.exact._waits_for_nobody", lambda _: not on_gpu)
    every = torch.arange(1 << 16).repeat(2)[:70_000]
    check(bf16(every), bf16(every.roll(distance)))
    check(bf16(every), bf16(every ^ distance))
    few = torch.where(every % 97 == 0, every ^ distance, every)
    check(bf16(every), bf16(few))


def test_exact_changes_count_steps_between_neighbouring_bf16_values():
    before = bf16(torch.tensor([0xC000, 0x8000, 0x0000, 0x3F80]))  # -2, -0, 0, 1
    after = bf16(torch.tensor([0xBFFF, 0x0000, 0x0001, 0x3F81]))
    assert (after[[0, 2, 3]] > before[[0, 2, 3]]).all()
    assert changes(after, before).tolist() == [4, 1, 1, 1]  # a zero that becomes the other one is far away


def test_copy_updated_by_exact_messages_equals_its_owner():
    torch.manual_seed(0)
    master, forms = torch.randn(16 * SLICE + 999) * 0.02, set()
    copy = master.bfloat16()
    for step in range(50):
        master -= (1e-5, 3e-4, 0.0, 1e-3, 1.0)[step % 5] * torch.randn_like(master).sign() * torch.rand_like(master)
        home = master.bfloat16()
        form = best_form(changes(home, copy).tolist(), home.numel())
        forms.add(form.bits)
        if form.bits in CODED:
            copy = there(home, copy, form)
        elif form.bits == WHOLE:
            copy = home.clone()
        assert torch.equal(copy.view(torch.int16), home.view(torch.int16))
    assert {NOTHING, 2, 4, WHOLE} <= forms


def test_exact_compression_is_thread_safe_across_lanes():
    def changed_rightly(seed: int) -> bool:
        dice = torch.Generator().manual_seed(seed)
        before = torch.randint(0, 1 << 16, (16 * SLICE,), generator=dice)
        home, copy = bf16(before + torch.randint(-9, 10, before.shape, generator=dice)), bf16(before)
        form = best_form(changes(home, copy).tolist(), len(before))
        return torch.equal(there(home, copy, form).view(torch.int16), home.view(torch.int16))

    with ThreadPoolExecutor(4) as lanes:
        assert all(lanes.map(changed_rightly, range(40)))


class Launched(TorchDispatchMode):
    """Counts operators that a GPU would launch: those that compute, of tensors with elements."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        some = any(one.numel() for one in (*args, given) if isinstance(one, torch.Tensor))
        self.count += some and not func.is_view and "empty" not in func._schema.name
        return given


@pytest.mark.parametrize(("bits", "launches"), [(2, (545, 494, 526)), (4, (545, 430, 462)), (8, (545, 386, 416))])
def test_gpu_launches_few_operators_and_takes_no_more_memory_than_counted(bits, launches, monkeypatch):
    """A shard of 2^27 weights, at a 2^10th of its size: in slices of 2^22 it was ``launches``."""
    monkeypatch.setattr(exact_module, "_waits_for_nobody", lambda _: False)
    monkeypatch.setattr(ThreadBuffers, "take", lambda self, name, *shape: torch.empty(shape[0], dtype=shape[1]))
    for name in ("CPU_SEGMENT", "GPU_SEGMENT"):
        monkeypatch.setattr(exact_module, name, GPU_SEGMENT >> 10)
    monkeypatch.setattr(exact_module, "HASHED", HASHED >> 10)
    dice, count = torch.Generator().manual_seed(bits), 1 << 17
    before, moved = torch.randint(0, 1 << 16, (count,), generator=dice), torch.randint(-1, 2, (count,), generator=dice)
    moved[::4] += 300  # as long a list as there may be
    home, copy = bf16(before + moved), bf16(before)
    form = ChangeForm(bits, count // 4 if bits < 8 else 0, count // 4)
    message, found = torch.empty(form.message_bytes(count), dtype=torch.uint8), copy.clone()
    parts: list[Any] = [
        lambda: changes(home, copy),
        lambda: encode_change(home, copy, form, message),
        lambda: decode_change(message, form, found),
    ]
    counted = []
    for part in parts:
        with Launched() as launched:
            part()
        counted.append(launched.count)
    assert torch.equal(found.view(torch.int16), home.view(torch.int16))
    assert all(8 * few <= many for few, many in zip(counted, launches, strict=True)), counted
    found.copy_(copy)
    counting, coding, decoding, hashing = (part.most for part in peaks([*parts, lambda: checksum(copy)], CPU))
    assert max(counting, hashing) + max(coding, decoding) <= coding_bytes(count)


def test_shortest_exact_form_is_chosen():
    assert best_form([0, 0, 0, 0], 5).bits == NOTHING
    assert best_form([1, 0, 0, 0], 1000) == ChangeForm(2)
    assert best_form([1000, 1000, 3, 0], 1000) == ChangeForm(4, 3)
    assert best_form([1000, 1000, 300, 20], 1000) == ChangeForm(4, 300, 20)
    assert best_form([1000, 1000, 900, 0], 1000) == ChangeForm(8)
    assert best_form([1000, 1000, 1000, 800], 1000).bits == best_form([ABSENT] * 4, 1000).bits == WHOLE


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70_000), st.integers(0, 2**31), st.integers(0, 15))
def test_checksum_detects_any_flipped_bit(length, seed, bit):
    values = torch.randint(0, 1 << 16, (length,), generator=torch.Generator().manual_seed(seed))
    turned = values.clone()
    turned[seed % length] ^= 1 << bit
    before, after = int(checksum(bf16(values))), int(checksum(bf16(turned)))
    assert before != after and 0 <= before < 2**31 and before == int(checksum(bf16(values)))


# schedules


def refused(nodes: int, local: int, groups: str) -> bool:
    """True of groups whose weights take another way than one hop between nodes to where they are kept."""
    weights, gradients, state = map(int, groups.split("/"))
    return weights != local or state <= local or local < gradients < state


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_exact_compression_schedules_verify_and_compute_right_sums(data):
    nodes, local = data.draw(st.sampled_from([(2, 1), (2, 2), (3, 2), (4, 1)]))
    kind = data.draw(st.sampled_from([{}, {"tied": True}, {"lora": True}, {"frozen": 2}]))
    given = dict(data.draw(st.sampled_from([EXACT, EXACT | {"early_updates": True}, EXACT | {"look_ahead": 0}])))
    given |= data.draw(st.sampled_from([{}, {"strategy": "tawpipe-spread", "step_cache": "all"}, {"groups": ""}]))
    if "groups" in given:
        some = [sizes for sizes in group_sizes(Topology.grid(nodes, local)) if not refused(nodes, local, sizes)]
        given |= {"strategy": "tawpipe-groups", "groups": data.draw(st.sampled_from(["", *some]))}
    count = data.draw(st.integers(1, 3 * nodes * local))
    for training in (True, False):
        schedule = make(llama(3, **kind), nodes, local, count, training=training, **given)
        verify(schedule, one_thread=True)
        check_numbers(schedule, seed=data.draw(st.integers(0, 99)))
        for program in schedule.programs:
            assert [Action.parse(str(action)) for action in program] == list(program)
            refreshed = [action.unit for action in program if action.compression == "exact"]
            assert sorted(refreshed) == list(range(len(schedule.model.units)))  # once each


def test_evaluation_keeps_weight_copies_in_equal_buffers():
    steps = [make(llama(3), 2, 2, count, training=training, **EXACT) for count, training in ((4, True), (7, False))]
    first, second = ({p.name: p.elements for p in s.pools[0] if p.kind is Kind.COPY} for s in steps)
    assert first == second and len(first) == len(steps[0].model.units)


def edited(schedule: Schedule, change) -> Schedule:
    """A schedule with a change of every rank's program."""
    return replace(schedule, programs=tuple(tuple(change(list(program))) for program in schedule.programs))


def of_unit(action: Action, unit: int) -> bool:
    return action.compression == "exact" and action.unit == unit


def no_size(program):
    return [action for action in program if action.op is not Op.SIZE]


def late_size(program):
    return [*no_size(program), *(action for action in program if action.op is Op.SIZE)]


def no_refresh(program):
    return [action for action in program if not of_unit(action, 2)]


def twice(program):
    return [copy for action in program for copy in [action] * (1 + of_unit(action, 2))]


def whole_without_a_word(program):
    plain = lambda action: replace(action, reads=action.reads[:1], compression="")  # noqa: E731
    return [plain(action) if of_unit(action, 2) else action for action in program]


def of_another_unit(program):
    return [replace(a, writes=(weight_copy(3),)) if of_unit(a, 2) else a for a in program]


def without_its_size(program):
    return [replace(a, reads=a.reads[:2]) if of_unit(a, 2) else a for a in program]


def uncounted(program):
    left = lambda action: tuple(b for b in action.reads if b not in (home_weight(2), weight_copy(2)))  # noqa: E731
    return [replace(a, reads=left(a)) if a.op is Op.SIZE else a for a in program]


def read_before(program):
    at = next(i for i, a in enumerate(program) if of_unit(a, 2))
    reader = next(i for i, a in enumerate(program) if weight_copy(2) in a.reads and i > at and a.op is Op.COLLECTIVE)
    program[at], program[reader] = program[reader], program[at]
    return program


def size_read_elsewhere(program):
    return [replace(a, reads=(*a.reads, SIZE)) if a.op is Op.FORWARD and a.block == 1 else a for a in program]


MUTANTS = (
    no_size,
    late_size,
    no_refresh,
    twice,
    whole_without_a_word,
    of_another_unit,
    without_its_size,
    uncounted,
    read_before,
    size_read_elsewhere,
)


@pytest.mark.parametrize("change", MUTANTS, ids=lambda change: change.__name__)
def test_schedule_changes_that_leave_a_copy_stale_are_refused(change):
    schedule = make(llama(3), 2, 2, 4, **EXACT)
    verify(schedule)
    with pytest.raises(ScheduleError):
        verify(edited(schedule, change))


def test_schedule_with_a_missing_refresh_on_one_rank_is_refused():
    schedule = make(llama(3), 2, 2, 4, **EXACT)
    with pytest.raises(ScheduleError):
        verify(replace(schedule, programs=(tuple(no_refresh(schedule.programs[0])), *schedule.programs[1:])))


@pytest.mark.parametrize("kind", [{}, {"lora": True}, {"frozen": 2}])
@pytest.mark.parametrize(("nodes", "local"), [(2, 1), (3, 2)])
def test_predicted_bytes_of_exact_weights_equal_the_simulation(nodes, local, kind):
    widths, model = Widths(2, 4, 4, 2), llama(4, **kind)
    usual, schedule = (make(model, nodes, local, 4, **given) for given in (PLAIN, EXACT))
    plain, exact = (costs(one, widths, activation_bytes={}) for one in (usual, schedule))
    clock = CostModel.timed(layers=4, forward_s=0.1, backward_s=0.3, between=LinkModel(1e5), inside=LinkModel(1e6))
    moved = play(schedule, replace(clock, weight_bytes=2, gradient_bytes=4, reduce_scatter="ring"), steps=2)
    for said, node in zip(exact.link_sent_bytes, moved.node_bytes[moved.steady_step], strict=True):
        assert node.sent == pytest.approx(said, rel=0.01)
    gone = 2 * (nodes - 1) / nodes  # bytes of an element of weights over a link, in the ring
    sizes = [(home.padded, unit.trainable) for home, unit in zip(schedule.homes, model.units, strict=True)]
    saved = sum(size * (1 - trained * 4.4 / 16) for size, trained in sizes) * gone
    assert plain.link_sent_bytes[0] - exact.link_sent_bytes[0] == pytest.approx(saved, rel=0.01)
    assert all(
        home.shard_size * nodes == schedule.buffer_elements(0)[weight_copy(u)] for u, home in enumerate(schedule.homes)
    )
    messages = max(home.shard_size for home in schedule.homes) * 2 * (1 + nodes)
    more = 2 * sum(schedule.pool_elements(0, kind) - usual.pool_elements(0, kind) for kind in (Kind.WEIGHT, Kind.COPY))
    assert exact.buffer_bytes - plain.buffer_bytes == messages + more
    assert more <= 2 * nodes * sum(
        home.shard_size for home in schedule.homes[:1] + schedule.homes[-2:]
    )  # used once a step


# refusals


@pytest.mark.parametrize(
    ("nodes", "given", "reason"),
    [
        (2, {"strategy": "tawpipe-spread"}, "step_cache all"),
        (2, {"strategy": "tawpipe-striped", "step_cache": "all"}, "to each of the others"),
        (2, {"strategy": "tawpipe-whole"}, "to each of the others"),
        (2, {"strategy": "flat"}, "no copy of weights"),
        (2, {"strategy": "hsdp"}, "no copy of weights"),
        (2, {"strategy": "weipipe"}, "round the ring"),
        (2, {"strategy": "1f1b"}, "no copy of weights"),
        (2, {"strategy": "tawpipe-groups", "groups": "2n/2n/2n"}, "anew for every visit"),
        (2, {"strategy": "tawpipe-groups", "groups": "1n/1n/1n"}, "anew for every visit"),
        (2, {"strategy": "tawpipe-groups", "groups": "1/2/2"}, "no weights pass a link"),
        (4, {"strategy": "tawpipe-groups", "groups": "1n/2n/4n"}, "several hops"),
        (4, {"strategy": "tawpipe-groups", "groups": "2n/2n/4n"}, "several hops"),
        (2, {"strategy": "tawpipe-step", "host_homes": "all"}, "host_homes all"),
        (2, {"strategy": "tawpipe-step", "reuse": False, "step_cache": "all"}, "without reuse"),
    ],
)
def test_weights_compression_exact_is_refused_without_kept_copies(nodes, given, reason):
    with pytest.raises(UserError, match=reason) as refused:
        make(llama(6), nodes, 2, 4, weights_compression="exact", **given)
    assert refused.value.setting == "schedule.weights_compression" and "none" in str(refused.value)


@pytest.mark.parametrize("strategy", ["tawpipe-step", "tawpipe-groups", "1f1b"])
def test_weights_compression_exact_changes_nothing_on_one_node(strategy):
    """A run that goes on without the other machines must not end."""
    schedule = make(llama(3), 1, 2, 4, strategy=strategy, weights_compression="exact")
    assert schedule.programs == make(llama(3), 1, 2, 4, strategy=strategy).programs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_compression_exact_is_refused_for_other_dtypes_than_bf16(dtype):
    usual: dict[str, Any] = {"clip_norm": 1.0, "compile_layers": False, "quantize": "none"}
    chosen = ScheduleSettings(strategy="tawpipe-step", weights_compression="exact")
    refuse_settings(chosen, **usual, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"none with float(32|64).*or bfloat16"):
        refuse_settings(chosen, **usual, dtype=dtype)


# training

CASES = {"tied, frozen layers": {"topology": (2, 1), "tied": True, "frozen": True}}
MORE = {
    "adapters": {"topology": (2, 2), "lora": True, "delays": 1},
    "early": {"topology": (2, 1), "frozen": True, "early_updates": True, "clip_norm": None},
    "groups": {"topology": (2, 2), "strategy": "tawpipe-groups", "groups": "1n/1n/2n", "delays": 2},
    "a low rate": {"topology": (3, 1), "lr": 1e-5},
    "homes in the host's memory": {"topology": (2, 2), "host_homes": "state"},
    "adapters on 4 bits": {"topology": (2, 2), "lora": True, "quantize": "nf4"},
    "gradients in 8 bits": {"topology": (2, 1), "gradients_compression": "int8", "reduce_dtype": "same"},
}


def test_weights_compression_exact_changes_no_bit(pool, tmp_path):
    """Weights, moments, losses, norms after steps that change nothing, everything, or would not be finite; between
    them evaluations, a save and a load.
    """
    run_cases(pool, CASES, str(tmp_path))


@pytest.mark.slow
def test_weights_compression_exact_changes_no_bit_in_more_cases(pool, tmp_path):
    run_cases(pool, MORE, str(tmp_path))


@pytest.mark.slow
def test_exact_compression_changes_no_bit_in_200_steps(pool, tmp_path):
    """With coded weights and coded gradients: over skipped steps, evaluations, loads, a spike of the rate, and
    another plan from the half on.
    """
    coded = {"weights_compression": "exact", "gradients_compression": "exact"}
    assert pool.run("exact:long_runs", 2, 1, steps=200, folder=str(tmp_path), coded=coded, timeout_s=900) == [[], []]


@pytest.mark.parametrize(
    ("coded", "lr", "most"),
    [({}, 3e-4, 1.0), ({"weights_compression": "exact"}, 3e-4, 0.37), ({"weights_compression": "exact"}, 1e-5, 0.16)],
)
def test_sent_bytes_of_exact_weights_match_the_prediction(pool, coded, lr, most):
    """Before anything has changed by 4.4 bits a weight, then as in the last step."""
    for sent, said, expected, weights, gradients in pool.run("exact:moved", 2, 1, coded=coded, lr=lr):
        assert sent == pytest.approx(said, rel=0.03) and sent == pytest.approx(expected, rel=0.03) and gradients == 1
        assert weights <= most and bool(coded) == (weights < 1)


def test_corrupted_weight_copy_is_detected_and_restored(pool):
    results = pool.run("exact:spoiled", 2, 2)
    assert [healed for healed, _, _ in results] == [[], [2], [], [2]]  # the members of a rail
    assert all(not wrong and same for _, wrong, same in results)
