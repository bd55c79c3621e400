"""A terminal for tests: a pair of pseudo-terminals, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import termios
import threading
from contextlib import suppress

_PIECE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+|\x1b")


class Terminal:
    """The end that a person sits at; ``slave`` is the one for processes, until they have it.

    Args:
        columns: of the screen, which does not wrap lines.
    """

    def __init__(self, columns: int = 100) -> None:
        self._master, self.slave = os.openpty()
        self.resize(columns)
        self._bytes = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def _read(self) -> None:
        with suppress(OSError):  # the last process has closed its end
            while chunk := os.read(self._master, 1 << 16):
                self._bytes += chunk

    def close_slave(self) -> None:
        """To be called when processes have their own copies of it."""
        os.close(self.slave)

    def finish(self) -> None:
        """Wait until all that was written is read; when nobody has the slave any more. May be called twice."""
        self._reader.join(10)
        with suppress(OSError):
            os.close(self._master)

    @property
    def text(self) -> str:
        """Everything that was written, with control characters."""
        return self._bytes.decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        """The lines that are to be seen, the scrolled ones included."""
        lines, row, column = [""], 0, 0
        for piece in _PIECE.findall(self.text):
            if piece == "\r":
                column = 0
            elif piece == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif piece.endswith("K") and piece.startswith("\x1b"):
                assert piece == "\x1b[2K", piece
                lines[row] = ""
            elif piece.endswith("A") and piece.startswith("\x1b"):
                row -= int(piece[2:-1] or 1)
            elif not piece.startswith("\x1b"):
                before = lines[row].ljust(column)
                lines[row] = before[:column] + piece + before[column + len(piece) :]
                column += len(piece)
        return [line.rstrip() for line in lines]
