"""Results of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tawpipe.errors import UserError

HOLDS, FAILS, UNPROVEN, HINT = "holds", "fails", "unproven", "hint"
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """Result of a check.

    Args:
        holds: True or False; None if these machines cannot tell.
        note: text for a line on the console.
        numbers: measurements, as plain data.
        hint: True if the check holds and the note suggests an improvement.
    """

    holds: bool | None
    note: str
    numbers: dict[str, Any] = field(default_factory=dict)
    hint: bool = False

    @property
    def status(self) -> str:
        """Result as one word: ``holds``, ``fails``, ``unproven`` or ``hint``."""
        if self.holds:
            return HINT if self.hint else HOLDS
        return UNPROVEN if self.holds is None else FAILS


def each_way(names: Iterable[str], run: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Call ``run`` with each name, and collect its results; a UserError counts as "cannot run here".

    Returns:
        Results by name; and messages of UserErrors by name, for those that cannot run here.
    """
    results, refused = dict[str, T](), dict[str, str]()
    for name in names:
        try:
            results[name] = run(name)
        except UserError as error:
            refused[name] = str(error)
    return results, refused
