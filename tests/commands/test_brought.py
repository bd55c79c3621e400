"""Commands that installed packages bring."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tawpipe.cli import main
from tawpipe.commands import brought as module
from tawpipe.commands.brought import brought
from tawpipe.commands.open import find_pages
from tawpipe.errors import UserError
from tawpipe.report.site import Page
from tawpipe_lab import command


@pytest.fixture
def other(monkeypatch):
    """A command ``other`` of some package; gives the words that it was run with."""
    ran: list[list[str]] = []
    brings = SimpleNamespace(LINE="do something else", run=lambda argv: ran.append(list(argv)) or 5)
    brings.pages = lambda folder: [Page("other.html", "Other", "Something else.", lambda: "")]
    point = SimpleNamespace(name="other", load=lambda: brings)
    monkeypatch.setattr(module, "entry_points", lambda group: [point] if group == module.GROUP else [])
    return ran


def test_lab_is_a_command_of_an_installed_package():
    assert brought()["lab"] is command and "cluster" in command.LINE


def test_plugin_command_runs_with_its_arguments_and_is_listed_in_help(other, capsys):
    assert main(["other", "a", "--b"]) == 5 and other == [["a", "--b"]]
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "do something else" in said and "train" in said
    assert main(["another"]) == 2 and "'other'" in capsys.readouterr().err


def test_pages_of_a_plugin_command_are_found(other, tmp_path):
    assert [page.name for page in find_pages(tmp_path)] == ["other.html"]
    with pytest.raises(UserError):
        find_pages(tmp_path / "missing")


def test_builtin_command_does_not_look_up_plugins(monkeypatch):
    monkeypatch.setattr(module, "entry_points", lambda group: pytest.fail("asked"))
    assert main(["train", "--help"]) == 0
