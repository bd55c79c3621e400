"""Docstrings and names keep to plain English, as far as a program can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from english import SOURCES, WORDS, code_of, faults, retired_names

FILES = sorted(SOURCES.rglob("*.py"))


def test_first_lines_of_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = [f"{path}:{line}: {first}" for path in FILES for line, first in faults(path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_no_defined_name_contains_a_retired_word() -> None:
    words = yaml.safe_load(WORDS.read_text())
    wrong = [f"{path}:{line}: {text}" for path in FILES for line, text in retired_names(path, words)]
    assert not wrong, "\n".join(wrong)


def test_every_exception_of_a_retired_word_has_a_reason_and_is_used() -> None:
    text = "\n".join(path.read_text() for path in FILES)
    for word, rules in yaml.safe_load(WORDS.read_text()).items():
        assert rules["use"] and all(rules["stays"].values()), word
        assert all(name in text or name in {path.stem for path in FILES} for name in rules["stays"]), word


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""What came of it."""', 1),
        ('"""Outcome of the save"""', 1),
        ('"""Outcome of the save."""\nclass A:\n    """Whether it is."""\n    x = 1\n    """Of a GPU"""', 2),
        ('"""Outcome of the save."""\nx = 1\n"""Limit of a step,\nin seconds."""', 0),
        ("x = 1", 0),
    ],
)
def test_first_lines_that_break_the_rule_are_found(source: str, expected: int) -> None:
    assert len(list(faults(source))) == expected


def test_retired_words_are_found_in_parts_of_names(tmp_path: Path) -> None:
    (tmp_path / "file_bins.py").write_text("def f(look_ahead, binary): bin_x = MostBins = set_x = of_set = 1")
    words = {
        "bin": {"use": "pack", "forms": ["bins"], "stays": {"bin_x": "a setting"}},
        "set": {"use": "group", "forms": [], "stays": {}},
    }
    names = {text.partition(":")[0] for _, text in retired_names(tmp_path / "file_bins.py", words)}
    assert names == {"file_bins", "MostBins", "of_set"}


def test_code_is_compared_without_docstrings_and_comments() -> None:
    first = '"""One."""\nclass A:\n    """Two."""\n    x = 1  # three\n    """Four."""\n'
    assert code_of(first) == code_of("class A:\n    x = 1\n") != code_of("class A:\n    x = 2\n")
    assert code_of('def f():\n    """A."""\n    ...\n') == code_of("def f():\n    ...\n")
