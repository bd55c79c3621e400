"""Pages as a browser's parser sees them, without a browser; and pages that are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser

from tawpipe.report.page import PLOTLY
from tawpipe.report.site import Page, Site

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Outline(HTMLParser):
    """The elements of a page, in their order, each with its attributes and those around it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"{self._open} closed by {tag}"
        self._open.pop()

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


@contextmanager
def served(pages: list[Page]) -> Iterator[Site]:
    """A server of these pages."""
    with Site("run7", pages) as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield site
        finally:
            site.shutdown()
            thread.join()


def check_page_text(text: str) -> Outline:
    """Landmarks, names of figures and controls, ids that occur once, and nothing that is elsewhere."""
    assert len(text.encode()) <= 2**20, "what draws figures lies beside pages, once"
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    page = Outline(text)
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id twice"
    for tag, attributes, _ in page.elements:
        for name in ("src", "href", "action", "poster", "srcset", "data"):
            if (where := attributes.get(name)) is not None:
                local = where.startswith("data:") or (tag == "a" and where.endswith(".html") and ":" not in where)
                local = local or (tag == "script" and where == PLOTLY)
                assert local or where[1:] in ids, f"{tag} {name}={where}"
    words = text.split("<footer>")[1].split("</footer>")[0]
    assert (PLOTLY in words) == bool(page.all("figure")) == (f'src="{PLOTLY}"' in text), "says what lies beside it"
    for tag, attributes, _ in page.elements:
        if tag in ("input", "output"):
            assert attributes["id"] in ids
    styles = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in styles and "@import" not in styles
    assert any(one.get("http-equiv") == "Content-Security-Policy" for one in page.all("meta"))
    assert any(one.get("name") == "viewport" for one in page.all("meta"))
    assert page.all("html")[0]["lang"] == "en"
    assert [len(page.all(tag)) for tag in ("header", "main", "h1", "title", "footer")] == [1] * 5
    labelled = {one["for"] for one in page.all("label")}
    assert {one["id"] for one in page.all("input")} <= labelled
    drawings = [attributes for tag, attributes, around in page.elements if "figure" in around and "role" in attributes]
    assert len([one for one in drawings if one["role"] == "img"]) == len(page.all("figure"))
    assert all(one["aria-label"] for one in [*drawings, *page.all("figure")])
    for section in page.all("section"):
        assert section["aria-labelledby"] in ids
    return page
