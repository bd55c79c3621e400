"""Plan for documents of uneven lengths as text, as JSON and as an HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tawpipe.console import columns, span
from tawpipe.dealing.balance import Packs
from tawpipe.plan.answer.dealt import BALANCED, IN_TURN, ROWS, DealReport, DealTried
from tawpipe.plan.search.candidate import GAIN
from tawpipe.report.bars import predicted_bars
from tawpipe.report.figures import stacked_bars
from tawpipe.report.page import Section, Table, check_page, timeline_section, write_page

HEAD = ("step", "tokens/s", "tokens/s/device", "not hidden", "over the mean", "over the floor", "in")
PHRASES = {ROWS: "rows of one length", IN_TURN: "documents packed by tokens and dealt in turn"}
SHOWN_RANKS = 48
"""Most ranks in a figure."""


def numbers(dealt: DealReport, deal: DealTried) -> dict[str, Any]:
    """Return one assignment of documents as a dict for JSON."""
    floor = min(dealt.median.floor, deal.packs.floor)  # stages of a pipeline share a long document
    return {
        "packing": deal.name,
        "sequence_ranks": deal.packs.ranks,
        "rounds": sum(deal.packs.shape),
        "shared_rounds": deal.packs.shape[0],
        "step_seconds": deal.seconds,
        "exposed_communication_s": deal.exposed_s,
        "tokens_per_second": deal.tokens_per_second,
        "imbalance": deal.over_mean,
        "imbalance_over_floor": deal.packs.seconds / floor if deal.name == BALANCED else None,
    }


def as_json(dealt: DealReport) -> dict[str, Any]:
    """Return the dict that ``--json`` prints for a plan with lengths."""
    median, best = dealt.median, dealt.best
    content = {
        "source": dealt.lengths.source,
        "documents": len(median.lengths),
        "tokens": sum(median.lengths),
        "tokens_per_step": dealt.tokens,
        "max_document": dealt.max_document,
        "bin_tokens": dealt.request.sequence_length,
        "rounds": sum(median.shape),
        "imbalance": median.seconds / median.mean_seconds,
        "imbalance_over_floor": median.imbalance,
        "imbalance_of_steps": [packs.seconds / packs.mean_seconds for packs in dealt.drawn],
        "chosen": dealt.chosen,
        "sequence_ranks": best.packs.ranks if best else None,
        "reason": reason(dealt),
        "strategies": [
            {"strategy": name, "knobs": dealt.settings(name)} | numbers(dealt, deal)
            for name, deal in dealt.strategies.items()
        ],
        "deals": [numbers(dealt, deal) for deal in dealt.deals],
        "histogram": [
            {"up_to": up_to, "documents": documents, "tokens": tokens}
            for up_to, documents, tokens in dealt.lengths.histogram.rows
        ],
    }
    return {"lengths": content}


def json_text(dealt: DealReport) -> str:
    """Return the JSON of the plan as text."""
    return json.dumps(as_json(dealt), indent=1, allow_nan=False)


def corpus(dealt: DealReport) -> Iterator[str]:
    """Yield lines of text on the lengths of the documents, the median step, and the imbalance of all steps."""
    lengths, median = dealt.lengths, dealt.median
    yield f"{lengths.source}, cut at {dealt.max_document:,} tokens:"
    yield from columns(
        [("up to", "documents", "tokens", "")]
        + [(f"{up_to:,}", f"{share:.1%}", f"{tokens:.1%}", "") for up_to, share, tokens in lengths.histogram.rows]
    )
    spread = [packs.seconds / packs.mean_seconds for packs in dealt.drawn]
    documents = f"{len(median.lengths):,} documents, the longest of {max(median.lengths):,} tokens"
    packs = f"packed micro-batches of up to {dealt.request.sequence_length:,} tokens, {_rounds(median)}"
    yield f"one step: {sum(median.lengths):,} tokens in {documents}; {packs}"
    yield (
        f"predicted imbalance of {len(spread)} steps: {spread[len(spread) // 2]:.3f} of the mean "
        f"({spread[0]:.3f} to {spread[-1]:.3f}), {median.imbalance:.3f} of the floor"
    )


def _rounds(packs: Packs) -> str:
    """Return a phrase with the number of rounds, such as "5 rounds, 2 of them shared"."""
    return packs.in_words + (f", {packs.shape[0]} of them shared" if packs.shape[0] else "")


def cells(dealt: DealReport, deal: DealTried) -> tuple[str, ...]:
    """Return one assignment as cells of a table row, in the order of ``HEAD``."""
    told = numbers(dealt, deal)
    floor = told["imbalance_over_floor"]
    return (
        span(deal.seconds),
        f"{deal.tokens_per_second:,.0f}",
        f"{deal.tokens_per_second / dealt.request.topology.world_size:,.0f}",
        f"{deal.exposed_s:.3f}",
        f"{deal.over_mean:.3f}",
        f"{floor:.3f}" if floor else "-",
        deal.packs.in_words,
    )


def tables(dealt: DealReport) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return a table of strategies and a table of assignments under the fastest one, as rows with a head."""
    first = [("strategy", *HEAD, "")]
    first += [(name, *cells(dealt, deal), "chosen" * (name == dealt.chosen)) for name, deal in dealt.strategies.items()]
    for candidate in dealt.candidates:
        if candidate.strategy not in dealt.strategies:
            first.append(
                (candidate.strategy, *["-"] * len(HEAD), candidate.why_not or ("does not fit" * (not candidate.fits)))
            )
    second = [("documents", *HEAD, "")]
    second += [(deal.words, *cells(dealt, deal), "best" * (deal is dealt.best)) for deal in dealt.deals]
    return first, second


def lines(dealt: DealReport) -> Iterator[str]:
    """Yield the plan as lines of text: the documents, the two tables, and the reason for the choice."""
    yield from corpus(dealt)
    first, second = tables(dealt)
    yield ""
    yield from columns(first)
    if len(second) > 1:
        yield f"\nunder {dealt.chosen}:"
        yield from columns(second)
    yield f"\n{reason(dealt)}"


def reason(dealt: DealReport) -> str:
    """Return a sentence with the chosen strategy, its time and gains; or the sentence that nothing fits."""
    best = dealt.best
    if best is None:
        tokens = dealt.request.sequence_length
        return f"no strategy can run packed micro-batches of {tokens:,} tokens here; a smaller --bin-tokens may fit"
    words = [f"{dealt.chosen}: {span(best.seconds)} per step, {best.tokens_per_second:,.0f} tokens per second"]
    for name in (IN_TURN, ROWS):
        if (other := dealt.deal_of(name)) is not None:
            words.append(f"{other.seconds / best.seconds:.2f} times as fast as {PHRASES[name]}")
    good = [deal for deal in dealt.deals if deal.name == BALANCED]
    alone = good[0]
    if best.packs.ranks > 1 and alone.packs.ranks == 1:
        gain = alone.seconds / best.seconds - 1
        shared = (
            f"sharing long documents between {best.packs.ranks} devices of a node saves {gain:.1%} "
            "(schedule.sequence_ranks)"
        )
    elif best.packs.ranks > 1:
        shared = (
            f"documents longer than a packed micro-batch need {best.packs.ranks} devices of a node "
            "(schedule.sequence_ranks)"
        )
    elif len(good) > 1:
        ranks = " or ".join(str(deal.packs.ranks) for deal in good[1:])
        shared = f"sharing long documents between {ranks} devices saves less than {GAIN:.1%}"
    else:
        shared = ""
    return ", ".join(words) + (f"; {shared}" if shared else "")


def write_dealt_page(dealt: DealReport, path: Path) -> None:
    """Write the HTML page of the plan.

    Raises:
        UserError: the folder does not exist.
    """
    check_page(str(path))
    request = dealt.request
    subtitle = f"{dealt.lengths.source}; {request.machine.topology}; {request.profile.source}"
    write_page(path, "Plan", "Documents of uneven lengths", _sections(dealt), subtitle=subtitle)


def _sections(dealt: DealReport) -> Iterator[Section]:
    """Yield the sections of the page: the choice, the lengths, the comparison of assignments and the times per rank."""
    strategies, deals = tables(dealt)
    marked = [i for i, row in enumerate(strategies[1:]) if row[0] == dealt.chosen]
    yield Section(dealt.chosen or "Nothing fits", reason(dealt), Table(strategies[0], strategies[1:], marked))
    histogram = dealt.lengths.histogram
    shares = {"share of documents": list(histogram.documents), "share of tokens": list(histogram.tokens)}
    figure = stacked_bars([f"up to {up_to:,}" for up_to in histogram.edges], shares, unit="", side_by_side=True)
    yield Section("Lengths of documents", "; ".join(list(corpus(dealt))[-2:]), figures=[figure])
    if dealt.best is None:
        return
    marked = [i for i, deal in enumerate(dealt.deals) if deal is dealt.best]
    words = f"The same documents under {dealt.chosen}."
    yield Section("Gain from balancing by time", words, Table(deals[0], deals[1:], marked))
    for deal in (dealt.deal_of(IN_TURN), dealt.best):
        if deal is not None:
            yield _times(deal)
    if dealt.best.timeline is not None:
        yield timeline_section(f"A step of {dealt.chosen}", predicted_bars(dealt.best.timeline))


def _times(deal: DealTried) -> Section:
    """Return a section with a figure of the modelled seconds of every rank or pipeline."""
    times = [row[:SHOWN_RANKS] for row in deal.packs.times]
    taker, part = ("pipeline", "bin") if deal.packs.positions > 1 else ("rank", "round")
    parts = {f"{part} {number}": row for number, row in enumerate(times)}
    figure = stacked_bars([f"{taker} {rank}" for rank in range(len(times[0]))], parts, unit="s, modelled")
    words = f"Compute seconds per {taker}: {deal.over_mean:.3f} of the mean, {part} by {part}."
    return Section(f"Time per rank: {deal.words}", words, figures=[figure])
