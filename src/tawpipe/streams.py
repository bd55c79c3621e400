"""Standard output and standard error whose write errors do not end the program, and a check of text settings.

A character that the encoding lacks is written as an escape sequence. Text that cannot be written (full disk, closed
reader) is dropped, and its lines are counted.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from tawpipe.errors import UserError


class Lossy:
    """Stream that escapes characters its encoding lacks, and drops text that cannot be written.

    Args:
        stream: receives the text.
        loses: exception types for which text is dropped; other exceptions are raised.
        name: name of the stream in the message that reports the first loss on standard error; empty for no message.

    ``lost`` is the number of dropped lines. ``problem`` is the text of the first error, or empty.
    """

    def __init__(self, stream: TextIO, loses: tuple[type[Exception], ...], name: str) -> None:
        self._stream, self._loses, self._name = stream, loses, name
        self.lost, self.problem = 0, ""
        self._unflushed = 0

    def write(self, text: str) -> int:
        """Write text and return its number of characters. Text that ends a line is flushed at once."""
        self._unflushed += text.count("\n")
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # the error may name only the codec's family
                coding = self._stream.encoding
                self._stream.write(text.encode(coding, "backslashreplace").decode(coding))
        except self._loses as error:
            self._lose(error)
        if text.endswith("\n"):  # raise write errors now, not after half of the output
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Flush the stream. If this fails with one of the lost error types, count the unflushed lines as lost."""
        try:
            self._stream.flush()
            self._unflushed = 0
        except self._loses as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Count the unflushed lines as lost, and report the first error on standard error."""
        first, self.problem = not self.problem, self.problem or str(error)
        self.lost, self._unflushed = self.lost + self._unflushed, 0
        if first and self._name and sys.stderr is not None:
            with suppress(OSError, ValueError):
                print(f"tawpipe: {self._name} accepts no more text: {error}", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lossy(stream: TextIO | None, loses: tuple[type[Exception], ...] = (OSError, ValueError), name: str = "") -> TextIO:
    """Wrap ``stream`` in a new :class:`Lossy`.

    Args:
        stream: stream to wrap; an existing ``Lossy`` around it is removed first. None, if the process was started
            without this stream, is replaced by the null device.
        loses: exception types for which text is dropped.
        name: name of the stream in the message about the first loss; empty for no message.
    """
    return cast(TextIO, Lossy(_inner(stream) or Path(os.devnull).open("w"), loses, name))


def _inner(stream: TextIO | None) -> TextIO | None:
    """Return the stream inside all :class:`Lossy`` wrappers, or ``stream` itself if it has none."""
    return _inner(stream._stream) if isinstance(stream, Lossy) else stream


def settle(stream: TextIO) -> None:
    """Flush ``stream``; if that fails, redirect its file descriptor to the null device.

    Otherwise, the interpreter would fail when it flushes the remaining text at exit.
    """
    try:
        (_inner(stream) or stream).flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError), Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


def check_text(setting: str, text: str) -> None:
    """Raise UserError if the setting's text contains bytes that are not UTF-8, which no tokenizer accepts.

    Args:
        setting: name of the setting, for the message.
        text: value of the setting.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # Python decodes such bytes to surrogates
        raise UserError(setting, text, "text in UTF-8")
