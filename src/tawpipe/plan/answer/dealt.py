"""Predicted steps of documents of uneven lengths: balanced by time, packed by tokens, or cut into rows of one length.

A few steps are drawn, and their documents are assigned (dealing/balance.py) by the time that a profile predicts for
them. The step with the median imbalance is simulated under every strategy, with the settings that are best for full
packed micro-batches. Under the fastest strategy the other ways of assigning the same documents are simulated, and long
documents shared by context-parallel groups of several sizes. Pipelines have packed micro-batches of their own.

If there are too many ranks to simulate, one rank represents all, with the longest packed micro-batch of every round. If
there are too many rounds, a few are simulated, and the rest is extrapolated by its modelled time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from tawpipe.console import progress, span
from tawpipe.dealing.balance import Packs, deal
from tawpipe.dealing.unbalanced import in_rows, in_turn
from tawpipe.errors import UserError
from tawpipe.plan.answer.lengths import Lengths
from tawpipe.plan.cost.feasible import fits, leanest
from tawpipe.plan.cost.predict import LARGEST_WORK, PLAYED_STEPS, foldable, memory_quickly, stand_ins
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.search.candidate import GAIN, Candidate
from tawpipe.plan.search.plan_file import settings_of
from tawpipe.plan.search.search import search
from tawpipe.schedule.pipelines.dealing import LONG
from tawpipe.schedule.sharing import speeds_of
from tawpipe.schedule.step import StepSpec
from tawpipe.schedule.strategies.build import build, step_of_packs
from tawpipe.simulate import Timeline, play

STEPS = 5
"""Steps that are drawn and assigned."""
MOST_PLAYED = 12_000
"""Packed micro-batches, times blocks, of the largest step that is simulated as a whole."""
ROWS, IN_TURN, BALANCED = "rows of one length", "packed by tokens, in turn", "balanced"


@dataclass(frozen=True)
class DealTried:
    """One assignment of a step's documents, and its simulated time.

    Args:
        name: ``ROWS``, ``IN_TURN`` or ``BALANCED``.
        packs: the packed micro-batches.
        seconds: simulated seconds of the step.
        exposed_s: seconds of the step during which a device waits for transfers.
        timeline: the simulated step with all ranks and rounds; None if not all were simulated.
    """

    name: str
    packs: Packs
    seconds: float
    exposed_s: float
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def over_mean(self) -> float:
        """Modelled time of the step, relative to the mean of all ranks: 1 if all compute equally long."""
        return self.packs.seconds / self.packs.mean_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together."""
        return sum(self.packs.lengths) / self.seconds

    @property
    def words(self) -> str:
        """Name of the assignment, for tables."""
        return self.name + (f", long ones over {self.packs.ranks} devices" if self.packs.ranks > 1 else "")


@dataclass(frozen=True)
class DealReport:
    """Result of planning for documents of uneven lengths.

    Args:
        request: request for full packed micro-batches.
        lengths: lengths of the corpus, cut at ``max_document``.
        tokens: most tokens of a step.
        max_document: most tokens of a document, and tokens of the rows of one length in the comparison.
        drawn: assignments of the drawn steps, the most even first.
        candidates: all strategies with their best settings.
        strategies: by strategy name the median step, assigned ``BALANCED``; the fastest first.
        deals: assignments of the same documents under the fastest strategy.
    """

    request: PlanRequest
    lengths: Lengths
    tokens: int
    max_document: int
    drawn: tuple[Packs, ...]
    candidates: tuple[Candidate, ...]
    strategies: dict[str, DealTried]
    deals: tuple[DealTried, ...]

    def __repr__(self) -> str:
        fastest = next(iter(self.strategies), "none fits")
        longest = f"documents up to {self.max_document:,}"
        return f"DealFound({self.tokens:,} tokens a step, {longest}; the fastest: {fastest})"

    @classmethod
    def of(
        cls,
        request: PlanRequest,
        lengths: Lengths,
        *,
        tokens: int,
        max_document: int,
    ) -> DealReport:
        """Draw some steps of documents, assign them, and simulate one of them under every strategy that fits.

        ``STEPS`` steps are drawn; the one with the median imbalance is simulated. Under the fastest strategy, other
        ways to assign the same documents are simulated as well: rows of one length, packing in turn, and larger
        context-parallel groups. Prints a progress line for each strategy.

        Args:
            request: request for full packed micro-batches.
            lengths: lengths of the corpus, cut at ``max_document``.
            tokens: most tokens of a step.
            max_document: most tokens of a document.

        Raises:
            UserError: a document is longer than any packed micro-batch can be.
        """
        alone = request.with_ranks(request.settings.sequence_ranks or 1)  # ``deal`` decides which documents are shared
        candidates = search(alone)
        good = [candidate for candidate in candidates if candidate.fits and candidate.step is not None]
        work = request.of(good[0].step).profile.work if good and good[0].step else request.profile.work
        cap, local = request.sequence_length, request.topology.local_size
        sizes = [n for n in range(1, local + 1) if local % n == 0 and (n == 1 or request.profile.shares)]
        sizes = [chosen_ranks] if (chosen_ranks := request.settings.sequence_ranks) else sizes
        least = next((n for n in sizes if cap * n >= lengths.longest), sizes[-1])
        world, speeds = request.topology.world_size, speeds_of(request.settings, request.topology)

        def dealt(documents: Sequence[int], ranks: int) -> Packs:
            return deal(documents, world_size=world, cap=cap, work=work, ranks=ranks, speeds=speeds)

        steps = [lengths.step(tokens, number) for number in range(STEPS)]
        drawn = sorted((dealt(batch, least) for batch in steps), key=lambda packs: packs.seconds / packs.mean_seconds)
        median = drawn[STEPS // 2]
        strategies: dict[str, DealTried] = {}
        for candidate in good:
            if candidate.step is None:
                continue
            packs, strategy = median, candidate.step.strategy
            if 1 + max(strategy.dealt_to(request.topology)) != world:  # packed micro-batches are assigned to pipelines
                cuts = LONG if request.cuts else None
                packs = strategy.dealing(candidate.step, cap=cap, work=work, cuts=cuts)(median.lengths)
            if (tried := played(request, candidate.step, BALANCED, packs)) is not None:
                progress.info(f"{candidate.strategy}: {span(tried.seconds)}")
                strategies[candidate.strategy] = tried
        strategies = dict(sorted(strategies.items(), key=lambda pair: pair[1].seconds))
        deals: list[DealTried] = []
        if strategies:
            name, best = next(iter(strategies.items()))
            step = next(candidate.step for candidate in good if candidate.strategy == name)
            assert step is not None
            documents, takers = median.lengths, best.packs.world_size
            others = [(ROWS, in_rows(documents, takers, min(cap, max_document), work))]
            if cap >= max_document:
                others.append((IN_TURN, in_turn(documents, takers, max_document, work)))
            others = [(name, replace(packs, speeds=best.packs.speeds)) for name, packs in others]
            if "sequence_ranks" not in step.strategy.refusals:
                others += [(BALANCED, dealt(documents, ranks)) for ranks in sizes if ranks > least]
            tries = [played(request, fit, *deal) for deal in others if (fit := _fitting(request, step, deal[1]))]
            compared = [deal for deal in tries if deal is not None]
            deals = sorted([*compared, best], key=lambda deal: (deal.name == BALANCED, deal.packs.ranks))
        return cls(request, lengths, tokens, max_document, tuple(drawn), tuple(candidates), strategies, tuple(deals))

    @cached_property
    def median(self) -> Packs:
        """Assignment of the drawn step whose imbalance is the median of the drawn steps."""
        return self.drawn[len(self.drawn) // 2]

    @property
    def chosen(self) -> str | None:
        """Name of the fastest strategy; None if none fits."""
        return next(iter(self.strategies), None)

    @property
    def best(self) -> DealTried | None:
        """Fastest balanced assignment under the fastest strategy; None if there is none.

        Within ``GAIN`` the one with the smallest context-parallel groups is preferred."""
        good = [deal for deal in self.deals if deal.name == BALANCED]
        if not good:
            return None
        return next(deal for deal in good if deal.seconds <= min(other.seconds for other in good) * (1 + GAIN))

    def deal_of(self, name: str) -> DealTried | None:
        """Return the first assignment with this name; None if there is none."""
        return next((deal for deal in self.deals if deal.name == name), None)

    def settings(self, strategy: str) -> dict[str, object]:
        """Return the schedule settings that a run would use under ``strategy``; empty if it cannot run."""
        step = next(candidate.step for candidate in self.candidates if candidate.strategy == strategy)
        return settings_of(step) if step is not None else {}


def step_of_deal(request: PlanRequest, step: StepSpec, packs: Packs) -> StepSpec:
    """Return a step for the packed micro-batches ``packs``, with the settings of ``step``.

    If the assignment has another size of context-parallel groups, that size is set, and whole rows recompute
    everything.

    Raises:
        UserError: the strategy does not support context-parallel groups.
    """
    settings = step.settings
    if step.sequence_ranks != packs.ranks:
        settings = replace(settings, sequence_ranks=packs.ranks)
        if not settings.sequence_chunk:
            settings = replace(settings, recompute="full")
    return step_of_packs(step.model, request.topology, settings, packs.form, strategy=step.strategy)


def _fitting(request: PlanRequest, step: StepSpec, packs: Packs) -> StepSpec | None:
    """Return ``step``, or its leanest variant if only that fits in memory, for groups as large as those of ``packs``.

    What must fit are full packed micro-batches of context-parallel groups. None if neither fits. If ``packs`` has no
    groups, ``step`` is returned unchecked, because the search has checked it."""
    if packs.ranks == 1:
        return step
    wide = request.with_length(request.sequence_length * packs.ranks)
    for variant in (step, leanest(request, step)):
        with suppress(UserError):
            binned = step_of_deal(request, variant, packs)
            if fits(wide, memory_quickly(wide, wide.step(binned.settings, binned.strategy))):
                return variant
    return None


def played(request: PlanRequest, step: StepSpec, name: str, packs: Packs) -> DealTried | None:
    """Simulate an assignment; None if the strategy cannot run it, or if too many different ranks would be simulated.

    Args:
        request: request for full packed micro-batches.
        step: a step of the strategy, for its settings.
        name: name of the assignment.
        packs: the assignment.
    """
    try:
        return _play(request, step, name, packs)
    except UserError:
        return None


def _play(request: PlanRequest, step: StepSpec, name: str, packs: Packs) -> DealTried | None:
    """Simulate an assignment; None if too many different ranks would be simulated.

    If there are too many rounds, two shorter steps are simulated, and the time of the remaining rounds is extrapolated
    in proportion to their modelled time.

    Raises:
        UserError: the strategy cannot run the assignment.
    """
    request, blocks = replace(request, dealt=()), len(request.model.blocks)  # no typical step
    binned = step_of_deal(request, step, packs)
    alike = request.topology == request.machine.topology and foldable(binned, request.costs)
    whole = packs.world_size * blocks <= LARGEST_WORK
    if not whole and not (alike and stand_ins(binned) == (0,)):
        return None
    each = step.settings.micro_batches_per_visit * step.divided_over
    rounds = max(2, MOST_PLAYED // blocks // (packs.world_size if whole else 1) // each) * each
    timeline = _timeline(request, step, _cut(packs, rounds), whole=whole)
    seconds, exposed = timeline.step_seconds, timeline.exposed_communication_s
    if sum(packs.shape) > rounds:
        less = _cut(packs, rounds - each)
        shorter = _timeline(request, step, less, whole=whole)
        now, before = _modelled(_cut(packs, rounds)), _modelled(less)
        more = (_modelled(packs) - now) / (now - before) if now > before else 0.0  # 0 if only empty ones remain
        seconds += more * (seconds - shorter.step_seconds)
        exposed += max(0.0, more * (exposed - shorter.exposed_communication_s))
    return DealTried(name, packs, seconds, exposed, timeline if whole and rounds >= sum(packs.shape) else None)


def _timeline(request: PlanRequest, step: StepSpec, packs: Packs, *, whole: bool) -> Timeline:
    """Simulate a step of ``packs`` and return its timeline.

    Args:
        request: request for full packed micro-batches.
        step: a step of the strategy, for its settings.
        packs: the assignment.
        whole: True to simulate all ranks; False to simulate rank 0 with the longest packed micro-batch of every round.
    """
    if not whole:
        longest = [[max(row, key=packs.time)] * len(row) for row in (*packs.shared, *packs.single)]
        rows = tuple(map(tuple, longest))
        packs = replace(packs, shared=rows[: len(packs.shared)], single=rows[len(packs.shared) :])
    binned = step_of_deal(request, step, packs)
    schedule = build(binned) if whole else build(binned, ranks=(0,))
    physical = request.machine.topology if whole else None
    return play(schedule, request.of(binned).costs.with_packs(packs), steps=PLAYED_STEPS, physical=physical)


def _cut(packs: Packs, rounds: int) -> Packs:
    """Return ``packs`` with at most ``rounds`` rounds.

    Rounds without documents are dropped first, then the last rounds. Of shared rounds, at most half of ``rounds`` are
    kept, or as many as are needed to fill up the number. Pipelines have rounds without documents if documents are few.
    """
    shared = packs.shared[: max(rounds - len(packs.single), rounds // 2)]
    most = rounds - len(shared)
    empty = [at for at, row in enumerate(packs.single) if not any(pack.documents for pack in row)]
    left_out = set(empty[: max(0, len(packs.single) - most)])
    kept = [row for at, row in enumerate(packs.single) if at not in left_out]
    return replace(packs, shared=shared, single=tuple(kept[:most]))


def _modelled(packs: Packs) -> float:
    """Return the modelled time of all rounds, where each takes as long as its slowest rank."""
    return sum(map(max, packs.times))
