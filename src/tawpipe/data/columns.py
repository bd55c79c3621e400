"""The columns of a row, which say its kind: text, a chat, or an instruction with its answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tawpipe.data.report import Skipped
from tawpipe.data.settings import ANSWERS, BESIDES, CHATS, PROMPTS, TEXT, DataSettings, Rows

RowKind = Literal["text", "chat", "instruction"]

NEEDED: dict[RowKind, tuple[tuple[str, ...], ...]] = {
    "text": (TEXT,),
    "chat": (CHATS,),
    "instruction": (PROMPTS, ANSWERS),
}
"""Of each group a row of the kind has at least one."""

EMPTY = (None, "", [])
"""Values of a column that holds nothing in a row: tables give every row the columns of all."""

SEEN = 1000
"""Sets of columns whose kinds are remembered."""

USUAL_ORDER: tuple[RowKind, ...] = ("chat", "instruction", "text")


@dataclass(frozen=True)
class RawRow:
    """The columns of one document that are of use and hold something, under tawpipe's names for them."""

    where: str
    kind: RowKind
    columns: dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """The settings that say what columns mean.

    Args:
        rows: the setting of this name.
        names: what ``DataSettings.column_names`` gives.
    """

    rows: Rows = "auto"
    names: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: DataSettings) -> Columns:
        return cls(settings.rows, settings.column_names())

    @cached_property
    def _seen(self) -> dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[RowKind, list[tuple[str, str]]]]:
        """The kind of rows with these columns, of which those hold something, and its own columns with theirs."""
        return {}

    @property
    def useful(self) -> set[str]:
        """The columns that any kind of row may need."""
        return {self._column(name) for name in (*TEXT, *CHATS, *PROMPTS, *ANSWERS, *BESIDES)}

    def row(self, where: str, item: Mapping[str, Any]) -> RawRow | Skipped:
        """The row, told by the columns that hold something, or else by those that there are; of use are the former."""
        names = tuple(item), tuple(name for name, value in item.items() if value not in EMPTY)
        known = self._seen.get(names)
        if known is None:
            kind = self.kind(names[1]) or self.kind(names[0])
            if kind is None:
                return self.lacking("row", where, names[0])
            wanted = [name for group in NEEDED[kind] for name in group] + list(BESIDES if kind != "text" else ())
            known = kind, [(name, column) for name in wanted if (column := self._column(name)) in names[1]]
            if len(self._seen) < SEEN:
                self._seen[names] = known
        kind, columns = known
        return RawRow(where, kind, {name: item[column] for name, column in columns})

    def kind(self, present: Collection[str]) -> RowKind | None:
        """Kind of a row with these columns; None if it lacks those that the settings ask for."""
        for kind in self._kinds:
            if all(any(self._column(name) in present for name in group) for group in NEEDED[kind]):
                return kind
        return None

    def lacking(self, kind: Literal["file", "row"], where: str, present: Collection[str]) -> Skipped:
        """A row, or a file whose rows are alike, that is of no kind; says which columns there are."""
        ways = [
            " with ".join(" or ".join(repr(self._column(name)) for name in group) for group in NEEDED[row_kind])
            for row_kind in sorted(self._kinds, key=list(NEEDED).index)
        ]
        return Skipped(
            kind,
            where,
            f"lacking the columns {', or '.join(ways)} (--columns names others)",
            f"it has {sorted(present)}",
        )

    @cached_property
    def _kinds(self) -> list[RowKind]:
        """The kinds that a row may be of, those first whose columns are named."""
        kinds = USUAL_ORDER if self.rows == "auto" else (self.rows,)
        return sorted(kinds, key=lambda kind: not any(name in self.names for group in NEEDED[kind] for name in group))

    def _column(self, name: str) -> str:
        return self.names.get(name, name)
