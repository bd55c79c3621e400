"""Columns of a row, which determine its kind: text, chat, or instruction with an answer."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from tawpipe.data.chats.messages import (
    ASSISTANT,
    EMPTY,
    MARKS,
    MEDIA,
    Malformed,
    read_messages,
    truth,
    without_nulls,
    words,
)
from tawpipe.data.report import Skipped
from tawpipe.data.settings import ANSWERS, BESIDES, CHATS, COLUMN_NAMES, PROMPTS, TEXT, DataSettings, Rows
from tawpipe.errors import UserError

RowKind = Literal["text", "chat", "instruction"]

NEEDED: dict[RowKind, tuple[tuple[str, ...], ...]] = {
    "text": (TEXT,),
    "chat": (CHATS,),
    "instruction": (PROMPTS, ANSWERS),
}
"""Groups of columns for each kind; a row of the kind has at least one column of every group."""

PREFERRED = frozenset({"chosen", "preferred", "accepted"})
"""Words in names of columns that hold the better of two answers."""
COMPARES, JUDGES = "which of two answers is better", "whether an answer is good"
SHOWS, WEIGHS = "which pictures, sounds or films belong to the text", "how much is learned of the row"
MEANINGS: dict[str, frozenset[str]] = {
    COMPARES: PREFERRED
    | {"rejected", "reject", "dispreferred", "winner", "loser", "better", "worse", "preference", "preferences"},
    JUDGES: frozenset({"label", "labels", "kto", "desirable", "undesirable", "thumbs"}),
    SHOWS: MEDIA,
    "which turns come before": frozenset({"history"}),
}
"""Words in names of columns that change the meaning of a row, by the meaning."""

SEEN = 1000
"""Number of sets of columns whose kinds are cached."""

USUAL_ORDER: tuple[RowKind, ...] = ("chat", "instruction", "text")


@dataclass(frozen=True)
class RawRow:
    """Useful, non-empty columns of one row, under tawpipe's names.

    Attributes:
        where: file, with line or row.
        kind: text, chat or instruction.
        columns: value of each column.
        unread: the other non-empty columns; for a table of texts all other columns.
    """

    where: str
    kind: RowKind
    columns: dict[str, Any]
    unread: tuple[str, ...] = ()


RowPlan = tuple[RowKind | None, dict[str, str], tuple[str, ...], dict[str, str]]
"""Kind of the rows of a table, its useful columns by tawpipe's names, its other columns, and the meaning of each other
column that may change the meaning of a row."""


@dataclass(frozen=True)
class Columns:
    """Settings that define the meaning of columns.

    Args:
        rows: the setting ``rows``.
        names: result of ``DataSettings.column_names``.
        ignored: columns to treat as absent.
    """

    rows: Rows = "auto"
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: DataSettings) -> Columns:
        """Return the columns that ``settings`` define."""
        return cls(settings.rows, settings.column_names(), tuple(settings.ignore_columns))

    @cached_property
    def _plan(self) -> Callable[[tuple[str, ...], tuple[str, ...]], RowPlan]:
        """Cached function that returns the plan of rows from all column names and the names of non-empty columns."""
        return lru_cache(maxsize=SEEN)(self._planned)

    def wanted(self, where: str, names: Collection[str]) -> tuple[list[str], tuple[str, ...]] | Skipped:
        """Return the columns of a table to read, and its other columns, or a ``Skipped`` if they fit no kind of row.

        For a table of texts only the text is read.
        """
        present = [name for name in names if name not in self.ignored]
        kinds = self._possible(present)
        if not kinds and not any(meaning(name) == COMPARES for name in present):  # `row` raises for compared answers
            return self.lacking("file", where, names)
        read = [name for name in present if kinds != ["text"] or name in map(self._column, TEXT)]
        return read, tuple(name for name in present if name not in read)

    def row(self, where: str, item: Mapping[str, Any], unread: tuple[str, ...] = ()) -> RawRow | Skipped:
        """Return the row with its useful columns, or a ``Skipped`` if it fits no kind.

        The kind follows from the non-empty columns, or else from all columns.

        Args:
            where: file, with line or row.
            item: value of each column.
            unread: further columns that the row has.

        Raises:
            UserError: a column changes the meaning of the row, so that training without it would be wrong.
        """
        if self.ignored:
            item = {name: value for name, value in item.items() if name not in self.ignored}
        names = tuple(item)
        kind, useful, others, meanings = self._plan(names, tuple(n for n in names if item[n] not in EMPTY))
        changed = [name for name, says in meanings.items() if _applies(says, item[name])]
        if changed:
            where += f", {changed[0]} = {reprlib.repr(item[changed[0]])}"
            answered = all(self._has_answer(item[useful[name]]) for name in CHATS if name in useful)
            raise self.untrainable(where, names, changed, answered=answered)
        if kind is None:
            return self.lacking("row", where, names)
        return RawRow(where, kind, {name: item[column] for name, column in useful.items()}, others + unread)

    def _has_answer(self, chat: object) -> bool:
        """Return True if ``chat`` has an assistant turn, or if its messages cannot be read.

        Without such a turn, only columns of compared answers, such as ``chosen``, hold an answer."""
        with contextlib.suppress(Malformed):
            return any(message["role"] == ASSISTANT for message in read_messages(chat, self.names, self.ignored))
        return True

    def untrainable(
        self, where: str, present: Collection[str], changed: Sequence[str], says: str = "", *, answered: bool = True
    ) -> UserError:
        """Return the error for data whose columns ``changed`` change the meaning of rows, with ways to train on it.

        Args:
            where: file, with line or row.
            present: all columns of the rows.
            changed: names of the columns.
            says: meaning of the first of ``changed``; by default derived from its name.
            answered: False if the rows have no answer without these columns.
        """
        way = f"--ignore-columns {' '.join(changed)} trains without {'them' if changed[1:] else 'it'}"
        learned = next((name for name in changed if words(name) & PREFERRED), None)
        if self.kind(present) is None and learned:
            use = ANSWERS[1] if any(self._column(name) in present for name in PROMPTS) else CHATS[0]
            others = " ".join(name for name in changed if name != learned)
            way = f"--columns {use}={learned}{f' --ignore-columns {others}' if others else ''} learns {learned!r}"
        elif self.kind(present) is None or not answered:
            way = "without it the rows have no answer, and tawpipe does not train on preferences"
        says = says or meaning(changed[0])
        expected = f"no column {changed[0]!r} (it says {says}, which training would ignore)"
        return UserError("--data", where, f"{expected}; {way}")

    def table_row(self, where: str, item: Mapping[str, Any], unread: tuple[str, ...] = ()) -> RawRow | Skipped:
        """Return a row of an Arrow table after removing null fields inside of its columns; see ``row``."""
        return self.row(where, {name: without_nulls(value) for name, value in item.items()}, unread)

    def _planned(self, names: tuple[str, ...], filled: tuple[str, ...]) -> RowPlan:
        """Return how to read a row with columns ``names``, of which ``filled`` are not empty in this row.

        The plan is: the kind of the row (text, chat, instruction or None), its useful columns by tawpipe's names, its
        other non-empty columns, and the meaning of each of these that may change the meaning of the row."""
        kind = self.kind(filled) or self.kind(names)
        if (
            kind == "text"
            and self.kind(names) == "instruction"
            and any(self._column(name) in filled for name in PROMPTS)
        ):
            kind = "instruction"  # its answer is empty; the text repeats the prompt
        wanted = [name for group in NEEDED[kind] for name in group] if kind else []
        wanted += BESIDES if kind in ("chat", "instruction") else ()
        useful = {name: column for name in wanted if (column := self._column(name)) in filled}
        others = tuple(name for name in filled if name not in useful.values())
        meanings = {} if "text" in (kind, self.rows) else {name: meaning(name) for name in others}
        # For a row of no kind, only preferences explain what it is.
        meanings = {name: says for name, says in meanings.items() if says and (kind or says == COMPARES)}
        return kind, useful, others, meanings

    def kind(self, present: Collection[str]) -> RowKind | None:
        """Return the kind of a row with these columns; None if it fits no kind that the settings allow."""
        return next(iter(self._possible(present)), None)

    def _possible(self, present: Collection[str]) -> list[RowKind]:
        """Return the kinds that a row with these columns may have, the most likely first."""
        known = {name for name in COLUMN_NAMES if self._column(name) in present}
        return [kind for kind in self._kinds if all(known.intersection(group) for group in NEEDED[kind])]

    def lacking(self, kind: Literal["file", "row"], where: str, present: Collection[str]) -> Skipped:
        """Return a ``Skipped`` for a row, or a file of equal rows, that fits no kind; it lists the columns."""
        wanted = [NEEDED[row_kind] for row_kind in NEEDED if row_kind in self._kinds]
        groups = [[" or ".join(repr(self._column(name)) for name in group) for group in needed] for needed in wanted]
        why = f"lacking the columns {', or '.join(map(' with '.join, groups))} (--columns names others)"
        return Skipped(kind, where, why, f"it has {sorted(present)}")

    @cached_property
    def _kinds(self) -> list[RowKind]:
        """Kinds that a row may have; kinds with columns named in the settings are first."""
        kinds = USUAL_ORDER if self.rows == "auto" else (self.rows,)
        return sorted(kinds, key=lambda kind: not any(name in self.names for group in NEEDED[kind] for name in group))

    def _column(self, name: str) -> str:
        """Return the name in the data of tawpipe's column ``name``."""
        return self.names.get(name, name)


def meaning(name: str) -> str:
    """Return the meaning of a column by its name if it may change the meaning of a row, else ``""``."""
    known = (says for says, among in MEANINGS.items() if words(name) & among)
    return next(known, WEIGHS if name in MARKS else "")


def _applies(says: str, value: object) -> bool:
    """Return True if a column with the meaning ``says`` changes the meaning of its row by its ``value``.

    A label that is neither true nor false, a weight that is true, and a number instead of media do not."""
    if isinstance(value, list) and all(each in EMPTY for each in value):
        return False
    if says == JUDGES:
        return any(truth(each) is not None for each in (value if isinstance(value, list) else [value]))
    return truth(value) is not True if says == WEIGHS else says != SHOWS or not isinstance(value, int | float)
