"""Tables of comma-separated values, where a quote out of place costs its own row and no other."""

import csv
from pathlib import Path

import pytest

from found_files import find_files
from tawpipe.data.chats.columns import RawRow
from tawpipe.data.reading.read import RowReader
from tawpipe.data.report import Skipped


def rows_of(path: Path, text: str) -> tuple[list[str], list[Skipped]]:
    """The texts of a table's rows, and what was left out."""
    path.write_text(text)
    found = [row for file in find_files([str(path)]) for row in RowReader().read(file)]
    texts = [row.columns["text"] for row in found if isinstance(row, RawRow)]
    return texts, [row for row in found if isinstance(row, Skipped)]


@pytest.mark.parametrize("opened", ['"two', 'two,"x', '"two ""and"" three', '"'])
@pytest.mark.parametrize("later", ["", '"a, b"', '"a\nb ""c"""'])
def test_unclosed_quote_in_a_csv_skips_only_its_own_row(tmp_path, opened, later):
    """Whether or not there are quotes in later rows."""
    table = ["text,id", *(f"t{n},{n}" for n in range(100))]
    table[3] = opened if "," in opened else f"{opened},2"
    if later:
        table[60] = f"{later},59"
    texts, skipped = rows_of(tmp_path / "a.csv", "\n".join(table) + "\n")
    expected = [f"t{n}" for n in range(100) if n != 2]
    if later:
        expected[58] = next(csv.reader([*later.splitlines(keepends=True)]))[0]
    assert texts == expected
    (one,) = skipped
    assert one.where == f"{tmp_path / 'a.csv'}, line 4" and "quote" in one.why


def test_quoted_csv_cells_are_read_and_unclosed_quotes_are_named(tmp_path):
    good = 'text,id\n"a\nb",1\n"c ""d""",2\ne "f" g,3\n"h" i,4\n"j",5'
    texts, skipped = rows_of(tmp_path / "a.csv", good)
    assert texts == ["a\nb", 'c "d"', 'e "f" g', "h i", "j"] and not skipped
    texts, (one,) = rows_of(tmp_path / "b.csv", '"text,id\nx,1\ny,2\n')
    assert not texts and one.kind == "file" and "quote" in one.why
    texts, skipped = rows_of(tmp_path / "c.csv", 'text,id\n"a,1\n"b,2\nc,3\n"d,4')
    assert texts == ["c"] and [one.where[-6:] for one in skipped] == ["line 2", "line 3", "line 5"]
