"""Standard output and standard error as streams whose faults end nothing, and a check of text that comes in.

A letter that the encoding lacks is written as an escape. Text that a full disk, or a reader that has gone, does not
take is lost, and counted.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from tawpipe.errors import UserError


class Lossy:
    """A stream that writes escapes for letters that its encoding lacks, and loses text that cannot be written.

    Args:
        stream: receives the text.
        loses: errors for which text is lost; others are raised.
        name: of the stream, with which the first loss is said on standard error; empty to say nothing.

    ``lost`` is the number of lines that were lost, ``problem`` why the first one was.
    """

    def __init__(self, stream: TextIO, loses: tuple[type[Exception], ...], name: str) -> None:
        self._stream, self._loses, self._name = stream, loses, name
        self.lost, self.problem = 0, ""
        self._unflushed = 0

    def write(self, text: str) -> int:
        self._unflushed += text.count("\n")
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # whose own name of the encoding may be that of its family
                coding = self._stream.encoding
                self._stream.write(text.encode(coding, "backslashreplace").decode(coding))
        except self._loses as error:
            self._lose(error)
        if text.endswith("\n"):  # a program whose output is lost ends with an error, and not with half of it
            self.flush()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
            self._unflushed = 0
        except self._loses as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        first, self.problem = not self.problem, self.problem or str(error)
        self.lost, self._unflushed = self.lost + self._unflushed, 0
        if first and self._name and sys.stderr is not None:
            with suppress(OSError, ValueError):
                print(f"tawpipe: {self._name} accepts no more text: {error}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lossy(stream: TextIO | None, loses: tuple[type[Exception], ...] = (OSError, ValueError), name: str = "") -> TextIO:
    """Wrap ``stream`` in a :class:`Lossy` of its own; None stands for a stream that the process was started without."""
    return cast(TextIO, Lossy(_inner(stream) or Path(os.devnull).open("w"), loses, name))


def _inner(stream: TextIO | None) -> TextIO | None:
    return _inner(stream._stream) if isinstance(stream, Lossy) else stream


def settle(stream: TextIO) -> None:
    """Drop text that still cannot be written, or the interpreter would fail over it when it ends."""
    try:
        (_inner(stream) or stream).flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


def check_text(setting: str, text: str) -> None:
    """Raise UserError for a setting that holds bytes which are no UTF-8: no tokenizer takes them."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # as Python reads such bytes
        raise UserError(setting, text, "text in UTF-8")
