"""Longest row on which every strategy can train: one document of as many tokens as fit in memory.

A schedule does not depend on the length of rows, and its memory grows with their tokens. So the schedules of a strategy
are built once, with the settings that need the least memory. Then memory is computed for one length after another, and
only the result is simulated. Whole rows or chunks are chosen for every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, isqrt
from typing import Any

from tawpipe.console import columns, progress, span
from tawpipe.errors import UserError
from tawpipe.model.attention.attention_kernel import FIXED
from tawpipe.model.flops import mfu
from tawpipe.plan.cost.feasible import DEVICE, LEAN, fits, lacking, relieved, resized, shortage, unplayed, with_settings
from tawpipe.plan.cost.predict import Needs, Prediction, memory_of, memory_quickly, predict, short_schedule
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.plan import held, of_ranks
from tawpipe.plan.search.plan_file import settings_of
from tawpipe.plan.search.refused import in_plain_words
from tawpipe.schedule.settings import DEFAULT
from tawpipe.schedule.step import Schedule, StepSpec, Strategy
from tawpipe.schedule.strategies.table import strategies

POSITIONS = "the model's positions"
SHORTEST = 2
"""Tokens of the shortest row that is tried."""
USUAL = {name: getattr(DEFAULT, name) for name in ("look_ahead", "gradient_buffers")}
"""Buffer settings that are used if memory suffices for them at the longest row."""
PRECISION = 0.005
"""Relative precision with which the length is found."""
NEAR = 0.01
"""Relative difference below which two lengths count as equal."""


def limit_of(tokens: int) -> str:
    """Return the words for the limit of ``tokens`` tokens at which a search stops, although longer rows would fit."""
    return f"a limit of {tokens:,} tokens"


@dataclass(frozen=True)
class LongestRow:
    """Longest row of one strategy.

    Args:
        strategy: name of the strategy.
        tokens: tokens of the row; 0 if none fits or the strategy cannot be simulated, and ``why_not`` gives the reason.
        binds: the limit that prevents longer rows: ``DEVICE``, ``HOST``, ``FILES``, ``POSITIONS`` or ``limit_of``.
        request: request for rows of this length.
        step: step with the settings for this length.
        prediction: predicted time and memory of ``step``.
        other_seconds: seconds of a step with whole rows if ``step`` has chunks, else with chunks; None if these do not
            fit at this length or cannot be used.
        why_not: reason why there is no row, or ``""``.
    """

    strategy: str
    tokens: int = 0
    binds: str = ""
    request: PlanRequest | None = None
    step: StepSpec | None = None
    prediction: Prediction | None = None
    other_seconds: float | None = None
    why_not: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one device."""
        if self.request is None or self.prediction is None:
            return 0.0
        of_step = self.tokens * self.request.global_batch
        return of_step / self.prediction.step_seconds / self.request.topology.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of a step, from 0 to 1; None if FLOPs or the device's peak are not known."""
        if self.request is None or self.prediction is None or not self.request.flops:
            return None
        devices, peak = self.request.topology.world_size, self.request.peak_flops
        return mfu(self.request.flops, self.prediction.step_seconds, peak=peak, num_devices=devices)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers for JSON, under the names that candidates of a plan have."""
        prediction = self.prediction
        return {
            "strategy": self.strategy,
            "tokens": self.tokens,
            "rows": self.request.global_batch if self.request else None,
            "sequence_length": self.tokens,
            "sequence_chunk": self.step.settings.sequence_chunk if self.step else None,
            "sequence_ranks": self.step.sequence_ranks if self.step else None,
            "offloaded_layers": self.step.settings.offloaded_layers if self.step else None,
            "binds": self.binds,
            "knobs": settings_of(self.step) if self.step else {},
            "step_seconds": prediction.step_seconds if prediction else None,
            "tokens_per_second_per_device": self.tokens_per_second if prediction else None,
            "mfu": self.mfu,
            "other_rows_step_seconds": self.other_seconds,
            "peak_gib": prediction.peak_bytes / 2**30 if prediction else None,
            "memory_gib": {name: size / 2**30 for name, size in prediction.memory.items()} if prediction else None,
            "host_gib": prediction.needs.host / 2**30 if prediction else None,
            "files_gib": prediction.needs.files / 2**30 if prediction else None,
            "why_not": self.why_not,
        }

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table, with one text per column of ``HEAD``."""
        if self.prediction is None or self.step is None or self.request is None:
            return self.strategy, *["-"] * (len(HEAD) - 3), self.binds, self.why_not
        prediction, settings = self.prediction, self.step.settings
        shown = [f"{name} {getattr(settings, name)}" for name in ("look_ahead", "gradient_buffers")]
        shown += [f"host_homes {settings.host_homes}"] * (settings.host_homes == "state")
        shown += [f"recompute {settings.recompute}"] * (settings.recompute != "full")
        if self.other_seconds is not None:
            shown.append(f"{'whole rows' if settings.sequence_chunk else 'chunks'}: {span(self.other_seconds)}")
        numbers = (
            f"{self.tokens:,}",
            f"{self.request.global_batch:,}",
            f"{settings.sequence_chunk:,}" if settings.sequence_chunk else "whole",
            str(self.step.sequence_ranks),
            f"{settings.offloaded_layers} of {self.step.model.num_layers}",
            span(prediction.step_seconds),
            f"{self.tokens_per_second:,.0f}",
            "-" if self.mfu is None else f"{self.mfu:.1%}",
            f"{prediction.peak_bytes / 2**30:.2f}",
            f"{prediction.needs.host / 2**30:.1f}",
            f"{prediction.needs.files / 2**30:.1f}",
        )
        return self.strategy, *numbers, self.binds, ", ".join(shown)


HEAD = (
    "strategy",
    "longest row",
    "rows",
    "chunk",
    "devices per row",
    "layers offloaded",
    "step",
    "tokens/s/device",
    "MFU",
    "GiB",
    "host GiB/node",
    "files GiB/node",
    "limited by",
    "settings",
)
ASSUMPTIONS = (
    "One document per row, one row at a time; micro_batches_per_visit 1, recompute full unless named, and the settings "
    "below."
)


@dataclass(frozen=True)
class Longest:
    """Longest row of every strategy, longest first.

    Args:
        request: request for the longest rows that are considered.
        rows: one entry for every strategy.
    """

    request: PlanRequest
    rows: tuple[LongestRow, ...]

    def __repr__(self) -> str:
        return f"Longest({self.reason})"

    @classmethod
    def of(cls, request: PlanRequest, *, ends: str = POSITIONS) -> Longest:
        """Search the longest row of every strategy that is no pipeline; prints a line for each.

        Pipelines are left out, because they keep several whole rows at one time.

        Args:
            request: request with micro-batches of one row, as long as rows may be.
            ends: name of the limit that the length of ``request`` stands for.
        """
        rows = []
        for strategy in strategies().values():
            ways = strategy.layouts(request.topology)
            if strategy.candidate and any(way.divided_over(request.topology) == 1 for way in ways):
                rows.append(_longest_of(request, strategy, ends))
                words = rows[-1].why_not or f"{rows[-1].tokens:,} tokens, limited by {rows[-1].binds}"
                progress.info(f"{strategy.name}: {words}")
        return cls(request, tuple(sorted(rows, key=lambda row: (-row.tokens, -row.tokens_per_second))))

    @property
    def best(self) -> LongestRow | None:
        """Longest row of all strategies; None if none fits."""
        return self.rows[0] if self.rows and self.rows[0].tokens else None

    @property
    def fastest(self) -> LongestRow | None:
        """Row with the most tokens per second among the longest; None if none fits.

        Only rows whose length is within ``NEAR`` of the longest are compared."""
        if self.best is None:
            return None
        near = (row for row in self.rows if row.tokens >= self.best.tokens * (1 - NEAR))
        return max(near, key=lambda row: row.tokens_per_second)

    @property
    def reason(self) -> str:
        """Sentence that names the longest row, its limit, and the fastest strategy at about that length."""
        best, fastest = self.best, self.fastest
        if best is None or fastest is None:
            return f"no strategy can train on a row of {SHORTEST} tokens on these machines"
        words = f"{best.strategy} has the longest row: {best.tokens:,} tokens, limited by {best.binds}"
        assert fastest.prediction is not None
        seconds = f"{span(fastest.prediction.step_seconds)} a step"
        if fastest is best:
            words += f"; no setting within {NEAR:.0%} of that length is faster than its {seconds}"
        else:
            words += f"; {fastest.strategy} is the fastest within {NEAR:.0%} of that length, {seconds}"
        if best.step is not None and best.step.sequence_ranks > 1:
            words += f"; a row is computed by {of_ranks(self.request, best.step.sequence_ranks)}"
        return words + ("" if self.request.memory_bytes else "; device memory is unknown (--memory)")

    @property
    def memory(self) -> str:
        """Sentence about the memory of the longest row, part by part; ``""`` if none fits."""
        best = self.best
        return held(self.request, best.prediction.needs) if best is not None and best.prediction else ""

    def table(self) -> Iterator[str]:
        """Yield the lines of the table, in columns."""
        return columns([HEAD, *(row.cells() for row in self.rows)], words=2)

    def json_text(self) -> str:
        """Return the result as JSON text."""
        rows = [row.as_json() for row in self.rows]
        content = {"longest": rows, "reason": self.reason}
        return json.dumps(content, indent=1, allow_nan=False)


def longest_that(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Search the largest number of tokens for which ``fits`` returns True, within ``PRECISION``.

    A very long result is rounded down to a multiple of ``FIXED`` tokens, for which the fastest attention kernel can be
    used; this costs less than a hundredth of its tokens.

    >>> longest_that(lambda tokens: tokens <= 1000, 2, 1 << 24) in range(994, 1001)
    True
    >>> longest_that(lambda tokens: tokens <= 177_682, 2, 1 << 24) % FIXED
    0

    Args:
        fits: returns True if a length fits.
        least: a length that fits.
        most: a length that does not fit.
    """
    while most - least > max(1, least * PRECISION):
        middle = max(isqrt(least * most), least + 1)  # lengths differ by orders of magnitude: halve their ratio
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least - least % FIXED * (least >= 100 * FIXED)


def _longest_of(request: PlanRequest, strategy: Strategy, ends: str) -> LongestRow:
    """Return the longest row of a strategy; homes in host memory are tried only if nothing fits without.

    Args:
        request: request for the longest rows that are considered.
        strategy: the strategy.
        ends: name of the limit that the length of ``request`` stands for.
    """
    rows = (_with_homes(request.with_homes(level), strategy, ends) for level in request.levels)
    first = next(rows)
    return first if first.tokens else next((row for row in rows if row.tokens), first)


def _with_homes(request: PlanRequest, strategy: Strategy, ends: str) -> LongestRow:
    """Return the longest row at the request's ``host_homes``, on one device or split over devices of a node.

    The row is split over all of them only if that makes it longer by more than ``NEAR``, and not if the whole row
    reaches the limit ``ends``. If there are fewer rows than devices, every size is tried, and of rows of about equal
    length the fastest is returned."""
    best, sizes = _by_ranks(request, strategy, ends), request.cp_group_sizes
    if not sizes or "sequence_ranks" in strategy.refusals or (best.binds == ends and not request.leaves_idle):
        return best
    for ranks in sizes if request.leaves_idle else sizes[-1:]:
        other = _by_ranks(request.with_ranks(ranks), strategy, ends)
        faster = request.leaves_idle and other.tokens_per_second > best.tokens_per_second
        near = other.tokens >= best.tokens * (1 - NEAR)
        best = other if best.tokens < other.tokens * (1 - NEAR) or (faster and near) else best
    return best


def _by_ranks(request: PlanRequest, strategy: Strategy, ends: str) -> LongestRow:
    """Return the longest row with the request's context-parallel size, as ``LongestRow``, with its predicted step.

    Of whole rows and chunks the faster is taken if both fit at this length. If device memory is not the limit, usual
    prefetching is used instead of the leanest if it fits. A reason is returned instead of a row if the strategy cannot
    run or nothing fits."""
    try:
        lean = _Lean(request, strategy)
        if why := unplayed(request, lean.step(0)):
            return LongestRow(strategy.name, why_not=why)
        tokens, chunk, binds = lean.longest(ends)
        if not tokens:
            why = shortage(request, lean.needs(SHORTEST, lean.fewest(SHORTEST, 0)[0], 0))
            return LongestRow(strategy.name, binds=binds, why_not=f"{SHORTEST} tokens need {why}")
        asked, tried = request.with_length(tokens), list[tuple[StepSpec, Prediction]]()
        others = lean.chunks[:1] if chunk else lean.chunks[1:]
        for size in (chunk, *[size for size in others if size != chunk and lean.fits(tokens, size)][:1]):
            for step in lean.settings_of(asked, tokens, size):
                usual = with_settings(step, **USUAL)
                step = usual if binds != DEVICE and fits(asked, memory_quickly(asked, usual)) else step
                tried.append((step, predict(asked, step)))
        best = min(tried, key=lambda way: way[1].step_seconds)
        in_chunks = bool(best[0].settings.sequence_chunk)
        seconds = (way.step_seconds for step, way in tried if bool(step.settings.sequence_chunk) != in_chunks)
        return LongestRow(strategy.name, tokens, binds, asked, *best, min(seconds, default=None))
    except UserError as error:
        return LongestRow(strategy.name, why_not=in_plain_words(error))


class _Lean:
    """One strategy with the settings that need the least memory, for rows of any length."""

    def __init__(self, request: PlanRequest, strategy: Strategy) -> None:
        self.request = request
        self.layers = {
            bool(chunk): request.model.num_layers if relieved(request, strategy, chunk=chunk) else 0 for chunk in (0, 1)
        }
        """Most layers that can be offloaded, by whether rows run in chunks."""
        chunk_size = request.settings.sequence_chunk
        self.chunks = (0, *reversed(request.chunks)) if chunk_size is None else (chunk_size,)
        """Chunk sizes to try: whole rows (0) first, then chunks, the largest first."""
        settings = replace(request.settings, strategy=strategy.name, recompute="full", **LEAN)
        self._first = request.step(settings, strategy)
        self.schedule = cache(self._schedule)
        self.needs = cache(self._needs)

    def step(self, offloaded: int, chunk: int = 0) -> StepSpec:
        """Return the step with ``offloaded`` layers offloaded, and rows in chunks of ``chunk`` tokens.

        ``chunk`` is 0 for whole rows."""
        return with_settings(self._first, offloaded_layers=offloaded, **self.request.in_chunks(chunk))

    def settings_of(self, asked: PlanRequest, tokens: int, chunk: int) -> Iterator[StepSpec]:
        """Yield the step with the fewest layers offloaded, and one that keeps attention's output outside the device.

        The second one offloads all layers. It is left out if it does not fit, or if nothing can be offloaded."""
        yield (step := self.step(self.fewest(tokens, chunk)[0], chunk))
        if layers := self.layers[bool(chunk)]:
            with suppress(UserError):  # whole rows of several ranks keep nothing
                kept = with_settings(step, recompute="selective", offloaded_layers=layers)
                yield from [kept] if fits(asked, memory_quickly(asked, kept)) else []

    def _schedule(self, offloaded: int, chunk: int) -> Schedule:
        """Return the schedule of ``step``. Only one is built for all chunk sizes, because they share all actions."""
        if chunk and chunk != self.chunks[-1]:
            return resized(self.schedule(offloaded, self.chunks[-1]), self.step(offloaded, chunk))
        return short_schedule(self.request, self.step(offloaded, chunk))

    def _needs(self, tokens: int, offloaded: int, chunk: int) -> Needs:
        """Return the memory for rows of ``tokens`` tokens."""
        return memory_of(self.request.with_length(tokens), self.schedule(offloaded, chunk))

    def lacking(self, tokens: int, offloaded: int, chunk: int) -> list[str]:
        """Return the kinds of memory that are too small for rows of ``tokens`` tokens.

        Args:
            offloaded: layers that are offloaded.
            chunk: tokens of a chunk; 0 for whole rows.
        """
        return lacking(self.request, self.needs(tokens, offloaded, chunk))

    def fewest(self, tokens: int, chunk: int) -> tuple[int, str]:
        """Return the fewest layers to offload for rows of ``tokens`` tokens, and the memory that is too small.

        These are the fewest with which the device has enough memory. The second result is ``""`` if the row fits with
        them. Otherwise it names the memory that is too small even then: device, host or files."""
        few, enough = 0, self.layers[bool(chunk)]
        if DEVICE not in (over := self.lacking(tokens, 0, chunk)):
            return 0, "".join(over[:1])
        if DEVICE in self.lacking(tokens, enough, chunk):
            return enough, DEVICE
        none, all_ = (self.needs(tokens, offloaded, chunk).device for offloaded in (few, enough))
        guess, stride = ceil(enough * (none - self.request.memory_bytes) / (none - all_)), 1  # layers save equally
        while enough - few > 1:  # few tries: each one builds a schedule
            guess = min(max(guess, few + 1), enough - 1)
            if DEVICE in self.lacking(tokens, guess, chunk):
                few, guess = guess, guess + stride
            else:
                enough, guess = guess, guess - stride
            stride *= 2
        return enough, next(iter(self.lacking(tokens, enough, chunk)), "")

    def fits(self, tokens: int, chunk: int) -> bool:
        """Return True if rows of ``tokens`` tokens fit with some number of offloaded layers."""
        some = any(not self.lacking(tokens, offloaded, chunk) for offloaded in (self.layers[bool(chunk)], 0))
        return some or not self.fewest(tokens, chunk)[1]

    def longest(self, ends: str) -> tuple[int, int, str]:
        """Return (most tokens that fit, chunk size, name of the limit that prevents more).

        The tokens are 0 if not even ``SHORTEST`` fit. The chunk size is the largest with which a row is about as long
        as with the smallest; 0 for whole rows.

        Args:
            ends: name of the limit that the length of the request stands for; returned if rows of that length fit.
        """
        most = self.request.sequence_length
        for chunk in self.chunks:
            if self.fits(most, chunk):
                return most, chunk, ends
        smallest = dict.fromkeys((self.chunks[-1], self.chunks[0]))  # short rows: either may need less

        def fits(tokens: int) -> bool:
            return any(self.fits(tokens, chunk) for chunk in smallest)

        if most <= SHORTEST or not fits(SHORTEST):
            return 0, 0, self.fewest(SHORTEST, 0)[1]
        low = longest_that(fits, SHORTEST, most)
        near = max(SHORTEST, ceil(low * (1 - NEAR)))
        chunk = next(chunk for chunk in (*self.chunks, *smallest) if self.fits(near, chunk))
        if not self.fits(low, chunk):
            low = longest_that(lambda tokens: self.fits(tokens, chunk), near, low)
        return low, chunk, self.fewest(low + max(2, ceil(2 * low * PRECISION)), chunk)[1]
