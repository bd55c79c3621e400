"""Checks of stalls: of the thread that issues all actions, and of a layer while transfers run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tawpipe.errors import RunError
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.pipeline.setup import CheckSettings
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.profile import clock_mhz
from tawpipe.prove.models import dtype_here, on_meta, rows, seeded_model, sized, small, ways
from tawpipe.prove.operators import attention_seen
from tawpipe.prove.outcome import Outcome, each_way
from tawpipe.prove.speed import LAYER, TOKENS, forward_and_backward, warm_up
from tawpipe.runtime.memory import give_back
from tawpipe.runtime.transport.transport import FAR_BLOCKS, NEAR_BLOCKS, make_group
from tawpipe.runtime.world import World

LENGTH = 48
MOST_LOST = 0.15
"""Maximum share of a layer's time that a transfer may cost."""
LEAST_S = 0.5
GATHERED = 1 << 26
"""Number of elements that all ranks gather together."""
ALIKE = 8
"""Number of runs in a series, equal on all ranks."""


def waits(world: World) -> Outcome:
    """Check that no thread waits for the device in the second step of several ways to train. Call on all ranks.

    torch raises an error for every wait that it knows. Copies to the device must come from page-locked memory, because
    torch does not report the wait of other copies."""
    every = ways(small().num_hidden_layers, LENGTH // 3)
    faults: dict[str, list[str]] = {}
    ran: dict[str, list[str]] = {}

    def lead(name: str) -> float:
        """Train two steps; return the seconds from the end of issuing the second one until its result was there."""
        with closing(
            Pipeline(seeded_model(small()), schedule=every[name], checks=CheckSettings(check="never"), world=world)
        ) as pipeline:
            with attention_seen(pipeline.executor.on_compute) as ran[name]:
                pipeline.step(rows(small(), 2 * world.size, LENGTH))
                pipeline.drain()
            with no_waiting(), unpinned_copies() as copies:
                result = pipeline.step(rows(small(), 2 * world.size, LENGTH, seed=1))
            issued = time.perf_counter()
            result.wait()
            seconds = time.perf_counter() - issued
            pipeline.drain()
        if copies:
            faults[name] = sorted(set(copies))
        return seconds

    leads, refused = each_way(every, lead)
    note = f"{len(leads)} ways to train, none of which waits" if leads else "nothing runs here"
    if faults:
        name, words = next(iter(faults.items()))
        note = f"copies that wait for the device under {', '.join(faults)}: {words[0]} ({len(words)} such under {name})"
    numbers = {"lead_s": leads, "faults": faults, "refused": refused, "attention": ran}
    return Outcome(bool(leads) and not faults, note, numbers)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise an error within the context when the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise RunError(str(error)) from error  # its text names the operation, and stands in the file
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def unpinned_copies() -> Iterator[list[str]]:
    """Record copies between the device and memory that is not page-locked, within the context.

    The yielded list gets a description of each copy when it is made.
    """
    copies: list[str] = []
    to, copy = Tensor.to, Tensor.copy_

    def note(host: Tensor) -> None:
        if not host.is_pinned() and host.numel():
            copies.append(
                f"{tuple(host.shape)} of {str(host.dtype).removeprefix('torch.')} from memory that is not pinned"
            )

    def watched_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        targets = [*args, kwargs.get("device")]
        if self.device.type == "cpu" and any(_kind(target) == "cuda" for target in targets):
            note(self)
        return to(self, *args, **kwargs)

    def watched_copy(self: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kinds = self.device.type, source.device.type
        if set(kinds) == {"cpu", "cuda"}:
            note(self if kinds[0] == "cpu" else source)
        return copy(self, source, *args, **kwargs)

    with patch.object(Tensor, "to", watched_to), patch.object(Tensor, "copy_", watched_copy):
        yield copies


def _kind(target: Any) -> str:
    """Return the device type that an argument of ``Tensor.to`` names, or an empty text."""
    if isinstance(target, Tensor):
        return target.device.type
    return getattr(target, "type", "") or (str(target).split(":")[0] if isinstance(target, str) else "")


def beside(world: World) -> Outcome:
    """Check that transfers lengthen a layer by less than ``MOST_LOST``. Call on all ranks.

    A layer is timed alone, next to a receive whose message does not arrive, and next to gathers of all ranks. The clock
    rate of the device before and after is reported. On a CPU, the check is not decided."""
    limit = timedelta(minutes=10)
    mate = world.rank ^ 1
    everyone = [list(range(world.size))]
    named = {"receive": FAR_BLOCKS[1], "send": FAR_BLOCKS[1], "gather": NEAR_BLOCKS}
    groups = {
        name: make_group(everyone, world.rank, world.device, timeout=limit, blocks=blocks, name=f"beside {name}")
        for name, blocks in named.items()
    }
    config, dtype, tokens = sized(world.device), dtype_here(world), TOKENS[world.device.type]
    bench = Bench(on_meta(config), world.device, dtype, 1024)
    seconds: dict[str, float] = {}
    clocks = [clock_mhz(world.device)]
    try:
        with bench.case(LAYER, [tokens]) as case:
            run = partial(forward_and_backward, bench, case)
            warm_up(run, world.device)
            seconds["alone"] = _timed(run, world)
            seconds["beside a receive"] = _beside_a_receive(run, world, mate, groups)
            seconds["beside gathers"] = _beside_gathers(run, world, groups["gather"])
    finally:
        for group in groups.values():
            dist.destroy_process_group(group)
        give_back(world.device)
    clocks.append(clock_mhz(world.device))
    lost = {name: value / seconds["alone"] - 1 for name, value in seconds.items() if name != "alone"}
    worst = {name: max(world.gather_numbers(value)) for name, value in lost.items()}
    note = f"{seconds['alone'] * 1e3:.1f} ms alone, " + ", ".join(
        f"{value:+.1%} {name}" for name, value in worst.items()
    )
    holds = max(worst.values()) < MOST_LOST if world.device.type == "cuda" else None  # CPU threads share processors
    factor = round(1 + max(0.0, *worst.values()), 3)
    if holds is not None and factor > 1:
        note += f"; a plan counts it with `device: {{beside: {factor}}}` in the topology file"
    return Outcome(holds, note, {"seconds": seconds, "lost": worst, "beside": factor, "clock_mhz": clocks})


def _timed(run: Callable[[], None], world: World) -> float:
    """Return the seconds of one call of ``run``: the median of three series, each of which repeats it for some time."""
    _series(run, world, 1)
    times = max(1, int(LEAST_S / 3 / max(_series(run, world, 1), 1e-6)))
    return statistics.median(_series(run, world, times) for _ in range(3))


def _series(run: Callable[[], None], world: World, times: int) -> float:
    """Call ``run`` ``times`` times, wait until all of it is computed, and return the mean seconds of a call."""
    begin = time.perf_counter()
    for _ in range(times):
        run()
    _finish(world)
    return (time.perf_counter() - begin) / times


def _finish(world: World) -> None:
    """Wait until the stream that computes is idle. Other streams are not waited for."""
    if world.device.type == "cuda":
        torch.cuda.current_stream(world.device).synchronize()


def _beside_a_receive(run: Callable[[], None], world: World, mate: int, groups: dict[str, dist.ProcessGroup]) -> float:
    """Return the seconds of one call of ``run`` (``_timed``) while a receive waits for a message of another rank.

    Ranks form pairs. The messages are sent after both ranks of each pair have measured, on another communicator. With
    an odd number of ranks, the last one measures without a receive. Call on all ranks."""
    if mate >= world.size:  # with an odd number of ranks, the last one has no partner
        seconds = _timed(run, world)
        world.barrier()
        return seconds
    outbound, here = ("send", "receive") if world.rank % 2 else ("receive", "send")
    message, answer = torch.zeros(2, 1 << 20, device=world.device)
    for group in (groups["receive"], groups["send"]):  # make the connections now, as both ranks are needed for that
        pair = [dist.P2POp(dist.isend, answer, mate, group), dist.P2POp(dist.irecv, message, mate, group)]
        for request in dist.batch_isend_irecv(pair):
            request.wait()
    work = dist.irecv(message, mate, group=groups[here])
    assert work is not None
    seconds = _timed(run, world)
    world.barrier()
    dist.send(answer, mate, group=groups[outbound])
    work.wait()
    return seconds


def _beside_gathers(run: Callable[[], None], world: World, group: dist.ProcessGroup) -> float:
    """Issue an all-gather before each of ``ALIKE`` calls of ``run``; return the mean seconds of a call.

    A call does not wait for its gather. All gathers have ended when this returns. Call on all ranks."""
    size = (GATHERED if world.device.type == "cuda" else 1 << 16) // world.size
    part, all_of_them = (torch.zeros(count, device=world.device) for count in (size, size * world.size))
    pending: list[Any] = []

    def both() -> None:
        pending.append(dist.all_gather_into_tensor(all_of_them, part, group=group, async_op=True))
        run()

    try:
        _series(both, world, 1)
        return _series(both, world, ALIKE)
    finally:
        for work in pending:
            work.wait()
