"""What the documentation names is there, and the files around the project say what the code says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

import tawpipe
from schedules import EVERY
from tawpipe.schedule.strategies.table import strategies

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md")), ROOT / "tests" / "faults.md"]


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _yaml(name: str) -> Any:
    return yaml.safe_load(_text(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_lead_to_existing_files(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_page_links_have_their_address(page):
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named, defined = set(re.findall(r"\]\[([^]]+)\]", text)), re.findall(r"^\[([^]]+)\]: https://\S+$", text, re.M)
    assert named == set(defined) and len(defined) == len(named)


def test_comparison_page_cites_only_the_commits_that_were_read():
    text, repository = _text("docs/compare.md"), r"github\.com/([\w.-]+/[\w.-]+)/"
    read = set(re.findall(rf"{repository}tree/(\w+)\)", text))
    cited = set(re.findall(rf"{repository}(?:blob|tree)/(\w+)/", text))
    assert len(cited) > 5 and cited <= read


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_longest_row_tables_show_measured_numbers(name):
    measured = json.loads(_text("benchmarks/results/2026-11-25-longest/longest.json"))
    tokens = {row["side"]: row["tokens"] for row in measured["rows"]}
    table = re.search(r"^\|.*tokens;.*\n((?:\|.*\n)+)", _text(name), flags=re.MULTILINE)
    assert table, "no table of longest rows"
    shown = set(re.findall(r"\d+,\d{3}", table[1].replace("chunks of 1,024", "")))
    assert len(shown) > 8 and shown <= {f"{number:,}" for number in tokens.values()}
    pairs = ("tawpipe-chunked", "deepspeed"), ("tawpipe-chunked-host", "deepspeed-kept-host")
    for own, other in pairs:
        assert f"{tokens[own] / tokens[other]:.1f} times" in _text(name)


def test_every_results_folder_is_listed_on_their_page():
    listed = re.findall(r"^\| \[(20[\w-]+)\]\(\1\) \|", _text("benchmarks/results/README.md"), flags=re.MULTILINE)
    assert listed == sorted(path.name for path in (ROOT / "benchmarks" / "results").iterdir() if path.is_dir())


def test_every_test_named_in_faults_md_exists():
    named = set(re.findall(r"`(test_\w+)`", _text("tests/faults.md")))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", source, flags=re.MULTILINE))
    assert len(named) > 20 and not named - defined


def test_headings_named_by_links_exist():
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([^)#]*)#([^)]*)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                other = (page.parent / target if target else page).read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.*)", other, flags=re.MULTILINE)
                assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


def test_settings_named_on_pages_exist():
    settings = _yaml("examples/train.yaml")
    groups = "|".join(name for name, value in settings.items() if isinstance(value, dict))
    unknown = {
        f"{group}.{name}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for group, name in re.findall(rf"`(?:--)?({groups})\.([a-z_-]+)", page.read_text(encoding="utf-8"))
        if name.replace("-", "_") not in settings[group]
    }
    assert not unknown


def test_every_page_is_in_the_index():
    listed = set(re.findall(r"\]\(([\w-]+\.md)", _text("docs/README.md")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_pictures_match_the_code_and_the_results(tmp_path):
    """After a change of imports or results: python docs/pictures."""
    subprocess.run([sys.executable, ROOT / "docs" / "pictures", tmp_path], check=True, capture_output=True)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert drawn == {path.name: _text(f"docs/pictures/{path.name}") for path in (ROOT / "docs/pictures").glob("*.svg")}
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert "prefers-color-scheme:dark" in svg and root.findall(".//{*}text"), "no dark colours, or text as paths"


def test_workflows_call_targets_that_exist():
    targets = set(re.findall(r"^([\w-]+):", _text("Makefile"), flags=re.MULTILINE))
    workflow = _yaml(".github/workflows/ci.yml")
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    called = [
        word for command in commands for line in re.findall(r"^make (.*)", command, re.M) for word in line.split()
    ]
    assert called == ["lint", "docs", "test-all"] and targets.issuperset(called)
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]


def test_pre_commit_uses_the_pinned_ruff_version():
    pinned = re.search(r"^ruff==(.*)$", _text("requirements-ci.txt"), flags=re.MULTILINE)
    revisions = {repository["repo"]: repository["rev"] for repository in _yaml(".pre-commit-config.yaml")["repos"]}
    assert pinned and revisions["https://github.com/astral-sh/ruff-pre-commit"] == f"v{pinned[1]}"


def test_six_paths_lead_through_at_most_twelve_files_each():
    paths = (
        _text("docs/design.md").partition("## Six paths through the code")[2].partition("\n## ")[0].split("\n**")[1:]
    )
    files = [set(re.findall(r"`([a-z_/]+\.py)`", path)) for path in paths]
    assert len(paths) == 6 and max(map(len, files)) <= 12
    assert [file for of_path in files for file in sorted(of_path) if not (ROOT / "src/tawpipe" / file).is_file()] == []


def test_version_is_equal_in_all_files():
    citation = _yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
    assert all({"type", "title", "authors"} <= reference.keys() for reference in citation["references"])
    pyproject = re.search(r'^version = "(.*)"$', _text("pyproject.toml"), flags=re.MULTILINE)
    newest = re.search(r"^## \[(.*?)\]", _text("CHANGELOG.md"), flags=re.MULTILINE)
    assert pyproject and newest
    assert citation["version"] == pyproject[1] == newest[1] == tawpipe.__version__


def test_design_page_lists_every_strategy_and_its_refusals():
    text, refusing = _text("docs/design.md"), dict[str, list[str]]()
    for name, strategy in ((name, strategies()[name]) for name in EVERY):
        if not strategy.candidate:  # the lab's own rows
            continue
        assert f"| `{name}` | {strategy.summary} |" in text
        if refused := ", ".join(f"`{setting}`" for setting in strategy.refusals):
            refusing.setdefault(refused, []).append(f"`{name}`")
    assert refusing
    for refused, names in refusing.items():
        assert f"* {', '.join(names)}: {refused} " in " ".join(text.split())
