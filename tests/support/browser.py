"""Headless Chromium, driven over a pipe with the protocol of its developer tools: nothing to install besides it."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The program; None where none is installed."""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync")


class Browser:
    """One tab. ``problems`` and ``requests`` are of the page that was opened last.

    Attributes:
        problems: what the page wrote to the console as an error or warning, and exceptions that it did not catch.
        requests: addresses that it asked for, but those of data that it holds itself.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._home = tempfile.TemporaryDirectory(prefix="tawpipe-chromium-")
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4. Of shells, bash knows numbers above 9.
        words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", CHROMIUM, *FLAGS, *QUIET]
        words += ["--remote-debugging-pipe", f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            words, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in, self._unread = ours_out, ours_in, b""
        self._numbers = itertools.count(1)
        self._session = ""
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size; a narrow one is a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)

    def open(self, address: str, *, width: int = 1280, dark: bool = False) -> None:
        """Load a page in a window of some width, and wait until its scripts have run."""
        self.problems, self.requests = [], []
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._ask("Page.navigate", url=address)
        self._wait_for("Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page; of a promise, what it comes to."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"]["exception"].get("description", found))
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression of JavaScript is true."""
        self.run(f"new Promise(done => {{ const look = () => {condition} ? done() : setTimeout(look, 20); look(); }})")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page, for people."""
        made = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(made["data"]))

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._home.cleanup()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._read(end)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _wait_for(self, event: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not any(one["method"] == event for one in self._events):
            self._read(end)

    def _read(self, end: float) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._in, 1 << 20) if ready else b""
            assert piece, "Chromium does not answer"
            self._unread += piece
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(one.get("value", one.get("description"))) for one in said["args"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(("data:", "blob:")):
            self.requests.append(said["request"]["url"])
