"""Checks of speed: the attention kernel, measured against predicted step time, and the cost of offloading."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig

from tawpipe.model.attention.attention_kernel import kernel_of_model
from tawpipe.model.flops import chain_flops, mfu, peak_flops
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings
from tawpipe.plan.cost.bench import Bench, Case
from tawpipe.plan.cost.measure import Asked, device_name, request_of
from tawpipe.plan.cost.predict import predict
from tawpipe.plan.cost.profile import clock_mhz, heat
from tawpipe.plan.machine.probe import probe
from tawpipe.prove.models import dtype_here, on_meta, rows, seeded_model, sized
from tawpipe.prove.operators import attention_seen
from tawpipe.prove.outcome import Outcome
from tawpipe.runtime.memory import give_back
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings

LIMIT = 0.15
TOKENS = {"cpu": 512, "cuda": 8192}
PER_DEVICE = 2
STEPS = 5
LAYER = 1
"""Block that is run by itself."""
QUICKER = "would be faster"
"""Text in the name of a kernel if a faster one is missing."""


@dataclass(frozen=True)
class TimedStep:
    """Times of one step, which was waited for until all of it had ended.

    Args:
        seconds: from the call until everything had ended.
        computing_s: part of ``seconds`` in which the device of this process computed. The rest it waited for transfers
            or the host.
        issuing_s: part of ``seconds`` in which the host issued the step.
        loss: loss of the step.
    """

    seconds: float
    computing_s: float
    issuing_s: float
    loss: float


def kernel(world: World) -> Outcome:
    """Report the name of the attention kernel of a plain Llama; the outcome always holds.

    It is a hint if a missing package makes the kernel slower. The attention operators of a layer are reported, too, for
    a row of one document and for packed documents."""
    config, dtype, tokens = sized(world.device), dtype_here(world), TOKENS[world.device.type]
    name = kernel_of_model(config, [], world.device, dtype)
    bench = Bench(on_meta(config), world.device, dtype, tokens)
    ran: dict[str, list[str]] = {}
    for what, documents in (("one document", [tokens]), ("packed documents", [tokens // 4, tokens - tokens // 4])):
        with bench.case(LAYER, documents) as case, attention_seen() as ran[what]:
            forward_and_backward(bench, case)
    return Outcome(True, name, {"kernel": name, "attention": ran}, hint=QUICKER in name)


def forward_and_backward(bench: Bench, case: Case) -> None:
    """Run one layer forward and backward, as training without recomputation does."""
    leaf = case.hidden.detach().requires_grad_()
    with torch.enable_grad():
        output = bench.chain.layer(LAYER, leaf, case.calls)
    torch.autograd.backward(output, case.hidden)


def warm_up(run: Callable[[], None], device: torch.device) -> None:
    """Run ``run`` repeatedly until a GPU has the clock rate that it has in training. Do nothing on a CPU."""

    def finished() -> None:
        run()
        torch.cuda.current_stream(device).synchronize()

    if device.type == "cuda":
        heat(finished)


def step(world: World) -> Outcome:
    """Check that a step of ``tawpipe-spread`` takes the predicted time, with a relative error below ``LIMIT``.

    The prediction uses a measured profile and measured links. The MFU is reported, too. On a CPU, the check is not
    decided. Call on all ranks."""
    config, dtype, tokens = sized(world.device), dtype_here(world), TOKENS[world.device.type]
    settings = ScheduleSettings(micro_batches_per_visit=PER_DEVICE)
    machine = probe(world).machine
    predicted, chain = 0.0, on_meta(config)
    if world.rank == 0:
        batch = Asked(tokens, PER_DEVICE * world.size, dtype=dtype, profile="measure", settings=settings)
        asked = request_of(chain, machine, batch, here=world.device)
        predicted = predict(asked, asked.step(settings)).step_seconds
    steps, clocks = _steps(world, config, dtype, settings, tokens)
    measured = statistics.median(timed.seconds for timed in steps)
    computing = statistics.median(timed.computing_s for timed in steps)
    issuing = statistics.median(timed.issuing_s for timed in steps)
    flops = (chain_flops(chain, [tokens]) or 0.0) * PER_DEVICE * world.size
    peak = peak_flops(device_name(world.device), str(dtype).removeprefix("torch."))
    used = mfu(flops, measured, peak=peak, num_devices=world.size)
    error = predicted / measured - 1
    numbers = {
        "tokens_per_device": PER_DEVICE * tokens,
        "seconds": measured,
        "predicted_seconds": predicted,
        "error": error,
        "computing_seconds": computing,
        "waiting_seconds": measured - computing,
        "issuing_seconds": issuing,
        "clock_mhz": clocks,
        "tokens_per_second_per_device": PER_DEVICE * tokens / measured,
        "mfu": used,
        "dtype": str(dtype),
    }
    note = f"{measured:.3f} s, predicted {predicted:.3f} s ({error:+.1%})" + (f", MFU {used:.0%}" if used else "")
    note += f"; {computing:.3f} s of it computing, issued in {issuing:.3f} s"
    # On a CPU, processes that share a processor slow each other down; the plan does not include that.
    return Outcome(abs(error) < LIMIT if world.device.type == "cuda" else None, note, numbers)


def offload(world: World) -> Outcome:
    """Check that losses are unchanged if all layer inputs wait in CPU memory; report the ratio of step times."""
    config, dtype, tokens = sized(world.device), dtype_here(world), TOKENS[world.device.type]
    taken, losses = [], []
    for layers in (0, config.num_hidden_layers):
        settings = ScheduleSettings(micro_batches_per_visit=PER_DEVICE, offloaded_layers=layers)
        steps, _ = _steps(world, config, dtype, settings, tokens)
        taken.append(statistics.median(timed.seconds for timed in steps))
        losses.append([timed.loss for timed in steps])
    ratio = taken[1] / taken[0]
    note = f"{ratio:.2f} of the time, losses {'equal' if losses[0] == losses[1] else 'differ'}"
    return Outcome(losses[0] == losses[1], note, {"seconds": taken, "losses": losses})


def _warm_up(config: LlamaConfig, device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    """Compute a layer repeatedly until a GPU has the clock rate of a training run; free its memory at the end."""
    bench = Bench(on_meta(config), device, dtype, tokens)
    with bench.case(LAYER, [tokens]) as case:
        warm_up(partial(forward_and_backward, bench, case), device)


def _steps(
    world: World, config: LlamaConfig, dtype: torch.dtype, settings: ScheduleSettings, tokens: int
) -> tuple[list[TimedStep], list[int]]:
    """Train ``STEPS`` steps, waiting after each one until all of it has ended, and time them. Call on all ranks.

    Returns:
        All steps but the first two; and the clock rate of the device in MHz before the first and after the last step.
    """
    with torch.device("meta"):
        model: Any = seeded_model(config)
    if world.device.type == "cuda":
        _warm_up(config, world.device, dtype, tokens)
        give_back(world.device)
    pipeline = Pipeline(model, schedule=settings, dtype=dtype, checks=CheckSettings(check="never"), world=world)
    steps, clocks = list[TimedStep](), [clock_mhz(world.device)]
    try:
        for number in range(STEPS):
            batch = rows(config, PER_DEVICE * world.size, tokens, seed=number)
            pipeline.drain()
            world.gather_numbers(0.0)
            computed, began = pipeline.executor.compute_s, time.perf_counter()
            result = pipeline.step(batch)
            issued = time.perf_counter() - began
            pipeline.drain()
            seconds = time.perf_counter() - began
            steps.append(TimedStep(seconds, pipeline.executor.compute_s - computed, issued, result.loss))
        clocks.append(clock_mhz(world.device))
    finally:
        pipeline.close()
    return steps[2:], clocks
