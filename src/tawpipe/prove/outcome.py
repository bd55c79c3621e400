"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HOLDS, FAILS, UNPROVEN, HINT = "holds", "fails", "unproven", "hint"


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
