"""Pages in headless Chromium: no errors, no requests, no scrolling sideways, no figure over another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from html_pages import check_page_text, served
from plan_requests import plan_request, profile
from schedules import llama
from tawpipe.commands.open import find_pages
from tawpipe.plan.answer.page import write_plan_page
from tawpipe.plan.search.plan import Plan
from tawpipe.plan.search.plan_file import replay
from tawpipe.plan.search.search import search
from tawpipe.report import predicted_bars
from tawpipe.report import site as site_module
from tawpipe.report.page import PLOTLY
from tawpipe.report.site import write_pages
from tawpipe.train.lock import running_in

pytest.importorskip("plotly")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
PHONE = 390
WIDTHS = (PHONE, 800, 1300, 1900)
SOME = ((PHONE, 1300), (1300, 800, 1900))
"""Widths of a window: the first when a page is loaded, then others."""
ALL = tuple((width, *(other for other in WIDTHS if other != width)) for width in WIDTHS)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-25-links" / "results.json"


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = plan_request(model=llama(2), profile=profile(2), global_batch=4, flops=1e9, peak_flops=1e12)
    whole = Plan.of(asked, search(asked))
    return replace(whole, candidates=whole.candidates[:4])


@pytest.fixture(scope="module")
def pages(plan, tmp_path_factory) -> Path:
    """A folder with a run, its plan, a recorded step, a comparison, and the page of a plan."""
    run = tmp_path_factory.mktemp("pages") / "run"
    step = run / "traces" / "step-00000003"
    step.mkdir(parents=True)
    rows = [{"step": i, "loss": 3 / i, "seconds": 0.5, "tokens_per_second": 90.0 + i} for i in range(1, 30)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan.save(run / "plan.yaml")
    (run / "config.yaml").write_text("model: tiny\nsteps: 60\ndata: [texts]\n")
    (run / "results.json").write_text(RESULTS.read_text())
    bars = predicted_bars(replay(run / "plan.yaml")[0])
    for rank in sorted({bar.rank for bar in bars}):
        mine = [bar for bar in bars if bar.rank == rank]
        spans = [[str(bar.action), bar.begin, bar.end] for bar in mine]
        content = {"format": 1, "rank": rank, "node": mine[0].node, "step": 3, "spans": spans}
        (step / f"rank-{rank}.json").write_text(json.dumps(content))
    write_plan_page(plan, run / "planned.html")
    write_pages("run", find_pages(run), run / "site")
    return run / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


NAMES = ("index.html", "run.html", "plan.html", "step-3.html", "compare.html", "planned.html")


def test_every_page_is_valid_and_describes_its_figures(pages):
    assert sorted(path.name for path in pages.iterdir()) == sorted([*NAMES, PLOTLY])
    for name in NAMES:
        outline = check_page_text((pages / name).read_text())
        assert len(outline.all("figure")) > 0 or name == "index.html"
    for name in NAMES[1:]:
        assert 'href="index.html"' in (pages / name).read_text()


@needs_chromium
@pytest.mark.parametrize("widths", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(
    "name", [name if name == "run.html" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_pages_fit_phones_and_desktops_without_errors(browser, pages, name, widths):
    """After loading, and when the window gets another width."""
    for index, (first, *others) in enumerate(widths):
        browser.open((pages / name).as_uri(), width=first, dark=index % 2 == 1)
        check_figures(browser, name)
        if first == PHONE:
            small = "[...document.querySelectorAll('main p, main td, main label')].map(one => " + FONT + ")"
            assert all(size >= 13 for size in browser.run(small))
        for width in others:
            browser.resize(width)
            check_figures(browser, name)
        assert browser.problems == []
        assert set(browser.requests) <= {(pages / name).as_uri(), (pages / PLOTLY).as_uri()}


def check_figures(browser: Browser, name: str) -> None:
    """Every figure is drawn as wide as its place, over no other; no page scrolls sideways.

    A drawing follows its place a tenth of a second later, on a busy machine after more.
    """
    until = time.monotonic() + 30
    while (faults := browser.run(FAULTS)) and time.monotonic() < until:
        time.sleep(0.05)
    assert faults == [], name


FAULTS = """(() => {
  const faults = [], figures = [...document.querySelectorAll('figure')];
  const drawn = figures.map(figure => figure.querySelector('.js-plotly-plot .main-svg'));
  const boxes = drawn.map(drawing => drawing && drawing.getBoundingClientRect());
  boxes.forEach((box, at) => {
    if (!box) return faults.push(`figure ${at} is not drawn`);
    const place = drawn[at].closest('.js-plotly-plot').getBoundingClientRect();
    const inside = figures[at].getBoundingClientRect();
    if (Math.abs(box.width - place.width) > 1 || Math.abs(box.height - place.height) > 1) {
      faults.push(`figure ${at}: ${box.width} x ${box.height} in a place of ${place.width} x ${place.height}`);
    }
    if (box.left < inside.left - 1 || box.right > inside.right + 1) faults.push(`figure ${at} leaves its frame`);
    boxes.slice(0, at).forEach((other, before) => {
      if (other && box.left < other.right - 1 && other.left < box.right - 1 && box.top < other.bottom - 1
        && other.top < box.bottom - 1) faults.push(`figures ${before} and ${at} overlap`);
    });
  });
  const page = document.documentElement;
  if (page.scrollWidth > page.clientWidth) faults.push(`${page.scrollWidth} pixels in a window of ${page.clientWidth}`);
  return faults;
})()"""


@needs_chromium
def test_facts_of_a_run_stand_beside_each_other_in_a_wide_window(browser, pages):
    tops = "[...document.querySelectorAll('.facts h2')].map(title => [title.textContent, title.offsetTop])"
    browser.open((pages / "run.html").as_uri(), width=1300)
    assert [title for title, _ in browser.run(tops)] == ["So far", "Settings", "Plan"]
    assert len({top for _, top in browser.run(tops)}) == 1
    browser.resize(PHONE)
    assert len({top for _, top in browser.run(tops)}) == 3


@needs_chromium
def test_served_page_renews_itself_until_the_run_has_ended(browser, tmp_path, monkeypatch):
    """Zoom and scroll position stay, as the page is not loaded again."""
    monkeypatch.setattr(site_module, "RENEW_S", 0.1)
    (tmp_path / "config.yaml").write_text("steps: 5\n")
    metrics = tmp_path / "metrics.jsonl"

    def step(number: int) -> None:
        with metrics.open("a") as file:
            file.write(json.dumps({"step": number, "loss": 3 / number, "tokens_per_second": 9.0}) + "\n")

    step(1)
    with served(find_pages(tmp_path)) as site:
        with running_in(tmp_path):
            browser.open(site.address + "run.html", width=PHONE)
            browser.run("scrollTo(0, 150)")
            browser.run(
                "Plotly.relayout(document.querySelector('.js-plotly-plot'), {'xaxis.range': [0, 4]}).then(() => 0)"
            )
            step(2)
            browser.wait("document.querySelector('.js-plotly-plot').data[0].x.length === 2")
            browser.wait("document.querySelector('.facts p').textContent.startsWith('Running: step 2 of 5')")
            assert browser.run("document.querySelector('.js-plotly-plot').layout.xaxis.range") == [0, 4]
            assert browser.run("scrollY") == 150
        step(5)
        browser.wait("document.querySelector('.facts p').textContent.startsWith('All steps done: step 5 of 5')")
        browser.wait("!document.querySelector('header + p')")  # it does not renew itself any more
    assert browser.problems == []


FONT = "parseFloat(getComputedStyle(one).fontSize)"


@needs_chromium
def test_text_contrast_is_at_least_4_5_to_1(browser, pages):
    """At least 4.5 to 1, as WCAG wants it."""
    for dark in (False, True):
        browser.open((pages / "index.html").as_uri(), dark=dark)
        names = ("--text", "--quiet", "--accent", "--warn")
        for name in names:
            for back in ("--back", "--soft", "--mark"):
                ratio = contrast(*(browser.run(COLOR % one).strip() for one in (name, back)))
                assert ratio >= 4.5, (name, back, dark, ratio)


COLOR = "getComputedStyle(document.documentElement).getPropertyValue('%s')"


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, #rrggbb."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@needs_chromium
def test_chosen_curve_is_drawn_last_and_its_row_is_marked(browser, pages, plan):
    """It is drawn last, so that no curve of equal values covers it, and its row is marked."""
    browser.open((pages / "planned.html").as_uri())
    assert browser.run("document.querySelector('tr.chosen td').textContent") == plan.chosen.strategy
    found = browser.run(LAST_DRAWN)
    assert len(found) == 2 and set(found) == {plan.chosen.strategy}


LAST_DRAWN = """[...document.querySelectorAll('.js-plotly-plot')]
  .map(plot => [...plot.querySelectorAll('.trace.scatter')]).filter(drawn => drawn.length > 1)
  .map(drawn => drawn[drawn.length - 1].__data__[0].trace.name)"""


@needs_chromium
def test_timeline_zoom_and_legend_buttons_work(browser, pages):
    browser.open((pages / "step-3.html").as_uri())
    width = "(range => range[1] - range[0])(document.querySelector('.js-plotly-plot').layout.xaxis.range)"
    before = browser.run(width)
    browser.run("document.querySelector('[data-zoom=in]').click()")
    assert browser.run(width) == pytest.approx(before / 2)
    browser.run("document.querySelector('[data-zoom=all]').click()")
    assert browser.run(width) == pytest.approx(before)
    browser.run("document.querySelector('.legend button').click()")
    assert browser.run("document.querySelector('.legend button').getAttribute('aria-pressed')") == "false"
    assert browser.run("document.querySelector('.js-plotly-plot').data[0].visible") is False
