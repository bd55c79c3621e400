"""The picture of packing: the same documents in rows end to end, in rows best fit, and dealt by their time."""

from __future__ import annotations

from collections.abc import Sequence

from drawing import Drawing

ROW, PROCESSES, TOKEN, LINE = 12, 4, 14, 27
DOCUMENTS = [5, 2, 16, 1, 4, 3, 9, 2, 7, 1, 4, 11, 2, 3, 6, 2, 1, 5, 2, 4, 3, 2, 1]
"""Their tokens, in the order of a shuffled corpus."""
ORDER = [0, 5, 2, 7, 1, 4, 3, 6]
"""Of the rows, which are shuffled once more."""
LEFT, BARS, SCALE = 112, 520, 0.55
PER_TOKEN = 10
"""Of a document's time, what a token adds besides the square of the length."""
TITLE = (
    "The same 23 documents on four processes. Split and fit fill rows of one length, and the process with the longest "
    "document computes for longest. Balanced makes rows of any length that take equally long."
)
Row = list[tuple[int, int]]
"""(document, tokens) from left to right."""


def packing() -> str:
    """The SVG."""
    drawing = Drawing(820, 548, TITLE)
    drawing.text(LEFT, 30, "tokens of the documents, one box each", "soft", size=12)
    drawing.text(BARS, 30, "time that each process computes", "soft", size=12)
    panels = (
        ("split", "Rows of one length, end to end: the longest document is cut wherever a row ends.", _split()),
        ("fit", "Whole documents, best fit: what is longer than a row is cut off, and rows end in padding.", _fit()),
        ("balanced", "Whole documents in rows of any length, so that all processes are done at once.", _balanced()),
    )
    for number, (name, words, rows) in enumerate(panels):
        _panel(drawing, 62 + number * 166, name, words, rows, row=0 if name == "balanced" else ROW)
    return drawing.svg()


def _time(row: Row) -> int:
    return sum(PER_TOKEN * tokens + tokens**2 for _, tokens in row)


def _split() -> list[list[Row]]:
    rows: list[Row] = [[]]
    for document, left in enumerate(DOCUMENTS):
        while left:
            room = ROW - sum(tokens for _, tokens in rows[-1])
            rows[-1].append((document, min(left, room)))
            left -= min(left, room)
            if sum(tokens for _, tokens in rows[-1]) == ROW:
                rows.append([])
    return _in_turn(rows[:-1])


def _fit() -> list[list[Row]]:
    rows: list[Row] = []
    for document in _longest_first():
        length = min(DOCUMENTS[document], ROW)
        room = [(ROW - sum(tokens for _, tokens in row), row) for row in rows]
        fitting = [(left, row) for left, row in room if left >= length]
        if not fitting:
            rows.append([(document, length)])
        else:
            min(fitting, key=lambda one: one[0])[1].append((document, length))
    return _in_turn(rows)


def _balanced() -> list[list[Row]]:
    bins: list[Row] = [[] for _ in range(PROCESSES)]
    for document in _longest_first():
        min(bins, key=_time).append((document, DOCUMENTS[document]))
    return [[one] for one in bins]


def _longest_first() -> list[int]:
    return sorted(range(len(DOCUMENTS)), key=lambda document: (-DOCUMENTS[document], document))


def _in_turn(rows: Sequence[Row]) -> list[list[Row]]:
    shuffled = [rows[at] for at in ORDER]
    return [shuffled[process::PROCESSES] for process in range(PROCESSES)]


def _panel(drawing: Drawing, top: int, name: str, words: str, processes: list[list[Row]], *, row: int) -> None:
    drawing.text(20, top, name, size=15, bold=True)
    drawing.text(LEFT, top, words, "soft", size=13)
    longest = DOCUMENTS.index(max(DOCUMENTS))
    times = [sum(map(_time, rows)) for rows in processes]
    for process, rows in enumerate(processes):
        x, y = float(LEFT), top + 14 + process * LINE
        drawing.text(20, y + 14, f"process {process}", "soft", size=12)
        for tokens_of in rows:
            begin = x
            for document, tokens in tokens_of:
                color = "weight" if document == longest else "near"
                drawing.rect(x, y, tokens * TOKEN - 2, 19, color, radius=2)
                x += tokens * TOKEN
            if row:
                if (padding := begin + row * TOKEN - x) > 0:
                    drawing.rect(x, y, padding - 2, 19, "panel", radius=2, border="line")
                x = begin + row * TOKEN + 8
        drawing.rect(BARS, y, times[process] * SCALE, 19, "gradient", radius=2)
    end = BARS + max(times) * SCALE
    drawing.line([(end, top + 10), (end, top + 14 + PROCESSES * LINE)], "ink", width=1)
