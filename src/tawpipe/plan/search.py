"""Which strategies there are, which knobs suit each of them, which strategy is best. Imports errors, schedule, plan.

The search is small and says what it does: every strategy is tried with few and many micro-batches per visit; those that
do not fit are dropped, those whose bound (computing, links) is behind the best prediction so far are not played; then
the best setting of each strategy that is not far behind is improved knob by knob as long as that gains something, and
homes are found for it where units or links are uneven (homes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.place import Homes, find_homes
from tawpipe.plan.request import (
    PLAYED_ROUNDS,
    Prediction,
    Question,
    bound_of,
    memory_quickly,
    predict,
    predict_pipeline,
)
from tawpipe.schedule.blocks import recompute_of_blocks
from tawpipe.schedule.routes.pipelines import AXES, PIPELINES, Shape
from tawpipe.schedule.spec import Knobs
from tawpipe.simulate.fold import foldable

STRATEGIES: dict[str, dict[str, Any]] = {
    "tawpipe-spread": {"placement": "spread"},
    "tawpipe-step": {"placement": "spread", "weights_scope": "step", "gradients_scope": "step"},
    "tawpipe-striped": {"placement": "striped"},
    "tawpipe-whole": {"placement": "whole"},
    "flat": {"placement": "flat"},
    "hsdp": {"placement": "hybrid", "gradients_scope": "step"},
    "weipipe": {"placement": "ring"},
}
"""Those that this project runs, by the knobs that make them."""
GAIN = 0.005
"""Below this a change of a knob is not worth its memory."""
LESS_MEMORY = 0.01
"""A choice that takes as long and saves as much of the memory is better."""
LARGEST_WORK = 4096
"""Ranks that are played, times blocks, beyond which a strategy is not played: a search should take a minute."""
MOST_PLAYED = 30_000
"""Micro-batches, times blocks, of the ranks and rounds that are played, beyond which a setting is not: the same."""
PASSES = 3
HOPELESS = 1.35
"""So many times as long as the best, a strategy is not improved knob by knob: recomputing nothing, the largest gain
there is, makes a step a quarter shorter.
"""


@dataclass(frozen=True)
class Candidate:
    """One strategy with the knobs that suit it best.

    Args:
        knobs: None where the strategy cannot be run or played at all; then ``why_not`` says why.
        runnable: whether this project runs it.
        homes: what was found where units live on one node each, see homes.py.
    """

    strategy: str
    knobs: Knobs | None
    prediction: Prediction | None
    runnable: bool
    fits: bool
    why_not: str = ""
    homes: Homes | None = None

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds if self.prediction is not None else float("inf")

    def chosen_knobs(self) -> dict[str, Any]:
        """The knobs by name, micro-batches left out."""
        if self.knobs is None:
            return {}
        names = (field.name for field in fields(Knobs) if field.name not in ("micro_batches", "reuse"))
        return {name: getattr(self.knobs, name) for name in names}


def search(question: Question, *, tell: Callable[[str], None] = lambda _: None) -> list[Candidate]:
    """The best setting of every strategy, the fastest that fits first.

    Args:
        tell: is given a line for every strategy.
    """
    found: list[Candidate] = []
    for strategy, fixed in STRATEGIES.items():
        candidate = _best(question, strategy, fixed)
        found.append(candidate)
        tell(describe(question, candidate))
    found.sort(key=lambda one: (not one.fits, one.seconds))
    for i, one in enumerate(found):
        ahead = min(other.seconds for other in found if other.fits or not found[0].fits)
        if one.fits and one.knobs is not None and one.prediction is not None and one.seconds < ahead * HOPELESS:
            knobs, made = _improve(question, one.knobs, one.prediction)
            found[i] = settle(question, replace(one, knobs=knobs, prediction=made))
            tell(describe(question, found[i]))
    for kind in PIPELINES:
        candidate = _best_pipeline(question, kind)
        found.append(candidate)
        tell(describe(question, candidate))
    return sorted(found, key=lambda one: (not one.fits, one.seconds))


def describe(question: Question, candidate: Candidate) -> str:
    """One line."""
    if candidate.prediction is None:
        return f"{candidate.strategy}: {candidate.why_not}"
    gib = candidate.prediction.peak_bytes / 2**30
    fits = "" if candidate.fits else ", does not fit"
    homes = f"; {candidate.homes}" if candidate.homes and len(candidate.homes.seconds) > 1 else ""
    return f"{candidate.strategy}: {candidate.seconds:.3f} s, {gib:.1f} GiB{fits}{homes}"


def fits(question: Question, memory: dict[str, int] | Any) -> bool:
    """Whether so much memory is there."""
    return not question.memory_bytes or sum(memory.values()) <= question.memory_bytes


def _best(question: Question, strategy: str, fixed: dict[str, Any]) -> Candidate:
    if why := _too_large(question, fixed):
        return Candidate(strategy, None, None, True, False, why)
    if strategy == "tawpipe-step" and question.topology.num_nodes == 1:
        return Candidate(strategy, None, None, True, False, "the same as tawpipe-spread on one node")
    options = [question.knobs(**fixed, micro_batches_per_visit=k) for k in _per_visit(question)]
    options = [knobs for knobs in options if _played(question, knobs) <= MOST_PLAYED] or options[:1]
    try:
        possible = [knobs for knobs in options if fits(question, memory_quickly(question, knobs))]
    except UserError as error:
        return Candidate(strategy, None, None, True, False, str(error))
    if not possible:
        options = [replace(knobs, look_ahead=1, gradient_buffers=1) for knobs in options]
        if _relieved(question, options[0]):
            layers = _layers(question)
            some = [replace(options[0], offloaded_layers=number) for number in (layers // 2, layers * 3 // 4)]
            options += [*some, *(replace(knobs, offloaded_layers=layers) for knobs in options)]
        possible = [knobs for knobs in options if fits(question, memory_quickly(question, knobs))]
    if not possible:
        leanest = _leanest(question, options[0])
        return Candidate(
            strategy, leanest, predict(question, leanest), True, fits(question, memory_quickly(question, leanest))
        )
    best: tuple[Knobs, Prediction] | None = None
    for bound, knobs in sorted(((bound_of(question, one), one) for one in possible), key=lambda pair: pair[0]):
        if best is None or bound < best[1].step_seconds * (1 - GAIN):
            made = predict(question, knobs)
            if best is None or made.step_seconds < best[1].step_seconds * (1 - GAIN):
                best = knobs, made
    assert best is not None
    return Candidate(strategy, *best, True, True)


def _played(question: Question, knobs: Knobs) -> int:
    """How much a prediction plays."""
    alike = question.topology == question.machine.topology and foldable(question.topology, knobs, question.costs)
    ranks = 1 if alike else question.topology.world_size
    rounds = min(knobs.rounds, PLAYED_ROUNDS + 1)
    return ranks * len(question.model.blocks) * knobs.micro_batches_per_visit * rounds


def _too_large(question: Question, fixed: dict[str, Any]) -> str:
    """Why a strategy is not played here, or nothing."""
    topology = question.topology
    if topology == question.machine.topology and foldable(topology, question.knobs(**fixed), question.costs):
        return ""
    if topology.world_size * len(question.model.blocks) <= LARGEST_WORK:
        return ""
    return f"not played on {topology.world_size} devices that do not all do alike"


def _best_pipeline(question: Question, kind: str) -> Candidate:
    """Over all devices, over the nodes, or inside each node: the fastest that fits, or the smallest."""
    reason = "torch.distributed.pipelining and Megatron-LM run it"
    found: list[tuple[bool, float, Prediction, str]] = []
    refused = ""
    world = question.topology.world_size
    if world * len(question.model.blocks) > LARGEST_WORK:
        return Candidate(kind, None, None, False, False, f"not played on {world} devices")
    for axis in AXES if world > 1 else ():
        if Shape(question.topology, axis, 1, False).size == 1:
            continue
        try:
            made = predict_pipeline(question, kind, axis)
        except UserError as error:
            refused = refused or str(error)
            continue
        good = fits(question, made.memory)
        found.append((not good, made.step_seconds if good else made.peak_bytes, made, axis))
    if not found:
        return Candidate(kind, None, None, False, False, refused or "a pipeline needs several devices")
    over, _, made, axis = min(found, key=lambda one: one[:2])
    where = {"world": "over all devices", "nodes": "over the nodes", "locals": "inside each node"}[axis]
    return Candidate(kind, None, made, False, not over, f"{where}; {reason}")


def _per_visit(question: Question) -> list[int]:
    """1, 2, 4, ... up to all micro-batches of a device."""
    most = -(-question.micro_batches // question.topology.world_size)
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*powers, most]


def _improve(question: Question, knobs: Knobs, prediction: Prediction) -> tuple[Knobs, Prediction]:
    """Change one knob at a time while a step gets faster by ``GAIN``, and memory allows it."""
    for _ in range(PASSES):
        before = prediction.step_seconds
        for change in _changes(question, knobs):
            other = replace(knobs, **change)
            if other == knobs or bound_of(question, other) >= prediction.step_seconds * (1 - GAIN):
                continue
            try:
                if not fits(question, memory_quickly(question, other)):
                    continue
                made = predict(question, other)
            except UserError:  # two knobs that do not go together: no reason to end a search
                continue
            if made.step_seconds < prediction.step_seconds * (1 - GAIN):
                knobs, prediction = other, made
        if prediction.step_seconds > before * (1 - GAIN):
            break
    return knobs, prediction


def settle(question: Question, candidate: Candidate) -> Candidate:
    """The candidate with the homes that ``find_homes`` finds, if a step is faster with them or needs less memory."""
    knobs, made = candidate.knobs, candidate.prediction
    assert knobs is not None and made is not None
    homes = find_homes(question, knobs)
    if homes is not None and homes.of_unit:
        other = replace(knobs, homes=homes.of_unit)
        moved = predict(question, other)
        gain = GAIN if moved.peak_bytes >= made.peak_bytes * (1 - LESS_MEMORY) else -GAIN
        if moved.step_seconds < made.step_seconds * (1 - gain) and fits(question, moved.memory):
            knobs, made = other, moved
    return replace(candidate, knobs=knobs, prediction=made, homes=homes)


def _changes(question: Question, knobs: Knobs) -> Iterator[dict[str, Any]]:
    for name in ("look_ahead", "gradient_buffers"):
        yield {name: getattr(knobs, name) + 1}
    units = len(question.model.units)
    if knobs.placement in ("spread", "striped") and knobs.weights_scope == "visit" and question.topology.num_nodes > 1:
        for kept in (units // 4, units // 2, units):
            if kept > knobs.kept_units:
                yield {"kept_units": kept}
    if knobs.placement in ("spread", "striped", "whole") and knobs.gradients_scope == "visit" and knobs.rounds > 1:
        yield {"gradients_scope": "step"}
    layers, offloaded = _layers(question), knobs.offloaded_layers
    for fewer in (0, offloaded // 2, offloaded * 3 // 4):
        if fewer < offloaded:
            yield {"offloaded_layers": fewer}
    # What a layer keeps besides its input stays on the device, and so does its input.
    if question.profile.kept.get("attention", 1):  # none where attention has no kernel whose result could be kept
        yield {"recompute": recompute_of_blocks("selective", question.model), "offloaded_layers": 0}
    for share in (4, 2, 1) if layers else ():
        last = max(1, layers // share)
        recompute = recompute_of_blocks(f"none:{last},full", question.model)
        yield {"recompute": recompute, "offloaded_layers": min(offloaded, layers - last)}


def _leanest(question: Question, knobs: Knobs) -> Knobs:
    """The setting of a strategy that needs the least memory."""
    lean = replace(knobs, micro_batches_per_visit=1, look_ahead=1, gradient_buffers=1)
    return replace(lean, offloaded_layers=_layers(question)) if _relieved(question, knobs) else lean


def _relieved(question: Question, knobs: Knobs) -> bool:
    """Whether the host's memory can take activations: not where that is what a device computes in."""
    return knobs.placement != "ring" and question.machine.device.name != "CPU"


def _layers(question: Question) -> int:
    return sum(block.kind == "layer" for block in question.model.blocks)
