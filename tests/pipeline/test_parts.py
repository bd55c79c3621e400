"""The parts of a pipeline by themselves: arguments, rows, steps, their costs, limits and results, state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tawpipe
from cases import LENGTH, llama
from states import BATCHES, make
from tawpipe import CheckSettings, Pipeline, RunError, TrainingSettings, UserError
from tawpipe.model.chain import Chain
from tawpipe.model.weights import InitSource, ModuleSource
from tawpipe.pipeline.batch import Deal, LocalBatch
from tawpipe.pipeline.setup import first_values
from tawpipe.pipeline.sizes import widths_of
from tawpipe.pipeline.state import State
from tawpipe.pipeline.steps import Steps
from tawpipe.runtime.watch.limits import FACTOR
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings

FINE = {"told": False, "finite": True, "tokens": 8, "took_s": 0.0, "loss": 1.0, "grad_norm": 1.0}


def result(*, alike: bool = True, **changes: Any) -> Any:
    def require_alike() -> None:
        if not alike:
            raise UserError("batch", "different ones", "the same")

    return SimpleNamespace(**FINE | changes, wait=lambda: None, require_alike=require_alike)


def steps(skip_limit: int = 0, told: list[timedelta] | None = None) -> Steps:
    wiring: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0),
        training=TrainingSettings(skip_limit=skip_limit),
        timeout=timedelta(seconds=60),
        schedules=SimpleNamespace(settings=SimpleNamespace(early_updates=False)),
        executor=SimpleNamespace(drain=lambda: None, watchdog=SimpleNamespace(limit_s=0.0, ends=True)),
        transport=SimpleNamespace(set_timeout=[].append if told is None else told.append),
    )
    return Steps(wiring, Deal(2, 0, 1))


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with closing(make()) as trained:
        yield trained


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("clip_norm", 1.0, "training=tawpipe.TrainingSettings(clip_norm=1.0)"),
        ("check", "never", "checks=tawpipe.CheckSettings(check='never')"),
    ],
)
def test_former_argument_is_refused_with_its_new_place(name: str, value: Any, place: str) -> None:
    with pytest.raises(UserError) as refused:
        Pipeline(llama(torch.float32), **{name: value})
    assert str(refused.value) == f"{name}: got {value!r}; Pipeline({place})"
    assert isinstance(eval(place.split("=", 1)[1], {"tawpipe": tawpipe}), TrainingSettings | CheckSettings)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'clipnorm'"):
        Pipeline(llama(torch.float32), clipnorm=1.0)


def test_third_step_in_flight_checks_the_first_result() -> None:
    judged = steps()
    judged._recent.append(result(alike=False))
    judged.judge_recent()  # one may be ahead
    judged._recent.append(result())
    judged._recent.append(result(alike=False))
    with pytest.raises(UserError, match="batch: got 'different ones"):
        judged.judge_recent()
    judged.drain()  # the caller knows


def test_process_end_raises_errors_that_the_caller_has_not_seen() -> None:
    judged = steps()
    judged._recent.append(result(alike=False, told=True))
    judged.end()
    judged._recent.append(result(alike=False))
    with pytest.raises(UserError, match="batch: got 'different ones"):
        judged.end()


def test_nonfinite_steps_are_counted_and_refused_beyond_the_limit() -> None:
    judged, bad = steps(skip_limit=2), result(finite=False, loss=float("nan"))
    for taken in (bad, bad, result(), bad, bad):
        judged.judge(taken)
    assert judged.skipped == 2
    judged.judge(result(tokens=0))
    assert judged.without_labels == 1
    with pytest.raises(RunError, match=r"loss nan .* the update was skipped"):
        judged.judge(bad)
    judged.forget()
    assert judged.skipped == 0


def test_step_limits_reach_transport_and_watchdog() -> None:
    told: list[timedelta] = []
    limits = steps(told=told)
    watchdog = limits._wiring.executor.watchdog
    for _ in range(2):
        limits.took(100.0)
    assert told[-1] == timedelta(seconds=2 * 100 * FACTOR + 30)
    assert watchdog.limit_s == 100 * FACTOR and not watchdog.ends
    limits.watch(timedelta(seconds=5))
    assert watchdog.limit_s == 100 * FACTOR and watchdog.ends


def test_deal_reports_shape_tokens_and_busiest_rank_of_rows() -> None:
    deal = Deal(2, 1, 4)
    local = LocalBatch(11, 16, [])
    assert deal.form(local) == 6 and deal.tokens(local) == 32
    assert deal.busiest(local) == ([16] * 4, 1)  # two of the six micro-batches


def test_pipeline_deals_documents_only_with_bin_tokens(pipeline: Pipeline) -> None:
    with pytest.raises(UserError, match="bin_tokens: got 0"):
        pipeline.deal([3])


def test_costs_grow_with_tokens_and_need_no_link_on_one_process(pipeline: Pipeline) -> None:
    schedule = pipeline.schedule(4)
    less, more = (pipeline._steps.costs(schedule, tokens) for tokens in (LENGTH, 2 * LENGTH))
    assert 0 < less.activation_bytes < more.activation_bytes and not any(less.link_sent_bytes)


def test_schedule_allocates_its_buffers_once(pipeline: Pipeline) -> None:
    adopted = []
    adopt = pipeline.executor.adopt
    pipeline.executor.adopt = lambda schedule: adopted.append(schedule) or adopt(schedule)  # type: ignore[method-assign]
    assert pipeline.schedule(3) is pipeline.schedule(3) and len(adopted) == 1


def test_load_restores_the_step_number_after_a_broken_load(pipeline: Pipeline, tmp_path) -> None:
    state = pipeline._state
    assert isinstance(state, State)
    pipeline.step(BATCHES[0])
    pipeline.save(tmp_path / "one")
    pipeline.step(BATCHES[1])
    assert pipeline.step_number == 2
    state._whole = False
    with pytest.raises(RunError, match="half of a state"):
        pipeline.step(BATCHES[0])
    pipeline.load(tmp_path / "one")
    assert pipeline.step_number == 1


def test_initial_values_are_those_of_the_model_or_random() -> None:
    assert isinstance(first_values(Chain(llama(torch.float32)), None, 0), ModuleSource)
    with torch.device("meta"):
        assert isinstance(first_values(Chain(llama(torch.float32)), None, 0), InitSource)
    source: Any = object()
    assert first_values(Chain(llama(torch.float32)), lambda chain: source, 0) is source


def test_element_widths_follow_dtype_and_reduce_dtype() -> None:
    chain = Chain(llama(torch.float32))
    wide = widths_of(chain, torch.bfloat16, DEFAULT, 2)
    assert (wide.weight, wide.gradient, wide.master, wide.unpacked) == (2, 4, 4, 0)
    same = widths_of(chain, torch.bfloat16, ScheduleSettings(reduce_dtype="same"), 2, exact=4)
    assert (same.gradient, same.master, same.exact) == (2, 4, 4)
