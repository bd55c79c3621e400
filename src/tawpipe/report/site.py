"""Pages that belong together, with a list of them: served to this machine alone, or written as files.

What is served is made anew at every request, so that the page of a run that goes on shows what is there by now.
"""

from __future__ import annotations

import errno
import html
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tawpipe.errors import UserError
from tawpipe.report.page import PLOTLY, Section, page_text, plotly_script, with_index, write_text

HOST = "127.0.0.1"
"""Loopback: nobody on another machine can ask."""
OWN_NAMES = (HOST, "localhost")
"""Names of this machine in a request. Others may be those of a page elsewhere that lets its name point here."""
INDEX = "index.html"


@dataclass(frozen=True)
class Page:
    """A page that can be made.

    Args:
        name: of its file, with .html.
        title, line: what the list says of it.
        make: its HTML.
    """

    name: str
    title: str
    line: str
    make: Callable[[], str]


def index_page(title: str, pages: Sequence[Page]) -> str:
    """The HTML of the list."""
    entries = "".join(
        f'<li><a href="{name}">{words}</a><span>{line}</span></li>'
        for name, words, line in (map(html.escape, (page.name, page.title, page.line)) for page in pages)
    )
    section = Section("Pages", markup=f'<ul class="pages">{entries}</ul>')
    return page_text("Pages", title, [section])


def write_pages(title: str, pages: Sequence[Page], out: Path) -> list[Path]:
    """Write the pages and their list into a folder, which is made if need be; the files.

    Raises:
        UserError: the folder cannot be written to, or a page cannot be made.
    """
    texts = {INDEX: index_page(title, pages)} | {page.name: with_index(page.make(), INDEX) for page in pages}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(out / name, text)
    except OSError as error:
        raise UserError("--out", str(out), f"a folder that can be written to ({error.strerror})") from error
    return [out / name for name in texts]


class Site(ThreadingHTTPServer):
    """Serves pages on this machine.

    Args:
        title: of the list.
        port: 0 for a free one.

    Raises:
        UserError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, title: str, pages: Sequence[Page], port: int = 0) -> None:
        self.title, self.pages = title, {page.name: page for page in pages}
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise UserError("--port", port, f"a free port; {why}; without --port one is found") from error

    @property
    def address(self) -> str:
        """What to give to a browser."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def text(self, name: str) -> tuple[HTTPStatus, str]:
        """The page of a name, or what is wrong with it."""
        if name in ("", INDEX):
            return HTTPStatus.OK, index_page(self.title, list(self.pages.values()))
        if name not in self.pages:
            return HTTPStatus.NOT_FOUND, _message("Page not found", name)
        try:
            return HTTPStatus.OK, with_index(self.pages[name].make(), INDEX)
        except UserError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, _message("This page cannot be made", str(error))
        except Exception as error:
            traceback.print_exc()
            return HTTPStatus.INTERNAL_SERVER_ERROR, _message("This page cannot be made", repr(error))

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is nothing to talk about."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()


def _message(title: str, words: str) -> str:
    return with_index(page_text("Pages", title, [Section("Why", words)]), INDEX)


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        """Answer with a page."""
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host")
        if host not in OWN_NAMES:
            return self._answer(
                HTTPStatus.FORBIDDEN, _message("Access denied", ("These pages are served to this machine only."))
            )
        name = unquote(urlsplit(self.path).path).removeprefix("/")
        if name == PLOTLY:
            return self._answer(HTTPStatus.OK, plotly_script(), "text/javascript")
        return self._answer(*self.server.text(name))

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/html") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""
