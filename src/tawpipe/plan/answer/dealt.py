"""Steps on documents of uneven lengths, played: dealt by their time, packed by their tokens, or cut into rows.

A few steps are drawn and dealt (dealing/balance.py) by what a profile says that documents take. The clock plays the
one of median imbalance, under every strategy with the settings that suit it where all bins are full. Under the
fastest it plays the same documents as others have them, and with long ones shared by sets of several sizes. Pipelines
have bins of their own.

Where ranks or rounds are too many to play, one rank stands for all, which has the longest bin of every round; and few
rounds are played, for what one takes beside its modelled time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from tawpipe.console import progress, span
from tawpipe.dealing.balance import Bins, deal
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
from tawpipe.schedule.strategies.build import build, step_of_bins
from tawpipe.simulate import Timeline, play

STEPS = 5
"""Steps that are drawn and dealt."""
MOST_PLAYED = 12_000
"""Bins, times blocks, of a step that is played as a whole."""
ROWS, IN_TURN, BALANCED = "rows of one length", "packed by tokens, in turn", "balanced"


@dataclass(frozen=True)
class DealTried:
    """One way to deal the documents of a step, and what the clock says of it.

    Args:
        name: ``ROWS``, ``IN_TURN`` or ``BALANCED``.
        timeline: of all ranks and rounds; None where not all of them were played.
    """

    name: str
    bins: Bins
    seconds: float
    exposed_s: float
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    @property
    def over_mean(self) -> float:
        """Modelled time beside that of a step in which all ranks compute equally long."""
        return self.bins.seconds / self.bins.mean_seconds

    @property
    def tokens_per_second(self) -> float:
        return sum(self.bins.lengths) / self.seconds

    @property
    def words(self) -> str:
        return self.name + (f", long ones over {self.bins.ranks} devices" if self.bins.ranks > 1 else "")


@dataclass(frozen=True)
class DealFound:
    """What was found out.

    Args:
        request: for bins that are full.
        lengths: of the corpus, cut at ``max_document``.
        tokens: of a step, at most.
        max_document: tokens of a document at most, and of the rows that are compared.
        drawn: how the steps that were drawn are dealt.
        candidates: strategies with the settings that suit them; the first ones are in ``strategies``.
        strategies: by name, the median step dealt ``BALANCED``; the fastest first.
        deals: under the fastest strategy, the same documents dealt otherwise, and as ``strategies`` has them.
    """

    request: PlanRequest
    lengths: Lengths
    tokens: int
    max_document: int
    drawn: tuple[Bins, ...]
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
    ) -> DealFound:
        """Draw, deal and play.

        Raises:
            UserError: a document is longer than any bin can be.
        """
        alone = request.with_ranks(request.settings.sequence_ranks or 1)  # which documents are shared, the deal says
        candidates = search(alone)
        good = [candidate for candidate in candidates if candidate.fits and candidate.step is not None]
        work = request.of(good[0].step).profile.work if good and good[0].step else request.profile.work
        cap, local = request.sequence_length, request.topology.local_size
        sizes = [n for n in range(1, local + 1) if local % n == 0 and (n == 1 or request.profile.shares)]
        sizes = [given] if (given := request.settings.sequence_ranks) else sizes
        least = next((n for n in sizes if cap * n >= lengths.longest), sizes[-1])
        world, speeds = request.topology.world_size, speeds_of(request.settings, request.topology)

        def dealt(documents: Sequence[int], ranks: int) -> Bins:
            return deal(documents, world_size=world, cap=cap, work=work, ranks=ranks, speeds=speeds)

        steps = [lengths.step(tokens, number) for number in range(STEPS)]
        drawn = sorted((dealt(batch, least) for batch in steps), key=lambda bins: bins.seconds / bins.mean_seconds)
        median = drawn[STEPS // 2]
        strategies: dict[str, DealTried] = {}
        for candidate in good:
            if candidate.step is None:
                continue
            bins, strategy = median, candidate.step.strategy
            if 1 + max(strategy.dealt_to(request.topology)) != world:  # bins of pipelines
                cuts = LONG if request.cuts else None
                bins = strategy.dealing(candidate.step, cap=cap, work=work, cuts=cuts)(median.lengths)
            if (tried := played(request, candidate.step, BALANCED, bins)) is not None:
                progress.info(f"{candidate.strategy}: {span(tried.seconds)}")
                strategies[candidate.strategy] = tried
        strategies = dict(sorted(strategies.items(), key=lambda pair: pair[1].seconds))
        deals: list[DealTried] = []
        if strategies:
            name, best = next(iter(strategies.items()))
            step = next(candidate.step for candidate in good if candidate.strategy == name)
            assert step is not None
            documents, takers = median.lengths, best.bins.world_size
            others = [(ROWS, in_rows(documents, takers, min(cap, max_document), work))]
            if cap >= max_document:
                others.append((IN_TURN, in_turn(documents, takers, max_document, work)))
            others = [(name, replace(bins, speeds=best.bins.speeds)) for name, bins in others]
            if "sequence_ranks" not in step.strategy.refusals:
                others += [(BALANCED, dealt(documents, ranks)) for ranks in sizes if ranks > least]
            tries = [played(request, fit, *deal) for deal in others if (fit := _fitting(request, step, deal[1]))]
            compared = [deal for deal in tries if deal is not None]
            deals = sorted([*compared, best], key=lambda deal: (deal.name == BALANCED, deal.bins.ranks))
        return cls(request, lengths, tokens, max_document, tuple(drawn), tuple(candidates), strategies, tuple(deals))

    @cached_property
    def median(self) -> Bins:
        return self.drawn[len(self.drawn) // 2]

    @property
    def chosen(self) -> str | None:
        """The fastest strategy."""
        return next(iter(self.strategies), None)

    @property
    def best(self) -> DealTried | None:
        """The fastest deal under it; sets only where they gain something."""
        good = [deal for deal in self.deals if deal.name == BALANCED]
        if not good:
            return None
        return next(deal for deal in good if deal.seconds <= min(other.seconds for other in good) * (1 + GAIN))

    def deal_of(self, name: str) -> DealTried | None:
        return next((deal for deal in self.deals if deal.name == name), None)

    def settings(self, strategy: str) -> dict[str, object]:
        """What the schedule of a run would be."""
        step = next(candidate.step for candidate in self.candidates if candidate.strategy == strategy)
        return settings_of(step) if step is not None else {}


def step_of_deal(request: PlanRequest, step: StepSpec, bins: Bins) -> StepSpec:
    """A step of this deal, with the settings of another.

    Raises:
        UserError: the strategy cannot run sets.
    """
    settings = step.settings
    if step.sequence_ranks != bins.ranks:
        settings = replace(settings, sequence_ranks=bins.ranks)
        if not settings.sequence_chunk:
            settings = replace(settings, recompute="full")
    return step_of_bins(step.model, request.topology, settings, bins.form, strategy=step.strategy)


def _fitting(request: PlanRequest, step: StepSpec, bins: Bins) -> StepSpec | None:
    """The step, or with the settings that need least, as memory holds full bins of sets; None if it does not. For
    bins of single ranks the search has found out.
    """
    if bins.ranks == 1:
        return step
    wide = request.with_length(request.sequence_length * bins.ranks)
    for variant in (step, leanest(request, step)):
        with suppress(UserError):
            binned = step_of_deal(request, variant, bins)
            if fits(wide, memory_quickly(wide, wide.step(binned.settings, binned.strategy))):
                return variant
    return None


def played(request: PlanRequest, step: StepSpec, name: str, bins: Bins) -> DealTried | None:
    """The clock's word on a deal; None if the strategy cannot run it, or too many ranks do not do alike."""
    try:
        return _play(request, step, name, bins)
    except UserError:
        return None


def _play(request: PlanRequest, step: StepSpec, name: str, bins: Bins) -> DealTried | None:
    request, blocks = replace(request, dealt=()), len(request.model.blocks)  # these bins, and no typical ones
    binned = step_of_deal(request, step, bins)
    alike = request.topology == request.machine.topology and foldable(binned, request.costs)
    whole = bins.world_size * blocks <= LARGEST_WORK
    if not whole and not (alike and stand_ins(binned) == (0,)):
        return None
    each = step.settings.micro_batches_per_visit * step.divided_over
    rounds = max(2, MOST_PLAYED // blocks // (bins.world_size if whole else 1) // each) * each
    timeline = _timeline(request, step, _cut(bins, rounds), whole=whole)
    seconds, exposed = timeline.step_seconds, timeline.exposed_communication_s
    if sum(bins.shape) > rounds:
        less = _cut(bins, rounds - each)
        shorter = _timeline(request, step, less, whole=whole)
        now, before = _modelled(_cut(bins, rounds)), _modelled(less)
        more = (_modelled(bins) - now) / (now - before) if now > before else 0.0  # only empty bins are left
        seconds += more * (seconds - shorter.step_seconds)
        exposed += max(0.0, more * (exposed - shorter.exposed_communication_s))
    return DealTried(name, bins, seconds, exposed, timeline if whole and rounds >= sum(bins.shape) else None)


def _timeline(request: PlanRequest, step: StepSpec, bins: Bins, *, whole: bool) -> Timeline:
    if not whole:
        longest = [[max(row, key=bins.time)] * len(row) for row in (*bins.shared, *bins.single)]
        rows = tuple(map(tuple, longest))
        bins = replace(bins, shared=rows[: len(bins.shared)], single=rows[len(bins.shared) :])
    binned = step_of_deal(request, step, bins)
    schedule = build(binned) if whole else build(binned, ranks=(0,))
    physical = request.machine.topology if whole else None
    return play(schedule, request.of(binned).costs.with_bins(bins), steps=PLAYED_STEPS, physical=physical)


def _cut(bins: Bins, rounds: int) -> Bins:
    """Return these bins with ``rounds`` rounds at most; those in which all bins are empty, as pipelines have them for
    few documents, are left out first.
    """
    shared = bins.shared[: max(rounds - len(bins.single), rounds // 2)]
    most = rounds - len(shared)
    empty = [at for at, row in enumerate(bins.single) if not any(bin.documents for bin in row)]
    left_out = set(empty[: max(0, len(bins.single) - most)])
    kept = [row for at, row in enumerate(bins.single) if at not in left_out]
    return replace(bins, shared=shared, single=tuple(kept[:most]))


def _modelled(bins: Bins) -> float:
    return sum(map(max, bins.times))
