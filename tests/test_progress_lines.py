"""Lines of measuring and planning: each replaces the one before on a terminal, and elsewhere they are few."""

from __future__ import annotations

import io

from tawpipe.console import ERASE_LINE, QUIET_S, passing, progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_lines_replace_each_other_on_a_terminal_and_warnings_stay() -> None:
    terminal = Terminal()
    with passing(terminal, indent="  "):
        progress.info("first")
        progress.warning("a fact")
        progress.info("x" * 1000)
    first, fact, last, end = terminal.getvalue().split(ERASE_LINE)[1:]
    assert (first, fact, end) == ("  first", "  a fact\n", "") and set(last.strip()) == {"x"} and len(last) < 1000


def test_a_file_gets_a_progress_line_only_if_the_last_one_is_old_enough() -> None:
    now, file = [0.0], io.StringIO()
    with passing(file, clock=lambda: now[0]):
        for seconds in (0.0, QUIET_S / 2, QUIET_S, 1.5 * QUIET_S):
            now[0] = seconds
            progress.info(f"after {seconds:.0f} s")
            if seconds == QUIET_S / 2:
                progress.warning("a fact")
    assert file.getvalue().splitlines() == ["after 0 s", "a fact", f"after {QUIET_S:.0f} s"]
    progress.info("outside")
    assert "outside" not in file.getvalue()
