"""Pages link every word of the glossary where they use it first."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tawpipe.schedule.strategies.table import strategies

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [*sorted(set((ROOT / "docs").glob("*.md")) - {GLOSSARY}), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

OTHER_SENSES = {
    ("docs/design.md", "base"): "of a class",
    ("docs/fine-tuning.md", "rank"): "of the matrices of an adapter",
    ("docs/fine-tuning.md", "round"): "a verb",
    ("docs/fine-tuning.md", "block"): "of an FP8 matrix",
    ("docs/models.md", "micro-batch"): "only in messages of the code",
    ("docs/models.md", "recomputation"): "only in messages of the code",
    ("docs/numbers.md", "round"): "a verb",
    ("docs/reliability.md", "buffer"): "of a torch module",
    ("docs/serving.md", "row"): "of a matrix",
    ("docs/serving.md", "round"): "a verb",
    ("docs/training.md", "round"): "a verb",
}
"""Words that a page uses only in another sense than the glossary's."""

NO_SENTENCES = [
    r"^( *)(`{3,})(?s:.*?)^ *\2$",  # code in fences
    r"(?<=\n\n)(?: {4}.*\n)+",  # formulas
    r"^#+ .*|^\|.*\n(?=\|[ :|-]+$)|^\|[^|]*\|",  # headings, also of the columns and lines of tables
    r"^\[[^]]+\]: .*",  # addresses of links
    r"`[^`]+`",  # names in code
    *map(re.escape, (one.summary for one in strategies().values())),  # text that the page repeats from the code
]
LINK = re.compile(r"!?\[((?:[^][]|\[[^]]*\])*)\](?:\(([^)]*)\)|\[[^]]+\])")


class Use(NamedTuple):
    """The word of the glossary, the line on which a page uses it first, and the target of its link there, or ""."""

    word: str
    line: int
    target: str


@functools.cache
def sections() -> dict[str, str]:
    """Return the words of the glossary, each with the anchor of its section."""
    found: dict[str, str] = {}
    for section in re.split(r"^## ", GLOSSARY.read_text(encoding="utf-8"), flags=re.M)[1:]:
        anchor = section.partition("\n")[0].lower().replace(" ", "-")
        found |= dict.fromkeys(re.findall(r"\*\*(.+?)\*\*", section), anchor)
    return found


def first_uses(text: str) -> Iterator[Use]:
    """Yield the first use of every word in the sentences of a page. A word inside the link to another page is none."""
    for pattern in NO_SENTENCES:
        text = re.sub(pattern, _blank, text, flags=re.M)
    links = [link for link in LINK.finditer(text) if "glossary.md" in (link[2] or "")]
    text = LINK.sub(_blank, text)
    for link in links:
        text = text[: link.start(1)] + link[1] + text[link.end(1) :]
    for word in sorted(sections(), key=len, reverse=True):  # a packed micro-batch is no use of micro-batch
        pattern = _forms(word)
        if found := pattern.search(text):
            target = next((link[2] for link in links if link.start() < found.start() < link.end()), "")
            yield Use(word, text.count("\n", 0, found.start()) + 1, target)
        text = pattern.sub(_blank, text)


def _forms(word: str) -> re.Pattern[str]:
    """Match singular and plural, also at the beginning of a sentence and over the end of a line."""
    rest = word[1:].replace(" ", r"\s+")
    rest = f"{rest[:-1]}(?:y|ies)" if rest.endswith("y") else f"{rest}(?:e?s)?"
    return re.compile(rf"(?<![\w-])[{word[0].lower()}{word[0].upper()}]{rest}(?![\w-])")


def _blank(found: re.Match[str]) -> str:
    """Return as many characters without words, on as many lines."""
    return "\n".join("\0" * len(line) for line in found[0].split("\n"))


@functools.cache
def uses_on(page: Path) -> list[Use]:
    """Return the first uses on a page."""
    return list(first_uses(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_every_glossary_word_at_its_first_use(page):
    name, folder = str(page.relative_to(ROOT)), "" if page.parent == GLOSSARY.parent else "docs/"
    wrong = []
    for use in uses_on(page):
        expected = f"{folder}glossary.md#{sections()[use.word]}"
        if (name, use.word) not in OTHER_SENSES and use.target != expected:
            wrong.append(f"{name}:{use.line}: {use.word}: got {use.target or 'no link'}; expected {expected}")
    assert not wrong, "\n".join(wrong)


def test_glossary_has_only_words_that_pages_use():
    used = {(str(page.relative_to(ROOT)), use.word) for page in PAGES for use in uses_on(page)}
    assert OTHER_SENSES.keys() <= used
    assert sections().keys() == {word for _, word in used - OTHER_SENSES.keys()}


def test_first_use_is_found_in_sentences_alone():
    text = """\
# A row
`row` [a row](other.md) ![a row](row.svg) [a row][named] tomorrow, row-wise

    row = 1

```
row
```

| row | |
|---|---|
| row | a packed
[named]: https://row

It is packed
micro-batches, then **[Rows](glossary.md#text)** of a micro-batch.
"""
    assert sorted(first_uses(text)) == [
        Use("micro-batch", 16, ""),
        Use("packed micro-batch", 15, ""),
        Use("row", 16, "glossary.md#text"),
    ]
