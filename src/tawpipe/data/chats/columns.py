"""The columns of a row, which say its kind: text, a chat, or an instruction with its answer."""

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
"""Groups of columns; a row of the kind has at least one column of every group."""

PREFERRED = frozenset({"chosen", "preferred", "accepted"})
"""Words in the names of columns that hold the better answer."""
COMPARES, JUDGES = "which of two answers is better", "whether an answer is good"
SHOWS, WEIGHS = "which pictures, sounds or films belong to the text", "how much is learned of the row"
MEANINGS: dict[str, frozenset[str]] = {
    COMPARES: PREFERRED
    | {"rejected", "reject", "dispreferred", "winner", "loser", "better", "worse", "preference", "preferences"},
    JUDGES: frozenset({"label", "labels", "kto", "desirable", "undesirable", "thumbs"}),
    SHOWS: MEDIA,
    "which turns come before": frozenset({"history"}),
}
"""Words in the names of columns that change the meaning of a row, by what such a column says."""

SEEN = 1000
"""Sets of columns whose kinds are remembered."""

USUAL_ORDER: tuple[RowKind, ...] = ("chat", "instruction", "text")


@dataclass(frozen=True)
class RawRow:
    """The columns of one document that are of use and hold something, under tawpipe's names for them.

    Attributes:
        unread: the other columns that hold something, or of a table of texts all others.
    """

    where: str
    kind: RowKind
    columns: dict[str, Any]
    unread: tuple[str, ...] = ()


RowPlan = tuple[RowKind | None, dict[str, str], tuple[str, ...], dict[str, str]]
"""Kind of the rows of a table, its useful columns by tawpipe's names, its other columns, and the meanings of those
others that may change what a row means."""


@dataclass(frozen=True)
class Columns:
    """The settings that say what columns mean.

    Args:
        rows: the setting of this name.
        names: what ``DataSettings.column_names`` gives.
        ignored: columns that are taken to be absent.
    """

    rows: Rows = "auto"
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: DataSettings) -> Columns:
        return cls(settings.rows, settings.column_names(), tuple(settings.ignore_columns))

    @cached_property
    def _plan(self) -> Callable[[tuple[str, ...], tuple[str, ...]], RowPlan]:
        """Plan of rows with columns ``names``, of which ``filled`` hold something."""
        return lru_cache(maxsize=SEEN)(self._planned)

    def wanted(self, where: str, names: Collection[str]) -> tuple[list[str], tuple[str, ...]] | Skipped:
        """Columns of a table to read, and its other columns. Of a table of texts only the text is read."""
        present = [name for name in names if name not in self.ignored]
        kinds = self._possible(present)
        if not kinds and not any(meaning(name) == COMPARES for name in present):  # which a row names
            return self.lacking("file", where, names)
        read = [name for name in present if kinds != ["text"] or name in map(self._column, TEXT)]
        return read, tuple(name for name in present if name not in read)

    def row(self, where: str, item: Mapping[str, Any], unread: tuple[str, ...] = ()) -> RawRow | Skipped:
        """The row, told by the columns that hold something, or else by those that there are; of use are the former.

        Args:
            unread: columns that it has besides those of ``item``.

        Raises:
            UserError: a column changes what the row means, so that training without it would be wrong.
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
        """False for a chat of which only the columns that are compared have an answer."""
        with contextlib.suppress(Malformed):
            return any(message["role"] == ASSISTANT for message in read_messages(chat, self.names, self.ignored))
        return True

    def untrainable(
        self, where: str, present: Collection[str], changed: Sequence[str], says: str = "", *, answered: bool = True
    ) -> UserError:
        """Return the refusal of a data set for the columns ``changed`` of its rows, and the ways to train on it.

        Args:
            present: all columns of the rows.
            says: what the first of ``changed`` says; by default what its name tells.
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
        """A row of an Arrow table, whose fields that are null within a column are taken to be absent; see ``row``."""
        return self.row(where, {name: without_nulls(value) for name, value in item.items()}, unread)

    def _planned(self, names: tuple[str, ...], filled: tuple[str, ...]) -> RowPlan:
        kind = self.kind(filled) or self.kind(names)
        if (
            kind == "text"
            and self.kind(names) == "instruction"
            and any(self._column(name) in filled for name in PROMPTS)
        ):
            kind = "instruction"  # whose answer is empty; the text repeats the prompt
        wanted = [name for group in NEEDED[kind] for name in group] if kind else []
        wanted += BESIDES if kind in ("chat", "instruction") else ()
        useful = {name: column for name in wanted if (column := self._column(name)) in filled}
        others = tuple(name for name in filled if name not in useful.values())
        meanings = {} if "text" in (kind, self.rows) else {name: meaning(name) for name in others}
        # Where more is wrong with the row, only preferences say what it is.
        meanings = {name: says for name, says in meanings.items() if says and (kind or says == COMPARES)}
        return kind, useful, others, meanings

    def kind(self, present: Collection[str]) -> RowKind | None:
        """Kind of a row with these columns; None if it lacks those that the settings ask for."""
        return next(iter(self._possible(present)), None)

    def _possible(self, present: Collection[str]) -> list[RowKind]:
        """The kinds that a row with these columns may be of, the likeliest first."""
        known = {name for name in COLUMN_NAMES if self._column(name) in present}
        return [kind for kind in self._kinds if all(known.intersection(group) for group in NEEDED[kind])]

    def lacking(self, kind: Literal["file", "row"], where: str, present: Collection[str]) -> Skipped:
        """A row, or a file whose rows are alike, that is of no kind; says which columns there are."""
        wanted = [NEEDED[row_kind] for row_kind in NEEDED if row_kind in self._kinds]
        groups = [[" or ".join(repr(self._column(name)) for name in group) for group in needed] for needed in wanted]
        why = f"lacking the columns {', or '.join(map(' with '.join, groups))} (--columns names others)"
        return Skipped(kind, where, why, f"it has {sorted(present)}")

    @cached_property
    def _kinds(self) -> list[RowKind]:
        """The kinds that a row may be of, those first whose columns are named."""
        kinds = USUAL_ORDER if self.rows == "auto" else (self.rows,)
        return sorted(kinds, key=lambda kind: not any(name in self.names for group in NEEDED[kind] for name in group))

    def _column(self, name: str) -> str:
        return self.names.get(name, name)


def meaning(name: str) -> str:
    """Return what a column of this name says that may change what its row means; empty for any other."""
    known = (says for says, among in MEANINGS.items() if words(name) & among)
    return next(known, WEIGHS if name in MARKS else "")


def _applies(says: str, value: object) -> bool:
    """True if a column changes what its row means by this value."""
    if isinstance(value, list) and all(each in EMPTY for each in value):
        return False
    if says == JUDGES:
        return any(truth(each) is not None for each in (value if isinstance(value, list) else [value]))
    return truth(value) is not True if says == WEIGHS else says != SHOWS or not isinstance(value, int | float)
