"""The check ``rivals``: predicts, builds, times and frees all rows, and writes what was measured after each one."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from tawpipe.console import Console
from tawpipe.errors import RunError
from tawpipe.plan.machine.doctor import sent_bytes
from tawpipe.plan.machine.probe import probe
from tawpipe.prove.models import dtype_here, rows
from tawpipe.prove.operators import attention_seen
from tawpipe.prove.outcome import Outcome
from tawpipe.runtime.memory import give_back
from tawpipe.runtime.world import World
from tawpipe_lab.versus.clock import Deadline, grown_bytes, visible_bytes
from tawpipe_lab.versus.forecast import LIMIT_S, LOSS_TOKENS, ROWS, STEPS, config_of, forecast, total_s
from tawpipe_lab.versus.sides import Side, Task, build

PATIENCE_S, PATIENCE = 60.0, 10.0
"""Time limit of a part of the check: seconds, and a multiple of the expected seconds. After it the process ends."""
FORECAST_S = 300.0
AGREE = 0.02
"""Largest relative difference of losses of one step."""
Keep = Callable[[Outcome], None]
Row = dict[str, Any]


class Rivals:
    """One run of the check on this rank; every method but ``late`` is called on all ranks.

    Args:
        world: the processes.
        keep: writes an outcome.
        file: the user's file of ``--rival``, or "".
    """

    def __init__(self, world: World, keep: Keep, file: str) -> None:
        self.world, self.keep, self.file, self.began = world, keep, file, time.monotonic()
        self.numbers: dict[str, Any] = {}
        self.now = "the links"
        self.deadline = Deadline(self.late)

    def run(self) -> Outcome:
        """Predict, then measure the small model with alternating rows, then the large one twice; return the outcome."""
        console = Console(self.world.rank)
        console.line("rivals: measures the links and a layer first; some seconds")
        self._allow(FORECAST_S)
        machine, dtype = probe(self.world).machine, dtype_here(self.world)
        make = lambda: json.dumps(forecast(self.world, machine, dtype, file=bool(self.file)))  # noqa: E731
        self.numbers = json.loads(self.world.text_of_rank_0(make))
        self.keep(Outcome(None, "predicted, not measured", self.numbers))
        for line in announced(self.numbers):
            console.line(line)
        for name, facts in self.numbers["models"].items():
            config = config_of(self.world.device, (facts["hidden"], facts["layers"]))
            task = Task(config, ROWS, facts["length"], LOSS_TOKENS, dtype, self.world)
            of_model = [row for row in self.numbers["rows"] if row["model"] == name]
            single = [[row] for row in of_model]
            for group in [of_model] if name == "small" else [*single, *reversed(single)]:
                self._measure([row for row in group if self._in_time(row)], task)
        self.deadline.close()
        return self.outcome()

    def late(self) -> None:
        """Write what was measured, as a failure; called when a part takes longer than its limit."""
        words = f"{self.now}: time limit reached; a process may have ended or be stuck"
        print(f"rivals: {words}", file=sys.stderr)
        self.keep(Outcome(False, words, self.numbers))

    def outcome(self) -> Outcome:
        """Return the outcome: it holds if no row failed and the losses of all rows agree."""
        every, left_out = self.numbers["rows"], self.numbers["left_out"]
        for row in every:
            _, timed, passes = STEPS[row["model"]]
            if "failed" not in row and len(row.get("seconds", ())) < timed * passes:
                words = f"{len(row.get('seconds', ()))} of {timed * passes} steps timed; {LIMIT_S:.0f} s allow no more"
                left_out[f"{row['model']}: {row['name']}"] = words
        worst = self.numbers["losses_differ"] = disagreement(every)
        words, failed = [f"losses differ by {worst:.1e}"], [row["name"] for row in every if "failed" in row]
        for name in self.numbers["models"]:
            measured = sorted((row["median"], row["name"]) for row in every if row["model"] == name and "median" in row)
            words += [f"{name}: " + ", ".join(f"{label} {seconds:.3g} s" for seconds, label in measured)]
        words += [f"failed: {', '.join(failed)}"] if failed else []
        words += [f"left out, or with fewer steps: {', '.join(left_out)}"] if left_out else []
        return Outcome(worst < AGREE and not failed, "; ".join(words), self.numbers)

    def _allow(self, seconds: float) -> None:
        """Allow ``seconds`` for the next part of the check, but no more than is left of the whole check."""
        self.deadline.allow(min(seconds, self.began + LIMIT_S + PATIENCE_S - time.monotonic()))

    def _measure(self, group: Sequence[Row], task: Task) -> None:
        """Build the rows of a group, train steps of each in turn, and free them."""
        give_back(task.world.device)  # of the group before, which nothing refers to any more
        sides = list[tuple[Row, Side]]()
        for row in group:
            self.now = f"{row['model']} model, {row['name']}"
            self._allow(PATIENCE_S + PATIENCE * self.numbers["models"][row["model"]]["build_s"])
            if (side := self._attempt(row, partial(build, row, task, self.file))) is not None:
                sides.append((row, side))
        warm, timed, _ = STEPS[group[0]["model"]] if group else (0, 0, 0)
        for number in range(warm + timed):
            if self._late(0.0):  # rows have fewer steps then
                break
            for row, side in sides:
                if "failed" not in row:
                    self._step(row, side, task, number, timed=number >= warm)
                    self.keep(Outcome(None, "not ended", self.numbers))
        for row, side in sides:
            if "median" in row:
                predicted = f" (predicted {row['predicted']['seconds']:.3g} s)" if row["predicted"] else ""
                timed_so_far = f"{row['median']:.3g} s per step{predicted}"
                Console(self.world.rank).line(f"rivals: {row['model']} model, {row['name']}: {timed_so_far}")
            if pipeline := getattr(side, "pipeline", None):
                pipeline.close()

    def _expected(self, row: Row) -> float:
        """Return the expected seconds of a step: predicted (or the longest), times measured by predicted."""
        predicted = [row for row in self.numbers["rows"] if row["predicted"]]
        ratios = [each["median"] / each["predicted"]["seconds"] for each in predicted if "median" in each]
        some = [row] if row["predicted"] else predicted
        return max(1.0, statistics.median(ratios or [1.0])) * max(each["predicted"]["seconds"] for each in some)

    def _late(self, seconds: float) -> bool:
        """Return True if work of ``seconds`` would end after the limit, by the clock of rank 0."""
        return self.world.gather_numbers(time.monotonic() - self.began + seconds)[0] > LIMIT_S

    def _in_time(self, row: Row) -> bool:
        """Return True if one more build of a row and its steps should end in time."""
        name = row["model"]
        total = total_s(name, [self._expected(row)], self.numbers["models"][name]["build_s"]) / STEPS[name][2]
        return not self._late(total) and "failed" not in row

    def _attempt(self, row: Row, act: Callable[[], Any]) -> Any:
        """Call ``act`` on all ranks; return its value, or None if it fails on a rank, and name its error in the row."""
        values = []

        def tried() -> None:
            try:
                values.append(act())
            except Exception as error:
                print(f"rivals: {row['name']}: {type(error).__name__}: {error}", file=sys.stderr)
                raise RunError(type(error).__name__) from error

        try:
            self.world.together(tried)
        except RunError as error:
            row["failed"] = str(error)
        return None if "failed" in row else values[0]

    def _step(self, row: Row, side: Side, task: Task, number: int, *, timed: bool) -> None:
        """Train one step of a row on the batch of this number, and add what was measured to the row."""
        world, device, train = self.world, self.world.device, partial(side.step, batch(task, number))
        self.now = f"{row['model']} model, {row['name']}, step {number + 1}"
        self._allow(PATIENCE_S + PATIENCE * self._expected(row))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seen = attention_seen(getattr(side, "on_compute", lambda run: run())) if number == 0 else nullcontext([])
        world.barrier()
        before, begin = sent_bytes(), time.perf_counter()
        with seen as operators:
            loss = self._attempt(row, train) if number == 0 else train()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        seconds = max(world.gather_numbers(time.perf_counter() - begin))
        world.barrier()
        first = world.machines.local_of(world.rank) == 0
        moved = max(world.gather_numbers(grown_bytes(before, sent_bytes()) if first else 0.0))
        if "failed" in row:
            return
        row.setdefault("attention", operators)
        row.setdefault("losses", []).append(statistics.fmean(world.gather_numbers(float(loss))))
        if not timed:
            return
        row.setdefault("seconds", []).append(seconds)
        row.setdefault("counted", []).append(moved)
        row["median"] = statistics.median(row["seconds"])
        row["spread"] = (max(row["seconds"]) - min(row["seconds"])) / row["median"]
        predicted = row["predicted"]["bytes"] if row["predicted"] else 0
        row["bytes"] = visible_bytes(statistics.median(row["counted"]), predicted)
        if device.type == "cuda" and row["model"] == "large":  # rows of the small model are in memory together
            row["gib"] = max(world.gather_numbers(torch.cuda.max_memory_allocated(device) / 2**30))


def batch(task: Task, number: int) -> torch.Tensor:
    """Return the tokens of step ``number``, [rows of all processes, tokens], equal on every rank."""
    return rows(task.config, task.rows * task.world.size, task.length, seed=number)["input_ids"]


def announced(numbers: dict[str, Any]) -> Iterator[str]:
    """Yield lines for the user: bytes over the link, seconds and memory of what follows."""
    every = [row for row in numbers["rows"] if row["predicted"]]
    times = {name: (warm + timed) * passes for name, (warm, timed, passes) in STEPS.items()}
    moved = sum(row["predicted"]["bytes"] * times[row["model"]] for row in every)
    seconds = sum(facts["total_s"] for facts in numbers["models"].values())
    held = {n: [row["predicted"]["gib"] for row in every if row["model"] == n] for n in numbers["models"]}
    most = max(sum(values) if name == "small" else max(values, default=0.0) for name, values in held.items())
    yield f"rivals: about {moved / 1e9:.3g} GB over each node's link, {seconds:.0f} s (at most {LIMIT_S:.0f} s)"
    yield f"rivals: up to {most:.1f} GiB of tensors on each device; files: --out and a page beside it"
    for name, facts in numbers["models"].items():
        yield f"rivals: {name} model: {facts['parameters'] / 1e6:,.1f} M parameters, {facts['tokens']:,} tokens a step"
    yield from (f"rivals: left out: {name}: {why}" for name, why in numbers["left_out"].items())


def disagreement(every: Sequence[Row]) -> float:
    """Return the largest relative difference of the losses of rows of one model at one step.

    Step numbers count from the build of a side; a second build repeats the losses of the first.
    """
    losses: dict[tuple[str, int], list[float]] = {}
    for row in every:
        for number, loss in enumerate(row.get("losses", ())):
            losses.setdefault((row["model"], number % sum(STEPS[row["model"]][:2])), []).append(loss)
    return max(((max(some) - min(some)) / max(map(abs, some)) for some in losses.values()), default=0.0)


def rivals(world: World, keep: Keep, *, file: str) -> Outcome:
    """Compare our strategies with FSDP2 and a user's loop on these processes. Call on all ranks.

    After an error the deadline stays active, so that a rank which then waits for others ends, too.

    Raises:
        RunError: a part of the check has failed, for example because another process has ended.
    """
    run = Rivals(world, keep, file)
    try:
        return run.run()
    except Exception as error:
        run.deadline.allow(PATIENCE_S)
        print(f"rivals: {type(error).__name__}: {error}", file=sys.stderr)
        words = f"{run.now}: ended by {type(error).__name__}; another process or a link may have failed"
        raise RunError(words) from error
