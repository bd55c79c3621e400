"""What a check has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tawpipe.errors import UserError

HOLDS, FAILS, UNPROVEN, HINT = "holds", "fails", "unproven", "hint"
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result of a check.

    Args:
        holds: None where these machines cannot tell.
        note: in words, for a line on the console.
        numbers: what was measured, as plain data.
        hint: it holds, and the note says what would be better.
    """

    holds: bool | None
    note: str
    numbers: dict[str, Any] = field(default_factory=dict)
    hint: bool = False

    @property
    def status(self) -> str:
        if self.holds:
            return HINT if self.hint else HOLDS
        return UNPROVEN if self.holds is None else FAILS


def each_way(names: Iterable[str], run: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Run a check for each name: what it returns, and the refusals of those that cannot run here."""
    results, refused = dict[str, T](), dict[str, str]()
    for name in names:
        try:
            results[name] = run(name)
        except UserError as error:
            refused[name] = str(error)
    return results, refused
