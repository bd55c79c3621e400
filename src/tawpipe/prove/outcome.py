"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HOLDS, FAILS, UNPROVEN = "holds", "fails", "unproven"


@dataclass(frozen=True)
class Outcome:
    """The result of a check.

    Args:
        holds: None where these machines cannot tell.
        note: in words, for a line on the console.
        numbers: what was measured, as plain data.
    """

    holds: bool | None
    note: str
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return UNPROVEN if self.holds is None else HOLDS if self.holds else FAILS
