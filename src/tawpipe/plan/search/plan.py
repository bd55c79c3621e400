"""Plan: the candidates, the choice and its reasons, as a table, as JSON, and as a file that a run follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tawpipe.console import columns, span
from tawpipe.errors import UserError
from tawpipe.plan.cost.feasible import QUICK_PLAYED, fits, gib, plays, shortage, with_settings
from tawpipe.plan.cost.predict import Needs, bound_of, memory_quickly, predict
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.candidate import GAIN, Candidate
from tawpipe.plan.search.plan_file import FORMAT, record_of, settings_of
from tawpipe.plan.search.refine import settle, ways_of_rows

COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step", span),
    "tokens_per_second_per_device": ("tokens/s/device", "{:.0f}".format),
    "mfu": ("MFU", "{:.1%}".format),
    "exposed_communication_s": ("not hidden", span),
    "idle_s": ("idle", span),
    "link_bytes": ("MB/link", lambda amount: f"{amount / 1e6:.0f}"),
    "peak_gib": ("GiB", "{:.2f}".format),
}
"""Columns of the table of candidates: name in the JSON -> title and text in the table."""
SYSTEM = "system: driver, libraries and communicators"


@dataclass(frozen=True)
class Plan:
    """Result of a search.

    Args:
        candidates: all candidates; the chosen one first, then those that fit, fastest first.
        chosen: the candidate to run: of the fastest within ``GAIN``, the one that sends the least between nodes; None
            if nothing fits.
        runner_up: the fastest other candidate that fits, or None.
    """

    request: PlanRequest
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    runner_up: Candidate | None

    def __repr__(self) -> str:
        """Return the choice with its reasons."""
        chosen = f"{self.chosen!r} of {len(self.candidates)}" if self.chosen else "nothing chosen"
        return f"Plan({chosen}\n  {self.reason})"

    @classmethod
    def of(cls, request: PlanRequest, candidates: Sequence[Candidate]) -> Plan:
        """Build the plan of a request from the candidates of a search: choose the best of them and put it first."""
        good = [candidate for candidate in candidates if candidate.fits and candidate.prediction is not None]
        good.sort(key=lambda candidate: candidate.seconds)
        if good:  # of the candidates within GAIN of the fastest, choose the one that sends the least between nodes
            alike = [candidate for candidate in good if candidate.seconds <= good[0].seconds * (1 + GAIN)]
            best = min(alike, key=lambda candidate: candidate.prediction.link_bytes if candidate.prediction else 0)
            good.remove(best)
            good.insert(0, best)
            candidates = [best, *(candidate for candidate in candidates if candidate is not best)]
        return cls(request, tuple(candidates), good[0] if good else None, good[1] if len(good) > 1 else None)

    @property
    def as_fast(self) -> tuple[Candidate, ...]:
        """Other candidates that fit and whose step time differs from the chosen one's by less than ``GAIN``."""
        if self.chosen is None:
            return ()
        others = (candidate for candidate in self.candidates if candidate is not self.chosen and candidate.fits)
        return tuple(candidate for candidate in others if abs(candidate.seconds / self.chosen.seconds - 1) < GAIN)

    @property
    def reason(self) -> str:
        """Reason for the choice, or the reason why nothing fits, in a sentence or two."""
        if self.chosen is None:
            return self._nothing_fits()
        assert self.chosen.prediction is not None and self.chosen.step is not None
        prediction, seconds = self.chosen.prediction, self.chosen.seconds
        computing = 1 - prediction.idle_s / seconds
        words = self.chosen.strategy
        if layout := self.chosen.step.strategy.layout:
            words += f", stages {layout}"
        if chunk := self.chosen.step.settings.sequence_chunk:
            words += f", rows in {of_chunks(self.request, chunk)}"
        if (ranks := self.chosen.step.sequence_ranks) > 1:
            words += f", every row over {of_ranks(self.request, ranks)}"
        words += f": computing is {computing:.0%} of the step"
        if self.request.topology.num_nodes > 1:
            busy = self.link_share(self.chosen)
            words += f", the busiest link is {busy:.0%} busy"
            step = self.chosen.step
            keeps = "step_cache" not in step.strategy.refusals
            if keeps and not step.step_cache and busy < 0.6:
                words += ", so keeping weights in the node beyond a visit saves nothing"
            elif busy > 0.9:
                words += ": the link is the limit (more micro-batches per visit or a larger batch would help)"
        if self.runner_up is not None:
            behind = self.runner_up.seconds / seconds - 1
            words += f"; {self.runner_up.strategy} is {'equally fast' if behind < GAIN else f'{behind:.1%} slower'}"
        return words

    def _nothing_fits(self) -> str:
        """Return the sentence that explains why nothing was chosen: which memory is missing, and how much."""
        least = self.least
        if least is None or least.prediction is None:
            return "no strategy can run this model on these machines"
        lacks = shortage(self.request, least.prediction.needs)
        why = self.request.profile.why_whole
        whole = f"; rows stay whole: {why}" if why else ""
        return f"nothing fits: {least.strategy} needs least, {lacks}{whole}"

    @property
    def least(self) -> Candidate | None:
        """Candidate that needs the least device memory; None if no candidate has a prediction."""
        return min(
            (candidate for candidate in self.candidates if candidate.prediction is not None),
            key=lambda candidate: candidate.prediction.peak_bytes if candidate.prediction else 0,
            default=None,
        )

    @property
    def memory(self) -> str:
        """Sentence about the memory of the chosen candidate, part by part; ``""`` if nothing was chosen."""
        if self.chosen is None or self.chosen.prediction is None:
            return ""
        step = self.chosen.step
        return held(self.request, self.chosen.prediction.needs, level=(step and step.settings.host_homes) or "none")

    @property
    def micro_batch(self) -> str:
        """Sentence about the micro-batch and the reason for its size; ``""`` if its size was given."""
        filling, size = self.request.filling, self.request.micro_batch
        return f"micro-batches of {size} ({filling.words(size)})" if filling else ""

    def link_share(self, candidate: Candidate) -> float:
        """Return the share of a candidate's step time during which the busiest link between nodes is busy."""
        assert candidate.prediction is not None
        return candidate.prediction.link_bytes / min(self.request.link_rates) / candidate.seconds

    def row(self, candidate: Candidate) -> dict[str, Any]:
        """Return one of ``candidates`` as a row of the JSON; values that are not known are None."""
        prediction, request = candidate.prediction, self.request
        row: dict[str, Any] = {
            "strategy": candidate.strategy,
            "knobs": candidate.chosen_settings(),
            "runnable": True,
            "fits": candidate.fits,
            "why_not": candidate.why_not,
            "exchange_seconds": candidate.homes and candidate.homes.seconds,
        }
        if prediction is None:
            return row | dict.fromkeys((*COLUMNS, "memory_gib", "host_gib", "files_gib"))
        devices = request.topology.world_size
        tokens = sum(request.dealt) or request.global_batch * request.sequence_length
        peak = request.peak_flops
        row |= {
            "step_seconds": prediction.step_seconds,
            "tokens_per_second_per_device": tokens / prediction.step_seconds / devices,
            "mfu": request.flops / (prediction.step_seconds * devices * peak) if peak and request.flops else None,
            "exposed_communication_s": prediction.exposed_communication_s,
            "idle_s": prediction.idle_s,
            "link_bytes": prediction.link_bytes,
            "peak_gib": prediction.peak_bytes / 2**30,
            "memory_gib": {name: size / 2**30 for name, size in prediction.memory.items()},
            "host_gib": prediction.needs.host / 2**30,
            "files_gib": prediction.needs.files / 2**30,
        }
        known = candidate.fits or prediction.timeline  # time was not simulated for the rest
        return row | dict.fromkeys(name for name in COLUMNS if not known and name != "peak_gib")

    def as_json(self) -> dict[str, Any]:
        """Return the plan as the dict that ``--json`` prints."""
        return {
            "candidates": [self.row(candidate) for candidate in self.candidates],
            "chosen": self.chosen.strategy if self.chosen else None,
            "reason": self.reason,
            "runner_up": self.runner_up.strategy if self.runner_up else None,
            "micro_batch": self.request.micro_batch,
        }

    def listed(self, *, everything: bool = False) -> list[Candidate]:
        """Return the candidates for the table: those that can run and have a prediction.

        Args:
            everything: True to include strategies that are rarely among the best, see ``Strategy.usual``.
        """
        leading = [id(candidate) for candidate in (self.chosen, self.runner_up, *self.as_fast)]
        return [
            candidate
            for candidate in self.candidates
            if candidate.prediction is not None and candidate.step is not None
            if everything or candidate.step.strategy.usual or id(candidate) in leading
        ]

    def table(self, *, separator: str = "", everything: bool = False) -> Iterator[str]:
        """Yield the lines of the table of candidates, its head first; with ``separator`` the cells are not aligned.

        Args:
            separator: text between the cells; ``""`` for aligned columns.
            everything: see ``listed``.
        """
        rows: list[tuple[str, ...]] = [("strategy", *(title for title, _ in COLUMNS.values()), "")]
        for candidate in self.listed(everything=everything):
            row, notes = self.row(candidate), list[str]()
            if candidate is self.chosen or not candidate.fits:
                notes.append("chosen" if candidate.fits else "does not fit")
            elif any(candidate is other for other in self.as_fast):
                notes.append("equally fast")
            if candidate.step is not None and (remark := candidate.step.strategy.remark(candidate.step)):
                notes.append(remark)
            cells = ["-" if row[name] is None else text(row[name]) for name, (_, text) in COLUMNS.items()]
            rows.append((candidate.strategy, *cells, ", ".join(notes)))
        if separator:
            yield from (separator.join(row) for row in rows)
            return
        yield from columns(rows)

    def left_out(self, *, everything: bool = False) -> Iterator[str]:
        """Yield lines on candidates that the table leaves out: the reason, with the names of all that have it.

        Further lines name missing packages that would make steps shorter, and candidates that only ``--all`` shows.

        Args:
            everything: True if the table lists everything, see ``listed``.
        """
        reasons: dict[str, list[str]] = {}
        for candidate in self.candidates:
            if candidate.prediction is None:
                reasons.setdefault(candidate.why_not, []).append(candidate.strategy)
        yield from (f"{', '.join(names)}: {why}" for why, names in reasons.items())
        shown = {candidate.strategy for candidate in self.listed(everything=everything)}
        shown.update(*reasons.values())
        for candidate in self.candidates:
            if candidate.step is not None and (missing := candidate.step.strategy.missing()):
                yield f"{candidate.strategy}: {missing}"
        hidden = [candidate.strategy for candidate in self.candidates if candidate.strategy not in shown]
        if hidden:
            yield f"with --all: {', '.join(hidden)}"

    def save(self, path: Path) -> None:
        """Write the plan to a file that ``tawpipe train --plan`` follows.

        Raises:
            UserError: nothing was chosen, or the file cannot be written.
        """
        text = self.text()
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError("--save", str(path), f"a file that can be written ({error.strerror})") from error

    def text(self) -> str:
        """Return the content of a plan file, as ``save`` writes it.

        Raises:
            UserError: nothing was chosen.
        """
        if self.chosen is None or self.chosen.step is None:
            raise UserError("plan", "no strategy", f"a model that fits these machines; {self.reason}")
        request = self.request
        content = {
            "format": FORMAT,
            "strategy": self.chosen.strategy,
            "reason": self.reason,
            "model": request.model.identity,
            "nodes": list(request.machine.nodes),
            "global_batch": request.global_batch,
            "micro_batch": request.micro_batch,
            "sequence_length": request.sequence_length,
            "weight_bytes": request.widths.weight,
            "gradient_bytes": request.widths.gradient,
            "step_seconds": round(self.chosen.seconds, 6),
            "schedule": settings_of(self.chosen.step),
        }
        record = {"clock": record_of(request.of(self.chosen.step))}
        clock = yaml.safe_dump(record, sort_keys=False, default_flow_style=True, width=120)
        head = yaml.safe_dump(content, sort_keys=False, width=120)
        return f"{head}# Costs that the clock was given, for `tawpipe trace`:\n{clock[1:].rstrip().removesuffix('}')}\n"


def of_chunks(request: PlanRequest, size: int) -> str:
    """Return the phrase "chunks of N tokens", with a note on dropout if the model has it."""
    return f"chunks of {size:,} tokens" + (" (another size is another draw of dropout)" if request.drops else "")


def of_ranks(request: PlanRequest, ranks: int) -> str:
    """Return the phrase "N devices of a node", with a note on dropout if the model has it."""
    return f"{ranks} devices of a node" + (" (another draw of dropout than one device's)" if request.drops else "")


STATE = "master weights, gradients, optimizer state"
AT_HOST = {"none": "", "state": STATE, "all": f"{STATE}, copies that travel, frozen weights"}


def held(request: PlanRequest, needs: Needs, *, level: str = "none") -> str:
    """Return a sentence on the needed memory of a device, part by part, and of a node's host and disk.

    Args:
        request: the request.
        needs: predicted memory.
        level: value of ``host_homes``, which decides what the host holds.
    """
    host_bytes = request.machine.host_bytes
    parts = ", ".join(f"{name} {gib(size)}" for name, size in needs.parts.items())
    words = f"device memory in GiB: {parts} ({SYSTEM})"
    if needs.host:
        known = f"of {gib(host_bytes)}" if host_bytes else "(amount available unknown)"
        state = f" (schedule.host_homes {level}: {AT_HOST[level]})" if AT_HOST[level] else ""
        words += f"; host memory per node{state} {gib(needs.host)} {known}"
    if needs.files:
        free = request.machine.files_bytes
        known = f"of {gib(free)} free" if free else "(free amount unknown)"
        words += f"; disk per node {gib(needs.files)} {known}"
    return words


def crossing(request: PlanRequest, first: Candidate, second: Candidate) -> str:
    """Return a sentence with a link rate at which ``second`` is faster than ``first``, or ``""``.

    Predicts both at rates from an eighth to eight times the present one, slower ones first. Returns ``""`` if
    ``second`` is faster at none of them, on one node, or if a prediction would take seconds."""
    if first.step is None or second.step is None or request.topology.num_nodes == 1:
        return ""
    if max(plays(request, first.step), plays(request, second.step)) > QUICK_PLAYED // 2:
        return ""  # each rate would take seconds
    base = request.machine.between.bytes_per_s
    for factor in (0.5, 0.25, 0.125, 2.0, 4.0, 8.0):
        other = replace(request, machine=request.machine.with_rate(base * factor))
        limit = predict(other, first.step).step_seconds * 0.995
        if bound_of(other, second.step) < limit and predict(other, second.step).step_seconds < limit:
            return f"{second.strategy} is faster with links of {base * factor * 8 / 1e9:.3g} Gbit/s"
    return ""


def other_rows(request: PlanRequest, chosen: Candidate) -> str:
    """Return a sentence that compares rows in chunks with whole rows, under the chosen strategy.

    Of the ways that were not chosen the fastest is named (``ways_of_rows``). Returns ``""`` if there is no choice."""
    assert chosen.step is not None
    request, times = request.with_homes(chosen.step.settings.host_homes or "none"), list[float]()
    in_chunks, ways = bool(chosen.step.settings.sequence_chunk), list(ways_of_rows(request, chosen.step))
    for way in ways:
        with suppress(UserError):  # the strategy refuses it
            other = with_settings(chosen.step, **way)
            if bool(way["sequence_chunk"]) != in_chunks and fits(request, memory_quickly(request, other)):
                times.append(predict(request, other).step_seconds)
    if not ways:
        return ""
    taken, left = ("in chunks", "whole") if in_chunks else ("whole", "in chunks")
    seconds = f"{span(min(times))} per step" if times else "do not fit"
    return f"rows {taken} take {span(chosen.seconds)} per step; rows {left}, with all layers offloaded: {seconds}"


def json_text(plan: Plan) -> str:
    """Return the JSON of a plan as text."""
    return json.dumps(plan.as_json(), indent=1, allow_nan=False)


def explain(plan: Plan, strategy: str) -> Iterator[str]:
    """Yield lines with the settings of the candidate of ``strategy``, and with its time and memory by part.

    Homes of single units are searched for it if that was not done before."""
    candidate = next(candidate for candidate in plan.candidates if candidate.strategy == strategy)
    yield f"{strategy}:"
    if candidate.prediction is None:
        yield f"  {candidate.why_not}"
        return
    for name, value in plan.row(candidate)["knobs"].items():
        if value not in ("", None):
            yield f"  {name}: {value}"
    prediction = candidate.prediction
    yield f"  step {span(prediction.step_seconds)}; lower bound {span(prediction.bound_s)} by computing and links"
    yield (
        f"  devices idle {span(prediction.idle_s)}, {span(prediction.exposed_communication_s)} of it waiting for "
        "transfers"
    )
    if plan.request.topology.num_nodes > 1:
        share = plan.link_share(candidate)
        yield f"  busiest link: {prediction.link_bytes / 1e6:.1f} MB, {share:.0%} of the step"
    if candidate.step is not None:
        settled = candidate if candidate.homes is not None else settle(plan.request, candidate)
        if settled.homes is not None:
            yield f"  {settled.homes}"
        if settled.step != candidate.step:
            yield f"  with the best of these homes a step takes {span(settled.seconds)}"
    for name, size in prediction.memory.items():
        yield f"  {name}: {size / 2**30:.3f} GiB"
    yield f"  together: {prediction.peak_bytes / 2**30:.3f} GiB"
    if prediction.needs.host:
        yield f"  host memory per node: {prediction.needs.host / 2**30:.3f} GiB"
    if prediction.needs.files:
        yield f"  disk per node: {prediction.needs.files / 2**30:.3f} GiB"
