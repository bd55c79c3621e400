"""What a library user sees who prints a result: a few lines that say what it is."""

from __future__ import annotations

import re

from plan_requests import plan_request, search_only
from states import ALONE, BATCHES
from tawpipe import MicroBatch, Pipeline, RunError, StepResult
from tawpipe.plan.search.plan import Plan
from tawpipe.runtime.lanes import Failure


def test_pipeline_repr_shows_model_strategy_and_steps(pipeline: Pipeline) -> None:
    first, *rest = repr(pipeline).splitlines()
    assert re.fullmatch(r"Pipeline\(LlamaForCausalLM: [\d,]+ parameters", first)
    assert rest == [
        "  tawpipe-spread, micro-batches of 1 row, float32",
        "  1 process = 1 node x 1 on cpu",
        "  1 step done)",
    ]


def test_step_result_repr_shows_its_numbers(pipeline: Pipeline) -> None:
    result = pipeline.step(BATCHES[0])
    numbers = f"loss {result.loss:.4f}, grad norm {result.grad_norm:.3g}, {result.tokens} tokens"
    assert repr(result) == f"StepResult({numbers})"
    evaluated = pipeline.evaluate(BATCHES[0])
    assert repr(evaluated) == f"StepResult(loss {evaluated.loss:.4f}, {evaluated.tokens} tokens)"


def test_failed_step_result_repr_shows_the_error() -> None:
    class Broken:
        done = True

        def wait(self) -> None:
            raise RunError("rank 1 is gone")

    assert repr(StepResult(Broken(), None, None, Failure())) == "StepResult(failed: rank 1 is gone)"  # type: ignore[arg-type]


def test_schedule_costs_and_batch_reprs_fit_on_a_line(pipeline: Pipeline) -> None:
    assert re.fullmatch(
        r"Schedule\(tawpipe-spread: 4 micro-batches, \d+ actions; 1 process = 1 node x 1\)", repr(pipeline.schedule(4))
    )
    words = repr(pipeline.costs(4, 16))
    assert words.startswith("Costs(tawpipe-spread: MiB of a process: home ") and "\n" not in words
    assert repr(ALONE) == "World(rank 0 of 1 process = 1 node x 1, cpu)"
    rows = MicroBatch.from_rows(BATCHES[0]["input_ids"][:1], BATCHES[0]["labels"][:1])
    assert re.fullmatch(r"MicroBatch\(1 x \d+ tokens, 1 documents, \d+ labels that count\)", repr(rows))


def test_plan_repr_shows_the_choice_and_its_reason() -> None:
    asked = plan_request(global_batch=4)
    plan = Plan.of(asked, search_only(asked))
    assert plan.chosen is not None
    assert repr(plan) == f"Plan({plan.chosen!r} of {len(plan.candidates)}\n  {plan.reason})"
    assert re.fullmatch(r"Candidate\([\w-]+: [\d.]+ m?s a step, [\d.]+ GiB\)", repr(plan.chosen))
    assert repr(Plan.of(asked, [])).startswith("Plan(nothing chosen\n  no strategy can run")
