"""The site of the documentation: its pages are there, its links lead to pages, and the reference names everything."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

import tawpipe
from tawpipe.cli import COMMANDS
from tawpipe.train.settings.config import train_options

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages from which the site is built."""
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        from reference import reference_pages  # type: ignore[import-not-found]
        from sources import collect  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    made = tmp_path_factory.mktemp("site")
    collect(ROOT, made)
    for name, text in reference_pages().items():
        (made / name).write_text(text, encoding="utf-8")
    return made


def _in_navigation() -> set[str]:
    class Loader(yaml.SafeLoader):
        """Reads past the function that mkdocs.yml names."""

    Loader.add_multi_constructor("!!python", lambda loader, suffix, node: None)
    Loader.add_multi_constructor("tag:yaml.org,2002:python", lambda loader, suffix, node: None)
    found: set[str] = set()
    waiting = [yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=Loader)["nav"]]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str):
            found.add(entry)
        else:
            waiting += entry.values() if isinstance(entry, dict) else entry
    return found


def test_site_navigation_lists_exactly_the_pages(folder):
    named = _in_navigation()
    assert {name for name in named if not (folder / name).is_file()} == set()
    assert {page.name for page in folder.glob("*.md")} <= named


def test_site_links_lead_to_files(folder):
    pages = list(folder.rglob("*.md"))
    for page in pages:
        text = re.sub(r"^(`{3,}).*?^\1$|`[^`\n]+`", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s#]+)", text):
            if "://" not in target:
                assert (page.parent / target).is_file(), (page, target)
    assert (folder / "repository" / "src" / "tawpipe" / "schedule" / "actions.py.md").is_file()
    assert (folder / "pictures" / "traffic.svg").is_file()


def test_broken_link_of_a_page_is_an_error(folder, tmp_path):
    import sources  # type: ignore[import-not-found]

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("`[code](is.no)` [a link](nowhere.md)\n")
    with pytest.raises(FileNotFoundError, match=r"docs/README.md: the link to nowhere.md"):
        sources.collect(tmp_path, tmp_path / "made")


def test_site_reference_lists_every_public_name_setting_and_command(folder):
    library = (folder / "library.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (.*)", library, flags=re.M)) == set(tawpipe.__all__)
    assert "### Pipeline.step\n" in library and "| `optimizer` |" in library
    configuration = (folder / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(--[^`]+)`", configuration, flags=re.M)) == {
        leaf.option for leaf in train_options().leaves.values()
    }
    commands = (folder / "commands.md").read_text(encoding="utf-8")
    assert {f"## tawpipe {name}" for name in COMMANDS} <= set(commands.splitlines())
