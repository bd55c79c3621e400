"""Related pages with an index page: served to this machine only, or written as files.

Served pages are made again for every request. The page of a run that goes on asks for itself every ``RENEW_S``.
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
from tawpipe.report.page import PLOTLY, Section, page_text, plotly_script, renewing, with_index, write_text

HOST = "127.0.0.1"
"""Loopback address: other machines cannot connect."""
OWN_NAMES = (HOST, "localhost")
"""Allowed host names in requests. A web page elsewhere could let another name resolve to this machine."""
INDEX = "index.html"
RENEW_S = 5.0
"""Seconds after which a served page whose run goes on renews itself."""


@dataclass(frozen=True)
class Page:
    """Page that can be made when needed.

    Args:
        name: file name, with .html.
        title: title in the index.
        line: description in the index.
        make: returns the HTML of the page.
    """

    name: str
    title: str
    line: str
    make: Callable[[], str]


def index_page(title: str, pages: Sequence[Page]) -> str:
    """Return the HTML of the index with links to all pages."""
    entries = "".join(
        f'<li><a href="{name}">{words}</a><span>{line}</span></li>'
        for name, words, line in (map(html.escape, (page.name, page.title, page.line)) for page in pages)
    )
    section = Section("Pages", markup=f'<ul class="pages">{entries}</ul>')
    return page_text("Pages", title, [section])


def write_pages(title: str, pages: Sequence[Page], out: Path) -> list[Path]:
    """Write all pages and their index into the folder ``out``, and return the files. The folder is created if needed.

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
    """HTTP server for pages, reachable from this machine only.

    Args:
        title: title of the index.
        pages: the pages.
        port: port to listen at; 0 for a free one.

    Raises:
        UserError: the port cannot be used.
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
        """Address of the index for a browser."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def text(self, name: str) -> tuple[HTTPStatus, str]:
        """Make the page ``name`` and return (HTTP status, HTML).

        An unknown name, or a page that cannot be made, gives the HTML of an error page. Unexpected errors are also
        printed."""
        if name in ("", INDEX):
            return HTTPStatus.OK, index_page(self.title, list(self.pages.values()))
        if name not in self.pages:
            return HTTPStatus.NOT_FOUND, _message("Page not found", name)
        try:
            return HTTPStatus.OK, renewing(with_index(self.pages[name].make(), INDEX), RENEW_S)
        except UserError as error:
            return HTTPStatus.INTERNAL_SERVER_ERROR, _message("This page cannot be made", str(error))
        except Exception as error:
            traceback.print_exc()
            return HTTPStatus.INTERNAL_SERVER_ERROR, _message("This page cannot be made", repr(error))

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the traceback of an error in a request, except if the browser has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            traceback.print_exc()


def _message(title: str, words: str) -> str:
    """Return the HTML of an error page with a title, a short text, and a link to the index."""
    return with_index(page_text("Pages", title, [Section("Why", words)]), INDEX)


class _Handler(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        """Answer a request with a page, the plotly script, or an error page. Refuse requests for other host names."""
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
        """Send a response with ``text`` as its content; without content for a HEAD request."""
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Do not print requests."""
